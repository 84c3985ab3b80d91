"""`Monitors` reads every row of `metrics.jsonl` before it is written, and tells alerts and what has to be done.

A condition is told once when it begins, and again only after it has cleared with a margin; the events of an update are
told each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_kl.control.verdict import near_target
from rlhf_kl.events import Event, RolledBack, ScorerFailed, in_order, worded
from rlhf_kl.monitors.alarms import ALARMS, EQUAL, Action, Alarm, Figures, advice, equal_scores, falls
from rlhf_kl.monitors.facts import History
from rlhf_kl.text import read_number


class Decision(NamedTuple):
    """What has to be done after an update."""

    action: Action
    name: str
    reason: str


class Monitors(History):
    """Reads the rows of a run in order; `best` and `best_checkpoint` are the best so far."""

    def __call__(self, row: Mapping[str, Any], events: Sequence[Event] = ()) -> tuple[list[str], Decision | None]:
        """The alerts that begin with a row, and what has to be done."""
        self.take(row, in_order(events))
        equal, decision = EQUAL if equal_scores(self) else {}, None
        alerts = worded(self._news(), equal)
        for alarm in (*ALARMS, *map(falls, self.config.eval.watched)):
            if (figures := self._beginning(alarm)) is not None:
                words = alarm.words(advice(self) | dict(figures) | equal)
                if alarm.action == "warn":
                    alerts.append(words)
                elif decision is None:
                    decision = Decision(alarm.action, alarm.name, words)
        return alerts, decision

    def rolled_back(self, decision: Decision, step: int, coef: float) -> str:
        """The alert after the run went back to checkpoint `step`; beta is `coef` now."""
        if decision.name == "kl-above-ceiling":
            self.rollbacks += 1
        else:
            self.skipped, self.turned_back = 0, True
        place = f"update {step}" if step else "the start"
        return worded([RolledBack(decision.reason, place, coef)])[0]

    def better_checkpoint(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The checkpoint that a row measures (in row k: of update k - 1), if it is the best so far."""
        metric, best = self.config.checkpoint.best, self.best_checkpoint
        value = None if metric is None else read_number(row, metric)
        if value is None or (self.constant_coef is None and not near_target(row)):
            return None
        sign = -1.0 if metric == "eval/perplexity" else 1.0
        better = best is None or sign * value > sign * best["value"]
        return {"step": row["step"] - 1, "metric": metric, "value": value} if better else None

    def _news(self) -> list[Event]:
        """The events of this row, but a scorer that goes on failing."""
        failed, before = [event.scorer for event in self.events if isinstance(event, ScorerFailed)], self.failing
        if self.has("eval/perplexity"):
            self.failing = failed
        return [event for event in self.events if not (isinstance(event, ScorerFailed) and event.scorer in before)]

    def _beginning(self, alarm: Alarm) -> Figures | None:
        """The figures of an alarm that begins with this row."""
        if (figures := alarm.measure(self)) is None:
            return None
        key = alarm.name + alarm.part
        if key in self.active:
            self.active[key] = self.active[key] + 1 if alarm.clears(figures) else 0
            if self.active[key] == alarm.hold:
                del self.active[key]
            return None
        if not alarm.begins(figures):
            return None
        if alarm.action == "warn":
            self.active[key] = 0
        return None if alarm.unless in self.active else figures
