"""Resolves the names in a config: built-in parts, local files and folders, hub ids."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from rlhf_kl.builtin.world import gold_scores, is_builtin
from rlhf_kl.commands.models import load_classifier_adapter
from rlhf_kl.commands.world import World
from rlhf_kl.components import is_reference
from rlhf_kl.config.plugins import reward_attribute
from rlhf_kl.config.schema import (
    SUM,
    EvalSection,
    PairsSection,
    PromptsSection,
    RewardSection,
    RunSection,
    ScorerSection,
    SFTDataSection,
)
from rlhf_kl.config.variables import secrets_of
from rlhf_kl.data.files import load_rows, text_column
from rlhf_kl.data.split import HELDOUT_SHARE, split_heldout, without_leaks
from rlhf_kl.data.texts import (
    UNUSABLE,
    Example,
    Labelled,
    Pair,
    read_examples,
    read_labels,
    read_pairs,
    read_prompts,
    read_texts,
)
from rlhf_kl.hub import model_folder
from rlhf_kl.models.load import SAFE, Access, compute_dtype, load_reward_model, load_tokenizer
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.models.value import freeze
from rlhf_kl.rewards.functions import GoldScorer, WeightedSum
from rlhf_kl.rewards.model import RewardModel, text_format
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.trl_interface import TRLReward
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.types import Prompt, RewardFn

T = TypeVar("T")


def access_of(run: RunSection) -> Access:
    """The permissions of a run to run other people's code."""
    return Access(remote_code=run.trust_remote_code, pickle=run.allow_pickle)


