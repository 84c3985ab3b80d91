"""What `doctor` measured before a run, for the `train` that follows in the same folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.config.resolve import dump_config
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


def own_code() -> dict[str, str]:
    """SHA-256 of the files of all modules that are neither installed nor of this program: plugins, and theirs."""
    installed = [Path(place).resolve() for place in (sys.prefix, sys.base_prefix, Path(__file__).parents[1])]
    files = {Path(file).resolve() for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
    return {str(file): _digest(file) for file in sorted(files) if not {*installed} & {*file.parents}}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def keep_measured(config: AnyConfig, under: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Write the states into the run's folder, unless it holds a run or cannot be written; returns whether."""
    folder = RunFolder(Path(config.run.output_dir))
    with contextlib.suppress(InputError, OSError), lock_run_folder(folder, resume=False, overwrite=False):
        write_json(folder.measured, {"under": under, "code": own_code(), "states": states})
        return True
    return False


def measured_before(folder: RunFolder, under: Mapping[str, Any]) -> dict[str, Any] | None:
    """The states that `doctor` kept in the folder under the same conditions, code included; None without them."""
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(folder.measured.read_text(encoding="utf-8"))
        if kept["under"] == under and all(_digest(Path(file)) == code for file, code in kept["code"].items()):
            return dict(kept["states"])
    return None
