from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PEER = """
import argparse, json
p = argparse.ArgumentParser()
for name in ("method", "policy", "reward", "prompts", "column", "output-dir"):
    p.add_argument("--" + name)
for name in ("updates", "batch", "group", "iterations", "max-new-tokens", "seed"):
    p.add_argument("--" + name, type=int)
for name in ("beta", "learning-rate"):
    p.add_argument("--" + name, type=float)
a = p.parse_args()
curve = [{"t": 2.0 * i, "score": float(i), "kl_token": 0.03 * a.beta ** -0.5} for i in range(1, a.updates + 1)]
print("loading ...")
print("RESULT " + json.dumps({"curve": curve, "median_update_s": 2.0, "peak_rss_mb": 512.0}))
"""


@pytest.fixture(scope="module")
def groups() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_groups", SCRIPTS / "bench_groups.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPTS))
    sys.modules.pop("bench", None)


def test_seconds_to_a_score_are_those_of_the_first_window_whose_mean_is_there(groups: ModuleType) -> None:
    run = groups.Run([1.0 + i for i in range(10)], [float(i) for i in range(10)], 0.1, 8.0, 300.0)
    assert run.seconds_to(2.0) == 5.0  # updates 1 to 5 have scores 0 to 4
    assert run.seconds_to(2.5) == 6.0
    assert math.isnan(run.seconds_to(7.5))
    assert run.score == 8.5  # the last fifth


def test_the_table_counts_the_runs_that_never_reached_the_score(groups: ModuleType) -> None:
    slow = groups.Run([float(i) for i in range(1, 11)], [1.0] * 10, 0.1, 8.0, 300.0)
    fast = groups.Run([float(i) for i in range(1, 11)], [3.0] * 10, 0.2, 8.0, 300.0)
    lines = groups.table({"gae": [slow, fast], "TRL grpo": [slow]}, 2.5).splitlines()
    assert " ".join(lines[1].split()) == "gae not reached 1 of 2 2.00 (1.41) 0.150 (0.071) 8.0 (0.0) 300 (0)"
    assert " ".join(lines[2].split()) == "TRL grpo not reached 0 of 1 1.00 0.100 8.0 300"


def test_the_peers_beta_is_searched_for_and_each_side_runs(
    groups: ModuleType,
    tmp_path: Path,
    tiny_folder: Path,
    tiny_reward_folder: Path,
    tiny_data: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stub whose KL is 0.03 / sqrt(beta): 0.1 at beta 0.09; from 0.3 on two runs, the second by that power."""
    (tmp_path / "peer.py").write_text(PEER)
    where = [
        str(tmp_path / "out"),
        *("--peer-python", sys.executable, "--peer-script", str(tmp_path / "peer.py")),
        *("--policy", str(tiny_folder), "--reward", str(tiny_reward_folder)),
        *("--prompts", str(tiny_data.prompts), "--batch", "8", "--updates", "6", "--max-new-tokens", "4"),
    ]
    groups.main([*where, "--seeds", "0", "--score", "3.5", "--sides", "rloo", "TRL grpo"])
    out = capsys.readouterr().out
    assert "betas of TRL: grpo 0.09" in out
    rows = {line.split("  ")[0]: line for line in out.split("betas of TRL")[1].splitlines()}
    assert rows["TRL grpo"].split()[2:7] == ["12.0", "1", "of", "1", "5.50"]
    assert "rloo" in rows
    (tmp_path / "peer.py").write_text("raise SystemExit(1)")  # finished runs are used again
    groups.main([*where, "--seeds", "0", "--sides", "rloo", "TRL grpo"])
    with pytest.raises(SystemExit):
        groups.main([*where, "--seeds", "1", "--sides", "TRL grpo", "--betas", "grpo=0.2"])


def test_models_come_together(groups: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        groups.main(["x", "--peer-python", "p", "--peer-script", "s", "--policy", "d"])
    assert caught.value.code == 2
    assert "--policy, --reward and --prompts come together" in capsys.readouterr().err
