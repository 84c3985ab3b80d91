"""What the end of a run shows."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_kl.commands.finish import train_closing
from rlhf_kl.report.control import closing_figures


def summary(kind: str, kls: list[float], target: float = 0.1) -> dict[str, Any]:
    rows = [{"kl/token": kl, "kl/error": kl / target - 1, "kl/target": target} for kl in kls]
    return {
        "config": {"kl": {"unit": "token", "controller": {"kind": kind}}},
        "final": rows[-1],
        "steps": len(kls),
        "seconds": 1.0,
        "tilt_share": 0.95,
        "control": closing_figures(rows, "token"),
    }


@pytest.mark.parametrize(
    ("kind", "kls", "words"),
    [
        ("adaptive", [0.1] * 20 + [0.11] * 20, "0.110, target 0.1 held (within 10% on average)"),
        ("mine.py:Law", [0.1] * 20 + [0.2] * 20, "0.200, target 0.1 missed (within 100% on average)"),
        ("fixed", [0.1] * 40, "0.100, target 0.1 reached (beta does not depend on the KL)"),
        ("static", [0.05] * 40, "0.050, target 0.1 not reached (beta does not depend on the KL)"),
        ("adaptive", [0.02, 0.04, 0.06, 0.08], "0.070, target 0.1"),  # too short to judge; its second half
    ],
)
def test_the_verdict_on_the_target(kind: str, kls: list[float], words: str) -> None:
    figures, _ = train_closing(summary(kind, kls), "runs/x")
    assert figures["KL per token"] == words
    assert figures["score gain"] == "95% of the most that this KL allows"


def test_a_collapsed_run_is_not_praised() -> None:
    run = summary("adaptive", [0.1] * 40)
    run["final"] |= {"rollout/distinct_responses": 0.02}
    figures, _ = train_closing(run, "runs/x")
    assert "score gain" not in figures
    assert figures["responses"] == "nearly all are the same text"
