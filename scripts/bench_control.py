"""How well each KL controller holds its target in real runs: a table, a picture, and a verdict.

    python scripts/bench_control.py --jobs 2          the ten rows: 42 runs of about a minute each
    python scripts/bench_control.py --rows adaptive   one row: three seeds x three starting betas
    python scripts/bench_control.py --rows stress     settings that nobody tuned `adaptive` for, and a real small model
    python scripts/bench_control.py --rows stress --reach   whether some constant beta holds the target there
    python scripts/bench_control.py --table-only      the results so far

The rows are comparisons in bench_control.yaml. Their runs are trained as `rlhf-kl compare` does: finished ones
are used again, an interrupted one goes on. A quick look: --seed 0 --set ppo.total_episodes=640
Into --out: bench_control.json, bench_control.png, runs/, one folder per run, and reach.json of --reach.
The real model, TinyStories-656K, comes from the hub, or from --real FOLDER.

tail error  mean over the second half of the updates of |exact KL / target - 1|
reachable   lowest tail error of a constant beta without a ceiling, of at most six; NO: above 0.25, out of the goals
peak        largest KL / target
in band     share of the updates from number 15 on within 25 % of the target
sd log beta standard deviation of log beta over the second half
cut         share of the second half's updates that the ceiling shortened
score       that PPO sees (normalised, clipped, less penalties); with gold and KL the mean of the last ten updates
of limit    score gain over the most that any policy could have at the same KL (`tilt_share` of summary.json)
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from control.reach import reach_table, read_reach, search
from control.results import by_beta, by_row, charts, goal_lines, read_results, stress_lines
from control.rows import Planner, is_stress

from rlhf_kl import ui
from rlhf_kl.commands.compare import train_grid
from rlhf_kl.commands.grid import check_folders
from rlhf_kl.config.compare import ComparePlan, PlannedRun, check_variants
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.report.drawing import save_sheet
from rlhf_kl.run.log import write_json
from rlhf_kl.ui import log


def show(rows: dict[str, list[PlannedRun]], planner: Planner) -> bool:
    """Print tables, write bench_control.json and .png; returns whether no run is missing."""
    results, missing = read_results(rows)
    reach, out = read_reach(planner), planner.out
    asked = {row: len(runs) for row, runs in rows.items()}
    print(f"{by_row(results, asked, reach)}\n")
    if not all(map(is_stress, rows)):  # these start from one beta only
        print(f"{by_beta(results)}\n")
    if "adaptive" in rows:
        print("\n".join(goal_lines(results["adaptive"], asked["adaptive"])))
    if any(map(is_stress, rows)):
        print("\n".join(stress_lines(results, asked, reach)))
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
    add("--rows", nargs="+", default=[], metavar="ROW",
        help="default: the first ten of bench_control.yaml; or `all`, or `stress`")  # fmt: skip
    add("--seed", type=int, help="this one only, instead of the row's")
    add("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    add("--set", dest="sets", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="for every run; wins over its row")  # fmt: skip
    add("--overwrite", action="store_true", help="start all runs anew")
    add("--real", type=Path, default=os.environ.get("RLHF_KL_REAL") or None, metavar="FOLDER",
        help="with models/TinyStories-656K and data/tinystories-1000; default: RLHF_KL_REAL, else the hub")  # fmt: skip
    add("--reach", action="store_true",
        help="search a constant beta that holds each row's target, and keep the results in reach.json")  # fmt: skip
    add("--table-only", action="store_true", help="run nothing, show the results so far")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and show the rows; returns the exit code."""
    asked = parse_arguments(arguments)
    ui.start()
    out = asked.out.absolute()
    planner = Planner(out, asked.sets, asked.seed, asked.real)

    def train(runs: list[PlannedRun]) -> None:
        plan = ComparePlan(out.name, out, runs, [])
        check_variants(plan)
        if asked.table_only:
            check_folders(plan)
        else:
            train_grid(plan, jobs=asked.jobs, overwrite=asked.overwrite)

    try:
        if asked.jobs < 1:
            raise InputError("--jobs must be at least 1")
        names = [name for text in asked.rows for name in text.split(",") if name]
        rows = planner.plan(names)
        left_out = [] if asked.table_only else planner.left_out(rows)
        for name, reason in left_out:
            log.error(f"{name} is left out: {reason}")
            del rows[name]
        if not rows:
            return 1
        if asked.reach:
            reach = search(planner, list(rows), train, anew=asked.overwrite)
            print(reach_table(reach))
            return 0 if len(reach) == len(rows) and not left_out else 1
        train([run for runs in rows.values() for run in runs])
        return 0 if show(rows, planner) and not left_out else 1
    except InputError as error:
        for problem in error.problems:
            log.error(problem)
        return 2
    except (KeyboardInterrupt, Interrupted):
        log.info("interrupted; the same command goes on from the last checkpoints")
        return 130


if __name__ == "__main__":
    sys.exit(main())
