"""A user's reward function or class as a scorer: its options, its thread, its state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.plugins import users_code
from rlhf_kl.rewards.functions import WeightedSum
from rlhf_kl.rewards.time_limit import OwnThread
from rlhf_kl.ui import log


class PluginReward:
    """A user's function with its options, or an instance of a user's class made with them.

    It runs in the main thread; with a time limit, all its calls run in one separate thread.
    """

    def __init__(self, attribute: Any, options: Mapping[str, Any], time_limit: float | None = None) -> None:
        """`time_limit`: seconds that a call may take. Errors: InputError if the instance cannot be made."""
        self.name = str(getattr(attribute, "__name__", attribute))
        self.columns = self.named = column_parameters(attribute, options)
        self._thread = OwnThread() if time_limit is not None else None
        self._limit = time_limit
        self._object: Any = self._made(attribute, options) if inspect.isclass(attribute) else attribute
        self._function: Any = self._object if inspect.isclass(attribute) else partial(attribute, **options)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> Any:
        """The result of the function. Errors: those of the function, InputError for a column, and TimeLimitExceeded."""
        call = self._call(prompts, responses)
        return call() if self._thread is None else self._thread.call(self._limit, call)

    def _call(self, prompts: Sequence[str], responses: Sequence[str]) -> Callable[[], Any]:
        return partial(self._function, prompts, responses, **self.columns_of(prompts))

    def columns_of(self, prompts: Sequence[str]) -> dict[str, list[Any]]:
        """Column of the data set -> its values, one a prompt. Errors: InputError if a prompt has no such column."""
        rows: list[Mapping[str, Any]] = [getattr(prompt, "row", {}) for prompt in prompts]
        for name in self.columns:
            if bare := [(prompt, row) for prompt, row in zip(prompts, rows, strict=True) if name not in row]:
                prompt, row = bare[0]
                raise InputError(
                    f"reward {self.name}: needs {name!r}, neither an option in the config nor a column of the prompt "
                    f"{prompt[:60]!r}{suggestion(name, row)}"
                )
        return {name: [row[name] for row in rows] for name in self.columns}

    @property
    def has_state(self) -> bool:
        """Whether it is an object with a state. The state of a torch module is its weights, which do not change."""
        if not all(callable(getattr(self._object, name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        return not getattr(self._object.state_dict, "__module__", "").startswith("torch.")

    def state_dict(self) -> dict[str, Any]:
        """A copy of its state. Errors: InputError if this fails, or if JSON cannot restore the state exactly."""
        state: dict[str, Any] = self._apart("state_dict")
        if (problem := _not_json(state, "state_dict()")) is not None:
            name = type(self._object).__name__
            raise InputError(f"reward {name}: {problem}: use only numbers, texts, lists, and mappings with text keys")
        return copy.deepcopy(state)  # the object may change its own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Errors: InputError if this fails."""
        self._apart("load_state_dict", copy.deepcopy(state))

    def _apart(self, method: str, *arguments: Any) -> Any:
        with users_code(f"reward {type(self._object).__name__}: {method} raised"):
            return self._in_its_thread(getattr(self._object, method), *arguments)

    def _in_its_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments) if self._thread is None else self._thread.call(None, function, *arguments)

    def _made(self, cls: type, options: Mapping[str, Any]) -> Any:
        with users_code(f"reward {cls.__name__}: cannot be created: raised"):
            return self._in_its_thread(partial(cls, **options))


def column_parameters(attribute: Any, options: Mapping[str, Any]) -> list[str]:
    """The columns of the data set that a reward function or class names.

    They are the parameters without a default, except prompts and responses, that the config does not set; for a class,
    the parameters of its `__call__`.
    """
    is_class = inspect.isclass(attribute)
    called = attribute.__call__ if is_class else attribute
    if is_class and getattr(called, "__module__", "").startswith("torch.") and hasattr(attribute, "forward"):
        called = attribute.forward
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # written in C
        return []
    provided = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: 3 if is_class else 2]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in provided]
    return [p.name for p in named if p.default is p.empty and (is_class or p.name not in options)]


def _not_json(value: Any, where: str) -> str | None:
    """The part of a value whose type JSON cannot restore."""
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            return f"{where} has the key {odd[0]!r}"
        problems = (_not_json(item, f"{where}[{key!r}]") for key, item in value.items())
    elif isinstance(value, list):
        problems = (_not_json(item, f"{where}[{i}]") for i, item in enumerate(value))
    elif value is None or isinstance(value, (bool, int, float, str)):
        return None
    else:
        return f"{where} is {type(value).__name__}"
    return next((problem for problem in problems if problem is not None), None)


# ---- all scorers of a run ----


def plugin_scorers(reward: Any, gold: Any) -> dict[str, PluginReward]:
    """The user's scorers of a run, by the name of their config key."""
    named = {"reward": reward, "gold": gold}
    if isinstance(reward, WeightedSum):
        named |= {f"terms.{name}": term for name, (_, term) in reward.terms.items()}
    return {name: one for name, one in named.items() if isinstance(one, PluginReward)}


def scorers_with_state(reward: Any, gold: Any) -> dict[str, PluginReward]:
    """The scorers whose state is saved in a checkpoint."""
    return {name: one for name, one in plugin_scorers(reward, gold).items() if one.has_state}


def columns_read(reward: Any, gold: Any) -> list[str]:
    """The columns of the data set that the scorers of a run name, required or optional."""
    return list(dict.fromkeys(name for one in plugin_scorers(reward, gold).values() for name in one.named))


def states_of(scorers: Mapping[str, PluginReward]) -> dict[str, dict[str, Any]]:
    """Their states by name. The state of gold, which is only logged, is left out if it fails.

    Errors: InputError, see `PluginReward.state_dict`.
    """
    states = {}
    for name, scorer in scorers.items():
        with _only_logged(name):
            states[name] = scorer.state_dict()
    return states


def load_states(scorers: Mapping[str, PluginReward], states: Mapping[str, dict[str, Any]]) -> None:
    """Restore the states of the scorers in it. Errors: InputError, see `PluginReward.load_state_dict`."""
    for name in scorers.keys() & states.keys():
        with _only_logged(name):
            scorers[name].load_state_dict(states[name])


class ScorerStates:
    """The states of scorers as one, for a checkpoint."""

    def __init__(self, scorers: Mapping[str, PluginReward]) -> None:
        self.scorers = scorers

    def state_dict(self) -> dict[str, Any]:
        return states_of(self.scorers)

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        load_states(self.scorers, states)
        for name in self.scorers.keys() - states.keys():
            log.warning(f"resume: {name}: the checkpoint has no state for it, so it starts anew")


@contextmanager
def state_kept(scorers: Mapping[str, PluginReward]) -> Iterator[None]:
    """Restore their state afterwards: an evaluation does not change a run."""
    before = states_of(scorers)
    try:
        yield
    finally:
        load_states(scorers, before)


def _only_logged(name: str) -> AbstractContextManager[None]:
    """An error of gold does not end a run."""
    return suppress(InputError) if name == "gold" else nullcontext()
