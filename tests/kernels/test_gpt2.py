"""Against transformers' GPT-2 and torch's gradients, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_kl.kernels import gpt2 as kernel
from rlhf_kl.kernels.gpt2 import Decoder, Rows, Weights, read
from rlhf_kl.models.compiled import _weights
from rlhf_kl.models.load import fuse_activations

pytestmark = pytest.mark.usefixtures("compiled")


def gpt2(hidden: int = 32, heads: int = 2, layers: int = 2, inner: int | None = None, context: int = 160) -> Any:
    """Random, with noise on every tensor: norms and biases that do nothing would hide what goes wrong with them."""
    config = GPT2Config(
        vocab_size=11,
        bos_token_id=1,
        eos_token_id=2,
        n_embd=hidden,
        n_head=heads,
        n_layer=layers,
        n_inner=inner,
        n_positions=context,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    fuse_activations(model)
    return model


def rows(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(11, mask.shape, generator=torch.Generator().manual_seed(seed))
    return ids.masked_fill_(~mask, 3), mask


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within float32's rounding of sums as large as the largest number."""
    assert found.shape == expected.shape
    assert float((found - expected).detach().abs().max()) <= 2e-5 * float(expected.detach().abs().max().clamp_min(1e-3))


SHAPES = {
    "plain": {},
    "one layer": {"layers": 1},
    "three heads of sixteen": {"hidden": 48, "heads": 3, "layers": 3},
    "heads that fill no vector": {"hidden": 48, "heads": 4},
    "heads of one": {"hidden": 16, "heads": 16},
    "a deep product": {"hidden": 144, "heads": 2, "layers": 1},
    "a wide middle": {"hidden": 16, "inner": 560, "layers": 1},
}
LENGTHS = {
    "unequal": [7, 3, 12, 1],
    "one row": [5],
    "longer than a block of queries": [70, 25, 24],
    "many rows": [13] * 40,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_states_and_gradients_are_those_of_the_model(shape: dict[str, int], lengths: list[int]) -> None:
    model = gpt2(**shape)
    exact = copy.deepcopy(model).double()
    ids, mask = rows(lengths)
    real = mask.flatten().nonzero().squeeze(1)
    states = real[::3] if len(real) > 3 else real
    found = read(_weights(model), Rows.of(ids, mask, states))
    expected = exact.transformer(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[states]
    close(found, expected)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (found * weight.float()).sum().backward()
    (expected * weight).sum().backward()
    for (name, own), theirs in zip(model.transformer.named_parameters(), exact.transformer.parameters(), strict=True):
        assert own.grad is not None, name
        close(own.grad, theirs.grad)


def test_scaling_of_attention_by_layer_is_kept() -> None:
    model = gpt2()
    model.transformer.h[1].attn.scaling = 0.9
    ids, mask = rows([6, 4])
    states = torch.arange(6)
    expected = model.transformer(input_ids=ids, use_cache=False).last_hidden_state[0]
    close(read(_weights(model), Rows.of(ids, mask, states)), expected)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """To the last bit: a resumed run may find another machine."""
    model = gpt2(hidden=48, heads=3)
    ids, mask = rows([50, 31, 50, 17, 44, 3, 50, 50, 29])
    states = mask.flatten().nonzero().squeeze(1)[::2]
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            model.zero_grad()
            hidden = read(_weights(model), Rows.of(ids, mask, states))
            hidden.square().sum().backward()
            found.append([hidden.detach(), *(p.grad.clone() for p in model.transformer.parameters())])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_rows_say_the_same_alone_and_among_others() -> None:
    """To the last bit: every number is summed in the same order whatever stands beside it."""
    weights = _weights(gpt2(hidden=48, heads=3))
    lengths = [30, 7, 19, 1, 26]
    ids, mask = rows(lengths)
    states = mask.flatten().nonzero().squeeze(1)
    with torch.no_grad():
        together = read(weights, Rows.of(ids, mask, states)).split(lengths)
        for row, length in enumerate(lengths):
            alone = Rows.of(ids[row : row + 1, :length], mask[row : row + 1, :length], torch.arange(length))
            assert torch.equal(read(weights, alone), together[row])


def test_a_weight_that_is_not_finite_shows() -> None:
    model = gpt2()
    ids, mask = rows([6, 4])
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[3, 5] = torch.nan
        assert read(_weights(model), Rows.of(ids, mask, torch.tensor([2]))).isnan().all()


def test_asking_twice_for_gradients_says_so() -> None:
    model = gpt2()
    total = read(_weights(model), Rows.of(*rows([6, 4]), torch.tensor([2]))).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        total.backward()


def test_weights_that_change_between_the_passes_are_noticed() -> None:
    model = gpt2()
    total = read(_weights(model), Rows.of(*rows([6, 4]), torch.tensor([2]))).sum()
    with torch.no_grad():
        model.transformer.wte.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_without_gradients_nothing_is_kept_for_them() -> None:
    model = gpt2()
    with torch.no_grad():
        assert not read(_weights(model), Rows.of(*rows([6, 4]), torch.tensor([2]))).requires_grad


# ------------------------------------------------------------------ decoding


def decoder(model: Any, slots: int, length: int) -> Decoder:
    return Decoder(_weights(model), model.lm_head.weight, slots, length)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_decoding_says_what_a_pass_over_whole_rows_says(shape: dict[str, int]) -> None:
    """Rows of unequal length, some of which leave on the way."""
    model = gpt2(**shape).double()
    single = copy.deepcopy(model).float()
    ids, mask = rows([5, 1, 9, 3, 2])
    going = decoder(single, 5, 60)
    texts = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
    left = list(range(5))
    logits, hidden = going.read(ids, mask)
    for step in range(50):
        for i, row in enumerate(left):
            whole = model(input_ids=torch.tensor([texts[row]]), output_hidden_states=True)
            close(logits[i], whole.logits[0, -1])
            close(hidden[i], whole.hidden_states[-1][0, -1])
        if step in (2, 20):
            kept = torch.arange(step == 2, len(left), 2)
            going.keep(kept)
            left = [left[i] for i in kept]
        tokens = torch.tensor([(7 * step + row) % 11 for row in left])
        for row, token in zip(left, tokens.tolist(), strict=True):
            texts[row].append(token)
        logits, hidden = going(tokens)


@torch.no_grad()
def test_it_goes_on_from_keys_and_values_of_the_model() -> None:
    model = gpt2(hidden=48, heads=4)
    ids, mask = rows([5, 1, 9, 3])
    left = mask.flip(1)  # the same rows, padded on the left
    moved = torch.full_like(ids, 3)
    moved[left] = ids[mask]
    own, taken = decoder(model, 4, 20), decoder(model, 4, 20)
    own.read(ids, mask)
    positions = (left.long().cumsum(1) - 1).clamp_min(0)
    cache = model(input_ids=moved, attention_mask=left, position_ids=positions, use_cache=True).past_key_values
    taken.take([(layer.keys, layer.values) for layer in cache.layers], left)
    for tokens in torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]):
        for a, b in zip(own(tokens), taken(tokens), strict=True):
            close(a, b)


def test_sizes_that_fill_no_vector_do_not_fit() -> None:
    assert _weights(gpt2()).fit(8)
    assert not _weights(gpt2(hidden=20, heads=2)).fit(8)
    assert not _weights(gpt2(hidden=24, heads=2)).fit(16)
    assert not _weights(gpt2(inner=24)).fit(8)  # narrower than a state
    plain = _weights(gpt2())
    for change in (torch.Tensor.double, lambda x: x.t().contiguous().t() if x.dim() > 1 else x):
        assert not Weights([change(x) for x in plain.tensors], 2, plain.eps, plain.scaling).fit(8)


def test_no_memory_is_an_error_that_smaller_passes_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own, after which a microbatch is halved."""
    library = kernel.compiled()

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name) if name != "gpt2_forward" else lambda *_: 1

    monkeypatch.setattr(kernel, "compiled", Full)
    with pytest.raises(torch.OutOfMemoryError):
        read(_weights(gpt2()), Rows.of(*rows([6, 4]), torch.tensor([2])))
