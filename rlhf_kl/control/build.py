"""The controller that a config names: its law, the options of that by its signature, and how it is built for a run."""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rlhf_kl.control.adaptive import AdaptiveKL
from rlhf_kl.control.base import COEF_SPAN, Law, clip
from rlhf_kl.control.guard import Guard, fits_update
from rlhf_kl.control.laws import PIDKL, DualKL, ExponentialKL, FixedKL, ScheduledKL, ThresholdKL, ZieglerKL
from rlhf_kl.errors import InputError, blame, suggestion
from rlhf_kl.plugins import checked_options, home_of, is_reference, load_attribute, parameters_of, users_code

CONTROLLERS: dict[str, type[Law]] = {
    "adaptive": AdaptiveKL,
    "dual": DualKL,
    "exponential": ExponentialKL,
    "fixed": FixedKL,
    "pid": PIDKL,
    "schedule": ScheduledKL,
    "threshold": ThresholdKL,
    "ziegler": ZieglerKL,
}
SYNONYMS = {"static": "fixed", "proportional": "ziegler"}

BOUNDS = {"min_coef", "max_coef"}  # of beta; the program keeps them for every law
# Options that the program sets if a law takes them and the user does not set them, by their usual names. A class of
# the user's may call them as tutorials, lm-human-preferences and verl do.
CONTROLLER_PROVIDED = {
    "coef": ("coef", "init_kl_coef", "kl_coef"),
    "target": ("target", "target_kl"),
    **{name: (name,) for name in ("total_episodes", "batch_size", *sorted(BOUNDS))},
}
COEF_WITHOUT_SCORES = 0.1  # `coef: auto` without scores
LOGPROBS = re.compile(r"log_?(p$|probs?|ratios?)", re.IGNORECASE)  # names of a parameter that is no KL


def stored_name(kind: str) -> str:
    """The name under which a kind is stored."""
    return SYNONYMS.get(kind, kind)


def adjusts(kind: str) -> bool:
    """Whether the beta of this kind of controller depends on the KL; assumed for a user's own class."""
    known = CONTROLLERS.get(stored_name(kind))
    return known is None or known.adjusts


def builtin_law(kind: str) -> type[Law] | None:
    """The class of a built-in kind of controller; None for a plugin. Errors: InputError for an unknown name."""
    if is_reference(kind):
        return None
    name = stored_name(kind)
    if name not in CONTROLLERS:
        hint = suggestion(kind, [*CONTROLLERS, *SYNONYMS])
        raise InputError(f"unknown name {kind!r}{hint} (or write file.py:Class or module:Class)")
    return CONTROLLERS[name]


def law_class(kind: str, where: str = "kl.controller.kind") -> type:
    """The class of a kind of controller. Errors: InputError if there is none, with `where` in front."""
    with blame(where):
        law = builtin_law(kind) or load_attribute(kind)
        if not inspect.isclass(law):
            raise InputError(f"{kind!r} is not a class: a controller is one with update(kl, episodes)")
    return law


def option_names(law: Any) -> dict[str, str]:
    """By their usual names, what a law calls the options of `CONTROLLER_PROVIDED` that it takes."""
    parameters = parameters_of(law) or []
    taken, takes_any = {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)
    found = dict[str, str]()
    for usual, names in CONTROLLER_PROVIDED.items():
        own = next((name for name in names if name in taken), "")
        if own or (takes_any and usual not in BOUNDS):
            found[usual] = own or usual
    return found


def by_own_names(written: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Options by the law's own names, of `option_names`; one that is written by both stays as it is."""
    return {key if names.get(key) in written else names.get(key, key): value for key, value in written.items()}


def law_options(law: type, written: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """The arguments that these options are for a law, and the problems of them; see `checked_options`.

    Bounds of beta that the law does not take are left out: the program keeps them.
    """
    names = option_names(law)
    own = {key: value for key, value in by_own_names(written, names).items() if key not in BOUNDS or key in names}
    arguments, problems = checked_options(law, own, where, provided=names.values(), beside=BOUNDS)
    if not problems and issubclass(law, Law):
        defaults = {option.name: option.default for option in fields(law)}
        problems = [f"{where}: {line}" for line in law.conflicts(defaults | arguments)]
    return arguments, problems


def _needed(law: Any) -> list[inspect.Parameter]:
    """The parameters of its `update` that have no default."""
    return [p for p in parameters_of(getattr(law, "update", None)) or () if p.default is p.empty]


def load_controller(kind: str, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The law of a kind of controller, and its arguments. Errors: InputError with every problem."""
    law = law_class(kind)
    arguments, problems = law_options(law, options, "kl.controller")
    if not fits_update(getattr(law, "update", None), None):
        problems.append(f"kl.controller.kind: {law.__name__} has no update(kl, episodes): a controller needs it")
    elif asked := [p.name for p in _needed(law) if LOGPROBS.search(p.name)]:
        problems.append(
            f"kl.controller.kind: {law.__name__}.update asks for {' and '.join(asked)}, but it gets the KL, a number "
            "in nats, and the number of responses: write update(kl, episodes)"
        )
    if problems:
        raise InputError(*problems)
    return law, arguments


def make_controller(kind: str, options: Mapping[str, Any], **sizes: Any) -> Guard:
    """The controller of a config; `sizes` as for `build_controller`. Errors: InputError with every problem.

    Says what of a class of the user's is taken for beta and for the usual options.
    """
    law, arguments = load_controller(kind, options)
    bounds = {name: value for name, value in options.items() if name in BOUNDS}
    control = build_controller(law, bounds | arguments, **sizes)
    if not isinstance(control.law, Law):
        other = [f"{own} is taken for {usual}" for usual, own in option_names(law).items() if own != usual]
        logging.getLogger("rlhf_kl").info("; ".join([f"kl.controller: {law.__name__}: {control.words()}", *other]))
    return control


def build_controller(
    kind: str | Callable[..., Any],
    options: Mapping[str, Any],
    *,
    where: str = "kl.controller",
    target: float | None = None,
    coef: float = COEF_WITHOUT_SCORES,
    total_episodes: int | None = None,
    batch_size: int | None = None,
) -> Guard:
    """The controller `kind(**options)`, ready for a run.

    kind: a name, or a class that is a law, see `Law`.
    options: those of the user, which win. A `coef` among them is the starting beta and must lie inside the bounds,
    `min_coef` and `max_coef`, which hold for every law, also for one that does not take them.
    The other arguments are passed on if the law takes them; None = not known. `coef` is then the value of `auto`: it is
    moved inside the bounds. Nats are in the target's unit. Errors: InputError, with `where` in front.
    """
    law: Any = law_class(kind, where) if isinstance(kind, str) else kind
    names, defaults = option_names(law), {p.name: p.default for p in parameters_of(law) or ()}
    own = by_own_names(options, names)

    def bound(name: str) -> float | None:
        value = own.get(name, defaults.get(name))
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    low, high = bound("min_coef"), bound("max_coef")
    written = names.get("coef") in own
    start = own[names["coef"]] if written else clip(coef, low or -math.inf, high or math.inf)
    known = {"target": target, "coef": start, "total_episodes": total_episodes, "batch_size": batch_size}
    with users_code(f"{where}: {law.__name__} cannot be created:", home_of(law)):
        known |= {"min_coef": low or COEF_SPAN[0] * start, "max_coef": high or COEF_SPAN[1] * start}
        given = {names[usual]: value for usual, value in known.items() if usual in names and value is not None}
        given |= {name: value for name, value in own.items() if name not in BOUNDS or name in names}
        return Guard(law(**given), low, high, start=start, auto=None if written else coef)
