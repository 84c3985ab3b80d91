from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.value import ActorCritic, HeadValue
from rlhf_kl.run.checkpoint import (
    FORMAT,
    Checkpoint,
    checkpoints,
    newest_whole,
    save_checkpoint,
    set_aside,
)
from rlhf_kl.sharding import slots_of, tensors_of
from rlhf_kl.trainers.optim import adamw

Make = Callable[..., Any]


def save(folder: Path, step: int, model: Any, keep: int = 2) -> Checkpoint:
    return save_checkpoint(folder, step, tensors_of(model), {}, {"step": step, "beta": 0.1}, keep)


def test_everything_comes_back(new_model: Make, tmp_path: Path) -> None:
    def model(seed: int) -> torch.nn.ModuleDict:
        return ActorCritic(LM(new_model(seed=seed)), HeadValue(16)).modules

    first, other = model(1), model(2)
    torch.nn.init.ones_(first["value"].head.weight)
    saved = save(tmp_path, 10, first)
    assert saved.path.name == "step-000010"
    assert saved.step == 10
    assert saved.state() == {"format": FORMAT, "step": 10, "beta": 0.1}
    saved.load_model(other)
    for (name, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert other["policy"].lm_head.weight is other["policy"].transformer.wte.weight


def test_only_the_newest_are_kept_oldest_first(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (5, 100, 20):
        save(tmp_path, step, model, keep=2)
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [20, 100]


def test_a_step_is_written_anew(tmp_path: Path) -> None:
    save(tmp_path, 5, torch.nn.Linear(2, 2))
    model = torch.nn.Linear(2, 2)
    again, loaded = save(tmp_path, 5, model), torch.nn.Linear(2, 2)
    again.load_model(loaded)
    assert torch.equal(loaded.weight, model.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nowhere") == []
    for name in (".step-000001.9.tmp", ".step-000002.removed", "step-000004.damaged", "step-12abc", "step-7", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000003").write_text("")
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("number", [None, FORMAT - 1, FORMAT + 1])
def test_the_state_of_another_version_is_refused_but_not_its_weights(tmp_path: Path, number: int | None) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    saved = save(tmp_path, 5, model)
    state = {"step": 5, "environment": {"rlhf_kl": "0.1.0"}} | ({} if number is None else {"format": number})
    (saved.path / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"step-000005: written by another version of rlhf-kl \(0\.1\.0\)"):
        saved.state()
    saved.load_model(other)
    assert torch.equal(other.weight, model.weight)


def test_an_optimizer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    net, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    optimizer, again = adamw(net, 0.01, 0.1), adamw(other, 0.01, 0.1)
    train(net, optimizer, range(3))
    saved = save_checkpoint(tmp_path, 3, tensors_of(net), slots_of(optimizer), {}, keep=1)
    saved.load_model(other)
    saved.load_optimizer(again)
    train(net, optimizer, range(3, 6))
    train(other, again, range(3, 6))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_before_its_first_step_has_nothing_to_load(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    optimizer = adamw(model, 0.01, 0.0)
    save_checkpoint(tmp_path, 1, tensors_of(model), slots_of(optimizer), {}, keep=1).load_optimizer(optimizer)
    assert optimizer.state_dict()["state"] == {}


# ---- damage ----

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "checksums.json")


def flip_a_bit(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "flipped": flip_a_bit,
    "flipped at its start": lambda path: flip_a_bit(path, 0.0),
    "flipped at its end": lambda path: flip_a_bit(path, 0.999),
    "torn": tear,
    "empty": empty,
    "gone": Path.unlink,
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_noticed_and_the_checkpoint_before_is_taken(tmp_path: Path, name: str, how: str) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (5, 10):
        assert save(tmp_path, step, model).damage() is None
    DAMAGES[how](tmp_path / "step-000010" / name)
    newest, problems = newest_whole(tmp_path)
    assert newest is not None
    assert newest.step == 5
    assert len(problems) == 1
    assert problems[0].startswith("step-000010: ")
    assert name in problems[0] or name == "checksums.json"


def test_a_file_that_was_put_there_later_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 5, torch.nn.Linear(2, 2))
    (tmp_path / "step-000005" / "pytorch_model.bin").write_bytes(b"pickled")
    assert newest_whole(tmp_path) == (None, ["step-000005: pytorch_model.bin is not listed in checksums.json"])


def test_a_damaged_checkpoint_counts_no_more_and_goes_when_it_is_written_anew(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (5, 10):
        save(tmp_path, step, model)
    set_aside(checkpoints(tmp_path)[-1])
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [5]
    assert (tmp_path / "step-000010.damaged" / "state.json").is_file()
    save(tmp_path, 10, model, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000010"]


def test_a_checkpoint_between_two_regular_ones_displaces_none(tmp_path: Path) -> None:
    """An interrupted run keeps the checkpoints that an uninterrupted one has, whatever it may roll back to."""
    model = torch.nn.Linear(2, 2)

    def kept(step: int) -> list[int]:
        save_checkpoint(tmp_path, step, tensors_of(model), {}, {}, keep=2, every=5, spared={5})
        return [checkpoint.step for checkpoint in checkpoints(tmp_path)]

    assert [kept(step) for step in (5, 10, 15)][-1] == [5, 10, 15]
    assert kept(17) == [5, 10, 15, 17]
    assert kept(20) == [5, 15, 20]


# ---- crashes and failing disks ----


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import os

    save(tmp_path, 5, torch.nn.Linear(2, 2))
    before = {name: (tmp_path / "step-000005" / name).read_bytes() for name in FILES}

    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            save(tmp_path, 10, torch.nn.Linear(2, 2))
    assert "step-000010" in str(caught.value.filename)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert {name: (tmp_path / "step-000005" / name).read_bytes() for name in FILES} == before


def test_a_full_disk_is_an_os_error_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A real one: files may not grow beyond a limit, which the system enforces under safetensors too."""
    code = (
        "import pathlib, resource, sys, torch\n"
        "from rlhf_kl.run.checkpoint import save_checkpoint\n"
        "folder, model = pathlib.Path(sys.argv[1]), torch.nn.Linear(100, 100).state_dict()\n"
        "save_checkpoint(folder, 5, model, {}, {}, 2)\n"
        "for limit in (0, 50, 4096, 40000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
        "    try:\n"
        "        save_checkpoint(folder, 10, model, {}, {}, 2)\n"
        "    except OSError as error:\n"
        "        print(limit, error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{limit} {errno.EFBIG}" for limit in (0, 50, 4096, 40000)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]
    assert checkpoints(tmp_path)[0].damage() is None
