"""`scripts/bench_control.py`: its rows are configs that can be trained, and its search for a constant beta."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.compare import check_variants
from rlhf_kl.config.yaml import read_yaml

SCRIPTS = Path(__file__).parents[2] / "scripts"
BENCH: dict[str, Any] = runpy.run_path(str(SCRIPTS / "bench_control.py"))


def test_every_row_can_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models/TinyStories-656K").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models/TinyStories-656K" / name).touch()
    (tmp_path / "data/tinystories-1000").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models/TinyStories-656K" / name).touch()
    (tmp_path / "data/tinystories-1000/stories.jsonl").write_text('{"text": "Once."}\n')
    args = BENCH["parse_arguments"](["--out", str(tmp_path / "out"), "--real", str(tmp_path)])
    rows = read_yaml(SCRIPTS / "bench_control.yaml")
    planned = {name: BENCH["plan_row"](name, row, args) for name, row in rows.items()}
    check_variants(BENCH["ComparePlan"]("x", tmp_path, [run for runs in planned.values() for run in runs], []))
    assert sum(len(planned[name]) for name in BENCH["chosen"]([], rows)) == 42
    assert [run.name for run in planned["pid"]] == ["pid-b0.01-s0", "pid-b0.1-s0", "pid-b1-s0"]
    (constant,) = BENCH["plan_row"]("stress-shrinking", rows["stress-shrinking"], args, 0.5)
    assert (constant.config.kl.controller.kind, constant.config.kl.ceiling) == ("fixed", None)
    assert constant.config.reward.model_extra == {"responses": 1024}


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("scale", [0.003, 1.0, 50.0])
def test_the_search_finds_a_constant_beta(power: float, scale: float) -> None:
    """KL/target = scale / beta^power, from beta 0.3."""
    tries: list[tuple[float, float, float]] = []
    while (coef := BENCH["next_coef"](tries)) is not None:
        coef = 0.3 if coef == "auto" else coef
        level = scale / coef**power
        tries.append((coef, level, abs(level - 1)))
    assert min(error for _, _, error in tries) <= 0.25
