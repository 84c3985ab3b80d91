"""`kill -9` of one process, of the first, of both, in rollout, update and checkpoint; resumed on two and on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from rlhf_kl.run.log import read_jsonl

pytestmark = pytest.mark.slow
Launch = Callable[..., Any]
KILLS = [  # which ranks die, when, on how many processes the run goes on, with shards
    ("1", "rollout", 2, False),
    ("0", "update", 1, False),
    ("0,1", "checkpoint", 2, False),
    ("0", "update", 2, True),
    ("1", "rollout", 1, True),
]


def figures(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run, timings and the number of processes left out."""
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "kl/token" in row]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "dist/"))} for row in rows]


@pytest.fixture(scope="module")
def config(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kills") / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))
    return file


@pytest.fixture(scope="module")
def whole(config: Path, together: Callable[..., Any]) -> dict[bool, Path]:
    """The run that nobody kills, without and with shards."""
    folders = {shard: config.parent / f"whole-{shard}" for shard in (False, True)}
    commands = [words_of(config, folder, 2, shard) for shard, folder in folders.items()]
    result = together(commands)
    assert result.codes == [[0, 0]] * 2, result.output
    return folders


def words_of(config: Path, folder: Path, count: int, shard: bool) -> list[Any]:
    shards = ["--set", "policy.shard=true", "--set", "reference.shard=true"] if shard and count > 1 else []
    return ["train", "--config", config, "--output-dir", folder, "--quiet", *shards]


@pytest.mark.parametrize(("ranks", "moment", "count", "shard"), KILLS)
def test_a_killed_group_ends_and_its_run_goes_on(
    launch: Launch,
    together: Callable[..., Any],
    config: Path,
    whole: dict[bool, Path],
    tmp_path: Path,
    ranks: str,
    moment: str,
    count: int,
    shard: bool,
) -> None:
    worker = Path(__file__).with_name("killed_command.py")
    began = time.monotonic()
    process = launch([worker, ranks, moment, *words_of(config, tmp_path / "run", 2, shard)])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    assert time.monotonic() - began < 60
    assert len(figures(tmp_path / "run")) < 6
    result = together([[*words_of(config, tmp_path / "run", count, shard), "--resume"]], count)
    assert result.codes == [[0]] * count, result.output
    before, after = figures(whole[shard]), figures(tmp_path / "run")
    assert [row["step"] for row in after] == list(range(1, 7))
    files = [folder / "final" / "model.safetensors" for folder in (whole[shard], tmp_path / "run")]
    weights, resumed = map(load_file, files)
    if count == 2:  # bit for bit
        assert after == before
        assert all(tensor.equal(resumed[name]) for name, tensor in weights.items())
    else:  # sums come in another order
        for a, b in zip(before, after, strict=True):
            assert b["kl/token"] == pytest.approx(a["kl/token"], rel=2e-3, abs=2e-5)
            assert b["kl/coef"] == pytest.approx(a["kl/coef"], rel=2e-3)


def test_a_stopped_process_is_not_waited_for_forever(
    launch: Launch, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDED_BY", "SIGSTOP")
    worker = Path(__file__).with_name("killed_command.py")
    words = [*words_of(config, tmp_path / "run", 2, False), "--set", "run.wait_minutes=0.1"]
    process = launch([worker, "0", "update", *words])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    line = "error: another process of the group has not answered for 0.1 minutes (run.wait_minutes)"
    assert output.count(line) == 1, output
