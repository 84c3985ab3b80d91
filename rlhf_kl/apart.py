"""Users' code in the program's process: what each of the two sets there is its own.

While the code of a user's runs, the path begins with its folders, and settings of Python and torch are as it left them.
Afterwards they are the program's again. Without this, a file that switches gradients off would end the training.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from rlhf_kl.errors import InputError


class Setting(NamedTuple):
    """Something of the process, or of its current thread, that code can read and set."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


UNKNOWN = object()  # the value of a setting that this torch lacks, or that it refuses to tell


@dataclass(eq=False)
class Home:
    """Where code of a user's lives, and what it has set in this process.

    The path, the modules and most settings are those of the process; gradients, autocast and the like of a thread.
    """

    folders: list[str] = field(default_factory=list)
    """Of its file and of what it imports: first on the path while it runs, else last. Processes that it starts inherit
    the path."""
    module: ModuleType | None = None
    """Of a file: imports find it under its name, and what it made can be pickled."""
    settings: dict[str, Any] = field(default_factory=dict)
    """That it left otherwise than it found them."""
    secrets: dict[str, str] = field(default_factory=dict)
    """What its options got from variables of the environment -> how these are written."""

    def hidden(self, text: str) -> str:
        """A text with variables as they are written in place of their values: no message shows these."""
        values = sorted(self.secrets, key=len, reverse=True)  # one may be a part of another one
        if not values:
            return text
        return re.sub("|".join(map(re.escape, values)), lambda match: self.secrets[match[0]], text)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A block that runs its code. What that prints goes to stderr: stdout is for the program's results."""
        printed = contextlib.redirect_stdout(sys.stderr)
        with self._on_path(), self._importable(), self._with_settings(), _signals_kept(), printed:
            yield
            if (
                "torch" in sys.modules and sys.modules["torch"].is_inference_mode_enabled()
            ):  # no tensor could be trained
                raise InputError(
                    "left torch.inference_mode on: write `with torch.inference_mode():` around what needs it"
                )

    def settle(self) -> None:
        """Set in this thread, which is its own, what it has set."""
        _write(self.settings, _settings())

    @contextlib.contextmanager
    def _on_path(self) -> Iterator[None]:
        before, own = list(sys.path), self.folders
        sys.path[:] = [*own, *(folder for folder in before if folder not in own)]
        try:
            yield
        finally:  # it may have added some itself
            self.folders = [folder for folder in sys.path if folder in own or folder not in before]
            sys.path[:] = [*before, *(folder for folder in self.folders if folder not in before)]

    @contextlib.contextmanager
    def _importable(self) -> Iterator[None]:
        """Another file may have the same name: its module comes back afterwards."""
        if self.module is None:
            yield
            return
        name = self.module.__name__
        before, sys.modules[name] = sys.modules.get(name), self.module
        try:
            yield
        finally:
            if before is not None:
                sys.modules[name] = before

    @contextlib.contextmanager
    def _with_settings(self) -> Iterator[None]:
        ours = _read(_settings())
        self.settle()
        try:
            with _once_torch_is_there(lambda: ours.update(_read(_of_torch()))):
                yield
        finally:
            known = _settings()
            for name, now in (found := _read(known)).items():
                if now not in (self.settings.get(name, ours.get(name)), UNKNOWN):
                    self.settings[name] = now
            if found != ours:
                _write(ours, known)


def _read(settings: Mapping[str, Setting]) -> dict[str, Any]:
    values = {}
    for name, setting in settings.items():
        values[name] = UNKNOWN
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            values[name] = setting.read()
    return values


def _write(values: Mapping[str, Any], settings: Mapping[str, Setting]) -> None:
    for name, value in values.items():
        if value is not UNKNOWN and _read({name: settings[name]}) != {name: value}:
            with contextlib.suppress(OSError, RuntimeError):  # a folder has gone, for one
                settings[name].write(value)


def _settings() -> dict[str, Setting]:
    return OF_PYTHON | (_of_torch() if "torch" in sys.modules else {})


