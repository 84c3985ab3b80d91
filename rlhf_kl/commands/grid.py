"""Trains the unfinished runs of a comparison, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from rlhf_kl import ui
from rlhf_kl.build.machine import on_this_machine
from rlhf_kl.config.compare import ComparePlan, PlannedRun, differences
from rlhf_kl.config.load import dump_config
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.program import NUMBER, cores
from rlhf_kl.report.run import stored_config
from rlhf_kl.run.folder import RunFolder, write_atomic
from rlhf_kl.run.signals import ending_on_sigterm
from rlhf_kl.ui import log

POLL_S = 0.3
GUARD = 3  # exit code of a run that a guard stopped: its rows count


def train_grid(plan: ComparePlan, *, jobs: int, overwrite: bool) -> list[str]:
    """Train the missing runs; returns the names of those that failed.

    Errors: InputError if a folder holds another run; Interrupted after a signal.
    """
    if not overwrite:
        check_folders(plan)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{plan.folder} cannot be created: {error.strerror}") from None
    try:
        with ending_on_sigterm():
            return Grid(plan, jobs, overwrite).work()
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None


def check_folders(plan: ComparePlan) -> None:
    """Errors: InputError for each folder whose run differs from the plan, before any training."""
    problems = []
    for run in plan.runs:
        folder = _run_folder(run)
        changed = folder.config.exists() and differences(stored_config(folder.config), on_this_machine(run.config))
        if changed:
            problems.append(
                f"{folder.path} holds a run with other settings ({changed[0]}): --overwrite starts all runs anew, "
                "another --output-dir keeps it"
            )
    if problems:
        raise InputError(*problems)


class Grid:
    """Trains the unfinished runs in `jobs` threads. After an interrupt the same command goes on."""

    def __init__(self, plan: ComparePlan, jobs: int, overwrite: bool) -> None:
        self.plan, self.jobs, self.overwrite = plan, jobs, overwrite
        self.missing = [run for run in plan.runs if overwrite or not _is_finished(run)]
        self.failures: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stopped = False

    def work(self) -> list[str]:
        """Train until all runs have ended; return the names of those that failed."""
        total, missing = len(self.plan.runs), len(self.missing)
        log.info(f"{total} runs: {total - missing} finished, {missing} to train")
        if not missing:
            return []
        began, updates = time.time(), sum(run.config.updates for run in self.missing)
        with ui.progress("training", updates) as advance, ThreadPoolExecutor(self.jobs) as threads:
            try:
                pending, counted = {threads.submit(self.train, run) for run in self.missing}, Counter[str]()
                while pending:
                    done, pending = wait(pending, POLL_S, FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    for run in self.missing:
                        if new := _updates_since(began, run) - counted[run.name]:
                            counted[run.name] += new
                            advance(new, note=f"{run.name} {counted[run.name]}/{run.config.updates}")
            finally:
                self.stop()
        return self.failures

    def train(self, run: PlannedRun) -> None:
        """Train a run, and tell how it ended."""
        began, file = time.monotonic(), self.plan.folder / "logs" / f"{run.name}.log"
        code = None if self.stopped else self.run(run, file)
        if self.stopped:
            return
        if code == 0:
            log.info(f"{run.name}: done in {time.monotonic() - began:.0f} s")
        elif code == GUARD:
            log.warning(f"{run.name}: stopped by a guard: {_last_line(file)}")
        else:
            log.error(f"{run.name}: failed: {_last_line(file) or f'exit code {code}'} ({file})")
            self.failures.append(run.name)

    def run(self, run: PlannedRun, file: Path) -> int:
        """Train a run in a process of its own, which writes its log into `file`; its exit code."""
        config = self.plan.folder / "configs" / f"{run.name}.yaml"  # which its process reads
        for path in (_run_folder(run).path, config, file):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(config, dump_config(run.config))
        mode = "--overwrite" if self.overwrite else "--resume"
        environment = dict(os.environ)
        if self.jobs > 1:
            # Each its share, or the processes fight for the same cores.
            environment.setdefault(NUMBER, str(max(1, cores() // self.jobs)))
        with file.open("wb") as out:
            # A session of its own: Ctrl-C reaches it once, through `stop`, and the run ends with a checkpoint.
            process = subprocess.Popen(
                [sys.executable, "-m", "rlhf_kl", "train", "--config", str(config), mode, "--quiet"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.processes.append(process)
        if self.stopped:  # since then
            process.send_signal(signal.SIGINT)
        return process.wait()

    def stop(self) -> None:
        """Start no more runs, and interrupt those in progress: each writes a checkpoint and ends."""
        self.stopped = True
        for process in self.processes:
            process.send_signal(signal.SIGINT)  # nothing where it has ended


def _run_folder(run: PlannedRun) -> RunFolder:
    return RunFolder(Path(run.config.run.output_dir))


def _updates_since(began: float, run: PlannedRun) -> int:
    """Updates of a run, which may go on with earlier ones; 0 while its rows are those of a run that it replaces."""
    metrics = _run_folder(run).metrics
    if not metrics.exists() or metrics.stat().st_mtime < began:
        return 0
    return min(metrics.read_bytes().count(b"\n"), run.config.updates)  # the closing evaluation is no update


def _is_finished(run: PlannedRun) -> bool:
    summary = _run_folder(run).finished_summary()
    return summary is not None and summary.get("steps", 0) >= run.config.updates


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else ""
