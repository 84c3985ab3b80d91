"""One update -> the figures of its metrics row. To add a metric, add its key here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.ops.kl import k1, k2, k3
from rlhf_kl.ops.masked import correlation, float64, mean_of_groups
from rlhf_kl.ppo.objectives import MOST_WEIGHT, importance
from rlhf_kl.ppo.settings import PPOSettings
from rlhf_kl.ppo.step import Update
from rlhf_kl.types import RAW, REWARD, TERM, RolloutBatch

DECILES = torch.linspace(0, 1, 11, dtype=torch.float64)  # and the ends


def update_row(update: Update, ppo: PPOSettings) -> dict[str, Any]:
    """The row of an update; figures of what was not done are NaN."""
    move, steps, taken, scale = update.move, update.steps, update.taken, update.loss_scale
    value_loss = update.mean("value") if update.critic_loss is None else update.critic_loss
    return {
        **rollout_metrics(update.rollout, update.coef, ppo),
        "policy/loss": update.mean("policy"),
        "policy/approx_kl": update.mean("approx_kl"),
        "policy/clip_fraction": update.mean("clipped"),
        "policy/logratio_first_max": steps[0].loss.max_logratio if steps else math.nan,
        "policy/grad_norm": sum(step.norm for step in taken) / len(taken) if taken else math.nan,
        "policy/learning_rate": update.learning_rate,
        **({"policy/loss_scale": scale, "policy/overflows": update.overflows} if scale is not None else {}),
        "policy/epochs": len(steps) * ppo.minibatch_size / ppo.batch_size,
        "value/loss": value_loss if ppo.critic else math.nan,
        "value/explained_variance": update.explained_variance,
        "kl/coef": update.coef,
        "kl/coef_next": update.coef_next,
        "kl/ceiling": ppo.ceiling,
        "kl/backtrack_factor": move.factor,
        "kl/scale": move.scale,
        "kl/after_update": move.kl_after,
    }


def sampling_gap(gap: Tensor, variance: Tensor, mask: Tensor) -> tuple[float, float]:
    """Mean over the tokens of `gap` (B, T), a token's figure less its mean over the vocabulary; and its standard error.

    0 on average if the tokens were drawn from the policy, after any prefix. `variance` (B, T): of
    that figure over the vocabulary. A third of the error's square is what the tokens themselves show, so that a bound
    on the sum of many batches holds for every distribution (Delyon 2009, "Exponential inequalities for sums of weakly
    dependent variables"; Howard et al. 2021, 1810.08240).
    """
    gaps, variances = gap.double()[mask], variance.double()[mask]
    spread = (gaps.square().sum() + 2 * variances.sum()) / 3
    return float(gaps.mean()), float(spread.sqrt()) / len(gaps)


def rollout_metrics(batch: RolloutBatch, coef: float, ppo: PPOSettings) -> dict[str, Any]:
    """Objective, KL and rollout keys of the row; KL in nats."""
    mask, lengths = batch.mask, batch.lengths
    target, unit = ppo.target, ppo.unit
    sequence_kl = torch.where(mask, batch.exact_kl, 0.0).sum(1)
    group = ppo.group
    several = len(mask) > 1  # one draw has no standard error
    token, sequence = batch.kl("token"), batch.kl("sequence")
    penalty = coef * sequence.mean
    log_ratio = k1(batch.logprobs, batch.ref_logprobs)
    logprobs = batch.logprobs
    k1_mean = batch.mean(log_ratio)
    chosen = batch.exact_kl[mask]
    k1_gap, k1_gap_se = sampling_gap(log_ratio - batch.exact_kl, batch.k1_variance, mask)
    logprob_gap, logprob_gap_se = sampling_gap(logprobs + batch.entropy, batch.logprob_variance, mask)
    return {
        **objective_metrics(batch, penalty),
        "kl/token": token.mean,
        "kl/token_stderr": token.stderr if several else None,
        "kl/sequence": sequence.mean,
        "kl/sequence_stderr": sequence.stderr if several else None,
        "kl/max_token": float(chosen.max()),
        "kl/p95_token": float(chosen.quantile(0.95)) if len(chosen) < 1 << 24 else None,
        "kl/max_sequence": float(sequence_kl.max()),
        "kl/target": target,
        "kl/error": batch.kl(unit).mean / target - 1,
        "kl/k1": k1_mean.mean,
        "kl/k1_stderr": k1_mean.stderr if several else None,
        "kl/k1_gap": k1_gap,
        "kl/k1_gap_stderr": k1_gap_se,
        "kl/k2": batch.mean(k2(logprobs, batch.ref_logprobs)).mean,
        "kl/k3": batch.mean(k3(logprobs, batch.ref_logprobs)).mean,
        "policy/entropy": batch.mean(batch.entropy).mean,
        "policy/logprob_gap": logprob_gap,
        "policy/logprob_gap_stderr": logprob_gap_se,
        **(engine_figures(batch) if ppo.engine else {}),
        "rollout/tokens": int(mask.sum()),
        "rollout/response_length": float(lengths.double().mean()),
        "rollout/eos_rate": float(batch.ended.double().mean()),
        "rollout/equal_groups": _equal_groups(batch, group),
        "rollout/distinct_responses": _distinct(batch.prompts, batch.responses, group),
    }


def objective_metrics(batch: RolloutBatch, penalty: float) -> dict[str, Any]:
    """The keys of scores and what they are made of. `penalty`: mean of coef times the KL of a sequence."""
    scored, raw = batch.scored, batch.scores[REWARD]
    scores, shaped = raw[scored], batch.shaped_scores[scored]
    score = mean_of_groups(float64(torch.where(scored, raw, 0.0)), float64(scored), batch.group)
    scores_shaped = float(shaped.mean())  # nan if none is scored
    return {
        "objective/scores": float(scores.mean()),
        "objective/scores_std": float(scores.std(correction=0)) if len(scores) else math.nan,
        "objective/scores_stderr": score.stderr if len(scores) > 1 else None,
        "objective/scores_deciles": scores.double().quantile(DECILES).tolist() if len(scores) else None,
        "objective/scores_shaped": scores_shaped,
        "objective/rlhf_reward": scores_shaped - penalty,
        "objective/kl_share": penalty / (penalty + abs(scores_shaped)) if penalty > 0 else 0.0,
        "rollout/score_length_corr": correlation(scores, batch.lengths[scored]) if len(scores) else None,
        "rollout/unscored": int((~scored).sum()),
        **{
            f"{key}/{name.removeprefix(prefix)}": float(part.nanmean())
            for prefix, key in ((TERM, "reward"), (RAW, "raw"))
            for name, part in batch.scores.items()
            if name.startswith(prefix)
        },
        **{f"penalty/{name}": float(part.mean()) for name, part in batch.penalties.items()},
    }


def engine_figures(batch: RolloutBatch) -> dict[str, float]:
    """How far the sampler's log-probs are from those of the policy, and the share of tokens whose weight is cut."""
    gaps = (batch.logprobs - batch.drawn)[batch.mask].abs()
    cut = importance(batch)[batch.mask] >= MOST_WEIGHT
    return {
        "rollout/engine_gap": float(gaps.mean()),
        "rollout/engine_gap_max": float(gaps.max()),
        "rollout/engine_cut": float(cut.double().mean()),
    }


def _equal_groups(batch: RolloutBatch, size: int) -> int | None:
    """Number of groups with equal scores, which learn from their KL only; None for groups of one."""
    if size == 1:
        return None
    shaped = torch.where(batch.scored, batch.shaped_scores, math.nan).view(-1, size).double()
    spread = shaped.nan_to_num(nan=-math.inf).amax(1) - shaped.nan_to_num(nan=math.inf).amin(1)
    return int((spread <= 0).sum())


def _distinct(prompts: Sequence[str], responses: Sequence[str], size: int) -> float:
    """Share of different texts among one response to each prompt, at most 1: the mean over the `size` of a group.

    Equal responses to one prompt do not count as equal: they may all be right.
    """
    draws = [(set(prompts[i::size]), set(responses[i::size])) for i in range(size)]
    return sum(min(1.0, len(texts) / len(asked)) for asked, texts in draws) / size
