"""Logits exist a bounded chunk at a time, in every pass there is, and no result depends on its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.evaluate import perplexity, policy_figures
from rlhf_kl.models import logits as module
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.logits import Logits
from rlhf_kl.models.value import ActorCritic, HeadValue, frozen_lm
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.rollout.collect import Assessor, exact_kl_now, exact_kl_of, measure, respond
from rlhf_kl.rollout.reference import ReferenceStates
from rlhf_kl.seeding import uniforms
from rlhf_kl.trainers.objectives import Targets, Tokens, ppo_losses
from rlhf_kl.trainers.tasks import TextTask
from rlhf_kl.types import PromptBatch, RolloutBatch, Sampling

Make = Callable[..., Any]
TEXTS = ("ab", "abcdab", "d", "cccc", "ba", "cd", "aaaa", "b")
SAMPLING = Sampling(6, 0.8, [2], 0)
CHUNK = 3  # rows of logits


# ---- by hand ----


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (99, [4])])
def test_chunks_come_in_order_and_are_joined(monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 5 * rows + 4)
    hidden = torch.arange(8.0).view(4, 2)
    logits = Logits(lambda x: x.sum(1, keepdim=True) + torch.arange(5), hidden, 5)
    seen = []

    def read(x: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        seen.append(len(x))
        return x[:, 0], hidden[at, 1]

    sums, seconds = logits.map(read)
    assert sums.tolist() == [1.0, 5.0, 9.0, 13.0]
    assert seconds.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert seen == sizes
    assert logits(slice(1, 3)).tolist() == [[5, 6, 7, 8, 9], [9, 10, 11, 12, 13]]


def test_a_vocabulary_wider_than_a_chunk_is_read_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 4)
    (sizes,) = Logits(lambda x: x, torch.zeros(3, 5), 5).map(lambda x, _: (torch.full((len(x),), len(x)),))
    assert sizes.tolist() == [1, 1, 1]


def test_no_state_gives_no_result() -> None:
    (nothing,) = Logits(lambda x: x, torch.zeros(0, 5), 5).map(lambda x, _: (x.sum(1),))
    assert nothing.shape == (0,)


# ---- in every pass ----


class Meter:
    """How many rows of logits that a head has made are held at once."""

    def __init__(self, *heads: torch.nn.Module) -> None:
        self.held: list[tuple[StorageWeakRef, int]] = []
        self.most = 0
        for head in heads:
            head.register_forward_hook(self.note)

    def note(self, _module: Any, _args: Any, output: Tensor) -> None:
        self.held = [(storage, rows) for storage, rows in self.held if not storage.expired()]
        self.held.append((StorageWeakRef(output.untyped_storage()), output.shape[:-1].numel()))
        self.most = max(self.most, sum(rows for _, rows in self.held))


class World:
    """A policy, its reference, and a rollout of the two."""

    def __init__(self, new_model: Make, letters: Any, prompts: PromptBatch) -> None:
        self.letters, self.prompts = letters, prompts
        self.model = ActorCritic(TransformersLM(new_model(seed=3)), HeadValue(16))
        self.reference = ReferenceStates(frozen_lm(new_model(seed=2), torch.float32, torch.device("cpu")))

    @property
    def heads(self) -> list[torch.nn.Module]:
        return [lm.model.lm_head for lm in (self.model.policy, self.reference.lm)]

    def rollout(self) -> RolloutBatch:
        noise = uniforms(len(TEXTS), 6, 0, "x")
        scorers = Scorers(Scorer("reward", PluginReward(length)))
        assess = Assessor(self.model, self.reference, None, scorers, ScoreShaping(), 0.8)
        return assess(respond(self.model.policy, self.prompts, noise, SAMPLING, self.letters))

    def gradient(self, loss: Tensor) -> Tensor:
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.trained if p.grad is not None])


def length(prompts: Any, responses: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def sampling(world: World) -> list[Tensor]:
    return [world.model.policy.sample(world.prompts, uniforms(len(TEXTS), 6, 0, "x"), SAMPLING).logprobs]


def scoring(world: World) -> list[Tensor]:
    rollout = world.rollout()
    return [*measure(world.model, world.reference, rollout.layout, 0.8)]


def kl_now(world: World) -> list[Tensor]:
    return [exact_kl_now(world.model.policy, world.reference, world.rollout(), 0.8)]


def kl_step(world: World) -> list[Tensor]:
    rows = world.rollout().layout.pack(range(len(TEXTS)))
    return [world.gradient(exact_kl_of(world.model.policy, world.reference, rows, 0.8).sum())]


def training(world: World) -> list[Tensor]:
    """With the exact KL in the loss."""
    rollout = world.rollout()
    noise = torch.Generator().manual_seed(0)
    advantages, returns = (torch.randn(rollout.mask.shape, generator=noise) * rollout.mask for _ in range(2))
    settings = {"kl": {"placement": "rao_blackwell", "estimator": "exact"}, "rollout": {"temperature": 0.8}}
    config = TrainConfig.model_validate(settings)
    rows = rollout.layout.pack(range(len(rollout)))

    def use(logits: Logits, hidden: Tensor) -> Any:
        values = world.model.value(rows, hidden)
        tokens = Tokens.of(rollout, Targets(advantages, torch.ones_like(advantages), returns, 0.7))
        return ppo_losses(tokens, rows, logits, values, config, world.reference.logits)

    losses = world.model.policy.states(rows, use)
    return [*(x.detach() for x in losses), world.gradient(losses.policy + losses.value)]


def fine_tuning(world: World) -> list[Tensor]:
    loss, _ = TextTask(world.model.policy, world.letters, TEXTS).loss([0, 1, 2, 3])
    return [loss.detach(), world.gradient(loss)]


def reading(world: World) -> list[Tensor]:
    return [torch.tensor(perplexity(world.model.policy, world.letters, TEXTS).nats_per_token)]


def evaluating(world: World) -> list[Tensor]:
    figures = policy_figures(
        world.model.policy, world.reference.lm, world.prompts, 0, SAMPLING, world.letters, batch_size=3
    )
    return [torch.tensor([figures.kl_token, figures.length])]


@pytest.mark.parametrize(
    "work", [sampling, scoring, kl_now, kl_step, training, fine_tuning, reading, evaluating], ids=lambda f: f.__name__
)
def test_a_chunk_at_a_time_gives_the_same_values_and_gradients(
    new_model: Make,
    letters: Any,
    prompts_of: Callable[..., PromptBatch],
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[World], list[Tensor]],
) -> None:
    results, most = [], []
    for rows in (1 << 20, CHUNK):
        monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 7 * rows)
        world = World(new_model, letters, prompts_of(*TEXTS))
        meters = [Meter(head) for head in world.heads]
        results.append(work(world))
        most.append(max(meter.most for meter in meters))
    whole, chunked = most
    assert whole > CHUNK
    assert chunked <= CHUNK
    for one, other in zip(*results, strict=True):
        assert other.isfinite().all()
        assert bool(other.any()) or not bool(one.any())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
