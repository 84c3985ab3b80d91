"""How well each KL controller holds its target in real runs: a table, a picture, and a verdict.

    python scripts/bench_control.py --jobs 2          the ten rows: 42 runs of about a minute each
    python scripts/bench_control.py --rows adaptive   one row: three seeds x three starting betas
    python scripts/bench_control.py --table-only      what there is so far

Every run is the product itself (`rlhf-kl train --config ppo_adaptive.yaml --resume`) as a process of its own,
so the grid goes on where it was stopped. The ceiling is on in `adaptive` and `fixed+ceiling` (and in those
further rows that vary `adaptive`); every other row runs without one. Results go to --out:
bench_control.json, bench_control.png, and one run folder per run.

tail error  mean over the second half of the updates of |exact KL / target - 1|
peak        largest KL / target
in band     share of the updates from number 15 on within +-25 % of the target
cut         share of the second half's updates that the ceiling shortened
score       mean over the second half of the score that PPO sees (normalised, clipped, less penalties)
gold, KL    means over the second half
limit       score gain over the most that any policy could have at the same KL, for the last ten updates: that
            of 24,576 reference samples tilted by exp(score / beta), which errs on the high side by about 1 %
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_kl.commands.compare import train_grid
from rlhf_kl.config.compare import ComparePlan, PlannedRun
from rlhf_kl.config.load import config_diff, load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.report import control
from rlhf_kl.report.control import BAND, BAND_FROM, ratios
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.resume import finished_summary
from rlhf_kl.run.run_folder import RunFolder, write_json

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "ppo_adaptive.yaml"
FROZEN_BATCHES = 20
NEVER = 1_000_000
LEAN = (
    f"eval.every={NEVER}",
    f"tracking.samples_every={NEVER}",
    "tracking.tensorboard=false",
    "checkpoint.every=20",
    "checkpoint.keep=1",
)
NO_CEILING = ("kl.ceiling=null",)
SEQUENCE_TARGET = 2.7  # nats per response, where no finished run says how long responses are


@dataclass(frozen=True)
class Law:
    """A row of the table: a controller with its options, and what else its runs set."""

    controller: dict[str, Any]
    settings: tuple[str, ...] = NO_CEILING
    all_seeds: bool = False  # else seed 0 alone where --seeds is not given


ADAPTIVE: dict[str, Any] = {"kind": "adaptive"}
LAWS = {
    "adaptive": Law(ADAPTIVE, (), all_seeds=True),
    "adaptive-no-ceiling": Law(ADAPTIVE, all_seeds=True),
    "fixed": Law({"kind": "fixed"}),
    "fixed+ceiling": Law({"kind": "fixed"}, ()),
    "ziegler-10000": Law({"kind": "ziegler", "horizon": 10000}),
    "ziegler-320": Law({"kind": "ziegler", "horizon": 320}),
    "threshold": Law({"kind": "threshold"}),
    "exponential": Law({"kind": "exponential"}),
    "dual": Law({"kind": "dual"}),
    "pid": Law({"kind": "pid"}),
}
FURTHER = {
    "adaptive-target-0.03": Law(ADAPTIVE, ("kl.target=0.03",), all_seeds=True),
    "adaptive-target-0.3": Law(ADAPTIVE, ("kl.target=0.3",), all_seeds=True),
    "adaptive-sequence": Law(ADAPTIVE, ("kl.unit=sequence",), all_seeds=True),
    "adaptive-head": Law(ADAPTIVE, ("policy.value=head",), all_seeds=True),
    "adaptive-separate": Law(ADAPTIVE, ("policy.value=separate",), all_seeds=True),
    "rao-blackwell": Law(ADAPTIVE, ("kl.placement=rao_blackwell", "kl.estimator=exact"), all_seeds=True),
    # The class's own bounds are [0.01, 1]: what the rule does where they do not hold it.
    "threshold-wide": Law({"kind": "threshold", "min_coef": 1e-4, "max_coef": 10.0}),
}
EVERY_LAW = LAWS | FURTHER


class Run(NamedTuple):
    """One training run of the grid."""

    row: str
    beta: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.row}-b{self.beta:g}-s{self.seed}"


class UnfinishedError(Exception):
    """The run has not made all of its updates."""


class InvalidError(Exception):
    """The run is not the one that the grid asks for."""


# ---------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Figures:
    """What one run came to; `None` = does not apply."""

    tail_error: float
    peak: float
    in_band: float | None
    cut: float
    score: float
    gold: float | None
    kl: float
    noise: float | None  # |KL/target - 1| that the standard error of the measurement alone would make
    of_limit: float | None = None


def updates_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are updates: the closing evaluation has a row of its own."""
    return [row for row in rows if control.is_update(row)]


