"""YAML without the traps of YAML 1.1: `1e-5` is a number, `off` and `1:30` are text, a key is written once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.errors import InputError
from rlhf_kl.text import utf8, whole

DEEPEST = 50  # levels of a mapping or list
TAG = "tag:yaml.org,2002:"
# What a text without quotes is, as in YAML 1.2; anything else is text.
_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class Text(str):
    """A text that knows the folders in which a relative path is looked for: that of its file, the working directory."""

    folders: tuple[Path, ...] = ()


def located(value: Any, *folders: Path) -> Any:
    """A copy of a value of a YAML whose texts know their folders; those that know them already keep them."""
    if isinstance(value, dict):
        return {key: located(item, *folders) for key, item in value.items()}
    if isinstance(value, list):
        return [located(item, *folders) for item in value]
    if not isinstance(value, str) or isinstance(value, Text):
        return value
    text = Text(value)
    text.folders = folders
    return text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 -- without those of YAML 1.1
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        if self.depth > DEEPEST:
            problem = f"nested more than {DEEPEST} levels deep"
            raise yaml.composer.ComposerError(problem=problem, problem_mark=self.peek_event().start_mark)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ARG002
        if node in self.recursive_objects:
            raise yaml.constructor.ConstructorError(
                problem="holds itself, through an alias (*)", problem_mark=node.start_mark
            )
        return super().construct_object(node, deep=True)  # at once: so what holds itself is found

    def construct_scalar(self, node: Any) -> Any:
        try:
            return whole(super().construct_scalar(node))
        except ValueError as error:
            raise yaml.constructor.ConstructorError(problem=str(error), problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in keys:
                problem = f"key {key!r} is written twice" if isinstance(key, str) else "a key must be text"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """A text; with a line break of Unicode it needs double quotes."""
    style = '"' if set(text) & set("\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar(f"{TAG}str", text, style=style)


for _kind, _pattern in _PLAIN.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), None)
_Loader.add_constructor(f"{TAG}int", lambda _, node: int(node.value))  # 010 is ten
_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(Text, _represent_text)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file. Raises InputError: unreadable, not YAML, not a mapping."""
    try:
        text = utf8(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    value = parse_yaml(text, where=str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: {'empty: ' if value is None else ''}must be a mapping (key: value)")
    return value


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text. Raises InputError, beginning with `where` and line:column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        message = ", ".join(part for part in (error.context, error.problem) if part)
        hint = "; indent with spaces" if r"'\t'" in message else "; is it YAML?" * ("<document start>" in message)
        raise InputError(f"{where}{place}: {message}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character that is not allowed, a number of too many digits
        raise InputError(f"{where}: {error}") from None


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
