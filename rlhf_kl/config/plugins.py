"""What a config names: its models, its controller, and plugins (a controller of the user's, and reward functions)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_kl.builtin.world import is_builtin
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
from rlhf_kl.errors import InputError, blame, collected, suggestion
from rlhf_kl.hub import model_folder, model_on_hub
from rlhf_kl.kl_controllers import (
    BOUNDS,
    COEF_WITHOUT_SCORES,
    CONTROLLER_PROVIDED,
    CONTROLLERS,
    SYNONYMS,
    KLController,
    build_controller,
    stored_name,
)
from rlhf_kl.plugins import (
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


def plugin_problems(raw: Mapping[str, Any]) -> list[str]:
    """Plugins in a mapping of `train` that do not exist or cannot be one, and what its built-in controller refuses.

    Runs none of the user's code.
    """
    problems = list[str]()
    for plugin in _named(raw):
        with collected(problems), blame(plugin.key):
            made, law = look_up(plugin.ref), plugin.key == "kl.controller.kind"
            if made == "value" or (made == "function" and law):
                raise InputError(f"{plugin.ref!r} is a {made}, not a class" + " or function" * (not law))
    options = dict(inner(raw, "kl", "controller"))
    kind = options.pop("kind", "adaptive")
    if isinstance(kind, str) and kind and not is_reference(kind) and "target" not in options:
        for name in {"coef", *BOUNDS} & options.keys():  # of these the schema tells which are wrong
            if not (type(options[name]) in (int, float) and 0 < options[name] < math.inf):
                del options[name]
        with collected(problems):  # only a law itself knows which values it refuses; any sizes of a run will do
            make_controller(kind, options, target=1.0, total_episodes=1, batch_size=1)
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


# ---- the controller


def controller_class(kind: str) -> type:
    """The class of a controller kind. Errors: InputError if there is none."""
    key, name = "kl.controller.kind", stored_name(kind)
    if name in CONTROLLERS:
        return CONTROLLERS[name]
    if not is_reference(kind):
        hint = suggestion(kind, [*CONTROLLERS, *SYNONYMS])
        raise InputError(f"{key}: unknown name {kind!r}{hint} (or write file.py:Class or module:Class)")
    with blame(key):
        law = load_attribute(kind)
    if not inspect.isclass(law):
        raise InputError(f"{key}: {kind!r} is not a class: a controller is one with coef and update(kl, episodes)")
    return law


def load_controller(kind: str, options: Mapping[str, Any]) -> tuple[type, dict[str, Any]]:
    """The class of a controller, and its arguments. Errors: InputError with every problem."""
    law = controller_class(kind)
    written = {key: value for key, value in options.items() if takes(law, key) or key not in BOUNDS}
    arguments, problems = checked_options(law, written, "kl.controller", provided=CONTROLLER_PROVIDED)
    try:
        inspect.signature(getattr(law, "update", None)).bind(None, 0.1, 64)  # type: ignore[arg-type]
    except TypeError:
        problems.append(f"kl.controller.kind: {law.__name__} has no update(kl, episodes): a law needs that and coef")
    except ValueError:  # written in C
        pass
    if problems:
        raise InputError(*problems)
    return law, dict(options) | arguments


def make_controller(kind: str, options: Mapping[str, Any], **sizes: Any) -> KLController:
    """The controller of this kind; `sizes` as for `build_controller`. Errors: InputError with all problems."""
    law, arguments = load_controller(kind, options)
    try:
        return build_controller(law, arguments, **sizes)
    except Exception as error:  # values that do not fit together, or an error in the user's code
        raised = f"{law.__name__} cannot be created: raised {explain(error)}" if users_line(error) else error
        raise InputError(f"kl.controller: {raised}") from error


def configured_controller(
    kl: KLSection, ppo: PPOSection, rollout: RolloutSection, coef: float = COEF_WITHOUT_SCORES
) -> KLController:
    """The controller of a config; `coef` is the value of `auto`. Errors: InputError."""
    # The controller does not move during the warm-up of the value function.
    episodes = max(1, ppo.total_episodes - ppo.value_warmup * rollout.batch_size)
    sizes = {"total_episodes": episodes, "batch_size": rollout.batch_size}
    return make_controller(kl.controller.kind, kl.controller.arguments, target=kl.target_value, coef=coef, **sizes)
