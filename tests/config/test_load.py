from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rlhf_kl.config.errors import all_keys
from rlhf_kl.config.load import config_diff, dump_config, json_schema, load_any, load_config
from rlhf_kl.config.paths import find_config, shipped_configs
from rlhf_kl.config.plugins import check_plugins
from rlhf_kl.config.schema import MODELS, Kind, Section, SFTConfig, TrainConfig, section_of
from rlhf_kl.errors import InputError

Write = Callable[..., Path]

CONTROLLER = """
class LinearKL:
    def __init__(self, *, coef: float, episodes: int, target: float) -> None:
        self.coef = coef
        raise AssertionError("never built just to check it")
    def update(self, kl, episodes): ...

class NoUpdate:
    pass
"""
REWARD = """
def brevity(prompts: list[str], responses: list[str], words: int = 12, *, slope: float) -> list[float]:
    raise AssertionError("never called just to check it")

def blind(words): ...

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Write:
    def write(name: str = "x.yaml", text: str = "run: {}\n") -> Path:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def problems(text: str, write: Write, *overrides: str, kind: Kind = "train") -> list[str]:
    with pytest.raises(InputError) as caught:
        load_config(kind, write(text=text), list(overrides))  # type: ignore[call-overload]
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


# ---- finding ----


def test_a_name_is_looked_up_here_then_in_configs_then_among_the_shipped(write: Write) -> None:
    shipped = find_config("ppo_adaptive.yaml")
    assert shipped.parent == shipped_configs()
    second = write("configs/ppo_adaptive.yaml")
    assert find_config("ppo_adaptive.yaml") == second
    first = write("ppo_adaptive.yaml")
    assert find_config("ppo_adaptive.yaml") == first


def test_a_config_is_named_without_its_ending(write: Write) -> None:
    assert find_config("ppo_static") == find_config("ppo_static.yaml")
    mine = write("mine.yaml")
    assert find_config("mine") == mine


def test_a_missing_config_names_the_nearest(write: Write) -> None:
    write("mine.yaml")
    with pytest.raises(InputError, match=r"did you mean mine\.yaml\?"):
        find_config("mien.yaml")
    with pytest.raises(InputError, match=r"did you mean ppo_adaptive\.yaml\?"):
        find_config("ppo_adaptiv.yaml")
    with pytest.raises(InputError, match="no config"):
        find_config("x" * 5000)


def test_a_folder_is_no_config(here: Path) -> None:
    (here / "sub.yaml").mkdir()
    with pytest.raises(InputError, match="folder"):
        find_config("sub.yaml")


@pytest.mark.parametrize("path", sorted(shipped_configs().glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    if "variants" in path.read_text():
        pytest.skip("a comparison of configs")
    if path.name == "ppo_model.yaml":
        pytest.skip("a base that must be given a model")
    _, config = load_any(path)
    assert config.run.name == path.stem


def test_the_differences_of_the_shipped_runs() -> None:
    adaptive, static = (load_config("train", f"ppo_{name}.yaml") for name in ("adaptive", "static"))
    assert {line.split(":")[0] for line in config_diff(adaptive, static)} == {
        "run.name", "run.output_dir", "kl.controller.kind", "kl.controller.coef",
        "kl.ceiling", "kl.ceiling.value", "kl.ceiling.action",
    }  # fmt: skip
    no_kl = load_config("train", "ppo_no_kl.yaml")
    assert (no_kl.kl.controller.kind, no_kl.kl.controller.coef, no_kl.kl.ceiling) == ("fixed", 0.0, None)
    smoke = load_config("train", "smoke.yaml")
    assert smoke.updates == 3
    assert "builtin:reviews\n" not in dump_config(smoke)


def test_the_commented_default_run_writes_the_defaults() -> None:
    changed = config_diff(load_config("train", "ppo_adaptive.yaml"), TrainConfig())
    assert {line.split(":")[0] for line in changed} == {"run.name", "run.output_dir", "kl.target"}  # of this world
    changed = config_diff(load_config("sft", "sft_reviews.yaml"), SFTConfig.model_validate({}))
    assert {line.split(":")[0] for line in changed} == {"run.name", "run.output_dir"}


# ---- extends and --set ----


def test_the_childs_values_win_and_the_rest_stays(write: Write) -> None:
    write("base.yaml", "kl: {target: 0.2, estimator: k3}\nppo: {epochs: 2}\n")
    config = load_config("train", write("child.yaml", "extends: base.yaml\nkl: {target: 0.3}\n"))
    assert (config.kl.target, config.kl.estimator, config.ppo.epochs) == (0.3, "k3", 2)
    assert config.run.name == "child"


def test_a_users_file_extends_the_shipped_one_of_its_own_name(write: Write) -> None:
    config = load_config("train", write("ppo_static.yaml", "extends: ppo_static.yaml\nrun: {seed: 7}\n"))
    assert (config.run.seed, config.kl.controller.kind) == (7, "fixed")


def test_extends_looks_beside_the_file_first(write: Write) -> None:
    write("base.yaml", "run: {seed: 1}\n")
    write("sub/base.yaml", "run: {seed: 2}\n")
    assert load_config("train", write("sub/child.yaml", "extends: base.yaml\n")).run.seed == 2


def test_a_circle_and_a_missing_parent_are_one_line(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    with pytest.raises(InputError, match="circle"):
        load_config("train", write("b.yaml", "extends: a.yaml\n"))
    assert "did you mean ppo_static.yaml?" in problems("extends: ppo_sttic.yaml\n", write)[0]
    assert "extends must be" in problems("extends: [1]\n", write)[0]
    assert "extends: no config" in problems("extends: x.yaml\n", write)[0]  # a file never matches itself


def test_a_chain_without_end_is_stopped(write: Write) -> None:
    for i in range(40):
        write(f"c{i}.yaml", f"extends: c{i + 1}.yaml\n")
    with pytest.raises(InputError, match="extend one another"):
        load_config("train", "c0.yaml")


CHANGED_KIND = "kl: {controller: {kind: pid, coef: 0.3, kp: 0.9}}\n"


@pytest.mark.parametrize("by", ["extends", "set", "set whole", "set in any order"])
def test_a_new_kind_drops_the_old_kinds_options(write: Write, by: str) -> None:
    base = write("base.yaml", CHANGED_KIND)
    if by == "extends":
        child = "extends: base.yaml\nkl: {controller: {kind: ziegler, horizon: 500}}\n"
        config = load_config("train", write("child.yaml", child))
    elif by == "set whole":
        config = load_config("train", base, ["kl.controller={kind: ziegler, horizon: 500}"])
    else:
        sets = ["kl.controller.kind=ziegler", "kl.controller.horizon=500"]
        config = load_config("train", base, sets if by == "set" else sets[::-1])
    assert config.kl.controller.options == {"horizon": 500}
    assert config.kl.controller.coef == "auto"


def test_the_same_kind_keeps_its_options_also_where_it_is_the_default(write: Write) -> None:
    base = write("base.yaml", CHANGED_KIND)
    config = load_config("train", base, ["kl.controller={kind: pid, ki: 0.2}"])
    assert config.kl.controller.options == {"kp": 0.9, "ki": 0.2}
    fixed = write("fixed.yaml", "kl: {controller: {kind: fixed, coef: 0.4}}\n")
    assert load_config("train", fixed, ["kl.controller.kind=static"]).kl.controller.coef == 0.4
    implied = write("implied.yaml", "kl: {controller: {coef: 0.4}}\n")
    assert load_config("train", implied, ["kl.controller.kind=adaptive"]).kl.controller.coef == 0.4
    assert load_config("train", implied, ["kl.controller.kind=pid"]).kl.controller.coef == "auto"


def test_the_general_keys_of_reward_outlive_its_kind(write: Write) -> None:
    write("mine.py", REWARD)
    base = write("base.yaml", "reward: {model: builtin:reviews-small, normalize: false, clip: null}\n")
    reward = load_config("train", base, ["reward.kind=mine.py:brevity", "reward.slope=2"]).reward
    assert (reward.model, reward.normalize, reward.clip, reward.options) == (None, False, None, {"slope": 2})


def test_set_reads_values_as_yaml(write: Write) -> None:
    sets = [
        "ppo.learning_rate=1e-5",
        "run.name=off",
        "tracking.tensorboard=false",
        "kl.ceiling=",
        "kl.target=1",
    ]
    config = load_config("train", write(), sets)
    assert (config.ppo.learning_rate, config.run.name, config.kl.target) == (1e-5, "off", 1.0)
    assert config.tracking.tensorboard is False
    assert config.kl.ceiling is None


def test_a_set_that_is_none_is_listed(write: Write) -> None:
    bad = ["nonsense", "=1", "a..b=1", "kl.target=[1", ".".join(["a"] * 5000) + "=1"]
    lines = problems("run: {}\n", write, *bad)
    assert len(lines) == len(bad)
    assert all(line.startswith("--set") for line in lines)


# ---- problems ----


def test_all_problems_are_listed_at_once(write: Write) -> None:
    text = """
