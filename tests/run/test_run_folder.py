from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.run.run_folder import RunFolder, newest_run, open_run_folder, write_json


def _make_run(path: Path) -> None:
    """A run with every file that the contract names."""
    with open_run_folder(path, resume=False, overwrite=False) as folder:
        for file in (folder.config, folder.metrics, folder.samples, folder.summary, folder.report):
            file.write_text("{}\n")
        for name in ("step-000005", "step-000010", ".step-000015.tmp"):
            (folder.checkpoints / name).mkdir(parents=True)
            (folder.checkpoints / name / "state.pt").write_text("x")
        for model in (folder.final, folder.path / "merged"):
            model.mkdir()
            (model / "model.safetensors").write_text("x")
        folder.tensorboard.mkdir()
        (folder.tensorboard / "events.out.tfevents.1.host").write_text("x")
        folder.claim("kl.png").write_text("x")
        folder.claim("mine.py").write_text("x")


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "runs" / "a", resume=False, overwrite=False) as folder:
        assert folder.path.is_dir()
        assert not folder.holds_run
        assert folder.config.name == "config.yaml"
        assert folder.metrics.parent == tmp_path / "runs" / "a"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_run_is_refused_without_either_option(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == "checkpoints" else (tmp_path / name).write_text("")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as caught:
        open_run_folder(tmp_path, resume=False, overwrite=False)
    assert len(caught.value.problems) == 1
    assert "--resume" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def test_resume_leaves_everything(tmp_path: Path) -> None:
    _make_run(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with open_run_folder(tmp_path, resume=True, overwrite=False) as folder:
        assert folder.holds_run
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_process_left_under_a_temporary_name_goes(tmp_path: Path) -> None:
    _make_run(tmp_path)
    for name in (".summary.json.99.tmp", ".metrics.jsonl.7.tmp", ".mine.1.tmp"):
        (tmp_path / name).write_text("half")
    open_run_folder(tmp_path, resume=True, overwrite=False).release()
    assert [path.name for path in tmp_path.glob("*.tmp")] == [".mine.1.tmp"]


def test_resume_and_overwrite_work_without_a_folder(tmp_path: Path) -> None:
    open_run_folder(tmp_path / "a", resume=True, overwrite=False).release()
    open_run_folder(tmp_path / "b", resume=False, overwrite=True).release()


def test_both_options_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exclude"):
        open_run_folder(tmp_path, resume=True, overwrite=True)


def test_overwrite_removes_the_run_and_keeps_what_is_the_users(tmp_path: Path) -> None:
    _make_run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "holiday.png").write_text("mine")
    (tmp_path / "checkpoints" / "step-notes").mkdir()
    (tmp_path / "tensorboard" / "mine.txt").write_text("mine")
    with open_run_folder(tmp_path, resume=False, overwrite=True) as folder:
        assert (tmp_path / "config.yaml").exists()  # until the new run is sure to start
        folder.clear()
        left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.name != ".rlhf-kl.lock"}
    assert left == {
        "notes.txt",
        "holiday.png",
        "checkpoints",
        "checkpoints/step-notes",
        "tensorboard",
        "tensorboard/mine.txt",
    }


WRITTEN = [
    *(".rlhf-kl.lock", ".rlhf-kl.files", "config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json"),
    *("report.html", "tensorboard", "checkpoints", "final", "merged", "kl.png", "mine.py"),
    *("checkpoints/step-000005", "tensorboard/events.out.tfevents.1.host"),
]


