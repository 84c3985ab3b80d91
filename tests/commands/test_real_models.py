"""A checkpoint that stores its tied weights under the head's name alone, against the same one saved again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_kl.run.log import read_jsonl

pytestmark = pytest.mark.slow

COMMON: dict[str, Any] = {
    "run": {"device": "cpu"},
    "checkpoint": {"every": 100},
    "tracking": {"tensorboard": False},
}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def test_as_shipped_and_saved_again_train_the_same(
    real_data: Path, rlhf_kl: Callable[..., Any], tmp_path: Path
) -> None:
    stories = real_data / "data" / "tinystories-1000"
    sentiment = str(real_data / "data" / "sst2" / "glue_dev.jsonl")
    steps = {"batch_size": 16, "microbatch_size": 16}

    def run(command: str, name: str, settings: dict[str, Any]) -> Path:
        (tmp_path / f"{command}.yaml").write_text(yaml.safe_dump(COMMON | settings))
        folder = tmp_path / name / command
        options = ("--config", tmp_path / f"{command}.yaml", "--output-dir", folder, "--quiet")
        outcome = rlhf_kl(command, *options)
        assert outcome.code == 0, outcome.err
        return folder

    def everything(name: str) -> dict[str, Path]:
        policy = {"model": str(real_data / "models" / name)}
        reward = run(
            "reward-model",
            name,
            {"policy": policy, "data": {"labels": sentiment}, "reward_model": {**steps, "epochs": 0.2}},
        )
        texts = {"texts": str(stories / "stories.jsonl"), "max_documents": 60}
        tuned = run("sft", name, {"policy": policy, "data": texts, "sft": {**steps, "epochs": 1.0}})
        trained = run(
            "train",
            name,
            {
                "policy": policy,
                "reward": {"model": str(reward / "final")},
                "data": {"prompts": str(stories / "prompts_first_sentence.jsonl"), "template": "{prompt} "},
                "rollout": {"batch_size": 16, "max_new_tokens": 16, "reference_samples": 32},
                "ppo": {"total_episodes": 48, "minibatch_size": 16},
                "eval": {"texts": str(stories / "stories.jsonl"), "max_documents": 5},
            },
        )
        return {"reward-model": reward, "sft": tuned, "train": trained}

    shipped, resaved = everything("TinyStories-656K"), everything("TinyStories-656K-resaved")
    for command, folder in shipped.items():
        assert rows(folder) == rows(resaved[command]), command
        one, other = (load_file(run / "final" / "model.safetensors") for run in (folder, resaved[command]))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), command
