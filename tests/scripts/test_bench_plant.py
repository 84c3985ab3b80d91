from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "bench_plant.py"


def call(*arguments: str) -> Any:
    return subprocess.run([sys.executable, str(PATH), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("argument", "code", "said"), [("--help", 0, "usage:"), ("fixd", 2, "no such law: fixd;")])
def test_help_and_mistakes(argument: str, code: int, said: str) -> None:
    done = call(argument)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
