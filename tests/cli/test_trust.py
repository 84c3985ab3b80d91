"""Which commands run the code that a config names, and which only read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

Cli = Callable[..., Any]
# Every import, construction and call leaves a line.
CODE = """
from pathlib import Path
place = Path(__file__).with_name("ran")

def note(what):
    with place.open("a") as file:
        file.write(what + "\\n")

note("imported")

def count(prompts, responses, letter: str = "a"):
    note("scored")
    return [response.count(letter) / 8 for response in responses]

class Law:
    def __init__(self, coef: float, rate: float = 0.5):
        note("built")
        self.coef = coef

    def update(self, kl, episodes):
        note("updated")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any], rlhf_kl: Cli) -> Path:
    """A folder with mine.py, tiny.yaml, and a finished run of it."""
    place = tmp_path_factory.mktemp("made")
    (place / "mine.py").write_text(CODE)
    settings = tiny_settings | {
        "reward": {"kind": "mine.py:count", "gold": "mine.py:count", "missing_eos_penalty": 0.0},
        "kl": {"controller": {"kind": "mine.py:Law", "coef": 0.1, "rate": 0.25}},
    }
    settings["ppo"] = settings["ppo"] | {"total_episodes": 32}
    (place / "tiny.yaml").write_text(yaml.safe_dump(settings))
    (place / "pair.yaml").write_text("base: tiny.yaml\nvariants: {a: {}, b: {kl: {target: 0.2}}}\n")
    assert rlhf_kl("train", "--config", place / "tiny.yaml", "--output-dir", place / "run", "--quiet").code == 0
    lines = set((place / "ran").read_text().split())
    assert lines == {"imported", "built", "updated", "scored"}
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that nothing has run in yet; the run's config names the copy's files."""
    copy = Path(shutil.copytree(made, tmp_path / "copy", ignore=shutil.ignore_patterns("ran")))
    config = copy / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(made / "mine.py"), str(copy / "run" / "mine.py")))
    monkeypatch.chdir(copy)
    return copy


def has_run(place: Path) -> bool:
    return bool(list(place.rglob("ran")))


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "validate", "tiny.yaml"),
        ("config", "validate", "pair.yaml"),
        ("config", "validate", "run/config.yaml"),
        ("config", "show", "tiny.yaml"),
        ("report", "run"),
        ("compare", "run", "run"),
        ("eval", "--run", "run"),
        ("eval", "--run", "run", "--checkpoint", "2"),
        ("generate", "--run", "run", "--prompt", "ab"),
        ("generate", "--run", "run", "--prompt", "ab", "--with-reference", "--checkpoint", "2"),
    ],
    ids=" ".join,
)
def test_commands_that_run_nothing_of_it(rlhf_kl: Cli, place: Path, arguments: tuple[str, ...]) -> None:
    outcome = rlhf_kl(*arguments)
    assert outcome.code == 0, outcome.err
    assert not has_run(place)


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--config", "tiny.yaml", "--kl", "0.1"),
        ("doctor", "--config", "tiny.yaml"),
        ("eval", "--run", "run", "--plugins"),
        ("generate", "--run", "run", "--prompt", "ab", "--scores", "--plugins"),
    ],
    ids=" ".join,
)
def test_commands_that_run_it(rlhf_kl: Cli, place: Path, arguments: tuple[str, ...]) -> None:
    outcome = rlhf_kl(*arguments)
    assert outcome.code == 0, outcome.err
    assert has_run(place)


def test_scores_that_need_a_plugin_are_left_out_of_an_evaluation(rlhf_kl: Cli, place: Path) -> None:
    without = rlhf_kl("eval", "--run", "run", "--json", "--quiet")
    [line] = without.err.splitlines()
    assert line.startswith("alert: scores and gold left out: they need code that the run names (")
    assert line.endswith("--plugins runs it")
    figures = json.loads(without.out)
    assert (figures["scores"], figures["gold"]) == (None, None)
    allowed = json.loads(rlhf_kl("eval", "--run", "run", "--json", "--plugins", "--quiet").out)
    assert 0 <= allowed["scores"] == allowed["gold"] < 1
    assert {**allowed, "scores": None, "gold": None} == figures


def test_a_run_whose_plugin_is_gone_can_still_be_evaluated(rlhf_kl: Cli, place: Path) -> None:
    (place / "run" / "mine.py").unlink()
    assert rlhf_kl("eval", "--run", "run").code == 0
    outcome = rlhf_kl("eval", "--run", "run", "--plugins")
    assert outcome.code == 2
    assert "no such file" in outcome.err


def test_scores_that_are_asked_for_are_refused_by_name(rlhf_kl: Cli, place: Path) -> None:
    outcome = rlhf_kl("generate", "--run", "run", "--prompt", "ab", "--scores")
    assert (outcome.code, outcome.out) == (2, "")
    [line] = outcome.err.splitlines()
    assert line.startswith("error: --scores needs code that the run names (")
    assert "--plugins" in line
    for command in (("eval",), ("generate", "--prompt", "ab")):
        outcome = rlhf_kl(*command, "--model", "run/final", "--plugins")
        assert (outcome.code, outcome.err) == (2, "error: --plugins belongs to a run: name one with --run\n")


def test_a_function_of_a_module_is_a_plugin_too(rlhf_kl: Cli, place: Path) -> None:
    config = place / "run" / "config.yaml"
    config.write_text(config.read_text().replace(f"{place}/run/mine.py:count", "os:system"))
    outcome = rlhf_kl("eval", "--run", "run", "--quiet")
    assert outcome.code == 0
    assert "(os:system)" in outcome.err


# ---- what comes with a model ----

REMOTE = """
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
Path({ran!r}).write_text("imported")

