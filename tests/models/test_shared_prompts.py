"""Rows with the same prompt: a pass that reads it once computes what a pass over whole rows computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import cache_utils

from rlhf_kl.models.lm import LM
from rlhf_kl.ops import packing
from rlhf_kl.ops.packing import Layout, Packed
from rlhf_kl.types import PromptBatch, Sampling

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
GATED = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": GATED,
    "mistral": {**GATED, "sliding_window": 4},  # shorter than the prompts
    "gemma2": {**GATED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "opt": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
}
if hasattr(cache_utils, "LinearAttentionLayer"):  # these read whole rows
    FAMILIES["qwen3_5_text"] = {
        **GATED,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        **{f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")},
        **{f"linear_num_{name}_heads": 2 for name in ("key", "value")},
    }
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_head": 8, "mamba_d_state": 8}
    FAMILIES["falcon_h1"] = {**GATED, "head_dim": 8, **mamba}
PROMPTS = (9, 9, 6, 6, 6, 9)  # tokens; rows with as many have the same prompt
RESPONSES = (5, 1, 3, 2, 5, 4)


def layout() -> Layout:
    """Six rows over two prompts of different lengths."""
    noise = torch.Generator().manual_seed(0)
    width, length = max(PROMPTS), max(RESPONSES)
    texts = {size: torch.randint(3, 29, (size,), generator=noise) for size in set(PROMPTS)}
    ids = torch.zeros(len(PROMPTS), width + length, dtype=torch.long)
    for row, prompt, response in zip(ids, PROMPTS, RESPONSES, strict=True):
        row[width - prompt : width] = texts[prompt]
        row[width : width + response] = torch.randint(3, 29, (response,), generator=noise)
    return Layout(ids, width, torch.tensor(PROMPTS), torch.tensor(RESPONSES))


def states_and_gradient(lm: LM, passes: list[Packed]) -> tuple[Tensor, Tensor]:
    """Hidden states of all response tokens by number, and the gradient of a weighted sum of them."""
    weights = torch.linspace(-1, 1, sum(len(rows.numbers) for rows in passes) * 16).view(-1, 16)
    states = torch.zeros_like(weights)
    lm.zero_grad()
    for rows in passes:
        hidden = lm.hidden(rows)
        states[rows.numbers] = hidden.detach()
        (hidden * weights[rows.numbers]).sum().backward()
    return states, torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])


def new_model(family: str) -> Any:
    """A random model, with weights large enough to tell positions and tokens apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, vocab_size=29, **tokens, **FAMILIES[family])
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_whole_rows(family: str) -> None:
    lm, batch = LM(new_model(family)), layout()
    states, gradient = states_and_gradient(lm, [batch.pack(range(6))])
    for passes in ([batch.pack_shared([4, 0, 2, 1, 3, 5])], list(batch.passes(range(6), most_rows=2, most_tokens=99))):
        assert all(rows.prompts is not None for rows in passes)
        shared, shared_gradient = states_and_gradient(lm, passes)
        torch.testing.assert_close(shared, states, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(shared_gradient, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_all_prompts_begin_with_is_read_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts that differ at their end: states and gradients, and samples with their log-probs."""
    lm, width = LM(new_model(family)), 9
    lengths, responses = torch.tensor([9, 8, 7, 9]), torch.tensor([3, 1, 2, 4])
    ids = torch.zeros(4, width + 4, dtype=torch.long)
    for row, (length, response) in enumerate(zip(lengths.tolist(), responses.tolist(), strict=True)):
        ids[row, width - length : width + response] = torch.arange(3, 3 + length + response)
        ids[row, width - 1] = 20 + row
    batch = Layout(ids, width, lengths, responses)
    prompts = PromptBatch(["x"] * 4, ids[:, :width], torch.arange(width) >= (width - lengths).unsqueeze(1))
    noise, sampling = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)), Sampling(5, 1.0, [2], 0)
    states, gradient = states_and_gradient(lm, [batch.pack(range(4))])
    sampled = lm.sample(prompts, noise, sampling)
    monkeypatch.setitem(packing.PASS_OVERHEAD, "cpu", 0)
    (rows,) = batch.passes(range(4), most_rows=9, most_tokens=999)
    assert rows.prompts is not None
    assert rows.prompts.prefix.tolist() == [3, 4, 5, 6, 7, 8]
    shared, shared_gradient = states_and_gradient(lm, [rows])
    torch.testing.assert_close(shared, states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shared_gradient, gradient, rtol=1e-3, atol=1e-3 * float(gradient.abs().max()))
    again = lm.sample(prompts, noise, sampling)
    assert torch.equal(again.ids, sampled.ids)
    torch.testing.assert_close(again.logprobs, sampled.logprobs, rtol=1e-4, atol=1e-4)


def test_prompts_are_shared_only_where_that_spares_enough() -> None:
    batch = layout()
    assert all(rows.prompts is None for rows in batch.passes(range(6), most_rows=9, most_tokens=99, share=False))
    assert all(rows.prompts is None for rows in batch.passes([0, 2], most_rows=9, most_tokens=99))  # two prompts
    (shared,) = batch.passes([0, 1, 5], most_rows=9, most_tokens=99)
    assert shared.prompts is not None
    assert shared.prompts.ids.shape == (1, 9)
    assert shared.ids.shape == (3, 4)


class Counted(tuple[int, ...]):
    """A prompt that counts how often it is hashed, which takes long for a long one."""

    hashed = 0

    def __hash__(self) -> int:
        Counted.hashed += 1
        return super().__hash__()


def test_prompts_are_hashed_a_few_times_not_once_for_each_pair_of_rows() -> None:
    rows = 64
    batch = Layout(torch.ones(rows, 9, dtype=torch.long), 4, torch.full((rows,), 4), torch.full((rows,), 5))
    batch.__dict__["prompt_tokens"] = [Counted(prompt) for prompt in batch.prompt_tokens]
    for _ in range(3):
        (packed,) = batch.passes(range(rows), most_rows=rows, most_tokens=9999)
        assert packed.prompts is not None
    assert rows <= Counted.hashed <= 10 * rows


def test_a_shared_pass_keeps_to_its_limits() -> None:
    passes = list(layout().passes(range(6), most_rows=2, most_tokens=99))
    assert [len(rows.ids) for rows in passes] == [2, 2, 2]
    assert sorted(int(n) for rows in passes for n in rows.numbers) == list(range(sum(RESPONSES)))
    assert len(list(layout().passes(range(6), most_rows=9, most_tokens=1))) == 6
