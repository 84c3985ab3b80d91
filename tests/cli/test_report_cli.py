"""`report` as a user types it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.run.folder import RunFolder

Cli = Callable[..., Any]


def test_the_newest_run_of_the_working_directory(
    write_run: Callable[..., Path],
    metrics_rows: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rlhf_kl: Cli,
) -> None:
    for name, age in (("new", 10), ("old", 1000)):
        folder = write_run(name, metrics_rows([0.1] * 4))
        os.utime(folder / "metrics.jsonl", (time.time() - age,) * 2)
    write_run("never-started")
    monkeypatch.chdir(tmp_path)
    done = rlhf_kl("report")
    assert (done.code, done.out) == (0, "runs/new/report.html\n")
    assert "unfinished: 4 of 60 updates" in done.err
    assert "new: KL report" in (tmp_path / "runs/new/report.html").read_text()
    assert (tmp_path / "runs/new/report.png").stat().st_size > 10_000


def test_several_runs_and_overwrite_takes_the_report_away(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], rlhf_kl: Cli
) -> None:
    folders = [write_run(name, metrics_rows([0.1] * 4)) for name in ("a", "b")]
    done = rlhf_kl("report", *folders, "--quiet")
    assert done.out.splitlines() == [str(folder / "report.html") for folder in folders]
    assert done.err == ""
    RunFolder(folders[0]).remove_run()
    assert list(folders[0].iterdir()) == []


@pytest.mark.parametrize("name", ["report.html", "report.png"])
def test_a_link_where_a_report_goes_is_replaced(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], tmp_path: Path, rlhf_kl: Cli, name: str
) -> None:
    folder, other = write_run("a", metrics_rows([0.1] * 4)), tmp_path / "other"
    other.write_text("precious")
    (folder / name).symlink_to(other)
    assert rlhf_kl("report", folder).code == 0
    assert (other.read_text(), (folder / name).is_symlink()) == ("precious", False)


def test_no_run_is_one_line_and_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf_kl: Cli) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlhf_kl("report") == (2, "", "error: no run under runs/: name a run folder\n")
    assert rlhf_kl("report", "nowhere") == (2, "", "error: nowhere: holds no run (no config.yaml)\n")


@pytest.mark.slow
def test_watch_follows_a_run_to_its_end(
    write_run: Callable[..., Path], metrics_rows: Callable[..., Any], rlhf_kl: Cli
) -> None:
    folder = write_run("running", metrics_rows([0.1] * 4), config={"ppo": {"total_episodes": 256}})

    def finish() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (folder / "report.html").exists() and 'http-equiv="refresh"' in (folder / "report.html").read_text():
                break
            time.sleep(0.05)
        (folder / "summary.json").write_text('{"stopped_by": null}')

    other = threading.Thread(target=finish)
    other.start()
    done = rlhf_kl("report", folder, "--watch", "--every", "1")
    other.join()
    assert done.code == 0
    text = (folder / "report.html").read_text()
    assert "refresh" not in text
    assert "finished" in text
