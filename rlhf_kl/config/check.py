"""All problems of a merged mapping at once: unknown keys, wrong values, conflicting keys, options of plugins."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from rlhf_kl.components import nearest
from rlhf_kl.config.describe import describe_errors, wrong_keys
from rlhf_kl.config.plugins import construction_problems, controller_problems, reward_problems
from rlhf_kl.config.schema import KLSection, PPOSection, RolloutSection, Section, section_of, subsections

AnySection = TypeVar("AnySection", bound=Section)


def check_mapping(model: type[AnySection], raw: dict[str, Any]) -> tuple[dict[str, Any], AnySection | None, list[str]]:
    """`raw` without its unknown keys, the config if it is valid, and the problems. Reads nothing from disk."""
    known, problems = copy.deepcopy(raw), list[str]()
    _drop_unknown_keys(model, known, "", all_keys(model), problems)
    try:
        return known, model.model_validate(known), problems
    except ValidationError as error:
        return known, None, [*problems, *describe_errors(error, model), *_disagreements(model, known, error)]


def plugin_problems(raw: dict[str, Any]) -> list[str]:
    """Problems of the controller and the reward functions that a mapping of `train` names."""
    problems = controller_problems(_inner(raw, "kl", "controller")) + reward_problems(_inner(raw, "reward"))
    if problems:
        return problems
    try:
        kl = KLSection.model_validate(raw.get("kl", {}))
        ppo = PPOSection.model_validate(raw.get("ppo", {}))
        rollout = RolloutSection.model_validate(raw.get("rollout", {}))
    except ValidationError:  # these problems are reported already
        return []
    return construction_problems(kl, ppo, rollout)


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
    """The same key in another section, else the nearest here, else the nearest anywhere."""
    close = nearest(key, siblings)
    if close is not None and not any(dotted.endswith(f".{key}") for dotted in known):
        return f"; did you mean {prefix}{close}?"
    anywhere = nearest_keys(key, known)
    return f"; did you mean {' or '.join(anywhere)}?" if anywhere else f"; valid: {', '.join(siblings)}"


def nearest_keys(key: str, known: Sequence[str]) -> list[str]:
    """Up to three of the dotted keys: those whose last part is `key`, else those nearest to it."""
    leaves: dict[str, list[str]] = {}
    for dotted in known:
        leaves.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    leaf = key if key in leaves else nearest(key, leaves)
    return leaves[leaf][:3] if leaf is not None else []
