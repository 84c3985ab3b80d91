from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.commands.build import shard_models
from rlhf_kl.commands.session import on_this_machine, pick_device, run_device
from rlhf_kl.config.schema import RunSection, TrainConfig
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
