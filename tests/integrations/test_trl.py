"""A KL budget in TRL's own trainers (`make test-integrations`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rlhf_kl.control import FixedKL
from rlhf_kl.errors import InputError
from rlhf_kl.integrations.trl import KLBudget
from tests.made import Make, weights

pytest.importorskip("trl", reason="no TRL here: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

KINDS = ("grpo", "rloo")
SHORT = {"max_steps": 6, "per_device_train_batch_size": 16, "max_completion_length": 6, "learning_rate": 3e-3}


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_budget_is_held(kind: str, start: int, seed: int, make_trainer: Make, toy: Any) -> None:
    """From a beta ten times too low and ten times too high; judged by the exact KL."""
    trainer = make_trainer(kind, toy.STARTS[kind][start], seed=seed)
    kls = toy.record_exact_kl(trainer)
    KLBudget.attach(trainer, target=toy.TARGET)
    trainer.train()
    assert toy.tail_error(kls) < 0.08  # a constant beta of 0.04: about 5
    assert max(kls) < 1.5 * toy.TARGET


@pytest.mark.parametrize("reward", ["share", "share_times_brevity"])
def test_a_reward_that_pays_for_stopping_early_is_held(reward: str, make_trainer: Make, toy: Any) -> None:
    trainer = make_trainer("rloo", toy.STARTS["rloo"][0], reward=reward)
    kls = toy.record_exact_kl(trainer)
    KLBudget.attach(trainer, target=toy.TARGET)
    trainer.train()
    assert toy.tail_error(kls) < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_beta_0_is_watched_and_stopped_at_a_limit(
    kind: str, make_trainer: Make, toy: Any, caplog: Any, capsys: Any
) -> None:
    trainer = make_trainer(kind, 0.0, max_steps=60)
    KLBudget.attach(trainer, target=0.1, stop_at=0.2)
    exact = toy.record_exact_kl(trainer)
    trainer.train()
    watched = logged(trainer, "kl_budget/kl")
    assert sum(watched) == pytest.approx(sum(exact), rel=0.05)
    assert watched == logged(trainer, "kl_budget/nats_per_token")
    assert max(watched[:-1]) <= 0.2 < watched[-1] < 0.25
    assert len(watched) == trainer.state.global_step < 60
    assert trainer.beta == 0.0
    assert "watches the KL" in capsys.readouterr().err
    assert "above 0.1" in caplog.text
    assert "above stop_at=0.2: training ends" in caplog.text


def test_an_adapter_is_watched_by_switching_it_off(make_trainer: Make, capsys: Any) -> None:
    """Its KL is that of a run with a beta too small to matter, whose reference is TRL's own."""
    from peft import LoraConfig

    adapter = {"peft_config": LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)}
    watched = make_trainer("grpo", 0.0, **SHORT | adapter)
    budget = KLBudget.attach(watched)
    assert "adapter switched off" in capsys.readouterr().err
    assert watched.ref_model is None
    watched.train()
    own = make_trainer("grpo", 1e-12, **SHORT | adapter)
    KLBudget.attach(own, log_only=True)
    own.train()
    assert budget.controller is None
    assert logged(watched, "kl_budget/kl")[-1] > 1e-5
    assert logged(watched, "kl_budget/kl") == pytest.approx(logged(own, "kl_budget/kl"), rel=1e-3, abs=1e-8)


