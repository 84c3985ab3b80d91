"""Alerts in words: what in a run's figures a person should act on, each said once when it begins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median, median_low
from typing import Any, Literal

from rlhf_kl.run.figures import read_number

Health = Literal["hardly learning", "healthy", "drifting"]

# Per-token KL of 0.01 to 0.1 nats is healthy. Scaled to a target, the upper end is 4/3 of it: the middle
# preset (0.075) has 0.1 as the end of its range.
_HEALTHY_PER_TOKEN = (0.01, 0.1)
_HEALTHY_OF_TARGET = (0.1, 4 / 3)
_LEAST_MEAN = 5  # values that make a mean
_SPIKE_HISTORY = 20
_CLIMB_WINDOWS = (12, 30, 90)
_STUCK_UPDATES = 5
_SMOOTH = 5  # updates in a smoothed score
_TREND_WINDOWS = (10, 25, 60)
# t statistics of a slope: strict, because every update is one more chance to be fooled by noise.
_GOLD_FALLS = -5.0
_SCORE_RISES = 2.0
_WORSE_PERPLEXITY = 1.5


def health(kl: float, target: float | None) -> Health:
    """Band of a mean KL: 0.1x to 4/3x of the target; without one 0.01 to 0.1 nats per token."""
    low, high = _HEALTHY_PER_TOKEN if target is None else (target * share for share in _HEALTHY_OF_TARGET)
    if kl < low:
        return "hardly learning"
    return "drifting" if kl > high else "healthy"


class KLAlerts:
    """Watches the rows of `metrics.jsonl` and says in words when something begins to go wrong.

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
        window: int = 100,
    ) -> None:
        """`target` in nats per `unit`; None watches only what needs no target (then per token).

        The mean is over the last `window` updates without the warm-up, a sixth of the run (3 to 20 updates),
        in which a KL that starts at 0 is still on its way. `kind`: the controller's; `adaptive` is not told to use
        adaptive. `min_coef, max_coef`: its bounds.
        """
        self.target = target
        self.unit = unit if target is not None else "token"
        self.warmup = min(20, max(3, (total_updates or 60) // 6))
        self._adaptive = kind == "adaptive"
        self._bounds = (min_coef, max_coef)
        self._window = window
        self._updates = 0
        self._kls: list[float] = []  # the last `window` values, warm-up included
        self._settled: list[float] = []  # those after the warm-up
        self._scores: list[float] = []
        self._pairs: list[list[float]] = []  # score and gold of the same update
        self._gold_range: list[float] = []
        self._best: dict[str, float] = {}  # lowest perplexity, and the score at that evaluation
        self._stuck = {"beta-at-min": 0, "beta-at-max": 0}
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
        return {
            "updates": self._updates,
            "kls": list(self._kls),
            "settled": list(self._settled),
            "scores": list(self._scores),
            "pairs": [list(pair) for pair in self._pairs],
            "gold_range": list(self._gold_range),
            "best": dict(self._best),
            "stuck": dict(self._stuck),
            "calm": dict(self._calm),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = int(state["updates"])
        self._kls = list(state["kls"])
        self._settled = list(state["settled"])
        self._scores = list(state["scores"])
        self._pairs = [list(pair) for pair in state["pairs"]]
        self._gold_range = list(state["gold_range"])
        self._best = dict(state["best"])
        self._stuck = dict(state["stuck"])
        self._calm = dict(state["calm"])

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
        """KL averaged over the window against the target, and the health bands."""
        if self.target is None or self._updates <= self.warmup:
            return []
        self._settled = [*self._settled, kl][-self._window :]
        if len(self._settled) < _LEAST_MEAN:
            return []
        mean = fmean(self._settled)
        ratio = mean / self.target
        figures = f"KL averages {self._nats(mean)} over the last {len(self._settled)} updates"
        idle = self._begins("kl-hardly-learning", ratio < 0.1, ratio > 0.12)
        below = self._begins("kl-below-target", ratio < 0.5, ratio > 0.55)
        above = self._begins("kl-above-target", ratio > 2, ratio < 1.8)
        drifting = self._begins("kl-drifting", ratio > _HEALTHY_OF_TARGET[1], ratio < 1.2)
        if idle:
            return [
                f"kl-hardly-learning: {figures}, under a tenth of the target {self.target:g}: the policy "
                "hardly moves. Lower kl.controller.coef or raise ppo.learning_rate"
            ]
        if below:
            return [
                f"kl-below-target: {figures}, {ratio:.2f}x the target {self.target:g}: the budget is not "
                f"used. Lower kl.controller.coef, or {self._adapt_or('raise ppo.learning_rate')}"
            ]
        if above:
            return [
                f"kl-above-target: {figures}, {ratio:.1f}x the target {self.target:g}. Raise "
                "kl.controller.coef, lower ppo.learning_rate, or set kl.ceiling"
            ]
        if drifting:
            return [
                f"kl-drifting: {figures}, {ratio:.2f}x the target {self.target:g}: the policy drifts past "
                f"its budget. Raise kl.controller.coef, or {self._adapt_or('set kl.ceiling')}"
            ]
        return []

    def _spike(self, kl: float) -> list[str]:
        recent = self._kls[-_SPIKE_HISTORY:]
        if len(recent) < _LEAST_MEAN:
            return []
        usual = median(recent)
        floor = 1.5 * self.target if self.target is not None else _HEALTHY_PER_TOKEN[1]
        jump = kl > 1.75 * max(recent[-2:])  # a rise over several updates is no spike
        on = jump and kl > 2.5 * usual and kl > floor
        if not self._begins("kl-spike", on, kl < 1.5 * usual or kl < floor / 1.5, hold=3):
            return []
        times = f"{kl / usual:.1f}x" if usual > 0 else "far above"
        return [
            f"kl-spike: the KL of this update is {self._nats(kl)}, {times} the median of the {len(recent)} "
            "before it. Set kl.ceiling or ppo.max_update_kl, or lower ppo.learning_rate"
        ]

    def _climb(self, kl: float) -> list[str]:
        self._kls = [*self._kls, kl][-self._window :]
        floor = 1.5 * self.target if self.target is not None else _HEALTHY_PER_TOKEN[1]
        rises = [window for window in _CLIMB_WINDOWS if _rises(self._kls[-window:], floor, window)]
        settled = not rises and not _rises(self._kls[-_CLIMB_WINDOWS[0] :], floor / 1.2, growth=1.05)
        if not self._begins("kl-climbing", bool(rises), settled, hold=3):
            return []
        low, _, high = _thirds(self._kls[-rises[0] :])
        return [
            f"kl-climbing: KL rose from {low:.3g} to {self._nats(high)} over the last {rises[0]} updates and "
            f"is still rising. Raise kl.controller.coef, set kl.ceiling, or {self._adapt_or('lower ppo.learning_rate')}"
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
                    f"controller can do no more: {advice}"
                )
        return alerts

    def _sampler(self, row: Mapping[str, Any]) -> list[str]:
        """k1's mean is an unbiased estimate of the exact KL: far below zero, the log-probs do not match."""
        k1, stderr, exact = (read_number(row, f"kl/{name}") for name in ("k1", "k1_stderr", "exact"))
        if k1 is None or stderr is None or exact is None:
            return []
        on = exact > 1e-5 and k1 < -3 * stderr - 1e-6  # beyond rounding, where the policy is the reference
        if not self._begins("sampler-mismatch", on, k1 > -2 * stderr, hold=3):
            return []
        return [
            f"sampler-mismatch: k1 averages {k1:.3g} with a standard error of {stderr:.2g} while the exact "
            f"KL is {exact:.3g}: the tokens were not sampled from the policy that is trained. Check "
            "temperature, dropout, padding and dtype"
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
        least = 0.1 * (self._gold_range[1] - self._gold_range[0])  # smaller falls matter to nobody
        found = None
        for window in _TREND_WINDOWS:
            if len(self._pairs) < window:
                break
            scores, golds = zip(*self._pairs[-window:], strict=True)
            (rise, rise_t), (fall, fall_t) = _trend(scores), _trend(golds)
            if rise_t > _SCORE_RISES and fall_t < _GOLD_FALLS and -fall > least:
                found = (window, rise, fall)
                break
        recent = [pair[1] for pair in self._pairs[-_TREND_WINDOWS[0] :]]
        settled = found is None and _trend(recent)[1] > 0
        if not self._begins("overoptimised-gold", found is not None, settled, hold=5) or found is None:
            return []
        window, rise, fall = found
        return [
            f"overoptimised-gold: over the last {window} updates the score rose by {rise:.2g} to {score:.3g} "
            f"while gold fell by {-fall:.2g} to {gold:.3g}: the policy exploits the reward model. Lower "
            "kl.target, raise kl.controller.coef, or go back to an earlier checkpoint"
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
        on = ratio > _WORSE_PERPLEXITY and score - best["score"] > _noise(self._scores)
        if not self._begins("overoptimised-perplexity", on, ratio < 0.9 * _WORSE_PERPLEXITY):
            return []
        return [
            f"overoptimised-perplexity: the score rises ({best['score']:.3g} to {score:.3g}) while held-out "
            f"perplexity gets worse ({best['perplexity']:.3g} to {perplexity:.3g}): the policy forgets its "
            "language. Lower kl.target or raise kl.controller.coef"
        ]


def _noise(values: Sequence[float]) -> float:
    """Standard error of a smoothed value, from successive differences: a trend adds little to it."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / 2 / _SMOOTH)


def _trend(values: Sequence[float]) -> tuple[float, float]:
    """Change over the window along the least-squares line, and the t statistic of its slope."""
    size = len(values)
    if size < 3:
        return 0.0, 0.0
    middle, mean = (size - 1) / 2, fmean(values)
    spread = sum((x - middle) ** 2 for x in range(size))
    slope = sum((x - middle) * (y - mean) for x, y in enumerate(values)) / spread
    residual = sum((y - mean - slope * (x - middle)) ** 2 for x, y in enumerate(values))
    error = math.sqrt(residual / (size - 2) / spread)
    noiseless = 1e-9 * (abs(mean) + abs(slope))  # no infinite certainty from figures without noise
    return slope * (size - 1), slope / max(error, noiseless, 1e-12)


def _thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Medians, the last a low one, so that a spike of an update or two is no climb."""
    size = len(values) // 3
    return median(values[:size]), median(values[size : 2 * size]), median_low(values[2 * size :])


def _rises(values: Sequence[float], floor: float, least: int = _CLIMB_WINDOWS[0], growth: float = 1.3) -> bool:
    """Each third of a full window above the one before; the last over `growth` x the first and `floor`."""
    if len(values) < least:
        return False
    first, second, third = _thirds(values)
    return first < second < min(third, values[-1]) and third > growth * first and third > floor