class OwnConfig(GPT2Config):
    model_type = "rlhf-kl-own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.mark.parametrize("command", [("eval",), ("generate", "--prompt", "ab")], ids=lambda words: words[0])
def test_code_of_a_model_runs_where_the_command_line_allows_it(
    rlhf_kl: Cli, place: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(place / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(place / "modules"))
    final, config = place / "run" / "final", place / "run" / "config.yaml"
    (final / "own.py").write_text(REMOTE.format(ran=str(place / "ran")))
    settings = json.loads((final / "config.json").read_text())
    settings |= {
        "model_type": "rlhf-kl-own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }
    (final / "config.json").write_text(json.dumps(settings))
    config.write_text(config.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    outcome = rlhf_kl(*command, "--run", "run", "--quiet")
    assert outcome.code == 2
    assert "--trust-remote-code" in outcome.err
    assert not has_run(place)
    rlhf_kl(*command, "--run", "run", "--trust-remote-code", "--quiet")
    assert has_run(place)


@pytest.mark.parametrize("command", [("eval",), ("generate", "--prompt", "ab")], ids=lambda words: words[0])
def test_pickled_weights_are_read_where_the_command_line_allows_it(
    rlhf_kl: Cli, place: Path, command: tuple[str, ...]
) -> None:
    from safetensors.torch import load_file

    final, config = place / "run" / "final", place / "run" / "config.yaml"
    tensors = load_file(final / "model.safetensors")
    for file in final.glob("*.safetensors"):
        file.unlink()
    torch.save(tensors, final / "pytorch_model.bin")
    config.write_text(config.read_text().replace("allow_pickle: false", "allow_pickle: true"))
    outcome = rlhf_kl(*command, "--run", "run", "--quiet")
    assert outcome.code == 2
    assert "--allow-pickle" in outcome.err
    assert rlhf_kl(*command, "--run", "run", "--allow-pickle", "--quiet").code == 0


# ---- controllers ----


@pytest.mark.parametrize(
    ("controller", "problem"),
    [
        ("{kind: 'subprocess:getoutput', cmd: touch ran}", "getoutput is not a class"),
        ("{kind: 'subprocess:Popen', args: touch ran, shell: true}", None),
        ("{kind: 'os:system', command: touch ran}", None),
        ("{kind: 'shelve:DbfilenameShelf', filename: ran}", None),
        ("{kind: 'mine.py:count'}", "count is not a class"),
    ],
)
def test_what_is_no_controller_is_refused_and_not_called(
    rlhf_kl: Cli, place: Path, controller: str, problem: str | None
) -> None:
    (place / "mine.py").write_text("def count(prompts, responses): ...\n")
    (place / "bad.yaml").write_text(f"kl: {{controller: {controller}}}\n")
    outcome = rlhf_kl("config", "validate", "bad.yaml")
    if problem is None:  # a class, or a name that the source does not spell out
        assert outcome.code == 0
        assert "`train` and `doctor` check the options" in outcome.err
    else:
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1)
        assert problem in outcome.err
    for command in ("simulate", "train", "doctor"):
        outcome = rlhf_kl(command, "--config", "bad.yaml")
        assert outcome.code == 2
        assert all(line.startswith("error: kl.controller") for line in outcome.err.splitlines()), outcome.err
    assert not has_run(place)
    assert not list(place.glob("ran*"))


def test_types_are_checked_where_the_code_is_imported(rlhf_kl: Cli, place: Path) -> None:
    sets = ("--set", "kl.controller.rate=fast", "--set", "reward.letter=5")
    outcome = rlhf_kl("config", "validate", "tiny.yaml", *sets)
    assert outcome.code == 0
    assert outcome.err.count("`train` and `doctor` check the options") == 2
    for command in ("train", "doctor"):
        outcome = rlhf_kl(command, "--config", "tiny.yaml", *sets)
        assert outcome.code == 2
        assert [line.split()[1] for line in outcome.err.splitlines()] == ["kl.controller.rate:", "reward.letter:"]
    outcome = rlhf_kl("compare", "--config", "pair.yaml", *sets)
    assert outcome.code == 2
    assert [line.split()[1:3] for line in outcome.err.splitlines()] == [
        [f"variants.{name}:", key] for name in "ab" for key in ("kl.controller.rate:", "reward.letter:")
    ]
