"""What turns a run back or ends it: a KL above the ceiling, and updates whose numbers are not finite."""

from __future__ import annotations

import math
from typing import Any

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import GuardStop
from rlhf_kl.models.lora import checkpointed
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.trainers.ppo import PPOTrainer, Update

ROLLBACK_RAISE = 2.0


class RunGuards:
    """Looks at every update before its row is written.

    Its state is empty whenever a checkpoint is written, so a resumed run has nothing to take over.
    """

    def __init__(self, config: TrainConfig, trainer: PPOTrainer, folder: RunFolder, same_start: bool) -> None:
        self.config, self.trainer, self.folder = config, trainer, folder
        self.same_start = same_start  # the reference is the starting policy
        self.skipped = 0  # in a row
        self.turned_back = False  # and no update has gone well since

    def watch(self, update: Update) -> str | None:
        """Turns the policy back where it must be, telling it in the row; or the reason why the run must end.

        Errors: GuardStop where there is nothing to turn back to.
        """
        turned = self._roll_back_above_ceiling(update.row)
        return turned or self._watch_numbers(update) or self._stop_above_ceiling(update.row)

    # ---- numbers that are not finite

    def _watch_numbers(self, update: Update) -> str | None:
        if update.skipped is None and not update.weights_lost:
            self.skipped, self.turned_back = 0, False
            return None
        self.skipped += 1
        limit = self.config.ppo.max_skipped
        if self.skipped < limit and not update.weights_lost:
            return None
        what = (
            "a weight is not finite any more"
            if update.weights_lost
            else f"{limit} updates in a row were skipped: {update.skipped} was not finite"
        )
        found = self._regular_checkpoints()
        if self.turned_back or not found:
            since = "again after going back to a checkpoint" if self.turned_back else "with no checkpoint to go back to"
            return f"{what} in update {update.row['step']}, {since}"
        self._load(found[-1])
        self.skipped, self.turned_back = 0, True
        update.row["alerts"].append(f"rolled-back: {what}; back to the policy of update {found[-1].step}")
        return None

    # ---- the ceiling

    def _roll_back_above_ceiling(self, row: dict[str, Any]) -> str | None:
        """The ceiling's `rollback`: back to the newest policy that measured below it, with beta raised.

        Where beta cannot be raised (it is 0, or at its bound) the same would happen again: the reason to end.
        """
        limit, measured = self._ceiling("rollback"), self._kl(row)
        if limit is None or not measured > limit:
            return None
        control = self.trainer.controller
        before = control.coef
        control.raise_coef(ROLLBACK_RAISE)
        if not control.coef > before:
            return f"KL {measured:.4g} is above the ceiling {limit:.4g}, and beta {before:.4g} cannot be raised"
        # A checkpoint of update k holds the policy that row k + 1 measured.
        key = f"kl/{self.config.kl.unit}"
        past = {old["step"]: old[key] for old in read_jsonl(self.folder.metrics) if old.get(key) is not None}
        good = [c for c in self._regular_checkpoints() if past.get(c.step + 1, limit) < limit]
        if good:
            self._load(good[-1])
        elif self.same_start:
            self.trainer.core.policy.load_state_dict(self.trainer.reference.state_dict())
        else:
            raise GuardStop(f"KL {measured:.4g} is above the ceiling {limit:.4g}, and there is nothing to roll back to")
        row["kl/coef_next"] = control.coef
        where = f"update {good[-1].step}" if good else "the start"
        row["alerts"].append(
            f"rolled-back: KL {measured:.4g} is above the ceiling {limit:.4g}; back to the policy of {where}, "
            f"beta is {control.coef:.4g} now"
        )
        return None

    def _stop_above_ceiling(self, row: dict[str, Any]) -> str | None:
        limit, measured = self._ceiling("stop"), self._kl(row)
        if limit is None or not measured > limit:
            return None
        return (
            f"KL {measured:.4g} nats per {self.config.kl.unit} is above the ceiling {limit:.4g} in update {row['step']}"
        )

    def _ceiling(self, action: str) -> float | None:
        ceiling = self.config.kl.ceiling
        return self.trainer.ceiling if ceiling is not None and ceiling.action == action else None

    def _kl(self, row: dict[str, Any]) -> float:
        value = row[f"kl/{self.config.kl.unit}"]
        return math.nan if value is None else float(value)

    # ---- checkpoints

    def _regular_checkpoints(self) -> list[Checkpoint]:
        """Whole ones. One that a signal made in between is no choice, or a resumed run would differ."""
        every = self.config.checkpoint.every
        return [c for c in checkpoints(self.folder.checkpoints) if c.step % every == 0 and c.damage() is None]

    def _load(self, checkpoint: Checkpoint) -> None:
        checkpoint.load_model(checkpointed(self.trainer.core))
        checkpoint.load_optimizer(self.trainer.optimizer)
