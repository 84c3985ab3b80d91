"""How well each KL controller holds its target in real runs: a table and a picture.

    python scripts/bench_control.py --jobs 2          the ten rows: 42 runs of about a minute each
    python scripts/bench_control.py --rows adaptive   one row: three seeds x three starting betas
    python scripts/bench_control.py --rows stress     settings that nobody tuned `adaptive` for, and a real small model
    python scripts/bench_control.py --rows stress --reach   whether some constant beta holds the target there

The rows are in bench_control.yaml. Their runs are trained as `rlhf-kl compare` does: finished ones are used again, an
interrupted one goes on. A quick look: --seed 0 --set ppo.total_episodes=640
Into --out: bench_control.json, bench_control.png and runs/, one folder per run.
The real model, TinyStories-656K, comes from the hub, or from --real FOLDER.

tail error  mean over the second half of the updates of |exact KL / target - 1|
peak        largest KL / target
in band     share of the updates from number 15 on within 25 % of the target
sd log beta standard deviation of log beta over the second half
cut         share of the second half's updates that the ceiling shortened
score       that PPO sees (normalised, clipped, less penalties), with the KL the mean of the last ten updates
gold        of held-out prompts at the end
of limit    score gain over the most that any policy could have at the same KL (`tilt_share` of summary.json)
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rlhf_kl import ui
from rlhf_kl.commands.grid import train_grid
from rlhf_kl.config.variants import ComparePlan, PlannedRun, check_variants, plan_comparison
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.control.verdict import BAND, tail
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.report.charts import ratio_chart
from rlhf_kl.report.drawing import ORDERED, Chart, save_sheet
from rlhf_kl.report.one_run import RunResult, read_run
from rlhf_kl.run.log import write_json
from rlhf_kl.text import format_number, format_percent, text_table

ROWS = Path(__file__).with_suffix(".yaml")
DEFAULT_ROWS = 10
LEAN = ("eval.every=1000000", "tracking.samples_every=1000000", "tracking.tensorboard=false", "checkpoint.every=20",
        "checkpoint.keep=1")  # fmt: skip
STORIES = "data/tinystories-1000/stories.jsonl"
REAL = {"policy.model": "models/TinyStories-656K", "data.prompts": STORIES, "eval.texts": STORIES}  # below --real


def from_files(folder: Path) -> list[str]:
    """Settings of `tinystories.yaml` with files in place of what the hub has; a file has no split for validation."""
    return [*(f"{key}={(folder / path).absolute()}" for key, path in REAL.items()), "eval.split=test"]


TRIES = 6  # constant betas of a row
FARTHEST = 10.0  # largest factor between two of them
INNER = (0.15, 0.85)  # part of a bracket that the next beta lies in

Results = dict[str, dict[float | str, list[RunResult]]]  # by row and starting beta


def chosen(names: Sequence[str], rows: Mapping[str, Any]) -> list[str]:
    """Names of rows; `all`, `stress` and none stand for several. Errors: InputError."""
    groups = {"all": list(rows), "stress": [row for row in rows if row.startswith("stress-")]}
    wanted = [row for name in names for row in groups.get(name, [name])] or list(rows)[:DEFAULT_ROWS]
    if unknown := [name for name in wanted if name not in rows]:
        raise InputError(*(f"--rows: no row {name!r}{suggestion(name, [*rows, *groups])}" for name in unknown))
    return list(dict.fromkeys(wanted))


def plan_row(name: str, row: Mapping[str, Any], args: Any, constant: float | str | None = None) -> list[PlannedRun]:
    """A row's runs: its seeds times its starting betas, or one run with a constant beta and no ceiling."""
    base, seeds, betas = row.get("base", "base.yaml"), row.get("seeds", [0]), row.get("betas", ["auto"])
    change = {key: value for key, value in row.items() if key not in ("base", "seeds", "betas", "reach")}
    kl = change.get("kl", {})
    if constant is None:
        label = {beta: name if beta == "auto" else f"{name}-b{beta:g}" for beta in betas}
        controllers = {beta: {"kind": "adaptive"} | kl.get("controller", {}) | {"coef": beta} for beta in betas}
    else:
        seeds, change = [0], change | row.get("reach", {})
        kl = kl | {"ceiling": None}
        label = {constant: f"{name}-constant-{constant}"}
        controllers = {constant: {"kind": "fixed", "coef": constant}}
    variants = {label[beta]: change | {"kl": kl | {"controller": law}} for beta, law in controllers.items()}
    sets = from_files(args.real) if args.real and "base" in row else []
    raw = {"base": base, "seeds": seeds, "variants": variants}
    return plan_comparison(raw, ROWS, [*LEAN, *sets, *args.sets], args.out, args.seed).runs


