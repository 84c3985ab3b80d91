from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_kl.config.load import dump_config
from rlhf_kl.errors import InputError

PATH = Path(__file__).parents[2] / "scripts" / "bench_control.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_control", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_control"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_control"]


def write_run(planned: Any, ratios: Sequence[float | None], cut: Sequence[int] = (), share: float = 0.9) -> None:
    """The folder of a finished run whose KL is `ratios` times its target; the updates in `cut` were cut."""
    folder = Path(planned.config.run.output_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(planned.config))
    rows = [
        {
            "step": step,
            "kl/error": None if ratio is None else ratio - 1,
            "kl/token": 0.1 * (ratio or 0.0),
            "kl/backtrack_factor": 0.5 if step in cut else 1.0,
            "objective/scores_shaped": 1.5,
        }
        for step, ratio in enumerate(ratios, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"stopped_by": None, "tilt_share": share}))


def test_rows_have_the_seeds_betas_and_ceilings_that_their_names_promise(bench: ModuleType, tmp_path: Path) -> None:
    rows = bench.plan_rows(["all"], tmp_path)
    for row, runs in rows.items():
        configs = [run.config for run in runs]
        seeds = [0, 1, 2] if row.startswith("adaptive") or row == "rao-blackwell" else [0]
        starts = [(seed, beta) for seed in seeds for beta in (0.01, 0.1, 1.0)]
        assert [(config.run.seed, config.kl.controller.coef) for config in configs] == starts, row
        assert [run.name for run in runs] == [f"{row}-b{beta:g}-s{seed}" for seed, beta in starts]
        assert {config.updates for config in configs} == {60}
        assert len({(c.kl.target_value, c.kl.unit, c.policy.value, c.kl.controller.kind) for c in configs}) == 1, row
        held = row in ("fixed+ceiling", "rao-blackwell") or (
            row.startswith("adaptive") and row != "adaptive-no-ceiling"
        )
        assert {config.kl.ceiling is not None for config in configs} == {held}, row
    assert rows["adaptive-target-0.03"][0].config.kl.target_value == 0.03
    assert rows["adaptive-separate"][0].config.policy.value == "separate"
    assert sum(map(len, bench.plan_rows([], tmp_path).values())) == 42


def test_set_and_seed_hold_for_every_run(bench: ModuleType, tmp_path: Path) -> None:
    (runs,) = bench.plan_rows(["adaptive"], tmp_path, ["ppo.total_episodes=128", "checkpoint.keep=3"], 7).values()
    assert [(run.seed, run.config.updates, run.config.checkpoint.keep) for run in runs] == [(7, 2, 3)] * 3


def test_unknown_row_is_named(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no row 'pdi'; did you mean pid"):
        bench.plan_rows(["adaptive", "pdi"], tmp_path)


def test_mistakes_are_told_before_anything_runs(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert bench.main(["--out", str(out), "--rows", "pid", "--set", "kl.tagret=1"]) == 2
    assert "kl.target" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("ratios", "cut", "missed"),
    [
        ([1.0] * 60, (), []),
        ([1.0] * 60, range(31, 41), ["cut by the ceiling"]),
        ([1.0] * 60, range(1, 31), []),  # not in the second half
        ([1.7] + [1.0] * 59, (), ["peak"]),
        ([1.1] * 60, (), ["tail error, mean"]),
        ([1.26] * 60, (), ["tail error, mean", "tail error, worst", "in band"]),
        ([1.0] * 40 + [None] + [1.0] * 19, (), ["tail error, mean", "tail error, worst", "peak"]),
    ],
)
def test_goals_are_missed_one_by_one(
    bench: ModuleType, tmp_path: Path, ratios: list[float | None], cut: Sequence[int], missed: list[str]
) -> None:
    planned = bench.plan_rows(["adaptive"], tmp_path)["adaptive"][0]
    write_run(planned, ratios, cut)
    results, _ = bench.read_results({"adaptive": [planned]})
    lines = bench.goal_lines(results["adaptive"], 1)
    wrong = [line.split(maxsplit=1)[1] for line in lines if "MISSED" in line]
    assert len(wrong) == len(missed)
    assert all(line.startswith(start) for line, start in zip(wrong, missed, strict=True))
    assert {goal.verdict(results["adaptive"], 9) for goal in bench.GOALS} == {"open"}


def test_tables_by_hand_and_what_is_missing(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench.plan_rows(["adaptive", "pid"], tmp_path)
    near, *others = rows["adaptive"]
    write_run(near, [1.2] * 60, share=0.8)  # seed 0 from 0.01
    write_run(others[2], [1.4] * 60, share=0.9)  # seed 1 from 0.01
    write_run(others[0], [0.0] * 30 + [2.0] + [1.0] * 29)  # seed 0 from 0.1
    write_run(rows["pid"][0], [1.0] * 20)  # ended early
    assert bench.main(["--out", str(tmp_path), "--rows", "adaptive,pid", "--table-only"]) == 1
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.split("\n\n")[0].splitlines()[1:]}
    # tail error (1/5 + 2/5 + 1/30) / 3; in band 46, 0 and 29 of the 46 updates from number 15 on
    assert lines["adaptive"][1:8] == ["3/9", "0.211", "0.400", "1.53", "2.00", "54%", "0%"]
    assert lines["adaptive"][-1] == "87%"
    assert lines["pid"][1:3] == ["0/3", "-"]
    by_beta = out.split("\n\n")[1].splitlines()
    assert by_beta[1].split() == ["adaptive", "0.300", "(1.30x)", "0.033", "(2.00x)"]
    missing = [line for line in out.splitlines() if line.startswith("missing")]
    assert len(missing) == 9
    assert "missing: pid-b0.01-s0: unfinished: 20 of 60 updates; " in out
    assert (tmp_path / "bench_control.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "bench_control.json").read_text())["rows"]["adaptive"][near.name]["of_limit"] == 0.8


def test_chart_names_each_starting_beta_once_and_tells_a_peak_beyond_its_top(bench: ModuleType, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    runs = [run for run in bench.plan_rows(["adaptive"], tmp_path)["adaptive"] if run.seed < 2]
    for run in runs:
        write_run(run, [50.0, None] + [1.0] * 58)
    (chart,) = bench.charts(bench.read_results({"adaptive": runs})[0])
    assert chart.subtitle.endswith("up to ∞x")
    axes = Figure().subplots()
    chart.draw(axes)
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) == 60]
    assert [line.get_label() for line in curves[:3]] == ["0.01", "0.1", "1.0"]
    assert len(curves) == 6
    assert len({line.get_color() for line in curves}) == 3
