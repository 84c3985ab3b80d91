"""Beginnings that rows have in common, a system message for one, are read once in a pass.

Everything in a causal transformer but attention works on one token at a time. So the distinct beginnings of all rows
go through the model as one long row; attention alone lays the rows out again, and what it finds goes back to the
beginnings. It is hung in where transformers lets attention be exchanged, so no architecture needs code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlhf_kl.models.compiled import compiled_weights
from rlhf_kl.models.quiet import quiet_transformers
from rlhf_kl.ops.prefixes import Grid, Prefixes, find_prefixes

NAME = "rlhf_kl_prefixes"  # of the attention, in transformers' list
SHARES = "rlhf_kl_shares"  # attribute of a model: reading beginnings once was tried, and agreed
WHOLE = "full_attention"  # transformers' name of a layer that looks at everything behind it
# Names in a config of how far a layer looks. Without a list of the layers' kinds nobody says where they hold.
WINDOWS = ("sliding_window", "attention_chunk_size")
# Laying rows out moves as many bytes a layer as hidden sizes, the products grow with their squares: so the share of
# tokens below which nothing is gained is this over the hidden size. CPU: measured; GPU: estimated from its rates.
LAYING_OUT = {"cpu": 25.0, "cuda": 80.0}
# At least this share where the model's place is taken by compiled functions, which read every row whole but faster.
BESIDE_COMPILED = 0.45


class _LaidOut(torch.autograd.Function):
    """What belongs to the beginnings (n, heads, size) at every place of a grid of them (places, heads, size)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        return x.index_select(0, grid.number)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grid: Grid = ctx.grid
        total = grad.index_select(0, grid.places)
        if len(grid.repeats):
            _add_rows(total, grid.number[grid.repeats], grad.index_select(0, grid.repeats))
        return total, None


class _Taken(torch.autograd.Function):
    """Rows of x (M, ...) by number (N,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, repeat: bool) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.shape, ctx.repeat = x.shape, repeat
        return x.index_select(0, numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (numbers,), whole = ctx.saved_tensors, grad.new_zeros(ctx.shape)
        return _add_rows(whole, numbers, grad) if ctx.repeat else whole.index_copy_(0, numbers, grad), None, None


def _add_rows(total: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
    """Add each of `rows` to the one of `total` that its number says, in the same order every time."""
    if total.device.type == "cpu":
        return total.index_add_(0, numbers, rows)
    return total.index_put_((numbers,), rows, accumulate=True)  # sorts; index_add_ on a GPU takes them as they come


def take_rows(x: Tensor, numbers: Tensor, *, repeat: bool) -> Tensor:
    """Rows of x (M, ...) by number (N,), some more than once where `repeat`: (N, ...).

    The gradient is the same every time, on every device.
    """
    taken: Tensor = _Taken.apply(x, numbers, repeat)
    return taken


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    rlhf_kl_prefixes: Prefixes | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; with `rlhf_kl_prefixes` from (1, heads, M, size) to (1, M, heads, size).

    Errors: ValueError where a layer looks at a window only.
    """
    if rlhf_kl_prefixes is None:
        usual: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return usual
    if kwargs.get("sliding_window") is not None:
        raise ValueError("a layer looks at a window of tokens")
    kwargs.pop("is_causal", None)
    (rows, length), common = rlhf_kl_prefixes.shape, rlhf_kl_prefixes.common

    def laid_out(x: Tensor, grid: Grid) -> Tensor:
        """(heads, n, size) as rows (B, heads, columns, size)."""
        places: Tensor = _LaidOut.apply(x.transpose(0, 1), grid)
        return places.view(rows, -1, *places.shape[1:]).transpose(1, 2)

    keys, values = (laid_out(x.squeeze(0), rlhf_kl_prefixes.grid) for x in (key, value))
    if 2 * common < length:
        found, _ = sdpa_attention_forward(
            module, laid_out(query.squeeze(0), rlhf_kl_prefixes.grid), keys, values, None, is_causal=True, **kwargs
        )
        return take_rows(found.flatten(0, 1), rlhf_kl_prefixes.grid.places, repeat=False).unsqueeze(0), None
    # What all rows begin with asks once, and not in each row again.
    first, _ = sdpa_attention_forward(
        module, *(x[:, :, :common] for x in (query, key, value)), None, is_causal=True, **kwargs
    )
    if common == len(rlhf_kl_prefixes.ids):
        return first, None
    seen = torch.ones(length - common, length, dtype=torch.bool, device=query.device).tril(common)
    queries = laid_out(query.squeeze(0)[:, common:], rlhf_kl_prefixes.own)
    found, _ = sdpa_attention_forward(module, queries, keys, values, seen[None, None], is_causal=False, **kwargs)
    others = take_rows(found.flatten(0, 1), rlhf_kl_prefixes.own.places, repeat=False).unsqueeze(0)
    return torch.cat([first, others], 1), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_inputs(prefixes: Prefixes) -> dict[str, Any]:
    """What a model is called with to read the beginnings as one row."""
    return {
        "input_ids": prefixes.ids.unsqueeze(0),
        "position_ids": prefixes.positions.unsqueeze(0),
        # Of four dimensions, so that no model makes a mask of its own: attention lays the rows out and needs none.
        "attention_mask": torch.zeros(1, 1, 1, 1, device=prefixes.ids.device),
        "rlhf_kl_prefixes": prefixes,
    }


