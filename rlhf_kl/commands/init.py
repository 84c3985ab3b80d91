"""`rlhf-kl init`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rlhf_kl.commands.options import local
from rlhf_kl.errors import InputError
from rlhf_kl.shell import shell_command, short_path


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", callback=local, help="Where (default: here).")] = Path(),
) -> None:
    """Begin a run of your own: copy a config, a reward function, prompts and texts. Nothing is overwritten."""
    from rlhf_kl.config.paths import shipped_configs

    if folder.suffix in (".yaml", ".yml") or folder.is_file():
        raise InputError(f"{folder} is no folder: init takes one, new or empty, and writes mine.yaml into it")
    # pip compiles mine.py where it installs it: __pycache__ is no file of a run
    files = sorted(file for file in (shipped_configs() / "init").iterdir() if file.is_file())
    if taken := [folder / file.name for file in files if os.path.lexists(folder / file.name)]:
        raise InputError(*(f"{file} is there already: init overwrites nothing, name a new folder" for file in taken))
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    config = short_path(str((folder / "mine.yaml").absolute()))
    print(f"Name your model in {config} (policy.model), then\n")
    commands = (f"doctor --config {config}", f"train --config {config}", "report", "eval --plugins", "scale --plugins")
    for command in commands:
        print(f"  {shell_command()} {command}")
