"""TensorBoard as a view of `metrics.jsonl`: one event file, never a point twice."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_kl.run.figures import read_number
from rlhf_kl.run.text import safe_text

_EVENTS = "events.out.tfevents.*"
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
        self._config = flatten(config)
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
            for old in self._folder.glob(_EVENTS):
                old.unlink()
            self._summary = summary
            self._writer = writer.FileWriter(str(self._folder), flush_secs=10)
            experiment, start, self._session_end = summary.hparams(self._config, dict.fromkeys(_RESULTS, 0.0))
        self._writer.add_summary(self._summary.custom_scalars(_layout(self._config.get("kl.unit", "token"))))
        self._writer.add_summary(experiment)
        self._writer.add_summary(start)
        for row in rows:
            self._add_row(row)
        for sample in samples:
            self._add_sample(sample)
        self._writer.flush()

    def row(self, row: Mapping[str, Any]) -> None:
        """Every finite number of a metrics row as a scalar at the row's `step`; alerts as text."""
        self._add_row(row)
        self._writer.flush()

    def sample(self, sample: Mapping[str, Any]) -> None:
        """A row of `samples.jsonl` (`step, prompt, response, score`, ...) as text."""
        self._add_sample(sample)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.add_summary(self._session_end)
            self._writer.close()
            self._writer = None

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_row(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        for name in row:
            if name != "step" and (value := read_number(row, name)) is not None:
                self._writer.add_summary(self._summary.scalar(name, value), step)
        if alerts := row.get("alerts"):
            self._add_text("alerts", "\n\n".join(_verbatim(str(alert)) for alert in alerts), step)

    def _add_sample(self, sample: Mapping[str, Any]) -> None:
        figures = ", ".join(
            f"{name} {value:.4g}"
            for name in ("score", "gold", "kl")
            if (value := read_number(sample, name)) is not None
        )
        parts = ["**prompt**", _verbatim(str(sample["prompt"]))]
        parts += ["**response**", _verbatim(str(sample["response"])), figures]
        self._add_text("samples", "\n\n".join(parts), int(sample["step"]))

    def _add_text(self, name: str, markdown: str, step: int) -> None:
        self._writer.add_summary(self._summary.text(name, markdown), step)


def _layout(unit: float | str) -> dict[str, dict[str, list[Any]]]:
    """The charts of the CUSTOM SCALARS tab: what belongs together in one picture."""

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
            "responses": together("rollout/eos_rate", "eval/distinct_2", "rollout/score_length_corr"),
        },
    }


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """Nested config as `section.key` names, as `--set` writes them; what is no number or text as JSON."""
    flat: dict[str, float | str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        elif isinstance(value, str):
            flat[name] = safe_text(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = value
        else:
            flat[name] = safe_text(json.dumps(value, ensure_ascii=False, default=str))
    return flat


def _verbatim(text: str) -> str:
    """Markdown that shows `text` as it is: inside an indented block no markup and no HTML counts."""
    return "\n".join(f"    {safe_text(line)}" for line in text.split("\n"))
