"""What a run was made with: the content of files and models, and a function that the run's config names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_kl.config.contents import content_of
from rlhf_kl.config.inputs import changed_inputs, contents
from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.schema import TrainConfig

OWN = """
policy: {model: start}
data: {prompts: many.jsonl}
reward: {kind: sum, terms: {a: {kind: 'mine.py:score'}, b: {model: judge}}}
kl: {controller: {kind: 'law.py:Law'}}
eval: {texts: held.txt, prompts: few.jsonl, scorers: {c: {model: other}}}
"""
FILES = {
    "mine.py": "def score(prompts, responses): ...\n",
    "law.py": "class Law:\n    coef = 0.1\n    def update(self, kl, episodes): ...\n",
    **dict.fromkeys(("many.jsonl", "few.jsonl"), '{"prompt": "a"}\n'),
    "held.txt": "a\n",
    **{f"{name}/config.json": "{}" for name in ("start", "judge", "other")},
    **{f"{name}/model.safetensors": "1" for name in ("start", "judge", "other")},
}
KEYS = {
    "mine.py": "reward.terms.a.kind",
    "law.py": "kl.controller.kind",
    "many.jsonl": "data.prompts",
    "few.jsonl": "eval.prompts",
    "held.txt": "eval.texts",
    "start/model.safetensors": "policy.model",
    "judge/model.safetensors": "reward.terms.b.model",
    "other/model.safetensors": "eval.scorers.c.model",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Of a run in the folder `run`, which has begun."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"own.yaml": OWN, **FILES}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    config: TrainConfig = load_config("train", "own.yaml")
    Path("run").mkdir()
    Path("run/.rlhf-kl.inputs").write_text(json.dumps(contents(config)))
    return config


@pytest.mark.parametrize(("file", "key"), KEYS.items())
def test_what_has_another_content_is_named(config: TrainConfig, tmp_path: Path, file: str, key: str) -> None:
    assert changed_inputs(Path("run"), config) == {}
    Path(file).write_text(FILES[file] + "# 2\n")
    name = file.partition("/")[0]
    assert {keys: text.split()[:3] for keys, text in changed_inputs(Path("run"), config).items()} == {
        (key,): [f"{key}:", name, "has"]
    }
    assert changed_inputs(Path("run"), config, lambda each: each != key) == {}
    (tmp_path / "run" / ".rlhf-kl.inputs").unlink()  # of an earlier build
    assert changed_inputs(Path("run"), config) == {}


def test_a_file_that_two_keys_name_is_told_once(config: TrainConfig) -> None:
    again = load_config("train", "own.yaml", ["eval.scorers.d.kind=mine.py:score"])
    Path("mine.py").write_text("def score(prompts, responses): return []\n")
    assert [{*keys} for keys in changed_inputs(Path("run"), again)] == [{"reward.terms.a.kind", "eval.scorers.d.kind"}]


def test_another_name_is_no_other_content(config: TrainConfig) -> None:
    """The names are compared with the config; a scorer that never trains may be named anew in a run that goes on."""
    Path("other").rename("third")
    again = load_config("train", "own.yaml", ["eval.scorers.c.model=third"])
    Path("third/model.safetensors").write_text("2")
    assert changed_inputs(Path("run"), again) == {}


def test_the_content_of_a_model_is_that_of_its_files_and_of_its_base(config: TrainConfig) -> None:
    whole = content_of("start")
    Path("start/README.md").write_text("new")
    assert content_of("start") == whole != content_of("nothing here")
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(Path("start").absolute())})
    )
    Path("adapter/adapter_model.safetensors").write_text("1")
    before = content_of("adapter")
    Path("start/model.safetensors").write_text("2")
    assert content_of("adapter") not in (None, before)
    assert content_of("nothing here") is None


def test_a_runs_config_names_the_function_that_the_run_was_made_with(config: TrainConfig, tmp_path: Path) -> None:
    """The file where it is the same, for its neighbours; else the run's copy; the file where that was changed too."""
    from rlhf_kl.config.resolve import dump_config

    run, mine = tmp_path / "run", tmp_path / "mine.py"
    (run / "config.yaml").write_text(dump_config(config))
    (run / "mine.py").write_text("# somebody else's\n")
    (run / "mine-2.py").write_text(FILES["mine.py"])

    def named() -> str:
        terms = load_config("train", run / "config.yaml").reward.terms
        return str(terms["a"].kind)

    assert named() == f"{mine}:score"
    mine.write_text("def score(prompts, responses): return []\n")
    assert named() == f"{run}/mine-2.py:score"
    mine.unlink()
    assert named() == f"{run}/mine-2.py:score"
    mine.write_text("def score(prompts, responses): return []\n")
    (run / "mine-2.py").write_text("def score(prompts, responses): return [1]\n")
    assert named() == f"{mine}:score"
    assert load_config("train", "own.yaml").reward.terms["a"].kind == f"{mine}:score"
