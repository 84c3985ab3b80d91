"""Controllers and reward functions that a config names: what reading it tells, what importing them tells, as made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rlhf_kl import ui
from rlhf_kl.config.named import check_named, configured_controller, models_of, plugins_of
from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.control import Guard, ScheduledKL, ZieglerKL, make_controller
from rlhf_kl.errors import InputError
from rlhf_kl.events import CoefNotFinite

SOURCE = """
class LinearKL:
    def __init__(self, *, coef: float, episodes: int, target: float) -> None:
        raise AssertionError("never built just to check it")
    def update(self, kl, episodes): ...

class NoCall:
    pass

class Law:
    def __init__(self, coef, min_coef, max_coef, key=None):
        self.coef, self.given, self.key = {}[key] if key == "sk-refused" else coef, (min_coef, max_coef), key
    def update(self, kl, episodes):
        if self.key: raise KeyError(f"at {self.key}")
        self.coef *= 100

class Thermostat:  # with the names of tutorials
    def __init__(self, init_kl_coef=0.1, target_kl=0.02):
        self.kl_coef, self.target_kl = init_kl_coef, target_kl
    def update(self, observed_kl):
        if observed_kl > 1.5 * self.target_kl: self.kl_coef *= 1.5
        elif observed_kl < 0.5 * self.target_kl: self.kl_coef /= 1.5
        return self.kl_coef

class Verl:
    def __init__(self, init_kl_coef, target_kl): self.value = init_kl_coef
    def update(self, current_kl, n_steps): self.value *= 2

def brevity(prompts: list[str], responses: list[str], words: int = 12, *, slope: float) -> list[float]:
    raise AssertionError("never called just to check it")

def blind(words): ...

def of_trl(completions): ...

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


PROBLEMS = [
    # (config, what reading it tells, else what importing its plugins tells)
    ("kl: {controller: {kind: mine.py:LinearKL, episodes: 5}}\nreward: {kind: mine.py:brevity, slope: 1}", [], []),
    (
        "reward: {kind: mine.py:brevity, word: 1.5, responses: []}\nkl: {controller: {kind: mine.py:LinearKL}}",
        [],
        [
            "kl.controller.episodes: missing, LinearKL needs it",
            "reward.responses: set by the program, remove it",
            "reward.word: unknown option of brevity; did you mean reward.words?",
        ],
    ),
    (  # a key of the section, beside a function's options
        "reward: {kind: mine.py:brevity, normalise: false}\n"
        "eval: {scorers: {x: {kind: mine.py:brevity, interfase: trl}}}",
        [],
        [
            "reward.normalise: unknown option of brevity; did you mean reward.normalize?",
            "eval.scorers.x.interfase: unknown option of brevity; did you mean eval.scorers.x.interface?",
        ],
    ),
    ("reward: {kind: mine.py:blind, words: 1}", [], ["reward.kind: a reward function takes (prompts, responses, ...)"]),
    ("reward: {kind: mine.py:of_trl}", [], ["reward.kind: a reward function takes (prompts, responses, ...)"]),
    ("reward: {kind: mine.py:of_trl, interface: trl}", [], []),
    ("reward: {kind: mine.py:NoCall}", [], ["reward.kind: NoCall has no __call__(prompts, responses)"]),
    ("reward: {kind: mine.py:NUMBER}", [], ["reward.kind: 'mine.py:NUMBER' is not a class or function"]),
    ("kl: {controller: {kind: mine.py:blind}}", [], ["kl.controller.kind: 'mine.py:blind' is not a class"]),
    (
        "kl: {controller: {kind: mine.py:LinearLK}}\nppo: {gamma: 2}\nreward: {gold: mine.py:Blind}",
        [
            "ppo.gamma must be less than or equal to 1: 2",
            "kl.controller.kind: mine.py has no 'LinearLK'; did you mean LinearKL?",
            "eval.scorers.gold.kind: mine.py has no 'Blind'; did you mean blind?",
        ],
        [],
    ),
    ("reward: {kind: rlhf_kl_no:f}", ["reward.kind: no module 'rlhf_kl_no' in "], []),
]


@pytest.mark.parametrize(("text", "read", "imported"), PROBLEMS)
def test_problems_of_plugins(here: Path, text: str, read: list[str], imported: list[str]) -> None:
    (here / "x.yaml").write_text(text)
    found: list[str] = []
    try:
        config = load_config("train", "x.yaml")
        assert not read
        check_named(config)
    except InputError as error:
        found = error.problems
    found = [line.replace(f"{here}/mine.py", "mine.py", 1) for line in found]
    assert len(found) == len(read + imported), found
    for line, expected in zip(found, read + imported, strict=True):
        assert line.startswith(expected)


