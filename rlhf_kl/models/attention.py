"""Attention of bfloat16 runs on a CPU, as two batched matrix products.

torch's fused kernel takes 2 to 10 times as long there, above all backward and for one token behind a cache. It needs no
memory for the scores, so long rows are left to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

SPECIAL = ("softcap", "position_bias", "cache")  # options of transformers' function that change the result
MOST_SCORES = 1 << 16  # of a head and row: 256 tokens that attend to each other


def install() -> None:
    """Let models with transformers' usual attention use this one, for the rest of the process."""
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    # GPT-2 reads ids that come without a mask, to warn of padding: the host would wait for a GPU at every token.
    PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention (B, T, heads, size) of `query` (B, heads, T, size) to L keys and values (B, groups, L, size).

    The scores are rounded to bfloat16, as in transformers' eager attention.
    """
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    (batch, heads, new, _), (groups, length) = query.shape, key.shape[1:3]
    special = dropout or any(options.get(name) is not None for name in SPECIAL)
    known = attention_mask is not None or new in (1, length)
    if special or not known or dtype != torch.bfloat16 or device != "cpu" or new * length > MOST_SCORES:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    mask, causal = attention_mask, options.get("is_causal")
    if mask is None and new > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(1, 1, new, length, dtype=torch.bool).tril()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared = heads // groups  # query heads of each key head
    with torch.autocast(device, enabled=False):
        q, k, v = (x.to(dtype).reshape(batch * groups, -1, x.shape[-1]) for x in (query * scale, key, value))
        if mask is None:
            scores = torch.bmm(q, k.transpose(1, 2))
        else:
            if mask.dtype == torch.bool:  # the least number, not -inf: a row of padding may attend to nothing
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
            if mask.shape[0] > 1 or mask.shape[1] > 1:
                mask = mask.expand(batch, heads, -1, -1).reshape(batch * groups, shared * new, length)
            else:
                mask = mask[0].expand(shared, -1, -1).reshape(1, shared * new, length)
            scores = torch.baddbmm(mask.to(dtype), q, k.transpose(1, 2))
        # In bfloat16 backward keeps a third of the memory, but rows that are no multiple of 32 long are slow.
        shares = torch.softmax(scores, -1, dtype=None if scores.requires_grad else torch.float32).to(dtype)
        found = torch.bmm(shares, v).view(batch, heads, new, -1)
    return found.transpose(1, 2), None
