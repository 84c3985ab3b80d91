"""Rows at trackers, in their offline modes, read back; skipped where a tracker is not installed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from rlhf_kl.errors import InputError
from rlhf_kl.run import trackers
from rlhf_kl.run.run_folder import RunFolder, open_run_folder
from rlhf_kl.run.trackers import Trackers, check_installed

CONFIG = {"run": {"name": "mine", "seed": 3}, "kl": {"target": 0.1, "ceiling": None}}
ROWS = [{"step": 1, "kl/token": 0.25, "kl/coef": 0.5, "objective/gold": None}, {"step": 2, "kl/token": 0.125}]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with open_run_folder(tmp_path / "run", resume=False, overwrite=False) as opened:
        yield opened


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    PartialState(cpu=True)  # as in a run; accelerate's trackers ask for it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trackers' own libraries
        yield


def write(
    name: str, folder: RunFolder, rows: list[dict[str, Any]], sent: int = 0, *, failed: bool = False
) -> list[str]:
    """Rows of one part of a run; the alerts."""
    alerts: list[str] = []
    tracking = Trackers([name], folder, "mine", CONFIG, alerts.append, sent)
    for row in rows:
        tracking.row(row)
    tracking.close(failed=failed)
    return alerts


def test_wandb_offline(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert write("wandb", folder, ROWS) == []
    known = json.loads((folder.path / "trackers.json").read_text())["wandb"]
    assert write("wandb", folder, [{"step": 3, "kl/token": 0.5}]) == []
    found, ids = {}, set()
    for file in folder.path.glob("wandb/offline-run-*/*.wandb"):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                values = record.history.item
                items = {".".join(value.nested_key) or value.key: value.value_json for value in values}
                found[json.loads(items["_step"])] = json.loads(items["kl/token"])
    assert found == {1: 0.25, 2: 0.125, 3: 0.5}
    assert ids == {(known, "rlhf-kl", "mine")}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log behind wandb's own header of seven bytes: blocks of 32 KiB, parts of records."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too short for the header of a part
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield whole
            whole = b""


def test_mlflow_on_disk(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert write("mlflow", folder, ROWS) == []
    again = [{"step": 2, "kl/token": 0.125}, {"step": 3, "kl/token": 0.5}]
    assert write("mlflow", folder, again, sent=2, failed=True) == []  # a resumed run goes on in the same one
    client = mlflow.MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("rlhf-kl").experiment_id])
    points = client.get_metric_history(run.info.run_id, "kl/token")
    assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.125), (3, 0.5)]
    assert run.data.params["kl.target"] == "0.1"
    assert run.info.run_name == "mine"
    assert run.info.status == "FAILED"


def test_trackio_on_disk(folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    assert write("trackio", folder, ROWS) == []
    (run,) = trackio.Api().runs("rlhf-kl")
    assert run.name == "mine"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """stand_in(error): wandb is a list of what was called; `error` is raised by its second row."""

    def install(error: Exception | None = None) -> list[Any]:
        calls: list[Any] = []

        class Tracker:
            def store_init_configuration(self, values: dict[str, Any]) -> None:
                calls.append(values)

            def log(self, values: dict[str, float], step: int) -> None:
                if error is not None and step == 2:
                    raise error
                calls.append((step, values))

            def finish(self) -> None:
                calls.append("finish")

        monkeypatch.setitem(trackers.START, "wandb", lambda run, folder, known: (Tracker(), known or "new", not known))
        return calls

    return install


def test_finite_numbers_at_their_step(folder: RunFolder, stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in()
    assert write("wandb", folder, ROWS) == []
    config = {"run.name": "mine", "run.seed": 3, "kl.target": 0.1, "kl.ceiling": None}
    assert calls == [config, (1, {"kl/token": 0.25, "kl/coef": 0.5}), (2, {"kl/token": 0.125}), "finish"]
    write("wandb", folder, [])
    assert calls[4:] == ["finish"]  # a run that goes on keeps its config there


def test_one_that_fails_is_switched_off(folder: RunFolder, stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in(OSError("no network"))
    alerts = write("wandb", folder, [*ROWS, {"step": 3, "kl/token": 0.5}])
    assert alerts == ["wandb: no network: switched off; metrics.jsonl has every row"]
    assert calls[1:] == [(1, {"kl/token": 0.25, "kl/coef": 0.5})]


def test_one_that_cannot_start_is_switched_off_and_tells_no_password(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("http://me:hunter2@127.0.0.1:9 does not answer")

    monkeypatch.setitem(trackers.START, "mlflow", fail)
    assert write("mlflow", folder, ROWS) == [
        "mlflow: http://127.0.0.1:9 does not answer: switched off; metrics.jsonl has every row"
    ]


def test_rows_that_were_sent_are_not_sent_again(folder: RunFolder, stand_in: Callable[..., list[Any]]) -> None:
    calls = stand_in()
    write("wandb", folder, ROWS, sent=1)
    assert calls[1:] == [(2, {"kl/token": 0.125}), "finish"]


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["absent", "a folder of that name"])
def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: spec)
    with pytest.raises(InputError, match=r"tracking\.trackers: wandb is not installed: pip install wandb"):
        check_installed(["wandb"])
