"""A reward behind a URL, asked of a real server that fails in every way."""

from __future__ import annotations

import itertools
import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl import remote
from rlhf_kl.errors import InputError, ServiceFailed
from rlhf_kl.plugins import checked_options
from rlhf_kl.remote import HttpReward, asked_pause
from rlhf_kl.rewards.plugin import PluginReward, RemoteReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.types import Prompts, Responses
from tests.made import Make, problem
from tests.servers import Answer, Server, closes, cuts, hangs, says, scores, serving

TEXTS = ["a", "bab", "aab", "", "c a a", "d", "aaaa"]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.01, 0.02))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def reward(url: str, **options: Any) -> RemoteReward:
    return RemoteReward(HttpReward, checked_options(HttpReward, {"url": url, **options}, "reward")[0])


def batch(*texts: str, rows: Any = None, **given: Any) -> Responses:
    count = len(texts)
    prompts = Prompts([f"p{i}" for i in range(count)], [[1]] * count, rows or [{}] * count, [()] * count)
    return Responses(prompts, list(texts), [[2]] * count, **given)


def test_responses_go_in_batches_and_scores_come_back_in_their_order(server: Server) -> None:
    rows = [{"answer": i, "tags": ["x"]} for i in range(7)]
    found = reward(server.url, batch=2, headers={"X-Team": "blue"})(batch(*TEXTS, rows=rows))
    assert found.tolist() == [text.count("a") / 8 for text in TEXTS]
    bodies = sorted((request.body for request in server.requests), key=lambda body: str(body["prompts"]))
    assert bodies[0] == {
        "prompts": ["p0", "p1"],
        "responses": ["a", "bab"],
        "answer": [0, 1],
        "tags": [["x"], ["x"]],
    }
    assert [len(body["responses"]) for body in bodies] == [2, 2, 2, 1]
    assert {request.headers["X-Team"] for request in server.requests} == {"blue"}
    assert {request.headers["Content-Type"] for request in server.requests} == {"application/json"}


def test_null_is_no_score(server: Server) -> None:
    server.plan = [says({"scores": [1, None, True]})]
    found = reward(server.url)(batch("x", "y", "z"))
    assert [found[0], found[2]] == [1.0, 1.0]
    assert math.isnan(found[1])


def test_columns_are_all_or_those_that_are_named(server: Server) -> None:
    rows: list[Any] = [{"answer": 1, "other": 2}, {"answer": 3, "when": 4}]
    reward(server.url)(batch("x", "y", rows=rows))
    named = reward(server.url, columns=["answer", "rendered"])
    named(batch("x", "y", rows=rows))
    sent = [{k: v for k, v in request.body.items() if k not in ("prompts", "responses")} for request in server.requests]
    assert sent == [
        {"answer": [1, 3], "other": [2, None], "when": [None, 4]},
        {"answer": [1, 3], "rendered": ["p0", "p1"]},
    ]
    misspelt = reward(server.url, columns=["answr"])
    assert "mean answer?" in problem(misspelt.columns_of, batch("x", rows=rows[:1]).prompts)


def test_openrlhf_gets_all_tokens_as_text(server: Server, letters: Any, prompts_of: Make) -> None:
    server.usual = scores("rewards", lambda query: float(len(query)))
    responses = Responses(prompts_of("ab", "c"), ["d", "da"], [[6, 2], [6, 3]], letters)
    found = reward(server.url, form="openrlhf")(responses)
    whole = ["<bos>abd<eos>", "<bos>cda"]
    assert server.requests[0].body == {"query": whole, "prompts": ["ab", "c"]}
    assert found.tolist() == [13.0, 8.0]


# ---- what passes


