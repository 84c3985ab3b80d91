"""What a person sees of a command: messages, progress, the live view of a training run, its summary.

Everything goes to stderr: results on stdout stay clean. Without a terminal plain lines replace the live view.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from rlhf_kl.run.figures import format_number, read_number
from rlhf_kl.run.text import safe_text

__all__ = ["Advance", "TrainingDisplay", "safe_text"]

_IN_BAND = 0.25
_HEADER_EVERY = 20
_PLAIN_PROGRESS_SECONDS = 10.0
_PLAIN_COLUMNS = (
    ("update", 9),
    ("episodes", 9),
    ("score", 8),
    ("KL", 8),
    ("KL/tgt", 7),
    ("beta", 8),
    ("ppl", 7),
    ("tok/s", 7),
    ("left", 8),
)


class Advance(Protocol):
    """Moves a progress bar on; `note` (a loss, say) replaces the one shown before."""

    def __call__(self, steps: int = 1, note: str | None = None) -> None: ...


class TrainingDisplay:
    """Context manager for all that a command says while it works.

    Any text may come from outside (prompts, file names): markup and control characters are shown as text.
    """

    def __init__(
        self,
        quiet: bool = False,
        total_updates: int = 0,
        target: float | None = None,
        unit: Literal["token", "sequence"] = "token",
        console: Console | None = None,
    ) -> None:
        """`quiet` leaves alerts and errors. `target`: KL target in nats per `unit`, None without one."""
        if console is None:
            console = Console(stderr=True, highlight=False, force_terminal=sys.stderr.isatty())
        self._console = console
        self._live_view = console.is_terminal and not console.is_dumb_terminal
        self._unicode = console.encoding.lower().startswith("utf")
        self._quiet = quiet
        self._total = total_updates
        self._target = target
        self._unit = unit
        self._live: Live | None = None
        self._bars: Progress | None = None
        self._row: Mapping[str, Any] = {}
        self._start: dict[str, float] = {}
        self._perplexity: float | None = None
        self._lines = 0
        self._last_update = time.monotonic()
        self._seconds: deque[float] = deque(maxlen=10)

    def __enter__(self) -> TrainingDisplay:
        self._last_update = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_live()

    # ---- words

    def message(self, text: str) -> None:
        """One thing to know."""
        if not self._quiet:
            words = Text(safe_text(text, keep_newlines=True))
            self._console.print(words, soft_wrap=not self._live_view, highlight=False)

    def alert(self, text: str) -> None:
        """Something to act on; shown with `quiet` too."""
        self._marked("alert", "yellow", text)

    def error(self, text: str) -> None:
        """What went wrong; shown with `quiet` too."""
        self._marked("error", "bold red", text)

    def counts_table(self, counts: Mapping[str, object]) -> None:
        """What the run will do, in numbers, before it starts."""
        if not self._quiet:
            self._pairs(counts)

    def summary(self, figures: Mapping[str, object], next_steps: Sequence[str] = ()) -> None:
        """The last figures of the run and where to look next (a command or a path each)."""
        self._stop_live()
        if self._quiet:
            return
        if self._live_view:
            self._console.print()
        self._pairs(figures)
        if next_steps:
            self._print(Text("Next:", style="bold" if self._live_view else ""))
        for step in next_steps:
            self._print(Text(f"  {safe_text(step)}"))

    # ---- progress

    @contextlib.contextmanager
    def progress(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """A bar over `total` steps (None: unknown) while the block runs; nested ones stand below it."""
        name = safe_text(description)
        began = time.monotonic()
        if self._quiet:
            yield _no_advance
            return
        if self._live_view:
            bars = self._bars = self._bars or self._new_bars()
            task = bars.add_task(name, total=total, note="")
            self._start_live()
            try:
                yield _bar_advance(bars, task)
            finally:
                bars.remove_task(task)
                if not bars.tasks and not self._row:
                    self._stop_live()
        else:
            self._print(Text(f"{name} ..."))
            yield _PlainAdvance(self, description, total)
        self.message(f"{description}: done in {_duration(time.monotonic() - began)}")

    # ---- the run

    def start_from(self, row: Mapping[str, Any]) -> None:
        """On resume: the first row of the run, which 'since the start' then refers to."""
        self._remember_start(row)
        self._last_update = time.monotonic()

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of `metrics.jsonl`."""
        now = time.monotonic()
        seconds = read_number(row, "time/step_s")
        self._seconds.append(now - self._last_update if seconds is None else seconds)
        self._last_update = now
        self._row = row
        self._remember_start(row)
        perplexity = read_number(row, "eval/perplexity")
        self._perplexity = self._perplexity if perplexity is None else perplexity
        if self._quiet:
            return
        if self._live_view:
            self._start_live()
            if self._live is not None:
                self._live.refresh()
        else:
            self._plain_row()

    def _remember_start(self, row: Mapping[str, Any]) -> None:
        for key in ("objective/scores", "objective/gold", "eval/perplexity"):
            if (value := read_number(row, key)) is not None:
                self._start.setdefault(key, value)

    def _seconds_left(self) -> float | None:
        done = read_number(self._row, "step")
        if done is None or not self._seconds or not self._total:
            return None
        return max(0.0, self._total - done) * sum(self._seconds) / len(self._seconds)

    def _kl(self) -> tuple[float | None, float | None]:
        """The KL in the target's unit, and as a multiple of the target."""
        kl = read_number(self._row, f"kl/{self._unit}")
        return kl, None if kl is None or not self._target else kl / self._target

    # ---- plain lines

    def _plain_row(self) -> None:
        if self._lines % _HEADER_EVERY == 0:
            names = [name for name, _ in _PLAIN_COLUMNS]
            names[names.index("KL")] = f"KL/{self._unit[:3]}"
            self._print(Text(_columns(names)))
        self._lines += 1
        kl, ratio = self._kl()
        left = self._seconds_left()
        step = f"{self._row.get('step', '-')}"
        cells = [
            f"{step}/{self._total}" if self._total else step,
            f"{self._row.get('episodes', '-')}",
            format_number(read_number(self._row, "objective/scores"), 4),
            format_number(kl, 4),
            "-" if ratio is None else f"{ratio:.2f}x",
            format_number(read_number(self._row, "kl/coef"), 4),
            format_number(read_number(self._row, "eval/perplexity")),
            _whole(read_number(self._row, "perf/tokens_per_s")),
            "-" if left is None else _duration(left),
        ]
        self._print(Text(_columns(cells)))

    # ---- the live view

    def _start_live(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._view,
                refresh_per_second=4,
                redirect_stdout=sys.stdout.isatty(),  # a piped stdout holds results: not ours to move
                redirect_stderr=True,
            )
            self._live.start()

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._bars = None

    def _new_bars(self) -> Progress:
        name = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        )
        note = TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True))
        return Progress(
            name, note, BarColumn(14), MofNCompleteColumn(), TimeRemainingColumn(compact=True),
            console=self._console, expand=True,
        )  # fmt: skip

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = [self._status()] if self._row else []
        if self._bars is not None and self._bars.tasks:
            parts.append(self._bars.get_renderable())
        return Group(*parts)

    def _status(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for label, value in (
            ("update", self._progress_text()),
            ("score", self._score_text()),
            (f"KL/{self._unit}", self._kl_text()),
            ("beta", self._beta_text()),
            ("perplexity", self._perplexity_text()),
            ("speed", self._speed_text()),
        ):
            if value is not None:
                table.add_row(label, value)
        return table

    def _glyph(self, fancy: str, plain: str) -> str:
        return fancy if self._unicode else plain

    def _progress_text(self) -> Text:
        step = int(read_number(self._row, "step") or 0)
        text = Text(f"{step}/{self._total}  " if self._total else f"{step}  ")
        if self._total:
            filled = round(20 * min(1.0, step / self._total))
            text.append(self._glyph("━", "=") * filled, style="cyan")
            text.append(self._glyph("─", "-") * (20 - filled), style="dim")
        left = self._seconds_left()
        if left is not None:
            text.append(f"  {_duration(left)} left" if left > 0 else "  last update done")
        return text

    def _score_text(self) -> Text | None:
        text = Text()
        self._append_change(text, "", "objective/scores")
        self._append_change(text, "   gold ", "objective/gold")
        return text if text else None

    def _append_change(self, text: Text, label: str, key: str) -> None:
        """A figure with its change since the start, arrow and sign: never by colour alone."""
        value = read_number(self._row, key)
        if value is None:
            return
        change = value - self._start[key]
        text.append(f"{label}{format_number(value)}")
        if abs(change) >= 0.005 * max(1.0, abs(value)):
            arrow = self._glyph("▲", "up") if change > 0 else self._glyph("▼", "down")
            text.append(
                f" {arrow} {'+' if change > 0 else ''}{format_number(change)}",
                style="green" if change > 0 else "red",
            )

    def _kl_text(self) -> Text | None:
        kl, ratio = self._kl()
        if kl is None:
            return None
        text = Text(f"{format_number(kl, 4)} ")
        if ratio is None or self._target is None:
            return text.append("nats, no target")
        text.append(f"of {self._target:.3g}  ")
        word, style = _band(ratio)
        text.append_text(self._gauge(ratio, style))
        return text.append(f"  {word}", style=style)

    def _gauge(self, ratio: float, style: str) -> Text:
        """A bar from 0 to twice the target, with a mark at the target."""
        half = 8
        filled = round(half * min(2.0, max(0.0, ratio)))
        full, empty, mark = self._glyph("█", "#"), self._glyph("░", "."), self._glyph("│", "|")
        text = Text()
        for start in (0, half):
            cells = min(half, max(0, filled - start))
            text.append(full * cells, style=style)
            text.append(empty * (half - cells), style="dim")
            if start == 0:
                text.append(mark, style="bold")
        return text

    def _beta_text(self) -> Text | None:
        coef = read_number(self._row, "kl/coef")
        if coef is None:
            return None
        text = Text(format_number(coef, 4))
        following = read_number(self._row, "kl/coef_next")
        if following is not None and following != coef:
            text.append(f" {self._glyph('→', '->')} {format_number(following, 4)}")
        factor = read_number(self._row, "kl/backtrack_factor")
        if factor is not None and factor < 1:
            text.append(f"   ceiling kept {factor:.0%}", style="yellow")
        return text

    def _perplexity_text(self) -> Text | None:
        if self._perplexity is None:
            return None
        text = Text(f"{format_number(self._perplexity)} held-out")
        return text.append(f", {format_number(self._start['eval/perplexity'])} at the start", style="dim")

    def _speed_text(self) -> Text | None:
        speed = read_number(self._row, "perf/tokens_per_s")
        parts = [] if speed is None else [f"{_whole(speed)} tokens/s"]
        if (episodes := read_number(self._row, "episodes")) is not None:
            parts.append(f"{_whole(episodes)} episodes")
        return Text(", ".join(parts)) if parts else None

    # ---- printing

    def _print(self, text: Text) -> None:
        # Soft wrap: commands and paths can be copied whole, and a log has one line per message.
        self._console.print(text, soft_wrap=True, highlight=False)

    def _marked(self, mark: str, style: str, text: str) -> None:
        words = safe_text(text, keep_newlines=True)
        if not self._live_view:
            self._print(Text(f"{mark}: {words}"))
            return
        table = Table.grid(padding=(0, 1))
        table.add_column(style=style, no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row(f"{mark}:", Text(words))
        self._console.print(table)

    def _pairs(self, pairs: Mapping[str, object]) -> None:
        rows = [(safe_text(str(name)), _value(value)) for name, value in pairs.items()]
        if not self._live_view:
            width = max((len(name) for name, _ in rows), default=0)
            for name, value in rows:
                self._print(Text(f"  {name:<{width}}  {value}"))
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, style="cyan")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(f"  {name}"), Text(value))
        self._console.print(table)


