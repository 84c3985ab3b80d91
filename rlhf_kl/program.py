"""Commands in a form that works where the user stands, with or without this environment on the PATH."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig

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
