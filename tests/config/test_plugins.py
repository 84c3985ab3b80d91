from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.plugins import controller_arguments, controller_class, plugin_files
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError


class Takes:
    def __init__(self, *, target: float, coef: float, max_coef: float = 4.0, **options: Any) -> None: ...


class TakesEpisodes:
    def __init__(self, *, total_episodes: int, batch_size: int) -> None: ...


def arguments(cls: Any, controller: dict[str, Any], coef: float = 0.3) -> dict[str, Any]:
    config = TrainConfig.model_validate({"kl": {"target": 0.2, "controller": {"kind": "x", **controller}}})
    return controller_arguments(cls, config.kl, config.ppo, config.rollout, coef)


def test_the_run_fills_in_what_the_signature_takes() -> None:
    filled = arguments(TakesEpisodes, {})
    assert filled == {"total_episodes": 3840, "batch_size": 64}
    filled = arguments(Takes, {"gain": 2})
    assert (filled["target"], filled["coef"], filled["gain"]) == (0.2, 0.3, 2)


def test_what_is_written_wins() -> None:
    assert arguments(Takes, {"coef": 0.7})["coef"] == 0.7
    assert arguments(TakesEpisodes, {"total_episodes": 10})["total_episodes"] == 10


def test_auto_stays_inside_the_bounds() -> None:
    assert arguments(Takes, {}, coef=9.0)["coef"] == 4.0
    assert arguments(Takes, {"max_coef": 6}, coef=9.0)["coef"] == 6.0
    assert arguments(Takes, {"min_coef": 0.5})["coef"] == 0.5


@pytest.mark.parametrize(
    "kind", ["fixed", "schedule", "proportional", "threshold", "exponential", "dual", "pid", "adaptive"]
)
def test_every_built_in_controller_can_be_built_from_a_default_run(kind: str) -> None:
    config = TrainConfig.model_validate({"kl": {"controller": {"kind": kind}}})
    cls = controller_class(config.kl.controller.kind)
    assert cls(**controller_arguments(cls, config.kl, config.ppo, config.rollout, 0.3)).coef == 0.3


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean adaptive\?"):
        controller_class("adaptve")
    with pytest.raises(InputError, match="not a class or function"):
        controller_class("math:pi")


def test_the_files_behind_a_config_are_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    config = TrainConfig.model_validate({"reward": {"kind": f"{file}:f"}, "kl": {"controller": {"kind": "a:B"}}})
    assert plugin_files(config) == {"reward.kind": file}
