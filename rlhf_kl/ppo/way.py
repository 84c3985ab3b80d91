"""The way from the reference to the policy: theta_ref + s (theta - theta_ref), along which the KL falls to 0.

It is known only where the policy began as its reference. Weights of the same names and shapes do not say so: half of
the way between two of them may be noise, as where one has the units of the other in another order.
(Interpolation towards the start: Rame et al. 2024, WARP, 2406.16768, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor, nn

from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import FACTORS, AdapterReference
from rlhf_kl.sharding import local, local_like


@dataclass
class Line:
    """A straight line of tensors: theta = origin + share (end - origin), where they began at `end`."""

    parameters: Sequence[Tensor]
    origin: Sequence[Tensor]
    share: float = 1.0

    @torch.no_grad()
    def go(self, share: float) -> None:
        """Move the tensors to this share of the way; from the origin there is no way back."""
        step, self.share = (share / self.share if share else 0.0), share
        for p, a in zip(self.parameters, self.origin, strict=True):
            p.copy_(torch.lerp(a.to(p), p, step) if step else a.to(p))  # theta may not be finite


@dataclass(frozen=True)
class Way:
    """The tensors of a policy that are scaled, and their values at the reference."""

    parameters: Sequence[Tensor]  # what this process holds of them
    origin: Callable[[], Sequence[Tensor]]

    def line(self) -> Line:
        """The line on which the tensors are now; all processes call it."""
        return Line(self.parameters, self.origin())


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
