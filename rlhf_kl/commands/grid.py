"""Trains the unfinished runs of a comparison, each in a process of its own."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rlhf_kl import ui
from rlhf_kl.build.machine import on_this_machine
from rlhf_kl.config.compare import ComparePlan, PlannedRun, differences
from rlhf_kl.config.load import dump_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.program import NUMBER, cores
from rlhf_kl.report.run import stored_config
from rlhf_kl.run.folder import RunFolder, write_atomic
from rlhf_kl.run.signals import ending_on_sigterm
from rlhf_kl.ui import Advance, log

POLL_S = 0.3
GUARD = 3  # exit code of a run that a guard stopped: its rows count


@dataclass
class Job:
    """A run in progress."""

    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: Path
    started: float
    updates: int = 0  # that have been counted

    def new_updates(self) -> int:
        """Updates since the last call; rows of a run that this one replaces are older than it."""
        metrics, before = _run_folder(self.run).metrics, self.updates
        if metrics.exists() and metrics.stat().st_mtime >= self.started:
            rows = metrics.read_bytes().count(b"\n")
            self.updates = max(before, min(rows, self.run.config.updates))  # the closing evaluation is no update
        return self.updates - before


def train_grid(plan: ComparePlan, *, jobs: int, overwrite: bool) -> list[str]:
    """Train the missing runs; returns the names of those that failed.

    Errors: InputError if a folder holds another run.
    """
    if not overwrite:
        check_folders(plan)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{plan.folder} cannot be created: {error.strerror}") from None
    with ending_on_sigterm():
        return Grid(plan, jobs, overwrite).work()


def check_folders(plan: ComparePlan) -> None:
    """Errors: InputError for each folder whose run differs from the plan, before any training."""
    problems = []
    for run in plan.runs:
        folder = _run_folder(run)
        changed = folder.config.exists() and differences(stored_config(folder.config), on_this_machine(begun(run)))
        if changed:
            problems.append(
                f"{folder.path} holds a run with other settings ({changed[0]}): --overwrite starts all runs anew, "
                "another --output-dir keeps it"
            )
    if problems:
        raise InputError(*problems)


class Grid:
    """Trains the unfinished runs, `jobs` at a time. After an interrupt the same command goes on."""

    def __init__(self, plan: ComparePlan, jobs: int, overwrite: bool) -> None:
        self.plan, self.jobs, self.overwrite = plan, jobs, overwrite
        self.waiting = [run for run in plan.runs if overwrite or not _is_finished(run)]
        self.running: list[Job] = []
        self.failures: list[str] = []

    def work(self) -> list[str]:
        """Train until all runs have ended; return the names of those that failed."""
        total = len(self.plan.runs)
        log.info(f"{total} runs: {total - len(self.waiting)} finished, {len(self.waiting)} to train")
        if not self.waiting:
            return []
        updates = sum(run.config.updates for run in self.waiting)
        try:
            with ui.progress("training", updates) as advance:
                while self.waiting or self.running:
                    self._step(advance)
        finally:
            self._stop()
        return self.failures

    def _step(self, advance: Advance) -> None:
        while len(self.running) < self.jobs and (run := self._next()):
            self.waiting.remove(run)
            self.running.append(self._start(run))
        time.sleep(POLL_S)
        for job in self.running:
            if new := job.new_updates():
                advance(new, note=f"{job.run.name} {job.updates}/{job.run.config.updates}")
        for job in [job for job in self.running if job.process.poll() is not None]:
            self.running.remove(job)
            advance(job.new_updates())
            self._report(job)

    def _next(self) -> PlannedRun | None:
        """The first waiting run that starts from no unfinished one."""
        unfinished = {run.name for run in (*self.waiting, *(job.run for job in self.running))}
        return next((run for run in self.waiting if run.after not in unfinished), None)

    def _start(self, run: PlannedRun) -> Job:
        config = self.plan.folder / "configs" / f"{run.name}.yaml"  # which its process reads
        log = self.plan.folder / "logs" / f"{run.name}.log"
        for path in (_run_folder(run).path, config, log):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(config, dump_config(begun(run)))
        mode = "--overwrite" if self.overwrite else "--resume"
        environment = dict(os.environ)
        if self.jobs > 1:
            # Each its share, or the processes fight for the same cores.
            environment.setdefault(NUMBER, str(max(1, cores() // self.jobs)))
        log.unlink(missing_ok=True)  # it may be a link
        with log.open("wb") as out:
            # A session of its own: Ctrl-C reaches it once, through `_stop`, and the run ends with a checkpoint.
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_kl", "train", "--config", str(config), mode, "--quiet"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return Job(run, process, log, time.time())

    def _report(self, job: Job) -> None:
        code, seconds = job.process.returncode, time.time() - job.started
        ended = len(self.plan.runs) - len(self.waiting) - len(self.running)
        text = f"[{ended}/{len(self.plan.runs)}] {job.run.name}: "
        if code == 0:
            log.info(f"{text}done in {seconds:.0f} s")
            return
        last = _last_line(job.log)
        if code == GUARD:
            log.warning(f"{text}stopped by a guard: {last}")
        else:
            self.failures.append(job.run.name)
            log.error(f"{text}failed: {last or f'exit code {code}'} ({job.log})")
        lost = [job.run.name]
        for run in list(self.waiting):  # in the order of their chain
            if run.after in lost:
                lost.append(run.name)
                self.waiting.remove(run)
        if len(lost) > 1:
            log.error(f"not trained, since {lost[0]} did not reach its end: {', '.join(lost[1:])}")
        self.failures += lost[1:]

    def _stop(self) -> None:
        """Interrupt the runs in progress: each writes a checkpoint and ends."""
        for job in self.running:
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)
        for job in self.running:
            job.process.wait()


def begun(run: PlannedRun) -> TrainConfig:
    """The config that a run starts with. In a chain, `auto` is the last beta of the run before, over the step in KL.

    The reference's samples, which `auto` reads elsewhere, know little of a policy that is far from the reference.
    """
    config, before = (
        run.config,
        RunFolder(Path(run.config.policy.model).parent).finished_summary() if run.after else None,
    )
    if before is None or config.kl.controller.coef != "auto":
        return config
    control, last = config.kl.controller, before["final"]
    coef = last["kl/coef_next"] * last["kl/target"] / config.kl.target_value
    coef = min(max(coef, control.min_coef or coef), control.max_coef or math.inf)
    controller = control.model_copy(update={"coef": coef})
    return config.model_copy(update={"kl": config.kl.model_copy(update={"controller": controller})})


def _run_folder(run: PlannedRun) -> RunFolder:
    return RunFolder(Path(run.config.run.output_dir))


def _is_finished(run: PlannedRun) -> bool:
    summary = _run_folder(run).finished_summary()
    return summary is not None and summary.get("steps", 0) >= run.config.updates


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
