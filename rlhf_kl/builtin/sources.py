"""The code that a part of the built-in world depends on, so that a part made by other code is not taken for it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
# Packages and modules that show, store and look things up; settings are in a part's key as values.
PASSED_OVER = ("run", "config", "cache", "components", "errors", "hub")


@cache  # once a process: the files may change while it runs
def code_of(module: str, package: Path = PACKAGE) -> str:
    """A digest of the code of a file and of all that it imports from the package, directly or not.

    module: a file of the package, as "commands/world.py". Comments and docstrings do not count.
    """
    digest = hashlib.sha256()
    for path in sorted(imported_sources(package / module, package)):
        digest.update(f"{path.relative_to(package).as_posix()}\0{code_text(path)}\0".encode())
    return digest.hexdigest()


def imported_sources(root: Path, package: Path = PACKAGE) -> set[Path]:
    """A file of the package and every file of it that it imports, directly or not, but for `PASSED_OVER`."""
    found: set[Path] = set()
    waiting = [root]
    while waiting:
        path = waiting.pop()
        if path not in found and path.relative_to(package).with_suffix("").parts[0] not in PASSED_OVER:
            found.add(path)
            waiting += _imports(path, package)
    return found


def code_text(path: Path) -> str:
    """The code of a file without comments, docstrings and layout."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(path: Path, package: Path) -> Iterator[Path]:
    """Files of the package that a file imports, also inside of functions; `from x import y` may name a module y."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            first, *rest = name.split(".")
            if first == "rlhf_kl":
                place = package.joinpath(*rest)
                yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
