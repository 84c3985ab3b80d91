"""Finds config files, and the files and folders that their values name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlhf_kl.builtin.world import is_builtin, world_folder
from rlhf_kl.config.contents import content_of, recorded
from rlhf_kl.config.yaml import Text
from rlhf_kl.errors import InputError, nearest, no_such_file
from rlhf_kl.hub import looks_like_path
from rlhf_kl.plugins import GIVEN, is_reference, look_up, reference_file


def shipped_configs() -> Path:
    """Folder of the configs that come with the package: in the wheel, else beside an editable install."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


SHOWN = ("ppo_adaptive.yaml", "ppo_model.yaml", "rloo_mentions.yaml", "smoke.yaml", "compare_adaptive_vs_static.yaml")
MOST_SHOWN = 5  # configs that an error names


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
    files = [path for place in places for path in place.glob("[!.]*.y*ml") if path.resolve() != but]
    known = {path.stem: path.name for path in files}
    known |= {path.stem: str(given.with_name(path.name)) for path in (here / given.parent).glob("[!.]*.y*ml")}
    close = nearest(given.stem, known)  # without the file extension, which is always .yaml
    shipped = shipped_configs()
    own = [path.name for path in files if path.parent.resolve() != shipped.resolve()]
    some = ", ".join(list(dict.fromkeys([*own, *SHOWN]))[:MOST_SHOWN])
    hint = f"did you mean {known[close]}?" if close else f"there are {some}, and more in {shipped}"
    raise InputError(f"no config {str(name)!r}; {hint}")


def source(value: Any) -> Any:
    """A text of a config file that may name a file or folder, with an existing path made absolute.

    Errors: InputError for a path to nothing and an unknown built-in world.
    """
    if not isinstance(value, Text) or value.startswith(GIVEN):
        return value
    if is_builtin(value):
        world_folder(value)
        return value
    for folder in value.folders:
        path = folder / os.path.expanduser(value)
        if os.path.exists(path):
            return os.path.abspath(path)
    if looks_like_path(value):
        raise no_such_file(value, *value.folders)
    return value


def plugin(value: Any) -> Any:
    """A text of a config file that may name a plugin, with the path of an existing file made absolute.

    Errors: InputError where it names none. Runs none of its code.
    """
    if not isinstance(value, Text) or not is_reference(value) or value.startswith(GIVEN):
        return value
    file = _of_the_run(value, reference_file(value, value.folders))
    ref = value if file is None else f"{file}:{value.rpartition(':')[2]}"
    look_up(ref)
    return ref


def _of_the_run(value: Text, file: Path | None) -> Path | None:
    """A plugin's file; in the config of a run the copy that it keeps, if the file has changed since then, or gone."""
    folder = value.folders[0]
    before = recorded(folder).get(value.rpartition(":")[0])
    if file is not None and before in (None, content_of(str(file))):
        return file
    copies = [copy for copy in sorted(folder.glob("*.py")) if content_of(str(copy)) == before]
    return copies[0] if copies else file or _kept_copy(value)


def _kept_copy(value: Text) -> Path | None:
    """The copy of a plugin that a run keeps beside its config, for when the file itself has gone."""
    file, _, name = value.rpartition(":")
    folder = value.folders[0]
    # If two files have the same name, the second is stored under another name.
    if not Path(file).is_absolute() or not (folder / "config.yaml").is_file():
        return None
    if (folder / f"{Path(file).stem}-2.py").exists():
        return None
    return reference_file(f"{Path(file).name}:{name}", [folder])
