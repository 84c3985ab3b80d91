"""A reward behind a URL (`reward.kind: http`): texts go there by POST as JSON, and their scores come back.

A request that fails is made again where that can help. What fails at last is no score: it ends the run.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, StringConstraints

from rlhf_kl.errors import ServiceFailed
from rlhf_kl.plugins import home_of

AT_ONCE = 8  # requests
PAUSES = (1.0, 3.0, 9.0, 27.0, 60.0)  # seconds before each further try; the last one stays
LONGEST = 86400.0  # pause that a server can ask for, in seconds
SHOWN = 200  # characters of an answer in a message

Url = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^(https?://|\$\{)")]
HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
HeaderValue = Annotated[str, StringConstraints(strip_whitespace=True, pattern=r"^[\t\x20-\x7e\x{a0}-\x{ff}]*$")]


class TryFailed(Exception):
    """What went wrong in one try; `pause`: seconds until the next one, at least. None = it would fail again."""

    def __init__(self, fault: str, pause: float | None = None) -> None:
        self.pause = pause
        super().__init__(hidden(fault))


class HttpReward:
    """Asks a server for scores; no message shows what its options took from the environment."""

    def __init__(
        self,
        url: Url,
        headers: dict[HeaderName, HeaderValue] | None = None,
        timeout: PositiveFloat = 60.0,
        retries: NonNegativeInt = 5,
        batch: PositiveInt = 16,
        form: Literal["openrlhf"] | None = None,
        columns: list[str] | None = None,
    ) -> None:
        """`timeout`: seconds. `batch`: responses in a request. `columns`: of the data that are sent; None = all.

        `form`: None = {prompts, responses} -> {scores}; openrlhf = {query, prompts} -> {rewards}.
        """
        self.url, self.timeout, self.retries, self.batch, self.columns = url, timeout, retries, batch, columns
        self.form, self.key = form, "scores" if form is None else "rewards"  # of the answer
        self.headers = {"Content-Type": "application/json"} | (headers or {})

    def __call__(self, body: Mapping[str, Sequence[Any]], texts: Sequence[str]) -> list[Any]:
        """What the server gives each of these responses; `body` has a value for each of them under every key.

        Errors: ServiceFailed with what the server said last.
        """
        ended, told = threading.Event(), set[int]()

        def ask(start: int) -> list[Any]:
            rows = slice(start, start + self.batch)
            sent = json.dumps({name: values[rows] for name, values in body.items()}, default=str)
            return self._scores(sent.encode(), len(texts[rows]), ended, told)

        starts = range(0, len(texts), self.batch)
        with ThreadPool(min(AT_ONCE, len(starts))) as pool:  # of daemons: a server that hangs keeps no process alive
            try:
                return [score for scores in pool.imap(ask, starts) for score in scores]
            finally:
                ended.set()

    def _scores(self, sent: bytes, count: int, ended: threading.Event, told: set[int]) -> list[Any]:
        """The answer to one request. `told`: the tries that have been logged as failed, of any request."""
        tries, pause = 0, 0.0
        while not ended.wait(pause):
            try:
                return self._ask(sent, count)
            except TryFailed as error:
                tries += 1
                if error.pause is None or tries > self.retries:
                    ended.set()
                    after = f"after {tries} tries: " if tries > 1 else ""
                    raise ServiceFailed(f"{after}{error}") from error
                pause = max(error.pause, PAUSES[min(tries, len(PAUSES)) - 1])
                if tries not in told:
                    told.add(tries)
                    again = f"try {tries + 1} of {self.retries + 1} in {pause:.0f} s"
                    logging.getLogger("rlhf_kl").warning(f"the reward's server: {error}; {again}")
        return []  # another request has failed

    def _ask(self, sent: bytes, count: int) -> list[Any]:
        """The answer, in one try. Errors: TryFailed."""
        import requests

        own = "authorization" in map(str.lower, self.headers)  # a .netrc would replace it
        options: dict[str, Any] = {"auth": (lambda request: request) if own else None, "allow_redirects": False}
        try:
            answer = requests.post(self.url, sent, headers=self.headers, timeout=self.timeout, **options)
        except requests.Timeout:
            raise TryFailed(f"{self.url}: no answer within {self.timeout:g} s", 0.0) from None
        except ValueError as error:  # a URL that is none
            raise TryFailed(f"{self.url}: {error}") from error
        except requests.RequestException as error:
            raise TryFailed(f"{self.url}: {cause_of(error)}", 0.0) from error
        status, text = answer.status_code, answer.content[: 8 * SHOWN].decode("utf-8", "replace")
        said = " ".join(hidden(text).split())[:SHOWN]  # hidden first: half a secret would not be found
        if not 200 <= status < 300:
            passes = status == 429 or status >= 500
            pause = asked_pause(answer.headers.get("Retry-After", "")) if passes else None
            raise TryFailed(f"{self.url}: {status} {answer.reason}: {answer.headers.get('Location', said)}", pause)
        try:
            values = answer.json()
        except ValueError:
            whole = {"Content-Length", "Transfer-Encoding"} & answer.headers.keys()  # else it may have been cut off
            raise TryFailed(f"{self.url}: answered no JSON: {said!r}", None if whole else 0.0) from None
        scores = values.get(self.key) if isinstance(values, dict) else None
        if not isinstance(scores, list) or len(scores) != count:
            came = f"{len(scores)} {self.key}" if isinstance(scores, list) else f"no list {self.key!r}"
            raise TryFailed(f"{self.url}: answered {came} for {count} responses: {said!r}")
        return scores


def hidden(text: str) -> str:
    """A text without the values of variables."""
    return home_of(HttpReward).hidden(text)


def asked_pause(after: str) -> float:
    """Seconds to wait by a header Retry-After: a number or a date; 0 without."""
    seconds = float(after) if after.isdecimal() else 0.0
    with suppress(ValueError):
        seconds = seconds or parsedate_to_datetime(after).timestamp() - time.time()
    return min(seconds, LONGEST)


def cause_of(error: BaseException) -> str:
    """What an exception began with: those of libraries wrap one another."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"
