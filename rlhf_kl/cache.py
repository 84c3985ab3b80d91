"""The folder for files that are made once for each user of a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$RLHF_KL_CACHE, or rlhf-kl in the user's cache folder."""
    if own := os.environ.get("RLHF_KL_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "rlhf-kl"
