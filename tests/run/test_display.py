from __future__ import annotations

import io
import re
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from rlhf_kl.run.display import TrainingDisplay

COUNTS = {"rollout batch": 64, "minibatch": 64, "microbatch": 16, "PPO epochs": 4, "updates": 60}


def _terminal(width: int) -> Console:
    return Console(
        width=width,
        height=40,
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        _environ={"TERM": "xterm"},
    )


def _plain(width: int = 60) -> Console:
    return Console(width=width, file=io.StringIO(), force_terminal=False)


def _written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _painted(console: Console) -> list[str]:
    """What was written between the points where the live view is wiped, without styles."""
    parts = _written(console).split("\x1b[2K")
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r| +$", "", part, flags=re.MULTILINE) for part in parts]


def _row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "episodes": 64 * step,
        "objective/scores": 0.5 * step,
        "objective/gold": 1 - 0.25 * step,
        "kl/token": 0.02 * step,
        "kl/sequence": 0.6 * step,
        "kl/coef": 0.1,
        "kl/coef_next": 0.12,
        "perf/tokens_per_s": 2310.4,
        "time/step_s": 2.0,
        **more,
    }


def _live(width: int, *rows: dict[str, Any], **options: Any) -> list[str]:
    """The lines of the last frame."""
    console = _terminal(width)
    options = {"total_updates": 60, "target": 0.1} | options
    with TrainingDisplay(console=console, **options) as display:
        for row in rows:
            display.update(row)
    return [line for line in _painted(console)[-1].split("\n") if line]


@pytest.mark.parametrize("width", [60, 80])
def test_the_live_view_fits_and_shows_all(width: int) -> None:
    lines = _live(width, _row(1, **{"eval/perplexity": 3.62}), _row(5, **{"kl/backtrack_factor": 0.5}))
    assert [line.split()[0] for line in lines] == [
        "update",
        "score",
        "KL/token",
        "beta",
        "perplexity",
        "speed",
    ]
    assert all(cell_len(line) <= width for line in lines)
    text = "\n".join(lines)
    for part in ("5/60", "1:50 left", "2.50 ▲ +2.00", "gold -0.250 ▼ -1.00", "0.1000 of 0.1", "in band"):
        assert part in text
    for part in (
        "0.1000 → 0.1200",
        "ceiling kept 50%",
        "3.62 held-out",
        "2310 tokens/s",
        "320 episodes",
    ):
        assert part in text
    assert "…" not in text


@pytest.mark.parametrize("width", [60, 80])
def test_large_figures_do_not_wrap(width: int) -> None:
    large = {
        "episodes": 12_345_678,
        "objective/scores": -123456.7,
        "objective/gold": 98765.4,
        "kl/token": 12.3,
    }
    lines = _live(width, _row(1), _row(99_999, **large), total_updates=100_000)
    assert len(lines) == 5
    assert all(cell_len(line) <= width for line in lines)


def test_the_band_is_shown_in_words() -> None:
    assert "below" in "\n".join(_live(60, _row(2)))
    assert "1.4x target" in "\n".join(_live(60, _row(7)))
    sequence = _live(60, _row(2), unit="sequence", target=1.0)
    assert "1.200 of 1" in "\n".join(sequence)
    assert any(line.startswith("KL/sequence") for line in sequence)


def test_without_a_target_and_with_missing_figures() -> None:
    lines = _live(60, {"step": 1, "kl/token": 0.5, "objective/scores": None, "kl/coef": float("nan")}, target=None)
    assert [line.split()[0] for line in lines] == ["update", "KL/token"]
    assert "no target" in lines[1]


def test_plain_lines_are_one_per_update_in_fixed_columns() -> None:
    console = _plain()
    with TrainingDisplay(console=console, total_updates=60, target=0.1) as display:
        for step in range(1, 26):
            display.update(_row(step, **({"eval/perplexity": 3.62} if step % 10 == 1 else {})))
    written = _written(console)
    assert "\x1b" not in written
    assert "\r" not in written
    assert written.isascii()
    lines = written.splitlines()
    assert len(lines) == 25 + 2  # the header comes again
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) < 80
    assert lines[1].split() == ["1/60", "64", "0.5000", "0.0200", "0.20x", "0.1000", "3.62", "2310", "1:58"]
    assert lines[2].split()[6] == "-"


def test_a_long_run_has_about_a_hundred_lines_in_a_log() -> None:
    console = _plain(80)
    with TrainingDisplay(console=console, total_updates=1000, target=0.1) as display:
        for step in range(1, 1001):
            display.update(_row(step, **({"eval/perplexity": 3.62} if step % 50 == 2 else {})))
    rows = [line.split() for line in _written(console).splitlines() if "/1000" in line]
    assert len(rows) == 101
    assert (rows[0][0], rows[-1][0]) == ("1/1000", "1000/1000")
    assert sum(row[6] == "3.62" for row in rows) == 20  # each evaluation is in the next line


