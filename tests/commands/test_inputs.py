"""Files and models that change after a run has begun: what reads the run tells it, refuses it, or takes the copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import save_model
from tests.runs import Cli, Train, rows, unfinished, updates

CODE = "def score(prompts, responses):\n    return [{sign}response.count('a') for response in responses]\n"


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, train: Train, tiny_folder: Path, tiny_reward_folder: Path, tiny_data: Any
) -> Path:
    """A folder with data, a function, models, and a finished run that was made with them."""
    place = tmp_path_factory.mktemp("inputs")
    (place / "mine.py").write_text(CODE.format(sign=""))
    shutil.copytree(tiny_folder, place / "start")
    shutil.copytree(tiny_reward_folder, place / "judge")
    shutil.copy(tiny_data.prompts, place / "many.jsonl")
    train(place / "run", *settings(place))
    return place


def settings(place: Path) -> tuple[str, ...]:
    terms = f"{{mine: {{kind: '{place}/mine.py:score'}}, judge: {{model: '{place}/judge'}}}}"
    return (
        f"policy.model='{place}/start'",
        f"data.prompts='{place}/many.jsonl'",
        f"reward={{kind: sum, missing_eos_penalty: 0, terms: {terms}}}",
        f"eval.scorers.other.model='{place}/judge'",
        "ppo.total_episodes=64",
    )


@pytest.fixture
def place(made: Path) -> Any:
    """The same folder, as it was; what a test changes in it is undone."""
    before = {file: file.read_bytes() for file in made.rglob("*") if file.is_file()}
    yield made
    for file, content in before.items():
        file.write_bytes(content)


def figures(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_held_out_prompts_that_are_others_are_told(place: Path, rlhf_kl: Cli) -> None:
    words = ("eval", "--run", place / "run", "--plugins", "--json")
    assert "has changed" not in rlhf_kl(*words).err
    with (place / "many.jsonl").open("a") as file:
        file.write('{"prompt": "dddd"}\n')
    for command in (words, ("generate", "--run", place / "run")):
        told = rlhf_kl(*command).err
        assert told.count("has changed") == 1
        assert "many.jsonl has changed" in told
        assert "held-out prompts" in told
    assert "has changed" not in rlhf_kl("generate", "--run", place / "run", "--prompt", "ab").err


def test_scores_are_those_of_the_runs_own_function(place: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    """And its config repeats the run, whatever became of the file."""
    words = ("eval", "--run", place / "run", "--plugins", "--json")
    before = figures(rlhf_kl(*words))
    (place / "mine.py").write_text(CODE.format(sign="-"))
    after = rlhf_kl(*words)
    assert figures(after) == before
    assert "run/mine.py, the run's copy" in after.err
    assert "has changed since" not in rlhf_kl("eval", "--run", place / "run").err  # which runs no function
    again = rlhf_kl("train", "--config", place / "run" / "config.yaml", "--output-dir", tmp_path / "again")
    assert "run/mine.py, the run's copy" in again.err
    assert rows(tmp_path / "again") == rows(place / "run")


def test_another_start_cannot_be_scaled(place: Path, rlhf_kl: Cli, new_model: Callable[..., Any], letters: Any) -> None:
    save_model(new_model(seed=5, spread=0.1), letters, place / "start")
    done = rlhf_kl("scale", place / "run", "--plugins")
    assert (done.code, done.err.count("start has changed")) == (2, 1)
    done = rlhf_kl("eval", "--run", place / "run")
    assert (done.code, done.err.count("start has changed")) == (0, 1)


def test_what_may_change_in_a_run_that_goes_on(
    place: Path, train: Train, tmp_path: Path, tiny_reward_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function, which is told; no model of a scorer, but one that never trains may give way to another."""
    from safetensors.torch import load_file, save_file

    run = unfinished(place / "run", tmp_path / "run", 2)
    tensors = load_file(place / "judge" / "model.safetensors")
    tensors["score.weight"] *= -1
    save_file(tensors, place / "judge" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError) as told:
        train(run, *settings(place), resume=True)
    keys = [line.partition(":")[0] for line in told.value.problems]
    assert keys == ["reward.terms.judge.model", f"eval.scorers.other.model ({place}/judge)"]
    shutil.copy(tiny_reward_folder / "model.safetensors", place / "judge")
    shutil.copytree(tiny_reward_folder, tmp_path / "third")
    (place / "mine.py").write_text(CODE.format(sign="-"))
    train(run, *settings(place), f"eval.scorers.other.model='{tmp_path}/third'", resume=True)
    assert capsys.readouterr().err.count("mine.py has changed") == 1
    assert updates(run)[:2] == updates(place / "run")[:2]
    assert updates(run)[2]["raw/mine"] == -updates(place / "run")[2]["raw/mine"]
