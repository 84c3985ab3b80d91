from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rlhf_kl.cli.evaluate import LABELS, _table

if TYPE_CHECKING:
    from rlhf_kl.commands.world import World

Cli = Callable[..., Any]
TEXT_KEYS = {"perplexity", "nats_per_token", "bits_per_byte", "tokens", "bytes", "documents"}
POLICY_KEYS = {"kl_token", "kl_sequence", "forward_kl_token", "scores", "gold", "length", "eos_rate", "distinct_2"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_settings: dict[str, Any], rlhf_kl: Cli) -> Path:
    """A finished run of the tiny model."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    arguments = ("--output-dir", folder / "run", "--set", "ppo.total_episodes=32", "--quiet")
    assert rlhf_kl("train", "--config", folder / "tiny.yaml", *arguments).code == 0
    return folder / "run"


def test_a_run_as_one_json_document(run: Path, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl("eval", "--run", run, "--plugins", "--json")
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found.keys() == TEXT_KEYS | POLICY_KEYS | {"reference"}
    assert found["reference"].keys() == TEXT_KEYS
    assert found["kl_token"] > 0


def test_a_run_as_a_table(run: Path, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl("eval", "--run", run, "--plugins", "--quiet")
    assert outcome.code == 0
    assert outcome.err == ""
    lines = outcome.out.splitlines()
    assert lines[0].split() == ["policy", "reference"]
    names = [line[:20].strip() for line in lines[1:-1]]
    keys = TEXT_KEYS | POLICY_KEYS - {"gold"}  # there is no gold scorer in this run
    assert set(names) == {LABELS[key].strip() for key in keys}
    assert lines[-1].startswith("KL and forgetting in nats. Forgetting: KL(reference || policy)")


def test_a_model_on_a_file(tiny_folder: Path, tiny_data: Any, rlhf_kl: Cli) -> None:
    outcome = rlhf_kl("eval", "--model", tiny_folder, "--texts", tiny_data.texts, "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out).keys() == TEXT_KEYS


def test_a_built_in_model_on_its_own_texts(small_world: World, rlhf_kl: Cli) -> None:
    name = "builtin:reviews-small"
    outcome = rlhf_kl("eval", "--model", name, "--texts", name, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["documents"] == 60
    assert 1 < found["perplexity"] < 10


def test_paths_are_those_of_the_working_directory(
    tiny_folder: Path, rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_folder)
    (tmp_path / "x.txt").write_text("abcd\n")
    outcome = rlhf_kl("eval", "--model", "model", "--texts", "x.txt", "--reference", "model", "--json")
    found = json.loads(outcome.out)
    assert found["perplexity"] == found["reference"]["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--run", "nowhere"), "nowhere"),
        (("--model", "./nowhere", "--texts", "builtin:reviews-small"), "--model: ./nowhere"),
        (("--model", "owner/mine"), "--model needs --texts"),
        (("--model", "x", "--run", "y"), "exclude each other"),
        (("--config", "nowhere.yaml"), "nowhere.yaml"),
        ((), "runs/"),
        (("--checkpoint", "three"), "--checkpoint"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], word: str, rlhf_kl: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = rlhf_kl("eval", *arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ")
    assert word in line


@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        ("x.txt", "", "holds no rows"),
        ("x.jsonl", '{"text": ""}\n', "no document has a token"),
        ("x.jsonl", '{"txt": "a"}\n', "did you mean txt?"),
    ],
)
def test_texts_that_cannot_be_read(
    name: str, body: str, found: str, tiny_folder: Path, rlhf_kl: Cli, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(body)
    outcome = rlhf_kl("eval", "--model", tiny_folder, "--texts", tmp_path / name, "--quiet")
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert found in line


def test_a_supervised_run_is_pointed_to_its_model(
    tiny_folder: Path, tiny_data: Any, rlhf_kl: Cli, tmp_path: Path
) -> None:
    """Only a `train` run has a reference; of another one `--model DIR/final` can be evaluated."""
    sets = (f"policy.model={tiny_folder}", f"data.texts={tiny_data.texts}", "tracking.tensorboard=false")
    arguments = [argument for change in sets for argument in ("--set", change)]
    folder = tmp_path / "run"
    assert rlhf_kl("sft", "--config", "sft_reviews.yaml", "--output-dir", folder, *arguments, "--quiet").code == 0
    outcome = rlhf_kl("eval", "--run", folder)
    assert outcome.code == 2
    assert all(line.startswith("error: ") for line in outcome.err.splitlines())
    assert rlhf_kl("eval", "--model", folder / "final", "--texts", tiny_data.texts, "--json").code == 0


def test_a_real_model(real_data: Path, rlhf_kl: Cli, tmp_path: Path) -> None:
    stories = (real_data / "data" / "tinystories-1000" / "stories.jsonl").read_text(encoding="utf-8")
    (tmp_path / "x.jsonl").write_text("\n".join(stories.split("\n")[:200]) + "\n", encoding="utf-8")
    model = real_data / "models" / "TinyStories-656K-resaved"
    outcome = rlhf_kl("eval", "--model", model, "--texts", tmp_path / "x.jsonl", "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert found["nats_per_token"] == pytest.approx(3.2278, rel=1e-3)
    assert found["bits_per_byte"] == pytest.approx(1.1775, rel=1e-3)


def test_large_figures_stay_apart() -> None:
    table = _table({"perplexity": 2170519.9644, "tokens": 5, "reference": {"perplexity": 2450362.8208, "tokens": 5}})
    assert [line.split() for line in table.splitlines()] == [
        ["policy", "reference"],
        ["held-out", "perplexity", "2170519.9644", "2450362.8208"],
        ["tokens", "5", "5"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1
