"""The built-in worlds: their names, sizes and settings, and the keys of their parts in the cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_kl.builtin.corpus import CorpusSizes
from rlhf_kl.errors import InputError, suggestion

BUILTIN = "builtin:"  # before the name of a world
GOLD = "rlhf_kl.builtin.gold:gold_scores"
DEFAULT_WORLD = f"{BUILTIN}reviews"
VERSION = 1  # raise it with a change of code that changes a corpus or a model, so that all are made anew


@dataclass(frozen=True)
class WorldSpec:
    """Sizes, seed and settings of a world; its trainings are the shipped configs with these settings."""

    name: str
    sizes: CorpusSizes = field(default_factory=CorpusSizes)
    seed: int = 0
    sft: tuple[str, ...] = ()  # as for `--set`
    reward_model: tuple[str, ...] = ()


WORLDS = {
    "reviews": WorldSpec("reviews", CorpusSizes(train_texts=9_600, pairs=4_000)),
    "reviews-small": WorldSpec(
        "reviews-small",
        CorpusSizes(train_texts=3000, heldout_texts=60, prompts=400, heldout_prompts=64, pairs=1500, heldout_pairs=100),
        sft=(
            "policy.architecture.hidden_size=64",
            "policy.architecture.layers=2",
            "policy.architecture.heads=2",
            "sft.epochs=3",
            "sft.learning_rate=5e-3",
        ),
        reward_model=("reward_model.epochs=2", "reward_model.learning_rate=2e-3"),
    ),
}


def is_builtin(value: Any) -> bool:
    """Whether a config's value names a built-in world."""
    return isinstance(value, str) and value.startswith(BUILTIN)


def world_spec(ref: str) -> WorldSpec:
    """The world behind `builtin:NAME`. Errors: InputError with the nearest name."""
    name = ref.removeprefix(BUILTIN)
    if name not in WORLDS:
        raise InputError(f"{ref}: no such built-in world{suggestion(name, WORLDS, BUILTIN)}")
    return WORLDS[name]


def cache_folder() -> Path:
    """$RLHF_KL_CACHE, or rlhf-kl in the user's cache folder."""
    if own := os.environ.get("RLHF_KL_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "rlhf-kl"


def part_key(spec: WorldSpec, versions: dict[str, str], settings: Sequence[str]) -> str:
    """A key that changes with the spec, `VERSION`, the part's settings and library versions."""
    content = json.dumps([asdict(spec), VERSION, versions, list(settings)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
