"""`rlhf_kl.train`: what the command `rlhf-kl train` does, and what its run has to show."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

from rlhf_kl.commands.train import train_command
from rlhf_kl.config.named import NOTHING, Given
from rlhf_kl.python.configured import ConfigLike, Reward, given_in_python, python_config
from rlhf_kl.python.session import python_call
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import read_jsonl

FRAME = '<iframe srcdoc="{}" style="width: 100%; height: 720px; border: 1px solid #8884"></iframe>'


class TrainedRun:
    """A run in its folder; everything is read when it is asked for."""

    def __init__(self, folder: str | PathLike[str], given: Given = NOTHING) -> None:
        """`given`: what its config names and came as objects, see `resolve`. Errors: InputError without a run there."""
        self.folder, self._given = Path(folder), given
        self._files = RunFolder(self.folder)
        self._files.require_run()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl: one for each update, and the closing evaluation."""
        return list(read_jsonl(self._files.metrics))

    @property
    def summary(self) -> dict[str, Any]:
        """The closing figures, config and versions, as in summary.json; empty for a run that is not finished."""
        return dict(self._result.summary)

    def frame(self) -> Any:
        """The rows as a data frame of pandas, which must be installed."""
        import pandas

        return pandas.DataFrame(self.metrics)

    @cached_property
    def policy(self) -> Any:
        """The trained model, as transformers (or peft, for an adapter) loads it: on the CPU, in float32."""
        return self._loaded.model

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self._loaded.tokenizer

    @cached_property
    def _loaded(self) -> Any:
        from rlhf_kl.training.load import Loader

        return Loader(self._result.config.run).language_model(str(self._files.final), "final", keep_adapter=True)

    @property
    def _result(self) -> Any:
        from rlhf_kl.report.one_run import read_run

        return read_run(self.folder)

    def frontier(
        self, targets: Sequence[float] | None = None, *, samples: int | None = None, quiet: bool = False
    ) -> dict[str, Any]:
        """Score, KL and perplexity of this policy at other KL targets, without training, as `rlhf-kl scale` tells.

        targets: in the run's unit; None: around the run's. samples: responses at each. Returns the document of
        scale.json, whose `rows` have a target each; the pictures are in the folder. Errors: RlhfKlError.
        """
        from rlhf_kl.commands.scale import frontier
        from rlhf_kl.commands.stored import Permissions

        with python_call(quiet=quiet):
            document, _ = frontier(self.folder, Permissions(plugins=True), targets, samples, given=self._given)
        return document

    def __repr__(self) -> str:
        from rlhf_kl.control.verdict import verdict_text

        result = self._result
        figures = result.figures
        held = f", {verdict_text(figures)}" if result.status == "finished" else ""
        return f"<run {self.folder}: {len(result.updates)} updates, {result.status}{held}>"

    def _repr_html_(self) -> str:
        """In a notebook: the report of the run."""
        from rlhf_kl.report.page import report_page

        return FRAME.format(html.escape(report_page(self._result)))


def train(
    config: ConfigLike = "ppo_adaptive.yaml",
    changes: Mapping[str, Any] | None = None,
    *,
    prompts: Iterable[Any] | None = None,
    texts: Iterable[str] | None = None,
    reward: Reward | None = None,
    output_dir: str | PathLike[str] | None = None,
    seed: int | None = None,
    updates: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> TrainedRun:
    """Train a policy as `rlhf-kl train` does, in this process.

    config: the name or path of a YAML, or its mapping. changes: values by dotted key, as `--set`.
    prompts: to train on, one in twenty of them held out: texts, conversations, or rows (mappings, whose columns the
    reward may read). texts: held out, for the perplexity. reward: f(prompts, responses, and columns that it names) ->
    one score a response. What is left out is as the config says.
    resume: go on from the newest checkpoint in output_dir, or start. overwrite: replace the run that is there.

    Errors: RlhfKlError; KeyboardInterrupt after Ctrl-C, which leaves a checkpoint: `resume=True` goes on.
    """
    given = given_in_python(prompts, texts, reward)
    short: dict[str, Any] = {"output_dir": output_dir, "seed": seed, "updates": updates}
    settings = python_config(config, changes, given, **short)
    with python_call(quiet=quiet):
        from rlhf_kl.training.loop import run_train

        train_command(partial(run_train, given=given), settings, resume=resume, overwrite=overwrite)
    return TrainedRun(settings.run.output_dir, given)
