"""Progress in a notebook: the lines of all bars that run, in one output of the cell that changes."""

from __future__ import annotations

import sys
import time
from typing import Any

WIDTH = 24  # characters of a full bar
EVERY = 0.25  # seconds between two changes


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookBars:
    """Lines by number; the output appears with the first one, and is empty when none is left."""

    def __init__(self) -> None:
        self._lines: dict[int, str] = {}
        self._count = 0
        self._output: Any = None
        self._changed = 0.0

    def add(self) -> int:
        """A number for one more line, below the others."""
        self._count += 1
        self._lines[self._count] = ""
        return self._count

    def change(self, number: int, text: str, done: int, total: int | None) -> None:
        """Show a line again, soon enough. `total`: None = unknown."""
        share = min(1.0, done / total) if total else 0.0
        full = round(WIDTH * share)
        self._lines[number] = f"{text} {'█' * full}{'░' * (WIDTH - full)} {share:.0%}" if total else f"{text} ..."
        if (now := time.monotonic()) - self._changed >= EVERY:
            self._changed = now
            self._show()

    def remove(self, number: int) -> None:
        """This line is done."""
        del self._lines[number]
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        shown = {"text/plain": "\n".join(self._lines.values())}
        if self._output is None:
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)
