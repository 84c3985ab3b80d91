"""The first run of a new user: `init`, a model filled in, `doctor`, `train`; and fifty mistakes on the way."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.plugins import load_attribute

Cli = Callable[..., Any]

MORE = """

def raises(prompts, responses):
    return [len(response) / 0 for response in responses]


def column(prompts, responses, answr):
    return [1.0] * len(responses)


class TutorialKL:
    def __init__(self, init_kl_coef=0.1):
        self.kl_coef = init_kl_coef

    def update(self, observed_kl):
        return self.kl_coef
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, rlhf_kl: Cli) -> Iterator[Path]:
    """The working directory: what `init` copies, with a tiny model filled in."""
    from rlhf_kl.models.load import save_model
    from rlhf_kl.models.scratch import new_gpt2, train_tokenizer

    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = rlhf_kl("init")
        assert (done.code, done.out.count("rlhf-kl"), done.err) == (0, 4, "")
        assert sorted(path.name for path in folder.iterdir()) == [
            "heldout.txt",
            "mine.py",
            "mine.yaml",
            "prompts.jsonl",
        ]
        assert len(Path("prompts.jsonl").read_text().splitlines()) == 40
        tokenizer = train_tokenizer(Path("heldout.txt").read_text().splitlines(), 300, 160)
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "layers": 1, "heads": 2, "context": 160}
        save_model(new_gpt2(**sizes, tokenizer=tokenizer, seed=0), tokenizer, folder / "tiny")
        config = Path("mine.yaml").read_text()
        assert config.count("model: null") == 1
        Path("mine.yaml").write_text(config.replace("model: null", "model: ./tiny"))
        Path("mine.py").write_text(Path("mine.py").read_text() + MORE)
        Path("tab.yaml").write_text("kl:\n\ttarget: 0.1\n")
        Path("twice.yaml").write_text("kl: {target: 0.1}\nkl: {target: 0.2}\n")
        yield folder


SMALL = ("--set", "rollout={batch_size: 8, max_new_tokens: 16, reference_samples: 64}", "--set", "run.device=cpu")


@pytest.mark.quick
def test_an_own_run_from_an_empty_folder(own: Path, rlhf_kl: Cli) -> None:
    done = rlhf_kl("doctor", "mine.yaml", "--updates", "3", *SMALL)
    assert (done.code, done.out.splitlines()[-1].split()[0]) == (0, "ready:"), done
    assert "3 updates of" in done.out
    assert done.err.count("sampling the reference ...") == 1
    assert done.out.endswith(" doubtful; next: rlhf-kl train --config mine.yaml\n")
    train = ("train", "mine", "--updates", "2", *SMALL, "--set", "tracking.tensorboard=false")
    done = rlhf_kl(*train, "--json", "--quiet")
    assert (done.code, json.loads(done.out)["steps"]) == (0, 2)
    done = rlhf_kl(*train, "--resume", "--quiet")
    assert "updates: 2 in " in done.out
    for word in ("blue", "green"):
        assert load_attribute("mine.py:right")(["It was"], ["It was blue."], answer=[word]) == [word == "blue"]