def judge(rows: Sequence[dict[str, Any]], *, beta: float, updates: int, unit: str = "token") -> Figures:
    """The figures of a run from its rows of metrics.

    Errors: UnfinishedError where updates are missing, InvalidError where the run did not start from `beta`.
    """
    rows = updates_of(rows)
    if [row["step"] for row in rows] != list(range(1, updates + 1)):
        raise UnfinishedError(f"{len(rows)} of {updates} updates")
    started = rows[0]["kl/coef"]
    if not math.isclose(started, beta, rel_tol=1e-9):
        raise InvalidError(f"started from beta {started:g}, not from {beta:g}")
    tail, values = control.tail(rows), ratios(rows)
    noise = [row["kl/token_stderr"] / row["kl/token"] for row in tail if row["kl/token"]]
    golds = [row["objective/gold"] for row in tail]
    return Figures(
        tail_error=control.tail_error(values),
        peak=control.peak(values),
        in_band=control.time_in_band(values),
        cut=share(row["kl/backtrack_factor"] < 1.0 for row in tail) or 0.0,
        score=mean_of(tail, "objective/scores_shaped"),
        gold=None if None in golds else statistics.fmean(golds),
        kl=mean_of(tail, f"kl/{unit}"),
        # E|error| of a normal error is sqrt(2/pi) of its spread; only the token mean has a standard error.
        noise=math.sqrt(2 / math.pi) * statistics.fmean(noise) if noise and unit == "token" else None,
    )


def share(flags: Any) -> float | None:
    """How many are true; None of none."""
    flags = list(flags)
    return sum(flags) / len(flags) if flags else None


def mean_of(rows: Sequence[dict[str, Any]], key: str) -> float:
    """The mean of a key; NaN where a row was not finite."""
    return statistics.fmean(math.nan if row[key] is None else row[key] for row in rows)


WORST = {"tail_error": max, "peak": max, "in_band": min, "cut": max}


@dataclass(frozen=True)
class Summary:
    """A row of the table: means and worst values over its finished runs."""

    asked: int
    finished: int
    mean: dict[str, float | None]
    worst: dict[str, float | None]


def summarize(runs: Sequence[Figures], asked: int) -> Summary:
    """A row's figures; a figure that is None in any run is None."""
    columns: dict[str, list[Any]] = {}
    for figures in runs:
        for key, value in asdict(figures).items():
            columns.setdefault(key, []).append(value)
    whole = {key: values for key, values in columns.items() if None not in values}
    return Summary(
        asked,
        len(runs),
        {key: statistics.fmean(whole[key]) if key in whole else None for key in columns},
        {key: worst(whole[key]) if key in whole else None for key, worst in WORST.items()},
    )


GOAL_RUNS = 9


@dataclass(frozen=True)
class Goal:
    """One promise of the default controller."""

    text: str
    worst: bool
    key: str
    limit: float
    at_least: bool = False

    def value(self, summary: Summary) -> float | None:
        """The figure that the goal is about."""
        return (summary.worst if self.worst else summary.mean).get(self.key)

    def verdict(self, summary: Summary) -> str:
        """met or MISSED; open while runs are missing."""
        value = self.value(summary)
        if summary.finished < summary.asked or value is None:
            return "open"
        return "met" if (value >= self.limit if self.at_least else value <= self.limit) else "MISSED"


GOALS = (
    Goal("tail error, mean of the runs", False, "tail_error", 0.08),
    Goal("tail error, worst run", True, "tail_error", 0.15),
    Goal("peak KL/target, worst run", True, "peak", 1.6),
    Goal(f"updates from {BAND_FROM} on within +-25 %", False, "in_band", 0.90, at_least=True),
    Goal("tail's updates cut by the ceiling", False, "cut", 0.20),
)


