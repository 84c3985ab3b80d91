"""From a file and `--set` to a config: finding, extending, merging, paths, all problems at once, and out again."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rlhf_kl.config.paths import find_config, shipped_configs
from rlhf_kl.config.problems import all_keys, checked
from rlhf_kl.config.resolve import config_diff, dump_config, json_schema, load_config
from rlhf_kl.config.schema import MODELS, Kind, Section, SFTConfig, TrainConfig
from rlhf_kl.config.yaml import read_yaml
from rlhf_kl.errors import InputError
from tests.runs import Write

SHIPPED = [path for path in sorted(shipped_configs().glob("*.yaml")) if "variants" not in path.read_text()]


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


def test_a_name_is_looked_up_here_then_in_configs_then_among_the_shipped(write: Write) -> None:
    assert find_config("ppo_adaptive") == find_config("ppo_adaptive.yaml") == shipped_configs() / "ppo_adaptive.yaml"
    for place in ("configs/ppo_adaptive.yaml", "ppo_adaptive.yaml"):
        file = write(place)
        assert find_config("ppo_adaptive.yaml") == file


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_an_editor_finds_no_fault_in_it(path: Path) -> None:
    kind = re.findall(r"schema=schema/(.+)\.json", path.read_text())[0]
    assert schema_errors(kind, read_yaml(path)) == []
    if path.name == "ppo_model.yaml":  # a base that must be given a model
        assert "builtin:" not in path.read_text()
        return
    config = load_config(None, path)
    assert (type(config), config.run.name) == (MODELS[kind], path.stem)


def test_the_commented_default_run_writes_the_defaults() -> None:
    changed = config_diff(load_config("train", "ppo_adaptive.yaml"), TrainConfig())
    assert {line.split(":")[0] for line in changed} == {
        *("run.name", "run.output_dir", "kl.target", "eval.responses", "eval.max_documents")  # of this world
    }
    changed = config_diff(load_config("sft", "sft_reviews.yaml"), SFTConfig.model_validate({}))
    assert {line.split(":")[0] for line in changed} == {"run.name", "run.output_dir"}


# ---- extends and --set ----


def test_the_childs_values_win_and_the_rest_stays(write: Write) -> None:
    write("base.yaml", "run: {seed: 1}\n")
    write("sub/base.yaml", "kl: {target: 0.2, estimator: k3}\nppo: {epochs: 2}\n")  # found beside the file first
    config = load_config("train", write("sub/child.yaml", "extends: base.yaml\nkl: {target: 0.3}\n"))
    assert (config.kl.target, config.kl.estimator, config.ppo.epochs, config.run.seed) == (0.3, "k3", 2, 0)
    assert config.run.name == "child"


def test_a_users_file_extends_the_shipped_one_of_its_own_name(write: Write) -> None:
    config = load_config("train", write("ppo_static.yaml", "extends: ppo_static.yaml\nrun: {seed: 7}\n"))
    assert (config.run.seed, config.kl.controller.kind) == (7, "fixed")


def test_a_circle_and_a_missing_parent_are_one_line(write: Write) -> None:
    write("a.yaml", "extends: b.yaml\n")
    with pytest.raises(InputError, match="circle"):
        load_config("train", write("b.yaml", "extends: a.yaml\n"))
    assert "did you mean ppo_static.yaml?" in problems("extends: ppo_sttic.yaml\n", write)[0]
    assert "extends must be" in problems("extends: [1]\n", write)[0]
    assert "extends: no config" in problems("extends: x.yaml\n", write)[0]  # a file never matches itself


PID = "kl: {controller: {kind: pid, coef: 0.3, kp: 0.9}}\n"


@pytest.mark.parametrize(
    ("base", "sets", "coef", "options"),
    [
        (PID, ["kl.controller={kind: ziegler, horizon: 500}"], "auto", {"horizon": 500}),
        (PID, ["kl.controller.kind=ziegler", "kl.controller.horizon=500"], "auto", {"horizon": 500}),
        (PID, ["kl.controller.horizon=500", "kl.controller.kind=ziegler"], "auto", {"horizon": 500}),
        (PID, ["kl.controller={kind: pid, ki: 0.2}"], 0.3, {"kp": 0.9, "ki": 0.2}),
        ("kl: {controller: {kind: fixed, coef: 0.4}}", ["kl.controller.kind=static"], 0.4, {}),
        ("kl: {controller: {coef: 0.4}}", ["kl.controller.kind=adaptive"], 0.4, {}),  # the default kind
        ("kl: {controller: {coef: 0.4}}", ["kl.controller.kind=pid"], "auto", {}),
    ],
)
def test_a_new_kind_drops_the_old_kinds_options(
    write: Write, base: str, sets: list[str], coef: Any, options: dict[str, Any]
) -> None:
    found = load_config("train", write("base.yaml", base), sets).kl.controller
    assert (found.coef, found.options) == (coef, options)


def test_extends_drops_them_too_and_the_general_keys_of_reward_outlive_its_kind(write: Write) -> None:
    write("base.yaml", PID + "reward: {model: builtin:reviews-small, normalize: false, clip: null}\n")
    write("mine.py", "def f(prompts, responses, slope): ...\n")
    child = "extends: base.yaml\nkl: {controller: {kind: ziegler}}\nreward: {kind: mine.py:f, slope: 2}\n"
    config = load_config("train", write("child.yaml", child))
    reward = config.reward
    assert config.kl.controller.options == {}
    assert (reward.model, reward.normalize, reward.clip, reward.options) == (None, False, None, {"slope": 2})


def test_set_reads_values_as_yaml_and_the_last_wins(write: Write) -> None:
    sets = ["ppo.learning_rate=1e-5", "run.name=off", "kl.ceiling=", "kl.target=1", "ppo.total_episodes=1e4"]
    config = load_config("train", write(), [*sets, "kl={target: 0.2}", "run.name=on"])
    assert (config.ppo.learning_rate, config.run.name, config.kl.target, config.kl.ceiling) == (1e-5, "on", 0.2, None)
    assert (config.ppo.total_episodes, type(config.ppo.total_episodes)) == (10_000, int)
    again = load_config("train", write(), ["kl.ceiling=null", "kl.ceiling.value=0.2"])
    assert again.kl.ceiling_value == 0.2


# ---- problems: all at once, a line each ----


def test_all_problems_are_listed_at_once(write: Write) -> None:
    text = """
