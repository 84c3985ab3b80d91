"""Logits far from 0, as those of real models are: bfloat16 has steps of 0.5 at -70."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence

from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.models import logits as logits_module
from rlhf_kl.models.lm import LM
from rlhf_kl.models.logits import RoundedHead, decoding_head, rounding_product
from rlhf_kl.models.value import ActorCritic, frozen_lm
from rlhf_kl.ops.head import token_logprobs
from rlhf_kl.ops.logprobs import chosen_logprobs, exact_kl
from rlhf_kl.ppo.checks import check_start, checked_prompts, padding_gap
from rlhf_kl.ppo.rollout import RolloutParts, Rollouts, exact_kl_now, measure, response_layout, sample
from rlhf_kl.ppo.states import ReferenceStates
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Prompts, RolloutBatch, Sampling
from tests.made import Make

BF16, CPU = torch.bfloat16, torch.device("cpu")
TEXTS = ("ab", "abcdab", "d", "cccc", "ba", "cd", "aaaa", "b")
SAMPLING = Sampling(8, 0.8, [2], 0)


@pytest.fixture
def shifted(new_model: Make) -> Make:
    """`shifted(-70.0, seed=1)`: a model all of whose logits are moved by that much, through a constant hidden unit.

    `moved` by some noise it is another model close by.
    """

    def make(shift: float, seed: int = 1, moved: float = 0.0) -> Any:
        model = new_model(seed=seed, spread=0.3)
        noise = torch.Generator().manual_seed(7)
        with torch.no_grad():
            model.config.tie_word_embeddings = False
            head = model.lm_head.weight + moved * torch.randn(model.lm_head.weight.shape, generator=noise)
            head[:, 0] = shift
            model.lm_head.weight = nn.Parameter(head)
            model.transformer.ln_f.weight[0], model.transformer.ln_f.bias[0] = 0.0, 1.0
        return model

    return make


def assessed(policy: LM, reference: LM, prompts: Prompts, letters: Any) -> Any:
    """A rollout, and the reference's states that belong to it."""
    states = ReferenceStates(reference)
    scorers = Scorers(Scorer("reward", PluginReward(lambda p, r: [float(len(x)) for x in r])))
    stream = PromptStream(prompts, len(prompts), 0)
    parts = RolloutParts(tokenizer=letters, scorers=scorers, prompts=stream, sampling=SAMPLING)
    rollouts = Rollouts(parts, ActorCritic(policy), states, ScoreShaping())
    responses, sampled = sample(policy, prompts, uniforms(len(prompts), 8, 0, "x"), SAMPLING, letters)
    return sampled, rollouts.assess(responses, sampled), states


def in_float64(lm: LM, rollout: RolloutBatch, rounded: torch.dtype = torch.float64) -> Tensor:
    """Logits (N, V) at the hidden states that the layers give, `rounded` as one likes."""
    with torch.no_grad():
        hidden = lm.hidden(rollout.layout.pack(range(len(rollout)))).double()
        return (hidden @ lm.model.lm_head.weight.double().T).to(rounded).double()


@pytest.mark.parametrize("shift", [-70.0, 40.0])
def test_log_probs_of_bfloat16_layers_are_those_of_float64_at_the_same_states(
    shifted: Make, prompts_of: Make, letters: Any, shift: float
) -> None:
    """Of the sampler, of the scoring pass and of a training pass."""
    lm = LM(shifted(shift), BF16)
    reference = frozen_lm(copy.deepcopy(lm.model), BF16, CPU)
    sampled, rollout, _ = assessed(lm, reference, prompts_of(*TEXTS), letters)
    rows = rollout.layout.pack(range(len(rollout)))
    ids = rollout.response_ids[rollout.mask]
    exact = Categorical(logits=in_float64(lm, rollout) / 0.8).log_prob(ids)
    coarse = Categorical(logits=in_float64(lm, rollout, BF16) / 0.8).log_prob(ids)
    assert float((coarse - exact).abs().max()) > 0.1  # what a head under autocast gives
    training = token_logprobs(lm(rows), lm.head(), ids, 0.8)
    for result in (training.detach(), rollout.logprobs[rollout.mask], rollout.ref_logprobs[rollout.mask]):
        assert result.dtype == torch.float32
        assert float((result - exact).abs().max()) < 1e-3
    # The sampler's own states differ by a rounding of theirs, its head does not.
    assert float((sampled.logprobs[rollout.mask] - exact).abs().max()) < 0.1