def finished(planned: PlannedRun) -> RunResult | None:
    """A run that has all its updates; None for any other."""
    folder = Path(planned.config.run.output_dir)
    run = read_run(folder) if (folder / "config.yaml").is_file() else None
    return run if run and run.status == "finished" and len(run.updates) == planned.config.updates else None


def log_beta_sd(run: RunResult) -> float | None:
    """Standard deviation of log beta over the second half of the updates; None without values, or if one is 0."""
    late = tail(run.series("kl/coef")[1])
    return pstdev(map(math.log, late)) if late and min(late) > 0.0 else None


def cut(run: RunResult) -> float:
    """Share of the second half's updates that the ceiling shortened."""
    return fmean(row["kl/backtrack_factor"] < 1.0 for row in tail(run.updates))


OWN = {"log_beta_sd": log_beta_sd, "cut": cut, "tilt_share": lambda run: run.summary.get("tilt_share")}


def over(runs: Sequence[RunResult], key: str, reduce: Callable[[list[float]], float] = fmean) -> float | None:
    """A figure of several runs as one; None where a run has none."""
    values = [(run.figures | {name: own(run) for name, own in OWN.items()}).get(key) for run in runs]
    return reduce(values) if values and None not in values else None


def by_row(results: Results) -> str:
    """One line a row: means over its runs, and the worst where the header names it."""
    header = ("", "runs", "tail error", "worst", "peak", "worst", "in band", "worst", "sd log beta", "cut", "score",
              "gold", "KL", "of limit")  # fmt: skip
    columns: list[tuple[Any, str, Any]] = [
        (format_number, "tail_error", fmean), (format_number, "tail_error", max),
        (format_number, "peak", fmean), (format_number, "peak", max),
        (format_percent, "time_in_band", fmean), (format_percent, "time_in_band", min),
        (format_number, "log_beta_sd", fmean), (format_percent, "cut", fmean),
        (format_number, "scores_shaped", fmean), (format_number, "gold", fmean), (format_number, "kl", fmean),
        (format_percent, "tilt_share", fmean),
    ]  # fmt: skip
    body = []
    for row, found in results.items():
        runs = [run for same in found.values() for run in same]
        body.append([row, str(len(runs)), *(form(over(runs, key, reduce)) for form, key, reduce in columns)])
    return text_table(header, body)


def by_beta(results: Results) -> str:
    """Tail error, and in brackets the peak, by row and starting beta; means over the seeds."""
    betas = list(dict.fromkeys(beta for found in results.values() for beta in found))
    body = [
        [row, *(f"{format_number(over(found.get(beta, []), 'tail_error'))} "
                f"({format_number(over(found.get(beta, []), 'peak'))}x)" for beta in betas)]
        for row, found in results.items()
    ]  # fmt: skip
    return text_table(("tail error (peak) from beta", *map(str, betas)), body)


def chart(row: str, found: Mapping[float | str, Sequence[RunResult]]) -> Chart:
    """KL / target over the updates, coloured by starting beta."""
    tints = [ORDERED[2 * i % len(ORDERED)] for i in range(len(found))]
    curves = [
        (run, tint, str(beta) if run is runs[0] else "")
        for (beta, runs), tint in zip(found.items(), tints, strict=True)
        for run in runs
    ]
    every = [run for run, _, _ in curves]
    return ratio_chart(row, f"{row}: tail error {format_number(over(every, 'tail_error'), 2)}", curves)


def show(rows: Mapping[str, list[PlannedRun]], out: Path) -> bool:
    """Print tables, write bench_control.json and .png; returns whether no run is missing."""
    results: Results = {row: {} for row in rows}
    missing = []
    for row, runs in rows.items():
        for planned in runs:
            if (run := finished(planned)) is None:
                missing.append(planned.name)
            else:
                results[row].setdefault(planned.config.kl.controller.coef, []).append(run)
    print(f"{by_row(results)}\n\n{by_beta(results)}\n", *(f"missing: {name}\n" for name in missing))
    every = {row: [run for runs in found.values() for run in runs] for row, found in results.items()}
    revisions = sorted({str(run.summary.get("git")) for runs in every.values() for run in runs})
    figures = {row: {run.name: run.figures for run in runs} for row, runs in every.items()}
    write_json(out / "bench_control.json", {"rows": figures, "revisions": revisions, "missing": missing})
    save_sheet([chart(row, found) for row, found in results.items()], out / "bench_control.png",
               columns=min(3 if len(rows) > 4 else 2, len(rows)))  # fmt: skip
    return not missing


