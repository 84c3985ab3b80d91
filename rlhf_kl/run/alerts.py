"""Alerts: conditions in a run's figures that need action, each raised once when it begins."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from statistics import fmean, median
from typing import Any, Literal

from rlhf_kl.run import sampling_gap
from rlhf_kl.run.sampling_gap import GapSum
from rlhf_kl.run.trends import noise, rises, thirds, trend
from rlhf_kl.text import read_number

_HEALTHY = 0.1  # nats per token, where there is no target
_DRIFTING = 4 / 3  # times the target: the middle preset (0.075) has 0.1 as the end of its range
_LEAST_MEAN = 5  # values that make a mean
_SPIKE_HISTORY = 20
_CLIMB_WINDOWS = (12, 30, 90)
_STUCK_UPDATES = 5
_SMOOTH = 5  # updates in a smoothed score
_TREND_WINDOWS = (10, 25, 60)
# t statistics of a slope: strict, because every update is one more chance for a false alarm.
_GOLD_FALLS = -5.0
_SCORE_RISES = 2.0
_WORSE_PERPLEXITY = 1.5
_STATE = ("updates", "kls", "settled", "scores", "pairs", "gold_range", "best", "stuck", "calm", "gaps")


class KLAlerts:
    """Reads the rows of `metrics.jsonl`, and returns a message when a problem begins.

    Every condition is raised once when it begins and again only after it has cleared with a margin. An alert
    starts with a stable word (`kl-above-target: ...`). Rows may lack any key; None and NaN count as missing.
    """

    def __init__(
        self,
        target: float | None,
        *,
        unit: Literal["token", "sequence"] = "token",
        kind: str | None = None,
        total_updates: int | None = None,
        min_coef: float | None = None,
        max_coef: float | None = None,
        ceiling: bool = False,
        window: int = 100,
    ) -> None:
        """`target` in nats per `unit`; None watches only what needs no target (then per token).

        The mean is over the last `window` updates without the warm-up, a sixth of the run (3 to 20 updates), in which
        a KL that starts at 0 still rises. `kind`: the controller's, for the advice. `min_coef, max_coef`: its bounds.
        `ceiling`: whether the run has one.
        """
        self.target = target
        self.unit = unit if target is not None else "token"
        self.warmup = min(20, max(3, (total_updates or 60) // 6))
        self._adaptive = kind == "adaptive"
        # A written coef is only the start where the controller changes it.
        self._to_rise, self._to_fall = "Raise ppo.learning_rate, or lower kl.target", "Lower ppo.learning_rate"
        self._to_restrain = "Lower kl.target"
        if kind in (None, "fixed", "schedule"):
            self._to_rise = "Lower kl.controller.coef, raise ppo.learning_rate, or use kl.controller.kind: adaptive"
            self._to_fall = "Raise kl.controller.coef, lower ppo.learning_rate"
            self._to_restrain = "Raise kl.controller.coef"
        self._bounds = (min_coef, max_coef)
        self._set_ceiling = "raise rollout.batch_size" if ceiling else "set kl.ceiling"
        self._window = window
        self._updates = 0
        self._kls: list[float] = []  # the last `window` values, warm-up included
        self._settled: list[float] = []  # those after the warm-up
        self._scores: list[float] = []
        self._pairs: list[list[float]] = []  # score and gold of the same update
        self._gold_range: list[float] = []
        self._best: dict[str, float] = {}  # lowest perplexity, and the score at that evaluation
        self._stuck = {"beta-at-min": 0, "beta-at-max": 0}
        self._gaps: dict[str, list[float]] = {}  # a `GapSum` of each figure
        self._calm: dict[str, int] = {}  # raised condition -> updates since it last held, even by the margin

    def __call__(self, row: Mapping[str, Any]) -> list[str]:
        """The alerts that begin with this row."""
        self._updates += 1
        alerts = [*self._sampler(row), *self._bounds_reached(row)]
        kl = read_number(row, f"kl/{self.unit}")
        if kl is not None:
            alerts += [*self._spike(kl), *self._climb(kl), *self._mean(kl)]
        alerts += self._overoptimised(row)
        return alerts

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, f"_{name}")) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in _STATE:
            setattr(self, f"_{name}", copy.deepcopy(state[name]))

    # ---- conditions

    def _begins(self, slug: str, on: bool, off: bool, hold: int = 1) -> bool:
        """True where the condition starts. It ends after `off` held for `hold` updates in a row."""
        if slug not in self._calm:
            if on:
                self._calm[slug] = 0
            return on
        self._calm[slug] = self._calm[slug] + 1 if off else 0
        if self._calm[slug] >= hold:
            del self._calm[slug]
        return False

    def _nats(self, kl: float) -> str:
        return f"{kl:.3g} nats per {self.unit}"

    def _adapt_or(self, otherwise: str) -> str:
        return otherwise if self._adaptive else "use kl.controller.kind: adaptive"

    def _mean(self, kl: float) -> list[str]:
        """KL averaged over the window against the target."""
        if self.target is None or self._updates <= self.warmup:
            return []
        self._settled = [*self._settled, kl][-self._window :]
        if len(self._settled) < _LEAST_MEAN:
            return []
        mean = fmean(self._settled)
        ratio = mean / self.target
        figures = f"KL averages {self._nats(mean)} over the last {len(self._settled)} updates"
        target = f"the target {self.target:g}"
        cases = (  # slug, begins, clears, its words
            ("kl-hardly-learning", ratio < 0.1, ratio > 0.12,
             f"under a tenth of {target}: the policy hardly changes. {self._to_rise}"),
            ("kl-below-target", ratio < 0.5, ratio > 0.55,
             f"{ratio:.2f}x {target}: the policy uses little of its KL budget. {self._to_rise}"),
            ("kl-above-target", ratio > 2, ratio < 1.8,
             f"{ratio:.1f}x {target}. {self._to_fall}, or {self._set_ceiling}"),
            ("kl-drifting", ratio > _DRIFTING, ratio < 1.2,
             f"{ratio:.2f}x {target}: the policy exceeds its KL budget. {self._to_fall}, or "
             f"{self._adapt_or(self._set_ceiling)}"),
        )  # fmt: skip
        alerts = [f"{slug}: {figures}, {words}" for slug, on, off, words in cases if self._begins(slug, on, off)]
        return alerts[:1]  # the first is the most serious

    def _spike(self, kl: float) -> list[str]:
        recent = self._kls[-_SPIKE_HISTORY:]
        if len(recent) < _LEAST_MEAN:
            return []
        usual = median(recent)
        floor = 1.5 * self.target if self.target is not None else _HEALTHY
        jump = kl > 1.75 * max(recent[-2:])  # a rise over several updates is no spike
        on = jump and kl > 2.5 * usual and kl > floor
        if not self._begins("kl-spike", on, kl < 1.5 * usual or kl < floor / 1.5, hold=3):
            return []
        times = f"{kl / usual:.1f}x" if usual > 0 else "far above"
        return [
            f"kl-spike: the KL of this update is {self._nats(kl)}, {times} the median of the {len(recent)} "
            f"before it. Lower ppo.learning_rate, set ppo.max_update_kl, or {self._set_ceiling}"
        ]

    def _climb(self, kl: float) -> list[str]:
        self._kls = [*self._kls, kl][-self._window :]
        floor = 1.5 * self.target if self.target is not None else _HEALTHY
        climbs = [window for window in _CLIMB_WINDOWS if rises(self._kls[-window:], floor, window)]
        shortest = _CLIMB_WINDOWS[0]
        settled = not climbs and not rises(self._kls[-shortest:], floor / 1.2, shortest, growth=1.05)
        if not self._begins("kl-climbing", bool(climbs), settled, hold=3):
            return []
        low, _, high = thirds(self._kls[-climbs[0] :])
        advice = f"{self._to_fall}, or {self._adapt_or(self._set_ceiling)}"
        return [
            f"kl-climbing: KL rose from {low:.3g} to {self._nats(high)} over the last {climbs[0]} updates and "
            f"is still rising. {advice}"
        ]

    def _bounds_reached(self, row: Mapping[str, Any]) -> list[str]:
        coef = read_number(row, "kl/coef_next")
        coef = read_number(row, "kl/coef") if coef is None else coef
        if coef is None:
            return []
        alerts = []
        for slug, bound, advice in zip(
            self._stuck,
            self._bounds,
            ("lower kl.controller.min_coef or kl.target", "raise kl.controller.max_coef or kl.target"),
            strict=True,
        ):
            at_bound = bound is not None and math.isclose(coef, bound, rel_tol=1e-3)
            self._stuck[slug] = self._stuck[slug] + 1 if at_bound else 0
            if self._begins(slug, self._stuck[slug] >= _STUCK_UPDATES, not at_bound, hold=_STUCK_UPDATES):
                alerts.append(
                    f"{slug}: beta has been at its bound {bound:g} for {_STUCK_UPDATES} updates, so the "
                    f"controller cannot go further: {advice}"
                )
        return alerts

    def _sampler(self, row: Mapping[str, Any]) -> list[str]:
        """Sampled tokens that do not follow the policy's distributions; once in a run, since sums keep the past."""
        words = []
        for key, says in sampling_gap.FIGURES.items():
            total = GapSum(*self._gaps.get(key, ())).add(row, key)
            self._gaps[key] = list(total)
            if total.shifted:
                words.append(f"{says.format(gap=total.mean)} (standard error {total.stderr:.2g})")
        if not self._begins("sampler-mismatch", bool(words), off=False):
            return []
        return [
            f"sampler-mismatch: over {self._updates} updates the tokens were not sampled from the policy that is "
            f"trained: {' and '.join(words)}. Check temperature, top-k and top-p, dropout, padding and dtype"
        ]

    def _overoptimised(self, row: Mapping[str, Any]) -> list[str]:
        score = read_number(row, "objective/scores")
        if score is None:
            return []
        self._scores = [*self._scores, score][-_SMOOTH * 4 :]
        return [*self._gold_falls(score, row), *self._perplexity_worsens(row)]

    def _gold_falls(self, score: float, row: Mapping[str, Any]) -> list[str]:
        """Gold's slope clearly below zero while the score's is above it, over one of the windows."""
        gold = read_number(row, "objective/gold")
        if gold is None:
            return []
        self._pairs = [*self._pairs, [score, gold]][-_TREND_WINDOWS[-1] :]
        low, high = self._gold_range or (gold, gold)
        self._gold_range = [min(low, gold), max(high, gold)]
        least = 0.1 * (self._gold_range[1] - self._gold_range[0])  # smaller falls do not count
        fall_seen = None
        for window in [window for window in _TREND_WINDOWS if window <= len(self._pairs)]:
            scores, golds = zip(*self._pairs[-window:], strict=True)
            (rise, rise_t), (fall, fall_t) = trend(scores), trend(golds)
            if rise_t > _SCORE_RISES and fall_t < _GOLD_FALLS and -fall > least:
                fall_seen = (window, rise, fall)
                break
        recent = [pair[1] for pair in self._pairs[-_TREND_WINDOWS[0] :]]
        settled = fall_seen is None and trend(recent)[1] > 0
        if not self._begins("overoptimised-gold", fall_seen is not None, settled, hold=5) or fall_seen is None:
            return []
        window, rise, fall = fall_seen
        return [
            f"overoptimised-gold: over the last {window} updates the score rose by {rise:.2g} to {score:.3g} "
            f"while gold fell by {-fall:.2g} to {gold:.3g}: the policy exploits the reward model. "
            f"{self._to_restrain}, or go back to an earlier checkpoint"
        ]

    def _perplexity_worsens(self, row: Mapping[str, Any]) -> list[str]:
        perplexity = read_number(row, "eval/perplexity")
        if perplexity is None:
            return []
        score = fmean(self._scores[-_SMOOTH:])
        if not self._best or perplexity < self._best["perplexity"]:
            self._best = {"perplexity": perplexity, "score": score}
        best = self._best
        ratio = perplexity / best["perplexity"] if best["perplexity"] > 0 else 1.0
        on = ratio > _WORSE_PERPLEXITY and score - best["score"] > noise(self._scores, _SMOOTH)
        if not self._begins("overoptimised-perplexity", on, ratio < 0.9 * _WORSE_PERPLEXITY):
            return []
        return [
            f"overoptimised-perplexity: the score rises ({best['score']:.3g} to {score:.3g}) while held-out "
            f"perplexity gets worse ({best['perplexity']:.3g} to {perplexity:.3g}): the policy forgets its "
            f"language. {self._to_restrain}"
        ]
