"""A model in a GGUF file, as llama.cpp reads it: transformers convert it once into an ordinary folder of the cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_kl import ui
from rlhf_kl.errors import InputError
from rlhf_kl.hub import first_line
from rlhf_kl.memory import memory_is_full
from rlhf_kl.models.pretrained import quiet_transformers, save_model
from rlhf_kl.run.folder import write_folder
from rlhf_kl.ui import log

MAGIC = b"GGUF"


def gguf_folder(ref: str) -> str:
    """The folder of the model in a file, in float32.

    Errors: InputError without the package `gguf`, and for a file that transformers cannot read.
    """
    file = Path(ref).resolve()
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise InputError(f"{ref}: is no GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{ref}: the package gguf is missing: pip install gguf (or rlhf-kl[gguf])")
    about = file.stat()
    key = hashlib.sha256(f"2 {file} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{file.stem}-{key}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if not folder.is_dir():
                with ui.progress(f"converting {file.name}"):
                    write_folder(folder, lambda place: _convert(ref, file, place))
                log.info(f"{ref}: its weights are float32 now, also those that were quantised; kept as {folder}")
    except OSError as error:
        raise InputError(
            f"{folder}: {error.strerror or first_line(error)}: RLHF_KL_CACHE names another place"
        ) from error
    return str(folder)


def cache_folder() -> Path:
    """$RLHF_KL_CACHE, or rlhf-kl in the user's cache folder."""
    if own := os.environ.get("RLHF_KL_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "rlhf-kl"


def _convert(ref: str, file: Path, place: Path) -> None:
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": str(file)}
    try:
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            tokenizer = AutoTokenizer.from_pretrained(**where)
            read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        if hasattr(read.config, "quantization_config"):
            del read.config.quantization_config  # the weights are whole again
        model = type(read)(read.config)  # without the reader's hooks, which would refuse to save
        model.load_state_dict(read.state_dict())
    except Exception as error:  # of the reader, which raises many types for files that it does not know
        if memory_is_full(error):
            raise
        raise InputError(f"{ref}: cannot be read: {first_line(error)}") from error
    model.tie_weights()
    model.generation_config = read.generation_config
    save_model(model, tokenizer, place)
