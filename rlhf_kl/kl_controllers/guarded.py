"""Bounds, NaN policy and rollback for any controller, built-in or a user's."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers.base import KLController, clip, require_number, resolve_bounds, restore, saved_attributes


def one_line(error: BaseException) -> str:
    """ "ValueError: no such shape": an exception in one line."""
    return f"{type(error).__name__}: {error}"


class GuardedController:
    """Protects a run against invalid measurements and faulty controllers; the trainer uses controllers through it.

    A missing or non-finite KL changes nothing. If an update makes coef non-finite, zero or negative, coef and
    the controller's state are restored. Bounds: the narrower of those given and the controller's own;
    without either they are relative to the starting coef (`base.COEF_SPAN`).

    `raised` is a factor on the controller's coef, which itself does not change: a controller that computes beta from
    the number of episodes only would overwrite a raised coef at its next update.
    """

    def __init__(
        self,
        controller: Any,
        min_coef: float | None = None,
        max_coef: float | None = None,
        wanted: float | None = None,
        explain: Callable[[BaseException], str] = one_line,
    ) -> None:
        """`wanted`: the computed starting coef, if the bounds have changed it.

        `explain`: words for an exception of the controller's own code.
        """
        if not hasattr(controller, "coef") or not callable(getattr(controller, "update", None)):
            raise ValueError(f"{type(controller).__name__} needs `coef` and `update(kl, episodes)`")
        self.controller, self.wanted, self.explain, self.raised = controller, wanted, explain, 1.0
        self._coef = require_number("coef", float(controller.coef))
        if self._coef < 0.0:
            raise ValueError(f"coef must not be negative, got {self._coef:g}")
        self._starts_at_zero = self._coef == 0.0
        low = [require_number("min_coef", x) for x in (min_coef, _own(controller, "min_coef")) if x is not None]
        high = [require_number("max_coef", x) for x in (max_coef, _own(controller, "max_coef")) if x is not None]
        self.min_coef, self.max_coef = resolve_bounds(self._coef, max(low, default=None), min(high, default=None))

    @property
    def coef(self) -> float:
        """beta for the next update: finite, inside the bounds, above 0 (0 only where it started there)."""
        return self._coef

    @property
    def adjusts(self) -> bool:
        """Whether beta depends on the KL: not if it is 0, constant or scheduled."""
        return bool(getattr(self.controller, "adjusts", True)) and self._coef > 0.0

    def update(self, kl: float | None, episodes: int) -> dict[str, Any]:
        """Move coef after a rollout of `episodes` responses whose mean KL was `kl` (nats, the target's unit).

        Returns facts for the monitors: where coef had to stay. Errors: InputError if the controller's own code fails.
        """
        if kl is None or not math.isfinite(kl):
            return {"kl-not-finite": {"kl": kl, "coef": self._coef}}
        before = self._controller_state()
        with self._own_code("update"):
            self.controller.update(float(kl), int(episodes))
            coef = self.raised * float(self.controller.coef)
        if not math.isfinite(coef) or coef < 0.0 or (coef == 0.0 and not self._starts_at_zero):
            restore(self.controller, before)
            self._write_coef(self._coef)
            return {"coef-not-finite": {"reason": f"the controller set it to {coef}", "kl": kl, "coef": self._coef}}
        self._coef = coef if coef == 0.0 else clip(coef, self.min_coef, self.max_coef)
        if self._coef != coef:
            self._write_coef(self._coef)
        return {}

    def raise_coef(self, factor: float) -> bool:
        """Multiply coef by `factor` (a rollback) for the rest of the run, inside the bounds; returns if it changed."""
        before, self._coef = self._coef, min(self._coef * factor, self.max_coef)
        if self._coef > before:
            self.raised *= self._coef / before
        return self._coef > before

    @property
    def needs_update_kl(self) -> bool:
        """Whether the controller uses `observe_update`, which needs a measurement."""
        own = getattr(type(self.controller), "observe_update", KLController.observe_update)
        return own is not KLController.observe_update

    def observe_update(self, kl_before: float, kl_after: float, kl_uncut: float) -> None:
        """`KLController.observe_update`, unless a figure is not finite."""
        if self.needs_update_kl and all(map(math.isfinite, (kl_before, kl_after, kl_uncut))):
            with self._own_code("observe_update"):
                self.controller.observe_update(float(kl_before), float(kl_after), float(kl_uncut))

    def observe_rate(self, factor: float) -> None:
        """`KLController.observe_rate`, if there is one; not called for a factor of 0 or 1."""
        observe = getattr(self.controller, "observe_rate", None)
        if callable(observe) and factor > 0.0 and factor != 1.0:
            with self._own_code("observe_rate"):
                observe(float(factor))

    @property
    def spent(self) -> bool:
        """Whether a lower beta would not move the policy farther from its reference, or is out of bounds."""
        return not self.adjusts or bool(getattr(self.controller, "spent", self._coef <= self.min_coef))

    @contextlib.contextmanager
    def _own_code(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = f"kl.controller: {type(self.controller).__name__}.{method}"
            raise InputError(f"{where} raised {self.explain(error)}") from error

    def reach(self, updates: int, batch_size: int) -> tuple[float, float]:
        """Lowest and highest coef that this run can reach, as far as the controller knows."""
        reach = getattr(self.controller, "reach", None)
        low, high = reach(updates, batch_size) if callable(reach) else (0.0, math.inf)
        low, high = (clip(self.raised * coef, self.min_coef, self.max_coef) for coef in (low, high))
        return low, high

    def start_facts(self, updates: int, batch_size: int) -> dict[str, Any]:
        """Facts before the run: a horizon or gain that cannot move beta in it, state that is not saved."""
        facts: dict[str, Any] = {}
        low, high = self.reach(updates, batch_size)
        if self.wanted is not None and not self.min_coef <= self.wanted <= self.max_coef:
            facts["coef-moved"] = {
                "wanted": self.wanted, "min_coef": self.min_coef, "max_coef": self.max_coef, "coef": self._coef,
            }  # fmt: skip
        if self.adjusts and low * 2 > self._coef and high < 2 * self._coef:
            kind = type(self.controller).__name__
            facts["controller-too-slow"] = {
                "updates": updates, "batch_size": batch_size, "kind": kind, "coef": self._coef, "low": low, "high": high
            }  # fmt: skip
        if unsaved := self._unsaved():
            facts["controller-state"] = {"names": ", ".join(unsaved)}
        return facts

    def _unsaved(self) -> list[str]:
        """Attributes of a plugin without `state_dict` that a checkpoint would lose."""
        own = getattr(type(self.controller), "state_dict", KLController.state_dict) is not KLController.state_dict
        if own or getattr(self.controller, "state_names", None) is not None:
            return []
        return sorted(set(getattr(self.controller, "__dict__", {})) - set(saved_attributes(self.controller)))

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": type(self.controller).__name__,
            "coef": self._coef,
            "raised": self.raised,
            "controller": self._controller_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state belongs to another controller."""
        kind = type(self.controller).__name__
        if state.get("kind") != kind:
            raise ValueError(f"the saved controller is {state.get('kind')}, the config's is {kind}")
        restore(self.controller, state["controller"])
        self._coef, self.raised = float(state["coef"]), float(state["raised"])
        self._write_coef(self._coef)

    def _controller_state(self) -> dict[str, Any]:
        own = getattr(self.controller, "state_dict", None)
        return copy.deepcopy(own() if own else saved_attributes(self.controller))

    def _write_coef(self, coef: float) -> None:
        with contextlib.suppress(AttributeError):  # a plugin's coef may be a read-only property
            self.controller.coef = coef / self.raised


def _own(controller: Any, name: str) -> Any:
    """A bound of the controller itself; None if it has none, or an infinite one."""
    value = getattr(controller, name, None)
    return None if value is None or math.isinf(float(value)) else value