def test_a_wait_is_told_in_a_log_where_it_was_long(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 3.0, 0.0, 12.0])
    monkeypatch.setattr("rlhf_kl.run.display.time.monotonic", lambda: next(seconds))
    console = _plain()
    with TrainingDisplay(console=console) as display:
        for name in ("short", "long"):
            with display.waiting(name):
                pass
    assert _written(console) == "long: done in 12 s\n"


def test_a_wait_in_a_terminal_is_shown_and_gone() -> None:
    console = _terminal(60)
    with TrainingDisplay(console=console) as display, display.waiting("loading the policy"):
        time.sleep(0.6)  # frames come every quarter of a second
    assert any("loading the policy" in frame for frame in _painted(console))
    assert "loading" not in _painted(console)[-1]


def test_a_long_plain_message_stays_one_line() -> None:
    console = _plain(40)
    with TrainingDisplay(console=console) as display:
        display.message("word " * 40)
        display.alert("kl-spike: " + "word " * 40)
    assert len(_written(console).splitlines()) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_outside_text_is_shown_as_text(terminal: bool) -> None:
    console = _terminal(80) if terminal else _plain(80)
    nasty = "a [red]b[/red] [/] \x1b[2J \x07 :smile:"
    shown = r"a [red]b[/red] [/] \x1b[2J \x07 :smile:"
    with TrainingDisplay(console=console) as display:
        display.message(nasty)
        display.alert(nasty)
        display.error(nasty)
        display.counts_table({nasty: nasty})
        with display.progress(nasty, 2) as advance:
            advance(1, nasty)
        display.summary({"prompt": nasty}, [nasty])
    written = _written(console)
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert written.count(shown) >= 7


@pytest.mark.parametrize("width", [60, 80])
def test_tables_alerts_and_summary_fit(width: int) -> None:
    console = _terminal(width)
    with TrainingDisplay(console=console) as display:
        display.counts_table(COUNTS)
        display.alert("kl-above-target: " + "many words about what happened and what to do " * 3)
        display.summary({"KL per token": 0.10321, "score": None, "time": "2:04"}, ["rlhf-kl report runs/a"])
    lines = console.export_text().splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert "  rollout batch  64" in [line.rstrip() for line in lines]
    assert "  KL per token  0.1032" in [line.rstrip() for line in lines]
    assert "  rlhf-kl report runs/a" in lines
    alert = [line for line in lines if "words" in line]
    assert alert[0].startswith("alert: kl-above-target")
    assert all(line.startswith("       ") for line in alert[1:])


def test_quiet_leaves_alerts_and_errors() -> None:
    console = _plain()
    with TrainingDisplay(quiet=True, console=console) as display:
        display.message("no")
        display.counts_table(COUNTS)
        with display.progress("no", 3) as advance:
            advance()
        display.update(_row(1))
        display.alert("kl-spike: yes")
        display.error("yes")
        display.summary({"no": 1}, ["no"])
    assert _written(console) == "alert: kl-spike: yes\nerror: yes\n"


def test_nested_progress_in_a_terminal() -> None:
    console = _terminal(60)
    with TrainingDisplay(console=console) as display:
        with display.progress("built-in world", 2) as outer:
            with display.progress("pre-training with a name that is too long for a line of sixty", 40) as advance:
                for _ in range(40):
                    advance(note="loss 2.31")
            outer()
        display.update(_row(1))
        with display.progress("evaluating", 3) as advance:
            advance(3)
    lines = [line.rstrip() for part in _painted(console) for line in part.splitlines()]
    assert "built-in world: done in 0 s" in lines
    assert "evaluating: done in 0 s" in lines
    assert all(cell_len(line) <= 60 for line in lines)


def test_a_terminal_shows_what_the_run_does_now_and_a_log_does_not() -> None:
    console, plain = _terminal(60), _plain()
    for shown in (console, plain):
        with TrainingDisplay(console=shown, total_updates=2) as display:
            display.now("evaluating")
            display.now("update 1")
            display.update(_row(1))
    assert any("evaluating, 0 s" in frame for frame in _painted(console))
    assert any("update 1, 0 s" in frame for frame in _painted(console))
    assert "update 1, 0 s" not in _painted(console)[-1]
    assert "evaluating" not in _written(plain)


def test_progress_that_fails_is_not_done_and_frees_the_terminal() -> None:
    console = _terminal(60)
    display = TrainingDisplay(console=console)
    with pytest.raises(RuntimeError), display, display.progress("building", 3):
        raise RuntimeError
    assert "done" not in console.export_text()
    assert _written(console).rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_slow_progress_in_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr("rlhf_kl.run.display.time.monotonic", lambda: float(next(clock)))
    console = _plain()
    with TrainingDisplay(console=console) as display, display.progress("building", 4) as advance:
        for _ in range(4):
            advance(note="loss 1.5")
    lines = _written(console).splitlines()
    assert lines == [
        "building ...",
        "building: 2/4 (50%), loss 1.5",
        "building: 4/4 (100%), loss 1.5",
        "building: done in 36 s",
    ]


def test_no_terminal_on_stderr_means_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with TrainingDisplay(total_updates=2, target=0.1) as display:
        display.update(_row(1))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "\x1b" not in captured.err
    assert len(captured.err.splitlines()) == 2
