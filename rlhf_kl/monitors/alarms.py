"""The alarms of a run in one table: what is measured, when an alarm begins and ends, its words, and what then happens.

What a part of a run reports when it happens has its words in `events.py`; what `doctor` judges, in `readiness.py`.
To add an alarm, add a line to `ALARMS` and to the page `GUIDE`, and a measurement where there is none yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, Literal

from rlhf_kl.control.tilt import least_kl
from rlhf_kl.events import UpdateSkipped, WeightsLost, alert
from rlhf_kl.monitors.facts import SAMPLED, START, GapSum, History, noise, rises, still_rises, thirds
from rlhf_kl.text import read_number, scorer_label

Figures = Mapping[str, Any]  # a measurement: the figures that an alarm is judged by, and that stand in its text
Action = Literal["warn", "rollback", "stop"]

CLIMBS = (12, 30, 90)  # windows of `kl-climbing`, in updates
STUCK = 5  # updates in a row: beta at its bound, or all responses or scores equal
FEW, MANY = 0.2, 0.4  # share of different responses at which `alike` begins, and at which it clears
CUT = 0.1  # share of clipped scores
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
    measure: Callable[[History], Figures | None]  # None: not known
    begins: Callable[[Figures], bool] = lambda _: True
    clears: Callable[[Figures], bool] = lambda _: False
    hold: int = 1  # updates in a row that it has to be clear before it ends
    unless: str = ""  # a worse alarm that covers it
    part: str = ""  # one of several conditions with this name
    action: Action = "warn"

    def words(self, figures: Figures) -> str:
        """The text with its figures; an alert with its name and the page of the guide that lists it."""
        text = self.text.format_map(figures)
        return alert(self.name, text) if self.action == "warn" else text


def advice(m: History) -> dict[str, Any]:
    """What to do, by the controller: a written coef is only the start where the controller changes it."""
    config, rate = m.config, m.learning_rate
    kind, batch, ceiling = config.kl.controller.kind, config.rollout.batch_size, config.kl.ceiling is not None
    constant = kind in ("fixed", "schedule")
    limit = "raise rollout.batch_size" if ceiling else "set kl.ceiling"
    exact = "Set kl.placement: rao_blackwell with kl.estimator: exact, a penalty without noise. "
    quieter = f"Lower ppo.learning_rate ({rate:.3g}, say to {rate / 3:.1g}) or raise rollout.batch_size "
    quieter += f"({batch}, say to {4 * batch}); if neither helps, the policy may be unable to learn this reward"
    rise = "Lower kl.controller.coef, raise ppo.learning_rate, or use kl.controller.kind: adaptive"
    goal = "Lower kl.target, raise ppo.learning_rate, or train for more updates. A target is a goal: where you want a "
    goal += "limit only, set kl.controller {kind: fixed, coef: 0} and a kl.ceiling"
    return {
        "unit": m.unit,
        "target": m.target,
        "to_rise": rise if constant else goal,
        "to_lower": "lower kl.controller.min_coef or kl.target",
        "to_fall": "Raise kl.controller.coef, lower ppo.learning_rate" if constant else "Lower ppo.learning_rate",
        "to_restrain": "Raise kl.controller.coef" if constant else "Lower kl.target (a goal that beta also falls for)",
        "less_noise": exact * ((config.kl.placement, config.kl.estimator) == ("reward", "k1")) + quieter,
        "limit_kl": limit,
        "adapt": limit if kind == "adaptive" else "use kl.controller.kind: adaptive",
    }


# ---- measurements


def sampled_elsewhere(m: History) -> Figures:
    sums = [(message, GapSum(*m.gaps[key])) for key, message in SAMPLED.items()]
    found = [f"{message.format(gap=s.mean)} (standard error {s.stderr:.2g})" for message, s in sums if s.shifted]
    return {"updates": m.updates, "found": " and ".join(found)}


def at_bound(side: int) -> Callable[[History], Figures | None]:
    def measure(m: History) -> Figures | None:
        if (bound := m.bounds[side]) is None or not m.has("kl/coef_next"):
            return None
        recent = [math.isclose(coef, bound, rel_tol=1e-3) for coef in m.values("kl/coef_next", STUCK)]
        return {"bound": bound, "stuck": len(recent) == STUCK and all(recent), "left": not recent[-1]}

    return measure


def usual_kl(m: History) -> Figures | None:
    before = m.values("kl")[:-1][-20:]
    if not m.has("kl") or len(before) < START:
        return None
    kl = m.now["kl"]
    jump = kl > 1.75 * max(before[-2:])  # a rise over several updates is no spike
    return {"kl": kl, "usual": median(before), "count": len(before), "jump": jump, "floor": m.floor}


def largest_kl(m: History) -> Figures | None:
    """Of a response, over the mean of all, which it follows while the KL rises: in 11 runs at most 2.2x the median."""
    pairs = [(row.get("kl/max_sequence"), row.get("kl/sequence")) for row in m.rows[-21:]]
    times = [largest / mean for largest, mean in pairs if largest and mean]
    if not m.has("kl", "kl/max_sequence", "kl/sequence") or m.now["kl"] < m.there or len(times) <= START:
        return None
    return {"largest": m.now["kl/max_sequence"], "times": times[-1], "before": median(times[:-1])}


def rising_kl(m: History) -> Figures | None:
    kls, shortest = m.values("kl"), CLIMBS[0]
    if not m.has("kl") or len(kls) < shortest:
        return None
    window = next((window for window in CLIMBS if rises(kls, window, m.floor)), 0)
    low, _, high = thirds(kls[-(window or shortest) :])
    over = not window and not rises(kls, shortest, m.floor / 1.2, growth=1.05)
    return {"low": low, "high": high, "window": window, "over": over}


def mean_kl(m: History) -> Figures | None:
    """Over the last 100 updates after the warm-up."""
    kls = [row["kl"] for row in m.rows[max(0, len(m.rows) - m.updates + m.warmup) :] if "kl" in row]
    if m.target is None or not m.has("kl") or len(kls) < START:
        return None
    ratio, rises = fmean(kls) / m.target, still_rises(m.values("kl"), RISE) and not equal_scores(m)
    return {"mean": fmean(kls), "count": len(kls), "ratio": ratio, "low": math.inf if rises else ratio}


def equal_scores(m: History) -> bool:
    """Whether no response scored better than another one to its prompt for some updates."""
    spreads, equal = m.values("objective/scores_std", STUCK), m.values("rollout/equal_groups", STUCK)
    groups = m.config.rollout.batch_size // m.config.rollout.samples_per_prompt
    none = len(spreads) == STUCK and max(spreads) <= 1e-6 * max(1.0, abs(m.now.get("objective/scores", 0.0)))
    return none or (len(equal) == STUCK and min(equal) >= groups)


def falls(name: str) -> Alarm:
    """A scorer that never trains fell, on held-out prompts, since its best evaluation, while the score rose."""
    figures = ("eval/scores", f"eval/{name}", "eval/scores_stderr", f"eval/{name}_stderr")

    def measure(m: History) -> Figures | None:
        if not m.has(*figures):
            return None
        known = [row for row in m.evaluations if {*figures} <= row.keys()]
        best = max(known, key=lambda row: row[figures[1]])
        score, value, *errors = (m.now[key] for key in figures)
        rise, fall = score - best[figures[0]], best[figures[1]] - value
        noise, error = (math.hypot(own, best[key]) for own, key in zip(errors, figures[2:], strict=True))
        # Stricter with each evaluation, one more chance of a false alarm: of 300, one run in 20 has one at most.
        sure = math.sqrt(2 * math.log(100 * (1 + m.updates // m.config.eval.updates_between)))
        found = {"since": best["step"], "rise": rise, "score": score, "fall": fall, "value": value}
        return found | {"falls": rise > SURE * noise and fall > sure * error, "over": fall < error}

    label = scorer_label(name)
    text = "since update {since:.0f} the score rose by {rise:.2g} to {score:.3g} in the evaluations, and "
    text += "the " * (label != name) + label + " fell by {fall:.2g} to {value:.3g}: the policy may exploit the reward. "
    text += "{to_restrain}, or go back to an earlier checkpoint"
    return Alarm(f"overoptimised-{name}", text, measure, lambda f: f["falls"], lambda f: f["over"])


def worse_perplexity(m: History) -> Figures | None:
    if not m.has("objective/scores", "eval/perplexity"):
        return None
    before, perplexity, low, score = m.lowest["perplexity"], m.now["eval/perplexity"], m.lowest["score"], m.score()
    rose = score - low > noise(m.values("objective/scores", 4 * START), START)
    times = perplexity / before
    return {"before": before, "perplexity": perplexity, "times": times, "low": low, "high": score, "rose": rose}


def bought(m: History) -> Figures | None:
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
    """A sign that a policy exploits its reward: a score that rises, without a true one. `size`: 1 where it begins."""

    def measure(m: History) -> Figures | None:
        found, scores = m.levels(key, updates), m.levels("objective/scores")
        if found is None or scores is None or "eval/gold" in m.first:
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


def alike(m: History) -> Figures | None:
    recent = m.values("rollout/distinct_responses", STUCK)
    equal = len(recent) == STUCK and max(recent) <= FEW
    return {"share": recent[-1], "equal": equal} if m.has("rollout/distinct_responses") else None


def clipped(m: History) -> Figures | None:
    shares = m.values("objective/scores_clipped", START)
    return {"share": fmean(shares), "count": len(shares)} if len(shares) == START else None


def collapsed(row: Mapping[str, Any]) -> bool:
    """Whether nearly all responses of an update are the same few texts."""
    distinct = read_number(row, "rollout/distinct_responses")
    return distinct is not None and distinct <= FEW


def above_ceiling(action: str) -> Callable[[History], Figures | None]:
    """A KL above the ceiling, where the config has this action for it."""

    def measure(m: History) -> Figures | None:
        kl, ceiling, limit = m.now.get("held"), m.config.kl.ceiling, m.config.kl.ceiling_value
        if ceiling is None or ceiling.action != action or kl is None or limit is None or kl <= limit:
            return None
        recent = [row.get("held", 0.0) for row in m.rows[-PATIENCE:]]
        # While the policy is frozen no update is shortened. A KL that falls is given time.
        waited = m.updates - m.config.ppo.value_warmup >= PATIENCE and min(recent) > limit and kl >= 0.9 * recent[0]
        figures = {"kl": kl, "kl_unit": m.config.kl.unit, "limit": limit, "step": m.row["step"]}
        return figures | {"rollbacks": m.rollbacks, "waited": waited}

    return measure


def broken(m: History) -> Figures | None:
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
    # And `falls`, of each scorer that never trains.
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
    Alarm("scores-clipped", "reward.clip cuts off {share:.0%} of the scores of the last {count} updates, so the policy "
          "cannot tell these responses apart: set a larger reward.clip",
          clipped, lambda f: f["share"] > CUT, lambda f: f["share"] < CUT / 2),
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
