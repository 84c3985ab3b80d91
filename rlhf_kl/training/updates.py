"""One update of a run, as a row of `metrics.jsonl`."""

from __future__ import annotations

import math
from typing import Any

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.events import Event, WeightsLost
from rlhf_kl.ops.masked import all_finite
from rlhf_kl.ppo.checks import check_first
from rlhf_kl.ppo.metrics import update_row
from rlhf_kl.rewards.scorer import Scorers, mean_metrics
from rlhf_kl.sharding import held_share, local
from rlhf_kl.training.start import Training
from rlhf_kl.types import REWARD, RolloutBatch


def update_policy(
    config: TrainConfig,
    training: Training,
    scorers: Scorers,
    ranks: Ranks,
    step: int,
    made: RolloutBatch | None = None,
) -> tuple[dict[str, Any], RolloutBatch, list[Event]]:
    """Update number `step` (from 1): its row, the rollout and its events. One that is not finite is left out.

    `made`: the rollout, where it was made before.
    """
    clock, trainer = training.clock, training.trainer
    with clock.timed("time/update_s"):
        update = trainer.update(step, made)
    rollout, events = update.rollout, update.events
    row = update_row(update, trainer.settings)
    seconds = {"time/rollout_s": 0.0, "time/score_s": 0.0} | clock.read()
    if made is None:
        seconds["time/update_s"] -= seconds["time/rollout_s"] + seconds["time/score_s"]
    if not all(ranks.all(all_finite(map(local, trainer.trained)))):
        events.append(WeightsLost())
    raw = [score for score in rollout.scores[REWARD].tolist() if not math.isnan(score)]
    row |= seconds | {
        "step": step,
        "episodes": step * config.rollout.batch_size,
        "objective/scores_clipped": training.shaping.clipped(raw),
        **mean_metrics(ranks.all(scorers.logged_metrics())),
        "dist/world_size": ranks.count,
        "dist/held": held_share(trainer.trained),
    }
    row = ranks.first(row)  # times are those of the first process
    if step <= config.ppo.value_warmup + 1:
        check_first(row, float32=config.run.dtype == "float32")
    return row, rollout, events
