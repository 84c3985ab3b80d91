import math
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_kl.report.control import closing_figures, control_figures, is_update, verdict_text, worth


def test_the_closing_evaluation_is_no_update() -> None:
    assert is_update({"step": 3, "kl/error": None})
    assert not is_update({"step": 4, "eval/perplexity": 3.0})


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


@pytest.mark.parametrize("kind", ["adaptive", "fixed"])
def test_the_figures_of_a_run_and_their_words(kind: str) -> None:
    kl = SimpleNamespace(target_value=0.2, unit="sequence", controller=SimpleNamespace(kind=kind))
    rows = [{"kl/sequence": 0.2 * x, "kl/error": x - 1, "objective/scores": x} for x in [0.1] * 20 + [1.04] * 20]
    rows[25]["objective/scores"] = None
    figures = control_figures(rows, kl)
    assert figures["kl"] == pytest.approx(0.208)
    if kind == "fixed":
        assert figures["verdict"] is None
        assert verdict_text(figures) == "no target (beta does not depend on the KL)"
    else:
        assert (figures["verdict"], figures["since"], figures["error_since"]) == ("late", 21, pytest.approx(0.04))
        assert verdict_text(figures) == "target 0.2 reached late (in band from update 21 on, within 4% since)"
    evaluated = [{"eval/perplexity": 2.9}, *rows, {"eval/perplexity": 3.5}]
    found = closing_figures(evaluated, "sequence")
    assert found == {"kl": pytest.approx((0.02, 0.208)), "scores": pytest.approx((0.1, 1.04)), "perplexity": (2.9, 3.5),
                     "kl_sequence": found["kl"]}  # fmt: skip
