"""What a training run leaves behind: rows, samples, TensorBoard, checkpoints, summary."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rlhf_kl.checkpoint import Checkpoint, checkpoints
from rlhf_kl.components import reference_file
from rlhf_kl.config.load import config_diff, dump_config, load_config
from rlhf_kl.config.schema import AnyConfig, Kind, TrainConfig
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.tracking.files import write_atomic
from rlhf_kl.tracking.jsonl import JsonlWriter, read_jsonl, truncate_after
from rlhf_kl.tracking.run_folder import RunFolder, write_json
from rlhf_kl.tracking.tensorboard import TensorBoardWriter
from rlhf_kl.tracking.versions import git_revision, versions

FREE_TO_CHANGE = ("run.name", "run.output_dir", "eval.", "checkpoint.", "tracking.")


class Recorder:
    """Writes a run's folder, from the beginning or from a checkpoint on; never a row twice."""

    def __init__(self, folder: RunFolder, config: AnyConfig, kind: Kind, display: TrainingDisplay) -> None:
        self.folder, self.config, self.display = folder, config, display
        self.kind, self.checkpoint = kind, self._last_checkpoint(kind)
        self.started = time.time()
        self.spent = float(self.checkpoint.state().get("seconds", 0.0)) if self.checkpoint else 0.0
        self.rows: JsonlWriter | None = None
        self.samples: JsonlWriter | None = None
        self.tensorboard: TensorBoardWriter | None = None

    def begin(self) -> None:
        """Open the files. Before this the folder stays free: a run that cannot start does not occupy it."""
        folder, config, kind = self.folder, self.config, self.kind
        step = self.checkpoint.step if self.checkpoint else 0
        for path in (folder.metrics, folder.samples):
            truncate_after(path, step)
        self._copy_plugins()
        write_atomic(folder.config, dump_config(config))
        self.rows = JsonlWriter(folder.metrics)
        if kind == "train":
            self.samples = JsonlWriter(folder.samples)
        if config.tracking.tensorboard:
            self.tensorboard = TensorBoardWriter(folder.tensorboard, config.model_dump(mode="json"))
            if step:
                self.tensorboard.rebuild(read_jsonl(folder.metrics), read_jsonl(folder.samples))

    @property
    def seconds(self) -> float:
        """Run time so far, earlier parts of a resumed run included."""
        return self.spent + time.time() - self.started

    def row(self, row: dict[str, Any]) -> None:
        """One row of metrics, everywhere it belongs."""
        assert self.rows is not None, "begin() opens the files"
        self.rows.write(row)
        if self.tensorboard:
            self.tensorboard.row(row)

    def sync(self) -> None:
        """The rows onto the disk, before a checkpoint that relies on them."""
        if self.rows is not None:
            self.rows.sync()

    def sample(self, sample: dict[str, Any]) -> None:
        """One sampled response."""
        assert self.samples is not None
        self.samples.write(sample)
        if self.tensorboard:
            self.tensorboard.sample(sample)

    def summary(self, **figures: Any) -> dict[str, Any]:
        """Write summary.json: these figures and what made them."""
        summary = {
            "run": self.config.run.name,
            "config": self.config.model_dump(mode="json"),
            "seed": self.config.run.seed,
            "seconds": self.seconds,
            "versions": versions(),
            "git": git_revision(Path.cwd()),
            **figures,
        }
        write_json(self.folder.summary, summary)
        return summary

    def close(self) -> None:
        """Everything onto the disk."""
        if self.rows is not None:
            self.rows.sync()
            self.rows.close()
        if self.samples is not None:
            self.samples.close()
        if self.tensorboard:
            self.tensorboard.close()

    def _last_checkpoint(self, kind: Kind) -> Checkpoint | None:
        found = checkpoints(self.folder.checkpoints)
        if not found:
            return None
        before = load_config(kind, self.folder.config, [])
        changed = [line for line in config_diff(before, self.config) if not line.startswith(FREE_TO_CHANGE)]
        if changed:
            raise InputError(
                f"{self.folder.path}: --resume goes on with the same config, but these keys changed:",
                *changed,
            )
        return found[-1]

    def _copy_plugins(self) -> None:
        if not isinstance(self.config, TrainConfig):
            return
        for ref in (self.config.reward.kind, self.config.reward.gold, self.config.kl.controller.kind):
            source = reference_file(ref, [Path.cwd()]) if ref else None
            if source is not None:
                shutil.copyfile(source, self.folder.claim(source.name))


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM ask for a stop after the current update; a second one ends at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def receive(self, number: int, _frame: FrameType | None) -> None:
        """The signal handler."""
        if self.signal is not None:
            raise Interrupted(number)
        self.signal = number

    def raise_if_asked(self) -> None:
        """Errors: Interrupted where a signal has come."""
        if self.signal is not None:
            raise Interrupted(self.signal)
