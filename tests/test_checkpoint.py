from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.checkpoint import Checkpoint, checkpoints, remove_folder, save_checkpoint, write_folder
from rlhf_kl.models.actor_critic import ActorCritic

Make = Callable[..., Any]


def save(folder: Path, step: int, model: Any, keep: int = 2) -> Checkpoint:
    tensors = {"0.step": torch.tensor(3.0), "0.exp_avg": torch.arange(6.0).view(2, 3).T}
    return save_checkpoint(folder, step, model, tensors, {"step": step, "beta": 0.1}, keep)


def test_everything_comes_back(new_model: Make, tmp_path: Path) -> None:
    model = ActorCritic(new_model(seed=1))
    torch.nn.init.ones_(model.value_head.weight)
    saved = save(tmp_path, 10, model)
    assert saved.path.name == "step-000010"
    assert saved.step == 10
    assert saved.state() == {"step": 10, "beta": 0.1}
    assert saved.optimizer_tensors()["0.exp_avg"].tolist() == [[0, 3], [1, 4], [2, 5]]
    other = ActorCritic(new_model(seed=2))
    saved.load_model(other)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert other.policy.lm_head.weight is other.policy.transformer.wte.weight


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
    for name in (".step-000001.9.tmp", ".step-000002.9.old", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000003").write_text("")
    assert checkpoints(tmp_path) == []


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "final"
    write_folder(target, lambda place: (place / "a").write_text("old"))

    def fail(place: Path) -> None:
        (place / "a").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_folder(target, fail)
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "final"
    write_folder(target, lambda place: (place / "old").write_text(""))
    write_folder(target, lambda place: (place / "new").write_text(json.dumps(1)))
    assert [path.name for path in target.iterdir()] == ["new"]
    remove_folder(target)
    remove_folder(target)  # nothing there: nothing to do
    assert list(target.parent.iterdir()) == []
