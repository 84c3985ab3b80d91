"""Resolves the names in a config: local files and folders, hub ids, plugins."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from rlhf_kl import ui
from rlhf_kl.commands.models import load_classifier_adapter
from rlhf_kl.config.plugins import NamedPlugin, load_reward
from rlhf_kl.config.schema import (
    EvalSection,
    PairsSection,
    PromptsSection,
    RewardSection,
    RunSection,
    ScorerSection,
    SFTDataSection,
)
from rlhf_kl.data.files import HELDOUT_SHARE, load_rows, split_heldout, text_column, without_leaks
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
from rlhf_kl.plugins import is_reference
from rlhf_kl.rewards.model import RewardModel, text_format
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import GOLD, REWARD, TERM, Scorer, Scorers
from rlhf_kl.rewards.trl import TRLReward
from rlhf_kl.types import Prompt
from rlhf_kl.ui import log

T = TypeVar("T")


def access_of(run: RunSection) -> Access:
    """The permissions of a run to run other people's code."""
    return Access(remote_code=run.trust_remote_code, pickle=run.allow_pickle)


class Resolver:
    """Turns the names in a config into models, prompts, texts and reward functions.

    A hub id is downloaded or taken from the cache. `key` is the config key of a name, for messages. Errors: InputError
    for a name that cannot be used.
    """

    def __init__(
        self,
        device: Any = "cpu",
        access: Access = SAFE,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`device` and `dtype`: of the reward models' computation."""
        self.device, self.access, self.dtype = device, access, dtype

    @classmethod
    def for_run(cls, run: RunSection, device: Any) -> Resolver:
        """The resolver of a config with this `run` section."""
        return cls(device, access_of(run), compute_dtype(run.dtype))

    def folder(self, ref: str, key: str) -> str:
        """The local folder of a model."""
        with ui.waiting(f"fetching {key}"):
            return model_folder(ref, key, pickled=self.access.pickle)

    def _rows(self, ref: str, split: str, key: str) -> list[dict[str, Any]]:
        with ui.waiting(f"reading {key}"):
            return load_rows(ref, split, key)

    # ------------------------------------------------------------------ texts and prompts

    def texts(
        self,
        ref: str,
        column: str,
        key: str,
        *,
        limit: int | None = None,
        split: str = "test",
        template: str | None = None,
    ) -> list[str]:
        """The first `limit` texts of a data set."""
        rows = self._rows(ref, split, key)
        return read_texts(rows[:limit], text_column(ref, column), template, f"{key}: {ref}")

    def prompts(self, data: PromptsSection, held: EvalSection) -> tuple[list[Prompt], list[Prompt]]:
        """Training prompts and held-out prompts, without overlap.

        If no held-out prompts are named, one prompt in twenty is held out.
        With fewer than twenty prompts the training prompts are also the held-out ones.
        """
        train = self._prompts(data.prompts, data.split, data, "data.prompts")
        if held.prompts is not None:
            kept = self._prompts(held.prompts, held.split, data, "eval.prompts")
            train = self._without_leaks(train, kept, str, "data.prompts")
        elif len(set(train)) >= HELDOUT_SHARE:
            train, kept = split_heldout(train, str, "data.prompts")
        else:
            return train, train
        return train, list(dict.fromkeys(kept)) or train

    def _prompts(self, ref: str, split: str, data: PromptsSection, key: str) -> list[Prompt]:
        rows, where = self._rows(ref, split, key), f"{key}: {ref}"
        prompts, skipped = read_prompts(
            rows, text_column(ref, data.column), data.template, where, chat=data.chat_template
        )
        if skipped:
            log.info(f"{key}: {skipped} of {len(rows)} conversations left out: {UNUSABLE}")
        return prompts

    # ------------------------------------------------------------------ supervised data

    def documents(self, data: SFTDataSection) -> tuple[list[str], list[str]]:
        """Training texts and held-out texts, without overlap."""

        def read(ref: str, split: str, key: str) -> list[str]:
            limit = data.max_documents if key == "data.texts" else None
            return self.texts(ref, data.column, key, limit=limit, split=split, template=data.template)

        return self._divided(read, "texts", data.texts, data, data.eval_texts, str)

    def examples(self, data: SFTDataSection) -> tuple[list[Example], list[Example]]:
        """Training prompts with responses, and held-out ones with other prompts."""

        def read(ref: str, split: str, key: str) -> list[Example]:
            rows, where = self._rows(ref, split, key)[: data.max_documents], f"{key}: {ref}"
            columns = (data.prompt_column, data.response_column or "")
            examples, skipped = read_examples(rows, *columns, data.template, where, chat=data.chat_template)
            self._report_skipped(skipped, len(rows), where)
            return examples

        return self._divided(read, "texts", data.texts, data, data.eval_texts, _prompt)

    def pairs(self, data: PairsSection) -> tuple[list[Pair], list[Pair]]:
        """Preference pairs, and held-out ones with other prompts."""
        assert data.pairs is not None

        def read(ref: str, split: str, key: str) -> list[Pair]:
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

        def read(ref: str, split: str, key: str) -> list[Labelled]:
            rows = self._rows(ref, split, key)
            return read_labels(rows, data.text_column, data.label_column, f"{key}: {ref}")

        return self._divided(read, "labels", data.labels, data, data.eval_pairs, lambda row: row.text)

    def _divided(
        self,
        read: Callable[[str, str, str], list[T]],
        name: str,
        ref: str,
        data: SFTDataSection | PairsSection,
        heldout: str | None,
        identity: Callable[[T], Hashable],
    ) -> tuple[list[T], list[T]]:
        """Training rows and held-out rows: those of `heldout`, or a part that is split off.

        `name`: the data's key in its section; rows with the same `identity` stay together.
        """
        key = f"data.{name}"
        train = read(ref, data.split, key)
        if heldout is None:
            return split_heldout(train, identity, f"{key}: {ref}")
        kept = read(heldout, data.eval_split, "data.eval_texts" if name == "texts" else "data.eval_pairs")
        return self._without_leaks(train, kept, identity, key), kept

    def _without_leaks(self, train: list[T], kept: list[T], identity: Callable[[T], Hashable], key: str) -> list[T]:
        rest = without_leaks(train, kept, identity, key)
        if len(rest) < len(train):
            count = len(train) - len(rest)
            log.info(f"{key}: {count} of {len(train)} rows left out: they are among the held-out ones")
        return rest

    def _report_skipped(self, count: int, total: int, where: str) -> None:
        if count:
            log.info(f"{where}: {count} of {total} rows left out: {UNUSABLE}, or no difference")

    # ------------------------------------------------------------------ scorers

    def scorers(self, section: RewardSection, *, reward: bool = True, gold: bool = True) -> Scorers:
        """The scorers of a config, or some of them: its reward, or the terms of a sum; and gold."""
        limit, terms = section.time_limit, section.terms or {}
        found = []
        for name, term in terms.items() if reward else ():
            found.append(Scorer(TERM + name, self._scorer(term, f"reward.terms.{name}", limit), term.weight))
        if reward and not terms:
            found.append(Scorer(REWARD, self._scorer(section, "reward", limit)))
        if gold and section.gold is not None:
            key, ref = "reward.gold", section.gold
            is_plugin = is_reference(ref)
            call = (
                _plugin(NamedPlugin(key, ref, {}), limit) if is_plugin else self.reward_model(ref, key, ScorerSection())
            )
            found.append(Scorer(GOLD, call, 0.0))
        return Scorers(*found)

    def _scorer(self, section: ScorerSection, where: str, limit: float | None) -> RewardModel | PluginReward:
        if section.kind != "model":
            return _plugin(
                NamedPlugin(f"{where}.kind", section.kind, section.options, section.interface == "trl"), limit
            )
        assert section.model is not None
        return self.reward_model(section.model, f"{where}.model", section)

    def reward_model(self, ref: str, key: str, section: ScorerSection) -> RewardModel:
        """A sequence classifier as a scorer; an adapter is merged into its base."""
        path = self.folder(ref, key)
        with ui.waiting(f"loading {key}"):
            if is_adapter(path):
                model, tokenizer = load_classifier_adapter(self, path, key, section.label)
            else:
                model = load_reward_model(path, key, self.access, section.label)
                tokenizer = load_tokenizer(path, key, self.access)
        form = text_format(model, chat=section.chat_template, append_eos=section.append_eos)
        return RewardModel(freeze(model).to(self.device), tokenizer, form=form, label=section.label, dtype=self.dtype)


def _plugin(plugin: NamedPlugin, limit: float | None) -> PluginReward:
    target, arguments, secrets = load_reward(plugin)
    return (TRLReward if plugin.trl else PluginReward)(target, arguments, limit, secrets)


def _prompt(row: Example | Pair) -> Hashable:
    return str(row.prompt)
