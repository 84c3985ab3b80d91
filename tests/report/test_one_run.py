from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.report.one_run import read_run
from tests.runs import Rows, Write

SIXTY = {"ppo": {"total_episodes": 3840}}


def test_figures_of_a_finished_run(write_run: Write, metrics_rows: Rows) -> None:
    rows = metrics_rows([0.0] * 10 + [0.2] * 10 + [0.1] * 40)
    run = read_run(write_run("done", rows, config=SIXTY, summary={}))
    assert (run.status, run.notes, len(run.updates), len(run.evaluations)) == ("finished", [], 60, 7)
    figures = run.figures
    assert figures["tail_error"] == pytest.approx(0.0)
    assert figures["peak"] == pytest.approx(2.0)
    assert figures["time_in_band"] == pytest.approx(40 / 46)
    assert (figures["kl"], figures["kl_sequence"]) == (pytest.approx(0.1), pytest.approx(2.0))
    assert figures["scores"] == pytest.approx(3.0)  # 1 + sqrt(2 * 2.0)
    assert figures["score_gain"] == pytest.approx(2.0)
    assert figures["gold_gain"] == pytest.approx(0.6)  # 0.5 * 2 - 0.1 * 4
    assert figures["perplexity_cost"] == pytest.approx(3.1 / 3.0 - 1)


def test_a_run_that_is_cut_off_and_one_that_a_guard_stopped(write_run: Write, metrics_rows: Rows) -> None:
    folder = write_run("torn", metrics_rows([0.1] * 12, evaluated=False), samples=[])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "kl/tok')
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"step"')
    run = read_run(folder)
    assert (len(run.updates), run.texts) == (12, [])
    unfinished, evaluations = run.notes
    assert unfinished == "unfinished: 12 of 60 updates"
    assert "perplexity" in evaluations
    assert run.figures["perplexity"] is None
    (folder / "summary.json").write_text('{"stopped_by": "KL above the ceiling"}')
    run = read_run(folder)
    assert run.status == "stopped by a guard"
    assert run.notes[0].startswith("stopped by a guard: KL ")


def test_gains_are_over_the_reference_s_own_samples_or_else_the_first_update(
    write_run: Write, metrics_rows: Rows
) -> None:
    summary, rows = {"reference": {"scores_shaped": -0.5}}, metrics_rows([0.1] * 60)
    run = read_run(write_run("done", rows, config=SIXTY, summary=summary))
    assert (run.gain("objective/scores_shaped"), run.gain("eval/gold")) == pytest.approx((2.5, 0.0))
    other = read_run(write_run("other", rows, config=SIXTY | {"reference": {"model": "another/model"}}))
    assert other.gain("eval/gold") is None
    rows[0]["eval/reference_gold"] = -2.0
    known = read_run(write_run("known", rows, config=SIXTY | {"reference": {"model": "another/model"}}))
    assert known.figures["gold_gain"] == pytest.approx(rows[-1]["eval/gold"] + 2.0)
    begun = read_run(write_run("begun", rows[:5], config=SIXTY))
    assert begun.figures["gold_gain"] is None


def test_a_kl_that_was_not_finite(write_run: Write, metrics_rows: Rows) -> None:
    rows = metrics_rows([0.1] * 60)
    rows[59] |= {"kl/token": None, "kl/sequence": None, "kl/error": None}
    figures = read_run(write_run("nan", rows, config=SIXTY)).figures
    assert figures["peak"] == float("inf")
    assert figures["kl"] is None


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\(no config.yaml\)"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("sft: {epochs: 1}\n")
    with pytest.raises(InputError, match="a run of `rlhf-kl sft`"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("kl: {target: -1.0}\n")
    with pytest.raises(InputError, match=r"config.yaml: kl.target"):
        read_run(tmp_path)


def test_a_score_beyond_what_its_kl_can_buy_is_told(write_run: Write, metrics_rows: Rows) -> None:
    """Rows whose score is sqrt(2 KL) of a spread of 1, the limit of Gaussian scores, and of a smaller spread."""
    rows, notes = metrics_rows([0.1] * 60), dict[float, list[str]]()
    for spread in (1.0, 0.5):
        tilt = [{"coef": spread / i, "kl": i**2 / 2, "gain": spread * i} for i in range(1, 6)]
        known = {"scores_shaped": 0.0, "scores_spread": spread, "tilt": tilt, "samples": 1024}
        notes[spread] = read_run(write_run(f"of-{spread}", rows, config=SIXTY, summary={"reference": known})).notes
    assert notes[1.0] == []
    assert [note for note in notes[0.5] if "its shaped score rose by 2, and no policy can gain more than 1 at" in note]
