"""`train`, `sft` and `reward-model` as a user types them, in this process."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.builtin.world import FILES
from rlhf_kl.run.log import read_jsonl
from tests.runs import Cli


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, rlhf_kl: Cli) -> tuple[Path, Any]:
    """The shipped smoke run on the small world: its folder, and what the command said."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    return folder, rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder)


def test_the_run_folder(smoke: tuple[Path, Any]) -> None:
    folder, outcome = smoke
    assert (outcome.code, outcome.out) == (0, "")  # results of a training are files
    shown = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    files = {"config.yaml", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", "summary.json"}
    assert shown == files | {"tensorboard", "checkpoints", "final"}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 1
    final = {path.name for path in (folder / "final").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= final
    assert any(name.startswith("value") for name in final)
    for sample in read_jsonl(folder / "samples.jsonl"):
        keys = {"step", "prompt", "response", "chosen", "score", "kl", "tokens"}
        means = {"gold", "score_mean", "of"} if sample["chosen"] == "held out" else set()
        assert sample.keys() - {"reference"} == keys | means
        assert sample["tokens"][0].keys() == {"text", "logprob", "ref_logprob", "kl"}


def test_a_run_names_the_world_and_never_its_files(smoke: tuple[Path, Any]) -> None:
    folder, _ = smoke
    assert "model: builtin:reviews-small" in (folder / "config.yaml").read_text()
    texts = [path for path in folder.rglob("*") if path.suffix in {".yaml", ".json", ".jsonl", ".md"}]
    assert len(texts) > 8
    assert [path.name for path in texts if str(FILES) in path.read_text()] == []


def test_the_rows_and_the_summary(smoke: tuple[Path, Any]) -> None:
    folder, _ = smoke
    found = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert [row["step"] for row in found if row.get("eval/gold") is not None] == [1, 4]
    for row in found[:3]:
        assert {key for key in row if not key.startswith("eval/")} == found[2].keys()
        assert row["episodes"] == 16 * row["step"]
        assert row["policy/logratio_first_max"] < 1e-3
        assert "kl/exact" not in row
        assert "objective/gold" not in row
        assert row["kl/error"] == pytest.approx(row["kl/token"] / row["kl/target"] - 1)
        shaped = row["objective/scores_shaped"] - row["kl/coef"] * row["kl/sequence"]
        assert row["objective/rlhf_reward"] == pytest.approx(shaped)
    assert [row["kl/coef"] for row in found[1:3]] == [row["kl/coef_next"] for row in found[:2]]
    assert found[0]["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert found[2]["kl/token"] > 0
    assert ["eval/perplexity" in row and "eval/scores" in row for row in found] == [True, False, False, True]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= {"run", "config", "seconds", "git", "tilt_share"}
    assert (summary["steps"], summary["episodes"], summary["seed"], summary["stopped_by"]) == (3, 48, 0, None)
    assert {key: summary["final"][key] for key in found[2]} == found[2]
    assert summary["versions"]["torch"]
    assert summary["best"]["step"] in (1, 2, 3)


def test_a_finished_run_prints_its_summary_and_next_steps_that_name_where_it_is_now(
    smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(smoke[0], tmp_path / "moved here"))
    before = (folder / "metrics.jsonl").read_bytes()
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder, "--resume")
    assert outcome.code == 0
    assert "finished" in outcome.err
    assert "held-out perplexity" in outcome.err
    commands = [line.strip() for line in outcome.err.splitlines() if "--run" in line or "--logdir" in line]
    assert [shlex.split(line)[-1] for line in commands] == [str(folder)] * 2
    assert (folder / "metrics.jsonl").read_bytes() == before
