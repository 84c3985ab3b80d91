"""The commands that train nothing: help, version, `config`, `guide` and `report`."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.commands import guide
from rlhf_kl.commands.options import read_config
from rlhf_kl.config import paths
from rlhf_kl.config.resolve import load_config
from tests.runs import Cli, Rows, Write, sets


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words", ["", "-h", "train --help", "config show -h", "--version", "simulate -h", "config schema -h"]
)
def test_help_and_version_are_results(words: str, rlhf_kl: Cli) -> None:
    code, out, err = rlhf_kl(*words.split())
    assert (code, bool(out), err) == (0, True, "")
    assert re.search(r"<(bool|int|float|.*\|)", out) is None  # how a value is parsed tells a reader nothing


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["train", "--config", "smoke.yaml", "--output-dir"], "--output-dir"),
        (["compare", "one", "two", "--output-dir"], "--output-dir"),
        (["simulate", "--updates", "3", "--plot"], "--plot"),
        (["init"], "folder"),
    ],
)
@pytest.mark.parametrize("place", ["s3://bucket/x", "file:///tmp/x"])
def test_nothing_is_written_to_an_address(words: list[str], option: str, place: str, here: Path, rlhf_kl: Cli) -> None:
    code, out, err = rlhf_kl(*words, place)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {option} ")
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [["generate", "--prompt"], ["train", "--config", "smoke.yaml", "--set"], []])
def test_bytes_of_a_command_line_that_are_no_utf_8_are_refused(words: list[str], rlhf_kl: Cli) -> None:
    cut = b"run.name=a\xff".decode(errors="surrogateescape")
    code, out, err = rlhf_kl(*words, cut)
    assert (code, out) == (2, "")
    assert err.startswith("error: command line: ")
    assert err.endswith(": 'run.name=a\\udcff'\n")


def test_help_a_wrong_config_and_a_simulation_need_no_heavy_imports(here: Path) -> None:
    (here / "x.yaml").write_text("kl: {target: -1}\n")
    heavy = ("torch", "transformers", "datasets", "accelerate", "matplotlib", "numpy", "pydantic")
    code = (
        "import sys, rlhf_kl\nfrom rlhf_kl.cli import run\nfor words in sys.argv[1:]:\n    run(words.split())\n"
        f"    print('loaded', *[m for m in {heavy} if m in sys.modules])\nrlhf_kl.AdaptiveKL, dir(rlhf_kl)\n"
        "print('loaded', 'torch' in sys.modules)"
    )
    words = ("--help", "config show smoke", "config validate x.yaml", "train x.yaml", "simulate --updates 3 --json")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    loaded = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert loaded == [[], *[["pydantic"]] * 3, ["numpy", "pydantic"], ["False"]]


def test_the_process_exits_with_the_code_and_a_reader_that_goes_away_is_no_error(here: Path) -> None:
    (here / "x.yaml").write_text("kl: {target: -1}\n")
    command = f"{sys.executable} -m rlhf_kl config"
    done = subprocess.run(f"{command} validate x.yaml".split(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = subprocess.run(["bash", "-c", f"{command} schema | true"], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_validate_and_show(rlhf_kl: Cli, here: Path) -> None:
    assert rlhf_kl("config", "validate", "sft_reviews.yaml") == (0, "sft_reviews.yaml: ok\n", "")
    code, out, err = rlhf_kl("config", "validate", "smoke", "--json", "--set", "kl.target=0", "--set", "a=1")
    assert (code, len(json.loads(out)["problems"]), err) == (2, 2, "")
    changes = ["kl.target=0.2", "run.seed=3"]
    (here / "again.yaml").write_text(rlhf_kl("config", "show", "ppo_static.yaml", *sets(*changes)).out)
    assert load_config("train", "again.yaml") == load_config("train", "ppo_static.yaml", changes)


def test_configs_that_pip_has_compiled(rlhf_kl: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a wheel that is installed: a __pycache__ beside every .py file. All of `make test-wheel` in small."""
    installed = Path(shutil.copytree(paths.shipped_configs(), here / "installed"))
    compileall.compile_dir(installed, quiet=2)
    assert len(list(installed.rglob("__pycache__"))) == 2
    monkeypatch.setattr(paths, "shipped_configs", lambda: installed)
    assert rlhf_kl("init", "mine").code == 0
    assert {path.name for path in (here / "mine").iterdir()} == {"heldout.txt", "mine.py", "mine.yaml", "prompts.jsonl"}
    assert rlhf_kl("config", "validate", "smollm2_sentiment.yaml").code == 0
    assert "__pycache__" not in rlhf_kl("config", "validate", "pycache").err


def test_schema_is_one_json_document(rlhf_kl: Cli) -> None:
    for kind, section in (("train", "ppo"), ("sft", "sft"), ("reward-model", "reward_model"), ("compare", "variants")):
        assert section in json.loads(rlhf_kl("config", "schema", "--kind", kind).out)["properties"]


def test_named_options_win_over_set(here: Path) -> None:
    config = read_config("train", "ppo_adaptive.yaml", ["run.seed=1"], output_dir=Path("odd: name"), seed=2)
    assert (config.run.seed, config.run.output_dir) == (2, str(here / "odd: name"))


