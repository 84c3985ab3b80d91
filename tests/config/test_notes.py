"""What is said at the start of a run about settings that work."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.config.notes import gradient_notes, start_notes, unused_notes
from rlhf_kl.config.schema import TrainConfig


def notes(**kl: Any) -> list[str]:
    return gradient_notes(TrainConfig.model_validate({"kl": kl}))


def test_choices_that_are_no_kl_gradient_are_said_once() -> None:
    assert notes() == []
    assert notes(placement="rao_blackwell", estimator="exact") == []
    assert notes(placement="loss", estimator="k2") == []
    assert notes(placement="loss", estimator="exact") == []
    for kl in (
        {"estimator": "k3"},
        {"estimator": "k2"},
        {"placement": "reward", "estimator": "exact"},
        {"estimator": "importance"},
        {"placement": "loss", "estimator": "k1"},
        {"placement": "loss", "estimator": "k3"},
    ):
        (note,) = notes(**kl)
        assert kl["estimator"] in note
        assert notes(**kl, controller={"kind": "fixed", "coef": 0.0}) == []


@pytest.mark.parametrize(
    ("value", "ppo", "unused"),
    [
        ("features", {}, []),
        ("features", {"vf_coef": 0.5, "critic_epochs": 2}, ["vf_coef"]),
        ("features", {"cliprange_value": 0.5}, ["cliprange_value"]),
        ("head", {"vf_coef": 0.5}, []),
        ("separate", {"critic_epochs": 2, "critic_learning_rate": 0.1}, ["critic_epochs", "critic_learning_rate"]),
    ],
)
def test_a_setting_of_another_value_function_is_said_to_be_unused(
    value: str, ppo: dict[str, Any], unused: list[str]
) -> None:
    notes = unused_notes(TrainConfig.model_validate({"policy": {"value": value}, "ppo": ppo}))
    assert [note.split(" ")[0] for note in notes] == [f"ppo.{name}" for name in unused]
    assert all(note.endswith(value) for note in notes)


def test_a_key_of_grpo_beside_another_advantage_is_said() -> None:
    config = TrainConfig.model_validate({"ppo": {"scale_by_group_std": False}})
    assert unused_notes(config) == ["ppo.scale_by_group_std is not used: ppo.advantage is gae"]


def test_a_run_says_all_of_them() -> None:
    config = TrainConfig.model_validate({"kl": {"estimator": "importance"}, "ppo": {"vf_coef": 0.5}})
    assert [note.partition(" ")[0] for note in start_notes(config)] == ["kl-gradient:", "ppo.vf_coef"]
    assert start_notes(TrainConfig()) == []


def test_parts_of_the_built_in_world_beside_another_policy() -> None:
    own = {
        "policy": {"model": "owner/mine"},
        "reward": {"model": "owner/classifier"},
        "data": {"prompts": "p.txt"},
        "eval": {"texts": "builtin:reviews"},
    }
    (note,) = start_notes(TrainConfig.model_validate(own))
    assert note.startswith("eval.texts builtin:reviews")
    assert start_notes(TrainConfig.model_validate(own | {"eval": {"texts": "t.txt"}})) == []
    assert start_notes(TrainConfig.model_validate({})) == []
