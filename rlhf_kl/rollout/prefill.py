"""Prompts that begin alike, a system message for one, read once before decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from rlhf_kl.models.prefix_sharing import least_share, packed_inputs
from rlhf_kl.ops.prefixes import find_prefixes


@torch.no_grad()
def read_once(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Any] | None:
    """Logits (B, V) after prompts (B, P) padded on the left, and the cache that a pass over them would have filled.

    None where that would not pay, or the model's cache holds more than keys and values.
    """
    least = least_share(model, ids.device)
    if least >= 1:
        return None
    cache = DynamicCache(config=model.config)
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    (rows, width), lengths = ids.shape, mask.sum(1, keepdim=True)
    columns = torch.arange(width, device=ids.device)
    left = (columns + width - lengths).clamp_max(width - 1)  # of a row that is moved to the left edge
    prefixes = find_prefixes(ids.gather(1, left), columns < lengths)
    if prefixes.repeated < least:
        return None
    number = prefixes.grid.number.view(rows, width)
    ends = number.gather(1, lengths - 1).squeeze(1)

    def pick(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0][0].index_select(0, ends).unsqueeze(1), *args[1:])

    # Before everything else that listens to the head, which finds one state a row there as ever.
    with model.get_output_embeddings().register_forward_pre_hook(pick, prepend=True):
        logits = model(**packed_inputs(prefixes), past_key_values=cache, use_cache=True).logits
    at = number.gather(1, (columns - width + lengths).clamp_min(0)).flatten()  # padding: anything, it is masked
    for layer in cache.layers:
        layer.keys, layer.values = (
            x[0].index_select(1, at).unflatten(1, (rows, width)).transpose(0, 1) for x in (layer.keys, layer.values)
        )
    return logits[:, -1], cache
