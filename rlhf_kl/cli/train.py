"""`rlhf-kl train`."""

from __future__ import annotations

from rlhf_kl.cli.loading import loading
from rlhf_kl.cli.options import Config, Merge, OutputDir, Overwrite, Quiet, Resume, Seed, Set, overrides


def train(
    config: Config,
    set_: Set = None,
    output_dir: OutputDir = None,
    seed: Seed = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    merge: Merge = False,
    quiet: Quiet = False,
) -> None:
    """Train a policy with PPO and keep its KL to the reference at the target."""
    from rlhf_kl.config.load import load_config
    from rlhf_kl.config.plugins import check_plugins

    # Errors of the config come before torch is imported.
    settings = load_config("train", config, overrides(set_, output_dir, seed))
    check_plugins(settings)
    with loading(quiet):
        from rlhf_kl.commands.closing import train_closing
        from rlhf_kl.commands.merge import merge_final, require_adapter
        from rlhf_kl.commands.session import train_command
        from rlhf_kl.commands.train import run_train
        from rlhf_kl.run.display import TrainingDisplay

    display = TrainingDisplay(quiet, settings.updates, settings.kl.target_value, settings.kl.unit)
    if merge:
        require_adapter(settings)
    summary = train_command(run_train, settings, resume=resume, overwrite=overwrite, display=display)
    if not summary:  # the first process shows it
        return
    if merge:
        merge_final(settings, display)
    display.summary(*train_closing(summary, settings.run.output_dir))
