"""The built-in world: files and a scorer in place of `builtin:NAME`, built on first use and kept in the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from rlhf_kl import ui
from rlhf_kl.builtin.corpus import write_corpus
from rlhf_kl.builtin.grammar import known_for
from rlhf_kl.builtin.world import GOLD, cache_folder, is_builtin, part_key, world_spec
from rlhf_kl.config.resolve import flat, load_config
from rlhf_kl.config.schema import RewardModelConfig, Section, SFTConfig
from rlhf_kl.errors import GuardStop, InputError
from rlhf_kl.events import worded
from rlhf_kl.models.pretrained import parameter_count
from rlhf_kl.run.folder import sweep, write_folder
from rlhf_kl.run.log import write_json
from rlhf_kl.seeding import seed_libraries
from rlhf_kl.supervised.fit import SupervisedTrainer
from rlhf_kl.train.load import Loader
from rlhf_kl.train.tasks import build_task
from rlhf_kl.ui import log

C = TypeVar("C", bound=Section)
PARTS = {  # of a world, by the config key that names it
    "policy.model": "policy",
    "reference.model": "policy",
    "reward.model": "reward_model",
    "reward.gold": "gold",
    "data.prompts": "prompts",
    "eval.prompts": "heldout_prompts",
    "eval.texts": "heldout",
    "data.texts": "train",
    "data.eval_texts": "heldout",
    "data.pairs": "pairs",
    "data.eval_pairs": "heldout_pairs",
}
COMES_WITH = {  # keys that a world fills where the config leaves them null and names the world elsewhere
    "reward.gold": ("reward.model", "data.prompts"),
    "eval.prompts": ("data.prompts",),
    "data.eval_texts": ("data.texts",),
    "data.eval_pairs": ("data.pairs",),
}


def with_files(config: C, sections: Collection[str] | None = None) -> C:
    """The config with files, folders and a scorer in place of each `builtin:NAME`; builds what is missing.

    A world's own held-out rows and gold scores stand in for those that the config leaves null. `sections`: only these.
    """
    values = flat(config.model_dump())

    def expand(value: Any, key: str) -> Any:
        if isinstance(value, Section):
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            expanded = {name: expand(old, f"{key}.{name}".lstrip(".")) for name, old in fields.items()}
            return value.model_copy(update={name: new for name, new in expanded.items() if new is not fields[name]})
        if key == "reward.terms" and value is not None:
            return {name: expand(term, "reward") for name, term in value.items()}
        if sections is not None and key.partition(".")[0] not in sections:
            return value
        if value is None:
            value = next((values[k] for k in COMES_WITH.get(key, ()) if is_builtin(values.get(k))), None)
        return world_file(value, PARTS[key]) if is_builtin(value) and key in PARTS else value

    expanded: C = expand(config, "")
    return expanded


def world_file(ref: str, part: str) -> str:
    """A part of the world that `ref` names, as a path or `module:name`; any other `ref` unchanged."""
    if not is_builtin(ref):
        return ref
    world = World(ref)
    if part in ("policy", "reward_model"):
        return str(world.policy() if part == "policy" else world.reward_model())
    return GOLD if part == "gold" else str(world.file(part))


class World:
    """A built-in world; each missing part is built and kept in the cache.

    It trains with the shipped configs of `sft` and `reward-model` and the world's settings, on the CPU.
    """

    def __init__(self, ref: str) -> None:
        self.ref, self.spec = ref, world_spec(ref)
        self.folder = cache_folder() / self.spec.name

    # ------------------------------------------------------------------ parts

    def corpus(self) -> Path:
        """Folder with texts, prompts and pairs as .jsonl."""
        return self._part(f"corpus-{part_key(self.spec, {}, [])}", self._write_corpus)

    def policy(self) -> Path:
        """Folder of the pre-trained policy with its tokenizer."""
        config: SFTConfig = load_config("sft", "sft_reviews.yaml", [f"data.texts={self.ref}", *self.spec.sft])
        settings = config.model_dump_json(include={"policy": {"model", "architecture"}, "sft": True})
        key = part_key(self.spec, _versions(), [settings])
        return self._part(f"policy-{key}", lambda folder: self._train(config, "policy", folder))

    def reward_model(self) -> Path:
        """Folder of the reward model."""
        places = [f"policy.model={self.ref}", f"data.pairs={self.ref}"]
        config: RewardModelConfig = load_config(
            "reward-model", "reward_reviews.yaml", [*places, *self.spec.reward_model]
        )
        settings = config.model_dump_json(include={"policy": {"model"}, "reward_model": True})
        key = part_key(self.spec, _versions(), [self.policy().name, settings])
        return self._part(f"reward-{key}", lambda folder: self._train(config, "reward model", folder))

    def file(self, name: str) -> Path:
        """One file of the corpus: train, heldout, prompts, heldout_prompts, pairs, heldout_pairs."""
        return self.corpus() / f"{name}.jsonl"

    # ------------------------------------------------------------------ building

    def _write_corpus(self, folder: Path) -> None:
        corpus = write_corpus(self.spec.seed, self.spec.sizes)

        def write(name: str, rows: Iterable[dict[str, str]]) -> None:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

        for kind in ("train", "heldout"):
            write(kind, ({"text": text} for text in getattr(corpus, f"{kind}_texts")))
        for name in ("prompts", "heldout_prompts"):
            write(name, ({"prompt": text, "known_for": known_for(text)} for text in getattr(corpus, name)))
        for name in ("pairs", "heldout_pairs"):
            # A response starts with the space after its prompt.
            fields = ((pair.prompt, f" {pair.chosen}", f" {pair.rejected}") for pair in getattr(corpus, name))
            write(name, (dict(zip(("prompt", "chosen", "rejected"), values, strict=True)) for values in fields))

    def _train(self, config: SFTConfig | RewardModelConfig, part: str, folder: Path) -> None:
        """Train to the end, and write the model. An interrupted build starts over, so there are no checkpoints."""
        task = build_task(with_files(config), Loader())
        settings = config.sft if isinstance(config, SFTConfig) else config.reward_model
        seed_libraries(config.run.seed)
        trainer = SupervisedTrainer(task, settings, config.run.seed)
        title = f"building {self.spec.name}: {part}"
        log.info(f"{len(task)} rows, {parameter_count(task.model):,} parameters, {trainer.steps} steps")
        with ui.progress(title, trainer.steps) as advance:
            for step in range(1, trainer.steps + 1):
                trainer.step(step)
                advance(1)
                for alert in worded(trainer.events):
                    log.warning(f"{title}: {alert}")
                if trainer.stuck:
                    raise GuardStop(f"{title}: {trainer.skipped} steps in a row had gradients that were not finite")
        task.save(folder)
        write_json(folder / "summary.json", {"final": task.evaluate(), "versions": _versions()})

    def _part(self, name: str, build: Callable[[Path], None]) -> Path:
        """The folder of a part, written under another name and renamed: where it is there, it is complete.

        Errors: InputError; the run would report its own folder.
        """
        target = self.folder / name
        try:
            if not target.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(self.folder / f".{name}.lock")
                with ui.progress(f"waiting for another process that builds {name}"):
                    held = lock.acquire()
                with held:
                    sweep(self.folder, name)
                    if not target.is_dir():  # else another process has built it
                        write_folder(target, build)
        except OSError as error:
            reason = f"the built-in world cannot be kept there: {error.strerror or error}"
            advice = "make room there, or name another folder in RLHF_KL_CACHE"
            raise InputError(f"{cache_folder()}: {reason}: {advice}") from error
        return target


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "tokenizers")}
