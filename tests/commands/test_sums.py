"""A sum whose terms are each on their own scale, over whole runs and what reads them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.log import read_jsonl
from tests.commands.test_resume import assert_same_run
from tests.made import numbers
from tests.runs import Cli, Train, sets, unfinished, updates

SCORERS = """
def wide(prompts, responses):
    return [100.0 * r.count("a") for r in responses]

def narrow(prompts, responses):
    return [r.count("b") + 7.0 for r in responses]

def of_some(prompts, responses):
    return [float(len(r)) if p[0] in "ab" else None for p, r in zip(prompts, responses)]

def fails(prompts, responses):
    return [1.0 / 0]

def constant(prompts, responses):
    return [1.0] * len(responses)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (place := tmp_path_factory.mktemp("scorers") / "mine.py").write_text(SCORERS)
    return place


def changes(mine: Path, normalize: str = "each", **weights: float) -> list[str]:
    """The settings of a sum of these functions."""
    terms = {name: {"kind": f"{mine}:{name}", "weight": weight} for name, weight in weights.items()}
    reward = {"kind": "sum", "terms": terms, "missing_eos_penalty": 0.0}
    return [f"reward={json.dumps(reward)}", f"reward.normalize={normalize}"]


@pytest.fixture(scope="module")
def each(tmp_path_factory: pytest.TempPathFactory, train: Train, mine: Path) -> Path:
    """A finished run; not to be written to."""
    folder = tmp_path_factory.mktemp("runs") / "each"
    train(folder, *changes(mine, wide=1.0, narrow=0.5, of_some=-0.25), "eval.every=3")
    return folder


def test_the_rows_of_a_sum_add_up(each: Path) -> None:
    """By the scale in the summary. Responses that a term does not score count as average: `of_some` scores half."""
    terms = json.loads((each / "summary.json").read_text())["reference"]["terms"]
    assert terms["wide"]["std"] > 50 * terms["narrow"]["std"]
    assert 0.2 < terms["of_some"]["scored"] < 0.8
    for row in updates(each):
        for name, weight in (("wide", 1.0), ("narrow", 0.5), ("of_some", -0.25)):
            of = terms[name]
            expected = weight * (row[f"raw/{name}"] - of["mean"]) / of["std"]
            assert row[f"reward/{name}"] == pytest.approx(expected, abs=1e-9)
        rest = row["objective/scores"] - row["reward/wide"] - row["reward/narrow"]
        scored = 16 * rest / row["reward/of_some"]  # of 16 responses
        assert 0 < round(scored) < 16
        assert scored == pytest.approx(round(scored))
    assert 7.0 < updates(each)[0]["raw/narrow"] < 13.0


