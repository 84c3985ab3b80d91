"""Finds config files, and the files and folders that their values name."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_kl.builtin.world import is_builtin, world_spec
from rlhf_kl.config.schema import MODELS, Kind, Location, Section, subsections
from rlhf_kl.errors import InputError, blame, collected, nearest, no_such_file
from rlhf_kl.plugins import is_reference, reference_file

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def shipped_configs() -> Path:
    """Folder of the configs that come with the package: in the wheel, else beside an editable install."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def find_config(name: str | Path, *, folder: Path | None = None, but: Path | None = None) -> Path:
    """The config file `name` (or `name`.yaml) in: `folder`, the working directory, its configs/, the shipped configs.

    but: a file to skip (one that extends another of its name). Raises InputError, which names the nearest file.
    """
    here = Path.cwd()
    places = [*([folder] if folder else []), here, here / "configs", shipped_configs()]
    given = Path(os.path.expanduser(name))
    for path in (place / name for place in places for name in (given, Path(f"{given}.yaml"))):
        if os.path.exists(path) and not path.is_dir() and (but is None or path.resolve() != but):
            return path.resolve()
    if os.path.isdir(here / given):
        raise InputError(f"{name} is a folder, not a config file")
    known = {path.stem: path.name for place in places for path in place.glob("*.y*ml") if path.resolve() != but}
    close = nearest(given.stem, known)  # without the file extension, which is always .yaml
    hint = f"; did you mean {known[close]}?" if close else f"; available: {', '.join(sorted(known.values()))}"
    raise InputError(f"no config {str(name)!r}{hint}")


def with_absolute_paths(raw: dict[str, Any], folders: Sequence[Path]) -> dict[str, Any]:
    """A copy of `raw` in which every value that exists on disk is an absolute path; the first folder wins."""
    raw = copy.deepcopy(raw)
    for model in MODELS.values():  # the kind of a file that another one extends is not known yet
        for _, mapping, name, location in located_values(model, raw):
            if not is_builtin(mapping[name]):
                mapping[name] = _absolute(mapping[name], location, folders)
    return raw


def missing_sources(kind: Kind, raw: dict[str, Any], folders: Sequence[Path]) -> list[str]:
    """Problems of values that name neither a file in the folders nor a built-in world."""
    problems = list[str]()
    for key, mapping, name, location in located_values(MODELS[kind], raw):
        value = mapping[name]
        if not location.path or (location.plugin and is_reference(value)):
            continue
        if is_builtin(value):
            with collected(problems), blame(key):
                world_spec(value)
        elif looks_like_path(value) and not os.path.exists(os.path.expanduser(value)):
            problems.append(f"{key}: {no_such_file(value, *folders)}")
    return problems


def located_values(
    model: type[Section], raw: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any], str, Location]]:
    """Dotted key, mapping, name in it and mark of every text in `raw` that may name something on disk."""
    for name, field in model.model_fields.items():
        for mark in field.metadata:
            if isinstance(mark, Location) and isinstance(raw.get(name), str) and raw[name]:
                yield prefix + name, raw, name, mark
    for name, section, mapping in subsections(model, raw):
        yield from located_values(section, mapping, f"{prefix}{name}.")


def _absolute(value: str, location: Location, folders: Sequence[Path]) -> str:
    if location.plugin:
        file = reference_file(value, folders) or _copy_of_plugin(value, folders[0])
        if file is not None:
            return f"{file}:{value.rpartition(':')[2]}"
    if location.path:
        for folder in folders:
            path = folder / os.path.expanduser(value)
            if os.path.exists(path):
                return os.path.abspath(path)
    return value


def _copy_of_plugin(value: str, folder: Path) -> Path | None:
    """The copy of a plugin that a run keeps beside its config, for when the file itself has gone."""
    file = Path(value.rpartition(":")[0])
    # If two files have the same name, the second is stored under another name.
    if not file.is_absolute() or not (folder / "config.yaml").is_file() or (folder / f"{file.stem}-2.py").exists():
        return None
    return reference_file(f"{file.name}:{value.rpartition(':')[2]}", [folder])


def looks_like_path(value: str) -> bool:
    """Whether a value can only be a path, also where there is no such file."""
    return value.startswith((".", "/", "~")) or value.lower().endswith(DATA_SUFFIXES)
