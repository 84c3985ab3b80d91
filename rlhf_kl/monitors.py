"""The alarms of a run in one table: what is measured, when an alarm begins and ends, its words, and what then happens.

`Monitors` reads every row of `metrics.jsonl` before it is written. A condition is told once when it begins, and again
only after it has cleared with a margin; the events of an update are told each time. To add an alarm, add a line to
`ALARMS` and to the page `GUIDE`, and a measurement where there is none yet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import correlation, fmean, linear_regression, median, median_low, stdev
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_kl.events import GUIDE, Event, GoldFailed, RolledBack, UpdateSkipped, WeightsLost, in_order, worded
from rlhf_kl.kl_controllers.held import near_target
from rlhf_kl.kl_controllers.tilt import least_kl
from rlhf_kl.report.control import is_update, worth
from rlhf_kl.text import read_number

if TYPE_CHECKING:  # what shows a run needs no torch
    from rlhf_kl.config.schema import TrainConfig
    from rlhf_kl.ppo.reference import ReferenceScores

Figures = Mapping[str, Any]  # a measurement: the figures that an alarm is judged by, and that stand in its text
Action = Literal["warn", "rollback", "stop"]

WINDOW = 100  # rows that are kept
START = 5  # rows that make a level or a mean
NO_TARGET = 0.1  # nats per token, where there is no target
CLIMBS = (12, 30, 90)  # windows of `kl-climbing`, in updates
TRENDS = (10, 25, 60)  # windows of `overoptimised-gold`, in updates
STUCK = 5  # updates in a row: beta at its bound, or all responses or scores equal
FEW, MANY = 0.2, 0.4  # share of different responses at which `alike` begins, and at which it clears
BOUGHT = 8  # updates of `kl-not-bought`
RISE = 10  # updates in which a KL that is called low no longer rises; twice as many for a score
SURE = 2.0  # standard errors of the score that a KL must exceed
EQUAL = {  # advice where all scores are equal
    "to_rise": "The scores of all responses to a prompt are equal, so there is nothing to learn: look at the scores in "
    "samples.jsonl; a reward has to tell responses apart, or the prompts are too easy or too hard for it",
    "to_lower": "the scores of all responses to a prompt are equal: look at the reward",
    "change": "look at the reward, whose scores for a prompt are all equal, and not at",
}
ROLLBACKS = 5  # at most in a run
PATIENCE = 10  # shortened updates in a row whose KL may be above the ceiling


@dataclass(frozen=True)
class Alarm:
    """One line of the table. One that stops or rolls back gives its text as the reason."""

    name: str  # the fixed word that an alert begins with
    text: str  # with places for figures and for the advice
    measure: Callable[[Monitors], Figures | None]  # None: not known
    begins: Callable[[Figures], bool] = lambda _: True
    clears: Callable[[Figures], bool] = lambda _: False
    hold: int = 1  # updates in a row that it has to be clear before it ends
    unless: str = ""  # a worse alarm that covers it
    part: str = ""  # one of several conditions with this name
    action: Action = "warn"

    def words(self, figures: Figures) -> str:
        """The text with its figures; an alert with its name and the page of the guide that lists it."""
        text = self.text.format_map(figures)
        return f"{self.name}: {text} (rlhf-kl guide {GUIDE})" if self.action == "warn" else text


class Decision(NamedTuple):
    """What has to be done after an update."""

    action: Action
    name: str
    reason: str


class Monitors:
    """Reads the rows of a run in order; `best` and `best_checkpoint` are the best so far."""

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
        self.target = config.kl.target_value if coef else None
        self.unit = config.kl.unit if coef else "token"
        self.there = 0.5 * (self.target or NO_TARGET)  # a KL below it may still rise
        self.floor = 1.5 * self.target if self.target is not None else NO_TARGET  # a KL below it may move as it likes
        self.warmup = min(20, max(3, config.updates // 6))  # updates in which a KL that starts at 0 still rises
        self.bounds = (control.min_coef, control.max_coef) if control.adjusts else (None, None)
        self.constant_coef = None if control.adjusts else coef
        self.curve: Sequence[Mapping[str, float]] = scores.tilt_curve() if scores else []
        self.advice = _advice(config, learning_rate) | {"unit": self.unit, "target": self.target}
        self.row: Mapping[str, Any] = {}
        self.now: dict[str, float] = {}  # the figures of this row
        self.events: list[Event] = []
        # The state.
        self.updates = 0
        self.rows: list[dict[str, float]] = []  # the figures of the last ones
        self.first: dict[str, list[float]] = {}
        self.gaps: dict[str, list[float]] = {}  # a `GapSum` of each figure
        self.gold: list[float] = []  # lowest and highest
        self.lowest: dict[str, float] = {}  # perplexity, and the score at that evaluation
        self.skipped = self.rollbacks = 0  # skipped updates are counted in a row
        self.turned_back = False  # and no update has gone well since
        self.active: dict[str, int] = {}  # updates in a row that it has been clear
        self.best: dict[str, Any] | None = None
        self.best_checkpoint: dict[str, Any] | None = None

    def __call__(self, row: Mapping[str, Any], events: Sequence[Event] = ()) -> tuple[list[str], Decision | None]:
        """The alerts that begin with a row, and what has to be done."""
        self._take(row, in_order(events))
        equal, decision = EQUAL if equal_scores(self) else {}, None
        alerts = worded(self._news(), equal)
        for alarm in ALARMS:
            if (figures := self._beginning(alarm)) is not None:
                words = alarm.words(self.advice | dict(figures) | equal)
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

    def state_dict(self) -> dict[str, Any]:
        """Everything that later alerts and decisions depend on."""
        return {name: copy.deepcopy(getattr(self, name)) for name in _STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        for name in _STATE:
            setattr(self, name, copy.deepcopy(state[name]))

    # ---- the history

    def _take(self, row: Mapping[str, Any], events: list[Event]) -> None:
        self.row, self.events, self.updates = row, events, self.updates + 1
        figures = {key: read_number(row, key) for key in row}
        figures |= {"kl": read_number(row, f"kl/{self.unit}"), "held": read_number(row, f"kl/{self.config.kl.unit}")}
        entropy, exact = read_number(row, "policy/entropy"), read_number(row, "kl/exact")
        if entropy is not None and exact is not None:  # over the whole vocabulary: no noise of single tokens
            figures["cross perplexity"] = math.exp(min(entropy + exact, 700.0))
        self.now = now = {name: value for name, value in figures.items() if value is not None}
        self.rows = [*self.rows, now][-WINDOW:]
        for name, value in now.items():
            if len(start := self.first.setdefault(name, [])) < START:
                start.append(value)
        for key in SAMPLED:
            self.gaps[key] = list(GapSum(*self.gaps.get(key, ())).add(row, key))
        if (gold := now.get("objective/gold")) is not None:
            self.gold = [min([*self.gold, gold]), max([*self.gold, gold])]
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
            self.best = {key: row.get(key) for key in _BEST}

    def _news(self) -> list[Event]:
        """The events of this row, but a gold scorer that goes on failing."""
        failing = "gold-failed" in self.active
        self.active.pop("gold-failed", None)
        if any(isinstance(event, GoldFailed) for event in self.events):
            self.active["gold-failed"] = 0
        return [event for event in self.events if not (failing and isinstance(event, GoldFailed))]

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


def collapsed(row: Mapping[str, Any]) -> bool:
    """Whether nearly all responses of an update are the same few texts."""
    distinct = read_number(row, "rollout/distinct_responses")
    return distinct is not None and distinct <= FEW


_BEST = ("step", "objective/scores_shaped", "objective/scores", "objective/gold", "kl/token", "kl/sequence", "kl/error")
_STATE = ("updates", "rows", "first", "gaps", "gold", "lowest", "skipped", "rollbacks", "turned_back", "active", "best",
          "best_checkpoint")  # fmt: skip


def _advice(config: TrainConfig, learning_rate: float) -> dict[str, Any]:
    """What to do, by the controller: a written coef is only the start where the controller changes it."""
    kind, batch, ceiling = config.kl.controller.kind, config.rollout.batch_size, config.kl.ceiling is not None
    constant = kind in ("fixed", "schedule")
    limit = "raise rollout.batch_size" if ceiling else "set kl.ceiling"
    exact = "Set kl.placement: rao_blackwell with kl.estimator: exact, a penalty without noise. "
    noise = (
        f"Lower ppo.learning_rate ({learning_rate:.3g}, say to {learning_rate / 3:.1g}) or raise rollout.batch_size "
    )
    noise += f"({batch}, say to {4 * batch}); if neither helps, the policy may be unable to learn this reward"
    rise = "Lower kl.controller.coef, raise ppo.learning_rate, or use kl.controller.kind: adaptive"
    goal = "Lower kl.target, raise ppo.learning_rate, or train for more updates. A target is a goal: where you want a "
    goal += "limit only, set kl.controller {kind: fixed, coef: 0} and a kl.ceiling"
    return {
        "to_rise": rise if constant else goal,
        "to_lower": "lower kl.controller.min_coef or kl.target",
        "to_fall": "Raise kl.controller.coef, lower ppo.learning_rate" if constant else "Lower ppo.learning_rate",
        "to_restrain": "Raise kl.controller.coef" if constant else "Lower kl.target (a goal that beta also falls for)",
        "less_noise": exact * ((config.kl.placement, config.kl.estimator) == ("reward", "k1")) + noise,
        "limit_kl": limit,
        "adapt": limit if kind == "adaptive" else "use kl.controller.kind: adaptive",
    }


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


# ---- measurements

SAMPLED = {  # 0 on average where the tokens were sampled from the policy
    "policy/logprob_gap": "their log-prob is {gap:+.3g} nats off the policy's distribution",
    "kl/k1_gap": "their log-ratio to the reference is {gap:+.3g} nats off the exact KL",
}


def sampled_elsewhere(m: Monitors) -> Figures:
    sums = [(message, GapSum(*m.gaps[key])) for key, message in SAMPLED.items()]
    found = [f"{message.format(gap=s.mean)} (standard error {s.stderr:.2g})" for message, s in sums if s.shifted]
    return {"updates": m.updates, "found": " and ".join(found)}


def at_bound(side: int) -> Callable[[Monitors], Figures | None]:
    def measure(m: Monitors) -> Figures | None:
        if (bound := m.bounds[side]) is None or not m.has("kl/coef_next"):
            return None
        recent = [math.isclose(coef, bound, rel_tol=1e-3) for coef in m.values("kl/coef_next", STUCK)]
        return {"bound": bound, "stuck": len(recent) == STUCK and all(recent), "left": not recent[-1]}

    return measure


def usual_kl(m: Monitors) -> Figures | None:
    before = m.values("kl")[:-1][-20:]
    if not m.has("kl") or len(before) < START:
        return None
    kl = m.now["kl"]
    jump = kl > 1.75 * max(before[-2:])  # a rise over several updates is no spike
    return {"kl": kl, "usual": median(before), "count": len(before), "jump": jump, "floor": m.floor}


def largest_kl(m: Monitors) -> Figures | None:
    """Of a response, over the mean of all, which it follows while the KL rises: in 11 runs at most 2.2x the median."""
    pairs = [(row.get("kl/max_sequence"), row.get("kl/sequence")) for row in m.rows[-21:]]
    times = [largest / mean for largest, mean in pairs if largest and mean]
    if not m.has("kl", "kl/max_sequence", "kl/sequence") or m.now["kl"] < m.there or len(times) <= START:
        return None
    return {"largest": m.now["kl/max_sequence"], "times": times[-1], "before": median(times[:-1])}


def rising_kl(m: Monitors) -> Figures | None:
    kls, shortest = m.values("kl"), CLIMBS[0]
    if not m.has("kl") or len(kls) < shortest:
        return None
    window = next((window for window in CLIMBS if rises(kls, window, m.floor)), 0)
    low, _, high = thirds(kls[-(window or shortest) :])
    over = not window and not rises(kls, shortest, m.floor / 1.2, growth=1.05)
    return {"low": low, "high": high, "window": window, "over": over}


def mean_kl(m: Monitors) -> Figures | None:
    """Over the last 100 updates after the warm-up."""
    kls = [row["kl"] for row in m.rows[max(0, len(m.rows) - m.updates + m.warmup) :] if "kl" in row]
    if m.target is None or not m.has("kl") or len(kls) < START:
        return None
    ratio, rises = fmean(kls) / m.target, still_rises(m.values("kl"), RISE) and not equal_scores(m)
    return {"mean": fmean(kls), "count": len(kls), "ratio": ratio, "low": math.inf if rises else ratio}


def equal_scores(m: Monitors) -> bool:
    """Whether no response scored better than another one to its prompt for some updates."""
    spreads, equal = m.values("objective/scores_std", STUCK), m.values("rollout/equal_groups", STUCK)
    groups = m.config.rollout.batch_size // m.config.rollout.samples_per_prompt
    none = len(spreads) == STUCK and max(spreads) <= 1e-6 * max(1.0, abs(m.now.get("objective/scores", 0.0)))
    return none or (len(equal) == STUCK and min(equal) >= groups)


def falling_gold(m: Monitors) -> Figures | None:
    """Gold's slope clearly below zero while the score's is above it, over one of the windows."""
    score, gold = "objective/scores", "objective/gold"
    if not m.has(score, gold):
        return None
    pairs = [(row[score], row[gold]) for row in m.rows if {score, gold} <= row.keys()]
    for window in [window for window in TRENDS if window <= len(pairs)]:
        scores, golds = zip(*pairs[-window:], strict=True)
        (rise, rise_t), (fall, fall_t) = trend(scores), trend(golds)
        # Strict, since every update is one more chance of a false alarm.
        if rise_t > 2 and fall_t < -5 and -fall > 0.1 * (m.gold[1] - m.gold[0]):
            return {"window": window, "rise": rise, "fall": -fall, "score": scores[-1], "gold": golds[-1]}
    return {"window": 0, "over": trend([pair[1] for pair in pairs[-TRENDS[0] :]])[1] > 0}


def worse_perplexity(m: Monitors) -> Figures | None:
    if not m.has("objective/scores", "eval/perplexity"):
        return None
    before, perplexity, low, score = m.lowest["perplexity"], m.now["eval/perplexity"], m.lowest["score"], m.score()
    rose = score - low > noise(m.values("objective/scores", 4 * START), START)
    times = perplexity / before
    return {"before": before, "perplexity": perplexity, "times": times, "low": low, "high": score, "rose": rose}


def bought(m: Monitors) -> Figures | None:
    """KL and gain in score of the last updates, once the KL is there."""
    needs = {"kl", "kl/sequence", "objective/scores_shaped"}
    recent = [row for row in m.rows if needs <= row.keys()][-BOUGHT:]
    if m.scores is None or not m.curve or not m.from_reference or not m.has(*needs):
        return None
    if len(recent) < BOUGHT or min(row["kl"] for row in recent) < m.there:
        return None
    kl = fmean(row["kl/sequence"] for row in recent)
    gain = fmean(row["objective/scores_shaped"] for row in recent) - m.scores.mean
    most = gain + SURE * m.score_stderr(BOUGHT)  # noise of the batches is no reason to warn
    known = most <= m.curve[-1]["gain"] and not still_rises(m.values("objective/scores_shaped"), 2 * RISE)
    return {"kl": kl, "most": least_kl(m.curve, most) / kl, "share": least_kl(m.curve, gain) / kl, "known": known}


def sign(key: str, message: str, size: Callable[[float, float], float], updates: int = START) -> Alarm:
    """A sign that a policy exploits its reward: a score that rises, without a gold one. `size`: 1 where it begins."""

    def measure(m: Monitors) -> Figures | None:
        found, scores = m.levels(key, updates), m.levels("objective/scores")
        if found is None or scores is None or m.gold:
            return None
        if scores[1] - scores[0] <= 2 * stdev(m.values("objective/scores", START)) / math.sqrt(START) + 1e-9:
            return None
        return {"low": scores[0], "high": scores[1], "start": found[0], "now": found[1], "size": size(*found)}

    text = f"the score rose from {{low:.3g}} to {{high:.3g}} while {message}: the policy may exploit the reward. "
    text += "Read its samples. {to_restrain}"
    return Alarm("overoptimised-signs", text, measure, lambda f: f["size"] >= 1, lambda f: f["size"] < 0.8, part=key)


def _times(start: float, now: float) -> float:
    """log(now / start); 0 where one of them is 0."""
    return math.log(now / start) if min(start, now) > 0 else 0.0


def alike(m: Monitors) -> Figures | None:
    recent = m.values("rollout/distinct_responses", STUCK)
    equal = len(recent) == STUCK and max(recent) <= FEW
    return {"share": recent[-1], "equal": equal} if m.has("rollout/distinct_responses") else None


def above_ceiling(action: str) -> Callable[[Monitors], Figures | None]:
    """A KL above the ceiling, where the config has this action for it."""

    def measure(m: Monitors) -> Figures | None:
        kl, ceiling, limit = m.now.get("held"), m.config.kl.ceiling, m.config.kl.ceiling_value
        if ceiling is None or ceiling.action != action or kl is None or limit is None or kl <= limit:
            return None
        recent = [row.get("held", 0.0) for row in m.rows[-PATIENCE:]]
        # While the policy is frozen no update is shortened. A KL that falls is given time.
        waited = m.updates - m.config.ppo.value_warmup >= PATIENCE and min(recent) > limit and kl >= 0.9 * recent[0]
        figures = {"kl": kl, "kl_unit": m.config.kl.unit, "limit": limit, "step": m.row["step"]}
        return figures | {"rollbacks": m.rollbacks, "waited": waited}

    return measure


def broken(m: Monitors) -> Figures | None:
    """Numbers that are not finite, where going on would not mend them."""
    limit, reason = m.config.ppo.max_skipped, None
    for event in m.events:
        if isinstance(event, UpdateSkipped) and event.broken and m.skipped >= limit:
            reason = f"{limit} updates in a row were skipped: {event.reason}"
        elif isinstance(event, WeightsLost):
            reason = event.words
    return {"reason": reason, "step": m.row["step"], "again": m.turned_back} if reason else None


# ---- the table

_MEAN = "KL averages {mean:.3g} nats per {unit} over the last {count} updates"
_AT_BOUND = f"beta has been at its bound {{bound:g}} for {STUCK} updates, so the controller cannot go further: "
_ABOVE = "KL {kl:.4g} nats per {kl_unit} is above the ceiling {limit:.4g}"

ALARMS = (
    # Conditions of the KL.
    Alarm("sampler-mismatch", "over {updates} updates the tokens were not sampled from the policy that is trained: "
          "{found}. Check temperature, top-k and top-p, dropout, padding and dtype",
          sampled_elsewhere, lambda f: bool(f["found"])),
    Alarm("beta-at-min", _AT_BOUND + "{to_lower}",
          at_bound(0), lambda f: f["stuck"], lambda f: f["left"], hold=STUCK),
    Alarm("beta-at-max", _AT_BOUND + "raise kl.controller.max_coef or kl.target",
          at_bound(1), lambda f: f["stuck"], lambda f: f["left"], hold=STUCK),
    Alarm("kl-spike", "the KL of this update is {kl:.3g} nats per {unit}, the median of the {count} before it "
          "{usual:.3g}. Lower ppo.learning_rate, set ppo.max_update_kl, or {limit_kl}",
          usual_kl, lambda f: f["jump"] and f["kl"] > max(2.5 * f["usual"], f["floor"]),
          lambda f: f["kl"] < max(1.5 * f["usual"], f["floor"] / 1.5), hold=3),
    Alarm("kl-max-spike", "one response has a KL of {largest:.3g} nats, {times:.1f}x the mean of the update; usual is "
          "{before:.1f}x. Read the samples with the largest KL (rlhf-kl report). {to_fall}, or {limit_kl}",
          largest_kl, lambda f: f["times"] > 3 * f["before"], lambda f: f["times"] < 2 * f["before"], hold=3),
    Alarm("kl-climbing", "KL rose from {low:.3g} to {high:.3g} nats per {unit} (means of the first and the last third "
          "of {window} updates) and is still rising. {to_fall}, or {adapt}",
          rising_kl, lambda f: f["window"] > 0, lambda f: f["over"], hold=3),
    Alarm("kl-hardly-learning", _MEAN + ", under a tenth of the target {target:g}: the policy hardly changes. "
          "{to_rise}", mean_kl, lambda f: f["low"] < 0.1, lambda f: f["ratio"] > 0.12),
    Alarm("kl-below-target", _MEAN + ", {ratio:.2f}x the target {target:g}: the policy uses little of its KL budget. "
          "{to_rise}", mean_kl, lambda f: f["low"] < 0.5, lambda f: f["ratio"] > 0.55, unless="kl-hardly-learning"),
    Alarm("kl-above-target", _MEAN + ", {ratio:.1f}x the target {target:g}. {to_fall}, or {limit_kl}",
          mean_kl, lambda f: f["ratio"] > 2, lambda f: f["ratio"] < 1.8),
    Alarm("kl-drifting", _MEAN + ", {ratio:.2f}x the target {target:g}: the policy exceeds its KL budget. {to_fall}, "
          "or {adapt}", mean_kl, lambda f: f["ratio"] > 4 / 3, lambda f: f["ratio"] < 1.2, unless="kl-above-target"),
    # What the KL is spent on.
    Alarm("overoptimised-gold", "over the last {window} updates the score rose by {rise:.2g} to {score:.3g} while gold "
          "fell by {fall:.2g} to {gold:.3g}: the policy exploits the reward model. {to_restrain}, or go back to an "
          "earlier checkpoint",
          falling_gold, lambda f: f["window"] > 0, lambda f: not f["window"] and f["over"], hold=5),
    Alarm("overoptimised-perplexity", "the score rises ({low:.3g} to {high:.3g}) while held-out perplexity gets worse "
          "({before:.3g} to {perplexity:.3g}): the policy forgets its language. {to_restrain}",
          worse_perplexity, lambda f: f["rose"] and f["times"] > 1.5, lambda f: f["times"] < 1.35),
    # By the Gaussian law a tenth of the KL is a third of the score that it could have bought.
    Alarm("kl-not-bought", f"over the last {BOUGHT} updates the gain in score needs at most {{most:.0%}} of the KL "
          "({kl:.3g} nats per response); the rest brought no score: the policy follows noise. {less_noise}",
          bought, lambda f: f["known"] and f["most"] < 0.1, lambda f: f["share"] > 0.15),
    sign("cross perplexity", "its samples became unlikely under the reference (perplexity {start:.3g} to {now:.3g})",
         lambda start, now: _times(start, now) / math.log(2)),
    sign("eval/distinct_2", "responses became alike (distinct-2 {start:.2g} to {now:.2g})",
         lambda start, now: (1 - now / start) / 0.3 if start else 0.0, updates=1),
    sign("rollout/response_length", "the length of responses changed from {start:.3g} to {now:.3g} tokens",
         lambda start, now: abs(_times(start, now)) / math.log(1.5)),
    sign("rollout/score_length_corr", "the score follows length (correlation {start:.2g} to {now:.2g})",
         lambda start, now: min(abs(now) / 0.6, (abs(now) - abs(start)) / 0.3)),
    Alarm("responses-equal", f"for {STUCK} updates nearly all responses have been the same text, whatever the prompt "
          "(last: {share:.0%} different texts; samples.jsonl has examples). Use a reward whose optimum is not this "
          "text, a lower kl.target, or prompts that end where the model's training texts go on",
          alike, lambda f: f["equal"], lambda f: f["share"] > MANY),
    # What turns a run back or ends it; the first that holds decides.
    Alarm("kl-above-ceiling", _ABOVE + " in update {step}", above_ceiling("stop"), action="stop"),
    Alarm("kl-above-ceiling", _ABOVE + f" again, after {ROLLBACKS} rollbacks, each of which doubled beta",
          above_ceiling("rollback"), lambda f: f["rollbacks"] == ROLLBACKS, action="stop"),
    Alarm("kl-above-ceiling", _ABOVE, above_ceiling("rollback"), action="rollback"),
    Alarm("kl-above-ceiling", _ABOVE + f" for {PATIENCE} updates in a row, although each was shortened",
          above_ceiling("backtrack"), lambda f: f["waited"], action="stop"),
    Alarm("numbers-broken", "{reason} in update {step}, again after going back to a checkpoint",
          broken, lambda f: f["again"], action="stop"),
    Alarm("numbers-broken", "{reason}", broken, action="rollback"),
)  # fmt: skip
