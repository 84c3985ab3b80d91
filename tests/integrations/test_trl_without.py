"""What needs no TRL."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.integrations import trl
from rlhf_kl.integrations.trl import KLBudget


def test_importing_it_needs_no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert "KLBudget" in runpy.run_path(str(trl.__file__))


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "TRL is not installed: pip install 'trl==1.16.0'"),
        ("1.17.0", "TRL 1.17.0 is installed, 1.16.* is needed"),
    ],
)
def test_a_version_that_does_not_fit_is_one_line(version: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "trl_version", lambda: version)
    with pytest.raises(InputError) as caught:
        KLBudget.attach(SimpleNamespace())
    assert len(caught.value.problems) == 1
    assert said in caught.value.problems[0]
