"""The events of a run: what its parts report when it happens, each with its figures beside its name and its words.

They are told in the order of this file. A new one also needs its name on the page `GUIDE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, dataclass_transform

GUIDE = "kl"  # the page that lists the alerts


def alert(name: str, text: str) -> str:
    """A line of `alerts`, which begins with a fixed word."""
    return f"{name}: {text} (rlhf-kl guide {GUIDE})"


@dataclass_transform(frozen_default=True)
class Event:
    """The base: each subclass is a frozen dataclass."""

    name: ClassVar[str]  # the fixed word that its alert begins with
    words: ClassVar[str]  # with places for the fields
    is_note: ClassVar[bool] = False  # a plain line that asks for nothing

    def __init_subclass__(cls, name: str) -> None:
        cls.name = name
        dataclass(frozen=True)(cls)

    def line(self, advice: Mapping[str, str]) -> str:
        """A note, or the alert with the page of the guide that lists it; `advice` replaces that of the event."""
        text = self.words.format_map(vars(self) | dict(advice))
        return text if self.is_note else alert(self.name, text)


class CoefMoved(Event, name="coef-moved"):
    words = ("auto found beta {wanted:.4g}, but kl.controller.min_coef and max_coef allow {min_coef:.4g} to "
             "{max_coef:.4g}: it starts at {coef:.4g}. Set them wider")  # fmt: skip
    wanted: float
    min_coef: float
    max_coef: float
    coef: float


class ControllerTooSlow(Event, name="controller-too-slow"):
    words = ("in {updates} updates of {batch_size} episodes {kind} can move beta only from {coef:.4g} to between "
             "{low:.4g} and {high:.4g}. Use kl.controller.kind=adaptive or a smaller horizon")  # fmt: skip
    updates: int
    batch_size: int
    kind: str
    coef: float
    low: float
    high: float


class ControllerState(Event, name="controller-state"):
    words = "{names} cannot be saved; define state_dict"
    names: str


class ScoresClipped(Event, name="scores-clipped"):
    words = ("reward.clip cuts off {share:.0%} of the reference samples' scores, so the policy cannot tell them apart: "
             "set a larger reward.clip, and reward.normalize=true where it is false")  # fmt: skip
    share: float


class EvalScores(Event, name="eval-scores"):
    words = "a score of the reward model was not finite: left out"


class KLNotFinite(Event, name="kl-not-finite"):
    words = "measured KL is {kl}; coef stays at {coef:.6g}"
    kl: float | None
    coef: float


class CoefNotFinite(Event, name="coef-not-finite"):
    words = "the controller set beta to {wrong:.6g} at KL {kl:.6g}, which is no number above 0; it stays {coef:.6g}"
    wrong: float
    kl: float
    coef: float


class LearningRateChanged(Event, name="learning-rate-changed"):
    words = "the learning rate is now {factor:.3g}x its schedule: {why}"
    is_note = True
    why: str
    factor: float


class NoProgress(Event, name="no-progress"):
    words = ("the KL is at {kl:.0%} of its target, and the score has risen by {rise:.2g} ± {noise:.2g}, no more than "
             "its noise: beta and the learning rate are not moved farther. Look at the responses and their scores: "
             "many may be empty or equal")  # fmt: skip
    kl: float
    rise: float
    noise: float


class LearningRateAtBound(Event, name="learning-rate-at-bound"):
    words = "{why}; the factor is at its bound {factor:g}: {change} ppo.learning_rate"
    why: str
    factor: float
    change: str = "raise"


class UpdateSkipped(Event, name="update-skipped"):
    words = "{reason}: the steps that need it were left out"
    reason: str
    broken: bool = True  # a number was not finite


class StepSkipped(Event, name="step-skipped"):
    words = "the gradient was not finite, so the step changed nothing"


class ScorerFailed(Event, name="scorer-failed"):
    words = "eval.scorers.{scorer}: {failure}: left out"
    scorer: str
    failure: str


class WeightsLost(Event, name="weights-lost"):
    words = "a weight is not finite any more"
    broken = True


class RolledBack(Event, name="rolled-back"):
    words = "{reason}; back to the policy, its optimizer and its controller of {place}, beta is {coef:.4g} now"
    reason: str
    place: str
    coef: float


def in_order(events: Iterable[Event]) -> list[Event]:
    """Each event once, in the order of this file."""
    return sorted(dict.fromkeys(events), key=lambda event: Event.__subclasses__().index(type(event)))


def worded(events: Iterable[Event], advice: Mapping[str, str] | None = None, *, notes: bool = False) -> list[str]:
    """The lines of the alerts among events, or of the notes."""
    return [event.line(advice or {}) for event in in_order(events) if event.is_note == notes]
