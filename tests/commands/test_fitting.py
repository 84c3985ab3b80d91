"""`doctor --device-memory`: what fits, told without loading anything."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.commands.fitting import ADAPTER, CHANGES, SHARDS, USABLE, changed, fits, fitting_changes, outliner
from rlhf_kl.commands.guide import FOLDER
from rlhf_kl.commands.options import byte_count
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.monitors.readiness import Finding
from rlhf_kl.training.footprint import Footprint, Place, total
from rlhf_kl.training.outlines import outlines
from tests.made import problem
from tests.runs import Cli, sets

SHAPE = {"model_type": "llama", "vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024}  # 8 million numbers
SHAPE |= {"num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PHASES = ("models loaded", "at rest", "sampling", "reading", "scoring", "training pass", "KL after the update")
PHASES += ("evaluation", "checkpoint")
Planned = Callable[..., dict[str, list[Finding]]]


@pytest.fixture
def planned(rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """`planned("80GB", "policy.lora={}", processes=8, code=0)`: topic -> findings, for a folder with a config alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    settings = {
        "extends": "ppo_model.yaml",
        "policy": {"model": "model"},
        "reward": {"kind": "http", "url": "http://127.0.0.1"},
        "data": {"prompts": "elsewhere.jsonl"},
        "eval": {"texts": "elsewhere.txt"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr("rlhf_kl.models.pretrained._load", lambda *_: pytest.fail("loaded a model"))

    def plan(memory: str, *changes: str, processes: int = 1, code: int = 0) -> dict[str, list[Finding]]:
        options = ("--device-memory", memory, "--processes", processes, "--json")
        outcome = rlhf_kl("doctor", "--config", tmp_path / "mine.yaml", *options, *sets(*changes))
        assert outcome.code == code, outcome
        found: dict[str, list[Finding]] = {}
        for row in json.loads(outcome.out):
            found.setdefault(row["topic"], []).append(Finding(**row))
        return found

    return plan


def test_a_small_model_fits_and_each_phase_is_told(planned: Planned) -> None:
    found = planned("24GB")
    first, *phases = found["memory"]
    assert [each.text.partition(":")[0] for each in phases] == list(PHASES)
    assert {each.level for each in found["memory"]} == {"fine"}
    assert "bfloat16" in first.text  # as on a GPU
    assert found["context"][0].level == "doubtful"  # the length of prompts that are not here
    assert "data.first_tokens" in found["context"][0].change
    known = planned("24GB", "data.first_tokens=32")
    assert "context" not in known
    assert "32 + 48 tokens" in known["memory"][0].text


def test_an_estimate_is_called_one(planned: Planned, tmp_path: Path) -> None:
    """Of experts, which look at numbers."""
    shape = SHAPE | {"model_type": "mixtral", "num_local_experts": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (told,) = [each for each in planned("24GB")["memory"] if each.level == "doubtful"]
    assert "mixtral" in told.text


def test_what_does_not_fit_is_fatal_with_the_key_to_change(planned: Planned) -> None:
    found = planned("250MB", "data.first_tokens=64", "run.device=cpu", code=2)["memory"]
    fatal = [each for each in found if each.level == "fatal"]
    assert any(each.text.startswith("training pass") for each in fatal)
    (change,) = {each.change for each in fatal if each.change}
    changes = change.split(", ")
    again = planned("250MB", "data.first_tokens=64", "run.device=cpu", *changes)  # the advice helps
    assert {each.level for each in again["memory"]} == {"fine"}
    nothing = planned("2MB", "data.first_tokens=64", code=2)["memory"]
    assert not any("=" in each.change for each in nothing)


def test_prompts_that_are_here_are_measured(rlhf_kl: Cli) -> None:
    words = ("doctor", "--config", "smoke.yaml", "--device-memory", "16GB", "--processes", 2, "--json")
    outcome = rlhf_kl(*words)
    assert outcome.code == 0, outcome
    found = json.loads(outcome.out)
    assert {row["topic"] for row in found} == {"memory"}
    assert all(row["level"] == "fine" for row in found)


def test_a_wrong_plan_is_told(planned: Planned, rlhf_kl: Cli, tmp_path: Path) -> None:
    assert planned("24GB", "policy.shard=true", code=2)["config"][0].level == "fatal"  # in one process
    assert planned("24GB", processes=7, code=2)["config"]  # which do not divide the batch
    assert "policy.model" in planned("24GB", "policy.model=owner/not-in-the-cache", code=2)["config"][0].text
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "policy.model" in planned("24GB", code=2)["config"][0].text
    for nonsense in ("80", "a lot", "-1GB", "0GB", "80GBs", "GB"):
        outcome = rlhf_kl("doctor", "--config", "smoke.yaml", f"--device-memory={nonsense}")
        assert outcome.code == 2, nonsense
        assert "--device-memory" in outcome.err
    share = "rollout.engine_options={gpu_memory_utilization: a lot}"
    for words, named in (
        (("--set", "ppo.gama=1"), "ppo.gama"),
        (("--pairs", "p.jsonl"), "--pairs"),
        (("--set", "rollout.engine=vllm", "--set", share), "gpu_memory_utilization"),
    ):
        outcome = rlhf_kl("doctor", "--config", "smoke.yaml", "--device-memory", "24GB", *words)
        assert outcome.code == 2
        assert named in outcome.err


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("24GiB", 24 * 2**30), ("1.5 TB", 1.5e12), ("512MiB", 512 * 2**20), ("40gb", 40e9)],
)
def test_sizes(text: str, size: float) -> None:
    assert byte_count("--device-memory", text) == size


def test_a_size_without_a_unit_is_none() -> None:
    assert "--device-memory 80" in problem(byte_count, "--device-memory", "80")


# ---- what to change


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    sections: dict[str, Any] = {
        "policy": {"model": str(tmp_path)},
        "reward": {"kind": "http", "url": "http://127.0.0.1"},
        "data": {"prompts": "builtin:reviews"},
        "eval": {"texts": "builtin:reviews", "scorers": {"gold": None}, "responses": 1},
        "rollout": {"batch_size": 64, "max_new_tokens": 16},
        "ppo": {"minibatch_size": 64, "microbatch_size": 64},
    }
    return TrainConfig.model_validate(sections)


def test_each_change_is_the_first_that_suffices(config: TrainConfig) -> None:
    """With less and less memory: nothing, smaller passes, shards where there are several processes, an adapter."""
    models = outliner(config, 16)

    def changes(processes: int, share: float) -> list[str] | None:
        one = Place(torch.device("cpu"), 1, 1.0, 16)
        largest = max(map(total, Footprint(config, models(False), one).phases().values()))
        return fitting_changes(config, models, Place(torch.device("cpu"), processes, share * largest / USABLE, 16))

    assert changes(1, 1.0) == []
    assert changes(1, 0.9) == ["ppo.microbatch_size=32"]
    assert changes(8, 0.2) == [SHARDS]
    assert changes(1, 0.25) == [ADAPTER, "ppo.microbatch_size=8"]
    assert changes(8, 0.001) is None
    adapted = changed(config, CHANGES[ADAPTER])
    assert fitting_changes(adapted, outliner(adapted, 16), Place(torch.device("cpu"), 1, 1.0, 16)) is None


def test_an_engine_gets_the_share_that_it_needs(config: TrainConfig) -> None:
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "vllm"})})
    size = 4 * sum(p.numel() for p in outlines(other, 16).policy.model.parameters())
    place = Place(torch.device("cpu"), 1, 40 * size, 16)
    sums = Footprint(other, outlines(other, 16), place)
    assert (sums.engine, sums.engine_needs) == (0.3, 0.05)
    tight = Place(torch.device("cpu"), 1, 3 * size, 16)  # 1.2 of its weights are 0.4 of it
    assert not fits(Footprint(other, outlines(other, 16), tight))
    assert Footprint(other, outlines(other, 16), tight).engine_needs == pytest.approx(0.45)


@pytest.mark.slow
def test_the_table_of_the_guide_is_what_is_computed() -> None:
    made = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "memory_table.py"))["table"]()
    assert any(made in page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md")), made
