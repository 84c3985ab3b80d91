"""The built-in worlds: their names, sizes and settings, and the keys of their parts in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rlhf_kl.builtin.corpus import CorpusSizes
from rlhf_kl.builtin.gold import gold_score
from rlhf_kl.components import suggestion
from rlhf_kl.errors import InputError

PREFIX = "builtin:"


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


def is_builtin(ref: str | None) -> bool:
    """Whether a config value names a built-in world."""
    return ref is not None and ref.startswith(PREFIX)


def world_spec(ref: str) -> WorldSpec:
    """The world behind `builtin:NAME`. Errors: InputError with the nearest name."""
    name = ref.removeprefix(PREFIX)
    if name not in WORLDS:
        raise InputError(f"{ref}: no such built-in world{suggestion(name, WORLDS, PREFIX)}")
    return WORLDS[name]


def part_key(spec: WorldSpec, code: Sequence[str], versions: dict[str, str], settings: Sequence[str]) -> str:
    """A key that changes with the spec, the code that makes the part, its settings and library versions."""
    content = json.dumps([asdict(spec), list(code), versions, list(settings)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def gold_scores(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The gold scorer of the built-in worlds, for a batch."""
    return [gold_score(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
