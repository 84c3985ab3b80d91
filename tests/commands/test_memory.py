"""The counted memory of an update: its terms, and the sum beside a profiler's peak of a real one, on small models."""

from __future__ import annotations

import gc
import json
import runpy
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile

from rlhf_kl.commands.build import build_setup, layers_of
from rlhf_kl.commands.doctor import full_update
from rlhf_kl.commands.memory import MemoryEstimate, estimate_memory, kept_by_autograd
from rlhf_kl.commands.start import prepare_training
from rlhf_kl.config.load import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import load_causal_lm, parameter_count
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.value import store_frozen
from rlhf_kl.rewards.scorer import Scorers

BENCH = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "bench.py"))
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    "words": LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "vocab_size": 6000},
    "llama": LLAMA | {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 352, "vocab_size": 300},
    "gpt2": {"hidden_size": 128, "layers": 4, "heads": 4, "vocab_size": 300},
    "deep": {"hidden_size": 64, "layers": 8, "heads": 4, "vocab_size": 300},
    "wide": LLAMA | {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 256, "vocab_size": 3000},
}
PROMPT, BATCH, NEW = 24, 16, 16
LORA = {"policy": {"lora": {"r": 4}}}
ONE_PASS = {"ppo": {"minibatch_size": BATCH}}


