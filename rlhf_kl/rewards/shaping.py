"""Raw score -> score for PPO: normalised on reference samples, clipped, minus the penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_kl.errors import InputError

ROUNDING = 4.0  # steps of the number type: scores that differ by less are equal
REPEAT = 3  # tokens in a row that count as repeated


class ResponseTraits(NamedTuple):
    """Properties of responses that penalties depend on; every field (B,)."""

    ended: Tensor  # bool: the response has an EOS
    lengths: Tensor  # tokens, EOS included
    repeated: Tensor  # share of its three-token runs that are repetitions


def response_traits(ids: Sequence[Sequence[int]], ended: Tensor) -> ResponseTraits:
    """Traits of responses with these tokens, on the CPU."""
    lengths, repeated = torch.tensor(list(map(len, ids))), torch.tensor(list(map(_repeated, ids)))
    return ResponseTraits(ended.cpu(), lengths, repeated)


def _repeated(tokens: Sequence[int]) -> float:
    runs = [tuple(tokens[i : i + REPEAT]) for i in range(len(tokens) - REPEAT + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


@dataclass(frozen=True)
class ScoreShaping:
    """Raw score -> normalised on reference samples, clipped, minus the penalties.

    Source: Ziegler et al. 2019, section 2.1 (normalisation on reference samples).
    """

    mean: float = 0.0
    std: float = 1.0
    clip: float | None = None
    missing_eos_penalty: float = 0.0
    length_penalty: float = 0.0  # per token
    repetition_penalty: float = 0.0  # times the repeated share

    def fit(self, scores: Tensor, *, normalize: bool) -> ScoreShaping:
        """The same shaping with the mean and standard deviation of raw scores (N,) of reference samples.

        Errors: InputError if all scores are equal, or differ by rounding alone, so that they have no scale.
        """
        if not normalize:
            return self
        std = float(scores.std(correction=0))
        rounding = ROUNDING * torch.finfo(scores.dtype).eps * float(scores.abs().max())
        if not std > rounding:
            same = f"all {len(scores)} reference samples have {'about ' * (std > 0)}the score {float(scores[0]):g}"
            advice = "If the policy can find other scores, set reward.normalize=false"
            raise InputError(f"reward: {same}, so reward.normalize finds no scale. {advice}")
        return replace(self, mean=float(scores.mean()), std=std)

    def __call__(self, scores: Tensor, traits: ResponseTraits) -> Tensor:
        """Raw scores (B,) of responses with these traits -> shaped scores (B,)."""
        shaped = self._scaled(scores)
        if self.clip is not None:
            shaped = shaped.clamp(-self.clip, self.clip)
        for penalty in self.penalties(traits).values():
            shaped = shaped - penalty.to(shaped)
        return shaped

    def clipped(self, scores: Tensor) -> float:
        """Share of raw scores (B,) that the clip makes equal to another one; of the best of a few values it is none."""
        if self.clip is None or not len(scores):
            return 0.0
        scaled = self._scaled(scores)
        sides = [scores[scaled > self.clip], scores[scaled < -self.clip]]
        return sum(len(side) for side in sides if len(side.unique()) > 1) / len(scores)

    def _scaled(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    def penalties(self, traits: ResponseTraits) -> dict[str, Tensor]:
        """Each active penalty by name: (B,), never negative."""
        terms = {
            "missing_eos": (self.missing_eos_penalty, (~traits.ended).float()),
            "length": (self.length_penalty, traits.lengths.float()),
            "repetition": (self.repetition_penalty, traits.repeated.float()),
        }
        return {name: size * amount for name, (size, amount) in terms.items() if size}
