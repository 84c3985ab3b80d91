"""What a config names: its models, and plugins (a controller, if that is a user's class, and reward functions)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.config.controllers import load_controller, make_controller
from rlhf_kl.config.paths import located_values
from rlhf_kl.config.schema import (
    AnyConfig,
    ControllerSection,
    KLSection,
    PPOSection,
    RewardSection,
    RolloutSection,
    TermSection,
    TrainConfig,
)
from rlhf_kl.config.schema.base import inner, refuse
from rlhf_kl.errors import InputError, blame, collected
from rlhf_kl.hub import model_folder, model_on_hub
from rlhf_kl.kl_controllers import COEF_WITHOUT_SCORES, KLController
from rlhf_kl.plugins import (
    checked_options,
    is_reference,
    load_attribute,
    look_up,
    missing_variables,
    reference_file,
    takes,
)

REWARD_PROVIDED = {"prompts", "responses"}
TRL_PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


class NamedPlugin(NamedTuple):
    """A plugin as a config names it."""

    key: str  # of its name
    ref: str
    options: dict[str, Any]
    trl: bool = False  # a function that is called as in TRL

    @property
    def where(self) -> str:
        """The key of the section with its options."""
        return self.key.removesuffix(".kind")


def plugins_of(config: AnyConfig) -> list[NamedPlugin]:
    """The plugins that a config names."""
    return list(_named(config.model_dump(include={"kl", "reward"}))) if isinstance(config, TrainConfig) else []


def _named(raw: Mapping[str, Any]) -> Iterator[NamedPlugin]:
    """The plugins in a mapping of `train`, whatever else is wrong with it."""
    reward, terms = inner(raw, "reward"), inner(raw, "reward", "terms")
    sections: dict[str, tuple[Mapping[str, Any], Any]] = {
        "kl.controller": (inner(raw, "kl", "controller"), ControllerSection),
        "reward": (reward, RewardSection),
        **{f"reward.terms.{name}": (inner(terms, name), TermSection) for name in terms},
    }
    for where, (section, model) in sections.items():
        if isinstance(section.get("kind"), str) and is_reference(section["kind"]):
            options = {key: value for key, value in section.items() if key not in model.model_fields}
            yield NamedPlugin(f"{where}.kind", section["kind"], options, section.get("interface") == "trl")
    if isinstance(reward.get("gold"), str) and is_reference(reward["gold"]):
        yield NamedPlugin("reward.gold", reward["gold"], {})


def plugin_files(config: AnyConfig) -> dict[str, Path]:
    """Dotted key -> file, for every key that names a "file.py:attribute"."""
    files = {plugin.key: reference_file(plugin.ref, [Path.cwd()]) for plugin in plugins_of(config)}
    return {key: path for key, path in files.items() if path is not None}


def plugin_problems(raw: Mapping[str, Any]) -> list[str]:
    """Plugins in a mapping of `train` that do not exist or cannot be one. Runs none of their code."""
    problems = list[str]()
    for plugin in _named(raw):
        with collected(problems), blame(plugin.key):
            made, law = look_up(plugin.ref), plugin.key == "kl.controller.kind"
            if made == "value" or (made == "function" and law):
                raise InputError(f"{plugin.ref!r} is a {made}, not a class" + " or function" * (not law))
    return problems


def plugin_notes(config: AnyConfig) -> list[str]:
    """Variables in options that are not set here; the commands that use the plugins refuse that."""
    return [note for plugin in plugins_of(config) for note in missing_variables(plugin.options, plugin.where)]


def check_named(config: AnyConfig, *, download: bool = False) -> None:
    """Check the models that a config names, and import and check its plugins. Errors: InputError with every problem.

    download: the models of the hub too, before one is loaded or built.
    """
    problems = list[str]()
    for plugin in plugins_of(config):
        with collected(problems):
            if plugin.key == "kl.controller.kind":
                load_controller(plugin.ref, plugin.options)
            else:
                load_reward(plugin)
    find = model_folder if download else model_on_hub
    for key, section, name, _ in located_values(type(config), config.model_dump()):
        with collected(problems), blame(key):
            if name in ("model", "gold") and not (is_builtin(section[name]) or is_reference(section[name])):
                find(section[name], pickled=config.run.allow_pickle)
    refuse(*problems)


def load_reward(plugin: NamedPlugin) -> tuple[Any, dict[str, Any]]:
    """A reward function or class, and its arguments. Errors: InputError with every problem."""
    key, ref, options, trl = plugin
    with blame(key):
        target = load_attribute(ref)
    if not callable(target):
        raise InputError(f"{key}: {ref!r} is not a class or function")
    is_class = inspect.isclass(target)
    provided = set() if is_class else TRL_PROVIDED if trl else REWARD_PROVIDED
    problems = [f"{plugin.where}.{name}: set by the program, remove it" for name in sorted(provided & {*options})]
    # Other parameters of a function may be columns of the data set.
    arguments, wrong = checked_options(target, options, plugin.where, provided=provided, complete=is_class)
    problems += wrong
    if is_class and not any("__call__" in vars(base) for base in target.__mro__):
        called = "__call__(prompts, completions, **columns)" if trl else "__call__(prompts, responses)"
        problems.append(f"{key}: {target.__name__} has no {called}")
    if not is_class and not trl and not all(takes(target, name) for name in REWARD_PROVIDED):
        hint = ": if it is written for TRL, set interface: trl" if takes(target, "completions") else ""
        problems.append(f"{key}: a reward function takes (prompts, responses, ...): {ref!r}{hint}")
    refuse(*problems)
    return target, arguments


def configured_controller(
    kl: KLSection, ppo: PPOSection, rollout: RolloutSection, coef: float = COEF_WITHOUT_SCORES
) -> KLController:
    """The controller of a config; `coef` is the value of `auto`. Errors: InputError."""
    # The controller does not move during the warm-up of the value function.
    episodes = max(1, ppo.total_episodes - ppo.value_warmup * rollout.batch_size)
    sizes = {"total_episodes": episodes, "batch_size": rollout.batch_size}
    return make_controller(kl.controller.kind, kl.controller.arguments, target=kl.target_value, coef=coef, **sizes)
