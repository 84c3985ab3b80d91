"""Whether a run may start or go on, and what influences its figures beside the config."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from rlhf_kl.config.contents import recorded
from rlhf_kl.config.inputs import changed_inputs, contents
from rlhf_kl.config.named import plugin_files, plugins_of
from rlhf_kl.config.problems import checked
from rlhf_kl.config.resolve import config_diff, flat, load_config
from rlhf_kl.config.schema import MODELS, AnyConfig, Kind, TrainConfig
from rlhf_kl.config.schema.reward import SERVERS
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.control import law_class, option_names
from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import RunFolder, copy_name
from rlhf_kl.run.log import write_json
from rlhf_kl.ui import log

FREE_TO_CHANGE = ("run.name", "run.output_dir", "eval.", "checkpoint.", "tracking.", "reward.time_limit")
OF_A_SERVER = ("url", "headers", "timeout", "retries", "batch")  # free too: it may have moved
# Free too, but sums are taken in another order.
ROUNDING_ONLY = (
    *("ppo.microbatch_size", "sft.microbatch_size", "reward_model.microbatch_size"),
    *("policy.shard", "reference.shard"),
)
PACKAGES = (
    *("rlhf-kl", "torch", "transformers", "accelerate", "tokenizers", "safetensors", "datasets", "peft", "numpy"),
    *("pydantic", "tensorboard"),
)


def kind_of(config: AnyConfig) -> Kind:
    """The command that a config is for."""
    return next(kind for kind, model in MODELS.items() if type(config) is model)


def check_outside(folder: RunFolder, config: AnyConfig) -> None:
    """Errors: InputError if --overwrite would remove something that the config names.

    A plugin's copy (`file.py:name`) is no error: it is read first and written again.
    """
    problems = [
        f"{key}: {value} lies in the folder that --overwrite empties: copy it elsewhere first"
        for key, value in flat(config.model_dump()).items()
        if isinstance(value, str)
        and Path(value).is_absolute()  # as every path of a config that is on the disk
        and folder.path.resolve() in Path(value).resolve().parents
        and Path(value).exists()
    ]
    if problems:
        raise InputError(*problems)


def check_config(folder: RunFolder, config: AnyConfig) -> None:
    """Alerts for changes since the run began that change only rounding.

    Errors: InputError with the list of the changes that matter.
    """
    kind = kind_of(config)
    # Of a function that has changed the run's own config names its copy, other configs the function.
    stored: list[AnyConfig] = [checked(MODELS[kind], read_yaml(folder.config)), load_config(kind, folder.config)]
    before = min(stored, key=lambda each: len(config_diff(each, config)))
    servers = [plugin.where for plugin in plugins_of(config) if plugin.ref in SERVERS]
    free = (*FREE_TO_CHANGE, *(f"{where}.{name}" for where in servers for name in OF_A_SERVER))
    lines = [line for line in config_diff(before, config) if not line.startswith(free)]
    if _may_grow(before, config):
        lines = [line for line in lines if not line.startswith("ppo.total_episodes:")]
    changed = [line for line in lines if not line.startswith(ROUNDING_ONLY)]
    if changed:
        raise InputError(
            f"{folder.path}: --resume goes on with the same config, but these keys changed:",
            *changed,
            "set them back, or name another --output-dir, or start this run anew with --overwrite",
        )
    for line in lines:
        log.warning(f"resume: {line}: sums are taken in another order, so figures may differ in their last digits")


def keep_inputs(folder: RunFolder, config: AnyConfig, *, anew: bool) -> None:
    """Write what the run is made with; of a run that goes on stays what it began with, none of an earlier build's."""
    if anew or folder.inputs.is_file():
        before = {} if anew else recorded(folder.path)
        write_json(folder.inputs, contents(config) | before)


def tell_changed(folder: RunFolder, config: AnyConfig, *, finished: bool) -> None:
    """Alerts for files that have changed since the run began; models too, but for those that are refused later."""
    later = isinstance(config, TrainConfig) and not finished  # see `check_fingerprints`
    for keys, line in changed_inputs(folder.path, config, lambda key: not (later and key.endswith(".model"))).items():
        mixed = not finished and any(key.startswith("reward.") for key in keys)
        log.warning(line + "; the scale of the scores is that of the old one" * mixed)


def _may_grow(before: AnyConfig, now: AnyConfig) -> bool:
    """Whether more episodes are the change, and neither learning rate nor controller depends on their number."""
    if not isinstance(before, TrainConfig) or not isinstance(now, TrainConfig):
        return False
    if now.ppo.total_episodes < before.ppo.total_episodes or before.ppo.lr_schedule != "constant":
        return False
    return "total_episodes" not in option_names(law_class(before.kl.controller.kind))


def plugin_copies(config: AnyConfig) -> dict[str, bytes]:
    """The plugins' files, by the names under which the run keeps them."""
    copies: dict[str, bytes] = {}
    for source in dict.fromkeys(path.resolve() for path in plugin_files(config).values()):
        name, count = copy_name(source.name), 1
        while name in copies:  # a/mine.py beside b/mine.py
            count += 1
            name = f"{Path(name).stem}-{count}.py"
        copies[name] = source.read_bytes()
    return copies


def check_fingerprints(before: Mapping[str, str], now: Mapping[str, str], where: Path) -> None:
    """Errors: InputError with the config keys whose content has changed since the run in `where` began."""
    problems = [
        f"{key}: its content has changed since the run in {where} began; --resume needs the old content"
        for key in now
        if key in before and before[key] != now[key]
    ]
    if problems:
        raise InputError(*problems)


def environment(device: torch.device, processes: int) -> dict[str, str]:
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


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that influence a result; imports none of them."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def git_revision(path: Path) -> str | None:
    """Commit of the repository around `path`, with `-dirty` if tracked files differ; None without a repository."""
    command = ["git", "-C", str(path), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
