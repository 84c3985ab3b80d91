"""One rollout of the global batch -> the figures of a metrics row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.ops.kl import k1, k2, k3


@dataclass(frozen=True)
class Gathered:
    """Per-token and per-response figures of the global batch, on the CPU."""

    exact_kl: Tensor  # (B, T)
    logprobs: Tensor  # (B, T)
    ref_logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool
    scores: Tensor  # (B,)
    shaped_scores: Tensor  # (B,)
    gold: Tensor | None  # (B,)
    ended: Tensor  # (B,) bool


def token_mean_stderr(per_token: Tensor, mask: Tensor) -> tuple[float, float]:
    """Token-weighted mean of (B, T) and its standard error, responses being the independent draws.

    A ratio estimator: tokens of one response are correlated, so the error is taken between responses.
    """
    sums, lengths = torch.where(mask, per_token, 0.0).double().sum(1), mask.double().sum(1)
    mean = sums.sum() / lengths.sum()
    rows = len(sums)
    residual = (sums - mean * lengths).square().sum() * rows / max(1, rows - 1)
    return float(mean), float(residual.sqrt() / lengths.sum())


def rollout_metrics(batch: Gathered, coef: float, target: float | None, unit: str) -> dict[str, Any]:
    """Objective, KL and rollout keys of the row; KL in nats."""
    mask, lengths = batch.mask, batch.mask.sum(1)
    sequence_kl = torch.where(mask, batch.exact_kl, 0.0).sum(1)
    several = len(mask) > 1  # one response has no standard error
    token_kl, token_se = token_mean_stderr(batch.exact_kl, mask)
    k1_mean, k1_se = token_mean_stderr(k1(batch.logprobs, batch.ref_logprobs), mask)
    chosen = batch.exact_kl[mask]
    mean_sequence = float(sequence_kl.mean())
    measured = token_kl if unit == "token" else mean_sequence
    scores_shaped = float(batch.shaped_scores.mean())
    per_position = [float(batch.exact_kl[:, t][mask[:, t]].mean()) for t in range(mask.shape[1]) if mask[:, t].any()]
    return {
        "objective/scores": float(batch.scores.mean()),
        "objective/scores_std": float(batch.scores.std(correction=0)),
        "objective/scores_deciles": _deciles(batch.scores),
        "objective/scores_shaped": scores_shaped,
        "objective/gold": float(batch.gold.mean()) if batch.gold is not None else None,
        "objective/rlhf_reward": scores_shaped - coef * mean_sequence,
        "objective/kl_share": _share(coef * mean_sequence, scores_shaped),
        "kl/token": token_kl,
        "kl/token_stderr": token_se if several else None,
        "kl/sequence": mean_sequence,
        "kl/sequence_stderr": float(sequence_kl.double().std() / len(sequence_kl) ** 0.5) if several else None,
        "kl/max_token": float(chosen.max()),
        "kl/p95_token": float(chosen.quantile(0.95)) if len(chosen) < 1 << 24 else None,
        "kl/max_sequence": float(sequence_kl.max()),
        "kl/target": target,
        "kl/error": measured / target - 1 if target else None,
        "kl/k1": k1_mean,
        "kl/k1_stderr": k1_se if several else None,
        "kl/k2": token_mean_stderr(k2(batch.logprobs, batch.ref_logprobs), mask)[0],
        "kl/k3": token_mean_stderr(k3(batch.logprobs, batch.ref_logprobs), mask)[0],
        "kl/exact": token_kl,
        "kl/per_position": per_position,
        "policy/entropy": token_mean_stderr(batch.entropy, mask)[0],
        "rollout/response_length": float(lengths.double().mean()),
        "rollout/eos_rate": float(batch.ended.double().mean()),
        "rollout/score_length_corr": _correlation(batch.scores, lengths),
    }


def _share(penalty: float, score: float) -> float:
    """How much of penalty + |score| the KL term takes, in [0, 1]."""
    return penalty / (penalty + abs(score)) if penalty > 0 else 0.0


def _deciles(values: Tensor) -> list[float]:
    """Minimum, the nine deciles, maximum."""
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    found: list[float] = values.double().quantile(steps).tolist()
    return found


def _correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's correlation of two (B,); None where one of them does not vary."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-12 else None
