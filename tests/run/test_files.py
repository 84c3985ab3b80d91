from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhf_kl.run.files import check_writable, write_atomic


def test_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "one")
    write_atomic(path, "zwei ü")
    assert path.read_text(encoding="utf-8") == "zwei ü"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_what_stands_under_the_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / f".a.txt.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    write_atomic(tmp_path / "a.txt", "one")
    assert (tmp_path / "precious").read_text() == "x"
    assert (tmp_path / "a.txt").read_text() == "one"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_whether_a_file_can_be_written_is_told_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"
    for place in (tmp_path, tmp_path / "no" / "a.txt", path / "a.txt", tmp_path / ("n" * 300)):
        with pytest.raises(OSError, match=r"Is a directory|No such file|Not a directory|name too long"):
            check_writable(place)
