"""What a config's names stand for: built-in parts, local files and folders, hub ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_kl.builtin.world import gold_scores, is_builtin
from rlhf_kl.commands.world import World
from rlhf_kl.components import is_reference, load_attribute
from rlhf_kl.config.schema import RewardSection
from rlhf_kl.data.files import columns, read_column, read_rows
from rlhf_kl.errors import InputError
from rlhf_kl.models.actor_critic import freeze
from rlhf_kl.models.load import load_reward_model, load_tokenizer
from rlhf_kl.reward_functions import GoldScorer, RewardModel, bind_reward
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.trainers.reward_model import Pair
from rlhf_kl.types import RewardFn

HELDOUT_SHARE = 20  # one row in so many is kept apart where a file brings no held-out part


class Sources:
    """Finds what config values name; built-in worlds are built on the way where they are missing."""

    def __init__(self, display: TrainingDisplay, device: Any = "cpu") -> None:
        self.display, self.device = display, device

    def world(self, ref: str) -> World:
        """The built-in world of a `builtin:NAME`."""
        return World(ref, self.display)

    def policy(self, ref: str) -> str:
        """A folder or hub id of a causal language model."""
        return str(self.world(ref).policy()) if is_builtin(ref) else ref

    def texts(self, ref: str, column: str, what: str, *, heldout: bool, limit: int | None = None) -> list[str]:
        """Texts to train on, or (`heldout`) those of a built-in world that were kept apart."""
        if is_builtin(ref):
            path = self.world(ref).file("heldout" if heldout else "train")
            column = "text"
        else:
            path = Path(ref)
        return read_column(path, column, what)[:limit]

    def prompts(self, ref: str, column: str, heldout: str | None) -> tuple[list[str], list[str]]:
        """Prompts to train on and held-out prompts.

        Where no held-out prompts are named, a built-in world brings its own; of a file one in twenty is kept
        apart (none where there are fewer than twenty: then the training prompts serve for both).
        """
        if is_builtin(ref):
            world = self.world(ref)
            train = read_column(world.file("prompts"), "prompt", "data.prompts")
            kept = read_column(world.file("heldout_prompts"), "prompt", "data.prompts")
        else:
            train = read_column(Path(ref), column, "data.prompts")
            train, kept = _split(train)
        if heldout is not None:
            path = self.world(heldout).file("heldout_prompts") if is_builtin(heldout) else Path(heldout)
            kept = read_column(path, "prompt" if is_builtin(heldout) else column, "eval.prompts")
        return train, kept or train

    def pairs(self, ref: str, names: tuple[str, str, str], what: str, *, heldout: bool) -> list[Pair]:
        """Preference pairs."""
        if is_builtin(ref):
            path, names = (
                self.world(ref).file("heldout_pairs" if heldout else "pairs"),
                ("prompt", "chosen", "rejected"),
            )
        else:
            path = Path(ref)
        found = columns(read_rows(path, what), list(names), f"{what}: {path}")
        return [Pair(*row) for row in zip(*found, strict=True)]

    def reward(self, section: RewardSection) -> RewardFn:
        """The reward function of a config."""
        if section.kind == "model":
            assert section.model is not None
            return self._reward_model(section.model, "reward.model")
        return bind_reward(load_attribute(section.kind, search=[Path.cwd()]), section.options, section.time_limit)

    def gold(self, section: RewardSection, *others: str) -> GoldScorer | None:
        """The scorer that is only logged; the built-in worlds bring their own."""
        if section.gold is not None and not is_builtin(section.gold):
            if is_reference(section.gold):
                return bind_reward(load_attribute(section.gold, search=[Path.cwd()]), {}, section.time_limit)
            return self._reward_model(section.gold, "reward.gold")
        if section.gold is not None or any(is_builtin(ref) for ref in others):
            return gold_scores
        return None

    def _reward_model(self, ref: str, what: str) -> RewardModel:
        path = str(self.world(ref).reward_model()) if is_builtin(ref) else ref
        model = freeze(load_reward_model(path, what)).to(self.device)
        return RewardModel(model, load_tokenizer(path, what))


def _split(rows: list[str]) -> tuple[list[str], list[str]]:
    """Every twentieth distinct row apart; equal rows stay on one side, so nothing leaks."""
    distinct = list(dict.fromkeys(rows))
    if len(distinct) < HELDOUT_SHARE:
        return rows, []
    apart = set(distinct[HELDOUT_SHARE - 1 :: HELDOUT_SHARE])
    return [row for row in rows if row not in apart], [row for row in distinct if row in apart]


def split_heldout(rows: list[Any], what: str) -> tuple[list[Any], list[Any]]:
    """Every twentieth row apart, for texts and pairs. Errors: InputError for fewer than twenty rows."""
    if len(rows) < HELDOUT_SHARE:
        raise InputError(f"{what}: {len(rows)} rows are too few to keep some apart: name held-out ones")
    train: list[Any] = []
    kept: list[Any] = []
    for number, row in enumerate(rows, 1):
        (kept if number % HELDOUT_SHARE == 0 else train).append(row)
    return train, kept
