"""A real browser over its debugging pipe: the DevTools protocol in JSON, no driver needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PATIENCE = 60.0  # seconds for one answer
OVERLAPS = """
[...document.querySelectorAll('svg.chart')].flatMap(chart => {
  const boxes = [...chart.querySelectorAll('text')].filter(t => t.textContent.trim())
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1)
    .filter(([, q]) => p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 2 && q.top < p.bottom - 2)
    .map(([b]) => chart.ariaLabel + ': ' + a + ' / ' + b));
})
"""


class Browser:
    """One tab, its messages and its requests."""

    def __init__(self, program: str, profile: Path) -> None:
        (read_here, write_there), (read_there, write_here) = os.pipe(), os.pipe()
        words = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        script = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.reader, self.writer = read_here, write_here
        os.set_blocking(self.reader, False)
        self.buffer, self.number, self.events = b"", 0, []
        self.session: str | None = None
        self.loader = ""  # of the page that is open
        tabs = self.call("Target.getTargets")["targetInfos"]
        target = next(tab["targetId"] for tab in tabs if tab["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of one command; events that come on the way are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(time.monotonic() + PATIENCE)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Load a file and wait until it has loaded."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.loader = self.call("Page.navigate", url=page.as_uri())["loaderId"]
        deadline = time.monotonic() + PATIENCE
        while not self._loaded():
            self.events.append(self._next(deadline))

    def _loaded(self) -> bool:
        """Whether this page has loaded: events of the one before may still come."""
        here = False
        for event in self.events:
            if event.get("method") == "Page.frameNavigated":
                here = event["params"]["frame"]["loaderId"] == self.loader
            if here and event.get("method") == "Page.loadEventFired":
                return True
        return False

    def evaluate(self, script: str) -> Any:
        """The value of a script on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def overlaps(self) -> list[str]:
        """Labels of a chart that lie on one another."""
        pairs: list[str] = self.evaluate(OVERLAPS)
        return pairs

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def point_at(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    @property
    def errors(self) -> list[str]:
        """Exceptions of scripts, and what the browser logged as errors (a refused fetch among them)."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    @property
    def requests(self) -> list[str]:
        """Addresses that the page requested."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["request"]["url"] for event in sent if event["loaderId"] == self.loader]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        os.close(self.reader)
        os.close(self.writer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert time.monotonic() < deadline, "no answer from the browser"
            assert self.process.poll() is None, "the browser has ended"
            try:
                self.buffer += os.read(self.reader, 1 << 16)
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self.buffer = self.buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium or Chrome; skips where none is installed."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)} is installed")
    tab = Browser(program, tmp_path_factory.mktemp("profile"))
    yield tab
    tab.close()
