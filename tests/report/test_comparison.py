from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.report.charts import _total_reward, target_charts
from rlhf_kl.report.comparison import Comparison, read_comparison
from rlhf_kl.report.sentences import judge
from rlhf_kl.report.side_by_side import write_comparison
from rlhf_kl.report.sweep import sweep_of
from tests.made import numbers
from tests.runs import Rows, Write

Grid = Callable[..., Comparison]


def test_variants_families_and_figures_follow_from_configs_and_rows(grid: Grid) -> None:
    comparison = grid(seeds=2)
    assert [variant.name for variant in comparison.variants] == [
        "adaptive-0.1x", "adaptive-1x", "static-0.1x", "static-1x", "static-10x",
    ]  # fmt: skip
    assert {name: len(members) for name, members in comparison.families.items()} == {"adaptive": 2, "static": 3}
    assert (comparison.target, comparison.unit, comparison.seeds) == (0.1, "token", [0, 1])
    [note] = comparison.notes  # the fixed ones follow the schedule
    assert ", that of static-0.1x, static-1x, static-10x is " in note
    assert [variant.name for variant in comparison.sweep] == ["static-0.1x", "static-1x", "static-10x"]  # by beta
    document = comparison.to_json(["one", "two"])
    assert set(document) == {"target", "unit", "variants", "equal_kl", "verdict", "notes"}
    assert document["verdict"] == "one\ntwo"
    static = document["variants"]["static-1x"]
    assert set(static) == {"family", "seeds", "mean", "sd", "kl_by_token"}
    keys = {"tail_error", "time_in_band", "peak", "kl", "scores", "gold", "perplexity"}
    assert keys <= set(static["seeds"]["0"])
    assert static["mean"]["kl"] == pytest.approx(0.1005)
    assert static["sd"]["kl"] == pytest.approx(0.001 / math.sqrt(2))


def test_score_at_equal_kl_takes_the_seed_s_own_noise_away(grid: Grid) -> None:
    comparison = grid(extra={"adaptive-0.1x": 0.2, "adaptive-1x": 0.4})
    score, gold = comparison.equal_kl
    assert [(e.points, e.curve, e.measure) for e in (score, gold)] == [
        ("adaptive", "static", "scores_shaped"), ("adaptive", "static", "gold"),
    ]  # fmt: skip
    # The scores are sqrt(2 KL): straight over sqrt(KL), so that interpolation is exact.
    assert score.mean == pytest.approx(0.3)
    assert score.interval == pytest.approx((0.3, 0.3), abs=1e-9)


def test_one_seed_and_unequal_lengths_have_notes(grid: Grid, tmp_path: Path) -> None:
    comparison = grid(seeds=1)
    assert len(read_comparison([tmp_path]).variants) == 5  # the folder of a comparison stands for its runs
    (note,) = comparison.notes
    assert note.startswith("not like for ")
    lines = judge(comparison)
    assert lines[-1].startswith("1 seed: no difference ")
    assert not any("at equal KL" in line for line in lines)
    assert comparison.to_json([])["variants"]["static-1x"]["sd"]["kl"] is None
    comparison = grid({"other": ("adaptive", 0.2, 0.1)}, seeds=2, updates={1: 40})
    assert numbers(comparison.notes[0])[:2] == [40, 60]
    assert "other-s1: unfinished: 40 of 60 updates" in comparison.notes
    x, mean, low, high = comparison.variants[0].series("kl/token")  # ends where the shortest run does
    assert (x[-1], mean[-1]) == (40.0, pytest.approx(0.1005))
    assert high[-1] - low[-1] == pytest.approx(2 * 0.001 / math.sqrt(2))


def test_perplexities_of_different_texts_have_a_note(write_run: Write, metrics_rows: Rows) -> None:
    """Where `eval.max_documents` differs, and in runs from before it had a fixed default."""
    paths = []
    for name, documents in (("a", 8), ("b", 20)):
        rows = metrics_rows([0.1] * 4)
        rows[-1] |= {"eval/perplexity": 9.0, "eval/documents": documents}
        paths.append(write_run(name, rows, config={"kl": {"target": 0.1 if name == "a" else 0.2}}))
    (note,) = (note for note in read_comparison(paths).notes if "perplexities" in note)
    assert note.endswith(": a 8, b 20")
    assert not [note for note in read_comparison(paths[:1]).notes if "perplexities" in note]


def test_what_cannot_be_compared(write_run: Write, metrics_rows: Rows, tmp_path: Path) -> None:
    rows = metrics_rows([0.1] * 4)
    one, again = write_run("a", rows), write_run("b", rows)
    with pytest.raises(InputError, match="same run: a, seed 0"):
        read_comparison([one, again])
    other = write_run("c", rows, config={"kl": {"unit": "sequence"}})
    with pytest.raises(InputError, match="different units"):
        read_comparison([one, other])
    begun = read_comparison([write_run("begun"), write_run("d", rows, config={"kl": {"target": 0.2}})])
    assert [variant.verdicts for variant in begun.variants] == [{"short": 1}] * 2
    write_comparison(begun, tmp_path / "out", "early")
    assert (tmp_path / "out" / "compare.html").read_text().count("<svg") == 2 + 5


@pytest.mark.parametrize(
    ("section", "other"),
    [
        ("reward", {"clip": 3.0}),
        ("reference", {"model": "a/b"}),
        ("rollout", {"temperature": 0.7}),
    ],
)
def test_scores_on_different_scales_are_not_compared(
    write_run: Write, metrics_rows: Rows, section: str, other: dict[str, Any]
) -> None:
    """Or by their KL to different references."""
    paths = []
    for name, kl, values in (("a-1", 0.1, {}), ("b-1", 0.05, other), ("b-2", 0.2, other)):
        config = {section: values, "kl": {"controller": {"kind": "fixed", "coef": kl}}}
        paths.append(write_run(name, metrics_rows([kl] * 40), config=config))
    comparison = read_comparison(paths)
    # A scorer that never trains judges policies of other rewards too.
    assert [entry.measure for entry in comparison.equal_kl] == ["gold"] * (section == "reward")
    notes = [note for note in comparison.notes if f"{section}.{next(iter(other))}: " in note]
    assert any(note.startswith("scores of a-1 and b-1 ") for note in notes)


