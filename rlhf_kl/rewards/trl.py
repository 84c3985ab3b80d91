"""A reward function written for TRL, called as in TRL's GRPOTrainer and RLOOTrainer."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_kl.config.plugins import TRL_PROVIDED
from rlhf_kl.plugins import hidden
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.types import Prompts, Responses

OWN = {"prompt", "completion", "completion_ids"}  # columns that TRL does not pass on


class TRLReward(PluginReward):
    """f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, **columns).

    For rows that are conversations, prompts and completions are lists of messages. The function gets every column of
    the data set, or only those that it names if it has no **kwargs. An async function is awaited.
    """

    def __init__(self, attribute: Any, options: Mapping[str, Any] | None = None, *limits: Any) -> None:
        """As for `PluginReward`."""
        super().__init__(attribute, options, *limits)
        parameters = list(inspect.signature(self._function).parameters.values())
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # An option wins over a column.
        filled = TRL_PROVIDED | (set() if inspect.isclass(attribute) else set(options or {}))
        own = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in filled]
        self.takes = {p.name for p in parameters}
        self.hidden_columns = OWN | filled
        self.named = [p.name for p in own]
        self.columns = [p.name for p in own if p.default is p.empty]
        self.update, self.updates = 1, 1
        self.extra: dict[str, list[str]] = defaultdict(list)  # columns logged since the update began, by `log_extra`
        self.logged: dict[str, list[float]] = defaultdict(list)  # by `log_metric`

    def begin(self, update: int, updates: int) -> None:
        """Start update number `update` (from 1); clears the logged values."""
        self.update, self.updates = update, updates
        self.extra.clear()
        self.logged.clear()

    def columns_of(self, prompts: Prompts) -> dict[str, list[Any]]:
        """Every column that it gets. Errors: InputError if a prompt has no column that it needs."""
        needed = super().columns_of(prompts)
        names = dict.fromkeys(name for row in prompts.rows for name in row if name not in self.hidden_columns)
        taken = [name for name in names if self.takes_all or name in self.takes]
        return needed | {name: [row.get(name) for row in prompts.rows] for name in taken}

    def _call(self, responses: Responses) -> Callable[[], Any]:
        prompts, texts, ids = responses
        asked = [[_message(*turn) for turn in turns] for turns in prompts.messages]
        arguments = {
            "prompts": [turns or text for turns, text in zip(asked, prompts.texts, strict=True)],
            "completions": [[_message("assistant", x)] if turns else x for turns, x in zip(asked, texts, strict=True)],
            "completion_ids": [list(row) for row in ids],
            "trainer_state": self._state(),
            "log_extra": self._log_extra,
            "log_metric": lambda name, value: self.logged[name].append(float(value)),
        }
        taken = {name: value for name, value in arguments.items() if self.takes_all or name in self.takes}
        return partial(self._function, **self.columns_of(prompts), **taken)

    @staticmethod
    def _values(answer: Any) -> Any:
        """As for `PluginReward`; nan means no score too."""
        values = PluginReward._values(answer)
        return [None if _is_nan(value) else value for value in values] if isinstance(values, list) else values

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        self.extra[column].extend(hidden(str(value)) for value in values)

    def _state(self) -> Any:
        from transformers import TrainerState

        return TrainerState(global_step=self.update - 1, max_steps=self.updates)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_nan(score: Any) -> bool:
    return hasattr(score, "__float__") and getattr(score, "ndim", 0) == 0 and math.isnan(score)
