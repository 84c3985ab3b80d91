"""The rows of bench_control.yaml as runs: which there are, where a real model comes from, constant betas instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_kl.config.compare import PlannedRun, plan_comparison
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.hub import model_folder
from rlhf_kl.report.run import RunResult, read_run

ROWS = Path(__file__).resolve().parents[1] / "bench_control.yaml"
DEFAULT_ROWS = 10
STRESS = "stress"  # stands for every row that begins with it
BASE = "control/base.yaml"
LEAN = (
    "eval.every=1000000",
    "tracking.samples_every=1000000",
    "tracking.tensorboard=false",
    "checkpoint.every=20",
    "checkpoint.keep=1",
)
# What the rows with a base of their own read from --real, instead of from the hub.
REAL = {
    "policy.model": "models/TinyStories-656K",
    "data.prompts": "data/tinystories-1000/stories.jsonl",
    "eval.texts": "data/tinystories-1000/stories.jsonl",
}


def is_stress(name: str) -> bool:
    """Whether a row is one of those that `stress` stands for."""
    return name.startswith(f"{STRESS}-")


def row_names(asked: Iterable[str], rows: Mapping[str, Any]) -> list[str]:
    """`all` stands for every row, `stress` for the stress rows, none for the first ten. Errors: InputError."""
    names = [row for name in asked for row in (filter(is_stress, rows) if name == STRESS else [name])]
    names = list(rows) if "all" in names else list(dict.fromkeys(names)) or list(rows)[:DEFAULT_ROWS]
    if problems := [
        f"--rows: no row {name!r}{suggestion(name, [*rows, STRESS])}" for name in names if name not in rows
    ]:
        raise InputError(*problems)
    return names


def local_model(folder: Path) -> list[str]:
    """`--set` that read the real model from a folder. Errors: InputError where it lacks something."""
    missing = [path for path in dict.fromkeys(REAL.values()) if not (folder / path).exists()]
    if missing:
        raise InputError(*(f"--real {folder}: holds no {path}" for path in missing))
    return [f"{key}={(folder / path).absolute()}" for key, path in REAL.items()]


@dataclass(frozen=True)
class Planner:
    """Lays out the runs of rows under one set of options."""

    out: Path
    sets: Sequence[str] = ()  # for every run
    seed: int | None = None  # instead of the row's
    real: Path | None = None  # a folder with the real model and its texts, instead of the hub

    def plan(self, asked: Iterable[str]) -> dict[str, list[PlannedRun]]:
        """The runs of each row (`row_names`). Errors: InputError."""
        rows = read_yaml(ROWS)
        return {name: self._runs(rows[name]) for name in row_names(asked, rows)}

    def constant(self, name: str, coef: float | str) -> PlannedRun:
        """A row's first setting under a constant beta, without a ceiling; a number or auto. Errors: InputError.

        A row whose `reach` is a fragment has it on top: no constant suits a setting that changes within the run.
        """
        row = read_yaml(ROWS)[name]
        fragment = next(iter(row["variants"].values())) | row.get("reach", {})
        controller = {"kind": "fixed", "coef": coef}
        fragment |= {"kl": fragment.get("kl", {}) | {"controller": controller, "ceiling": None}}
        shown = coef if isinstance(coef, str) else f"{coef:g}"
        (run,) = self._runs({**row, "seeds": [0], "variants": {f"{name}-constant-{shown}": fragment}})
        return run

    def left_out(self, rows: Mapping[str, Sequence[PlannedRun]]) -> list[tuple[str, str]]:
        """The planned rows whose model cannot be had, and why; looks for it on the hub."""
        models = {name: runs[0].config.policy.model for name, runs in rows.items() if "base" in read_yaml(ROWS)[name]}
        reasons = {model: _reason(model) for model in dict.fromkeys(models.values())}
        return [(name, reasons[model]) for name, model in models.items() if reasons[model]]

    def _runs(self, row: Mapping[str, Any]) -> list[PlannedRun]:
        local = local_model(self.real) if self.real and "base" in row else []
        raw = {"base": BASE, **{key: value for key, value in row.items() if key != "reach"}}
        return plan_comparison(raw, ROWS, [*LEAN, *local, *self.sets], self.out, self.seed).runs


def _reason(model: str) -> str:
    """Why a model cannot be had; empty where it can."""
    try:
        model_folder(model)
    except InputError as error:
        return f"{error} (--real FOLDER, or the environment variable RLHF_KL_REAL, takes it from a folder)"
    return ""


def started(planned: PlannedRun) -> RunResult | None:
    """What there is of a run; None where it has not started."""
    folder = Path(planned.config.run.output_dir)
    return read_run(folder) if (folder / "config.yaml").is_file() else None


def is_complete(planned: PlannedRun, run: RunResult) -> bool:
    """Whether a run has come to its end with all its updates."""
    return run.status == "finished" and len(run.updates) == planned.config.updates
