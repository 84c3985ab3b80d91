from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_kl.config.plugins import (
    configured_controller,
    controller_definition,
    controller_problems,
    make_controller,
    plugin_files,
)
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.kl_controllers import ScheduledKL, ZieglerKL
from rlhf_kl.kl_controllers.base import KLController


def controller(coef: float = 0.3, **section: object) -> KLController:
    config = TrainConfig.model_validate(
        {"kl": {"target": 0.2, "controller": section}, "ppo": {"total_episodes": 640}, "rollout": {"batch_size": 64}}
    )
    law = configured_controller(config.kl, config.ppo, config.rollout, coef).controller
    assert isinstance(law, KLController)
    return law


def test_a_controller_gets_target_coef_and_sizes_of_the_config() -> None:
    law = controller(kind="ziegler", clip_error=0.5)
    assert isinstance(law, ZieglerKL)
    assert (law.target, law.coef, law.clip_error, law.horizon) == (0.2, 0.3, 0.5, 64.0)  # 640 / 20, at least a batch
    scheduled = controller(kind="schedule")
    assert isinstance(scheduled, ScheduledKL)
    assert scheduled.total_episodes == 640


def test_a_written_coef_wins_over_the_value_of_auto() -> None:
    assert controller(kind="adaptive", coef=0.7).coef == 0.7
    assert controller(kind="fixed", coef=0).coef == 0.0


def test_old_names_of_kinds_are_read() -> None:
    for written, stored in (("static", "fixed"), ("proportional", "ziegler"), ("mine:Law", "mine:Law")):
        config = TrainConfig.model_validate({"kl": {"controller": {"kind": written, "coef": 0.1}}})
        assert config.kl.controller.kind == stored
        if written != stored:
            assert controller_definition(written) == controller_definition(stored)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean adaptive\?"):
        controller_definition("adaptve")
    assert controller_definition("math:pi").kind == "value"


def test_a_controller_that_needs_bounds_gets_them(tmp_path: Path) -> None:
    """Those that are written, else those around the starting beta; they hold whatever the class does."""
    (tmp_path / "law.py").write_text(
        "class Law:\n"
        "    def __init__(self, coef, min_coef, max_coef):\n"
        "        self.coef, self.given = coef, (min_coef, max_coef)\n"
        "    def update(self, kl, episodes):\n        self.coef *= 100\n"
    )
    kind = f"{tmp_path}/law.py:Law"
    assert controller_problems({"kind": kind, "min_coef": 0.01}) == []
    for options, bounds in (({}, (5e-4, 500.0)), ({"min_coef": 0.01, "max_coef": 2.0}, (0.01, 2.0))):
        law = make_controller(kind, options, coef=0.5)
        assert law.controller.given == pytest.approx(bounds)
        for _ in range(3):
            law.update(0.1, 64)
        assert law.coef == pytest.approx(bounds[1])


def test_the_plugin_files_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    config = TrainConfig.model_validate({"reward": {"kind": f"{file}:f"}, "kl": {"controller": {"kind": "a:B"}}})
    assert plugin_files(config) == {"reward.kind": file}
