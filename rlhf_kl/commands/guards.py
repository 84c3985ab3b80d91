"""Guards that roll a run back or end it: for a KL above the ceiling, and for numbers that are not finite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_kl.commands.training import Training
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.rollout.collect import UNSCORED
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.types import RolloutBatch

ROLLBACK_RAISE = 2.0
ROLLBACKS = 5  # at most in a run
PATIENCE = 10  # shortened updates in a row whose KL may be above the ceiling
FALLING = 0.9  # times the first of them: a KL below this is falling


@dataclass(frozen=True)
class StepResult:
    """One step of the run: its row, and the data behind it."""

    row: dict[str, Any]
    rollout: RolloutBatch
    skipped: str | None  # the figure that was not finite; steps of the update were left out
    weights_lost: bool  # a weight is not finite any more


class RunGuards:
    """Checks every update before its row is written."""

    def __init__(self, config: TrainConfig, training: Training, folder: RunFolder) -> None:
        self.config, self.training, self.folder = config, training, folder
        # Both are 0 and False whenever a checkpoint is written.
        self.skipped = 0  # in a row
        self.turned_back = False  # and no update has gone well since
        self.rollbacks = 0
        self.above: list[float] = []  # KLs above a ceiling that shortens updates, in a row

    def watch(self, update: StepResult) -> str | None:
        """Roll the policy back if necessary, with an alert in the row; return a reason if the run must end."""
        return self._watch_ceiling(update.row) or self._watch_numbers(update)

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {"rollbacks": self.rollbacks, "above": list(self.above)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.rollbacks, self.above = state["rollbacks"], list(state["above"])

    # ---- numbers that are not finite

    def _watch_numbers(self, update: StepResult) -> str | None:
        if update.skipped is None and not update.weights_lost:
            self.skipped, self.turned_back = 0, False
            return None
        if update.skipped == UNSCORED and not update.weights_lost:  # nothing is broken: going back would not help
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
        whole = self._regular_checkpoints()
        if self.turned_back or not whole:
            since = "again after going back to a checkpoint" if self.turned_back else "with no checkpoint to go back to"
            return f"{what} in update {update.row['step']}, {since}"
        self.training.go_back(whole[-1])
        self.skipped, self.turned_back = 0, True
        update.row["alerts"].append(f"rolled-back: {what}; back to the policy of update {whole[-1].step}")
        return None

    # ---- the ceiling

    def _watch_ceiling(self, row: dict[str, Any]) -> str | None:
        ceiling, limit = self.config.kl.ceiling, self.config.kl.ceiling_value
        value = row[f"kl/{self.config.kl.unit}"]
        if ceiling is None or limit is None or value is None or not value > limit:
            self.above = []
            return None
        where = f"KL {value:.4g} nats per {self.config.kl.unit} is above the ceiling {limit:.4g}"
        if ceiling.action == "stop":
            return f"{where} in update {row['step']}"
        if ceiling.action == "rollback":
            return self._roll_back(row, where, limit)
        frozen = row["step"] <= self.config.ppo.value_warmup  # then nothing is shortened
        return None if frozen else self._lose_patience(value, where)

    def _roll_back(self, row: dict[str, Any], where: str, limit: float) -> str | None:
        """Restore the newest checkpoint whose policy was below the ceiling, with beta doubled.

        Each further rollback doubles beta once more. Returns a reason to end the run if beta cannot be raised (it is
        0, or at its bound), or if doubling it has not helped.
        """
        control = self.training.trainer.controller
        if self.rollbacks == ROLLBACKS:
            return f"{where} again, after {ROLLBACKS} rollbacks, each of which doubled beta"
        # A checkpoint of update k holds the policy that row k + 1 measured.
        key = f"kl/{self.config.kl.unit}"
        past = {old["step"]: old[key] for old in read_jsonl(self.folder.metrics) if old.get(key) is not None}
        good = [c for c in self._regular_checkpoints() if past.get(c.step + 1, limit) < limit]
        good = self.training.trainer.ranks.first(good)  # only its disk counts
        if not good:
            return f"{where}, and so was the policy of every checkpoint: there is nothing to roll back to"
        raised = control.raised
        self.training.go_back(good[-1])
        if not control.raise_coef(ROLLBACK_RAISE * raised / control.raised):
            return f"{where}, and beta {control.coef:.4g} cannot be raised"
        self.rollbacks += 1
        row["kl/coef_next"] = control.coef
        row["alerts"].append(
            f"rolled-back: {where}; back to the policy, its optimizer and its controller of "
            f"{f'update {good[-1].step}' if good[-1].step else 'the start'}, beta is {control.coef:.4g} now "
            f"(rollback {self.rollbacks} of at most {ROLLBACKS})"
        )
        return None

    def _lose_patience(self, value: float, where: str) -> str | None:
        """A reason to end the run if the KL of shortened updates stays above the ceiling and does not fall."""
        self.above = [*self.above, value][-PATIENCE:]
        if len(self.above) < PATIENCE or value < FALLING * self.above[0]:
            return None
        return f"{where} for {PATIENCE} updates in a row, although each was shortened"

    # ---- checkpoints

    def _regular_checkpoints(self) -> list[Checkpoint]:
        """Complete ones at regular steps. One that a signal made in between would make a resumed run differ."""
        every = self.config.checkpoint.every
        ranks, found = self.training.trainer.ranks, []
        if ranks.writes:
            found = [c for c in checkpoints(self.folder.checkpoints) if c.step % every == 0 and c.damage() is None]
        return ranks.first(found)
