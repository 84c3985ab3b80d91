"""Building the built-in world on first use, with the same trainers as `sft` and `reward-model`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_kl.builtin.corpus import write_corpus
from rlhf_kl.builtin.world import WorldSpec, part_key, world_spec
from rlhf_kl.cache import cache_folder
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import RewardModelConfig, SFTConfig
from rlhf_kl.errors import InputError, RunFailed
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.failures import FULL, room_words
from rlhf_kl.run.folders import CHECKSUMS, damage, sweep, write_folder
from rlhf_kl.run.run_folder import open_run_folder

PACKAGE = Path(__file__).parent.parent
CORPUS_SOURCES = [PACKAGE / "builtin" / f"{name}.py" for name in ("grammar", "gold", "corpus")]
TRAINER_SOURCES = [
    *CORPUS_SOURCES,
    *(PACKAGE / "trainers" / f"{name}.py" for name in ("supervised", "sft", "reward_model", "optim")),
    *(PACKAGE / "models" / f"{name}.py" for name in ("scratch", "text", "tokenizer")),
]
# A build starts over where it was interrupted: no checkpoints, and only the closing evaluation matters.
LEAN = ("run.device=cpu", "tracking.tensorboard=false", "checkpoint.every=1000000", "eval.every=1000000")


class World:
    """A built-in world; each part is built when it is first asked for, and kept in the cache."""

    def __init__(self, ref: str, display: TrainingDisplay) -> None:
        self.spec: WorldSpec = world_spec(ref)
        self.display = display
        self.folder = cache_folder() / self.spec.name
        self.found: dict[str, Path] = {}  # a key is worked out once: its sources may change while we run

    # ------------------------------------------------------------------ parts

    def corpus(self) -> Path:
        """Folder with texts, prompts and pairs as .jsonl."""
        if "corpus" not in self.found:
            key = part_key(self.spec, CORPUS_SOURCES, {}, [])
            self.found["corpus"] = self._part(f"corpus-{key}", self._write_corpus)
        return self.found["corpus"]

    def policy(self) -> Path:
        """Folder of the pre-trained policy with its tokenizer."""
        if "policy" not in self.found:
            config = load_config("sft", "sft_reviews.yaml", list(self.spec.sft))
            settings = config.model_dump_json(include={"policy": {"model", "architecture"}, "sft": True})
            key = part_key(self.spec, TRAINER_SOURCES, _versions(), [settings])
            self.found["policy"] = self._part(f"policy-{key}", self._train_policy)
        return self.found["policy"]

    def reward_model(self) -> Path:
        """Folder of the reward model."""
        if "reward" not in self.found:
            config = load_config("reward-model", "reward_reviews.yaml", list(self.spec.reward_model))
            settings = config.model_dump_json(include={"policy": {"model"}, "reward_model": True})
            key = part_key(self.spec, TRAINER_SOURCES, _versions(), [self.policy().name, settings])
            self.found["reward"] = self._part(f"reward-{key}", self._train_reward_model)
        return self.found["reward"]

    def file(self, name: str) -> Path:
        """One file of the corpus: train, heldout, prompts, heldout_prompts, pairs, heldout_pairs."""
        return self.corpus() / f"{name}.jsonl"

    # ------------------------------------------------------------------ building

    def _write_corpus(self, folder: Path) -> None:
        corpus = write_corpus(self.spec.seed, self.spec.sizes)
        _write_jsonl(folder / "train.jsonl", ({"text": text} for text in corpus.train_texts))
        _write_jsonl(folder / "heldout.jsonl", ({"text": text} for text in corpus.heldout_texts))
        _write_jsonl(folder / "prompts.jsonl", ({"prompt": text} for text in corpus.prompts))
        _write_jsonl(folder / "heldout_prompts.jsonl", ({"prompt": text} for text in corpus.heldout_prompts))
        for name in ("pairs", "heldout_pairs"):
            rows = (
                # A response starts with the space that parts it from its prompt.
                {"prompt": pair.prompt, "chosen": f" {pair.chosen}", "rejected": f" {pair.rejected}"}
                for pair in getattr(corpus, name)
            )
            _write_jsonl(folder / f"{name}.jsonl", rows)

    def _train_policy(self, folder: Path) -> None:
        from rlhf_kl.commands.sft import run_sft

        overrides = [
            *self.spec.sft,
            f"data.texts={json.dumps(str(self.file('train')))}",
            f"data.eval_texts={json.dumps(str(self.file('heldout')))}",
        ]
        config = load_config("sft", "sft_reviews.yaml", [*overrides, *LEAN])
        assert isinstance(config, SFTConfig)
        self._train(folder, config, run_sft, f"building {self.spec.name}: policy")

    def _train_reward_model(self, folder: Path) -> None:
        from rlhf_kl.commands.reward_model import run_reward_model

        overrides = [
            *self.spec.reward_model,
            f"policy.model={json.dumps(str(self.policy()))}",
            f"data.pairs={json.dumps(str(self.file('pairs')))}",
            f"data.eval_pairs={json.dumps(str(self.file('heldout_pairs')))}",
        ]
        settings = [*overrides, *LEAN]
        config = load_config("reward-model", "reward_reviews.yaml", settings)
        assert isinstance(config, RewardModelConfig)
        self._train(folder, config, run_reward_model, f"building {self.spec.name}: reward model")

    def _train(self, folder: Path, config: Any, run: Callable[..., Any], title: str) -> None:
        """Train into a run folder below `folder`, then keep its final model alone."""
        place = folder / "run"
        with open_run_folder(place, resume=False, overwrite=False) as run_folder:
            run(config, run_folder, self.display, title=title)
        for path in run_folder.final.iterdir():
            path.rename(folder / path.name)
        shutil.copy(run_folder.summary, folder / "summary.json")
        shutil.rmtree(place)

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
            if not _is_whole(target):  # else the other process has built it by now
                if target.is_dir():
                    self.display.alert(f"{target}: {damage(target)}: building it again")
                write_folder(target, build, checksums=True)


@contextlib.contextmanager
def _cache_failures() -> Iterator[None]:
    """Here, where it is known that an OSError is the cache's: a run would take it for its own folder's.

    Errors: RunFailed for a disk that is full, InputError for a folder that cannot be used.
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


def _write_jsonl(path: Path, rows: Iterator[dict[str, str]]) -> None:
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
