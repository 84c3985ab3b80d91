"""The start of every training command: the folder, a finished run, the device, the processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhf_kl import ui
from rlhf_kl.config.schema import AnyConfig, RunSection
from rlhf_kl.distributed import Ranks, joined_group
from rlhf_kl.errors import InputError
from rlhf_kl.memory import keep_freed_memory
from rlhf_kl.program import shell_command
from rlhf_kl.run.log import check_installed
from rlhf_kl.run.run import Run, open_run
from rlhf_kl.run.signals import ending_on_sigterm

if TYPE_CHECKING:
    import torch

C = TypeVar("C", bound=AnyConfig)
LAUNCH = f"start them with {shell_command('torchrun')} --nproc-per-node N -m rlhf_kl train --config X.yaml"


def train_command(
    work: Callable[[Any, Run], dict[str, Any]], config: AnyConfig, *, resume: bool, overwrite: bool
) -> dict[str, Any]:
    """Open the run and do its work; a finished run with --resume gives its summary.

    Of several processes the first one writes the folder; the others give {}.
    """
    check_installed(config.tracking.trackers)
    keep_freed_memory()
    config = on_this_machine(config)  # the stored config repeats the run on any machine
    with (
        ending_on_sigterm(),
        joined(config.run) as ranks,
        open_run(config, ranks, resume=resume, overwrite=overwrite) as run,
    ):
        if run.finished is None and not ranks.writes:
            ui.silence()
        summary = work(config, run) if run.finished is None else run.finished
        return summary if ranks.writes else {}


def on_this_machine(config: C) -> C:
    """The config with a number type in place of `run.dtype: auto`.

    bfloat16 on a GPU that computes in it (one that only emulates it is slow), else float32.
    """
    if config.run.dtype != "auto":
        return config
    import torch

    on_gpu = pick_device(config.run).type == "cuda"
    dtype = "bfloat16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    run = config.run.model_copy(update={"dtype": dtype})
    return cast(C, config.model_copy(update={"run": run}))


def pick_device(section: RunSection) -> torch.device:
    """The device of a run. Errors: InputError for a missing one."""
    import torch

    name = section.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"  # mps only by name: it was never measured
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"run.device: {name}: no CUDA device is available here")
    number = name.partition(":")[2]
    if number and int(number) >= torch.cuda.device_count():
        raise InputError(f"run.device: {name}: there are {torch.cuda.device_count()} CUDA devices")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("run.device: mps is not available here")
    return torch.device(name)


def run_device(section: RunSection, *, group: bool = False) -> torch.device:
    """The device of this process, made the current one; `group` says that several processes may run the command.

    Errors: InputError for a missing device, and for several processes that cannot work together.
    """
    import torch

    device, count = pick_device(section), int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and not group:
        raise InputError("several processes: this command runs in one; train, sft and reward-model can run in several")
    if count > 1 and (device.index is not None or device.type == "mps"):
        raise InputError(f"run.device: {section.device}: with several processes write cuda or cpu; each takes its own")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and here > torch.cuda.device_count():
        raise InputError(f"{here} processes share {torch.cuda.device_count()} CUDA devices here: start one for each")
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise InputError(
                f"accelerate's {name} is not used here: write policy.shard and reference.shard in the config; {LAUNCH}"
            )
    if count > 1 and device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def joined(section: RunSection) -> Iterator[Ranks]:
    """The processes of a run, this one alone or the group that a launcher started."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Ranks()
        return
    from torch import distributed

    backend = "nccl" if run_device(section, group=True).type == "cuda" else "gloo"
    if not distributed.is_initialized():  # by an earlier command of this process
        distributed.init_process_group(backend, timeout=timedelta(minutes=section.wait_minutes))
    with joined_group(section.wait_minutes) as group:
        yield group
