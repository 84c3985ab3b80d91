"""The state of a training run: a table for the live view, a line for a log."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from rlhf_kl.kl_controllers.held import BAND
from rlhf_kl.text import format_number, read_number

Unit = Literal["token", "sequence"]
Pieces = list[tuple[str, str]]  # text and its style

COMPARED = ("objective/scores", "objective/gold", "eval/perplexity")  # with their first value
WIDTHS = (9, 9, 8, 8, 7, 8, 7, 7, 8)  # of a log line's columns


class RunStatus:
    """The newest row of a run, and figures of earlier rows to compare with."""

    def __init__(self, total: int, target: float, unit: Unit) -> None:
        """`total`: updates of the run; `target` in nats per `unit`."""
        self.total, self._target, self._unit = total, target, unit
        self._row: Mapping[str, Any] = {}
        self._first: dict[str, float] = {}
        self._perplexity: float | None = None
        self._perplexity_is_new = False  # since the last line of a log
        self._evaluated = 0  # the update of the last evaluation
        self._seconds: deque[float] = deque(maxlen=10)  # of the last updates

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self._row)

    def update(self, row: Mapping[str, Any]) -> None:
        """Take a row of `metrics.jsonl`."""
        self._row = row
        self.remember(row)
        if (seconds := self._number("time/step_s")) is not None:
            self._seconds.append(seconds)

    def remember(self, row: Mapping[str, Any]) -> None:
        """Keep the figures that later rows are compared with; earlier rows of a resumed run come only here."""
        for key in COMPARED:
            if (value := read_number(row, key)) is not None:
                self._first.setdefault(key, value)
        if (perplexity := read_number(row, "eval/perplexity")) is not None:
            self._perplexity, self._perplexity_is_new, self._evaluated = perplexity, True, int(row.get("step") or 0)

    def _number(self, key: str) -> float | None:
        return read_number(self._row, key)

    def _seconds_left(self) -> float | None:
        done = self._number("step")
        if done is None or not self._seconds:
            return None
        return max(0.0, self.total - done) * fmean(self._seconds)

    def _kl(self) -> tuple[float | None, float | None]:
        """The KL in the target's unit, and as a multiple of the target."""
        kl = self._number(f"kl/{self._unit}")
        return (None, None) if kl is None else (round(kl, 7), kl / self._target)

    # ---- a line of a log

    def header(self) -> str:
        """The names of a line's columns."""
        return _columns(f"update episodes score KL/{self._unit[:3]} KL/tgt beta ppl tok/s left".split())

    def line(self) -> str:
        """The row in fixed columns."""
        kl, ratio = self._kl()
        left, speed = self._seconds_left(), self._number("perf/tokens_per_s")
        perplexity, self._perplexity_is_new = self._perplexity if self._perplexity_is_new else None, False
        return _columns(
            (
                f"{self._row.get('step', '-')}/{self.total}",
                f"{self._row.get('episodes', '-')}",
                format_number(self._number("objective/scores"), 4),
                format_number(kl, 4),
                "-" if ratio is None else f"{ratio:.2f}x",
                format_number(self._number("kl/coef"), 4),
                format_number(perplexity),
                "-" if speed is None else f"{speed:.0f}",
                "-" if left is None else duration(left),
            )
        )

    # ---- the live view

    def table(self) -> Table:
        """The row as a small table, without missing figures."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        scores = [*self._change("", "objective/scores"), *self._change("   gold ", "objective/gold")]
        for label, pieces in (
            ("update", self._progress()),
            ("score", scores and [*scores, ("   one batch", "dim")]),
            (f"KL/{self._unit}", self._kl_pieces()),
            ("beta", self._beta()),
            ("perplexity", self._perplexity_pieces()),
        ):
            if pieces:
                table.add_row(label, Text.assemble(*pieces))
        return table

    def _progress(self) -> Pieces:
        step = int(self._number("step") or 0)
        filled = round(16 * min(1.0, step / self.total))
        pieces: Pieces = [(f"{step}/{self.total}  ", ""), ("━" * filled, "cyan"), ("─" * (16 - filled), "dim")]
        if (left := self._seconds_left()) is not None:
            pieces.append((f"  {duration(left)} left" if left > 0 else "  last update done", ""))
        if (speed := self._number("perf/tokens_per_s")) is not None:
            pieces.append((f"  {speed:.0f} tok/s", "dim"))
        return pieces

    def _change(self, label: str, key: str) -> Pieces:
        """A figure with its change since the start: with arrow and sign, never only by colour."""
        value = self._number(key)
        if value is None:
            return []
        change = value - self._first[key]
        pieces: Pieces = [(f"{label}{format_number(value)}", "")]
        if change >= 0.005 * max(1.0, abs(value)):
            pieces.append((f" ▲ +{format_number(change)}", "green"))
        elif -change >= 0.005 * max(1.0, abs(value)):
            pieces.append((f" ▼ {format_number(change)}", "red"))
        return pieces

    def _kl_pieces(self) -> Pieces:
        kl, ratio = self._kl()
        if kl is None or ratio is None:
            return []
        above = (f"{ratio:.1f}x target", "red" if ratio > 2 else "yellow")
        inside = abs(ratio - 1) <= BAND
        label, style = ("in band", "green") if inside else ("below", "yellow") if ratio < 1 else above
        # A bar from 0 to twice the target, with a mark at the target.
        half = 8
        filled = round(half * min(2.0, max(0.0, ratio)))
        left, right = min(half, filled), max(0, filled - half)
        bar = [("█" * left, style), ("░" * (half - left), "dim"), ("│", "bold"), ("█" * right, style)]
        bar += [("░" * (half - right), "dim"), (f"  {label}", style)]
        return [(f"{format_number(kl, 4)} of {self._target:.3g}  ", ""), *bar]

    def _beta(self) -> Pieces:
        coef, following = self._number("kl/coef"), self._number("kl/coef_next")
        if coef is None:
            return []
        pieces: Pieces = [(format_number(coef, 4), "")]
        if following is not None and following != coef:
            pieces.append((f" → {format_number(following, 4)}", ""))
        factor = self._number("kl/backtrack_factor")
        if factor is not None and factor < 1:
            pieces.append((f"   ceiling kept {factor:.0%}", "yellow"))
        return pieces

    def _perplexity_pieces(self) -> Pieces:
        if self._perplexity is None:
            return []
        when = "after training" if self.total < self._evaluated else f"update {self._evaluated}"
        first = f"; {format_number(self._first['eval/perplexity'])} at the start" if self._evaluated > 1 else ""
        return [(f"{format_number(self._perplexity)} held-out, {when}", ""), (first, "dim")]


def duration(seconds: float) -> str:
    """`9 s`, `1:12` or `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def _columns(cells: Sequence[str]) -> str:
    """Right-aligned cells; a cell that is too wide for its column keeps a space before it."""
    return "".join(
        f"{cell:>{width}}" if len(cell) < width else f" {cell}" for cell, width in zip(cells, WIDTHS, strict=True)
    )