def test_a_reference_of_ones_own(make_trainer: Make, tmp_path: Path) -> None:
    """Another model's weights: the KL is above 0 from the first rollout. One of another shape is refused."""
    from transformers import GPT2Config, GPT2LMHeadModel

    trainer = make_trainer("grpo", 0.0, **SHORT | {"max_steps": 1})
    torch.manual_seed(5)
    KLBudget.attach(trainer, ref_model=GPT2LMHeadModel(trainer.model.config))
    trainer.train()
    assert logged(trainer, "kl_budget/kl")[0] > 1e-3
    with pytest.raises(InputError, match="ref_model does not fit"):
        KLBudget.attach(
            make_trainer("grpo", 0.0, **SHORT), ref_model=GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1))
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_beta_drifts_and_args_beta_does_nothing(kind: str, make_trainer: Make, toy: Any) -> None:
    """The canary: should TRL begin to read `args.beta`, this run would stay near the reference."""

    class SetArgs(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.beta = 10.0

    trainer = make_trainer(kind, toy.STARTS[kind][0])
    trainer.add_callback(SetArgs())
    kls = toy.record_exact_kl(trainer)
    trainer.train()
    assert toy.tail_error(kls) > 3.0


def trained(make_trainer: Make, kind: str, beta: float, options: dict[str, Any] | None = None) -> Any:
    """A short run with a budget of these options, or with none. Seeds are set when a trainer is made."""
    trainer = make_trainer(kind, beta, **SHORT)
    if options is not None:
        KLBudget.attach(trainer, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_uses_the_beta_of_the_budget(kind: str, make_trainer: Make) -> None:
    plain = trained(make_trainer, kind, 0.1)
    same = trained(make_trainer, kind, 0.1, {"controller": "fixed"})
    raised = trained(make_trainer, kind, 0.1, {"controller": "schedule", "end_coef": 5.0})
    assert torch.equal(weights(plain.model), weights(same.model))
    assert not torch.equal(weights(plain.model), weights(raised.model))
    assert raised.beta == pytest.approx(5.0)  # the schedule's end after the last of six rollouts
    assert logged(raised, "kl_budget/beta")[1:] == logged(raised, "kl_budget/beta_next")[:-1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("beta", "options"), [(0.05, {"log_only": True}), (0.0, {})])
def test_watching_changes_nothing(kind: str, beta: float, options: dict[str, Any], make_trainer: Make) -> None:
    plain, watched = trained(make_trainer, kind, beta), trained(make_trainer, kind, beta, options)
    assert torch.equal(weights(plain.model), weights(watched.model))
    if beta:
        assert set(logged(watched, "kl_budget/beta")) == {beta}
        assert set(logged(watched, "kl_budget/beta_next")) != {beta}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(kind: str, make_trainer: Make) -> None:
    settings = SHORT | {"save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(kind, 0.05, **settings)
    first = KLBudget.attach(whole)
    whole.train()
    resumed = make_trainer(kind, 0.05, **settings)
    budget = KLBudget.attach(resumed)
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-3"))
    assert resumed.beta == whole.beta != 0.05
    assert budget.controller.save() == first.controller.save()
    assert logged(resumed, "kl_budget/kl") == logged(whole, "kl_budget/kl")
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_a_checkpoint_of_another_target_is_refused(make_trainer: Make) -> None:
    settings = SHORT | {"save_strategy": "steps", "save_steps": 3, "max_steps": 3}
    first = make_trainer("rloo", 0.05, **settings)
    KLBudget.attach(first)
    first.train()
    second = make_trainer("rloo", 0.05, **settings | {"max_steps": 6})
    KLBudget.attach(second, target=0.2)
    with pytest.raises(InputError, match=r"held 0\.1 .* 0\.2"):
        second.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{"num_iterations": 2}, {"steps_per_generation": 2}, {"gradient_accumulation_steps": 2, "num_iterations": 2}],
    ids=str,
)
def test_one_update_a_rollout_from_fresh_samples(
    kind: str, settings: dict[str, int], make_trainer: Make, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k3 agrees with the exact KL only where the rollouts are the same."""
    trainer = make_trainer(kind, 0.02, **SHORT | {"max_steps": 8} | settings)
    exact = toy.record_exact_kl(trainer)
    budget = KLBudget.attach(trainer)
    updates: list[float] = []
    inner = budget.controller.law.update

    def update(kl: float, episodes: int) -> list[str]:
        updates.append(kl)
        return inner(kl, episodes)

    monkeypatch.setattr(budget.controller.law, "update", update)
    trainer.train()
    assert len(updates) == len(exact) == 4
    assert updates[0] == pytest.approx(0.0, abs=1e-6)  # the first rollout's policy is the reference
    assert updates == pytest.approx(exact, rel=0.5, abs=1e-3)


def test_a_unit_of_sequences(make_trainer: Make, toy: Any) -> None:
    trainer = make_trainer("rloo", 0.02, **SHORT)
    KLBudget.attach(trainer, unit="sequence", controller=FixedKL(coef=0.02))
    trainer.train()
    lengths = logged(trainer, "completions/mean_length")
    expected = [kl * length for kl, length in zip(logged(trainer, "kl_budget/nats_per_token"), lengths, strict=True)]
    assert logged(trainer, "kl_budget/kl") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({}, {"target": 0.2, "stop_at": 0.1}, r"stop_at .*\(0.2\).* 0\.1$"),
        ({}, {"unit": "sequenz"}, "'sequenz'.* mean sequence"),
        ({}, {"target": 0.0}, r"\btarget .* 0\.0$"),
        ({"restore_callback_states_from_checkpoint": True}, {}, "remove restore_callback_states"),
        ({}, {"controller": "adaptve"}, "'adaptve'"),
        ({}, {"controller": "dual", "gain": 1.0}, "argument 'gain'"),
        ({}, {"controller": FixedKL(coef=0.1), "gain": 1.0}, r"options \(gain\)"),
    ],
)
def test_refusals(settings: dict[str, Any], options: dict[str, Any], said: str, make_trainer: Make) -> None:
    with pytest.raises(InputError, match=said) as caught:
        KLBudget.attach(make_trainer("grpo", 0.1, **SHORT | settings), **options)
    assert len(caught.value.problems) == 1


def test_a_second_budget_is_refused(make_trainer: Make) -> None:
    trainer = make_trainer("grpo", 0.1, **SHORT)
    KLBudget.attach(trainer)
    with pytest.raises(InputError, match="has a KL budget"):
        KLBudget.attach(trainer)


def test_it_says_what_it_holds_and_doubts(make_trainer: Make, capsys: Any, caplog: Any) -> None:
    KLBudget.attach(make_trainer("grpo", 0.1, **SHORT, top_p=0.9), target=0.2)
    assert "(k3; fresh samples" in capsys.readouterr().err
    assert "sampling: top_k, top_p" in caplog.text


TWO = """
import importlib.util, json, os, sys
script, model, folder = sys.argv[1:]
spec = importlib.util.spec_from_file_location("toy", script)
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
from rlhf_kl.integrations.trl import KLBudget

figures = {}
for kind in ("grpo", "rloo"):
    trainer = toy.make_trainer(kind, model, folder + "/run", 0.05, max_steps=4, per_device_train_batch_size=16,
                               max_completion_length=6, learning_rate=3e-3)
    budget = KLBudget.attach(trainer)
    trainer.train()
    figures[kind] = {"beta": trainer.beta, "state": budget.controller.save()}
figures["world"] = trainer.accelerator.num_processes
open(f"{folder}/{os.environ['RANK']}.json", "w").write(json.dumps(figures))
"""


def test_two_processes_keep_one_beta(toy: Any, toy_model: str, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    arguments = [str(tmp_path / "two.py"), toy.__file__, toy_model, str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["world"] == 2
    assert 0.05 not in (first["grpo"]["beta"], first["rloo"]["beta"])