@pytest.mark.parametrize(
    "fault",
    [
        says("busy", 503),
        says("slow down", 429),
        says({"detail": "no"}, 500),
        closes,
        cuts,
        partial(cuts, length=False),
        hangs,
    ],
    ids=["503", "429", "500", "closes", "cuts", "cuts without a length", "hangs"],
)
def test_a_request_is_made_again_after_what_passes(
    server: Server, fault: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    server.plan = [fault, fault]
    with caplog.at_level(logging.WARNING, "rlhf_kl"):
        found = reward(server.url, retries=2, timeout=0.3)(batch("a", "b"))
    assert found.tolist() == [0.125, 0.0]
    assert [request.body["responses"] for request in server.requests] == [["a", "b"]] * 3
    assert [server.url in line for line in caplog.messages] == [True, True]


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_says_how_long_to_wait(server: Server, status: int) -> None:
    server.plan = [says("", status, Retry_After="1")]
    reward(server.url)(batch("a"))
    first, second = (request.time for request in server.requests)
    assert 0.95 < second - first < 3


def test_the_pause_that_a_header_asks_for() -> None:
    assert [asked_pause(text) for text in ("7", "", "soon", "-3", "1.5")] == [7.0, 0.0, 0.0, 0.0, 0.0]
    assert 55 < asked_pause(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert asked_pause(formatdate(time.time() - 60, usegmt=True)) < 0
    assert asked_pause("9" * 30) == 86400.0


def test_pauses_grow(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES", (0.05, 0.15, 0.3))
    server.usual = says("", 500)
    with pytest.raises(ServiceFailed):
        reward(server.url, retries=4)(batch("a"))
    times = [request.time for request in server.requests]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap >= least for gap, least in zip(gaps, (0.05, 0.15, 0.3, 0.3), strict=True)), gaps


# ---- what does not


@pytest.mark.parametrize(
    ("fault", "tries", "words"),
    [
        (says("the model is loading", 503), 3, "after 3 tries: .* 503 .*the model is loading"),
        (says({"detail": "no such token"}, 401), 1, "401 .*no such token"),
        (says("gone", 404, Retry_After="1"), 1, "404 .*gone"),
        (says("", 307, Location="http://x.org/new"), 1, "307 .*http://x.org/new"),
        (hangs, 3, "no answer within 0.2 s"),
        (closes, 3, "closed connection"),
        (cuts, 3, "15 bytes read"),
        (says("<html>welcome</html>"), 1, "<html>welcome"),
        (says([1.0, 2.0]), 1, r"no list 'scores' .*\[1.0, 2.0\]"),
        (says({"rewards": [1.0, 2.0]}), 1, "no list 'scores' .*rewards"),
        (says({"scores": [1.0]}), 1, r"1 scores for 2 .*\[1.0\]"),
        (says({"scores": [1.0] * 3}), 1, "3 scores for 2 "),
        (says({"scores": {"a": 1.0}}), 1, "no list 'scores'"),
        (says({"scores": [1.0, math.nan]}), 1, "'yy' is nan"),
        (says({"scores": [1.0, math.inf]}), 1, "'yy' is inf"),
        (says({"scores": [1.0, "high"]}), 1, "'yy' is 'high'"),
        (says({"scores": [1.0, [2.0]]}), 1, r"'yy' is \[2.0\]"),
    ],
)
def test_a_failure_is_no_score_and_says_what_came(server: Server, fault: Answer, tries: int, words: str) -> None:
    server.usual = fault
    scorers = Scorers(Scorer("terms.x", reward(server.url, retries=2, timeout=0.2)))
    with pytest.raises(ServiceFailed, match=rf"^reward\.terms\.x: .*{words}") as caught:
        scorers(batch("x", "yy"))
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(server.requests) == tries


def test_no_server_at_all() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(ServiceFailed, match=r"after 2 tries: .*[Rr]efused"):
        reward(url, retries=1)(batch("a"))
    with pytest.raises(ServiceFailed, match=r"http://\[x: "):
        reward("http://[x", retries=1)(batch("a"))


def test_one_that_never_trains_ends_nothing(server: Server) -> None:
    server.usual = says("", 404)
    count = PluginReward(lambda prompts, responses: [1.0] * len(responses))
    scorers, failures = Scorers(Scorer("reward", count), Scorer("scorers.far", reward(server.url))), dict[str, str]()
    values = scorers.judge(batch("a", "b"), failures)
    assert values["reward"] == [1.0, 1.0]
    assert all(map(math.isnan, values["far"]))
    assert "404" in failures["far"]


def test_after_a_failure_nothing_more_is_asked(server: Server) -> None:
    server.usual = says("", 400)
    with pytest.raises(ServiceFailed):
        reward(server.url, batch=1)(batch(*["a"] * 200))
    assert len(server.requests) <= remote.AT_ONCE
    time.sleep(0.1)
    assert len(server.requests) <= remote.AT_ONCE


def test_several_requests_are_under_way_at_once(server: Server) -> None:
    together = threading.Barrier(4, timeout=10)

    def answer(handler: Any, body: Any) -> None:
        together.wait()
        scores()(handler, body)

    server.usual = answer
    assert len(reward(server.url, batch=2)(batch(*TEXTS))) == 7


def test_a_signal_ends_the_wait_for_a_server_that_hangs(server: Server) -> None:
    server.usual = hangs

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            reward(server.url, timeout=20.0)(batch(*TEXTS))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 5


# ---- secrets


def test_a_secret_is_sent_and_never_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("RM_TOKEN", "sk-71f3\n")  # as read from a file
    monkeypatch.setenv("RM_KEY", "key-22aa")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server.plan = [says("sk-71f3 is busy", 503)]
    server.usual = says("sk-71f3 and key-22aa are wrong" + "." * 165 + "sk-71f3", 403)
    made = reward(f"{server.url}?key=${{RM_KEY}}", headers={"authorization": "Bearer ${RM_TOKEN}"})
    with caplog.at_level(logging.DEBUG), pytest.raises(ServiceFailed) as caught:
        made(batch("a"))
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer sk-71f3"}
    assert {request.path for request in server.requests} == {"/score?key=key-22aa"}
    assert "${RM_TOKEN} and ${RM_KEY} are wrong" in str(caught.value)
    told = [record.getMessage() for record in caplog.records if record.name == "rlhf_kl"]
    assert len(told) == 1
    assert not any(secret in text for secret in ("71f3", "22aa") for text in [str(caught.value), *told])


def test_what_is_no_header_or_no_address_is_told_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_TOKEN", "sk-71f3\nX-Other: 1")
    options = {"url": "rm:8000", "headers": {"Authorization": "Bearer ${RM_TOKEN}"}, "retries": -1, "batch": 0}
    _, problems = checked_options(HttpReward, options, "reward")
    assert [line.partition(":")[0] for line in problems] == [
        f"reward.{key}" for key in ("url", "headers", "retries", "batch")
    ]
    assert "71f3" not in "".join(problems)


def test_input_errors_are_still_told_before_the_run() -> None:
    with pytest.raises(InputError, match=r"^reward: needs 'answer'"):
        Scorers(Scorer("reward", reward("http://x.org", columns=["answer"]))).columns_of(batch("a").prompts)
