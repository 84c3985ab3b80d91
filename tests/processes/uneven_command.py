"""Runs one command line in every process of a group; the second makes a training pass of each row by itself."""

from __future__ import annotations

import os
import sys
from typing import Any

from rlhf_kl import cli
from rlhf_kl.trainers.ppo import PPOTrainer

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        passes = PPOTrainer.training_passes

        def one_by_one(self: PPOTrainer, rollout: Any, rows: Any, size: int) -> Any:
            return passes(self, rollout, rows, 1)

        PPOTrainer.training_passes = one_by_one  # type: ignore[method-assign]
    sys.exit(cli.run(sys.argv[1:]))
