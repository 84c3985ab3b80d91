"""The estimate of a process's memory beside the bytes of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.distributed import can_shard
from rlhf_kl.models.load import save_model
from rlhf_kl.models.scratch import new_gpt2

Launch = Callable[..., Any]
SHARD = {"policy": {"shard": True}}
EVERYTHING = SHARD | {"reference": {"shard": True}}


@pytest.fixture(scope="module")
def layered_folder(tmp_path_factory: pytest.TempPathFactory, letters: Any) -> Path:
    """A GPT-2 that is nearly all layers: 2.7 MB of weights."""
    shape = {"hidden_size": 96, "layers": 6, "heads": 2, "context": 32}
    folder = tmp_path_factory.mktemp("layered") / "model"
    save_model(new_gpt2(vocab_size=len(letters), tokenizer=letters, seed=0, **shape), letters, folder)
    return folder


@pytest.mark.parametrize(
    ("processes", "sections"),
    [(2, {}), (2, EVERYTHING), (2, EVERYTHING | {"policy": {"shard": True, "lora": {"r": 2}}})],
    ids=["two", "all sharded", "sharded adapter"],
)
def test_what_a_process_holds_after_an_update(
    launch: Launch,
    layered_folder: Path,
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    processes: int,
    sections: dict[str, Any],
) -> None:
    if SHARD.keys() & sections.keys() and not can_shard():
        pytest.skip("FSDP2 of this torch is too old")
    policy = {"model": str(layered_folder), "value": "head"} | sections.get("policy", {})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings | sections | {"policy": policy}))
    worker = Path(__file__).with_name("held_bytes.py")
    process = launch([worker, tmp_path / "run.yaml", tmp_path / "bytes"], processes)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    for index in range(processes):
        found = json.loads((tmp_path / f"bytes.{index}").read_text())
        assert found["held"] == pytest.approx(found["kept"] + found["states"], rel=0.1)
