"""Runs on a GPU: `make gpu-check`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.run.log import read_jsonl
from tests.made import Make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_on_one_gpu(rlhf_kl: Make, tiny_settings: dict[str, Any], tmp_path: Path, dtype: str) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings | {"run": {"device": "cuda", "dtype": dtype}}))
    outcome = rlhf_kl("train", "--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "run", "--quiet")
    assert outcome.code == 0, outcome.err
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "kl/token" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(math.isfinite(row["policy/loss"]) for row in rows)
    assert rows[0]["kl/token"] == pytest.approx(0.0, abs=1e-4 if dtype == "float32" else 1e-2)
    assert rows[-1]["kl/token"] > 0
