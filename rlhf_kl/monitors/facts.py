"""The facts of a run: what was measured of it, each with one definition.

`History` holds those of a run that goes on, row by row, for the alarms; the functions before it tell those of the rows
of a whole run, for its summary, its card, its pages and comparisons. How well it held its target: `control/verdict.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import correlation, fmean, linear_regression, median, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_kl.control import adjusts
from rlhf_kl.control.verdict import end, near_target, ratios, tail_error, time_in_band, verdict
from rlhf_kl.events import Event, UpdateSkipped, WeightsLost
from rlhf_kl.text import read_number

if TYPE_CHECKING:  # what shows a run needs no torch
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.ppo.reference import ReferenceScores

StartEnd = tuple[float | None, float | None]

CLOSING = {
    "scores": "objective/scores", "scores_shaped": "objective/scores_shaped",
    "kl_sequence": "kl/sequence", "beta": "kl/coef", "length": "rollout/response_length",
    "perplexity": "eval/perplexity", "forward_kl_token": "eval/forward_kl_token", "distinct_2": "eval/distinct_2",
}  # fmt: skip
WINDOW = 100  # rows that are kept
EVALUATIONS = 10  # that are kept
START = 5  # rows that make a level or a mean
NO_TARGET = 0.1  # nats per token, where there is no target
SAMPLED = {  # 0 on average where the tokens were sampled from the policy
    "policy/logprob_gap": "their log-prob is {gap:+.3g} nats off the policy's distribution",
    "kl/k1_gap": "their log-ratio to the reference is {gap:+.3g} nats off the exact KL",
}
BEST = ("step", "objective/scores_shaped", "objective/scores", "kl/token", "kl/sequence", "kl/error")
STATE = ("updates", "rows", "evaluations", "failing", "first", "gaps", "lowest", "skipped", "rollbacks", "turned_back",
         "active", "best", "best_checkpoint")  # fmt: skip

# ---- of all rows


def is_update(row: Mapping[str, Any]) -> bool:
    """False for the row of a closing evaluation, which is no update."""
    return "kl/error" in row


def worth(row: Mapping[str, Any], coef: float | None) -> float:
    """A figure by which the rows of one run can be compared; NaN or -inf for a row that does not count.

    coef: a beta that does not depend on the KL: the shaped score less coef times the KL of a response. None: beta
    follows the KL, so score - beta * KL means another thing in each row; then it is the shaped score, in rows whose
    KL is near the target or below.
    """
    if coef is None:
        return float(row["objective/scores_shaped"]) if near_target(row) else -math.inf
    return float(row["objective/scores_shaped"] - coef * row["kl/sequence"])


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of numbers; None without numbers, or if one is missing."""
    every = list(values)
    known = [value for value in every if value is not None]
    return fmean(known) if known and len(known) == len(every) else None


def control_figures(rows: Sequence[Mapping[str, Any]], kl: Any, frozen: int = 0) -> dict[str, Any]:
    """The figures that judge a run, for its summary, its card and its pages; what they mean: see `control.verdict`.

    rows: those of all updates; `kl` is their mean at the end, None if one was not finite. kl: the config's section.
    A beta that does not depend on the KL has no verdict. frozen: the first updates, in which the policy was not
    trained (`ppo.value_warmup`); they are not judged.
    """
    values = ratios(rows[frozen:])
    word, since, error = verdict(values) if adjusts(kl.controller.kind) else (None, None, None)
    return {
        "kl": mean(row.get(f"kl/{kl.unit}") for row in end(rows)),
        "target": kl.target_value, "unit": kl.unit, "updates": len(values),
        "tail_error": tail_error(values), "time_in_band": time_in_band(values),
        "verdict": word, "since": since and since + frozen, "error_since": error,
    }  # fmt: skip


def closing_figures(
    rows: Sequence[Mapping[str, Any]], unit: str = "token", scorers: Iterable[str] = ()
) -> dict[str, StartEnd]:
    """Start and end of each figure that was measured: the first update, and the mean of the last ten (`end`).

    rows: those of all updates, and of the closing evaluation. What only evaluations measure (`eval/*`): the first and
    the last evaluation. unit: of `kl`. scorers: those that never train, by name.
    """

    def numbers(some: Sequence[Mapping[str, Any]], key: str) -> list[float]:
        return [value for row in some if (value := read_number(row, key)) is not None]

    updates = [row for row in rows if is_update(row)]
    figures: dict[str, StartEnd] = {}
    for name, key in {"kl": f"kl/{unit}", **CLOSING, **{name: f"eval/{name}" for name in scorers}}.items():
        first, last = numbers(updates[:1], key), numbers(end(updates), key)
        if key.startswith("eval/"):
            found = numbers(rows, key)
            first, last = found[:-1][:1], found[-1:]
        if last:
            figures[name] = (first[0] if first else None, fmean(last))
    return figures


