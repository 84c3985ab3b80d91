"""What stands between a run and a law: beta stays valid whatever the law does, whose code may be the user's."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from contextlib import AbstractContextManager
from typing import Any

from rlhf_kl.control.base import Law, clip, require_number, resolve_bounds, restore_attributes, saved_attributes
from rlhf_kl.errors import InputError
from rlhf_kl.events import CoefMoved, CoefNotFinite, ControllerState, ControllerTooSlow, Event, KLNotFinite
from rlhf_kl.plugins import home_of, users_code

COEF_NAMES = ("coef", "kl_coef", "beta", "value")  # of the attribute that holds beta; the first that is a number
UPDATES = ((0.1, 64), (0.1,))  # what an `update` may be called with: the KL and the episodes, or the KL alone


class Guard:
    """A law in a run: `beta`, its bounds, and the only calls of the law's methods.

    beta: the coefficient of the next update: finite, inside the bounds, above 0 (0 only where it started there).
    min_coef, max_coef: its bounds. kind: the name of the law's class. adjusts: whether beta depends on the KL.
    raised: what rollbacks multiply the law's beta by, since a law that computes it anew would overwrite a raised one.
    """

    def __init__(
        self,
        law: Any,
        min_coef: float | None = None,
        max_coef: float | None = None,
        *,
        start: float | None = None,
        auto: float | None = None,
    ) -> None:
        """Bounds: those given, else the law's own, else relative to its starting beta (COEF_SPAN).

        start: beta, where no attribute of the law holds it yet. auto: the start that was computed, before the bounds.
        Raises ValueError for a law without a fitting `update` or a starting beta, and for bounds that make no sense.
        """
        self.law, self.kind, self.auto, self.raised = law, type(law).__name__, auto, 1.0
        if not fits_update(getattr(law, "update", None)):
            raise ValueError(f"{self.kind} needs update(kl, episodes), which returns beta or changes `coef`")
        self._takes_episodes = fits_call(law.update, *UPDATES[0])
        held = self._held()
        if held is None and start is None:
            raise ValueError(f"{self.kind} has no beta to start with in an attribute {', '.join(COEF_NAMES)}")
        self.beta = require_number("coef", start if held is None else held)
        if self.beta < 0.0:
            raise ValueError(f"coef must not be negative, got {self.beta:g}")
        low = getattr(law, "min_coef", None) if min_coef is None else min_coef
        high = getattr(law, "max_coef", None) if max_coef is None else max_coef
        low, high = (None if bound is None or math.isinf(bound) else bound for bound in (low, high))
        self.min_coef, self.max_coef = resolve_bounds(self.beta, low, high)
        self.adjusts = self.beta > 0.0 and bool(getattr(law, "adjusts", True))  # from 0 it cannot

    @property
    def bounds(self) -> tuple[float, float]:
        return self.min_coef, self.max_coef

    @property
    def needs_update_kl(self) -> bool:
        """Whether the law uses `observe_update`, which needs a measurement."""
        method = getattr(self.law, "observe_update", None)
        return callable(method) and getattr(method, "__func__", None) is not Law.observe_update

    # ---- an update

    def step(
        self, kl: float | None, episodes: int, move: tuple[float, float, float] | None = None, *, progress: bool = True
    ) -> list[Event]:
        """Move beta after a rollout of `episodes` responses whose mean KL was `kl` (nats, the target's unit).

        move: the arguments of `observe_update`, if it was measured. progress: that of `observe_progress`. A missing or
        non-finite figure changes nothing. If beta becomes non-finite, zero or negative, the law's state is restored.
        Returns where beta had to stay. Errors: InputError if the law's own code fails.
        """
        if move is not None and self.needs_update_kl and all(map(math.isfinite, move)):
            self._ask("observe_update", *map(float, move))
        if kl is None or not math.isfinite(kl):
            return [KLNotFinite(kl, self.beta)]
        self._ask("observe_progress", progress)
        before = self._law_state()
        beta = self.raised * self._updated(float(kl), int(episodes))
        if not math.isfinite(beta) or beta < 0.0 or (beta == 0.0 and self.min_coef > 0.0):
            self._load(before, self.beta, self.raised)
            return [CoefNotFinite(beta, kl, self.beta)]
        self.beta = clip(beta, *self.bounds)
        if self.beta != beta:
            self._set_law_coef()
        return []

    def distance_kept(self) -> float:
        """The share that is kept of the policy's distance from its reference now, from 0 to 1.

        Errors: InputError if the law gives another one.
        """
        if not self._has("scale"):
            return 1.0
        with self._calls("scale"):
            share = float(self.law.scale())
        if not 0.0 <= share <= 1.0:
            raise InputError(f"kl.controller: {self.kind}.scale returned {share:g}: it must be from 0 to 1")
        return share

    def change_rate(self, factor: float) -> None:
        """Tell the law by what factor the learning rate changes; not for one of 0 or 1."""
        if factor > 0.0 and factor != 1.0:
            self._ask("observe_rate", float(factor))

    def know_solved(self, coef: float, share: float) -> None:
        """Tell the law which beta should hold the target by the reference's samples; see `Law.observe_solved`."""
        self._ask("observe_solved", float(coef), float(share))

    def raise_beta(self, factor: float) -> bool:
        """Multiply beta by `factor` (a rollback) for the rest of the run, inside the bounds; returns if it changed."""
        before, self.beta = self.beta, min(self.beta * factor, self.max_coef)
        if self.beta > before:
            self.raised *= self.beta / before
        return self.beta > before

    # ---- the beginning

    def beta_range(self, updates: int, batch_size: int) -> tuple[float, float]:
        """Lowest and highest beta that this run can reach, as far as the law knows."""
        if not isinstance(self.law, Law):
            return self.bounds
        with self._calls("reach"):
            low, high = (clip(self.raised * coef, *self.bounds) for coef in self.law.reach(updates, batch_size))
        return low, high

    def start_events(self, updates: int, batch_size: int) -> list[Event]:
        """Before the run: a start that was moved, a law that cannot move beta in this run, state that is not saved."""
        events: list[Event] = []
        low, high = self.beta_range(updates, batch_size)
        if self.auto is not None and self.auto != clip(self.auto, *self.bounds):
            events.append(CoefMoved(self.auto, *self.bounds, self.beta))
        if self.adjusts and low * 2 > self.beta and high < 2 * self.beta:
            events.append(ControllerTooSlow(updates, batch_size, self.kind, self.beta, low, high))
        if unsaved := self._unsaved():
            events.append(ControllerState(", ".join(unsaved)))
        return events

    def words(self) -> str:
        """What of the law is taken for beta."""
        called, name = "update(kl, episodes)" if self._takes_episodes else "update(kl)", self.coef_name
        return f"beta is what {called} returns" + (f", or its {name} if that is nothing" if name else "")

    # ---- the state

    def save(self) -> dict[str, Any]:
        """The state for a checkpoint: that of the law, and beta."""
        return {"kind": self.kind, "beta": self.beta, "raised": self.raised, "law": self._law_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `save`. Raises ValueError when the state belongs to another controller."""
        if state.get("kind") != self.kind:
            raise ValueError(f"the saved controller is {state.get('kind')}, the config's is {self.kind}")
        self._load(state["law"], float(state["beta"]), float(state["raised"]))

    def _law_state(self) -> dict[str, Any]:
        with self._calls("state_dict"):
            return copy.deepcopy(self.law.state_dict() if self._has("state_dict") else saved_attributes(self.law))

    def _load(self, law: dict[str, Any], beta: float, raised: float) -> None:
        with self._calls("load_state_dict"):
            if self._has("load_state_dict"):
                self.law.load_state_dict(copy.deepcopy(law))
            else:
                restore_attributes(self.law, law)
        self.beta, self.raised = beta, raised
        self._set_law_coef()

    def _unsaved(self) -> list[str]:
        """Attributes that a checkpoint would lose."""
        inherited = isinstance(self.law, Law) and type(self.law).state_dict is Law.state_dict
        if self._has("state_dict") and not (inherited and self.law.state_names is None):
            return []
        return sorted(getattr(self.law, "__dict__", {}).keys() - self._law_state().keys())

    # ---- the law's own code

    def _updated(self, kl: float, episodes: int) -> float:
        """The law's beta after its `update`."""
        with self._calls("update"):
            try:
                returned = self.law.update(kl, episodes) if self._takes_episodes else self.law.update(kl)
            except (TypeError, AttributeError) as error:
                if "Tensor" in str(error) or "'float' object" in str(error):  # of torch.exp, .item() and the like
                    said = str(error).partition("\n")[0].partition(", but expected")[0]
                    error.args = (f"{said}: the KL is a number and no tensor, for math.exp(kl) and the like",)
                raise
            beta = returned if is_number(returned) else self._held()
            if beta is None:
                given = f"returned {'None' if returned is None else type(returned).__name__}, no number"
                raise InputError(
                    f"kl.controller: {self.kind}.update {given}, and no attribute {', '.join(COEF_NAMES)} holds beta"
                )
            return float(beta)

    @property
    def coef_name(self) -> str | None:
        """The attribute of the law that holds beta; None: only its `update` tells it."""
        return next((name for name in COEF_NAMES if is_number(getattr(self.law, name, None))), None)

    def _held(self) -> Any:
        """The number in the attribute that holds beta; None without such."""
        name = self.coef_name
        return None if name is None else float(getattr(self.law, name))

    def _set_law_coef(self) -> None:
        """Let the law go on from the beta of the run."""
        with self._calls("coef"), contextlib.suppress(AttributeError):  # it may be a read-only property
            if (name := self.coef_name) is not None:
                setattr(self.law, name, self.beta / self.raised)

    def _has(self, method: str) -> bool:
        return callable(getattr(self.law, method, None))

    def _ask(self, method: str, *arguments: Any) -> None:
        """Call this method, if the law has it."""
        if self._has(method):
            with self._calls(method):
                getattr(self.law, method)(*arguments)

    def _calls(self, method: str) -> AbstractContextManager[None]:
        """A block that runs this method of the law. Errors: InputError if a user's fails."""
        law = type(self.law)
        home = None if law.__module__.startswith("rlhf_kl.") else home_of(law)
        return users_code(f"kl.controller: {self.kind}.{method} raised", home)


def is_number(value: Any) -> bool:
    """Whether it is a single number, also one of numpy or torch; a boolean and a text are none."""
    return hasattr(value, "__float__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


def fits_update(update: Any, *first: Any) -> bool:
    """Whether it may be called as an `update` is, `first` coming before: what stands for self in a class's."""
    return callable(update) and any(fits_call(update, *first, *arguments) for arguments in UPDATES)


def fits_call(function: Any, *arguments: Any) -> bool:
    """Whether a function may be called so; one without a signature, written in C, may."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:
        pass
    return True
