"""What a config's names stand for: built-in parts, local files and folders, hub ids."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

from rlhf_kl.builtin.world import gold_scores, is_builtin
from rlhf_kl.commands.world import World
from rlhf_kl.components import is_reference, load_attribute
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
from rlhf_kl.models.actor_critic import freeze
from rlhf_kl.models.load import SAFE, Access, load_reward_model, load_tokenizer
from rlhf_kl.models.lora import is_adapter
from rlhf_kl.reward_functions import GoldScorer, RewardModel, WeightedSum, bind_reward, text_format
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.types import RewardFn

T = TypeVar("T")


def access_of(run: RunSection) -> Access:
    """What a run allows to be run of other people's code."""
    return Access(remote_code=run.trust_remote_code, pickle=run.allow_pickle)


class Resolver:
    """Finds what config values name; built-in worlds are built on the way where they are missing."""

    def __init__(self, display: TrainingDisplay, device: Any = "cpu", access: Access = SAFE) -> None:
        self.display, self.device, self.access = display, device, access

    def world(self, ref: str) -> World:
        """The built-in world of a `builtin:NAME`."""
        return World(ref, self.display)

    def policy(self, ref: str, what: str = "policy.model") -> str:
        """The local folder of a causal language model; a hub id is downloaded, or found in the cache."""
        if is_builtin(ref):
            return str(self.world(ref).policy())
        return model_folder(ref, what, pickled=self.access.pickle)

    # ------------------------------------------------------------------ texts

    def texts(
        self,
        ref: str,
        column: str,
        what: str,
        *,
        heldout: bool,
        limit: int | None = None,
        split: str = "test",
        template: str | None = None,
    ) -> list[str]:
        """Texts to train on, or (`heldout`) those of a built-in world that were kept apart."""
        if is_builtin(ref):
            path = self.world(ref).file("heldout" if heldout else "train")
            return read_texts(load_rows(str(path), split, what), "text", None, what)[:limit]
        rows = load_rows(ref, split, what)
        return read_texts(rows[:limit], text_column(ref, column), template, f"{what}: {ref}")

    def prompts(self, data: PromptsSection, held: EvalSection) -> tuple[list[str], list[str]]:
        """Prompts to train on and held-out prompts, none of which is among the former.

        Where no held-out prompts are named, a built-in world brings its own; of other prompts one in twenty is
        kept apart (none where there are fewer than twenty: then the training prompts serve for both).
        """
        if is_builtin(data.prompts):
            train, kept = (
                self._world_prompts(data.prompts, "prompts"),
                self._world_prompts(data.prompts, "heldout_prompts"),
            )
        else:
            train = self._prompt_texts(data.prompts, data.split, data, "data.prompts")
            kept = []
        if held.prompts is not None:
            if is_builtin(held.prompts):
                kept = self._world_prompts(held.prompts, "heldout_prompts")
            else:
                kept = self._prompt_texts(held.prompts, held.split, data, "eval.prompts")
            train = self._without_leaks(train, kept, "data.prompts")
        elif not kept and len(set(train)) >= HELDOUT_SHARE:
            train, kept = split_heldout(train, str, "data.prompts")
        return train, list(dict.fromkeys(kept)) or train

    def _world_prompts(self, ref: str, part: str) -> list[str]:
        return read_texts(
            load_rows(str(self.world(ref).file(part)), "", "data.prompts"), "prompt", None, "data.prompts"
        )

    def _prompt_texts(self, ref: str, split: str, data: PromptsSection, what: str) -> list[str]:
        rows, where = load_rows(ref, split, what), f"{what}: {ref}"
        found, skipped = read_prompts(
            rows, text_column(ref, data.column), data.template, where, chat=data.chat_template
        )
        if skipped:
            self.display.message(f"{what}: {skipped} of {len(rows)} conversations left out: {UNUSABLE}")
        return found

    # ------------------------------------------------------------------ supervised data

    def documents(self, data: SFTDataSection) -> tuple[list[str], list[str]]:
        """Texts to learn, and held-out ones, none of which is among the former."""
        train = self.texts(
            data.texts,
            data.column,
            "data.texts",
            heldout=False,
            limit=data.max_documents,
            split=data.split,
            template=data.template,
        )
        if data.eval_texts is None and not is_builtin(data.texts):
            return split_heldout(train, str, f"data.texts: {data.texts}")
        kept = self.texts(
            data.eval_texts or data.texts,
            data.column,
            "data.eval_texts",
            heldout=True,
            split=data.eval_split,
            template=data.template,
        )
        return self._without_leaks(train, kept, "data.texts"), kept

    def examples(self, data: SFTDataSection) -> tuple[list[Example], list[Example]]:
        """Prompts with the responses to learn, and held-out ones with other prompts."""
        assert data.response_column is not None

        def read(ref: str, split: str, what: str) -> list[Example]:
            rows = load_rows(self._named(ref), split, what)[: data.max_documents]
            where = f"{what}: {ref}"
            names = (data.prompt_column, data.response_column or "")
            found, skipped = read_examples(rows, *names, data.template, where, chat=data.chat_template)
            self._say_skipped(skipped, len(rows), where)
            return found

        train = read(data.texts, data.split, "data.texts")
        if data.eval_texts is None:
            return split_heldout(train, _prompt, f"data.texts: {data.texts}")
        kept = read(data.eval_texts, data.eval_split, "data.eval_texts")
        return self._without_leaks(train, kept, "data.texts", by_prompt=True), kept

    def pairs(self, data: PairsSection) -> tuple[list[Pair], list[Pair]]:
        """Preference pairs, and held-out ones with other prompts."""
        assert data.pairs is not None

        def read(ref: str, split: str, what: str, part: str) -> list[Pair]:
            if is_builtin(ref):
                rows = load_rows(str(self.world(ref).file(part)), "", what)
                return read_pairs(rows, "prompt", "chosen", "rejected", None, what)[0]
            rows, where = load_rows(ref, split, what), f"{what}: {ref}"
            names = (data.prompt_column, data.chosen_column, data.rejected_column)
            found, skipped = read_pairs(rows, *names, data.template, where, chat=data.chat_template)
            self._say_skipped(skipped, len(rows), where)
            return found

        train = read(data.pairs, data.split, "data.pairs", "pairs")
        if data.eval_pairs is None and not is_builtin(data.pairs):
            return split_heldout(train, _prompt, f"data.pairs: {data.pairs}")
        kept = read(data.eval_pairs or data.pairs, data.eval_split, "data.eval_pairs", "heldout_pairs")
        return self._without_leaks(train, kept, "data.pairs", by_prompt=True), kept

    def all_pairs(self, data: PairsSection) -> list[Pair]:
        """Every pair of a file, none kept apart."""
        assert data.pairs is not None
        rows = load_rows(data.pairs, data.split, "--pairs")
        names = (data.prompt_column, data.chosen_column, data.rejected_column)
        return read_pairs(rows, *names, data.template, f"--pairs: {data.pairs}", chat=data.chat_template)[0]

    def labelled(self, data: PairsSection) -> tuple[list[Labelled], list[Labelled]]:
        """Labelled texts, and held-out ones, none of which is among the former."""
        assert data.labels is not None

        def read(ref: str, split: str, what: str) -> list[Labelled]:
            rows = load_rows(self._named(ref), split, what)
            return read_labels(rows, data.text_column, data.label_column, f"{what}: {ref}")

        train = read(data.labels, data.split, "data.labels")
        if data.eval_pairs is None:
            return split_heldout(train, lambda row: row.text, f"data.labels: {data.labels}")
        kept = read(data.eval_pairs, data.eval_split, "data.eval_pairs")
        texts = {row.text for row in kept}
        rest = [row for row in train if row.text not in texts]
        self._say_leaks(len(train) - len(rest), len(train), "data.labels")
        return rest, kept

    def _named(self, ref: str) -> str:
        """A file, folder or hub id as it is; a built-in world has texts, prompts and pairs only."""
        return str(self.world(ref).file("train")) if is_builtin(ref) else ref

    def _without_leaks(self, train: list[T], kept: list[T], what: str, *, by_prompt: bool = False) -> list[T]:
        key = _prompt if by_prompt else _itself
        rest = without_leaks(train, kept, key, what)
        self._say_leaks(len(train) - len(rest), len(train), what)
        return rest

    def _say_leaks(self, count: int, total: int, what: str) -> None:
        if count:
            self.display.message(f"{what}: {count} of {total} rows left out: they are among the held-out ones")

    def _say_skipped(self, count: int, total: int, where: str) -> None:
        if count:
            self.display.message(f"{where}: {count} of {total} rows left out: {UNUSABLE}, or no difference")

    # ------------------------------------------------------------------ scorers

    def reward(self, section: RewardSection) -> RewardFn:
        """The reward function of a config."""
        if section.kind != SUM:
            return self._scorer(section, "reward", section.time_limit)
        terms = section.terms or {}
        return WeightedSum(
            {
                name: (term.weight, self._scorer(term, f"reward.terms.{name}", section.time_limit))
                for name, term in terms.items()
            }
        )

    def _scorer(self, section: ScorerSection, where: str, limit: float | None) -> RewardFn:
        if section.kind != "model":
            return bind_reward(load_attribute(section.kind, search=[Path.cwd()]), section.options, limit)
        assert section.model is not None
        return self.reward_model(section.model, f"{where}.model", section)

    def gold(self, section: RewardSection, *others: str) -> GoldScorer | None:
        """The scorer that is only logged; the built-in worlds bring their own."""
        if section.gold is not None and not is_builtin(section.gold):
            if is_reference(section.gold):
                return bind_reward(load_attribute(section.gold, search=[Path.cwd()]), {}, section.time_limit)
            return self.reward_model(section.gold, "reward.gold", ScorerSection())
        if section.gold is not None or any(is_builtin(ref) for ref in others):
            return gold_scores
        return None

    def reward_model(self, ref: str, what: str, section: ScorerSection) -> RewardModel:
        """A sequence classifier as a scorer; an adapter is merged into its base."""
        from rlhf_kl.commands.models import load_classifier_adapter  # which finds models by this class

        if is_builtin(ref):
            path = str(self.world(ref).reward_model())
        else:
            path = model_folder(ref, what, pickled=self.access.pickle)
        if is_adapter(path):
            model, tokenizer = load_classifier_adapter(self, path, what, section.label)
        else:
            model = load_reward_model(path, what, self.access, section.label)
            tokenizer = load_tokenizer(path, what, self.access)
        form = text_format(model, chat=section.chat_template, append_eos=section.append_eos)
        return RewardModel(freeze(model).to(self.device), tokenizer, form=form, label=section.label)


def _prompt(row: Any) -> Hashable:
    return str(row.prompt)


def _itself(row: Any) -> Hashable:
    return row  # type: ignore[no-any-return]
