"""Rows of `metrics.jsonl` sent to wandb, trackio or mlflow, through accelerate's trackers."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rlhf_kl.config.load import flat
from rlhf_kl.errors import InputError
from rlhf_kl.run.files import write_atomic
from rlhf_kl.run.run_folder import RunFolder
from rlhf_kl.text import read_number

PROJECT = "rlhf-kl"
QUIET = {  # variables that are set where the user has not: few lines, and no minutes of waiting for a server
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
IDS = "trackers.json"  # the run's id at each tracker, for a resumed run


def check_installed(names: Sequence[str]) -> None:
    """Errors: InputError for each tracker that is not installed; called before the run."""
    # Without an origin it is any folder of that name, such as wandb's own in the working directory.
    if missing := [name for name in names if (spec := find_spec(name)) is None or spec.origin is None]:
        raise InputError(*(f"tracking.trackers: {name} is not installed: pip install {name}" for name in missing))


class Trackers:
    """The trackers that a run names. One that fails is switched off and reported; the run goes on."""

    def __init__(
        self,
        names: Sequence[str],
        folder: RunFolder,
        run: str,
        config: Mapping[str, Any],
        alert: Callable[[str], None],
        sent: int = 0,
    ) -> None:
        """`run`: its name; `config`: resolved, as nested mappings; `sent`: the last step that they have already."""
        self.alert, self.sent = alert, sent
        self.running: dict[str, Any] = {}
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        place = folder.claim(IDS)
        ids: dict[str, str] = {}
        if place.is_file():
            with contextlib.suppress(ValueError):
                ids = json.loads(place.read_text(encoding="utf-8"))
        for name in names:
            try:
                tracker, ids[name], new = START[name](run, folder, ids.get(name))
                if new:
                    tracker.store_init_configuration({key: _plain(value) for key, value in flat(config).items()})
            except Exception as error:  # of any library
                self._switch_off(name, error)
                continue
            self.running[name] = tracker
            write_atomic(place, json.dumps(ids))

    def row(self, row: Mapping[str, Any]) -> None:
        """The finite numbers of a row, at its step; nothing of a row that was sent before the run was interrupted."""
        if row["step"] <= self.sent:
            return
        figures = {name: value for name in row if name != "step" and (value := read_number(row, name)) is not None}
        self._each(lambda _, tracker: tracker.log(figures, step=int(row["step"])))

    def close(self, *, failed: bool) -> None:
        """Send what is left, and whether the run failed."""
        self._each(lambda name, tracker: FAIL[name](tracker) if failed and name in FAIL else tracker.finish())

    def _each(self, call: Callable[[str, Any], object]) -> None:
        for name, tracker in list(self.running.items()):
            try:
                call(name, tracker)
            except Exception as error:  # of any library
                del self.running[name]
                self._switch_off(name, error)

    def _switch_off(self, name: str, error: Exception) -> None:
        reason = re.sub(r"://[^/@\s]*@", "://", " ".join(str(error).split()))  # an address may hold a password
        self.alert(f"{name}: {reason}: switched off; metrics.jsonl has every row")


Started = tuple[Any, str, bool]  # the tracker, its id of the run, and whether the run is new there


def _wandb(run: str, folder: RunFolder, known: str | None) -> Started:
    from accelerate.tracking import WandBTracker

    tracker = WandBTracker(PROJECT, name=run, id=known, resume="allow", dir=str(folder.path))
    tracker.start()
    return tracker, str(tracker.run.id), known is None


def _trackio(run: str, folder: RunFolder, known: str | None) -> Started:
    from accelerate.tracking import TrackioTracker

    del folder
    tracker = TrackioTracker(PROJECT, name=known or run, resume="must" if known else "never")
    tracker.start()
    return tracker, str(tracker.run.name), known is None


def _mlflow(run: str, folder: RunFolder, known: str | None) -> Started:
    from accelerate.tracking import MLflowTracker

    del folder
    tracker = MLflowTracker(experiment_name=PROJECT, run_name=run, run_id=known)
    tracker.start()
    return tracker, str(tracker.active_run.info.run_id), known is None


def _fail_wandb(tracker: Any) -> None:
    tracker.run.finish(exit_code=1)


def _fail_mlflow(_tracker: Any) -> None:
    import mlflow

    mlflow.end_run(status="FAILED")


FAIL = {"wandb": _fail_wandb, "mlflow": _fail_mlflow}
START: dict[str, Callable[[str, RunFolder, str | None], Started]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def _plain(value: Any) -> Any:
    """A value in a type that every tracker accepts."""
    return value if isinstance(value, bool | int | float | str) or value is None else json.dumps(value)