def settings(folder: Path, dtype: str, changes: dict[str, Any]) -> TrainConfig:
    sections: dict[str, dict[str, Any]] = {
        "run": {"dtype": dtype, "device": "cpu"},
        "policy": {"model": str(folder / "policy")},
        "reward": {"kind": "model", "model": str(folder / "reward"), "normalize": False, "clip": None},
        "data": {"prompts": str(folder / "prompts.jsonl")},
        "rollout": {"batch_size": BATCH, "max_new_tokens": NEW, "reference_samples": BATCH},
        "ppo": {"learning_rate": 1e-6, "total_episodes": 10 * BATCH},
        "kl": {"controller": {"kind": "fixed", "coef": 0.1}},
        "eval": {"texts": str(folder / "held.jsonl"), "column": "prompt", "prompts": str(folder / "held.jsonl")},
    }
    return TrainConfig.model_validate(sections | {name: sections[name] | section for name, section in changes.items()})


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, a reward model of its shape, and prompts of one length, for each shape."""
    folders = {}
    for name, shape in SHAPES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        BENCH["random_world"](folders[name], shape, [PROMPT] * 256)
        (folders[name] / "held.jsonl").write_text(json.dumps({"prompt": "w1 w2"}) + "\n")
    return folders


def bytes_of_tensors() -> int:
    """Of all storages that tensors use, each once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = [thing.untyped_storage() for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ---- the sum


def measured(config: TrainConfig) -> tuple[MemoryEstimate, int]:
    """The estimate, and the most that is allocated at a time in an update and in one of full length."""
    device, before = torch.device("cpu"), bytes_of_tensors()
    setup = build_setup(config, device)
    trainer, estimate = prepare_training(config, setup).trainer, estimate_memory(config, setup, device)
    held = bytes_of_tensors() - before  # before the profiler, which would not see a weight mapped from its file
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.update(1)
        full_update(setup, trainer)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return estimate, held + max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def many(rows: int, new: int, in_pass: int = 16) -> dict[str, Any]:
    """Many responses, few of them in a training pass."""
    return {
        "rollout": {"batch_size": rows, "max_new_tokens": new, "reference_samples": BATCH},
        "ppo": {"microbatch_size": in_pass, "total_episodes": 10 * rows, "minibatch_size": 16},
    }


GROUPS = {"samples_per_prompt": 4, "batch_size": BATCH, "max_new_tokens": NEW, "reference_samples": BATCH}
FIXED = {"controller": {"kind": "fixed", "coef": 0.1}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("words", {}),
    ("words", LORA),
    ("words", ONE_PASS),
    ("llama", ONE_PASS),
    ("llama", ONE_PASS | LORA),
    ("gpt2", ONE_PASS),
    ("gpt2", ONE_PASS | LORA),
    ("wide", {}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("words", ONE_PASS | {"kl": FIXED | {"placement": "reward"}}),
    ("gpt2", ONE_PASS | {"policy": {"value": "separate"}}),
    ("gpt2", ONE_PASS | {"policy": {"gradient_checkpointing": True}}),
    ("gpt2", {"ppo": {"minibatch_size": BATCH, "advantage": "rloo"}, "rollout": GROUPS}),
    ("wide", {"kl": FIXED | {"ceiling": None}, "ppo": {"microbatch_size": 2}}),
    ("words", many(256, 8)),
    ("deep", many(96, 40, in_pass=4)),
    ("gpt2", many(64, 60, in_pass=4)),
    ("gpt2", many(192, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes", "dtype"),
    [*((*case, dtype) for case in CASES for dtype in ("float32", "bfloat16")), *((*case, "float32") for case in MORE)],
)
def test_the_count_is_a_profilers_peak(
    worlds: dict[str, Path], model: str, changes: dict[str, Any], dtype: str
) -> None:
    estimate, peak = measured(settings(worlds[model], dtype, changes))
    assert estimate.total(estimate.rows) == pytest.approx(peak, rel=0.1)


# ---- the terms


def test_what_a_pass_keeps(new_model: Callable[..., Any]) -> None:
    model = new_model(hidden_size=64)
    weights = sum(p.numel() for p in model.transformer.h.parameters())
    before = bytes_of_tensors()
    fixed, per_token = kept_by_autograd(LM(model))
    assert fixed < 0.1 * weights
    assert per_token == pytest.approx(4 * 16.5 * 64, rel=0.1)  # two inputs of norms and of layers, 3, 1, 8
    copied, less = kept_by_autograd(LM(model, torch.bfloat16))
    assert copied == pytest.approx(2 * weights, rel=0.05)
    assert 0.5 < less / per_token < 0.75  # norms and the sums of layers stay float32
    assert bytes_of_tensors() == before  # nothing is left
    adapted = add_adapter(model, r=1, alpha=1.0, target_modules=None, ref="x", seed=0)
    store_frozen(adapted, torch.bfloat16)
    copied, _ = kept_by_autograd(LM(adapted, torch.bfloat16))
    assert copied < 0.1 * weights


def test_what_fits_into_memory() -> None:
    sizes = {"kept": 60, "states": 10, "rollout": 65, "training": 5, "gradients": 25, "tied": 5, "per_pass": 3}
    estimate = MemoryEstimate(**sizes, per_row=8, logits=2, chunk=12, minibatch=12, rows=4)
    # 70 and: a rollout; passes of 4, 43 each, beside gradients; one pass of 12, with the logits of a chunk.
    assert [estimate.total(rows) for rows in (1, 4, 12)] == [135, 143, 186]
    # Where a backward pass ends: the gradients of two uses of the embeddings, beside those of an earlier pass.
    assert [replace(estimate, tied=50).total(rows) for rows in (4, 12)] == [250, 200]
    assert [estimate.largest_microbatch(room) for room in (186, 185, 142, 134)] == [12, 6, 3, None]


@pytest.fixture
def estimated(tiny_folder: Path, tmp_path: Path, tiny_settings: dict[str, Any]) -> Callable[..., MemoryEstimate]:
    """`estimated(policy, "policy.shard=true", processes=2)`: of the tiny run."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    other = load_causal_lm(str(tiny_folder))

    def estimate(policy: Any, *changes: str, processes: int = 1) -> MemoryEstimate:
        config = load_config("train", tmp_path / "tiny.yaml", list(changes))
        prompts = SimpleNamespace(longest=4)
        setup: Any = SimpleNamespace(policy=LM(policy), reference=LM(other), scorers=Scorers(), prompts=prompts)
        return estimate_memory(config, setup, torch.device("cpu"), processes)

    return estimate


@pytest.mark.parametrize(
    ("kept", "changes", "rows"),
    [
        (1000, [], 16),
        (25_000, [], 4),
        (25_000, ["policy.value=separate"], 2),
        (25_000, ["ppo.microbatch_size=8"], 8),
        (25_000, ["rollout.samples_per_prompt=4"], 5),
        (25_000, ["rollout.samples_per_prompt=4", "rollout.max_new_tokens=12"], 2),
        (25_000, ["rollout.samples_per_prompt=4", "policy.gradient_checkpointing=true"], 4),
    ],
)
def test_rows_of_a_pass(
    new_model: Callable[..., Any],
    estimated: Callable[..., MemoryEstimate],
    kept: int,
    changes: list[str],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 tokens and 6 new ones; of a prompt that four responses share, each takes 1 token, and 1 for its keys."""
    monkeypatch.setattr("rlhf_kl.memory.kept_per_token", lambda _policy: kept)
    monkeypatch.setattr("rlhf_kl.memory.ROOM", {"cpu": 4 * 25_000 * 40})
    assert estimated(new_model(), "ppo.microbatch_size=null", *changes).rows == rows


def test_the_weights_of_an_adapter_and_of_shards(new_model: Any, estimated: Callable[..., MemoryEstimate]) -> None:
    model = new_model()
    size = parameter_count(model)

    whole = estimated(model)
    # Policy, reference and two moments; gradients and the copy for the ceiling; in float32.
    assert (whole.kept, whole.training, whole.gradients) == (4 * size * 4, size * 4, size * 4)
    vocabulary = model.config.vocab_size
    # The reference's states and logits, and the critic's features.
    assert whole.states == 16 * 6 * (16 + vocabulary + 16) * 4
    layers = [parameter_count(layer) for layer in layers_of(model)]
    outside = size - sum(layers)
    shared = estimated(model, "policy.shard=true", processes=2)
    assert shared.kept == 4 * (size / 2 + size + size)  # half of the policy, the reference, half of two moments
    assert shared.training == 4 * (size / 2 + 2 * max(layers) + outside)  # two layers and what is outside of them
    assert shared.gradients == 4 * (size / 2 + max(layers) + outside)  # and of one layer and that
    copies, parts = (estimated(model, "kl.ceiling=null", f"policy.shard={x}", processes=2) for x in ("false", "true"))
    assert parts.rollout - copies.rollout == 4 * size / 2  # gathered
    both = estimated(model, "policy.shard=true", "reference.shard=true", processes=2)
    assert both.kept == 4 * (size / 2 + outside + sum(layers) / 2 + size)
    adapted = add_adapter(model, r=1, alpha=1.0, target_modules=None, ref="x", seed=0)
    less, trained = estimated(adapted), sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert (less.kept, less.training, less.tied) == (4 * (size + trained + 2 * trained), 4 * trained, 0)