@pytest.mark.parametrize("other", [{"data": {"prompts": "hard.jsonl"}}, {"rollout": {"max_new_tokens": 9}}])
def test_scores_of_other_prompts_stay_on_the_scale_of_their_own_reference(
    write_run: Write, metrics_rows: Rows, other: dict[str, Any]
) -> None:
    """Both gain 1.5 over their references; harder prompts, whose reference scores 3 less, once made it 3 less."""
    paths = []
    for name, config, mean in (("easy", {}, 3.0), ("hard", other, 0.0)):
        rows = [row | {"objective/scores_shaped": 1.5} for row in metrics_rows([0.1] * 40)]
        reference = {"scale": {"mean": mean, "std": 1.0}, "samples": 256, "scores_shaped": 0.0}
        controller = {"kl": {"controller": {"kind": "adaptive" if name == "easy" else "pid"}}}
        paths.append(write_run(name, rows, config=controller | config, summary={"reference": reference}))
    comparison = read_comparison(paths)
    gains = [comparison.ends(variant) for variant in comparison.variants]
    assert [next(iter(each.values()))[1] for each in gains] == pytest.approx([1.5, 1.5])
    assert any("easy and hard" in note for note in comparison.notes)


def test_perplexities_of_other_texts_are_told(write_run: Write, metrics_rows: Rows) -> None:
    """Texts of an equal number once counted as the same."""
    paths = [
        write_run(name, metrics_rows([0.1] * 40), config={"eval": {"texts": f"{name}.txt"}}) for name in ("one", "two")
    ]
    notes = read_comparison(paths).notes
    assert any("eval.texts: " in note for note in notes)


def test_a_sweep_of_targets_shows_what_each_cost(write_run: Write, metrics_rows: Rows) -> None:
    paths = []
    for target, golds in {0.05: (0.9, 1.1), 0.1: (2.6, 3.2), 0.2: (2.9, 3.1), 0.4: (-0.1, 0.1)}.items():
        for seed, gold in enumerate(golds):
            rows = metrics_rows([target] * 30, target=target)
            rows = [row | {"eval/gold": gold} if "eval/gold" in row else row for row in rows]
            config = {"run": {"seed": seed}, "kl": {"target": target}}
            summary = {"reference": {"scores_shaped": 0.0}}
            paths.append(write_run(f"target-{target}-s{seed}", rows, config=config, summary=summary))
    comparison = read_comparison(paths)
    lines = judge(comparison)
    assert lines[0].startswith("KL targets per token: held by target-0.05, target-0.1, ")
    assert not any("kl.target" in line for line in lines)  # it shows what each cost; `scale` suggests one
    score, perplexity, _ = target_charts(sweep_of(comparison))  # forgetting is unknown
    assert [line.label for line in score.lines] == ["score", "true score"]
    assert score.lines[1].x == [0.05, 0.1, 0.2, 0.4]
    assert score.lines[1].y == pytest.approx([1.0, 2.9, 3.0, 0.0])
    assert [line.y[0] for line in perplexity.lines[1:]] == pytest.approx([3.05, 2.5 * 3.05], rel=0.1)
    assert re.fullmatch(r"Score: \S+ to \S+; true score: highest at 0.2", score.title)
    assert (score.log, perplexity.log, perplexity.ylim) == ("x", "x", None)


def test_an_error_of_the_perplexity_never_reaches_below_zero(write_run: Write, metrics_rows: Rows) -> None:
    """The picture once showed 23 with an error of 28 down to -5."""
    paths = []
    for target, perplexities in {0.05: (3, 3.1), 0.1: (3.2, 3.4), 0.2: (4, 60)}.items():
        for seed, perplexity in enumerate(perplexities):
            rows = metrics_rows([target] * 30, target=target)
            rows = [row | {"eval/perplexity": perplexity} if "eval/perplexity" in row else row for row in rows]
            config = {"run": {"seed": seed}, "kl": {"target": target}}
            paths.append(write_run(f"target-{target}-s{seed}", rows, config=config, summary={}))
    (chart,) = [each for each in target_charts(sweep_of(read_comparison(paths))) if each.ylabel == "perplexity"]
    assert (chart.title, chart.log) == ("Perplexity: 3.05 to 32.0", "xy")
    assert min(chart.lines[0].low) < 0 < chart.ylim[0] < 3.05
    assert chart.ylim[1] > max(chart.lines[0].high)


def test_the_total_reward_pays_for_the_kl() -> None:
    """Gain sqrt(2 KL), the most that Gaussian scores allow: the total is highest at KL = 1 / (2 beta^2)."""
    gains = [(kl, math.sqrt(2 * kl)) for kl in (0.5, 2.0, 8.0, 0.0, 50.0)]
    chart = _total_reward(gains, (0.1, 0.25, 0.5, 1.0))
    first, *others = chart.lines
    assert (first.label, first.x) == ("beta 0.1", [0.0, 0.5, 2.0, 8.0, 50.0])
    assert first.y == pytest.approx([math.sqrt(2 * kl) - 0.1 * kl for kl in first.x])
    assert [(mark.x[0], mark.y[0]) for mark in others[::2]] == [(50.0, 5.0), (8.0, 2.0), (2.0, 1.0), (0.5, 0.5)]
