"""Rows as JSON lines, in TensorBoard, and at trackers in their offline modes, read back."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import PartialState

from rlhf_kl.errors import InputError
from rlhf_kl.run import log
from rlhf_kl.run.folder import RunFolder
from rlhf_kl.run.log import JsonlWriter, TensorBoardWriter, Tracker, Views, check_installed, read_jsonl, write_json

# ---- JSON lines


def test_rows_come_back_exactly_and_reach_the_file_at_once(tmp_path: Path) -> None:
    rows = [{"step": 1, "kl/token": 0.1 + 0.2, "alerts": ["a"]}, {"step": 2, "text": "é 漢 \u2028 \x00 \ud800 \r\n"}]
    writer = JsonlWriter(tmp_path / "deep" / "metrics.jsonl")
    for count, row in enumerate(rows, start=1):
        writer.write(row)
        assert read_jsonl(writer.path) == rows[:count]
    assert writer.size == writer.path.stat().st_size
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_the_file_is_strict_json(tmp_path: Path) -> None:
    row = {"a": math.nan, "b": [math.inf, np.float32(0.5)], "c": {"d": -math.inf}, "e": np.int64(3)}
    write_json(tmp_path / "m.json", row)

    def forbidden(name: str) -> float:
        raise AssertionError(name)

    strict = json.loads((tmp_path / "m.json").read_text(), parse_constant=forbidden)
    assert strict == {"a": None, "b": [None, 0.5], "c": {"d": None}, "e": 3}


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "x', b"\x00" * 700, b'{"response": "\xc3', b'{"step": 3}\n'])
def test_what_stands_behind_a_checkpoint_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path, known = tmp_path / "m.jsonl", b'{"step":1, "x": 1.50}\n{"step": 2}\n'
    path.write_bytes(known + tail)
    assert [row["step"] for row in read_jsonl(path)][:2] == [1, 2]
    writer = JsonlWriter(path, len(known))
    writer.write({"step": 3})
    assert path.read_bytes() == known + b'{"step": 3}\n'


def test_damage_inside_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        read_jsonl(tmp_path / "m.jsonl")


# ---- TensorBoard


def _read(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
    return events


def test_a_resumed_run_shows_every_row_once_beside_its_config(tmp_path: Path) -> None:
    folder, rows = RunFolder(tmp_path), JsonlWriter(tmp_path / "metrics.jsonl")
    board = TensorBoardWriter(folder)
    for step in (1, 2):
        rows.write({"step": step, "kl/token": step / 8, "kl/coef": math.nan, "eval/gold": None})
    for step in (1, 2, 3):  # a row behind the checkpoint too
        board.row({"step": step, "kl/token": 9.0})
    board.close()
    (tmp_path / "tensorboard" / "mine.txt").write_text("")
    board = TensorBoardWriter(folder)
    board.row({"step": 3, "kl/token": 0.5, "alerts": ["kl-spike: <b>high</b>"]})
    board.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    events = _read(tmp_path)
    assert events.Tags()["scalars"] == ["kl/token"]
    points = [(event.step, event.value) for event in events.Scalars("kl/token")]
    assert points == [(1, 0.125), (2, 0.25), (3, 0.5)]


# ---- trackers

Write = Callable[..., str]
CONFIG = {"run": {"name": "mine", "seed": 3}, "kl": {"target": 0.1, "ceiling": None}}
ROWS = [{"step": 1, "kl/token": 0.25, "kl/coef": 0.5, "eval/gold": None}, {"step": 2, "kl/token": 0.125}]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    PartialState(cpu=True)  # as in a run; accelerate's trackers ask for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trackers' own libraries
        yield


@pytest.fixture
def write(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """write("wandb", rows): rows of one part of a run; returns the alerts."""

    def run(name: str, rows: list[dict[str, Any]], sent: int = 0, *, failed: bool = False) -> str:
        views = Views({name: lambda: Tracker(name, folder, "mine", CONFIG, sent)})
        for row in rows:
            views.row(row)
        views.close(failed=failed)
        return " ".join(line for line in capsys.readouterr().err.splitlines() if "alert:" in line)

    return run


def test_wandb_offline(write: Write, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert write("wandb", ROWS) == ""
    known = json.loads((folder.path / "trackers.json").read_text())["wandb"]
    assert write("wandb", [{"step": 3, "kl/token": 0.5}]) == ""
    files = [file.name for file in folder.path.glob("wandb/offline-run-*/*.wandb")]
    assert files == [f"run-{known}.wandb"] * 2  # a resumed run goes on in the same one


@pytest.mark.parametrize(("name", "theirs"), [("wandb", "mine-too"), ("trackio", "rlhf-kl")])
def test_the_project_is_the_user_s_where_wandb_is_told_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str
) -> None:
    from accelerate import tracking

    monkeypatch.setenv("WANDB_PROJECT", "mine-too")
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, lambda project, **_: project)
    assert log._accelerates(name, "mine", folder.path, None) == theirs


def test_mlflow_on_disk(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert write("mlflow", ROWS) == ""
    again = [{"step": 2, "kl/token": 0.125}, {"step": 3, "kl/token": 0.5}]
    assert write("mlflow", again, sent=2, failed=True) == ""  # a resumed run goes on in the same one
    client = mlflow.MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("rlhf-kl").experiment_id])
    points = client.get_metric_history(run.info.run_id, "kl/token")
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.125), (3, 0.5)]
    assert run.data.params["kl.target"] == "0.1"
    assert run.info.run_name == "mine"
    assert run.info.status == "FAILED"


def test_trackio_on_disk(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert write("trackio", ROWS) == ""
    (run,) = trackio.Api().runs("rlhf-kl")
    assert run.name == "mine"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """stand_in(error): wandb is a list of what was called; `error` is raised by its second row."""

    def install(error: Exception | None = None) -> list[Any]:
        calls: list[Any] = []

        class StandIn:
            run = SimpleNamespace(id="new")

            def start(self) -> None: ...

            def store_init_configuration(self, values: dict[str, Any]) -> None:
                calls.append(values)

            def log(self, values: dict[str, float], step: int) -> None:
                if error is not None and step == 2:
                    raise error
                calls.append((step, values))

            def finish(self) -> None:
                calls.append("finish")

        monkeypatch.setattr(log, "_accelerates", lambda *_: StandIn())
        return calls

    return install


def test_finite_numbers_are_sent_once_at_their_step(write: Write, stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in()
    assert write("wandb", ROWS) == ""
    config = {"run.name": "mine", "run.seed": 3, "kl.target": 0.1, "kl.ceiling": None}
    assert calls == [config, (1, {"kl/token": 0.25, "kl/coef": 0.5}), (2, {"kl/token": 0.125}), "finish"]
    write("wandb", ROWS, sent=1)  # a run that goes on keeps its config there
    assert calls[4:] == [(2, {"kl/token": 0.125}), "finish"]


def test_one_that_fails_is_switched_off_and_tells_no_password(write: Write, stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in(OSError("http://me:hunter2@127.0.0.1:9 does not answer"))
    alerts = write("wandb", [*ROWS, {"step": 3, "kl/token": 0.5}])
    assert alerts.startswith("alert: wandb: http://127.0.0.1:9 ")
    assert "hunter2" not in alerts
    assert calls[1:] == [(1, {"kl/token": 0.25, "kl/coef": 0.5})]


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["absent", "a folder of that name"])
def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    monkeypatch.setattr(log, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match=r"^tracking\.trackers: .*pip install wandb"):
        check_installed(["wandb"])
