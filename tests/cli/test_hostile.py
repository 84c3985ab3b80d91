"""Configs, names and texts that mean harm: refused in a line each, or shown as what they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from rlhf_kl.config.schema import MODELS, Section, section_of

Cli = Callable[..., Any]


def refused(outcome: Any, *words: str) -> None:
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert lines
    for line in lines:
        assert line.startswith("error: ")
        assert line.isprintable()
        assert len(line) < 2000
    for word in words:
        assert any(word in line for line in lines), (word, lines)


# ---- files ----

BOMB = "a0: &a0 [1]\n" + "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20))
FILES = {
    "bomb": (BOMB.encode(), "too many values"),
    "bomb of mappings": (b"a: &a {x: 1}\nb: &b {x: *a, y: *a}\n" + b"".join(
        b"c%d: &c%d {x: *%s, y: *%s}\n" % (i, i, *([b"b" if i == 0 else b"c%d" % (i - 1)] * 2)) for i in range(40)
    ), "too many values"),
    "itself": (b"kl: &x {target: 0.1, controller: *x}\n", "recursive"),
    "python": (b"kl: !!python/object/apply:os.system ['touch owned']\n", "tag !!python/object/apply:os.system is not"),
    "python key": (b"!!python/name:os.system : 1\n", "is not allowed"),
    "twice": (b"kl: {target: 0.1}\nppo: {epochs: 1}\nkl: {target: 0.2}\n", "key 'kl' is written twice"),
    "brackets": (b"kl: " + b"[" * 100_000, "nested too deeply"),
    "escapes": (b'"\\e[2J\\e]0;owned\\a": 1\n', "\\x1b[2J"),
    "reversed": ('"\u202egpj.exe": 1\n'.encode(), "\\u202e"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_means_harm_is_refused_quickly(rlhf_kl: Cli, tmp_path: Path, monkeypatch: Any, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    data, said = FILES[name]
    (tmp_path / "x.yaml").write_bytes(data)
    began = time.process_time()
    refused(rlhf_kl("config", "validate", "x.yaml"), said)
    assert time.process_time() - began < 5
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    "name", ["two\nlines.yaml", "\x1b[2J.yaml", "\u202elmay.yaml", "a\rb.yaml", "--x.yaml", "%s.yaml"]
)
def test_any_file_name_can_be_used_and_is_shown_as_text(rlhf_kl: Cli, tmp_path: Path, name: str) -> None:
    name = f"{name}.yaml"
    (tmp_path / name).write_text("kl: {target: -1}\n")
    refused(rlhf_kl("config", "validate", tmp_path / name), "kl.target")
    (tmp_path / name).write_text("kl: {target: 0.1}\n")
    outcome = rlhf_kl("config", "validate", tmp_path / name)
    if outcome.code:  # the run's name follows from the file's
        refused(outcome, "run.name must be a plain folder name")
    refused(rlhf_kl("config", "validate", tmp_path / f"missing-{name}"), "no config")


@pytest.mark.parametrize(
    "name", ["../x", "/tmp/x", "a/b", "a\\b", "..", ".", ".hidden", "", "a\nb", "a\x00b", "\x1b[2J"]
)
def test_a_run_s_name_does_not_lead_out_of_its_folder(rlhf_kl: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "x.yaml").write_text(f"run: {{name: {json.dumps(name)}}}\nkl: {{target: 0.1}}\n")
    refused(rlhf_kl("config", "validate", tmp_path / "x.yaml"), "run.name")


def numbers(model: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            yield from numbers(section, f"{prefix}{name}.")
        elif {int, float} & {field.annotation, *get_args(field.annotation)}:
            yield prefix + name


NUMBERS = [(kind, key) for kind, model in MODELS.items() for key in numbers(model)]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf", "1e400", "-1e400"])
def test_no_number_may_be_one_that_is_not_finite(rlhf_kl: Cli, tmp_path: Path, value: str) -> None:
    assert len(NUMBERS) > 50
    files = {"train": "smoke.yaml", "sft": "sft_reviews.yaml", "reward-model": "reward_reviews.yaml"}
    for kind, file in files.items():
        keys = [key for of, key in NUMBERS if of == kind]
        sets = [argument for key in keys for argument in ("--set", f"{key}={value}")]
        refused(rlhf_kl("config", "validate", file, *sets), *keys)


# ---- texts ----


@pytest.mark.parametrize(
    "text", ["\x1b[2J\x1b]0;owned\x07", "[bold red]x[/] {{7*7}} <script>alert(1)</script>", "a\r\u2028b"]
)
def test_what_a_model_reads_and_writes_is_shown_as_text(
    rlhf_kl: Cli, tmp_path: Path, tiny_settings: dict[str, Any], text: str
) -> None:
    """As part of a prompt, in an error that quotes a response, and in the name of a file."""
    folder = tmp_path / "odd \x1b[31m name"
    folder.mkdir()
    prompts, own = folder / "prompts.jsonl", folder / "own.py"
    prompts.write_text(json.dumps({text: text}) + "\n")
    own.write_text(f"def score(prompts, responses):\n    raise ValueError({text!r})\n")
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump(tiny_settings | {"data": {"prompts": str(prompts)}}))
    refused(
        rlhf_kl("train", "--config", config, "--output-dir", tmp_path / "a"), "no column 'prompt'", r"\x1b[31m name"
    )
    config.write_text(yaml.safe_dump(tiny_settings | {"reward": {"kind": f"{own}:score"}}))
    outcome = rlhf_kl("train", "--config", config, "--output-dir", tmp_path / "b")
    assert outcome.code == 2
    assert "\x1b" not in outcome.err
    assert "\u2028" not in outcome.err
    assert outcome.err.count("error: ") == 1