def shares(model: Any) -> bool:
    """Whether the model can read beginnings once."""
    return bool(getattr(model, SHARES, False))


def least_share(model: Any, device: torch.device) -> float:
    """Share of a batch's tokens that must repeat what another row has before, for reading them once to pay."""
    if not shares(model):
        return float("inf")
    hidden = int(model.config.get_text_config().hidden_size)
    least = LAYING_OUT.get(device.type, LAYING_OUT["cuda"]) / hidden
    return max(least, BESIDE_COMPILED) if compiled_weights(model, device) is not None else least


Read = Callable[[Tensor, Tensor, Tensor, Prefixes | None], Tensor]


@torch.no_grad()
def try_sharing(model: Any, read: Read, tolerance: float) -> None:
    """Mark the model where `read(ids, mask, states, prefixes)` says the same with beginnings read once, and without.

    `tolerance`: largest difference over the largest number.
    """
    setattr(model, SHARES, False)
    text = model.config.get_text_config()
    # A layer of another kind may look less far than everything behind it, and only show that in long texts.
    kinds = getattr(text, "layer_types", None)
    alike = set(kinds) == {WHOLE} if kinds else not any(getattr(text, name, None) for name in WINDOWS)
    if not alike or getattr(model.config, "_attn_implementation", None) not in ("sdpa", NAME):
        return
    device = next(model.parameters()).device
    mask = torch.arange(6, device=device) < torch.tensor([[6], [4], [5]], device=device)
    states = torch.tensor([2, 5, 8, 9, 14, 16], device=device)
    with quiet_transformers():
        model.set_attn_implementation(NAME)
    agrees = True
    for second in (2, 5):  # of the last row: half of the longest is common to all, and one token only
        ids = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 6, 0, 0], [1, second, 3, 4, 1, 0]], device=device)
        ids %= text.vocab_size
        setattr(model, SHARES, True)
        try:
            plain = read(ids, mask, states, None)
            gap = float((read(ids, mask, states, find_prefixes(ids, mask)) - plain).abs().max())
            agrees = agrees and gap <= tolerance * max(1.0, float(plain.abs().max()))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            agrees = False  # attention that cannot be exchanged, or more than attention that looks at other tokens
    setattr(model, SHARES, agrees)
    if not agrees:
        with quiet_transformers():
            model.set_attn_implementation("sdpa")
