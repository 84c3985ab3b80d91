"""The base of all KL controllers: checked options, bounds, guards and saved state, also for a class of the user's."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from rlhf_kl.errors import InputError
from rlhf_kl.events import CoefMoved, CoefNotFinite, ControllerState, ControllerTooSlow, Event, KLNotFinite
from rlhf_kl.plugins import checked_options, home_of, parameters_of, users_code

COEF_SPAN = (1e-3, 1e3)  # default bounds of beta, relative to its start
# Options that the program sets if a class takes them and the user does not set them.
CONTROLLER_PROVIDED = {"target", "coef", "total_episodes", "batch_size", "min_coef", "max_coef"}

Positive: TypeAlias = Annotated[float, Field(gt=0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, lt=1)]  # the weight that an average keeps on its past


def require_number(name: str, value: object) -> float:
    """`value` as a finite float; ValueError otherwise (None, NaN, text and booleans included)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def require_positive(name: str, value: object) -> float:
    """`value` as a finite float above zero; ValueError otherwise."""
    number = require_number(name, value)
    if number <= 0.0:
        raise ValueError(f"{name} must be above 0, got {value!r}")
    return number


def resolve_bounds(coef: float, low: float | None, high: float | None) -> tuple[float, float]:
    """The bounds of a beta that starts at `coef`; None = COEF_SPAN times it. A constant 0 has none.

    Raises ValueError if they are not above 0, in the wrong order, or exclude `coef`.
    """
    if coef == 0.0:
        return 0.0, math.inf
    low = COEF_SPAN[0] * coef if low is None else require_positive("min_coef", low)
    high = COEF_SPAN[1] * coef if high is None else require_positive("max_coef", high)
    if low > high:
        raise ValueError(f"min_coef {low:g} is above max_coef {high:g}")
    if not low <= coef <= high:
        raise ValueError(f"coef {coef:g} is outside [min_coef, max_coef] = [{low:g}, {high:g}]")
    return low, high


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@dataclass(kw_only=True, eq=False)
class KLController:
    """Moves `coef` (beta) so that the policy's KL to its reference stays at a target.

    A subclass writes `update`; any other class with `coef` and `update(kl, episodes)` is a controller too.
    Options are keyword arguments; `CONTROLLER_PROVIDED` names those that the run sets. `min_coef` and `max_coef` bound
    beta; None = COEF_SPAN times the starting `coef`. The KL is in nats, in the unit of the target.

    A run calls `step` and takes `beta`, which protects it against invalid measurements and faulty laws.
    """

    coef: Positive = 0.1
    min_coef: Positive | None = None
    max_coef: Positive | None = None

    kind: str = field(default="", init=False)
    """The name of the law's class."""
    raised: float = field(default=1.0, init=False)
    """What rollbacks multiply `coef` by: a law that computes it anew at each update would overwrite a raised one."""
    wanted: float | None = field(default=None, init=False)
    """The computed start, if the bounds have changed it."""
    solved: tuple[float, float] | None = field(default=None, init=False)
    """The beta that should hold the target, and the share of the target's KL for which the reference's samples suffice
    to tell it (1 = all); None = not known."""
    may_lower: bool = field(default=True, init=False)
    """False: the score does not rise with the KL that is spent, so a lower beta would only spend more."""
    bounds: tuple[float, float] = field(default=(0.0, math.inf), init=False)
    _beta: float = field(default=math.nan, init=False)

    state_names: ClassVar[tuple[str, ...] | None] = None  # None: every attribute that JSON can hold
    adjusts: ClassVar[bool] = True  # False: beta does not depend on the KL, so it cannot be too slow

    def __post_init__(self) -> None:
        # The class whose options these are: a user's own on top of it may have others.
        self.check_options(next(law for law in type(self).__mro__ if "__dataclass_fields__" in vars(law)))
        self.min_coef, self.max_coef = self.bounds = resolve_bounds(self.coef, self.min_coef, self.max_coef)

    def check_options(self, law: type) -> None:
        """Give the options of `law` the types of their annotations. Errors: ValueError with all that do not fit."""
        names = [p.name for p in parameters_of(law) or ()]
        given = {name: value for name in names if isinstance(value := getattr(self, name, ()), (int, float, str))}
        arguments, problems = checked_options(law, given, law.__name__, complete=False)
        if problems := problems or self.conflicts(vars(self)):
            raise ValueError("; ".join(problems))
        vars(self).update(arguments)

    @staticmethod
    def conflicts(options: Mapping[str, Any]) -> list[str]:  # noqa: ARG004
        """Problems of options of the law, each right by itself, that do not fit together."""
        return []

    # ---- the law: what a subclass may write

    def update(self, kl: float, episodes: int) -> None:
        """Move `coef` after one rollout of `episodes` responses whose mean KL was `kl` nats."""
        raise NotImplementedError(f"{type(self).__name__} has no update(kl, episodes)")

    def observe_update(self, kl_before: float, kl_after: float, kl_uncut: float) -> None:
        """Use the KL before the policy update, and that expected of the next rollout; called before `update`.

        Nats in the target's unit. `kl_uncut` is expected after the whole update if the ceiling cut it, else equal to
        `kl_after`. Both are read at the states of the rollout, so their differences have little sampling noise.
        """

    def observe_rate(self, factor: float) -> None:
        """The learning rate of the next update is `factor` times that of the last one, and so is the policy's step."""

    def scale(self) -> float:
        """The share of the policy's distance from its reference, sqrt(KL), that is kept; called after `update`.

        1 = all of it. The KL becomes the square of the share times what it was. Where the policy did not begin as its
        reference, it is not called.
        """
        return 1.0

    def log_steps(self, episodes: int) -> tuple[float, float]:
        """Largest fall and rise of log(coef) in one update while the KL is between 0 and 2x target."""
        return math.inf, math.inf

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        """Lowest and highest coef that `updates` updates of `batch_size` episodes can reach."""
        fall, rise = (min(step * updates, 700.0) if updates else 0.0 for step in self.log_steps(batch_size))
        return max(self.bounds[0], self.coef * math.exp(-fall)), min(self.bounds[1], self.coef * math.exp(rise))

    def state_dict(self) -> dict[str, Any]:
        return saved_attributes(self, self.state_names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_attributes(self, state)

    def _set_coef(self, coef: float) -> None:
        self.coef = clip(coef, *self.bounds)

    def _move(self, log_step: float) -> None:
        """coef *= exp(log_step), inside the bounds and without overflow."""
        self._set_coef(self.coef * math.exp(clip(log_step, -50.0, 50.0)))

    # ---- what a run calls

    @property
    def beta(self) -> float:
        """The coefficient of the next update: finite, inside the bounds, above 0 (0 only where it started there)."""
        return self._beta

    @property
    def needs_update_kl(self) -> bool:
        """Whether the law uses `observe_update`, which needs a measurement."""
        return getattr(self.observe_update, "__func__", None) is not KLController.observe_update

    def step(self, kl: float | None, episodes: int, move: tuple[float, float, float] | None = None) -> list[Event]:
        """Move beta after a rollout of `episodes` responses whose mean KL was `kl` (nats, the target's unit).

        move: the arguments of `observe_update`, if it was measured. A missing or non-finite figure changes nothing. If
        the law makes coef non-finite, zero or negative, coef and the law's state are restored.
        Returns where beta had to stay. Errors: InputError if the law's own code fails.
        """
        if move is not None and self.needs_update_kl and all(map(math.isfinite, move)):
            with self._calls("observe_update"):
                self.observe_update(*map(float, move))
        if kl is None or not math.isfinite(kl):
            return [KLNotFinite(kl, self._beta)]
        with self._calls("state_dict"):
            before = copy.deepcopy(self.state_dict())
        with self._calls("update"):
            self.update(float(kl), int(episodes))
            beta = self.raised * float(self.coef)
        if not math.isfinite(beta) or beta < 0.0 or (beta == 0.0 and self.bounds[0] > 0.0):
            self._load(before)
            return [CoefNotFinite(beta, kl, self._beta)]
        self._beta = clip(beta, *self.bounds)
        if self._beta != beta:
            self._set_law_coef()
        return []

    def distance_kept(self) -> float:
        """The share that is kept of the policy's distance from its reference now, from 0 to 1.

        Errors: InputError if the law gives another one.
        """
        with self._calls("scale"):
            share = float(self.scale())
        if not 0.0 <= share <= 1.0:
            raise InputError(f"kl.controller: {self.kind}.scale returned {share:g}: it must be from 0 to 1")
        return share

    def change_rate(self, factor: float) -> None:
        """Tell the law by what factor the learning rate changes; not for one of 0 or 1."""
        if factor > 0.0 and factor != 1.0:
            with self._calls("observe_rate"):
                self.observe_rate(float(factor))

    def raise_beta(self, factor: float) -> bool:
        """Multiply beta by `factor` (a rollback) for the rest of the run, inside the bounds; returns if it changed."""
        before, self._beta = self._beta, min(self._beta * factor, self.bounds[1])
        if self._beta > before:
            self.raised *= self._beta / before
        return self._beta > before

    def beta_range(self, updates: int, batch_size: int) -> tuple[float, float]:
        """Lowest and highest beta that this run can reach, as far as the law knows."""
        with self._calls("reach"):
            low, high = (clip(self.raised * coef, *self.bounds) for coef in self.reach(updates, batch_size))
        return low, high

    def start_events(self, updates: int, batch_size: int) -> list[Event]:
        """Before the run: a start that was moved, a law that cannot move beta in this run, state that is not saved."""
        events: list[Event] = []
        low, high = self.beta_range(updates, batch_size)
        if self.wanted is not None and self.wanted != clip(self.wanted, *self.bounds):
            events.append(CoefMoved(self.wanted, *self.bounds, self._beta))
        if self.adjusts and low * 2 > self._beta and high < 2 * self._beta:
            events.append(ControllerTooSlow(updates, batch_size, self.kind, self._beta, low, high))
        with self._calls("state_dict"):
            unsaved = self._unsaved()
        if unsaved:
            events.append(ControllerState(", ".join(unsaved)))
        return events

    def _unsaved(self) -> list[str]:
        """Attributes that a checkpoint would lose."""
        own = self.state_names is not None or type(self).state_dict is not KLController.state_dict
        return [] if own else sorted(vars(self).keys() - self.state_dict().keys())

    def save(self) -> dict[str, Any]:
        """The state for a checkpoint: that of the law, and beta."""
        with self._calls("state_dict"):
            law = copy.deepcopy(self.state_dict())
        return {"kind": self.kind, "beta": self._beta, "raised": self.raised, "law": law}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `save`. Raises ValueError when the state belongs to another controller."""
        if state.get("kind") != self.kind:
            raise ValueError(f"the saved controller is {state.get('kind')}, the config's is {self.kind}")
        self._load(state["law"], float(state["beta"]), float(state["raised"]))

    def _load(self, law: dict[str, Any], beta: float | None = None, raised: float | None = None) -> None:
        """Restore the state of the law, and beta (None: as it is)."""
        beta, raised = self._beta if beta is None else beta, self.raised if raised is None else raised
        with self._calls("load_state_dict"):
            self.load_state_dict(copy.deepcopy(law))  # which may hold `_beta` and `raised` too
        self._beta, self.raised = beta, raised
        self._set_law_coef()

    def _set_law_coef(self) -> None:
        """Let the law go on from the beta of the run."""
        with self._calls("coef"):
            self.coef = self._beta / self.raised

    def _calls(self, method: str) -> AbstractContextManager[None]:
        """A block that runs this method of the law. Errors: InputError if a user's fails."""
        own = None if self.law_class.__module__.startswith("rlhf_kl.") else home_of(self.law_class)
        return users_code(f"kl.controller: {self.kind}.{method} raised", own)

    @property
    def law_class(self) -> type:
        """The class whose code the law is."""
        return type(self)


def saved_attributes(obj: Any, names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Attributes of `obj` that survive JSON (tuples and deques as lists); all of them unless named."""
    saved = {}
    for name, value in getattr(obj, "__dict__", {}).items():
        plain = list(value) if isinstance(value, (deque, tuple)) else value
        with contextlib.suppress(TypeError, ValueError):
            if (names is None or name in names) and json.loads(json.dumps(plain, allow_nan=False)) == plain:
                saved[name] = plain
    return saved


def restore_attributes(obj: Any, state: dict[str, Any]) -> None:
    """Set attributes from `saved_attributes`, in the container type the attribute has now."""
    for name, value in copy.deepcopy(state).items():
        now = getattr(obj, name, None)
        if value is not None and isinstance(now, (deque, tuple)):
            value = deque(value, now.maxlen) if isinstance(now, deque) else tuple(value)
        setattr(obj, name, value)