run: {seed: -1, device: gpu}
ppo: {lerning_rate: 1e-5, gamma: 1.5, epochs: 2.5, minibatch_size: 48}
kl: {target: -0.1, controller: {kind: pdi}, placement: rao_blackwell, estimator: k1}
tracking: {tensorboard: off}
data: {prompts: missing.jsonl}
reward: {kind: nowhere.py:f}
"""
    expected = {
        "--set": "'foo'",
        "kl.traget": "kl.target?",
        "run.seed": "0: -1",
        "run.device": "'gpu'",
        "ppo.lerning_rate": "ppo.learning_rate?",
        "ppo.gamma": "1: 1.5",
        "ppo.epochs": "2.5",
        "kl.target": "-0.1",
        "kl.estimator": "'k1'",
        "kl.controller.kind": "pid?",
        "tracking.tensorboard": "'off'",
        "data.prompts": f"missing.jsonl (looked in {Path.cwd()})",
        "ppo.minibatch_size": "rollout.batch_size (64): 48",
        "reward.kind": f"nowhere.py (looked in {Path.cwd()})",
    }
    lines = {re.split(r"[ :]", line)[0]: line for line in problems(text, write, "foo", "kl.traget=1")}
    assert lines.keys() == expected.keys()
    assert [key for key, words in expected.items() if words not in lines[key]] == []


TERMS = "reward: {kind: sum, %s: x, terms: {a: {model: builtin:reviews}}}"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        # There is no line about a default that stands in for a wrong value.
        ("kl: {target: x, ceiling: {value: 0.05}}", "kl.target", "'conservative'"),
        ("ppo: {minibatch_size: x}\nrollout: {batch_size: 48}", "ppo.minibatch_size", "whole number"),
        (TERMS % "normalise", "reward.normalise", "reward.normalize?"),
        # values
        ("eval:", "eval", ": null"),
        ("run: {name: ../x}", "run.name", "'../x'"),
        ("kl: {controller: {kind: pid, kp: .nan}}", "kl.controller.kp", "nan"),
        ("kl: {controller: {kind: pid, coef: 50, max_coef: 10}}", "kl.controller", "coef 50"),
        ("kl: {controller: {kind: threshold, low: 2}}", "kl.controller", "high 1.5"),
        ("kl: {controller: {kind: adaptive, coef: 0}}", "kl.controller.coef", "above 0"),
        ("kl: {controller: {kind: pdi, kp: 1}}", "kl.controller.kind", " pid?"),
        ("reward: {interface: trl}", "reward.interface", "'trl'"),
        ("policy: {model: builtin:reviws}", "policy.model", "builtin:reviws"),
        # keys that do not agree
        ("kl: {ceiling: {value: 0.5x}}", "kl.ceiling.value", "kl.target (0.1): 0.5x"),
        ("kl: {ceiling: {value: x}}", "kl.ceiling.value", "1.5x: 'x'"),
        ("kl: {target: moderate, unit: sequence}", "kl.target", "'moderate'"),
        ("reward: {kind: sum}", "reward.terms", "reward.kind"),
        (TERMS % "label", "reward.label", "reward.kind"),
        ("reward: {normalize: each}", "reward.normalize", "reward.kind"),
        (TERMS.replace("%s: x", "normalize: all"), "reward.normalize", "'each'"),
        (TERMS.replace("%s: x, ", "").replace("reviews}", "reviews, weight: 0}"), "reward.terms", "weight"),
        ("data: {chat_template: false, system: c}", "data.system", "data.chat_template"),
    ],
)  # fmt: skip
def test_a_problem_names_the_key_the_value_and_the_expected_one(write: Write, text: str, key: str, words: str) -> None:
    [line] = problems(text + "\n", write)
    found, _, rest = re.match(r"([\w.]+)([ :])(.*)", line).groups()  # type: ignore[union-attr]
    assert found == key
    assert words in rest


def test_a_config_of_another_command_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match="`rlhf-kl train`"):
        load_config("sft", "ppo_adaptive.yaml")
    with pytest.raises(InputError, match="config for `rlhf-kl reward-model`"):
        load_config("train", "reward_reviews.yaml")
    assert "rlhf-kl compare" in problems("base: x.yaml\nvariants: {}\n", write)[0]
    text = "sft: {batch_size: 10, microbatch_size: 4}\npolicy: {architecture: {heads: 5}}\n"
    size, heads = sorted(problems(text, write, kind="sft"), reverse=True)
    assert re.match(r"sft\.microbatch_size .* sft\.batch_size \(10\): 4$", size)
    assert re.match(r"policy\.architecture\.heads .* policy\.architecture\.hidden_size \(144\): 5$", heads)


@pytest.mark.parametrize("model", MODELS.values())
@pytest.mark.parametrize("value", [[1], {"a": 1}, math.nan, -1])
def test_every_key_refuses_what_no_key_can_be(model: type[Section], value: Any) -> None:
    keys = all_keys(model)
    leaves = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    if isinstance(value, dict):
        leaves = [key for key in leaves if not key.endswith("_options")]  # which is what they are
    raw: dict[str, Any] = {}
    for key in leaves:
        *sections, name = key.split(".")
        section = raw
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    with pytest.raises(InputError) as caught:
        checked(model, raw)
    assert [key for key in leaves if not any(line.startswith(key) for line in caught.value.problems)] == []


NAMED = {
    "policy.model": "policy: {model: owner/mine}",
    "reward.model": "reward: {model: owner/classifier}",
    "data.prompts": "data: {prompts: owner/prompts}",
    "eval.texts": "eval: {texts: owner/texts}",
}


@pytest.mark.parametrize("base", ["smoke.yaml", "ppo_model.yaml", None])
def test_a_policy_of_the_users_own_takes_nothing_from_the_world(base: str | None, write: Write) -> None:
    text = "\n".join([*([f"extends: {base}"] if base else []), *NAMED.values()])
    assert "builtin:" not in dump_config(load_config("train", write(text=text)))
    lines = problems(text.replace(NAMED["reward.model"], "").replace(NAMED["eval.texts"], ""), write)
    assert [line.partition(" is missing: ")[0] for line in lines] == ["reward.model", "eval.texts"]
    assert all("builtin:NAME" in line for line in lines)  # what to write


def test_all_that_is_missing_is_listed_at_once(write: Write) -> None:
    lines = problems("extends: ppo_adaptive.yaml\npolicy: {model: owner/mine}\nppo: {gamma: 3}", write)
    assert {line.split()[0] for line in lines} == {"reward.model", "data.prompts", "eval.texts", "ppo.gamma"}
    assert {line.split()[0] for line in problems("extends: ppo_model.yaml", write)} == set(NAMED)
    terms = {"reward.model": "reward: {kind: sum, terms: {a: {weight: 2.0}}}"}
    (line,) = problems("\n".join((NAMED | terms).values()), write)
    assert line.startswith("reward.terms.a.model ")
    (line,) = problems("policy: {model: owner/m}\nsft: {}\n", write, kind="sft")
    assert line.startswith("data.texts ")
    (line,) = problems("policy: {model: owner/m}\nreward_model: {}\n", write, kind="reward-model")
    assert re.match(r"data\.pairs .*data\.labels", line)


def test_a_built_in_policy_brings_its_own_world(write: Write) -> None:
    small = "policy.model=builtin:reviews-small"
    config = load_config("train", "ppo_adaptive.yaml", [small, "eval.texts=null"])
    assert [config.data.prompts, config.eval.texts, config.reward.model] == ["builtin:reviews-small"] * 3
    assert load_config("sft", "sft_reviews.yaml", [small]).data.texts == "builtin:reviews"  # as its file says
    assert load_config("sft", write(text="sft: {}\n"), [small]).data.texts == "builtin:reviews-small"
    terms = {"reward": {"kind": "sum", "terms": {"a": {}, "b": {"kind": "own.py:f"}}}}
    found = TrainConfig.model_validate(terms).reward.terms
    assert found is not None
    assert [term.model for term in found.values()] == ["builtin:reviews", None]


def test_paths_are_tried_from_the_file_then_from_here_and_stored_absolute(write: Write, here: Path) -> None:
    for name in ("both.txt", "sub/both.txt", "only_here.txt", "sub/model/config.json", "sub/mine.py"):
        write(name, "class Law: ...\n")
    text = "data: {prompts: both.txt}\neval: {texts: only_here.txt}\npolicy: {model: model}\n"
    text += "reference: {model: org/name}\nreward: {model: org/scorer}\nkl: {controller: {kind: mine.py:Law}}\n"
    write("sub/base.yaml", text)
    config = load_config("train", write("x.yaml", "extends: sub/base.yaml\n"))  # a parent's paths are its own
    assert config.data.prompts == str(here / "sub/both.txt")
    assert config.eval.texts == str(here / "only_here.txt")
    assert config.policy.model == str(here / "sub/model")
    assert config.kl.controller.kind == f"{here / 'sub/mine.py'}:Law"
    assert config.reference.model == "org/name"
    assert load_config("train", here / "x.yaml", ["data.prompts=both.txt"]).data.prompts == str(here / "both.txt")


def test_the_run_folder_is_absolute_and_follows_the_name(write: Write, here: Path) -> None:
    assert load_config("train", write("mine.yaml")).run.output_dir == str(here / "runs/mine")
    assert load_config("train", write(), ["run.name=other"]).run.output_dir == str(here / "runs/other")
    assert load_config("train", write(), ["run.output_dir=out"]).run.output_dir == str(here / "out")


PLUGINS = ["reward.kind=mine.py:f", "reward.slope=2", "kl.controller={kind: pid, kp: 0.25, max_coef: 3}"]


@pytest.mark.parametrize(
    ("name", "sets"), [("ppo_no_kl", []), ("ppo_adaptive", PLUGINS), ("sft_reviews", []), ("reward_reviews", [])]
)
def test_what_is_dumped_loads_back_equal(name: str, sets: list[str], write: Write) -> None:
    write("mine.py", "def f(prompts, responses, slope): ...\n")
    config = load_config(None, f"{name}.yaml", [*sets, "run.name='1e5'", "run.device=cuda:0"])
    again = load_config(None, write("config.yaml", dump_config(config)))
    assert again == config
    assert config_diff(again, config) == []


def test_a_diff_names_old_and_new(write: Write) -> None:
    a = load_config("train", write())
    b = load_config("train", write(), ["kl.target=0.2", "kl.controller={kind: pid, kp: 0.25}"])
    assert config_diff(a, b) == [
        "kl.target: 0.1 -> 0.2",
        "kl.controller.kind: adaptive -> pid",
        "kl.controller.kp: (absent) -> 0.25",
    ]


def schema_errors(kind: Kind, config: dict[str, Any]) -> list[str]:
    schema = json.loads(json.dumps(json_schema(kind)))
    return [error.message for error in Draft202012Validator(schema).iter_errors(config)]


def test_what_an_editor_marks() -> None:
    valid = {"policy": {"model": None}, "extends": "x.yaml", "kl": {"placement": None, "estimator": None}}
    assert schema_errors("train", valid) == []
    assert schema_errors("train", {"ppo": {"learning_rate": "fast"}})
    assert schema_errors("train", {"kl": {"traget": 0.1}})


def test_an_unknown_config_without_a_near_name_is_answered_by_five(write: Write) -> None:
    """Those of the working directory come first; files that an editor or a tool hides are none."""
    for name in ("mine.yaml", ".hidden.yaml"):
        write(name)
    with pytest.raises(InputError) as caught:
        find_config("nope.yaml")
    names = re.findall(r"[\w.]+\.yaml", str(caught.value))
    assert names[:3] == ["nope.yaml", "mine.yaml", "ppo_adaptive.yaml"]
    assert len(names) == 6
    assert str(shipped_configs()) in str(caught.value)
    assert all((shipped_configs() / name).is_file() for name in names[2:])
