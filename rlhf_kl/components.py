"""Names: the nearest valid one, and "module:attribute" or "file.py:attribute" as an object."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_kl.errors import InputError


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name closest to `word`, or with `word` as its initials (lr: learning_rate); else None."""
    by_lower = {name.lower(): name for name in names}
    for name in by_lower:
        if "_" in name and word.lower() == "".join(part[:1] for part in name.split("_")):
            return by_lower[name]
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def suggestion(word: str, names: Iterable[str], prefix: str = "") -> str:
    """ "; did you mean X?", or the valid names if none is close (empty if there are none)."""
    names = sorted(names)
    close = nearest(word, names)
    if close is not None:
        return f"; did you mean {prefix}{close}?"
    return f"; valid: {', '.join(names)}" if names else ""


def is_reference(text: str) -> bool:
    """Whether `text` has the form "module:attribute" or "file.py:attribute" (not "builtin:NAME")."""
    module, _, attribute = text.rpartition(":")
    return bool(module) and attribute.isidentifier() and module != "builtin"


def reference_file(ref: str, search: Iterable[Path]) -> Path | None:
    """The existing file of a "file.py:attribute", looked for in each folder in `search`; else None."""
    name = ref.rpartition(":")[0]
    if not name.endswith(".py"):
        return None
    for folder in search:
        path = folder / Path(name).expanduser()
        if os.path.isfile(path):  # unlike Path.is_file for a name that is too long
            return path.resolve()
    return None


def load_attribute(ref: str, *, search: Sequence[Path]) -> Any:
    """The object that `ref` names. Runs the code of its module.

    ref: "module:attribute" (modules in the working directory too) or "file.py:attribute" (looked for in `search`).
    Raises InputError: no such file, module or attribute, or an error in the imported code.
    """
    source, _, attribute = ref.rpartition(":")
    if source.endswith(".py"):
        path = reference_file(ref, search)
        if path is None:
            places = ", ".join(dict.fromkeys(str(folder) for folder in search))
            raise InputError(f"no such file: {source} (looked in {places})")
        module = _import_file(path)
    else:
        module = _import_module(source)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"{source} has no {attribute!r}{suggestion(attribute, public)}") from None


@contextmanager
def _on_path(*folders: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = before


def _import_file(path: Path) -> ModuleType:
    """Run the file as a separate module, once per content."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    name = f"_rlhf_kl_file_{path.stem}_{sha256(bytes(path) + b':' + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and get_type_hints look the module up by name
    try:
        with _on_path(path.parent, Path.cwd()):
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(_import_failure(str(path), error, str(path))) from error
    return module


def _import_module(name: str) -> ModuleType:
    try:
        with _on_path(Path.cwd()):
            importlib.invalidate_caches()
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(f"no module {name!r} in {Path.cwd()} or in this environment") from None
        raise InputError(_import_failure(name, error, _module_file(name))) from error
    except (Exception, SystemExit) as error:
        raise InputError(_import_failure(name, error, _module_file(name))) from error


def _module_file(name: str) -> str:
    return os.path.join(os.getcwd(), *name.split(".")) + ".py"


def _import_failure(source: str, error: BaseException, file: str) -> str:
    """One line: the source, the exception, and the line of `file` (else of the last file)."""
    reason = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    if isinstance(error, SyntaxError) and error.lineno is not None:
        place = f"line {error.lineno}" if error.filename == file else f"{error.filename}:{error.lineno}"
        return f"{source} cannot be imported: {reason} ({place})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if own:
        return f"{source} cannot be imported: {reason} (line {own[-1].lineno})"
    foreign = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    place = f" ({foreign[-1].filename}:{foreign[-1].lineno})" if foreign else ""
    return f"{source} cannot be imported: {reason}{place}"
