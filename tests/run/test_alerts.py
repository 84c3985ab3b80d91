from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.run.alerts import KLAlerts

Row = dict[str, Any]


def _run(alerts: KLAlerts, make_row: Callable[[int], Row], updates: int, first: int = 1) -> list[tuple[int, str]]:
    """(update, slug) of every alert."""
    raised = []
    for step in range(first, first + updates):
        for alert in alerts({"step": step, **make_row(step)}):
            slug, _, words = alert.partition(": ")
            assert words
            assert "\n" not in alert
            raised.append((step, slug))
    return raised


def _slugs(raised: list[tuple[int, str]]) -> list[str]:
    return [slug for _, slug in raised]


def _noisy(level: float, seed: int = 0) -> Callable[[int], Row]:
    rng = random.Random(seed)
    return lambda _: {"kl/token": level * (1 + rng.gauss(0, 0.12))}


@pytest.mark.parametrize("seed", range(5))
def test_a_good_run_is_silent(seed: int) -> None:
    rng = random.Random(seed)

    def row(step: int) -> Row:
        grown = 1 - math.exp(-step / 5)
        figures: Row = {
            "kl/token": 0.1 * (1 - math.exp(-step / 3)) * (1 + rng.gauss(0, 0.12)),
            "objective/scores": 0.3 + 5 * grown + rng.gauss(0, 0.2),
            "objective/gold": -0.1 + 1.2 * grown + rng.gauss(0, 0.15),
            "kl/coef": 0.1,
        }
        if step % 10 == 1:
            figures["eval/perplexity"] = 3.6 + 1.3 * grown
        return figures

    assert _run(KLAlerts(0.1, total_updates=500, min_coef=1e-3, max_coef=10.0), row, 500) == []


@pytest.mark.parametrize(
    ("level", "slug"),
    [
        (0.25, "kl-above-target"),
        (0.15, "kl-drifting"),
        (0.04, "kl-below-target"),
        (0.005, "kl-hardly-learning"),
    ],
)
def test_the_mean_against_the_target_is_raised_once(level: float, slug: str) -> None:
    raised = _run(KLAlerts(0.1, total_updates=60), _noisy(level), 60)
    assert _slugs(raised) == [slug]
    assert raised[0][0] > 10  # not during the warm-up


@pytest.mark.parametrize("row", [_noisy(0.04), _noisy(0.15), lambda step: {"kl/token": 0.1 * 1.012**step}])
def test_advice_can_be_followed_with_the_controller_in_use(row: Callable[[int], Row]) -> None:
    for kind in (None, "fixed", "adaptive"):
        alerts = KLAlerts(0.1, kind=kind, total_updates=60)
        texts = [text for step in range(1, 61) for text in alerts(row(step))]
        assert texts
        assert all(("kl.controller.coef, " in text) == (kind != "adaptive") for text in texts)
        assert any("use kl.controller.kind: adaptive" in text for text in texts) == (kind != "adaptive")


def test_an_alert_holds_its_numbers() -> None:
    alerts = KLAlerts(0.1, total_updates=60)
    texts = [text for _ in range(60) for text in alerts({"kl/token": 0.25})]
    assert len(texts) == 1
    assert "0.25 nats per token" in texts[0]
    assert "2.5x the target 0.1" in texts[0]


def test_the_unit_chooses_the_row_key() -> None:
    row = {"kl/token": 0.1, "kl/sequence": 9.0}
    assert _slugs(_run(KLAlerts(3.0, unit="sequence"), lambda _: row, 60)) == ["kl-above-target"]
    assert _run(KLAlerts(0.1, unit="token"), lambda _: row, 60) == []


def test_no_alert_asks_for_a_ceiling_that_is_there() -> None:
    for ceiling in (False, True):
        watch = KLAlerts(0.1, kind="adaptive", ceiling=ceiling)
        [alert, *_] = [words for step in range(1, 61) for words in watch({"step": step, "kl/token": 0.25})]
        assert ("set kl.ceiling" in alert) != ceiling