class Resolver:
    """Turns the names in a config into models, prompts, texts and reward functions.

    A built-in world is built if it is missing; a hub id is downloaded or taken from the cache. `key` is the config
    key of a name, for messages. Errors: InputError for a name that cannot be used.
    """

    def __init__(
        self,
        display: TrainingDisplay,
        device: Any = "cpu",
        access: Access = SAFE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`device` and `dtype`: of the reward models' computation."""
        self.display, self.device, self.access, self.dtype = display, device, access, dtype

    @classmethod
    def for_run(cls, run: RunSection, display: TrainingDisplay, device: Any) -> Resolver:
        """The resolver of a config with this `run` section."""
        return cls(display, device, access_of(run), compute_dtype(run.dtype))

    def world(self, ref: str) -> World:
        """The built-in world of a `builtin:NAME`."""
        return World(ref, self.display)

    def policy(self, ref: str, key: str = "policy.model") -> str:
        """The local folder of a causal language model."""
        return str(self.world(ref).policy()) if is_builtin(ref) else self._folder(ref, key)

    def _rows(self, ref: str, split: str, key: str) -> list[dict[str, Any]]:
        with self.display.waiting(f"reading {key}"):
            return load_rows(ref, split, key)

    def _folder(self, ref: str, key: str) -> str:
        with self.display.waiting(f"fetching {key}"):
            return model_folder(ref, key, pickled=self.access.pickle)

    # ------------------------------------------------------------------ texts and prompts

    def texts(
        self,
        ref: str,
        column: str,
        key: str,
        *,
        heldout: bool,
        limit: int | None = None,
        split: str = "test",
        template: str | None = None,
    ) -> list[str]:
        """Texts to train on, or (`heldout`) the held-out texts of a built-in world."""
        if is_builtin(ref):
            path = self.world(ref).file("heldout" if heldout else "train")
            return read_texts(self._rows(str(path), split, key), "text", None, key)[:limit]
        rows = self._rows(ref, split, key)
        return read_texts(rows[:limit], text_column(ref, column), template, f"{key}: {ref}")

    def prompts(self, data: PromptsSection, held: EvalSection) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts and held-out prompts, without overlap.

        If no held-out prompts are named, a built-in world has its own; of other prompts one in twenty is held out.
        With fewer than twenty prompts the training prompts are also the held-out ones.
        """
        train = self._prompts(data.prompts, data.split, data, "data.prompts", "prompts")
        if held.prompts is not None:
            kept = self._prompts(held.prompts, held.split, data, "eval.prompts", "heldout_prompts")
            train = self._without_leaks(train, kept, str, "data.prompts")
        elif is_builtin(data.prompts):
            kept = self._prompts(data.prompts, data.split, data, "data.prompts", "heldout_prompts")
        elif len(set(train)) >= HELDOUT_SHARE:
            train, kept = split_heldout(train, str, "data.prompts")
        else:
            return train, train
        return train, list(dict.fromkeys(kept)) or train

    def _prompts(self, ref: str, split: str, data: PromptsSection, key: str, part: str) -> list[Prompt]:
        """`part`: the file of a built-in world."""
        if is_builtin(ref):
            own = self._rows(str(self.world(ref).file(part)), "", key)
            return read_prompts(own, "prompt", None, key, chat=False)[0]
        rows, where = self._rows(ref, split, key), f"{key}: {ref}"
        prompts, skipped = read_prompts(
            rows, text_column(ref, data.column), data.template, where, chat=data.chat_template
        )
        if skipped:
            self.display.message(f"{key}: {skipped} of {len(rows)} conversations left out: {UNUSABLE}")
        return prompts

    # ------------------------------------------------------------------ supervised data

    def documents(self, data: SFTDataSection) -> tuple[list[str], list[str]]:
        """Training texts and held-out texts, without overlap."""

        def read(ref: str, split: str, key: str, heldout: bool) -> list[str]:
            limit = None if heldout else data.max_documents
            return self.texts(ref, data.column, key, heldout=heldout, limit=limit, split=split, template=data.template)

        return self._divided(read, "texts", data.texts, data, data.eval_texts, str)

    def examples(self, data: SFTDataSection) -> tuple[list[Example], list[Example]]:
        """Training prompts with responses, and held-out ones with other prompts."""

        def read(ref: str, split: str, key: str, _heldout: bool) -> list[Example]:
            rows, where = self._rows(self._file(ref), split, key)[: data.max_documents], f"{key}: {ref}"
            columns = (data.prompt_column, data.response_column or "")
            examples, skipped = read_examples(rows, *columns, data.template, where, chat=data.chat_template)
            self._report_skipped(skipped, len(rows), where)
            return examples

        return self._divided(read, "texts", data.texts, data, data.eval_texts, _prompt)

    def pairs(self, data: PairsSection) -> tuple[list[Pair], list[Pair]]:
        """Preference pairs, and held-out ones with other prompts."""
        assert data.pairs is not None

        def read(ref: str, split: str, key: str, heldout: bool) -> list[Pair]:
            if is_builtin(ref):
                rows = self._rows(str(self.world(ref).file("heldout_pairs" if heldout else "pairs")), "", key)
                return read_pairs(rows, "prompt", "chosen", "rejected", None, key)[0]
            return self._read_pairs(ref, split, data, key)

        return self._divided(read, "pairs", data.pairs, data, data.eval_pairs, _prompt)

    def all_pairs(self, data: PairsSection) -> list[Pair]:
        """Every pair of a file, none held out."""
        assert data.pairs is not None
        return self._read_pairs(data.pairs, data.split, data, "--pairs")

    def _read_pairs(self, ref: str, split: str, data: PairsSection, key: str) -> list[Pair]:
        rows, where = self._rows(ref, split, key), f"{key}: {ref}"
        columns = (data.prompt_column, data.chosen_column, data.rejected_column)
        pairs, skipped = read_pairs(rows, *columns, data.template, where, chat=data.chat_template)
        self._report_skipped(skipped, len(rows), where)
        return pairs

    def labelled(self, data: PairsSection) -> tuple[list[Labelled], list[Labelled]]:
        """Labelled training texts and held-out ones, without overlap."""
        assert data.labels is not None

        def read(ref: str, split: str, key: str, _heldout: bool) -> list[Labelled]:
            rows = self._rows(self._file(ref), split, key)
            return read_labels(rows, data.text_column, data.label_column, f"{key}: {ref}")

        return self._divided(read, "labels", data.labels, data, data.eval_pairs, lambda row: row.text)

    def _file(self, ref: str) -> str:
        """A file, folder or hub id unchanged; a built-in world has only texts, prompts and pairs."""
        return str(self.world(ref).file("train")) if is_builtin(ref) else ref

    def _divided(
        self,
        read: Callable[[str, str, str, bool], list[T]],
        name: str,
        ref: str,
        data: SFTDataSection | PairsSection,
        heldout: str | None,
        identity: Callable[[T], Hashable],
    ) -> tuple[list[T], list[T]]:
        """Training rows and held-out rows: those of `heldout`, of the built-in world, or a part that is split off.

        `name`: the data's key in its section; rows with the same `identity` stay together.
        """
        key = f"data.{name}"
        train = read(ref, data.split, key, False)
        if heldout is None and not is_builtin(ref):
            return split_heldout(train, identity, f"{key}: {ref}")
        kept = read(heldout or ref, data.eval_split, "data.eval_texts" if name == "texts" else "data.eval_pairs", True)
        return self._without_leaks(train, kept, identity, key), kept

    def _without_leaks(self, train: list[T], kept: list[T], identity: Callable[[T], Hashable], key: str) -> list[T]:
        rest = without_leaks(train, kept, identity, key)
        if len(rest) < len(train):
            count = len(train) - len(rest)
            self.display.message(f"{key}: {count} of {len(train)} rows left out: they are among the held-out ones")
        return rest

    def _report_skipped(self, count: int, total: int, where: str) -> None:
        if count:
            self.display.message(f"{where}: {count} of {total} rows left out: {UNUSABLE}, or no difference")

    # ------------------------------------------------------------------ scorers

    def reward(self, section: RewardSection) -> RewardFn:
        """The reward function of a config."""
        if section.kind != SUM:
            return self._scorer(section, "reward", section.time_limit)
        return WeightedSum(
            {
                name: (term.weight, self._scorer(term, f"reward.terms.{name}", section.time_limit))
                for name, term in (section.terms or {}).items()
            }
        )

    def _scorer(self, section: ScorerSection, where: str, limit: float | None) -> RewardFn:
        if section.kind != "model":
            return _plugin(section.kind, section.options, f"{where}.kind", where, limit, section.interface == "trl")
        assert section.model is not None
        return self.reward_model(section.model, f"{where}.model", section)

    def gold(self, section: RewardSection, *others: str) -> GoldScorer | None:
        """The scorer that is only logged; a built-in world has its own."""
        if section.gold is not None and not is_builtin(section.gold):
            if is_reference(section.gold):
                return _plugin(section.gold, {}, "reward.gold", "reward.gold", section.time_limit)
            return self.reward_model(section.gold, "reward.gold", ScorerSection())
        if section.gold is not None or any(is_builtin(ref) for ref in others):
            return gold_scores
        return None

    def reward_model(self, ref: str, key: str, section: ScorerSection) -> RewardModel:
        """A sequence classifier as a scorer; an adapter is merged into its base."""
        path = str(self.world(ref).reward_model()) if is_builtin(ref) else self._folder(ref, key)
        with self.display.waiting(f"loading {key}"):
            if is_adapter(path):
                model, tokenizer = load_classifier_adapter(self, path, key, section.label)
            else:
                model = load_reward_model(path, key, self.access, section.label)
                tokenizer = load_tokenizer(path, key, self.access)
        form = text_format(model, chat=section.chat_template, append_eos=section.append_eos)
        return RewardModel(freeze(model).to(self.device), tokenizer, form=form, label=section.label, dtype=self.dtype)


def _plugin(
    ref: str, options: dict[str, Any], key: str, where: str, limit: float | None, trl: bool = False
) -> PluginReward:
    attribute, values = reward_attribute(ref, options, key, where, trl=trl)
    return (TRLReward if trl else PluginReward)(attribute, values, limit, secrets_of(options))


def _prompt(row: Example | Pair) -> Hashable:
    return str(row.prompt)
