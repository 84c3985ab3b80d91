"""All problems of a merged mapping at once, a line each that names the key: "ppo.gamma must be ...: 1.5"."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from rlhf_kl.config.schema import Section, section_of
from rlhf_kl.config.schema.sections import inner
from rlhf_kl.errors import FAMILIAR, InputError, nearest

AnySection = TypeVar("AnySection", bound=Section)
# What pydantic calls in other words than a YAML file does.
EXPECTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "string_type": "text",
    "string_too_short": "not empty",
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "model_attributes_type": "a mapping",
}
# The key of a section that is meant where the section itself has a value.
MEANT = {"policy": "model", "reference": "model", "reward": "model", "data": "prompts", "eval": "texts"}
MEANT |= {"kl": "target", "kl.controller": "kind", "kl.ceiling": "value", "policy.lora": "r"}


def checked(model: type[AnySection], raw: dict[str, Any]) -> AnySection:
    """The config that a mapping is. Errors: InputError with every problem."""
    config, found = _validate(model, raw)
    if config is not None:
        return config
    # pydantic compares the keys of a section only where each is right by itself: once more without the wrong ones.
    wrong = {key.removesuffix(".kind") for key in found if key}  # the options beside a kind depend on it
    rest = copy.deepcopy(raw)
    for key in wrong:
        *parents, name = key.split(".")
        inner(rest, *parents).pop(name, None)
    problems = [line for lines in found.values() for line in lines]
    for lines in _validate(model, rest)[1].values():
        problems += [line for line in lines if not any(_names(line, key) for key in wrong)]
    raise InputError(*dict.fromkeys(problems))


def _names(line: str, key: str) -> bool:
    """Whether a problem is about `key`, a key below it, or the mapping that it stands in."""
    words = [f"{word}." for word in re.findall(r"\w+(?:\.\w+)+", line)]
    return any(word.startswith(f"{key}.") or f"{key}.".startswith(word) for word in words)


def all_keys(model: type[Section], prefix: str = "") -> list[str]:
    """Every dotted key of a config."""
    keys = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        keys += [prefix + name, *(all_keys(section, f"{prefix}{name}.") if section else [])]
    return keys


def nearest_keys(key: str, known: Sequence[str], beside: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Up to three of the keys `known`: `key`'s name here, those that end in it, the nearest `beside` it or anywhere."""
    if FAMILIAR.get(key) in known:
        return [FAMILIAR[key]]
    leaves = [dotted.rpartition(".")[2] for dotted in known]
    if key not in leaves and (close := nearest(key, beside)):
        return [beside[close]]
    leaf = key if key in leaves else nearest(key, leaves)
    return [dotted for dotted, last in zip(known, leaves, strict=True) if last == leaf][:3]


def _validate(model: type[AnySection], raw: dict[str, Any]) -> tuple[AnySection | None, dict[str, list[str]]]:
    """The config, or its problems by dotted key; by "" where the keys of a section do not agree."""
    try:
        return model.model_validate(raw), {}
    except ValidationError as error:
        return None, _describe(error, model, raw)


def _describe(error: ValidationError, model: type[Section], raw: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    expected: dict[str, list[str]] = {}  # several where the type is a union
    for problem in error.errors(include_url=False):
        kind, value, cause = problem["type"], problem["input"], problem.get("ctx", {}).get("error")
        parents, key = _place(problem["loc"], raw)
        path = ".".join([*parents, key])
        if kind == "extra_forbidden":
            found[path] = [f"{path}: unknown key; {_hint(key, parents, model)}"]
        elif kind == "missing":
            about = (_section(model, parents).model_fields[key].description or "").partition("\n")[0].rstrip(".")
            found[path] = [f"{path} is missing: {about[:1].lower()}{about[1:]}"]
        elif isinstance(cause, InputError) and isinstance(value, str):
            found[path] = [f"{path}: {line}" for line in cause.problems]
        elif isinstance(cause, InputError):  # of keys that do not agree: it names them
            found.setdefault("", []).extend(cause.problems)
        elif cause is not None:
            found[path] = [f"{path} {cause}"]
        elif kind != "default_factory_not_called":  # which follows from another problem
            phrases = expected.setdefault(path, [])
            phrases.append(EXPECTED.get(kind) or problem["msg"].removeprefix("Input should be "))
            if path in MEANT and type(value) in (str, int, float):
                phrases[-1] += f" like {{{MEANT[path]}: {value}}}"
            null = ["null"] if _may_be_null(_section(model, parents), key) else []
            found[path] = [f"{path} must be {' or '.join([*phrases, *null])}: {_shown(value)}"]
    return found


def _place(loc: tuple[int | str, ...], raw: Any) -> tuple[list[str], str]:
    """Sections and key of an error; behind the key pydantic names the branches of a union."""
    parts = list[str]()
    for item in loc:
        if not isinstance(raw, dict):
            break
        parts.append(str(item))
        raw = raw.get(item, {})
    return parts[:-1], "".join(parts[-1:])


def _section(model: type[Section], names: Sequence[str]) -> type[Section]:
    """The section below these keys."""
    for name in names:
        field = model.model_fields.get(name)  # None: a name of the user's, as in reward.terms.NAME
        if field is not None:
            options = (field.annotation, *get_args(field.annotation))
            model = next(filter(None, map(section_of, options)), model)
    return model


def _may_be_null(section: type[Section], key: str) -> bool:
    """Whether null is a value of this key; pydantic does not say so."""
    field = section.model_fields.get(key)
    return field is not None and type(None) in get_args(field.annotation)


def _hint(key: str, parents: Sequence[str], model: type[Section]) -> str:
    """What an unknown key may be meant for; of a dotted one that is right, how a file writes it."""
    if key in all_keys(model) and not parents:
        *sections, last = key.split(".")
        return f"in a file it is `{': {'.join([*sections, last])}: ...{'}' * len(sections)}`"
    beside = {name: ".".join([*parents, name]) for name in _section(model, parents).model_fields}
    close = nearest_keys(key, all_keys(model), beside)
    return f"did you mean {' or '.join(close)}?" if close else f"valid: {', '.join(beside)}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
