"""TensorBoard as a view of `metrics.jsonl`: one event file, never a point twice."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_kl.config.load import flat
from rlhf_kl.run.contents import event_files
from rlhf_kl.text import read_number, safe_text

# The columns beside the config in the HPARAMS tab.
_RESULTS = ("objective/scores", "objective/gold", "kl/token", "kl/coef", "eval/perplexity")


class TensorBoardWriter:
    """Scalars, text samples and the config of one run.

    The config goes into the same event file: `SummaryWriter.add_hparams` would open a new subfolder at every
    call and rejects lists.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Starts a fresh event file in `folder`; `config` is the resolved config as nested mappings."""
        self._folder = folder
        self._config = {name: _parameter(value) for name, value in flat(config).items()}
        self._writer: Any = None
        self.rebuild(())

    def rebuild(self, rows: Iterable[Mapping[str, Any]], samples: Iterable[Mapping[str, Any]] = ()) -> None:
        """Replaces the event files by one that holds exactly these metrics rows and samples."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard and its protobuf
            from torch.utils.tensorboard import summary, writer

            if self._writer is not None:
                self._writer.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            for old in event_files(self._folder):
                old.unlink()
            self._summary = summary
            self._writer = writer.FileWriter(str(self._folder), flush_secs=10)
            experiment, start, self._session_end = summary.hparams(self._config, dict.fromkeys(_RESULTS, 0.0))
            charts = summary.custom_scalars(_layout(self._config.get("kl.unit", "token")))
        for event in (charts, experiment, start):
            self._writer.add_summary(event)
        for row in rows:
            self._add_row(row)
        for sample in samples:
            self.sample(sample)
        self._writer.flush()

    def row(self, row: Mapping[str, Any]) -> None:
        """Every finite number of a metrics row as a scalar at the row's `step`; alerts as text."""
        self._add_row(row)
        self._writer.flush()

    def _add_row(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        for name in row:
            if name != "step" and (value := read_number(row, name)) is not None:
                self._writer.add_summary(self._summary.scalar(name, value), step)
        if alerts := row.get("alerts"):
            self._add_text("alerts", "\n\n".join(_verbatim(str(alert)) for alert in alerts), step)

    def sample(self, sample: Mapping[str, Any]) -> None:
        """A row of `samples.jsonl` (`step, prompt, response, score`, ...) as text."""
        figures = ", ".join(
            f"{name} {value:.4g}"
            for name in ("score", "gold", "kl")
            if (value := read_number(sample, name)) is not None
        )
        prompt, response = (_verbatim(str(sample[name])) for name in ("prompt", "response"))
        markdown = "\n\n".join(("**prompt**", prompt, "**response**", response, figures))
        self._add_text("samples", markdown, int(sample["step"]))

    def _add_text(self, name: str, markdown: str, step: int) -> None:
        self._writer.add_summary(self._summary.text(name, markdown), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.add_summary(self._session_end)
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _layout(unit: float | str) -> dict[str, dict[str, list[Any]]]:
    """The charts of the CUSTOM SCALARS tab, with related curves in one picture."""

    def together(*tags: str) -> list[Any]:
        return ["Multiline", [f"^{tag}$" for tag in tags]]

    return {
        "KL control": {
            f"KL per {unit} and its target": together(f"kl/{unit}", "kl/target", "kl/ceiling"),
            "beta": together("kl/coef"),
            "KL per token: exact and estimated": together("kl/exact", "kl/k1", "kl/k2", "kl/k3"),
        },
        "Objective": {
            "score and gold": together("objective/scores", "objective/gold"),
            "score less the KL penalty": together("objective/scores_shaped", "objective/rlhf_reward"),
        },
        "What it costs": {
            "held-out perplexity": together("eval/perplexity"),
            "share of the KL that the gain in score needs": together("kl/bought"),
            "responses": together("rollout/eos_rate", "eval/distinct_2", "rollout/score_length_corr"),
        },
    }


def _parameter(value: Any) -> float | str:
    """A value as the HPARAMS tab takes it: other than numbers and text as JSON."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return safe_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _verbatim(text: str) -> str:
    """Markdown that shows `text` as it is: an indented block shows markup and HTML as text."""
    return "\n".join(f"    {safe_text(line)}" for line in text.split("\n"))
