"""The built-in worlds: their names, and their files, which `scripts/make_world.py` made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_kl.errors import InputError, suggestion

BUILTIN = "builtin:"  # before the name of a world
WORLDS = ("reviews", "reviews-small")
DEFAULT_WORLD = f"{BUILTIN}reviews"
FILES = Path(__file__).parent / "files"
MODELS = ("policy", "reward")  # folders of a world; all else in it are .jsonl.gz files
GOLD = "rlhf_kl.builtin.gold:gold_scores"  # the scorer that knows the truth of every world


def is_builtin(value: Any) -> bool:
    """Whether a config's value names a built-in world."""
    return isinstance(value, str) and value.startswith(BUILTIN)


def world_folder(ref: str) -> Path:
    """The folder of the world behind `builtin:NAME`. Errors: InputError with the nearest name."""
    name = ref.removeprefix(BUILTIN)
    if name not in WORLDS:
        raise InputError(f"{ref}: no such built-in world{suggestion(name, WORLDS, BUILTIN)}")
    return FILES / name


def world_file(ref: str, part: str) -> str:
    """A part of the world that `ref` names, as a path; any other `ref` unchanged.

    `part`: policy, reward, train, heldout, prompts, heldout_prompts, pairs, heldout_pairs.
    """
    return str(world_folder(ref) / (part if part in MODELS else f"{part}.jsonl.gz")) if is_builtin(ref) else ref
