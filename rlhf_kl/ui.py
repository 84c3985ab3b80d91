"""What a person sees of a command: the messages of `log`, progress, the updates of a training run, its summary.

Everything goes to stderr: results on stdout stay clean. A terminal has bars besides the lines.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from rlhf_kl.display import NotebookBars, in_notebook
from rlhf_kl.text import duration, format_number, hanging, read_number, safe_text

log = logging.getLogger("rlhf_kl")
HEADER_EVERY = 20  # lines on updates
LOG_ROWS = 100  # such lines of a whole run
COLUMNS = {"update": 9, "episodes": 9, "score": 8, "KL": 8, "KL/tgt": 7, "beta": 8, "ppl": 7, "tok/s": 7, "left": 8}
WIDE_ONLY = ("episodes", "tok/s")  # columns that a narrow terminal has no room for
LINE_SECONDS = 60.0  # at least, between two lines on the progress of one thing
SLOW_SECONDS = 10.0  # of what is told when it is done


class Advance(Protocol):
    """Moves a progress bar on; `note` (such as a loss) replaces the one shown before."""

    def __call__(self, steps: int = 1, note: str | None = None) -> None: ...


def _no_bar(steps: int = 1, note: str | None = None) -> None:
    """Where there is no terminal."""


class RunTable:
    """The rows of a run as lines in fixed columns: all of a short run, about a hundred of a long one."""

    def __init__(self, total: int, target: float, unit: str) -> None:
        """`total`: updates of the run. `target` in nats per `unit`."""
        self.total, self.target, self.unit = total, target, unit
        narrow = _screen.width < sum(COLUMNS.values())
        self.columns = {name: width for name, width in COLUMNS.items() if not (narrow and name in WIDE_ONLY)}
        self.lines = 0
        self.shown = 0  # step of the last line
        self.times: list[float] = []  # seconds of each update

    def show(self, row: Mapping[str, Any]) -> str:
        """Take a row of `metrics.jsonl`; returns its figures for a bar."""
        number = partial(read_number, row)
        step, kl, beta, score = row["step"], number(f"kl/{self.unit}"), number("kl/coef"), number("objective/scores")
        self.times += [] if (seconds := number("time/step_s")) is None else [seconds]
        kl = kl and round(kl, 7)  # the sums of float32 leave a little at 0
        far = step - self.shown >= self.total / LOG_ROWS
        if far or self.lines == 0 or step == self.total or number("eval/perplexity") is not None:
            if self.lines % HEADER_EVERY == 0:
                self._line({name: name for name in COLUMNS} | {"KL": f"KL/{self.unit[:3]}"})
            speed = number("perf/tokens_per_s")
            self._line(
                {
                    "update": f"{step}/{self.total}",
                    "episodes": f"{row.get('episodes', '-')}",
                    "score": format_number(score, 4),
                    "KL": format_number(kl, 4),
                    "KL/tgt": "-" if kl is None else f"{kl / self.target:.2f}x",
                    "beta": format_number(beta, 4),
                    "ppl": format_number(number("eval/perplexity")),
                    "tok/s": "-" if speed is None else f"{speed:.0f}",
                    "left": duration((self.total - step) * fmean(self.times)) if self.times else "-",
                }
            )
            self.lines, self.shown = self.lines + 1, step
        return f"KL {format_number(kl)}/{self.target:.3g} beta {format_number(beta)} score {format_number(score)}"

    def _line(self, cells: Mapping[str, str]) -> None:
        log.info("".join(f" {cells[name]:>{width - 1}}" for name, width in self.columns.items()))


class Screen:
    """What a command writes to stderr: the words of `log`, progress, the updates of a run.

    Any text may come from outside (prompts, file names): markup and control characters are shown as text.
    """

    def __init__(self) -> None:
        self.start(quiet=True)

    def start(self, quiet: bool = False, console: Console | None = None) -> None:
        """Begin a command. `quiet` shows only alerts, errors and the summary, which then goes to stdout."""
        notebook = console is None and in_notebook()
        if notebook:  # whose stderr has the colour of errors
            console = Console(file=sys.stdout, highlight=False, force_terminal=False, force_jupyter=False, width=100)
        elif console is None:
            console = Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())
        self._console = console
        self._terminal = console.is_terminal and not console.is_dumb_terminal
        self._quiet, self._moves = quiet, self._terminal and not quiet
        self._bars: Progress | None = None
        self._cell = NotebookBars() if notebook and not quiet else None
        log.setLevel(logging.WARNING if quiet else logging.INFO)

    @property
    def width(self) -> float:
        """Columns of the terminal; a log has no limit."""
        return self._console.width if self._terminal else math.inf

    def silence(self) -> None:
        """Show nothing from now on: another process of the group shows it."""
        self._quiet, self._moves = True, False
        log.setLevel(logging.CRITICAL)

    # ---- words

    def write(self, record: logging.LogRecord) -> None:
        """Show a message; a warning is an alert, a message that needs action."""
        message = safe_text(record.getMessage(), keep_newlines=True)
        if record.levelno < logging.WARNING:
            self._print(Text(message), soft_wrap=not self._terminal)
        else:
            error = record.levelno >= logging.ERROR
            self._print_pair("error: " if error else "alert: ", message, "bold red" if error else "yellow")

    def print_summary(
        self, figures: Mapping[str, object], next_steps: Sequence[str] = (), texts: RenderableType | None = None
    ) -> None:
        """Show the last figures of the run, some of its texts, and next steps (commands or paths)."""
        if self._quiet:
            for name, value in figures.items():
                print(f"{safe_text(name)}: {_value(value)}")
            return
        if self._terminal:
            self._console.print()
        names = {name: f"  {safe_text(name)}" for name in figures}
        for name, value in figures.items():
            self._print_pair(f"{names[name]:<{max(map(len, names.values()))}}  ", _value(value), "cyan")
        if texts is not None:
            self._console.print(texts, "")
        if next_steps:
            self._print(Text("Next:", style="bold" if self._terminal else ""))
        for step in next_steps:
            self._print(Text(f"  {safe_text(step)}"))

    # ---- progress

    @contextlib.contextmanager
    def progress(self, name: str, total: int | None = None) -> Iterator[Advance]:
        """A bar over `total` steps (None: unknown) while the block runs; in a log a line a minute as it advances.

        A line at the end if that took ten seconds.
        """
        began = told = time.monotonic()
        done = 0

        def tell(steps: int = 1, note: str | None = None) -> None:
            nonlocal done, told
            done, now = done + steps, time.monotonic()
            if now - told >= LINE_SECONDS:
                told = now
                share = f"/{total} ({done / total:.0%})" if total else ""
                log.info(f"{name}: {done}{share}{f', {note}' if note else ''}")

        with self.bar(name, total) as advance:
            yield advance if self._moves or self._cell else tell
        if (seconds := time.monotonic() - began) >= SLOW_SECONDS:
            log.info(f"{name}: done in {duration(seconds)}")

    @contextlib.contextmanager
    def bar(self, name: str, total: int | None = None, done: int = 0) -> Iterator[Advance]:
        """A bar over `total` steps, `done` of them before, while the block runs; a terminal or a notebook shows it."""
        if self._cell is not None:
            with self._line_in_cell(self._cell, name, total, done) as advance_line:
                yield advance_line
            return
        if not self._moves:
            yield _no_bar
            return
        bars = self._bars = self._bars or self._new_bars()
        task = bars.add_task("", total=total, completed=done)
        figures = ""

        def advance(steps: int = 1, note: str | None = None) -> None:
            nonlocal done, figures
            done += steps
            figures = figures if note is None else note
            count = f" {done}/{total}" if total else f" {done}" * (done > 0)
            description = safe_text(f"{name}{count} {figures}")
            bars.update(task, advance=steps, description=description, refresh=note is not None)

        advance(0)
        bars.start()
        try:
            yield advance
        finally:
            bars.remove_task(task)
            if not bars.tasks:
                bars.stop()
                self._bars = None

    @contextlib.contextmanager
    def _line_in_cell(self, cell: NotebookBars, name: str, total: int | None, done: int) -> Iterator[Advance]:
        number, figures = cell.add(), ""

        def advance(steps: int = 1, note: str | None = None) -> None:
            nonlocal done, figures
            done += steps
            figures = figures if note is None else note
            count = f" {done}/{total}" if total else ""
            cell.change(number, safe_text(f"{name}{count} {figures}").rstrip(), done, total)

        advance(0)
        try:
            yield advance
        finally:
            cell.remove(number)

    def _new_bars(self) -> Progress:
        text = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False, table_column=text),
            BarColumn(min(40, max(3, self._console.width - 64))),  # what the figures of a run leave
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),  # a piped stdout holds results
            speed_estimate_period=600,
            refresh_per_second=4,
        )

    # ---- printing

    def _print(self, text: Text, *, soft_wrap: bool = True) -> None:
        """Soft wrap: commands and paths can be copied whole, and a log has one line per message."""
        self._console.print(text, soft_wrap=soft_wrap, highlight=False)

    def _print_pair(self, name: str, value: str, style: str) -> None:
        """A name and its value, whose lines stand below each other in a terminal."""
        value = hanging(value, self._console.width if self._terminal else None, len(name))
        self._print(Text.assemble((name, style if self._terminal else ""), value))


def _value(value: object) -> str:
    if isinstance(value, float):
        return format_number(value, 4)
    return safe_text("-" if value is None else str(value))


class _Words(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _screen.write(record)


log.addHandler(_Words())
log.propagate = False
_screen = Screen()
start, silence, print_summary = _screen.start, _screen.silence, _screen.print_summary
progress, bar = _screen.progress, _screen.bar
