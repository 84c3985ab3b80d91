"""`rlhf-kl reward-model`."""

from __future__ import annotations

from rlhf_kl.cli.loading import loading
from rlhf_kl.cli.options import Config, Merge, OutputDir, Overwrite, Quiet, Resume, Seed, Set, overrides


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
    from rlhf_kl.config.load import load_config

    # Errors of the config come before torch is imported.
    settings = load_config("reward-model", config, overrides(set_, output_dir, seed))
    with loading(quiet):
        from rlhf_kl.commands.closing import supervised_closing
        from rlhf_kl.commands.merge import merge_final, require_adapter
        from rlhf_kl.commands.reward_model import run_reward_model
        from rlhf_kl.commands.session import train_command
        from rlhf_kl.run.display import TrainingDisplay

    display = TrainingDisplay(quiet)
    if merge:
        require_adapter(settings)
    summary = train_command(run_reward_model, settings, resume=resume, overwrite=overwrite, display=display)
    if not summary:  # the first process shows it
        return
    if merge:
        merge_final(settings, display)
    display.summary(*supervised_closing(summary, settings.run.output_dir))
