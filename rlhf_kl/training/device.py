"""Where a command computes: its device, its number type, its processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from rlhf_kl.config.schema import AnyConfig
from rlhf_kl.config.schema.sections import RunSection
from rlhf_kl.distributed import Ranks, joined_group
from rlhf_kl.errors import InputError
from rlhf_kl.shell import shell_command
from rlhf_kl.ui import log

if TYPE_CHECKING:
    import torch

SLOWER = 1.2  # a factor that is told
C = TypeVar("C", bound=AnyConfig)
LACKS_ON_MPS = (
    "mps: rlhf-kl was never run on it. It lacks float64, whose sums come to the CPU, CUDA graphs, and several "
    "processes; AdamW takes several kernels. run.device=cpu is measured"
)
LAUNCH = f"start them with {shell_command('torchrun')} --nproc-per-node N -m rlhf_kl train --config X.yaml"


def on_this_machine(config: C, *, stored: bool = False) -> C:
    """The config with a number type in place of `run.dtype: auto`.

    bfloat16 on a CUDA GPU that computes in it, float16 on one that would only emulate it, which is slow, else float32.
    `stored`: to read a run, whose 16 bits count as auto, or a lone model; a log line tells a type that is neither the
    run's nor float32.
    """
    if config.run.dtype == "float32" or not (stored or config.run.dtype == "auto"):
        return config
    import torch

    device = pick_device(config.run).type
    dtype = "float32"
    if device == "cuda":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if stored and dtype != {"auto": "float32"}.get(config.run.dtype, config.run.dtype):
        log.info(f"run.dtype: {config.run.dtype}; here, on {device}, the models compute in {dtype}")
    run = config.run.model_copy(update={"dtype": dtype})
    return cast(C, config.model_copy(update={"run": run}))


def half_slowdown(section: RunSection) -> float:
    """Time of a product in 16 bits over that in float32, measured here for such a run on a CPU; 1 for others."""
    import torch

    if section.dtype in ("auto", "float32") or pick_device(section).type != "cpu":
        return 1.0
    seconds = []
    for dtype in (getattr(torch, section.dtype), torch.float32):
        x = torch.ones(512, 512, dtype=dtype)
        moments = [(torch.mm(x, x), time.perf_counter())[1] for _ in range(6)]
        seconds.append(min(end - start for start, end in itertools.pairwise(moments)))
    return seconds[0] / seconds[1]


def pick_device(section: RunSection) -> torch.device:
    """The device of a run. Errors: InputError for a missing one."""
    import torch

    name = section.device
    if name == "auto":
        mps = torch.backends.mps.is_available() and group_size() == 1  # several processes cannot work together on it
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
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

    device, count = pick_device(section), group_size()
    if count > 1 and not group:
        raise InputError("several processes: this command runs in one; train, sft and reward-model can run in several")
    if count > 1 and (device.index is not None or device.type == "mps"):
        raise InputError(f"run.device: {section.device}: with several processes write cuda or cpu; each takes its own")
    here, visible = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if device.type == "cuda" and here > visible:
        raise InputError(f"{here} processes share {visible} CUDA devices here: start one for each")
    for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise InputError(
                f"accelerate's {name} is not used here: write policy.shard and reference.shard in the config; {LAUNCH}"
            )
    if count > 1 and device.type == "cuda":
        # A single visible one is this process's own, as with Slurm's --gpus-per-task=1.
        index = (os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "not set") if visible > 1 else "0"
        if not index.isdigit() or int(index) >= visible:
            error = InputError(f"LOCAL_RANK is {index}, and there are {visible} CUDA devices here: {LAUNCH}")
            error.told = False  # the others may have theirs
            raise error
        device = torch.device("cuda", int(index))
    if device.index is not None:
        torch.cuda.set_device(device)
    if device.type == "mps":
        log.info(LACKS_ON_MPS)
    # cuDNN's attention makes a plan for each new length, which takes longer than a rollout; torch has other kernels.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def group_size() -> int:
    """Processes of the group that a launcher started, 1 without one. Errors: InputError for copies that train alone."""
    copies = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"
    if "SLURM_STEP_ID" in os.environ:  # srun started this process, not the shell of sbatch or salloc
        copies = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or copies
    if "WORLD_SIZE" not in os.environ and int(copies) > 1:
        raise InputError(
            f"srun or mpirun started {copies} processes that do not know of each other: let it start one torchrun on "
            "each node, as in the script of `rlhf-kl guide cluster`; for separate runs set WORLD_SIZE=1"
        )
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined(section: RunSection) -> Iterator[Ranks]:
    """The processes of a run, this one alone or the group that a launcher started."""
    if group_size() == 1:
        yield Ranks()
        return
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise InputError(f"WORLD_SIZE is set, but not {', '.join(missing)}: {LAUNCH}")
    from torch import distributed

    backend = "nccl" if run_device(section, group=True).type == "cuda" else "gloo"
    if not distributed.is_initialized():  # by an earlier command of this process
        distributed.init_process_group(backend, timeout=timedelta(minutes=section.wait_minutes))
    with joined_group(section.wait_minutes) as group:
        yield group
