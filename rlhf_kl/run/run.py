"""A run: what it consists of, what it writes, and how it goes on after a crash, bit for bit."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

import torch

from rlhf_kl.config.resolve import dump_config
from rlhf_kl.config.schema import AnyConfig, TrainConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.errors import GuardStop, InputError, Interrupted
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints
from rlhf_kl.run.folder import NO_CHECKPOINTS, RunFolder, lock_run_folder, write_atomic
from rlhf_kl.run.interval import Interval, checkpoint_size
from rlhf_kl.run.log import JsonlWriter, TensorBoardWriter, Tracker, Views, read_jsonl, write_json
from rlhf_kl.run.resume import (
    check_config,
    check_fingerprints,
    check_outside,
    environment,
    git_revision,
    keep_inputs,
    kind_of,
    plugin_copies,
    report_differences,
    tell_changed,
    versions,
)
from rlhf_kl.run.saving import Saving
from rlhf_kl.run.signals import StopRequest, grace_note, stopping_on_signals
from rlhf_kl.seeding import derive_seed, library_state, load_library_state, seed_libraries
from rlhf_kl.shell import LAST_SECONDS, keep_threads
from rlhf_kl.ui import log


class Run:
    """One run in its folder. Of several ranks the first one writes; all call the same methods.

    In order: `check`, `track` what it consists of, `begin`, `log` in each of `steps`, `finish`.
    """

    def __init__(self, config: AnyConfig, ranks: Ranks | None = None) -> None:
        self.config, self.ranks, self.kind = config, ranks or Ranks(), kind_of(config)
        self.folder = RunFolder(Path(config.run.output_dir))
        self.checkpoint: Checkpoint | None = None  # the one to go on from
        self.finished: dict[str, Any] | None = None  # the summary of a run that is complete
        self.tracked: dict[str, Any] = {}
        self.spared: list[int] = []  # steps of checkpoints that are never dropped
        self._state: dict[str, Any] = {}  # of the checkpoint
        self._inputs: dict[str, Any] = {}  # what `check` compares
        self._sound = True  # whether what is tracked may be saved
        self._started = time.time()
        self._total = 0  # steps of the whole run
        self.interval: Interval  # between its checkpoints, known when it begins
        self._overwrites = False
        self._lock: IO[str] | None = None
        self._stop = StopRequest(0.0)
        self._exits = contextlib.ExitStack()  # of the handling of signals
        self._rows: JsonlWriter | None = None
        self._samples: JsonlWriter | None = None
        self._views = Views({})
        self._saving = Saving(self.folder.checkpoints, config.checkpoint, self.ranks)

    # ---- the beginning

    def open(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Lock the folder, and with `resume` find the checkpoint to go on from.

        Errors: InputError for a folder that cannot be used, one whose run has another config, and a checkpoint that
        cannot be read.
        """

        def first() -> None:
            if overwrite:
                check_outside(self.folder, self.config)
            self._lock = lock_run_folder(self.folder, resume=resume, overwrite=overwrite)
            if resume:
                self._find_checkpoint()
            if self.finished or self.checkpoint:
                tell_changed(self.folder, self.config, finished=self.finished is not None)
            if self.finished is None:
                self.folder.check_models()
                self.folder.check_copies(plugin_copies(self.config))

        self._overwrites = overwrite
        self.ranks.run(first if self.ranks.writes else lambda: None)
        self.finished, self.checkpoint = self.ranks.first((self.finished, self.checkpoint))
        if self.checkpoint is not None and self.finished is None:
            self._state = self.checkpoint.state()
            self.spared = list(self._state["spared"])

    def _find_checkpoint(self) -> None:
        folder, finished = self.folder, self.folder.finished_summary()
        if finished is not None or checkpoints(folder.checkpoints):
            check_config(folder, self.config)
        if finished is not None:
            further = isinstance(self.config, TrainConfig) and self.config.updates > finished["steps"]
            log.info(f"{folder.path} holds a finished run{', going on with more episodes' if further else ''}")
            if not further:
                self.finished = finished
                return
        self.checkpoint = next(reversed(checkpoints(folder.checkpoints)), None)
        if self.checkpoint is None and finished is not None:
            raise InputError(
                f"{folder.path}: finished, and could go on only from a checkpoint{NO_CHECKPOINTS}: "
                "--overwrite starts anew, another --output-dir keeps it"
            )
        if self.checkpoint is None:
            without = "a run without a checkpoint: starting it from its beginning"
            log.info(f"{folder.path} holds {without if folder.config.exists() else 'no run yet: starting one'}")

    def check(self, config: AnyConfig, device: torch.device, fingerprints: Mapping[str, str]) -> None:
        """Check what the config only names, seed the libraries, and keep the number of threads.

        `config`: as it is stored, with nothing left to decide. `fingerprints`: of models and files, by config key.
        Errors: InputError if one has changed since the run began.
        """
        self.config = config
        same = self.ranks.all((dump_config(config), dict(fingerprints)))
        if any(each != same[0] for each in same):
            raise InputError("the processes read different configs, models or data")
        before = self._state.get("environment", {})
        keep_threads(before.get("threads"))
        self._inputs = {"fingerprints": dict(fingerprints), "environment": environment(device, self.ranks.count)}
        if self.checkpoint is not None:
            check_fingerprints(self._state["fingerprints"], fingerprints, self.folder.path)
            report_differences(before, self._inputs["environment"])
        index, seed = self.ranks.index, self.config.run.seed
        seed_libraries(derive_seed(seed, "process", index) if index else seed)

    def track(self, **objects: Any) -> None:
        """Put objects into every checkpoint, and load their state now where the run goes on.

        `model` and `optimizer` go into files of tensors; the `state_dict()` of any other must be JSON, and may differ
        between ranks. One without `load_state_dict` is built from `saved`.
        """
        self.tracked |= objects
        if self.checkpoint is not None:
            self.restore(self.checkpoint, objects)

    def saved(self, name: str) -> dict[str, Any] | None:
        """The state under this name in the checkpoint from which the run goes on; None without one."""
        return self._tracked_states(self._state).get(name)

    def restore(self, checkpoint: Checkpoint, names: Iterable[str]) -> None:
        """Load what is tracked under these names from a checkpoint."""
        states = self._tracked_states(checkpoint.state())  # read anew: objects may change what they got
        for name in names:
            if name == "model":
                checkpoint.load_model(self.tracked[name])
            elif name == "optimizer":
                checkpoint.load_optimizer(self.tracked[name])
            elif hasattr(self.tracked[name], "load_state_dict"):
                self.tracked[name].load_state_dict(states[name])

    def _tracked_states(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of the first rank, with what is different on this one."""
        first, *others = state.get("tracked", [{}])
        return {**first, **(others[self.ranks.index - 1] if 0 < self.ranks.index <= len(others) else {})}

    def begin(self, total: int) -> None:
        """Open the files, and handle signals from now on. `total`: the number of steps, those done before included.

        Nothing is written before, so a run that cannot start leaves the folder free, or the run that it replaces.
        """
        unit: Literal["updates", "steps"] = "updates" if self.kind == "train" else "steps"
        size = checkpoint_size(self.tracked["model"], self.tracked["optimizer"])
        self._total = total
        self.interval = Interval(self.config.checkpoint.every, size, total, unit, self._state.get("every"))
        self.ranks.run(self._open_files if self.ranks.writes else lambda: None)
        self._stop = self._exits.enter_context(stopping_on_signals(self.config.checkpoint.grace))
        if note := grace_note(self.config.checkpoint.grace):
            log.warning(note)
        if self.checkpoint is not None:
            if self.ranks.index < len(self._state["tracked"]):
                load_library_state(self._tracked_states(self._state)["libraries"])
            log.info(f"going on from {'update' if self.kind == 'train' else 'step'} {self.checkpoint.step}")

    def _open_files(self) -> None:
        folder, config = self.folder, self.config
        copies = plugin_copies(config)  # before they are removed: one may be a copy itself
        folder.write_copies(copies)  # while the config of an earlier build still says which are the run's
        if self._overwrites:
            folder.remove_run(copies)
        sent = max((row["step"] for row in read_jsonl(folder.metrics)), default=0) if self.checkpoint else 0
        sent -= folder.summary.is_file()  # its closing row makes room for an update
        lengths = self._state.get("lengths", {})
        self._rows = JsonlWriter(folder.metrics, lengths.get(folder.metrics.name, 0))
        if self.kind == "train":
            self._samples = JsonlWriter(folder.samples, lengths.get(folder.samples.name, 0))
        keep_inputs(folder, config, anew=self.checkpoint is None)
        write_atomic(folder.config, dump_config(config))
        views: dict[str, Callable[[], Any]] = {}
        if config.tracking.tensorboard:
            views["tensorboard"] = partial(TensorBoardWriter, folder)
        for name in config.tracking.trackers:
            views[name] = partial(Tracker, name, folder, config.run.name, config.model_dump(mode="json"), sent)
        self._views = Views(views)
        if self.checkpoint is not None:
            # The process may have died between writing this checkpoint and dropping an older one.
            self._saving.prune({"every": self.interval.every, "spared": self.spared})

    # ---- the loop

    @property
    def next_step(self) -> int:
        """The first step to do."""
        return 1 if self.checkpoint is None else self.checkpoint.step + 1

    def steps(self) -> Iterator[int]:
        """The steps that are left; after each the checkpoint that is due. Errors: Interrupted after a signal."""
        due = False
        for step in range(self.next_step, self._total + 1):
            yield step
            self._saving.settle(waits=False)
            due = due or self.interval.is_regular(step) or step == self._total
            if (due or self._needs_checkpoint()) and self._sound:
                self.save(step)
                due = False
            if number := self._signalled():
                self.settle()
                raise Interrupted(number)
        self._exits.close()

    def _needs_checkpoint(self) -> bool:
        """Whether a rank got a signal, or found that the last checkpoint is too old."""
        return any(self.ranks.all(self.interval.is_late() or self._stop.signal is not None))

    def _signalled(self) -> int:
        """The signal that a rank got, else 0."""
        return max(self.ranks.all(self._stop.signal or 0))

    def log(self, row: dict[str, Any], *, sound: bool = True) -> None:
        """Write a row of metrics. `sound`: whether what is tracked may be saved after it; else the next one decides."""
        self._sound = sound
        if self._rows is not None:
            self._rows.write(row)
            self._views.row(row)

    def sample(self, sample: dict[str, Any]) -> None:
        """Write one sampled response."""
        if self._samples is not None:
            self._samples.write(sample)

    def save(self, step: int) -> None:
        """Write checkpoint `step`: all that is tracked, the state of the libraries, and the length of the files.

        With `checkpoint.background` it is complete when another one is saved, or after `settle`.
        """
        states = self.ranks.all(self.ranks.run(self._own_states))
        state = self.ranks.run(partial(self._state_now, states))
        self._saving.save(step, self.tracked["model"], self.tracked["optimizer"], state)
        self.interval.saved()

    def save_sound(self, step: int) -> None:
        """As `save`, where what is tracked may be saved; then the checkpoint is complete."""
        if self._sound:
            self.save(step)
            self.settle()

    def settle(self) -> None:
        """Wait for a checkpoint that is being written. Errors: OSError if the disk was full."""
        self._saving.settle()

    def checkpoints(self) -> list[Checkpoint]:
        """The complete ones, oldest first, once none is being written any more."""
        self.settle()
        return checkpoints(self.folder.checkpoints)

    def _own_states(self) -> dict[str, Any]:
        others = {name: one for name, one in self.tracked.items() if name not in ("model", "optimizer")}
        return {name: one.state_dict() for name, one in others.items()} | {"libraries": library_state()}

    def _state_now(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds beside tensors. `states`: what is tracked, by rank."""
        for file in self._files():
            file.sync()  # a checkpoint never counts rows that are not on the disk
        lengths = {file.path.name: file.size for file in self._files()}
        first, *others = states
        tracked = [first, *({name: one for name, one in each.items() if one != first.get(name)} for each in others)]
        state = {"tracked": tracked, "spared": self.spared, "seconds": self.seconds, "lengths": lengths}
        return state | {"every": self.interval.every, **self._inputs}

    # ---- the end

    @property
    def seconds(self) -> float:
        """Run time so far, earlier parts of a resumed run included."""
        return float(self._state.get("seconds", 0.0)) + time.time() - self._started

    def finish(self, **figures: Any) -> dict[str, Any]:
        """Write and return summary.json: these figures, with config, versions and git revision."""
        self.settle()
        summary = {
            "run": self.config.run.name,
            "config": self.config.model_dump(mode="json"),
            "seed": self.config.run.seed,
            "seconds": self.seconds,
            "versions": versions(),
            "git": git_revision(Path.cwd()),
            **figures,
        }
        for file in self._files():
            file.sync()
        if self.ranks.writes:
            write_json(self.folder.summary, summary)
        return summary

    def stop(self, row: dict[str, Any], reason: str, **figures: Any) -> NoReturn:
        """End the run for a guard, after `row`: save what may be saved. Errors: GuardStop."""
        self.save_sound(row["step"])
        self.finish(steps=row["step"], final=row, stopped_by=reason, **figures)
        raise GuardStop(reason)

    def close(self) -> None:
        """Close the files and free the folder, once nothing is being written; an interrupted run waits for seconds."""
        self._exits.close()
        failure = sys.exc_info()[0]
        self._saving.wait(None if failure is None or issubclass(failure, Exception) else LAST_SECONDS)
        self._views.close(failed=failure is not None)
        self._saving.close(self._close_files)

    def _close_files(self) -> None:
        for file in (*self._files(), self._lock):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk has been reported already
                    file.close()

    def _files(self) -> list[JsonlWriter]:
        return [file for file in (self._rows, self._samples) if file is not None]

    @property
    def began(self) -> bool:
        """Whether this process writes its rows already."""
        return self._rows is not None

    def way_on(self) -> str:
        """Where --resume would go on."""
        self._saving.wait()
        complete = [each.step for each in checkpoints(self.folder.checkpoints)]
        if not complete:
            return "there is no checkpoint yet: --resume begins anew"
        return f"the checkpoint of step {complete[-1]} is complete: --resume goes on from it"
