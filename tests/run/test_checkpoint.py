from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl import sharding
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.models.value import ActorCritic, HeadValue
from rlhf_kl.optim import adamw
from rlhf_kl.run import checkpoint
from rlhf_kl.run.checkpoint import FORMAT, Checkpoint, checkpoints, prune, save_checkpoint
from rlhf_kl.sharding import slots_of, tensors_of

Make = Callable[..., Any]


def save(folder: Path, step: int, model: Any) -> Checkpoint:
    return save_checkpoint(folder, step, tensors_of(model), [], {"beta": 0.1})


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "nowhere") == []
    for name in (".step-000001.9.tmp", ".step-000002.removed", "step-12abc", "step-7", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000003").write_text("")
    assert checkpoints(tmp_path) == []


def test_the_state_of_another_version_is_refused_but_not_its_weights(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    saved = save(tmp_path, 5, model)
    (saved.path / "state.json").write_text('{"format": 1}')
    with pytest.raises(InputError, match="step-000005: written by "):
        saved.state()
    other = torch.nn.Linear(2, 2)
    saved.load_model(other)
    saved.load_optimizer(adamw(other, 0.01, 0.1))  # it was saved before its first step
    assert torch.equal(other.weight, model.weight)


def trained(seed: int, new_model: Make) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a tied head, and its optimizer after a step."""
    model = ActorCritic(LM(new_model(seed=seed)), HeadValue(16)).modules
    optimizer = adamw(model, 0.01, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def test_shards_are_small_and_come_back_bit_for_bit(
    new_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 4000)
    (model, optimizer), (other, again) = trained(1, new_model), trained(2, new_model)
    save(tmp_path, 5, other)
    saved = save_checkpoint(tmp_path, 5, tensors_of(model), slots_of(optimizer), {"beta": 0.1})  # written anew
    assert (saved.path.name, saved.step) == ("step-000005", 5)
    files = sorted(path.name for path in saved.path.glob("*.safetensors"))
    assert saved.state() == {"format": FORMAT, "files": files, "beta": 0.1}
    for stem, tensors in (("model", tensors_of(model)), ("optimizer", slots_of(optimizer))):
        paths = sorted(saved.path.glob(f"{stem}-*.safetensors"))
        assert [path.name for path in paths] == [f"{stem}-{n + 1:05d}.safetensors" for n in range(len(paths))]
        assert len(paths) > 3
        parts = [load_file(path) for path in paths]
        assert sum(map(len, parts)) == len(dict(tensors))
        assert all(len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 4000 for part in parts)
    saved.load_model(other)
    saved.load_optimizer(again)
    assert other["policy"].lm_head.weight is other["policy"].transformer.wte.weight
    for before, after in ((tensors_of(model), tensors_of(other)), (slots_of(optimizer), slots_of(again))):
        for (name, tensor), (as_name, same) in zip(before, after, strict=True):
            assert name == as_name
            assert torch.equal(tensor, same), name


def test_of_gathered_tensors_memory_holds_one_shard(
    new_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded tensor is stood in for by a copy; the next tensor is there while a shard is written."""
    alive, most = 0, 0

    def release(size: int) -> None:
        nonlocal alive
        alive -= size

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal alive, most
        copy = tensor.clone()
        weakref.finalize(copy.untyped_storage(), release, copy.nbytes)
        alive += copy.nbytes
        most = max(most, alive)
        return copy

    model, optimizer = trained(1, new_model)
    sizes = [tensor.nbytes for _, tensor in [*tensors_of(model), *slots_of(optimizer)]]
    monkeypatch.setattr(checkpoint, "SHARD", 4000)
    monkeypatch.setattr(sharding, "full", copied)
    save_checkpoint(tmp_path, 5, tensors_of(model), slots_of(optimizer), {})
    assert alive == 0
    assert most <= max(4000, *sizes) + max(sizes) < 0.2 * sum(sizes)


@pytest.mark.parametrize("name", ["model-00001.safetensors", "optimizer-00001.safetensors", "state.json"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    net = torch.nn.Linear(2, 2)
    saved = save(tmp_path, 5, net)
    data = (saved.path / name).read_bytes()
    (saved.path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"step-000005: cannot be read: .*checkpoint before"):
        saved.state(), saved.load_model(net), saved.load_optimizer(adamw(net, 0.01, 0.1))
    (saved.path / name).unlink()
    with pytest.raises(InputError, match=f"step-000005: .*{name}"):
        saved.state()


def test_a_checkpoint_between_two_regular_ones_displaces_none(tmp_path: Path) -> None:
    """An interrupted run keeps the checkpoints that an uninterrupted one has, whatever it may roll back to."""

    def kept(step: int) -> list[int]:
        save(tmp_path, step, torch.nn.Linear(2, 2))
        prune(tmp_path, 2, every=5, spared=[5])
        return [checkpoint.step for checkpoint in checkpoints(tmp_path)]

    assert [kept(step) for step in (5, 10, 15)][-1] == [5, 10, 15]
    assert kept(17) == [5, 10, 15, 17]
    assert kept(20) == [5, 15, 20]
