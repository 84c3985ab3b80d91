"""The first run of a new user: `init`, a model filled in, `doctor`, `train`; and all that cannot be done on the way.

Of each mistake: the command line, its exit code, and the words on stderr, one line per problem, no traceback.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from rlhf_kl import cli
from rlhf_kl.commands.options import Command, Group
from rlhf_kl.errors import GuardStop, InputError, Interrupted, RlhfKlError
from rlhf_kl.plugins import load_attribute
from rlhf_kl.training.load import Loader
from tests.runs import Cli

MORE = """

def raises(prompts, responses):
    raise RuntimeError("\\x1b[2Jthe server is gone\\u2028")


def column(prompts, responses, answr):
    return [1.0] * len(responses)


class BlindKL:
    coef = 0.1

    def update(self):
        return self.coef
"""
WORLD = "{kind: model, model: builtin:reviews-small}"
FILES = {
    "tab.yaml": "kl:\n\ttarget: 0.1\n",
    "twice.yaml": "kl: {target: 0.1}\nkl: {target: 0.2}\n",
    "odd.yaml": '"\\e[2J\\e]0;owned\\a": 1\n',
    "compare.yaml": "base: mine.yaml\nseeds: [0]\nvariants: {a: {policy: {model: no/such/model}}, b: {}}\n",
    "world.yaml": f"extends: mine.yaml\nreward: {WORLD}\ndata: {{prompts: late.jsonl}}\n",
    "column.jsonl": '{"promt": "ab"}\n',
    "late.jsonl": '{"prompt": "ab"}\n{"promt": "ab"}\n',
    "thesis/thesis.tex": "my only copy",
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, rlhf_kl: Cli) -> Iterator[Path]:
    """The working directory: what `init` copies, with a tiny model filled in."""
    from rlhf_kl.models.pretrained import save_model
    from rlhf_kl.models.scratch import new_gpt2, train_tokenizer

    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = rlhf_kl("init")
        assert (done.code, done.out.count("rlhf-kl"), done.err) == (0, 5, "")
        assert {path.name for path in folder.iterdir()} == {"heldout.txt", "mine.py", "mine.yaml", "prompts.jsonl"}
        assert len(Path("prompts.jsonl").read_text().splitlines()) == 40
        tokenizer = train_tokenizer(Path("heldout.txt").read_text().splitlines(), 300, 160)
        sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "layers": 1, "heads": 2, "context": 160}
        save_model(new_gpt2(**sizes, tokenizer=tokenizer, seed=0), tokenizer, folder / "tiny")
        config = Path("mine.yaml").read_text()
        assert config.count("model: null") == 1
        Path("mine.yaml").write_text(config.replace("model: null", "model: ./tiny"))
        Path("mine.py").write_text(Path("mine.py").read_text() + MORE)
        Path("thesis").mkdir()
        for name, text in FILES.items():
            Path(name).write_text(text)
        yield folder


SMALL = ("--set", "rollout={batch_size: 8, max_new_tokens: 16, reference_samples: 64}", "--set", "run.device=cpu")
TWO = ("train", "mine", "--updates", "2", *SMALL, "--set", "tracking.tensorboard=false")


@pytest.fixture(scope="module")
def ran(own: Path, rlhf_kl: Cli) -> str:
    """What the run in runs/mine printed, as JSON."""
    done = rlhf_kl(*TWO, "--json", "--quiet")
    assert done.code == 0, done
    return done.out


@pytest.mark.quick
def test_an_own_run_from_an_empty_folder(own: Path, ran: str, rlhf_kl: Cli) -> None:
    done = rlhf_kl("doctor", "mine.yaml", "--updates", "3", *SMALL)
    assert (done.code, done.out.splitlines()[-1].split()[0]) == (0, "ready:"), done
    assert "3 updates of" in done.out
    train = ["train", "--config", "mine.yaml", "--updates", "3", *SMALL]
    assert done.out.endswith(f" doubtful; next: rlhf-kl {shlex.join(train)}\n")
    assert json.loads(ran)["steps"] == 2
    done = rlhf_kl(*TWO, "--resume", "--quiet")
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
    (CHECK + "ppo.batch_size=32", "ppo.batch_size", "did you mean rollout.batch_size?"),
    (CHECK + "rollout.top_p=0.9", "rollout.top_p", "valid: batch_size, max_new_tokens, temperature"),
    # values
    (CHECK + "kl.target=0,05", "kl.target", "'0,05'", "must be a number"),
    (CHECK + "ppo.advantage=groups", "ppo.advantage", "'groups'", "'gae', 'rloo' or 'grpo'"),
    (CHECK + "ppo.advantage=grpo", "rollout.samples_per_prompt must be at least 2"),
    (CHECK + "rollout.engine=vlm", "rollout.engine", "'vllm' or null: 'vlm'"),
    (CHECK + "ppo.minibatch_size=half", "ppo.minibatch_size", "a whole number or null: 'half'"),
    (CHECK + "'reward={kind: sum, terms: {short: {model: 3}}}'", "reward.terms.short.model", "text or null: 3"),
    (CHECK + "run.output_dir=s3://bucket/x", "run.output_dir must be a local folder", "'s3://bucket/x'"),
    (CHECK + "policy.model=s3://bucket/x", "policy.model: s3://bucket/x is an address"),
    (CHECK + "data.prompts=https://x.org/p.jsonl", "data.prompts: https://x.org/p.jsonl is an address"),
    (CHECK + "run.dtype=bf16", "run.dtype", "'bf16'", "'bfloat16'"),
    (CHECK + "kl=0.05", "kl must be a mapping like {{target: 0.05}}: 0.05"),
    (CHECK + "kl.ceiling=2", "kl.ceiling must be a mapping like {{value: 2}} or null: 2"),
    (CHECK + "kl.ceiling=true", "kl.ceiling must be a mapping or null: true"),
    (CHECK + TERM % ("sentences", "heavy"), "reward.terms.short.weight", "'heavy'", "a number"),
    (CHECK + TERM % ("sentence", "1.0"), "reward.terms.short.kind", "'sentence'", "did you mean sentences?"),
    (TRAIN + "rollout.max_new_tokens=600", "rollout.max_new_tokens: 600 + a prompt > 160", "lower it"),
    # files
    (CHECK + "data.prompts=promts.jsonl", "data.prompts", "promts.jsonl (looked in {here})", "mean prompts.jsonl?"),
    (CHECK + "policy.model=./tinny", "policy.model", "./tinny", "did you mean tiny?"),
    (CHECK + "policy.model=tinny/", "policy.model: no such file or folder: tinny/ (looked in ", "did you mean tiny?"),
    ("config validate runs/mine/confg.yml", "did you mean runs/mine/config.yaml?"),
    (TRAIN + "data.column=promt", "prompts.jsonl: row 1", "'promt'", "did you mean prompt?"),
    (TRAIN + "reward.kind=mine.py:column", "reward", "'answr'", "did you mean answer?"),
    (TRAIN + "reward.kind=mine.py:raises", "reward", r"RuntimeError: \x1b[2Jthe server", "(mine.py:13)"),
    (TRAIN + "kl.controller.kind=mine.py:BlindKL", "controller.kind", "BlindKL", "update(kl, episodes)"),
    (TRAIN + "tracking.trackers=[mlflow]", "tracking.trackers: mlflow is not installed"),
    ("config validate odd.yaml", r"\x1b[2J\x1b]0;owned\x07: unknown key"),
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
    ("eval --model tiny", "--model needs --texts"),
    ("eval --model tiny --run x", "exclude each other"),
    ("eval --model tiny --tokens", "--tokens "),
    ("eval --config mine.yaml --checkpoint 2", "--checkpoint belongs to a run"),
    ("eval --model tiny --plugins", "--plugins belongs to a run: name one with --run"),
    ("generate --model tiny --quiet", "name prompts with --prompt"),
    ("generate --model tiny --prompt a --with-reference --quiet", "--with-reference"),
    ("train mine.yaml --output-dir thesis", "thesis"),
    # commands
    ("--nonsense", "see rlhf-kl --help"),
    ("config", "see rlhf-kl config --help"),
    ("sft --batch-size 1", "--set sft.batch_size=VALUE"),
    ("compare --zzzz", "--set KEY=VALUE"),
    ("compare", "compare takes --config FILE to train, or RUN folders to read"),
    ("compare x --seed 1", "need --config"),
    ("train mine.yaml --config=x", "extra argument(s) (mine.yaml)"),
    ("train", "'--config'", "such as rlhf-kl train --config smoke.yaml"),
    ("train --conf mine.yaml", "--conf", "did you mean --config?"),
    ("train mine.yaml --lr 1", "--lr", "--set ppo.learning_rate=VALUE"),
    ("train mine.yaml --steps 10", "--steps", "did you mean --updates N?"),
    ("train mine.yaml --updates three", "'--updates'", "'three'", "integer"),
    ("train mine.yaml --updates=three", "'--updates'", "'three'", "integer"),
    ("train mine.yaml --updates 3 --set ppo.total_episodes=9", "--updates 3", "ppo.total_episodes", "choose one"),
    ("train mine.yaml --resume true", "(true)"),
    ("train mine.yaml kl.target=0.2", "(kl.target=0.2)", "did you mean --set kl.target=0.2?"),
    ("evl", "'evl'", "Did you mean 'eval'?"),
    ("eval runs/mine", "(runs/mine)", "did you mean --run runs/mine?"),
    ("generate hello", "(hello)", "did you mean --prompt hello?"),
    ("generate runs/mine", "(runs/mine)", "did you mean --run runs/mine?"),
    ("init", "mine.yaml is there already", "name a new folder"),
    ("init mine.yaml", "mine.yaml is no folder", "writes mine.yaml into it"),
    ("init new.yaml", "new.yaml is no folder"),
    ("init prompts.jsonl/x", "prompts.jsonl/x: Not a directory"),
    ("doctor mine.yaml --steps 10", "--steps", "did you mean --updates N?"),
    ("doctor mine.yaml --updates 3 --set ppo.total_episodes=9", "--updates 3", "ppo.total_episodes", "choose one"),
]  # fmt: skip


@pytest.mark.parametrize("command", ["eval", "generate --prompt It", "scale"])
def test_a_command_names_the_newest_run_where_it_takes_it(command: str, own: Path, ran: str, rlhf_kl: Cli) -> None:
    def enough(*_: object, **given: object) -> None:
        raise InputError("enough")

    with pytest.MonkeyPatch.context() as patch:
        for module in ("subject", "responses"):
            patch.setattr(f"rlhf_kl.commands.{module}.Loader", enough)  # which they need next
        done = rlhf_kl(*shlex.split(command))
        named = rlhf_kl(*shlex.split(command), *(["runs/mine"] if command == "scale" else ["--run", "runs/mine"]))
    assert "the newest run: runs/mine\n" in done.err
    assert "newest" not in named.err
    assert done.err.endswith("error: enough\n")


@pytest.mark.parametrize("mistake", MISTAKES, ids=[line for line, *_ in MISTAKES])
def test_a_mistake_is_told_with_its_key_its_value_and_the_next_step(
    mistake: tuple[str, ...], own: Path, ran: str, rlhf_kl: Cli
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
    assert [path.name for path in (own / "thesis").iterdir()] == ["thesis.tex"]


NO_MODEL = "neither a folder nor a hub id (owner/name, owner/name@revision): no such file or folder: no/such/model"
UNLOADED = {
    "eval --run nope": ["nope: holds no run"],
    "eval --model tiny --reference thesis --texts column.jsonl": [
        "--reference: {here}/thesis: the folder has no config.json",
        "--texts: column.jsonl: row 1 has no column 'text'",
    ],
    "generate --model tiny/config.json --prompts x.txt": [
        "--model: {here}/tiny/config.json: is a file, not the folder of a model",
        "--prompts: no such file: x.txt",
    ],
    "train --config mine.yaml --set policy.model=no/such/model --set reward.gold=thesis": [
        f"policy.model: {NO_MODEL}",
        "eval.scorers.gold.model: {here}/thesis: the folder has no config.json",
    ],
    "train --config mine.yaml --output-dir thesis": ["{here}/thesis is not empty and not a run of this program: "],
    "train --config mine.yaml --resume --overwrite": ["--resume and --overwrite exclude each other"],
    "doctor --config mine.yaml --pairs column.jsonl": ["--pairs: column.jsonl: row 1 has no column 'chosen'"],
    "reward-model --config reward_reviews.yaml --set policy.model=no/such/model --set data.pairs=column.jsonl": [
        f"policy.model: {NO_MODEL}"
    ],
    "compare --config compare.yaml": [f"variants.a: policy.model: {NO_MODEL}"],
}


def test_what_needs_no_computing_is_told_before_torch_is_imported(own: Path) -> None:
    code = (
        "import sys\nfrom rlhf_kl.cli import run\nfor line in sys.argv[1:]:\n"
        "    print(run(line.split()), 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *UNLOADED], capture_output=True, text=True, check=True)
    expected = [line for problems in UNLOADED.values() for line in (*(f"error: {p}" for p in problems), "2 False")]
    told = done.stderr.splitlines()
    assert len(told) == len(expected), done.stderr
    for line, words in zip(told, expected, strict=True):
        assert line.startswith(words.format(here=own))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train world.yaml", "data.prompts: {here}/late.jsonl: row 2 "),
        ("eval --config world.yaml", "data.prompts: {here}/late.jsonl: row 2 "),
        (
            "reward-model reward_reviews.yaml --set policy.model=builtin:reviews-small --set data.pairs=late.jsonl",
            "data.pairs: {here}/late.jsonl: row 1 ",
        ),
    ],
)
def test_data_are_checked_before_a_model_is_loaded(
    line: str, words: str, own: Path, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loader, "_language_model", None)
    outcome = rlhf_kl(*shlex.split(line))
    assert words.format(here=own) in outcome.err + outcome.out
    assert outcome.code == 2


FULL = "error: memory is full: use a smaller model, or a device with more memory (run.device)\n"
GO_ON = "interrupted; to go on from the last checkpoint, if there is one: rlhf-kl train --config a.yaml --resume\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (GuardStop("above the ceiling"), 3, "error: above the ceiling\n"),
        (RlhfKlError("disk full"), 1, "error: disk full\n"),
        (MemoryError(), 1, FULL),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"), 1, FULL),
        (KeyboardInterrupt(), 130, GO_ON),
        (Interrupted(2), 130, GO_ON),
        (Interrupted(15), 143, GO_ON),
    ],
)  # fmt: skip
def test_exit_codes(error: BaseException, code: int, said: str, rlhf_kl: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False, cls=Group)

    def fail(config: str = "", overwrite: bool = False) -> None:
        raise error

    for name in ("train", "report"):
        failing.command(name, cls=Command)(fail)
    monkeypatch.setattr(cli, "app", failing)
    assert rlhf_kl("train", "--config", "a.yaml", "--overwrite") == (code, "", said)
    assert rlhf_kl("report") == (code, "", "interrupted\n" if said == GO_ON else said)  # it has no --resume
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rlhf_kl("train").err == said * (said == FULL)  # the rest is told by the first process of the group
