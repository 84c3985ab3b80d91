"""A user's reward function or class, plain or written for TRL: its columns, its state, its thread and its scores."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError, ServiceFailed, suggestion
from rlhf_kl.models.tokens import AS_WRITTEN
from rlhf_kl.plugins import TRL_PROVIDED, home_of, parameters_of, users_code
from rlhf_kl.types import Prompts, Responses

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LARGEST = float(torch.finfo(torch.float32).max)  # of a score: PPO computes in float32
RENDERED = "rendered"  # a column of its own: the prompt as the policy is asked
TEXTS = ("prompts", "responses")
TRL_HIDDEN = {"prompt", "completion", "completion_ids"}  # columns that TRL does not pass on


class PluginReward:
    """A user's function with its options, or an instance of a user's class made with them.

    It runs in the main thread; with a time limit, all its calls run in one separate thread.
    """

    def __init__(
        self,
        attribute: Any,
        options: Mapping[str, Any] | None = None,
        time_limit: float | None = None,
    ) -> None:
        """`time_limit`: seconds that a call may take. Errors: InputError if the instance cannot be made."""
        self._home = home_of(attribute)
        self._thread = OwnThread(self._home.settle) if time_limit is not None else None
        self._limit = time_limit
        self._object: Any = attribute
        self._options = dict(options or {})
        called: Any = partial(attribute, **self._options)
        if inspect.isclass(attribute):
            with users_code(f"{attribute.__name__} cannot be created: raised", self._home):
                called = self._object = self._run(partial(attribute, **_copied(self._options)))
            self._options = {}
        self.parameters = parameters_of(called) or []
        self._names = _texts_named(self.parameters, exactly=called is not self._object)
        own = [p for p in self.parameters if p.kind in NAMED and p.name not in (*self._names, *self._options)]
        own = own if self._names else own[2:]
        self.columns = [p.name for p in own if p.default is p.empty]  # of the data set, that it needs,
        self.defaults = {p.name: p.default for p in own if p.default is not p.empty}  # and that it takes
        self.named = [p.name for p in own]
        self.update, self.updates = 1, 1
        self.extra: dict[str, list[str]] = defaultdict(list)  # columns that it logged since the update began
        self.logged: dict[str, list[float]] = defaultdict(list)  # and metrics

    def begin(self, update: int, updates: int) -> None:
        """Start update number `update` (from 1) of `updates`; clears what it logged."""
        self.update, self.updates = update, updates
        self.extra.clear()
        self.logged.clear()

    def __call__(self, responses: Responses) -> Tensor:
        """Scores (B,) float64, as a function's numbers are; NaN where it returned None.

        Errors: InputError with its fault: the line that raised, the missing column, or the score that is no number.
        """
        texts = responses.texts
        batch = f"{len(texts)} responses, the first of them {texts[0][:60]!r}"
        call = self._call(responses)
        with users_code("raised", self._home):
            returned = self._run(lambda: self._values(call()), self._limit)
        if not isinstance(returned, list):
            raise InputError(f"returned {type(returned).__name__}, not one number per response, on {batch}")
        if len(returned) != len(texts):
            raise InputError(f"returned {len(returned)} scores for {batch}")
        scores = [math.nan if score is None else _number(score) for score in returned]
        for score, raw, response in zip(scores, returned, texts, strict=True):
            if raw is not None and not abs(score) <= LARGEST:
                fault = f"beyond {LARGEST:.2g}" if math.isfinite(score) else "not a finite number"
                raise InputError(f"the score of {response[:60]!r} is {self._home.hidden(repr(raw))}, {fault}")
        return torch.tensor(scores, dtype=torch.float64)

    def _call(self, responses: Responses) -> Callable[[], Any]:
        """The call for these responses. It may change all that it gets: nothing of it is the program's."""
        prompts = responses.prompts
        texts, columns = (list(prompts.texts), list(responses.texts)), self._copied_columns(prompts)
        if not self._names:
            return self._with_options(*texts, **columns)
        return self._with_options(**dict(zip(self._names, texts, strict=True)), **columns)

    def _with_options(self, *arguments: Any, **named: Any) -> Callable[[], Any]:
        return partial(self._object, *arguments, **_copied(self._options), **named)

    def _copied_columns(self, prompts: Prompts) -> dict[str, list[Any]]:
        # Each by itself: the responses to one prompt share its row.
        return {name: [_copied(value) for value in values] for name, values in self.columns_of(prompts).items()}

    def columns_of(self, prompts: Prompts) -> dict[str, list[Any]]:
        """Column of the data set -> its values, one a prompt. Errors: InputError if a prompt has no such column."""
        rows = self.rows_of(prompts)
        for text, row in zip(prompts.texts, rows, strict=True):
            for name in self.columns:
                if name not in row:
                    raise InputError(
                        f"needs {name!r}, neither an option in the config nor a column of the prompt "
                        f"{text[:60]!r}{suggestion(name, row)}"
                    )
        known = {name: [row[name] for row in rows] for name in self.columns}
        taken = {name: default for name, default in self.defaults.items() if any(name in row for row in rows)}
        return known | {name: [row.get(name, default) for row in rows] for name, default in taken.items()}

    def rows_of(self, prompts: Prompts) -> Sequence[Mapping[str, Any]]:
        """The rows of the data set; if it names it, with the prompt as the policy is asked, where a row has no such."""
        if RENDERED not in self.named:
            return prompts.rows
        asked = prompts.rendered or prompts.texts
        return [{RENDERED: text, **row} for text, row in zip(asked, prompts.rows, strict=True)]

    @property
    def has_state(self) -> bool:
        """Whether it is an object with a state. The state of a torch module is its weights, which do not change."""
        if not all(callable(getattr(self._object, name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        return not getattr(self._object.state_dict, "__module__", "").startswith("torch.")

    def state_dict(self) -> dict[str, Any]:
        """A copy of its state. Errors: InputError if this fails, or if JSON cannot restore the state exactly."""
        with users_code("state_dict raised", self._home):
            state = self._run(self._object.state_dict)
            copied: dict[str, Any] = json.loads(json.dumps(state))
        if copied != state and repr(copied) != repr(state):  # NaN is not equal to itself
            raise InputError("state_dict: JSON cannot hold it: use only numbers, texts, lists, and dicts of these")
        return copied

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Errors: InputError if this fails."""
        with users_code("load_state_dict raised", self._home):
            self._run(partial(self._object.load_state_dict, json.loads(json.dumps(state))))

    @staticmethod
    def _values(answer: Any) -> Any:
        """The values of anything that has them in order; a generator or an async function runs here."""
        if inspect.isawaitable(answer):
            answer = _event_loop(threading.get_ident()).run_until_complete(answer)
        unfit = isinstance(answer, str | Mapping | Set)  # which give letters, keys, or values in any order
        return list(answer) if hasattr(answer, "__iter__") and not unfit else answer

    def _run(self, call: Callable[[], Any], limit: float | None = None) -> Any:
        return call() if self._thread is None else self._thread.call(limit, call)


class TRLReward(PluginReward):
    """f(prompts=, completions=, completion_ids=, trainer_state=, log_extra=, log_metric=, **columns), as TRL calls it.

    For rows that are conversations, prompts and completions are lists of messages. The function gets every column of
    the data set, or only those that it names if it has no **kwargs.
    """

    def __init__(self, attribute: Any, options: Mapping[str, Any] | None = None, *limits: Any) -> None:
        """As for `PluginReward`."""
        super().__init__(attribute, options, *limits)
        self.takes = {p.name for p in self.parameters}
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters)
        # An option wins over a column.
        filled = TRL_PROVIDED | (set() if inspect.isclass(attribute) else set(options or {}))
        own = [p for p in self.parameters if p.kind in NAMED and p.name not in filled]
        self.hidden_columns = TRL_HIDDEN | filled
        self.named = [p.name for p in own]
        self.columns, self.defaults = [p.name for p in own if p.default is p.empty], {}

    def columns_of(self, prompts: Prompts) -> dict[str, list[Any]]:
        """Every column that it gets. Errors: InputError if a prompt has no column that it needs."""
        needed = super().columns_of(prompts)
        rows = self.rows_of(prompts)
        names = dict.fromkeys(name for row in rows for name in row if name not in self.hidden_columns)
        taken = [name for name in names if self.takes_all or name in self.takes]
        return needed | {name: [row.get(name) for row in rows] for name in taken}

    def _call(self, responses: Responses) -> Callable[[], Any]:
        from transformers import TrainerState

        prompts, texts, ids = responses.prompts, responses.texts, responses.ids
        hidden = self._home.hidden
        asked = [[_message(*turn) for turn in turns] for turns in prompts.messages]
        arguments = {
            "prompts": [turns or text for turns, text in zip(asked, prompts.texts, strict=True)],
            "completions": [[_message("assistant", x)] if turns else x for turns, x in zip(asked, texts, strict=True)],
            "completion_ids": [list(row) for row in ids],
            "trainer_state": TrainerState(global_step=self.update - 1, max_steps=self.updates),
            "log_extra": lambda name, values: self.extra[name].extend(hidden(str(value)) for value in values),
            "log_metric": lambda name, value: self.logged[name].append(float(value)),
        }
        taken = {name: value for name, value in arguments.items() if self.takes_all or name in self.takes}
        return self._with_options(**self._copied_columns(prompts), **taken)

    @staticmethod
    def _values(answer: Any) -> Any:
        """As for `PluginReward`; nan means no score too."""
        values = PluginReward._values(answer)
        return [None if _is_nan(value) else value for value in values] if isinstance(values, list) else values


class RemoteReward(PluginReward):
    """An `HttpReward`. It gets every column of the data set, or only those that its option `columns` names."""

    def __init__(self, attribute: Any, options: Mapping[str, Any] | None = None, *limits: Any) -> None:
        """As for `PluginReward`."""
        super().__init__(attribute, options, *limits)
        self.columns = self.named = self._object.columns or []
        self.defaults = {}

    def __call__(self, responses: Responses) -> Tensor:
        """As `PluginReward`. Errors: ServiceFailed, also for scores that are no numbers."""
        try:
            return super().__call__(responses)
        except InputError as error:
            raise ServiceFailed(self._home.hidden(f"{self._object.url}: {error}")) from error

    def columns_of(self, prompts: Prompts) -> dict[str, list[Any]]:
        """Every column that is sent. Errors: InputError if a prompt has no column that the config names."""
        if self._object.columns is not None:
            return super().columns_of(prompts)
        names = dict.fromkeys(name for row in prompts.rows for name in row)
        return {name: [row.get(name) for row in prompts.rows] for name in names}

    def _call(self, responses: Responses) -> Callable[[], Any]:
        prompts, texts, ids = responses.prompts, responses.texts, responses.ids
        if self._object.form is None:
            own = {"prompts": prompts.texts, "responses": texts}
        else:  # all tokens, special ones too: there reward models read a text as it is
            rows = [[*asked, *answered] for asked, answered in zip(prompts.ids, ids, strict=True)]
            own = {
                "query": responses.tokenizer.batch_decode(rows, **AS_WRITTEN),
                "prompts": prompts.rendered or prompts.texts,
            }
        return partial(self._object, self.columns_of(prompts) | own, texts)


def _texts_named(parameters: Sequence[inspect.Parameter], *, exactly: bool) -> tuple[str, ...]:
    """The names under which prompts and responses are passed: these, or unless `exactly` the first others.

    Empty: they can only be passed by their places.
    """
    plain = [p.name for p in parameters if p.kind in NAMED]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if len(plain) + any_name < len(parameters):
        return ()
    required = [p.name for p in parameters if p.name in plain and p.default is p.empty]
    others = iter([] if exactly else [name for name in required if name not in TEXTS])
    names = [name if name in plain else next(others, name if any_name else "") for name in TEXTS]
    return tuple(names) if all(names) else ()


def _copied(value: Any) -> Any:
    """A copy of a value, of all that it holds too; one that cannot be copied (a file that is being read) as it is."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_nan(score: Any) -> bool:
    return hasattr(score, "__float__") and getattr(score, "ndim", 0) == 0 and math.isnan(score)


@cache
def _event_loop(_thread: int) -> asyncio.AbstractEventLoop:
    """One event loop for each thread: an async function may keep objects of its loop between calls."""
    return asyncio.new_event_loop()


def _number(score: Any) -> float:
    """The number; NaN for what is not a single number. True is 1."""
    if isinstance(score, str) or not hasattr(score, "__float__"):
        return math.nan
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a row of several numbers
        return math.nan


# ---- a thread with a time limit


class OwnThread:
    """Runs all calls in one separate thread, and abandons a call that takes too long.

    An abandoned call keeps its thread (Python cannot end it). It does not keep the process from ending, and the next
    call gets a new thread.
    """

    def __init__(self, begin: Callable[[], Any] = lambda: None) -> None:
        """`begin`: runs in each new thread first."""
        self._begin = begin
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None

    def call(self, seconds: float | None, function: Callable[[], Any]) -> Any:
        """The function's result, or its exception. Errors: InputError after `seconds` (None = never)."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=_serve, args=(self._calls, device, self._begin), daemon=True).start()
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        if not wait([answer], seconds).done:
            self._calls = None
            raise InputError(f"took longer than {seconds:g} s (reward.time_limit)")
        return answer.result()


def _serve(
    calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]], device: int | None, begin: Callable[[], Any]
) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # by default a new thread uses the first GPU
    begin()
    while True:
        function, answer = calls.get()
        try:
            answer.set_result(function())
        except BaseException as error:  # the caller gets every exception
            answer.set_exception(error)