# ---- whether some constant beta holds a row's target


def next_coef(tries: Sequence[tuple[float, float, float]]) -> float | str | None:
    """The constant beta to try next; the first is auto, and None ends the search.

    tries: beta, mean KL/target and tail error of each run so far. A larger beta means a lower KL. Betas that are 3x
    apart would miss the target: at rest the KL falls as 1/beta to 1/beta², so within 25 % lies a range of betas no
    wider than 1.3x to 1.7x.
    """
    if not tries:
        return "auto"
    if len(tries) >= TRIES or min(error for _, _, error in tries) <= BAND:
        return None
    above = max(((coef, level) for coef, level, _ in tries if level > 1.0), default=None)  # the nearest to the target
    below = min(((coef, level) for coef, level, _ in tries if level <= 1.0), default=None)
    if above is None or below is None:
        coef, level = above or below or (1.0, 1.0)
        return float(f"{coef * min(max(level, 1 / FARTHEST), FARTHEST):.3g}")
    low, high = (math.log(max(level, 1e-3)) for _, level in (above, below))
    share = min(max(low / (low - high), INNER[0]), INNER[1])
    return float(f"{above[0] * (below[0] / above[0]) ** share:.3g}")


def search(name: str, row: Mapping[str, Any], args: Any) -> list[tuple[float, float, float]]:
    """Beta, mean KL/target of the second half and tail error of each constant beta that was tried."""
    tries: list[tuple[float, float, float]] = []
    while (coef := next_coef(tries)) is not None:
        (planned,) = plan_row(name, row, args, coef)
        train([planned], args)
        if (run := finished(planned)) is None:
            raise InputError(f"{planned.name}: the run has not come to its end")
        tries.append((run.updates[0]["kl/coef"], fmean(tail(run.ratios)), run.figures["tail_error"]))
    return tries


def show_reach(names: Sequence[str], rows: Mapping[str, Any], args: Any) -> None:
    """A line a row: the best constant beta, and all that were tried with their mean KL/target."""
    body = []
    for name in names:
        tries = search(name, rows[name], args)
        coef, _, error = min(tries, key=lambda one: one[2])
        tried = ", ".join(f"{format_number(one[0])}: {format_number(one[1], 2)}" for one in sorted(tries))
        body.append([name, "yes" if error <= BAND else "NO", format_number(coef), format_number(error), tried])
    print(text_table(("reachable by a constant beta", "", "beta", "tail error", "tried: KL/target"), body))


def train(runs: list[PlannedRun], args: Any) -> None:
    """Train those that are not finished."""
    plan = ComparePlan(args.out.name, args.out, runs, [])
    check_variants(plan)
    train_grid(plan, jobs=args.jobs, overwrite=args.overwrite)


def parse_arguments(words: Sequence[str] | None) -> Any:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/bench_control"))
    add("--rows", nargs="+", default=[], metavar="ROW", help="default: the first ten; or `all`, or `stress`")
    add("--seed", type=int, help="this one only, instead of the row's")
    add("--jobs", type=int, default=1, help="runs at once; above 1 each has its share of the cores")
    add("--set", dest="sets", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="for every run")
    add("--overwrite", action="store_true", help="start all runs anew")
    add("--real", type=Path, default=os.environ.get("RLHF_KL_REAL") or None, metavar="FOLDER",
        help="with models/TinyStories-656K and data/tinystories-1000; default: RLHF_KL_REAL, else the hub")  # fmt: skip
    add("--reach", action="store_true", help="search a constant beta that holds each row's target")
    add("--table-only", action="store_true", help="run nothing, show the results so far")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run and show the rows; returns the exit code."""
    args, rows = parse_arguments(words), read_yaml(ROWS)
    args.out = args.out.absolute()
    ui.start()
    try:
        names = chosen(args.rows, rows)
        if args.reach:
            show_reach(names, rows, args)
            return 0
        planned = {name: plan_row(name, rows[name], args) for name in names}
        if not args.table_only:
            train([run for runs in planned.values() for run in runs], args)
        return 0 if show(planned, args.out) else 1
    except InputError as error:
        for problem in error.problems:
            ui.log.error(problem)
        return 2


if __name__ == "__main__":
    sys.exit(main())
