"""`eval` and `generate`, and which commands run the code that a config names; all read one finished tiny run."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from rlhf_kl.commands.evaluate import LABELS
from rlhf_kl.commands.stored import Permissions
from rlhf_kl.report.texts import held_out_texts
from tests.runs import Cli

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
    """A folder with mine.py, tiny.yaml, and a finished run of it whose policy has moved away from its reference."""
    place = tmp_path_factory.mktemp("made")
    (place / "mine.py").write_text(CODE)
    settings = tiny_settings | {
        "reward": {"kind": "mine.py:count", "missing_eos_penalty": 0.0},
        "kl": {"controller": {"kind": "mine.py:Law", "coef": 0.001, "rate": 0.25}, "ceiling": None},
        "ppo": tiny_settings["ppo"] | {"learning_rate": 3e-3},
        "eval": tiny_settings["eval"] | {"scorers": {"same": {"kind": "mine.py:count"}}},
    }
    (place / "tiny.yaml").write_text(yaml.safe_dump(settings))
    (place / "pair.yaml").write_text("base: tiny.yaml\nvariants: {a: {}, b: {kl: {target: 0.2}}}\n")
    assert rlhf_kl("train", "--config", place / "tiny.yaml", "--output-dir", place / "run", "--quiet").code == 0
    assert set((place / "ran").read_text().split()) == {"imported", "built", "updated", "scored"}
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


def document(outcome: Any) -> Any:
    assert outcome.code == 0, outcome
    return json.loads(outcome.out)


# ---- eval ----


def test_a_run_as_a_table(place: Path, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl("eval", "--run", "run", "--plugins", "--quiet", "--tokens")
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["policy", "reference"]
    table = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("±"))]
    known = {*map(str.strip, LABELS.values())} - {LABELS["distinct_2"].strip()}  # its texts have no spaces
    assert {line[:20].strip() for line in table} == {"score", "same", *known}
    assert held_out_texts(place / "run")[0]["policy"][-1]["text"] in outcome.out
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert [line.split()[-1] for line in lines if line.startswith("all ")] == ["100.0%", "100.0%"]  # tokens, places


def test_a_broken_model_has_no_figures_and_the_document_is_json(tiny_folder: Path, place: Path, rlhf_kl: Cli) -> None:
    (place / "x.txt").write_text("abcd\nbadc\n")
    broken = Path(shutil.copytree(tiny_folder, place / "broken"))
    tensors = load_file(broken / "model.safetensors")
    save_file({key: 1e5 * x if "ln_f" in key else x for key, x in tensors.items()}, broken / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    words = ("eval", "--model", "broken", "--texts", "x.txt")
    found = document(rlhf_kl(*words, "--json"))
    assert found["perplexity"] is found["perplexity_stderr"] is None
    assert found["nats_per_token"] > 700
    assert rlhf_kl(*words).code == 0


# ---- generate ----


def test_samples_of_a_run(rlhf_kl: Cli, place: Path) -> None:
    words = ("generate", "--run", "run", "--prompt", "ab", "--samples", 2, "--json")
    found = document(rlhf_kl(*words, "--prompt", "d"))
    assert [sample["prompt"] for sample in found] == ["ab", "ab", "d", "d"]
    assert all(sample.keys() == {"prompt", "response", "ended"} for sample in found)
    assert document(rlhf_kl(*words)) == found[:2]  # whatever stands beside a prompt
    assert document(rlhf_kl(*words, "--seed", 5)) != found[:2]


def test_the_reference_beside_it_and_the_kl_of_every_token(rlhf_kl: Cli, place: Path) -> None:
    options = ("--run", "run", "--prompt", "ab", "--with-reference")
    more = ("--samples", 8, "--scores", "--plugins", "--json")
    found = document(rlhf_kl("generate", *options, *more))
    for sample in found:
        tokens = sample["tokens"]
        assert sample["kl"] == pytest.approx(sum(token["kl"] for token in tokens))
        assert sample["kl_token"] == pytest.approx(sample["kl"] / len(tokens))
        assert "".join(t["text"] for t in tokens if "<" not in t["text"]) == sample["response"]
        assert sample["score"] == pytest.approx(sample["response"].count("a") / 8)
        assert sample["reference_score"] == pytest.approx(sample["reference"].count("a") / 8)
    at_start = document(rlhf_kl("generate", *options, *more, "--checkpoint", 2))
    assert sum(sample["kl"] for sample in at_start) < sum(sample["kl"] for sample in found)
    lines = rlhf_kl("generate", *options, "--quiet").out.splitlines()
    assert lines[1] == "ab"
    assert lines[2].split()[:3:2] == ["reference", "KL"]
    assert lines[2].index("policy") == 40


def test_prompts_of_the_run_of_stdin_or_of_a_file(rlhf_kl: Cli, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [each["prompt"] for each in held_out_texts(place / "run")]
    assert [sample["prompt"] for sample in document(rlhf_kl("generate", "--run", "run", "--json"))] == shown
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\r\n\nd\n")))
    found = document(rlhf_kl("generate", "--run", "run", "--prompts", "-", "--json"))
    assert found == document(rlhf_kl("generate", "--run", "run", "--prompt", "ab", "--prompt", "d", "--json"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\n\xff\n")))
    outcome = rlhf_kl("generate", "--run", "run", "--prompts", "-")
    assert outcome.code == 2
    assert outcome.err.startswith("error: stdin: ")
    assert "(line 2, byte 3)" in outcome.err
    (place / "in.csv").write_text("q\nab\nd\n")
    assert found == document(rlhf_kl("generate", "--run", "run", "--prompts", "in.csv", "--column", "q", "--json"))


def test_prompts_of_a_file_get_the_template_of_the_run(rlhf_kl: Cli, place: Path) -> None:
    """The policy was once asked in a form that it had never seen."""
    config = place / "run" / "config.yaml"
    stored = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(stored | {"data": stored["data"] | {"template": "d{prompt}b"}}))
    (place / "in.jsonl").write_text('{"prompt": "a", "q": "c"}\n')
    words = ("generate", "--run", "run", "--prompts", "in.jsonl", "--json")
    assert [sample["prompt"] for sample in document(rlhf_kl(*words))] == ["dab"]
    config.write_text(yaml.safe_dump(stored | {"data": stored["data"] | {"template": "d{q}b"}}))
    (place / "in.jsonl").write_text('{"q": "c"}\n')
    assert [sample["prompt"] for sample in document(rlhf_kl(*words))] == ["dcb"]
    config.write_text(yaml.safe_dump(stored | {"data": stored["data"] | {"column": "q"}}))
    assert [sample["prompt"] for sample in document(rlhf_kl(*words))] == ["c"]
    config.write_text(yaml.safe_dump(stored | {"data": stored["data"] | {"template": "d{prompt}b"}}))
    outcome = rlhf_kl(*words)
    assert outcome.code == 2
    assert "prompt" in outcome.err
    outcome = rlhf_kl(*words, "--column", "q")
    assert [sample["prompt"] for sample in document(outcome)] == ["c"]
    assert "data.template" in outcome.err


STATEFUL = """
class Counted:
    def __init__(self):
        self.calls = 0

    def __call__(self, prompts, responses):
        self.calls += 1
        return [float(self.calls) for _ in responses]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
