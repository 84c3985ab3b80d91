"""Write what is made from the config's schema: the guide's page of every key, and JSON Schemas beside the configs."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import rlhf_kl
from rlhf_kl.config.resolve import json_schema
from rlhf_kl.config.schema import MODELS, Section, section_of
from rlhf_kl.config.variants import compare_schema

PACKAGE = Path(rlhf_kl.__file__).parent
WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false", type(None): "null"}
INTRODUCTION = """# Config reference

Every key, its values and its default, made from the schema (`python scripts/config_reference.py`).
`rlhf-kl config show FILE` prints the values of one config, `rlhf-kl config schema` the JSON Schema for editors.
"""


def config_reference() -> str:
    """The page, as Markdown."""
    parts = [INTRODUCTION]
    for kind in MODELS:
        parts.append(f"## rlhf-kl {kind}\n")
        for path, section in _sections(MODELS[kind], ""):
            rows = [_row(name, field) for name, field in section.model_fields.items() if not _inner(field)]
            if rows:
                parts.append(
                    f"### {path}\n\n| key | values | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
                )
    return "\n".join(parts)


def _sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """Dotted path and class of each section, in the order of the YAML."""
    for name, field in section.model_fields.items():
        inner = _inner(field)
        if inner is not None:
            path = f"{prefix}{name}"
            yield path, inner
            yield from _sections(inner, f"{path}.")


def _inner(field: FieldInfo) -> type[Section] | None:
    return section_of(field.annotation)


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split()).replace("|", "\\|")
    value = [] if field.default_factory is list else field.default
    default = "" if value is PydanticUndefined else f"`{_yaml(value)}`"
    return f"| `{name}` | {_values(field)} | {default} | {meaning} |"


def _yaml(value: Any) -> str:
    """A value in YAML syntax."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _values(field: FieldInfo) -> str:
    """What may be written, in words."""
    return ", ".join(dict.fromkeys(_kinds(field.annotation, _bounds(field.metadata))))


def _kinds(annotation: Any, bounds: str) -> Iterator[str]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(
            inner[0], bounds or _bounds([m for meta in inner[1:] for m in getattr(meta, "metadata", [meta])])
        )
    elif origin in (Union, types.UnionType):
        for option in inner:
            yield from _kinds(option, bounds)
    elif origin is Literal:
        yield from (f"`{value}`" for value in inner)
    elif origin is dict:
        yield "mapping"
    elif origin is list:
        yield f"list of {', '.join(_kinds(inner[0], ''))}"
    else:
        number = annotation in (int, float)
        yield WORDS.get(annotation, "mapping") + (bounds if number else "")


def _bounds(metadata: Any) -> str:
    """Such as " above 0"."""
    words = {"gt": "above", "ge": "from", "lt": "below", "le": "to"}
    found = [(words[name], getattr(item, name)) for item in metadata for name in words if hasattr(item, name)]
    return "".join(f" {word} {value:g}" for word, value in found if abs(value) < 1e9)


def documents() -> dict[Path, str]:
    """Path and content of every file."""
    schemas = {**{kind: json_schema(kind) for kind in MODELS}, "compare": compare_schema()}
    folder = PACKAGE.parent / "configs" / "schema"
    return {
        PACKAGE / "guide" / "config_reference.md": config_reference(),
        **{folder / f"{name}.json": json.dumps(schema, indent=1) + "\n" for name, schema in schemas.items()},
    }


if __name__ == "__main__":
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(PACKAGE.parent))
