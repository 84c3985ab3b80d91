"""A run folder that an earlier version wrote: not resumed, and read by everything that only looks at it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from rlhf_kl.config.load import load_config
from rlhf_kl.models.load import save_model

Make = Callable[..., Any]
Cli = Callable[..., Any]
LORA = "policy/base_model/model/transformer/h/0/attn/c_attn/lora_{}/default/weight"


@pytest.fixture
def old_run(tmp_path: Path, tiny_settings: dict[str, Any], metrics_rows: Make) -> Make:
    """`old_run("name", tensors, policy={...})`: a run that was ended after its checkpoint of update 4."""

    def write(name: str, tensors: dict[str, Any], **policy: Any) -> Path:
        folder = tmp_path / name
        settings = copy.deepcopy(tiny_settings)
        settings["policy"] |= policy
        settings["kl"] = {"controller": {"kind": "proportional", "coef": 0.1, "horizon": 500}}
        settings["run"] |= {"name": name, "output_dir": str(folder)}
        checkpoint = folder / "checkpoints" / "step-000004"
        checkpoint.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        rows = metrics_rows([0.0, 0.05, 0.1, 0.1, 0.1, 0.1], gold=False)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "samples.jsonl").write_text("")
        final = {"steps": 6, "stopped_by": None, "seconds": 1.0, "final": rows[-2] | rows[-1], "best": None}
        (folder / "summary.json").write_text(json.dumps(final))
        save_file(tensors, checkpoint / "model.safetensors")
        save_file({"policy.lm_head.weight.exp_avg": torch.zeros(2)}, checkpoint / "optimizer.safetensors")
        law = {"kind": "ProportionalKL", "coef": 0.1, "controller": {"coef": 0.1}}
        state = {"step": 4, "trainer": {"controller": law, "compiled": 16, "decoding_agrees": True}}
        (checkpoint / "state.json").write_text(json.dumps(state))
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
        (checkpoint / "checksums.json").write_text(json.dumps(digests))
        return folder

    return write


def whole(model: Any) -> dict[str, Any]:
    """Its checkpoint, tied weights under one name alone, with a separate value function beside it."""
    tensors = {f"policy.{name}": x.clone() for name, x in model.state_dict().items() if "wte" not in name}
    tensors |= {f"value_trunk.{name}": x.clone() for name, x in model.transformer.state_dict().items()}
    return tensors | {"value_head.weight": torch.zeros(1, 16), "value_head.bias": torch.zeros(1)}


def figures(outcome: Any) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    read: dict[str, Any] = json.loads(outcome.out)
    return read


def test_the_policy_of_a_checkpoint_is_evaluated_and_sampled_from(
    rlhf_kl: Cli, old_run: Make, new_model: Make, letters: Any, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    model = new_model(seed=9, spread=0.3)
    save_model(model, letters, tmp_path / "same")
    folder = old_run("old", whole(model), value="separate")
    read = figures(rlhf_kl("eval", "--run", folder, "--json"))
    direct = figures(rlhf_kl("eval", "--model", tmp_path / "same", "--texts", tiny_settings["eval"]["texts"], "--json"))
    assert {key: read[key] for key in direct} == pytest.approx(direct, rel=1e-5)
    assert read["kl_token"] > 0.01
    options = ("generate", "--prompt", "a", "--prompt", "cd", "--samples", 3, "--max-new-tokens", 6, "--json")
    for run in (("--run", folder), ("--run", folder, "--checkpoint", 4)):
        assert rlhf_kl(*options, *run).out == rlhf_kl(*options, "--model", tmp_path / "same").out
    (beside, *_) = figures(rlhf_kl(*options, "--run", folder, "--with-reference", "--scores", "--plugins"))
    assert {"score", "reference", "kl", "tokens"} <= beside.keys()


def test_so_is_an_adapter(rlhf_kl: Cli, old_run: Make) -> None:
    kls = []
    for name, size in (("start", 0.0), ("moved", 2.0)):
        adapter = {
            LORA.format("A"): torch.ones(2, 16),
            LORA.format("B"): torch.linspace(-size, size, 96).reshape(48, 2),
            "critic/inner/weight": torch.zeros(128, 16),
        }
        folder = old_run(name, adapter, lora={"r": 2, "alpha": 2.0, "target_modules": ["c_attn"]})
        kls.append(figures(rlhf_kl("eval", "--run", folder, "--checkpoint", 4, "--json"))["kl_token"])
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[1] > 0.001


def test_it_is_reported_and_compared_beside_a_new_one(
    rlhf_kl: Cli, old_run: Make, new_model: Make, tiny_run: Path, tmp_path: Path
) -> None:
    folder = old_run("old", whole(new_model()), value="separate")
    outcome = rlhf_kl("report", folder)
    assert outcome.code == 0, outcome.err
    assert "ziegler" in (folder / "report.html").read_text()
    outcome = rlhf_kl("compare", folder, tiny_run, "--output-dir", tmp_path / "comparison")
    assert outcome.code == 0, outcome.err
    compared = json.loads((tmp_path / "comparison" / "compare.json").read_text())
    assert len(compared["variants"]) == 2


def test_it_is_not_resumed_and_its_config_starts_another_run(
    rlhf_kl: Cli, old_run: Make, new_model: Make, tmp_path: Path
) -> None:
    folder = old_run("old", whole(new_model()), value="separate")
    (folder / "summary.json").unlink()
    outcome = rlhf_kl("train", "--config", folder / "config.yaml", "--resume", "--quiet")
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert "step-000004: written by another version" in line
    short = ("--set", "ppo.total_episodes=16", "--output-dir", tmp_path / "new", "--quiet")
    assert rlhf_kl("train", "--config", folder / "config.yaml", *short).code == 0
    assert load_config("train", tmp_path / "new" / "config.yaml").kl.controller.kind == "ziegler"
