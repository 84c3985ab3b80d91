"""How this program is called and runs: command lines that work where the user stands, and OpenMP's threads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig

NUMBER = "OMP_NUM_THREADS"
MODULES = {"rlhf-kl": "rlhf_kl", "tensorboard": "tensorboard.main", "torchrun": "torch.distributed.run"}


def shell_command(name: str = "rlhf-kl") -> str:
    """The start of a command line that runs this environment's `name`, a key of MODULES."""
    found, own = shutil.which(name), shutil.which(name, path=sysconfig.get_path("scripts"))
    if own is None:
        return f"{short_path(sys.executable)} -m {MODULES[name]}"
    return name if found is not None and os.path.samefile(found, own) else short_path(own)


def short_path(path: str) -> str:
    """A path for a command line, relative where it lies in the working directory."""
    here = os.getcwd()
    return shlex.quote(os.path.relpath(path, here) if path.startswith(here + os.sep) else path)


def wait_without_spinning() -> None:
    """Let waiting threads sleep after a moment, unless the user has set one of the variables.

    Call it before torch is imported. By default they spin for milliseconds: with another run on the same cores, a
    waiting thread then blocks the core that the other thread needs.
    """
    if not any(os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["GOMP_SPINCOUNT"] = "4000"  # rounds; GNU's OpenMP, that of torch on Linux
        os.environ["KMP_BLOCKTIME"] = "0"  # LLVM's and Intel's, in milliseconds


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_threads(saved: str | None) -> None:
    """Use as many threads as before, if this machine has the cores and the user sets no number: sums stay the same."""
    import torch

    if saved is not None and not os.environ.get(NUMBER) and int(saved) <= cores():
        torch.set_num_threads(int(saved))
