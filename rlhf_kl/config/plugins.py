"""The controllers and reward functions that a config names, and checks of their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf_kl.components import accepts, check_options, is_reference, load_attribute, reference_file
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
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers import CONTROLLERS, GuardedController, build_controller
from rlhf_kl.kl_controllers.factory import COEF_WITHOUT_SCORES, CONTROLLER_PROVIDED, SYNONYMS, stored_name

REWARD_PROVIDED = {"prompts", "responses"}


def controller_class(kind: str) -> Callable[..., Any]:
    """The class behind a controller kind. Raises InputError: no such kind, file or attribute."""
    builtins = CONTROLLERS | {word: CONTROLLERS[name] for word, name in SYNONYMS.items()}
    return _callable(load_attribute(stored_name(kind), search=[Path.cwd()], builtins=builtins), kind)


def configured_controller(
    kl: KLSection, ppo: PPOSection, rollout: RolloutSection, coef: float = COEF_WITHOUT_SCORES
) -> GuardedController:
    """The controller of a config; `coef` is the value of `auto`. Raises as `build_controller` does."""
    return build_controller(
        controller_class(kl.controller.kind),
        kl.controller.arguments,
        target=kl.target_value,
        coef=coef,
        # While the value function warms up alone the controller stands still.
        total_episodes=max(1, ppo.total_episodes - ppo.value_warmup * rollout.batch_size),
        batch_size=rollout.batch_size,
    )


def controller_problems(section: Mapping[str, Any]) -> list[str]:
    """Problems of a raw `kl.controller`: unknown kind, options that do not fit its signature."""
    kind = section.get("kind", ControllerSection.model_fields["kind"].default)
    if not isinstance(kind, str) or not kind:
        return []
    where = "kl.controller"
    try:
        cls = controller_class(kind)
    except InputError as error:
        return [f"{where}.kind: {problem}" for problem in error.problems]
    options = {k: v for k, v in section.items() if k not in ControllerSection.model_fields and k != "target"}
    problems = check_options(cls, options, provided=CONTROLLER_PROVIDED, where=where)
    name = getattr(cls, "__name__", kind)
    if section.get("coef", "auto") != "auto" and not accepts(cls, "coef"):
        problems.append(f"{where}.coef: {name} takes no coef")
    if inspect.isclass(cls) and not callable(getattr(cls, "update", None)):
        problems.append(f"{where}.kind: {name} has no update(kl, episodes)")
    return problems


def construction_problems(kl: KLSection, ppo: PPOSection, rollout: RolloutSection) -> list[str]:
    """Problems with the values of a built-in controller. Other people's code is not called."""
    if kl.controller.kind not in CONTROLLERS:
        return []
    try:
        configured_controller(kl, ppo, rollout)
    except ValueError as error:
        return [f"kl.controller: {error}"]
    return []


def reward_problems(section: Mapping[str, Any]) -> list[str]:
    """Problems of a raw `reward`: functions that do not exist, options that do not fit."""
    terms = section.get("terms")
    terms = terms if isinstance(terms, dict) else {}
    problems = _scorer_problems(section, RewardSection, "reward")
    problems += _function_problems(section.get("gold"), {}, key="reward.gold", where="reward.gold")
    for name, term in terms.items():
        if isinstance(term, dict):
            problems += _scorer_problems(term, TermSection, f"reward.terms.{name}")
    return problems


def _scorer_problems(raw: Mapping[str, Any], section: type[ScorerSection], where: str) -> list[str]:
    options = {key: value for key, value in raw.items() if key not in section.model_fields}
    return _function_problems(raw.get("kind"), options, key=f"{where}.kind", where=where)


def _function_problems(ref: Any, options: dict[str, Any], *, key: str, where: str) -> list[str]:
    if not isinstance(ref, str) or not is_reference(ref):
        return []
    try:
        function = _callable(load_attribute(ref, search=[Path.cwd()]), ref)
    except InputError as error:
        return [f"{key}: {problem}" for problem in error.problems]
    taken = sorted(REWARD_PROVIDED & options.keys())
    problems = [f"{where}.{name}: filled in by the program" for name in taken]
    problems += check_options(function, options, provided=REWARD_PROVIDED, where=where)
    if not inspect.isclass(function) and not all(accepts(function, name) for name in REWARD_PROVIDED):
        problems.append(f"{key}: a reward function takes (prompts, responses, ...): {ref!r}")
    return problems


def plugin_files(config: AnyConfig) -> dict[str, Path]:
    """Dotted key -> file, for every key that names a "file.py:attribute"."""
    if not isinstance(config, TrainConfig):
        return {}
    refs = {
        "kl.controller.kind": config.kl.controller.kind,
        "reward.kind": config.reward.kind,
        "reward.gold": config.reward.gold,
        **{f"reward.terms.{name}.kind": term.kind for name, term in (config.reward.terms or {}).items()},
    }
    files = {key: reference_file(ref, [Path.cwd()]) for key, ref in refs.items() if ref is not None}
    return {key: path for key, path in files.items() if path is not None}


def _callable(obj: Any, ref: str) -> Callable[..., Any]:
    if not callable(obj):
        raise InputError(f"{ref!r} is not a class or function")
    return obj  # type: ignore[no-any-return]
