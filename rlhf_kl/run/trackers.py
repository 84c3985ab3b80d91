"""Rows of `metrics.jsonl` sent to wandb, trackio or mlflow, through accelerate's trackers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from rlhf_kl.config.load import flat
from rlhf_kl.errors import InputError
from rlhf_kl.run.figures import read_number
from rlhf_kl.run.files import write_atomic
from rlhf_kl.run.run_folder import RunFolder

PROJECT = "rlhf-kl"
IDS = "trackers.json"  # of the run at each tracker, so that a resumed run goes on there


def check_installed(names: Sequence[str]) -> None:
    """Errors: InputError for each tracker that is not there, before any time is spent on the run."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise InputError(*(f"tracking.trackers: {name} is not installed: pip install {name}" for name in missing))


class Trackers:
    """The trackers that a run names. One that fails is switched off and reported; the run goes on."""

    def __init__(
        self, names: Sequence[str], folder: RunFolder, run: str, config: Mapping[str, Any], alert: Callable[[str], None]
    ) -> None:
        """`run`: its name; `config`: resolved, as nested mappings.

        Errors: InputError for a tracker that is not installed or cannot start.
        """
        self.alert = alert
        self.running: dict[str, Any] = {}
        check_installed(names)
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
                raise InputError(f"tracking.trackers: {name} does not start: {error}") from error
            self.running[name] = tracker
        write_atomic(place, json.dumps(ids))

    def row(self, row: Mapping[str, Any]) -> None:
        """The finite numbers of a row, at its step."""
        figures = {name: value for name in row if name != "step" and (value := read_number(row, name)) is not None}
        self._each(lambda tracker: tracker.log(figures, step=int(row["step"])))

    def close(self) -> None:
        """Send what is left."""
        self._each(lambda tracker: tracker.finish())

    def _each(self, call: Callable[[Any], object]) -> None:
        for name, tracker in list(self.running.items()):
            try:
                call(tracker)
            except Exception as error:  # of any library
                del self.running[name]
                self.alert(f"{name}: {error}: switched off; metrics.jsonl has every row")


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


START: dict[str, Callable[[str, RunFolder, str | None], Started]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _mlflow,
}


def _plain(value: Any) -> Any:
    """A value as every tracker takes it."""
    return value if isinstance(value, bool | int | float | str) or value is None else json.dumps(value)
