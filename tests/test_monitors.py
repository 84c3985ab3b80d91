"""Each alarm on a list of rows: which begin, when, and in which words; and what has to be done."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlhf_kl
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.events import (
    GUIDE,
    Event,
    LearningRateAtBound,
    LearningRateChanged,
    ScorerFailed,
    UpdateSkipped,
    WeightsLost,
    worded,
)
from rlhf_kl.monitors import Decision, Monitors
from rlhf_kl.monitors.alarms import ALARMS, FEW, collapsed, falls
from rlhf_kl.monitors.facts import SAMPLED, GapSum
from tests.made import numbers

Row = dict[str, Any]
MakeRow = Callable[[int], Row]
Level = Callable[[int], float] | float
SIGMA, BATCH, TOKENS = 2.0, 64, 30.0  # spread of the reference's scores; responses; tokens of each
# The tilt of Gaussian scores, where the gain is sigma sqrt(2 KL), as far as samples might show it: 4.5 nats.
CURVE = [{"coef": SIGMA / g, "kl": g**2 / 2, "gain": SIGMA * g} for g in (3 * 0.85**i for i in range(24, -1, -1))]
SCORES = SimpleNamespace(tilt_curve=lambda: CURVE, mean=1.0, mean_stderr=0.05, spread=SIGMA)


def monitors(updates: int = 60, coef: float = 0.1, scores: Any = None, start: bool = True, **sections: Any) -> Monitors:
    """Of a run with a target of 0.1 per token whose beta stays between 0.01 and 1."""
    kl = {"target": 0.1, "controller": {"kind": "adaptive"}, "ceiling": None} | sections.pop("kl", {})
    batch = sections.pop("batch", BATCH)
    ppo = {"minibatch_size": batch, "total_episodes": batch * updates} | sections.pop("ppo", {})
    config = TrainConfig.model_validate({"kl": kl, "ppo": ppo, "rollout": {"batch_size": batch}} | sections)
    control = SimpleNamespace(
        adjusts=config.kl.controller.kind not in ("fixed", "schedule"), min_coef=0.01, max_coef=1.0
    )
    return Monitors(config, coef=coef, control=control, scores=scores, learning_rate=1e-3, from_reference=start)


def texts(m: Monitors, make_row: MakeRow, updates: int = 60, first: int = 1) -> list[tuple[int, str]]:
    """(update, alert)."""
    found = [
        (step, alert) for step in range(first, first + updates) for alert in m({"step": step, **make_row(step)})[0]
    ]
    assert all("\n" not in alert and alert.partition(": ")[2] for _, alert in found)
    return found


def names(m: Monitors, make_row: MakeRow, updates: int = 60, first: int = 1) -> list[tuple[int, str]]:
    return [(step, alert.partition(":")[0]) for step, alert in texts(m, make_row, updates, first)]


def kl(level: Level, noise: float = 0.0, seed: int = 0) -> MakeRow:
    rng = random.Random(seed)
    return lambda step: {"kl/token": (level if isinstance(level, float) else level(step)) * (1 + rng.gauss(0, noise))}


def watched(score: Callable[[int], float], value: Callable[[int], float], name: str = "gold", seed: int = 0) -> MakeRow:
    """What an evaluation, every ten updates, finds of the score and of a scorer that never trains."""
    rng = random.Random(seed)

    def row(step: int) -> Row:
        if step % 10 != 1:
            return {}
        figures = {"eval/scores": score(step) + rng.gauss(0, 0.1), f"eval/{name}": value(step) + rng.gauss(0, 0.1)}
        return {"eval/perplexity": 3.0} | figures | {f"{key}_stderr": 0.1 for key in figures}

    return row


def peaked(step: int) -> float:
    return -0.1 + 0.05 * step if step < 15 else 0.65 - 0.1 * (step - 15)


def perplexity(step: int, score: float) -> Row:
    return {"objective/scores": score} | ({"eval/perplexity": 3.6 + 0.1 * step} if step % 10 == 1 else {})


def learning(**changes: Callable[[int], Any]) -> MakeRow:
    """A run that learns and stays itself, but for these figures."""
    return lambda step: (
        {
            "objective/scores": 0.1 * step + (0.02 if step % 2 else 0.0),
            "policy/entropy": 1.2,
            "kl/token": 0.1,
            "rollout/response_length": 25.0 + step % 3,
            "rollout/score_length_corr": 0.1,
            "eval/distinct_2": 0.25,
        }
        | {key: value(step) for key, value in changes.items()}
    )


def gap(key: str, size: Callable[[int], float]) -> MakeRow:
    """Updates of 1000 tokens that have a spread of 1 nat each."""
    return lambda step: {key: size(step), f"{key}_stderr": 1 / math.sqrt(1000), "rollout/tokens": 1000}


def alike(*shares: float | None) -> MakeRow:
    return lambda step: {"rollout/distinct_responses": shares[(step - 1) % len(shares)]}


NO_TARGET = {"coef": 0.0, "kl": {"controller": {"kind": "fixed", "coef": 0}}}
FALLS, WORSE, SIGN = (f"overoptimised-{measure}" for measure in ("gold", "perplexity", "signs"))
RISES, LENGTH = lambda step: 0.3 + 0.3 * step, "rollout/response_length"

TABLE: dict[str, tuple[dict[str, Any], MakeRow, list[tuple[int, str]]]] = {
    # The mean KL, after a warm-up of ten updates and over at least five.
    "far above the target": ({}, kl(0.25), [(15, "kl-above-target")]),
    "above the target": ({}, kl(0.15), [(15, "kl-drifting")]),
    "below the target": ({}, kl(0.04), [(15, "kl-below-target")]),
    "nearly no KL": ({}, kl(0.005), [(15, "kl-hardly-learning")]),
    "on the target": ({}, kl(0.1), []),
    "a policy that is frozen at first": (
        {"ppo": {"value_warmup": 20}},
        lambda step: {"kl/token": 0.0 if step <= 20 else 0.1},
        [],
    ),
    "nearly no KL after that": (
        {"ppo": {"value_warmup": 20}},
        lambda step: {"kl/token": 0.0 if step <= 20 else 0.005},
        [(31, "kl-hardly-learning")],
    ),
    "a target per response": (
        {"kl": {"target": 3.0, "unit": "sequence"}},
        lambda _: {"kl/token": 0.1, "kl/sequence": 9.0},
        [(15, "kl-above-target")],
    ),
    "no target, a steady KL": (NO_TARGET, kl(5.0), []),
    # Single updates, and a rise.
    "two spikes": ({}, kl(lambda step: 0.5 if step in {30, 31, 50} else 0.08), [(30, "kl-spike"), (50, "kl-spike")]),
    "a jump under the target": ({}, kl(lambda step: 0.07 if step % 50 == 30 else 0.06), []),
    "one response leaves": (
        {},
        lambda step: {"kl/token": 0.1, "kl/sequence": 3.0, "kl/max_sequence": 30.0 if step in {30, 31} else 6.0},
        [(30, "kl-max-spike")],
    ),
    "one response leaves, and all with it": (
        {},
        lambda step: {"kl/token": 0.01, "kl/sequence": 0.3 * step, "kl/max_sequence": 3.0 * step},
        [(15, "kl-hardly-learning")],
    ),
    "a short run on its way": ({"updates": 10}, kl(lambda step: 0.0004 * step**2), []),
    "low at the end of its way": ({"updates": 30}, kl(lambda step: 0.004 * min(step, 10)), [(19, "kl-below-target")]),
    "a climb": (NO_TARGET, kl(lambda step: 0.004 * step**1.6), [(12, "kl-climbing")]),
    "a slow climb": (
        {"updates": 120},
        kl(lambda step: 0.1 * 1.012**step),
        [(28, "kl-drifting"), (90, "kl-climbing"), (91, "kl-above-target")],
    ),
    # Beta at its bounds.
    "beta touches a bound": ({}, lambda step: {"kl/coef_next": 1.0 if step % 4 else 0.9}, []),
    "beta stuck": (
        {},
        lambda step: {"kl/coef_next": 1.0 if step < 20 else 0.01},
        [(5, "beta-at-max"), (24, "beta-at-min")],
    ),
    "beta leaves its bound for a moment, again and again": (
        {},
        lambda step: {"kl/coef_next": 0.9 if step in range(6, 26, 2) else 1.0},
        [(5, "beta-at-max")],
    ),
    "a constant beta": ({"kl": {"controller": {"kind": "fixed", "coef": 1.0}}}, lambda _: {"kl/coef_next": 1.0}, []),
    # What is bought for the KL.
    "gold falls while the score rises": ({}, watched(RISES, peaked), [(31, FALLS)]),
    "gold falls with the score": ({}, watched(lambda step: 9 - 0.3 * step, peaked), []),
    "gold falls by less than its noise": ({}, watched(RISES, lambda step: -0.005 * step), []),
    "gold falls, rises and falls": (
        {"updates": 160},
        watched(RISES, lambda step: abs(step - 60) / 20 if step < 120 else 0.0),
        [(21, FALLS), (121, FALLS)],
    ),
    "another scorer falls": (
        {"eval": {"scorers": {"polite": {"kind": "mine.py:polite"}}}},
        watched(RISES, peaked, "polite"),
        [(31, "overoptimised-polite")],
    ),
    "a scorer that the config does not name": ({}, watched(RISES, peaked, "polite"), []),
    "perplexity worse, score higher": ({}, lambda step: perplexity(step, 0.2 * step), [(21, WORSE)]),
    "perplexity worse, same score": ({}, lambda step: perplexity(step, 1.0), []),
    # One sign each, while the score rises.
    "a run that stays itself": ({}, learning(), []),
    "unlikely samples": ({}, learning(**{"policy/entropy": lambda step: 1.1 + 0.1 * step}), [(12, SIGN)]),
    "alike": ({}, learning(**{"eval/distinct_2": lambda s: 0.25 if s < 10 else 0.0}), [(10, SIGN)]),
    "longer": ({}, learning(**{LENGTH: lambda s: 20.0 + 2 * s}), [(12, SIGN)]),
    "shorter": ({}, learning(**{LENGTH: lambda s: 40 / (1 + s / 10)}), [(12, SIGN)]),
    "length counts": ({}, learning(**{"rollout/score_length_corr": lambda s: min(0.9, 0.05 * s)}), [(14, SIGN)]),
    "a sign comes again": (
        {},
        learning(**{LENGTH: lambda s: 60.0 if s in (*range(8, 15), *range(22, 30)) else 25.0}),
        [(9, SIGN), (23, SIGN)],
    ),
    "the score stays": ({}, learning(**{"objective/scores": lambda _: 1.0, "policy/entropy": lambda s: 0.1 * s}), []),
    "gold speaks for itself": (
        {},
        learning(**{"eval/gold": lambda _: 0.0, "policy/entropy": lambda s: 0.1 * s}),
        [],
    ),
    # Responses of one text.
    "equal from the start": ({}, alike(0.016), [(5, "responses-equal")]),
    "equal for four updates": ({}, alike(*[0.016] * 4, 1.0), []),
    "equal, hovering": ({}, alike(*[0.016] * 5, 0.3), [(5, "responses-equal")]),
    "equal twice": ({"updates": 11}, alike(*[0.016] * 5, 1.0), [(5, "responses-equal"), (11, "responses-equal")]),
    # Scores that the clip makes equal.
    "clipped": ({}, lambda s: {"objective/scores_clipped": min(0.5, 0.019 * s)}, [(8, "scores-clipped")]),
    "hardly clipped": ({}, lambda _: {"objective/scores_clipped": 0.05}, []),
    # Tokens from another distribution; 1.6 standard errors in each update.
    "log-probs shifted": ({}, gap("policy/logprob_gap", lambda _: 0.05), [(13, "sampler-mismatch")]),
    "log-ratios shifted": ({}, gap("kl/k1_gap", lambda _: -0.05), [(13, "sampler-mismatch")]),
    "both ways": ({}, gap("kl/k1_gap", lambda step: 0.05 * (-1) ** step), []),
}


@pytest.mark.parametrize("case", TABLE)
def test_alarms_of_rows(case: str) -> None:
    settings, make_row, expected = TABLE[case]
    assert names(monitors(**settings), make_row, settings.get("updates", 60)) == expected


def test_every_name_of_the_table_is_reached() -> None:
    """Events and decisions have tests of their own."""
    told = {name for _, _, expected in TABLE.values() for _, name in expected} | {"kl-not-bought"}
    assert told == {alarm.name for alarm in (*ALARMS, falls("gold"), falls("polite")) if alarm.action == "warn"}


@pytest.mark.parametrize("seed", range(5))
def test_a_good_run_is_silent(seed: int) -> None:
    rng = random.Random(seed)

    def row(step: int) -> Row:
        grown = 1 - math.exp(-step / 5)
        return (
            {
                "kl/token": 0.1 * (1 - math.exp(-step / 3)) * (1 + rng.gauss(0, 0.12)),
                "objective/scores": 0.3 + 5 * grown + rng.gauss(0, 0.2),
                "kl/coef": 0.1,
            }
            | evaluated(step)
            | ({"eval/perplexity": 3.6 + 1.3 * grown} if step % 10 == 1 else {})
        )

    evaluated = watched(lambda step: 5.3 - 5 * math.exp(-step / 5), lambda step: 1.1 - math.exp(-step / 5), seed=seed)
    assert texts(monitors(500), row, 500) == []


@pytest.mark.slow
def test_noise_of_a_scorer_is_no_fall() -> None:
    """In runs of 3000 updates whose score rises all the time: 20 evaluations in each window of 200."""
    for seed in range(10):
        assert texts(monitors(), watched(lambda step: 3 + 0.02 * step, lambda _: 1.0, seed=seed), 3000) == []


@pytest.mark.parametrize("kind", ["fixed", "schedule", "pid", "adaptive"])
@pytest.mark.parametrize("ceiling", [False, True])
def test_advice_can_be_followed_with_the_controller_in_use(kind: str, ceiling: bool) -> None:
    section = {"controller": {"kind": kind, "coef": 0.1}, "ceiling": {"value": 9.0} if ceiling else None}
    constant = kind in ("fixed", "schedule")
    for level in (0.04, 0.15, 0.25):
        [(_, text)] = texts(monitors(kl=section), kl(level))
        assert ("kl.controller.coef" in text) == constant
        assert ("set kl.ceiling" in text) <= (not ceiling)
        assert ("use kl.controller.kind: adaptive" in text) <= (kind != "adaptive")
    assert numbers(text)[:4] == [0.25, 5, 2.5, 0.1]  # the mean KL, of 5 updates, over the target


@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_equal_scores_are_told_in_place_of_a_higher_learning_rate(advantage: str) -> None:
    """`rloo` compares responses to one prompt, where scores that differ only between prompts are equal."""
    size = 4 if advantage == "rloo" else 1
    sections = {"ppo": {"advantage": advantage}, "rollout": {"batch_size": BATCH, "samples_per_prompt": size}}
    events = [LearningRateAtBound("x", 10.0)]

    def alerts(std: float, groups: int) -> str:
        m, row = monitors(**sections), {"objective/scores": 1.0, "objective/scores_std": std, "kl/coef_next": 0.01}
        row |= {"rollout/equal_groups": groups} if size > 1 else {}
        told = [m({"step": step, "kl/token": 0.003 * step, **row}, events)[0] for step in range(1, 17)]
        return "\n".join(alert for alerts in told[4:] for alert in alerts)

    equal = alerts(1.0 if size > 1 else 0.0, BATCH // size)
    names = {line.partition(":")[0] for line in equal.splitlines()}
    assert names == {"beta-at-min", "kl-below-target", "learning-rate-at-bound"}
    assert equal.count("samples.jsonl") == 1
    assert not re.search("(raise|lower) ", equal, re.IGNORECASE)
    assert "raise ppo.learning_rate" in alerts(1.0, BATCH // size - 1)


def test_again_only_after_it_has_cleared_with_a_margin() -> None:
    m = monitors(18)
    hover = names(m, kl(lambda step: 0.21 if (step // 60) % 2 else 0.19), 400)
    assert [name for _, name in hover].count("kl-above-target") <= 1
    assert names(m, kl(0.1), 150, first=401) == []
    assert "kl-above-target" in [name for _, name in names(m, kl(0.3), 150, first=551)]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "n/a", True])
def test_missing_figures_are_passed_over(missing: object) -> None:
    keys = ["kl/token", "kl/coef_next", "objective/scores", "eval/perplexity"]
    keys += ["eval/scores", "eval/scores_stderr", "eval/gold", "eval/gold_stderr"]
    keys += [*SAMPLED, *(f"{key}_stderr" for key in SAMPLED), "rollout/tokens", "rollout/distinct_responses"]
    m = monitors(scores=SCORES)
    assert texts(m, lambda _: dict.fromkeys([*keys, *learning()(1)], missing), 40) == []
    json.dumps(m.state_dict(), allow_nan=False)
    assert not collapsed({"rollout/distinct_responses": missing})
    assert collapsed({"rollout/distinct_responses": FEW})


def test_the_perplexity_of_a_sign_is_that_of_the_cross_entropy() -> None:
    """One state, two tokens: E_pi[-log ref] by hand. Two of the last five updates are of the new policy."""
    pi, ref = (0.9, 0.1), (0.2, 0.8)
    cross, entropy = (-sum(p * math.log(q) for p, q in zip(pi, other, strict=True)) for other in (ref, pi))
    changes = {"kl/token": cross - entropy, "policy/entropy": entropy}
    found = texts(monitors(), learning(**{k: lambda s, v=v: v if s >= 10 else 0.0 for k, v in changes.items()}))
    [text] = [text for _, text in found if "perplexity" in text]
    assert f"(perplexity 1 to {(3 + 2 * math.exp(cross)) / 5:.3g})" in text


def bought(share: Level, seed: int = 0, level: Level = 3.0) -> MakeRow:
    """Updates whose score is worth `share` of the KL by the Gaussian law, with the noise of batches of 64."""
    rng = random.Random(seed)

    def row(step: int) -> Row:
        nats, part = (x if isinstance(x, float) else x(step) for x in (level, share))
        return {
            "kl/sequence": nats * (1 + rng.gauss(0, 0.1)),
            "kl/token": nats / TOKENS * (1 + rng.gauss(0, 0.1)),
            "objective/scores_shaped": 1 + SIGMA * math.sqrt(2 * part * nats) + rng.gauss(0, SIGMA / math.sqrt(BATCH)),
        }

    return row


def not_bought(make_row: MakeRow, updates: int = 40, **settings: Any) -> list[int]:
    """Updates of the alert."""
    found = names(monitors(updates, scores=SCORES, **settings), make_row, updates)
    return [step for step, name in found if name == "kl-not-bought"]


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_told_from_score(seed: int) -> None:
    """The KL is there after six updates; a score comes later, first a tenth of what the KL could buy."""
    grows = lambda step: 3.0 * min(1.0, step / 12)  # noqa: E731
    assert not_bought(bought(lambda step: min(0.7, 0.16 + 0.01 * step), seed, grows), 100) == []
    for share in (0.0, 0.04):
        [step] = not_bought(bought(share, seed, grows), 100)
        assert 20 <= step <= 32  # a score that rises is waited for
    assert not_bought(bought(lambda step: 0.0015 * step**1.3, seed, grows), 60) == []  # a third of it at the end


def test_when_nothing_is_said_of_the_kl() -> None:
    rows = bought(0.0)
    assert len(not_bought(rows)) == 1
    assert not_bought(bought(0.0, level=1.2)) == []  # it may still rise
    assert not_bought(rows, kl={"target": 9.0, "unit": "sequence"}) == []
    assert not_bought(bought(0.0, level=1.0), **NO_TARGET) == []  # 0.03 nats per token
    assert len(not_bought(bought(0.0, level=6.0), **NO_TARGET)) == 1
    assert not_bought(bought(0.03), batch=2) == []  # the same score may be luck
    assert not_bought(rows, start=False) == []
    gain = {"objective/scores_shaped": 1 + 3.5 * SIGMA}
    assert not_bought(lambda step: bought(0.0, level=60.0)(step) | gain) == []  # beyond the samples
    lost = {"kl/sequence": math.nan, "objective/scores_shaped": math.nan}
    assert len(not_bought(lambda step: rows(step) | (lost if step % 2 else {}))) == 1
    waves = {True: 0.02, False: 0.5}
    assert len(not_bought(bought(lambda step: waves[step // 30 != 1]), 90)) == 2
    waves[False] = 0.11  # above the threshold, not by the margin
    assert len(not_bought(bought(lambda step: waves[step // 30 != 1]), 90)) == 1


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_noisy_penalty_is_mended_first(placement: str) -> None:
    section = {"placement": placement, "estimator": "k1" if placement == "reward" else "k2"}
    [text] = [text for _, text in texts(monitors(scores=SCORES, kl=section), bought(0.0)) if "not-bought" in text]
    assert ("rao_blackwell with kl.estimator: exact, a penalty without noise. Lower ppo" in text) == (
        placement == "reward"
    )
    assert "Lower ppo.learning_rate (0.001, say to 0.0003) or raise rollout.batch_size (64, say to 256)" in text


def test_the_guide_lists_every_alert() -> None:
    page = (Path(rlhf_kl.__file__).parent / "guide" / f"{GUIDE}.md").read_text()
    told = {each.name for each in ALARMS} | {kind.name for kind in Event.__subclasses__() if not kind.is_note}
    assert told <= set(re.findall(r"`([a-z-]+)`", page))


def test_the_words_of_an_event_have_places_for_its_fields() -> None:
    for kind in Event.__subclasses__():
        places = {field for _, field, _, _ in Formatter().parse(kind.words) if field}
        assert places == {field.name for field in fields(kind)} - {"broken"}  # type: ignore[arg-type]


def test_a_changed_learning_rate_asks_for_nothing() -> None:
    events = [LearningRateChanged("so it was", 0.5)]
    assert monitors()({"step": 1}, events) == ([], None)
    assert worded(events) == []
    (line,) = worded(events, notes=True)
    assert " 0.5x " in line


def test_events_are_told_each_time_and_a_failing_scorer_where_it_begins_to_fail() -> None:
    m, rate = monitors(), LearningRateAtBound("so it was", 0.01, "lower")
    one, two = (ScorerFailed(name, "{no} route") for name in ("one", "two"))
    evaluated = {"step": 1, "eval/perplexity": 3.0}
    told = [m({"step": 1}, [rate])[0], m({"step": 1}, [rate])[0], m(evaluated, [one])[0], m({"step": 1}, [])[0]]
    told += [m(evaluated, events)[0] for events in ([one, two], [two], [one, rate, one])]
    failures = [
        f"scorer-failed: eval.scorers.{each}: {{no}} route: left out (rlhf-kl guide {GUIDE})" for each in ("one", "two")
    ]
    change = told[0][0]
    assert change.startswith("learning-rate-at-bound: so it was; the factor is at its bound 0.01: lower ppo.learning_")
    assert told == [[change], [change], [failures[0]], [], [failures[1]], [], [change, failures[0]]]


def test_two_events_of_one_kind_are_both_told_and_the_same_one_once() -> None:
    one, other = UpdateSkipped("a gradient was not finite"), UpdateSkipped("the loss was not finite")
    told = worded([other, one, WeightsLost(), one])
    assert [line.split(": ")[:2] for line in told[:2]] == [["update-skipped", each.reason] for each in (other, one)]
    assert len(told) == 3


SKIPPED = [UpdateSkipped("a score was not finite")]
UNSCORED = [UpdateSkipped("the reward returned None for all responses", broken=False)]
LOST = [WeightsLost()]


def decisions(m: Monitors, rows: list[tuple[Row, Sequence[Event]]]) -> list[tuple[int, str, str]]:
    """(update, action, reason); every rollback is done."""
    found = []
    for step, (row, events) in enumerate(rows, 1):
        _, decision = m({"step": step, **row}, events)
        if decision is not None:
            found.append((step, decision.action, decision.reason))
            if decision.action == "rollback":
                assert m.rolled_back(decision, step, 0.2).startswith(f"rolled-back: {decision.reason}; back to ")
    return found


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([SKIPPED] * 2 + [[]] + [SKIPPED] * 2, []),
        ([[], *[SKIPPED] * 3, [], *[SKIPPED] * 3], [(4, "rollback"), (8, "rollback")]),
        ([SKIPPED] * 6, [(3, "rollback"), (6, "stop")]),
        ([UNSCORED] * 9, []),  # nothing is broken: going back would not help
        ([SKIPPED, SKIPPED, UNSCORED, SKIPPED], [(4, "rollback")]),
        ([LOST, [], LOST, LOST], [(1, "rollback"), (3, "rollback"), (4, "stop")]),
    ],
)
def test_numbers_that_are_not_finite_turn_a_run_back_once(updates: list[Any], expected: list[tuple[int, str]]) -> None:
    found = decisions(monitors(), [({}, each) for each in updates])
    assert [each[:2] for each in found] == expected
    assert all("again after going back" in reason for _, action, reason in found if action == "stop")


def ceiling(action: str, levels: list[float], **ppo: Any) -> list[tuple[int, str, str]]:
    section = {"ceiling": {"value": 0.2, "action": action}}
    return decisions(monitors(kl=section, ppo=ppo), [({"kl/token": level}, []) for level in levels])


def test_a_kl_above_the_ceiling() -> None:
    reason = "KL 0.3 nats per token is above the ceiling 0.2 in update 3"
    assert ceiling("stop", [0.2, 0.1, 0.3])[0] == (3, "stop", reason)
    per_response = {"unit": "sequence", "target": 2.0, "ceiling": {"value": 3.0, "action": "stop"}}
    free = monitors(coef=0.0, kl=per_response | NO_TARGET["kl"])  # without a penalty its KL is told per token
    [(_, action, reason)] = decisions(free, [({"kl/token": 0.1, "kl/sequence": 4.0}, [])])
    assert (action, reason) == ("stop", "KL 4 nats per sequence is above the ceiling 3 in update 1")
    found = ceiling("rollback", [0.3, 0.1] * 6)
    assert [each[:2] for each in found] == [*((step, "rollback") for step in (1, 3, 5, 7, 9)), (11, "stop")]
    assert found[-1][2].endswith("again, after 5 rollbacks, each of which doubled beta")
    [(step, action, reason), *_] = ceiling("backtrack", [*[0.3] * 9, 0.1, *[0.3] * 12])
    assert (step, action) == (20, "stop")
    assert reason.endswith("for 10 updates in a row, although each was shortened")
    assert ceiling("backtrack", [0.9 * 0.98**step for step in range(30)]) == []  # it falls
    assert ceiling("backtrack", [0.3] * 20, value_warmup=11) == []  # the policy was frozen


def test_the_best_update_and_the_best_checkpoint() -> None:
    m, other = monitors(checkpoint={"best": "objective/scores"}), monitors(checkpoint={"best": "eval/perplexity"})
    for perplexity, better in ((5.0, True), (6.0, False), (4.0, True)):
        best = other.better_checkpoint({"step": 9, "kl/error": 0.0, "eval/perplexity": perplexity})
        assert bool(best) == better
        other.best_checkpoint = best or other.best_checkpoint
    for step, (score, error) in enumerate([(1.0, 0.0), (3.0, 0.2), (2.0, 0.0), (9.0, 0.5), (math.nan, 0.0)], 1):
        row = {"step": step, "kl/error": error, "objective/scores": score, "objective/scores_shaped": score}
        m(row)
        m.best_checkpoint = m.better_checkpoint(row) or m.best_checkpoint
    assert m.best is not None
    assert m.best["step"] == 2  # update 4 is far above the target
    assert m.best_checkpoint == {"step": 1, "metric": "objective/scores", "value": 3.0}


@pytest.mark.parametrize("cut", [3, 17, 26, 45, 77])
def test_resumed_monitors_say_what_unbroken_ones_say(cut: int) -> None:
    makers = [
        kl(lambda step: 0.004 * step**1.6),
        watched(RISES, peaked),
        gap("kl/k1_gap", lambda _: 0.05),
        lambda step: {"kl/coef_next": min(1.0, 0.05 * step), "kl/sequence": 3.0, "objective/scores_shaped": 1.0},
        lambda step: perplexity(step, 0.2 * step) | {"kl/error": 0.1},
        alike(*[0.01] * 7, 0.9),
    ]
    rows = [{"step": step} | {k: v for make in makers for k, v in make(step).items()} for step in range(1, 90)]
    events = [SKIPPED if step % 7 < 4 else [] for step in range(1, 90)]
    settings: dict[str, Any] = {"kl": {"ceiling": {"value": 0.5}}, "scores": SCORES}
    whole, first, second = (monitors(**settings) for _ in range(3))
    for m in (whole, first):
        m.rolled_back(Decision("rollback", "weights-lost", ""), 0, 0.1)
    expected = [whole(row, each) for row, each in zip(rows, events, strict=True)]
    assert len({name for alerts, _ in expected for name in alerts}) >= 8
    assert len({decision.name for _, decision in expected if decision}) == 2
    whole.rollbacks = first.rollbacks = 2
    whole.best_checkpoint = first.best_checkpoint = {"step": 2, "metric": "objective/scores", "value": 1.0}
    found = [first(row, each) for row, each in zip(rows[:cut], events[:cut], strict=True)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for name in ("rollbacks", "turned_back", "best_checkpoint"):
        assert getattr(second, name) == getattr(first, name)
    found += [second(row, each) for row, each in zip(rows[cut:], events[cut:], strict=True)]
    assert found == expected
    assert vars(second) == vars(whole)


def test_responses_to_one_prompt_are_one_draw() -> None:
    """Of a score's standard error: four to a prompt make it twice as large."""
    scores = SimpleNamespace(tilt_curve=list, spread=1.0, mean_stderr=0.0)
    alone = monitors(scores=scores)
    groups = monitors(scores=scores, ppo={"advantage": "rloo"}, rollout={"batch_size": BATCH, "samples_per_prompt": 4})
    assert groups.score_stderr(8) == pytest.approx(2 * alone.score_stderr(8))


