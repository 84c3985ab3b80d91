"""What is known about a class or function without a call, and which options fit it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from rlhf_kl.components import suggestion

_DYNAMIC = {"setattr", "vars", "__dict__", "__getattr__", "__setattr__"}  # code that gives attributes any name


@dataclass(frozen=True)
class Definition:
    """A name in the user's code, read from its source or from the imported object. None = not known."""

    name: str
    kind: Literal["class", "function", "value"] | None = None
    parameters: Sequence[inspect.Parameter] | None = None
    members: frozenset[str] | None = None  # of a class: the names that it defines and that its methods use

    def takes(self, name: str) -> bool | None:
        """Whether it has a parameter of that name, or takes any (**kwargs)."""
        if self.parameters is None:
            return None
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in self.parameters)

    def lacks(self, name: str) -> bool:
        """Whether its instances certainly have no such method or attribute."""
        return self.members is not None and not self.members & {name, *_DYNAMIC}


def definition_of(obj: Any) -> Definition:
    """The definition of an imported object."""
    name = str(getattr(obj, "__name__", repr(obj)))
    if inspect.isclass(obj):
        return Definition(name, "class", _parameters(obj), _members(obj))
    return Definition(name, "function", _parameters(obj)) if callable(obj) else Definition(name, "value")


def _members(cls: type) -> frozenset[str]:
    words = set[str]()
    for base in cls.__mro__[:-1]:  # but for `object`
        own = vars(base)
        words |= own.keys() - {"__dict__", "__weakref__"}
        for member in own.values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            words |= set(code.co_names) if inspect.iscode(code) else set()
    return frozenset(words)


def _parameters(obj: Any) -> list[inspect.Parameter] | None:
    """Parameters with their annotations as types, or as texts if they cannot be resolved."""
    for evaluate in (True, False):
        try:
            return list(inspect.signature(obj, eval_str=evaluate).parameters.values())
        except Exception:  # an annotation is the user's code; and some callables written in C have no signature
            continue
    return None


# ---- options ----


def option_problems(
    definition: Definition,
    options: Mapping[str, Any],
    *,
    provided: set[str],
    where: str,
    written: Mapping[str, Any] | None = None,
    complete: bool = True,
) -> list[str]:
    """Problems of a call with these options, from the signature alone.

    provided: parameters that the program sets if the options do not.
    where: dotted path of the options, the beginning of every problem.
    written: the options as messages show them, if they differ from those that are passed.
    complete: whether parameters without a default get their values from the options only.
    """
    if definition.parameters is None:
        return []
    name, written = definition.name, options if written is None else written
    kinds = inspect.Parameter
    named = {p.name: p for p in definition.parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
    problems = []
    for key, value in options.items():
        if key in named:
            problems += _type_problem(named[key], value, written[key], f"{where}.{key}")
        elif not definition.takes(key):
            hint = suggestion(key, set(named) - (provided - set(options)), prefix=f"{where}.")
            problems.append(f"{where}.{key}: unknown option of {name}{hint}")
    for p in named.values():
        if complete and p.default is p.empty and p.name not in options and p.name not in provided:
            problems.append(f"{where}.{p.name}: missing, {name} needs it")
    return problems


def _type_problem(parameter: inspect.Parameter, value: Any, written: Any, where: str) -> list[str]:
    adapter = _adapter(parameter.annotation)
    if adapter is None:
        return []
    try:
        # The types of JSON are those of YAML: a list may be a tuple, a text may be a path, but "1" is no number.
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reasons = dict.fromkeys(problem["msg"] for problem in error.errors(include_url=False))
        return [f"{where}: {written!r} does not fit: {' / '.join(reasons)}"]
    except ValueError:
        return [f"{where}: {written!r} cannot be used as a value"]
    return []


def _adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Validates values of a type; None for one that cannot be checked."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return None
    for config in (ConfigDict(allow_inf_nan=False), None):
        try:
            return TypeAdapter(annotation, config=config)
        except PydanticUserError:  # models bring their own config; arbitrary classes have no schema
            continue
        except Exception:
            return None
    return None
