from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.config.schema.eval import EvalSection
from rlhf_kl.training import sets
from rlhf_kl.training.evaluation import evaluate_policy
from rlhf_kl.training.resolved import resolve
from rlhf_kl.training.setup import build_setup
from rlhf_kl.training.start import prepare_training
from tests.made import move

AUTO = {"every": "auto", "responses": "auto", "max_documents": "auto"}


def test_evaluations_of_the_default_sizes_take_little_of_a_run_of_60_updates(
    tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens that the embeddings of both models read are counted, those with a backward pass three times.

    32 responses of 24 tokens in an update; texts of 2,000 tokens, as 8,000 characters of English have.
    """
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": "abcdabcdab"}) + "\n" for _ in range(300)))
    changes = {
        "ppo": {"total_episodes": 60 * 32, "epochs": 1},
        "rollout": {"batch_size": 32, "max_new_tokens": 24, "reference_samples": None},
        "eval": AUTO | {"texts": str(texts)},
    }
    merged = {name: tiny_settings.get(name, {}) | section for name, section in changes.items()}
    config = TrainConfig.model_validate(tiny_settings | merged)
    setup = build_setup(resolve(config), torch.device("cpu"))
    setup = replace(setup, sampling=replace(setup.sampling, eos_ids=[-1]))  # all responses have one length
    read = [0]

    def count(module: Any, inputs: Any, states: torch.Tensor) -> None:
        read[0] += inputs[0].numel() * (3 if states.requires_grad else 1)

    for lm in (setup.policy, setup.reference):
        lm.module.get_input_embeddings().register_forward_hook(count)

    def cost(work: Callable[[], Any]) -> int:
        before = read[0]
        work()
        return read[0] - before

    training = prepare_training(config, setup)
    held = training.heldout
    assert (config.eval.updates_between, len(held.texts), len(held.firsts)) == (10, 200, 24)
    first, later = (cost(lambda step=step: evaluate_policy(held, True, step, [])) for step in (1, 11))
    update = cost(lambda: training.trainer.update(1))
    spent = first + 6 * later
    assert 0.05 < spent / (spent + 60 * update) < 0.15


def test_what_is_written_is_what_an_evaluation_has(tiny_settings: dict[str, Any]) -> None:
    changes = {"eval": tiny_settings["eval"] | {"every": 7, "responses": 50, "max_documents": 5}}
    config = TrainConfig.model_validate(tiny_settings | changes)
    held = prepare_training(config, build_setup(resolve(config), torch.device("cpu"))).heldout
    assert (config.eval.updates_between, len(held.texts), len(held.firsts)) == (7, 5, 50)


def test_a_policy_that_did_not_begin_as_its_reference_is_measured_beside_it(tiny_settings: dict[str, Any]) -> None:
    """At the start too, where else the figures of the reference are those of the policy."""
    config = TrainConfig.model_validate(tiny_settings)
    held = prepare_training(config, build_setup(resolve(config), torch.device("cpu"))).heldout
    move(held.policy.module, seed=0)
    row, *_ = evaluate_policy(held, False, 1, [])
    assert row["eval/reference_perplexity"] != row["eval/perplexity"]
    assert min(row["eval/kl_token"], row["eval/forward_kl_token"]) > 0.0
    assert row["eval/kl_token"] != row["eval/forward_kl_token"]


def test_the_texts_of_a_run_are_drawn_up_to_so_many_characters() -> None:
    section = EvalSection(texts="x.txt")
    texts = [f"{i:03}" * 100 for i in range(100)]  # 300 characters each
    found = sets.evaluated(texts, section)
    assert len(found) == 8_000 // 300
    assert found == sorted(found) == sets.evaluated(texts, section)
    assert set(found) != set(texts[:26])  # a file may be sorted
    long = ["a" * 9000, "b" * 9000, "c" * 9000, "d" * 9000, "e" * 9000]
    assert len(sets.evaluated(long, section)) == 4
    for written in (100, None):
        assert sets.evaluated(texts, section.model_copy(update={"max_documents": written})) == texts


def test_penalties_and_the_rate_of_the_critic_are_those_of_the_config(tiny_settings: Any) -> None:
    penalties = {"missing_eos_penalty": 1.0, "length_penalty": 0.01, "repetition_penalty": 0.3}
    changes = {"reward": penalties, "ppo": {"critic_learning_rate": 5.0e-3}}
    changes = {name: tiny_settings[name] | section for name, section in changes.items()}
    config = TrainConfig.model_validate(tiny_settings | changes)
    training = prepare_training(config, build_setup(resolve(config), torch.device("cpu")))
    assert {name: getattr(training.shaping, name) for name in penalties} == penalties
    rates = [group["lr"] for group in training.trainer.optimizer.param_groups]
    assert rates == [2.0e-4, 2.0e-4, 5.0e-3]  # matrices, vectors, critic
    critic, scores = training.trainer.model.critic, training.reference_scores
    assert critic is not None
    assert (critic.mean, critic.scale) == (scores.mean, scores.spread)
