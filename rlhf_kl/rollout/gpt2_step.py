"""One decoding step of a GPT-2 in its plain operations.

At one token a row, most of the time of the model's own forward goes into what surrounds them: masks that are built
anew, configs that are read, wrappers. The operations are the model's, in its order, on its own tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_kl.models.actor_critic import position_ids
from rlhf_kl.models.compiled import is_plain_gpt2
from rlhf_kl.rollout.cache import holds_everything

AGREES = "rlhf_kl_step"  # attribute of a model: whether the step says what its own forward says
STEPS_AGREE = 1e-4  # largest difference of a logit over the largest logit


class _Layer(NamedTuple):
    """What a layer multiplies by; (bias, weight) of each product."""

    norm: nn.LayerNorm
    qkv: tuple[Tensor, Tensor]
    scaling: float
    out: tuple[Tensor, Tensor]
    norm_2: nn.LayerNorm
    up: tuple[Tensor, Tensor]
    act: nn.Module
    down: tuple[Tensor, Tensor]


class GPT2Step:
    """Made for one rollout: it holds the model's tensors and asks the model nothing any more."""

    def __init__(self, model: Any) -> None:
        self.body, self.head, self.heads = model.transformer, model.lm_head.weight, model.config.n_head
        self.layers = [
            _Layer(
                block.ln_1,
                _product(block.attn.c_attn),
                block.attn.scaling,
                _product(block.attn.c_proj),
                block.ln_2,
                _product(block.mlp.c_fc),
                block.mlp.act,
                _product(block.mlp.c_proj),
            )
            for block in self.body.h
        ]
        self.rooms: list[Tensor] = []  # (2, b, heads, length, size) a layer: keys and values
        self.bias = torch.empty(0)  # (b, heads, 1, length): added to what a query finds; -inf = padding

    def begin(self, cache: Any, attention: Tensor) -> bool:
        """Take over the cache of a model that has read the prompts; `attention` (b, length) is True at real tokens.

        Returns whether it could: a cache of another kind stays as it is.
        """
        if not holds_everything(cache):
            return False
        rows, length = attention.shape
        for layer in cache.layers:
            seen, size = layer.keys.shape[2:]
            room = layer.keys.new_empty(2, rows, self.heads, length, size)
            room[0, :, :, :seen], room[1, :, :, :seen] = layer.keys, layer.values
            self.rooms.append(room)
        bias = self.rooms[0].new_zeros(rows, self.heads, 1, length)
        self.bias = bias.masked_fill_(~attention[:, None, None], -torch.inf)
        return True

    def keep(self, rows: Tensor) -> None:
        """Only these rows go on."""
        self.rooms = [room.index_select(1, rows) for room in self.rooms]
        self.bias = self.bias.index_select(0, rows)

    def __call__(self, tokens: Tensor, positions: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """One token (b,) a row at its position (b,), the last of `seen` columns.

        Returns logits (b, V) and what the LM head reads (b, H).
        """
        x = F.embedding(tokens, self.body.wte.weight).add_(F.embedding(positions, self.body.wpe.weight))
        rows, size = x.shape
        bias = self.bias[..., :seen]
        for layer, room in zip(self.layers, self.rooms, strict=True):
            qkv = torch.addmm(layer.qkv[0], _normed(layer.norm, x), layer.qkv[1]).view(rows, 3, self.heads, -1)
            room[:, :, :, seen - 1] = qkv[:, 1:].transpose(0, 1)
            found = _attend(qkv[:, 0].unsqueeze(2), room[..., :seen, :], bias, layer.scaling)
            x += torch.addmm(layer.out[0], found.reshape(rows, size), layer.out[1])
            wide = layer.act(torch.addmm(layer.up[0], _normed(layer.norm_2, x), layer.up[1]))
            x += torch.addmm(layer.down[0], wide, layer.down[1])
        hidden = _normed(self.body.ln_f, x)
        return F.linear(hidden, self.head), hidden


def _attend(query: Tensor, kept: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """What queries (b, heads, 1, size) find among keys and values (2, b, heads, seen, size)."""
    if query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, kept[0], kept[1], attn_mask=bias, scale=scaling)
    # Made for many queries a row, the fused operation takes longer here than its parts.
    keys, values = kept.flatten(1, 2)
    found = torch.baddbmm(bias.flatten(0, 1), query.flatten(0, 1), keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(torch.softmax(found, -1), values)


def _product(module: Any) -> tuple[Tensor, Tensor]:
    return module.bias, module.weight


def _normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def gpt2_step(model: Any) -> GPT2Step | None:
    """A step for this model; None where it is no GPT-2 as transformers makes it, or the two do not agree.

    Whether they agree is tried once for a model.
    """
    if not is_plain_gpt2(model) or not hasattr(model, "lm_head"):
        return None
    if getattr(model, AGREES, None) is None:
        setattr(model, AGREES, _agrees(model, GPT2Step(model)))
    return GPT2Step(model) if getattr(model, AGREES) else None


@torch.no_grad()
def _agrees(model: Any, step: GPT2Step) -> bool:
    """Both continue a small batch, one row of which is padded on the left, by one token.

    In float32 whatever the run computes in: rounding to bfloat16 would hide what is asked here.
    """
    device = model.lm_head.weight.device
    with torch.autocast(device.type, enabled=False):
        return _same_token(model, step, device)


def _same_token(model: Any, step: GPT2Step, device: torch.device) -> bool:
    ids = (torch.arange(8, device=device).view(2, 4) * 7 + 1) % model.config.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :2] = False
    positions = position_ids(mask)
    caches = []
    for _ in range(2):
        first = model(input_ids=ids[:, :3], attention_mask=mask[:, :3], position_ids=positions[:, :3], use_cache=True)
        caches.append(first.past_key_values)
    if not step.begin(caches[1], mask):
        return False
    own = model(
        input_ids=ids[:, 3:],
        attention_mask=mask,
        position_ids=positions[:, 3:],
        past_key_values=caches[0],
        use_cache=True,
    ).logits[:, -1]
    found, _ = step(ids[:, 3], positions[:, 3], 4)
    return bool((found - own).abs().max() <= STEPS_AGREE * own.abs().max().clamp_min(1.0))
