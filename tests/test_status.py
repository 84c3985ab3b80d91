from __future__ import annotations

import pytest
from rich.console import Console

from rlhf_kl.status import RunStatus, duration

ROWS = (
    {"step": 1, "objective/scores": 1.0, "kl/token": 0.05, "kl/coef": 0.1, "kl/coef_next": 0.2, "time/step_s": 3.0},
    {"step": 2, "objective/scores": 2.0, "kl/token": 0.3, "kl/coef": 0.2, "kl/coef_next": 0.3, "time/step_s": 5.0},
)


def _shown(status: RunStatus, *, unicode: bool) -> str:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(status.table(unicode=unicode))
    return shown.get()


def test_a_terminal_without_utf_8_gets_ascii() -> None:
    status = RunStatus(10, 0.1, "token")
    assert not status
    for row in ROWS:
        status.update(row)
    assert status
    assert not _shown(status, unicode=True).isascii()
    text = _shown(status, unicode=False)
    assert text.isascii()
    for part in ("2/10  ====----", "2.00 up +1.00", "0.2000 -> 0.3000", "########|########  3.0x target", "32 s left"):
        assert part in text


def test_after_a_resume_the_start_is_that_of_the_run() -> None:
    status = RunStatus(10, 0.1, "token")
    status.remember({"step": 1, "objective/scores": 1.0, "eval/perplexity": 2.5, "time/step_s": 60.0})
    assert not status  # nothing of this part of the run yet
    status.update({"step": 5, "objective/scores": 4.0, "time/step_s": 2.0})
    text = _shown(status, unicode=False)
    assert "4.00 up +3.00" in text
    assert "2.50 held-out, 2.50 at the start" in text
    assert "10 s left" in text  # at the speed of now


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.6, "1:00"), (72, "1:12"), (7384, "2:03:04")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_wide_cell_keeps_its_distance() -> None:
    status = RunStatus(3, 0.1, "token")
    status.update({"step": 1, "kl/coef": 0.39231, "eval/perplexity": 73210.0})
    assert "0.3923 7.3e+04" in status.line()