def test_the_models_of_a_config_are_folders_and_names_of_the_hub() -> None:
    terms = {"a": {"model": "owner/a"}, "b": {"kind": "mine.py:brevity"}, "c": {}}
    scorers = {"g": {"model": "owner/g"}, "f": {"kind": "mine.py:brevity"}, "none": None}
    raw = {"reference": {"model": "owner/r"}, "reward": {"kind": "sum", "terms": terms}, "eval": {"scorers": scorers}}
    config = TrainConfig.model_validate(raw)
    assert models_of(config) == {
        "reference.model": "owner/r",
        "reward.terms.a.model": "owner/a",
        "eval.scorers.g.model": "owner/g",
    }
    assert {plugin.key for plugin in plugins_of(config)} == {
        "reward.terms.b.kind", "eval.scorers.f.kind", "eval.scorers.gold.kind",
    }  # fmt: skip


def controller(coef: float = 0.3, warmup: int = 0, **section: object) -> Guard:
    ppo = {"total_episodes": 640, "value_warmup": warmup}
    config = TrainConfig.model_validate(
        {"kl": {"target": 0.2, "controller": section}, "ppo": ppo, "rollout": {"batch_size": 64}}
    )
    return configured_controller(config, coef)


def test_a_controller_gets_target_coef_and_sizes_of_the_config() -> None:
    law = controller(kind="proportional", clip_error=0.5).law
    assert isinstance(law, ZieglerKL)
    assert (law.target, law.coef, law.clip_error, law.horizon) == (0.2, 0.3, 0.5, 64.0)  # 640 / 20, at least a batch
    scheduled = controller(kind="schedule").law
    assert isinstance(scheduled, ScheduledKL)
    assert scheduled.total_episodes == 640
    later = controller(kind="schedule", warmup=2).law
    assert isinstance(later, ScheduledKL)
    assert later.total_episodes == 512  # it does not move while only the value function learns
    # A written coef wins over the value of `auto`.
    assert (controller(kind="adaptive", coef=0.7).beta, controller(kind="static", coef=0).beta) == (0.7, 0.0)


def test_a_controller_that_needs_bounds_gets_them() -> None:
    """Those that are written, else those around the starting beta; they hold whatever the class does."""
    for options, bounds in (({}, (5e-4, 500.0)), ({"min_coef": 0.01, "max_coef": 2.0}, (0.01, 2.0))):
        law = make_controller("mine.py:Law", options, coef=0.5)
        assert law.law.given == pytest.approx(bounds)
        for _ in range(3):
            law.step(0.1, 64)
        assert law.beta == pytest.approx(bounds[1])


