from __future__ import annotations

import pytest

from rlhf_kl.commands.session import make_accelerator, pick_device
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


def test_what_accelerate_offers_beside_is_refused(monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError, match=r"accelerate's FSDP is not used here: write policy\.shard"):
        make_accelerator(RunSection(device="cpu"), group=True)
