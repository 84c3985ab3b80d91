"""Texts from a row's columns: "TITLE: {title}\\nTL;DR:"."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from rlhf_kl.errors import InputError, nearest


def template_fields(template: str) -> list[str]:
    """Columns in a template such as "{title}: {post}".

    Errors: ValueError for a single brace, a template without columns, and braces with more than a name.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"is no template: {error} (write {{{{ and }}}} for braces)") from error
    fields = [name for _, name, _, _ in parts if name is not None]
    for _, name, form, conversion in parts:
        if name is not None and (not name or form or conversion or any(c in name for c in ".[]")):
            raise ValueError(f"is no template: braces may contain only a column's name: {name or '{}'}")
    if not fields:
        raise ValueError("names no column: write one in braces, such as {prompt}")
    return list(dict.fromkeys(fields))


def fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """The template with a row's columns. Errors: InputError for a missing column or one that is no text."""
    values = {}
    for name in template_fields(template):
        value = column(row, name, where)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            kind = "null" if value is None else type(value).__name__
            raise InputError(f"{where}: {name} is {kind}, not text")
        values[name] = value
    return template.format_map(values)


def column(row: Mapping[str, Any], name: str, where: str, key: str = "") -> Any:
    """A column of a row; `key`: what names it, as it is written in front of the name.

    Errors: InputError with the most similar column.
    """
    if name not in row:
        names = [str(key) for key in row]
        close = nearest(name, names)
        hint = f"; did you mean {close}?" if close else f" (it has {', '.join(names[:12]) or 'none'})"
        if key and names and not close:
            hint += f"; set {key} {names[0] if len(names) == 1 else 'one of them'}"
        raise InputError(f"{where} has no column {name!r}{hint}")
    return row[name]