def test_updates_are_whole_batches(rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    monkeypatch.setattr("rlhf_kl.commands.train.train_command", lambda _run, config, **_: trained.append(config))
    assert rlhf_kl("train", "ppo_adaptive", "--updates", 7, "--set", "rollout.batch_size=32").code == 0
    assert (trained[0].updates, trained[0].ppo.total_episodes) == (7, 7 * 32)


@pytest.mark.parametrize("page", guide.PAGES)
def test_no_word_is_cut_in_80_columns(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    guide._show(guide._text(page))
    shown = capsys.readouterr().out
    assert "…" not in shown.replace("...", "")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", guide._text(page), re.DOTALL | re.MULTILINE)
    code = [line.rstrip() for block in blocks for line in block.splitlines()]
    assert all(line in shown.splitlines() for line in code)  # as it is copied: whole, without a margin
    assert all(len(line) <= 80 or line in code for line in shown.splitlines())


def test_a_dotted_key_of_a_file_is_told_how_it_is_written(rlhf_kl: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "base: ppo_adaptive.yaml\nseeds: [0]\nvariants: {low: {kl.target: 0.03}, b: {}}\n"
    )
    done = rlhf_kl("compare", "--config", tmp_path / "mine.yaml")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "kl.target: unknown key; in a file it is `kl: {target: ...}`" in done.err


def test_simulate_takes_the_words_of_a_target(rlhf_kl: Cli) -> None:
    assert rlhf_kl("simulate", "--target", "moderate", "--updates", "2").out.startswith("adaptive, target 0.075 nats")
    for wrong in ("moderat", "0", "-1", "nan", "inf"):
        done = rlhf_kl("simulate", "--target", wrong)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert f"--target: '{wrong}' is no number above 0" in done.err
    assert "did you mean moderate?" in rlhf_kl("simulate", "--target", "moderat").err


def test_pictures_and_links_become_words_and_a_page_has_any_spelling(rlhf_kl: Cli) -> None:
    text = "See [the page on KL](kl.md#units), [that](https://x.org) ([how](kl.md)).\n![A curve](../a.png)\n"
    text += '<picture>\n<source media="dark" srcset="b.png">\n<img alt="Two curves" src="a.png">\n</picture>'
    shown = "See the page on KL (page kl), [that](https://x.org) (how: page kl).\n*(Picture: A curve.)*\n"
    shown += "*(Picture: Two curves.)*"
    assert guide._for_terminal(text) == shown
    assert rlhf_kl("guide", "Coming-From.md").out.strip().startswith("Coming from")
    assert max(map(len, rlhf_kl("guide").out.splitlines())) <= 80
    assert rlhf_kl("guide", "reward").out == rlhf_kl("guide", "rewards_and_controllers").out
    assert "models_and_data or metrics?" in rlhf_kl("guide", "m").err


@pytest.mark.slow
def test_the_newest_run_of_the_working_directory(
    write_run: Write, metrics_rows: Rows, here: Path, rlhf_kl: Cli
) -> None:
    for name in ("old", "new"):
        write_run(name, metrics_rows([0.1] * 4))
    done = rlhf_kl("report")
    assert (done.code, done.out) == (0, "runs/new/report.html\n")
    assert "unfinished: 4 of 60 updates" in done.err
    assert "new: KL report" in (here / "runs/new/report.html").read_text()
    assert json.loads(rlhf_kl("report", "runs/new", "--json").out)["runs/new"]["page"] == "runs/new/report.html"
    # A link where the report goes is replaced: nothing is written outside of the folder.
    (here / "other").write_text("precious")
    (here / "runs/new/report.html").unlink()
    (here / "runs/new/report.html").symlink_to(here / "other")
    done = rlhf_kl("report", "runs/new", "runs/old", "--quiet")
    assert (here / "other").read_text() == "precious"
    assert (done.out, done.err) == ("runs/new/report.html\nruns/old/report.html\n", "")


@pytest.mark.slow
def test_watch_follows_a_run_to_its_end(
    write_run: Write, metrics_rows: Rows, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run("running", metrics_rows([0.1] * 4), config={"ppo": {"total_episodes": 256}})

    def finish(seconds: float) -> None:
        assert 'http-equiv="refresh"' in (folder / "report.html").read_text()
        (folder / "summary.json").write_text('{"stopped_by": null}')

    monkeypatch.setattr(time, "sleep", finish)
    assert rlhf_kl("report", folder, "--watch", "--every", "1").code == 0
    assert "refresh" not in (folder / "report.html").read_text()


def test_a_file_of_the_users_does_not_take_the_place_of_a_library_in_the_program(tmp_path: Path) -> None:
    """Python itself would put the working directory before all libraries (`python -m`)."""
    (tmp_path / "random.py").write_text("raise SystemExit(3)\ndef f(prompts, responses): ...\n")
    (tmp_path / "x.yaml").write_text("reward: {kind: random.py:f}\n")
    command = [sys.executable, "-m", "rlhf_kl", "config", "validate", "x.yaml"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "random is" in done.stderr


def test_a_process_that_users_code_starts_imports_nothing_of_the_program() -> None:
    code = "import sys, rlhf_kl.__main__; print(*(name for name in sys.modules if name.startswith('rlhf_kl')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rlhf_kl", "rlhf_kl.__main__"]
