"""What a run was made with, beside its config: the content of the files and models that the config names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rlhf_kl.config.contents import content_of, recorded
from rlhf_kl.config.named import models_of, plugins_of
from rlhf_kl.config.resolve import flat
from rlhf_kl.config.schema import AnyConfig
from rlhf_kl.shell import short_path
from rlhf_kl.ui import log


def inputs_of(config: AnyConfig) -> dict[str, str]:
    """By key, the files and models that a config names, but for the program's own."""
    named = {key: str(x) for key, x in flat(config.model_dump()).items() if key.startswith(("data.", "eval."))}
    named |= {plugin.key: plugin.ref.rpartition(":")[0] for plugin in plugins_of(config)}
    return {key: x for key, x in named.items() if os.path.isabs(x) and os.path.isfile(x)} | models_of(config)


def contents(config: AnyConfig) -> dict[str, str]:
    """The hash of each, by its name: what a run keeps."""
    return {name: found for name in inputs_of(config).values() if (found := content_of(name)) is not None}


def changed_inputs(
    folder: Path, config: AnyConfig, reads: Callable[[str], bool] = bool, known: dict[str, str | None] | None = None
) -> dict[tuple[str, ...], str]:
    """A sentence on each file or model, by its keys, that has another content than when the run in a folder began.

    `reads`: whether a key counts. `known`: hashes by name, from an earlier call. What the run did not name, or an
    earlier build did not keep, counts as the same.
    """
    before, known, named = recorded(folder), {} if known is None else known, dict[str, list[str]]()
    for key, name in inputs_of(config).items():
        if name in before and reads(key):
            named.setdefault(name, []).append(key)
    known.update({name: content_of(name) for name in named.keys() - known.keys()})
    other = {tuple(keys): name for name, keys in named.items() if known[name] not in (None, before[name])}
    return {
        keys: f"{', '.join(keys)}: {short_path(name)} has changed since the run began" for keys, name in other.items()
    }


def tell_copies(config: AnyConfig) -> None:
    """Say which functions are copies that a run keeps; see `config.paths.plugin`."""
    for name in dict.fromkeys(inputs_of(config).values()):
        if name.endswith(".py") and (kept := recorded(Path(name).parent)) and name not in kept:
            log.info(f"{short_path(name)}, the run's copy, is used: the file itself has changed, or gone")
