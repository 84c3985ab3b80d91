"""The targets that take GPUS=: what they would run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = "-m accelerate.commands.launch --multi_gpu --num_processes 4 -m rlhf_kl"


def printed(*words: str) -> list[str]:
    """The command lines of rlhf-kl that a target would run."""
    command = ["make", "-n", *words, f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [" ".join(line.split()[1:]) for line in done.stdout.splitlines() if "rlhf_kl" in line]


@pytest.mark.parametrize("gpus", [[], ["GPUS="], ["GPUS=1"]])
def test_one_process_needs_no_launcher(gpus: list[str]) -> None:
    assert printed("train", *gpus) == ["-m rlhf_kl train --config ppo_adaptive.yaml --resume"]


@pytest.mark.parametrize("name", ["sentiment", "tldr", "chat"])
def test_a_recipe_trains_on_all_gpus(name: str) -> None:
    assert printed(f"gpu-{name}", "GPUS=4") == [
        f"{LAUNCHER} sft --config {name}_sft.yaml --resume",
        f"{LAUNCHER} reward-model --config {name}_reward.yaml --resume",
        f"-m rlhf_kl doctor --config {name}_ppo.yaml --processes 4",
        f"{LAUNCHER} train --config {name}_ppo.yaml --resume",
    ]
    assert all("accelerate" not in line for line in printed(f"gpu-{name}"))
