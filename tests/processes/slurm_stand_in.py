"""Slurm on one machine, as far as a batch script sees it: called as `srun`, `scancel` or `scontrol`.

`srun` starts its program once for each node. As Slurm's, it answers SIGTERM by killing what it started: a signal
reaches those processes only through `scancel`, which sends it to all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

STEP = Path(sys.argv[0]).with_name("step")  # holds the process id of `srun`


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def send(number: int, pid: int) -> None:
    for process in descendants(pid):
        process.send_signal(number)


def srun(words: list[str]) -> int:
    while words[0].startswith("--"):
        words = words[1:]
    nodes = int(os.environ["SLURM_NNODES"])
    steps = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes)}
    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGKILL, os.getpid()))
    tasks = [subprocess.Popen(words, env=os.environ | steps | {"SLURM_PROCID": str(node)}) for node in range(nodes)]
    STEP.write_text(str(os.getpid()))
    codes = [task.wait() for task in tasks]
    STEP.unlink()
    return max(code if code >= 0 else 128 - code for code in codes)


def scancel(words: list[str]) -> int:
    assert words == ["--signal=TERM", os.environ["SLURM_JOB_ID"]]
    if STEP.exists():
        send(signal.SIGTERM, int(STEP.read_text()))
    return 0


def scontrol(words: list[str]) -> int:
    if words[0] == "show":
        assert words == ["show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        print("127.0.0.1\nnode2")
    else:
        assert words == ["requeue", os.environ["SLURM_JOB_ID"]]
        STEP.with_name("requeued").touch()
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scancel": scancel, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
