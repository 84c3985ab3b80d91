"""`train`, `sft` and `reward-model` as a user types them, in this process."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_kl.run.log import read_jsonl
from tests.runs import rows

if TYPE_CHECKING:
    from rlhf_kl.build.world import World

Cli = Callable[..., Any]

ROW_KEYS = {
    *("step", "episodes", "alerts", "kl/coef", "kl/coef_next", "kl/ceiling", "kl/backtrack_factor"),
    *(f"objective/{name}" for name in ("scores", "scores_std", "scores_shaped", "gold", "rlhf_reward")),
    *(f"kl/{name}" for name in ("token", "sequence", "max_token", "max_sequence", "target", "error")),
    *(f"kl/{name}" for name in ("k1", "k2", "k3", "exact")),
    *(f"policy/{name}" for name in ("loss", "entropy", "approx_kl", "clip_fraction", "logratio_first_max")),
    *("value/loss", "value/explained_variance", "rollout/response_length", "rollout/eos_rate"),
    *(f"time/{name}_s" for name in ("rollout", "score", "update", "step")),
    *("dist/world_size", "dist/held"),
    *(f"perf/{name}" for name in ("samples_per_s", "tokens_per_s", "peak_memory_mb")),
}
SUMMARY_KEYS = {
    *("run", "config", "seed", "steps", "episodes", "seconds", "versions", "git", "final", "best"),
    *("tilt_share", "stopped_by"),
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory, small_world: World, rlhf_kl: Cli) -> tuple[Path, Any]:
    """The shipped smoke run on the small world: its folder, and what the command said."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    return folder, rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder)


# ---- a whole run ----


def test_the_run_folder(smoke: tuple[Path, Any]) -> None:
    folder, outcome = smoke
    assert (outcome.code, outcome.out) == (0, "")  # results of a training are files
    shown = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert shown == {
        *("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json"),
        *("tensorboard", "checkpoints", "final"),
    }
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 1
    final = {path.name for path in (folder / "final").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= final
    assert any(name.startswith("value") for name in final)
    samples = read_jsonl(folder / "samples.jsonl")
    assert {sample["step"] for sample in samples if sample["chosen"] != "held out"} == {1, 2, 3}
    for sample in samples:
        keys = {"step", "prompt", "response", "chosen", "score", "gold", "kl", "tokens"}
        assert sample.keys() - {"reference"} == keys
        assert sample["tokens"][0].keys() == {"text", "logprob", "ref_logprob", "kl"}


def test_every_row_has_every_key(smoke: tuple[Path, Any]) -> None:
    found = read_jsonl(smoke[0] / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    for row in found[:3]:
        assert row.keys() >= ROW_KEYS
        assert row["episodes"] == 16 * row["step"]
        assert row["objective/gold"] is not None
        assert row["policy/logratio_first_max"] < 1e-3
        assert row["kl/token"] == row["kl/exact"]
        assert row["kl/error"] == pytest.approx(row["kl/token"] / row["kl/target"] - 1)
        shaped = row["objective/scores_shaped"] - row["kl/coef"] * row["kl/sequence"]
        assert row["objective/rlhf_reward"] == pytest.approx(shaped)
    assert [row["kl/coef"] for row in found[1:3]] == [row["kl/coef_next"] for row in found[:2]]
    assert found[0]["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert found[2]["kl/token"] > 0
    assert ["eval/perplexity" in row and "eval/scores" in row for row in found] == [True, False, False, True]


def test_the_summary(smoke: tuple[Path, Any]) -> None:
    folder, _ = smoke
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["stopped_by"] is None
    assert (summary["steps"], summary["episodes"], summary["seed"]) == (3, 48, 0)
    last = read_jsonl(folder / "metrics.jsonl")[2]
    assert {key: summary["final"][key] for key in ROW_KEYS} == {key: last[key] for key in ROW_KEYS}
    assert summary["versions"]["torch"]
    assert summary["best"]["step"] in (1, 2, 3)


def test_the_final_model_is_one_of_plain_transformers(smoke: tuple[Path, Any], small_world: World) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = smoke
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    start = AutoModelForCausalLM.from_pretrained(small_world.policy())
    trained = load_file(folder / "checkpoints" / "step-000003" / "model-00001.safetensors")
    weights = {f"policy.{name}": tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in trained.items() if name.startswith("policy."))
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    settings = model.generation_config
    assert settings.top_k == 0
    assert tokenizer.eos_token_id in settings.eos_token_id
    inputs = tokenizer("I went to the", return_tensors="pt")
    assert inputs["input_ids"][0, 0] == tokenizer.bos_token_id
    written = model.generate(**inputs, max_new_tokens=3, do_sample=True)
    assert written.shape[1] > inputs["input_ids"].shape[1]


def test_the_resolved_config_repeats_the_run(smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    folder, _ = smoke
    again = tmp_path / "again"
    assert rlhf_kl("train", "--config", folder / "config.yaml", "--output-dir", again, "--quiet").code == 0
    assert rows(again) == rows(folder)


# ---- a folder that holds a run ----


def test_a_second_run_is_refused_and_a_finished_one_prints_its_summary(
    smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path
) -> None:
    """Next steps name the folder where the run is now."""
    folder = Path(shutil.copytree(smoke[0], tmp_path / "moved here"))
    before = (folder / "metrics.jsonl").read_bytes()
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder)
    assert (outcome.code, outcome.err.count("error: ")) == (2, 1)
    assert "--resume" in outcome.err
    assert "--overwrite" in outcome.err
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder, "--resume")
    assert outcome.code == 0
    assert "finished" in outcome.err
    assert "held-out perplexity" in outcome.err
    commands = [line.strip() for line in outcome.err.splitlines() if "--run" in line or "--logdir" in line]
    assert [shlex.split(line)[-1] for line in commands] == [str(folder)] * 2
    assert (folder / "metrics.jsonl").read_bytes() == before
