"""The controllers and reward functions that a config names, and checks of their options.

Reading a config only parses their source. They are imported by the commands that use them: `train`, `doctor`,
`simulate`, and, if allowed, `eval` and `generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_kl.components import is_reference, load_attribute, reference_file, suggestion
from rlhf_kl.config.definitions import Definition, definition_of, option_problems
from rlhf_kl.config.schema import (
    AnyConfig,
    ControllerSection,
    KLSection,
    PPOSection,
    RewardSection,
    RolloutSection,
    ScorerSection,
    TermSection,
    TrainConfig,
)
from rlhf_kl.config.source import read_definition
from rlhf_kl.config.variables import filled, hidden, missing_variables, secrets_of, variable_problems
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers import CONTROLLERS, GuardedController, build_controller
from rlhf_kl.kl_controllers.factory import COEF_WITHOUT_SCORES, CONTROLLER_PROVIDED, SYNONYMS, stored_name

REWARD_PROVIDED = {"prompts", "responses"}
TRL_PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
Define = Callable[[str], Definition]


def by_source(ref: str) -> Definition:
    """The definition of a plugin, read from its source. Runs nothing of it."""
    return read_definition(ref, [Path.cwd()])


def by_import(ref: str) -> Definition:
    """The definition of an imported plugin. Runs its module."""
    return definition_of(load_attribute(ref, search=[Path.cwd()]))


# ---- controllers ----


def configured_controller(
    kl: KLSection, ppo: PPOSection, rollout: RolloutSection, coef: float = COEF_WITHOUT_SCORES
) -> GuardedController:
    """The controller of a config; `coef` is the value of `auto`. Errors: InputError."""
    # The controller does not move during the warm-up of the value function.
    episodes = max(1, ppo.total_episodes - ppo.value_warmup * rollout.batch_size)
    sizes = {"total_episodes": episodes, "batch_size": rollout.batch_size}
    return make_controller(kl.controller.kind, kl.controller.arguments, target=kl.target_value, coef=coef, **sizes)


def make_controller(kind: str, options: Mapping[str, Any], **sizes: Any) -> GuardedController:
    """The controller of this kind; `sizes` as for `build_controller`. Errors: InputError with all problems."""
    where, name = "kl.controller", stored_name(kind)
    if problems := controller_problems({**options, "kind": kind}, by_import):
        raise InputError(*problems)
    try:
        if name in CONTROLLERS:
            return build_controller(name, options, **sizes)
        hide = partial(hidden, secrets=secrets_of(options))
        return build_controller(load_attribute(kind, search=[Path.cwd()]), filled(options, where), hide=hide, **sizes)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {hidden(str(error), secrets_of(options))}") from error


def controller_problems(section: Mapping[str, Any], define: Define = by_source) -> list[str]:
    """Problems of a raw `kl.controller`: unknown kind, no controller, options that do not fit its signature."""
    kind = section.get("kind", ControllerSection.model_fields["kind"].default)
    if not isinstance(kind, str) or not kind:
        return []
    where = "kl.controller"
    options = {k: v for k, v in section.items() if k not in ControllerSection.model_fields and k != "target"}
    try:
        law = controller_definition(kind, define)
    except InputError as error:
        return [f"{where}.kind: {problem}" for problem in error.problems]
    if law.kind in ("function", "value"):
        return [f"{where}.kind: {law.name} is not a class: a controller is a class with coef and update(kl, episodes)"]
    if stored_name(kind) in CONTROLLERS:
        problems = option_problems(law, options, provided=CONTROLLER_PROVIDED, where=where)
    else:
        problems = _option_problems(law, options, CONTROLLER_PROVIDED, where, define)
    if section.get("coef", "auto") != "auto" and law.takes("coef") is False:
        problems.append(f"{where}.coef: {law.name} has no option coef")
    parts = {"update": "update(kl, episodes)", "coef": "coef"}
    if lacking := [shown for name, shown in parts.items() if law.lacks(name)]:
        problems.append(f"{where}.kind: {law.name} has no {' and no '.join(lacking)}")
    return problems


def controller_definition(kind: str, define: Define = by_import) -> Definition:
    """The definition of a controller kind. Errors: InputError if no controller has that name."""
    if stored_name(kind) in CONTROLLERS:
        return definition_of(CONTROLLERS[stored_name(kind)])
    if not is_reference(kind):
        hint = suggestion(kind, [*CONTROLLERS, *SYNONYMS])
        raise InputError(f"unknown name {kind!r}{hint} (or write file.py:Class or module:Class)")
    return define(kind)


def construction_problems(kl: KLSection, ppo: PPOSection, rollout: RolloutSection) -> list[str]:
    """Problems with the values of a built-in controller. Other people's code is not called."""
    if kl.controller.kind not in CONTROLLERS:
        return []
    try:
        configured_controller(kl, ppo, rollout)
    except InputError as error:
        return error.problems
    return []


# ---- reward functions ----


