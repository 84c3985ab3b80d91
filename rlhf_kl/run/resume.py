"""The start of a resumed run: its newest undamaged checkpoint, and checks that it is still the same run."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch

from rlhf_kl.config.load import config_diff, load_config
from rlhf_kl.config.plugins import configured_controller, controller_class
from rlhf_kl.config.schema import AnyConfig, Kind, RewardModelConfig, SFTConfig, TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers import CONTROLLERS
from rlhf_kl.plugins import takes
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints, newest_whole, set_aside
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.run.versions import versions
from rlhf_kl.ui import log

FREE_TO_CHANGE = ("run.name", "run.output_dir", "eval.", "checkpoint.", "tracking.", "reward.time_limit")
# Free too, but sums are taken in another order.
ROUNDING_ONLY = (
    *("ppo.microbatch_size", "sft.microbatch_size", "reward_model.microbatch_size"),
    *("policy.shard", "reference.shard"),
)


def kind_of(config: AnyConfig) -> Kind:
    """The command that a config is for."""
    kinds: dict[type, Kind] = {SFTConfig: "sft", RewardModelConfig: "reward-model", TrainConfig: "train"}
    return kinds[type(config)]


def check_resumed(folder: RunFolder, config: AnyConfig) -> dict[str, Any] | None:
    """Show a message on the state of the folder; return the summary of a finished run, None for one that must run.

    Errors: InputError if the folder's run has another config, or another version wrote it.
    """
    finished = finished_summary(folder)
    further = finished is not None and isinstance(config, TrainConfig) and config.updates > finished["steps"]
    started = bool(checkpoints(folder.checkpoints))
    if further or finished is None:
        _check_format(folder)
    if started or finished is not None:
        check_config(folder, config)
    if finished is not None:
        log.info(f"{folder.path} holds a finished run{', going on with more episodes' if further else ''}")
    elif not folder.config.exists():
        log.info(f"{folder.path} holds no run yet: starting one")
    elif not started:
        log.info(f"{folder.path} holds a run without a checkpoint: starting it from its beginning")
    return None if further else finished


def last_checkpoint(folder: RunFolder, config: AnyConfig) -> Checkpoint | None:
    """The checkpoint to resume from; None if there is none yet.

    A damaged one is renamed, with an alert, and the previous one is used.
    Errors: InputError if the config changed in a way that matters, or every checkpoint is damaged.
    """
    if not checkpoints(folder.checkpoints):
        return None
    for line in check_config(folder, config):
        log.warning(f"resume: {line}: sums are taken in another order, so figures may differ in their last digits")
    newest, problems = newest_whole(folder.checkpoints)
    if newest is None:
        raise InputError(
            *(f"{folder.checkpoints}: every checkpoint is damaged: {problem}" for problem in problems),
            f"{folder.path}: --resume has no checkpoint to start from; --overwrite starts anew",
        )
    for checkpoint in checkpoints(folder.checkpoints):
        if checkpoint.step > newest.step:
            set_aside(checkpoint)
    for problem in problems:
        log.warning(f"resume: damaged checkpoint {problem}; going on from {newest.path.name}")
    return newest


def _check_format(folder: RunFolder) -> None:
    """Errors: InputError if another version of this program wrote the checkpoint."""
    for checkpoint in reversed(checkpoints(folder.checkpoints)):
        try:
            checkpoint.state()
        except InputError:
            if checkpoint.damage() is None:
                raise
        except (OSError, ValueError, AttributeError):
            pass  # damaged: the previous one is used
        else:
            return


def check_config(folder: RunFolder, config: AnyConfig) -> list[str]:
    """Changes since the run began that change only rounding.

    Errors: InputError with the list of the changes that matter.
    """
    before = load_config(kind_of(config), folder.config, [])
    lines = [line for line in config_diff(before, config) if not line.startswith(FREE_TO_CHANGE)]
    if _may_grow(before, config):
        lines = [line for line in lines if not line.startswith("ppo.total_episodes:")]
    changed = [line for line in lines if not line.startswith(ROUNDING_ONLY)]
    if changed:
        raise InputError(
            f"{folder.path}: --resume goes on with the same config, but these keys changed:",
            *changed,
            "set them back, or name another --output-dir, or start this run anew with --overwrite",
        )
    return lines


def _may_grow(before: AnyConfig, now: AnyConfig) -> bool:
    """Whether more episodes are the change, and neither learning rate nor controller depends on their number."""
    if not isinstance(before, TrainConfig) or not isinstance(now, TrainConfig):
        return False
    grows = now.ppo.total_episodes > before.ppo.total_episodes
    return grows and before.ppo.lr_schedule == "constant" and not _controller_counts_episodes(before, now)


def _controller_counts_episodes(before: TrainConfig, now: TrainConfig) -> bool:
    """Whether the controller depends on the number of episodes; a plugin that takes this number counts as one."""
    kind = before.kl.controller.kind
    if kind not in CONTROLLERS:
        return takes(controller_class(kind), "total_episodes")
    short, grown = (configured_controller(before.kl, c.ppo, before.rollout).controller for c in (before, now))
    return bool(vars(short) != vars(grown))


def finished_summary(folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a finished run, else None."""
    if not folder.summary.is_file() or not folder.final.is_dir():
        return None
    try:
        summary: dict[str, Any] = json.loads(folder.summary.read_text(encoding="utf-8"))
        return summary if summary["stopped_by"] is None else None
    except (ValueError, KeyError, TypeError):  # damaged: the last checkpoint can rebuild it
        return None


# ---- influences on the figures beside the config ----


def environment(device: torch.device, processes: int = 1) -> dict[str, str]:
    """Library versions, processes, threads and hardware: if one differs, last digits may differ."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        **versions(),
        "processes": str(processes),
        "threads": str(torch.get_num_threads()),
        "device": name,
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
    }


def report_differences(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Show an alert about changes since the checkpoint was written."""
    changed = [
        f"{key} {before.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
    if changed:
        log.warning(
            f"resume: {', '.join(changed)} since the checkpoint: figures may differ from those of an uninterrupted run"
        )


def check_fingerprints(before: Mapping[str, str], now: Mapping[str, str], where: str) -> None:
    """Errors: InputError with the config keys whose content has changed since the run in `where` began."""
    problems = [
        f"{key}: its content has changed since the run in {where} began; --resume needs the old content"
        for key in now
        if key in before and before[key] != now[key]
    ]
    if problems:
        raise InputError(*problems)