def _raising() -> list[Any]:
    """The filters that turn warnings into errors. Others are not a user's alone: libraries add some when imported."""
    return [filter_ for filter_ in warnings.filters if filter_[0] == "error"]


def _set_raising(wanted: list[Any]) -> None:
    kept = [filter_ for filter_ in warnings.filters if filter_[0] != "error" or filter_ in wanted]
    warnings.resetwarnings()  # which tells the C code of a change too
    warnings.filters[:] = [*(filter_ for filter_ in wanted if filter_ not in kept), *kept]  # type: ignore[index]


OF_PYTHON = {
    "working directory": Setting(os.getcwd, os.chdir),
    "warnings as errors": Setting(_raising, _set_raising),
}


# ---- of torch: what changes the program's figures or ends it; random generators do neither, see `seeding`


@cache
def _of_torch() -> dict[str, Setting]:
    import torch

    settings = {
        "gradients": Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
        "dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "device": Setting(_default_device, torch.set_default_device),
        "GPU": Setting(_gpu, torch.cuda.set_device),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
        "tiny numbers": Setting(lambda: sys.float_info.min * HALF == 0.0, torch.set_flush_denormal),
        "anomalies": Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.set_anomaly_enabled(*value),
        ),
        "deterministic": Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "float32": Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    }
    settings["autocast blocks"] = Setting(_autocast_blocks, _set_autocast_blocks)
    for device in ("cpu", "cuda"):
        settings[f"autocast {device}"] = Setting(
            partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)
        )
        settings[f"autocast dtype {device}"] = Setting(
            partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)
        )
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        settings[f"{kind} attention"] = Setting(
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"), getattr(torch.backends.cuda, f"enable_{kind}_sdp")
        )
    for path in BACKENDS:
        settings[path] = _backend(torch.backends, path)
    return settings


HALF = 0.5  # the interpreter would fold a constant product
BACKENDS = (
    # Outer ones first: they set those inside.
    *("fp32_precision", "cudnn.fp32_precision", "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"),
    *("cuda.matmul.fp32_precision", "mkldnn.fp32_precision", "mkldnn.conv.fp32_precision"),
    *("mkldnn.rnn.fp32_precision", "mkldnn.matmul.fp32_precision"),
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "cudnn.allow_tf32", "mkldnn.enabled"),
    *("cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.allow_bf16_reduced_precision_reduction"),
)


def _backend(backends: Any, path: str) -> Setting:
    *inside, name = path.split(".")

    def holder() -> Any:
        return reduce(getattr, inside, backends)

    return Setting(lambda: getattr(holder(), name), lambda value: setattr(holder(), name, value))


def _autocast_blocks() -> int:
    """How many of them are open: the end of the last one forgets the rounded weights, which are old after a step."""
    import torch

    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _set_autocast_blocks(wanted: int) -> None:
    import torch

    for _ in range(wanted - _autocast_blocks()):
        torch.autocast_increment_nesting()
    for _ in range(_autocast_blocks() - wanted):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()


def _default_device() -> Any:
    """None where nobody has set one, which is faster than to set the CPU."""
    import torch

    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else context.device


def _gpu() -> int:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


@contextlib.contextmanager
def _once_torch_is_there(then: Callable[[], Any]) -> Iterator[None]:
    """A block that may be the first to import torch: `then` is called with torch as it comes."""
    if "torch" in sys.modules:
        yield
        return
    finder = _TorchFinder(then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path[:] = [each for each in sys.meta_path if each is not finder]


class _TorchFinder(MetaPathFinder):
    def __init__(self, then: Callable[[], Any]) -> None:
        self.then, self.asks = then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != "torch" or self.asks:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(name)  # by the other finders
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_then(module: ModuleType) -> None:
                run(module)
                self.then()

            spec.loader.exec_module = run_then  # type: ignore[method-assign]
        return spec


# ---- signals


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Libraries that a user's file imports may handle Ctrl-C: the program's own handling stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler and handler is not None:  # None: set by C code
                signal.signal(number, handler)
