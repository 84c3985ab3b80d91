"""Strict YAML: the types of YAML 1.2 (`1e-5` is a number, `off` is a text), and one line per mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.errors import InputError

MAX_BYTES = 1_000_000
MAX_NODES = 50_000  # after aliases are expanded: a few lines of anchors can expand to billions
MAX_DEPTH = 50

_CORE = "tag:yaml.org,2002:"
# Type -> pattern of its texts, and their first characters. A text that fits two types gets the first.
_PATTERNS = {
    "null": (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    "int": (re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    "float": (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}
_CONVERT: dict[str, Callable[[str], Any]] = {
    "null": lambda _: None,
    "bool": lambda text: text.lower() == "true",
    "int": int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 -- none of YAML 1.1
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(problem="nested too deeply", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


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
        _class.add_implicit_resolver(_CORE + _name, _pattern, _first_characters)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a file. Raises InputError: unreadable, not YAML, not a mapping, too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES // 1_000_000} MB, not a config")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start})") from None
    value = parse_yaml(text, where=str(path))
    if value is None:
        raise InputError(f"{path}: empty")
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a mapping (key: value), not {_kind(value)}")
    return value


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text. Raises InputError, beginning with `where` and line:column."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{where}:{line}: character {error.character!r} is not allowed") from None
    except yaml.MarkedYAMLError as error:
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{where}{_place(error.problem_mark)}: not valid YAML: {reason}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: {error}") from None
    if node is None:
        return None
    builder = _Builder(where)
    value = builder.build(node, depth=0)
    if builder.problems:
        raise InputError(*builder.problems)
    return value


def dump_yaml(value: Any) -> str:
    """YAML text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Builder:
    """Nodes to values; collects the problems that do not stop the reading."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.nodes = 0
        self.problems: list[str] = []

    def build(self, node: yaml.Node, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise InputError(f"{self.where}: too many values (aliases multiply them)")
        if depth > MAX_DEPTH:
            raise InputError(f"{self.where}{_place(node.start_mark)}: nested too deeply")
        if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
            return [self.build(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._problem(node, f"tag {_tag(node)} is not allowed")
        return None

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.build(key_node, depth + 1)
            value = self.build(value_node, depth + 1)
            if not isinstance(key, str):
                self._problem(key_node, f"a key must be text, not {_kind(key)}")
            elif key in result:
                self._problem(key_node, f"key {key!r} is written twice")
            else:
                result[key] = value
        return result

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text, kind = node.value, node.tag.removeprefix(_CORE)
        if kind == "str":
            return text
        if kind not in _PATTERNS:
            self._problem(node, f"tag {_tag(node)} is not allowed")
        elif not _PATTERNS[kind][0].match(text):
            self._problem(node, f"{text[:40]!r} does not fit its tag {_tag(node)}")
        elif kind == "int" and len(text) > 100:  # int() rejects very long numbers with its own error
            self._problem(node, f"a whole number of {len(text)} digits is too long")
        else:
            return _CONVERT[kind](text)
        return None

    def _problem(self, node: yaml.Node, reason: str) -> None:
        self.problems.append(f"{self.where}{_place(node.start_mark)}: {reason}")


def _place(mark: Any) -> str:
    return "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"


def _tag(node: yaml.Node) -> str:
    return str(node.tag).replace(_CORE, "!!")


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping"}
    return names.get(type(value), "null")
