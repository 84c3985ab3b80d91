"""What a training pass keeps in memory until its backward pass, by counting."""

from __future__ import annotations

from typing import Any

import torch

# Numbers that one layer keeps for a token, in hidden sizes: inputs and outputs of attention and the feed-forward
# part with its inner width of four, and the two norms.
KEPT_PER_LAYER = 18
ROOM = {"cpu": 1 << 30, "cuda": 8 << 30}  # bytes that one pass may keep where nobody says how many rows it has


def kept_per_token(model: Any) -> int:
    """Numbers that a pass with gradients keeps for a token, logits left out; good to about a third."""
    shape = model.config.get_text_config()
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    if getattr(model, "recomputes", False):
        return (layers + KEPT_PER_LAYER) * hidden  # the inputs of all layers, and the one that is computed again
    return layers * hidden * KEPT_PER_LAYER


def tokens_of_a_pass(kept: int, device: torch.device, dtype: str) -> int:
    """Tokens whose activations fit into the room of a pass, where each keeps `kept` numbers; at least 1."""
    size = 2 if dtype == "bfloat16" else 4
    return max(1, ROOM.get(device.type, ROOM["cpu"]) // (kept * size))