def _no_advance(steps: int = 1, note: str | None = None) -> None:
    del steps, note


def _bar_advance(bars: Progress, task: TaskID) -> Advance:
    def advance(steps: int = 1, note: str | None = None) -> None:
        bars.advance(task, steps)
        if note is not None:
            bars.update(task, note=safe_text(note))

    return advance


class _PlainAdvance:
    """Progress in a log: a line now and then, none for what is quickly done."""

    def __init__(self, display: TrainingDisplay, name: str, total: int | None) -> None:
        self._display = display
        self._name = name
        self._total = total
        self._done = 0
        self._said = time.monotonic()

    def __call__(self, steps: int = 1, note: str | None = None) -> None:
        self._done += steps
        now = time.monotonic()
        if now - self._said < _PLAIN_PROGRESS_SECONDS:
            return
        self._said = now
        of_total = f"/{self._total} ({self._done / self._total:.0%})" if self._total else ""
        self._display.message(f"{self._name}: {self._done}{of_total}{f', {note}' if note else ''}")


def _band(ratio: float) -> tuple[str, str]:
    if abs(ratio - 1) <= _IN_BAND:
        return "in band", "green"
    if ratio < 1:
        return "below", "yellow"
    return f"{ratio:.1f}x target", "red" if ratio > 2 else "yellow"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return safe_text("-" if value is None else str(value))
    return f"{value}" if isinstance(value, int) else format_number(value, 4) if math.isfinite(value) else "-"


def _duration(seconds: float) -> str:
    """`9 s`, `1:12` or `2:03:04`."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _columns(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _PLAIN_COLUMNS, strict=True))
