from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.builtin.corpus import CorpusSizes
from rlhf_kl.builtin.world import WORLDS, WorldSpec
from rlhf_kl.config.schema import SFTConfig, TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.train.world_files import GOLD, World, with_files

SIZES = CorpusSizes(train_texts=300, heldout_texts=20, prompts=20, heldout_prompts=10, pairs=40, heldout_pairs=20)
SFT = ("policy.architecture={hidden_size: 16, layers: 1, heads: 1, vocab_size: 300}", "sft.epochs=0.2")
TINY = WorldSpec("tiny", SIZES, sft=SFT, reward_model=("reward_model.epochs=0.5",))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(WORLDS, "tiny", TINY)
    return tmp_path / "cache"


def tiny() -> World:
    return World("builtin:tiny")


def files(folder: Path) -> dict[str, bytes]:
    """Everything that does not say when it was made."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "summary.json"}


def test_a_world_is_whole_deterministic_and_built_once(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tiny()
    parts = [world.corpus(), world.policy(), world.reward_model()]
    assert all(part.is_relative_to(own_cache) for part in parts)
    for part in parts[1:]:
        assert {"model.safetensors", "config.json", "tokenizer.json", "summary.json"} <= set(os.listdir(part))
    assert not list(world.folder.glob("*.tmp"))
    again = tiny()
    monkeypatch.setattr(World, "_train", None)  # not built twice
    assert [again.corpus(), again.policy(), again.reward_model()] == parts
    monkeypatch.undo()
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "other"))
    monkeypatch.setitem(WORLDS, "tiny", TINY)
    other = tiny()
    for part, twin in zip(parts, (other.corpus(), other.policy(), other.reward_model()), strict=True):
        assert part.name == twin.name
        assert files(part) == files(twin)


def test_a_build_that_breaks_leaves_nothing_and_the_next_one_works(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tiny()
    world.corpus()

    def breaks(_task: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlhf_kl.train.tasks.TextTask.save", breaks)
        with pytest.raises(KeyboardInterrupt):
            world.policy()
    assert not [path for path in world.folder.iterdir() if path.name.startswith("policy-")]
    assert (tiny().policy() / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_one_line(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="RLHF_KL_CACHE") as caught:
        tiny().corpus()
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: ")


def test_other_settings_are_another_part(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tiny().corpus()
    monkeypatch.setitem(WORLDS, "tiny", replace(TINY, seed=1))
    second = tiny().corpus()
    assert first.name != second.name
    assert (first / "train.jsonl").read_bytes() != (second / "train.jsonl").read_bytes()


def test_two_builds_at_once_leave_one_whole_part(tmp_path: Path) -> None:
    code = "from rlhf_kl.train.world_files import World\nprint(World('builtin:reviews-small').corpus())"
    environment = os.environ | {"RLHF_KL_CACHE": str(tmp_path / "cache")}
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
        for _ in range(2)
    ]
    places = {process.communicate(timeout=120)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (place,) = places
    assert len(read_jsonl(Path(place) / "train.jsonl")) == 3000
    visible = [path.name for path in Path(place).parent.iterdir() if not path.name.endswith(".lock")]
    assert visible == [Path(place).name]


def test_each_key_gets_its_own_part(own_cache: Path) -> None:
    sft = with_files(SFTConfig.model_validate({"data": {"texts": "builtin:tiny"}}))
    assert [Path(file or "").name for file in (sft.data.texts, sft.data.eval_texts)] == ["train.jsonl", "heldout.jsonl"]
    assert sft.policy.model is None
    written = {"policy": {"model": "/own", "value": "head"}, "reward": {"kind": "mine.py:score"}}
    written |= {"data": {"prompts": "builtin:tiny"}, "eval": {"texts": "t.txt"}}
    config = TrainConfig.model_validate(written)
    files = with_files(config)
    assert (files.policy, files.eval.texts) == (config.policy, "t.txt")
    assert Path(files.data.prompts).name == "prompts.jsonl"
    assert Path(files.eval.prompts or "").name == "heldout_prompts.jsonl"
    assert files.reward.gold == GOLD
    assert with_files(files) == files
    assert with_files(config, ("policy", "reference")) == config  # the others are not built
    assert [path.name for path in (own_cache / "tiny").iterdir() if path.is_dir()] == [tiny().corpus().name]
    terms = {"a": {"kind": "model", "model": "builtin:tiny"}, "b": {"kind": "mine.py:score"}}
    summed = TrainConfig.model_validate(written | {"reward": {"kind": "sum", "terms": terms, "gold": "mine.py:score"}})
    reward = with_files(summed).reward
    assert reward.terms is not None
    assert (reward.terms["a"].model, reward.terms["b"].model) == (str(tiny().reward_model()), None)
    assert reward.gold == "mine.py:score"


def test_the_small_world_can_be_learned_from(small_world: World) -> None:
    """What every other test of a run relies on."""
    policy, reward = (
        json.loads((part / "summary.json").read_text())["final"]
        for part in (small_world.policy(), small_world.reward_model())
    )
    assert policy["eval/perplexity"] < 10
    assert reward["eval/accuracy"] > 0.6