def goal_lines(summary: Summary) -> list[str]:
    """Which goals `adaptive` meets, one per line."""
    lines = [f"Goals of `adaptive` ({summary.finished} of {summary.asked} runs):"]
    for goal in GOALS:
        value, side = goal.value(summary), "at least" if goal.at_least else "at most"
        shown = "-" if value is None else f"{value:.3f}"
        lines.append(f"  {goal.verdict(summary):<7} {goal.text:<36} {shown:>6}   ({side} {goal.limit:.2f})")
    if summary.finished < summary.asked:
        lines.append(f"  open: {summary.asked - summary.finished} runs are missing")
    if summary.asked < GOAL_RUNS:
        lines.append(f"  note: the goals are for {GOAL_RUNS} runs, three seeds x three starting betas")
    return lines


# ---------------------------------------------------------------------------------------------- table


def table(summaries: dict[str, Summary]) -> str:
    """Fixed columns, at most 100 characters wide."""
    groups = f"{'':<20}{'':>5}{'tail error':>14}{'KL/target peak':>15}{'in band':>10}{'cut':>11}"
    names = f"{'':<20}{'runs':>5}" + "".join(
        f"{'mean':>{w}}{'worst':>{v}}" for w, v in ((7, 7), (7, 7), (5, 6), (5, 6))
    )
    names += f"{'score':>6}{'gold':>6}{'KL':>7}{'limit':>6}"
    lines = [groups, names]
    for row, s in summaries.items():
        cells = f"{row:<20}{f'{s.finished}/{s.asked}':>5}"
        if s.finished:
            m, w = s.mean, s.worst
            cells += f"{number(m['tail_error'], 7)}{number(w['tail_error'], 7)}"
            cells += f"{number(m['peak'], 7)}{number(w['peak'], 7)}"
            cells += f"{percent(m['in_band'], 5)}{percent(w['in_band'], 6)}"
            cells += f"{percent(m['cut'], 5)}{percent(w['cut'], 6)}"
            cells += f"{number(m['score'], 6)}{number(m['gold'], 6)}{number(m['kl'], 7)}"
            cells += percent(m["of_limit"], 6)
        lines.append(cells.rstrip())
    return "\n".join(lines)


def by_beta(figures: dict[str, dict[Run, Figures]]) -> str:
    """Tail error, and in brackets the peak, by starting beta; means over the seeds."""
    betas = sorted({run.beta for runs in figures.values() for run in runs})
    lines = [f"{'tail error (peak) from beta':<28}" + "".join(f"{beta:>16g}" for beta in betas)]
    for row, runs in figures.items():
        cells = f"{row:<28}"
        for beta in betas:
            mine = [found for run, found in runs.items() if run.beta == beta]
            tail, peak = (
                statistics.fmean(getattr(found, key) for found in mine) if mine else None
                for key in ("tail_error", "peak")
            )
            cells += f"{number(tail, 7)}{f'({number(peak, 4).strip()})':>8}".rjust(16) if mine else f"{'-':>16}"
        lines.append(cells)
    return "\n".join(lines)


def number(value: float | None, width: int) -> str:
    """Three decimals where there is room, fewer for large values."""
    if value is None:
        return f"{'-':>{width}}"
    decimals = 2 if width < 7 else 3
    if abs(value) >= 10:
        decimals = 1
    return f"{value:>{width}.{decimals}f}"


def percent(value: float | None, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.0%}"


# ---------------------------------------------------------------------------------------------- grid


@dataclass(frozen=True)
class Settings:
    """What the command line asks for."""

    out: Path
    updates: int
    batch: int
    sets: tuple[str, ...]
    jobs: int

    def folder(self, run: Run) -> RunFolder:
        return RunFolder(self.out / run.name)


