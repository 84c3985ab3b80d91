from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.run.contents import CHECKPOINT
from rlhf_kl.run.folders import remove_folder, sweep, write_folder


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


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


class Killed(BaseException):
    """Stands for SIGKILL: the code under test gets no chance to clean up (see `kill_at`)."""


def kill_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The process ends at its `count`-th call that changes names or syncs; nothing after it happens."""
    import os
    import shutil

    calls = iter(range(1, 1000))

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) >= count:
                raise Killed
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))


def test_wherever_a_write_is_killed_the_old_or_the_new_folder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = []
    for count in range(1, 40):
        place = tmp_path / str(count)
        write_folder(place / "final", lambda at: (at / "a").write_text("old") and None)
        with monkeypatch.context() as patch:
            kill_at(patch, count)
            try:
                write_folder(place / "final", lambda at: (at / "a").write_text("new") and None)
            except Killed:
                reached.append(count)
        sweep(place, re.compile("final"))
        assert tree(place) in ({"final/a": "old"}, {"final/a": "new"}), count
    assert 5 < len(reached) < 39  # it was killed at every place, and ended by itself after the last


def test_wherever_a_removal_is_killed_the_folder_is_whole_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in range(1, 8):
        place = tmp_path / str(count)
        write_folder(place / "final", lambda at: (at / "a").write_text("old") and None)
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(patch, count)
            remove_folder(place / "final")
        sweep(place, re.compile("final"))
        assert tree(place) in ({"final/a": "old"}, {}), count


def test_sweeping_leaves_what_is_not_ours(tmp_path: Path) -> None:
    for name in (".notes.1.tmp", ".step-000003.1.tmp", ".step-000004.removed", "step-000005"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-000006.1.tmp").write_text("a file")
    sweep(tmp_path, CHECKPOINT)
    sweep(tmp_path / "nowhere", CHECKPOINT)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".notes.1.tmp", ".step-000006.1.tmp", "step-000005"]


def test_sweeping_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "other" / "precious").mkdir(parents=True)
    for name in (".final.1.tmp", ".final.replaced"):
        (tmp_path / name).symlink_to(tmp_path / "other")
    sweep(tmp_path, re.compile("final"))
    assert (tmp_path / "other" / "precious").is_dir()
    assert not (tmp_path / "final").exists()
