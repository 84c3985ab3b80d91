"""How well each KL controller holds its target in real runs: a table, a picture, and a verdict.

    python scripts/bench_control.py --jobs 2          the ten rows: 42 runs of about a minute each
    python scripts/bench_control.py --rows adaptive   one row: three seeds x three starting betas
    python scripts/bench_control.py --rows stress     settings that nobody tuned `adaptive` for, and a real small model
    python scripts/bench_control.py --rows stress-glad --reach   can any constant beta hold the target there?
    python scripts/bench_control.py --table-only      what there is so far

The rows are comparisons in bench_control.yaml. Their runs are trained as `rlhf-kl compare` does: finished ones
are used again, an interrupted one goes on. A quick look: --seed 0 --set ppo.total_episodes=640
Into --out: bench_control.json, bench_control.png, and runs/, one folder per run.

TinyStories-656K comes from the hub, or from --real FOLDER.

tail error  mean over the second half of the updates of |exact KL / target - 1|
peak        largest KL / target
in band     share of the updates from number 15 on within 25 % of the target
cut         share of the second half's updates that the ceiling shortened
quiet       standard deviation of log beta over the second half
score       that PPO sees (normalised, clipped, less penalties); with gold and KL the mean of the last ten updates
of limit    score gain over the most that any policy could have at the same KL (`tilt_share` of summary.json)
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from rlhf_kl.commands.compare import train_grid
from rlhf_kl.commands.grid import check_folders
from rlhf_kl.components import suggestion
from rlhf_kl.config.compare import ComparePlan, PlannedRun, plan_comparison
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.report.control import tail
from rlhf_kl.report.plots.chart import UPDATE, Axes, Chart, plot_line, plot_target
from rlhf_kl.report.plots.compare import TOP
from rlhf_kl.report.plots.render import save_sheet
from rlhf_kl.report.plots.style import ORDERED
from rlhf_kl.report.run import RunResult, read_run
from rlhf_kl.report.table import text_table
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.figures import format_number, format_percent, read_number
from rlhf_kl.run.run_folder import write_json

ROWS = Path(__file__).resolve().with_suffix(".yaml")
DEFAULT_ROWS = 10
BASE = "../configs/ppo_adaptive.yaml"
LEAN = (
    "eval.every=1000000",
    "tracking.samples_every=1000000",
    "tracking.tensorboard=false",
    "checkpoint.every=20",
    "checkpoint.keep=1",
)
STRESS = "stress"  # stands for every row that begins with it
REACH = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # constant betas
REACHABLE = 0.25  # tail error of the best of them
REAL = {
    "policy.model": "models/TinyStories-656K",
    "data.prompts": "data/tinystories-1000/stories.jsonl",
    "eval.texts": "data/tinystories-1000/stories.jsonl",
}


def plan_rows(
    names: Sequence[str],
    out: Path,
    sets: Sequence[str] = (),
    seed: int | None = None,
    real: Path | None = None,
    reach: bool = False,
) -> dict[str, list[PlannedRun]]:
    """The runs of each row; `all` stands for every row, `stress` for those of that name, and none for the first ten.

    real: a folder that holds what the rows of a real model read. reach: constant betas instead of each row's own
    controller, one seed. Errors: InputError.
    """
    rows = read_yaml(ROWS)
    names = [row for name in names for row in (_stress_rows(rows) if name == STRESS else [name])]
    names = list(rows) if "all" in names else names or list(rows)[:DEFAULT_ROWS]
    if problems := [f"--rows: no row {name!r}{suggestion(name, rows)}" for name in names if name not in rows]:
        raise InputError(*problems)
    if reach:
        rows = {name: constant_betas(name, rows[name]) for name in names}
    local = [] if real is None else [f"{key}={(real / path).absolute()}" for key, path in REAL.items()]

    def runs(row: dict[str, Any]) -> list[PlannedRun]:
        return plan_comparison(
            {"base": BASE, **row}, ROWS, [*LEAN, *(local if "base" in row else ()), *sets], out, seed
        ).runs

    return {name: runs(rows[name]) for name in names}


def _stress_rows(rows: Iterable[str]) -> list[str]:
    return [name for name in rows if name.startswith(f"{STRESS}-")]


def constant_betas(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """The same setting under constant betas, without a ceiling."""
    ((_, fragment),) = list(row["variants"].items())[:1]
    kl = fragment.get("kl", {})
    return row | {
        "seeds": [0],
        "variants": {
            f"{name}-beta{coef:g}": fragment
            | {"kl": kl | {"controller": {"kind": "fixed", "coef": coef}, "ceiling": None}}
            for coef in REACH
        },
    }


# ---- figures


class Result(NamedTuple):
    """A finished run of a row."""

    beta: float | str  # that it started from, or "auto"
    run: RunResult

    @property
    def figures(self) -> dict[str, float | None]:
        betas = [read_number(row, "kl/coef") for row in tail(self.run.updates)]
        logs = [math.log(beta) for beta in betas if beta]
        own = {"of_limit": read_number(self.run.summary, "tilt_share"), "quiet": pstdev(logs) if logs else None}
        return asdict(self.run.figures) | own


Reduce = Callable[[list[float]], float]


def over_runs(results: Sequence[Result], key: str, reduce: Reduce = fmean) -> float | None:
    """A figure of several runs as one; None where a run has none."""
    values = [result.figures[key] for result in results]
    known = [value for value in values if value is not None]
    return reduce(known) if known and len(known) == len(values) else None


def read_results(rows: dict[str, list[PlannedRun]]) -> tuple[dict[str, list[Result]], list[str]]:
    """The finished runs of each row, and a line for each other run."""
    results: dict[str, list[Result]] = {row: [] for row in rows}
    missing = []
    for row, runs in rows.items():
        for planned in runs:
            folder = Path(planned.config.run.output_dir)
            if not (folder / "config.yaml").is_file():
                missing.append(f"{planned.name}: has not started")
                continue
            run = read_run(folder)
            if run.status == "finished" and len(run.updates) == planned.config.updates:
                results[row].append(Result(planned.config.kl.controller.coef, run))
            else:
                missing.append(f"{planned.name}: {'; '.join(run.notes)}")
    return results, missing


class Goal(NamedTuple):
    """One promise of the default controller."""

    text: str
    key: str
    reduce: Reduce
    limit: float
    at_least: bool = False

    def verdict(self, results: Sequence[Result], asked: int) -> str:
        """met or MISSED; open while runs are missing."""
        value = over_runs(results, self.key, self.reduce)
        if value is None or len(results) < asked:
            return "open"
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "MISSED"


GOAL_RUNS = 9
STRESS_GOALS = (
    Goal("tail error, mean of the runs", "tail_error", fmean, 0.06),
    Goal("tail error, worst run", "tail_error", max, 0.15),
    Goal("peak KL/target with a ceiling, worst run", "peak", max, 1.6),
)
GOALS = (
    Goal("tail error, mean of the runs", "tail_error", fmean, 0.08),
    Goal("tail error, worst run", "tail_error", max, 0.15),
    Goal("peak KL/target, worst run", "peak", max, 1.6),
    Goal("in band, mean of the runs", "time_in_band", fmean, 0.90, at_least=True),
    Goal("cut by the ceiling, mean of the runs", "cut", fmean, 0.20),
)


# ---- what is shown


def by_row(results: dict[str, list[Result]], asked: dict[str, int]) -> str:
    """One line a row: means over its runs, and the worst where the header names it."""
    header = ("", "runs", "tail error", "worst", "peak", "worst", "in band", "worst", "quiet", "cut", "score", "gold",
              "KL", "of limit")  # fmt: skip
    columns: list[tuple[Callable[[float | None], str], str, Reduce]] = [
        (format_number, "tail_error", fmean), (format_number, "tail_error", max),
        (format_number, "peak", fmean), (format_number, "peak", max),
        (format_percent, "time_in_band", fmean), (format_percent, "time_in_band", min),
        (format_number, "quiet", fmean), (format_percent, "cut", fmean),
        (format_number, "scores_shaped", fmean), (format_number, "gold", fmean),
        (format_number, "kl", fmean), (format_percent, "of_limit", fmean),
    ]  # fmt: skip
    body = [
        [row, f"{len(runs)}/{asked[row]}", *(show(over_runs(runs, key, reduce)) for show, key, reduce in columns)]
        for row, runs in results.items()
    ]
    return text_table(header, body)


def starting_betas(results: dict[str, list[Result]]) -> list[float | str]:
    """In order, "auto" last."""
    betas = {result.beta for runs in results.values() for result in runs}
    return sorted(betas, key=lambda beta: (isinstance(beta, str), beta))


def by_beta(results: dict[str, list[Result]]) -> str:
    """Tail error, and in brackets the peak, by row and starting beta; means over the seeds."""
    betas = starting_betas(results)
    body = []
    for row, runs in results.items():
        cells = [row]
        for beta in betas:
            same = [result for result in runs if result.beta == beta]
            tail, peak = over_runs(same, "tail_error"), over_runs(same, "peak")
            cells.append(f"{format_number(tail)} ({format_number(peak)}x)" if same else "-")
        body.append(cells)
    return text_table(("tail error (peak) from beta", *map(str, betas)), body)


def stress_lines(results: dict[str, list[Result]], asked: dict[str, int]) -> list[str]:
    """Which goals the stress rows meet; what no policy of theirs can reach is for `--reach` to say."""
    runs = [run for row in _stress_rows(results) for run in results[row]]
    number = sum(asked[row] for row in _stress_rows(results))
    bounded = [run for run in runs if read_number(run.run.updates[0], "kl/ceiling") is not None]
    lines = [f"Goals of the stress rows ({len(runs)} of {number} runs):"]
    for goal in STRESS_GOALS:
        counted = bounded if goal.key == "peak" else runs
        lines.append(goal_line(goal, counted, len(counted) + number - len(runs)))
    return lines


def reach_lines(results: dict[str, list[Result]]) -> list[str]:
    """Whether some constant beta of each row stays within 25 %."""
    lines = ["Reachable: the best constant beta, and its tail error"]
    for row, runs in results.items():
        best = min(runs, key=lambda run: run.figures["tail_error"] or math.inf, default=None)
        error = None if best is None else best.figures["tail_error"]
        if best is not None and error is not None:
            lines.append(f"  {'yes' if error <= REACHABLE else 'NO':<4} {row:<24} {best.beta:>6}  {error:.3f}")
    return lines


def goal_line(goal: Goal, results: Sequence[Result], asked: int) -> str:
    """A goal, its figure and its verdict."""
    shown = format_number(over_runs(results, goal.key, goal.reduce))
    side = "at least" if goal.at_least else "at most"
    return f"  {goal.verdict(results, asked):<7} {goal.text:<42} {shown:>7}   ({side} {goal.limit:.2f})"


def goal_lines(results: Sequence[Result], asked: int) -> list[str]:
    """Which goals `adaptive` meets, one per line."""
    lines = [f"Goals of `adaptive` ({len(results)} of {asked} runs):"]
    lines += [goal_line(goal, results, asked) for goal in GOALS]
    if asked < GOAL_RUNS:
        lines.append(f"  note: the goals are for {GOAL_RUNS} runs, three seeds x three starting betas")
    return lines


def charts(results: dict[str, list[Result]]) -> list[Chart]:
    """KL / target over the updates, one chart a row, coloured by starting beta."""
    betas = starting_betas(results)
    tints = {beta: ORDERED[(2 * i) % len(ORDERED)] for i, beta in enumerate(betas)}
    return [_chart(row, runs, tints) for row, runs in results.items()]


def _chart(row: str, runs: Sequence[Result], tints: dict[float | str, str]) -> Chart:
    def draw(axes: Axes) -> None:
        axes.set(xlabel=UPDATE, ylabel="KL / target", ylim=(0.0, TOP))
        plot_target(axes, 1.0, label="")
        named: set[float | str] = set()
        for beta, run in runs:
            ratios = [min(ratio, 1.5 * TOP) for ratio in run.ratios]
            label = "" if beta in named else str(beta)
            plot_line(axes, range(1, len(ratios) + 1), ratios, tints[beta], linewidth=1.1, label=label)
            named.add(beta)

    highest = over_runs(runs, "peak", max) or 0.0
    subtitle = f"tail error {format_number(over_runs(runs, 'tail_error'), 2)}"
    subtitle += f", up to {format_number(highest, 2)}x" if highest > TOP else ""
    return Chart(row, row, draw, subtitle=subtitle)


def show(rows: dict[str, list[PlannedRun]], out: Path, *, reach: bool = False) -> bool:
    """Tables to stdout, bench_control.json and .png; whether all runs are there."""
    results, missing = read_results(rows)
    asked = {row: len(runs) for row, runs in rows.items()}
    print(f"{by_row(results, asked)}\n\n{by_beta(results)}\n")
    if "adaptive" in rows:
        print("\n".join(goal_lines(results["adaptive"], asked["adaptive"])))
    if reach:
        print("\n".join(reach_lines(results)))
    elif _stress_rows(rows):
        print("\n".join(stress_lines(results, asked)))
    for line in missing:
        print(f"missing: {line}")
    revisions = sorted({str(result.run.summary.get("git")) for runs in results.values() for result in runs})
    if len(revisions) > 1:
        print(f"note: made by different revisions of the code: {', '.join(revisions)}")
    figures = {row: {result.run.name: result.figures for result in runs} for row, runs in results.items()}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench_control.json", {"rows": figures, "revisions": revisions, "missing": missing})
    columns = min(3 if len(rows) > 4 else 2, len(rows))
    save_sheet(charts(results), out / "bench_control.png", columns=columns,
               footer="Lines: runs, named by starting beta. Band: target ± 25 %.")  # fmt: skip
    print(f"{out / 'bench_control.png'}, {out / 'bench_control.json'}")
    return not missing


def parse_arguments(arguments: Sequence[str] | None) -> Any:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", "--output-dir", type=Path, default=Path("runs/bench_control"))
    add("--rows", nargs="+", default=[], metavar="ROW", help="default: the first ten of bench_control.yaml; or `all`")
    add("--seed", type=int, help="this one only, instead of the row's")
    add("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    add("--set", dest="sets", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="for every run; wins over its row")  # fmt: skip
    add("--overwrite", action="store_true", help="start all runs anew")
    add("--real", type=Path, default=os.environ.get("RLHF_KL_REAL"), metavar="FOLDER",
        help="with models/TinyStories-656K and data/tinystories-1000; default: RLHF_KL_REAL, else the hub")  # fmt: skip
    add("--reach", action="store_true", help="constant betas in the rows' settings: can the target be reached there?")
    add("--table-only", action="store_true", help="run nothing, show what there is")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and show the rows; returns the exit code."""
    asked = parse_arguments(arguments)
    display, out = TrainingDisplay(), asked.out.absolute()
    try:
        if asked.jobs < 1:
            raise InputError("--jobs must be at least 1")
        names = [name for text in asked.rows for name in text.split(",") if name]
        real = None if asked.real is None else Path(asked.real)
        rows = plan_rows(names, out, asked.sets, asked.seed, real, asked.reach)
        plan = ComparePlan(out.name, out, [run for runs in rows.values() for run in runs], [])
        if asked.table_only:
            check_folders(plan)
        else:
            train_grid(plan, jobs=asked.jobs, overwrite=asked.overwrite, display=display)
        return 0 if show(rows, out, reach=asked.reach) else 1
    except InputError as error:
        for problem in error.problems:
            display.error(problem)
        return 2
    except (KeyboardInterrupt, Interrupted):
        display.message("interrupted; the same command goes on from the last checkpoints")
        return 130


if __name__ == "__main__":
    sys.exit(main())
