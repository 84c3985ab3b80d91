"""Models whose layers the compiled functions know, where they say the same as the model itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import GPT2LMHeadModel, GPT2Model
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.pytorch_utils import Conv1D

from rlhf_kl.kernels.build import library, missing
from rlhf_kl.kernels.gpt2 import Rows, Weights, read
from rlhf_kl.kernels.logits import HeadLogits, plain_matrix

AGREES = "rlhf_kl_compiled"  # attribute of a model: whether the compiled functions say what its own forward says
LOGITS_AGREE = 1e-4  # largest difference of a logit over the largest, in float32
NARROW = 8  # numbers in the smallest vectors
# What a GPT-2 consists of, where its activation is GELU in the tanh form.
PARTS = {
    GPT2LMHeadModel,
    GPT2Model,
    GPT2Block,
    GPT2Attention,
    GPT2MLP,
    Conv1D,
    GELUTanh,
    NewGELUActivation,
    nn.GELU,
    nn.Dropout,
    nn.Embedding,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
}


def is_plain_gpt2(model: Any) -> bool:
    """Whether it is a GPT-2 as transformers makes it, with nothing hung into it and nothing replaced."""
    if type(model) not in (GPT2LMHeadModel, GPT2Model):
        return False
    if model.config.add_cross_attention or model.config.reorder_and_upcast_attn:
        return False
    waiting: list[nn.Module | None] = [model]
    while waiting:  # quicker than model.modules(): this is asked before every pass
        module = waiting.pop()
        if module is None or not _is_plain(module):
            return False
        waiting += module._modules.values()
    return not _has_any_global_hook()


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    if kind not in PARTS or "forward" in module.__dict__ or module._backward_hooks or module._backward_pre_hooks:
        return False
    if kind is nn.Dropout and module.training and module.p:
        return False
    if kind is nn.GELU and module.approximate != "tanh":
        return False
    if not (module._forward_hooks or module._forward_pre_hooks):
        return True
    # Those of transformers' own only listen; this program's are there only while a model's own forward runs.
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return all(getattr(hook, "__module__", "").startswith(("transformers.", "rlhf_kl.")) for hook in hooks)


def slower_reason(model: Any, dtype: str) -> str | None:
    """Why a model on the CPU that the compiled functions know has to do without them; None where it has not.

    `dtype`: what the run computes in.
    """
    if dtype != "float32" or getattr(model, "recomputes", False) or not is_plain_gpt2(model):
        return None
    return missing() if _weights(model).fit(NARROW) else None


def compiled_weights(model: Any, device: torch.device) -> Weights | None:
    """What the compiled functions read in this model's place; None where it has to do the work itself.

    Whether they agree is tried once for a model, when it is first asked.
    """
    if device.type != "cpu" or getattr(model, AGREES, None) is False or torch.is_autocast_enabled("cpu"):
        return None
    if getattr(model, "recomputes", False) and torch.is_grad_enabled():
        return None
    if not is_plain_gpt2(model) or (compiled := library()) is None:
        return None
    weights = _weights(model)
    if not weights.fit(compiled.lanes()) or not _head_fits(model, weights):
        return None
    if getattr(model, AGREES, None) is None:
        setattr(model, AGREES, _agrees(model, weights))
    return weights if getattr(model, AGREES) else None


@contextlib.contextmanager
def by_itself(model: Any) -> Iterator[None]:
    """A model that does its own work meanwhile, so that its ways of doing it can be compared."""
    before = getattr(model, AGREES, None)
    setattr(model, AGREES, False)
    try:
        yield
    finally:
        setattr(model, AGREES, before)


def read_rows(weights: Weights, ids: Tensor, mask: Tensor, states: Tensor) -> Tensor:
    """What the LM head reads (N, H) at `states` (N,) of rows `ids` (B, L) padded on the right.

    Errors: IndexError for a token or position that the model does not know.
    """
    rising = bool((states[1:] > states[:-1]).all())
    order, back = (states, None) if rising else states.unique(return_inverse=True)
    found = read(weights, Rows.of(ids, mask, order))
    return found if back is None else found.index_select(0, back)


def plain_head(model: Any) -> Tensor:
    """The weight (V, H) of a GPT-2's LM head."""
    weight: Tensor = model.lm_head.weight
    return weight


def _body(model: Any) -> Any:
    return getattr(model, "transformer", model)


def _head_fits(model: Any, weights: Weights) -> bool:
    """Whether a model's LM head, where it has one, can be read and says only tokens that the model can take in."""
    if type(model) is GPT2Model:
        return True
    head = model.lm_head
    return head.bias is None and plain_matrix(head.weight) and len(head.weight) <= len(weights.tensors[0])


def _weights(model: Any) -> Weights:
    body = _body(model)
    tensors, norms = [body.wte.weight, body.wpe.weight, body.ln_f.weight, body.ln_f.bias], [body.ln_f.eps]
    for block in body.h:
        parts = (block.ln_1, block.attn.c_attn, block.attn.c_proj, block.ln_2, block.mlp.c_fc, block.mlp.c_proj)
        tensors += [tensor for part in parts for tensor in (part.weight, part.bias)]
        norms += [block.ln_1.eps, block.ln_2.eps]
    return Weights(tensors, model.config.n_head, norms, [float(block.attn.scaling) for block in body.h])


@torch.no_grad()
def _agrees(model: Any, weights: Weights) -> bool:
    """Both read a small batch, one row of which is padded."""
    ids = (torch.arange(12) ** 2 + torch.arange(12)).view(2, 6) % len(weights.tensors[0])
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    if ids.shape[1] > len(weights.tensors[1]):
        return False
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    states = torch.tensor([1, 2, 4, 6, 9])
    found = read_rows(weights, ids, mask, states)
    if type(model) is GPT2Model:
        own: Tensor = output.last_hidden_state
    else:
        own, found = output.logits, HeadLogits.apply(found, plain_head(model))
    own = own.flatten(0, 1)[states]
    return float((found - own).abs().max()) <= LOGITS_AGREE * max(1.0, float(own.abs().max()))