def test_the_state_does_not_grow_with_the_run() -> None:
    m, row = monitors(), {"kl/token": 0.1, "objective/scores": 1.0, "eval/perplexity": 3.0, "eval/gold": 1.0}
    texts(m, lambda _: row, 300)
    size = len(json.dumps(m.state_dict()))
    texts(m, lambda _: row, 300)
    assert len(json.dumps(m.state_dict())) == size


KEY = "policy/logprob_gap"


def sums(total: float, squares: float, variance: float, tokens: int) -> Row:
    """A row of an update, from sums over its tokens."""
    error = math.sqrt((squares + 2 * variance) / 3) / tokens
    return {KEY: total / tokens, f"{KEY}_stderr": error, "rollout/tokens": tokens}


def test_sums_over_the_updates_are_exact() -> None:
    total = GapSum().add(sums(3.0, 30.0, 15.0, 10), KEY).add(sums(-5.0, 6.0, 12.0, 30), KEY)
    assert total == pytest.approx((-2.0, 20.0 + 10.0, 40.0))
    assert (total.mean, total.stderr) == (pytest.approx(-0.05), pytest.approx(math.sqrt(30) / 40))


DISTRIBUTIONS = {
    "two words": np.array([0.5, 0.5]),
    "all but certain": np.array([0.999, 0.001]),
    "hardly ever": np.array([1 - 1e-5, 1e-5]),
    "any": np.random.default_rng(0).dirichlet(np.full(50, 0.1)),
}


