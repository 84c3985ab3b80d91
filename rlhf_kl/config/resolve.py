"""Reads a YAML file and `--set` into a checked config, or reports all problems at once; notes on doubtful choices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_kl.config.paths import find_config
from rlhf_kl.config.problems import checked
from rlhf_kl.config.schema import MODELS, AnyConfig, Kind, TrainConfig
from rlhf_kl.config.schema.control import ControllerSection
from rlhf_kl.config.schema.reward import RewardSection, ScorerSection, TermSection
from rlhf_kl.config.schema.training import PPOSection
from rlhf_kl.config.yaml import DEEPEST, dump_yaml, located, parse_yaml, read_yaml
from rlhf_kl.control import stored_name
from rlhf_kl.errors import InputError, blame, collected

# The sections that only one command's config has.
OWN_SECTIONS: dict[str, set[str]] = {
    "sft": {"sft"},
    "reward-model": {"reward_model"},
    "compare": {"variants"},
    "train": {"reference", "reward", "rollout", "ppo", "kl"},
}
NAMED_LATER = {"model", "prompts", "texts"}  # null in a base config: to be named in the one that extends it
# Mappings whose keys depend on their `kind`, and the keys that a new kind drops.
BY_KIND: dict[str, type[ScorerSection] | type[ControllerSection]] = {
    "reward": RewardSection,
    "reward.terms.*": TermSection,
    "eval.scorers.*": ScorerSection,
    "kl.controller": ControllerSection,
}
OF_KIND = {*ScorerSection.model_fields, *ControllerSection.model_fields, "terms"}


def load_config(
    kind: Kind | None, file: str | Path, overrides: Sequence[str] = (), fragment: Mapping[str, Any] | None = None
) -> Any:
    """Read, merge and check a config. Raises InputError with every problem.

    kind: its command; None = the one that its sections belong to. file: see `find_config`.
    fragment: keys on top of the file (`located`). overrides: "a.b=value" each, the value in YAML; together one mapping
    on top of that.
    """
    path = find_config(file)
    changes, problems = parse_overrides(overrides)
    raw = merged(merged(read_merged(path), fragment or {}), changes)
    return complete_config(kind, raw, path, problems)


def complete_config(kind: Kind | None, raw: dict[str, Any], path: Path, problems: list[str]) -> Any:
    """The config that a merged mapping is; `path`: of its file, whose name is that of the run by default.

    `problems`: found before. Errors: InputError with every problem.
    """
    own = detect_kind(raw)
    kind = kind or (own if own in MODELS else "train")
    if own not in (None, kind):
        raise InputError(f"{path} is a config for `rlhf-kl {own}`, not for `rlhf-kl {kind}`")
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    with collected(problems):
        config = checked(MODELS[kind], raw)
    if problems:
        raise InputError(*dict.fromkeys(problems))
    output_dir = os.path.abspath(os.path.expanduser(config.run.output_dir))
    return config.model_copy(update={"run": config.run.model_copy(update={"output_dir": output_dir})})


def detect_kind(raw: Mapping[str, Any]) -> str | None:
    """The command whose own sections a merged mapping holds; None if it has only those that all share."""
    return next((command for command, sections in OWN_SECTIONS.items() if sections & raw.keys()), None)


# ---- writing and comparing ----


def dump_config(config: AnyConfig) -> str:
    """YAML with every key written, that loads back to an equal config."""
    return dump_yaml(config.model_dump())


def json_schema(kind: Kind) -> dict[str, Any]:
    """JSON Schema of a config file, for editors; no key is required, since the parent file may set it."""
    schema = MODELS[kind].model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("required", None)
        for name in NAMED_LATER & part.get("properties", {}).keys():
            part["properties"][name] = {"anyOf": [part["properties"][name], {"type": "null"}]}
    extends = {"type": "string", "description": "Parent config; the keys of this file override it."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def config_diff(a: AnyConfig, b: AnyConfig) -> list[str]:
    """ "key: old -> new" for every dotted key whose value differs.

    `data.chat_template: auto` in the new one is no change: a run stores what it stands for.
    """
    old, new = (flat(config.model_dump()) for config in (a, b))
    changed = [key for key in {**old, **new} if repr(old.get(key, ABSENT)) != repr(new.get(key, ABSENT))]
    pairs = {key: [_as_written(values.get(key, ABSENT)) for values in (old, new)] for key in changed}
    return [
        f"{key}: {before} -> {after}"
        for key, (before, after) in pairs.items()
        if before != after and (key, after) != ("data.chat_template", "auto")
    ]


ABSENT = object()


def _as_written(value: Any) -> str:
    return "(absent)" if value is ABSENT else dump_yaml([value])[2:].strip()


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        nested = isinstance(value, dict) and value
        values |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return values


# ---- reading and merging ----


def read_merged(path: Path, chain: Sequence[Path] = ()) -> dict[str, Any]:
    """The mapping of a file on top of those that it extends; `chain`: the files that extend it."""
    if path in chain:
        raise InputError(f"configs extend each other in a circle: {' -> '.join(map(str, [*chain, path]))}")
    return extended(located(read_yaml(path), path.parent, Path.cwd()), path, chain)


def extended(raw: dict[str, Any], path: Path, chain: Sequence[Path] = ()) -> dict[str, Any]:
    """A mapping on top of those that it extends; `path`: of its file, which need not be there."""
    parent_name = raw.pop("extends", None)
    if parent_name is None:
        return raw
    if not isinstance(parent_name, str) or not parent_name:
        raise InputError(f"{path}: extends must be the name of a config file: {parent_name!r}")
    with blame(f"{path}: extends"):
        parent = find_config(parent_name, folder=path.parent, but=path)
    return merged(read_merged(parent, [*chain, path]), raw)


def parse_overrides(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """All valid `--set` as one fragment, of which the last wins, and the problems of the others."""
    problems: list[str] = []
    fragment: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) > DEEPEST:
            problems.append(f"--set {text!r}: write section.key=value")
            continue
        with collected(problems):
            parsed = parse_yaml(value, where=f"--set {key.strip()}")
            for part in reversed(parts):
                parsed = {part: parsed}
            # No rule of kinds here: `--set kl.controller.kp=1 --set kl.controller.kind=pid` is one mapping.
            fragment = merged(fragment, parsed, kinds=False)
    return located(fragment, Path.cwd()), problems


def merged(
    parent: Mapping[str, Any], child: Mapping[str, Any], where: str = "", *, kinds: bool = True
) -> dict[str, Any]:
    """The child's values win; where it changes a `kind`, the parent's options of the old kind go (`kinds`)."""
    both = dict(parent)
    by_kind = BY_KIND.get(where) or BY_KIND.get(f"{where.rpartition('.')[0]}.*")
    if kinds and by_kind and "kind" in child and _kind_of(by_kind, child) != _kind_of(by_kind, parent):
        general = by_kind.model_fields.keys() - OF_KIND
        both = {key: value for key, value in parent.items() if key in general}
    for key, value in child.items():
        old = both.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(old, value, f"{where}.{key}" if where else key, kinds=kinds)
        both[key] = value
    return both


def _kind_of(model: type[ScorerSection] | type[ControllerSection], section: Mapping[str, Any]) -> Any:
    kind = section.get("kind", model.model_fields["kind"].default)
    return stored_name(kind) if isinstance(kind, str) else kind


# ---- notes at the start of a run: valid settings that may not do what the user intends ----

# (placement, estimator): why its gradient is not that of KL(policy || reference).
GRADIENTS = {
    ("reward", "exact"): "the current token's own KL is only a baseline there; rao_blackwell has the true gradient",
    ("reward", "k2"): "not the gradient of KL(policy || reference); k1 is",
    ("reward", "k3"): "not the gradient of KL(policy || reference); k1 is",
    ("reward", "importance"): "it overestimates the KL on samples of the policy itself",
    ("loss", "k1"): "its expected gradient is zero, so it does not limit the KL",
    ("loss", "k3"): "has the gradient of KL(reference || policy), the other direction",
    ("loss", "importance"): "it overestimates the KL on samples of the policy itself",
}


def gradient_notes(config: TrainConfig) -> list[str]:
    """Choices whose gradient is not that of KL(policy || reference)."""
    kl = config.kl
    reason = GRADIENTS.get((kl.placement, kl.estimator))
    if reason is None or kl.controller.coef == 0:
        return []
    return [
        f"kl-gradient: kl.estimator {kl.estimator} in the {kl.placement}: {reason}. Use kl.placement=reward "
        "with kl.estimator=k1, or leave both out (rlhf-kl guide kl)"
    ]


def unused_notes(config: TrainConfig) -> list[str]:
    """Settings of a kind of value function, advantage or engine that the run does not have."""
    unread = {
        None: ("lam", "critic_lam", "critic_epochs", "critic_learning_rate", "cliprange_value", "vf_coef"),
        "features": ("vf_coef", "cliprange_value"),
    }.get(config.critic, ("critic_epochs", "critic_learning_rate"))
    if config.ppo.advantage != "grpo":
        unread += ("scale_by_group_std",)
    defaults = PPOSection()
    unused = [f"ppo.{name}" for name in unread if getattr(config.ppo, name) != getattr(defaults, name)]
    if config.critic is None and "value" in config.policy.model_fields_set:
        unused.append("policy.value")
    critic = f", policy.value is {config.critic}" if config.critic else ""
    notes = [f"{name} is not used: ppo.advantage is {config.ppo.advantage}{critic}" for name in unused]
    if config.rollout.engine_options and config.rollout.engine is None:
        notes.append("rollout.engine_options is not used: rollout.engine is null")
    if config.reward.gold is not None:
        notes.append("reward.gold is read as eval.scorers.gold: write it there")
    return notes
