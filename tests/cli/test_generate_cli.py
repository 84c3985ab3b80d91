from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.run.jsonl import read_jsonl

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any], rlhf_kl: Cli) -> Path:
    """A finished tiny run whose policy has moved away from its reference."""
    import yaml

    place = tmp_path_factory.mktemp("generate")
    settings = tiny_settings | {"kl": {"controller": {"kind": "fixed", "coef": 0.001}, "ceiling": None}}
    settings["ppo"] = settings["ppo"] | {"learning_rate": 3e-3}
    (place / "tiny.yaml").write_text(yaml.safe_dump(settings))
    outcome = rlhf_kl("train", "--config", place / "tiny.yaml", "--output-dir", place / "run", "--quiet")
    assert outcome.code == 0, outcome
    return place / "run"


def samples_of(outcome: Any) -> list[dict[str, Any]]:
    assert outcome.code == 0, outcome
    found: list[dict[str, Any]] = json.loads(outcome.out)
    return found


def test_samples_of_a_run_as_json(rlhf_kl: Cli, run: Path) -> None:
    found = samples_of(rlhf_kl("generate", "--run", run, "--prompt", "ab", "--prompt", "d", "--samples", 2, "--json"))
    assert [sample["prompt"] for sample in found] == ["ab", "ab", "d", "d"]
    assert all(sample.keys() == {"prompt", "response", "ended"} for sample in found)
    assert all(set(sample["response"]) <= set("abcd") for sample in found)
    again = samples_of(rlhf_kl("generate", "--run", run, "--prompt", "ab", "--samples", 2, "--json"))
    assert again == found[:2]  # whatever stands beside a prompt
    other = samples_of(rlhf_kl("generate", "--run", run, "--prompt", "ab", "--samples", 2, "--seed", 5, "--json"))
    assert other != again


def test_the_reference_beside_it_and_the_kl_of_every_token(rlhf_kl: Cli, run: Path) -> None:
    options = ("--run", run, "--prompt", "ab", "--samples", 8, "--with-reference", "--scores", "--plugins", "--json")
    found = samples_of(rlhf_kl("generate", *options))
    for sample in found:
        tokens = sample["tokens"]
        assert sample["kl"] == pytest.approx(sum(token["kl"] for token in tokens))
        assert sample["kl_token"] == pytest.approx(sample["kl"] / len(tokens))
        assert "".join(t["text"] for t in tokens if "<" not in t["text"]) == sample["response"]
        assert sample["score"] == pytest.approx(sample["response"].count("a") / 8)
        assert sample["reference_score"] == pytest.approx(sample["reference"].count("a") / 8)
    assert sum(sample["kl"] for sample in found) > 0
    at_start = samples_of(rlhf_kl("generate", *options[:-1], "--checkpoint", 2, "--json"))
    assert sum(sample["kl"] for sample in at_start) < sum(sample["kl"] for sample in found)


def test_what_a_reader_sees(rlhf_kl: Cli, run: Path) -> None:
    outcome = rlhf_kl("generate", "--run", run, "--prompt", "ab", "--with-reference", "--quiet")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0] == "ab"
    assert lines[1].startswith("policy ")
    assert "per token" in lines[1]
    assert lines[2].startswith("reference ")


