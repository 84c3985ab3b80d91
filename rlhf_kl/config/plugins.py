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
from rlhf_kl.config.schema.base import inner, refuse
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
    broken_variables,
    checked_options,
    explain,
    is_reference,
    load_attribute,
    look_up,
    missing_variables,
    reference_file,
    takes,
    users_line,
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


# ---- checks ----


def plugin_problems(raw: Mapping[str, Any]) -> list[str]:
    """Problems of the controller and the reward functions in a mapping of `train`. Runs no code of the user's.

    A built-in controller is made, since only that tells which values it refuses.
    """
    problems = []
    for plugin in _named(raw):
        problems += broken_variables(plugin.options, plugin.where)
        try:
            look_up(plugin.ref)
        except InputError as error:
            problems += [f"{plugin.key}: {problem}" for problem in error.problems]
    section = inner(raw, "kl", "controller")
    kind = section.get("kind", ControllerSection.model_fields["kind"].default)
    if isinstance(kind, str) and kind and not is_reference(kind):
        options = {k: v for k, v in section.items() if k not in ControllerSection.model_fields and k != "target"}
        try:
            load_controller(kind, options)
            configured_controller(
                KLSection.model_validate(raw.get("kl", {})),
                PPOSection.model_validate(raw.get("ppo", {})),
                RolloutSection.model_validate(raw.get("rollout", {})),
            )
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


# ---- reward functions ----


def load_reward(plugin: NamedPlugin) -> tuple[Any, dict[str, Any]]:
    """A reward function or class, and its arguments. Errors: InputError with every problem."""
    key, ref, options, trl = plugin
    target = _import(key, ref)
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


# ---- controllers ----


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
        raise InputError(f"{key}: {kind!r} is not a class: a controller is one with coef and update(kl, episodes)")
    return law


def load_controller(kind: str, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The class of a controller, and its arguments. Errors: InputError with every problem."""
    law = controller_class(kind)
    written = {key: value for key, value in options.items() if takes(law, key) or key not in ("min_coef", "max_coef")}
    arguments, problems = checked_options(law, written, "kl.controller", provided=CONTROLLER_PROVIDED)
    try:
        inspect.signature(getattr(law, "update", None)).bind(None, 0.1, 64)  # type: ignore[arg-type]
    except TypeError:
        problems.append(f"kl.controller.kind: {law.__name__} has no update(kl, episodes)")
    except ValueError:  # written in C
        pass
    refuse(*problems)
    return law, dict(options) | arguments


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
    law, arguments = load_controller(kind, options)
    try:
        return build_controller(law, arguments, explain=explain, **sizes)
    except Exception as error:  # values that do not fit together, or an error in the user's code
        raised = f"{law.__name__} cannot be created: raised {explain(error)}" if users_line(error) else error
        raise InputError(f"kl.controller: {raised}") from error
