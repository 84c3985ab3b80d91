from __future__ import annotations

import pytest

from rlhf_kl.commands.session import launched_alone, make_accelerator, pick_device
from rlhf_kl.config.schema import RunSection
from rlhf_kl.errors import InputError


def test_a_device_that_is_not_here(fresh_accelerate: None) -> None:
    import torch

    if torch.cuda.is_available():
        with pytest.raises(InputError, match=r"run\.device: cuda:99"):
            make_accelerator(RunSection(device="cuda:99"))
    else:
        with pytest.raises(InputError, match=r"run\.device: cuda: no CUDA device"):
            make_accelerator(RunSection(device="cuda"))
        with pytest.raises(InputError, match=r"run\.device: mps"):
            make_accelerator(RunSection(device="mps"))


def test_mps_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device(RunSection(device="auto")).type == "cpu"
    assert pick_device(RunSection(device="mps")).type == "mps"


def test_the_cpu_where_it_is_asked_for(fresh_accelerate: None) -> None:
    assert make_accelerator(RunSection(device="cpu")).device.type == "cpu"


def test_processes_that_lost_each_other(monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> None:
    """Each would believe that it is alone, and train a model of its own."""
    make_accelerator(RunSection(device="cpu"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="processes"):
        make_accelerator(RunSection(device="cpu"))


ALONE = [
    ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, True),  # as `accelerate launch` on CPUs sets them
    ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ({"PMI_SIZE": "4"}, True),
    ({}, False),
    ({"ACCELERATE_MIXED_PRECISION": "no"}, False),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
    ({"WORLD_SIZE": "2", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"}, False),
]


@pytest.mark.parametrize(("variables", "alone"), ALONE)
def test_a_launcher_that_starts_one_process_where_several_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], alone: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched_alone() == alone


def test_it_is_refused(monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> None:
    monkeypatch.setenv("PMI_SIZE", "2")
    words = "should start several processes, but this one is alone: start them with torchrun"
    with pytest.raises(InputError, match=words):
        make_accelerator(RunSection(device="cpu"), group=True)


@pytest.mark.parametrize(
    ("name", "words"), [("FSDP", "set policy.shard"), ("MEGATRON_LM", "Megatron-LM"), ("DEEPSPEED", "DeepSpeed")]
)
def test_what_accelerate_offers_beside_is_refused(
    monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None, name: str, words: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(InputError, match=words):
        make_accelerator(RunSection(device="cpu"), group=True)
