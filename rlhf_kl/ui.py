"""What a person sees of a command: the messages of `log`, progress, the live view of a training run, its summary.

Everything goes to stderr: results on stdout stay clean. Without a terminal plain lines replace the live view.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from rlhf_kl.status import RunStatus, duration
from rlhf_kl.text import format_number, safe_text

log = logging.getLogger("rlhf_kl")
HEADER_EVERY = 20  # lines of a log
LOG_ROWS = 100  # of a whole run
LOG_SECONDS = 10.0  # at least, between two lines on the progress of one thing
LOG_SHARE = 0.1  # of the whole, between two lines; or a minute


class Advance(Protocol):
    """Moves a progress bar on; `note` (such as a loss) replaces the one shown before."""

    def __call__(self, steps: int = 1, note: str | None = None) -> None: ...


class Screen:
    """What a command writes to stderr: the words of `log`, progress, the live view of a run.

    Any text may come from outside (prompts, file names): markup and control characters are shown as text.
    """

    def __init__(self) -> None:
        self.start(quiet=True)

    def start(self, quiet: bool = False, console: Console | None = None) -> None:
        """Begin a command. `quiet` shows only alerts, errors and the summary, which then goes to stdout."""
        if console is None:
            console = Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())
        self._console = console
        self._terminal = console.is_terminal and not console.is_dumb_terminal
        self._quiet, self._moves = quiet, self._terminal and not quiet
        self._status: RunStatus | None = None
        self._lines, self._shown = 0, 0  # rows of the log, and the step of the last
        self._live: Live | None = None
        self._bars: Progress | None = None
        self._now: tuple[str, float] | None = None  # what goes on, and since when
        log.setLevel(logging.WARNING if quiet else logging.INFO)

    def silence(self) -> None:
        """Show nothing from now on: another process of the group shows it."""
        self._quiet, self._moves = True, False
        log.setLevel(logging.CRITICAL)

    # ---- words

    def write(self, record: logging.LogRecord) -> None:
        """Show a message; a warning is an alert, a message that needs action."""
        message = Text(safe_text(record.getMessage(), keep_newlines=True))
        if record.levelno < logging.WARNING:
            self._print(message, soft_wrap=not self._terminal)
            return
        mark, style = ("error", "bold red") if record.levelno >= logging.ERROR else ("alert", "yellow")
        if not self._terminal:
            self._print(Text(f"{mark}: ") + message)
            return
        table = _two_columns(style, padding=1)
        table.add_row(f"{mark}:", message)
        self._console.print(table)

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
        self._pairs(figures)
        if texts is not None:
            self._console.print(texts, "")
        if next_steps:
            self._print(Text("Next:", style="bold" if self._terminal else ""))
        for step in next_steps:
            self._print(Text(f"  {safe_text(step)}"))

    # ---- progress

    @contextlib.contextmanager
    def progress(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Show a bar over `total` steps (None: unknown) while the block runs; nested bars are below it."""
        began = time.monotonic()
        if self._moves:
            with self._bar(safe_text(description), total) as advance:
                yield advance
        else:
            log.info(f"{description} ...")
            yield self._log_progress(description, total)
        log.info(f"{description}: done in {duration(time.monotonic() - began)}")

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """A moving bar in a terminal while the block runs; a line at its end if that took ten seconds."""
        began = time.monotonic()
        with self._bar(safe_text(message), None) if self._moves else contextlib.nullcontext():
            yield
        if (seconds := time.monotonic() - began) >= LOG_SECONDS:
            log.info(f"{message}: done in {duration(seconds)}")

    @contextlib.contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Advance]:
        bars = self._bars = self._bars or self._new_bars()
        task = bars.add_task(name, total=total, note="")

        def advance(steps: int = 1, note: str | None = None) -> None:
            bars.advance(task, steps)
            if note is not None:
                bars.update(task, note=safe_text(note))

        self._start_live()
        try:
            yield advance
        finally:
            bars.remove_task(task)
            if not bars.tasks and self._status is None:
                self._stop_live()

    def _log_progress(self, name: str, total: int | None) -> Advance:
        """A line every tenth or every minute, none for what takes less than ten seconds."""
        done, shown, last = 0, 0, time.monotonic()

        def advance(steps: int = 1, note: str | None = None) -> None:
            nonlocal done, shown, last
            done, now = done + steps, time.monotonic()
            waited = now - last
            far = total is None or done - shown >= LOG_SHARE * total
            if waited >= 6 * LOG_SECONDS or (waited >= LOG_SECONDS and far):
                shown, last = done, now
                share = f"/{total} ({done / total:.0%})" if total else ""
                log.info(f"{name}: {done}{share}{f', {note}' if note else ''}")

        return advance

    # ---- the run

    @contextlib.contextmanager
    def live(self, status: RunStatus) -> Iterator[None]:
        """Show the rows of a run while the block runs."""
        self._status = status
        try:
            yield
        finally:
            self._stop_live()

    def show_work(self, message: str) -> None:
        """What the run does from now on, shown in a terminal with its seconds until the next call."""
        self._now = safe_text(message), time.monotonic()
        if self._moves:
            self._start_live().refresh()

    def show_row(self, row: Mapping[str, Any]) -> None:
        """Show a row of `metrics.jsonl`."""
        assert self._status is not None, "within live()"
        self._status.update(row)
        if self._moves:
            self._start_live().refresh()
        if self._moves or self._quiet:
            return
        step, total = int(row.get("step") or 0), self._status.total
        if self._lines and step < total and step - self._shown < total / LOG_ROWS:
            return
        self._shown = step
        if self._lines % HEADER_EVERY == 0:
            self._print(Text(self._status.header()))
        self._lines += 1
        self._print(Text(self._status.line()))

    def _start_live(self) -> Live:
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._view,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # a piped stdout holds results
                redirect_stderr=True,
            )
            self._live.start()
        return self._live

    def _stop_live(self) -> None:
        if self._live is not None:
            self._now = None  # not in the last frame, which stays
            self._live.stop()
            self._live = self._bars = None

    def _new_bars(self) -> Progress:
        name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        return Progress(
            TextColumn("{task.description}", markup=False, table_column=name),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(14),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [self._status.table()] if self._status else []
        if self._now is not None:
            message, since = self._now
            parts.append(Text(f"{message}, {duration(time.monotonic() - since)}", style="dim", overflow="ellipsis"))
        if self._bars is not None and self._bars.tasks:
            parts.append(self._bars.get_renderable())
        return Group(*parts)

    # ---- printing

    def _print(self, text: Text, *, soft_wrap: bool = True) -> None:
        """Soft wrap: commands and paths can be copied whole, and a log has one line per message."""
        self._console.print(text, soft_wrap=soft_wrap, highlight=False)

    def _pairs(self, pairs: Mapping[str, object]) -> None:
        rows = [(f"  {safe_text(str(name))}", _value(value)) for name, value in pairs.items()]
        width = max((len(name) for name, _ in rows), default=0)
        table = _two_columns("cyan", padding=2)
        for name, value in rows:
            if self._terminal:
                table.add_row(Text(name), Text(value))
            else:
                self._print(Text(f"{name:<{width}}  {value}"))
        if self._terminal:
            self._console.print(table)


def _two_columns(style: str, padding: int) -> Table:
    return Table.grid(Column(style=style, no_wrap=True), Column(overflow="fold"), padding=(0, padding))


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
start, silence, live = _screen.start, _screen.silence, _screen.live
progress, waiting, show_work, show_row = _screen.progress, _screen.waiting, _screen.show_work, _screen.show_row
print_summary = _screen.print_summary
