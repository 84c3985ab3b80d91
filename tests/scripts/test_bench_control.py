import dataclasses
import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.run.checkpoint import FORMAT

PATH = Path(__file__).parents[2] / "scripts" / "bench_control.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_control", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_control"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_control"]


def rows_of(ratios, beta=0.1, cut=(), stderr=0.005):
    """Metrics rows of a run whose KL is `ratios` times a target of 0.1; the updates in `cut` are cut."""
    rows = [
        {
            "step": step,
            "kl/error": ratio - 1,
            "kl/coef": beta if step == 1 else 0.5,
            "kl/token": 0.1 * ratio,
            "kl/sequence": 3.0 * ratio,
            "kl/token_stderr": stderr,
            "kl/backtrack_factor": 0.5 if step in cut else 1.0,
            "objective/scores_shaped": float(step),
            "objective/gold": 0.5,
        }
        for step, ratio in enumerate(ratios, start=1)
    ]
    return [*rows, {"step": len(rows) + 1, "eval/perplexity": 3.0}]  # the closing evaluation


def settings_of(bench, folder, sets=()):
    return bench.Settings(folder, 60, 64, sets, 1)


def test_figures_of_a_run_counted_by_hand(bench):
    ratios = [0.0] * 9 + [3.0] + [1.0] * 5 + [1.1, 0.9, 1.3, 1.0, 0.7]
    found = bench.judge(rows_of(ratios, cut=[3, 12, 20]), beta=0.1, updates=20)
    assert found.tail_error == pytest.approx((0.1 + 0.1 + 0.3 + 0.3) / 10)
    assert found.peak == pytest.approx(3.0)
    assert found.in_band == pytest.approx(4 / 6)  # updates 15 to 20, of which 18 and 20 are outside
    assert found.cut == pytest.approx(2 / 10)  # update 3 is not in the second half
    assert found.score == pytest.approx(15.5)
    assert found.kl == pytest.approx(0.1)


def test_kl_is_told_in_the_target_s_unit(bench):
    found = bench.judge(rows_of([1.0] * 20), beta=0.1, updates=20, unit="sequence")
    assert found.kl == pytest.approx(3.0)
    assert found.noise is None  # the standard error is that of the token mean


def test_noise_of_a_measurement_is_its_mean_absolute_error(bench):
    import random

    rng = random.Random(0)
    found = bench.judge(rows_of([1.0] * 20, stderr=0.005), beta=0.1, updates=20)
    drawn = sum(abs(rng.gauss(0.0, 0.05)) for _ in range(100_000)) / 100_000
    assert found.noise == pytest.approx(drawn, rel=0.02)


@pytest.mark.parametrize("ratios", [[1.0] * 12, []])
def test_unfinished_run_is_not_judged(bench, ratios):
    with pytest.raises(bench.UnfinishedError, match=f"{len(ratios)} of 20"):
        bench.judge(rows_of(ratios), beta=0.1, updates=20)


def test_gap_in_the_steps_is_unfinished(bench):
    rows = rows_of([1.0] * 20)
    with pytest.raises(bench.UnfinishedError):
        bench.judge(rows[:5] + rows[6:], beta=0.1, updates=20)


def test_another_starting_beta_is_an_error(bench):
    with pytest.raises(bench.InvalidError, match=r"from beta 0\.1, not from 0\.01"):
        bench.judge(rows_of([1.0] * 20, beta=0.1), beta=0.01, updates=20)


def test_kl_that_was_not_finite_is_no_success(bench):
    rows = rows_of([1.0] * 20)
    rows[15]["kl/error"] = None
    found = bench.judge(rows, beta=0.1, updates=20)
    assert found.tail_error == found.peak == math.inf
    assert found.in_band == pytest.approx(5 / 6)


def test_short_run_has_no_share_in_the_band(bench):
    found = bench.judge(rows_of([1.0] * 4), beta=0.1, updates=4)
    assert found.in_band is None
    assert bench.summarize([found], 1).worst["in_band"] is None


