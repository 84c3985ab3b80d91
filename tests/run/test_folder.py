from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from rlhf_kl.errors import InputError, no_such_file
from rlhf_kl.run.folder import RunFolder, lock_run_folder, newest_run, sweep, write_atomic, write_folder
from rlhf_kl.run.log import JsonlWriter, read_jsonl, write_json


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
    for name in ("scaled-2024-05-01", "scaled-1.2.3", "scaled-e", "scaled-", "scaled-0.1-mine"):
        (run / name).mkdir()
        (run / name / "mine").write_text("mine")
    for name in ("scaled-0.05", "scaled-2", "scaled-1e-05", "scaled-1e+06", "scaled-1.5e-05"):
        (run / name).mkdir()
        (run / name / "model").write_text("x")
    (folder.final / "mine").symlink_to(precious)
    open_folder(run, overwrite=True)
    assert folder.config.exists()  # until the new run is sure to start
    folder.remove_run()
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    users = {f"scaled-{name}/mine" for name in ("2024-05-01", "1.2.3", "e", "", "0.1-mine")}
    assert left == users | {".rlhf-kl.lock", "mine.png", "checkpoints/mine.png", "tensorboard/mine.png"}
    assert (precious / "file").read_text() == "x"


FILES = ["config.yaml", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "summary.json", "report.html", "report.png"]
FOLDERS = ["final", "merged", "checkpoints", "checkpoints/step-000005", "tensorboard", "scaled-0.5"]


