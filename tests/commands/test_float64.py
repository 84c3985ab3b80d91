"""A whole run, `eval` and `generate` on a device that has no float64."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils import backend_registration

from rlhf_kl.run.log import read_jsonl

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices written in python",
)
DEVICE = Path(__file__).with_name("device_without_float64.py")


def on_the_device(*arguments: str | Path) -> str:
    """What a command prints there."""
    done = subprocess.run([sys.executable, DEVICE, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_device_of_these_tests_has_no_float64() -> None:
    code = (
        "import runpy, sys, torch\n"
        "names = runpy.run_path(sys.argv[1])\n"
        "with names['Everywhere']():\n"
        "    ones = torch.ones(2).to(names['DEVICE'])\n"
        "    print(ones.device.type, ones.sum().cpu().double())\n"
        "    ones.sum().double()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, DEVICE], capture_output=True, text=True, check=False)
    assert done.stdout == "single tensor(2., dtype=torch.float64)\n"
    assert "TypeError: the device has no float64" in done.stderr


def test_a_run_on_a_device_without_float64_draws_the_tokens_of_the_cpu(
    train: Callable[..., dict[str, Any]], tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    """What needs float64 is computed on the CPU; later rows differ by rounding, which Adam's first steps enlarge."""
    settings = tiny_settings | {"ppo": tiny_settings["ppo"] | {"total_episodes": 48}}
    train(tmp_path / "cpu", "ppo.total_episodes=48")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    on_the_device("train", "--config", tmp_path / "tiny.yaml", "--output-dir", tmp_path / "there", "--quiet")
    here, there = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("cpu", "there"))
    assert [row["step"] for row in there] == [1, 2, 3, 4]
    exact = ("objective/scores", "objective/scores_std", "rollout/response_length", "rollout/eos_rate")
    assert [there[0][key] for key in exact] == [here[0][key] for key in exact]
    for key, error in (("policy/entropy", 1e-6), ("eval/perplexity", 1e-6), ("value/loss", 1e-4)):
        assert there[0][key] == pytest.approx(here[0][key], rel=error), key
    assert there[-1]["eval/perplexity"] == pytest.approx(here[-1]["eval/perplexity"], rel=0.01)
    assert there[2]["kl/token"] == pytest.approx(here[2]["kl/token"], rel=0.2)
    found = json.loads(on_the_device("eval", "--run", tmp_path / "there", "--json", "--quiet"))
    assert found["perplexity"] == pytest.approx(there[-1]["eval/perplexity"], rel=1e-5)
    command = ("generate", "--run", tmp_path / "there", "--prompt", "ab", "--with-reference", "--json", "--quiet")
    assert json.loads(on_the_device(*command))[0]["kl"] >= 0
