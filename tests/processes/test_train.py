"""`train` in two processes beside one: the same run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rlhf_kl.run.jsonl import read_jsonl

Cli = Callable[..., Any]
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "minibatches": ["ppo.minibatch_size=8"],
    "reward": ["kl.placement=reward", "kl.estimator=k1"],
    "adapter": ["policy.lora={r: 2}"],
    "separate": ["policy.value=separate"],
    "rloo": ["ppo.advantage=rloo", "rollout.samples_per_prompt=4"],
    "grpo": ["ppo.advantage=grpo", "rollout.samples_per_prompt=2"],
    "ceiling": ["kl.ceiling.value=0.002", "ppo.learning_rate=5.0e-3", "kl.target=0.001"],
    "sequence": ["kl.unit=sequence", "kl.target=0.5"],
}


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_settings: dict[str, Any],
    rlhf_kl: Cli,
    together: Callable[..., Any],
) -> Callable[[str], tuple[Path, Path]]:
    """runs(variant): the folders of the run in one process and in two."""
    place = tmp_path_factory.mktemp("two")
    (place / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))

    def words(variant: str, count: int) -> list[Any]:
        options = [word for setting in VARIANTS[variant] for word in ("--set", setting)]
        return ["train", "--config", place / "tiny.yaml", "--output-dir", place / f"{variant}-{count}", *options]

    for variant in VARIANTS:
        outcome = rlhf_kl(*words(variant, 1), "--quiet")
        assert outcome.code == 0, outcome.err
    result = together([[*words(variant, 2), "--quiet"] for variant in VARIANTS])
    assert result.codes == [[0] * len(VARIANTS)] * 2, result.output
    return lambda variant: (place / f"{variant}-1", place / f"{variant}-2")


def updates(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "kl/token" in row]


def assert_close(one: Any, two: Any, where: str) -> None:
    """Numbers, or lists of them, within the rounding of float32 sums in another order."""
    if isinstance(one, list):
        assert len(one) == len(two), where
        for a, b in zip(one, two, strict=True):
            assert_close(a, b, where)
    elif isinstance(one, float) and isinstance(two, float):
        assert math.isclose(one, two, rel_tol=2e-3, abs_tol=2e-5), f"{where}: {one} {two}"
    elif not isinstance(one, dict):
        assert one == two, where


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_make_the_run_of_one(runs: Callable[[str], tuple[Path, Path]], variant: str) -> None:
    one, two = (updates(folder) for folder in runs(variant))
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        assert (b["dist/world_size"], b["dist/coef_spread"]) == (2, 0.0)
        assert a.keys() == b.keys()
        for key in a.keys() - {"dist/world_size"}:
            if not key.startswith(("time/", "perf/")):
                assert_close(a[key], b[key], f"update {a['step']}, {key}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_and_weights_are_those_of_one_process(runs: Callable[[str], tuple[Path, Path]], variant: str) -> None:
    folders = runs(variant)
    one, two = (
        [
            (row["step"], row["prompt"], row["response"])
            for row in read_jsonl(folder / "samples.jsonl")
            if row["chosen"] == "first"
        ]
        for folder in folders
    )
    assert one
    assert one == two
    name = "adapter_model.safetensors" if variant == "adapter" else "model.safetensors"
    before, after = (load_file(folder / "final" / name) for folder in folders)
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-2, atol=1e-4)


def test_the_ceiling_acts_in_both(runs: Callable[[str], tuple[Path, Path]]) -> None:
    factors = [row["kl/backtrack_factor"] for row in updates(runs("ceiling")[1])]
    assert min(factors) < 1.0
