"""Classes and functions of the user's that a config names as "module:name" or "file.py:name".

Reading a config looks for the name in the source and runs nothing (`look_up`). The commands that use a plugin import
it (`load_attribute`) and check its options against its signature (`checked_options`) before anything slow begins.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, create_model

from rlhf_kl.errors import FAMILIAR, InputError, suggestion
from rlhf_kl.memory import memory_is_full
from rlhf_kl.variables import filled, hidden, missing_variables, secrets_of

# Files whose lines are not the user's.
_LIBRARIES = (str(Path(__file__).parent), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<")
_BINDS_ANYTHING = {"*", "__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


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


# ---- in the source ----


def look_up(ref: str) -> Literal["class", "function"] | None:
    """What `ref` names, by the source of its module; None where this does not tell. Runs nothing.

    Errors: InputError if there is no such file, module or name.
    """
    module, _, name = ref.rpartition(":")
    path = _existing_file(ref) if module.endswith(".py") else _module_file(module)
    if path is None:
        return None
    tree = _parsed(path)
    nodes = list(_module_nodes(tree))
    words = {w for n in nodes for key in ("name", "asname", "id") if isinstance(w := getattr(n, key, None), str)}
    if name not in words and not words & _BINDS_ANYTHING and not any(isinstance(n, ast.Global) for n in ast.walk(tree)):
        public = {n.name for n in nodes if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name[0] != "_"}
        raise InputError(f"{module} has no {name!r}{suggestion(name, public)}")
    match [node for node in nodes if isinstance(node, _SCOPES) and getattr(node, "name", None) == name]:
        case [ast.ClassDef()]:
            return "class"
        case [ast.FunctionDef(decorator_list=[])]:  # a decorator may return anything
            return "function"
    return None


def _existing_file(ref: str) -> Path:
    path = reference_file(ref, [Path.cwd()])
    if path is None:
        raise InputError(f"no such file: {ref.rpartition(':')[0]} (looked in {Path.cwd()})")
    return path


def _module_file(module: str) -> Path | None:
    """The .py file of a module, without an import of its parents; None if it has none (one written in C, say)."""
    spec, places = None, None
    parts = module.split(".")
    for number in range(len(parts)):
        spec = _spec(".".join(parts[: number + 1]), places)
        if spec is None:
            raise InputError(f"no module {module!r} in {Path.cwd()} or in this environment")
        places = list(spec.submodule_search_locations or ())
    origin = spec.origin if spec is not None and spec.has_location else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _spec(name: str, places: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        on_path = places is None and finder is PathFinder
        try:
            # Modules in the working directory too, as for the import.
            spec = finder.find_spec(name, [os.getcwd(), *sys.path] if on_path else places)
        except (ImportError, ValueError, OSError):  # names that no module can have
            continue
        if spec is not None:
            return spec
    return None


def _parsed(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in the user's strings
            return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno is not None else ""
        raise InputError(f"{path} is not Python: {error.msg}{place}") from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _module_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not those inside its functions and classes."""
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            yield node
            if not isinstance(node, _SCOPES):
                waiting.append(node)


# ---- imported ----


def load_attribute(ref: str) -> Any:
    """The object that `ref` names. Runs the code of its module.

    ref: "module:attribute" (modules in the working directory too) or "file.py:attribute".
    Raises InputError: no such file, module or attribute, or an error in the imported code.
    """
    source, _, attribute = ref.rpartition(":")
    if source.endswith(".py"):
        module = _import_file(_existing_file(ref))
    else:
        _module_file(source)
        with users_code(f"{source} cannot be imported:"), _on_path(Path.cwd()):
            importlib.invalidate_caches()
            module = importlib.import_module(source)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"{source} has no {attribute!r}{suggestion(attribute, public)}") from None