def test_a_class_with_the_names_of_a_tutorial_is_a_controller(capsys: pytest.CaptureFixture[str]) -> None:
    ui.start()
    law = controller(0.1, kind="mine.py:Thermostat")  # the value of `auto`
    ui.start(quiet=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "alert" not in said
    assert all(name in said for name in ("Thermostat", "update(kl)", "kl_coef", "init_kl_coef", "target_kl"))
    betas = [law.step(kl, 64) or law.beta for kl in (0.2, 0.2, 0.4, 0.4, 0.2, 0.2)]  # by hand: the config's target, 0.2
    assert betas == pytest.approx([0.1, 0.1, 0.15, 0.225, 0.225, 0.225])
    again = make_controller("mine.py:Thermostat", {"coef": 0.7}, target=0.2)
    assert again.beta == controller(kind="mine.py:Thermostat", init_kl_coef=0.7).beta == 0.7
    again.restore(law.save())
    assert (again.beta, again.save()["law"]) == (law.beta, {"kl_coef": law.beta, "target_kl": 0.2})
    with pytest.raises(InputError, match=r"^kl\.controller\.coef: "):
        make_controller("mine.py:Thermostat", {"coef": 0.7, "init_kl_coef": 0.1})
    verl = controller(0.1, kind="mine.py:Verl", max_coef=0.3)
    for _ in range(3):
        verl.step(0.2, 64)
    assert verl.beta == 0.3


def test_what_a_class_raises_is_one_line_with_its_place_and_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-refused")
    with pytest.raises(InputError, match=r"Law .*KeyError: '\$\{MY_KEY\}' \(mine"):
        make_controller("mine.py:Law", {"key": "${MY_KEY}"})
    monkeypatch.setenv("MY_KEY", "sk-123456")
    law = make_controller("mine.py:Law", {"key": "${MY_KEY}"}, coef=1.0)
    with pytest.raises(InputError, match=r"Law\.update .*KeyError: 'at \$\{MY_KEY\}' \(mine.py:"):
        law.step(0.1, 64)


@pytest.mark.parametrize("wrong", ["torch.exp(kl)", "kl.mean()", "kl.item()", "torch.clamp(kl, max=1.0)"])
def test_a_class_that_takes_the_kl_for_a_tensor_is_told_what_it_gets(here: Path, wrong: str) -> None:
    """As the exponential controller of a tutorial is written."""
    code = f"import torch\nclass Exponential:\n    coef = 0.1\n    def update(self, kl): self.coef *= {wrong}\n"
    (here / "exponential.py").write_text(code)
    words = r"raised \w+Error: [^\n]*: the KL is a number and no tensor, for math\.exp\(kl\) .*\.py:4"
    with pytest.raises(InputError, match=words) as found:
        make_controller("exponential.py:Exponential", {}).step(0.2, 64)
    assert len(str(found.value)) < 250


@pytest.mark.parametrize("names", ["logprob, ref_logprob", "log_ratio", "policy_logp, episodes"])
def test_a_class_that_asks_for_log_probs_is_refused(here: Path, names: str) -> None:
    """It would take the KL for a log-prob, and the number of responses for the reference's."""
    (here / "course.py").write_text(f"class Course:\n    coef = 0.1\n    def update(self, {names}): return 0.1\n")
    with pytest.raises(InputError, match=r"Course\.update asks for .*, but it gets the KL, a number in nats"):
        make_controller("course.py:Course", {})


@pytest.mark.parametrize("names", ["kl, log_path='x'", "mean_kl, episodes, logprobs=None", "kl, ref_count"])
def test_a_class_whose_other_parameters_are_named_like_log_probs_is_taken(here: Path, names: str) -> None:
    (here / "own.py").write_text(f"class Own:\n    coef = 0.1\n    def update(self, {names}): return 0.1\n")
    assert make_controller("own.py:Own", {}).kind == "Own"


def test_a_misspelled_coef_is_told(here: Path) -> None:
    with pytest.raises(InputError, match=r"kl\.controller\.coeff: .*did you mean kl\.controller\.coef\?"):
        make_controller("adaptive", {"coeff": 0.1})


METHODS = ("update", "observe_update", "observe_rate", "scale", "state_dict", "load_state_dict")
WATCHED = """
import torch
class Watched:
    def __init__(self, coef): self.coef, self.found = coef, []
    def note(self, method):
        from rlhf_kl_near_law import X
        self.found.append(method)
        torch.set_grad_enabled(False)
        if method == FAILS: raise KeyError("broken")
    def update(self, kl, episodes):
        self.note("update")
        self.coef = float("nan") if kl > 1 else self.coef
    def observe_update(self, before, after, uncut): self.note("observe_update")
    def observe_rate(self, factor): self.note("observe_rate")
    def scale(self): return self.note("scale") or 0.5
    def state_dict(self): return self.note("state_dict") or {"a": 1}
    def load_state_dict(self, state): self.note("load_state_dict")
"""


@pytest.mark.parametrize("base", ["", "(rlhf_kl.KLController)"])
@pytest.mark.parametrize("fails", ["", *METHODS])
def test_every_method_of_a_law_runs_at_its_home(here: Path, fails: str, base: str) -> None:
    """With its neighbours and settings, and with the line of its fault."""
    (here / "laws").mkdir()
    (here / "laws" / "rlhf_kl_near_law.py").write_text("X = 1\n")
    code = WATCHED.replace("FAILS", repr(fails)).replace("Watched:", f"Watched{base}:")
    if base:
        code = "import rlhf_kl\n" + code.replace(
            "self.coef, self.found = coef, []", "self.found = []; super().__init__(coef=coef)"
        )
    (here / "laws" / "law.py").write_text(code)
    law = make_controller("laws/law.py:Watched", {"coef": 0.1})

    def use() -> None:
        sys.modules.pop("rlhf_kl_near_law", None)
        assert law.step(0.1, 64, (0.1, 0.1, 0.1)) == []
        assert isinstance(law.step(2.0, 64)[0], CoefNotFinite)
        law.change_rate(0.5)
        assert law.distance_kept() == 0.5
        law.restore(law.save())

    if fails:
        with pytest.raises(InputError, match=rf"Watched.{fails} raised KeyError: 'broken' .*law\.py:"):
            use()
    else:
        use()
        assert set(law.law.found) == set(METHODS)
    assert torch.is_grad_enabled()
    sys.modules.pop("rlhf_kl_near_law", None)
