"""How this program is called and runs: command lines that work where the user stands, threads, library warnings."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import sysconfig
import threading
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

LAST_SECONDS = 5.0  # of an interrupted program
NUMBER = "OMP_NUM_THREADS"
MODULES = {"rlhf-kl": "rlhf_kl", "tensorboard": "tensorboard.main", "torchrun": "torch.distributed.run"}


# Beginnings of the paths of files whose lines are not the user's.
LIBRARIES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    *(f"{Path(__file__).parent}{os.sep}", "<"),
)


def program_version() -> str:
    """As it was installed; without that it runs from its folder too."""
    try:
        return metadata.version("rlhf-kl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def hide_library_warnings() -> None:
    """Show the warnings of a user's own code alone. What libraries warn of is for the maintainers of this program.

    Call it before they are imported. `python -W default`, or a variable that names their verbosity, shows theirs.
    """
    for name in ("TRANSFORMERS", "DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{name}_VERBOSITY", "error")
    if sys.warnoptions:
        return
    show = warnings.showwarning

    def show_own(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if not filename.startswith(LIBRARIES):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_own
    if logging.lastResort is not None:  # of loggers that nobody has set up
        logging.lastResort.addFilter(
            lambda record: record.levelno >= logging.ERROR or not record.pathname.startswith(LIBRARIES)
        )


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


def source_name(source: str | None) -> str:
    """A name to be shared: a hub id, or of a local path no folder but that of a run."""
    path = Path(source or "")
    if not path.is_absolute():
        return source or ""
    return path.parent.name if path.name in ("final", "merged") else path.name


def wait_without_spinning() -> None:
    """Let waiting threads sleep after a moment, unless the user has set one of the variables.

    Call it before torch is imported. By default they spin for milliseconds: with another run on the same cores, a
    waiting thread then blocks the core that the other thread needs.
    """
    if not any(os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        os.environ["GOMP_SPINCOUNT"] = "4000"  # rounds; GNU's OpenMP, that of torch on Linux
        os.environ["KMP_BLOCKTIME"] = "0"  # LLVM's and Intel's, in milliseconds


def end_soon(code: int) -> None:
    """Let the process end with this exit code within seconds, with all that it does at its end or without.

    A user's pool of processes that do not answer would keep an interrupted program for ever.
    """

    def end() -> None:
        time.sleep(LAST_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_threads(saved: str | None) -> None:
    """Use as many threads as before, if this machine has the cores and the user sets no number: sums stay the same."""
    import torch

    if saved is not None and not os.environ.get(NUMBER) and int(saved) <= cores():
        torch.set_num_threads(int(saved))
