"""Estimates the memory that a training pass keeps until its backward pass."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_kl.models.load import parameter_count

# Numbers that one layer keeps for a token, in hidden sizes: inputs and outputs of attention and the feed-forward
# part with its inner width of four, and the two norms.
KEPT_PER_LAYER = 18
# Bytes that one pass may keep if the number of rows is not set; more if the weights take more.
ROOM = {"cpu": 96 << 20, "cuda": 8 << 30}


def kept_per_token(model: Any) -> int:
    """Numbers that a pass with gradients keeps per token, without logits; correct to about a third."""
    shape = model.config.get_text_config()
    layers, hidden = int(shape.num_hidden_layers), int(shape.hidden_size)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return (layers + KEPT_PER_LAYER) * hidden  # the inputs of all layers, and the layer that is recomputed
    return layers * hidden * KEPT_PER_LAYER


def tokens_of_a_pass(model: Any, device: torch.device, dtype: str, *, models: int = 1) -> int:
    """Tokens that one training pass has room for, with float32 weights; at least 1.

    `models` of this size take part: two if the value function has its own model. Weights, gradients and Adam's moments
    take four times the weights; activations of the same size as the weights add little.
    """
    room = max(ROOM.get(device.type, ROOM["cpu"]), 4 * models * parameter_count(model))
    return max(1, room // (models * kept_per_token(model) * (2 if dtype == "bfloat16" else 4)))
