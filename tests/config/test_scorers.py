"""`eval.scorers`: names, kinds, what a world brings, the older key, and what other keys say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.builtin.world import GOLD
from rlhf_kl.config.named import scorers_of
from rlhf_kl.config.resolve import config_diff, dump_config, load_config, unused_notes
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError

OWN = "policy: {model: owner/m}\ndata: {prompts: owner/p}\n"
MINE = "def polite(prompts, responses, word='please'): ...\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def load(scorers: str, *sets: str, reward: str = "{model: owner/r}", rest: str = "") -> TrainConfig:
    """Of a policy of the user's own; `scorers`: the YAML of the mapping."""
    Path("x.yaml").write_text(f"{OWN}reward: {reward}\neval: {{texts: owner/t, scorers: {scorers}}}\n{rest}")
    config: TrainConfig = load_config("train", "x.yaml", sets)
    return config


def problems(*arguments: Any, **options: Any) -> list[str]:
    with pytest.raises(InputError) as caught:
        load(*arguments, **options)
    return caught.value.problems


def test_scorers_by_name_are_written_as_a_reward_is(here: Path) -> None:
    config = load("{polite: {kind: 'mine.py:polite', word: thanks}, rm: {model: owner/other, label: POSITIVE}}")
    polite, rm = config.eval.watched.values()
    assert (polite.kind, polite.options) == (f"{here}/mine.py:polite", {"word": "thanks"})
    assert (rm.kind, rm.model, rm.label) == ("model", "owner/other", "POSITIVE")
    assert list(scorers_of(config)) == ["reward", "eval.scorers.polite", "eval.scorers.rm"]
    Path("again.yaml").write_text(dump_config(config))
    assert config_diff(load_config("train", "again.yaml"), config) == []


def test_a_child_adds_replaces_and_removes_scorers(here: Path) -> None:
    load("{a: {kind: 'mine.py:polite', word: thanks}, b: {model: owner/b}, c: {model: owner/c}}")
    child = "eval: {scorers: {a: {kind: model, model: owner/a}, b: null, d: {model: owner/d}}}"
    Path("child.yaml").write_text(f"extends: x.yaml\n{child}\n")
    config = load_config("train", "child.yaml", ["eval.scorers.c.label=GOOD"])
    assert {name: (scorer.model, scorer.label) for name, scorer in config.eval.watched.items()} == {
        "a": ("owner/a", None),
        "c": ("owner/c", "GOOD"),
        "d": ("owner/d", None),
    }


def test_a_world_brings_its_truth_where_its_reward_or_prompts_are_used() -> None:
    def gold(**sections: Any) -> Any:
        return TrainConfig.model_validate(sections).eval.watched.get("gold")

    own = {"policy": {"model": "owner/m"}, "eval": {"texts": "owner/t"}}
    prompts, reward = {"data": {"prompts": "builtin:reviews"}}, {"reward": {"model": "builtin:reviews"}}
    assert gold().kind == GOLD
    assert gold(**own, **prompts, reward={"kind": "mine.py:polite"}).kind == GOLD
    assert gold(**own, **reward, data={"prompts": "owner/p"}).kind == GOLD
    assert gold(**own, reward={"kind": "mine.py:polite"}, data={"prompts": "owner/p"}) is None
    assert gold(eval={"scorers": {"gold": {"model": "owner/g"}}}).model == "owner/g"
    assert gold(eval={"scorers": {"gold": None}}) is None
    off = TrainConfig.model_validate({"eval": {"scorers": {"gold": None}}})
    Path("off.yaml").write_text(dump_config(off))  # a run that is repeated has none either
    assert load_config("train", "off.yaml").eval.watched == {}


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("owner/g", {"model": "owner/g"}),
        ("mine.py:polite", {"kind": "{here}/mine.py:polite"}),
        ("builtin:reviews", {"kind": GOLD}),
    ],
)
def test_the_older_key_is_read_and_noted(here: Path, gold: str, expected: dict[str, str]) -> None:
    config = load("{}", f"reward.gold={gold}")
    scorer = config.eval.watched["gold"]
    assert {key: getattr(scorer, key) for key in expected} == {
        key: value.format(here=here) for key, value in expected.items()
    }
    assert [note for note in unused_notes(config) if note.startswith("reward.gold ")]
    stored = dump_config(config)
    assert "eval.scorers.gold" not in stored
    Path("stored.yaml").write_text(stored)
    again = load_config("train", "stored.yaml")
    assert (config_diff(again, config), unused_notes(again)) == ([], [])


def test_gold_is_written_once() -> None:
    (line,) = problems("{gold: {model: owner/g}}", reward="{model: owner/r, gold: owner/h}")
    assert line.startswith("reward.gold ")
    assert "eval.scorers.gold" in line


@pytest.mark.parametrize(
    ("scorers", "key"),
    [
        *((f"{{{name}: {{model: a/b}}}}", f"eval.scorers.{name}:") for name in ("scores", "perplexity", "kl_token")),
        *((f"{{{name}: {{model: a/b}}}}", f"eval.scorers.{name}:") for name in ("x_stderr", "x_gain", "reference_x")),
        ("{a/b: {model: a/b}}", "eval.scorers:"),
        ("{'': {model: a/b}}", "eval.scorers:"),
        ("{x: {}}", "eval.scorers.x.model "),
        ("{x: {kind: sum}}", "eval.scorers.x.kind "),
        ("{x: {kind: modle}}", "eval.scorers.x.kind "),
        ("{x: {model: a/b, wieght: 2}}", "eval.scorers.x.wieght:"),
        ("{x: {kind: mine.py:polit}}", "eval.scorers.x.kind:"),
        ("{x: {kind: 'mine.py:polite', model: a/b}}", "eval.scorers.x.model "),
        ("{x: mine.py:polite}", "eval.scorers.x "),
        ("[x]", "eval.scorers "),
    ],
)
def test_what_cannot_be_a_scorer(scorers: str, key: str) -> None:
    (line,) = problems(scorers)
    assert line.startswith(key)


@pytest.mark.parametrize(
    ("best", "hint"),
    [
        ("eval/polite", None),
        ("eval/scores", None),
        ("eval/perplexity", None),
        ("objective/scores_shaped", None),
        ("eval/polit", "eval/polite"),
        ("eval/gold", "eval/polite"),
        ("eval/scors", "eval/scores"),
        ("kl/token", "eval/polite"),
    ],
)
def test_the_best_checkpoint_is_kept_by_a_scorer_that_there_is(best: str, hint: str | None) -> None:
    arguments = "{polite: {kind: 'mine.py:polite'}}", f"checkpoint.best={best}"
    if hint is None:
        assert load(*arguments).checkpoint.best == best
    else:
        (line,) = problems(*arguments)
        assert line.startswith(f"checkpoint.best: '{best}' ")
        assert hint in line


def test_a_scorer_that_is_wrong_is_told_alone() -> None:
    """Not also that there is none of its name."""
    (line,) = problems("{polite: {kind: null}}", "checkpoint.best=eval/polite")
    assert line.startswith("eval.scorers.polite.kind ")
