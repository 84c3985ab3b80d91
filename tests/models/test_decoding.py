from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from rlhf_kl.models import decoding
from rlhf_kl.models.decoding import pick_tokens, reserve
from rlhf_kl.models.lm import LM, takes_ready_masks
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.pretrained import load_causal_lm
from rlhf_kl.models.value import store_frozen
from rlhf_kl.ppo.rollout import response_layout
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Prompts, Sampled, Sampling
from tests.made import Make

EOS, PAD = 2, 0
TEXTS = ("ab", "abcdab", "d", "cccc")


def sample(
    model: Any,
    prompts: Prompts,
    noise: torch.Tensor,
    eos: tuple[int, ...] = (EOS,),
    temperature: float = 1.0,
    pad: int = PAD,
) -> Sampled:
    return LM(model).sample(prompts.ids, noise, Sampling(noise.shape[1], temperature, list(eos), pad))


def test_an_even_grid_of_noise_gives_the_exact_shares() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    assert torch.bincount(pick_tokens(logits.expand(1000, 4), noise, 1.0)[0]).tolist() == [100, 200, 300, 400]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_a_forbidden_token_never_comes(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    token, logprob = pick_tokens(logits, torch.tensor([uniform], dtype=torch.float64), 1.0)
    assert int(token) in (1, 3)
    assert float(logprob) == pytest.approx(math.log(0.5))


@pytest.mark.parametrize("eos", [(EOS,), (EOS, 5)])
def test_the_first_eos_ends_a_response(new_model: Make, prompts_of: Make, eos: tuple[int, ...]) -> None:
    sampled = sample(new_model(seed=3), prompts_of(*TEXTS * 16), uniforms(64, 12, 0, "x"), eos=eos)
    lasts = set()
    assert 0 < int(sampled.ended.sum()) < 64  # both kinds are there
    for ids, mask, ended in zip(sampled.ids.tolist(), sampled.mask.tolist(), sampled.ended, strict=True):
        length = sum(mask)
        assert mask == [True] * length + [False] * (len(mask) - length)
        assert (ids[length - 1] in eos) == bool(ended)
        assert not set(eos) & set(ids[: length - 1])
        assert all(token == PAD for token in ids[length:])
        assert ended or length == 12
        lasts.add(ids[length - 1])
    assert lasts >= set(eos)


def test_a_pad_token_that_is_the_eos_ends_nothing(new_model: Make, prompts_of: Make) -> None:
    model, prompts, noise = new_model(seed=3), prompts_of(*TEXTS * 16), uniforms(64, 12, 0, "x")
    usual = sample(model, prompts, noise)
    same = sample(model, prompts, noise, pad=EOS)
    assert torch.equal(same.mask, usual.mask)
    assert torch.equal(same.ended, usual.ended)
    assert torch.equal(same.ids, usual.ids.masked_fill(~usual.mask, EOS))


def test_responses_are_cut_to_the_longest(new_model: Make, prompts_of: Make) -> None:
    every = tuple(range(7))  # any token ends it
    sampled = sample(new_model(), prompts_of("ab", "c"), uniforms(2, 9, 0, "x"), eos=every)
    assert sampled.ids.shape == (2, 1)
    assert sampled.ended.all()


def test_tokens_and_log_probs_are_those_of_each_row_alone(new_model: Make, prompts_of: Make, own_logits: Make) -> None:
    """By one pass of the model over the bare text: neither padding, nor neighbours, nor the cache change anything."""
    model, noise = new_model(seed=3), uniforms(32, 10, 0, "x")
    prompts = prompts_of(*TEXTS * 8)
    sampled = sample(model, prompts, noise, temperature=0.8)
    assert len(set(sampled.mask.sum(1).tolist())) > 4
    for i in range(len(prompts)):
        response = sampled.ids[i, sampled.mask[i]]
        whole = torch.cat([torch.tensor(prompts.ids[i]), response])
        logp = Categorical(logits=own_logits(model, whole)[-len(response) - 1 : -1] / 0.8)
        drawn = (logp.probs.cumsum(-1) <= noise[i, : len(response)].unsqueeze(1)).sum(-1)
        assert drawn.tolist() == response.tolist()
        result = sampled.logprobs[i]
        torch.testing.assert_close(result[: len(response)].double(), logp.log_prob(response), rtol=1e-4, atol=1e-4)
        assert (result[len(response) :] == 0).all()


@pytest.mark.parametrize("test_every", [1, 4])
@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_rows_that_are_done_leave_the_batch_and_change_no_other(
    new_model: Make, prompts_of: Make, monkeypatch: pytest.MonkeyPatch, compact_below: float, test_every: int
) -> None:
    model, prompts, noise = new_model(seed=3), prompts_of(*TEXTS * 8), uniforms(32, 12, 0, "x")
    expected, rows = sample(model, prompts, noise), []
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    monkeypatch.setitem(decoding.COMPACT_BELOW, "cpu", compact_below)
    monkeypatch.setitem(decoding.STOP_TEST_EVERY, "cpu", test_every)
    result = sample(model, prompts, noise)
    for a, b in zip(result[:3], expected[:3], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
    left = [int((expected.mask.sum(1) > column).sum()) for column in range(len(rows))]
    if not compact_below:
        assert rows == [32] * len(rows)
    else:  # looked at after every `test_every` tokens
        assert rows == [left[column - column % test_every] for column in range(len(rows))]
    assert len(rows) < 12 or bool((expected.mask.sum(1) == 12).any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compact_below", [0.0, 1.0])
def test_steps_of_fixed_shapes_draw_the_same(
    new_model: Make, prompts_of: Make, monkeypatch: pytest.MonkeyPatch, compact_below: float, dtype: torch.dtype
) -> None:
    """Those that a GPU replays: while the cache grows by two tokens, and rows leave."""
    model, prompts, noise = new_model(seed=3), prompts_of(*TEXTS * 8), uniforms(32, 12, 0, "x")
    model.ready_masks = takes_ready_masks(model)
    assert model.ready_masks
    lm, sampling = LM(model, dtype), Sampling(12, 1.0, [EOS], PAD)
    expected, fixed = lm.sample(prompts.ids, noise, sampling), []
    monkeypatch.setitem(decoding.COMPACT_BELOW, "cpu", compact_below)
    monkeypatch.setattr(decoding, "GROWTH", 2)
    monkeypatch.setattr(decoding, "ALIGNED", 1)
    monkeypatch.setattr(decoding, "takes_fixed_shapes", lambda *_: fixed.append(True) or True)
    result = lm.sample(prompts.ids, noise, sampling)
    assert fixed
    for a, b in zip(result[:3], expected[:3], strict=True):
        assert torch.equal(a, b)
    error = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=1e-4, atol=error)


def test_what_one_model_was_found_to_take_says_nothing_of_another(
    new_model: Make, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready masks belong to the model that was loaded and its copies; a lost CUDA graph to the one that lost it."""
    loaded = load_causal_lm(str(tiny_folder))
    policy, reference = LM(loaded), LM(copy.deepcopy(loaded))
    other: Any = new_model()
    assert type(other) is type(loaded)
    assert [policy.ready_masks, reference.ready_masks, LM(other).ready_masks] == [True, True, False]
    monkeypatch.setattr(LM, "device", torch.device("cuda"))
    cache = SimpleNamespace(layers=[decoding.ReservedLayer()])
    assert [decoding.takes_fixed_shapes(lm, cache) for lm in (policy, reference, LM(other))] == [True, True, False]
    policy.give_up_graphs("it waits for the device")
    assert [decoding.takes_fixed_shapes(lm, cache) for lm in (policy, reference)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_states_that_sampling_keeps_are_those_of_a_pass(
    new_model: Make, prompts_of: Make, dtype: torch.dtype
) -> None:
    """In float32; in bfloat16, where they differ by rounding, none are kept."""
    lm, prompts = LM(new_model(), dtype), prompts_of(*TEXTS)
    sampled = lm.sample(prompts.ids, uniforms(4, 10, 0, "x"), Sampling(10, 1.0, [2], 0))
    if dtype == torch.bfloat16:
        assert sampled.states is None
        return
    layout = response_layout(prompts.ids, sampled, lm.device)
    with torch.no_grad():
        expected = lm.hidden(layout.pack(range(4)))
    torch.testing.assert_close(sampled.states, expected, rtol=1e-4, atol=1e-4)


def test_sequences_come_as_often_as_the_model_says(new_model: Make, prompts_of: Make) -> None:
    """Two tokens, 4000 samples, against the enumerated probabilities of all pairs."""
    model, count = new_model(seed=1, spread=0.3), 4000
    prompts = prompts_of(*["ab"] * count)
    sampled = sample(model, prompts, uniforms(count, 2, 0, "x"), eos=(), temperature=1.3)
    with torch.no_grad():
        prompt = torch.tensor(prompts.ids[:1])
        first = torch.softmax(model(input_ids=prompt).logits[0, -1] / 1.3, -1)
        after = torch.cat([prompt.repeat(7, 1), torch.arange(7).unsqueeze(1)], 1)
        second = torch.softmax(model(input_ids=after).logits[:, -1] / 1.3, -1)
    wanted = (first.unsqueeze(1) * second).flatten() * count
    result = torch.bincount(sampled.ids[:, 0] * 7 + sampled.ids[:, 1], minlength=49)
    likely = wanted > 5
    chi_square = float(((result - wanted).square() / wanted)[likely].sum())
    assert chi_square < 1.9 * int(likely.sum())


def test_a_prompt_may_hold_the_pad_and_eos_tokens(new_model: Make) -> None:
    """Masks never look at ids."""
    model = new_model()
    special, longer = [1, 0, 2, 4], [1, 3, 4, 5, 6, 3]
    noise, sampling = uniforms(2, 6, 0, "x"), Sampling(6, 1.0, [EOS], PAD)
    alone = LM(model).sample([special], noise[:1], sampling)
    padded = LM(model).sample([special, longer], noise, sampling)
    assert padded.rows()[0] == alone.rows()[0]


FREE = {"_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty"}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 96}
LAYERS = 6
READS = ("_local_scalar_dense", "nonzero", "equal")


class Kernels(TorchDispatchMode):
    """The operations that a GPU would run a kernel for: all but views and allocations."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("_to_copy", "copy_") and args[-1].dtype != result.dtype:
            token = args[-1].numel() <= 2 * WIDE["intermediate_size"] and args[-1].data_ptr() not in self.weights
            self.seen.append("cast of a token" if token else "cast of a weight or of the cache")
        elif not (func.is_view or name in FREE):
            self.seen.append(name)
        return result


def step_of(lm: LM) -> Counter[str]:
    """Of one step of the sampler, for two rows, between two tests for finished ones."""
    prompts = torch.arange(40).view(2, 20).tolist()
    with Kernels({p.data_ptr() for p in lm.parameters()}) as kernels:
        lm.sample(prompts, uniforms(2, 4, 0, "x"), Sampling(4, 1.0, [99], 0))
    *_, start, end = (place for place, name in enumerate(kernels.seen) if name == "searchsorted")
    return Counter(kernels.seen[start:end])


@pytest.mark.parametrize("kind", ["trained", "adapter", "frozen"])
def test_a_step_in_bfloat16_casts_no_weight_and_reads_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several layers, between two tests for finished rows: weights and cache are not cast again."""
    monkeypatch.setitem(decoding.STOP_TEST_EVERY, "cpu", 8)
    config = AutoConfig.for_model("qwen2", num_hidden_layers=LAYERS, vocab_size=90, tie_word_embeddings=True, **WIDE)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.ready_masks = takes_ready_masks(model)
    model.requires_grad_(kind == "trained")
    if kind == "adapter":
        model = add_adapter(model, r=8, alpha=16.0, target_modules=None, ref="x", seed=0)
    store_frozen(model, torch.bfloat16)
    ours = step_of(LM(model, torch.bfloat16))
    assert ours.total() > LAYERS * 30
    assert ours["cast of a token"] > LAYERS
    assert not ours["cast of a weight or of the cache"]
    assert not any(ours[name] for name in READS)


def test_a_rollout_reads_from_the_device_only_to_test_for_finished_rows(
    new_model: Make, prompts_of: Make, reads_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(decoding.STOP_TEST_EVERY, "cpu", 8)
    model, prompts = new_model(), prompts_of(*TEXTS)
    model.ready_masks = takes_ready_masks(model)

    def reads(limit: int) -> int:
        sampling, noise = Sampling(limit, 1.0, [99], PAD), uniforms(len(TEXTS), limit, 0, "x")
        return len(reads_of(lambda: LM(model, torch.bfloat16).sample(prompts.ids, noise, sampling)))

    assert [reads(limit) - reads(1) for limit in (7, 8, 15, 17)] == [0, 1, 1, 2]


ROWS, HEADS, SIZE = 3, 2, 4


def states(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, HEADS, length, SIZE, generator=noise) for _ in range(2))
    return keys, values


def test_it_holds_what_the_usual_cache_holds_while_rows_leave() -> None:
    usual, reserved = DynamicCache(), DynamicCache()
    for cache in (usual, reserved):
        for layer in range(2):
            cache.update(*states(5, layer), layer)
    reserve(reserved, 8, torch.float32)
    kept = torch.arange(ROWS)
    for step, leaving in enumerate([None, [0, 2], [1]]):
        if leaving is not None:
            chosen = torch.tensor(leaving)
            kept = kept[chosen]
            for cache in (usual, reserved):
                cache.reorder_cache(chosen)
        for layer in range(2):
            new = [x[kept] for x in states(1, 10 * step + layer)]
            one, other = (cache.update(*new, layer) for cache in (usual, reserved))
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert reserved.get_seq_length() == usual.get_seq_length() == 6 + step
