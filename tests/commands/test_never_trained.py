"""Scorers that never train, from the config to all that shows a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.config.schema.eval import scorer_names
from rlhf_kl.report.comparison import read_comparison
from rlhf_kl.run.log import read_jsonl
from tests.runs import Cli, rows

NAMES = ["long", "model"]
CODE = "def long(prompts, responses, letters: int = 1):\n    return [len(text) / letters for text in responses]\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any, train: Callable[..., Any], tiny_reward_folder: Path) -> Path:
    """A finished run with two of them, which began elsewhere than at its reference."""
    folder: Path = tmp_path_factory.mktemp("watched") / "tiny"
    (folder.parent / "mine.py").write_text(CODE)
    (folder.parent / "held.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in ("aa", "bb", "cab")))
    long = f"{{kind: '{folder.parent}/mine.py:long', letters: 2}}"
    scorers = f"eval.scorers={{long: {long}, model: {{model: '{tiny_reward_folder}'}}}}"
    train(folder, scorers, f"eval.prompts={folder.parent}/held.jsonl", "checkpoint.best=eval/long", "kl.ceiling=null",
          "ppo.learning_rate=5e-3", "kl.target=5")  # fmt: skip
    return folder


def document(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


@pytest.mark.slow
def test_no_other_figure_has_a_name_that_a_scorer_may_have(run: Path, rlhf_kl: Cli) -> None:
    """In no row and in no document: what reads them takes every other name for that of a scorer."""
    evaluated = [row for row in rows(run) if "eval/perplexity" in row]
    for row in evaluated:
        assert scorer_names(key.removeprefix("eval/") for key in row if key.startswith("eval/")) == NAMES
        assert all(row[f"eval/{name}_stderr"] > 0 for name in NAMES)
    summary = json.loads((run / "summary.json").read_text())
    assert scorer_names(summary["closing"]) == NAMES
    assert [summary["closing"][name] for name in NAMES] == [
        [row[f"eval/{name}"] for row in (evaluated[0], evaluated[-1])] for name in NAMES
    ]
    samples = read_jsonl(run / "samples.jsonl")
    for sample in samples:
        assert scorer_names(sample) == (NAMES if sample["chosen"] == "held out" else [])
        assert scorer_names(sample.get("reference", {})) in ([], NAMES)
        if sample["chosen"] == "held out":
            assert sample["long"] == len(sample["response"]) / 2
    found = document(rlhf_kl("eval", "--run", run, "--json", "--plugins", "--quiet"))
    assert scorer_names(found) == scorer_names(found["reference"]) == NAMES
    assert scorer_names(found["texts"][0]["policy"][0]) == NAMES
    scaled = document(rlhf_kl("scale", run, "--json", "--plugins", "--samples", "8", "--targets", "0.01", "--quiet"))
    for row in (*scaled["rows"], scaled["reference"], scaled["rows"][0]["texts"][0]):
        assert scorer_names(row) == NAMES
    words = ("generate", "--run", run, "--prompt", "ab", "--scores", "--plugins", "--with-reference", "--json")
    assert scorer_names(document(rlhf_kl(*words, "--quiet"))[0]) == []
    compared = read_comparison([run]).to_json([])["variants"]["tiny"]
    assert scorer_names(compared["mean"]) == scorer_names(compared["seeds"]["0"]) == NAMES
    assert compared["mean"]["long_gain"] == evaluated[-1]["eval/long"] - evaluated[0]["eval/long"]


@pytest.mark.slow
def test_the_best_checkpoint_by_a_scorer(run: Path) -> None:
    best = json.loads((run / "summary.json").read_text())["best_checkpoint"]
    by_step = {row["step"] - 1: row["eval/long"] for row in rows(run) if row.get("eval/long") is not None}
    assert best["metric"] == "eval/long"
    assert best["value"] == by_step[best["step"]]


@pytest.mark.slow
def test_only_what_needs_code_needs_a_permission(run: Path, rlhf_kl: Cli) -> None:
    found = rlhf_kl("eval", "--run", run, "--json", "--quiet")
    figures, [line] = document(found), found.err.splitlines()
    assert scorer_names(figures) == ["model"]
    assert figures["scores"] is None
    assert "mine.py:count" in line  # the reward
    assert "mine.py:long" in line
    text = rlhf_kl("eval", "--run", run, "--quiet", "--plugins").out
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["score", *NAMES]


@pytest.mark.slow
def test_a_reference_that_is_another_model_is_scored_too(
    train: Callable[..., Any], tmp_path: Path, new_model: Any, letters: Any
) -> None:
    from rlhf_kl.models.pretrained import save_model

    save_model(new_model(seed=7, spread=0.1), letters, tmp_path / "other")
    (tmp_path / "mine.py").write_text(CODE)
    settings = f"reference.model={tmp_path}/other", f"eval.scorers.long.kind={tmp_path}/mine.py:long"
    train(tmp_path / "run", *settings, "ppo.total_episodes=32", "kl.ceiling=null", "kl.target=1")
    first, *_, last = (row for row in rows(tmp_path / "run") if "eval/perplexity" in row)
    assert first["eval/reference_long"] != first["eval/long"]
    assert "eval/reference_long" not in last
    figures = read_comparison([tmp_path / "run"]).variants[0].runs[0].figures
    assert figures["long_gain"] == pytest.approx(last["eval/long"] - first["eval/reference_long"])


@pytest.mark.slow
def test_what_cannot_be_loaded_ends_the_run_before_it_begins(train: Callable[..., Any], tmp_path: Path) -> None:
    from rlhf_kl.errors import InputError

    (tmp_path / "mine.py").write_text("def f(prompts, responses, answer): ...\nx = 1\n")
    with pytest.raises(InputError) as caught:
        train(tmp_path / "run", f"eval.scorers.f.kind={tmp_path}/mine.py:f", f"eval.scorers.m.model={tmp_path}")
    (line,) = caught.value.problems
    assert line.startswith("eval.scorers.m.model: ")
    with pytest.raises(InputError, match=r"^eval\.scorers\.f: needs 'answer'"):
        train(tmp_path / "other", f"eval.scorers.f.kind={tmp_path}/mine.py:f")
    assert not list(tmp_path.glob("*/metrics.jsonl"))
