"""A run as its folder tells it: config, updates, evaluations, samples, and what is missing of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rlhf_kl.config.load import check_mapping, detect_kind
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError
from rlhf_kl.report import control
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.run_folder import RunFolder

Status = Literal["finished", "unfinished", "stopped by a guard"]
Series = tuple[list[float], list[float]]  # updates, values


@dataclass(frozen=True)
class RunResult:
    """One training run, finished or not."""

    path: Path
    config: TrainConfig
    updates: list[dict[str, Any]]  # rows of metrics.jsonl that are updates
    evaluations: list[dict[str, Any]]  # rows with an evaluation, the closing one included
    samples: list[dict[str, Any]]
    summary: dict[str, Any]  # empty until the run has come to its end
    notes: list[str]  # what is missing or damaged, one sentence each

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def target(self) -> float:
        """KL target, nats in `unit`."""
        return self.config.kl.target_value

    @property
    def unit(self) -> str:
        return self.config.kl.unit

    @property
    def status(self) -> Status:
        if not self.summary:
            return "unfinished"
        return "finished" if self.summary.get("stopped_by") is None else "stopped by a guard"

    @property
    def constant_coef(self) -> float | None:
        """Beta where the run holds it constant, else None."""
        if self.config.kl.controller.kind != "fixed" or not self.updates:
            return None
        return number(self.updates[0], "kl/coef")

    @cached_property
    def ratios(self) -> list[float]:
        """KL / target of each update."""
        return control.ratios(self.updates)

    def series(self, key: str) -> Series:
        """Updates and values of a key, missing ones left out; `eval/*` with the closing evaluation."""
        rows = self.evaluations if key.startswith("eval/") else self.updates
        found = [(row["step"], value) for row in rows if (value := number(row, key)) is not None]
        return [float(step) for step, _ in found], [value for _, value in found]

    def end(self, key: str) -> float | None:
        """Mean over the last ten updates; of `eval/*` the last evaluation."""
        if key.startswith("eval/"):
            values = self.series(key)[1]
            return values[-1] if values else None
        return mean(row.get(key) for row in control.end(self.updates))

    def reference(self, key: str) -> float | None:
        """A figure of the reference: from its own samples where the summary has them, else of the first update.

        The first update's policy is the starting policy, which is the reference unless the config names another.
        """
        kept = self.summary.get("reference")
        value = number(kept, key.removeprefix("objective/")) if isinstance(kept, Mapping) else None
        if value is None and self.updates and self.config.reference.model is None:
            value = number(self.updates[0], key)
        return value

    def gain(self, key: str) -> float | None:
        """Value at the end less that of the reference."""
        last, first = self.end(key), self.reference(key)
        return None if last is None or first is None else last - first


@dataclass(frozen=True)
class RunFigures:
    """What one run came to. `None`: not measured, or does not apply. Ends are means of the last ten updates."""

    tail_error: float | None
    time_in_band: float | None
    peak: float | None
    cut: float | None  # share of the second half's updates that the ceiling shortened
    kl: float | None  # at the end, nats in the target's unit
    kl_sequence: float | None
    beta: float | None
    scores: float | None  # raw
    scores_shaped: float | None
    score_gain: float | None  # of the shaped scores over the reference
    gold: float | None
    gold_gain: float | None
    perplexity: float | None  # held-out, of the closing evaluation
    perplexity_cost: float | None  # that over the first evaluation's, less 1
    length: float | None
    settled: bool | None


def figures(run: RunResult) -> RunFigures:
    """The figures that tables and verdicts are made of."""
    first, last = (values[i] if (values := run.series("eval/perplexity")[1]) else None for i in (0, -1))
    return RunFigures(
        tail_error=control.tail_error(run.ratios),
        time_in_band=control.time_in_band(run.ratios),
        peak=control.peak(run.ratios),
        cut=mean(float(row["kl/backtrack_factor"] < 1.0) for row in control.tail(run.updates)),
        kl=run.end(f"kl/{run.unit}"),
        kl_sequence=run.end("kl/sequence"),
        beta=run.end("kl/coef"),
        scores=run.end("objective/scores"),
        scores_shaped=run.end("objective/scores_shaped"),
        score_gain=run.gain("objective/scores_shaped"),
        gold=run.end("objective/gold"),
        gold_gain=run.gain("objective/gold"),
        perplexity=last,
        perplexity_cost=None if first is None or last is None or len(run.evaluations) < 2 else last / first - 1.0,
        length=run.end("rollout/response_length"),
        settled=control.settled(run.series("kl/sequence")[1]),
    )


def read_run(path: Path) -> RunResult:
    """The run in a folder. Errors: InputError where there is none, or where a line of its files is damaged."""
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise InputError(f"{path}: holds no run (no config.yaml)")
    config = stored_config(folder.config)
    notes: list[str] = []
    rows = _rows(folder.metrics, notes)
    updates = [row for row in rows if control.is_update(row)]
    evaluations = [row for row in rows if number(row, "eval/perplexity") is not None]
    summary = _summary(folder.summary, notes)
    run = RunResult(path, config, updates, evaluations, _samples(folder.samples, notes), summary, notes)
    notes += _missing(run)
    return run


def stored_config(path: Path) -> TrainConfig:
    """A run's resolved config; unlike `load_config` it does not ask whether models and data are still there."""
    raw = read_yaml(path)
    kind = detect_kind(raw)
    if kind != "train":
        raise InputError(f"{path.parent}: a run of `rlhf-kl {kind}`; only runs of `rlhf-kl train` have a KL to show")
    _, config, problems = check_mapping(TrainConfig, raw)
    if problems or config is None:
        raise InputError(*(f"{path}: {problem}" for problem in dict.fromkeys(problems)))
    return config


