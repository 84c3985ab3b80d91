"""A key-value cache for decoding: space is reserved once, and finished rows are removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, (B, heads, length, size) each, written in place.

    The usual layer copies all its content for each new token.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Takes the content of a layer, with space for `length` tokens in total."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.room = [
            torch.cat([x, x.new_empty(*x.shape[:2], length - x.shape[2], x.shape[3])], 2) for x in (keys, values)
        ]
        self._show(keys.shape[2])

    def _show(self, length: int) -> None:
        self.keys, self.values = (x[:, :, :length] for x in self.room)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens; returns all keys and values."""
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows only."""
        length = self.keys.shape[2]
        self.room = [x.index_select(0, beam_idx) for x in self.room]
        self._show(length)


def reserve(cache: Any, length: int) -> None:
    """Reserve space for `length` tokens in the layers of a cache that a model has just filled.

    Layers of another kind (sliding windows, running states) are not changed.
    """
    if type(cache) is DynamicCache:
        cache.layers = [
            ReservedLayer(layer.keys, layer.values, length)
            if type(layer) is DynamicLayer and layer.is_initialized
            else layer
            for layer in cache.layers
        ]


def attends_to_everything(config: Any) -> bool:
    """Whether every layer of a model attends to all previous tokens, without a window."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def keeps_each_token(config: Any) -> bool:
    """Whether every layer of a model keeps the keys and values of single tokens.

    A layer with a running state (linear attention, Mamba) overwrites it, so no gradient goes through its cache.
    """
    kept = (DynamicLayer, DynamicSlidingWindowLayer)
    return all(type(layer) in kept for layer in DynamicCache(config=config).layers)
