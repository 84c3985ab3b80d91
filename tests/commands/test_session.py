from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlhf_kl.commands.session import make_accelerator, pick_device, train_command
from rlhf_kl.config.schema import RunSection, TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.run.display import TrainingDisplay


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


def test_a_folder_is_released_whatever_happens(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"run": {"output_dir": str(tmp_path / "run")}})
    display = TrainingDisplay(quiet=True)

    def breaks(*_: Any) -> dict[str, Any]:
        raise InputError("no such thing")

    for _ in range(2):
        with pytest.raises(InputError, match="no such thing"):
            train_command(breaks, config, resume=False, overwrite=False, display=display)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "-m", "rlhf_kl"], 2),
        (["python", "-m", "accelerate.commands.launch", "--cpu", "--num-processes=3"], 3),
        (["python", "/bin/accelerate", "launch", "-m", "rlhf_kl"], 1),
        (["bash"], 1),
        (None, 1),  # as the first process of a container has no parent
    ],
)
def test_a_launcher_that_starts_one_process_where_several_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None, words: list[str] | None, wanted: int
) -> None:
    parent = None if words is None else SimpleNamespace(cmdline=lambda: words)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    if wanted == 1:
        assert make_accelerator(RunSection(device="cpu"), group=True).num_processes == 1
        return
    with pytest.raises(InputError, match=f"was asked for {wanted} processes and started one: start them with torchrun"):
        make_accelerator(RunSection(device="cpu"), group=True)
    assert make_accelerator(RunSection(device="cpu")).num_processes == 1  # a command that runs in one


def test_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch, fresh_accelerate: None) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(InputError, match="DeepSpeed is not supported"):
        make_accelerator(RunSection(device="cpu"), group=True)