@pytest.mark.parametrize(
    ("name", "dangling"),
    [*((name, False) for name in [".rlhf-kl.lock", *FILES, *FOLDERS]), ("metrics.jsonl", True), ("final", True)],
)
def test_of_a_link_among_what_a_run_wrote_only_the_link_goes(tmp_path: Path, name: str, dangling: bool) -> None:
    """The real file or folder is moved out, as somebody does who keeps it on another disk; its copy is the target."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder = make_run(run)
    (run / "scaled-0.5").mkdir()
    (run / "tensorboard" / "events.out.tfevents.1").write_text("x")
    (run / name).rename(elsewhere)
    (run / name).symlink_to(tmp_path / "nowhere" if dangling else elsewhere)
    before = contents(elsewhere)
    open_folder(run, overwrite=True)
    folder.remove_run()
    assert contents(elsewhere) == before
    assert not (run / name).is_symlink()
    assert sorted(path.name for path in run.iterdir() if path.is_file()) == [".rlhf-kl.lock"]
    JsonlWriter(folder.metrics).close()
    write_folder(folder.final, lambda place: (place / "model").write_text("new") and None)
    assert contents(elsewhere) == before
    assert not (tmp_path / "nowhere").exists()


def contents(path: Path) -> dict[str, str | None]:
    """Of a file, or of all in a folder."""
    paths = [path, *path.rglob("*")]
    return {str(each.relative_to(path)): each.read_text() if each.is_file() else None for each in paths}


@pytest.mark.parametrize("hard", [False, True])
def test_nothing_is_written_through_a_link(tmp_path: Path, hard: bool) -> None:
    """As `cp --link` makes it of a run, or a user of a file on another disk."""
    precious = tmp_path / "precious"

    def link(path: Path) -> Path:
        precious.write_text('{"step": 1}\n{"step": 2}\n')
        path.unlink(missing_ok=True)
        path.hardlink_to(precious) if hard else path.symlink_to(precious)
        return path

    place, unwritten = tmp_path / "run", '{"step": 1}\n{"step": 2}\n'
    place.mkdir()
    for keep, rows in ((0, [3]), (12, [1, 3])):
        writer = JsonlWriter(link(place / "metrics.jsonl"), keep)
        writer.write({"step": 3})
        writer.close()
        assert [row["step"] for row in read_jsonl(place / "metrics.jsonl")] == rows
    write_atomic(link(place / "config.yaml"), "new")
    temporary = link(place / f".summary.json.{os.getpid()}.tmp")
    write_atomic(place / "summary.json", "new")
    assert (place / "config.yaml").read_text() + (place / "summary.json").read_text() == "newnew"
    link(place / f".final.{os.getpid()}.tmp")
    write_folder(place / "final", lambda folder: (folder / "model").write_text("new") and None)
    assert precious.read_text() == unwritten
    assert not temporary.exists()


def test_sweeping_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    for name in (".final.1.tmp", ".final.removed"):
        (tmp_path / name).symlink_to(tmp_path / "other")
    sweep(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["other", "other/precious"]


def test_copies_of_plugins_are_the_runs_until_somebody_changes_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    for name, text in {"mine.py": "own", "notes.py": "own", "scaled-2.txt": "own"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=r"mine\.py "):
        folder.check_copies({"mine.py": b"new"})
    for again in (b"first", b"second"):  # a plugin that is edited between two runs
        copies = {"law.py": again, "mine.py": b"own"}
        folder.check_copies(copies)
        folder.remove_run(copies)
        folder.write_copies(copies)
    assert (tmp_path / "law.py").read_bytes() == b"second"
    folder.remove_run()
    assert not (tmp_path / "law.py").exists()
    assert sorted(path.name for path in tmp_path.glob("*.*")) == sorted(
        [".rlhf-kl.copies", ".rlhf-kl.lock", "mine.py", "notes.py", "scaled-2.txt"]
    )
    folder.write_copies({"law.py": b"first"})
    (tmp_path / "law.py").write_text("changed")
    folder.remove_run()
    assert (tmp_path / "law.py").read_text() == "changed"
    with pytest.raises(InputError, match=r"law\.py "):
        folder.check_copies({"law.py": b"second"})


@pytest.mark.parametrize("dies_at", [1, 2, 3], ids=["the list", "the first copy", "the second copy"])
@pytest.mark.parametrize("before", [False, True], ids=["a new run", "a run again"])
def test_copies_stay_the_runs_wherever_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int, before: bool
) -> None:
    """Between any two of the files that it writes; then the user edits the plugins."""
    folder, names, written = make_run(tmp_path), ("law.py", "score.py"), list[Path]()
    if before:
        folder.write_copies(dict.fromkeys(names, b"first"))

    def write(path: Path, content: str | bytes) -> None:
        if len(written) == dies_at:
            raise KeyboardInterrupt
        written.append(path)
        write_atomic(path, content)

    monkeypatch.setattr("rlhf_kl.run.folder.write_atomic", write)
    with contextlib.suppress(KeyboardInterrupt):
        folder.write_copies(dict.fromkeys(names, b"second"))
    monkeypatch.undo()
    edited = dict.fromkeys(names, b"third")
    folder.check_copies(edited)
    folder.write_copies(edited)
    assert [(tmp_path / name).read_bytes() for name in names] == [b"third", b"third"]
    folder.remove_run()
    assert not [name for name in names if (tmp_path / name).exists()]


def test_the_copies_of_an_earlier_build_are_those_that_its_config_names(tmp_path: Path) -> None:
    """It made no list, or one of single hashes."""
    folder = make_run(tmp_path)
    folder.config.write_text("kl:\n  controller:\n    kind: /home/me/my law.py:Keep\n")
    for name in ("my_law.py", "notes.py"):
        (tmp_path / name).write_text("old")
    folder.check_copies({"my_law.py": b"new"})
    with pytest.raises(InputError, match=r"notes\.py "):
        folder.check_copies({"notes.py": b"new"})
    folder.write_copies({"my_law.py": b"new"})
    assert (tmp_path / "my_law.py").read_bytes() == b"new"
    folder.copies.write_text(json.dumps({"notes.py": sha256(b"old").hexdigest()}))
    folder.check_copies({"notes.py": b"new"})
    folder.copies.write_text("{}")  # of this build, which copied nothing: the file is the user's
    with pytest.raises(InputError, match=r"my_law\.py "):
        folder.check_copies({"my_law.py": b"newer"})


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
        with pytest.raises(InputError, match=re.escape(str(place))):
            open_folder(place)


def test_a_file_that_cannot_be_written_is_named_by_its_own_name() -> None:
    with pytest.raises(OSError, match=r"'/proc/report\.html'"):
        write_atomic(Path("/proc/report.html"), "x")


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
            with pytest.raises(InputError, match=f"process {holder.pid} "):
                open_folder(tmp_path, resume=True)
            holder.kill()
            holder.wait()
            open_folder(tmp_path, resume=True)
        finally:
            os.killpg(holder.pid, 9)


def test_the_newest_run_is_that_of_the_newest_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run under"):
        newest_run()
    for name, age in (("finished", 200), ("older", 300), ("running", 100), ("never-started", 0)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("run:\n  seed: 0\nppo:\n  epochs: 1\n")
        if name != "never-started":
            (folder / "metrics.jsonl").write_text("")
            os.utime(folder / "metrics.jsonl", (1e9 - age, 1e9 - age))
    supervised = tmp_path / "runs" / "sft"
    supervised.mkdir()
    (supervised / "config.yaml").write_text("run:\n  seed: 0\nsft:\n  epochs: 1\n")
    (supervised / "metrics.jsonl").write_text("")  # newer than all, and no run of `train`
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


@pytest.mark.parametrize("name", ["notes.md", "onnx", "plot.png"])
@pytest.mark.parametrize("place", ["final", "merged"])
def test_files_of_a_users_in_a_folder_that_is_replaced_are_told(tmp_path: Path, place: str, name: str) -> None:
    folder = RunFolder(tmp_path)
    folder.check_models()
    for file in ("model-00001-of-00002.safetensors", "config.json", "README.md", "tokenizer.model", "vocab.txt"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / file).touch()
    folder.check_models()
    (tmp_path / place / name).touch()
    with pytest.raises(InputError, match=rf"{place}/{re.escape(name)}"):
        folder.check_models()


def test_the_nearest_file_is_no_folder_where_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "main.py").touch()
    assert "mean main.py?" in str(no_such_file("mine.py", tmp_path))
    (tmp_path / "main.py").unlink()
    assert "did you mean" not in str(no_such_file("mine.py", tmp_path))
    assert "or folder: mime" in str(no_such_file("mime", tmp_path))
    assert "mean mine?" in str(no_such_file("mime", tmp_path))
