"""`rlhf-kl train`, `rlhf-kl sft` and `rlhf-kl reward-model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_kl.cli.options import (
    Config,
    Merge,
    OutputDir,
    Overwrite,
    Quiet,
    Resume,
    Seed,
    Set,
    Updates,
    loading,
    overrides,
)

if TYPE_CHECKING:
    from rlhf_kl.config.schema import Kind


def train(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    updates: Updates = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    """Train a policy with PPO and keep its KL to the reference at the target."""
    _train("train", config, set_, output_dir, seed, resume, overwrite, merge, quiet, updates)


def sft(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    """Train a language model on texts: fine-tuning, or from scratch."""
    _train("sft", config, set_, output_dir, seed, resume, overwrite, merge, quiet)


def reward_model(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    """Train a reward model from preference pairs (Bradley-Terry)."""
    _train("reward-model", config, set_, output_dir, seed, resume, overwrite, merge, quiet)


def _train(
    kind: Kind,
    config: str,
    sets: Sequence[str] | None,
    output_dir: Path | None,
    seed: int | None,
    resume: bool,
    overwrite: bool,
    merge: bool,
    quiet: bool,
    updates: int | None = None,
) -> None:
    from rlhf_kl.config.load import load_config
    from rlhf_kl.config.plugins import check_plugins
    from rlhf_kl.config.schema import TrainConfig

    # Errors of the config come before torch is imported.
    changes = overrides(sets, output_dir, seed)
    settings: Any = load_config(kind, config, changes)
    if updates is not None:
        changes.append(f"ppo.total_episodes={updates * settings.rollout.batch_size}")
        settings = load_config(kind, config, changes)
    if isinstance(settings, TrainConfig):
        check_plugins(settings)
    with loading(quiet):
        from rlhf_kl import ui
        from rlhf_kl.commands.closing import supervised_closing, train_closing
        from rlhf_kl.commands.merge import merge_final, require_adapter
        from rlhf_kl.commands.session import train_command
        from rlhf_kl.commands.supervised import run_supervised
        from rlhf_kl.commands.train import run_train

    ui.start(quiet)
    if merge:
        require_adapter(settings)
    runs: dict[str, Any] = {"train": run_train, "sft": run_supervised, "reward-model": run_supervised}
    summary = train_command(runs[kind], settings, resume=resume, overwrite=overwrite)
    if not summary:  # the first process shows it
        return
    if merge:
        merge_final(settings)
    closing = train_closing if kind == "train" else supervised_closing
    ui.print_summary(*closing(summary, settings.run.output_dir))