def score_error(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Standard error of the score at the end, a mean over updates: that of their batches; None where a row lacks it."""
    last = end([row for row in rows if is_update(row)])
    errors = [error for row in last if (error := read_number(row, "objective/scores_stderr")) is not None]
    return math.hypot(*errors) / len(errors) if errors and len(errors) == len(last) else None


def closing_note(updates: int) -> str:
    """What the two values of a closing figure are, in a run of that many updates."""
    count = len(end(range(updates)))
    return f"start -> mean of the last {count} update{'s' * (count != 1)} (of held-out figures: the end)"


# ---- row by row


class History:
    """The figures of a run: of its first rows, its last ones, and sums over all."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        coef: float,
        control: Any,
        scores: ReferenceScores | None,
        learning_rate: float,
        from_reference: bool = True,
    ) -> None:
        """`coef`: the starting beta. `control`: the KL controller. `scores`: of the reference's samples.

        `learning_rate`: the peak. `from_reference`: whether the policy starts as its reference, with a KL of 0.
        """
        self.config, self.scores, self.from_reference = config, scores, from_reference
        self.learning_rate = learning_rate
        self.target = config.kl.target_value if coef else None
        self.unit = config.kl.unit if coef else "token"
        self.there = 0.5 * (self.target or NO_TARGET)  # a KL below it may still rise
        self.floor = 1.5 * self.target if self.target is not None else NO_TARGET  # a KL below it may move as it likes
        # Updates in which the policy is frozen, and in which a KL that starts at 0 still rises.
        self.warmup = config.ppo.value_warmup + min(20, max(3, config.controlled_updates // 6))
        self.bounds = (control.min_coef, control.max_coef) if control.adjusts else (None, None)
        self.constant_coef = None if control.adjusts else coef
        self.curve: Sequence[Mapping[str, float]] = scores.tilt_curve() if scores else []
        self.row: Mapping[str, Any] = {}
        self.now: dict[str, float] = {}  # the figures of this row
        self.events: list[Event] = []
        # The state.
        self.updates = 0
        self.rows: list[dict[str, float]] = []  # the figures of the last ones
        self.evaluations: list[dict[str, float]] = []  # and of the last that evaluate
        self.failing: list[str] = []  # scorers that failed in the last evaluation
        self.first: dict[str, list[float]] = {}
        self.gaps: dict[str, list[float]] = {}  # a `GapSum` of each figure
        self.lowest: dict[str, float] = {}  # perplexity, and the score at that evaluation
        self.skipped = self.rollbacks = 0  # skipped updates are counted in a row
        self.turned_back = False  # and no update has gone well since
        self.active: dict[str, int] = {}  # alarms, and updates in a row that each has been clear
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that later alerts and decisions depend on."""
        return {name: copy.deepcopy(getattr(self, name)) for name in STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        for name in STATE:
            setattr(self, name, copy.deepcopy(state[name]))

    def take(self, row: Mapping[str, Any], events: list[Event]) -> None:
        """Add a row and what happened in its update."""
        self.row, self.events, self.updates = row, events, self.updates + 1
        figures = {key: read_number(row, key) for key in row}
        figures |= {"kl": read_number(row, f"kl/{self.unit}"), "held": read_number(row, f"kl/{self.config.kl.unit}")}
        entropy, exact = read_number(row, "policy/entropy"), read_number(row, "kl/token")
        if entropy is not None and exact is not None:  # over the whole vocabulary: no noise of single tokens
            figures["cross perplexity"] = math.exp(min(entropy + exact, 700.0))
        self.now = now = {name: value for name, value in figures.items() if value is not None}
        self.rows = [*self.rows, now][-WINDOW:]
        for name, value in now.items():
            if len(start := self.first.setdefault(name, [])) < START:
                start.append(value)
        for key in SAMPLED:
            self.gaps[key] = list(GapSum(*self.gaps.get(key, ())).add(row, key))
        if "eval/perplexity" in now:
            found = {key: value for key, value in now.items() if key == "step" or key.startswith("eval/")}
            self.evaluations = [*self.evaluations, found][-EVALUATIONS:]
        perplexity = now.get("eval/perplexity", math.inf)
        if "objective/scores" in now and perplexity < self.lowest.get("perplexity", math.inf):
            self.lowest = {"perplexity": perplexity, "score": self.score()}
        skips = [event for event in events if isinstance(event, UpdateSkipped | WeightsLost)]
        if any(skip.broken for skip in skips):
            self.skipped += 1
        elif not skips:
            self.skipped, self.turned_back = 0, False
        value = worth(row, self.constant_coef) if is_update(row) else -math.inf
        if math.isfinite(value) and (self.best is None or value > worth(self.best, self.constant_coef)):
            self.best = {key: row.get(key) for key in BEST}

    def has(self, *names: str) -> bool:
        """Whether this row has these figures."""
        return all(name in self.now for name in names)

    def values(self, name: str, last: int = WINDOW) -> list[float]:
        """The last values of a figure, as far as rows have it."""
        return [row[name] for row in self.rows if name in row][-last:]

    def levels(self, name: str, updates: int = START) -> tuple[float, float] | None:
        """Means over the first updates and over the last; None until there are enough."""
        start, now = self.first.get(name, [])[:updates], self.values(name, updates)
        return (fmean(start), fmean(now)) if len(now) == updates else None

    def score(self) -> float:
        """The smoothed score."""
        return fmean(self.values("objective/scores", START))

    def score_stderr(self, updates: int) -> float:
        """Standard error of the gain over some updates: of their batches (by prompts) and of the reference's mean."""
        assert self.scores is not None
        rollout = self.config.rollout
        draws = updates * rollout.batch_size / rollout.samples_per_prompt
        return math.hypot(self.scores.spread / math.sqrt(draws), self.scores.mean_stderr)


# ---- statistics


class GapSum(NamedTuple):
    """Were tokens sampled from the policy that the trainer computes? Sums of one figure over all updates so far.

    A sampled token's log-prob plus the entropy is 0 on average, and its log-ratio to the reference minus the exact KL.
    Another temperature, top-k or top-p shifts the first; weights of an older policy the second.
    """

    total: float = 0.0  # nats
    variance: float = 0.0  # nats squared
    tokens: float = 0.0

    def add(self, row: Mapping[str, Any], key: str) -> GapSum:
        """The sum with this row's tokens; unchanged if the row lacks a figure."""
        gap, stderr, tokens = (read_number(row, name) for name in (key, f"{key}_stderr", "rollout/tokens"))
        if gap is None or stderr is None or tokens is None:
            return self
        return GapSum(self.total + gap * tokens, self.variance + (stderr * tokens) ** 2, self.tokens + tokens)

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / self.tokens

    @property
    def stderr(self) -> float:
        """Of the mean, nats per token."""
        return math.sqrt(self.variance) / self.tokens

    @property
    def shifted(self) -> bool:
        """Whether the sum is larger than sampling from the policy itself gives at any update of a run.

        The normal mixture bound (Robbins 1970; Howard et al. 2021, 1810.08240): a false alarm in one of 2,000 runs at
        most. Differences of two passes (1e-3 nats) and of bfloat16 (a hundredth of a token's spread) raise none.
        """
        false_alarm, settling, rounding, negligible = 5e-4, 100.0, 1e-3, 0.01
        variance = self.variance + self.tokens * rounding**2
        sure = variance + settling
        bound = math.sqrt(sure * math.log(sure / settling / false_alarm**2))
        return abs(self.total) > bound + negligible * math.sqrt(variance * self.tokens)


def noise(values: Sequence[float], smoothing: int) -> float:
    """Standard error of a mean of `smoothing` values, from successive differences: a trend adds little to it."""
    if len(values) < 2:
        return 0.0
    return math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(values)) / 2 / smoothing)


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Change over the window along the least-squares line, and the t statistic of its slope."""
    steps = range(len(values))
    if len(values) < 3 or max(values) - min(values) <= 1e-9 * max(map(abs, values)):  # rounding is no trend
        return 0.0, 0.0
    r = correlation(steps, values)
    change = linear_regression(steps, values).slope * steps[-1]
    return change, r * math.sqrt((len(values) - 2) / max(1 - r * r, 1e-12))


def still_rises(values: Sequence[float], window: int) -> bool:
    """Whether the last values rise clearly, or are too few to tell."""
    return len(values) < window or trend(values[-window:])[1] > 1.5


def thirds(values: Sequence[float]) -> tuple[float, float, float]:
    """Medians of each third, the last one low, so that a spike of one or two updates does not count as a rise."""
    size = len(values) // 3
    return median(values[:size]), median(values[size : 2 * size]), median_low(values[2 * size :])


def rises(values: Sequence[float], window: int, floor: float, growth: float = 1.3) -> bool:
    """Each third of the window above the one before; the last over `growth` x the first and `floor`."""
    if len(values) < window:
        return False
    first, second, third = thirds(values[-window:])
    return first < second < min(third, values[-1]) and third > growth * first and third > floor
