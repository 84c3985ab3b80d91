from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from rlhf_kl import cli
from rlhf_kl.cli.options import overrides
from rlhf_kl.config.load import load_config
from rlhf_kl.errors import GuardStop, RlhfKlError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rlhf_kl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rlhf_kl", *arguments], capture_output=True, text=True, check=False)


def test_validate_says_ok_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "validate", "sft_reviews.yaml"]) == 0
    assert capsys.readouterr().out == "sft_reviews.yaml: ok\n"


def test_every_problem_is_one_line_on_stderr(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "x.yaml").write_text("ppo: {lerning_rate: 1, gamma: 2}\nkl: {target: -0.1}\n")
    assert cli.run(["config", "validate", "x.yaml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("error: ") for line in lines)


def test_what_show_prints_is_a_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "show", "ppo_static.yaml", "--set", "kl.target=0.2", "--set", "run.seed=3"]) == 0
    (here / "again.yaml").write_text(capsys.readouterr().out)
    assert load_config("train", "again.yaml") == load_config(
        "train", "ppo_static.yaml", ["kl.target=0.2", "run.seed=3"]
    )


@pytest.mark.parametrize(
    ("kind", "section"), [("train", "ppo"), ("sft", "sft"), ("reward-model", "reward_model"), ("compare", "variants")]
)
def test_schema_is_one_json_document(kind: str, section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "schema", "--kind", kind]) == 0
    assert section in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["--nonsense"], ["config"], ["config", "show"], ["config", "schema", "--kind", "x"]],
)
def test_a_bad_command_line_is_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")


def test_help_and_version_are_results(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"], ["config", "--help"], ["--version"]):
        assert cli.run(arguments) == 0
        out, err = capsys.readouterr()
        assert out
        assert err == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GuardStop("the KL is above its ceiling"), 3, "error: the KL is above its ceiling\n"),
        (RlhfKlError("the disk is full"), 1, "error: the disk is full\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", failing)
    assert cli.run(["--"]) == code
    assert said in capsys.readouterr().err


def test_the_process_exits_with_the_code_and_without_a_traceback(here: Path) -> None:
    (here / "x.yaml").write_text("kl: {target: .nan}\n")
    done = rlhf_kl("config", "validate", "x.yaml")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: kl.target must be a finite number: nan\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m rlhf_kl config schema | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_help_needs_no_heavy_imports() -> None:
    code = (
        "import sys\nfrom rlhf_kl.cli import run\nrun(['--help'])\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_named_options_win_over_set(here: Path) -> None:
    changes = overrides(["run.seed=1"], output_dir=Path("odd: name"), seed=2)
    config = load_config("train", "ppo_adaptive.yaml", changes)
    assert (config.run.seed, config.run.output_dir) == (2, str(here / "odd: name"))
