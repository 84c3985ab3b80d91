"""Classes and functions of the user's that a config names as "module:name" or "file.py:name", and their options.

Reading a config only looks for the name in the source (`look_up`) and runs nothing. The commands that use a plugin
import it (`load_attribute`) and check its options against its signature (`checked_options`) before anything slow.
All of its code runs in `users_code`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rlhf_kl.apart import Home
from rlhf_kl.errors import InputError, RlhfKlError, nearest, no_such_file, suggestion
from rlhf_kl.memory import memory_is_full
from rlhf_kl.shell import LIBRARIES

# What the program gives a reward function by name: a plain one, and one that is written for TRL.
REWARD_PROVIDED = {"prompts", "responses"}
TRL_PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


GIVEN = "python:"  # before the name of what was given in Python, in place of a file or a hub id


def given_name(value: Any, otherwise: str) -> str:
    """How a config names what was given in Python: a function by its name."""
    name = getattr(value, "__name__", type(value).__name__ if callable(value) else otherwise)
    return GIVEN + (name if name.isidentifier() else otherwise)


def refuse_given(ref: str) -> None:
    """Errors: InputError for what was given in Python, which no file holds."""
    if ref.startswith(GIVEN):
        raise InputError(
            f"{ref.removeprefix(GIVEN)} was given in Python: name a file in its place, or go on there, with "
            "rlhf_kl.train(..., resume=True)"
        )


def is_reference(text: str) -> bool:
    """Whether `text` has the form "module:attribute" or "file.py:attribute" (not "builtin:NAME")."""
    module, _, attribute = text.rpartition(":")
    return bool(module) and attribute.isidentifier() and module != "builtin"


def reference_file(ref: str, search: Iterable[Path]) -> Path | None:
    """The existing file of a "file.py:attribute", looked for in each folder in `search`; else None."""
    name = ref.rpartition(":")[0]
    paths = (folder / Path(name).expanduser() for folder in search if name.endswith(".py"))
    return next((path.resolve() for path in paths if os.path.isfile(path)), None)


# ---- in the source ----


def look_up(ref: str) -> None:
    """Look whether the source of a module or file holds the name of `ref`; runs nothing.

    Errors: InputError if there is no such file, module or name.
    """
    module, _, name = ref.rpartition(":")
    path = _existing_file(ref) if module.endswith(".py") else _module_file(module)
    if path is None:
        return
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} is not Python: {error}") from None
    named = {getattr(node, key, None) for node in ast.walk(tree) for key in ("name", "asname", "id")}
    if not named & {name, "*", "__getattr__", "globals"}:  # which may make any name
        public = {n.name for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name[0] != "_"}
        raise InputError(f"{module} has no {name!r}{suggestion(name, public)}")


def _existing_file(ref: str) -> Path:
    path = reference_file(ref, [Path.cwd()])
    if path is None:
        raise no_such_file(ref.rpartition(":")[0])
    if _is_library(path):
        raise InputError(
            f"{path}: {path.stem} is the name of a library, which others import by it: give the file another name, "
            f"such as my_{path.name}"
        )
    return path


def _is_library(path: Path) -> bool:
    """Whether a module of Python or of an installed package has the name of this file, by which it is imported."""
    name = path.stem
    if name in sys.stdlib_module_names or name in ("__main__", "rlhf_kl"):
        return True
    installed = [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]
    spec = PathFinder.find_spec(name, installed) if name.isidentifier() else None
    return spec is not None and spec.origin is not None and not os.path.samefile(spec.origin, path)


def _module_file(module: str) -> Path | None:
    """The .py file of a module that is in no package; to find one that is would run the package.

    Errors: InputError if there is no such module or package.
    """
    top, *inside = module.split(".")
    with Home([str(Path.cwd())]).entered(), _files_hidden(top):
        spec = importlib.util.find_spec(top)
    if spec is None:
        raise InputError(f"no module {top!r} in {Path.cwd()} or in this environment")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") and not inside else None


# ---- imported ----


def load_attribute(ref: str) -> Any:
    """The object of a "module:attribute" (of the working directory too) or "file.py:attribute". Runs its module.

    Raises InputError: no such file, module or attribute, or an error in the imported code.
    """
    refuse_given(ref)
    source, _, name = ref.rpartition(":")
    if source.endswith(".py"):
        home = _home_of_file(_existing_file(ref))
    else:
        home = _HOMES.setdefault(f"{Path.cwd()}:{source}", Home([str(Path.cwd())]))
        with users_code(f"{source} cannot be imported:", home), _files_hidden(source.partition(".")[0]):
            importlib.import_module(source)
    module = home.module or sys.modules[source]
    with users_code(f"{source} cannot be imported:", home):
        attribute = getattr(module, name, _MISSING)
    if attribute is _MISSING:
        public = [name for name in vars(module) if not name.startswith("_")]
        raise InputError(f"{source} has no {name!r}{suggestion(name, public)}")
    _LOADED[id(attribute)] = attribute, home
    return attribute


_MISSING = object()
_HOMES: dict[str, Home] = {}  # by file and content, or by working directory and module
_LOADED: dict[int, tuple[Any, Home]] = {}  # by the id of an attribute, which is kept and so has it for itself


def home_of(attribute: Any) -> Home:
    """The home of what `load_attribute` gave, or of what came without a name in a config: one without folders."""
    return _LOADED.setdefault(id(attribute), (attribute, Home()))[1]


def _home_of_file(path: Path) -> Home:
    """The home of a file, run once per content as the module of its name."""
    with users_code(f"{path} cannot be imported:"):
        source = path.read_bytes()
    key = f"_rlhf_kl_file_{path.stem}_{sha256(bytes(path) + b':' + source).hexdigest()[:16]}"
    if key in _HOMES:
        return _HOMES[key]
    if hides := sorted(file.name for file in path.parent.glob("*.py") if _is_library(file)):
        logging.getLogger("rlhf_kl").warning(
            f"{path.parent}: {', '.join(hides[:3])}: has the name of a library, in whose place {path.name} and what it "
            "imports would get it: give it another name"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    folders = dict.fromkeys([str(path.parent), str(Path.cwd())])
    home, before = Home([*folders], module), sys.modules.get(path.stem)
    try:
        with users_code(f"{path} cannot be imported:", home):
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    if before is None or _is_file(before):
        sys.modules[path.stem] = module  # for code that looks a class's module up, and for threads of the user's
    _HOMES[key], sys.modules[key] = home, module  # there all that has run is found
    return home


def _is_file(module: ModuleType | None) -> bool:
    return any(home.module is module for home in _HOMES.values() if home.module)


@contextmanager
def _files_hidden(name: str) -> Iterator[None]:
    """A block that imports the module of this name, not a file that a config names and that has the same name."""
    if _is_file(hidden := sys.modules.get(name)):
        del sys.modules[name]
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules.setdefault(name, hidden)


@contextmanager
def users_code(what: str, home: Home | None = None) -> Iterator[None]:
    """A block that runs code of the user's, in its home (None: the program's own, or code of both).

    Errors: InputError, `what` and "ValueError: no route (mine.py:12)", the last line of a user's that it passed.
    Full memory is no fault of the user's code. An exit code of its own must not become the program's.
    """
    try:
        with home.entered() if home else nullcontext():
            yield
    except RlhfKlError:
        raise
    except (Exception, SystemExit) as error:
        if memory_is_full(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
        line = f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""
        message = f"{what} {type(error).__name__}: {error}{line}"
        raise InputError(home.hidden(message) if home else message) from error


# ---- variables: `${NAME}` in an option is read from the environment when it is used, and stored as it is written ----

_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # `$${` is a literal `${`
SHORT = 4  # characters: a shorter value is no secret, and would be found in every text


def filled(value: Any) -> Any:
    """A value with the variables in its texts filled in; one that is not set stays as written."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: "${" if found[1] is None else os.environ.get(found[1]) or found[0], value)
    if isinstance(value, dict):
        return {key: filled(item) for key, item in value.items()}
    return [filled(item) for item in value] if isinstance(value, list) else value


def variables_of(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """The variables in the texts of a value, each with its dotted path; `key` is that of the value."""
    if isinstance(value, str):
        yield from ((key, name) for name in _VARIABLE.findall(value) if name)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from variables_of(item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from variables_of(item, key)


def missing_variables(value: Any, key: str) -> list[str]:
    """Problems of variables that the environment lacks; `key` is the dotted path of the value."""
    missing = [(path, name) for path, name in variables_of(value, key) if not os.environ.get(name)]
    return [f"{path}: the environment variable {name} is not set" for path, name in missing]


def secrets_of(value: Any) -> dict[str, str]:
    """The values that `filled` puts into it -> how they are written; see `Home.hidden`."""
    values = {os.environ.get(name, "").strip(): f"${{{name}}}" for _, name in variables_of(value, "")}
    return {value: name for value, name in values.items() if len(value) >= SHORT}


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
    target: Any,
    written: Mapping[str, Any],
    where: str,
    *,
    provided: Collection[str] = (),
    complete: bool = True,
    beside: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The arguments that these options are for a class or function, and the problems of them. Does not call it.

    Variables are filled in, and a value has the type of its annotation: a list may become a tuple, a text a path. The
    home of `target` gets to know what it has to hide.
    where: dotted path of the options. provided: parameters that the program sets if the options do not.
    complete: whether parameters without a default get their values from the options only. beside: keys of the program
    that stand beside the options.
    """
    values, parameters, name = filled(dict(written)), parameters_of(target), getattr(target, "__name__", repr(target))
    if secrets := secrets_of(dict(written)):
        home_of(target).secrets.update(secrets)
    problems = missing_variables(dict(written), where)
    if parameters is None:
        return values, problems
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    needed = {p.name for p in named.values() if complete and p.default is p.empty and p.name not in provided}
    types: dict[str, Any] = {p.name: _checkable(p.annotation) for p in named.values()}
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    make: Any = TypedDict  # for a type checker its keys would have to be literals
    options = make("Options", {key: type_ if key in needed else NotRequired[type_] for key, type_ in types.items()})
    options.__pydantic_config__ = ConfigDict(extra="allow" if any_name else "forbid", allow_inf_nan=False)
    try:
        # The types of JSON are those of YAML: a list may be a tuple, a text may be a path, but "1" is no number.
        typed = TypeAdapter(options).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        reasons: dict[str, str] = {}  # one for each option, also where the annotation is a union
        for problem in error.errors(include_url=False):
            key, kind = str(problem["loc"][0]), problem["type"] if len(problem["loc"]) == 1 else ""
            if kind == "missing":
                reason = f"missing, {name} needs it"
            elif kind == "extra_forbidden":
                every = {*named, *beside}
                valid = every if nearest(key, every) else set(named) - set(provided)
                reason = f"unknown option of {name}{suggestion(key, valid, prefix=f'{where}.')}"
            else:
                reason = f"{written[key]!r} does not fit: {problem['msg']}"
            reasons.setdefault(key, reason)
        return {}, [*problems, *(f"{where}.{key}: {text}" for key, text in reasons.items())]
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