def _import_file(path: Path) -> ModuleType:
    """Run the file as a separate module, once per content."""
    with users_code(f"{path} cannot be imported:"):
        source = path.read_bytes()
        name = f"_rlhf_kl_file_{path.stem}_{sha256(bytes(path) + b':' + source).hexdigest()[:16]}"
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module  # dataclasses and get_type_hints look the module up by name
        try:
            with _on_path(path.parent, Path.cwd()):
                exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _on_path(*folders: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path[:0] = [str(folder) for folder in folders]
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def users_code(what: str, secrets: Mapping[str, str] | None = None) -> Iterator[None]:
    """Errors: InputError, `what` and "ValueError: no route (mine.py:12)", without the values of secrets.

    Full memory is no fault of the user's code. An exit code of its own must not become the program's.
    """
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if memory_is_full(error):
            raise
        raise InputError(f"{what} {explain(error, secrets)}") from error


def explain(error: BaseException, secrets: Mapping[str, str] | None = None) -> str:
    """ "ValueError: no route (mine.py:12)": an exception, and the last line of the user's that it passed."""
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    line = users_line(error)
    return hidden(f"{text} ({line})" if line else text, secrets or {})


def users_line(error: BaseException) -> str | None:
    """ "mine.py:12": where an exception last passed through a file of the user's, if it did."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else None


# ---- options ----


def parameters_of(target: Any) -> list[inspect.Parameter] | None:
    """Parameters with their annotations as types, or as texts if they cannot be resolved; None for some C code."""
    for evaluate in (True, False):
        try:
            return list(inspect.signature(target, eval_str=evaluate).parameters.values())
        except Exception:  # an annotation is the user's code
            continue
    return None


def takes(target: Any, name: str) -> bool:
    """Whether a call of it may have an argument of that name."""
    parameters = parameters_of(target)
    return parameters is None or any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def checked_options(
    target: Any, written: Mapping[str, Any], where: str, *, provided: Collection[str] = (), complete: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The arguments that these options are for a class or function, and the problems of them. Does not call it.

    Variables are filled in, and a value has the type of its annotation: a list may become a tuple, a text a path.
    where: dotted path of the options. provided: parameters that the program sets if the options do not.
    complete: whether parameters without a default get their values from the options only.
    """
    values, parameters, name = filled(dict(written)), parameters_of(target), getattr(target, "__name__", repr(target))
    problems = missing_variables(written, where)
    if parameters is None:
        return values, problems
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in named.values() if complete and p.default is p.empty and p.name not in provided}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    fields: dict[str, Any] = {
        f"option_{i}": (_checkable(p.annotation), Field(... if p.name in needed else None, alias=p.name))
        for i, p in enumerate(named.values())
    }
    config = ConfigDict(extra="allow" if any_name else "forbid", allow_inf_nan=False)
    model: Any = create_model("Options", __config__=config, **fields)
    try:
        # The types of JSON are those of YAML: a list may be a tuple, a text may be a path, but "1" is no number.
        checked = model.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        reasons: dict[str, str] = {}
        for kind, loc, reason in ((e["type"], e["loc"], e["msg"]) for e in error.errors(include_url=False)):
            key = str(loc[0]) if loc else ""
            if len(loc) == 1 and kind == "missing":
                reasons[key] = f"missing, {name} needs it"
            elif len(loc) == 1 and kind == "extra_forbidden":
                hint = suggestion(key, set(named) - (set(provided) - set(written)), prefix=f"{where}.")
                familiar = FAMILIAR.get(key, "")
                hint = f"; did you mean {familiar}?" if familiar.startswith(f"{where}.") else hint
                reasons[key] = f"unknown option of {name}{hint}"
            else:  # several where the annotation is a union
                shown = written.get(key, written)
                reasons[key] = f"{reasons[key]} / {reason}" if key in reasons else f"{shown!r} does not fit: {reason}"
        problems += [f"{where}.{key}: {reason}" for key, reason in reasons.items()]
        return {}, [hidden(problem, secrets_of(written)) for problem in problems]
    typed = {p.name: getattr(checked, f"option_{i}") for i, p in enumerate(named.values()) if p.name in values}
    # An iterator would be empty after its first use.
    return values | {key: value for key, value in typed.items() if not hasattr(value, "__next__")}, problems


def _checkable(annotation: Any) -> Any:
    """A type that values can be checked against; Any for one that pydantic does not know, or cannot resolve."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return Any
    try:
        TypeAdapter(annotation)
    except Exception:  # other people's schemas may raise anything
        return Any
    return annotation
