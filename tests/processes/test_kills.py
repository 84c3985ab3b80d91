"""`kill -9` of one process, of the first, of both, in rollout, update and checkpoint; resumed on two and on one."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from safetensors.torch import load_file

from rlhf_kl.run.checkpoint import checkpoints
from tests.made import Make
from tests.runs import rows, sets

pytestmark = pytest.mark.slow
KILLS = [  # which ranks die, when, on how many processes the run goes on, and what is special
    ("1", "rollout", 2, ""),
    ("0", "update", 1, ""),
    ("0,1", "checkpoint", 2, ""),
    ("0", "meanwhile", 2, "background"),
    ("0", "update", 2, "shard"),
    ("1", "rollout", 1, "shard background"),
    ("1", "shard", 2, "shard"),
    ("1", "shard", 2, "shard background"),
    ("1", "weights", 2, "shard engine"),
]
SPECIAL = {
    "shard": ["policy.shard=true", "reference.shard=true"],
    "background": ["checkpoint.background=true"],
    "engine": ["rollout.engine=vllm"],
}
WHOLE = {"shard engine": "shard engine", "shard background": "shard", "shard": "shard"}  # with equal figures


def figures(folder: Path) -> list[dict[str, Any]]:
    """The updates of a run, without the number of processes."""
    return [{k: v for k, v in row.items() if k[:5] != "dist/"} for row in rows(folder) if "kl/token" in row]


@pytest.fixture(scope="module")
def config(tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("kills") / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))
    return file


@pytest.fixture(scope="module")
def whole(config: Path, together: Make) -> dict[str, Path]:
    """The runs that nobody kills."""
    folders = {special: config.parent / f"whole-{special}" for special in ("", *dict.fromkeys(WHOLE.values()))}
    result = together([words_of(config, folder, 2, special) for special, folder in folders.items()])
    assert result.codes == [[0] * len(folders)] * 2, result.output
    return folders


def words_of(config: Path, folder: Path, count: int, special: str) -> list[Any]:
    given = [name for name in special.split() if name != "shard" or count > 1]
    changes = sets(*(change for name in given for change in SPECIAL[name]))
    return ["train", "--config", config, "--output-dir", folder, "--quiet", *changes]


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_group_ends_and_its_run_goes_on(
    launch: Make, together: Make, config: Path, whole: Any, tmp_path: Path, kill: tuple[str, str, int, str]
) -> None:
    ranks, moment, count, special = kill
    worker = Path(__file__).with_name("killed_command.py")
    began = time.monotonic()
    process = launch([worker, ranks, moment, *words_of(config, tmp_path / "run", 2, special)])
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0, output
    assert time.monotonic() - began < 60
    told = f"process {ranks} on {socket.gethostname()} has ended"
    assert output.count(told) == (0 if "," in ranks else 1), output
    assert len(figures(tmp_path / "run")) < 6
    if moment in ("meanwhile", "shard"):
        assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    result = together([[*words_of(config, tmp_path / "run", count, special), "--resume"]], count)
    assert result.codes == [[0]] * count, result.output
    unharmed = whole[WHOLE.get(special, "")]
    before, after = figures(unharmed), figures(tmp_path / "run")
    assert [row["step"] for row in after] == list(range(1, 7))
    if count == 2:  # bit for bit
        assert after == before
        weights, resumed = (load_file(run / "final" / "model.safetensors") for run in (unharmed, tmp_path / "run"))
        assert all(tensor.equal(resumed[name]) for name, tensor in weights.items())
    else:  # sums come in another order
        for a, b in zip(before, after, strict=True):
            assert b["kl/token"] == pytest.approx(a["kl/token"], rel=2e-3, abs=2e-5)
            assert b["kl/coef"] == pytest.approx(a["kl/coef"], rel=2e-3)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_stopped_process_is_not_waited_for_forever(
    launch: Make, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("ENDED_BY", "SIGSTOP")
    worker = Path(__file__).with_name("killed_command.py")
    words = [*words_of(config, tmp_path / "run", 2, ""), "--set", "run.wait_minutes=0.1"]
    process = launch([worker, rank, "update", *words])
    line = f"process {rank} on {socket.gethostname()} has not answered for 0.1 minutes (run.wait_minutes)"
    told = next((each for each in process.stdout if line in each), None)
    for rest in psutil.Process(process.pid).children():
        if rest.status() == psutil.STATUS_STOPPED:  # torchrun would wait 30 s before it kills it
            rest.kill()
    output, _ = process.communicate(timeout=60)
    assert told is not None
    assert line not in output
    assert process.returncode != 0, output