def test_again_only_after_it_cleared_with_a_margin() -> None:
    alerts = KLAlerts(1.0, total_updates=18, window=10)
    hover = _run(alerts, lambda step: {"kl/token": 2.05 if (step // 10) % 2 else 1.95}, 200)
    assert _slugs(hover).count("kl-above-target") == 1
    calm = _run(alerts, lambda _: {"kl/token": 1.0}, 30, first=201)
    assert calm == []
    assert "kl-above-target" in _slugs(_run(alerts, lambda _: {"kl/token": 2.3}, 30, first=231))


def test_a_spike_is_raised_and_a_lone_spike_is_no_climb() -> None:
    raised = _run(KLAlerts(0.1), lambda step: {"kl/token": 0.5 if step in {30, 31, 50} else 0.1}, 60)
    assert [step for step, slug in raised if slug == "kl-spike"] == [30, 50]
    assert "kl-climbing" not in _slugs(raised)


def test_a_jump_that_stays_under_the_target_is_no_spike() -> None:
    raised = _run(KLAlerts(0.1), lambda step: {"kl/token": 0.09 if step == 30 else 0.03}, 30)
    assert "kl-spike" not in _slugs(raised)


@pytest.mark.parametrize("target", [0.1, None])
def test_a_climb_without_bound_is_raised_once(target: float | None) -> None:
    raised = _run(KLAlerts(target, total_updates=60), lambda step: {"kl/token": 0.004 * step**1.6}, 60)
    climbs = [step for step, slug in raised if slug == "kl-climbing"]
    assert len(climbs) == 1
    assert climbs[0] <= 20
    assert "kl-spike" not in _slugs(raised)


def test_a_slow_climb_is_raised_too() -> None:
    raised = _run(KLAlerts(0.1), lambda step: {"kl/token": 0.1 * 1.012**step}, 150)
    assert "kl-climbing" in _slugs(raised)


def test_without_a_target_only_targetless_alerts() -> None:
    raised = _run(KLAlerts(None), lambda _: {"kl/token": 5.0, "kl/sequence": 100.0}, 60)
    assert raised == []


def _overoptimising(step: int, rng: random.Random) -> Row:
    gold = -0.1 + 0.05 * step if step < 15 else 0.65 - 0.1 * (step - 15)
    return {
        "objective/scores": 0.3 + 0.3 * step + rng.gauss(0, 0.15),
        "objective/gold": gold + rng.gauss(0, 0.12),
    }


def test_gold_that_falls_while_the_score_rises() -> None:
    rng = random.Random(0)
    raised = _run(KLAlerts(None), lambda step: _overoptimising(step, rng), 40)
    assert _slugs(raised) == ["overoptimised-gold"]
    assert 15 < raised[0][0] <= 28


def test_gold_that_falls_with_the_score_is_not_overoptimisation() -> None:
    rng = random.Random(0)

    def row(step: int) -> Row:
        return _overoptimising(step, rng) | {"objective/scores": 9 - 0.3 * step}

    assert _run(KLAlerts(None), row, 40) == []


@pytest.mark.parametrize("seed", range(3))
def test_noise_in_gold_is_no_fall(seed: int) -> None:
    rng = random.Random(seed)

    def row(step: int) -> Row:
        return {
            "objective/scores": 3 + 0.005 * step + rng.gauss(0, 0.3),
            "objective/gold": 1 + rng.gauss(0, 0.3),
        }

    assert _run(KLAlerts(None), row, 1000) == []


def test_perplexity_that_gets_worse_while_the_score_rises() -> None:
    def row(step: int) -> Row:
        figures: Row = {"objective/scores": 0.2 * step}
        if step % 10 == 1:
            figures["eval/perplexity"] = 3.6 + 0.1 * step
        return figures

    assert _run(KLAlerts(None), row, 60) == [(21, "overoptimised-perplexity")]
    constant = _run(KLAlerts(None), lambda step: row(step) | {"objective/scores": 1.0}, 60)
    assert constant == []


def test_a_controller_stuck_at_a_bound() -> None:
    alerts = KLAlerts(0.1, min_coef=0.01, max_coef=1.0)
    raised = _run(alerts, lambda step: {"kl/coef_next": 1.0 if step % 4 else 0.9}, 20)
    assert raised == []  # touches it, but is not stuck
    assert _run(alerts, lambda _: {"kl/coef_next": 1.0}, 20, first=21)[0][1] == "beta-at-max"
    assert _run(alerts, lambda _: {"kl/coef_next": 0.01}, 20, first=41) == [(45, "beta-at-min")]


def _gap(key: str, gap: float) -> Row:
    """An update whose 1000 tokens have a spread of 1 nat each."""
    return {key: gap, f"{key}_stderr": 1 / math.sqrt(1000), "rollout/tokens": 1000}


@pytest.mark.parametrize("key", ["policy/logprob_gap", "kl/k1_gap"])
@pytest.mark.parametrize("gap", [0.05, -0.05])
def test_sampler_and_trainer_that_disagree(key: str, gap: float) -> None:
    """1.6 standard errors in each update, either way: too little for one alone, and too much for many together."""
    alerts = KLAlerts(None)
    texts = [(step, text) for step in range(1, 101) for text in alerts(_gap(key, gap))]
    assert len(texts) == 1
    step, text = texts[0]
    assert 4 <= step <= 25
    assert text.startswith("sampler-mismatch: ")
    assert f"over {step} updates" in text
    assert f"{gap:+.3g} nats" in text
    assert _run(KLAlerts(None), lambda step: _gap(key, gap * (-1) ** step), 300) == []


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, "n/a", True])
def test_missing_figures_are_skipped(missing: object) -> None:
    kl = [f"kl/{name}" for name in ("token", "coef", "coef_next", "k1_gap", "k1_gap_stderr")]
    keys = [
        *kl,
        "policy/logprob_gap",
        "policy/logprob_gap_stderr",
        "rollout/tokens",
        "objective/scores",
        "objective/gold",
        "eval/perplexity",
    ]
    alerts = KLAlerts(0.1, min_coef=0.1, max_coef=1.0)
    assert _run(alerts, lambda _: dict.fromkeys(keys, missing), 40) == []
    assert alerts({}) == []
    json.dumps(alerts.state_dict(), allow_nan=False)


@pytest.mark.parametrize("cut", [3, 17, 26, 45])
def test_a_resumed_watch_raises_what_an_unbroken_one_raises(cut: int) -> None:
    rng = random.Random(1)
    rows = []
    for step in range(1, 80):
        row = _overoptimising(step, rng) | {"kl/token": 0.004 * step**1.6, "kl/coef": min(1.0, 0.05 * step)}
        row |= _gap("kl/k1_gap", 0.05)
        rows.append(row | ({"eval/perplexity": 3.6 + 0.1 * step} if step % 10 == 1 else {}))
    whole = KLAlerts(0.1, total_updates=60, max_coef=1.0)
    expected = [whole(row) for row in rows]
    assert sum(map(len, expected)) >= 5
    first = KLAlerts(0.1, total_updates=60, max_coef=1.0)
    raised = [first(row) for row in rows[:cut]]
    second = KLAlerts(0.1, total_updates=60, max_coef=1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    raised += [second(row) for row in rows[cut:]]
    assert raised == expected
    assert second.state_dict() == whole.state_dict()


def test_the_state_does_not_grow_with_the_run() -> None:
    alerts = KLAlerts(0.1)
    _run(alerts, lambda _: {"kl/token": 0.1, "objective/scores": 1.0, "objective/gold": 1.0}, 300)
    size = len(json.dumps(alerts.state_dict()))
    _run(alerts, lambda _: {"kl/token": 0.1, "objective/scores": 1.0, "objective/gold": 1.0}, 300)
    assert len(json.dumps(alerts.state_dict())) == size