def test_from_a_file_to_a_file(rlhf_kl: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("q\n" + "".join(f"{x}{y}\n" for x in "abcd" for y in "abcdabcdabcd"))
    options = ("--prompts", tmp_path / "in.csv", "--column", "q", "--output", tmp_path / "out.jsonl")
    outcome = rlhf_kl("generate", "--run", run, *options)
    assert (outcome.code, outcome.out) == (0, "")
    assert "48 responses" in outcome.err
    assert rlhf_kl("generate", "--run", run, *options, "--json", "--quiet").out == ""
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [row["prompt"] for row in rows] == [x + y for x in "abcd" for y in "abcdabcdabcd"]


def test_any_model_samples_too(rlhf_kl: Cli, tiny_folder: Path) -> None:
    options = ("--model", tiny_folder, "--prompt", "ab", "--max-new-tokens", 3, "--json")
    (found,) = samples_of(rlhf_kl("generate", *options))
    assert len(found["response"]) <= 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "name prompts with --prompt"),
        (("--prompt", "a", "--prompts", "x.txt"), "name prompts with --prompt"),
        (("--prompt", ""), "none of 1 prompts can be used: 1 empty"),
        (("--prompts", "nowhere.jsonl"), "--prompts: no such file"),
        (("--prompt", "a", "--checkpoint", "99"), "no such checkpoint"),
        (("--prompt", "a", "--output", "x.txt"), "must end in .jsonl"),
        (("--prompt", "a", "--output", "/proc/x.jsonl"), "--output: /proc/x.jsonl: cannot be written: No such file"),
        (("--prompt", "a" * 40), "longer than the 26 tokens"),
    ],
)
def test_what_cannot_be_done_is_one_line(rlhf_kl: Cli, run: Path, options: tuple[str, ...], expected: str) -> None:
    outcome = rlhf_kl("generate", "--run", run, "--quiet", *options)
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert expected in line


def test_a_model_has_no_reference_of_its_own(rlhf_kl: Cli, tiny_folder: Path) -> None:
    outcome = rlhf_kl("generate", "--model", tiny_folder, "--prompt", "a", "--with-reference", "--scores", "--quiet")
    assert outcome.code == 2
    assert [line.split()[1] for line in outcome.err.splitlines()] == ["--with-reference", "--scores"]


def test_an_output_that_cannot_be_written_is_told_before_sampling(
    rlhf_kl: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_kl.models.lm import LM

    def never(*_: Any) -> None:
        raise AssertionError("sampled")

    monkeypatch.setattr(LM, "sample", never)
    (tmp_path / "folder.jsonl").mkdir()
    for place, reason in ((tmp_path / "no" / "x.jsonl", "No such file"), (tmp_path / "folder.jsonl", "Is a directory")):
        outcome = rlhf_kl("generate", "--run", run, "--prompt", "a", "--output", place, "--quiet")
        assert (outcome.code, outcome.out) == (2, "")
        (line,) = outcome.err.splitlines()
        assert f"error: --output: {place}: cannot be written: {reason}" in line


def test_a_disk_that_fills_up_while_it_samples(
    rlhf_kl: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_kl.commands import generate

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "write_atomic", full)
    outcome = rlhf_kl("generate", "--run", run, "--prompt", "a", "--output", tmp_path / "x.jsonl", "--quiet")
    assert outcome.code == 1
    assert outcome.err == f"error: --output: {tmp_path}/x.jsonl: cannot be written: No space left on device\n"


def test_less_memory_changes_no_sample(rlhf_kl: Cli, run: Path, small_device: Callable[..., list[int]]) -> None:
    arguments = ("generate", "--run", run, "--prompt", "ab", "--prompt", "d", "--samples", 9, "--json")
    before = samples_of(rlhf_kl(*arguments))
    passes = small_device(5)
    assert samples_of(rlhf_kl(*arguments)) == before
    assert max(passes) == 18


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_full_memory_is_one_line(rlhf_kl: Cli, run: Path, small_device: Callable[..., list[int]], command: str) -> None:
    more = ("--prompt", "abcdabcdabcd") if command == "generate" else ()
    small_device(32, length=8)
    outcome = rlhf_kl(command, "--run", run, "--quiet", *more)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: memory is full: a single row does not fit: ")


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_a_model_that_does_not_fit_is_one_line(
    rlhf_kl: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    more = ("--prompt", "ab") if command == "generate" else ()
    monkeypatch.setattr("torch.nn.Module.to", lambda *_, **__: torch.empty(1 << 60))
    outcome = rlhf_kl(command, "--run", run, "--quiet", *more)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: memory is full: use a smaller model")
