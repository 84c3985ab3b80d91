"""Makes the files of the built-in worlds anew: `python scripts/make_world.py [--only reviews-small] [--into FOLDER]`.

A world is texts, prompts and pairs (review_corpus.py), a policy that `rlhf-kl sft` trains on the texts, and a reward
model that `rlhf-kl reward-model` trains on the pairs. They train on one thread of the CPU with the shipped configs and
take five minutes; the weights are then rounded to bfloat16. The texts come out the same everywhere; the weights do
with the same libraries on the same kind of processor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from review_corpus import CorpusSizes, Pair, known_for, write_corpus
from safetensors.torch import load_file, save_file

from rlhf_kl.builtin.world import FILES

WHERE_IT_WAS = ("is_local", "local_files_only")  # when the tokenizer was loaded to be saved again


@dataclass(frozen=True)
class WorldSpec:
    """Sizes and seed of a world's corpus, and what its trainings set beside the shipped configs."""

    sizes: CorpusSizes = field(default_factory=CorpusSizes)
    seed: int = 0
    sft: tuple[str, ...] = ()  # as for `--set`
    reward_model: tuple[str, ...] = ()


SPECS = {
    "reviews": WorldSpec(CorpusSizes(train_texts=9_600, pairs=4_000)),
    "reviews-small": WorldSpec(
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


def make_world(spec: WorldSpec, folder: Path) -> None:
    """Write a world into a folder, in place of what is there."""
    with tempfile.TemporaryDirectory() as temporary:
        made, policy, reward = (Path(temporary) / name for name in ("made", "sft", "reward-model"))
        made.mkdir()
        for name, rows in corpus_rows(spec).items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (made / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
        data = {path.name.removesuffix(".jsonl.gz"): path for path in made.iterdir()}
        texts = {"data.texts": data["train"], "data.eval_texts": data["heldout"]}
        pairs = {"data.pairs": data["pairs"], "data.eval_pairs": data["heldout_pairs"]}
        _train("sft", "sft_reviews.yaml", texts, spec.sft, policy)
        start = {"policy.model": policy / "final"}
        _train("reward-model", "reward_reviews.yaml", start | pairs, spec.reward_model, reward)
        ship(policy / "final", made / "policy")
        ship(reward / "final", made / "reward")
        final = _read_json(reward / "summary.json")["final"]
        figures = {key: value for key, value in final.items() if key.startswith("eval/")}
        _write_json(made / "reward" / "summary.json", {"final": figures})  # `doctor` reads the accuracy
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)


def corpus_rows(spec: WorldSpec) -> dict[str, list[dict[str, str]]]:
    """The rows of each data file of a world, by its name without ".jsonl.gz"."""
    corpus = write_corpus(spec.seed, spec.sizes)

    def pairs(found: Sequence[Pair]) -> list[dict[str, str]]:  # a response starts with the space after its prompt
        return [{"prompt": p.prompt, "chosen": f" {p.chosen}", "rejected": f" {p.rejected}"} for p in found]

    def prompts(found: Sequence[str]) -> list[dict[str, str]]:
        return [{"prompt": text, "known_for": known_for(text)} for text in found]

    return {
        "train": [{"text": text} for text in corpus.train_texts],
        "heldout": [{"text": text} for text in corpus.heldout_texts],
        "prompts": prompts(corpus.prompts),
        "heldout_prompts": prompts(corpus.heldout_prompts),
        "pairs": pairs(corpus.pairs),
        "heldout_pairs": pairs(corpus.heldout_pairs),
    }


def _train(command: str, config: str, files: Mapping[str, Path], settings: tuple[str, ...], folder: Path) -> None:
    """`rlhf-kl sft` or `reward-model` into a run folder, on one thread of the CPU."""
    values = ["run.device=cpu", *(f"{key}={file}" for key, file in files.items()), *settings]
    words = [command, "--config", config, *(word for value in values for word in ("--set", value))]
    line = [sys.executable, "-m", "rlhf_kl", *words, "--output-dir", str(folder), "--quiet"]
    subprocess.run(line, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def ship(model: Path, folder: Path) -> None:
    """A model's folder for plain transformers with its weights rounded to bfloat16."""
    folder.mkdir()
    weights = load_file(model / "model.safetensors")
    rounded = {name: w.to(torch.bfloat16) if w.is_floating_point() else w for name, w in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", _read_json(model / "config.json") | {"dtype": "bfloat16"})
    tokenizer = _read_json(model / "tokenizer_config.json")
    _write_json(folder / "tokenizer_config.json", {k: v for k, v in tokenizer.items() if k not in WHERE_IT_WAS})
    text = json.dumps(_read_json(model / "tokenizer.json"), ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")  # half of its size was white space
    if (model / "generation_config.json").exists():  # a classifier does not generate
        shutil.copy(model / "generation_config.json", folder)


def _read_json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Make the worlds that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SPECS, action="append", help="this world; without it, all are made")
    parser.add_argument("--into", type=Path, default=FILES, help="a folder for each world lies in it")
    args = parser.parse_args()
    for name in args.only or SPECS:
        make_world(SPECS[name], args.into / name)
        size = sum(file.stat().st_size for file in (args.into / name).rglob("*") if file.is_file())
        print(f"{args.into / name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
