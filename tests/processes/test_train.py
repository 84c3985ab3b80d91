"""`train` in two processes beside one: the same run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import save_model
from rlhf_kl.run.checkpoint import Checkpoint
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.sharding import can_shard
from tests import vllm_standin
from tests.made import Make

Runs = dict[str, tuple[Path, Path]]
VARIANTS: dict[str, list[str]] = {
    "default": [],
    "minibatches": ["ppo.minibatch_size=8", "checkpoint.background=true"],
    "reward": ["kl.placement=reward", "kl.estimator=k1"],
    "sum": ["reward={kind: sum, terms: {a: {kind: 'MINE'}, b: {kind: 'MINE', letter: b}}}", "reward.normalize=each"],
    "adapter": ["policy.lora={r: 2}"],
    "separate": ["policy.value=separate"],
    "rloo": ["ppo.advantage=rloo", "rollout.samples_per_prompt=4"],
    "grpo": ["ppo.advantage=grpo", "rollout.samples_per_prompt=2"],
    "ceiling": ["kl.ceiling.value=0.002", "ppo.learning_rate=5.0e-3", "kl.target=0.001"],
    "sequence": ["kl.unit=sequence", "kl.target=0.5"],
    "sharded": ["checkpoint.background=true"],
    "sharded-adapter": ["policy.lora={r: 2}"],
    "sharded-head": ["policy.value=head"],
    "sharded-separate": ["policy.value=separate"],
    "sharded-ceiling": ["kl.ceiling.value=0.002", "ppo.learning_rate=5.0e-3", "kl.target=0.001"],
    "sharded-rloo": ["ppo.advantage=rloo", "rollout.samples_per_prompt=4"],
    "sharded-recompute": ["policy.gradient_checkpointing=true"],
    "sharded-scorer": ["eval.scorers.x.model=GOLD"],
    "sharded-microbatches": ["ppo.microbatch_size=2"],
    "sharded-half": ["policy.model=HALF"],
    "engine": ["rollout.engine=vllm", "ppo.advantage=rloo", "rollout.samples_per_prompt=4"],
    "sharded-engine": ["rollout.engine=vllm", "policy.lora={r: 2}"],
    "frozen-ceiling": ["reference.model=OTHER", "kl.ceiling.value=0.02", "kl.target=0.01"],
}
NEEDS_SHARDS = pytest.mark.skipif(not can_shard(), reason="FSDP2 of this torch is too old")
if not can_shard():
    VARIANTS = {name: settings for name, settings in VARIANTS.items() if not name.startswith(("sharded", "frozen"))}
SHARDS = ["policy.shard=true", "reference.shard=true"]  # in the run of two processes; of "frozen" the last alone


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, new_model: Make, letters: Any) -> Path:
    save_model(new_model(seed=7, spread=0.1), letters, folder := tmp_path_factory.mktemp("other"))
    return folder


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: Any, tiny_settings: Any, rlhf_kl: Make, together: Make, tiny_reward_folder: Path, other: Path
) -> Runs:
    """The folders of the run in one process and in two."""
    half = tmp_path_factory.mktemp("half")  # whose weights are read as float32, layer by layer
    AutoModelForCausalLM.from_pretrained(other).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(other).save_pretrained(half)
    place = tmp_path_factory.mktemp("two")
    (place / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    folders = {"GOLD": tiny_reward_folder, "OTHER": other, "HALF": half, "MINE": tiny_settings["reward"]["kind"]}

    def words(variant: str, count: int) -> list[Any]:
        shards = {"sharded": SHARDS, "frozen": SHARDS[1:]}.get(variant.partition("-")[0], [])
        settings = [re.sub("[A-Z]{4,}", lambda name: str(folders[name[0]]), each) for each in VARIANTS[variant]]
        settings += shards if count > 1 else []
        options = [word for setting in settings for word in ("--set", setting)]
        return ["train", "--config", place / "tiny.yaml", "--output-dir", place / f"{variant}-{count}", *options]

    with pytest.MonkeyPatch.context() as patch:
        for name, module in vllm_standin.modules().items():
            patch.setitem(sys.modules, name, module)
        for variant in VARIANTS:
            outcome = rlhf_kl(*words(variant, 1), "--quiet")
            assert outcome.code == 0, outcome.err
    result = together([[*words(variant, 2), "--quiet"] for variant in VARIANTS])
    assert result.codes == [[0] * len(VARIANTS)] * 2, result.output
    return {variant: (place / f"{variant}-1", place / f"{variant}-2") for variant in VARIANTS}


def updates(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_jsonl(folder / "metrics.jsonl") if "kl/token" in row]


def assert_close(one: Any, two: Any, where: str) -> None:
    """Numbers, or lists of them, within the rounding of float32 sums in another order."""
    if isinstance(one, float | list):
        assert two == pytest.approx(one, rel=2e-3, abs=2e-5), where
    elif not isinstance(one, dict):
        assert one == two, where


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_make_the_run_of_one(runs: Runs, variant: str) -> None:
    one, two = (updates(folder) for folder in runs[variant])
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        assert b["dist/world_size"] == 2
        assert a.keys() == b.keys()
        sharded = variant.startswith("sharded")
        assert 0.4 < b["dist/held"] < 0.6 if sharded else b["dist/held"] == 1.0  # real DTensors
        names = [[text.partition(":")[0] for text in row.get("alerts", ())] for row in (a, b)]
        assert names[0] == names[1]
        for key in a.keys() - {"dist/world_size", "dist/held", "alerts"}:
            if not key.startswith(("time/", "perf/")):
                assert_close(a[key], b[key], f"update {a['step']}, {key}")

    assert not variant.endswith("ceiling") or min(row["kl/backtrack_factor"] for row in two) < 1.0
    # Samples and weights.
    folders, samples = runs[variant], []
    for folder in folders:
        rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["chosen"] != "largest kl"]
        samples.append([(row["step"], row["prompt"], row["response"], row.get("score_mean")) for row in rows])
    assert samples[0]
    assert samples[0] == samples[1]
    tables = [{(row["text"], row["id"]): row for row in read_jsonl(folder / "tokens.jsonl")} for folder in folders]
    assert tables[0].keys() == tables[1].keys()
    assert sum(row["kl"] for row in tables[0].values()) > 0
    for name, row in tables[0].items():
        for key, value in row.items():
            assert_close(value, tables[1][name][key], f"tokens.jsonl: {name}, {key}")
    name = "adapter_model.safetensors" if "policy.lora={r: 2}" in VARIANTS[variant] else "model.safetensors"
    before, after = (load_file(folder / "final" / name) for folder in folders)
    for key, tensor in before.items():
        torch.testing.assert_close(after[key], tensor, rtol=1e-2, atol=1e-4)


@NEEDS_SHARDS
def test_a_part_of_a_checkpoint_that_cannot_be_read_is_one_line(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    folder = runs["sharded"][1]
    shutil.copytree(folder / "checkpoints" / "step-000004", place := tmp_path / "step-000004")
    saved = Checkpoint(place)
    policy = torch.nn.ModuleDict({"policy": AutoModelForCausalLM.from_pretrained(folder / "final")})
    saved.load_model(policy)
    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStorageReader, "read_data", fails)
        with pytest.raises(InputError, match=r"step-000004: cannot be read: .*Input/output error"):
            saved.load_model(policy)
    part = min(place.glob("shard-*.safetensors"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"^.*step-000004: cannot be read: .*checkpoint before"):
        saved.load_model(policy)
    part.unlink()
    with pytest.raises(InputError, match=f"step-000004: {part.name} is missing"):
        saved.state()


@NEEDS_SHARDS
@pytest.mark.parametrize("counts", [(1, 2), (2, 3, 1)])
def test_a_run_goes_on_with_or_without_shards(
    rlhf_kl: Make, together: Make, tiny_settings: dict[str, Any], tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """Some updates in some processes, some in others: the run of one process."""
    sizes = {"rollout": {"batch_size": 12}, "ppo": {"total_episodes": 72, "minibatch_size": 12, "microbatch_size": 4}}
    settings = tiny_settings | {name: tiny_settings[name] | more for name, more in sizes.items()}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    words = ["train", "--config", tmp_path / "tiny.yaml", "--quiet", "--output-dir"]
    assert rlhf_kl(*words, tmp_path / "one").code == 0
    shards = [word for setting in SHARDS for word in ("--set", setting)]
    each = 6 // len(counts)
    for part, count in enumerate(counts, 1):
        more = ["--set", f"ppo.total_episodes={12 * each * part}", *(["--resume"] if part > 1 else [])]
        result = together([[*words, tmp_path / "run", *more, *(shards if count > 1 else [])]], count)
        assert result.codes == [[0]] * count, result.output
    whole, parts = updates(tmp_path / "one"), updates(tmp_path / "run")
    assert [row["dist/world_size"] for row in parts] == [count for count in counts for _ in range(each)]
    for a, b in zip(whole, parts, strict=True):
        for key in ("kl/token", "kl/coef", "objective/scores", "policy/loss", "value/loss", "eval/perplexity"):
            assert_close(a.get(key), b.get(key), f"update {a['step']}, {key}")


@NEEDS_SHARDS
def test_weights_in_16_bits(rlhf_kl: Make, together: Make, tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    """Sharded layers are gathered in them; the policy begins as its reference, and learns as in one process.

    In float16 the scale of the loss moves alike in all processes.
    """
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", tmp_path / "tiny.yaml", "--quiet", "--set", "run.dtype=DTYPE", "--output-dir"]
    shards = [word for each in SHARDS for word in ("--set", each)]
    runs = {"bfloat16": ("bfloat16", shards), "float16": ("float16", []), "float16-sharded": ("float16", shards)}
    written = {name: [str(word).replace("DTYPE", dtype) for word in words] for name, (dtype, _) in runs.items()}
    for name in ("bfloat16", "float16"):
        assert rlhf_kl(*written[name], tmp_path / f"{name}-1").code == 0
    result = together([[*written[name], tmp_path / f"{name}-2", *more] for name, (_, more) in runs.items()])
    assert result.codes == [[0] * 3] * 2, result.output
    for name, (dtype, more) in runs.items():
        one, two = updates(tmp_path / f"{dtype}-1"), updates(tmp_path / f"{name}-2")
        assert two[0]["kl/token"] < 1e-6
        assert (two[0]["dist/held"] < 0.6) == bool(more)
        for a, b in zip(one, two, strict=True):
            for key in ("kl/token", "objective/scores", "policy/loss", "policy/grad_norm"):
                assert b[key] == pytest.approx(a[key], rel=0.02, abs=2e-4), (name, a["step"], key)
            for key in ("policy/loss_scale", "policy/overflows"):
                assert a.get(key) == b.get(key), (name, a["step"], key)
    assert "policy/loss_scale" in two[0]


@NEEDS_SHARDS
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("settings", [[], ["policy.value=separate"], ["policy.value=head", "ppo.value_warmup=1"]])
def test_processes_that_need_more_passes_than_others(
    launch: Make,
    rlhf_kl: Make,
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    full: bool,
) -> None:
    """One pass in the first process and eight in the second, of sharded weights, which all gather together.

    Gradients are summed after the last pass of a minibatch, or after each where memory is `full`.
    """
    monkeypatch.setenv("WHOLE", str(1 << 60 if full else 0))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", str(tmp_path / "tiny.yaml"), "--quiet"]
    words += [word for setting in settings for word in ("--set", setting)]
    outcome = rlhf_kl(*words, "--output-dir", tmp_path / "one")
    assert outcome.code == 0, outcome.err
    shards = [word for setting in SHARDS for word in ("--set", setting)]
    worker = Path(__file__).with_name("uneven_command.py")
    process = launch([worker, *words, *shards, "--output-dir", tmp_path / "two"])
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    ((summed, passes),) = re.findall(r"summed after (\d+) of (\d+)", output)
    assert int(passes) == int(summed) * (1 if full else 8) > 0
    for a, b in zip(updates(tmp_path / "one"), updates(tmp_path / "two"), strict=True):
        for key in ("kl/token", "kl/coef", "policy/loss", "value/loss", "policy/grad_norm"):
            assert_close(a.get(key), b.get(key), f"update {a['step']}, {key}")


@NEEDS_SHARDS
@pytest.mark.parametrize("old", [False, True])
def test_one_model_is_whole_while_it_samples_and_else_one_layer(
    launch: Make,
    tiny_settings: dict[str, Any],
    tiny_reward_folder: Path,
    tmp_path: Path,
    new_model: Make,
    letters: Any,
    monkeypatch: pytest.MonkeyPatch,
    old: bool,
) -> None:
    """Of policy, reference and value of two layers each, and of two reward models of one; FSDP's list does not grow.

    `old`: by the private names of torch before 2.13. Where this fails, a version has other ones.
    """
    monkeypatch.setenv("OLD", str(int(old)))
    save_model(new_model(layers=2), letters, tmp_path / "policy")
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    words = ["train", "--config", str(tmp_path / "tiny.yaml"), "--quiet", "--output-dir", tmp_path / "run"]
    model = f"{{model: '{tiny_reward_folder}'}}"
    changes = [
        *SHARDS,
        f"policy.model={tmp_path / 'policy'}",
        "policy.value=separate",
        f"eval.scorers.x={model}",
        "ppo.total_episodes=48",
    ]
    changes += [f"reward={{kind: sum, terms: {{a: {model}, b: {{kind: '{tiny_settings['reward']['kind']}'}}}}}}"]
    worker = Path(__file__).with_name("gathered_command.py")
    process = launch([worker, *words, *[word for change in changes for word in ("--set", change)]])
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "of 8 layers: {'reading': 1, 'sampling': 2, 'training': 1}; 0 passes remembered" in output, output
