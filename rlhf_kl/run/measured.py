"""What `doctor` measured before a run, for the `train` that follows in the same folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.config.load import dump_config
from rlhf_kl.config.schema import AnyConfig
from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import RunFolder, lock_run_folder
from rlhf_kl.run.log import write_json
from rlhf_kl.run.resume import environment


def conditions(
    config: AnyConfig, device: torch.device, processes: int, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    """What must be equal for a measurement to hold: config, content of models and files, versions and hardware."""
    return {
        "config": dump_config(config),
        "fingerprints": dict(fingerprints),
        "environment": environment(device, processes),
    }


def keep_measured(config: AnyConfig, under: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Write the states into the run's folder, unless it holds a run or cannot be written; returns whether."""
    folder = RunFolder(Path(config.run.output_dir))
    with contextlib.suppress(InputError, OSError), lock_run_folder(folder, resume=False, overwrite=False):
        write_json(folder.measured, {"under": under, "states": states})
        return True
    return False


def measured_before(folder: RunFolder, under: Mapping[str, Any]) -> dict[str, Any] | None:
    """The states that `doctor` kept in the folder under the same conditions; None without them."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(folder.measured.read_text(encoding="utf-8"))
        if kept["under"] == under:
            return dict(kept["states"])
    return None
