from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlhf_kl import ui
from rlhf_kl.text import duration
from rlhf_kl.ui import RunTable, log


def _terminal(width: int) -> Console:
    settings: dict[str, Any] = {"force_terminal": True, "_environ": {"TERM": "xterm"}}
    return Console(width=width, height=40, record=True, file=io.StringIO(), **settings)


def _plain(width: int = 60) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=False)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _painted(console: Console) -> list[str]:
    """what was written between the points where bars are wiped, without styles."""
    parts = _written(console).split("\x1b[2K")
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r| +$", "", part, flags=re.MULTILINE) for part in parts]


def _row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "episodes": 64 * step,
        "objective/scores": 0.5 * step,
        "kl/token": 0.02 * step,
        "kl/sequence": 0.6 * step,
        "kl/coef": 0.1,
        "kl/coef_next": 0.12,
        "perf/tokens_per_s": 2310.4,
        "time/step_s": 2.0,
        "time/elapsed_s": 65 + 2.0 * step,  # with a start that comes but once
        **more,
    }


@pytest.fixture(autouse=True)
def screen() -> Iterator[None]:
    """Later tests of this process get the usual screen back."""
    yield
    ui.start(quiet=True)


@contextlib.contextmanager
def shown(
    console: Console | None, total: int = 60, target: float = 0.1, unit: Any = "token", quiet: bool = False
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What is shown within the block, of a run too, whose rows the given function takes."""
    ui.start(quiet, console)
    table = RunTable(total, target, unit)
    with ui.bar("update", total) as advance:
        yield lambda row: advance(1, table.show(row))


def _bars(console: Console) -> list[str]:
    """The bars on updates that were painted."""
    return [line for part in _painted(console) for line in part.split("\n") if " update " in line]


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_has_lines_and_one_bar_that_fit(width: int) -> None:
    console = _terminal(width)
    with shown(console, 60) as show:
        show(_row(1, **{"eval/perplexity": 3.62}))
        show(_row(2))
    lines = [line for part in _painted(console) for line in part.split("\n")]
    assert all(cell_len(line) <= width for line in lines)
    header = ["update", "episodes", "score", "KL/tok", "KL/tgt", "beta", "ppl", "tok/s", "left"]
    cells = ["2/60", "128", "1.000", "0.0400", "0.40x", "0.1000", "-", "2310", "1:56"]
    kept = [i for i, name in enumerate(header) if width == 80 or name not in ("episodes", "tok/s")]
    found = [line.split() for line in lines if line.split()[:1] in (["update"], ["2/60"])]
    assert found == [[row[i] for i in kept] for row in (header, cells)]
    assert "KL 0.040/0.1 beta 0.100 score" in _bars(console)[-1]
    large = {"episodes": 12_345_678, "objective/scores": -123456.7, "kl/token": 12.3}
    wide = _terminal(width)
    with shown(wide, 100_000) as show:
        show(_row(99_999, **large))
    assert all(cell_len(line) <= width for line in _bars(wide))


def test_after_a_resume_the_bar_begins_where_the_run_was() -> None:
    console = _terminal(80)
    ui.start(console=console)
    with ui.bar("update", 10, done=4) as advance:
        advance(1, "KL 0.1")
    bars = _bars(console)
    assert " update 4/10 " in bars[0]
    assert " update 5/10 " in bars[-1]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00"), (72, "1:12"), (7384, "2:03:04")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_plain_lines_are_one_per_update_in_fixed_columns() -> None:
    console = _plain()
    with shown(console, 60) as show:
        for step in range(1, 26):
            show(_row(step, **({"eval/perplexity": 3.62} if step % 10 == 1 else {})))
        log.warning("kl-spike: " + "word " * 40)
    written = _written(console)
    assert written.replace("\n", "").isprintable()
    assert written.isascii()
    *lines, alert = written.splitlines()
    assert alert.startswith("alert: kl-spike: word")
    assert len(lines) == 25 + 2  # the header comes again
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 80
    assert lines[1].split() == ["1/60", "64", "0.5000", "0.0200", "0.20x", "0.1000", "3.62", "2310", "1:58"]
    assert lines[2].split()[6] == "-"


def test_a_long_run_has_about_a_hundred_lines_in_a_log() -> None:
    console = _plain(80)
    with shown(console, 1000) as show:
        for step in range(1, 1001):
            show(_row(step, **({"eval/perplexity": 3.62} if step % 50 == 2 else {})))
    rows = [line.split() for line in _written(console).splitlines() if "/1000" in line]
    assert len(rows) == 102
    assert (rows[0][0], rows[-1][0]) == ("1/1000", "1000/1000")
    assert sum(row[6] == "3.62" for row in rows) == 20  # each evaluation is in the next line


@pytest.mark.parametrize("terminal", [True, False])
def test_outside_text_is_shown_as_text(terminal: bool) -> None:
    console = _terminal(80) if terminal else _plain(80)
    nasty = "a [red]b[/red] [/] \x1b[2J \x07 :smile:"
    safe = r"a [red]b[/red] [/] \x1b[2J \x07 :smile:"
    with shown(console):
        log.info(nasty)
        log.warning(nasty)
        log.error(nasty)
        with ui.progress(nasty, 2) as advance:
            advance(1, nasty)
        ui.print_summary({nasty: nasty}, [nasty])
    written = _written(console)
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert written.count(safe) >= 6


def test_alerts_and_summary_fit() -> None:
    console = _terminal(60)
    ui.start(console=console)
    log.warning("kl-above-target: " + "many words about what happened and what to do " * 3)
    ui.print_summary({"KL per token": 0.10321, "score": None, "time": "2:04"}, ["rlhf-kl report runs/a"])
    lines = console.export_text().splitlines()
    assert all(cell_len(line) <= 60 for line in lines)
    assert "  KL per token  0.1032" in [line.rstrip() for line in lines]
    assert "  rlhf-kl report runs/a" in lines
    alert = [line for line in lines if "words" in line]
    assert alert[0].startswith("alert: kl-above-target")
    assert all(line.startswith("       ") for line in alert[1:])


def test_quiet_leaves_alerts_and_errors() -> None:
    console = _plain()
    with shown(console, quiet=True) as show:
        log.info("no")
        with ui.progress("no", 3) as advance:
            advance()
        show(_row(1))
        log.warning("kl-spike: yes")
        log.error("yes")
        ui.print_summary({"no": 1}, ["no"])
    assert _written(console) == "alert: kl-spike: yes\nerror: yes\n"


def test_nested_progress_in_a_terminal() -> None:
    console = _terminal(60)
    with shown(console) as show:
        with ui.progress("built-in world", 2) as outer:
            with ui.progress("pre-training with a name that is too long for a line of sixty", 40) as advance:
                for _ in range(40):
                    advance(note="loss 2.31")
            outer()
        show(_row(1))
        with ui.progress("evaluating", 3) as advance:
            advance(3)
    lines = [line.rstrip() for part in _painted(console) for line in part.splitlines()]
    assert not any("done in" in line for line in lines)  # nothing was slow
    assert all(cell_len(line) <= 60 for line in lines)


def test_progress_that_fails_is_not_done_and_frees_the_terminal() -> None:
    console = _terminal(60)
    ui.start(console=console)
    with pytest.raises(RuntimeError), ui.progress("building", 3):
        raise RuntimeError
    assert "done" not in console.export_text()
    assert _written(console).rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_no_terminal_on_stderr_means_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with shown(None, 2) as show:
        show(_row(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert len(captured.err.splitlines()) == 2


def test_missing_figures_and_the_unit() -> None:
    console = _plain(80)
    with shown(console, unit="sequence", target=1.0) as show:
        show({"step": 1, "kl/sequence": 0.5, "objective/scores": None, "kl/coef": float("nan")})
    header, row = _written(console).splitlines()
    assert header.split()[3] == "KL/seq"
    assert row.split() == ["1/60", "-", "-", "0.5000", "0.50x", "-", "-", "-", "-"]


def test_slow_progress_in_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr("rlhf_kl.ui.time.monotonic", lambda: float(next(clock)))
    console = _plain()
    with shown(console), ui.progress("building", 4) as advance:
        for _ in range(4):
            advance(note="loss 1.5")
    lines = _written(console).splitlines()
    assert lines == ["building: 2/4 (50%), loss 1.5", "building: 4/4 (100%), loss 1.5", "building: done in 3:20"]
