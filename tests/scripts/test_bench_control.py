from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_kl.config.load import dump_config
from rlhf_kl.config.plugins import check_plugins
from rlhf_kl.errors import InputError

MODULES = ("bench_control", "control", "stress_rewards")
PATH = Path(__file__).parents[2] / "scripts" / "bench_control.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The script, with its parts importable as they are where it is run."""
    sys.path.insert(0, str(PATH.parent))
    try:
        yield importlib.import_module("bench_control")
    finally:
        sys.path.remove(str(PATH.parent))
        for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
            del sys.modules[name]


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A folder with what the rows of a real model read."""
    folder = tmp_path / "real"
    (folder / "models/TinyStories-656K").mkdir(parents=True)
    (folder / "data/tinystories-1000").mkdir(parents=True)
    (folder / "data/tinystories-1000/stories.jsonl").write_text('{"text": "Once."}\n')
    return folder


def plan(bench: ModuleType, out: Path, rows: Sequence[str], **options: Any) -> dict[str, list[Any]]:
    planned: dict[str, list[Any]] = bench.Planner(out, **options).plan(rows)
    return planned


def write_run(
    planned: Any, ratios: Sequence[float | None], cut: Sequence[int] = (), share: float = 0.9, coef: float = 0.2
) -> None:
    """The folder of a finished run whose KL is `ratios` times its target; the updates in `cut` were cut."""
    folder = Path(planned.config.run.output_dir)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(planned.config))
    rows = [
        {
            "step": step,
            "kl/error": None if ratio is None else ratio - 1,
            "kl/token": 0.1 * (ratio or 0.0),
            "kl/coef": coef,
            "kl/backtrack_factor": 0.5 if step in cut else 1.0,
            "objective/scores_shaped": 1.5,
        }
        for step, ratio in enumerate(ratios, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"stopped_by": None, "tilt_share": share}))


def test_rows_have_the_seeds_betas_and_ceilings_that_their_names_promise(bench: ModuleType, tmp_path: Path) -> None:
    rows = plan(bench, tmp_path, ["all"])
    for row, runs in rows.items():
        if bench.is_stress(row):
            continue
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
    assert sum(map(len, plan(bench, tmp_path, []).values())) == 42


def test_set_and_seed_hold_for_every_run(bench: ModuleType, tmp_path: Path) -> None:
    (runs,) = plan(bench, tmp_path, ["adaptive"], sets=["ppo.total_episodes=128", "checkpoint.keep=3"], seed=7).values()
    assert [(run.seed, run.config.updates, run.config.checkpoint.keep) for run in runs] == [(7, 2, 3)] * 3


def test_unknown_row_is_named(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no row 'pdi'; did you mean pid"):
        plan(bench, tmp_path, ["adaptive", "pdi"])


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
    planned = plan(bench, tmp_path, ["adaptive"])["adaptive"][0]
    write_run(planned, ratios, cut)
    results, _ = bench.read_results({"adaptive": [planned]})
    goals = importlib.import_module("control.results")
    lines = bench.goal_lines(results["adaptive"], 1)
    wrong = [line.split(maxsplit=1)[1] for line in lines if "MISSED" in line]
    assert len(wrong) == len(missed)
    assert all(line.startswith(start) for line, start in zip(wrong, missed, strict=True))
    assert {goal.verdict(results["adaptive"], 9) for goal in goals.GOALS} == {"open"}


def test_tables_by_hand_and_what_is_missing(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = plan(bench, tmp_path, ["adaptive", "pid"])
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

    runs = [run for run in plan(bench, tmp_path, ["adaptive"])["adaptive"] if run.seed < 2]
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


# ---- stress rows


@pytest.mark.slow
def test_stress_stands_for_its_rows_each_with_three_seeds(bench: ModuleType, tmp_path: Path, real: Path) -> None:
    rows = plan(bench, tmp_path, ["stress"], real=real)
    assert rows.keys() == {row for row in plan(bench, tmp_path, ["all"]) if row.startswith("stress-")}
    assert [run.name for run in rows["stress-batch-8"]] == [f"stress-batch-8-s{seed}" for seed in (0, 1, 2)]
    assert {run.config.kl.controller.coef for runs in rows.values() for run in runs} == {"auto"}
    lengths = {row: runs[0].config.updates for row, runs in rows.items()}
    told = [(row, runs[0].config.policy.model) for row, runs in rows.items() if lengths[row] == 40]
    assert told, "the rows of the real model"
    assert all(model == str(real / "models/TinyStories-656K") for _, model in told)
    assert lengths.pop("stress-long") == 200
    assert set(lengths.values()) == {40, 60}
    configs = {row: runs[0].config for row, runs in rows.items()}
    assert configs["stress-scores-x100"].reward.terms["model"].weight == 100.0
    assert configs["stress-scores-x100"].reward.clip is None
    assert {row for row, config in configs.items() if config.kl.ceiling is None} == {
        "stress-rate-1e-3",
        "stress-rate-2e-3",
    }
    for runs in rows.values():
        check_plugins(runs[0].config)


def test_the_real_model_comes_from_the_hub_or_a_folder(bench: ModuleType, tmp_path: Path, real: Path) -> None:
    (hub,) = {run.config.policy.model for run in plan(bench, tmp_path, ["stress-glad"])["stress-glad"]}
    assert hub == "raincandy-u/TinyStories-656K"
    texts = str(real / "data/tinystories-1000/stories.jsonl")
    for run in plan(bench, tmp_path, ["stress-glad"], real=real)["stress-glad"]:
        assert (run.config.data.prompts, run.config.eval.texts) == (texts, texts)
    home = plan(bench, tmp_path, ["stress-small"], real=real)["stress-small"]
    assert {run.config.policy.model for run in home} == {"builtin:reviews-small"}
    Path(texts).unlink()
    with pytest.raises(InputError, match=r"--real .*: holds no data/tinystories-1000/stories.jsonl"):
        plan(bench, tmp_path, ["stress-glad"], real=real)


def test_rows_whose_model_cannot_be_had_are_left_out_and_named(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(ref: str, key: str) -> str:
        raise InputError(f"{key}: {ref}: no such folder here")

    monkeypatch.setattr("control.rows.model_folder", gone)
    assert bench.main(["--out", str(tmp_path / "out"), "--rows", "stress-glad,stress-brief"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is left out: ")[0] for line in lines] == ["error: stress-glad", "error: stress-brief"]
    assert "--real FOLDER" in lines[0]
    assert bench.Planner(tmp_path).left_out(plan(bench, tmp_path, ["stress-small"])) == []


def rest(exponent: float, ideal: float) -> Callable[[float], float]:
    """KL/target at rest under a constant beta: a power of it."""
    return lambda coef: (ideal / coef) ** exponent


@pytest.mark.parametrize("ideal", [1e-3, 0.02, 0.13, 0.9, 40.0])
@pytest.mark.parametrize("exponent", [0.6, 1.0, 2.0])
def test_the_search_arrives_within_25_percent(bench: ModuleType, exponent: float, ideal: float) -> None:
    reach = importlib.import_module("control.reach")
    level, tries, coef = rest(exponent, ideal), [], "auto"
    while coef is not None:
        beta = 0.13 if coef == "auto" else coef
        tries.append(reach.Try(beta, level(beta), abs(level(beta) - 1.0)))
        coef = reach.next_coef(tries)
    assert reach.Reach(tries).reachable, tries
    assert len(tries) <= 6


def test_the_search_ends_where_no_beta_helps(bench: ModuleType) -> None:
    reach = importlib.import_module("control.reach")
    assert reach.next_coef([reach.Try(0.1, 0.20, 0.8), reach.Try(0.02, 0.203, 0.797)]) is None  # too slow to get there
    assert reach.next_coef([reach.Try(0.1, 0.20, 0.8), reach.Try(0.02, 0.40, 0.6)]) == 0.008  # it still rises
    noisy = [reach.Try(0.1 + 0.01 * i, 1.0, 0.4) for i in range(6)]
    assert reach.next_coef(noisy) is None  # in the mean at the target, and never near it
    assert not reach.Reach(noisy).reachable


def test_reach_trains_until_the_target_is_held_and_is_kept(bench: ModuleType, tmp_path: Path) -> None:
    """A plant whose KL is the target at beta 0.06; auto is 0.2."""
    level, trained = rest(1.0, 0.06), []
    planner = bench.Planner(tmp_path)

    def train(runs: list[Any]) -> None:
        for run in runs:
            coef = 0.2 if run.config.kl.controller.coef == "auto" else run.config.kl.controller.coef
            trained.append(coef)
            write_run(run, [0.0] * 30 + [level(coef)] * 30, coef=coef)

    found = bench.search(planner, ["stress-small"], train)["stress-small"]
    assert found.reachable
    assert trained[0] == 0.2
    assert found.best.coef == trained[-1] == pytest.approx(0.06, rel=0.3)
    assert found.best.tail_error == pytest.approx(abs(0.06 / found.best.coef - 1.0))
    before = len(trained)
    assert bench.search(planner, ["stress-small"], train) == {"stress-small": found}
    assert bench.read_reach(planner) == {"stress-small": found}
    assert len(trained) == before
    assert bench.read_reach(bench.Planner(tmp_path, ["kl.target=0.2"])) == {}  # another setting
    assert bench.search(planner, ["stress-lora"], lambda runs: None) == {}  # nothing has been trained


def test_constant_betas_have_the_rows_setting_and_no_ceiling(bench: ModuleType, tmp_path: Path) -> None:
    planner = bench.Planner(tmp_path)
    run = planner.constant("stress-sequence", 0.125)
    kl = run.config.kl
    assert (run.name, kl.unit, kl.target_value, kl.ceiling) == (
        "stress-sequence-constant-0.125-s0",
        "sequence",
        2.7,
        None,
    )
    assert (kl.controller.kind, kl.controller.coef) == ("fixed", 0.125)
    assert planner.constant("stress-small", "auto").config.kl.controller.coef == "auto"
    assert planner.constant("stress-shrinking", "auto").config.reward.options == {"responses": 1024}


def test_stress_goals_leave_out_what_no_constant_beta_holds(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reach = importlib.import_module("control.reach")
    names = ["stress-small", "stress-rate-1e-3", "stress-rate-1e-5"]
    rows = plan(bench, tmp_path, names)
    for run in rows["stress-small"]:
        write_run(run, [1.1] * 60)
    for run in rows["stress-rate-1e-3"]:  # without a ceiling: its peak is no goal
        write_run(run, [4.0] + [1.0] * 59)
    for run in rows["stress-rate-1e-5"]:
        write_run(run, [0.2] * 60)
    arguments = ["--out", str(tmp_path), "--rows", ",".join(names), "--table-only"]
    planner = bench.Planner(tmp_path)
    reach.keep(planner, "stress-small", reach.Reach([reach.Try(0.2, 1.0, 0.12)]))
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    verdicts = [line.split()[0] for line in out.split("Goals of the stress rows")[1].splitlines()[1:4]]
    assert verdicts == ["MISSED", "MISSED", "met"]  # a row of unknown reach counts
    assert "note: --reach has not been run for stress-rate-1e-3, stress-rate-1e-5" in out
    reach.keep(planner, "stress-rate-1e-3", reach.Reach([reach.Try(0.2, 0.9, 0.2)]))
    reach.keep(planner, "stress-rate-1e-5", reach.Reach([reach.Try(0.2, 0.2, 0.8), reach.Try(0.01, 0.21, 0.79)]))
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Goals of the stress rows (6 of 6 runs of 2 rows)" in out
    verdicts = [line.split()[0] for line in out.split("Goals of the stress rows")[1].splitlines()[1:4]]
    assert verdicts == ["met", "met", "met"]  # (3 * 0.1 + 3 * 0) / 6
    assert "left out, as no constant beta holds the target: stress-rate-1e-5" in out
    table = {line.split()[0]: line for line in out.splitlines()[:4] if line.strip()}
    assert "0.120 at 0.200" in table["stress-small"]
    assert "NO: 0.790 at 0.010" in table["stress-rate-1e-5"]


def test_the_shrinking_reward_counts_responses_and_keeps_its_count(bench: ModuleType) -> None:
    from rlhf_kl.builtin.gold import gold_scores

    reward = importlib.import_module("stress_rewards").ShrinkingReward
    prompts = ["We stayed at the harbour hotel last weekend ."] * 2
    responses = ["The room was clean and cosy . We will come back soon .", "The room was damp . We will never return ."]
    full = gold_scores(prompts, responses)
    assert full[0] > full[1]
    one = reward(responses=4)
    assert [one(prompts, responses) for _ in range(2)] == [full, full]
    other = reward(responses=4)
    other.load_state_dict(one.state_dict())
    assert one(prompts, responses) == other(prompts, responses) == pytest.approx([0.05 * score for score in full])
    default = reward()
    assert default.left == 1024 + 44 * 64  # the reference samples, and 44 updates: number 45 is the first that shrinks
