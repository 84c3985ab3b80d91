from __future__ import annotations

import copy

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import AdapterReference, add_adapter
from rlhf_kl.models.pretrained import size_words
from rlhf_kl.ops.packing import pack_last
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make, move, numbers, problem

SAMPLING = Sampling(8, 0.9, [2], 0)


@pytest.fixture(params=[False, True], ids=["fresh adapter", "began as an adapter"])
def pair(request: pytest.FixtureRequest, new_model: Make) -> tuple[LM, AdapterReference, LM]:
    """A policy whose adapter was trained, the reference inside it, and a copy of what the policy was at its start."""
    policy = add_adapter(new_model(), r=2, alpha=4.0, target_modules=None, ref="base", seed=1)
    if request.param:
        move(policy, seed=1)
    start = LM(copy.deepcopy(policy))
    reference = AdapterReference(policy, keep_start=request.param)
    move(policy, seed=2)
    return LM(policy), reference, start


def test_each_name_of_a_layer_is_checked_by_itself(new_model: Make) -> None:
    options = {"r": 2, "alpha": 4.0, "ref": "base", "seed": 1}
    words = problem(add_adapter, new_model(), target_modules=["c_attn", "c_porj"], **options)
    assert "'c_porj'; did you mean c_proj?" in words
    with pytest.raises(InputError) as caught:
        add_adapter(new_model(), target_modules=["attn.c_atn", "c_attn", "roj"], **options)
    assert ["c_attn?" in caught.value.problems[0], "'roj'" in caught.value.problems[1]] == [True, True]
    adapted = add_adapter(new_model(), target_modules=["c_attn", "mlp.c_proj"], **options)
    found = {name.split(".lora_A")[0].split("h.0.")[-1] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert {"attn.c_attn", "mlp.c_proj"} == {name for name in found if "h." not in name}


def test_switched_off_it_is_the_start_bit_for_bit(pair: tuple[LM, AdapterReference, LM], prompts_of: Make) -> None:
    """What it samples, its states, and its logits at them; and the policy is what it was afterwards."""
    policy, reference, start = pair
    rows = pack_last([[1, 3, 4, 5], [1, 6]], torch.device("cpu"))
    prompts, noise = prompts_of("ab", "c", "dddd"), uniforms(3, 8, 0, "x")
    with torch.no_grad():
        before = policy.hidden(rows)
        hidden = start.hidden(rows)
        assert float((hidden - before).abs().max()) > 1e-2
        assert torch.equal(reference.hidden(rows), hidden)
        assert torch.equal(reference.head().logits(hidden), start.head().logits(hidden))
        one, other = (lm.sample(prompts.ids, noise, SAMPLING) for lm in (reference, start))
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(policy.hidden(rows), before)


def test_it_may_be_read_in_the_middle_of_a_pass_of_the_policy(pair: tuple[LM, AdapterReference, LM]) -> None:
    """As the exact KL in the loss does: the policy's gradients are those of its own pass."""
    policy, reference, _ = pair
    rows = pack_last([[1, 3, 4, 5], [1, 6]], torch.device("cpu"))

    gradients = []
    for beside in (False, True):
        policy.zero_grad()
        hidden = policy(rows)
        if beside:
            with torch.no_grad():
                reference.head().logits(reference.hidden(rows))
        policy.head().logits(hidden).logsumexp(-1).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert float(gradients[0].norm()) > 0.1
    assert torch.equal(*gradients)


def test_it_names_no_tensor_that_is_trained_and_its_state_stays_that_of_the_start(
    pair: tuple[LM, AdapterReference, LM],
) -> None:
    policy, reference, start = pair
    trained = {p.data_ptr() for p in policy.parameters() if p.requires_grad}
    assert trained
    assert not trained & {p.data_ptr() for _, p in reference.named_parameters()}
    state, was = reference.state_dict(), start.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in was.items())


def test_an_adapters_size_is_its_own(new_model: Make) -> None:
    """Not that of the model below it, nor with the copy of its start."""
    whole = new_model()
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert size_words(whole) == f"{count:,} parameters"
    policy = add_adapter(whole, r=2, alpha=8.0, target_modules=None, ref="base", seed=1)
    own = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    AdapterReference(policy, keep_start=True)
    assert numbers(size_words(policy).replace(",", "")) == [own, count]