def _contents(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.mark.parametrize("mode", ["resume", "overwrite"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_among_what_a_run_writes_is_refused_and_its_target_kept(tmp_path: Path, name: str, mode: str) -> None:
    """The real file or folder is moved out, as somebody does who keeps it on another disk."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    _make_run(run)
    (run / name).rename(elsewhere)
    (run / name).symlink_to(elsewhere)
    before = _contents(tmp_path)
    with pytest.raises(InputError) as caught:
        open_run_folder(run, resume=mode == "resume", overwrite=mode == "overwrite").clear()
    assert [problem.partition(" is a link: ")[0] for problem in caught.value.problems] == [str(run / name)]
    assert _contents(tmp_path) == before
    assert (run / name).is_symlink()


@pytest.mark.parametrize("name", [".rlhf-kl.lock", "metrics.jsonl", "samples.jsonl"])
def test_a_second_name_of_a_file_that_is_written_in_place_is_refused(tmp_path: Path, name: str) -> None:
    """As `cp --link` makes it: the rows of the copy would be cut off with those of the run."""
    _make_run(tmp_path / "run")
    (tmp_path / "copy").hardlink_to(tmp_path / "run" / name)
    before = (tmp_path / "copy").read_bytes()
    with pytest.raises(InputError, match=f"{name} has a second name"):
        open_run_folder(tmp_path / "run", resume=True, overwrite=False)
    assert (tmp_path / "copy").read_bytes() == before


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    _make_run(tmp_path / "run")
    assert (tmp_path / "disk" / "metrics.jsonl").exists()
    with open_run_folder(tmp_path / "run", resume=True, overwrite=False), pytest.raises(InputError, match="in use"):
        open_run_folder(tmp_path / "disk", resume=True, overwrite=False)
    with open_run_folder(tmp_path / "run", resume=False, overwrite=True) as folder:
        folder.clear()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == [".rlhf-kl.lock"]
    assert (tmp_path / "run").is_symlink()


def test_links_of_the_users_own_stay_and_so_do_their_targets(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    _make_run(run)
    precious.mkdir()
    (precious / "file").write_text("x")
    for place in (run, run / "tensorboard", run / "checkpoints"):
        (place / "mine").symlink_to(precious)
    (run / "final" / "notes").symlink_to(precious)
    with open_run_folder(run, resume=False, overwrite=True) as folder:
        folder.clear()
    assert (precious / "file").read_text() == "x"
    left = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_symlink()}
    assert left == {"mine", "tensorboard/mine", "checkpoints/mine"}


def test_an_edited_list_of_files_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    _make_run(tmp_path / "run")
    (tmp_path / "precious").write_text("x")
    with (tmp_path / "run" / ".rlhf-kl.files").open("a") as file:
        file.write("../precious\n..\n")
    with open_run_folder(tmp_path / "run", resume=False, overwrite=True) as folder:
        folder.clear()
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("name", ["thesis.txt", "config.yaml"])
def test_a_strangers_folder_is_refused_with_any_option(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="not a run"):
        open_run_folder(tmp_path, resume=resume, overwrite=not resume)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_copied_run_without_dotfiles_is_still_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    open_run_folder(tmp_path, resume=True, overwrite=False).release()


def test_unwritable_places_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        open_run_folder(tmp_path / "file", resume=False, overwrite=False)
    with pytest.raises(InputError, match="cannot write the run folder"):
        open_run_folder(tmp_path / "file" / "run", resume=False, overwrite=False)


def test_a_second_run_of_the_same_process_is_refused_and_breaks_no_lock(tmp_path: Path) -> None:
    with open_run_folder(tmp_path / "a", resume=False, overwrite=False):
        with pytest.raises(InputError, match="in use"):
            open_run_folder(tmp_path / "x" / ".." / "a", resume=True, overwrite=False)
        assert _open_elsewhere(tmp_path / "a").returncode == 2
    assert _open_elsewhere(tmp_path / "a").returncode == 0


def test_the_lock_goes_with_its_process_and_the_refusal_names_it(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from rlhf_kl.run.run_folder import open_run_folder\n"
        "folder = open_run_folder(pathlib.Path(sys.argv[1]), resume=True, overwrite=False)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {holder.pid} on"):
            open_run_folder(tmp_path, resume=True, overwrite=False)
        holder.kill()
    open_run_folder(tmp_path, resume=True, overwrite=False).release()


def _open_elsewhere(path: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, pathlib\n"
        "from rlhf_kl.errors import InputError\n"
        "from rlhf_kl.run.run_folder import open_run_folder\n"
        "try:\n"
        "    open_run_folder(pathlib.Path(sys.argv[1]), resume=True, overwrite=False)\n"
        "except InputError:\n"
        "    sys.exit(2)\n"
    )
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)


def test_claims_are_plain_names(tmp_path: Path) -> None:
    for name in ("../a", "a/b", "", ".."):
        with pytest.raises(ValueError, match="plain file name"):
            RunFolder(tmp_path).claim(name)


def test_write_json_is_strict(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", {"final": {"kl": math.nan}, "steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final": {"kl": None}, "steps": 3}


def test_the_newest_run_is_that_of_the_newest_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run under runs/: name a run folder"):
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