"""


def test_a_reward_with_a_state_is_asked_in_the_state_that_it_had(
    rlhf_kl: Cli, tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    """eval, scale and generate once asked an object that was built anew, beside a run that had logged the other's."""
    (tmp_path / "mine.py").write_text(STATEFUL)
    settings = tiny_settings | {"reward": {"kind": "mine.py:Counted", "normalize": False, "clip": None}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    run = tmp_path / "run"
    assert rlhf_kl("train", "--config", tmp_path / "tiny.yaml", "--output-dir", run, "--quiet").code == 0
    words = ("generate", "--run", run, "--prompt", "ab", "--scores", "--plugins", "--json")
    at_end, earlier = (document(rlhf_kl(*words, *more))[0]["score"] for more in ((), ("--checkpoint", 2)))
    assert at_end > earlier > 1
    figures = document(rlhf_kl("eval", "--run", run, "--plugins", "--json"))
    assert figures["scores"] >= at_end
    shutil.rmtree(run / "checkpoints")
    outcome = rlhf_kl(*words)
    assert document(outcome)[0]["score"] == 1
    assert "begins anew" in outcome.err


# ---- whose code runs ----


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("config validate tiny.yaml", False),
        ("config validate pair.yaml", False),
        ("config show run/config.yaml", False),
        ("report run", False),
        ("compare run run", False),
        ("eval --run run --checkpoint 2", False),
        ("generate --run run --prompt ab --with-reference", False),
        ("simulate --config tiny.yaml --kl 0.1", True),
        ("doctor --config tiny.yaml", True),
        ("eval --run run --plugins", True),
    ],
)
def test_which_commands_run_the_code_that_a_config_names(rlhf_kl: Cli, place: Path, words: str, runs: bool) -> None:
    outcome = rlhf_kl(*words.split())
    assert outcome.code == 0, outcome.err
    assert has_run(place) is runs


def test_scores_that_need_a_plugin_need_a_permission(rlhf_kl: Cli, place: Path) -> None:
    without = rlhf_kl("eval", "--run", "run", "--json", "--quiet")
    [line] = without.err.splitlines()
    assert line.startswith("alert: scores left")
    assert line.endswith("--plugins runs it")
    figures = json.loads(without.out)
    allowed = document(rlhf_kl("eval", "--run", "run", "--json", "--plugins", "--quiet"))
    assert {name for name in figures if figures[name] != allowed[name]} == {"scores", "reference", "texts"}
    assert allowed.keys() - figures.keys() == {"same", "same_stderr"}
    assert "of" not in figures["texts"][0]["policy"][0]
    assert figures["reference"]["scores"] is figures["scores"] is figures["texts"][0]["policy"][0]["score"] is None
    outcome = rlhf_kl("generate", "--run", "run", "--prompt", "ab", "--scores")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: --scores ")
    (place / "run" / "mine.py").unlink()
    assert rlhf_kl("eval", "--run", "run").code == 0
    assert rlhf_kl("eval", "--run", "run", "--plugins").code == 2


def test_the_permissions_in_a_runs_config_do_not_count(place: Path) -> None:
    config = place / "run" / "config.yaml"
    names = ("trust_remote_code", "allow_pickle")
    for name in names:
        config.write_text(config.read_text().replace(f"{name}: false", f"{name}: true"))
    for given in ({}, {"remote_code": True}, {"pickle": True}):
        run = Permissions(**given).opened(Path("run"), None, None)[0].run
        assert [getattr(run, name) for name in names] == ["remote_code" in given, "pickle" in given]


def test_what_is_no_controller_is_refused_and_not_called(rlhf_kl: Cli, place: Path) -> None:
    (place / "bad.yaml").write_text("kl: {controller: {kind: 'subprocess:Popen', args: touch ran, shell: true}}\n")
    assert rlhf_kl("config", "validate", "bad.yaml").code == 0  # which runs nothing, and so cannot tell
    for command in ("simulate", "train", "doctor"):
        outcome = rlhf_kl(command, "--config", "bad.yaml")
        assert outcome.code == 2
        assert all(line.startswith("error: kl.controller") for line in outcome.err.splitlines()), outcome.err
    assert not has_run(place)
