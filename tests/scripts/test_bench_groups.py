from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from rlhf_kl.run.folder import RunFolder

SCRIPTS = Path(__file__).parents[2] / "scripts"
PEER = """
import json, sys, types
a = types.SimpleNamespace(**json.loads(sys.argv[1]))
assert (a.batch, a.minibatches, a.dtype) == (8, 4, "bfloat16"), a
curve = [{"seconds": 2.0 * i, "score": float(i), "kl": 0.03 * a.beta ** -0.5} for i in range(1, a.updates + 1)]
print("loading ...")
print(json.dumps({"curve": curve, "median_update_s": 2.0, "peak_rss_mb": 512.0}))
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


@pytest.mark.slow
def test_the_peers_beta_is_searched_for_and_each_side_runs(
    groups: ModuleType,
    tmp_path: Path,
    tiny_folder: Path,
    tiny_reward_folder: Path,
    tiny_data: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stub whose KL is 0.03 / sqrt(beta): 0.1 at beta 0.09; from 0.3 on three runs, the last by that power."""
    (tmp_path / "scripts").mkdir()
    peer = tmp_path / "scripts" / "peer_trl.py"
    peer.write_text(PEER)
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    where = [
        *(str(tmp_path / "out"), "--peer-python", sys.executable, "--dtype", "bfloat16"),
        *("--batch", "8", "--updates", "6", "--max-new-tokens", "4"),
    ]

    def make(args: SimpleNamespace) -> None:
        args.policy, args.reward, args.prompts = str(tiny_folder), str(tiny_reward_folder), tiny_data.prompts

    monkeypatch.setattr(groups, "make_models", make)
    groups.main([*where, "--seeds", "0", "--score", "3.5", "--sides", "rloo", "TRL grpo"])
    out = capsys.readouterr().out
    assert "TRL grpo landed near the target in 3 runs" in out
    assert "betas of TRL: grpo 0.09" in out
    assert "rloo: 0 of 1 runs landed near the target, without a search" in out  # six updates are too few
    rows = {line.split("  ")[0]: line.split()[2:] for line in out.split("betas of TRL")[1].splitlines()}
    assert rows["TRL grpo"] == ["2", "512", "0.100", "5.50", "12.0", "1", "of", "1"]
    assert "rloo" in rows
    ours = RunFolder(tmp_path / "out" / "rloo-s0")
    settings = yaml.safe_load(ours.config.read_text())
    assert (settings["ppo"]["epochs"], settings["ppo"]["minibatch_size"]) == (1, 2)
    assert settings["run"]["dtype"] == "bfloat16"