def reward_attribute(
    ref: str, options: Mapping[str, Any], key: str, where: str, *, trl: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The function or class of a plugin, and its options with their variables filled in.

    `key` names it in the config, `where` its options; `trl`: it is called as TRL does. Errors: InputError with all
    problems.
    """
    if problems := _function_problems(ref, options, by_import, key=key, where=where, trl=trl):
        raise InputError(*problems)
    return load_attribute(ref, search=[Path.cwd()]), filled(options, where)


def reward_problems(section: Mapping[str, Any], define: Define = by_source) -> list[str]:
    """Problems of a raw `reward`: functions that do not exist, options that do not fit."""
    terms = section.get("terms")
    terms = terms if isinstance(terms, dict) else {}
    problems = _scorer_problems(section, RewardSection, "reward", define)
    problems += _function_problems(section.get("gold"), {}, define, key="reward.gold", where="reward.gold")
    for name, term in terms.items():
        if isinstance(term, dict):
            problems += _scorer_problems(term, TermSection, f"reward.terms.{name}", define)
    return problems


def _scorer_problems(raw: Mapping[str, Any], section: type[ScorerSection], where: str, define: Define) -> list[str]:
    options = {key: value for key, value in raw.items() if key not in section.model_fields}
    trl = raw.get("interface") == "trl"
    return _function_problems(raw.get("kind"), options, define, key=f"{where}.kind", where=where, trl=trl)


def _function_problems(
    ref: Any, options: Mapping[str, Any], define: Define, *, key: str, where: str, trl: bool = False
) -> list[str]:
    if not isinstance(ref, str) or not is_reference(ref):
        return []
    try:
        plugin = define(ref)
    except InputError as error:
        return [f"{key}: {problem}" for problem in error.problems]
    if plugin.kind == "value":
        return [f"{key}: {ref!r} is not a class or function"]
    if plugin.kind == "class":
        called = "__call__(prompts, completions, **columns)" if trl else "__call__(prompts, responses)"
        missing = [f"{key}: {plugin.name} has no {called}"] if plugin.lacks("__call__") else []
        return _option_problems(plugin, options, set(), where, define) + missing
    provided = TRL_PROVIDED if trl else REWARD_PROVIDED
    problems = [f"{where}.{name}: set by the program, remove it" for name in sorted(provided & options.keys())]
    # Its other parameters may be columns of the data set.
    problems += _option_problems(plugin, options, provided, where, define, complete=False)
    if not trl and any(plugin.takes(name) is False for name in REWARD_PROVIDED):
        hint = ": if it is written for TRL, set interface: trl" if plugin.takes("completions") else ""
        problems.append(f"{key}: a reward function takes (prompts, responses, ...): {ref!r}{hint}")
    return problems


# ---- both ----


def _option_problems(
    plugin: Definition,
    options: Mapping[str, Any],
    provided: set[str],
    where: str,
    define: Define,
    *,
    complete: bool = True,
) -> list[str]:
    """Problems of a plugin's options; if it is imported, also of the values of their variables."""
    problems = variable_problems(options, where)
    if define is by_import and not problems:
        problems = missing_variables(options, where)
    values = options if problems or define is by_source else filled(options, where)
    problems += option_problems(plugin, values, provided=provided, where=where, written=options, complete=complete)
    return [hidden(problem, secrets_of(options)) for problem in problems]


def check_plugins(config: TrainConfig) -> None:
    """Import the plugins of a config and check them. Errors: InputError with every problem."""
    problems = controller_problems(config.kl.controller.model_dump(), by_import)
    problems += reward_problems(config.reward.model_dump(), by_import)
    if problems:
        raise InputError(*problems)


def plugins_of(config: AnyConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    """Dotted key -> plugin and its options, for every key that names one."""
    if not isinstance(config, TrainConfig):
        return {}
    controller, reward = config.kl.controller, config.reward
    named = {
        "kl.controller.kind": (controller.kind, controller.options),
        "reward.kind": (reward.kind, reward.options),
        "reward.gold": (reward.gold or "", {}),
        **{f"reward.terms.{name}.kind": (term.kind, term.options) for name, term in (reward.terms or {}).items()},
    }
    return {key: plugin for key, plugin in named.items() if is_reference(plugin[0])}


def plugin_secrets(config: AnyConfig) -> dict[str, str]:
    """Values of the variables in the options of all plugins -> how they are written."""
    return secrets_of({key: options for key, (_, options) in plugins_of(config).items()})


def plugin_files(config: AnyConfig) -> dict[str, Path]:
    """Dotted key -> file, for every key that names a "file.py:attribute"."""
    files = {key: reference_file(ref, [Path.cwd()]) for key, (ref, _) in plugins_of(config).items()}
    return {key: path for key, path in files.items() if path is not None}


def plugin_notes(config: AnyConfig) -> list[str]:
    """Notes on problems that only this machine, or the commands that run the plugins, can find."""
    notes = []
    for key, (ref, options) in plugins_of(config).items():
        notes += missing_variables(options, key.removesuffix(".kind"))
        plugin = by_source(ref)
        if plugin.kind is None or plugin.parameters is None:
            notes.append(f"{key}: {ref}: its options cannot be read from the source: `train` and `doctor` check them")
    return notes
