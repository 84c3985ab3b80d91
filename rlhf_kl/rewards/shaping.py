"""Raw score -> score for PPO: normalised on reference samples, clipped, minus the penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_kl.errors import InputError

ROUNDING = 4.0  # steps of the number type: scores that differ by less are equal
REPEAT = 3  # tokens in a row that count as repeated


def scale_of(scores: Tensor, key: str, change: str) -> dict[str, float]:
    """The "mean" and "std" of raw scores (N,) of reference samples, of those that are no NaN.

    Errors: InputError under `key` if they are equal, or differ by rounding alone, so that they have no scale; `change`:
    what to do then.
    """
    scores = scores[~scores.isnan()]
    if not len(scores):
        raise InputError(f"{key}: returned None for all reference samples, so there is no scale. {change}")
    std = float(scores.std(correction=0))
    rounding = ROUNDING * torch.finfo(scores.dtype).eps * float(scores.abs().max())
    if not std > rounding:
        same = f"all {len(scores)} reference samples have {'about ' * (std > 0)}the score {float(scores[0]):g}"
        raise InputError(f"{key}: {same}, so reward.normalize finds no scale. {change}")
    return {"mean": float(scores.mean()), "std": std}


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the three-token runs of a response that are repetitions."""
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
        change = "If the policy can find other scores, set reward.normalize=false"
        return replace(self, **scale_of(scores, "reward", change))

    def __call__(self, scores: Tensor, penalties: Mapping[str, Tensor]) -> Tensor:
        """Raw scores (B,), and the `penalties` of the responses -> shaped scores (B,)."""
        shaped = self._scaled(scores)
        if self.clip is not None:
            shaped = shaped.clamp(-self.clip, self.clip)
        for penalty in penalties.values():
            shaped = shaped - penalty.to(shaped)
        return shaped

    def clipped(self, scores: Sequence[float]) -> float:
        """Share of raw scores that the clip makes equal to another one; of the best of a few values it is none."""
        if self.clip is None or not scores:
            return 0.0
        low, high = (self.mean + side * self.clip * self.std for side in (-1, 1))
        sides = [score for score in scores if score > high], [score for score in scores if score < low]
        return sum(len(side) for side in sides if len({*side}) > 1) / len(scores)

    def _scaled(self, scores: Tensor) -> Tensor:
        return (scores - self.mean) / self.std

    def penalties(self, ids: Sequence[Sequence[int]], ended: Tensor) -> dict[str, Tensor]:
        """Each active penalty by name: (B,) on the CPU, never negative.

        `ids`: the tokens of each response, EOS included; `ended` (B,): whether it has an EOS.
        """
        terms = {
            "missing_eos": (self.missing_eos_penalty, (~ended).float()),
            "length": (self.length_penalty, torch.tensor(list(map(len, ids))).float()),
            "repetition": (self.repetition_penalty, torch.tensor(list(map(repeated_share, ids))).float()),
        }
        return {name: size * amount for name, (size, amount) in terms.items() if size}
