"""YAML without the traps of YAML 1.1: `1e-5` is a number, `off` and `1:30` are text, a key is written once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlhf_kl.errors import InputError

# What a text without quotes is, as in YAML 1.2; anything else is text.
_PLAIN: list[tuple[str, Callable[[str], Any]]] = [
    (r"~|null|Null|NULL|", lambda _: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+", int),
    (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 -- every value without a tag of its own is a str, a seq or a map


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """A text, in quotes where it would be read as something else."""
    quoted = any(re.fullmatch(pattern, text) for pattern, _ in _PLAIN) or set(text) & set("\x85\u2028\u2029\ufeff")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)


def _value(node: yaml.Node) -> Any:
    def refuse(problem: str, node: yaml.Node) -> Any:
        raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)

    if node.tag not in [f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map")]:
        refuse(f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed", node)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _value(key_node)
            if not isinstance(key, str) or key in mapping:
                refuse(f"key {key!r} is written twice" if isinstance(key, str) else "a key must be text", key_node)
            mapping[key] = _value(value_node)
        return mapping
    if re.search("[\ud800-\udfff]", node.value):
        refuse("half of a surrogate pair is no text", node)
    if isinstance(node, yaml.ScalarNode) and node.style is not None:  # in quotes, or a block
        return node.value
    convert = next((read for pattern, read in _PLAIN if re.fullmatch(pattern, node.value)), str)
    return convert(node.value)


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
        raise InputError(f"{path}: {'empty: ' if value is None else ''}must be a mapping (key: value)")
    return value


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of a YAML text. Raises InputError, beginning with `where` and line:column."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _value(node)
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
