"""The C of this folder as a library for this machine's processor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rlhf_kl.cache import cache_folder

SOURCES = ("gpt2.c", "logits.c")
# Nothing that lets results depend on how an expression is written, but for fused multiply-add. OpenMP's functions are
# left open: they are found in the library that torch has loaded, and so its threads are used and not a second team.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
COMPILERS = ("gcc", "cc")
COMPILE_SECONDS = 120.0  # usually three
VECTORS = {"avx2", "fma"}  # what a processor must have: the tiles are made for its registers


class _Unavailable(Exception):
    """Why there is no library."""


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    import torch  # noqa: F401  its OpenMP must be there first

    try:
        return _load()
    except _Unavailable as reason:
        return str(reason)


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where there are none, for the reason that `missing` names."""
    found = _loaded()
    return found if isinstance(found, ctypes.CDLL) else None


def missing() -> str | None:
    """Why there is no library; None where there is one."""
    found = _loaded()
    return found if isinstance(found, str) else None


def _load() -> ctypes.CDLL:
    features = _processor_features()
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise _Unavailable("there is no C compiler (gcc)")
    try:
        name = f"kernels-{_key(compiler, features)}.so"
        with contextlib.suppress(OSError, RuntimeError):  # no home, or one that cannot be written or run from
            return _kept(name, compiler)
        with tempfile.TemporaryDirectory() as folder:
            return _open(_made(Path(folder) / name, compiler))
    except OSError as error:
        raise _Unavailable(f"they cannot be loaded: {error}") from error


def _kept(name: str, compiler: str) -> ctypes.CDLL:
    """The library in the cache, made where it is not there or cannot be loaded. Errors: OSError, RuntimeError."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / name
    if not (_is_ours(folder) and (not target.exists() or _is_ours(target))):
        raise OSError("somebody else can write there")  # and have their code run here
    if target.is_file():
        with contextlib.suppress(OSError):
            return _open(target)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as work:
        made = _made(Path(work) / name, compiler)
        _open(made)
        os.replace(made, target)
    return _open(target)


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _processor_features() -> str:
    """What the processor says it can do. Errors: _Unavailable where the tiles are not made for it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise _Unavailable("they are made for Linux on x86-64")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise _Unavailable("the processor does not say what it can do") from error
    flags = next((line for line in lines if line.startswith("flags")), "")
    if not set(flags.split()) >= VECTORS:
        raise _Unavailable("the processor has no AVX2")
    return flags


def _key(compiler: str, features: str) -> str:
    """Changes with the sources, the flags, the compiler and the processor: a home may be on several machines."""
    digest = hashlib.sha256(repr((FLAGS, compiler, os.stat(os.path.realpath(compiler)).st_mtime, features)).encode())
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _made(target: Path, compiler: str) -> Path:
    objects = [str(target.with_name(f"{Path(source).stem}.o")) for source in SOURCES]
    for source, made in zip(SOURCES, objects, strict=True):
        _run(compiler, *FLAGS, "-fopenmp", "-fPIC", "-c", str(Path(__file__).parent / source), "-o", made)
    _run(compiler, "-shared", *objects, "-o", str(target), "-lm")
    target.chmod(0o700)
    return target


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _Unavailable(f"{command[0]} took longer than {COMPILE_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise _Unavailable(f"{command[0]} failed: {lines[0].strip() if lines else done.returncode}")


def _open(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name in ("lanes", "gpt2_kept", "gpt2_packed"):
        getattr(found, name).restype = ctypes.c_int64
    return found
