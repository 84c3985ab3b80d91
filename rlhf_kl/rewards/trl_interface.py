"""A reward function that was written for TRL, called as TRL's GRPOTrainer and RLOOTrainer call it."""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from rlhf_kl.config.plugins import TRL_PROVIDED
from rlhf_kl.errors import InputError
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.types import Prompt, Response

OWN = {"prompt", "completion", "completion_ids"}  # columns that TRL does not pass on


class TRLReward(PluginReward):
    """f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, **columns).

    Completions, and the prompts of rows that are conversations, are lists of messages there. It gets every column of
    the data set, or those that it names where it has no **kwargs. An async function is waited for.
    """

    def __init__(
        self,
        attribute: Any,
        options: Mapping[str, Any],
        time_limit: float | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """As for `PluginReward`."""
        super().__init__(attribute, options, time_limit, secrets)
        parameters = list(inspect.signature(self._function).parameters.values())
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.takes = {p.name for p in parameters}
        needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.columns = [p.name for p in needed if p.name not in TRL_PROVIDED]
        self.update, self.updates = 0, 0
        self.extra: dict[str, list[Any]] = {}  # what it logged of each response of its last call
        self.logged: dict[str, list[float]] = defaultdict(list)

    def begin(self, update: int, updates: int) -> None:
        """Update number `update` (from 1) begins; forgets what was logged."""
        self.update, self.updates = update, updates
        self.extra.clear()
        self.logged.clear()

    def metrics(self) -> dict[str, float]:
        """Mean of what it logged by `log_metric` since the update began."""
        return {f"log/{name}": fmean(values) for name, values in self.logged.items()}

    def _call(self, prompts: Sequence[str], responses: Sequence[str]) -> Callable[[], Any]:
        if any(not isinstance(response, Response) for response in responses):
            raise InputError(f"reward {self.name}: completion_ids are known of sampled responses only")
        names = {name for prompt in prompts for name in getattr(prompt, "row", {})} | set(self.columns)
        arguments = {
            **{name: [getattr(prompt, "row", {}).get(name) for prompt in prompts] for name in names - OWN},
            "prompts": [_messages(prompt) or str(prompt) for prompt in prompts],
            "completions": [_completion(prompt, text) for prompt, text in zip(prompts, responses, strict=True)],
            "completion_ids": [list(response.ids) for response in responses if isinstance(response, Response)],
            "trainer_state": self._state(),
            "log_extra": self.extra.__setitem__,
            "log_metric": lambda name, value: self.logged[name].append(float(value)),
        }
        self.columns_of(prompts)  # none is missing
        taken = {name: value for name, value in arguments.items() if self.takes_all or name in self.takes}
        return partial(_result, partial(self._function, **taken))

    def _state(self) -> Any:
        from transformers import TrainerState

        return TrainerState(global_step=max(0, self.update - 1), max_steps=self.updates)


def _messages(prompt: str) -> list[dict[str, str]]:
    turns = prompt.messages if isinstance(prompt, Prompt) else ()
    return [{"role": role, "content": content} for role, content in turns]


def _completion(prompt: str, response: str) -> Any:
    return [{"role": "assistant", "content": str(response)}] if _messages(prompt) else str(response)


def _result(call: Callable[[], Any]) -> Any:
    result = call()
    return asyncio.run(result) if inspect.iscoroutine(result) else result
