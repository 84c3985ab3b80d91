from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_kl.config.load import load_config
from rlhf_kl.config.plugins import (
    configured_controller,
    controller_class,
    load_controller,
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
            assert controller_class(written) == controller_class(stored)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean adaptive\?"):
        controller_class("adaptve")
    with pytest.raises(InputError, match="pi is not a class"):
        controller_class("math:pi")


def test_a_controller_that_needs_bounds_gets_them(tmp_path: Path) -> None:
    """Those that are written, else those around the starting beta; they hold whatever the class does."""
    (tmp_path / "law.py").write_text(
        "class Law:\n"
        "    def __init__(self, coef, min_coef, max_coef):\n"
        "        self.coef, self.given = coef, (min_coef, max_coef)\n"
        "    def update(self, kl, episodes):\n        self.coef *= 100\n"
    )
    kind = f"{tmp_path}/law.py:Law"
    for options, bounds in (({}, (5e-4, 500.0)), ({"min_coef": 0.01, "max_coef": 2.0}, (0.01, 2.0))):
        law = make_controller(kind, options, coef=0.5)
        assert law.controller.given == pytest.approx(bounds)
        for _ in range(3):
            law.update(0.1, 64)
        assert law.coef == pytest.approx(bounds[1])


@pytest.mark.parametrize(
    ("attribute", "signature", "words"),
    [
        (
            "kl_coef",
            "observed_kl",
            "has no update(kl, episodes) and no coef: "
            "rename update(observed_kl) to update(kl, episodes) and kl_coef to coef",
        ),
        ("coef", "observed_kl", "has no update(kl, episodes): rename update(observed_kl) to update(kl, episodes)"),
        ("kl_coef", "kl, n", "has no coef: rename kl_coef to coef"),
        ("weight", "kl, n", "has no coef"),
        ("coef", "kl, n", None),
        ("coef", "kl, n, more=1", None),
        ("coef", "kl, *rest", None),
        ("coef", "*kl", None),
    ],
)
def test_a_controller_as_the_tutorials_write_it(
    tmp_path: Path, attribute: str, signature: str, words: str | None
) -> None:
    (tmp_path / "law.py").write_text(
        "class Law:\n"
        f"    def __init__(self, init_kl_coef=0.1):\n        self.{attribute} = init_kl_coef\n"
        f"    def update(self, {signature}):\n        self.{attribute} *= 1.5\n"
    )
    if words is None:
        load_controller(f"{tmp_path}/law.py:Law", {})
        return
    with pytest.raises(InputError) as caught:
        load_controller(f"{tmp_path}/law.py:Law", {})
    assert caught.value.problems == [f"kl.controller.kind: Law {words}"]


def test_what_a_class_raises_is_one_line_with_its_place_and_without_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arithmetic error in `update` leaves beta where it is; any other ends the run."""
    monkeypatch.setenv("MY_KEY", "sk-123456")
    (tmp_path / "law.py").write_text(
        "class Made:\n"
        "    def __init__(self, key, error=None):\n"
        "        self.coef, self.key, self.error = 1.0, key, error\n"
        "    def update(self, kl, episodes):\n"
        "        raise {'over': OverflowError, 'key': KeyError}[self.error](f'at {self.key}')\n"
        "class Refuses(Made):\n"
        "    def __init__(self, key):\n        self.coef = {}[key]\n"
    )
    with pytest.raises(InputError) as caught:
        make_controller(f"{tmp_path}/law.py:Refuses", {"key": "${MY_KEY}"})
    reason = "Refuses cannot be created: raised KeyError: '${MY_KEY}' (law.py:8)"
    assert caught.value.problems == [f"kl.controller: {reason}"]
    law = make_controller(f"{tmp_path}/law.py:Made", {"key": "${MY_KEY}", "error": "over"})
    [alert] = law.update(0.1, 64)
    assert "OverflowError: at ${MY_KEY} (law.py:5)" in alert
    assert law.coef == 1.0
    with pytest.raises(InputError, match=r"Made.update raised KeyError: 'at \$\{MY_KEY\}' \(law.py:5\)"):
        make_controller(f"{tmp_path}/law.py:Made", {"key": "${MY_KEY}", "error": "key"}).update(0.1, 64)


@pytest.mark.parametrize(
    ("members", "lacking"),
    [
        ("coef: float = 1.0", "update"),
        ("def update(self, kl, n): ...", "coef"),
        ("def __init__(self, **v): vars(self).update(v)", None),
        ("def __getattr__(self, name): ...", None),
    ],
)
def test_what_instances_are_known_to_lack(tmp_path: Path, members: str, lacking: str | None) -> None:
    (tmp_path / "law.py").write_text(f"class Law:\n    {members}\n")
    if lacking is None:
        load_controller(f"{tmp_path}/law.py:Law", {})
    else:
        with pytest.raises(InputError, match=f"Law has no {lacking}"):
            load_controller(f"{tmp_path}/law.py:Law", {})


def test_the_shipped_schedule_tightens() -> None:
    config = load_config("train", "ppo_schedule")
    law = configured_controller(config.kl, config.ppo, config.rollout)
    coefs = [law.coef]
    for _ in range(config.updates):
        law.update(0.1, config.rollout.batch_size)
        coefs.append(law.coef)
    assert coefs == sorted(coefs)
    assert (coefs[0], coefs[-1]) == pytest.approx((0.1, 0.3))


def test_the_plugin_files_of_a_config(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    config = TrainConfig.model_validate({"reward": {"kind": f"{file}:f"}, "kl": {"controller": {"kind": "a:B"}}})
    assert plugin_files(config) == {"reward.kind": file}
