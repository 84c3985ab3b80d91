"""Names on the Hugging Face hub, and its models as local folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rlhf_kl.errors import InputError, is_address, no_such_file

# Enough to load a model and its tokenizer: pickles only on request, other formats of the weights never.
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
PICKLED_FILES = ["*.bin"]
SUBFOLDERS = ["*/*"]
GGUF = ".gguf"
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
GZIP = ".gz"  # behind any of them but .parquet, which is compressed inside
_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<subset>[\w.-]+))?(@(?P<revision>[\w./-]+))?")


class HubName(NamedTuple):
    """`owner/name[:subset][@revision]` taken apart; only data sets have subsets."""

    name: str
    subset: str | None
    revision: str | None


def looks_like_path(value: str) -> bool:
    """Whether a value can only be a path or address, also where there is no such file."""
    named = value.lower().removesuffix(GZIP).endswith((*DATA_SUFFIXES, GGUF))
    return named or is_address(value) or value.startswith((".", "/", "~")) or value.endswith("/")


def data_suffix(name: str) -> str:
    """The suffix that tells the kind of a data file, in lower case: ".csv" for x.csv and x.csv.gz."""
    name = name.lower()
    suffix = Path(name.removesuffix(GZIP)).suffix
    return GZIP if suffix == ".parquet" and name.endswith(GZIP) else suffix


def hub_name(ref: str) -> HubName | None:
    """The parts of a hub id; None if `ref` cannot be one."""
    match = _ID.fullmatch(ref)
    return HubName(match["name"], match["subset"], match["revision"]) if match else None


def model_on_hub(ref: str, *, pickled: bool = False) -> HubName | None:
    """The hub id of a model, None for a local folder or GGUF file.

    Errors: InputError if `ref` can be none of them, or holds no model.
    """
    folder, hub = Path(ref), hub_name(ref)
    if folder.is_file():
        if folder.suffix == GGUF:
            return None
        raise InputError(f"{ref}: is a file, not the folder of a model, and no {GGUF} file")
    if not folder.is_dir():
        if folder.suffix == GGUF:
            raise no_such_file(ref)
        if hub is None or hub.subset is not None or ref.startswith("."):
            raise InputError(f"neither a folder nor a hub id (owner/name, owner/name@revision): {no_such_file(ref)}")
        return hub
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise InputError(f"{ref}: the folder has no config.json, so it holds no transformers model")
    has_pickle = any(folder.glob("*.bin"))
    if not any(folder.glob("*.safetensors")) and not (has_pickle and pickled):
        hint = " (pickled weights can run code: convert them, or set run.allow_pickle; for a run: --allow-pickle)"
        raise InputError(f"{ref}: the folder holds no weights (*.safetensors){hint * has_pickle}")
    return None


def model_folder(ref: str, *, pickled: bool = False) -> str:
    """The folder of a model: a local one, or GGUF file, itself; of a hub id (`owner/name[@revision]`) its download.

    Loading from it reads only local files. Errors: InputError if there is no such model or revision.
    """
    hub = model_on_hub(ref, pickled=pickled)
    if hub is None:
        return ref
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = MODEL_FILES + (PICKLED_FILES if pickled else [])
    try:
        return snapshot_download(hub.name, revision=hub.revision, allow_patterns=patterns, ignore_patterns=SUBFOLDERS)
    except LocalEntryNotFoundError as error:
        reason = "the hub cannot be reached, its cache does not hold it"
        raise InputError(f"{ref}: {reason}, and {no_such_file(ref)}") from error
    except Exception as error:  # the hub's clients raise many types
        raise InputError(f"{ref}: cannot be downloaded: {first_line(error)}; {no_such_file(ref)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text that is neither blank nor the status of a request."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and "Client Error" not in line), type(error).__name__)
