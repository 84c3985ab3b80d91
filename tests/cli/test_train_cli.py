"""`train`, `sft` and `reward-model` as a user types them, in this process."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rlhf_kl.run import trackers
from rlhf_kl.run.jsonl import read_jsonl

if TYPE_CHECKING:
    from rlhf_kl.commands.world import World

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


def assert_refused(outcome: Any, *words: str) -> None:
    """Exit 2, one line for the one problem, no traceback, nothing on stdout."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in errors[0]


def test_updates_are_whole_batches(rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    monkeypatch.setattr("rlhf_kl.commands.session.train_command", lambda _run, config, **_: trained.append(config))
    changes = ("--set", "rollout.batch_size=32", "--set", "ppo.total_episodes=5")
    assert rlhf_kl("train", "--config", "ppo_adaptive", "--updates", 7, *changes).code == 0
    assert (trained[0].updates, trained[0].ppo.total_episodes) == (7, 7 * 32)
    assert rlhf_kl("train", "--config", "ppo_adaptive", "--updates", 0).code == 2


# ---- a whole run ----


def test_it_ends_well_and_says_where_to_look(smoke: tuple[Path, Any]) -> None:
    folder, outcome = smoke
    assert outcome.code == 0
    assert outcome.out == ""  # results of a training are files
    assert f"rlhf-kl eval --run {folder}" in outcome.err


def test_the_run_folder(smoke: tuple[Path, Any]) -> None:
    folder, _ = smoke
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


def test_every_row_has_every_key(smoke: tuple[Path, Any]) -> None:
    rows = read_jsonl(smoke[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows[:3]:
        assert row.keys() >= ROW_KEYS
        assert row["episodes"] == 16 * row["step"]
        assert row["objective/gold"] is not None
        assert row["policy/logratio_first_max"] < 1e-3
        assert row["kl/token"] == row["kl/exact"]
        assert row["kl/error"] == pytest.approx(row["kl/token"] / row["kl/target"] - 1)
        shaped = row["objective/scores_shaped"] - row["kl/coef"] * row["kl/sequence"]
        assert row["objective/rlhf_reward"] == pytest.approx(shaped)
    assert rows[0]["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert rows[2]["kl/token"] > 0
    assert ["eval/perplexity" in row and "eval/scores" in row for row in rows] == [True, False, False, True]


def test_each_update_uses_the_beta_that_the_one_before_left(smoke: tuple[Path, Any]) -> None:
    rows = read_jsonl(smoke[0] / "metrics.jsonl")[:3]
    assert [row["kl/coef"] for row in rows[1:]] == [row["kl/coef_next"] for row in rows[:-1]]


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


def test_samples(smoke: tuple[Path, Any]) -> None:
    samples = read_jsonl(smoke[0] / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    for sample in samples:
        assert sample.keys() == {"step", "prompt", "response", "chosen", "score", "gold", "kl", "tokens"}
        assert sample["tokens"][0].keys() == {"text", "logprob", "ref_logprob", "kl"}


def test_the_final_model_is_one_of_plain_transformers(smoke: tuple[Path, Any], small_world: World) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = smoke
    model = AutoModelForCausalLM.from_pretrained(folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    start = AutoModelForCausalLM.from_pretrained(small_world.policy())
    inputs = tokenizer("I went to the", return_tensors="pt")
    assert inputs["input_ids"][0, 0] == tokenizer.bos_token_id
    with torch.no_grad():
        logits = model(input_ids=inputs["input_ids"]).logits
        before = start(input_ids=inputs["input_ids"]).logits
    assert float((logits - before).abs().max()) > 1e-3  # it is the trained one
    trained = load_file(folder / "checkpoints" / "step-000003" / "model.safetensors")
    ours = start
    ours.load_state_dict(
        {k.removeprefix("policy."): v for k, v in trained.items() if k.startswith("policy.")}, strict=False
    )
    ours.transformer.wte.weight = ours.lm_head.weight
    with torch.no_grad():
        assert torch.equal(ours(input_ids=inputs["input_ids"]).logits, logits)
    settings = model.generation_config
    assert settings.top_k == 0
    assert tokenizer.eos_token_id in settings.eos_token_id
    written = model.generate(**inputs, max_new_tokens=3, do_sample=True)
    assert written.shape[1] > inputs["input_ids"].shape[1]


def test_the_resolved_config_repeats_the_run(smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    folder, _ = smoke
    again = tmp_path / "again"
    assert rlhf_kl("train", "--config", folder / "config.yaml", "--output-dir", again, "--quiet").code == 0
    for row, twin in zip(*(read_jsonl(f / "metrics.jsonl") for f in (folder, again)), strict=True):
        for key in row:
            assert key.startswith(("time/", "perf/")) or row[key] == twin[key], key


# ---- a folder that holds a run ----


def test_a_second_run_is_refused(smoke: tuple[Path, Any], rlhf_kl: Cli) -> None:
    folder, _ = smoke
    before = (folder / "metrics.jsonl").read_bytes()
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder)
    assert_refused(outcome, "--resume", "--overwrite")
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_prints_its_summary(smoke: tuple[Path, Any], rlhf_kl: Cli) -> None:
    folder, _ = smoke
    before = (folder / "metrics.jsonl").read_bytes()
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder, "--resume")
    assert outcome.code == 0
    assert "finished" in outcome.err
    assert "held-out perplexity" in outcome.err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_what_to_do_next_names_the_folder_where_the_run_is_now(
    smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(smoke[0], tmp_path / "moved here"))
    outcome = rlhf_kl("train", "--config", "smoke.yaml", "--output-dir", folder, "--resume")
    assert outcome.code == 0
    assert str(smoke[0]) not in outcome.err
    commands = [line.strip() for line in outcome.err.splitlines() if "--run" in line or "--logdir" in line]
    assert [shlex.split(line)[-1] for line in commands] == [str(folder)] * 2


def test_overwriting_leaves_nothing_of_the_old_run(smoke: tuple[Path, Any], rlhf_kl: Cli, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(smoke[0], tmp_path / "run"))
    (folder / "checkpoints" / "step-000099").mkdir()
    arguments = ("train", "--config", "smoke.yaml", "--output-dir", folder, "--seed", 7, "--quiet")
    short = ("--set", "ppo.total_episodes=16")
    assert rlhf_kl(*arguments, *short, "--overwrite").code == 0
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [1, 2]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000001"]
    assert {sample["step"] for sample in read_jsonl(folder / "samples.jsonl")} == {1}
    assert len(list((folder / "tensorboard").glob("events*"))) == 1
    assert json.loads((folder / "summary.json").read_text())["seed"] == 7


def test_resuming_where_there_is_nothing_starts_and_says_so(tiny_config: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    arguments = ("train", "--config", tiny_config, "--output-dir", tmp_path / "run", "--resume")
    outcome = rlhf_kl(*arguments, "--set", "ppo.total_episodes=16")
    assert outcome.code == 0
    assert "starting" in outcome.err
    assert (tmp_path / "run" / "summary.json").is_file()


# ---- the other trainings ----


@pytest.mark.parametrize(
    ("command", "file", "key"),
    [("sft", "sft_reviews.yaml", "eval/perplexity"), ("reward-model", "reward_reviews.yaml", "eval/accuracy")],
)
def test_supervised_runs_on_the_built_in_world(
    command: str, file: str, key: str, small_world: World, rlhf_kl: Cli, tmp_path: Path
) -> None:
    section = command.replace("-", "_")
    data = "data.texts" if command == "sft" else "data.pairs"
    sets = [
        f"{data}=builtin:reviews-small",
        "policy.model=builtin:reviews-small",
        f"{section}.epochs=0.05",
        f"{section}.learning_rate=1e-4",
    ]
    outcome = rlhf_kl(
        command, "--config", file, "--output-dir", tmp_path / "run", *(a for s in sets for a in ("--set", s))
    )
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final"][key] > 0
    assert summary["stopped_by"] is None
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[0].keys() >= {"step", "train/loss", key}
    assert_refused(rlhf_kl(command, "--config", file, "--output-dir", tmp_path / "run"), "--resume")


# ---- bad input: each one line and exit 2 ----


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any]) -> Path:
    file = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    file.write_text(yaml.safe_dump(tiny_settings))
    return file


@pytest.fixture
def refused(tiny_config: Path, rlhf_kl: Cli, tmp_path: Path) -> Callable[..., None]:
    """`refused(["kl.target=-1"], "kl.target")`: the tiny run with these `--set` is, and says why."""

    def check(sets: Sequence[str], *words: str) -> None:
        changes = [argument for change in sets for argument in ("--set", change)]
        outcome = rlhf_kl("train", "--config", tiny_config, "--output-dir", tmp_path / "run", *changes)
        assert_refused(outcome, *words)
        assert not (tmp_path / "run" / "config.yaml").exists()

    return check


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("ppo.lerning_rate=1e-3", ("ppo.lerning_rate", "ppo.learning_rate")),
        ("pppo.epochs=2", ("pppo", "ppo")),
        ("ppo.epochs=many", ("ppo.epochs", "many")),
        ("rollout.batch_size=1.5", ("rollout.batch_size",)),
        ("kl.target=-0.1", ("kl.target", "-0.1")),
        ("kl.controller={kind: adaptve}", ("kl.controller", "adaptve", "adaptive")),
        ("kl.controller={kind: adaptive, no_such: 1}", ("no_such",)),
        ("data.prompts=nowhere.jsonl", ("data.prompts", "nowhere.jsonl")),
        ("policy.model=./no-such-folder", ("policy.model", "no-such-folder")),
        ("reward={kind: 'nowhere.py:score'}", ("nowhere.py",)),
        ("ppo.microbatch_size=3", ("ppo.microbatch_size",)),
        ("kl.ceiling.value=0.05", ("kl.ceiling",)),
    ],
)
def test_a_bad_config(refused: Callable[..., None], change: str, words: tuple[str, ...]) -> None:
    refused([change], *words)


def test_a_config_that_is_not_there(rlhf_kl: Cli, tmp_path: Path) -> None:
    assert_refused(rlhf_kl("train", "--config", "ppo_adaptiv.yaml"), "ppo_adaptiv.yaml", "ppo_adaptive.yaml")
    assert_refused(rlhf_kl("train"), "--config")
    assert_refused(rlhf_kl("trian"), "trian")


def test_all_problems_at_once(rlhf_kl: Cli, tiny_config: Path) -> None:
    outcome = rlhf_kl("train", "--config", tiny_config, "--set", "kl.target=-1", "--set", "ppo.epochs=0")
    assert outcome.code == 2
    assert {line.split()[1] for line in outcome.err.splitlines()} == {"ppo.epochs", "kl.target"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("", ("holds no rows",)),
        ('{"prompt": ""}\n{"prompt": " "}\n', ("none of 2 prompts can be used: 2 empty",)),
        ('{"prompt": ""}\n{"prompt": "' + "abcd" * 8 + '"}\n', ("1 empty, 1 longer than the 26 tokens",)),
        ('{"question": "ab"}\n', ("no column 'prompt'",)),
        ("not json\n", ("line 1",)),
    ],
)
def test_bad_prompts(refused: Callable[..., None], tmp_path: Path, body: str, words: tuple[str, ...]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(body)
    refused([f"data.prompts='{path}'"], "data.prompts", str(path) if "holds" in words[0] else "", *words)


def test_no_room_for_a_prompt(refused: Callable[..., None]) -> None:
    refused(["rollout.max_new_tokens=32"], "rollout.max_new_tokens")


def test_bad_held_out_data(refused: Callable[..., None], tmp_path: Path) -> None:
    refused([f"eval.texts='{tmp_path}/nowhere.txt'"], "eval.texts", "nowhere.txt")
    (tmp_path / "long.txt").write_text("abcd" * 8 + "\n")
    refused([f"eval.prompts='{tmp_path}/long.txt'"], "eval.prompts", "1 longer")


def test_a_model_folder_without_weights(refused: Callable[..., None], tiny_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_folder, tmp_path / "copy"))
    (copy / "model.safetensors").unlink()
    refused([f"policy.model='{copy}'"], "policy.model", "holds no weights")


def test_a_reward_model_with_a_random_head(refused: Callable[..., None], tiny_folder: Path) -> None:
    refused([f"reward={{kind: model, model: '{tiny_folder}'}}"], "reward.model", "random")


SCORERS = """
def raises(prompts, responses):
    raise RuntimeError("the server is gone")

def too_few(prompts, responses):
    return [1.0]

def nan(prompts, responses):
    return [float("nan")] * len(responses)

def text(prompts, responses):
    return ["good"] * len(responses)

def constant(prompts, responses):
    return [1.0] * len(responses)

def lengths(prompts, responses):
    return [float(len(response)) for response in responses]
"""


@pytest.fixture
def scorers(tmp_path: Path) -> Path:
    (tmp_path / "scorers.py").write_text(SCORERS)
    return tmp_path / "scorers.py"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", ("RuntimeError", "the server is gone")),
        ("too_few", ("1 scores for",)),
        ("nan", ("nan", "not a finite number")),
        ("text", ("'good'", "not a finite number")),
        ("constant", ("finds no scale",)),
    ],
)
def test_a_reward_function_that_misbehaves(
    tiny_config: Path, rlhf_kl: Cli, scorers: Path, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    change = f"reward={{kind: '{scorers}:{name}'}}"
    outcome = rlhf_kl("train", "--config", tiny_config, "--output-dir", tmp_path / "run", "--set", change)
    assert_refused(outcome, "reward", *words)


@pytest.mark.parametrize("name", ["raises", "too_few", "nan", "text"])
def test_a_gold_function_that_misbehaves_costs_its_figures_only(
    tiny_config: Path, rlhf_kl: Cli, scorers: Path, tmp_path: Path, name: str
) -> None:
    change = f"reward={{kind: '{scorers}:lengths', gold: '{scorers}:{name}'}}"
    outcome = rlhf_kl("train", "--config", tiny_config, "--output-dir", tmp_path / "run", "--set", change)
    assert outcome.code == 0
    assert "gold-failed: reward.gold: " in outcome.err
    assert "Traceback" not in outcome.err


def test_a_folder_of_somebody_else(tiny_config: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("my only copy")
    for option in ([], ["--overwrite"], ["--resume"]):
        outcome = rlhf_kl("train", "--config", tiny_config, "--output-dir", tmp_path, *option)
        assert_refused(outcome, str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "my only copy"


def test_a_guard_that_stops_the_run_is_exit_three(tiny_config: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    sets = ("--set", "kl.target=1e-7", "--set", "kl.ceiling={value: 2e-7, action: stop}")
    outcome = rlhf_kl("train", "--config", tiny_config, "--output-dir", tmp_path / "run", *sets)
    assert outcome.code == 3
    assert outcome.err.splitlines()[-1].startswith("error: KL ")
    assert "Traceback" not in outcome.err


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    words = ["--config", "smoke.yaml", "--set", "tracking.trackers=[mlflow]"]
    outcome = rlhf_kl("train", *words, "--output-dir", tmp_path / "run")
    assert (outcome.code, outcome.err) == (2, "error: tracking.trackers: mlflow is not installed: pip install mlflow\n")
    assert not (tmp_path / "run").exists()
