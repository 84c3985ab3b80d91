from __future__ import annotations

import json
import re
from pathlib import Path

import make_world
import pytest
import torch
from review_corpus import CorpusSizes
from safetensors.torch import load_file

from rlhf_kl.builtin.world import FILES, GOLD, WORLDS, world_file
from rlhf_kl.config.schema import SFTConfig, TrainConfig
from rlhf_kl.data.files import read_rows
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.perplexity import perplexity_of, text_sums
from rlhf_kl.models.pretrained import load_causal_lm, load_reward_model, load_tokenizer
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.training.world_files import with_files

SMALL = "builtin:reviews-small"
DATA = ("train", "heldout", "prompts", "heldout_prompts", "pairs", "heldout_pairs")
SIZES = CorpusSizes(train_texts=300, heldout_texts=20, prompts=20, heldout_prompts=10, pairs=40, heldout_pairs=20)
SFT = ("policy.architecture={hidden_size: 16, layers: 1, heads: 1, vocab_size: 300}", "sft.epochs=0.2")


def part(name: str, world: str = SMALL) -> Path:
    return Path(world_file(world, name))


def form(folder: Path) -> dict[str, list[str]]:
    """What a world's files hold, whatever their figures: by file its columns, tensors with their types, or keys."""
    found = dict[str, list[str]]()
    for path in sorted(folder.rglob("*.*")):
        if path.name.endswith(".jsonl.gz"):
            inside = sorted({column for row in read_rows(path) for column in row})
        elif path.suffix == ".safetensors":
            inside = sorted({re.sub(r"\d+", "N", name) + f" {w.dtype}" for name, w in load_file(path).items()})
        else:
            inside = sorted(json.loads(path.read_text(encoding="utf-8")))
        found[path.relative_to(folder).as_posix()] = inside
    return found


@pytest.mark.slow
def test_the_script_makes_files_of_the_form_of_those_that_are_shipped(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    (folder / "old").mkdir(parents=True)
    spec = make_world.WorldSpec(SIZES, sft=SFT, reward_model=("reward_model.epochs=0.5",))
    make_world.make_world(spec, folder)
    assert form(folder) == form(FILES / "reviews-small")
    assert not (folder / "old").exists()
    tokenizer = load_tokenizer(str(folder / "policy"))
    assert load_causal_lm(str(folder / "policy")).config.vocab_size == len(tokenizer) <= 300
    assert json.loads((folder / "reward" / "summary.json").read_text())["final"]["eval/accuracy"] > 0
    reward = RewardModel(load_reward_model(str(folder / "reward")), load_tokenizer(str(folder / "reward")))
    row = read_rows(folder / "pairs.jsonl.gz")[0]
    assert reward.score([row["prompt"]], [row["chosen"]]).isfinite().all()


def test_the_worlds_are_shipped_as_small_files_in_bfloat16() -> None:
    assert {path.name for path in FILES.iterdir()} == {*WORLDS} == {*make_world.SPECS}
    assert sum(path.stat().st_size for path in FILES.rglob("*.*")) < 5e6
    assert form(FILES / "reviews") == form(FILES / "reviews-small")
    for model in FILES.rglob("*.safetensors"):
        assert {w.dtype for w in load_file(model).values()} == {torch.bfloat16}


@pytest.mark.parametrize("world", WORLDS)
def test_the_shipped_rows_are_those_that_the_script_writes(world: str) -> None:
    """In another process and on another machine: the files were written there."""
    written = make_world.corpus_rows(make_world.SPECS[world])
    assert {*written} == {*DATA}
    for name, rows in written.items():
        assert read_rows(part(name, f"builtin:{world}")) == rows, name


def test_the_small_world_can_be_learned_from() -> None:
    """What every other test of a run relies on."""
    policy, reward = (str(part(name)) for name in ("policy", "reward"))
    texts = [row["text"] for row in read_rows(part("heldout"))]
    figures = perplexity_of([text_sums(LM(load_causal_lm(policy), torch.float32), load_tokenizer(policy), texts)])
    assert figures.perplexity < 10
    rows = read_rows(part("heldout_pairs"))
    score = RewardModel(load_reward_model(reward), load_tokenizer(reward)).score
    chosen, rejected = (
        score([row["prompt"] for row in rows], [row[key] for row in rows]) for key in ("chosen", "rejected")
    )
    accuracy = (chosen > rejected).float().mean().item()
    assert accuracy > 0.6
    stored = json.loads((Path(reward) / "summary.json").read_text(encoding="utf-8"))["final"]["eval/accuracy"]
    assert accuracy == pytest.approx(stored, abs=0.02)  # before the weights were rounded


def test_each_key_gets_its_own_part() -> None:
    sft = with_files(SFTConfig.model_validate({"data": {"texts": SMALL}}))
    assert [sft.data.texts, sft.data.eval_texts] == [str(part("train")), str(part("heldout"))]
    assert sft.policy.model is None
    written = {"policy": {"model": "/own", "value": "head"}, "reward": {"kind": "mine.py:score"}}
    written |= {"data": {"prompts": SMALL}, "eval": {"texts": "t.txt"}}
    config = TrainConfig.model_validate(written)
    files = with_files(config)
    assert (files.policy, files.eval.texts) == (config.policy, "t.txt")
    assert [files.data.prompts, files.eval.prompts] == [str(part("prompts")), str(part("heldout_prompts"))]
    assert files.eval.watched["gold"].kind == GOLD
    assert with_files(files) == files
    assert with_files(config, ("policy", "reference")) == config
    terms = {"a": {"kind": "model", "model": SMALL}, "b": {"kind": "mine.py:score"}}
    written |= {"eval": {"texts": "t.txt", "scorers": terms | {"gold": None}}}
    summed = with_files(TrainConfig.model_validate(written | {"reward": {"kind": "sum", "terms": terms}}))
    for scorers in (summed.reward.terms, summed.eval.watched):
        assert scorers is not None
        assert {name: scorer.model for name, scorer in scorers.items()} == {"a": str(part("reward")), "b": None}


def test_a_world_that_there_is_not_is_named() -> None:
    with pytest.raises(InputError, match="builtin:reviews-smal"):
        world_file("builtin:reviews-smal", "policy")
