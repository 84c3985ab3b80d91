"""What the README prints works as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rlhf_kl.run.jsonl import read_jsonl

if TYPE_CHECKING:
    from rlhf_kl.commands.world import World

README = Path(__file__).parent.parent / "README.md"


def blocks(heading: str) -> dict[str, list[str]]:
    """The code blocks below a heading, by language, in their order."""
    section = README.read_text(encoding="utf-8").split(f"\n{heading}\n", 1)[1]
    section = re.split(r"\n#{2,3} ", section, maxsplit=1)[0]
    found: dict[str, list[str]] = {}
    for language, text in re.findall(r"```(\w+)\n(.*?)```", section, flags=re.DOTALL):
        found.setdefault(language, []).append(text)
    return found


def test_a_config_for_a_model_of_ones_own(rlhf_kl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = blocks("## Commands")
    (tmp_path / "my.yaml").write_text(printed["yaml"][0])
    (tmp_path / "mine.py").write_text(printed["python"][0])
    (tmp_path / "my-model").mkdir()
    for name in ("prompts.jsonl", "heldout.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    outcome = rlhf_kl("config", "validate", "my.yaml")
    assert outcome.code == 0, outcome.err


def test_a_controller_of_ones_own(
    small_world: World, rlhf_kl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = blocks("### Your own controller")
    assert len(printed["python"][0].strip().splitlines()) <= 10
    (tmp_path / "mine.py").write_text(printed["python"][0])
    (tmp_path / "mine.yaml").write_text("extends: smoke.yaml\n" + printed["yaml"][0])
    monkeypatch.chdir(tmp_path)
    outcome = rlhf_kl("train", "--config", "mine.yaml", "--output-dir", "run", "--quiet")
    assert outcome.code == 0, outcome.err
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "kl/coef" in row]
    # Linear in the episodes seen, by hand: 16 a rollout, 5000 in all.
    assert [row["kl/coef"] for row in rows] == pytest.approx([0.2, 0.2 * (1 - 16 / 5000), 0.2 * (1 - 32 / 5000)])


def test_a_loop_of_ones_own() -> None:
    names = {
        "scores": torch.tensor([1.0, 0.5]),
        "logprobs": torch.tensor([[-2.0, -2.5], [-3.0, 0.0]]),
        "ref_logprobs": torch.tensor([[-2.1, -2.3], [-2.8, 0.0]]),
        "mask": torch.tensor([[True, True], [True, False]]),
    }
    exec(blocks("### Your own controller")["python"][1], names)
    torch.testing.assert_close(names["rewards"], torch.tensor([[-0.01, 1.02], [0.52, 0.0]]))
    assert names["controller"].updates == 1  # type: ignore[attr-defined]
