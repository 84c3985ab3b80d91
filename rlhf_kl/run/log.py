"""What a run writes row by row: `metrics.jsonl`, `samples.jsonl`, TensorBoard, trackers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from rlhf_kl.config.resolve import flat
from rlhf_kl.errors import InputError
from rlhf_kl.run.folder import EVENTS, RunFolder, write_atomic
from rlhf_kl.text import read_number
from rlhf_kl.ui import log

# `chosen` of an evaluation's rows in samples.jsonl; all other rows are responses that were trained on.
HELD_OUT, NOT_HELD_OUT = EVALUATED = ("held out", "training prompt")  # the second: too few prompts to hold some out

# ---- JSON ----


def encode_json(value: Any, *, indent: int | None = None) -> bytes:
    """Strict UTF-8 JSON: NaN and infinities become null, numpy and torch scalars numbers, what JSON lacks text."""

    def other(x: Any) -> Any:  # without importing numpy or torch
        return x.tolist() if hasattr(x, "tolist") else str(x)

    ready = to_jsonable_python(value, inf_nan_mode="null", fallback=other)
    return json.dumps(ready, ensure_ascii=False, indent=indent).encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, encode_json(value, indent=2) + b"\n")


class JsonlWriter:
    """Appends one JSON object per line; each line reaches the operating system before `write` returns."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Open `path` after its first `keep` bytes; rows after a checkpoint are cut off and computed again.

        A link, hard or symbolic, is replaced by a file of its own.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
            write_atomic(path, path.read_bytes()[:keep] if path.exists() else b"")
        self._file = path.open("ab")
        self._file.truncate(min(keep, self.size))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Errors: OSError (disk full)."""
        try:
            self._file.write(encode_json(row) + b"\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    @property
    def size(self) -> int:
        """Bytes of the file so far."""
        return os.fstat(self._file.fileno()).st_size

    def sync(self) -> None:
        """Put all rows on the disk: before a checkpoint that relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of `path`, without an incomplete last line; empty without a file.

    Errors: InputError for a damaged line before the last.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:  # includes undecodable bytes
            if number < len(lines):
                raise InputError(f"{path}: line {number} is not a JSON object") from None
    return rows


# ---- TensorBoard ----


class TensorBoardWriter:
    """The figures of one run, in one event file, which accelerate's tracker could not write anew."""

    def __init__(self, folder: RunFolder) -> None:
        """Replace the event files by one with the rows of the run so far."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside tensorboard and its protobuf
            from torch.utils.tensorboard import SummaryWriter

            folder.tensorboard.mkdir(parents=True, exist_ok=True)
            for old in folder.tensorboard.glob(EVENTS):
                old.unlink()
            self._writer = SummaryWriter(str(folder.tensorboard), flush_secs=10)
        for row in read_jsonl(folder.metrics):
            self.row(row)

    def row(self, row: Mapping[str, Any]) -> None:
        """Every finite number of a metrics row as a scalar at the row's `step`."""
        for name, value in _figures(row).items():
            self._writer.add_scalar(name, value, int(row["step"]))
        self._writer.flush()

    def close(self, *, failed: bool = False) -> None:
        """Write what is left."""
        del failed
        self._writer.close()


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row."""
    return {name: value for name in row if name != "step" and (value := read_number(row, name)) is not None}


# ---- trackers ----

PROJECT = "rlhf-kl"
QUIET = {  # variables that are set where the user has not: few lines, and no minutes of waiting for a server
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
# The attribute of accelerate's tracker that holds the id by which a resumed run goes on there.
IDS = {"wandb": "run.id", "trackio": "run.name", "mlflow": "active_run.info.run_id"}


def check_installed(names: Sequence[str]) -> None:
    """Errors: InputError for each tracker that is not installed; called before the run."""
    # Without an origin it is any folder of that name, such as wandb's own in the working directory.
    if missing := [name for name in names if (spec := find_spec(name)) is None or spec.origin is None]:
        raise InputError(*(f"tracking.trackers: {name} is not installed: pip install {name}" for name in missing))


class Tracker:
    """Rows sent through accelerate's tracker of this name; a run that goes on does so there too."""

    def __init__(self, name: str, folder: RunFolder, run: str, config: Mapping[str, Any], sent: int = 0) -> None:
        """`run`: its name; `config`: resolved, as nested mappings; `sent`: the last step that it has already."""
        self.name, self.sent = name, sent
        for variable, value in QUIET.items():
            os.environ.setdefault(variable, value)
        ids = json.loads(folder.trackers.read_text(encoding="utf-8")) if folder.trackers.is_file() else {}
        self._tracker = _accelerates(name, run, folder.path, ids.get(name))
        self._tracker.start()
        if name not in ids:
            values = {key: json.dumps(v) if isinstance(v, list | dict) else v for key, v in flat(config).items()}
            self._tracker.store_init_configuration(values)
        ids[name] = str(attrgetter(IDS[name])(self._tracker))
        write_atomic(folder.trackers, json.dumps(ids))

    def row(self, row: Mapping[str, Any]) -> None:
        """The finite numbers of a row, at its step; nothing of a row that was sent before the run was interrupted."""
        if row["step"] > self.sent:
            self._tracker.log(_figures(row), step=int(row["step"]))

    def close(self, *, failed: bool = False) -> None:
        """Send what is left, and whether the run failed."""
        if failed and self.name == "wandb":
            self._tracker.run.finish(exit_code=1)
        elif failed and self.name == "mlflow":
            sys.modules[self.name].end_run(status="FAILED")
        else:
            self._tracker.finish()


def _accelerates(name: str, run: str, folder: Path, known: str | None) -> Any:
    """accelerate's tracker; with a `known` id it goes on in that run."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    options: dict[str, dict[str, Any]] = {
        "wandb": {"name": run, "id": known, "resume": "allow", "dir": str(folder)},
        "trackio": {"name": known or run, "resume": "must" if known else "never"},
        "mlflow": {"run_name": run, "run_id": known},
    }
    project = os.environ.get("WANDB_PROJECT", PROJECT) if name == "wandb" else PROJECT
    return LOGGER_TYPE_TO_CLASS[name](project, **options[name])


class Views:
    """TensorBoard and the trackers. One that fails is switched off with a warning, and the run goes on."""

    def __init__(self, makers: Mapping[str, Callable[[], TensorBoardWriter | Tracker]]) -> None:
        self._running: dict[str, TensorBoardWriter | Tracker] = {}
        for name, make in makers.items():
            with self._switched_off_if_it_fails(name):
                self._running[name] = make()

    def row(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        for name, view in list(self._running.items()):
            with self._switched_off_if_it_fails(name):
                view.row(row)

    def close(self, *, failed: bool) -> None:
        """Nothing follows."""
        for name, view in list(self._running.items()):
            with self._switched_off_if_it_fails(name):
                view.close(failed=failed)

    @contextlib.contextmanager
    def _switched_off_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of any library
            self._running.pop(name, None)
            reason = re.sub(r"://[^/@\s]*@", "://", " ".join(str(error).split()))  # an address may hold a password
            log.warning(f"{name}: {reason}: switched off; metrics.jsonl has every row")
