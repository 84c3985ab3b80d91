"""Hashes of the files and models that a config names, and those that a run keeps of what it was made with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rlhf_kl.errors import InputError
from rlhf_kl.hub import MODEL_FILES, PICKLED_FILES, model_folder

INPUTS = ".rlhf-kl.inputs"  # in the folder of a run: by name, as its config writes it, the hash of the content


def recorded(folder: Path) -> dict[str, str]:
    """What the run in a folder keeps; empty for one of an earlier build."""
    file = folder / INPUTS
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def content_of(name: str) -> str | None:
    """Hash of a file, or of the files of a model, with those of an adapter's base; None if there is no such thing."""
    try:
        path = Path(name if Path(name).exists() else model_folder(name))
    except InputError:
        return None
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted({each for pattern in (*MODEL_FILES, *PICKLED_FILES) for each in path.glob(pattern)})
    parts = [f"{file.name} {content_of(str(file))}" for file in files]
    adapter = path / "adapter_config.json"
    if adapter.is_file() and not (path / "config.json").is_file():
        parts.append(f"base {content_of(str(json.loads(adapter.read_bytes()).get('base_model_name_or_path')))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
