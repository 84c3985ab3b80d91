from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlhf_kl.commands.scale import Scaled, _median_texts, measured, rise_error, usual_samples
from rlhf_kl.ppo.heldout import Samples
from rlhf_kl.report.sweep import scaled_answer
from rlhf_kl.run.folder import RunFolder
from tests.runs import updates

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Any]) -> Path:
    """A finished run of an adapter, far enough from its reference to be scaled."""
    folder = tmp_path_factory.mktemp("scale") / "tiny"
    held = folder.with_name("held.jsonl")
    held.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in ("aa", "bb", "cab", "ddc", "bdcb")))
    changes = ("policy.lora={r: 4}", "ppo.learning_rate=5e-3", "kl.ceiling=null", f"eval.prompts={held}")
    train(folder, *changes)
    return folder


def test_one_run_at_every_target(run: Path, rlhf_kl: Cli, tiny_folder: Path, tiny_data: Any) -> None:
    full = json.loads(rlhf_kl("eval", "--run", run, "--samples", "64", "--plugins", "--json").out)
    kl = full["kl_token"]
    targets = [round(share * kl, 5) for share in (0.25, 0.5, 1.2, 9.0)]
    words = ("scale", run, "--plugins", "--samples", "64", "--targets", ",".join(map(str, targets)))
    done = rlhf_kl(*words, "--json", "--save", targets[1])  # not the one that is measured last
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document == json.loads((run / "scale.json").read_text())
    rows = document["rows"]
    low, half, trained, high = rows
    assert trained["scale"] == 1.0
    assert [row["target"] for row in (low, half, high)] == targets[:3]
    for row in (low, half, high):
        assert row["kl_token"] == pytest.approx(row["target"], rel=0.15)
        assert len({text["text"] for text in row["texts"]}) == 2
    assert trained["kl_token"] == pytest.approx(kl, rel=1e-4)  # as `eval` measures it, on the same prompts
    assert trained["perplexity"] == pytest.approx(full["perplexity"], rel=1e-5)
    assert document["reference"]["perplexity"] == pytest.approx(full["reference"]["perplexity"], rel=1e-5)
    assert 0.3 < low["scale"] < half["scale"] < 1 < high["scale"] < 1.5
    assert document["too_far"] == [targets[3]]
    assert (document["responses"], document["prompts"]) == (64, full["prompts"]) == (64, 5)
    assert trained["kl_token_stderr"] == pytest.approx(full["kl_token_stderr"], rel=1e-3)
    assert all(row["score_rise_stderr"] >= 0 for row in rows)
    # What was saved is on the line between the reference and the merged policy, and is an ordinary model.
    saved = run / f"scaled-{targets[1]:g}"
    weights, start = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (saved, tiny_folder))
    moved = {name: (weights[name] - start[name]).norm().item() for name in start}
    assert max(moved.values()) > 0
    assert min(moved.values()) == 0  # an adapter leaves most weights alone
    assert f"| scale | {half['scale']:.4g} of " in (saved / "README.md").read_text()
    alone = json.loads(rlhf_kl("eval", "--model", saved, "--texts", tiny_data.texts, "--json").out)
    assert alone["perplexity"] == pytest.approx(half["perplexity"], rel=1e-5)
    assert low["perplexity"] != pytest.approx(half["perplexity"], rel=1e-4)
    page = (run / "scale.html").read_text()
    assert all(title in page for title in ("<h3>Score: ", "Two responses of median score"))
    assert (run / "scale.png").stat().st_size > 10_000


