from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from rlhf_kl.models.actor_critic import ActorCritic
from rlhf_kl.rollout import reference as reference_module
from rlhf_kl.rollout.collect import Measured, Sampling, assemble, draw, exact_kl_now, measure
from rlhf_kl.rollout.reference import ReferenceLogits
from rlhf_kl.rollout.sampling import Sampled
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba", "cd", "aaaa", "b")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def parts(new_model: Make, prompts_of: Callable[..., PromptBatch]) -> tuple[Any, ...]:
    policy, reference = new_model(seed=3), new_model(seed=2)
    prompts = prompts_of(*TEXTS)
    model = ActorCritic(policy)
    torch.nn.init.ones_(model.value_head.weight)
    sampled = draw(policy, prompts, uniforms(len(TEXTS), 6, 0, "x"), Sampling(6, 0.8, [2], 0), "cpu")
    return model, reference, prompts, sampled


def one_by_one(model: Any, prompts: PromptBatch, sampled: Sampled, row: int) -> torch.Tensor:
    """Logits (T, V) at one row's response, from the bare text without padding."""
    response = sampled.ids[row, sampled.mask[row]]
    ids = torch.cat([prompts.ids[row, prompts.mask[row]], response])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids.unsqueeze(0)).logits[0]
    return logits[-len(response) - 1 : -1]


def test_against_each_row_alone(parts: tuple[Any, ...]) -> None:
    """What the sampler saw through its cache is what the padded pass over whole rows measures."""
    model, reference, prompts, sampled = parts
    measured = measure(model, reference, prompts, sampled, 0.8)
    for row in range(len(TEXTS)):
        mine = Categorical(logits=one_by_one(model.policy, prompts, sampled, row) / 0.8)
        other = Categorical(logits=one_by_one(reference, prompts, sampled, row) / 0.8)
        live = sampled.mask[row]
        ids = sampled.ids[row, live]
        torch.testing.assert_close(measured.logprobs[row, live], mine.log_prob(ids), **CLOSE)
        torch.testing.assert_close(measured.ref_logprobs[row, live], other.log_prob(ids), **CLOSE)
        torch.testing.assert_close(measured.exact_kl[row, live], kl_divergence(mine, other), **CLOSE)
        torch.testing.assert_close(measured.entropy[row, live], mine.entropy(), **CLOSE)


def test_the_sampler_with_its_cache_draws_from_what_is_measured(parts: tuple[Any, ...]) -> None:
    """Sampling again from the measured distributions with the same noise gives the same tokens."""
    model, _, prompts, sampled = parts
    noise = uniforms(len(TEXTS), 6, 0, "x")
    for row in range(len(TEXTS)):
        p = torch.softmax(one_by_one(model.policy, prompts, sampled, row) / 0.8, -1).double()
        again = (p.cumsum(-1) <= noise[row, : len(p)].unsqueeze(1)).sum(-1)
        assert again.tolist() == sampled.ids[row, sampled.mask[row]].tolist()


def test_padding_is_zero_everywhere(parts: tuple[Any, ...]) -> None:
    model, reference, prompts, sampled = parts
    assert not sampled.mask.all()
    for tensor in vars(measure(model, reference, prompts, sampled, 0.8)).values():
        assert (tensor[~sampled.mask] == 0).all()


def test_the_size_of_a_pass_changes_nothing(parts: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference, prompts, sampled = parts
    whole = vars(measure(model, reference, prompts, sampled, 0.8))
    monkeypatch.setattr(reference_module, "PASS_ELEMENTS", {"cpu": 1})
    logits = ReferenceLogits(reference)
    logits.head_elements = 1
    for name, tensor in vars(measure(model, reference, prompts, sampled, 0.8, logits)).items():
        torch.testing.assert_close(tensor, whole[name], **CLOSE)


def test_a_policy_is_nowhere_from_itself(parts: tuple[Any, ...]) -> None:
    model, _, prompts, sampled = parts
    assert float(measure(model, model.policy, prompts, sampled, 0.8).exact_kl.abs().max()) < 1e-5


def test_kl_of_the_moved_model_at_the_old_states(parts: tuple[Any, ...], new_model: Make) -> None:
    model, reference, prompts, sampled = parts
    measured, kept = measure(model, reference, prompts, sampled, 0.8), ReferenceLogits(reference)
    rollout = assemble(prompts, sampled, measured, torch.zeros(8), torch.zeros(8))
    torch.testing.assert_close(exact_kl_now(model, kept, rollout, 0.8), measured.exact_kl, **CLOSE)
    moved = ActorCritic(new_model(seed=4))
    expected: Measured = measure(moved, reference, prompts, sampled, 0.8)
    torch.testing.assert_close(exact_kl_now(moved, kept, rollout, 0.8), expected.exact_kl, **CLOSE)
    assert float((expected.exact_kl - measured.exact_kl).abs().max()) > 0.01


def test_the_rollout_is_made_of_its_parts(parts: tuple[Any, ...]) -> None:
    model, reference, prompts, sampled = parts
    measured = measure(model, reference, prompts, sampled, 0.8)
    rollout = assemble(prompts, sampled, measured, torch.arange(8.0), torch.ones(8))
    assert rollout.scores.tolist() == list(range(8))
    assert torch.equal(rollout.input_ids, torch.cat([prompts.ids, sampled.ids], 1))
    assert torch.equal(rollout.ended, sampled.ended)
