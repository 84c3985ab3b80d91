"""Runs that train an adapter: one copy of the weights is policy and reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from rlhf_kl.models.pretrained import load_causal_lm
from tests.runs import Cli, Train, rows

LORA = ("policy.lora={r: 4, alpha: 8.0}", "ppo.learning_rate=5e-3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    """A finished run of six updates with an adapter; not to be written to."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(folder, *LORA)
    return folder


def test_final_and_checkpoints_hold_the_adapter_alone(run: Path, tiny_folder: Path) -> None:
    final = {path.name for path in (run / "final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "value.safetensors"} <= final
    assert "model.safetensors" not in final
    adapter = json.loads((run / "final" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(tiny_folder)
    stored = load_file(run / "checkpoints" / "step-000006" / "model-00001.safetensors")
    assert all("lora" in name or "critic" in name for name in stored)


def test_eval_reads_the_adapter_and_its_checkpoints(run: Path, rlhf_kl: Cli) -> None:
    last, early = (json.loads(rlhf_kl("eval", "--run", run, "--json", *more).out) for more in ((), ("--checkpoint", 2)))
    summary = json.loads((run / "summary.json").read_text())["final"]
    assert last["perplexity"] == pytest.approx(summary["eval/perplexity"], rel=1e-4)
    assert last["kl_token"] > early["kl_token"] > 0
    assert early["perplexity"] == pytest.approx(rows(run)[2]["eval/perplexity"], rel=1e-4)


def test_an_adapter_is_trained_further_with_its_beginning_as_the_reference(
    run: Path, train: Train, tmp_path: Path
) -> None:
    train(tmp_path / "more", f"policy.model='{run}/final'", "ppo.learning_rate=5e-3")
    found = rows(tmp_path / "more")
    assert found[0]["kl/token"] == pytest.approx(0.0, abs=1e-6)  # to the adapter it began as, not to the base
    assert found[0]["eval/perplexity"] == pytest.approx(rows(run)[-1]["eval/perplexity"], rel=1e-5)
    assert found[-2]["kl/token"] > 1e-3
    assert (tmp_path / "more" / "final" / "adapter_model.safetensors").is_file()


def test_merge_writes_the_whole_model(rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    options = ("train", "--config", tmp_path / "tiny.yaml", "--quiet", "--output-dir")
    lora = (tmp_path / "run", "--set", "policy.lora={r: 2}")
    assert rlhf_kl(*options, *lora).code == 0
    assert not (tmp_path / "run" / "merged").exists()
    assert rlhf_kl(*options, *lora, "--resume", "--merge").code == 0  # of a run that is finished
    assert type(load_causal_lm(str(tmp_path / "run" / "merged"))).__name__ == "GPT2LMHeadModel"
    texts = ("--texts", tiny_settings["eval"]["texts"], "--json")
    whole, adapter = (
        json.loads(rlhf_kl("eval", "--model", tmp_path / "run" / name, *texts).out) for name in ("merged", "final")
    )
    assert whole.pop("standard_errors") == pytest.approx(adapter.pop("standard_errors"), rel=1e-3)
    assert whole == pytest.approx(adapter, rel=1e-5)
    cards = [(tmp_path / "run" / name / "README.md").read_text() for name in ("final", "merged")]
    assert ["library_name: peft" in card for card in cards] == [True, False]
    outcome = rlhf_kl(*options, tmp_path / "other", "--merge")
    assert outcome.code == 2
    assert "--merge: " in outcome.err
