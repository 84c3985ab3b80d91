"""Policy and value function as one module, so that one wrapper (DDP, autocast) holds both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_kl.kernels.gpt2 import Weights
from rlhf_kl.kernels.logits import HeadLogits
from rlhf_kl.models.compiled import by_itself, compiled_weights, plain_head, read_rows
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.models.last_layer import last_mlp_at, try_last_mlp
from rlhf_kl.models.prefix_sharing import packed_inputs, shares, take_rows, try_sharing
from rlhf_kl.models.recompute import recomputing
from rlhf_kl.ops.prefixes import Prefixes

PLAIN = "rlhf_kl_plain"  # attribute of a model: why the short way of `read_states` does not work with it

WAYS_AGREE = 1e-4  # largest difference of a logit over the largest logit, in float32


class StateOutput(NamedTuple):
    """Policy logits and values at the states that response tokens were drawn from."""

    logits: Tensor  # (N, V)
    values: Tensor | None  # (N,) float32; None where the value function reads features


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, L) that count real tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def response_logits(model: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """Logits (B, width, V) from which the last `width` tokens of `ids` (B, L) were drawn, by the plain way.

    Runs the model's own forward, so soft-capping and scaling of the logits stay in.
    """
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids(mask),
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits
    return logits[:, :-1]


def read_states(
    model: Any, ids: Tensor, mask: Tensor, states: Tensor, prefixes: Prefixes | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) at `states` (N,), counted through the B * L positions of `ids` (B, L), and what the LM head reads.

    The latter is (N, H). Rows are padded on the right only. `prefixes`: theirs, which a model that can reads in their
    place. Runs the model's own forward, or compiled functions that say the same.
    """
    if (weights := _read_whole(model, ids, prefixes)) is not None:
        seen = read_rows(weights, ids, mask, states)
        return HeadLogits.apply(seen, plain_head(model)), seen
    if plain_reason(model):
        output = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position_ids(mask),
            output_hidden_states=True,
            use_cache=False,
        )
        return output.logits.flatten(0, 1)[states], output.hidden_states[-1].flatten(0, 1)[states]
    read: list[Tensor] = []
    reading = Reading.of(model, ids, states, prefixes)

    def pick_states(_head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before the LM head: leaves only the states that are asked for, so no other logits come to be."""
        read.append(reading.pick(args[0].flatten(0, 1)))
        return (read[0].unsqueeze(0), *args[1:])

    with model.get_output_embeddings().register_forward_pre_hook(pick_states), last_mlp_at(model, reading.needed):
        logits: Tensor = model(**reading.inputs, use_cache=False).logits
    if not read or logits.shape[:-1] != (1, len(states)):
        raise RuntimeError("its logits are not what its LM head computes")
    return logits.flatten(0, 1), read[0]  # flatten, since the gradient of an index is a whole tensor of zeros first


def read_trunk(trunk: Any, ids: Tensor, mask: Tensor, states: Tensor, prefixes: Prefixes | None = None) -> Tensor:
    """Last hidden states (N, H) of a model without a head at `states`; arguments as of `read_states`."""
    if (weights := _read_whole(trunk, ids, prefixes)) is not None:
        return read_rows(weights, ids, mask, states)
    reading = Reading.of(trunk, ids, states, prefixes)
    with last_mlp_at(trunk, reading.needed):
        output = trunk(**reading.inputs, use_cache=False)
    return reading.pick(output.last_hidden_state.flatten(0, 1))


def _read_whole(model: Any, ids: Tensor, prefixes: Prefixes | None) -> Weights | None:
    """What compiled functions read in the model's place; None where it does its own work."""
    return compiled_weights(model, ids.device) if prefixes is None or not shares(model) else None


class Reading(NamedTuple):
    """What a causal model is called with to be read at some states, and where its output has them."""

    inputs: dict[str, Any]
    needed: Tensor  # (n,) long: positions of the output that are read, each once
    states: Tensor  # (N,) long: the position of each state, some of them more than once where `repeat`
    repeat: bool

    @classmethod
    def of(cls, model: Any, ids: Tensor, states: Tensor, prefixes: Prefixes | None) -> Reading:
        """Rows `ids` (B, L) padded on the right, or where the model can their `prefixes`."""
        if prefixes is None or not shares(model):
            return cls({"input_ids": ids, "attention_mask": _nothing_hidden(ids)}, states, states, False)
        numbers = prefixes.grid.number[states]
        return cls(packed_inputs(prefixes), numbers.unique(), numbers, True)

    def pick(self, output: Tensor) -> Tensor:
        """The states (N, H) of an output whose positions are flat: (positions, H)."""
        return take_rows(output, self.states, repeat=self.repeat)


def _nothing_hidden(ids: Tensor) -> Tensor:
    """A mask of ones: attention is causal and padding stands on the right, so nothing needs hiding.

    Given all the same, since some models guess from the ids where no mask is given.
    """
    return torch.ones_like(ids)


def plain_reason(model: Any) -> str | None:
    """Why `read_states` takes the plain way with this model; None where it takes the short one."""
    reason: str | None = getattr(model, PLAIN, None)
    return reason


@torch.no_grad()
def choose_way(model: Any) -> None:
    """Try the short way of `read_states` on a small batch; where it fails mark the model for the plain one."""
    with by_itself(model):
        _choose_way(model)


def _choose_way(model: Any) -> None:
    device = next(model.parameters()).device
    ids = (torch.arange(12, device=device).view(2, 6) * 7 + 1) % model.config.get_text_config().vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 4:] = False
    states = torch.tensor([1, 2, 4, 6, 9], device=device)
    setattr(model, PLAIN, None)
    try:
        short = read_states(model, ids, mask, states)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        setattr(model, PLAIN, f"{type(error).__name__}: {error}")
        return
    setattr(model, PLAIN, "being compared")
    plain = read_states(model, ids, mask, states)
    gap = max(float((a - b).abs().max()) for a, b in zip(short, plain, strict=True))
    agrees = gap <= WAYS_AGREE * max(1.0, float(plain[0].abs().max()))
    setattr(model, PLAIN, None if agrees else f"its logits there differ by {gap:.2g}")
    if agrees:
        try_last_mlp(model, lambda: read_states(model, ids, mask, states)[0], WAYS_AGREE)
        try_sharing(model, lambda *rows: read_states(model, *rows)[0], WAYS_AGREE)


