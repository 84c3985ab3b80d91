"""Writes a run's records: rows, samples, TensorBoard, trackers, checkpoints, summary."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_kl.config.load import dump_config
from rlhf_kl.config.plugins import plugin_files
from rlhf_kl.config.schema import AnyConfig, Kind
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import InputError
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints, prune, save_checkpoint
from rlhf_kl.run.contents import CHECKPOINT, MODELS, link_problems
from rlhf_kl.run.files import write_atomic, write_bytes_atomic
from rlhf_kl.run.folders import sweep
from rlhf_kl.run.jsonl import JsonlWriter, read_jsonl, truncate_after, truncate_at
from rlhf_kl.run.resume import check_fingerprints, environment, last_checkpoint, report_differences
from rlhf_kl.run.run_folder import RunFolder, write_json
from rlhf_kl.run.tensorboard import TensorBoardWriter
from rlhf_kl.run.trackers import Trackers
from rlhf_kl.run.versions import git_revision, versions
from rlhf_kl.seeding import derive_seed, library_state, load_library_state, seed_libraries
from rlhf_kl.sharding import slots_of, tensors_of
from rlhf_kl.threads import keep_threads
from rlhf_kl.ui import log


class Recorder:
    """Writes a run's folder, from the beginning or from a checkpoint on; never a row twice."""

    def __init__(
        self,
        folder: RunFolder,
        config: AnyConfig,
        kind: Kind,
        device: torch.device,
        fingerprints: Mapping[str, str],
        processes: Ranks | None = None,
    ) -> None:
        """`fingerprints`: of files that the config names, by key. Of several `processes` the first writes.

        Errors: InputError if there is a checkpoint, but the run has changed since.
        """
        self.folder, self.config = folder, config
        self.kind, self.fingerprints = kind, dict(fingerprints)
        self.processes = processes or Ranks()
        self.checkpoint = None if folder.replaces else self.processes.first(self.processes.run(self._last))
        self.state: dict[str, Any] = self.checkpoint.state() if self.checkpoint else {}
        keep_threads(self.state.get("environment", {}).get("threads"))
        self.environment = environment(device, self.processes.count)
        same = self.processes.all((dump_config(config), self.fingerprints))
        if any(each != same[0] for each in same):
            raise InputError("the processes read different configs, models or data")
        if self.checkpoint is not None:
            check_fingerprints(self.state["fingerprints"], self.fingerprints, str(folder.path))
            report_differences(self.state["environment"], self.environment)
        self.started = time.time()
        self.spent = float(self.state.get("seconds", 0.0))
        self.rows: JsonlWriter | None = None
        self.samples: JsonlWriter | None = None
        self.tensorboard: TensorBoardWriter | None = None
        self.trackers: Trackers | None = None
        index = self.processes.index
        seed_libraries(derive_seed(config.run.seed, "process", index) if index else config.run.seed)

    def _last(self) -> Checkpoint | None:
        if not self.processes.writes:
            return None
        self._sweep()
        return last_checkpoint(self.folder, self.config)

    def begin(self) -> None:
        """Open the files. Nothing is written before, so a run that cannot start leaves the folder free.

        Errors: InputError if the path of a plugin's copy is a link.
        """
        self.processes.run(self._open_files)
        if self.checkpoint:
            states = [self.state["libraries"], *self.state.get("other_libraries", [])]
            if self.processes.index < len(states):
                load_library_state(states[self.processes.index])

    def _open_files(self) -> None:
        if not self.processes.writes:
            return
        folder, config = self.folder, self.config
        plugins = self._plugins()
        if problems := link_problems(folder.path / name for name in plugins):
            raise InputError(*problems)
        if folder.replaces:
            self._sweep()
            folder.clear()
        sent = self._sent_to_trackers()
        for path in (folder.metrics, folder.samples):
            self._truncate(path)
        for name, content in plugins.items():
            write_bytes_atomic(folder.claim(name), content)
        write_atomic(folder.config, dump_config(config))
        self.rows = JsonlWriter(folder.metrics)
        if self.kind == "train":
            self.samples = JsonlWriter(folder.samples)
        if config.tracking.tensorboard:
            self.tensorboard = TensorBoardWriter(folder.tensorboard, config.model_dump(mode="json"))
            if self.checkpoint:
                self.tensorboard.rebuild(read_jsonl(folder.metrics), read_jsonl(folder.samples))
        if config.tracking.trackers:
            values = config.model_dump(mode="json")
            names, run = config.tracking.trackers, config.run.name
            self.trackers = Trackers(names, folder, run, values, log.warning, sent)
        if self.checkpoint:
            # The process may have died between writing this checkpoint and dropping an older one.
            section = config.checkpoint
            prune(folder.checkpoints, section.keep, every=section.every, spared=self.state.get("spared", ()))

    def _sent_to_trackers(self) -> int:
        """The last step that trackers have of a run that goes on; its closing row makes room for an update."""
        if not (self.config.tracking.trackers and self.checkpoint):
            return 0
        last = max((int(row["step"]) for row in read_jsonl(self.folder.metrics)), default=0)
        return last - self.folder.summary.is_file()

    def _sweep(self) -> None:
        """Remove incomplete folders of killed processes."""
        sweep(self.folder.checkpoints, CHECKPOINT)
        sweep(self.folder.path, re.compile("|".join(MODELS)))

    def _truncate(self, path: Path) -> None:
        """Remove the rows after the checkpoint: they are computed again."""
        if self.checkpoint is None:
            truncate_at(path, 0)
        elif not truncate_at(path, self.state["lengths"].get(path.name, 0)):
            log.warning(
                f"resume: {path} does not fit the checkpoint: rows are missing or were changed; "
                f"rows up to step {self.checkpoint.step} are kept"
            )
            truncate_after(path, self.checkpoint.step)

    @property
    def seconds(self) -> float:
        """Run time so far, earlier parts of a resumed run included."""
        return self.spent + time.time() - self.started

    def row(self, row: dict[str, Any]) -> None:
        """Write one row of metrics to all records."""
        if not self.processes.writes:
            return
        assert self.rows is not None, "begin() opens the files"
        self.folder.check_there()
        self.rows.write(row)
        if self.trackers is not None:
            self.trackers.row(row)
        self._show(lambda tensorboard: tensorboard.row(row))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
    ) -> None:
        """Write checkpoint `step`: the model, the optimizer, `state`, and the state of libraries and files.

        `state["spared"]`, if present: steps of checkpoints that must stay.
        """
        libraries, *others = self.processes.all(library_state())
        state = {**state, "libraries": libraries, "other_libraries": others}
        self.processes.check_weights(model.parameters())
        keep = self.processes.writes
        tensors, slots = tensors_of(model, keep=keep), slots_of(optimizer, keep=keep)
        self.processes.run(lambda: self._write(step, tensors, slots, state))  # all wait until it is complete

    def _write(
        self, step: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        if not self.processes.writes:
            return
        self.folder.check_there()
        lengths = {}
        for writer in (self.rows, self.samples):
            if writer is not None:
                writer.sync()  # a checkpoint never counts rows that are not on the disk
                lengths[writer.path.name] = writer.size
        section = self.config.checkpoint
        save_checkpoint(
            self.folder.checkpoints,
            step,
            model,
            optimizer,
            {
                **state,
                "seconds": self.seconds,
                "lengths": lengths,
                "fingerprints": self.fingerprints,
                "environment": self.environment,
            },
            section.keep,
            every=section.every,
            spared=state.get("spared", ()),
        )

    def sample(self, sample: dict[str, Any]) -> None:
        """Write one sampled response."""
        if not self.processes.writes:
            return
        assert self.samples is not None
        self.samples.write(sample)
        self._show(lambda tensorboard: tensorboard.sample(sample))

    def _show(self, show: Callable[[TensorBoardWriter], None]) -> None:
        """TensorBoard only shows the rows: if it cannot be written, the run goes on without it."""
        if self.tensorboard is None:
            return
        try:
            show(self.tensorboard)
        except OSError as error:
            self.tensorboard = None
            log.warning(f"tensorboard: {error.strerror or error}: switched off; --resume rebuilds it")

    def summary(self, **figures: Any) -> dict[str, Any]:
        """Write summary.json: these figures, with config, versions and git revision."""
        summary = {
            "run": self.config.run.name,
            "config": self.config.model_dump(mode="json"),
            "seed": self.config.run.seed,
            "seconds": self.seconds,
            "versions": versions(),
            "git": git_revision(Path.cwd()),
            **figures,
        }
        for writer in (self.rows, self.samples):
            if writer is not None:
                writer.sync()
        if self.processes.writes:
            write_json(self.folder.summary, summary)
        return summary

    def mention_checkpoint(self) -> None:
        """Name the checkpoint after an error that the user can fix, as in a reward function."""
        present = checkpoints(self.folder.checkpoints)
        if self.rows is not None and present:
            log.warning(
                f"the checkpoint of step {present[-1].step} is complete: fix the error, then --resume goes on from it"
            )

    def close(self) -> None:
        """Close the files; all data that must be on the disk is there already."""
        for file in (self.rows, self.samples, self.tensorboard):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk has been reported already
                    file.close()
        if self.trackers is not None:
            self.trackers.close(failed=sys.exc_info()[0] is not None)

    def _plugins(self) -> dict[str, bytes]:
        """The plugins' files, by the names under which the run keeps them; one may be such a copy itself."""
        copies: dict[str, bytes] = {}
        for source in dict.fromkeys(path.resolve() for path in plugin_files(self.config).values()):
            name, count = re.sub(r"[^\w.-]", "_", source.name), 1
            while name in copies:  # a/mine.py beside b/mine.py
                count += 1
                name = f"{Path(name).stem}-{count}.py"
            copies[name] = source.read_bytes()
        return copies