def plan(rows: Sequence[str], betas: Sequence[float], seeds: Sequence[int] | None) -> list[Run]:
    """The runs of the grid, row by row. Errors: InputError for an unknown row."""
    unknown = [row for row in rows if row not in EVERY_LAW]
    if unknown:
        raise InputError(f"--rows: unknown: {', '.join(unknown)}; there are {', '.join(EVERY_LAW)}")
    return [
        Run(row, beta, seed)
        for row in rows
        for seed in (seeds if seeds is not None else (0, 1, 2) if EVERY_LAW[row].all_seeds else (0,))
        for beta in betas
    ]


def overrides(run: Run, settings: Settings) -> list[str]:
    """All that this run sets on top of ppo_adaptive.yaml; what makes its row comes last and wins."""
    law = EVERY_LAW[run.row]
    own = list(law.settings)
    if "kl.unit=sequence" in own:
        own.append(f"kl.target={sequence_target(settings)}")
    return [
        *LEAN,
        *settings.sets,
        *own,
        f"ppo.total_episodes={settings.updates * settings.batch}",
        f"kl.controller={json.dumps(law.controller | {'coef': run.beta})}",
        f"run.name={json.dumps(run.name)}",
        f"run.seed={run.seed}",
        f"run.output_dir={json.dumps(str(settings.folder(run).path))}",
    ]


def sequence_target(settings: Settings) -> float:
    """The default target times the tokens of a response; the same for all runs of the row once one exists."""
    for config in sorted(settings.out.glob("adaptive-sequence-*/config.yaml")):
        return load_config("train", config).kl.target_value
    per_token = load_config("train", CONFIG, settings.sets).kl.target_value
    for path in sorted(settings.out.glob("*/summary.json")):
        summary = finished_summary(RunFolder(path.parent))
        if summary is not None:
            return round(per_token * summary["reference"]["length"], 1)
    return SEQUENCE_TARGET


def config_of(run: Run, settings: Settings) -> TrainConfig:
    """The run's config. Errors: InputError, also where its folder holds a run with another one."""
    config = load_config("train", CONFIG, overrides(run, settings))
    there = settings.folder(run).config
    if there.exists():
        from rlhf_kl.run.resume import FREE_TO_CHANGE

        changes = config_diff(load_config("train", there), config)
        changes = [line for line in changes if not line.startswith(FREE_TO_CHANGE)]
        if changes:
            raise InputError(f"{there.parent} holds a run with other settings (choose another --out): {changes[0]}")
    return config


def train_missing(runs: Sequence[Run], settings: Settings) -> bool:
    """Train what is not finished yet, as `rlhf-kl compare` does; False where a run failed."""
    planned = [PlannedRun(run.row, run.seed, config_of(run, settings)) for run in runs]
    grid = ComparePlan(settings.out.name, settings.out, planned, [])
    return not train_grid(grid, jobs=settings.jobs, overwrite=False, display=TrainingDisplay())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------- noise floor


def frozen_noise(readings: Sequence[float]) -> float:
    """Mean of |reading / mean - 1|: the tail error of a policy that stands still exactly at its target."""
    mean = statistics.fmean(readings)
    return statistics.fmean(abs(reading / mean - 1.0) for reading in readings)


def measure_frozen(folder: RunFolder) -> list[float]:
    """The KL of a finished run's policy, measured by batches as its updates would, again and again."""
    import torch
    from rlhf_kl.models.actor_critic import ActorCritic

    from rlhf_kl.commands.session import make_accelerator
    from rlhf_kl.commands.train import build_parts
    from rlhf_kl.models.load import load_causal_lm
    from rlhf_kl.rollout.collect import draw, measure
    from rlhf_kl.seeding import uniforms

    config = load_config("train", folder.config)
    accelerator = make_accelerator(config.run)
    parts = build_parts(config, accelerator, TrainingDisplay(quiet=True))
    model = ActorCritic(load_causal_lm(str(folder.final))).to(accelerator.device)
    readings = []
    for step in range(1, FROZEN_BATCHES + 1):
        prompts = parts.prompts.batch(step)
        noise = uniforms(len(prompts), parts.sampling.max_new_tokens, config.run.seed, "frozen policy", step)
        with torch.no_grad(), accelerator.autocast():
            sampled = draw(model.policy, prompts, noise, parts.sampling, accelerator.device)
            measured = measure(model, parts.reference, prompts, sampled, parts.sampling.temperature)
        count = sampled.mask.sum() if config.kl.unit == "token" else len(prompts)
        readings.append(float(measured.exact_kl.double().sum() / count))
    return readings