def test_the_exact_kl_of_two_bfloat16_models_is_that_of_float64_at_their_states(
    shifted: Make, prompts_of: Make, letters: Any
) -> None:
    policy = LM(shifted(-70.0, moved=0.1), BF16)
    reference = frozen_lm(shifted(-70.0), BF16, CPU)
    _, rollout, states = assessed(policy, reference, prompts_of(*TEXTS), letters)

    def kl(rounded: torch.dtype) -> Tensor:
        pair = (Categorical(logits=in_float64(lm, rollout, rounded) / 0.8) for lm in (policy, reference))
        return kl_divergence(*pair)

    exact = kl(torch.float64)
    assert 0.01 < float(exact.mean()) < 0.3
    assert float(kl(BF16).mean()) > 1.05 * float(exact.mean())
    again = exact_kl_now(policy, states, rollout, 0.8)
    for result in (rollout.exact_kl, again):
        torch.testing.assert_close(result[rollout.mask].double(), exact, rtol=1e-3, atol=1e-4)


def start(policy: Any, prompts: Prompts, dtype: torch.dtype) -> list[str]:
    """The checks of a run that starts from `policy`."""
    lm, reference = LM(policy, dtype), frozen_lm(copy.deepcopy(policy), dtype, CPU)
    sampled = lm.sample(prompts.ids, uniforms(len(prompts), 8, 0, "x"), SAMPLING)
    layout = response_layout(prompts.ids, sampled, lm.device)
    stats, _ = measure(ActorCritic(lm), ReferenceStates(reference), layout, 0.8)
    name = str(dtype).removeprefix("torch.")
    return check_start(lm, reference, sampled, stats, reference_is_initial_policy=True, dtype=name)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("shift", [-100.0, 0.0, 60.0])
def test_a_shift_passes_the_padding_check(shifted: Make, prompts_of: Make, shift: float, dtype: torch.dtype) -> None:
    results = start(shifted(shift), prompts_of(*TEXTS), dtype)
    assert any("padded against unpadded" in line for line in results)


def test_the_padding_gap_is_that_of_the_worst_token(shifted: Make, prompts_of: Make) -> None:
    sampled = LM(shifted(0.0)).sample(prompts_of(*TEXTS).ids, uniforms(len(TEXTS), 8, 0, "x"), SAMPLING)
    other = sampled.logprobs.clone()
    other[1, 0] += 0.25
    other[~sampled.mask] = 9.0
    assert padding_gap(sampled, other) == pytest.approx(0.25)


ROUNDS = pytest.mark.skipif(rounding_product(CPU) is None, reason="no products in bfloat16 on this processor")
Product = Callable[[Tensor, Tensor], Tensor]


