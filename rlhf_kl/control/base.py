"""The base of the laws: checked options, bounds and saved state. A class of the user's may extend it."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from rlhf_kl.plugins import checked_options, parameters_of

COEF_SPAN = (1e-3, 1e3)  # default bounds of beta, relative to its start
SURE = 3.0  # standard errors that no chance makes
FIRST_STEP = (
    2.5  # measured, 1.9 to 3.4: the first step of a policy over the later ones: Adam has no momentum to build up
)

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
class Law:
    """Moves `coef` (beta) so that the policy's KL to its reference stays at a target.

    A subclass writes `update`. A class without this base is a law too if its `update(kl, episodes)` or `update(kl)`
    returns beta, or one of its attributes `COEF_NAMES` holds it; all other methods are optional. In a run a `Guard`
    calls them, which protects beta against invalid measurements and faulty laws.

    Options are keyword arguments; `CONTROLLER_PROVIDED` names those that the run sets. `min_coef` and `max_coef` bound
    beta; None = COEF_SPAN times the starting `coef`. The KL is in nats, in the unit of the target.
    """

    coef: Positive = 0.1
    min_coef: Positive | None = None
    max_coef: Positive | None = None

    bounds: tuple[float, float] = field(default=(0.0, math.inf), init=False)

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

    # ---- what a subclass may write, in the order in which a run calls it

    def observe_solved(self, coef: float, share: float) -> None:
        """By the reference's samples, `coef` is the beta that should hold the target; called before the first update.

        share: of the target's KL for which the samples suffice to tell it; 1 = all. Not called where they tell nothing.
        """

    def observe_progress(self, rises: bool) -> None:
        """Whether the score rises with the KL that is spent; called before `update`.

        If not, a lower beta would only spend more.
        """

    def observe_update(self, kl_before: float, kl_after: float, kl_uncut: float) -> None:
        """Use the KL before the policy update, and that expected of the next rollout; called before `update`.

        Nats in the target's unit. `kl_uncut` is expected after the whole update if the ceiling cut it, else equal to
        `kl_after`. Both are read at the states of the rollout, so their differences have little sampling noise.
        """

    def observe_rate(self, factor: float) -> None:
        """The learning rate of the next update is `factor` times that of the last one, and so is the policy's step."""

    def update(self, kl: float, episodes: int) -> float | None:
        """Move `coef` after one rollout of `episodes` responses whose mean KL was `kl` nats.

        What it returns is beta; None: `coef` is. Errors: ValueError of the built-in laws for a KL that is not finite.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update(kl, episodes)")

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

    def _finite(self, kl: float) -> float:
        """A measurement that may enter the state. Errors: ValueError for NaN and infinity; a `Guard` passes none on."""
        return require_number("kl", float(kl))

    def _set_coef(self, coef: float) -> None:
        self.coef = clip(coef, *self.bounds)

    def _move(self, log_step: float) -> None:
        """coef *= exp(log_step), inside the bounds and without overflow."""
        self._set_coef(self.coef * math.exp(clip(log_step, -50.0, 50.0)))


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
