"""The built-in world: its corpus, policy and reward model, built on first use and kept in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_kl.builtin.corpus import write_corpus
from rlhf_kl.builtin.grammar import known_for
from rlhf_kl.builtin.sources import code_of, code_text
from rlhf_kl.builtin.world import WorldSpec, part_key, world_spec
from rlhf_kl.cache import cache_folder
from rlhf_kl.commands.models import new_language_model
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import EpochsSection, RewardModelConfig, SFTConfig
from rlhf_kl.data.texts import Pair
from rlhf_kl.errors import GuardStop, InputError, RunFailed
from rlhf_kl.evaluate import perplexity
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.load import context_length, load_causal_lm, load_tokenizer, parameter_count, save_model
from rlhf_kl.models.scratch import classifier_from_lm
from rlhf_kl.rewards.model import RewardModel, save_reward_model
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.failures import FULL, room_words
from rlhf_kl.run.folders import CHECKSUMS, damage, sweep, write_folder
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.run_folder import write_json
from rlhf_kl.seeding import derive_seed, seed_libraries
from rlhf_kl.trainers.reward_figures import pair_figures
from rlhf_kl.trainers.reward_model import PairObjective, initialise_head
from rlhf_kl.trainers.sft import TextObjective
from rlhf_kl.trainers.supervised import Objective, SupervisedTrainer

WRITER = "builtin/corpus.py"
BUILDER = "commands/world.py"  # this file: it makes every part


class World:
    """A built-in world; each missing part is built and kept in the cache.

    It trains with the shipped configs of `sft` and `reward-model` and the world's settings, on the CPU.
    """

    def __init__(self, ref: str, display: TrainingDisplay) -> None:
        self.spec: WorldSpec = world_spec(ref)
        self.display = display
        self.folder = cache_folder() / self.spec.name
        self.parts: dict[str, Path] = {}  # a key is computed once: the sources may change during the run

    # ------------------------------------------------------------------ parts

    def corpus(self) -> Path:
        """Folder with texts, prompts and pairs as .jsonl."""
        if "corpus" not in self.parts:
            key = part_key(self.spec, [code_of(WRITER), code_text(Path(__file__))], {}, [])
            self.parts["corpus"] = self._part(f"corpus-{key}", self._write_corpus)
        return self.parts["corpus"]

    def policy(self) -> Path:
        """Folder of the pre-trained policy with its tokenizer."""
        if "policy" not in self.parts:
            settings = self._sft().model_dump_json(include={"policy": {"model", "architecture"}, "sft": True})
            key = part_key(self.spec, [code_of(BUILDER)], _versions(), [settings])
            self.parts["policy"] = self._part(f"policy-{key}", self._train_policy)
        return self.parts["policy"]

    def reward_model(self) -> Path:
        """Folder of the reward model."""
        if "reward" not in self.parts:
            settings = self._reward().model_dump_json(include={"policy": {"model"}, "reward_model": True})
            key = part_key(self.spec, [code_of(BUILDER)], _versions(), [self.policy().name, settings])
            self.parts["reward"] = self._part(f"reward-{key}", self._train_reward_model)
        return self.parts["reward"]

    def file(self, name: str) -> Path:
        """One file of the corpus: train, heldout, prompts, heldout_prompts, pairs, heldout_pairs."""
        return self.corpus() / f"{name}.jsonl"

    def _sft(self) -> SFTConfig:
        return load_config("sft", "sft_reviews.yaml", list(self.spec.sft))

    def _reward(self) -> RewardModelConfig:
        return load_config("reward-model", "reward_reviews.yaml", list(self.spec.reward_model))

    # ------------------------------------------------------------------ building

    def _write_corpus(self, folder: Path) -> None:
        corpus = write_corpus(self.spec.seed, self.spec.sizes)
        _write_jsonl(folder / "train.jsonl", ({"text": text} for text in corpus.train_texts))
        _write_jsonl(folder / "heldout.jsonl", ({"text": text} for text in corpus.heldout_texts))
        for name in ("prompts", "heldout_prompts"):
            rows = ({"prompt": text, "known_for": known_for(text)} for text in getattr(corpus, name))
            _write_jsonl(folder / f"{name}.jsonl", rows)
        for name in ("pairs", "heldout_pairs"):
            rows = (
                # A response starts with the space after its prompt.
                {"prompt": pair.prompt, "chosen": f" {pair.chosen}", "rejected": f" {pair.rejected}"}
                for pair in getattr(corpus, name)
            )
            _write_jsonl(folder / f"{name}.jsonl", rows)

    def _train_policy(self, folder: Path) -> None:
        config = self._sft()
        texts, heldout = ([row["text"] for row in read_jsonl(self.file(name))] for name in ("train", "heldout"))
        model, tokenizer = new_language_model(config.policy.architecture, texts, config.run.seed)
        lm = TransformersLM(model)
        objective = TextObjective(lm, tokenizer, texts, context_length(model))
        self._fit(model, objective, config.sft, config.run.seed, "policy")
        figures = perplexity(lm, tokenizer, heldout[: config.eval.max_documents])
        save_model(model, tokenizer, folder)
        _write_summary(folder, {"eval/perplexity": figures.perplexity})

    def _train_reward_model(self, folder: Path) -> None:
        config, path = self._reward(), str(self.policy())
        seed = config.run.seed
        pairs, heldout = ([Pair(**row) for row in read_jsonl(self.file(name))] for name in ("pairs", "heldout_pairs"))
        heldout = heldout[: config.eval.max_pairs]
        tokenizer = load_tokenizer(path)
        model = classifier_from_lm(load_causal_lm(path), tokenizer, "policy.model")
        initialise_head(model.score, derive_seed(seed, "head"))
        reward = RewardModel(model, tokenizer)
        self._fit(model, PairObjective(reward, pairs), config.reward_model, seed, "reward model")
        prompts = [pair.prompt for pair in heldout]
        chosen, rejected = (
            reward.score(prompts, [getattr(pair, side) for pair in heldout]) for side in ("chosen", "rejected")
        )
        save_reward_model(reward, folder)
        _write_summary(folder, pair_figures(chosen, rejected))

    def _fit(self, model: Any, objective: Objective, settings: EpochsSection, seed: int, part: str) -> None:
        """Train to the end. An interrupted build starts over, so there are no checkpoints."""
        seed_libraries(seed)
        trainer = SupervisedTrainer(model, objective, settings, seed)
        title = f"building {self.spec.name}: {part}"
        self.display.message(f"{len(objective)} rows, {parameter_count(model):,} parameters, {trainer.steps} steps")
        with self.display.progress(title, trainer.steps) as advance:
            for row in trainer.train():
                advance(1)
                for alert in row.get("alerts", []):
                    self.display.alert(f"{title}: {alert}")
                if trainer.stuck:
                    raise GuardStop(f"{title}: {trainer.skipped} steps in a row had gradients that were not finite")

    def _part(self, name: str, build: Callable[[Path], None]) -> Path:
        target = self.folder / name
        with _cache_failures():
            if not _is_whole(target):
                self._build(target, build)
        return target

    def _build(self, target: Path, build: Callable[[Path], None]) -> None:
        name = target.name
        with _lock(self.folder / f".{name}.lock", self.display, f"another process is building {name}: waiting"):
            sweep(self.folder, re.compile(re.escape(name)))
            if not _is_whole(target):  # else another process has built it
                if target.is_dir():
                    self.display.alert(f"{target}: {damage(target)}: building it again")
                write_folder(target, build, checksums=True)


@contextlib.contextmanager
def _cache_failures() -> Iterator[None]:
    """Report an OSError of the cache as such; the run would report its own folder.

    Errors: RunFailed for a full disk, InputError for a folder that cannot be used.
    """
    try:
        yield
    except OSError as error:
        folder = cache_folder()
        words = f"{folder}: the built-in world cannot be kept there: {error.strerror or error}"
        if error.errno in FULL:
            raise RunFailed(f"{words}: {room_words(folder)}, or name another folder in RLHF_KL_CACHE") from error
        raise InputError(f"{words}: name another folder in RLHF_KL_CACHE") from error


def _is_whole(part: Path) -> bool:
    return part.is_dir() and (not (part / CHECKSUMS).is_file() or damage(part) is None)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}


def _write_summary(folder: Path, figures: dict[str, float]) -> None:
    """Write a part's figures on held-out data, and the versions of its libraries."""
    write_json(folder / "summary.json", {"final": figures, "versions": _versions()})


def _write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@contextlib.contextmanager
def _lock(path: Path, display: TrainingDisplay, waiting: str) -> Iterator[None]:
    """An exclusive lock that the operating system releases when its owner dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            display.message(waiting)
            fcntl.lockf(handle, fcntl.LOCK_EX)
        yield
