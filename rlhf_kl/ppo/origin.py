"""Whether a policy lies on a known way from its reference, and which tensors go along it.

Weights of the same names and shapes do not say so: half of the way between two of them may be noise, as where one has
the units of the other in another order.
"""

from __future__ import annotations

from itertools import starmap

import torch
from torch import nn

from rlhf_kl.control.way import Way
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import FACTORS, AdapterReference
from rlhf_kl.sharding import local, local_like


def way_from(reference: LM, policy: nn.Module, *, began_there: bool) -> Way | None:
    """The way to a policy; None where its reference is no point on a known one.

    `began_there`: the policy began as the reference, with the same weights. An adapter on the model that is the
    reference lies on a way of its own, whatever it began as: its product B A adds to that model's weights. Of an
    adapter that starts at 0 or goes back to its base B alone is scaled, so that what is added goes with the share.
    Where an adapter began as another one both factors are scaled, and the KL falls with no known power of the share.
    """
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    if isinstance(reference, AdapterReference):
        factors = {name: name.split(".")[-3] for name, _ in trained}
        if not set(factors.values()) <= set(FACTORS):  # a whole layer is trained beside them
            return None
        if not reference.keep_start:
            last = [p for name, p in trained if factors[name] == FACTORS[-1]]
            return Way([local(p) for p in last], lambda: [torch.zeros_like(local(p)) for p in last])
    elif not began_there:
        return None
    start = reference.state_dict()
    pairs = [(start[name], p) for name, p in trained]
    # A sharded reference of an unsharded policy is gathered, and a start may be kept on the CPU.
    origin = lambda: list(starmap(local_like, ((a.to(p.device), p) for a, p in pairs)))  # noqa: E731
    return Way([local(p) for _, p in trained], origin)


def same_weights(policy: nn.Module, reference: nn.Module) -> bool:
    """Whether all tensors of two models are the same numbers under the same names."""
    own, other = policy.state_dict(), reference.state_dict()
    return own.keys() == other.keys() and all(
        own[name].shape == other[name].shape
        and torch.equal(own[name].float(), other[name].to(own[name].device).float())
        for name in own
    )