def test_summary_takes_the_worst_side_of_each_figure(bench):
    good = bench.judge(rows_of([1.0] * 20), beta=0.1, updates=20)
    bad = bench.judge(rows_of([1.0] * 10 + [2.0] * 10, cut=range(11, 21)), beta=0.1, updates=20)
    found = bench.summarize([good, bad], 2)
    assert found.mean["tail_error"] == pytest.approx(0.5)
    assert found.worst == pytest.approx({"tail_error": 1.0, "peak": 2.0, "in_band": 0.0, "cut": 1.0})


def verdicts(bench, ratios, asked=1, cut=()):
    runs = [bench.judge(rows_of(ratios, cut=cut), beta=0.1, updates=60)]
    summary = bench.summarize(runs, asked)
    return [goal.verdict(summary) for goal in bench.GOALS]


def test_goals_are_met_at_target_and_missed_one_by_one(bench):
    assert verdicts(bench, [1.0] * 60) == ["met"] * 5
    assert verdicts(bench, [1.0] * 60, cut=range(31, 41)) == ["met"] * 4 + ["MISSED"]
    assert verdicts(bench, [1.7] + [1.0] * 59) == ["met", "met", "MISSED", "met", "met"]
    assert verdicts(bench, [1.1] * 60) == ["MISSED", "met", "met", "met", "met"]
    assert verdicts(bench, [1.26] * 60) == ["MISSED", "MISSED", "met", "MISSED", "met"]


def test_goals_stay_open_while_runs_are_missing(bench):
    assert verdicts(bench, [1.0] * 60, asked=9) == ["open"] * 5
    lines = bench.goal_lines(bench.summarize([], 9))
    assert lines[-1] == "  open: 9 runs are missing"


def test_table_has_fixed_columns_and_fits(bench):
    rows = [row | {"objective/gold": -1.5} for row in rows_of([1.0] * 30 + [386.0] * 30)]
    wild = dataclasses.replace(bench.judge(rows, beta=0.1, updates=60), of_limit=-0.125)
    none = bench.summarize([], 3)
    lines = bench.table(dict.fromkeys(bench.EVERY_LAW, bench.summarize([wild], 3)) | {"fixed": none})
    lines = lines.splitlines()
    assert max(map(len, lines)) <= 100
    assert len({len(line) for line in lines[2:] if not line.startswith("fixed  ")}) == 1
    assert "1/3" in lines[2]
    assert next(line for line in lines if line.startswith("fixed  ")).split() == ["fixed", "0/3"]


def test_figures_by_starting_beta_are_means_over_seeds(bench):
    near, far = (bench.judge(rows_of([ratio] * 20), beta=0.1, updates=20) for ratio in (1.0, 2.0))
    runs = {bench.Run("pid", 0.1, 0): near, bench.Run("pid", 0.1, 1): far, bench.Run("pid", 1.0, 0): far}
    head, line = bench.by_beta({"pid": runs}).splitlines()
    assert head.split()[-2:] == ["0.1", "1"]
    assert line.split() == ["pid", "0.500", "(1.50)", "1.000", "(2.00)"]


def test_default_grid_is_nine_runs_of_adaptive_and_one_seed_of_the_laws(bench):
    runs = bench.plan(list(bench.LAWS), [0.01, 0.1, 1.0], None)
    counts = {row: sum(run.row == row for run in runs) for row in bench.LAWS}
    assert counts.pop("adaptive") == counts.pop("adaptive-no-ceiling") == 9
    assert set(counts.values()) == {3}
    assert len({run.name for run in runs}) == len(runs) == 42
    assert {run.seed for run in bench.plan(["pid"], [0.1], [3, 4])} == {3, 4}


def test_unknown_row_is_named(bench):
    with pytest.raises(InputError, match="pdi"):
        bench.plan(["pid", "pdi"], [0.1], None)


def test_every_row_is_a_config_that_starts_from_the_beta_asked_for(bench, tmp_path):
    settings = settings_of(bench, tmp_path)
    for row in bench.EVERY_LAW:
        config = bench.config_of(bench.Run(row, 0.01, 2), settings)
        assert config.kl.controller.coef == 0.01
        assert config.updates == 60
        assert config.run.seed == 2
        held = {"adaptive", "fixed+ceiling", *bench.FURTHER} - {"threshold-wide"}
        assert (config.kl.ceiling is not None) == (row in held), row


