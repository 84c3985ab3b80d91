from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_kl.config.compare import load_compare
from rlhf_kl.config.load import load_config
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
        ({"seed": [1]}, "seed: unknown key; did you mean seeds?"),
        ({"seeds": [1, 1]}, "seeds must be a list of different numbers"),
        ({"seeds": [1, -1]}, "seeds must be greater than or equal to 0"),
        ({"base": "ppo_adaptiv.yaml"}, "base: no config 'ppo_adaptiv.yaml'; did you mean ppo_adaptive.yaml?"),
        ({"base": "sft_reviews.yaml"}, "is a config for `rlhf-kl sft`"),
        ({"variants": {}}, "variants must name at least one"),
        ({"variants": {"a/b": {}}}, "a name has letters, digits and ._+- only: 'a/b'"),
        ({"variants": {"a": {"run": {"seed": 1}}}}, "variants.a.run.seed: set by the program, remove it"),
        ({"variants": {"a": {"extends": "x"}}}, "variants.a.extends: all variants start from `base`"),
        ({"variants": {"a": {"kl": {"tarmet": 1}}}}, "variants.a: kl.tarmet: unknown key; did you mean kl.target?"),
        ({"variants": {"a": {}, "b": None}}, "variants: a and b are the same run"),
        ({}, "--chain: needs two variants or more that hold a KL target"),
        (
            {"variants": {"a": {}, "b": {"kl": {"target": 0.4}, "ppo": {"lam": 0.9}}}},
            "--chain: variants.a and b must differ in kl.target only: ppo.lam: 0.95 -> 0.9",
        ),
    ],
)
def test_each_mistake_is_one_line(write: Write, keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load_compare(write(**keys), chain="--chain" in expected)
    [line] = caught.value.problems
    assert expected in line


def test_problems_of_the_command_line(write: Write) -> None:
    with pytest.raises(InputError, match="a and b are the same run"):
        load_compare(write(), ["kl.controller={kind: static, coef: 0.3}"])
    with pytest.raises(InputError, match=r"^--set 'foo': write section.key=value$"):
        load_compare(write(), ["foo"])
    with pytest.raises(InputError, match="seeds must be less than 4294967296"):
        load_compare(write(), [], seed=2**32)


def test_runs_with_different_prompts_are_noted(write: Write) -> None:
    [note] = load_compare(write(variants={"a": {}, "b": {"rollout": {"batch_size": 128}}})).notes
    assert note == "a and b do not see the same prompts in the same order (rollout.batch_size: 64 -> 128): unpaired"


@pytest.mark.parametrize(("name", "runs"), [("compare_adaptive_vs_static.yaml", 30), ("sweep_beta.yaml", 18)])
def test_the_shipped_comparisons(name: str, runs: int, write: Write) -> None:
    plan = load_compare(name)
    assert (len(plan.runs), plan.notes) == (runs, [])
    assert len({run.config.kl.ceiling_value for run in plan.runs}) == 1  # or the KL of one side is kept by it


@pytest.mark.parametrize(("file", "command"), [("smoke.yaml", "train"), ("own.yaml", "sft")])
def test_the_config_of_another_command_is_one_line(file: str, command: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("extends: sft_reviews.yaml\n")  # has no section of its own
    with pytest.raises(InputError, match=f"{file} is a config for `rlhf-kl {command}`, not for `rlhf-kl compare`"):
        load_compare(file)


TARGETS = {"free": {"kl": {"controller": {"kind": "fixed", "coef": 0.0}, "ceiling": None}}} | {
    f"t{target}": {"kl": {"target": target}} for target in (0.4, 0.05, "aggressive")
}


def test_a_chain_goes_from_low_to_high(write: Write, tmp_path: Path) -> None:
    plan = load_compare(write(variants=TARGETS), ["reward.clip=4.0"], updates=20, chain=True)
    names = [(run.name, run.after) for run in plan.runs]
    assert names[:3] == [("t0.05-s0", ""), ("taggressive-s0", "t0.05-s0"), ("t0.4-s0", "taggressive-s0")]
    assert names[3] == ("t0.05-s7", "")
    assert plan.notes == ["not in the chain, since no KL target is held: free"]
    first, second, third = (run.config for run in plan.runs[:3])
    assert (first.policy.model, first.reference.model) == ("builtin:reviews", None)
    assert second.policy.model == str(tmp_path / "runs" / "mine-chain" / "runs" / "t0.05-s0" / "final")
    assert third.policy.model.endswith("taggressive-s0/final")
    assert {second.reference.model, third.reference.model} == {"builtin:reviews"}
    assert {(run.config.updates, run.config.ppo.lr_schedule) for run in plan.runs} == {(20, "constant")}
    assert plan.options["t0.4"] == "--config ppo_adaptive.yaml --set reward.clip=4.0"


def test_a_chain_keeps_a_reference_of_its_own_and_trains_its_adapter_on(write: Write) -> None:
    sets = ["reference.model=builtin:reviews-small", "policy.lora={r: 4}"]
    first, second, *_ = (run.config for run in load_compare(write(variants=TARGETS), sets, chain=True).runs)
    assert (first.reference.model, second.reference.model) == ("builtin:reviews-small", "builtin:reviews-small")
    assert first.policy.lora is not None
    assert second.policy.lora is None  # `final` holds the adapter, which is trained further
