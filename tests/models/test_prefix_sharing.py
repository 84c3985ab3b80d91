from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.models import prefix_sharing
from rlhf_kl.models.actor_critic import ActorCritic, choose_trunk_way, choose_way, plain_reason, read_states
from rlhf_kl.models.load import load_causal_lm, save_model
from rlhf_kl.models.lora import AdapterReference, add_adapter
from rlhf_kl.models.prefix_sharing import NAME, least_share, shares, take_rows
from rlhf_kl.models.recompute import enable_recompute
from rlhf_kl.models.text import pad
from rlhf_kl.ops.prefixes import Prefixes, find_prefixes

pytestmark = pytest.mark.usefixtures("uncompiled")  # this is about what models do themselves

Make = Callable[..., Any]
IDS = torch.tensor([[1, 3, 4, 5, 6, 2], [1, 3, 4, 4, 0, 0], [1, 3, 4, 5, 6, 3], [1, 3, 4, 5, 6, 2]])
MASK = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] * 6, [True] * 6])
STATES = torch.tensor([2, 3, 4, 8, 9, 14, 15, 16, 17, 20, 22])
PREFIXES = find_prefixes(IDS, MASK)


def model_of(kind: str, **sizes: Any) -> Any:
    """A small random model of some architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    wide = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 7, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | wide | sizes
    config = AutoConfig.for_model(kind, intermediate_size=24, max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    choose_way(model)
    return model


def gradients(
    model: Any,
    prefixes: Prefixes | None,
    ids: torch.Tensor = IDS,
    mask: torch.Tensor = MASK,
    states: torch.Tensor = STATES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at the states, and the gradient of something made from them."""
    model.zero_grad()
    logits, _ = read_states(model, ids, mask, states, prefixes)
    weight = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    (logits.log_softmax(-1) * weight).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(
    ("rows", "common"),
    [
        ([[1, 3, 4, 5, 6, 2], [1, 3, 4, 5, 4], [1, 3, 4, 5, 4, 3]], 4),  # asks on its own
        ([[1, 3, 4, 5, 6, 2], [1, 3, 4, 5, 6, 2]], 6),  # and is all there is
        ([[1, 3, 4, 5, 6, 2]], 6),
        ([[1, 3, 4], [3, 3, 4, 5, 6], [4, 3, 4]], 0),
    ],
)
def test_whatever_rows_have_in_common(new_model: Make, rows: list[list[int]], common: int) -> None:
    model = new_model()
    choose_way(model)
    ids, mask = pad(rows, 0, left=False)
    states = mask.flatten().nonzero().squeeze(1)
    prefixes = find_prefixes(ids, mask)
    assert prefixes.common == common
    whole, once = (gradients(model, one, ids, mask, states) for one in (None, prefixes))
    torch.testing.assert_close(once[0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(once[1], whole[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "opt", "gpt_neox"])
def test_logits_and_gradients_are_those_of_whole_rows(kind: str) -> None:
    special = {"opt": {"ffn_dim": 24, "word_embed_proj_dim": 16}, "qwen3": {"head_dim": 8}}
    model = model_of(kind, **special.get(kind, {}))
    assert shares(model)
    whole, once = gradients(model, None), gradients(model, PREFIXES)
    assert float(whole[1].norm()) > 0.1
    torch.testing.assert_close(once[0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(once[1], whole[1], rtol=1e-4, atol=1e-4)


def test_a_token_goes_through_the_layers_once(new_model: Make) -> None:
    model, seen = new_model(), []
    choose_way(model)
    model.transformer.h[0].ln_1.register_forward_hook(lambda *args: seen.append(args[2].shape[:-1].numel()))
    gradients(model, PREFIXES)
    gradients(model, None)
    assert seen == [len(PREFIXES.ids), IDS.numel()]
    assert len(PREFIXES.ids) == 3 + 3 + 1 + 1


def test_layers_that_are_computed_again_lay_the_rows_out_again(new_model: Make) -> None:
    model = new_model()
    choose_way(model)
    whole = gradients(model, None)
    enable_recompute(model, "x")
    with torch.enable_grad():
        model.train()
        again = gradients(model, PREFIXES)
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-4)


def test_an_adapter_and_the_reference_below_it_share_too(new_model: Make) -> None:
    model = new_model(spread=0.2)
    choose_way(model)
    start = read_states(model, IDS, MASK, STATES)[0].detach()
    adapted = add_adapter(model, r=2, alpha=4.0, target_modules=None, ref="x", what="x", seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    reference = AdapterReference(adapted, keep_start=False)
    assert shares(adapted)
    assert shares(reference)
    whole, once = gradients(adapted, None), gradients(adapted, PREFIXES)
    torch.testing.assert_close(once, whole, rtol=1e-4, atol=1e-4)
    assert float((once[0] - start).abs().max()) > 1e-3
    found, _ = read_states(reference, IDS, MASK, STATES, PREFIXES)
    torch.testing.assert_close(found.detach(), start, rtol=1e-5, atol=1e-5)


def test_a_value_trunk_shares(new_model: Make) -> None:
    trunk = new_model(seed=2).base_model
    choose_trunk_way(trunk)
    model = ActorCritic(new_model(), trunk)
    nn.init.ones_(model.value_head.weight)
    seen: list[int] = []
    trunk.h[0].ln_1.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    whole = model(IDS, MASK, STATES).values
    torch.testing.assert_close(model(IDS, MASK, STATES, PREFIXES).values, whole, rtol=1e-5, atol=1e-4)
    assert seen == [6, len(PREFIXES.ids)]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mistral", {"sliding_window": 4}),  # says so to its attention
        ("phimoe", {"sliding_window": 64}),  # says so to its mask only
        ("gemma3_text", {"head_dim": 8, "sliding_window": 512}),  # wider than what is tried
        ("gemma2", {"head_dim": 8}),  # attention of its own
        ("mamba", {"state_size": 4}),  # none at all
    ],
)
def test_a_model_that_cannot_reads_whole_rows(kind: str, sizes: dict[str, Any]) -> None:
    model = model_of(kind, **sizes)
    before = model.config._attn_implementation
    assert not shares(model)
    assert before != NAME
    assert least_share(model, torch.device("cpu")) == float("inf")
    assert torch.equal(gradients(model, PREFIXES)[0], gradients(model, None)[0])


class _Mixing(nn.Module):
    """Looks at the token before, as no MLP should."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + nn.functional.pad(x, (0, 0, 1, -1))


def test_a_model_whose_other_layers_mix_tokens_reads_whole_rows(new_model: Make) -> None:
    model = new_model()
    model.transformer.h[0].mlp = _Mixing(model.transformer.h[0].mlp)
    choose_way(model)
    assert plain_reason(model) is None  # causal all the same
    assert not shares(model)
    assert model.config._attn_implementation == "sdpa"


def test_it_pays_from_a_smaller_share_on_in_a_wider_model(new_model: Make) -> None:
    small, wide = new_model(), new_model(hidden_size=64)
    for model in (small, wide):
        choose_way(model)
    cpu = torch.device("cpu")
    assert least_share(wide, cpu) == pytest.approx(prefix_sharing.LAYING_OUT["cpu"] / 64)
    assert least_share(small, cpu) > 1  # never


def test_nothing_of_it_is_saved(new_model: Make, letters: Any, tmp_path: Path) -> None:
    model = new_model()
    choose_way(model)
    save_model(model, letters, tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    assert shares(load_causal_lm(str(tmp_path)))
    assert shares(copy.deepcopy(model))


@pytest.mark.parametrize(("numbers", "repeat"), [([2, 0, 2, 2], True), ([3, 0], False)])
def test_the_gradient_of_rows_that_are_taken_is_their_sum(numbers: list[int], repeat: bool) -> None:
    x = torch.randn(4, 3, requires_grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: take_rows(x, torch.tensor(numbers), repeat=repeat), (x,))
