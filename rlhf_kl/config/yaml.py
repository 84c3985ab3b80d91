"""PyYAML without the traps of YAML 1.1: `1e-5` is a number, `off` and `010` are what they look like; keys once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.errors import InputError

MAX_VALUES = 50_000  # a few lines of aliases can multiply to billions
_CORE = "tag:yaml.org,2002:"
# Type -> pattern of its texts, and their first characters. A text that fits two types gets the first.
_PATTERNS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 -- none of YAML 1.1
    yaml_constructors = {}  # noqa: RUF012
    values = 0

    def construct_map(self, node: yaml.MappingNode) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            _refuse_tag(self, node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in result:
                problem = f"key {key!r} is written twice" if isinstance(key, str) else "a key must be text"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            result[key] = self.construct_object(value_node, deep=True)
        return result

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        self.values += 1
        if self.values > MAX_VALUES:
            raise yaml.constructor.ConstructorError(problem="too many values", problem_mark=node.start_mark)
        value = super().construct_object(node, deep)
        self.constructed_objects.pop(node, None)  # an alias is a value of its own
        return value


def _refuse_tag(_: Any, node: yaml.Node) -> None:
    problem = f"tag {node.tag} is not allowed, or does not fit its value"
    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def _add_scalar(name: str, convert: Callable[[str], Any]) -> None:
    def construct(loader: Any, node: yaml.Node) -> Any:
        fits = isinstance(node, yaml.ScalarNode) and (name == "str" or re.fullmatch(_PATTERNS[name][0], node.value))
        return convert(node.value) if fits else _refuse_tag(loader, node)

    _Loader.add_constructor(_CORE + name, construct)


_add_scalar("null", lambda _: None)
_add_scalar("bool", lambda text: text.lower() == "true")
_add_scalar("int", int)
_add_scalar("float", lambda text: float(re.sub(r"\.(?=[in])", "", text.lower())))
_add_scalar("str", str)
_Loader.add_constructor(_CORE + "seq", partial(_Loader.construct_sequence, deep=True))
_Loader.add_constructor(_CORE + "map", _Loader.construct_map)
_Loader.add_constructor(None, _refuse_tag)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around exactly the texts that `_Loader` would read as another type."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 -- none of YAML 1.1

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Only double quotes preserve the line breaks of Unicode.
        style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar(_CORE + "str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
for _name, (_pattern, _first_characters) in _PATTERNS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_CORE + _name, re.compile(f"^(?:{_pattern})$"), _first_characters)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file. Raises InputError: unreadable, not YAML, not a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    value = parse_yaml(text, where=str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: {'empty' if value is None else 'must be a mapping (key: value)'}")
    return value


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text. Raises InputError, beginning with `where` and line:column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{where}:{line}: character {error.character!r} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{where}{place}: {reason.replace(_CORE, '!!')}") from None
    except (yaml.YAMLError, ValueError) as error:  # a number of too many digits
        raise InputError(f"{where}: {error}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply") from None


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