def number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number of a row, else None."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def mean(values: Any) -> float | None:
    """Mean of numbers; None of none, or where one is missing."""
    found = list(values)
    if not found or any(value is None or not math.isfinite(value) for value in found):
        return None
    return fmean(found)


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        notes.append(f"{path.name} is missing: no update has been written yet")
        return []
    if not _whole(path):
        notes.append(f"the last line of {path.name} is cut off and left out")
    rows = [row for row in read_jsonl(path) if isinstance(row.get("step"), int)]
    later: dict[tuple[int, bool], dict[str, Any]] = {}
    for row in rows:  # the last one of a step counts
        later[row["step"], control.is_update(row)] = row
    return [later[key] for key in sorted(later)]


def _samples(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    if not _whole(path):
        notes.append(f"the last line of {path.name} is cut off and left out")
    return [row for row in read_jsonl(path) if isinstance(row.get("step"), int) and "response" in row]


def _whole(path: Path) -> bool:
    """Whether the last line is whole, with or without its line break."""
    last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        return not last or isinstance(json.loads(last), dict)
    except ValueError:
        return False


def _summary(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        notes.append("summary.json cannot be read")
        return {}
    return summary if isinstance(summary, dict) else {}


def _missing(run: RunResult) -> list[str]:
    notes = []
    done, asked = len(run.updates), run.config.updates
    steps = [row["step"] for row in run.updates]
    if run.status == "stopped by a guard":
        notes.append(f"stopped by a guard: {run.summary['stopped_by']}")
    elif run.status == "unfinished" or done < asked:
        notes.append(f"unfinished: {done} of {asked} updates")
    if steps and steps != list(range(1, done + 1)):
        notes.append(f"updates are missing in between: {done} rows up to update {steps[-1]}")
    if run.updates and not run.evaluations:
        notes.append("no evaluation has been made: held-out perplexity is unknown")
    elif run.updates and len(run.evaluations) == 1:
        notes.append("only one evaluation has been made: what the run costs in perplexity is unknown")
    return notes
