"""What cannot be done: the command line, its exit code, the words on stderr; one line per problem, no traceback."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rlhf_kl import cli
from rlhf_kl.errors import GuardStop, Interrupted, RlhfKlError

Cli = Callable[..., Any]

SCORERS = """
LIMIT = 3
def raises(prompts, responses):
    raise RuntimeError("\\x1b[2Jthe server is gone\\u2028")
"""


@pytest.fixture
def place(tmp_path: Path, tiny_settings: dict[str, Any], tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a config of the tiny model, and things that cannot be used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    (tmp_path / "python.yaml").write_text("kl: !!python/object/apply:os.system ['touch owned']\n")
    (tmp_path / "odd.yaml").write_text('"\\e[2J\\e]0;owned\\a": 1\n')
    (tmp_path / "scorers.py").write_text(SCORERS)
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n{"prompt": "' + "abcd" * 8 + '"}\n')
    (tmp_path / "column.jsonl").write_text('{"promt": "ab"}\n')
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("my only copy")
    return tmp_path


TRAIN = "train --config tiny.yaml --quiet --output-dir run --set "
REFUSED = [
    # usage
    ("--nonsense", "see rlhf-kl --help"),
    ("config", "see rlhf-kl config --help"),
    ("sft --batch-size 1", "--set sft.batch_size=VALUE"),
    ("compare --zzzz", "--set KEY=VALUE"),
    ("compare", "compare takes --config FILE to train, or RUN folders to read"),
    ("compare x --seed 1", "need --config"),
    ("train tiny.yaml --config=x", "extra argument(s) (tiny.yaml)"),
    # configs
    ("config validate python.yaml", "could not determine a constructor for the tag"),
    ("config validate odd.yaml", r"\x1b[2J\x1b]0;owned\x07: unknown key"),
    (TRAIN + "tracking.trackers=[mlflow]", "tracking.trackers: mlflow is not installed"),
    (TRAIN + "kl.controller.kind=subprocess:call", "call' is not a class"),
    (TRAIN + "reward.kind=scorers.py:LIMIT", "LIMIT' is not a class or function"),
    # what only shows when a run begins
    (TRAIN + "data.prompts=empty.jsonl", "none of 1 prompts can be used: 1 longer than the 26 tokens"),
    (TRAIN + "reward.kind=scorers.py:raises", r"RuntimeError: \x1b[2Jthe server is gone"),
    *((f"train --config tiny.yaml --output-dir thesis {flag}", "thesis") for flag in ("", "--resume", "--overwrite")),
    # runs and models
    ("report", "no run under runs/: name a run folder"),
    ("report nowhere", "nowhere: holds no run (no config.yaml)"),
    ("eval", "runs/"),
    ("eval --model tiny", "--model needs --texts"),
    ("eval --model tiny --run x", "exclude each other"),
    ("eval --config tiny.yaml --checkpoint 2", "--checkpoint belongs to a run"),
    ("eval --model tiny --plugins", "--plugins belongs to a run: name one with --run"),
    ("generate --model tiny --quiet", "name prompts with --prompt"),
    ("generate --model tiny --prompt a --with-reference --quiet", "--with-reference"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_done_is_one_line_and_exit_2(line: str, words: str, place: Path, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl(*shlex.split(line))
    assert (outcome.code, outcome.out) == (2, ""), outcome
    [error] = [said for said in outcome.err.splitlines() if said.startswith("error: ")]
    assert words in error
    assert error.isprintable()
    assert "Traceback" not in outcome.err
    assert not (place / "run" / "config.yaml").exists()
    assert not (place / "owned").exists()
    assert (place / "thesis" / "thesis.tex").read_text() == "my only copy"


NO_MODEL = "neither a folder nor a hub id (owner/name, owner/name@revision): no such file: no/such/model"
UNLOADED = {
    "eval --run nope": ["nope: holds no run"],
    "eval --model tiny --reference thesis --texts column.jsonl": [
        "--reference: {place}/thesis: the folder has no config.json",
        "--texts: column.jsonl: row 1 has no column 'text'",
    ],
    "generate --model tiny/config.json --prompts x.txt": [
        "--model: {place}/tiny/config.json: is a file, not the folder of a model",
        "--prompts: no such file: x.txt",
    ],
    "train --config tiny.yaml --set policy.model=no/such/model --set reward.gold=thesis": [
        f"policy.model: {NO_MODEL}",
        "reward.gold: {place}/thesis: the folder has no config.json",
    ],
    "doctor --config tiny.yaml --pairs column.jsonl": ["--pairs: column.jsonl: row 1 has no column 'chosen'"],
    "reward-model --config reward_reviews.yaml --set policy.model=no/such/model --set data.pairs=column.jsonl": [
        f"policy.model: {NO_MODEL}"
    ],
    "compare --config compare.yaml": [f"variants.a: policy.model: {NO_MODEL}"],
}


def test_what_needs_no_computing_is_told_before_torch_is_imported(place: Path) -> None:
    variants = {"a": {"policy": {"model": "no/such/model"}}, "b": {}}
    (place / "compare.yaml").write_text(yaml.safe_dump({"base": "tiny.yaml", "seeds": [0], "variants": variants}))
    code = (
        "import sys\nfrom rlhf_kl.cli import run\nfor line in sys.argv[1:]:\n"
        "    print(run(line.split()), 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *UNLOADED], capture_output=True, text=True, check=True)
    expected = [line for problems in UNLOADED.values() for line in (*(f"error: {p}" for p in problems), "2 False")]
    told = done.stderr.splitlines()
    assert len(told) == len(expected), done.stderr
    for line, words in zip(told, expected, strict=True):
        assert line.startswith(words.format(place=place))


WORLD = "builtin:reviews-small"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train {own} --set data.prompts=late.jsonl", "data.prompts: {place}/late.jsonl: row 2 has no column 'prompt'"),
        ("eval --config own.yaml", "data.prompts: {place}/late.jsonl: row 2 has no column 'prompt'"),
        (
            f"reward-model --config reward_reviews.yaml --set policy.model={WORLD} --set data.pairs=late.jsonl",
            "data.pairs: {place}/late.jsonl: row 1 has no column 'chosen'",
        ),
    ],
)
def test_data_and_names_are_checked_before_a_world_is_built(
    line: str, words: str, place: Path, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in reward model takes a minute."""
    (place / "late.jsonl").write_text('{"prompt": "ab"}\n{"promt": "ab"}\n')
    monkeypatch.setenv("RLHF_KL_CACHE", str(place / "cache"))
    settings = yaml.safe_load((place / "tiny.yaml").read_text())
    settings |= {"reward": {"model": WORLD}}
    (place / "own.yaml").write_text(yaml.safe_dump(settings | {"data": {"prompts": "late.jsonl"}}))
    (place / "tiny.yaml").write_text(yaml.safe_dump(settings))
    own = "--config tiny.yaml --set run.output_dir=run"
    outcome = rlhf_kl(*shlex.split(line.format(own=own)))
    assert words.format(place=place) in outcome.err + outcome.out
    assert outcome.code == 2
    assert not (place / "cache").exists()


GO_ON = "interrupted; to go on from the last checkpoint: rlhf-kl fail --config a.yaml --resume\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GuardStop("the KL is above its ceiling"), 3, "error: the KL is above its ceiling\n"),
        (RlhfKlError("the disk is full"), 1, "error: the disk is full\n"),
        (MemoryError(), 1, "error: memory is full: use a smaller model, or a device with more memory (run.device)\n"),
        (KeyboardInterrupt(), 130, ""),
        (Interrupted(2), 130, GO_ON),
        (Interrupted(15), 143, GO_ON),
    ],
)  # fmt: skip
def test_exit_codes(error: BaseException, code: int, said: str, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail(config: str = "", overwrite: bool = False) -> None:
        raise error

    failing.command("other")(lambda: None)
    monkeypatch.setattr(cli, "app", failing)
    assert rlhf_kl("fail", "--config", "a.yaml", "--overwrite") == (code, "", said)
