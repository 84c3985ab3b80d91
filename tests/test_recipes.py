"""The shipped recipes, as far as they can be tried without a network and a GPU.

Every step runs on a data set of the same columns and splits, with a random model of the same architecture.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_control import REAL, STORIES, from_files

from rlhf_kl.config.paths import shipped_configs
from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.variants import load_compare
from rlhf_kl.data.rows import read_texts
from rlhf_kl.models.pretrained import save_model
from rlhf_kl.models.scratch import train_tokenizer
from rlhf_kl.plugins import load_attribute
from rlhf_kl.training import sets
from tests.conftest import REPOSITORY

Cli = Callable[..., Any]
WORDS = "the film was good bad long funny and a story of one dog who ran far away home again".split()  # noqa: SIM905
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 160}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-community/gpt2": ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 160}),
    "EleutherAI/pythia-160m": ("gpt_neox", {**SIZES, "intermediate_size": 32}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llama", {**SIZES, "intermediate_size": 32}),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1}),
}
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def sentence(number: int) -> str:
    """Words that differ from number to number."""
    return (
        " ".join(WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(6 + number % 7)) + f" {number}."
    )


def turns(number: int, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": sentence(number)}, {"role": "assistant", "content": answer}]


# The columns and splits of each data set, as its page describes them.
DATA: dict[str, tuple[tuple[str, ...], Callable[[int], dict[str, Any]]]] = {
    "stanfordnlp/imdb": (("train", "test"), lambda n: {"text": sentence(n), "label": n % 2}),
    "trl-lib/tldr": (
        ("train", "validation", "test"),
        lambda n: {"prompt": f"SUBREDDIT: r/x\n\nPOST: {sentence(n)}\n\nTL;DR:", "completion": f" {sentence(n + 1)}"},
    ),
    "trl-lib/tldr-preference": (
        ("train", "validation"),
        lambda n: {"prompt": f"POST: {sentence(n)}\n\nTL;DR:", "chosen": f" {sentence(n + 1)}", "rejected": " bad"},
    ),
    "trl-lib/ultrafeedback_binarized": (
        ("train", "test"),
        lambda n: {"chosen": turns(n, sentence(n + 1)), "rejected": turns(n, "bad"), "score_chosen": 9.0},
    ),
    "Salesforce/wikitext:wikitext-2-raw-v1": (("train", "test"), lambda n: {"text": sentence(n) if n % 3 else ""}),
}
RECIPES = ("sentiment", "tldr", "chat")
LESS = {
    "sft": ["sft.batch_size=16", "sft.microbatch_size=8"],
    "reward-model": ["reward_model.batch_size=16", "reward_model.microbatch_size=8"],
    "train": [
        *("rollout.batch_size=8", "rollout.max_new_tokens=6", "rollout.reference_samples=32"),
        *("ppo.total_episodes=16", "ppo.epochs=1", "ppo.minibatch_size=8", "ppo.microbatch_size=8"),
        *("eval.max_documents=10", "tracking.tensorboard=false"),
    ],
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for every name of the hub that a recipe mentions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    place = tmp_path_factory.mktemp("hub")
    folders = {}
    for name, (splits, row) in DATA.items():
        folder = place / name.replace("/", "--").replace(":", "--")
        folder.mkdir()
        for i, split in enumerate(splits):
            rows = [json.dumps(row(1000 * i + n)) + "\n" for n in range(60)]
            (folder / f"{split}.jsonl").write_text("".join(rows))
        folders[name] = str(folder)
    tokenizer = train_tokenizer([sentence(n) for n in range(200)], 300, 160)
    tokenizer.chat_template = CHAT
    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(0)
        special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **special, **sizes)
        save_model(AutoModelForCausalLM.from_config(config), tokenizer, place / name.replace("/", "--"))
        folders[name] = str(place / name.replace("/", "--"))
    return folders


def rewritten(value: Any, folders: dict[str, str]) -> Any:
    """The recipe with folders in place of hub ids, splits without the ranges that need the whole data set."""
    if isinstance(value, dict):
        return {
            k: rewritten(v.partition("[")[0] if "split" in k and isinstance(v, str) else v, folders)
            for k, v in value.items()
        }
    return folders.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_step_of_a_recipe_runs(
    recipe: str, stand_ins: dict[str, str], rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # runs/ is here
    for step, command in (("sft", "sft"), ("reward", "reward-model"), ("ppo", "train")):
        name = f"{recipe}_{step}"
        raw = yaml.safe_load((shipped_configs() / f"{name}.yaml").read_text())
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(rewritten(raw, stand_ins)))
        changes = [*LESS[command], "run.dtype=float32", "run.device=cpu"]
        sets = [argument for change in changes for argument in ("--set", change)]
        merge = ("--merge",) if (recipe, command) == ("chat", "train") else ()
        outcome = rlhf_kl(command, "--config", f"{name}.yaml", "--quiet", *sets, *merge)
        assert outcome.code == 0, (name, outcome.err)
        assert (tmp_path / "runs" / name / "summary.json").is_file()
    chat = recipe == "chat"
    assert (tmp_path / "runs" / f"{recipe}_ppo" / "merged").is_dir() == chat
    reward = json.loads((tmp_path / "runs" / f"{recipe}_reward" / "final" / "config.json").read_text())
    assert reward["rlhf_kl_format"] == {"chat": chat, "append_eos": True, "pair": False}


def test_the_run_of_a_real_model_on_a_laptop(
    stand_ins: dict[str, str], rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the files that it ships with; its model may lie in the working directory, under its name on the hub."""
    monkeypatch.chdir(tmp_path)
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    shutil.copytree(stand_ins[name], tmp_path / name)
    changes = *LESS["train"], "rollout.temperature=1"  # random weights write hardly any word that VADER knows
    sets = [argument for change in changes for argument in ("--set", change)]
    assert rlhf_kl("train", "--config", "smollm2_sentiment.yaml", "--quiet", *sets).code == 0
    variants = [run.config for run in load_compare("sweep_smollm2.yaml", []).runs]
    assert {Path(config.reward.kind.rpartition(":")[0]).is_file() for config in variants} == {True}
    config = load_config("train", "smollm2_sentiment.yaml")
    assert (config.updates, config.policy.model) == (12, str(tmp_path / name))
    rows = Path(config.data.prompts).read_text().splitlines()
    assert len(set(rows)) == len(rows) > 100
    place = shipped_configs() / "smollm2" / "vader.py"
    score, short = (load_attribute(f"{place}:{kind}") for kind in ("compound", "short"))
    assert score([""] * 3, ["I love it.", "It is a door.", "This is awful."]) == [0.6369, 0.0, -0.4588]
    assert short([""] * 4, ["I love it.", "I love it", "", "a " * 13 + "."]) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_as_shipped_is_valid_and_names_nothing_else(recipe: str) -> None:
    for step, kind in (("sft", "sft"), ("reward", "reward-model"), ("ppo", "train")):
        file = f"{recipe}_{step}.yaml"
        load_config(kind, file)
        text = (shipped_configs() / file).read_text()
        assert f"--config {file}" in text  # the command that uses it
        raw = yaml.safe_load(text)
        named = [
            v for section in raw.values() if isinstance(section, dict) for v in section.values() if isinstance(v, str)
        ]
        hub = {value for value in named if "/" in value and not value.startswith("runs/")}
        assert hub <= DATA.keys() | MODELS.keys()
    ppo = load_config("train", f"{recipe}_ppo.yaml")
    assert ppo.policy.model == f"runs/{recipe}_sft/final"
    assert ppo.reward.model == f"runs/{recipe}_reward/final"


def test_the_plants_of_tinystories_are_read_from_files(tmp_path: Path) -> None:
    """In place of the hub's data set, whose split for validation no file has: 27 runs once failed in an hour."""
    file = tmp_path / STORIES
    file.parent.mkdir(parents=True)
    (tmp_path / REAL["policy.model"]).mkdir(parents=True)
    file.write_text("".join(f'{{"text": "story {i}"}}\n' for i in range(3)), encoding="utf-8")
    config = load_config("train", str(REPOSITORY / "scripts" / "tinystories.yaml"), from_files(tmp_path))
    held, read = config.eval, partial(read_texts, column="text")
    assert len(sets.load("eval.texts", held.texts, held.split, read, beside=config.data.prompts)) == 3