run: {seed: -1, device: gpu}
ppo: {lerning_rate: 1e-5, gamma: 1.5, epochs: 2.5, minibatch_size: 48}
kl: {target: -0.1, controller: {kind: pdi}}
tracking: {tensorboard: off}
data: {prompts: missing.jsonl}
"""
    assert set(problems(text, write)) == {
        "run.seed must be at least 0: -1",
        "run.device must be auto, cpu, cuda, cuda:N or mps: 'gpu'",
        "ppo.lerning_rate: unknown key; did you mean ppo.learning_rate?",
        "ppo.gamma must be at most 1: 1.5",
        "ppo.epochs must be a whole number: 2.5",
        "kl.target must be positive: -0.1",
        "kl.controller.kind: unknown name 'pdi'; did you mean pid? (or write file.py:Class or module:Class)",
        "tracking.tensorboard must be a boolean (write true or false): 'off'",
        "data.prompts: no such file: missing.jsonl",
        "ppo.minibatch_size must divide rollout.batch_size (64): 48",
    }


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "kl: {placement: rao_blackwell, estimator: k1, unit: seq}",
            [
                "kl.unit must be 'token' or 'sequence': 'seq'",
                "kl.estimator must be 'exact' where kl.placement is rao_blackwell: 'k1'",
            ],
        ),
        # There is no line about a default that stands in for the wrong value.
        ("kl: {target: -1, ceiling: {value: 0.05}}", ["kl.target must be positive: -1"]),
        (
            "ppo: {minibatch_size: x}\nrollout: {batch_size: 48}",
            ["ppo.minibatch_size must be a whole number or null: 'x'"],
        ),
        ("kl: {controller: {kind: 5, coef: 0}}", ["kl.controller.kind must be text: 5"]),
        ("reward: {kind: 5, words: 3}", ["reward.kind must be text: 5"]),
        ("rollout: 5\nppo: {minibatch_size: 48}", ["rollout must be a mapping: 5"]),
    ],
)
def test_right_keys_that_disagree_are_listed_beside_a_wrong_one(write: Write, text: str, lines: list[str]) -> None:
    assert problems(text + "\n", write) == lines


def test_a_set_that_cannot_be_read_is_listed_with_the_rest(write: Write) -> None:
    assert problems("run: {seed: -1}\n", write, "foo", "kl.traget=1", "ppo.epochs=four") == [
        "--set 'foo': write section.key=value",
        "kl.traget: unknown key; did you mean kl.target?",
        "run.seed must be at least 0: -1",
        "ppo.epochs must be a whole number: 'four'",
    ]


def test_sets_that_contradict_each_other(write: Write) -> None:
    for sets in (["kl=3", "kl.target=0.1"], ["kl.ceiling.value=2x", "kl={ceiling: 3}"]):
        assert f"--set {sets[0]!r} and --set {sets[1]!r} contradict each other: drop one" in problems(
            "run: {}\n", write, *sets
        )
    again = load_config("train", write(), ["kl.target=0.1", "run.seed=1", "kl={target: 0.2}", "run.seed=2"])
    assert (again.kl.target, again.run.seed) == (0.2, 2)


def test_a_section_that_is_set_and_then_left_out(write: Write) -> None:
    file = write()
    assert load_config("train", file, ["kl.ceiling.value=1.3x", "kl.ceiling=null"]).kl.ceiling is None
    assert load_config("train", file, ["kl.ceiling=null", "kl.ceiling.value=0.2"]).kl.ceiling_value == 0.2


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ppo: {batch_size: 32}", "ppo.batch_size: unknown key; did you mean rollout.batch_size?"),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean ppo.learning_rate?"),
        ("ppo: {lr: 1}", "ppo.lr: unknown key; did you mean ppo.learning_rate?"),
        ("rollot: {batch_size: 1}", "rollot: unknown key; did you mean rollout?"),
        ("reward: {normalise: true}", "reward.normalise: unknown key; did you mean reward.normalize?"),
        ("kl: {ceiling: {valu: 2x}}", "kl.ceiling.valu: unknown key; did you mean kl.ceiling.value?"),
        (
            "run: {'': 1}",
            "run.: unknown key; valid: name, output_dir, seed, device, dtype, wait_minutes, trust_remote_code, "
            "allow_pickle",
        ),
        ("kl: 5", "kl must be a mapping: 5"),
        ("eval:", "eval must be a mapping: null"),
        ("run: {name: 5}", "run.name must be text: 5"),
        ("ppo: {critic_lam: none}", "ppo.critic_lam must be a number or null: 'none'"),
        ("ppo: {learning_rate: '1e-5'}", "ppo.learning_rate must be a number or 'auto': '1e-5'"),
        ("ppo: {learning_rate: .nan}", "ppo.learning_rate must be a finite number: nan"),
        ("ppo: {learning_rate: 1e999}", "ppo.learning_rate must be a finite number: inf"),
        ("ppo: {whiten_rewards: 1}", "ppo.whiten_rewards must be a boolean (write true or false): 1"),
        ("run: {seed: 99999999999}", "run.seed must be below 4294967296: 99999999999"),
        (
            "reward: {kind: sum, terms: {a: {model: builtin:reviews, wieght: 2}}}",
            "reward.terms.a.wieght: unknown key; did you mean reward.terms.a.weight?",
        ),
        (
            "reward: {kind: sum, normalise: true, terms: {a: {model: builtin:reviews}}}",
            "reward.normalise: unknown key; did you mean reward.normalize?",
        ),
        ("ppo: {epochs: true}", "ppo.epochs must be a whole number: true"),
        ("rollout: {temperature: 0}", "rollout.temperature must be positive: 0"),
        ("kl: {placement: los}", "kl.placement must be 'reward', 'loss' or 'rao_blackwell': 'los'"),
        ("kl: {controller: {coef: high}}", "kl.controller.coef must be a number or 'auto': 'high'"),
        ("kl: {controller: {coef: -1}}", "kl.controller.coef must not be negative: -1"),
        (
            "kl: {controller: {kind: pid, coef: 0}}",
            "kl.controller.coef must be positive: 0 (only kind fixed may hold beta at 0)",
        ),
        ("kl: {controller: {target: 1}}", "kl.controller.target: unknown key; did you mean kl.target?"),
        (
            "kl: {placement: rao_blackwell, estimator: k1}",
            "kl.estimator must be 'exact' where kl.placement is rao_blackwell: 'k1'",
        ),
        ("kl: {ceiling: {value: 0.05}}", "kl.ceiling.value must be above kl.target (0.1): 0.05"),
        ("kl: {ceiling: {value: 0.5x}}", "kl.ceiling.value must be above kl.target (0.1): 0.5x"),
        ("kl: {ceiling: {value: x}}", "kl.ceiling.value must be a number or a multiple such as 1.5x: 'x'"),
        ("ppo: {minibatch_size: 48}", "ppo.minibatch_size must divide rollout.batch_size (64): 48"),
        ("ppo: {microbatch_size: 24}", "ppo.microbatch_size must divide ppo.minibatch_size (16): 24"),
        ("ppo: {minibatch_size: 8, microbatch_size: 6}", "ppo.microbatch_size must divide ppo.minibatch_size (8): 6"),
        ("reward: {kind: modl}", None),
        ("reward: {kind: mine.py:f}", None),
        (
            "policy: {model: builtin:review}",
            "policy.model: no built-in 'builtin:review'; did you mean builtin:reviews?",
        ),
        (
            "reward: {kind: sum, terms: {a: {model: builtin:review}}}",
            "reward.terms.a.model: no built-in 'builtin:review'; did you mean builtin:reviews?",
        ),
        (
            "reward: {kind: sum, label: good, terms: {a: {model: builtin:reviews}}}",
            "reward.label is only read where reward.kind is model: 'good'",
        ),
        ("reference: {model: ./nowhere}", "reference.model: no such file: ./nowhere"),
        (
            "data: {chat_options: {enable_thinking: false}}",
            "data.chat_options is only read where data.chat_template is true",
        ),
        ("data: {chat_template: true, chat_options: [1]}", None),
        ("data: {prompts: ''}", "data.prompts must be not empty: ''"),
    ],
)  # fmt: skip
def test_a_problem_names_the_key_the_value_and_the_expected_one(write: Write, text: str, line: str | None) -> None:
    lines = problems(text + "\n", write)
    assert len(lines) == 1
    if line is not None:
        assert lines == [line]


def test_a_config_of_another_command_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match="config for `rlhf-kl train`, not for `rlhf-kl sft`"):
        load_config("sft", "ppo_adaptive.yaml")
    with pytest.raises(InputError, match="config for `rlhf-kl reward-model`"):
        load_config("train", "reward_reviews.yaml")
    assert "rlhf-kl compare" in problems("base: x.yaml\nvariants: {}\n", write)[0]


def test_sft_checks_its_own_sizes(write: Write) -> None:
    lines = problems(
        "sft: {batch_size: 10, microbatch_size: 4}\npolicy: {architecture: {heads: 5}}\n", write, kind="sft"
    )
    assert set(lines) == {
        "sft.microbatch_size must divide sft.batch_size (10): 4",
        "policy.architecture.heads must divide policy.architecture.hidden_size (144): 5",
    }  # fmt: skip


EPISODES = "ppo.total_episodes (in responses: updates x rollout.batch_size)"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *((key, EPISODES) for key in ("updates", "ppo.updates", "ppo.steps", "run.max_steps", "eval.steps")),
        *((key, "ppo.learning_rate") for key in ("lr", "ppo.lr", "policy.lr")),
        *((key, "kl.controller.coef") for key in ("beta", "kl.beta", "kl.controller.beta")),
        *((key, "rollout.samples_per_prompt") for key in ("num_generations", "rollout.num_generations")),
    ],
)
def test_keys_as_other_programs_call_them(write: Write, key: str, name: str) -> None:
    text = "1"
    for part in reversed(key.split(".")):
        text = f"{{{part}: {text}}}"
    for found in (problems(f"{text}\n", write), problems("run: {}\n", write, f"{key}=1")):
        [line] = found
        assert line.startswith(f"{key}: unknown ")
        assert line.endswith(f"; did you mean {name}?")


@pytest.mark.parametrize("number", ["1e4", "10000.0", "10000"])
def test_episodes_are_a_whole_number_in_any_form(write: Write, number: str) -> None:
    episodes = load_config("train", write(text=f"ppo: {{total_episodes: {number}}}\n")).ppo.total_episodes
    assert episodes == 10_000
    assert isinstance(episodes, int)
    assert problems("ppo: {total_episodes: 1.5}\n", write) == ["ppo.total_episodes must be a whole number: 1.5"]


# ---- plugins ----


def test_a_plugin_is_looked_up_by_reading_a_config_and_checked_by_importing_it(write: Write) -> None:
    write("mine.py", CONTROLLER + REWARD)
    text = "kl: {controller: {kind: mine.py:LinearKL, coef: 0.2, episodes: 5000}}\n"
    text += "reward: {kind: mine.py:brevity, slope: 1}\n"
    config = load_config("train", write(text=text))
    assert (config.kl.controller.options, config.reward.options) == ({"episodes": 5000}, {"slope": 1})
    assert Path(config.kl.controller.kind.rpartition(":")[0]).is_absolute()
    check_plugins(config)


PLUGIN_PROBLEMS = [
    # (config, what reading it tells, else what importing its plugins tells)
    (
        "kl: {controller: {kind: mine.py:LinearKL, coef: 0.2, episods: 5000}}",
        [],
        [
            "kl.controller.episodes: missing, LinearKL needs it",
            "kl.controller.episods: unknown option of LinearKL; did you mean kl.controller.episodes?",
        ],
    ),
    (
        "kl: {controller: {kind: mine.py:NoUpdate, coef: 1}}",
        [],
        [
            "kl.controller.coef: unknown option of NoUpdate",
            "kl.controller.kind: NoUpdate has no update(kl, episodes) and no coef",
        ],
    ),
    (
        "reward: {kind: mine.py:brevity, word: 1.5, responses: []}",
        [],
        [
            "reward.responses: set by the program, remove it",
            "reward.word: unknown option of brevity; did you mean reward.words?",
        ],
    ),
    (
        "reward: {kind: mine.py:blind, words: 1}\nkl: {controller: {kind: mine.py:LinearKL}}",
        [],
        [
            "kl.controller.episodes: missing, LinearKL needs it",
            "reward.kind: a reward function takes (prompts, responses, ...): 'mine.py:blind'",
        ],
    ),
    (
        "reward: {kind: mine.py:NoUpdate, gold: mine.py:Blind}",
        ["reward.gold: mine.py has no 'Blind'; did you mean blind?"],
        [],
    ),
    ("reward: {kind: mine.py:NoUpdate}", [], ["reward.kind: NoUpdate has no __call__(prompts, responses)"]),
    ("reward: {kind: mine.py:NUMBER}", [], ["reward.kind: 'mine.py:NUMBER' is not a class or function"]),
    (
        "kl: {controller: {kind: mine.py:LinearLK}}\nppo: {gamma: 2}",
        [
            "ppo.gamma must be at most 1: 2",
            "kl.controller.kind: mine.py has no 'LinearLK'; did you mean LinearKL?",
        ],
        [],
    ),
    (
        "kl: {controller: {kind: mine.py:blind}}",
        ["kl.controller.kind: blind is not a class: a controller is a class with coef and update(kl, episodes)"],
        [],
    ),
    ("reward: {kind: other.py:f}", ["reward.kind: no such file: other.py (looked in {here})"], []),
    ("reward: {kind: rlhf_kl_no:f}", ["reward.kind: no module 'rlhf_kl_no' in {here} or in this environment"], []),
    (
        "reward: {kind: mine.py:brevity, slope: 'a ${'}",
        ["reward.slope: write a variable as ${NAME}, and a literal ${ as $${"],
        [],
    ),
]


@pytest.mark.parametrize(("text", "read", "imported"), PLUGIN_PROBLEMS)
def test_problems_of_plugins(write: Write, here: Path, text: str, read: list[str], imported: list[str]) -> None:
    write("mine.py", CONTROLLER + REWARD)
    with pytest.raises(InputError) as caught:
        check_plugins(load_config("train", write(text=text)))
    found = [line.replace(f"{here}/mine.py", "mine.py") for line in caught.value.problems]
    assert found == [line.replace("{here}", str(here)) for line in read + imported]


@pytest.mark.parametrize(
    ("controller", "key"),
    [
        ("{kind: ziegler, horizn: 5}", "kl.controller.horizn"),
        ("{kind: pid, kp: fast}", "kl.controller.kp"),
        ("{kind: pid, kp: .nan}", "kl.controller.kp"),
        ("{kind: pid, kp: -1}", "kl.controller"),
        ("{kind: pid, coef: 50, max_coef: 10}", "kl.controller"),
        ("{kind: schedule, shape: round}", "kl.controller"),
    ],
)
def test_what_a_built_in_controller_refuses_is_found_before_the_run(write: Write, controller: str, key: str) -> None:
    [line] = problems(f"kl: {{controller: {controller}}}\n", write)
    assert line.split(": ")[0].split(" must")[0] == key


def test_bounds_leave_room_for_auto(write: Write) -> None:
    text = "kl: {controller: {kind: pid, min_coef: 0.5, max_coef: 2}}\n"
    assert load_config("train", write(text=text)).kl.controller.coef == "auto"


# ---- paths ----


def test_paths_are_tried_from_the_file_then_from_here_and_stored_absolute(write: Write, here: Path) -> None:
    for name in ("both.txt", "sub/both.txt", "only_here.txt", "sub/model/config.json"):
        write(name, "x")
    text = "data: {prompts: both.txt}\neval: {texts: only_here.txt}\npolicy: {model: model}\n"
    text += "reference: {model: org/name}\nreward: {model: org/scorer}\n"
    config = load_config("train", write("sub/x.yaml", text))
    assert config.data.prompts == str(here / "sub/both.txt")
    assert config.eval.texts == str(here / "only_here.txt")
    assert config.policy.model == str(here / "sub/model")
    assert config.reference.model == "org/name"
    assert load_config("train", here / "sub/x.yaml", ["data.prompts=both.txt"]).data.prompts == str(here / "both.txt")


def test_a_parents_paths_are_its_own(write: Write, here: Path) -> None:
    write("sub/mine.py", CONTROLLER)
    write("sub/base.yaml", "kl: {controller: {kind: mine.py:LinearKL, episodes: 1}}\n")
    config = load_config("train", write("child.yaml", "extends: sub/base.yaml\n"))
    assert config.kl.controller.kind == f"{here / 'sub/mine.py'}:LinearKL"


def test_a_folder_named_like_a_kind_is_not_used(write: Write, here: Path) -> None:
    for name in ("model", "adaptive", "builtin:reviews"):
        (here / name).mkdir()
    config = load_config("train", write())
    assert (config.reward.kind, config.kl.controller.kind) == ("model", "adaptive")
    assert config.policy.model == "builtin:reviews"


def test_the_run_folder_is_absolute_and_follows_the_name(write: Write, here: Path) -> None:
    assert load_config("train", write("mine.yaml")).run.output_dir == str(here / "runs/mine")
    assert load_config("train", write(), ["run.name=other"]).run.output_dir == str(here / "runs/other")
    assert load_config("train", write(), ["run.output_dir=out"]).run.output_dir == str(here / "out")


# ---- out again ----


@pytest.mark.parametrize("name", ["ppo_adaptive", "ppo_no_kl", "smoke", "sft_reviews", "reward_reviews"])
def test_what_is_dumped_loads_back_equal(name: str, write: Write) -> None:
    kind, config = load_any(f"{name}.yaml", ["run.name='1e5'", "run.device=cuda:0"])
    again = load_any(write("config.yaml", dump_config(config)))
    assert again == (kind, config)
    assert config_diff(again[1], config) == []


def test_options_of_plugins_survive_the_dump(write: Write) -> None:
    write("mine.py", REWARD + CONTROLLER)
    sets = [
        "reward.kind=mine.py:brevity",
        "reward.slope=2",
        "kl.controller={kind: pid, kp: 0.25, max_coef: 3}",
    ]
    config = load_config("train", write(), sets)
    assert load_config("train", write("config.yaml", dump_config(config))) == config


def test_a_diff_names_old_and_new(write: Write) -> None:
    a = load_config("train", write())
    b = load_config("train", write(), ["kl.target=0.2", "kl.controller={kind: pid, kp: 0.25}"])
    assert config_diff(a, b) == [
        "kl.target: 0.1 -> 0.2",
        "kl.controller.kind: adaptive -> pid",
        "kl.controller.kp: (absent) -> 0.25",
    ]


def schema_errors(kind: Kind, config: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft202012Validator(json_schema(kind)).iter_errors(config)]


@pytest.mark.parametrize("path", sorted(shipped_configs().glob("*.yaml")), ids=lambda path: path.stem)
def test_an_editor_finds_no_fault_in_a_shipped_config(path: Path) -> None:
    if path.stem.startswith(("compare_", "sweep_")):
        pytest.skip("a comparison of configs")
    kind = re.findall(r"schema=schema/(.+)\.json", path.read_text())[0]
    assert schema_errors(kind, yaml.safe_load(path.read_text())) == []


def test_what_an_editor_marks() -> None:
    assert schema_errors("train", {"ppo": {"learning_rate": "1e-5"}, "policy": {"model": None}}) == []
    assert schema_errors("train", {"ppo": {"learning_rate": "fast"}}) != []
    assert schema_errors("train", {"kl": {"traget": 0.1}}) != []


@pytest.mark.parametrize("kind", MODELS)
def test_the_json_schema_is_json_with_extends(kind: Kind) -> None:
    schema = json.loads(json.dumps(json_schema(kind)))
    assert "extends" in schema["properties"]
    assert schema["additionalProperties"] is False


# ---- whatever comes ----

KEYS = sorted({part for model in MODELS.values() for key in all_keys(model) for part in key.split(".")})
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "fixed", "pid", "model", "1.5x", "moderate", "builtin:reviews", "a.py:f"])
)  # fmt: skip
trees = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=2) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), v, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.dictionaries(st.sampled_from(KEYS), trees, max_size=5),
    sets=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(KEYS), leaves), max_size=2),
)
def test_any_mapping_is_a_config_or_an_input_error(here: Path, raw: dict[str, Any], sets: list[Any]) -> None:
    file = here / "any.yaml"
    file.write_text(yaml.safe_dump(raw, allow_unicode=False))
    overrides = [f"{section}.{key}={value!r}" for section, key, value in sets]
    for kind in MODELS:
        try:
            config = load_config(kind, file, overrides)  # type: ignore[call-overload]
        except InputError as error:
            assert error.problems  # noqa: PT017
        else:
            assert isinstance(config, MODELS[kind])


def _mutations(model: type[Section], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        keys += [f"{prefix}{name}"] if section is None else _mutations(section, f"{prefix}{name}.")
    return keys


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("value", ["[1]", "{a: 1}", ".nan", "-1"])
def test_every_key_refuses_what_no_key_can_be(kind: Kind, value: str, write: Write) -> None:
    own = {"train": "ppo: {}", "sft": "sft: {}", "reward-model": "reward_model: {}"}[kind]
    file = write(text=own + "\n")
    for key in _mutations(MODELS[kind]):
        with pytest.raises(InputError) as caught:
            load_config(kind, file, [f"{key}={value}"])  # type: ignore[call-overload]
        assert any(line.startswith(key) for line in caught.value.problems), caught.value.problems


def test_a_config_error_needs_no_torch(write: Write) -> None:
    file = write(text="ppo: {lerning_rate: 1}\n")
    code = (
        "import sys\nfrom rlhf_kl.config.load import load_config\nfrom rlhf_kl.errors import InputError\n"
        f"load_config('train', 'ppo_adaptive.yaml')\ntry: load_config('train', {str(file)!r})\n"
        "except InputError: pass\nelse: raise SystemExit('no error')\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("batch", "minibatch"), [(64, 16), (6, 2), (10, 5), (7, 7), (2, 1), (1, 1)])
def test_a_minibatch_is_a_quarter_of_the_batch(write: Write, batch: int, minibatch: int) -> None:
    config = load_config("train", write(text=f"rollout: {{batch_size: {batch}}}\n"))
    assert config.ppo.minibatch_size is None
    assert config.minibatch_size == minibatch


@pytest.mark.parametrize(("episodes", "samples"), [(64, 128), (3840, 480), (51200, 1024)])
def test_reference_samples_are_few_where_the_run_is_short(write: Write, episodes: int, samples: int) -> None:
    file = write(text=f"ppo: {{total_episodes: {episodes}}}\n")
    assert load_config("train", file).reference_samples == samples
    assert load_config("train", file, ["rollout.reference_samples=7"]).reference_samples == 7
