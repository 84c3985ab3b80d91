"""The config of a call from Python: a file or a mapping, changes by dotted key, and what is given as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from rlhf_kl.builtin.world import DEFAULT_WORLD, is_builtin
from rlhf_kl.config.named import Given, check_named
from rlhf_kl.config.paths import find_config
from rlhf_kl.config.resolve import complete_config, extended, merged, read_merged
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.sections import inner
from rlhf_kl.config.yaml import located
from rlhf_kl.errors import InputError
from rlhf_kl.plugins import GIVEN, given_name

ConfigLike: TypeAlias = str | PathLike[str] | Mapping[str, Any]
Reward: TypeAlias = Callable[..., Any]


def given_in_python(
    prompts: Iterable[Any] | None = None, texts: Iterable[str] | None = None, reward: Reward | None = None
) -> dict[str, Any]:
    """What came as objects, by the config key that names it. Errors: InputError for a single text, and for none."""
    given: dict[str, Any] = {}
    for key, values, name in (("data.prompts", prompts, "prompts"), ("eval.texts", texts, "texts")):
        if values is not None:
            given[key] = listed(name, values)
            if not given[key]:
                raise InputError(f"{name}: are none: leave them out, or name a file as {key}")
    if reward is not None:
        given["reward.kind"] = reward
    return given


def listed(name: str, values: Iterable[Any]) -> list[Any]:
    """The values as a list. Errors: InputError for a text or a mapping, whose parts would be taken for them."""
    if isinstance(values, str | Mapping):
        raise InputError(f"{name}: is one {'text' if isinstance(values, str) else 'mapping'}: give a list")
    return list(values)


def python_config(
    config: ConfigLike,
    changes: Mapping[str, Any] | None,
    given: Given,
    *,
    needs_data: bool = True,
    **short: Any,
) -> TrainConfig:
    """The checked config of a call. What is given stands in it by its name, as `python:NAME`.

    `short`: output_dir, seed, updates; None = as the config says. Without `needs_data` the prompts, texts and the
    reward that it does not name are given later. Errors: InputError with every problem.
    """
    path = Path("python.yaml")  # names the run of a mapping
    if isinstance(config, Mapping):
        raw = extended(located(_plain(config), Path.cwd()), Path.cwd() / path)
    else:
        path = find_config(config if isinstance(config, str) else Path(config))
        raw = read_merged(path)
    raw = merged(raw, located(_nested(changes or {}), Path.cwd()))
    names = {"run.output_dir": short.get("output_dir"), "run.seed": short.get("seed")}
    raw = merged(raw, located(_nested({key: value for key, value in names.items() if value is not None}), Path.cwd()))
    nameless = {"reward.kind": "reward"}  # what a value without a name is called
    named = {key: given_name(value, nameless.get(key, key.rpartition(".")[2])) for key, value in given.items()}
    raw = merged(raw, _nested(named))
    if not needs_data:
        raw = merged(raw, _nested(_left_open(raw)))
    settings: TrainConfig = complete_config("train", raw, path, [])
    if (updates := short.get("updates")) is not None:
        if not (isinstance(updates, int) and updates >= 1):
            raise InputError(f"updates: must be a whole number from 1 on: {updates!r}")
        raw = merged(raw, _nested({"ppo.total_episodes": updates * settings.rollout.batch_size}))
        settings = complete_config("train", raw, path, [])
    if needs_data:
        check_named(settings, given=given)
    return settings


def _left_open(raw: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted key, names for what a config does not name, and no built-in world brings along."""
    data, held, reward = (inner(raw, section) for section in ("data", "eval", "reward"))
    if is_builtin(inner(raw, "policy").get("model") or DEFAULT_WORLD):
        return {}
    scored = reward.get("model") is not None or reward.get("kind", "model") != "model"
    named = {"data.prompts": data.get("prompts"), "eval.texts": held.get("texts"), "reward.kind": scored or None}
    later = {"data.prompts": "prompts", "eval.texts": "texts", "reward.kind": "scores"}
    return {key: GIVEN + later[key] for key, value in named.items() if value is None}


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of dotted keys. Errors: InputError for a key that is no text."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise InputError(f"{key!r}: write section.key")
        part = _plain(value)
        for name in reversed(key.split(".")):
            part = {name: part}
        nested = merged(nested, part, kinds=False)
    return nested


def _plain(value: Any) -> Any:
    """A copy of a value as a YAML file would give it: paths as texts, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PathLike) else value
