"""pydantic's errors as lines that name the key: "ppo.gamma must be at most 1: 1.5"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_kl.config.schema import Section, section_of
from rlhf_kl.errors import InputError

TYPES = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "a boolean (write true or false)",
    "string_type": "text",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "model_attributes_type": "a mapping",
}
BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def describe_errors(error: ValidationError, model: type[Section]) -> list[str]:
    """One line per key, with the expected and the given value."""
    lines: list[str] = []
    expected: dict[str, tuple[FieldInfo | None, Any, list[tuple[bool, str]]]] = {}
    for problem in error.errors(include_url=False):
        kind, context = problem["type"], problem.get("ctx", {})
        if kind == "default_factory_not_called":  # follows from another problem
            continue
        path, field = _field(problem["loc"], model)
        cause = context.get("error")
        if kind == "missing":
            lines.append(f"{path} is missing{_meaning(field)}")
        elif isinstance(cause, InputError):
            lines += cause.problems
        elif cause is not None:
            lines.append(f"{path} {cause}")
        else:
            _, _, phrases = expected.setdefault(path, (field, problem["input"], []))
            phrases.append(_phrase(kind, context, problem["msg"]))
    for path, (field, value, phrases) in expected.items():
        lines.append(f"{path} must be {_joined(field, phrases)}: {_shown(value)}")
    return lines


def _meaning(field: FieldInfo | None) -> str:
    """The first sentence of a key's description."""
    words = ((field and field.description) or "").partition("\n")[0].rstrip(".")
    return f": {words[:1].lower()}{words[1:]}" if words else ""


def wrong_keys(error: ValidationError, model: type[Section]) -> set[str]:
    """Dotted keys whose own values are wrong, without the sections whose keys do not agree."""
    return {
        _field(problem["loc"], model)[0]
        for problem in error.errors(include_url=False)
        if not isinstance(problem.get("ctx", {}).get("error"), InputError)
    }


def _field(loc: tuple[int | str, ...], model: type[Section]) -> tuple[str, FieldInfo | None]:
    """Dotted key and field of an error; behind the key pydantic names the branches of a union."""
    parts: list[str] = []
    field: FieldInfo | None = None
    current: type[Section] | None = model
    for item in loc:
        if current is None or item not in current.model_fields:
            break
        field = current.model_fields[str(item)]
        parts.append(str(item))
        current = section_of(field.annotation)
    return ".".join(parts), field


def _phrase(kind: str, context: Mapping[str, Any], message: str) -> tuple[bool, str]:
    """Whether only the value is wrong (and not its type), and the expected one in words."""
    if kind in TYPES:
        return False, TYPES[kind]
    if kind == "literal_error":
        return False, str(context["expected"])
    if kind == "finite_number":
        return True, "a finite number"
    if kind == "string_too_short":
        return True, "not empty"
    if kind == "greater_than":
        return True, "positive" if context["gt"] == 0 else f"above {_bound(context['gt'])}"
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        return True, f"{words} {_bound(context[name])}"
    return False, message


def _bound(value: float) -> str:
    """A bound in words, with every digit of a whole number."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _joined(field: FieldInfo | None, phrases: list[tuple[bool, str]]) -> str:
    values = [text for is_value, text in phrases if is_value]
    texts = list(dict.fromkeys(values or [text for _, text in phrases]))
    if not values and field is not None and type(None) in get_args(field.annotation):
        texts.append("null")
    return " or ".join(texts)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
