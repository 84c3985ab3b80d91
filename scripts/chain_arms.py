"""What a chain of targets gives beside runs of their own: score, true score and perplexity at each target, with errors.

    python scripts/chain_arms.py --jobs 2               3,500 updates and 125 evaluations: an hour on two cores
    python scripts/chain_arms.py --jobs 2 --seed 0      one seed

The targets and seeds are those of chain.yaml. The arms:

own-60   a run of 60 updates at each target
own-20   a run of 20 updates at each target
chain    20 updates at each target from low to high, each run from the policy of the one before
down     the same from high to low: the KL comes from above
held     the lowest target five times: as many updates as the chain, without its KL

Each policy is evaluated as by `rlhf-kl eval --samples 1024`. Finished runs and evaluations are used again. The result
is a table and chain.json beside the runs. Errors are standard errors of the mean over seeds; share: the score gained
over the reference, of what own-60 gains at that target; a star: a true score that differs from own-60's by more than
two standard errors of the difference, paired by seed.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.evaluate import evaluate
from rlhf_kl.commands.grid import train_grid
from rlhf_kl.config.compare import ComparePlan, PlannedRun, link, load_compare
from rlhf_kl.program import NUMBER, cores
from rlhf_kl.report.verdict import text_table
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import write_json

HERE = Path(__file__).resolve().parent
FIGURES = ("kl_token", "scores", "gold", "perplexity", "forward_kl_token", "distinct_2")
SHOWN = ("kl_token", "scores", "gold", "perplexity")

Results = dict[str, dict[float, dict[int, dict[str, Any]]]]  # by arm, target (of `held`: its place) and seed


def named(run: PlannedRun, arm: str, folder: Path, label: str = "") -> PlannedRun:
    """The run as one of an arm, with a folder and a name of its own."""
    variant = f"{arm}-{label or run.variant.removeprefix('target-')}"
    name = f"{variant}-s{run.seed}"
    section = run.config.run.model_copy(update={"name": name, "output_dir": str(folder / "runs" / name)})
    return PlannedRun(variant, run.seed, run.config.model_copy(update={"run": section}))


def plan_arms(folder: Path, seed: int | None, sets: Sequence[str], updates: int) -> ComparePlan:
    """The runs of all arms, seed by seed. `updates`: of a run of the chain; `own-60` has three times as many."""
    plans = {n: load_compare(HERE / "chain.yaml", sets, folder, seed, updates=n) for n in (updates, 3 * updates)}
    short, long = (plan.runs for plan in plans.values())
    runs: list[PlannedRun] = []
    for number in dict.fromkeys(run.seed for run in short):
        row, others = ([run for run in each if run.seed == number] for each in (short, long))
        runs += [named(run, "own-60", folder) for run in others] + [named(run, "own-20", folder) for run in row]
        runs += link([named(run, "chain", folder) for run in row])
        runs += link([named(run, "down", folder) for run in reversed(row)])
        runs += link([named(row[0], "held", folder, run.variant.removeprefix("target-")) for run in row])
    return replace(plans[updates], folder=folder, runs=runs)


def evaluated(run: PlannedRun, folder: Path, samples: int) -> dict[str, Any]:
    """The figures of `eval --samples`, kept beside the runs."""
    file = folder / "evaluations" / f"{run.name}-{samples}.json"
    if not file.is_file():
        with redirect_stdout(io.StringIO()) as out:
            evaluate(run=Path(run.config.run.output_dir), samples=samples, as_json=True, quiet=True)
        figures = json.loads(out.getvalue())
        figures.pop("texts")
        file.parent.mkdir(exist_ok=True)
        write_json(file, figures)
    return dict(json.loads(file.read_text(encoding="utf-8")))


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of some seeds and its standard error, None for one seed."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def summed_up(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """For each arm and target: means with errors, the share of own-60's gain, and the difference in gold."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, by_target in results.items():
        for target, by_seed in by_target.items():
            entry: dict[str, Any] = {
                name: mean_error([figures[name] for figures in by_seed.values()])
                for name in FIGURES
                if all(figures.get(name) is not None for figures in by_seed.values())
            }
            pairs = [
                (own, results["own-60"][target][seed])
                for seed, own in by_seed.items()
                if seed in results["own-60"].get(target, {})
            ]
            start = "reference"
            shares = [(a["scores"] - a[start]["scores"]) / (b["scores"] - b[start]["scores"]) for a, b in pairs]
            if pairs and arm not in ("own-60", "held"):
                entry["share"] = mean_error(shares)
                entry["gold_difference"] = mean_error([a["gold"] - b["gold"] for a, b in pairs])
            table.setdefault(arm, {})[f"{target:g}"] = entry
    return table


def shown(pair: tuple[float, float | None] | None, digits: int = 2) -> str:
    if pair is None:
        return "-"
    mean, error = pair
    return f"{mean:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")


def rows_of(table: dict[str, dict[str, dict[str, Any]]]) -> list[list[str]]:
    """The lines of the printed table."""
    rows = []
    for arm, by_target in table.items():
        for number, (target, entry) in enumerate(by_target.items(), start=1):
            difference = entry.get("gold_difference")
            star = "*" if difference and difference[1] and abs(difference[0]) > 2 * difference[1] else ""
            place = f"{arm} {number}" if arm == "held" else f"{arm} {target}"
            figures = [shown(entry.get(name), 3 if name == "kl_token" else 2) for name in SHOWN]
            share = entry.get("share")
            rows.append([place, *figures[:2], figures[2] + star, figures[3], shown(share, 3) if share else "-"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/chain_arms"))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--updates", type=int, default=20, help="of a run of the chain")
    parser.add_argument("--samples", type=int, default=1024, help="held-out responses of an evaluation")
    parser.add_argument("--set", action="append", dest="sets", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    ui.start(False)
    plan = plan_arms(args.out.resolve(), args.seed, args.sets, args.updates)
    if failures := train_grid(plan, jobs=args.jobs, overwrite=False):
        print(f"failed: {', '.join(failures)}", file=sys.stderr)
        return 1
    runs = [run for run in plan.runs if RunFolder(Path(run.config.run.output_dir)).final.is_dir()]
    os.environ.setdefault(NUMBER, str(max(1, cores() // args.jobs)))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn) as pool, ui.progress("evaluating", len(runs)) as advance:
        results: Results = {}
        jobs = [pool.submit(evaluated, run, plan.folder, args.samples) for run in runs]
        for run, job in zip(runs, jobs, strict=True):
            arm, _, label = run.variant.rpartition("-")
            results.setdefault(arm, {}).setdefault(float(label), {})[run.seed] = job.result()
            advance(1)
    table = summed_up(results)
    seeds = list(dict.fromkeys(run.seed for run in runs))
    by_seed = {
        arm: {
            f"{target:g}": {
                str(seed): {name: figures.get(name) for name in (*FIGURES, "standard_errors", "reference")}
                for seed, figures in each.items()
            }
            for target, each in by_target.items()
        }
        for arm, by_target in results.items()
    }
    write_json(plan.folder / "chain.json", {"seeds": seeds, "arms": table, "runs": by_seed})
    header = ["arm and target", "KL", "score", "true score", "perplexity", "share"]
    print(text_table(header, rows_of(table)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
