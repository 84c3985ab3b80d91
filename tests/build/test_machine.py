from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.build import machine
from rlhf_kl.build.machine import (
    bfloat16_slowdown,
    group_size,
    on_this_machine,
    pick_device,
    run_device,
)
from rlhf_kl.build.parts import shard_models
from rlhf_kl.commands.findings import check_dtype
from rlhf_kl.commands.train import train_command
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.base import RunSection
from rlhf_kl.errors import InputError
from rlhf_kl.rewards.scorer import Scorers


def test_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        with pytest.raises(InputError, match=r"run\.device: cuda:99"):
            run_device(RunSection(device="cuda:99"))
    else:
        with pytest.raises(InputError, match=r"run\.device: cuda: no CUDA device"):
            run_device(RunSection(device="cuda"))
        with pytest.raises(InputError, match=r"run\.device: mps"):
            run_device(RunSection(device="mps"))


def test_mps_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device(RunSection(device="auto")).type == "cpu"
    assert pick_device(RunSection(device="mps")).type == "mps"


def test_several_processes_of_a_command_that_runs_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="several processes"):
        run_device(RunSection(device="cpu"))
    assert run_device(RunSection(device="cpu"), group=True).type == "cpu"


def test_what_accelerate_offers_beside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=r"accelerate's FSDP is not used here: write policy\.shard"):
        run_device(RunSection(device="cpu"), group=True)


@pytest.mark.parametrize(
    ("device", "gpu", "computes_in_it", "dtype"),
    [
        ("auto", True, True, "bfloat16"),
        ("auto", True, False, "float32"),
        ("cpu", True, True, "float32"),
        ("auto", False, False, "float32"),
    ],
)
def test_the_type_of_a_machine(
    device: str, gpu: bool, computes_in_it: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or computes_in_it
    )
    config = TrainConfig.model_validate({"run": {"dtype": "auto", "device": device}})
    assert on_this_machine(config).run.dtype == dtype
    written = TrainConfig.model_validate({"run": {"dtype": "float32", "device": device}})
    assert on_this_machine(written) is written


@pytest.mark.parametrize(
    ("stored", "gpu", "dtype", "told"),
    [
        ("bfloat16", False, "float32", "run.dtype: bfloat16; here, on cpu, the models compute in float32"),
        ("bfloat16", True, "bfloat16", None),
        ("auto", False, "float32", None),  # as for `--model`
        ("auto", True, "bfloat16", "run.dtype: auto; here, on cuda, the models compute in bfloat16"),
        ("float32", True, "float32", None),
    ],
)
def test_a_run_is_read_in_a_type_that_this_machine_computes_in(
    stored: str,
    gpu: bool,
    dtype: str,
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    with caplog.at_level("INFO", logger="rlhf_kl"):
        config = on_this_machine(TrainConfig.model_validate({"run": {"dtype": stored}}), stored=True)
    assert config.run.dtype == dtype
    assert caplog.messages == [told] * (told is not None)


# ---- what a launcher tells


LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SLURM = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """launched("RANK=1 ..."): an environment with these variables of launchers, and no others."""

    def change(variables: str) -> None:
        for name in (*LAUNCHERS, *SLURM):
            monkeypatch.delenv(name, raising=False)
        for variable in variables.split():
            monkeypatch.setenv(*variable.split("="))

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
    ],
)
def test_the_size_of_a_group(variables: str, size: int, launched: Callable[[str], None]) -> None:
    launched(variables)
    assert group_size() == size


@pytest.mark.parametrize(
    "variables",
    [
        "SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_PROCID=0",
        "SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_ID=3 SLURM_PROCID=1",
        "OMPI_COMM_WORLD_SIZE=2",
        "PMI_SIZE=2",
    ],
)
def test_copies_that_would_each_run_alone(variables: str, launched: Callable[[str], None]) -> None:
    launched(variables)
    with pytest.raises(InputError, match="started 2 processes that do not know of each other"):
        group_size()


