from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_kl.commands.sources import Sources, split_heldout
from rlhf_kl.config.schema import RewardSection
from rlhf_kl.errors import InputError
from rlhf_kl.reward_functions import RewardModel
from rlhf_kl.tracking.display import TrainingDisplay
from rlhf_kl.trainers.reward_model import Pair

if TYPE_CHECKING:
    from rlhf_kl.commands.world import World

SMALL = "builtin:reviews-small"


@pytest.fixture
def sources() -> Sources:
    return Sources(TrainingDisplay(quiet=True))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_built_in_world_stands_behind_its_name(sources: Sources, small_world: World) -> None:
    assert sources.policy(SMALL) == str(small_world.policy())
    train, kept = sources.prompts(SMALL, "any", None)
    assert len(train) == 400
    assert len(kept) == 64
    assert not set(train) & set(kept)
    assert len(sources.texts(SMALL, "any", "data.texts", heldout=True)) == 60
    assert len(sources.texts(SMALL, "any", "data.texts", heldout=True, limit=7)) == 7
    assert len(sources.texts(SMALL, "any", "data.texts", heldout=False)) == 3000
    reward = sources.reward(RewardSection(model=SMALL))
    assert isinstance(reward, RewardModel)
    assert len(reward(train[:2], [" good", " bad"])) == 2


def test_an_unknown_world_names_the_nearest(sources: Sources) -> None:
    with pytest.raises(InputError, match="builtin:reviews"):
        sources.policy("builtin:review")


def test_of_a_file_one_prompt_in_twenty_is_kept_apart_and_none_leaks(sources: Sources, tmp_path: Path) -> None:
    rows = [{"q": f"prompt {i % 40}"} for i in range(100)]  # each of 40 two or three times
    train, kept = sources.prompts(jsonl(tmp_path / "p.jsonl", rows), "q", None)
    assert len(kept) == 2
    assert not set(train) & set(kept)
    assert set(train) | set(kept) == {row["q"] for row in rows}


def test_few_prompts_serve_for_both(sources: Sources, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"q": "one"}, {"q": "two"}])
    assert sources.prompts(path, "q", None) == (["one", "two"], ["one", "two"])


def test_held_out_prompts_that_are_named_win(sources: Sources, tmp_path: Path) -> None:
    train = jsonl(tmp_path / "p.jsonl", [{"q": f"{i}"} for i in range(40)])
    own = jsonl(tmp_path / "h.jsonl", [{"q": "mine"}])
    assert sources.prompts(train, "q", own)[1] == ["mine"]


def test_pairs_of_a_file(sources: Sources, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"p": "a", "good": "b", "bad": "c"}])
    names = ("p", "good", "bad")
    assert sources.pairs(path, names, "data.pairs", heldout=False) == [Pair("a", "b", "c")]


def test_one_row_in_twenty_is_held_out() -> None:
    train, kept = split_heldout(list(range(1, 61)), "data.texts: x")
    assert kept == [20, 40, 60]
    assert sorted(train + kept) == list(range(1, 61))
    with pytest.raises(InputError, match="19 rows are too few"):
        split_heldout(list(range(19)), "data.texts: x")


def test_gold_comes_with_a_built_in_world_only(sources: Sources, tiny_data: Any) -> None:
    assert sources.gold(RewardSection(), SMALL) is not None
    own = RewardSection(kind=tiny_data.reward)
    assert sources.gold(own, "/some/folder") is None
    chosen = RewardSection(kind=tiny_data.reward, gold=tiny_data.reward)
    gold = sources.gold(chosen, "/some/folder")
    assert gold is not None
    assert gold(["x"], ["aa"]) == [0.25]


def test_a_reward_function_with_its_options(sources: Sources, tiny_data: Any) -> None:
    section = RewardSection.model_validate({"kind": tiny_data.reward, "letter": "b"})
    assert sources.reward(section)(["x"], ["abb"]) == [0.25]
