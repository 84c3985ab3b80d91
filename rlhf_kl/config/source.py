"""Reads the definition of a class or function that a config names from its source. Imports and runs nothing."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_kl.components import reference_file, suggestion
from rlhf_kl.config.definitions import Definition
from rlhf_kl.errors import InputError

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BINDS_ANYTHING = {"globals", "locals", "vars", "exec", "eval", "setattr"}  # called in a module's body


def read_definition(ref: str, search: Sequence[Path]) -> Definition:
    """The definition of "module:name" or "file.py:name", from its source.

    search: folders in which a file is looked for. Errors: InputError if there is no such file, module or name.
    """
    module, _, name = ref.rpartition(":")
    path = _source_file(module, ref, search)
    if path is None:
        return Definition(name)
    tree = _parse(path)
    found = list(_bindings(tree, name))
    if not found and _is_closed(tree):
        public = {word for word in _bound_names(tree) if not word.startswith("_")}
        raise InputError(f"{module} has no {name!r}{suggestion(name, public)}")
    return _definition(found[0], tree) if len(found) == 1 else Definition(name)


def _source_file(module: str, ref: str, search: Sequence[Path]) -> Path | None:
    """The .py file of a module; None if it has none (a module written in C, for example)."""
    if module.endswith(".py"):
        path = reference_file(ref, search)
        if path is None:
            places = ", ".join(dict.fromkeys(str(folder) for folder in search))
            raise InputError(f"no such file: {module} (looked in {places})")
        return path
    spec = _find_spec(module)
    if spec is None:
        raise InputError(f"no module {module!r} in {Path.cwd()} or in this environment")
    origin = spec.origin if spec.has_location else None
    return Path(origin) if origin is not None and origin.endswith(".py") and os.path.isfile(origin) else None


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Like `importlib.util.find_spec`, but without importing the parent packages."""
    spec, places = None, None
    for number in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: number + 1])
        spec = _find_part(name, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def _find_part(name: str, places: list[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        on_path = places is None and finder is importlib.machinery.PathFinder
        try:
            # Modules in the working directory too, as for the import.
            spec = finder.find_spec(name, [os.getcwd(), *sys.path] if on_path else places)
        except (ImportError, ValueError, OSError):  # names that no module can have
            continue
        if spec is not None:
            return spec
    return None


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the user's strings
            return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno is not None else ""
        raise InputError(f"{path} is not Python: {error.msg}{place}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is not Python: {error}") from None


# ---- names ----


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run in the body of a module or class, without those inside its functions and classes."""
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _names_of(node: ast.AST) -> list[str]:
    """The names that a node binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [node.name] if isinstance(node, ast.ExceptHandler) and node.name else []


def _bindings(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    return (node for node in _own_nodes(tree) if name in _names_of(node))


def _bound_names(tree: ast.AST) -> set[str]:
    return {name for node in _own_nodes(tree) for name in _names_of(node)}


def _is_closed(tree: ast.Module) -> bool:
    """Whether all names of a module are explicit in its body."""
    nodes = list(_own_nodes(tree))
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    made = any(isinstance(node, ast.Global) for node in ast.walk(tree))
    return not (made or called & _BINDS_ANYTHING or _bound_names(tree) & {"*", "__getattr__"})


# ---- classes and functions ----


def _definition(node: ast.AST, tree: ast.Module) -> Definition:
    if isinstance(node, ast.ClassDef):
        family = _family(node, tree)
        return Definition(node.name, "class", _class_parameters(node, family), _members(family))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        # A decorator may return anything.
        plain = not node.decorator_list
        return Definition(node.name, "function" if plain else None, _parameters(node.args) if plain else None)
    name = _names_of(node)[0]
    return Definition(name)


def _family(node: ast.ClassDef, tree: ast.Module) -> list[ast.ClassDef] | None:
    """A class and all its base classes, nearest first; None if some are not in this file."""
    if node.keywords or any(_is_unknown_decorator(decorator) for decorator in node.decorator_list):
        return None
    family, waiting = [node], list(node.bases)
    while waiting:
        base = waiting.pop(0)
        if not isinstance(base, ast.Name):
            return None
        found = list(_bindings(tree, base.id))
        if not found and base.id == "object":
            continue
        if len(found) != 1 or not isinstance(found[0], ast.ClassDef) or found[0] in family:
            return None
        if found[0].keywords or found[0].decorator_list:
            return None
        family.append(found[0])
        waiting += found[0].bases
    return family


def _members(family: list[ast.ClassDef] | None) -> frozenset[str] | None:
    if family is None:
        return None
    words = set[str]()
    for cls in family:
        words |= _bound_names(cls)
        for node in ast.walk(cls):
            if isinstance(node, ast.Attribute):
                words.add(node.attr)
            elif isinstance(node, ast.Name):
                words.add(node.id)
    return frozenset(words)


def _class_parameters(node: ast.ClassDef, family: list[ast.ClassDef] | None) -> list[inspect.Parameter] | None:
    """Parameters of the class's `__init__`; None if this file has no `__init__` or does not define its parameters."""
    if any(list(_bindings(cls, "__new__")) for cls in family or [node]):
        return None
    if any(_is_unknown_decorator(decorator) for decorator in node.decorator_list):
        return None
    for cls in family or [node]:
        found = list(_bindings(cls, "__init__"))
        if found:
            init = found[0]
            known = len(found) == 1 and isinstance(init, ast.FunctionDef) and not init.decorator_list
            return _parameters(init.args)[1:] if known and isinstance(init, ast.FunctionDef) else None
        if cls.decorator_list:
            return _fields(cls) if family == [cls] else None
    return None if family is None else []


def _is_unknown_decorator(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
    plain = not (isinstance(decorator, ast.Call) and any(k.arg == "init" for k in decorator.keywords))
    return not (name == "dataclass" and plain)


def _fields(cls: ast.ClassDef) -> list[inspect.Parameter] | None:
    """Parameters of a dataclass without bases; None if a field is made by a call, which has options."""
    parameters = []
    for statement in cls.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        written = ast.dump(statement.annotation)
        if isinstance(statement.value, ast.Call) or "KW_ONLY" in written:
            return None
        if "ClassVar" not in written:
            parameters.append(_parameter(statement.target.id, statement.value, inspect.Parameter.KEYWORD_ONLY))
    return parameters


def _parameters(args: ast.arguments) -> list[inspect.Parameter]:
    kinds = inspect.Parameter
    by_place: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_ONLY) for arg in args.posonlyargs]
    by_place += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in args.args]
    required = [None] * (len(by_place) - len(args.defaults))
    found = [
        _parameter(arg.arg, default, kind)
        for (arg, kind), default in zip(by_place, [*required, *args.defaults], strict=True)
    ]
    found += [
        _parameter(arg.arg, default, kinds.KEYWORD_ONLY)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return found + ([kinds(args.kwarg.arg, kinds.VAR_KEYWORD)] if args.kwarg else [])


def _parameter(name: str, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else ...)
