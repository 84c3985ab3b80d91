"""Responses by vLLM itself (`make test-vllm`): the built-in model, and a Llama, whose adapter vLLM reads as one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from rlhf_kl.builtin.world import world_file
from rlhf_kl.models.engine import VLLM
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import AdapterReference, add_adapter
from rlhf_kl.models.pretrained import load_causal_lm
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make, move
from tests.processes.conftest import launch, together  # noqa: F401
from tests.runs import rows, sets

pytest.importorskip("vllm", reason="no vLLM here: make test-vllm")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]

SMALL = {"kv_cache_memory_bytes": 1 << 27, "enforce_eager": True}
PROMPTS = [[5, 9, 14], [7], [11, 12, 13, 40, 41]]
WORLD = world_file("builtin:reviews-small", "policy")
SHARDS = ["policy.shard=true", "reference.shard=true"]
OTHERS = [f"{key}=builtin:reviews-small" for key in ("reward.model", "data.prompts", "eval.texts")]
LORA = ["policy.lora={r: 4}", "policy.model=LLAMA", *OTHERS]
VARIANTS = {
    "gae": [],
    "rloo": ["ppo.advantage=rloo", "rollout.samples_per_prompt=4", "eval.every=2"],
    "adapter": LORA,
    "sharded": SHARDS,
    "sharded-adapter": [*LORA, *SHARDS[:1]],
    "reference": ["reference.model=OTHER", *SHARDS],  # whose samples are drawn by its own weights
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(WORLD)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        initializer_range=0.1,
        **sizes,
    )
    folder = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_as_computed(engine: VLLM, lm: LM) -> None:
    """The engine's log-probs are those of the model, and the same noise draws the same tokens."""
    engine.load(lm)
    sampling, noise = Sampling(12, 0.8, [1], 0), uniforms(3, 12, 0, "x")
    drawn, again = (engine.sample(PROMPTS, noise, sampling) for _ in range(2))
    assert torch.equal(drawn.ids, again.ids)
    for i, row in enumerate(drawn.rows()):
        with torch.no_grad(), lm.active():
            logits = lm.model(input_ids=torch.tensor([[*PROMPTS[i], *row]])).logits[0, -len(row) - 1 : -1]
        logp = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor([row]).T)[:, 0]
        torch.testing.assert_close(drawn.logprobs[i, : len(row)], logp, rtol=1e-3, atol=1e-3)
        assert bool(drawn.ended[i]) == (row[-1] == 1)


@pytest.mark.parametrize("adapter", [None, False, True])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_log_probs_are_those_of_the_model_that_was_loaded(llama: Path, kind: str, adapter: bool | None) -> None:
    """A whole model, one with an adapter, and one that began with an adapter: policy and reference in turn."""
    model = load_causal_lm(WORLD if kind == "gpt2" else str(llama))
    reference = None
    if adapter is not None:
        model = add_adapter(model, r=2, alpha=4.0, target_modules=None, ref="base", seed=1)
        move(model, seed=5, by=0.05)
        reference = AdapterReference(model, keep_start=adapter)
    policy = LM(model)
    engine = VLLM(policy, 32, SMALL)
    assert engine.takes_adapters is (kind == "llama" and adapter is not None)
    for seed in (2, 3):
        move(model, seed=seed, by=0.02)
        assert_as_computed(engine, policy)
        if reference is not None:
            assert_as_computed(engine, reference)


@pytest.fixture(scope="module")
def runs(llama: Path, together: Make, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:  # noqa: F811
    """Runs of smoke.yaml by vLLM in one process and in two."""
    place = tmp_path_factory.mktemp("runs")
    other = load_causal_lm(WORLD)
    move(other, seed=9, by=0.01)
    other.save_pretrained(place / "other")
    AutoTokenizer.from_pretrained(WORLD).save_pretrained(place / "other")
    common = ["rollout.engine=vllm", f"rollout.engine_options={json.dumps(SMALL)}", "ppo.total_episodes=192"]
    given = {"LLAMA": str(llama), "OTHER": str(place / "other")}

    def words(variant: str, count: int) -> list[Any]:
        changes = [change for change in VARIANTS[variant] if count > 1 or change not in SHARDS]
        changes = [re.sub("[A-Z]{4,}", lambda name: given[name[0]], change) for change in changes]
        place_of = ["--output-dir", place / f"{variant}-{count}"]
        return ["train", "--config", "smoke.yaml", "--quiet", *place_of, *sets(*common, *changes)]

    result = together([words(variant, 1) for variant in VARIANTS], 1)
    assert result.codes == [[0] * len(VARIANTS)], result.output
    for variant in VARIANTS:  # an engine that ends takes the group of its process with it
        result = together([words(variant, 2)], 2)
        assert result.codes == [[0]] * 2, result.output
    return {variant: (place / f"{variant}-1", place / f"{variant}-2") for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_with_an_engine_each_make_the_run_of_one(
    runs: dict[str, tuple[Path, Path]], variant: str
) -> None:
    one, two = ([row for row in rows(folder) if "kl/token" in row] for folder in runs[variant])
    assert len(one) == len(two) > 2
    for a, b in zip(one, two, strict=True):
        assert b["dist/world_size"] == 2
        for key in ("kl/token", "kl/coef", "objective/scores", "policy/loss", "eval/perplexity", "eval/kl_token"):
            if isinstance(a.get(key), float):
                assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-5), (a["step"], key)
        assert 0.0 < b["rollout/engine_gap"] < 1e-4
        assert b["rollout/engine_cut"] == 0.0
        assert abs(b["policy/logprob_gap"]) < 4 * b["policy/logprob_gap_stderr"]


def row_texts(folder: Path) -> list[Any]:
    return [json.loads(line)["response"] for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("variant", ["gae", "sharded-adapter"])
def test_texts_do_not_depend_on_the_number_of_processes(runs: dict[str, tuple[Path, Path]], variant: str) -> None:
    one, two = map(row_texts, runs[variant])
    assert one
    assert one == two