@pytest.mark.parametrize("command", ["train", "sft", "reward-model", "eval", "generate"])
def test_every_command_refuses_such_copies(
    command: str, launched: Callable[[str], None], rlhf_kl: Any, tmp_path: Path, tiny_folder: Path
) -> None:
    launched("OMPI_COMM_WORLD_SIZE=2")
    (texts := tmp_path / "texts.txt").write_text("ab\n")
    words = {
        "eval": ["--model", tiny_folder, "--texts", texts],
        "generate": ["--model", tiny_folder, "--prompt", "a"],
        "train": ["--config", "smoke.yaml", "--output-dir", tmp_path / "run"],
        "sft": ["--config", "sft_reviews.yaml", "--output-dir", tmp_path / "run"],
        "reward-model": ["--config", "reward_reviews.yaml", "--output-dir", tmp_path / "run"],
    }
    outcome = rlhf_kl(command, *words[command], "--quiet")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert "srun or mpirun started 2 processes that do not know of each other" in line
    assert "torchrun" in line
    assert not (tmp_path / "run").exists()


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
    variables: str, visible: int, device: str, launched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(f"WORLD_SIZE=4 {variables}")
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    section = RunSection(device="cuda")
    if device.startswith("cuda:"):
        assert run_device(section, group=True) == torch.device(device)
        assert made_current == [torch.device(device)]
    else:
        with pytest.raises(InputError, match=device):
            run_device(section, group=True)


def test_a_process_of_a_group_that_has_no_gpu_says_so_itself(
    launched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, rlhf_kl: Any, tmp_path: Path
) -> None:
    launched("WORLD_SIZE=4 RANK=3 LOCAL_RANK=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = ["--config", "smoke.yaml", "--output-dir", tmp_path / "run", "--set", "run.device=cuda", "--quiet"]
    outcome = rlhf_kl("train", *words)
    assert outcome.code == 2
    assert outcome.err.startswith("error: LOCAL_RANK is 3")


def test_a_group_without_an_address_is_one_line(
    launched: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, rlhf_kl: Any, tmp_path: Path
) -> None:
    launched("WORLD_SIZE=2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", tmp_path / "run", "--quiet")
    assert outcome.code == 2
    assert outcome.err.startswith("error: WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT: start them with")


@pytest.mark.parametrize(
    ("precision", "dtype", "told"),
    [("fp16", "float32", True), ("bf16", "float32", True), ("bf16", "bfloat16", False), ("no", "bfloat16", False)],
)
def test_accelerates_precision_is_told_to_have_no_effect(
    precision: str,
    dtype: str,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    run = {"output_dir": str(tmp_path / "run"), "device": "cpu", "dtype": dtype}
    config = TrainConfig.model_validate({"run": run})
    monkeypatch.setattr(machine, "bfloat16_slowdown", lambda section: 1.0)
    train_command(lambda *_: {}, config, resume=False, overwrite=False)
    line = f"accelerate's --mixed_precision {precision} is not used: run.dtype decides ({dtype})"
    assert caplog.messages == [line] * told


@pytest.mark.parametrize(("delay", "level"), [(0.02, "doubtful"), (0.0, "fine")])
def test_a_cpu_without_units_for_bfloat16_is_measured_and_told(
    delay: float, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def product(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001 if x.dtype == torch.float32 else 0.001 + delay)
        return x

    monkeypatch.setattr(torch, "mm", product)
    run = {"output_dir": str(tmp_path / "run"), "device": "cpu", "dtype": "bfloat16"}
    config = TrainConfig.model_validate({"run": run})
    slowdown = bfloat16_slowdown(config.run)
    assert (slowdown > 5) == (delay > 0)
    assert bfloat16_slowdown(config.run.model_copy(update={"dtype": "float32"})) == 1.0
    finding = check_dtype(config, torch.device("cpu"))
    assert finding.level == level
    assert "times as long as in float32" in finding.text
    train_command(lambda *_: {}, config, resume=False, overwrite=False)
    told = [line for line in caplog.messages if line.startswith("run.dtype: products in bfloat16 take ")]
    assert len(told) == (delay > 0)


# ---- shards


def shard(policy: Any, reference: Any) -> None:
    config = TrainConfig.model_validate({"policy": {"model": "builtin:reviews"}, "reference": {"shard": True}})
    lm = SimpleNamespace(model=policy, device=torch.device("cpu"))
    parts: Any = SimpleNamespace(policy=lm, reference=SimpleNamespace(model=reference), scorers=Scorers(), sharded=[])
    shard_models(config, parts, None)  # type: ignore[arg-type]


def test_an_adapters_reference_is_the_policy() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"no frozen model is separate from the policy: set policy\.shard"):
        shard(model, model)


def test_a_model_that_does_not_name_its_layers() -> None:
    with pytest.raises(InputError, match="a Sequential does not name its layers"):
        shard(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
