"""A policy of the user's own takes nothing from the built-in world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.load import dump_config, json_schema, load_config
from rlhf_kl.config.paths import shipped_configs
from rlhf_kl.config.schema import Kind, TrainConfig
from rlhf_kl.errors import InputError

NAMED = {
    "policy.model": "policy: {model: owner/mine}",
    "reward.model": "reward: {model: owner/classifier}",
    "data.prompts": "data: {prompts: owner/prompts}",
    "eval.texts": "eval: {texts: owner/texts}",
}
BASES = ("ppo_adaptive.yaml", "ppo_static.yaml", "ppo_no_kl.yaml", "smoke.yaml", "ppo_model.yaml", None)


def problems(folder: Path, text: str, *sets: str) -> list[str]:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_config("train", folder / "mine.yaml", sets)
    return caught.value.problems


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("left_out", ["reward.model", "data.prompts", "eval.texts"])
def test_what_is_left_out_is_refused_whatever_it_extends(base: str | None, left_out: str, tmp_path: Path) -> None:
    lines = [f"extends: {base}"] if base else []
    (line,) = problems(tmp_path, "\n".join([*lines, *(text for key, text in NAMED.items() if key != left_out)]))
    assert line.startswith(f"{left_out} is missing: ")
    assert "builtin:NAME" in line  # what to write


def test_all_that_is_missing_is_listed_at_once(tmp_path: Path) -> None:
    lines = problems(tmp_path, "extends: ppo_adaptive.yaml\npolicy: {model: owner/mine}\nppo: {gamma: 3}")
    assert {line.split()[0] for line in lines} == {"reward.model", "data.prompts", "eval.texts", "ppo.gamma"}
    lines = problems(tmp_path, "extends: ppo_model.yaml")
    assert {line.split()[0] for line in lines} == set(NAMED)
    terms = "reward: {kind: sum, terms: {a: {weight: 2.0}}}"
    (line,) = problems(tmp_path, "\n".join(text for key, text in (NAMED | {"reward.model": terms}).items()))
    assert line.startswith("reward.terms.a.model is missing")


def test_a_function_is_a_reward_too_and_what_is_written_counts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(prompts, responses):\n    return [0.0 for _ in responses]\n")
    named = NAMED | {"reward.model": "reward: {kind: own.py:f}", "eval.texts": "eval: {texts: builtin:reviews}"}
    (tmp_path / "mine.yaml").write_text("\n".join(["extends: ppo_model.yaml", *named.values()]))
    config = load_config("train", tmp_path / "mine.yaml")
    assert (config.reward.model, config.eval.texts) == (None, "builtin:reviews")
    assert dump_config(config).count("builtin:") == 1  # the one that was asked for


def test_the_base_of_own_models_holds_nothing_built_in(tmp_path: Path) -> None:
    assert "builtin:" not in (shipped_configs() / "ppo_model.yaml").read_text()
    (tmp_path / "mine.yaml").write_text("\n".join(["extends: ppo_model.yaml", *NAMED.values()]))
    config = load_config("train", tmp_path / "mine.yaml")
    assert (config.run.dtype, config.ppo.learning_rate) == ("auto", "auto")
    assert "builtin" not in dump_config(config)


@pytest.mark.parametrize("recipe", ["sentiment", "tldr", "chat"])
def test_recipes_hold_nothing_built_in(recipe: str) -> None:
    config = load_config("train", f"{recipe}_ppo.yaml")
    assert "builtin" not in dump_config(config)
    assert (config.run.dtype, config.ppo.learning_rate) == ("auto", "auto")


def test_a_built_in_policy_brings_its_own_world() -> None:
    config = load_config("train", "ppo_adaptive.yaml", ["policy.model=builtin:reviews-small", "eval.texts=null"])
    named = [config.data.prompts, config.eval.texts, config.reward.model]
    assert named == ["builtin:reviews-small"] * 3
    terms = {"reward": {"kind": "sum", "terms": {"a": {}, "b": {"kind": "own.py:f"}}}}
    found = TrainConfig.model_validate(terms).reward.terms
    assert found is not None
    assert [term.model for term in found.values()] == ["builtin:reviews", None]


@pytest.mark.parametrize(
    "wrong", [{"policy": 3}, {"data": []}, {"reward": "x"}, {"reward": {"kind": "sum", "terms": 1}}]
)
def test_wrong_types_are_one_line(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert len(problems(tmp_path, json.dumps(wrong))) == 1


def test_an_editor_asks_for_nothing_that_another_file_may_hold() -> None:
    schema = json_schema("train")
    assert "required" not in schema
    assert [name for name, part in schema["$defs"].items() if "required" in part] == []


@pytest.mark.parametrize(
    ("kind", "section", "missing"),
    [
        ("sft", "sft", "data.texts is missing: texts to train on"),
        ("reward-model", "reward_model", "data.pairs must be given if there are no data.labels"),
    ],
)
def test_supervised_training_of_an_own_model_takes_no_built_in_data(
    tmp_path: Path, kind: Kind, section: str, missing: str
) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "mine.yaml"
    file.write_text(f"policy: {{model: ./model}}\n{section}: {{epochs: 1}}\n")
    with pytest.raises(InputError) as caught:
        load_config(kind, file)
    assert [problem for problem in caught.value.problems if missing in problem]
    for world in ("builtin:reviews", "builtin:reviews-small"):
        file.write_text(f"policy: {{model: '{world}'}}\n{section}: {{epochs: 1}}\n")
        data = load_config(kind, file).data
        assert world in (getattr(data, "texts", None), getattr(data, "pairs", None))