def test_a_target_that_was_measured_is_written_without_a_sample(
    run: Path, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the advice under the table says it, without --plugins: it once drew all samples again and lost the scores."""
    kl = json.loads(rlhf_kl("eval", "--run", run, "--samples", "64", "--plugins", "--json").out)["kl_token"]
    words = ("--plugins", "--samples", "16", "--targets", f"{kl / 2:.5g}")
    assert rlhf_kl("scale", run, *words, "--save", f"{kl / 2:.5g}").code == 0
    written, page = run / f"scaled-{kl / 2:.5g}", (run / "scale.json").read_bytes()
    weights = {file.name: file.read_bytes() for file in written.iterdir()}
    shutil.rmtree(written)
    monkeypatch.setattr(Scaled, "measure", None)
    done = rlhf_kl("scale", run, "--save", f"{kl / 2:.5g}")
    assert done.code == 0, done.err
    assert " at a KL of " in done.out
    assert "scores left out" not in done.err
    assert (run / "scale.json").read_bytes() == page
    assert {file.name: file.read_bytes() for file in written.iterdir()} == weights
    assert measured(RunFolder(run), 0.5 * kl * 1.1) is None
    os.utime(run / "final")  # another policy has been written since
    assert measured(RunFolder(run), float(f"{kl / 2:.5g}")) is None


def test_what_cannot_be_scaled(run: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    cases = {
        ("--targets", "0.1,x"): "--targets 0.1,x: must be numbers from 1e-09 on with commas between",
        ("--targets", "0"): "--targets 0: must be numbers",
        ("--save", "-1"): "Invalid value for '--save'",
    }
    for words, message in cases.items():
        done = rlhf_kl("scale", run, *words)
        assert (done.code, done.out) == (2, "")
        assert message in done.err
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    done = rlhf_kl("scale", tmp_path / "run")
    assert done.code == 2
    assert "has not ended" in done.err


def test_a_reference_of_other_weights_is_no_start_and_a_copy_of_the_same_is(
    run: Path, rlhf_kl: Cli, train: Callable[..., Any], tiny_folder: Path, tmp_path: Path
) -> None:
    """A policy that was trained before is not moved towards the model that it came from; see tests/ppo/test_way.py."""
    train(tmp_path / "first", "ppo.learning_rate=5e-3", "kl.ceiling=null")
    trained = f"policy.model='{tmp_path}/first/final'"
    train(tmp_path / "on", trained, f"reference.model='{tiny_folder}'", "kl.target=1e-4", "kl.ceiling={value: 2e-4}")
    found = updates(tmp_path / "on")
    assert found[0]["kl/token"] > 1e-3
    assert {row["kl/scale"] for row in found} == {1.0}
    done = rlhf_kl("scale", tmp_path / "on", "--plugins")
    assert done.code == 2
    assert f"reference ({tiny_folder})" in done.err
    shutil.copytree(tiny_folder, tmp_path / "copy")
    options = ("ppo.learning_rate=5e-3", "kl.target=1e-3", "kl.ceiling={value: 1.1e-3}")
    train(tmp_path / "same", f"reference.model='{tmp_path}/copy'", *options)
    assert min(row["kl/scale"] for row in updates(tmp_path / "same")) < 1.0
    assert rlhf_kl("scale", tmp_path / "same", "--plugins", "--samples", "16", "--targets", "5e-4").code == 0


@pytest.mark.parametrize(
    ("seconds", "samples", "why"),
    [
        ([0.24, 0.1, 0.3], 256, ": about 4 s each"),  # by hand: 256 * 0.24 / 16
        ([2.0, 1.6, 90.0], 120, ": about 15 s each"),  # 15 / 0.125; one update was slow
        ([30.0], 64, ": about 2:00 each"),
        ([], 256, ""),
    ],
)
def test_a_slow_model_gets_fewer_responses(seconds: list[float], samples: int, why: str) -> None:
    rows = [{"step": 1, "time/rollout_s": each} for each in seconds] + [{"step": 2, "eval/perplexity": 3.0}]
    found, said = usual_samples(rows, 16)
    assert found == samples
    assert said == why


def test_the_default_is_told(run: Path, rlhf_kl: Cli) -> None:
    done = rlhf_kl("scale", run, "--plugins", "--targets", "0.01", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["responses"] == 256
    (line,) = (line for line in done.err.splitlines() if "--samples N" in line)
    assert re.search(r"256 responses .*: about \d+ s each", line)


def test_what_prompts_have_in_common_is_no_error_of_a_rise() -> None:
    """By hand: the rises of three prompts are 1, 2 and 3 on average, so the error is 1 / sqrt(3)."""
    prompts, texts = [0, 0, 1, 1, 2, 2], [""] * 6
    before = Samples(texts=texts, scores=[0.0, 5.0, 50.0, 40.0, 900.0, 800.0], prompts=prompts)
    after = Samples(texts=texts, scores=[1.0, 6.0, 51.0, 43.0, 903.0, 803.0], prompts=prompts)
    assert rise_error(before, after) == pytest.approx(1 / math.sqrt(3))
    assert rise_error(before, Samples(texts=texts, prompts=prompts)) is None  # without scores


def test_one_prompt_suggests_no_target() -> None:
    row = defaultdict[str, Any](lambda: None, target=0.1, scale=1.0, kl_token=1.0, kl_sequence=1.0, scores=1.0)
    row |= {"perplexity": 1.0, "forward_kl_token": 0.1, "distinct_2": 0.5}
    reference = {"scores": 0.0, "perplexity": 1.0, "distinct_2": 0.5}
    document = {"unit": "token", "responses": 64, "rows": [row], "reference": reference, "too_far": []}
    answers = [scaled_answer(document | {"prompts": prompts}, "runs/x")[0] for prompts in (1, 2)]
    assert answers[0].startswith("One prompt suggests no ")
    assert answers[1].startswith("Suggested target: 0.1 nats ")


def test_the_texts_are_those_of_median_score_to_the_first_two_prompts() -> None:
    prompts = ["a", "a", "b", "b", "a", "c"]
    own = Samples(kl=[0.1] * 6, texts=list("uvwxyz"), scores=[5.0, 1.0, math.nan, 9.0, 2.0, 4.0])
    assert [(each["prompt"], each["text"]) for each in _median_texts(prompts, own)] == [("a", "y"), ("b", "x")]
    assert len({each["text"] for each in _median_texts(["a"] * 6, own)}) == 2
    unscored = Samples(kl=[0.1] * 6, texts=list("uvwxyz"))
    assert [each["text"] for each in _median_texts(prompts, unscored)] == ["u", "w"]


def test_a_target_that_is_not_reached_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL grows as scale^1.6, so 0.2 is too far: it once stood in the table and among those not measured."""
    scaled = object.__new__(Scaled)
    scaled.unit, scaled.rows, scaled.scales, scaled.too_far = "token", {}, {}, []

    def measure(share: float, _: str = "") -> None:
        scaled.rows[share] = {"kl_token": 0.1 * share**1.6}

    monkeypatch.setattr(scaled, "measure", measure)
    measure(1.0)
    scaled.reach(0.2)
    assert scaled.too_far == [0.2]
    assert list(scaled.scales) == [0.17]
    assert scaled.kl(scaled.scales[0.17]) == pytest.approx(0.1 * 2**0.8)
