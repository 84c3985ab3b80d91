"""Models whose layers the compiled functions know, where they say the same as the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, GPT2Model
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.pytorch_utils import Conv1D

from rlhf_kl.kernels.build import library, missing
from rlhf_kl.kernels.gpt2 import Rows, Weights, read

AGREES = "rlhf_kl_compiled"  # attribute of a model: whether the compiled functions say what its own forward says
STATES_AGREE = 1e-4  # largest difference of a hidden state over the largest, in float32
# What a GPT-2 consists of.
PARTS = {
    GPT2LMHeadModel,
    GPT2Model,
    GPT2Block,
    GPT2Attention,
    GPT2MLP,
    Conv1D,
    nn.Dropout,
    nn.Embedding,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleList,
}
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def is_plain_gpt2(model: Any) -> bool:
    """Whether it is a GPT-2 as transformers makes it, with nothing hung into it and nothing replaced."""
    if type(model) not in (GPT2LMHeadModel, GPT2Model):
        return False
    if model.config.add_cross_attention or model.config.reorder_and_upcast_attn:
        return False
    waiting: list[nn.Module] = [model]
    while waiting:  # quicker than model.modules(): this is asked before every pass
        module = waiting.pop()
        if not _is_plain(module):
            return False
        # An activation is told by what it computes.
        waiting += [part for name, part in module._modules.items() if not (name == "act" and type(module) is GPT2MLP)]
    return True


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    if kind not in PARTS or "forward" in module.__dict__:
        return False
    if kind is nn.Dropout and module.training and module.p:
        return False
    if not (module._forward_hooks or module._forward_pre_hooks):
        return True
    # Those of transformers' own and of this program only listen to a model that is asked directly.
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return all(getattr(hook, "__module__", "").startswith(("transformers.", "rlhf_kl.")) for hook in hooks)


def slower_reason(model: Any, dtype: str) -> str | None:
    """Why a model on the CPU that the compiled functions know has to do without them; None where it has not.

    `dtype`: what the run computes in.
    """
    if dtype != "float32" or next(model.parameters()).device.type != "cpu" or not _known(model):
        return None
    return missing()


def compiled_weights(model: Any, device: torch.device) -> Weights | None:
    """What the compiled functions read in this model's place; None where it has to do the work itself.

    Whether they agree is tried once for a model, when it is first asked.
    """
    if device.type != "cpu" or getattr(model, AGREES, None) is False or torch.is_autocast_enabled("cpu"):
        return None
    if getattr(model, "recomputes", False) and torch.is_grad_enabled():
        return None
    if getattr(model, AGREES, None) is None:
        setattr(model, AGREES, False)  # its own forward is asked meanwhile
        setattr(model, AGREES, _agrees(model))
    if not getattr(model, AGREES) or not is_plain_gpt2(model):
        return None
    weights = _weights(model)
    return weights if weights.fit else None


def read_rows(weights: Weights, ids: Tensor, mask: Tensor, states: Tensor) -> Tensor:
    """What the LM head reads (N, H) at `states` (N,) of rows `ids` (B, L) padded on the right.

    Errors: IndexError for a token or position that the model does not know.
    """
    tokens, positions = len(weights.tensors[0]), len(weights.tensors[1])
    if ids.shape[1] > positions or int(ids.max()) >= tokens or int(ids.min()) < 0:
        raise IndexError(f"a token beyond {tokens}, or a row longer than {positions}")
    rising = bool((states[1:] > states[:-1]).all())
    order, back = (states, None) if rising else states.unique(return_inverse=True)
    found = read(weights, Rows.of(ids, mask, order))
    return found if back is None else found.index_select(0, back)


def _body(model: Any) -> Any:
    return getattr(model, "transformer", model)


def _known(model: Any) -> bool:
    return is_plain_gpt2(model) and model.config.activation_function in TANH_GELU


def _weights(model: Any) -> Weights:
    body = _body(model)
    tensors = [body.wte.weight, body.wpe.weight, body.ln_f.weight, body.ln_f.bias]
    for block in body.h:
        parts = (block.ln_1, block.attn.c_attn, block.attn.c_proj, block.ln_2, block.mlp.c_fc, block.mlp.c_proj)
        tensors += [tensor for part in parts for tensor in (part.weight, part.bias)]
    scaling = [float(block.attn.scaling) for block in body.h]
    return Weights(tensors, model.config.n_head, model.config.layer_norm_epsilon, scaling)


@torch.no_grad()
def _agrees(model: Any) -> bool:
    """Both read a small batch, one row of which is padded."""
    if not _known(model) or library() is None:
        return False
    weights = _weights(model)
    if not weights.fit:
        return False
    ids = (torch.arange(12).view(2, 6) * 7 + 1) % len(weights.tensors[0])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    states = torch.tensor([1, 2, 4, 6, 9])
    if ids.shape[1] > len(weights.tensors[1]):
        return False
    own: Tensor = _body(model)(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[states]
    gap = float((read_rows(weights, ids, mask, states) - own).abs().max())
    return gap <= STATES_AGREE * max(1.0, float(own.abs().max()))


def plain_head(model: Any) -> Tensor:
    """The weight (V, H) of a GPT-2's LM head."""
    weight: Tensor = model.lm_head.weight
    return weight
