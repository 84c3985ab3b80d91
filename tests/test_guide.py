"""The guide's code runs as it is printed. The trainers that it is for are stood in for by their few names it uses."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rlhf_kl.simulate import Plant, gaussian_law

TARGET = 0.1
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Recipe = Callable[..., Any]


def verl_section() -> str:
    page = (files("rlhf_kl") / "guide" / "coming_from.md").read_text(encoding="utf-8")
    return page.split("\n## verl\n")[1].split("\n## ")[0]


def settings(kind: str = "rlhf_kl", coef: float = 0.05) -> SimpleNamespace:
    """verl's algorithm.kl_ctrl."""
    return SimpleNamespace(type=kind, kl_coef=coef, target_kl=TARGET, horizon=10000)


def latest(folder: str) -> str | None:
    """What verl's find_latest_ckpt_path answers."""
    tracker = Path(folder, "latest_checkpointed_iteration.txt")
    return str(tracker.with_name(f"global_step_{tracker.read_text()}")) if tracker.exists() else None


@pytest.fixture
def start(monkeypatch, tmp_path) -> Recipe:
    """A new process of verl, up to its controller: (mode, folder, settings) -> the callback and the controller."""
    (code,) = CODE.findall(verl_section())

    class Callback:
        def __init__(self, config: Any = None) -> None:
            self.config = config

    def new(mode: str = "auto", folder: Path | None = None, kl_ctrl: Any = None) -> tuple[Any, Any]:
        core_algos = ModuleType("verl.trainer.ppo.core_algos")
        core_algos.get_kl_controller = lambda config: f"verl's own {config.type}"  # type: ignore[attr-defined]
        modules = {
            "verl.trainer.ppo": SimpleNamespace(core_algos=core_algos),
            "verl.trainer.ppo.core_algos": core_algos,
            "verl.trainer.ppo.checkpoint_callback": SimpleNamespace(CheckpointCallback=Callback),
            "verl.utils.checkpoint.checkpoint_manager": SimpleNamespace(find_latest_ckpt_path=latest),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        names: dict[str, Any] = {}
        exec(compile(code, "verl_kl.py", "exec"), names)
        trainer = SimpleNamespace(
            default_local_dir=str(tmp_path), resume_mode=mode, resume_from_path=folder and str(folder)
        )
        callback = names["SaveKLBudget"](SimpleNamespace(trainer=trainer))
        return callback, core_algos.get_kl_controller(kl_ctrl or settings())

    return new


def train(controller: Any, plant: Plant, updates: int) -> tuple[list[float], list[float]]:
    """KLs and betas, in verl's order: beta is read, the controller updated, then the policy."""
    kls, betas = [], []
    for _ in range(updates):
        kl, beta = plant.measure(), controller.value
        controller.update(current_kl=kl, n_steps=64)
        plant.advance(beta)
        kls.append(kl)
        betas.append(beta)
    return kls, betas


def save(callback: Any, controller: Any, folder: Path, step: int) -> None:
    """verl's own order: the folder, the tracker, the callback."""
    checkpoint = folder / f"global_step_{step}"
    checkpoint.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    trainer = SimpleNamespace(kl_ctrl_in_reward=controller)
    callback.on_save(trainer=trainer, global_step=step, checkpoint_dir=str(checkpoint), async_save=False)


def test_the_switches_of_the_text_name_what_the_code_has(start):
    assert "VERL_USE_EXTERNAL_MODULES=verl_kl " in verl_section()
    assert "trainer.checkpoint_callback_class=verl_kl.SaveKLBudget" in verl_section()
    assert "algorithm.kl_ctrl.type=rlhf_kl" in verl_section()
    callback, controller = start()
    assert (type(callback).__name__, type(controller).__name__) == ("SaveKLBudget", "KLBudget")


def test_verls_own_kinds_stay(start):
    assert start(kl_ctrl=settings("adaptive"))[1] == "verl's own adaptive"


@pytest.mark.parametrize("coef", [0.02, 0.2, 2.0], ids=["ten times too low", "right", "ten times too high"])
def test_the_target_is_held(start, coef):
    """Per token: 20 tokens and a spread of scores at which beta 0.2 holds 0.1 nats per token."""
    plant = Plant(gaussian_law(sigma=0.4), noise=0.05, length=20.0, inertia=0.5, climb=0.3)
    kls, betas = train(start(kl_ctrl=settings(coef=coef))[1], plant, 60)
    assert sum(abs(kl / TARGET - 1.0) for kl in kls[30:]) / 30 < 0.12
    assert math.exp(sum(map(math.log, betas[30:])) / 30) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_moves_nothing(start, kl, capsys):
    controller = start()[1]
    controller.update(current_kl=kl, n_steps=64)
    assert controller.value == 0.05
    assert "kl-not-finite" in capsys.readouterr().out


def test_a_resumed_run_goes_on_like_one_that_never_stopped(start, tmp_path):
    callback, controller = start()
    plant = Plant(gaussian_law(sigma=0.4), length=20.0)
    train(controller, plant, 20)
    save(callback, controller, tmp_path, 20)
    kls, betas = train(controller, plant, 10)
    save(callback, controller, tmp_path, 30)
    more_kls, more_betas = train(controller, plant, 10)

    def continued(other: Any, kls: list[float]) -> list[float]:
        betas = []
        for kl in kls:
            betas.append(other.value)
            other.update(current_kl=kl, n_steps=64)
        return betas

    earlier = tmp_path / "global_step_20"
    assert continued(start("auto")[1], more_kls) == more_betas
    assert continued(start("resume_path", earlier)[1], kls) == betas
    assert start("disable", earlier)[1].value == 0.05
    assert 0.05 not in (betas[0], more_betas[0])


def test_a_checkpoint_without_the_controller_starts_it_anew(start, tmp_path):
    (tmp_path / "global_step_5").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert start()[1].value == 0.05
