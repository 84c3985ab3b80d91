from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.config.resolve import load_config
from rlhf_kl.config.variants import load_compare
from rlhf_kl.errors import InputError
from tests.runs import Write

VARIANTS = {"a": {"kl": {"controller": {"coef": 0.1}}}, "b": {"kl": {"controller": {"kind": "static", "coef": 0.1}}}}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def make(**keys: Any) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump({"base": "ppo_adaptive.yaml", "seeds": [0, 7], "variants": VARIANTS} | keys))
        return file

    return make


def test_every_variant_with_every_seed_pairs_first(write: Write, tmp_path: Path) -> None:
    plan = load_compare(write(), ["ppo.total_episodes=640"])
    assert [run.name for run in plan.runs] == ["a-s0", "b-s0", "a-s7", "b-s7"]
    assert (plan.folder, plan.notes) == (tmp_path / "runs" / "mine", [])
    last = plan.runs[-1].config
    assert (last.run.seed, last.run.output_dir) == (7, str(tmp_path / "runs" / "mine" / "runs" / "b-s7"))
    # As if a file that extends the base held the fragment.
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"extends": "ppo_adaptive.yaml", **VARIANTS["b"]}))
    alone = load_config("train", "b.yaml", ["ppo.total_episodes=640"])
    assert last.model_copy(update={"run": alone.run}) == alone
    other = load_compare(write(), [], tmp_path / "here", seed=3)
    assert ([run.name for run in other.runs], other.folder) == (["a-s3", "b-s3"], tmp_path / "here")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"seed": [1]}, "seeds?"),
        ({"seeds": [1, 1]}, "seeds must "),
        ({"seeds": [1, -1]}, "0: -1"),
        ({"base": "ppo_adaptiv.yaml"}, "mean ppo_adaptive.yaml?"),
        ({"base": "sft_reviews.yaml"}, "`rlhf-kl sft`"),
        ({"variants": {}}, "variants must "),
        ({"variants": {"a/b": {}}}, "only: 'a/b'"),
        ({"variants": {"a": {"run": {"seed": 1}}}}, "variants.a.run.seed: "),
        ({"variants": {"a": {"extends": "x"}}}, "variants.a.extends: "),
        ({"variants": {"a": {"kl": {"tarmet": 1}}}}, "mean kl.target?"),
        ({"variants": {"a": {}, "b": None}}, "variants: a and b "),
    ],
)
def test_each_mistake_is_one_line(write: Write, keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load_compare(write(**keys))
    [line] = caught.value.problems
    assert expected in line


def test_problems_of_the_command_line(write: Write) -> None:
    with pytest.raises(InputError, match="a and b "):
        load_compare(write(), ["kl.controller={kind: static, coef: 0.3}"])
    with pytest.raises(InputError, match=r"^--set 'foo': "):
        load_compare(write(), ["foo"])
    with pytest.raises(InputError, match="4294967296"):
        load_compare(write(), [], seed=2**32)


def test_checkpoints_stay_where_somebody_has_written_how_many(write: Write, tmp_path: Path) -> None:
    """In the base, in what it extends, in a variant or by --set; a shipped config writes no number."""
    (tmp_path / "parent.yaml").write_text("extends: ppo_adaptive.yaml\ncheckpoint: {keep: 2}\n")
    (tmp_path / "base.yaml").write_text("extends: parent.yaml\ncheckpoint: {every: 5}\n")
    a = {"kl": {"target": 0.1}}
    for base, variant, sets, keeps in (
        ("ppo_adaptive.yaml", a, [], False),
        ("ppo_adaptive.yaml", a | {"checkpoint": {"every": 5}}, [], False),
        ("ppo_adaptive.yaml", a | {"checkpoint": {"keep": 2}}, [], True),
        ("ppo_adaptive.yaml", a, ["checkpoint.keep=2"], True),
        ("parent.yaml", a, [], True),
        ("base.yaml", a, [], True),
    ):
        plan = load_compare(write(base=base, variants={"a": variant}), sets)
        assert {run.keeps for run in plan.runs} == {keeps}, (base, variant, sets)


def test_runs_with_different_prompts_are_noted(write: Write) -> None:
    [note] = load_compare(write(variants={"a": {}, "b": {"rollout": {"batch_size": 128}}})).notes
    assert note.startswith("a and b ")
    assert "(rollout.batch_size: 64 -> 128)" in note


@pytest.mark.parametrize(("name", "runs"), [("compare_adaptive_vs_static.yaml", 30), ("sweep_beta.yaml", 18)])
def test_the_shipped_comparisons(name: str, runs: int, write: Write) -> None:
    plan = load_compare(name)
    assert (len(plan.runs), plan.notes) == (runs, [])
    assert not any(run.keeps for run in plan.runs)
    assert len({run.config.kl.ceiling_value for run in plan.runs}) == 1  # or the KL of one side is kept by it


@pytest.mark.parametrize(("file", "command"), [("smoke.yaml", "train"), ("own.yaml", "sft")])
def test_the_config_of_another_command_is_one_line(file: str, command: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: sft_reviews.yaml\n")  # has no section of its own
    with pytest.raises(InputError, match=f"{file} is a config for `rlhf-kl {command}`, not for `rlhf-kl compare`"):
        load_compare(file)