def test_what_makes_a_row_wins_over_set(bench, tmp_path):
    sets = ("kl.ceiling.value=1.3x", "kl.target=0.05")
    config = bench.config_of(bench.Run("pid", 0.1, 0), settings_of(bench, tmp_path, sets))
    assert config.kl.ceiling is None
    assert config.kl.target_value == 0.05


def test_sequence_target_follows_the_length_of_a_finished_run_and_then_stays(bench, tmp_path):
    settings, run = settings_of(bench, tmp_path), bench.Run("adaptive-sequence", 0.1, 0)
    assert bench.config_of(run, settings).kl.target_value == bench.SEQUENCE_TARGET
    (tmp_path / "adaptive-b0.1-s0" / "final").mkdir(parents=True)
    summary = {"stopped_by": None, "reference": {"length": 34.2}}
    (tmp_path / "adaptive-b0.1-s0" / "summary.json").write_text(json.dumps(summary))
    config = bench.config_of(run, settings)
    assert config.kl.unit == "sequence"
    assert config.kl.target_value == pytest.approx(3.4)
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "config.yaml").write_text("kl: {unit: sequence, target: 3.1}")
    assert bench.sequence_target(settings) == 3.1


def test_folder_with_a_run_of_other_settings_is_refused(bench, tmp_path):
    run = bench.Run("pid", 0.1, 0)
    config = bench.config_of(run, settings_of(bench, tmp_path))
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    assert bench.config_of(run, settings_of(bench, tmp_path)) == config
    with pytest.raises(InputError, match=r"kl.target: 0.1 -> 0.05"):
        bench.config_of(run, settings_of(bench, tmp_path, ("kl.target=0.05",)))


def test_frozen_noise_is_relative_to_its_own_mean(bench):
    assert bench.frozen_noise([0.9, 1.1, 1.0, 1.0]) == pytest.approx(0.05)
    assert bench.frozen_noise([9.0, 11.0, 10.0, 10.0]) == pytest.approx(0.05)


def test_picture_with_empty_wild_and_infinite_rows(bench, tmp_path):
    curves = {
        "adaptive": [(bench.Run("adaptive", 0.1, 0), [0.0, 1.0])],
        "fixed": [(bench.Run("fixed", 0.01, 0), [0.0, 50.0, math.inf])],
        "pid": [(bench.Run("pid", 1.0, 0), [])],
    }
    file = tmp_path / "bench.png"
    bench.picture(curves, dict.fromkeys(curves, bench.summarize([], 1)), file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_told_before_anything_runs(bench, tmp_path, capsys):
    out = tmp_path / "out"
    assert bench.main(["--out", str(out), "--set", "kl.tagret=1"]) == 2
    assert "kl.target" in capsys.readouterr().err
    assert bench.main(["--out", str(out), "--rows", "none"]) == 2
    assert not out.exists()


def test_the_limit_of_gaussian_scores_is_their_closed_form(bench, tmp_path):
    """Spread 1 buys sqrt(2 KL); scores are normalised as the run did it, and its mean is that of the samples."""
    spread = [statistics.NormalDist().inv_cdf((i + 0.5) / 4000) for i in range(4000)]
    samples = bench.Reference([3.0 + 2.0 * x for x in spread], [[1.0] * 4000, [5.0] * 4000, [0.0] * 4000], [0] * 4000)
    folder = bench.RunFolder(tmp_path)
    rows = [row | {"kl/sequence": 0.5, "objective/scores_shaped": 0.25 + 0.8} for row in rows_of([1.0] * 60)]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert samples.share(folder) is None  # nothing says how the run normalised its scores
    checkpoint = folder.checkpoints / "step-000060"
    checkpoint.mkdir(parents=True)
    shaping = {"mean": 2.5, "std": 2.0, "clip": None, "missing_eos_penalty": 9.0}
    (checkpoint / "state.json").write_text(json.dumps({"format": FORMAT, "trainer": {"shaping": shaping}}))
    assert samples.share(folder) == pytest.approx(0.8, rel=0.01)
