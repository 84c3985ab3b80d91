"""A reward's server of the tests' own, in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Request(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    time: float


Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]  # writes it to the client


def says(value: Any, status: int = 200, **headers: str) -> Answer:
    """An answer: JSON, or a text as it is."""

    def answer(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        handler.send_response(status)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), text)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def scores(key: str = "scores", score: Callable[[str], Any] = lambda text: text.count("a") / 8) -> Answer:
    """The right answer: a score of each response."""

    def answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        says({key: [score(text) for text in body["responses" if key == "scores" else "query"]]})(handler, body)

    return answer


def hangs(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """No answer until the client has gone."""
    handler.connection.settimeout(30)
    with contextlib.suppress(OSError):
        handler.connection.recv(1)


def closes(handler: BaseHTTPRequestHandler, _: dict[str, Any]) -> None:
    """Before the answer."""
    handler.close_connection = True


def cuts(handler: BaseHTTPRequestHandler, _: dict[str, Any], length: bool = True) -> None:
    """In the middle of the answer. `length`: the header tells how long it would have been."""
    handler.send_response(200)
    if length:
        handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [0.5')


class Server:
    """It answers by a plan, and when that is done as usual; `requests` are all that it got."""

    def __init__(self, *plan: Answer, usual: Answer | None = None) -> None:
        self.plan, self.usual = list(plan), usual or scores()
        self.requests: list[Request] = []
        self.lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(Request(self.path, dict(self.headers), body, time.monotonic()))
                    answer = outer.plan.pop(0) if outer.plan else outer.usual
                answer(self, body)

            def log_message(self, *_: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: Any) -> None: ...

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"


@contextlib.contextmanager
def serving(*plan: Answer, usual: Answer | None = None) -> Iterator[Server]:
    server = Server(*plan, usual=usual)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
