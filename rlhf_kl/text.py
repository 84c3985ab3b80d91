"""Text for people: numbers, safe versions of untrusted text (prompts, responses, file names), and line breaks."""

from __future__ import annotations

import codecs
import math
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len

# Controls, lone surrogates, line and paragraph separators move the cursor or break a line; format characters hide or
# reorder the text around them.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # format characters of emoji and scripts


def safe_text(text: str, *, keep_newlines: bool = False) -> str:
    r"""`text` with control characters shown as text, as in ``\x1b[2J`` or ``\u202e``.

    Newlines become ``\n`` unless `keep_newlines`. Printable text is returned unchanged, markup too:
    the caller must show it without interpreting markup.
    """
    kept = _JOINERS + "\n" * keep_newlines
    return "".join(
        char if char in kept or unicodedata.category(char) not in _UNSAFE else char.encode("unicode_escape").decode()
        for char in text
    )


def visible(text: str) -> str:
    """A token's text with its spaces, line breaks and controls to be seen; an empty one as a sign."""
    return safe_text(text).replace(" ", "␣") or "∅"


def utf8(data: bytes) -> str:
    """The text of a file, without a byte order mark. Errors: ValueError, with the line and what to do."""
    try:
        return data.decode("utf-8-sig")  # a spreadsheet puts the mark in front
    except UnicodeDecodeError as error:
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        line = data.count(b"\n", 0, error.start) + 1
        place = ", but UTF-16" if wide else f" (line {line}, byte {error.start})"
        raise ValueError(f"is not UTF-8 text{place}: save it as UTF-8") from error


def whole(text: str) -> str:
    """A text whose pairs of surrogates are one character each.

    Errors: ValueError for half of a pair, which no file of UTF-8 and no tokenizer can hold. It comes where a text was
    cut between two units of UTF-16, and from bytes of a command line that are no UTF-8.
    """
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        lone = next(i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff")
        raise ValueError(f"half of a surrogate pair is no text: {text[max(0, lone - 40) : lone + 1]!r}") from None


def stdout_width() -> int | None:
    """Columns of the terminal on stdout; None if stdout is no terminal, and lines stay whole."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hanging(text: str, width: int | None, indent: int) -> str:
    """Each line of `text` broken between words to `width` columns, all but the first with `indent` spaces in front.

    The first line leaves as much room on its left. No word is broken; with width None no line is.
    """
    lines = text.split("\n")
    if width is not None:
        wrapper = textwrap.TextWrapper(max(width - indent, 20), break_long_words=False, break_on_hyphens=False)
        lines = [row for line in lines for row in wrapper.wrap(line)]
    return f"\n{' ' * indent}".join(lines)


def text_table(header: Sequence[str], body: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns as wide as needed, the first one left-aligned; what is wider than `width` goes to further tables."""
    sizes = [max(map(cell_len, column)) for column in zip(header, *body, strict=True)]
    parts: list[list[int]] = [[0]]
    for i, size in enumerate(sizes[1:], start=1):
        if width and len(parts[-1]) > 1 and sum(sizes[k] + 2 for k in parts[-1]) + size > width:
            parts.append([0])
        parts[-1].append(i)
    tables = []
    for part in parts:
        gaps = [[(row[i], " " * (sizes[i] - cell_len(row[i])), i) for i in part] for row in (header, *body)]
        rows = [[gap + cell if i else cell + gap for cell, gap, i in row] for row in gaps]
        tables.append("\n".join("  ".join(row).rstrip() for row in rows))
    return "\n\n".join(tables)


def scorer_label(name: str) -> str:
    """What people read for a scorer that never trains."""
    return "true score" if name == "gold" else name


# ---- numbers


def read_number(row: Mapping[str, Any], key: str) -> float | None:
    """The finite number that a row has under `key`, else None."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def format_number(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, in at most 8 characters; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10_000 or size < 0.001:
        return f"{value:.1e}"
    decimals = digits - 1 - (math.floor(math.log10(size)) if size >= 1 else -1)
    return f"{value:.{max(0, min(decimals, 4))}f}"


def with_error(value: float | None, error: float | None) -> str:
    """`2.14 ± 0.03`, to two digits of the error; empty for None, and without an error where there is none or 0."""
    if value is None or not error:
        return "" if value is None else format_number(value, 4)
    digits = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def start_to_end(figure: Iterable[float | None]) -> str:
    """`0.780 -> 3.43`; a figure without a start alone."""
    return " -> ".join(format_number(value) for value in figure if value is not None) or "-"


def score_text(figure: Iterable[float | None], error: float | None) -> str:
    """`0.780 -> 3.43 (±0.021 at the end)`."""
    return start_to_end(figure) + ("" if error is None else f" (±{format_number(error)} at the end)")


def cut(text: str, most: int) -> str:
    """Its first characters, or its last ones for a negative number of them; "…" stands for the others."""
    if len(text) <= abs(most):
        return text
    return f"{text[:most]}…" if most > 0 else f"…{text[most:]}"


def counted(number: int, noun: str) -> str:
    """`1 update`, `2 updates`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_percent(value: float | None, *, signed: bool = False) -> str:
    """A share as whole percent."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else "∞"
    return f"{value:+.0%}" if signed else f"{value:.0%}"


def duration(seconds: float) -> str:
    """`9 s`, `1:12` or `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"