def noise_floor(runs: Sequence[Run], settings: Settings) -> dict[str, Any] | None:
    """The frozen measurement of the first finished run in its own file, made once."""
    for run in runs:
        folder, file = settings.folder(run), settings.out / "noise_floor.json"
        if run.row != "adaptive" or finished_summary(folder) is None:
            continue
        if file.exists() and file.stat().st_mtime > folder.summary.stat().st_mtime:
            kept: dict[str, Any] = json.loads(file.read_text())
            if kept["run"] == run.name:
                return kept
        say(f"measuring the frozen policy of {run.name}, {FROZEN_BATCHES} batches")
        readings = measure_frozen(folder)
        found = {"run": run.name, "error": frozen_noise(readings), "kl": readings}
        write_json(file, found)
        return found
    return None


# ---------------------------------------------------------------------------------------------- limit

LIMIT_PROMPTS, LIMIT_SAMPLES = 128, 192  # a run's own 1024 samples would make its limit uncertain by 4 %


class Reference(NamedTuple):
    """Many samples of the frozen reference: raw scores, what penalties look at, and the prompt of each."""

    scores: list[float]
    traits: list[list[float]]
    prompts: list[int]

    def share(self, folder: RunFolder) -> float | None:
        """The score gain of a finished run's last updates over the limit at their KL."""
        from rlhf_kl.reward_functions import ResponseTraits, ScoreShaping
        from torch import tensor

        from rlhf_kl.kl_controllers.tilt import centre_groups, gain_at_kl
        from rlhf_kl.run.checkpoint import checkpoints

        kept = checkpoints(folder.checkpoints)
        if not kept:
            return None
        shaping = ScoreShaping(**kept[-1].state()["trainer"]["shaping"])
        ended, lengths, repeated = (tensor(column) for column in self.traits)
        shaped = shaping(tensor(self.scores), ResponseTraits(ended.bool(), lengths, repeated)).tolist()
        last = control.end(updates_of(read_jsonl(folder.metrics)))
        limit = gain_at_kl(centre_groups(shaped, self.prompts), mean_of(last, "kl/sequence"))
        return (mean_of(last, "objective/scores_shaped") - statistics.fmean(shaped)) / limit if limit else None


def reference(runs: Sequence[Run], settings: Settings) -> Reference | None:
    """Sampled once, with the models of the first finished run, into its own file."""
    file = settings.out / "reference.json"
    if file.exists():
        return Reference(**json.loads(file.read_text()))
    finished = [settings.folder(run) for run in runs if finished_summary(settings.folder(run)) is not None]
    if not finished:
        return None
    from rlhf_kl.commands.parts import build_parts
    from rlhf_kl.commands.session import make_accelerator
    from rlhf_kl.commands.train import reference_samples
    from rlhf_kl.seeding import shuffled

    config = load_config("train", finished[0].config)
    accelerator = make_accelerator(config.run)
    parts = build_parts(config, accelerator, TrainingDisplay(quiet=True))
    chosen = shuffled(len(parts.prompts), 0, "limit")[:LIMIT_PROMPTS].tolist()
    prompts = [prompt for prompt in chosen for _ in range(LIMIT_SAMPLES)]
    say(f"sampling {len(prompts)} responses of the reference")
    found = list(reference_samples(config, parts, accelerator, prompts))
    scores = [score for batch in found for score in batch.scores.tolist()]
    traits = [[float(x) for batch in found for x in batch.traits[i].tolist()] for i in range(3)]
    write_json(file, {"scores": scores, "traits": traits, "prompts": prompts})
    return Reference(scores, traits, prompts)


# ---------------------------------------------------------------------------------------------- picture

TOP = 3.0  # of the KL/target axis


