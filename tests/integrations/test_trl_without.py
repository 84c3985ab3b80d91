"""What needs no TRL."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.integrations import trl
from rlhf_kl.integrations.trl import KLBudget


def test_importing_it_needs_no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert "KLBudget" in runpy.run_path(str(trl.__file__))


def test_what_a_trainer_lacks_is_one_line() -> None:
    """A trainer is known by what it has, not by its class or TRL's version."""
    trainer = SimpleNamespace(beta=0.1, num_iterations=1, accelerator=None, _metrics={}, _step=0)
    with pytest.raises(InputError) as caught:
        KLBudget.attach(trainer)
    (problem,) = caught.value.problems
    assert "SimpleNamespace has no _get_per_token_logps_and_entropies, _generate_and_score_completions" in problem
