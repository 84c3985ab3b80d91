from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.build.machine import (
    on_this_machine,
    pick_device,
    run_device,
)
from rlhf_kl.build.parts import shard_models
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


@pytest.mark.parametrize(
    ("variables", "visible", "device"),
    [
        ("LOCAL_RANK=3", 1, "cuda:0"),  # Slurm's --gpus-per-task=1
        ("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", 4, "cuda:3"),
        ("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4", 1, "4 processes share 1 CUDA devices here"),
    ],
)
def test_the_gpu_of_one_of_several_processes(
    variables: str, visible: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in f"WORLD_SIZE=4 {variables}".split():
        monkeypatch.setenv(*variable.split("="))
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


def test_a_group_without_an_address_is_one_line(monkeypatch: pytest.MonkeyPatch, rlhf_kl: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", tmp_path / "run", "--quiet")
    assert outcome.code == 2
    assert outcome.err.startswith("error: WORLD_SIZE is set, but not RANK, MASTER_ADDR, MASTER_PORT: start them with")


@pytest.mark.parametrize(
    ("precision", "dtype", "told"), [("bf16", "float32", True), ("bf16", "bfloat16", False), ("no", "bfloat16", False)]
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
    train_command(lambda *_: {}, config, resume=False, overwrite=False)
    line = f"accelerate's --mixed_precision {precision} is not used: run.dtype decides ({dtype})"
    assert caplog.messages == [line] * told


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