def choose_trunk_way(trunk: Any) -> None:
    """As `choose_way`, for a model without a head, which is read by `read_trunk`."""
    with by_itself(trunk):
        try_sharing(trunk, lambda *rows: read_trunk(trunk, *rows), WAYS_AGREE)


class ActorCritic(nn.Module):
    """A causal LM with a value function: a critic on frozen features, a head on its own trunk, or a trunk of its own.

    Source: Ziegler et al. 2019 (shared trunk); Ouyang et al. 2022 (separate, from the reward model).
    """

    def __init__(
        self,
        policy: Any,
        value_trunk: Any | None = None,
        value_head: nn.Linear | None = None,
        critic: FeatureCritic | None = None,
    ) -> None:
        super().__init__()
        self.policy, self.value_trunk, self.critic = policy, value_trunk, critic
        if critic is None and value_head is None:
            value_head = _zero_head((value_trunk or policy).config.get_text_config().hidden_size)
        self.value_head = value_head

    def forward(self, ids: Tensor, mask: Tensor, states: Tensor, prefixes: Prefixes | None = None) -> StateOutput:
        """`ids` and `mask` (B, L), padded on the right, `states` (N,) of the B * L -> logits (N, V), values (N,)."""
        with recomputing(self.policy):
            logits, hidden = read_states(self.policy, ids, mask, states, prefixes)
        return StateOutput(logits, self.values(ids, mask, states, hidden, prefixes))

    def values(
        self, ids: Tensor, mask: Tensor, states: Tensor, hidden: Tensor, prefixes: Prefixes | None = None
    ) -> Tensor | None:
        """Values (N,) at `states`, where the policy's LM head reads `hidden` (N, H); None with a critic."""
        if self.value_head is None:
            return None
        if self.value_trunk is not None:
            hidden = read_trunk(self.value_trunk, ids, mask, states, prefixes)
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)
        return values.float()


def _zero_head(size: int) -> nn.Linear:
    head = nn.Linear(size, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def value_head_from_reward(score: nn.Linear, mean: float, std: float) -> nn.Linear:
    """The reward model's head as a value head that predicts *normalised* scores: (w h - mean) / std."""
    head = nn.Linear(score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(score.weight / std)
        head.bias.copy_(((score.bias if score.bias is not None else 0.0) - mean) / std * torch.ones(1))
    return head


def freeze(model: nn.Module) -> nn.Module:
    """No gradients, eval mode; returns the model."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.eval()


def shared_trainable(model: nn.Module, reference: nn.Module) -> list[str]:
    """Names of trainable tensors of `model` whose memory the reference uses as well."""
    frozen = {parameter.data_ptr() for parameter in reference.parameters()}
    return [name for name, p in model.named_parameters() if p.requires_grad and p.data_ptr() in frozen]
