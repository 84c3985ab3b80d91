from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.distributed import Ranks
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.setup import build_setup
from rlhf_kl.training.start import score_reference


def test_each_reference_sample_keeps_its_prompt_in_every_round(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    """By a score that the prompt alone decides: 480 samples are drawn in four rounds."""
    (tmp_path / "mine.py").write_text(
        "def of_prompt(prompts, responses):\n    return [sum(map(ord, p)) + len(p) / 7 for p in prompts]\n"
    )
    changes = {"reward": {"kind": f"{tmp_path}/mine.py:of_prompt"}, "rollout": {"reference_samples": 480}}
    merged = {name: tiny_settings[name] | section for name, section in changes.items()}
    config = TrainConfig.model_validate(tiny_settings | merged)
    samples = score_reference(config, build_setup(resolve(config), torch.device("cpu")), Ranks())
    assert len(samples.scores) == len(samples.groups) == 480
    of_groups: dict[int, set[float]] = {}
    for group, score in zip(samples.groups, samples.scores.tolist(), strict=True):
        of_groups.setdefault(group, set()).add(score)
    assert {len(found) for found in of_groups.values()} == {1}
    assert len({score for found in of_groups.values() for score in found}) > 5


def test_frozen_layers_are_rounded_before_they_come_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in float32 may not fit there: 7B of an adapter's frozen weights take 28 GB."""
    config = load_config("train", "smoke.yaml", ["run.dtype=bfloat16", "policy.lora={r: 2}"])
    moved: list[tuple[str, torch.dtype]] = []
    to = nn.Module.to

    def noting(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if arguments == (torch.device("meta"),):
            moved.extend((name, parameter.dtype) for name, parameter in self.named_parameters())
        return to(self, *arguments, **named)

    monkeypatch.setattr(nn.Module, "to", noting)
    build_setup(resolve(config), torch.device("meta"))
    layers = {dtype for name, dtype in moved if ".c_fc" in name and "lora_" not in name and name.endswith("weight")}
    assert layers == {torch.bfloat16}
    assert {dtype for name, dtype in moved if "lora_" in name} == {torch.float32}
