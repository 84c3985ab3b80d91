"""A class of the user's as a controller, with the standard names of its options and attributes or other usual ones."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from rlhf_kl.control.base import (
    CONTROLLER_PROVIDED,
    KLController,
    require_number,
    resolve_bounds,
    restore_attributes,
    saved_attributes,
)
from rlhf_kl.plugins import checked_options, parameters_of

# Names that a class of the user's may have instead, as in tutorials, lm-human-preferences and verl.
OTHER_OPTIONS = {"init_kl_coef": "coef", "kl_coef": "coef", "target_kl": "target"}
COEF_NAMES, TARGET_NAMES = ("coef", "kl_coef", "value"), ("target", "target_kl")  # of attributes


def law_options(law: type, written: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """`checked_options` of a law, with the problems of options that do not fit together."""
    provided = CONTROLLER_PROVIDED | {*names_of_options(options_of(law)).values()}
    arguments, problems = checked_options(law, written, where, provided=provided)
    if not problems and issubclass(law, KLController):
        defaults = {option.name: option.default for option in fields(law)}
        problems = [f"{where}: {line}" for line in law.conflicts(defaults | arguments)]
    return arguments, problems


def names_of_options(taken: Collection[str]) -> dict[str, str]:
    """Of the names of a class's options the `OTHER_OPTIONS`, by the standard names that are not among them."""
    return {OTHER_OPTIONS[name]: name for name in taken if OTHER_OPTIONS.get(name, name) not in taken}


def options_of(law: Any) -> list[str]:
    """The names of a class's options."""
    return [parameter.name for parameter in parameters_of(law) or ()]


def own_names(taken: Collection[str], coef_name: str, *, alone: bool) -> str:
    """What is taken for the standard names, in words; empty where a class has these.

    `coef_name`: of its attribute. `alone`: its `update` takes the KL alone.
    """
    named = {own: usual for usual, own in names_of_options(taken).items()}
    named |= {coef_name: "beta"} if coef_name != "coef" else {}
    words = [f"{own} is taken for {usual}" for own, usual in named.items()]
    words += ["update gets the KL alone"] * alone
    return f"{', '.join(words)}. Their usual names are coef, target, update(kl, episodes)" if words else ""


def fits_call(function: Any, *arguments: Any) -> bool:
    """Whether a function may be called so; one without a signature, written in C, may."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass
    return True


class ForeignKL(KLController):
    """A controller around an object that is none: its `coef` and `update`, and what else of the law it has.

    They may have the names of `COEF_NAMES` and `TARGET_NAMES`, and `update` may take the KL alone.
    """

    def __init__(self, law: Any) -> None:
        self.law, self.coef_name = law, next((name for name in COEF_NAMES if hasattr(law, name)), "")
        if not self.coef_name or not callable(getattr(law, "update", None)):
            raise ValueError(f"{type(law).__name__} needs `coef` and `update(kl, episodes)`")
        parts = ("update", "observe_update", "observe_rate", "scale", "state_dict", "load_state_dict")
        for name in (*parts, "adjusts", "min_coef", "max_coef"):
            if hasattr(law, name):
                setattr(self, name, getattr(law, name))
        for name in TARGET_NAMES:
            self.target = getattr(law, name, getattr(self, "target", None))
        self.alone = not fits_call(law.update, 0.1, 64)
        if self.alone:
            self.update = lambda kl, _: law.update(kl)  # type: ignore[method-assign, assignment]

    def own_names(self) -> str:
        """What is taken for the standard names, in words; empty where it has these."""
        return own_names(options_of(type(self.law)), self.coef_name, alone=self.alone)

    @property
    def law_class(self) -> type:
        return type(self.law)

    @property
    def coef(self) -> float:
        return getattr(self.law, self.coef_name)  # type: ignore[no-any-return]

    @coef.setter
    def coef(self, coef: float) -> None:
        with contextlib.suppress(AttributeError):  # it may be a read-only property
            setattr(self.law, self.coef_name, coef)

    def state_dict(self) -> dict[str, Any]:
        return saved_attributes(self.law)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_attributes(self.law, state)

    def _unsaved(self) -> list[str]:
        own = "state_dict" in vars(self)
        return [] if own else sorted(getattr(self.law, "__dict__", {}).keys() - self.state_dict().keys())


def as_controller(
    law: Any, min_coef: float | None = None, max_coef: float | None = None, wanted: float | None = None
) -> KLController:
    """A law, the user's or one of ours, ready for a run.

    Bounds: those given, else the law's own, else relative to its starting coef (COEF_SPAN). wanted: see `KLController`.
    Raises ValueError for one without `coef` or `update`, and for bounds that make no sense.
    """
    control = law if isinstance(law, KLController) else ForeignKL(law)
    control.kind, control.wanted = type(law).__name__, wanted
    control._beta = require_number("coef", float(control.coef))
    if control._beta < 0.0:
        raise ValueError(f"coef must not be negative, got {control._beta:g}")
    low, high = (
        own if given is None else given for given, own in ((min_coef, control.min_coef), (max_coef, control.max_coef))
    )
    low, high = (None if bound is None or math.isinf(bound) else bound for bound in (low, high))
    control.min_coef, control.max_coef = control.bounds = resolve_bounds(control._beta, low, high)
    if control._beta == 0.0:
        vars(control)["adjusts"] = False  # it stays there
    return control
