"""`rlhf-kl` with one of its faster paths off: `python scripts/switched.py PATH train --config ...`.

What a path gains is the seconds of an update without it over those with it; `gpu_report.py` measures that. The paths:

graphs          steps of sampling are replayed as a CUDA graph; off: Python starts each kernel
head            in a run of half precision the LM head multiplies in it too; off: in float32
shared_prompts  a pass reads a prompt once for several responses; off: with each of them. Sampling shares it still
norms           an RMS norm is one kernel; off: those that transformers writes out
ready_masks     a step of sampling has its mask in the form that attention takes; off: transformers make it. No graphs
"""

from __future__ import annotations

import sys
from typing import Any

from rlhf_kl.__main__ import main
from rlhf_kl.models import pretrained
from rlhf_kl.models.lm import LM, Trunk

PATHS: dict[str, tuple[Any, str, Any]] = {  # class or module, attribute, and its value where the path is off
    "graphs": (Trunk, "graphs", False),
    "head": (LM, "_rounds", lambda *_: False),
    "shared_prompts": (Trunk, "shares_prompts", False),
    "norms": (pretrained, "fuse_norms", lambda model: model),
    "ready_masks": (Trunk, "ready_masks", False),
}


def switch_off(path: str) -> None:
    """For this process. Errors: SystemExit where the program has no such attribute, since nothing would change."""
    owner, attribute, off = PATHS[path]
    if not hasattr(owner, attribute):
        raise SystemExit(f"error: {owner.__name__} has no {attribute}: {path} cannot be switched off")
    setattr(owner, attribute, off)


if __name__ == "__main__":
    switch_off(sys.argv.pop(1))
    main()
