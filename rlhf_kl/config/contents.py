"""Hashes of the files and models that a config names, and those that a run keeps of what it was made with."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rlhf_kl.errors import InputError
from rlhf_kl.hub import GGUF, MODEL_FILES, PICKLED_FILES, model_folder

INPUTS = ".rlhf-kl.inputs"  # in the folder of a run: by name, as its config writes it, the hash of the content
WEIGHTS = (".safetensors", ".bin", GGUF)  # training changes all of them, and they may have many GB:
BLOCK, EVERY = 1 << 12, 1 << 20  # bytes that are read, of so many


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
        return _of_weights(path) if path.suffix in WEIGHTS else _of_bytes(path)
    files = sorted({each for pattern in (*MODEL_FILES, *PICKLED_FILES) for each in path.glob(pattern)})
    parts = [f"{file.name} {content_of(str(file))}" for file in files]
    adapter = path / "adapter_config.json"
    if adapter.is_file() and not (path / "config.json").is_file():
        parts.append(f"base {content_of(str(json.loads(adapter.read_bytes()).get('base_model_name_or_path')))}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _of_bytes(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_weights(path: Path) -> str:
    """Of the size, and the beginning of each MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in range(0, size, EVERY):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return digest.hexdigest()
