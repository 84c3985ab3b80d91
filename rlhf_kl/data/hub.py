"""Rows of data sets from the Hugging Face hub, or from a folder with the same layout."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.hub import HubName, first_line, hub_name, probe


def read_dataset(ref: str, split: str, key: str) -> list[dict[str, Any]]:
    """All rows of a split, of a hub id (`owner/name[:subset][@revision]`) or a folder with data files.

    `split` is written as for the datasets library: "train", "test", "train[:1000]".
    Errors: InputError where there is no such data set, revision, subset or split.
    """
    import datasets

    where, folder = f"{key}: {ref}", Path(ref).is_dir()
    name = HubName(ref, None, None) if folder else hub_name(ref)
    if name is None:
        raise InputError(f"{where} is neither a file nor a hub id (owner/name, owner/name@revision)")
    reachable = folder or probe(name.name, name.revision, "dataset", where)
    with silent(datasets), _offline(datasets, not reachable):
        try:
            data = datasets.load_dataset(name.name, name.subset, split=split, revision=name.revision)
        except Exception as error:  # the library raises a dozen kinds
            raise InputError(f"{where}: {_reason(error, split, reachable)}") from error
    return [dict(row) for row in data]


@contextlib.contextmanager
def silent(datasets: Any) -> Iterator[None]:
    """The datasets library without messages and progress bars."""
    before, bars = datasets.utils.logging.get_verbosity(), datasets.utils.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(before)
        if not bars:
            datasets.utils.enable_progress_bars()


@contextlib.contextmanager
def _offline(datasets: Any, offline: bool) -> Iterator[None]:
    """If the hub cannot be reached, read from the cache, without a retry for each file."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or offline
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _reason(error: Exception, split: str, reachable: bool) -> str:
    text = first_line(error)
    if text.startswith("Unknown split"):  # 'Unknown split "tran". Should be one of ["train", "test"].'
        names = re.findall(r"['\"]([^'\"]+)['\"]", text.partition("one of")[2])
        return f"has no split {split!r}{suggestion(split, names)}"
    if not reachable:
        return "no local folder of that name, the hub cannot be reached, and its cache does not contain it"
    return f"cannot be read: {text}"
