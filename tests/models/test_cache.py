from __future__ import annotations

import torch
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache, StaticCache

from rlhf_kl.models.decoding import reserve

ROWS, HEADS, SIZE = 3, 2, 4


def states(length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(ROWS, HEADS, length, SIZE, generator=noise) for _ in range(2))
    return keys, values


def test_it_holds_what_the_usual_cache_holds_while_rows_leave() -> None:
    usual, reserved = DynamicCache(), DynamicCache()
    for cache in (usual, reserved):
        for layer in range(2):
            cache.update(*states(5, layer), layer)
    reserve(reserved, 8)
    kept = torch.arange(ROWS)
    for step, leaving in enumerate([None, [0, 2], [1]]):
        if leaving is not None:
            chosen = torch.tensor(leaving)
            kept = kept[chosen]
            for cache in (usual, reserved):
                cache.reorder_cache(chosen)
        for layer in range(2):
            new = [x[kept] for x in states(1, 10 * step + layer)]
            one, other = (cache.update(*new, layer) for cache in (usual, reserved))
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert reserved.get_seq_length() == usual.get_seq_length() == 6 + step


def test_room_is_taken_once() -> None:
    cache = DynamicCache()
    cache.update(*states(2, 0), 0)
    reserve(cache, 9)
    places = {cache.update(*states(1, step), 0)[0].data_ptr() for step in range(7)}
    assert len(places) == 1


def test_caches_of_another_kind_stay_as_they_are() -> None:
    config = AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=4)
    sliding = DynamicCache(config=config)
    for layer in range(2):
        sliding.update(*states(5, layer), layer)
    empty = DynamicCache(config=AutoConfig.for_model("llama", num_hidden_layers=2))
    for cache in (sliding, StaticCache(config=config, max_cache_len=8), empty, None):
        before = list(cache.layers) if cache else []
        reserve(cache, 8)
        assert not cache or cache.layers == before