def wide_mm(x: Tensor, y: Tensor, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """What `torch.mm` does on a GPU with an `out_dtype`."""
    assert x.dtype == y.dtype == BF16
    return torch.matmul(x.to(out_dtype), y.to(out_dtype))


@pytest.fixture(params=[pytest.param("cpu", marks=ROUNDS), "cuda"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Product:
    """The product of a processor with units for bfloat16, and that of a GPU, computed here."""
    if request.param == "cuda":
        monkeypatch.setattr(torch, "mm", wide_mm)
        return logits_module._product_of_cuda
    found = rounding_product(CPU)
    assert found is not None
    return found


def test_a_product_that_rounds_its_sums_or_is_missing_is_found(product: Product) -> None:
    assert logits_module.fault_of(product, CPU) == ""
    assert "off by" in logits_module.fault_of(lambda x, weight: (x.bfloat16() @ weight.bfloat16().T).float(), CPU)
    missing = TypeError("mm() got an unexpected keyword argument 'out_dtype'\nhere")

    def fails(x: Tensor, weight: Tensor) -> Tensor:
        raise missing

    assert logits_module.fault_of(fails, CPU) == "mm() got an unexpected keyword argument 'out_dtype'"


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_a_rounded_head_keeps_log_probs_and_the_kl(product: Product, spread: float) -> None:
    """At logits near -70, through a unit near 10 whose column is near -7: the shift is no number that bfloat16 has."""
    noise, states = torch.Generator().manual_seed(0), 200

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    layer = nn.Linear(256, 4096, bias=False)
    with torch.no_grad():
        layer.weight.copy_(0.12 * normal(4096, 256))
        layer.weight[:, 3] = -7.03 + spread * normal(4096)
        hidden = normal(states, 256)
        hidden[:, 3] = 10 + 0.5 * normal(states)
        exact = Categorical(logits=hidden.double() @ layer.weight.double().T)
        assert -80 < float((hidden @ layer.weight.T).mean()) < -60
        found, ids = RoundedHead(layer, product).now()(hidden), exact.sample()
        for logits in (found, decoding_head(layer)(hidden)):
            gap = (Categorical(logits=logits.double()).log_prob(ids) - exact.log_prob(ids)).abs()
            assert float(gap.mean()) < 1e-2
            assert float(gap.max()) < 0.1
        for moved in (0.0, 1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 7e-2):
            other, there = nn.Linear(256, 4096, bias=False), hidden + moved * normal(states, 256)
            other.weight.copy_(layer.weight + moved * normal(4096, 256))
            kl = float(kl_divergence(exact, Categorical(logits=there.double() @ other.weight.double().T)).mean())
            result = float(exact_kl(found, RoundedHead(other, product).now()(there)).mean())
            assert abs(result - kl) < max(0.03 * kl, 5e-5)
    assert kl > 0.7


def test_gradients_of_a_rounded_head_are_those_of_float64(product: Product) -> None:
    """Of a loss that no shift of the logits changes, to the rounding of bfloat16."""
    torch.manual_seed(0)
    layer, hidden = nn.Linear(64, 512, bias=False), torch.randn(48, 64, requires_grad=True)
    with torch.no_grad():
        layer.weight[:, 3] -= 7.0
    ids = torch.randint(512, (48,))
    (3.0 * chosen_logprobs(RoundedHead(layer, product).now()(hidden), ids)).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, layer.weight)]
    (3.0 * Categorical(logits=exact[0] @ exact[1].T).log_prob(ids)).sum().backward()
    for mine, theirs in ((hidden.grad, exact[0].grad), (layer.weight.grad, exact[1].grad)):
        assert mine is not None
        assert theirs is not None
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 0.02


def test_a_rounded_head_follows_each_change_of_its_weights(product: Product) -> None:
    """By the optimizer's one kernel, and by copies, as the ceiling and a checkpoint make them."""
    torch.manual_seed(0)
    layer, hidden = nn.Linear(64, 512, bias=False), torch.randn(48, 64)
    head, start = RoundedHead(layer, product), layer.weight.detach().clone()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True)

    def agrees() -> bool:
        with torch.no_grad():
            exact = torch.log_softmax(layer(hidden), -1)
            return bool((torch.log_softmax(head.now()(hidden), -1) - exact).abs().max() < 0.1)

    layer.weight.requires_grad_(False)  # as the policy in the warm-up of a critic
    assert agrees()
    with torch.no_grad():  # as `scale` moves a policy that is not trained
        layer.weight.mul_(0.5)
    assert agrees()
    with torch.no_grad():
        layer.weight.copy_(start)
    layer.weight.requires_grad_(True)
    assert agrees()
    layer(hidden).square().sum().backward()
    optimizer.step()
    assert (layer.weight - start).abs().min() > 0.1
    assert agrees()
    with torch.no_grad():
        layer.weight.copy_(start)
    assert agrees()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_pass_reads_the_weights_of_now_inside_a_block_that_somebody_left_open(
    new_model: Make, prompts_of: Make, dtype: torch.dtype
) -> None:
    """autocast keeps the rounded weights until its outermost block ends: of a notebook, or of a scorer's library."""
    model, noise = new_model(seed=1), uniforms(8, 8, 0, "x")
    prompts = checked_prompts(PromptStream(prompts_of(*TEXTS), 8, 0))

    def found(lm: LM) -> list[Tensor]:
        sampled = lm.sample(prompts, noise, SAMPLING)
        rows = response_layout(prompts, sampled, CPU).pack(range(8))
        return [sampled.logprobs, lm.hidden(rows)]

    results = list[list[Tensor]]()
    for block in (contextlib.nullcontext(), torch.autocast("cpu", BF16, enabled=False)):
        lm = LM(copy.deepcopy(model), dtype)
        with block:
            before = found(lm)
            with torch.no_grad():
                for parameter in lm.parameters():
                    parameter.mul_(1.5)
            after = found(lm)
        assert not torch.equal(before[1], after[1])
        results.append([*before, *after])
    assert all(map(torch.equal, *results))