@pytest.mark.parametrize(("name", "tokens"), list(zip(DISTRIBUTIONS, [3, 200, 3, 200], strict=True)))
def test_honest_sampling_raises_no_alarm_at_any_time(name: str, tokens: int) -> None:
    """500 runs of 300 updates; the tokens' log-probs may be as skewed as they like."""
    p = np.sort(DISTRIBUTIONS[name])[::-1]
    runs, updates = 500, 300
    away = np.log(p) - (p * np.log(p)).sum()
    rng = np.random.default_rng(1)
    counts = rng.multinomial(tokens, p, size=(runs, updates))
    totals = counts @ away
    squares = counts @ np.square(away)
    variance = tokens * (p * away**2).sum()
    alarms = 0
    for run in range(runs):
        total, seen = GapSum(), False
        for one, square in zip(totals[run], squares[run], strict=True):
            total = total.add(sums(one, square, variance, tokens), KEY)
            seen = seen or total.shifted
        alarms += seen
    assert alarms <= 1  # at most 0.25 are expected


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1, 1.5])
def test_another_temperature_is_seen_within_a_few_thousand_tokens(temperature: float) -> None:
    p = 1 / np.arange(1, 101)
    p /= p.sum()
    q = p ** (1 / temperature)
    q /= q.sum()
    away = np.log(p) - (p * np.log(p)).sum()
    rng, total, seen = np.random.default_rng(0), GapSum(), False
    for _ in range(20):
        counts = rng.multinomial(500, q)
        total = total.add(sums(counts @ away, counts @ away**2, 500 * (p * away**2).sum(), 500), KEY)
        seen = seen or total.shifted
    assert seen
    assert total.mean == pytest.approx((q * away).sum(), abs=4 * total.stderr)
    assert (total.mean > 0) == (temperature < 1)


def test_rounding_and_what_bfloat16_does_are_no_alarm() -> None:
    """Between two passes over one text; and a shift of half a percent of a token's spread."""
    total, coarse = GapSum(), GapSum()
    for _ in range(10_000):
        total = total.add(sums(1e-6 * 2000, 1e-12 * 2000, 1e-14 * 2000, 2000), KEY)
        coarse = coarse.add(sums(0.005 * 2000, 2000, 2000, 2000), KEY)
    assert not total.shifted
    assert not coarse.shifted
    assert coarse.mean / coarse.stderr > 20