def picture(curves: dict[str, list[tuple[Run, list[float]]]], summaries: dict[str, Summary], file: Path) -> None:
    """KL / target over the updates, one panel a row, coloured by starting beta."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    betas = sorted({run.beta for runs in curves.values() for run, _ in runs})
    colours = {b: colormaps["plasma"](0.05 + 0.75 * i / max(1, len(betas) - 1)) for i, b in enumerate(betas)}
    columns = min(3 if len(curves) > 4 else 2, len(curves))
    lines = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel in panels.flat[len(curves) :]:
        panel.set_visible(False)
    for panel, (row, runs) in zip(panels.flat, curves.items(), strict=False):
        panel.axhspan(1 - BAND, 1 + BAND, color="0.88", zorder=0)
        panel.axhline(1.0, color="0.45", linewidth=0.8, zorder=1)
        for run, values in runs:
            panel.plot(
                range(1, len(values) + 1),
                [min(value, 100 * TOP) for value in values],
                color=colours[run.beta],
                linewidth=1.1,
                alpha=0.9,
            )
        summary = summaries[row]
        title = row
        if summary.finished:
            title += f"   tail error {summary.mean['tail_error']:.2f}"
        if summary.finished < summary.asked:
            title += f"  ({summary.finished} of {summary.asked} runs)"
        panel.set_title(title, fontsize=10, loc="left")
        highest = max((value for _, values in runs for value in values), default=0.0)
        if highest > TOP:
            panel.text(
                0.99, 0.96, f"up to {highest:.0f}x", transform=panel.transAxes, ha="right", va="top",
                fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
            )  # fmt: skip
        panel.set_ylim(0, TOP)
        panel.spines[["top", "right"]].set_visible(False)
    # Below every column's last panel, also where the last line is not full.
    for position in range(len(curves)):
        panel = panels.flat[position]
        if position % columns == 0:
            panel.set_ylabel("KL / target")
        if position + columns >= len(curves):
            panel.set_xlabel("update")
            panel.tick_params(labelbottom=True)
    if betas:
        handles = [Line2D([], [], color=colours[beta], label=f"{beta:g}") for beta in betas]
        figure.legend(
            handles=handles, title="starting beta (band: +-25 %)", loc="outside upper right",
            ncols=len(betas), frameon=False, fontsize=9, title_fontsize=9,
        )  # fmt: skip
    figure.savefig(file, dpi=130)


# ---------------------------------------------------------------------------------------------- all of it


@dataclass
class Results:
    """Figures by row, and what is missing or wrong."""

    figures: dict[str, dict[Run, Figures]]
    missing: list[str]
    invalid: list[str]
    revisions: set[str]


def read_results(runs: Sequence[Run], settings: Settings) -> Results:
    """What the run folders hold."""
    found = Results({run.row: {} for run in runs}, [], [], set())
    limit = reference(runs, settings)
    for run in runs:
        folder = settings.folder(run)
        try:
            rows = read_jsonl(folder.metrics)
            unit = config_of(run, settings).kl.unit
            figures = judge(rows, beta=run.beta, updates=settings.updates, unit=unit)
            summary = finished_summary(folder)
            if summary is None:
                raise UnfinishedError("its closing evaluation is missing")
        except UnfinishedError as reason:
            found.missing.append(f"{run.name}: {reason}")
        except (InvalidError, InputError) as reason:
            found.invalid.append(f"{run.name}: {reason}")
        else:
            found.figures[run.row][run] = Figures(
                **asdict(figures) | {"of_limit": limit.share(folder) if limit is not None else None}
            )
            found.revisions.add(str(summary.get("git")))
    return found


def show(runs: Sequence[Run], settings: Settings) -> int:
    """Table to stdout, bench_control.json and .png; returns the exit code."""
    found = read_results(runs, settings)
    asked = {row: sum(run.row == row for run in runs) for row in found.figures}
    summaries = {row: summarize(list(done.values()), asked[row]) for row, done in found.figures.items()}
    floor = noise_floor(runs, settings)
    print(f"{settings.updates} updates of {settings.batch} episodes", *settings.sets)
    print(table(summaries))
    print(f"\n{by_beta(found.figures)}\n")
    for text in floor_lines(floor, summaries.get("adaptive")):
        print(text)
    goals = goal_lines(summaries["adaptive"]) if "adaptive" in summaries else []
    for text in goals:
        print(text)
    for text in found.missing:
        print(f"missing: {text}")
    for text in found.invalid:
        print(f"error: {text}", file=sys.stderr)
    if len(found.revisions) > 1:
        print(f"note: made by different revisions of the code: {', '.join(sorted(found.revisions))}")
    write_json(
        settings.out / "bench_control.json",
        {
            "updates": settings.updates,
            "batch": settings.batch,
            "set": settings.sets,
            "revisions": sorted(found.revisions),
            "noise_floor": floor,
            "rows": {
                row: asdict(summaries[row])
                | {
                    "controller": EVERY_LAW[row].controller,
                    "runs": {run.name: asdict(figures) for run, figures in done.items()},
                }
                for row, done in found.figures.items()
            },
            "goals": [
                {**asdict(goal), "value": goal.value(summaries["adaptive"]),
                 "verdict": goal.verdict(summaries["adaptive"])}
                for goal in GOALS
            ] if goals else [],
            "missing": found.missing,
            "invalid": found.invalid,
        },
    )  # fmt: skip
    curves: dict[str, list[tuple[Run, list[float]]]] = {row: [] for row in summaries}
    for run in runs:
        values = ratios(updates_of(read_jsonl(settings.folder(run).metrics)))
        curves[run.row].append((run, values))
    picture(curves, summaries, settings.out / "bench_control.png")
    print(f"{settings.out / 'bench_control.png'}, {settings.out / 'bench_control.json'}")
    return 1 if found.missing or found.invalid else 0


def floor_lines(floor: dict[str, Any] | None, adaptive: Summary | None) -> list[str]:
    """The tail error that the noise of sampling alone makes, in two ways."""
    lines = []
    if floor is not None:
        lines.append(
            f"Noise floor: {floor['error']:.3f}, mean |KL/mean - 1| of {len(floor['kl'])} batches sampled "
            f"from one frozen policy ({floor['run']})"
        )
    noise = adaptive.mean.get("noise") if adaptive is not None else None
    if noise is not None:
        lines.append(f"Noise floor: {noise:.3f}, sqrt(2/pi) x the relative standard error of the adaptive runs")
    return lines


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def listed(kind: type) -> Any:
        return lambda text: [kind(item) for item in text.split(",") if item]

    parser.add_argument("--out", type=Path, default=Path("runs/bench_control"))
    parser.add_argument(
        "--rows",
        type=listed(str),
        default=list(LAWS),
        help=f"comma-separated; default: {','.join(LAWS)}; `all` adds {','.join(FURTHER)}",
    )
    parser.add_argument(
        "--seeds", type=listed(int), help="default: 0,1,2 for the adaptive rows and 0 for the other laws"
    )
    parser.add_argument("--betas", type=listed(float), default=[0.01, 0.1, 1.0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; above 1 each has one thread")
    parser.add_argument(
        "--set", dest="sets", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="for every run; what makes a row wins over it",
    )  # fmt: skip
    parser.add_argument("--table-only", action="store_true", help="run nothing, show what there is")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and show the grid; returns the exit code."""
    asked = parse_arguments(arguments)
    try:
        if asked.updates < 2 or asked.jobs < 1:
            raise InputError("--updates must be at least 2 and --jobs at least 1")
        rows = list(EVERY_LAW) if asked.rows == ["all"] else asked.rows
        runs = plan(rows, asked.betas, asked.seeds)
        batch = load_config("train", CONFIG, asked.sets).rollout.batch_size
        settings = Settings(asked.out.absolute(), asked.updates, batch, tuple(asked.sets), asked.jobs)
        for run in runs:  # a mistake is told before the first minute is spent
            config_of(run, settings)
        settings.out.mkdir(parents=True, exist_ok=True)
        whole = asked.table_only or train_missing(runs, settings)
        return show(runs, settings) or int(not whole)
    except InputError as error:
        for problem in error.problems:
            say(f"error: {problem}")
        return 2
    except (KeyboardInterrupt, Interrupted):
        say("interrupted; the same command goes on from the last checkpoints")
        return 130


if __name__ == "__main__":
    sys.exit(main())
