import math
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_kl.control.verdict import verdict_text
from rlhf_kl.monitors.facts import closing_figures, control_figures, is_update, score_error, worth
from rlhf_kl.text import score_text


def test_the_closing_evaluation_is_no_update() -> None:
    assert is_update({"step": 3, "kl/error": None})
    assert not is_update({"step": 4, "eval/perplexity": 3.0})


def test_the_score_at_the_end_has_the_error_of_its_batches() -> None:
    """By hand: of four batches the second half, errors of 0.3 and 0.4: 0.5 / 2."""
    rows: list[dict[str, Any]] = [
        {"kl/error": 0.0, "objective/scores": 1.0, "objective/scores_stderr": each} for each in (9.0, 9.0, 0.3, 0.4)
    ]
    closing = {"eval/scores": 1.0}
    assert score_error([*rows, closing]) == pytest.approx(0.25)
    assert score_error([*rows[:3], {"kl/error": 0.0}, closing]) is None
    assert score_error([]) is None
    assert score_text((0.8, 3.4), 0.25) == "0.800 -> 3.40 (±0.250 at the end)"
    assert score_text((0.8, 3.4), None) == "0.800 -> 3.40"


def row(scores: float | None, kl: float, coef: float, target: float = 1.0) -> dict[str, Any]:
    shaped = math.nan if scores is None else scores
    reward = {"objective/scores_shaped": shaped, "objective/rlhf_reward": shaped - coef * kl}
    return reward | {"kl/sequence": kl, "kl/error": kl / target - 1.0}


def test_the_best_row_is_chosen_by_a_figure_that_all_rows_share() -> None:
    """Where beta falls, score less beta times KL rises by itself."""
    rows = [row(1.0, 0.9, coef=1.0), row(1.2, 1.2, coef=0.5), row(1.1, 1.1, coef=0.01), row(2.0, 1.3, coef=0.01)]
    assert [worth(each, None) for each in rows] == [1.0, 1.2, 1.1, -math.inf]
    assert worth({"objective/scores_shaped": 1.0, "kl/error": None}, None) == -math.inf
    assert [worth(each, 1.0) for each in rows] == pytest.approx([0.1, 0.0, 0.0, 0.7])
    assert math.isnan(worth(row(None, 0.5, coef=1.0), None))


RISES = [0.72 * min(1.0, step / 25) ** 2 for step in range(1, 31)]  # a small real model: 0.72x the target, and rising


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1.0] * 14, "under 15 updates"),
        (RISES, "the KL still rises"),
        ([0.1] * 51 + [1.0] * 9, "in band only from update 52 on"),
    ],
)
def test_the_reason_of_a_run_that_is_too_short(values: list[float], why: str) -> None:
    kl = SimpleNamespace(target_value=0.2, unit="token", controller=SimpleNamespace(kind="adaptive"))
    figures = control_figures([{"kl/token": 0.2 * x, "kl/error": x - 1} for x in values], kl)
    share = math.fsum(values[-10:]) / 10
    began = f"{share:.0%} of the target 0.2 in {len(values)} updates"
    assert verdict_text(figures) == f"{began}: too short to say more ({why})"


def test_updates_with_a_frozen_policy_are_not_judged() -> None:
    """A warm-up of the value function once made a run late that held its target as soon as it could."""
    kl = SimpleNamespace(target_value=0.2, unit="token", controller=SimpleNamespace(kind="adaptive"))
    rows = [{"kl/token": 0.2 * x, "kl/error": x - 1} for x in [0.0] * 20 + [0.3, 0.6, 0.8] + [1.0] * 37]
    alone, found = control_figures(rows[20:], kl), control_figures(rows, kl, frozen=20)
    assert (found["verdict"], found["updates"], found["tail_error"]) == ("held", 40, alone["tail_error"])
    assert found["since"] == alone["since"] + 20
    assert control_figures(rows, kl)["verdict"] == "late"


@pytest.mark.parametrize("kind", ["adaptive", "fixed"])
def test_the_figures_of_a_run_and_their_words(kind: str) -> None:
    kl = SimpleNamespace(target_value=0.2, unit="sequence", controller=SimpleNamespace(kind=kind))
    rows = [{"kl/sequence": 0.2 * x, "kl/error": x - 1, "objective/scores": x} for x in [0.1] * 20 + [1.04] * 20]
    rows[25]["objective/scores"] = None
    figures = control_figures(rows, kl)
    assert figures["kl"] == pytest.approx(0.208)
    if kind == "fixed":
        assert figures["verdict"] is None
        assert verdict_text(figures) == "no target is held (beta does not depend on the KL)"
    else:
        assert (figures["verdict"], figures["since"], figures["error_since"]) == ("late", 21, pytest.approx(0.04))
        assert verdict_text(figures) == "target 0.2 reached late (in band from update 21 on, off by 4% since)"
    broken = [*rows[:-1], rows[-1] | {"kl/sequence": None, "kl/error": None}]
    assert control_figures(broken, kl)["kl"] is None
    evaluated = [{"eval/perplexity": 2.9}, *rows, {"eval/perplexity": 3.5}]
    found = closing_figures(evaluated, "sequence")
    assert found == {"kl": pytest.approx((0.02, 0.208)), "scores": pytest.approx((0.1, 1.04)), "perplexity": (2.9, 3.5),
                     "kl_sequence": found["kl"]}  # fmt: skip
