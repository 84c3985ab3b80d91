"""Gradients of three processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made import Make

pytestmark = pytest.mark.slow


def test_gradients_that_travel_early_have_the_same_sums_bit_for_bit(launch: Make) -> None:
    process = launch([Path(__file__).with_name("gradients_command.py")], 3)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    (order,) = [line for line in output.splitlines() if "first layer" in line]
    # Of the fourth pass: four of five layers travel before the first one is reached; that one and the experts follow.
    passes = ["first layer"] * 3 + ["sends 2550"] * 4 + ["first layer"] + ["sends 2550"] * 4 + ["sends 16"]
    assert order.split("; ") == passes
