"""The controller and the reward functions that a config names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

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
from rlhf_kl.config.schema.base import refuse
from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.kl_controllers import (
    COEF_WITHOUT_SCORES,
    CONTROLLER_PROVIDED,
    CONTROLLERS,
    SYNONYMS,
    GuardedController,
    build_controller,
    stored_name,
)
from rlhf_kl.plugins import (
    checked_options,
    explain,
    is_reference,
    load_attribute,
    look_up,
    parameters_of,
    reference_file,
    takes,
    users_line,
)
from rlhf_kl.variables import missing_variables, secrets_of, variable_problems

REWARD_PROVIDED = {"prompts", "responses"}
TRL_PROVIDED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
_ANY_ATTRIBUTE = {"setattr", "vars", "__dict__", "__getattr__", "__setattr__"}  # code that gives attributes any name


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


class Loaded(NamedTuple):
    """An imported class or function, and the arguments that its options are."""

    target: Any
    arguments: dict[str, Any]
    secrets: dict[str, str]  # values that no message may show -> how the config writes them


def plugins_of(config: AnyConfig) -> list[NamedPlugin]:
    """The plugins that a config names."""
    return list(_named(config.model_dump(include={"kl", "reward"}))) if isinstance(config, TrainConfig) else []


def _named(raw: Mapping[str, Any]) -> Iterator[NamedPlugin]:
    """The plugins in a mapping of `train`, whatever else is wrong with it."""
    reward = _mapping(raw, "reward")
    sections: list[tuple[str, Mapping[str, Any], Any]] = [
        ("kl.controller", _mapping(_mapping(raw, "kl"), "controller"), ControllerSection),
        ("reward", reward, RewardSection),
        *((f"reward.terms.{name}", _mapping(reward["terms"], name), TermSection) for name in _mapping(reward, "terms")),
    ]
    for where, section, model in sections:
        options = {key: value for key, value in section.items() if key not in model.model_fields}
        if model is ControllerSection:
            options.pop("target", None)
        yield from _plugin(f"{where}.kind", section.get("kind"), options, section.get("interface") == "trl")
    yield from _plugin("reward.gold", reward.get("gold"), {})


def _plugin(key: str, ref: Any, options: dict[str, Any], trl: bool = False) -> Iterator[NamedPlugin]:
    if isinstance(ref, str) and is_reference(ref):
        yield NamedPlugin(key, ref, options, trl)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def plugin_files(config: AnyConfig) -> dict[str, Path]:
    """Dotted key -> file, for every key that names a "file.py:attribute"."""
    files = {plugin.key: reference_file(plugin.ref, [Path.cwd()]) for plugin in plugins_of(config)}
    return {key: path for key, path in files.items() if path is not None}


def config_secrets(config: AnyConfig) -> dict[str, str]:
    """Values of the variables in the options of all plugins -> how they are written."""
    return secrets_of([plugin.options for plugin in plugins_of(config)])


# ---- without running code of the user's ----


def _source_problems(raw: Mapping[str, Any]) -> list[str]:
    """Problems of the plugins in a mapping of `train` that their source and the config show."""
    problems = []
    for plugin in _named(raw):
        problems += variable_problems(plugin.options, plugin.where)
        try:
            if look_up(plugin.ref) == "function" and plugin.key == "kl.controller.kind":
                problems.append(_no_class(plugin.ref))
        except InputError as error:
            problems += [f"{plugin.key}: {problem}" for problem in error.problems]
    return problems


def plugin_problems(raw: Mapping[str, Any]) -> list[str]:
    """Problems of the controller and the reward functions that a mapping of `train` names. Runs no code of the user's.

    A built-in controller is made, since only that tells which values it refuses.
    """
    problems = _source_problems(raw)
    section = _mapping(_mapping(raw, "kl"), "controller")
    kind = section.get("kind", ControllerSection.model_fields["kind"].default)
    if not isinstance(kind, str) or not kind or is_reference(kind):
        return problems
    options = {k: v for k, v in section.items() if k not in ControllerSection.model_fields and k != "target"}
    try:
        load_controller(kind, options)
        kl = KLSection.model_validate(raw.get("kl", {}))
        ppo = PPOSection.model_validate(raw.get("ppo", {}))
        rollout = RolloutSection.model_validate(raw.get("rollout", {}))
        configured_controller(kl, ppo, rollout)
    except InputError as error:
        problems += error.problems
    except ValidationError:  # these problems are reported already
        pass
    return problems


def plugin_notes(config: AnyConfig) -> list[str]:
    """What only the commands that run the plugins can check."""
    notes = [note for plugin in plugins_of(config) for note in missing_variables(plugin.options, plugin.where)]
    return notes + [
        f"{plugin.key}: `train` and `doctor` check the options of {plugin.ref}: its code runs only there"
        for plugin in plugins_of(config)
        if plugin.options
    ]


# ---- imported ----


def check_plugins(config: TrainConfig) -> None:
    """Import the plugins of a config and check them; calls none. Errors: InputError with every problem."""
    problems = []
    for plugin in plugins_of(config):
        try:
            if plugin.key == "kl.controller.kind":
                load_controller(plugin.ref, config.kl.controller.arguments)
            else:
                load_reward(plugin)
        except InputError as error:
            problems += error.problems
    refuse(*problems)


def _import(key: str, ref: str) -> Any:
    try:
        return load_attribute(ref)
    except InputError as error:
        raise InputError(*(f"{key}: {problem}" for problem in error.problems)) from error


def load_reward(plugin: NamedPlugin) -> Loaded:
    """A reward function or class. Errors: InputError with every problem."""
    key, ref, options, trl = plugin
    target = _import(key, ref)
    if not callable(target):
        raise InputError(f"{key}: {ref!r} is not a class or function")
    is_class = inspect.isclass(target)
    provided = TRL_PROVIDED if trl else REWARD_PROVIDED
    problems = []
    if not is_class:
        problems += [f"{plugin.where}.{name}: set by the program, remove it" for name in sorted(provided & {*options})]
    elif not any("__call__" in vars(base) for base in target.__mro__):
        called = "__call__(prompts, completions, **columns)" if trl else "__call__(prompts, responses)"
        problems.append(f"{key}: {target.__name__} has no {called}")
    # Other parameters of a function may be columns of the data set.
    arguments, wrong = checked_options(
        target, options, plugin.where, provided=() if is_class else provided, complete=is_class
    )
    problems += wrong
    if not is_class and not trl and not all(takes(target, name) for name in REWARD_PROVIDED):
        hint = ": if it is written for TRL, set interface: trl" if takes(target, "completions") else ""
        problems.append(f"{key}: a reward function takes (prompts, responses, ...): {ref!r}{hint}")
    refuse(*problems)
    return Loaded(target, arguments, secrets_of(options))


def controller_class(kind: str) -> type:
    """The class of a controller kind. Errors: InputError if there is none."""
    key, name = "kl.controller.kind", stored_name(kind)
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    if not is_reference(kind):
        hint = suggestion(kind, [*CONTROLLERS, *SYNONYMS])
        raise InputError(f"{key}: unknown name {kind!r}{hint} (or write file.py:Class or module:Class)")
    law = _import(key, kind)
    if not inspect.isclass(law):
        raise InputError(_no_class(kind))
    return law


def _no_class(ref: str) -> str:
    name = ref.rpartition(":")[2]
    return f"kl.controller.kind: {name} is not a class: a controller is a class with coef and update(kl, episodes)"


def load_controller(kind: str, options: Mapping[str, Any]) -> Loaded:
    """The class of a controller. Errors: InputError with every problem."""
    law = controller_class(kind)
    arguments, problems = checked_options(
        law, {key: value for key, value in options.items() if takes(law, key) or key not in ("min_coef", "max_coef")},
        "kl.controller", provided=CONTROLLER_PROVIDED,
    )  # fmt: skip
    if stored_name(kind) not in CONTROLLERS:
        problems += _interface_problems(law)
    refuse(*problems)
    return Loaded(law, dict(options) | arguments, secrets_of(options))


def _interface_problems(law: type) -> list[str]:
    """What a class lacks of a controller. Tutorials write `kl_coef` and `update(observed_kl)`: to be renamed."""
    words, lacking, renamed = _attributes(law), [], []
    update = getattr(law, "update", None)
    try:
        inspect.signature(update).bind(None, 0.1, 64)  # type: ignore[arg-type]
    except TypeError:
        if not words & (_ANY_ATTRIBUTE | {"update"} if update is None else set()):
            lacking.append("update(kl, episodes)")
            given = ", ".join(p.name for p in (parameters_of(update) or [])[1:])
            renamed += [f"update({given}) to update(kl, episodes)"] if update is not None else []
    except ValueError:  # written in C
        pass
    if not words & (_ANY_ATTRIBUTE | {"coef"}):
        lacking.append("coef")
        renamed += ["kl_coef to coef"] if "kl_coef" in words else []
    hint = f": rename {' and '.join(renamed)}" if renamed else ""
    return [f"kl.controller.kind: {law.__name__} has no {' and no '.join(lacking)}{hint}"] if lacking else []


def _attributes(cls: type) -> set[str]:
    """The names that a class defines and that its methods use."""
    words = set[str]()
    for base in cls.__mro__[:-1]:  # but for `object`
        own = vars(base)
        words |= own.keys() - {"__dict__", "__weakref__"}
        for member in own.values():
            code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
            words |= set(code.co_names) if inspect.iscode(code) else set()
    return words


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
    law, arguments, secrets = load_controller(kind, options)

    def told(error: BaseException) -> str:
        return explain(error, secrets)

    try:
        return build_controller(law, arguments, explain=told, **sizes)
    except (Exception, SystemExit) as error:
        if users_line(error):
            raise InputError(f"kl.controller: {law.__name__} cannot be created: raised {told(error)}") from error
        if isinstance(error, (TypeError, ValueError)):  # values that do not fit together
            raise InputError(f"kl.controller: {error}") from error
        raise
