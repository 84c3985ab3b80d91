"""Reads a run from its folder: config, updates, evaluations, texts, figures, and notes on gaps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import Any, Literal

from rlhf_kl.config.problems import checked
from rlhf_kl.config.resolve import detect_kind
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.control.tilt import NEAR_NORMAL, normal_limit
from rlhf_kl.control.verdict import end, ratios
from rlhf_kl.errors import InputError, blame
from rlhf_kl.monitors.facts import CLOSING, StartEnd, closing_figures, control_figures, is_update, mean
from rlhf_kl.monitors.kl_shares import Part, part_of
from rlhf_kl.report.texts import held_out_texts
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.text import read_number

SHAPED = "objective/scores_shaped"
PER_PROMPT = 8  # samples of the reference
SURE = 2.0  # standard errors of a change that is told


@dataclass(frozen=True)
class RunResult:
    """One training run, finished or not."""

    path: Path
    config: TrainConfig
    updates: list[dict[str, Any]]  # rows of metrics.jsonl that are updates
    evaluations: list[dict[str, Any]]  # rows with an evaluation, the closing one included
    summary: dict[str, Any]  # empty until the run has ended

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def unit(self) -> str:
        return self.config.kl.unit

    @property
    def scorers(self) -> list[str]:
        """Names of the scorers that never train."""
        return list(self.config.eval.watched)

    @property
    def status(self) -> Literal["finished", "unfinished", "stopped by a guard"]:
        if not self.summary:
            return "unfinished"
        return "finished" if self.summary.get("stopped_by") is None else "stopped by a guard"

    @property
    def notes(self) -> list[str]:
        """What is missing, one sentence each."""
        notes = []
        if self.status == "stopped by a guard":
            notes.append(f"stopped by a guard: {self.summary['stopped_by']}")
        elif self.status == "unfinished" or len(self.updates) < self.config.updates:
            notes.append(f"unfinished: {len(self.updates)} of {self.config.updates} updates")
        if self.updates and len(self.evaluations) < 2:
            notes.append("fewer than two evaluations: the cost in perplexity is unknown")
        if self.beyond_limit:
            notes.append(self.beyond_limit)
        return notes

    @property
    def constant_coef(self) -> float | None:
        """Beta if it is constant, else None."""
        fixed = self.updates and self.config.kl.controller.kind == "fixed"
        return read_number(self.updates[0], "kl/coef") if fixed else None

    @property
    def reference_figures(self) -> Mapping[str, Any]:
        """Figures of the reference's own samples; empty if the summary has none."""
        return self.summary.get("reference") or {}

    @property
    def report(self) -> Path:
        """Where its page is, or will be."""
        return RunFolder(self.path).report

    @cached_property
    def texts(self) -> list[dict[str, Any]]:
        """See `held_out_texts`."""
        return held_out_texts(self.path)

    @cached_property
    def token_parts(self) -> list[Part]:
        """The KL of the last evaluation's responses, by token and by place; empty without one."""
        return list(map(part_of, read_jsonl(RunFolder(self.path).tokens)))

    @cached_property
    def closing(self) -> dict[str, StartEnd]:
        """See `closing_figures`."""
        return closing_figures([*self.updates, *self.evaluations[-1:]], self.unit, self.scorers)

    @cached_property
    def ratios(self) -> list[float]:
        """KL / target of each update."""
        return ratios(self.updates)

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Updates and values of a key, missing ones left out; `eval/*` with the closing evaluation."""
        rows = self.evaluations if key.startswith("eval/") else self.updates
        points = [(float(row["step"]), value) for row in rows if (value := read_number(row, key)) is not None]
        return [step for step, _ in points], [value for _, value in points]

    def end(self, key: str) -> float | None:
        """Mean over the last ten updates; of `eval/*` the last evaluation, if it is not the first one too."""
        rows = self.evaluations[1:][-1:] if key.startswith("eval/") else end(self.updates)
        return mean(row.get(key) for row in rows)

    def reference(self, key: str) -> float | None:
        """A figure of the reference: from its own samples if the summary has them, else from the first row.

        The first row's policy is the starting policy, which is the reference unless the config names another.
        """
        value = read_number(self.reference_figures, key.removeprefix("objective/"))
        for row in (self.evaluations if key.startswith("eval/") else self.updates)[:1]:
            if value is None:
                own = self.config.reference.model in (None, self.config.policy.model)
                value = read_number(row, key if own else key.replace("/", "/reference_"))
        return value

    def gain(self, key: str) -> float | None:
        """Value at the end minus that of the reference."""
        last, first = self.end(key), self.reference(key)
        return None if last is None or first is None else last - first

    def gain_on(self, other: RunResult) -> float | None:
        """The shaped score that it gained over the reference, on the scale of another run of the same reward.

        Each run measures scale and reference on samples of its own number, whose noise is no difference of runs.
        """
        own, there = (run.reference_figures.get("scale") for run in (self, other))
        last, first = self.end(SHAPED), other.reference(SHAPED)
        if not own or not there or last is None or first is None:
            return self.gain(SHAPED)
        return float((last * own["std"] + own["mean"] - there["mean"]) / there["std"] - first)

    @cached_property
    def fallen(self) -> list[str]:
        """Scorers that never train and fell on held-out prompts while the score rose there, by two standard errors."""

        def rise(name: str) -> float:
            (_, values), (_, errors) = (self.series(f"eval/{name}{end}") for end in ("", "_stderr"))
            if len(values) < 2 or len(errors) != len(values):
                return 0.0
            return (values[-1] - values[0]) / (math.hypot(errors[0], errors[-1]) or math.inf)

        return [name for name in self.scorers if rise(name) < -SURE] if rise("scores") > SURE else []

    @property
    def beyond_limit(self) -> str:
        """What is wrong where the score gained more than any policy can at this KL; empty where it did not.

        It tells nothing where scores are far from Gaussian (see `normal_limit`). Three standard errors are no fault.
        """
        known, gain, kl = self.reference_figures, self.figures["score_gain"], self.figures["kl_sequence"]
        scores = [value for row in end(self.updates) if (value := read_number(row, SHAPED)) is not None]
        if gain is None or kl is None or not known.get("tilt") or len(scores) < 2:
            return ""
        limit = normal_limit(known["scores_spread"], known["tilt"], kl)
        batches = PER_PROMPT * self.config.rollout.batch_size / known.get("samples", math.inf)  # of reference's prompts
        error = stdev(scores) * math.sqrt(1 / len(scores) + batches)
        if limit is None or gain <= (1 + NEAR_NORMAL) * limit + 3 * error:
            return ""
        return (
            f"its shaped score rose by {gain:.3g}, and no policy can gain more than {limit:.3g} at its KL of {kl:.3g} "
            "nats per response: its scores and those of the reference differ in prompts, reward or temperature"
        )

    @cached_property
    def figures(self) -> dict[str, Any]:
        """The figures of tables and verdicts, None where not measured; those at the end are means of ten updates."""
        ends = {name: self.closing.get(name, (None, None))[1] for name in (*CLOSING, *self.scorers)}
        perplexity = ends["perplexity"]
        before = self.reference("eval/perplexity") if len(self.evaluations) > 1 else None
        return {
            **control_figures(self.updates, self.config.kl, self.config.ppo.value_warmup),
            **ends,
            "peak": max(self.ratios, default=None),
            "score_gain": self.gain(SHAPED),  # over the reference
            **{f"{name}_gain": self.gain(f"eval/{name}") for name in self.scorers},
            "perplexity_cost": perplexity / before - 1.0 if perplexity is not None and before else None,
        }


def read_run(path: Path) -> RunResult:
    """The run in a folder. Errors: InputError if there is none, or if a line of its files is damaged."""
    folder = RunFolder(path)
    folder.require_run()
    config, rows = stored_config(folder.config), read_jsonl(folder.metrics)
    updates = [row for row in rows if is_update(row)]
    evaluations = [row for row in rows if read_number(row, "eval/perplexity") is not None]
    summary = json.loads(folder.summary.read_text(encoding="utf-8")) if folder.summary.is_file() else {}
    return RunResult(path, config, updates, evaluations, summary)


def stored_config(path: Path) -> TrainConfig:
    """A run's resolved config; unlike with `load_config`, models and data may be gone."""
    raw = read_yaml(path)
    if (kind := detect_kind(raw)) != "train":
        raise InputError(f"{path.parent}: a run of `rlhf-kl {kind}`; only runs of `rlhf-kl train` have a KL to show")
    with blame(str(path)):
        return checked(TrainConfig, raw)
