"""The commands on a device that only says it is one: no tensor stays behind, and the host seldom waits for it."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.run.log import read_jsonl

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the fake device, and there is none here"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA of its own, not a fake device"),
]
HERE = Path(__file__).parent
SMOKE, ON_GPU = ["--config", "smoke.yaml"], ["--set", "run.device=cuda"]
IN_BFLOAT16 = [*ON_GPU, "--set", "run.dtype=bfloat16"]
SMALL = "{hidden_size: 32, layers: 1, heads: 2, context: 128, vocab_size: 512}"
TEXTS = ["data.texts=builtin:reviews-small", "data.max_documents=200", f"policy.architecture={SMALL}", "sft.epochs=0.3"]
PAIRS = ["policy.model=builtin:reviews-small", "data.pairs=builtin:reviews-small", "reward_model.epochs=0.02"]
ADAPTER = ["policy.lora={}", "policy.value=separate", "policy.gradient_checkpointing=true"]
GROUPS = ["ppo.advantage=grpo", "rollout.samples_per_prompt=4", "reward.model=reward-model/final"]
HEAD = ["policy.value=head", "kl.target=0.001", "kl.ceiling.value=0.002", "ppo.learning_rate=0.005"]


def settings(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


COMMANDS = {
    "train": ["train", *SMOKE, *IN_BFLOAT16, "--output-dir", "train"],
    "eval": ["eval", "--run", "train"],
    "eval-model": ["eval", "--model", "train/final", "--texts", "builtin:reviews-small"],
    "generate": ["generate", "--run", "train", "--prompt", "The film", "--with-reference", "--scores"],
    "generate-long": ["generate", "--run", "train", "--prompt", "The", "--samples", "8", "--max-new-tokens", "64"],
    "doctor": ["doctor", *SMOKE, *IN_BFLOAT16],
    "sft": ["sft", "--config", "sft_reviews.yaml", *IN_BFLOAT16, *settings(TEXTS), "--output-dir", "sft"],
    "reward-model": [
        *("reward-model", "--config", "reward_reviews.yaml", "--output-dir", "reward-model"),
        *(*IN_BFLOAT16, *settings(PAIRS)),
    ],
    "train-adapter": ["train", *SMOKE, *IN_BFLOAT16, *settings(ADAPTER), "--output-dir", "adapter"],
    "train-groups": ["train", *SMOKE, *ON_GPU, *settings(GROUPS), "--output-dir", "groups"],
    "train-head": ["train", *SMOKE, *ON_GPU, *settings([*HEAD, "run.dtype=auto"]), "--output-dir", "head"],
}
DECODE = [name for name in COMMANDS if name not in ("sft", "reward-model", "eval-model")]


SCRIPTS = HERE.parents[1] / "scripts"
MAKE = """
import sys, pathlib, count_operations
count_operations.command(pathlib.Path(sys.argv[1]), int(sys.argv[2]), 1)
"""
LAYERS = (1, 2)  # what each further layer asks of a device is the same


def scripts_counter() -> Any:
    """`scripts/count_operations.py`, a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        return importlib.import_module("count_operations")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each command did, all of them in one process; and how much memory goes back that the process then frees."""
    folder, counter = tmp_path_factory.mktemp("fake"), scripts_counter()
    for layers in LAYERS:  # in a process of its own: what ran before here cannot change its weights
        subprocess.run([sys.executable, "-c", MAKE, str(folder), str(layers)], cwd=SCRIPTS, check=True)
    commands = COMMANDS | {f"{layers}-layers": counter.command(folder, layers, 1) for layers in LAYERS}
    result = counter.run_there(folder, list(commands.values()))
    found = dict(zip(commands, result["commands"], strict=True))
    for layers in LAYERS:
        assert found[f"{layers}-layers"]["code"] == 0, found[f"{layers}-layers"]["output"]
        found[f"{layers}-layers"] = counter.counts(found[f"{layers}-layers"])
    return found | {"returned_mib": result["returned_mib"], "folder": folder}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_well(outcomes: dict[str, Any], name: str) -> None:
    assert outcomes[name]["code"] == 0, outcomes[name]["output"]


@pytest.mark.parametrize("name", DECODE)
def test_decoding_waits_for_the_device_at_one_step_of_eight(outcomes: dict[str, Any], name: str) -> None:
    steps, waits = outcomes[name]["steps"], outcomes[name]["between"]
    assert steps > 10
    assert waits <= steps / 8, outcomes[name]["places"]


@pytest.mark.parametrize(("column", "most"), [("operations", 9000), ("with parts", 10400), ("kernels", 4000)])
def test_an_update_of_thirty_layers_asks_for_few_operations_beside_sampling(
    outcomes: dict[str, Any], column: str, most: int
) -> None:
    one, two = (outcomes[f"{layers}-layers"]["outside of sampling"][column] for layers in LAYERS)
    assert 0 < one < one + 29 * (two - one) <= most, outcomes["2-layers"]


def test_the_host_seldom_waits_in_an_update(outcomes: dict[str, Any]) -> None:
    one, two = outcomes["1-layers"], outcomes["2-layers"]
    waits = {name: row["waits"] for name, row in two.items()}
    assert waits == {name: row["waits"] for name, row in one.items()}  # however many layers there are
    assert 3 <= waits["sampling"] <= 6, waits  # 24 tokens, of which every eighth is a look at what has ended
    assert waits["outside of sampling"] <= 9, waits
    assert waits["training passes"] <= 1, waits


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float16(outcomes: dict[str, Any]) -> None:
    run = outcomes["folder"] / "head"
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["dtype"] == "float16"
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "policy/loss_scale" in row]
    assert rows
    assert all(row["policy/overflows"] == 0 for row in rows)
    places = outcomes["train-head"]["places"]
    waits = sum(count for place, count in places.items() if " at gradients.py" in place)
    assert waits <= 2 * len(rows) + 1, places  # one an update, one a checkpoint, one at the start


def test_the_tokens_of_many_responses_are_read_at_once(outcomes: dict[str, Any]) -> None:
    """`eval` shows every response: 64 of each model, with four figures for a token."""
    places = outcomes["eval"]["places"]
    assert sum(count for place, count in places.items() if " at ppo/evaluate.py" in place) < 128, places


def test_memory_that_was_freed_beside_a_gpu_goes_back(outcomes: dict[str, Any]) -> None:
    assert outcomes["returned_mib"] > 250