def test_a_stored_run_is_read_on_its_own_scale(each: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    """From the summary, or without it from a checkpoint: `eval` agrees with the run's last evaluation."""
    last = read_jsonl(each / "metrics.jsonl")[-1]
    shutil.copytree(each, tmp_path / "bare")
    (tmp_path / "bare" / "summary.json").unlink()
    found = []
    for folder in (each, tmp_path / "bare"):
        outcome = rlhf_kl("eval", "--run", folder, "--plugins", "--json", "--quiet", "--samples", 96)
        assert outcome.code == 0, outcome.err
        found.append(json.loads(outcome.out)["scores"])
    assert found[0] == found[1]
    assert abs(found[0] - last["eval/scores"]) < 0.5  # of other samples; raw ones are near 100
    words = ("generate", "--run", each, "--plugins", "--scores", "--json", "--quiet", "--prompt", "c")  # not of_some's
    (row,) = json.loads(rlhf_kl(*words).out)
    terms = json.loads((each / "summary.json").read_text())["reference"]["terms"]
    a, b = (row["response"].count(letter) for letter in "ab")
    wide, narrow = terms["wide"], terms["narrow"]
    by_hand = (100 * a - wide["mean"]) / wide["std"] + 0.5 * (b + 7 - narrow["mean"]) / narrow["std"]
    assert row["score"] == pytest.approx(by_hand)
    shutil.rmtree(tmp_path / "bare" / "checkpoints")
    outcome = rlhf_kl("eval", "--run", tmp_path / "bare", "--plugins", "--json", "--quiet")
    assert (outcome.code, "summary.json" in outcome.err) == (2, True)


def test_without_a_run_there_is_no_scale(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path, mine: Path
) -> None:
    reward = {"kind": "sum", "normalize": "each", "terms": {"wide": {"kind": f"{mine}:wide"}}}
    (tmp_path / "start.yaml").write_text(yaml.safe_dump(tiny_settings | {"reward": reward}))
    outcome = rlhf_kl("eval", "--config", tmp_path / "start.yaml", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["scores"] is None
    assert "reward.normalize=each" in outcome.err


def test_a_run_that_goes_on_keeps_its_scale(each: Path, train: Train, mine: Path, tmp_path: Path) -> None:
    unfinished(each, tmp_path / "killed", kept=2)
    terms = changes(mine, wide=1.0, narrow=0.5, of_some=-0.25)
    train(tmp_path / "killed", *terms, "eval.every=3", resume=True)
    assert_same_run(each, tmp_path / "killed")
    starts = [found.state()["tracked"][0]["start"] for found in checkpoints(each / "checkpoints")]
    assert all(start == starts[0] for start in starts)


def test_the_widest_term_does_not_win(train: Train, mine: Path, tmp_path: Path) -> None:
    """a counts 100 times as much as b. On one scale both rise, else a alone."""
    rises = {}
    for normalize in ("each", "true"):
        learn = ("ppo.total_episodes=1280", "ppo.learning_rate=0.01", "kl.target=0.2", "eval.every=100")
        train(tmp_path / normalize, *changes(mine, normalize, wide=1.0, narrow=1.0), *learn)
        made = updates(tmp_path / normalize)
        counts = torch.tensor([[row["raw/wide"] / 100, row["raw/narrow"]] for row in made])
        rises[normalize] = (counts[-10:].mean(0) - counts[:2].mean(0)).tolist()
    assert min(rises["each"]) > 0.3, rises
    assert rises["true"][0] > 0.3, rises
    assert rises["true"][1] < 0.1, rises


def test_a_term_without_a_scale_is_an_error_of_its_key(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path, mine: Path
) -> None:
    """More samples are drawn before it is told. Of weight 0 it needs none, and may fail in one of two rounds."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ("train", "--config", tmp_path / "tiny.yaml", "--quiet", "--updates", 1, "--output-dir", tmp_path / "run")
    outcome = rlhf_kl(*words, *sets(*changes(mine, wide=1.0, constant=1.0)))
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if "reward.terms.constant" in line]
    assert 256 in numbers(line)  # four times 64
    several = (*changes(mine, wide=1.0, constant=0.0, fails=0.0), "rollout.reference_samples=256")
    assert rlhf_kl(*words, *sets(*several)).code == 0
    (row,) = updates(tmp_path / "run")
    assert (row["raw/constant"], row["reward/constant"], row["raw/fails"]) == (1.0, 0.0, None)


@pytest.mark.parametrize(("normalize", "level"), [("true", "doubtful"), ("each", "fine"), ("false", "doubtful")])
def test_doctor_tells_what_each_term_gives(
    rlhf_kl: Cli, tiny_settings: dict[str, Any], tmp_path: Path, mine: Path, normalize: str, level: str
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    settings = sets(*changes(mine, normalize, wide=1.0, narrow=1.0), "reward.clip=null")
    words = ("doctor", "--config", tmp_path / "tiny.yaml", "--quiet", "--updates", 1, *settings)
    outcome = rlhf_kl(*words, "--json")
    assert outcome.code == 0, outcome.err
    (found,) = [finding for finding in json.loads(outcome.out) if finding["topic"] == "terms"]
    assert found["level"] == level
    table = [re.split(r"  +", line.strip()) for line in found["text"].splitlines()]
    wide, narrow = (dict(zip(table[0], row, strict=True)) for row in table[1:3])
    assert float(wide["spread"]) > 50 * float(narrow["spread"])
    assert wide["corr. narrow"] == narrow["corr. wide"]
    shares = [int(row["share"].rstrip("%")) for row in (wide, narrow)]
    assert sum(shares) in (99, 100, 101)
    assert (shares[0] > 90) == (level == "doubtful")
    assert level == "fine" or "reward.terms.wide.weight" in found["change"]
    assert re.search(r"^\w+ +terms +term +weight", rlhf_kl(*words).out, flags=re.MULTILINE)
