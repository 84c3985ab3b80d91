"""The way from the reference, and KLs after scaling, against plain transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_kl.control import Guard
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import AdapterReference, add_adapter
from rlhf_kl.models.value import frozen_lm
from rlhf_kl.ppo.origin import same_weights, way_from
from tests.made import Make, Recorder, move, weights

SCALED = 0.7  # of the way: a square of 0.49
RATES = {"whole": 1e-2, "fresh": 5e-2, "on its base": 5e-2, "on its start": 5e-2}


class Shrinker(Recorder):
    """A controller that scales the policy back after each update."""

    def scale(self) -> float:
        return SCALED


def adapted(base: Any) -> Any:
    return add_adapter(base, r=2, alpha=8.0, target_modules=None, ref="base", seed=1)


def policy_and_reference(kind: str, base: Any) -> tuple[Any, Any]:
    """A policy of this kind, and its reference; None = a copy of the start."""
    if kind == "whole":
        return base, None
    policy = adapted(base)
    if kind != "fresh":
        move(policy, seed=2, by=0.1)
    return policy, AdapterReference(policy, keep_start=kind == "on its start")


@torch.no_grad()
def plain_kl(policy: Any, reference: Any, rollout: Any) -> float:
    """KL per token at the states of a rollout, by the models' own forward calls, row by row."""
    total, count = 0.0, 0
    for prompt, kept, response, mask in zip(
        rollout.prompt_ids, rollout.prompt_mask, rollout.response_ids, rollout.mask, strict=True
    ):
        ids = torch.cat([prompt[kept], response[mask]]).unsqueeze(0)
        at = slice(int(kept.sum()) - 1, ids.shape[1] - 1)
        p = policy(input_ids=ids).logits[0, at].double().log_softmax(-1)
        with reference.active() if isinstance(reference, AdapterReference) else torch.no_grad():
            model = policy if isinstance(reference, AdapterReference) else reference
            q = model(input_ids=ids).logits[0, at].double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
        count += int(mask.sum())
    return total / count


@pytest.mark.parametrize("ceiling", [None, 0.02])
@pytest.mark.parametrize(
    ("kind", "batch"),  # of the larger batch the KL after an update is first read at half
    [*((kind, 16) for kind in RATES), ("whole", 64), ("on its base", 64)],
)
def test_the_kl_after_an_update_is_what_plain_transformers_measure_whoever_scaled(
    make_trainer: Make, new_model: Make, kind: str, ceiling: float | None, batch: int
) -> None:
    policy, reference = policy_and_reference(kind, new_model(seed=3, spread=0.1))
    start = copy.deepcopy(policy) if reference is None else None
    trainer = make_trainer(
        policy=policy,
        reference=reference,
        began_there=kind == "whole",
        controller=Guard(Shrinker(1e-3) if ceiling is None else Recorder(1e-3), max_coef=0.1),
        rollout={"batch_size": batch},
        ppo={"learning_rate": RATES[kind], "total_episodes": 10 * batch, "minibatch_size": batch // 2},
        kl={"target": 0.015, "ceiling": ceiling and {"value": ceiling, "action": "backtrack"}},
    )
    cuts = 0
    for step in range(1, 4):
        update = trainer.update(step)
        after = plain_kl(policy, start if reference is None else reference, update.rollout)
        read = batch == 16 or update.move.scale < 1.0  # at all states, so by no sample of them
        assert update.move.kl_after == pytest.approx(after, rel=0.05 if read else 0.5)
        assert (update.move.scale == 1.0) == (ceiling is not None and update.move.factor == 1.0)
        if ceiling is None and batch == 16:  # the controller's share, by the square
            assert update.move.kl_after == pytest.approx(SCALED**2 * update.move.kl_uncut, rel=0.05)
        elif ceiling is None:
            assert update.move.scale < 1.0
        elif update.move.factor < 1.0:
            cuts += 1
            forecast = trainer.ceiling.forecast(update.move.kl_before, update.move.kl_uncut)
            kept = update.move.kl_after / update.move.kl_uncut  # of the KL, and so of the forecast
            assert 0.93 <= max(update.move.kl_after, forecast * kept) / ceiling <= 1.0
    assert cuts or ceiling is None


def test_a_policy_that_did_not_begin_as_its_reference_is_never_moved_towards_it(
    make_trainer: Make, new_model: Make
) -> None:
    """One of the same architecture that has learned something: the update is shortened, and what it knows stays."""
    policy, reference = new_model(seed=4, spread=0.1), new_model(seed=3, spread=0.1)
    start, other = weights(policy), weights(reference)
    trainer = make_trainer(
        policy=policy,
        reference=reference,
        controller=Guard(Shrinker(1e-3), max_coef=0.1),
        kl={"target": 1e-3, "ceiling": {"value": 2e-3, "action": "backtrack"}},
    )
    for step in (1, 2, 3):
        move_of = trainer.update(step).move
        assert move_of.kl_before > 2e-3
        assert move_of.scale == 1.0
        assert move_of.kl_after <= move_of.kl_before
    assert (weights(policy) - start).norm() < 0.2 * (start - other).norm()


def test_same_names_and_shapes_are_no_way(new_model: Make) -> None:
    """The reference is the policy's function with the units of its layers in another order."""
    policy, reference = new_model(seed=1), new_model(seed=1)
    assert same_weights(policy, reference)
    assert not same_weights(policy, new_model(seed=1, hidden_size=24))
    with torch.no_grad():
        order = torch.randperm(64)
        for layer in reference.transformer.h:
            layer.mlp.c_fc.weight.copy_(layer.mlp.c_fc.weight[:, order])
            layer.mlp.c_fc.bias.copy_(layer.mlp.c_fc.bias[order])
            layer.mlp.c_proj.weight.copy_(layer.mlp.c_proj.weight[order])
    ids = torch.tensor([[1, 3, 4, 5]])
    assert torch.allclose(policy(ids).logits, reference(ids).logits, atol=1e-5)
    assert not same_weights(policy, reference)
    there = frozen_lm(reference, torch.float32, torch.device("cpu"))
    assert way_from(there, LM(policy), began_there=False) is None


def test_a_way_has_the_kinds_of_tensors_that_lead_to_the_reference(new_model: Make) -> None:
    start = new_model(seed=2)
    policy = LM(new_model(seed=1))
    way = way_from(LM(start), policy, began_there=True)
    assert way is not None
    assert all(torch.equal(a, b) for a, b in zip(way.origin(), start.parameters(), strict=True))
    for kind, scaled in (("fresh", {"lora_B"}), ("on its base", {"lora_B"}), ("on its start", {"lora_A", "lora_B"})):
        model, reference = policy_and_reference(kind, new_model(seed=1))
        found = way_from(reference, LM(model), began_there=kind != "on its base")
        assert found is not None
        names = {id(p): name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad}
        assert {names[id(p)] for p in found.parameters} == scaled
        ids = torch.tensor([[1, 3, 4, 5]])
        with reference.active():
            there = model(ids).logits
        move(model, seed=5, by=0.1)
        assert not torch.allclose(model(ids).logits, there, atol=1e-4)
        found.line().go(0.0)
        assert torch.allclose(model(ids).logits, there, atol=1e-5)
    model, reference = policy_and_reference("fresh", new_model(seed=1))
    model.base_model.model.transformer.ln_f.weight.requires_grad_(True)  # a whole layer beside the adapter
    assert way_from(reference, LM(model), began_there=True) is None
