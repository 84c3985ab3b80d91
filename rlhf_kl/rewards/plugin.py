"""A user's reward function or class: its options, its thread, its state, and the checks of its scores."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future, wait
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError, suggestion
from rlhf_kl.plugins import hidden, users_code
from rlhf_kl.types import Prompts, Responses


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
        options = dict(options or {})
        self.columns = self.named = column_parameters(attribute, options)
        self._thread = OwnThread() if time_limit is not None else None
        self._limit = time_limit
        self._object: Any = attribute
        if inspect.isclass(attribute):
            with users_code(f"{attribute.__name__} cannot be created: raised"):
                self._object = self._run(partial(attribute, **options))
        self._function: Any = self._object if inspect.isclass(attribute) else partial(attribute, **options)

    def __call__(self, responses: Responses) -> Tensor:
        """Scores (B,) float32; NaN where it returned None.

        Errors: InputError with its fault: the line that raised, the missing column, or the score that is no number.
        """
        texts = responses.texts
        batch = f"{len(texts)} responses, the first of them {texts[0][:60]!r}"
        call = self._call(responses)
        try:
            with users_code("raised"):
                returned = self._run(lambda: self._values(call()), self._limit)
        except TimeLimitExceeded as error:
            raise InputError(f"{error} (reward.time_limit) on {batch}") from error
        if not isinstance(returned, list):
            raise InputError(f"returned {type(returned).__name__}, not one number per response, on {batch}")
        if len(returned) != len(texts):
            raise InputError(f"returned {len(returned)} scores for {batch}")
        scores = torch.tensor([math.nan if score is None else _number(score) for score in returned])
        for score, raw, response in zip(scores.tolist(), returned, texts, strict=True):
            if raw is not None and not math.isfinite(score):
                shown = hidden(repr(raw))
                raise InputError(f"the score of {response[:60]!r} is {shown}, not a finite number")
        return scores

    def _call(self, responses: Responses) -> Callable[[], Any]:
        prompts = responses.prompts
        return partial(self._function, list(prompts.texts), list(responses.texts), **self.columns_of(prompts))

    def columns_of(self, prompts: Prompts) -> dict[str, list[Any]]:
        """Column of the data set -> its values, one a prompt. Errors: InputError if a prompt has no such column."""
        for text, row in zip(prompts.texts, prompts.rows, strict=True):
            for name in self.columns:
                if name not in row:
                    raise InputError(
                        f"needs {name!r}, neither an option in the config nor a column of the prompt "
                        f"{text[:60]!r}{suggestion(name, row)}"
                    )
        return {name: [row[name] for row in prompts.rows] for name in self.columns}

    @property
    def has_state(self) -> bool:
        """Whether it is an object with a state. The state of a torch module is its weights, which do not change."""
        if not all(callable(getattr(self._object, name, None)) for name in ("state_dict", "load_state_dict")):
            return False
        return not getattr(self._object.state_dict, "__module__", "").startswith("torch.")

    def state_dict(self) -> dict[str, Any]:
        """A copy of its state. Errors: InputError if this fails, or if JSON cannot restore the state exactly."""
        with users_code("state_dict raised"):
            state = self._run(self._object.state_dict)
            copy: dict[str, Any] = json.loads(json.dumps(state))
        if copy != state and repr(copy) != repr(state):  # NaN is not equal to itself
            raise InputError("state_dict: JSON cannot hold it: use only numbers, texts, lists, and dicts of these")
        return copy

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. Errors: InputError if this fails."""
        with users_code("load_state_dict raised"):
            self._run(partial(self._object.load_state_dict, json.loads(json.dumps(state))))

    @staticmethod
    def _values(answer: Any) -> Any:
        """The values of anything that has them in order; a generator or an async function runs here."""
        if inspect.isawaitable(answer):
            answer = _event_loop(threading.get_ident()).run_until_complete(answer)
        # Iterating one of these gives keys, names of columns, bytes, or values in any order.
        unfit = isinstance(answer, str | bytes | bytearray | memoryview | Mapping | Set) or hasattr(answer, "columns")
        return list(answer) if hasattr(answer, "__iter__") and not unfit else answer

    def _run(self, call: Callable[[], Any], limit: float | None = None) -> Any:
        return call() if self._thread is None else self._thread.call(limit, call)


def column_parameters(attribute: Any, options: Mapping[str, Any]) -> list[str]:
    """The columns of the data set that a reward function or class names.

    They are the parameters without a default, except prompts and responses, that the config does not set; for a class,
    the parameters of its `__call__`.
    """
    is_class = inspect.isclass(attribute)
    called = attribute.__call__ if is_class else attribute
    try:
        parameters = list(inspect.signature(called).parameters.values())
    except ValueError:  # written in C
        return []
    provided = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: 3 if is_class else 2]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in provided]
    return [p.name for p in named if p.default is p.empty and (is_class or p.name not in options)]


@cache
def _event_loop(_thread: int) -> asyncio.AbstractEventLoop:
    """One event loop for each thread: an async function may keep objects of its loop between calls."""
    return asyncio.new_event_loop()


def _number(score: Any) -> float:
    """The number, inf beyond float32; NaN for what is not a single number. True is 1."""
    if isinstance(score, str) or not hasattr(score, "__float__"):
        return math.nan
    try:
        return float(torch.tensor(float(score), dtype=torch.float32))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # a row of several numbers
        return math.nan


# ---- a thread with a time limit


class TimeLimitExceeded(InputError):
    """A call took longer than its time limit."""


class OwnThread:
    """Runs all calls in one separate thread, and abandons a call that takes too long.

    An abandoned call keeps its thread (Python cannot end it). It does not keep the process from ending, and the next
    call gets a new thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] | None = None

    def call(self, seconds: float | None, function: Callable[[], Any]) -> Any:
        """The function's result, or its exception. Errors: TimeLimitExceeded after `seconds` (None = never)."""
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=_serve, args=(self._calls, device), daemon=True).start()
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        if not wait([answer], seconds).done:
            self._calls = None
            raise TimeLimitExceeded(f"took longer than {seconds:g} s")
        return answer.result()


def _serve(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # by default a new thread uses the first GPU
    while True:
        function, answer = calls.get()
        try:
            answer.set_result(function())
        except BaseException as error:  # the caller gets every exception
            answer.set_exception(error)
