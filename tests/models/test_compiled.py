from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from rlhf_kl.models import compiled
from rlhf_kl.models.actor_critic import choose_way, read_states, read_trunk, response_logits
from rlhf_kl.models.compiled import AGREES, compiled_weights, is_plain_gpt2, slower_reason
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.recompute import enable_recompute, recomputing
from rlhf_kl.ops.prefixes import find_prefixes

pytestmark = pytest.mark.usefixtures("compiler")

Make = Callable[..., Any]
CPU = torch.device("cpu")
IDS = torch.tensor([[1, 3, 4, 5, 6, 3], [1, 6, 3, 4, 0, 0]])
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
STATES = torch.tensor([2, 4, 6, 9])


def test_it_says_what_the_model_says(new_model: Make) -> None:
    model = new_model()
    assert compiled_weights(model, CPU) is not None
    logits, hidden = read_states(model, IDS, MASK, STATES)
    torch.testing.assert_close(read_trunk(model.transformer, IDS, MASK, STATES), hidden)
    expected = response_logits(model, IDS, MASK, 5)  # from which the tokens behind column 0 were drawn
    torch.testing.assert_close(logits, expected[[0, 0, 1, 1], [2, 4, 0, 3]], rtol=1e-4, atol=1e-4)


def test_states_in_any_order_and_more_than_once(new_model: Make) -> None:
    model = new_model()
    order = torch.tensor([3, 0, 0, 2])
    logits = read_states(model, IDS, MASK, STATES)[0]
    again = read_states(model, IDS, MASK, STATES[order])[0]
    assert torch.equal(again, logits[order])
    again.sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (read_states(model, IDS, MASK, STATES)[0] * torch.tensor([2.0, 0.0, 1.0, 1.0]).unsqueeze(1)).sum().backward()
    for own, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_model_with_something_of_its_own_does_its_own_work(new_model: Make) -> None:
    plain = new_model()
    assert is_plain_gpt2(plain)
    assert is_plain_gpt2(plain.transformer)
    with plain.transformer.ln_f.register_forward_hook(lambda *_: None):
        assert not is_plain_gpt2(plain)
    assert is_plain_gpt2(plain)
    patched, dropping = new_model(), new_model()
    patched.transformer.h[0].mlp.forward = lambda x: x
    dropping.transformer.drop.p = 0.1
    dropping.train()
    adapted = add_adapter(new_model(), r=2, alpha=4.0, target_modules=None, ref="x", what="policy.lora", seed=1)
    for model in (patched, dropping, adapted, adapted.get_base_model()):
        assert compiled_weights(model, CPU) is None


def test_a_model_that_computes_something_else_is_found_out(new_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = new_model(), GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: 2 * own(self, x))
    assert compiled_weights(model, CPU) is None
    assert getattr(model, AGREES) is False


@pytest.mark.parametrize("activation", [torch.nn.ReLU(), torch.nn.GELU()])
def test_another_activation_is_found_out(new_model: Make, activation: torch.nn.Module) -> None:
    model = new_model()
    model.transformer.h[0].mlp.act = activation
    assert compiled_weights(model, CPU) is None


def test_where_it_is_not_asked(new_model: Make) -> None:
    """Another precision, layers that are computed again for their gradients, beginnings that are read once."""
    model = new_model()
    assert compiled_weights(model, CPU) is not None
    assert compiled_weights(model, torch.device("meta")) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled_weights(model, CPU) is None
    choose_way(model)
    prefixes = find_prefixes(IDS, MASK)
    torch.testing.assert_close(
        read_states(model, IDS, MASK, STATES, prefixes)[0], read_states(model, IDS, MASK, STATES)[0]
    )
    enable_recompute(model, "x")
    with recomputing(model):
        assert compiled_weights(model, CPU) is None
    with torch.no_grad():
        assert compiled_weights(model, CPU) is not None


def test_tokens_and_rows_that_the_model_does_not_know(new_model: Make) -> None:
    model = new_model(context=8)
    for ids in (IDS + 4, IDS - 4, IDS.repeat(1, 2)):
        with pytest.raises(IndexError):
            read_states(model, ids, torch.ones_like(ids, dtype=torch.bool), STATES)


def test_a_machine_without_them_is_told_only_where_they_would_help(
    new_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model()
    assert slower_reason(model, "float32") is None
    monkeypatch.setattr(compiled, "missing", lambda: "no compiler")
    assert slower_reason(model, "float32") == "no compiler"
    assert slower_reason(model, "bfloat16") is None
    assert slower_reason(torch.nn.Linear(2, 2), "float32") is None


def test_logits_that_are_more_than_the_head_s_are_found_out(new_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    own = GPT2LMHeadModel.forward

    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", capped)
    model = new_model()
    choose_way(model)
    assert compiled_weights(model, CPU) is None
    assert float(read_states(model, IDS, MASK, STATES)[0].detach().abs().max()) <= 1.0


def test_ways_of_a_model_are_compared_without_them(new_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run in bfloat16 or with layers computed again relies on."""
    model, asked = new_model(), []
    monkeypatch.setattr(compiled, "read", lambda *_: asked.append(1))
    choose_way(model)
    assert not asked
    assert getattr(model, AGREES) is None


@pytest.mark.parametrize("change", ["bias", "bfloat16", "more tokens", "norm"])
def test_a_head_or_norm_that_they_cannot_read(new_model: Make, change: str) -> None:
    model = new_model()
    assert compiled_weights(model, CPU) is not None
    if change == "norm":
        model.transformer.h[0].ln_2.eps = 1e-2
    else:
        rows = 9 if change == "more tokens" else 7
        dtype = torch.bfloat16 if change == "bfloat16" else torch.float32
        model.lm_head = torch.nn.Linear(16, rows, bias=change == "bias", dtype=dtype)
    assert compiled_weights(model, CPU) is None


def test_whoever_listens_to_gradients_or_activations_is_heard(new_model: Make) -> None:
    model = new_model()
    assert compiled_weights(model, CPU) is not None
    for listen in (
        lambda: model.transformer.h[0].register_full_backward_hook(lambda *_: None),
        lambda: model.transformer.h[0].mlp.act.register_forward_hook(lambda *_: None),
        lambda: torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ):
        handle = listen()
        assert compiled_weights(model, CPU) is None
        handle.remove()
    assert compiled_weights(model, CPU) is not None


def test_torch_s_defaults_change_nothing(new_model: Make) -> None:
    model = new_model()
    expected = read_states(model, IDS, MASK, STATES)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = read_states(model, IDS, MASK, STATES)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
