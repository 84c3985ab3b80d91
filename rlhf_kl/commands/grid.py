"""Trains the unfinished runs of a comparison, each in a process of its own, and reads them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from rlhf_kl import ui
from rlhf_kl.config.inputs import changed_inputs
from rlhf_kl.config.resolve import dump_config
from rlhf_kl.config.variants import ComparePlan, PlannedRun, differences
from rlhf_kl.errors import InputError, Interrupted
from rlhf_kl.report.comparison import CONFIGS, Comparison, not_begun, read_comparison
from rlhf_kl.report.one_run import stored_config
from rlhf_kl.run.folder import (
    RunFolder,
    checkpoint_folders,
    checkpoint_step,
    lock_run_folder,
    remove_folder,
    write_atomic,
)
from rlhf_kl.run.signals import ending_on_sigterm
from rlhf_kl.shell import NUMBER, cores
from rlhf_kl.text import counted
from rlhf_kl.training.device import on_this_machine
from rlhf_kl.ui import log

POLL_S = 0.3
WAYS = "--overwrite starts all runs anew, another --output-dir keeps them"
GUARD = 3  # exit code of a run that a guard stopped: its rows count


def train_grid(plan: ComparePlan, *, jobs: int, overwrite: bool) -> list[str]:
    """Train the missing runs, `jobs` at a time; returns the names of those that failed.

    A run that has finished loses its checkpoints, which are there to resume. After an interrupt the same command goes
    on. Errors: InputError if a folder holds another run; Interrupted after a signal.
    """
    if not overwrite:
        check_folders(plan)
    waiting = [run for run in plan.runs if overwrite or not _is_finished(run)]
    forget_others(plan)
    dropped = 0
    for run in plan.runs:
        write_atomic(_config_file(plan, run), dump_config(run.config))
        if run not in waiting:  # an earlier process may have died between the two
            dropped += drop_checkpoints(run)
    jobs = max(1, min(jobs, len(waiting)))
    log.info(f"{counted(len(plan.runs), 'run')}: {len(plan.runs) - len(waiting)} finished, {len(waiting)} to train")
    running: dict[str, tuple[PlannedRun, subprocess.Popen[bytes]]] = {}
    failures: list[str] = []
    began, told = time.time(), Counter[str]()
    try:
        with ending_on_sigterm(), ui.progress("training", sum(run.config.updates for run in waiting)) as advance:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[run.name] = run, start_run(plan, run, jobs, overwrite)
                time.sleep(POLL_S)
                for run, process in list(running.values()):
                    ended = process.poll() is not None
                    if new := _updates_since(began, run) - told[run.name]:
                        told[run.name] += new
                        advance(new, note=f"{run.name} {told[run.name]}/{run.config.updates}")
                    if ended:
                        del running[run.name]
                        failures += [run.name] * (not tell_end(run, process.returncode, _log_file(plan, run)))
                        dropped += drop_checkpoints(run)
    except KeyboardInterrupt:
        raise Interrupted(signal.SIGINT) from None
    finally:
        for _, process in running.values():
            process.send_signal(signal.SIGINT)  # each writes a checkpoint and ends
        for _, process in running.values():
            process.wait()
        if dropped:
            runs = f"{dropped} finished run{'s' * (dropped > 1)}"
            log.info(f"checkpoints of {runs} removed (checkpoint.keep in the config keeps them)")
    return failures


def planned_comparison(plan: ComparePlan) -> Comparison:
    """The runs of a plan that have been started, with the names that the plan gives them."""
    names = {Path(run.config.run.output_dir): run.variant for run in plan.runs}
    started = {path: name for path, name in names.items() if (path / "config.yaml").is_file()}
    if not started:
        raise InputError(f"{plan.folder}: none of the runs has started")
    comparison = read_comparison(list(started), started)
    missing = not_begun([path for path in names if path not in started])
    return Comparison(comparison.variants, [*plan.notes, *missing, *comparison.notes])


def check_folders(plan: ComparePlan) -> None:
    """Errors: InputError for each folder whose run differs from the plan, and each file that changed."""
    problems = []
    used, known = dict[str, list[str]](), dict[str, str | None]()
    for run in plan.runs:
        folder = _run_folder(run)
        changed = folder.config.exists() and differences(stored_config(folder.config), on_this_machine(run.config))
        if folder.finished_summary() is not None or checkpoint_folders(folder.checkpoints):
            for line in changed_inputs(folder.path, run.config, known=known).values():
                used.setdefault(line, []).append(run.name)
        if changed:
            problems.append(f"{folder.path} holds a run with other settings ({changed[0]}): {WAYS}")
    problems += [f"{line} ({', '.join(names[:2])}{', ...' * (len(names) > 2)}): {WAYS}" for line, names in used.items()]
    if problems:
        raise InputError(*problems)


def forget_others(plan: ComparePlan) -> None:
    """Remove the configs of runs that are not planned any more, or each would be noted as one that has not begun."""
    planned = {run.name for run in plan.runs}
    for file in (plan.folder / CONFIGS).glob("*.yaml"):
        if file.stem not in planned and re.fullmatch(r".+-s\d+", file.stem):
            file.unlink(missing_ok=True)


def start_run(plan: ComparePlan, run: PlannedRun, jobs: int, overwrite: bool) -> subprocess.Popen[bytes]:
    """Start a run in a process of its own, which writes into its log."""
    config, file = _config_file(plan, run), _log_file(plan, run)
    write_atomic(config, dump_config(run.config))  # again: another plan in this folder may have removed it
    for path in (_run_folder(run).path, file):
        path.parent.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if jobs > 1 and (threads := given_threads()) is not None:
        # Each its share, or the processes fight for the same cores.
        environment[NUMBER] = str(max(1, threads // jobs))
    mode = "--overwrite" if overwrite else "--resume"
    file.unlink(missing_ok=True)  # a link is replaced
    with file.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "rlhf_kl", "train", "--config", str(config), mode, "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )


def given_threads() -> int | None:
    """Threads of all runs together: what the user has set, else the cores; None for a number that only OpenMP reads."""
    own = os.environ.get(NUMBER, "").strip()
    return cores() if not own else int(own) if own.isdecimal() and int(own) else None


def drop_checkpoints(run: PlannedRun) -> bool:
    """Remove those of a finished run, but for its best one (`checkpoint.best`); none if the run `keeps` them.

    Returns whether there were any to remove.
    """
    folder = _run_folder(run)
    if run.keeps or (summary := folder.finished_summary()) is None:
        return False
    best = (summary.get("best_checkpoint") or {}).get("step")
    with contextlib.suppress(InputError), lock_run_folder(folder, resume=True, overwrite=False):
        old = [path for path in checkpoint_folders(folder.checkpoints) if checkpoint_step(path) != best]
        for path in old:
            remove_folder(path)
        return bool(old)
    return False


def tell_end(run: PlannedRun, code: int, file: Path) -> bool:
    """Say how a run ended; False if it failed."""
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
    if code == 0:
        log.info(f"{run.name}: done")
    elif code == GUARD:
        log.warning(f"{run.name}: stopped by a guard: {last}")
    else:
        log.error(f"{run.name}: failed: {last} ({file})")
    return code in (0, GUARD)


def _run_folder(run: PlannedRun) -> RunFolder:
    return RunFolder(Path(run.config.run.output_dir))


def _config_file(plan: ComparePlan, run: PlannedRun) -> Path:
    """What the process of a run reads."""
    file = plan.folder / CONFIGS / f"{run.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def _log_file(plan: ComparePlan, run: PlannedRun) -> Path:
    return plan.folder / "logs" / f"{run.name}.log"


def _updates_since(began: float, run: PlannedRun) -> int:
    """Updates of a run, which may go on with earlier ones; 0 while its rows are those of a run that it replaces."""
    metrics = _run_folder(run).metrics
    if not metrics.exists() or metrics.stat().st_mtime < began:
        return 0
    return min(metrics.read_bytes().count(b"\n"), run.config.updates)  # the closing evaluation is no update


def _is_finished(run: PlannedRun) -> bool:
    summary = _run_folder(run).finished_summary()
    return summary is not None and summary.get("steps", 0) >= run.config.updates
