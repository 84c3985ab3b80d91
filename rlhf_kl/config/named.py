"""What a config names: its models, its controller, and plugins (a controller of the user's, and reward functions)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlhf_kl.builtin.world import is_builtin
from rlhf_kl.config.schema import AnyConfig, TrainConfig
from rlhf_kl.config.schema.reward import SERVERS, RewardSection, ScorerSection, TermSection
from rlhf_kl.config.schema.sections import refuse
from rlhf_kl.control import Guard, load_controller, make_controller
from rlhf_kl.errors import InputError, blame, collected
from rlhf_kl.hub import model_folder, model_on_hub
from rlhf_kl.plugins import (
    REWARD_PROVIDED,
    TRL_PROVIDED,
    checked_options,
    is_reference,
    load_attribute,
    missing_variables,
    reference_file,
    takes,
)

Given = Mapping[str, Any]
NOTHING: Given = MappingProxyType({})


class NamedPlugin(NamedTuple):
    """A plugin as a config names it, or a reward's server: a class of this program's."""

    key: str  # of its name
    ref: str
    options: dict[str, Any]
    trl: bool = False  # a function that is called as in TRL

    @property
    def where(self) -> str:
        """The key of the section with its options."""
        return self.key.removesuffix(".kind")

    @property
    def address(self) -> str:
        """Where it is: its reference, or the URL of a server."""
        return str(self.options["url"]) if self.ref in SERVERS else self.ref


def scorers_of(config: TrainConfig) -> dict[str, ScorerSection]:
    """By key: the reward, its terms, and the scorers that never train."""
    terms = {f"reward.terms.{name}": term for name, term in (config.reward.terms or {}).items()}
    return {"reward": config.reward, **terms} | {f"eval.scorers.{name}": s for name, s in config.eval.watched.items()}


def plugins_of(config: AnyConfig) -> list[NamedPlugin]:
    """The plugins that a config names."""
    if not isinstance(config, TrainConfig):
        return []
    controller = config.kl.controller
    found = [NamedPlugin("kl.controller.kind", controller.kind, controller.options)]
    found += [
        NamedPlugin(f"{where}.kind", scorer.kind, scorer.options, scorer.interface == "trl")
        for where, scorer in scorers_of(config).items()
    ]
    return [plugin for plugin in found if is_reference(plugin.ref) or plugin.ref in SERVERS]


def models_of(config: AnyConfig) -> dict[str, str]:
    """By key, the models that a config names: folders and hub ids."""
    named: dict[str, str | None] = {"policy.model": config.policy.model}
    if isinstance(config, TrainConfig):
        named["reference.model"] = config.reference.model
        named |= {f"{where}.model": scorer.model for where, scorer in scorers_of(config).items()}
    return {key: ref for key, ref in named.items() if ref and not is_builtin(ref)}


def plugin_files(config: AnyConfig) -> dict[str, Path]:
    """Dotted key -> file, for every key that names a "file.py:attribute"."""
    files = {plugin.key: reference_file(plugin.ref, [Path.cwd()]) for plugin in plugins_of(config)}
    return {key: path for key, path in files.items() if path is not None}


def plugin_notes(config: AnyConfig) -> list[str]:
    """Variables in options that are not set here; who uses the plugins refuses that."""
    return [note for plugin in plugins_of(config) for note in missing_variables(plugin.options, plugin.where)]


def check_named(config: AnyConfig, *, download: bool = False, given: Given = NOTHING) -> None:
    """Check the models that a config names, and import and check its plugins. Errors: InputError with every problem.

    download: the models of the hub too, before one is loaded or built. given: see `load_reward`.
    """
    problems = list[str]()
    for plugin in plugins_of(config):
        with collected(problems):
            if plugin.key == "kl.controller.kind":
                load_controller(plugin.ref, plugin.options)
            else:
                load_reward(plugin, given)
    find = model_folder if download else model_on_hub
    for key, ref in models_of(config).items():
        with collected(problems), blame(key):
            find(ref, pickled=config.run.allow_pickle)
    refuse(*problems)


def load_reward(plugin: NamedPlugin, given: Given = NOTHING) -> tuple[Any, dict[str, Any]]:
    """A reward function or class, and its arguments. Errors: InputError with every problem.

    given: what came from Python, by the config key that names it.
    """
    key, ref, options, trl = plugin
    with blame(key):
        target: Any = given[key] if key in given else SERVERS.get(ref) or load_attribute(ref)
    if not callable(target):
        raise InputError(f"{key}: {ref!r} is not a class or function")
    is_class = inspect.isclass(target)
    provided = set() if is_class else TRL_PROVIDED if trl else REWARD_PROVIDED
    problems = [f"{plugin.where}.{name}: set by the program, remove it" for name in sorted(provided & {*options})]
    # Other parameters of a function may be columns of the data set.
    in_sum = plugin.where.startswith("reward.")
    section = RewardSection if plugin.where == "reward" else TermSection if in_sum else ScorerSection
    arguments, wrong = checked_options(
        target, options, plugin.where, provided=provided, complete=is_class, beside=section.model_fields
    )
    problems += wrong
    if is_class and not any("__call__" in vars(base) for base in target.__mro__):
        called = "__call__(prompts, completions, **columns)" if trl else "__call__(prompts, responses)"
        problems.append(f"{key}: {target.__name__} has no {called}")
    if not is_class and not trl and not all(takes(target, name) for name in REWARD_PROVIDED):
        hint = ": if it is written for TRL, set interface: trl" if takes(target, "completions") else ""
        problems.append(f"{key}: a reward function takes (prompts, responses, ...): {ref!r}{hint}")
    refuse(*problems)
    return target, arguments


def configured_controller(config: TrainConfig, coef: float) -> Guard:
    """The controller of a config; `coef` is the value of `auto`. Errors: InputError."""
    kl, batch = config.kl, config.rollout.batch_size
    # The controller does not move during the warm-up of the value function.
    episodes = max(1, config.ppo.total_episodes - config.ppo.value_warmup * batch)
    sizes = {"target": kl.target_value, "coef": coef, "total_episodes": episodes, "batch_size": batch}
    return make_controller(kl.controller.kind, kl.controller.arguments, **sizes)