CHECK = "config validate mine.yaml --set "
TRAIN = "train mine.yaml --quiet --output-dir run --set "
TERM = "'reward={kind: sum, terms: {short: {kind: mine.py:%s, weight: %s}}}'"
MISTAKES = [
    # keys
    (CHECK + "ppo.updates=30", "ppo.updates", "did you mean ppo.total_episodes?"),
    (CHECK + "max_steps=2", "max_steps", "did you mean ppo.total_episodes?"),
    (CHECK + "kl.init_kl_coef=0.1", "kl.init_kl_coef", "did you mean kl.controller.coef?"),
    (CHECK + "kl.controller.target=0.1", "kl.controller.target", "did you mean kl.target?"),
    (CHECK + "ppo.lerning_rate=1e-5", "ppo.lerning_rate", "did you mean ppo.learning_rate?"),
    (CHECK + "ppo.batch_size=32", "ppo.batch_size", "did you mean rollout.batch_size?"),
    (CHECK + "rollout.top_p=0.9", "rollout.top_p", "valid: batch_size, max_new_tokens, temperature"),
    (CHECK + "kl.target", "'kl.target'", "write section.key=value"),
    # values
    (CHECK + "kl.target=0,05", "kl.target", "'0,05'", "must be a number"),
    (CHECK + "kl.target=high", "kl.target", "'high'", "a number or 'conservative', 'moderate' or 'aggressive'"),
    (CHECK + "ppo.advantage=groups", "ppo.advantage", "'groups'", "'gae', 'rloo' or 'grpo'"),
    (CHECK + "ppo.advantage=grpo", "rollout.samples_per_prompt must be at least 2"),
    (CHECK + "run.device=gpu", "run.device", "'gpu'", "auto, cpu, cuda, cuda:N or mps"),
    (CHECK + "run.dtype=bf16", "run.dtype", "'bf16'", "'bfloat16'"),
    (CHECK + "kl.ceiling=2", "kl.ceiling", "a mapping: 2"),
    (CHECK + "kl.controller.coef=0", "kl.controller.coef must be above 0"),
    (CHECK + TERM % ("sentences", "heavy"), "reward.terms.short.weight", "'heavy'", "a number"),
    (CHECK + TERM % ("sentence", "1.0"), "reward.terms.short.kind", "'sentence'", "did you mean sentences?"),
    (TRAIN + "rollout.max_new_tokens=600", "rollout.max_new_tokens: 600 + a prompt > 160", "lower it"),
    # files
    (CHECK + "data.prompts=promts.jsonl", "data.prompts", "promts.jsonl (looked in {here})", "mean prompts.jsonl?"),
    (CHECK + "policy.model=./tinny", "policy.model", "./tinny", "did you mean tiny?"),
    (CHECK + "reward.kind=mine.py:sentenses", "reward.kind", "'sentenses'", "did you mean sentences?"),
    (TRAIN + "data.column=promt", "prompts.jsonl: row 1", "'promt'", "did you mean prompt?"),
    (TRAIN + "reward.kind=mine.py:column", "reward", "'answr'", "did you mean answer?"),
    (TRAIN + "reward.kind=mine.py:raises", "reward", "ZeroDivisionError", "(mine.py:13)"),
    (TRAIN + "kl.controller.kind=mine.py:TutorialKL", "controller.kind", "update(kl, episodes)", "needs that and coef"),
    ("config validate tab.yaml", "tab.yaml:2:1", r"'\t'", "indent with spaces"),
    ("config validate twice.yaml", "twice.yaml:2:1", "key 'kl' is written twice"),
    ("train mien.yaml", "'mien.yaml'", "did you mean mine.yaml?"),
    ("train tiny", "tiny is a folder"),
    # runs
    ("eval --run runs", "runs: holds no run", "did you mean runs/mine?"),
    ("report mine", "mine: holds no run", "did you mean runs/mine?"),
    ("generate --run tiny", "tiny: holds no run", "did you mean --model tiny?"),
    ("compare mine.yaml", "mine.yaml: holds no run", "did you mean --config mine.yaml?"),
    ("compare --config mine.yaml", "a config for `rlhf-kl train`", "which has variants"),
    ("train prompts.jsonl", "prompts.jsonl:2:1", "is it YAML?"),
    # commands
    ("train", "'--config'", "such as rlhf-kl train --config smoke.yaml"),
    ("train --conf mine.yaml", "--conf", "did you mean --config?"),
    ("train mine.yaml --lr 1", "--lr", "--set ppo.learning_rate=VALUE"),
    ("train mine.yaml --steps 10", "--steps", "did you mean --updates N?"),
    ("train mine.yaml --updates three", "'--updates'", "'three'", "integer"),
    ("train mine.yaml --updates 3 --set ppo.total_episodes=9", "--updates 3", "ppo.total_episodes", "choose one"),
    ("train mine.yaml --resume true", "(true)"),
    ("train mine.yaml kl.target=0.2", "(kl.target=0.2)", "did you mean --set kl.target=0.2?"),
    ("evl", "'evl'", "Did you mean 'eval'?"),
    ("eval runs/mine", "(runs/mine)", "did you mean --run runs/mine?"),
    ("generate hello", "(hello)", "did you mean --prompt hello?"),
    ("init", "mine.yaml is there already", "name a new folder"),
    ("init mine.yaml", "mine.yaml is no folder", "writes mine.yaml into it"),
    ("init new.yaml", "new.yaml is no folder"),
    ("doctor mine.yaml --steps 10", "--steps", "did you mean --updates N?"),
    ("doctor mine.yaml --updates 3 --set ppo.total_episodes=9", "--updates 3", "ppo.total_episodes", "choose one"),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_told_with_its_key_its_value_and_the_next_step(
    mistake: tuple[str, ...], own: Path, rlhf_kl: Cli
) -> None:
    line, *words = mistake
    done = rlhf_kl(*shlex.split(line))
    assert (done.code, done.out) == (2, ""), done
    said = [text for text in done.err.splitlines() if text.startswith("error: ")]
    assert [word for word in words if word.format(here=own) not in "\n".join(said)] == [], said
    assert len(said) == 1 or line == "init"
    assert all(text.isprintable() for text in said)
    assert "Traceback" not in done.err
    assert not (own / "run" / "config.yaml").exists()
