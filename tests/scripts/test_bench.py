from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from rlhf_kl.config.load import load_config

PATH = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench"]


@pytest.fixture(scope="module")
def world(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return bench.random_world(
        tmp_path_factory.mktemp("world"), bench.Shape(32, 2, 50), heads=2, prompt=5, response=4, prompts=8
    )


def test_the_operations_are_those_that_torch_counts(bench: ModuleType, world: Any) -> None:
    from rlhf_kl.models.load import load_causal_lm

    model = load_causal_lm(str(world.policy))
    model.set_attn_implementation("eager")
    rows, length = 3, 4
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(rows, length, dtype=torch.long))
    attention = 2 * 2 * 2 * rows * length * length * 32  # layers x (scores and mix): what the floor leaves out
    assert counter.get_total_flops() - attention == rows * length * (world.shape.body + world.shape.head)


def test_the_operations_read_the_weights_once(bench: ModuleType, world: Any) -> None:
    from rlhf_kl.models.load import load_causal_lm

    matrices = [
        p for name, p in load_causal_lm(str(world.policy)).named_parameters() if p.dim() == 2 and "wpe" not in name
    ]
    assert world.shape.weights == sum(p.numel() for p in matrices)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_its_configs_are_valid(bench: ModuleType, world: Any, tmp_path: Path, device: str) -> None:
    config = bench.config_for(world, batch=12, length=4, updates=3, device=device, dtype="float32")
    (tmp_path / "scored.py").write_text(bench.SCRIPT_REWARD)
    (tmp_path / "bench.yaml").write_text(yaml.safe_dump(config))
    loaded = load_config("train", str(tmp_path / "bench.yaml"), [])
    assert loaded.kl.ceiling is None
    assert loaded.updates == 3


def test_a_run_is_summed_up(bench: ModuleType, world: Any, tmp_path: Path) -> None:
    config = bench.config_for(
        world, batch=4, length=4, updates=4, device="cpu", dtype="float32", rollout={"reference_samples": 8}
    )
    run = bench.measured(config, tmp_path, world)
    assert 3.0 < run.length <= 4.0  # it ends a text once in fifty tokens
    assert run.samples_per_s == pytest.approx(4 / run.step_s)
    assert 0 < run.rollout_s + run.score_s + run.update_s <= 1.5 * run.step_s
    assert run.peak_memory_mb > 100


@pytest.mark.parametrize(("arguments", "said"), [(["phasess"], "no such part"), (["peer"], "needs --peer-python")])
def test_bad_arguments(arguments: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, str(PATH), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.usefixtures("uncompiled")  # whose operations torch cannot count
def test_the_floor_counts_what_a_pass_over_a_rollout_computes(bench: ModuleType, world: Any) -> None:
    from rlhf_kl.models.actor_critic import read_states

    from rlhf_kl.models.load import load_causal_lm

    model = load_causal_lm(str(world.policy))
    model.set_attn_implementation("eager")
    rows, prompt, response = 3, 5, 4
    length = prompt + response - 1  # the last token is chosen but never read
    ids = torch.ones(rows, length, dtype=torch.long)
    states = torch.cat([torch.arange(prompt - 1, length) + row * length for row in range(rows)])
    with FlopCounterMode(display=False) as counter:
        read_states(model, ids, torch.ones_like(ids), states)[0].sum().backward()
    attention = 3 * 2 * 2 * 2 * rows * length * length * 32
    run = bench.Run(0, 0, 0, 0, 0, 0, response, prompt, rows, 1, 0, 0, 0)
    config = bench.config_for(world, batch=rows, length=response, updates=1, device="cpu", dtype="float32")
    found = bench.floors(run, world, config, "cpu", "float32")
    assert found["update_s"] * found["multiply_gflops"] * 1e9 == pytest.approx(counter.get_total_flops() - attention)


def test_the_floor_counts_what_prompts_share_once(bench: ModuleType, world: Any) -> None:
    from rlhf_kl.models.actor_critic import read_states
    from rlhf_kl.ops.prefixes import find_prefixes

    from rlhf_kl.models.load import load_causal_lm

    model = load_causal_lm(str(world.policy))
    rows, prompt, response = 3, 5, 4
    length = prompt + response - 1
    ids = torch.arange(2, 2 + rows * length).view(rows, length)
    ids[:, :3] = ids[0, :3]
    mask = torch.ones_like(ids, dtype=torch.bool)
    states = torch.cat([torch.arange(prompt - 1, length) + row * length for row in range(rows)])
    with FlopCounterMode(display=False) as counter:
        read_states(model, ids, mask, states, find_prefixes(ids, mask))[0].sum().backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(counted[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    run = bench.Run(0, 0, 0, 0, 0, 0, response, prompt, rows, 1, 0, 0, 0)
    config = bench.config_for(world, batch=rows, length=response, updates=1, device="cpu", dtype="float32")
    shared = dataclasses.replace(world, repeated=bench.repeated_share(ids[:, :prompt].tolist(), rows))
    found = bench.floors(run, shared, config, "cpu", "float32")
    assert found["update_s"] * found["multiply_gflops"] * 1e9 == pytest.approx(products)


def test_what_prompts_repeat_of_each_other(bench: ModuleType) -> None:
    """Of the nine tokens 1 and 1 2 come twice in the first batch; a 1 in the second stands alone."""
    rows = [[1, 2, 3], [1, 2, 4], [5, 2, 3], [1]]
    assert bench.repeated_share(rows[:3], 3) == pytest.approx(2 / 9)
    assert bench.repeated_share(rows[:2], 64) == pytest.approx(2 / 6)
    assert bench.repeated_share(rows, 2) == pytest.approx((2 / 6 + 0) / 2)


def test_a_reward_model_on_a_random_trunk(bench: ModuleType, world: Any, tmp_path: Path) -> None:
    from rlhf_kl.models.load import load_causal_lm, load_reward_model

    model = load_reward_model(str(bench.random_reward(world, tmp_path)))
    policy = load_causal_lm(str(world.policy))
    assert model.num_labels == 1
    torch.testing.assert_close(model.transformer.wte.weight, policy.transformer.wte.weight)


def test_a_policy_that_never_ends_a_text(bench: ModuleType, world: Any, tmp_path: Path) -> None:
    """Also where it goes on from its own samples; what else it says stays as it was."""
    from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model

    before = load_causal_lm(str(world.policy))
    torch.nn.init.normal_(before.transformer.ln_f.bias, generator=torch.Generator().manual_seed(0))  # as training does
    (tmp_path / "policy").mkdir()
    save_model(before, load_tokenizer(str(world.policy)), tmp_path / "policy")
    world = dataclasses.replace(world, policy=tmp_path / "policy")
    after = load_causal_lm(str(bench.endless(world, tmp_path).policy))
    ids = torch.randint(2, world.shape.vocabulary, (16, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain, changed = before(input_ids=ids).logits, after(input_ids=ids).logits
    end = 1
    assert float(changed.softmax(-1)[..., end].max()) < 1e-6
    assert float(plain.softmax(-1)[..., end].max()) > 1e-4
    kept = [i for i in range(world.shape.vocabulary) if i != end]
    torch.testing.assert_close(changed[..., kept], plain[..., kept], rtol=1e-5, atol=1e-5)


def test_a_file_that_cannot_be_written_is_told_before_measuring(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "phases", "--out", "/proc/x.json"])
    with pytest.raises(SystemExit) as caught:
        bench.arguments()
    assert caught.value.code == 2
    assert "error: --out: /proc/x.json: cannot be written: No such file" in capsys.readouterr().err
