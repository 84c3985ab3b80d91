from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.commands.findings import check_dtype
from rlhf_kl.commands.train import train_command
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.sections import RunSection
from rlhf_kl.errors import InputError
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.training.device import group_size, half_slowdown, on_this_machine, pick_device, run_device
from rlhf_kl.training.shards import shard_models
from tests.runs import Cli, sets


def test_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        with pytest.raises(InputError, match=r"run\.device: cuda:99"):
            run_device(RunSection(device="cuda:99"))
    else:
        with pytest.raises(InputError, match=r"^run\.device: cuda: "):
            run_device(RunSection(device="cuda"))
        with pytest.raises(InputError, match=r"run\.device: mps"):
            run_device(RunSection(device="mps"))


@pytest.mark.parametrize(("processes", "device"), [(1, "mps"), (2, "cpu")])
def test_mps_is_taken_by_one_process_and_told_to_be_untried(
    processes: int, device: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    with caplog.at_level("INFO", logger="rlhf_kl"):
        assert run_device(RunSection(device="auto"), group=True).type == device
    assert [line.partition(":")[0] for line in caplog.messages] == ["mps"] * (device == "mps")
    auto = TrainConfig.model_validate({"run": {"dtype": "auto"}})
    assert on_this_machine(auto).run.dtype == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device(RunSection(device="auto")).type == "cuda"


def test_several_processes_of_a_command_that_runs_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="several processes"):
        run_device(RunSection(device="cpu"))
    assert run_device(RunSection(device="cpu"), group=True).type == "cpu"


def test_what_accelerate_offers_beside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=r"FSDP .*policy\.shard"):
        run_device(RunSection(device="cpu"), group=True)


@pytest.mark.parametrize(
    ("written", "machine", "read", "dtype", "told"),
    [
        ("auto", "gpu", False, "bfloat16", None),
        ("auto", "old gpu", False, "float16", None),
        ("auto", "cpu", False, "float32", None),
        ("float32", "gpu", False, "float32", None),
        # of a run that is read where it may not have been trained
        ("bfloat16", "cpu", True, "float32", "on cpu"),
        ("bfloat16", "gpu", True, "bfloat16", None),
        ("auto", "cpu", True, "float32", None),  # as for `--model`
        ("auto", "gpu", True, "bfloat16", "on cuda"),
        ("bfloat16", "old gpu", True, "float16", "on cuda"),
        ("float16", "gpu", True, "bfloat16", "on cuda"),
        ("float16", "cpu", True, "float32", "on cpu"),
        ("float16", "gpu", False, "float16", None),
        ("float32", "gpu", True, "float32", None),
    ],
)
def test_the_type_of_a_machine(
    written: str, machine: str, read: bool, dtype: str, told: str | None, monkeypatch: Any, caplog: Any
) -> None:
    def computes_in_it(including_emulation: bool = True) -> bool:
        return including_emulation or machine == "gpu"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine != "cpu")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", computes_in_it)
    with caplog.at_level("INFO", logger="rlhf_kl"):
        config = on_this_machine(TrainConfig.model_validate({"run": {"dtype": written}}), stored=read)
    assert config.run.dtype == dtype
    assert len(caplog.messages) == (told is not None)
    assert all(f"run.dtype: {written}" in line and str(told) in line for line in caplog.messages)
    on_cpu = TrainConfig.model_validate({"run": {"dtype": written, "device": "cpu"}})
    assert on_this_machine(on_cpu).run.dtype == ("float32" if written == "auto" else written)


# ---- what a launcher tells


LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """launched("RANK=1 ...", gpus=2): these variables of launchers and no others, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def change(variables: str, gpus: int = 0) -> None:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            monkeypatch.delenv(name)
        for variable in variables.split():
            monkeypatch.setenv(*variable.split("="))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return change


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ("", 1),
        ("SLURM_NTASKS=2", 1),  # a shell of salloc
        ("SLURM_NTASKS=2 SLURM_PROCID=0", 1),  # the script of sbatch
        ("SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_ID=4294967290 SLURM_PROCID=0", 1),  # salloc's own step
        ("SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_PROCID=0", 1),
        ("SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_PROCID=1 WORLD_SIZE=8 RANK=5", 8),  # torchrun on each node
        ("SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_PROCID=1 WORLD_SIZE=1", 1),  # separate runs
        ("OMPI_COMM_WORLD_SIZE=1", 1),
        # copies that would each run alone
        ("SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_PROCID=0", None),
        ("SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=3 SLURM_PROCID=1", None),
        ("OMPI_COMM_WORLD_SIZE=2", None),
        ("PMI_SIZE=2", None),
    ],
)
def test_the_size_of_a_group(variables: str, size: int | None, launched: Callable[..., None]) -> None:
    launched(variables)
    if size is not None:
        assert group_size() == size
        return
    with pytest.raises(InputError, match="started 2 processes"):
        group_size()


@pytest.mark.parametrize(
    "line",
    [
        *("eval --model tiny --texts texts.txt", "generate --model tiny --prompt a"),
        *("train --config smoke.yaml", "sft --config sft_reviews.yaml", "reward-model --config reward_reviews.yaml"),
    ],
)
def test_every_command_refuses_such_copies(
    line: str, launched: Callable[..., None], rlhf_kl: Cli, tmp_path: Path, tiny_folder: Path
) -> None:
    launched("OMPI_COMM_WORLD_SIZE=2")
    (tmp_path / "texts.txt").write_text("ab\n")
    (tmp_path / "tiny").symlink_to(tiny_folder)
    outcome = rlhf_kl(*line.split(), "--quiet")
    assert outcome.code == 2
    (told,) = outcome.err.splitlines()
    assert "mpirun started 2 processes" in told
    assert "torchrun" in told
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("variables", "visible", "device"),
    [
        ("LOCAL_RANK=3 RANK=3", 1, "cuda:0"),  # Slurm's --gpus-per-task=1
        ("RANK=3", 1, "cuda:0"),
        ("LOCAL_RANK=3 RANK=3 LOCAL_WORLD_SIZE=4", 4, "cuda:3"),
        ("RANK=3 SLURM_LOCALID=1", 2, "cuda:1"),
        ("LOCAL_RANK=3 RANK=3", 2, "LOCAL_RANK is 3, and there are 2 CUDA devices here: start them with"),
        ("RANK=3", 2, "LOCAL_RANK is not set, and there are 2 CUDA devices here: start them with"),
        ("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", 1, "4 processes share 1 CUDA devices here"),
    ],
)
def test_the_gpu_of_one_of_several_processes(
    variables: str, visible: int, device: str, launched: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(f"WORLD_SIZE=4 {variables}", gpus=visible)
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    section = RunSection(device="cuda")
    if device.startswith("cuda:"):
        assert run_device(section, group=True) == torch.device(device)
        assert made_current == [torch.device(device)]
    else:
        with pytest.raises(InputError, match=device):
            run_device(section, group=True)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("WORLD_SIZE=4 RANK=3 LOCAL_RANK=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1", "LOCAL_RANK is 3"),
        ("WORLD_SIZE=2", "WORLD_SIZE is set"),
    ],
)
def test_a_process_of_a_group_that_cannot_begin_says_so_itself(
    variables: str, words: str, launched: Callable[..., None], rlhf_kl: Cli
) -> None:
    launched(variables, gpus=2)
    outcome = rlhf_kl("train", "smoke", *sets("run.device=cuda"), "--quiet")
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {words}")


def on_cpu(folder: Path, dtype: str) -> TrainConfig:
    return TrainConfig.model_validate({"run": {"output_dir": str(folder), "device": "cpu", "dtype": dtype}})


@pytest.mark.parametrize(
    ("precision", "dtype", "told"),
    [
        *(("fp16", "float32", 1), ("bf16", "float32", 1), ("bf16", "bfloat16", 0), ("no", "bfloat16", 0)),
        *(("fp16", "float16", 0), ("bf16", "float16", 1)),
    ],
)
def test_accelerates_precision_is_told_to_have_no_effect(
    precision: str, dtype: str, told: int, monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    train_command(lambda *_: {}, on_cpu(tmp_path / "run", dtype), resume=False, overwrite=False)
    assert len(caplog.messages) == told
    assert all(precision in line and f"run.dtype decides ({dtype})" in line for line in caplog.messages)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("delay", "level"), [(0.02, "doubtful"), (0.0, "fine")])
def test_a_cpu_without_units_for_16_bits_is_measured_and_told(
    delay: float, level: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001 if x.dtype == torch.float32 else 0.001 + delay)
        return x

    monkeypatch.setattr(torch, "mm", product)
    config = on_cpu(tmp_path / "run", dtype)
    assert (half_slowdown(config.run) > 5) == (delay > 0)
    assert half_slowdown(config.run.model_copy(update={"dtype": "float32"})) == 1.0
    finding = check_dtype(config, torch.device("cpu"))
    assert finding.level == level
    assert ("in float32" in finding.text) == (delay > 0)


def shard(policy: Any, reference: Any) -> None:
    config = TrainConfig.model_validate({"policy": {"model": "builtin:reviews"}, "reference": {"shard": True}})
    lm = SimpleNamespace(model=policy, device=torch.device("cpu"))
    parts: Any = SimpleNamespace(policy=lm, reference=SimpleNamespace(model=reference), scorers=Scorers(), sharded=[])
    shard_models(config, parts, None)  # type: ignore[arg-type]


def test_an_adapters_reference_is_the_policy() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"set policy\.shard"):
        shard(model, model)


def test_a_machine_that_does_not_see_the_run_s_folder(tmp_path: Path) -> None:
    settings = {"policy": {"model": "builtin:reviews", "shard": True}, "run": {"output_dir": str(tmp_path / "run")}}
    lm = SimpleNamespace(model=nn.Linear(1, 1), device=torch.device("cpu"))
    parts: Any = SimpleNamespace(policy=lm, reference=lm, scorers=Scorers(), sharded=[])
    with pytest.raises(InputError, match=r"^policy\.shard: .*/run"):
        shard_models(TrainConfig.model_validate(settings), parts, torch.device("cpu"))


def test_a_model_that_does_not_name_its_layers() -> None:
    with pytest.raises(InputError, match="a Sequential does"):
        shard(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
