from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import RunFolder, lock_run_folder, newest_run, sweep, write_folder
from rlhf_kl.run.log import write_json


def open_folder(path: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Take the lock and give it back."""
    lock_run_folder(RunFolder(path), resume=resume, overwrite=overwrite).close()


def make_run(path: Path) -> RunFolder:
    """A run with every file that the program writes."""
    open_folder(path)
    folder = RunFolder(path)
    for file in folder.files:
        file.write_text("{}\n")
    folder.tensorboard.mkdir()
    for place in (*folder.folders, folder.checkpoints / "step-000005", folder.checkpoints / "step-000010"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "file").write_text("x")
    return folder


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    for options in ({}, {"resume": True}, {"overwrite": True}):
        open_folder(tmp_path / "runs" / f"{options}", **options)
        assert not RunFolder(tmp_path / "runs" / f"{options}").holds_run
    with pytest.raises(InputError, match="exclude"):
        open_folder(tmp_path, resume=True, overwrite=True)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_run_is_refused_without_either_option(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).write_text("")
    with pytest.raises(InputError, match=r"--resume.*--overwrite"):
        open_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_resume_leaves_everything_but_what_killed_processes_left(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / ".summary.json.99.tmp").write_text("half")
    for name in (".final.7.tmp", "checkpoints/.step-000015.7.tmp", "checkpoints/.step-000001.removed"):
        (tmp_path / name).mkdir()
    open_folder(tmp_path, resume=True)
    assert folder.holds_run
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / ".rlhf-kl.lock").unlink()  # a copy without its dotfiles is a run still
    open_folder(tmp_path, resume=True)


def test_removing_a_run_keeps_what_is_the_users(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    folder = make_run(run)
    precious.mkdir()
    (precious / "file").write_text("x")
    (folder.tensorboard / "events.out.tfevents.1").write_text("x")
    for place in (run, folder.checkpoints, folder.tensorboard):
        (place / "mine.png").write_text("mine")
    (folder.final / "mine").symlink_to(precious)
    open_folder(run, overwrite=True)
    assert folder.config.exists()  # until the new run is sure to start
    folder.remove_run()
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert left == {".rlhf-kl.lock", "mine.png", "checkpoints/mine.png", "tensorboard/mine.png"}
    assert (precious / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml"])
def test_a_strangers_folder_is_refused_with_any_option(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="not a run"):
            open_folder(tmp_path, **options)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_places_that_cannot_be_written_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run"), tmp_path / ("n" * 300)):
        with pytest.raises(InputError, match=r"is a file|cannot write the run folder"):
            open_folder(place)


HOLDER = """
import os, pathlib, sys, time
from rlhf_kl.run.folder import RunFolder, lock_run_folder
lock = lock_run_folder(RunFolder(pathlib.Path(sys.argv[1])), resume=True, overwrite=False)
if os.fork():
    print('held', flush=True)
    sys.stdin.read()
else:
    time.sleep(60)
"""


def test_the_lock_names_its_process_and_goes_with_it_though_a_child_lives_on(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(InputError, match=f"in use by process {holder.pid} on"):
                open_folder(tmp_path, resume=True)
            holder.kill()
            holder.wait()
            open_folder(tmp_path, resume=True)
        finally:
            os.killpg(holder.pid, 9)


def test_the_newest_run_is_that_of_the_newest_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run under runs/: name the folder of one"):
        newest_run()
    for name, age in (("finished", 200), ("older", 300), ("running", 100), ("never-started", 0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("")
        if name != "never-started":
            (folder / "metrics.jsonl").write_text("")
            os.utime(folder / "metrics.jsonl", (1e9 - age, 1e9 - age))
    assert newest_run() == Path("runs/running")
    with pytest.raises(InputError, match="no finished run"):
        newest_run(finished=True)
    for name in ("finished", "older"):
        (tmp_path / "runs" / name / "final").mkdir()
    assert newest_run(finished=True) == Path("runs/finished")
    folder = RunFolder(Path("runs/older"))
    assert folder.finished_summary() is None
    for stopped_by in (None, "KL above the ceiling"):
        write_json(folder.summary, {"stopped_by": stopped_by})
        assert folder.finished_summary() == (None if stopped_by else {"stopped_by": None})


def test_a_folder_is_replaced_whole_and_a_write_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "final"
    write_folder(target, lambda place: (place / "old").write_text("") and None)
    write_folder(target, lambda place: (place / "new").write_text("") and None)

    def fail(place: Path) -> None:
        (place / "half").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_folder(target, fail)
    assert [str(path.relative_to(target)) for path in target.parent.rglob("*") if path.is_file()] == ["new"]


def test_sweeping_one_name_leaves_the_others(tmp_path: Path) -> None:
    for name in (".policy-a.1.tmp", ".policy-ab.1.tmp", "policy-a"):
        (tmp_path / name).mkdir()
    (tmp_path / ".policy-a.2.tmp").write_text("")
    sweep(tmp_path, "policy-a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".policy-ab.1.tmp", "policy-a"]
