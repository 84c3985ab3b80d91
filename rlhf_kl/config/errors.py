"""All problems of a merged mapping at once, each a line that names the key: "ppo.gamma must be at most 1: 1.5"."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rlhf_kl.config.schema import Section, section_of, subsections
from rlhf_kl.errors import FAMILIAR, InputError, nearest

AnySection = TypeVar("AnySection", bound=Section)


def check_mapping(model: type[AnySection], raw: dict[str, Any]) -> tuple[dict[str, Any], AnySection | None, list[str]]:
    """`raw` without its unknown keys, the config if it is valid, and the problems. Reads nothing from disk."""
    known, problems = copy.deepcopy(raw), list[str]()
    _drop_unknown_keys(model, known, "", all_keys(model), problems)
    try:
        return known, model.model_validate(known), problems
    except ValidationError as error:
        return known, None, [*problems, *describe_errors(error, model), *_disagreements(model, known, error)]


def all_keys(model: type[Section], prefix: str = "") -> list[str]:
    """Every dotted key of a config."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        section = section_of(field.annotation)
        if section is not None:
            keys += all_keys(section, f"{prefix}{name}.")
    return keys


def _inner(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    """The mapping below these keys; empty if there is none."""
    for name in names:
        value = raw.get(name)
        raw = value if isinstance(value, dict) else {}
    return raw


def _disagreements(model: type[Section], known: dict[str, Any], error: ValidationError) -> list[str]:
    """Conflicts between valid keys: pydantic does not compare the keys of a section with a wrong value.

    So the wrong values are left out, and with them every problem about their defaults.
    """
    wrong = {key.removesuffix(".kind") for key in wrong_keys(error, model)}  # the options beside it depend on its kind
    rest = copy.deepcopy(known)
    for key in wrong:
        *parents, name = key.split(".")
        _inner(rest, *parents).pop(name, None)
    try:
        model.model_validate(rest)
    except ValidationError as again:
        return [line for line in describe_errors(again, model) if not any(_names(line, key) for key in wrong)]
    return []


def _names(line: str, key: str) -> bool:
    """Whether a problem is about `key` or a key below it."""
    return any(f"{word}.".startswith(f"{key}.") for word in re.findall(r"[\w.]+", line))


def _drop_unknown_keys(
    model: type[Section], raw: dict[str, Any], prefix: str, known: Sequence[str], problems: list[str]
) -> None:
    """Remove the keys that `model` does not have from `raw`, and add a problem for each and for non-finite options."""
    takes_options = model.takes_options(raw)
    for key in [key for key in raw if key not in model.model_fields]:
        if not takes_options:
            problems.append(f"{prefix}{key}: unknown key{_key_hint(key, prefix, list(model.model_fields), known)}")
        elif not _finite(raw[key]):
            problems.append(f"{prefix}{key} must be a finite number")
        else:
            continue
        del raw[key]
    for name, section, mapping in subsections(model, raw):
        _drop_unknown_keys(section, mapping, f"{prefix}{name}.", known, problems)


def _finite(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _key_hint(key: str, prefix: str, siblings: Sequence[str], known: Sequence[str]) -> str:
    """What it is called here, else the same key in another section, else the nearest here, else anywhere."""
    familiar = FAMILIAR.get(key)
    if familiar in known:
        counts = " (in responses: updates x rollout.batch_size)" if familiar == "ppo.total_episodes" else ""
        return f"; did you mean {familiar}{counts}?"
    close = nearest(key, siblings)
    if close is not None and not any(dotted.endswith(f".{key}") for dotted in known):
        return f"; did you mean {prefix}{close}?"
    anywhere = nearest_keys(key, known)
    return f"; did you mean {' or '.join(anywhere)}?" if anywhere else f"; valid: {', '.join(siblings)}"


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Up to three of the dotted keys: what `key` is called here, else those that end in it, else the nearest."""
    if FAMILIAR.get(key) in known:
        return [FAMILIAR[key]]
    leaves: dict[str, list[str]] = {}
    for dotted in known:
        leaves.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    leaf = key if key in leaves else nearest(key, leaves)
    return leaves[leaf][:3] if leaf is not None else []


# ---- pydantic's errors in words ----

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
