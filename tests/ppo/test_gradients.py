"""The gradient that the trainer really takes, against the objective's own, by listing every response.

A real GPT-2 over seven letters and responses of at most three tokens: each loss is weighted with the
probability of its response, so that the sum is the expected gradient of an update's first step.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl.ppo.objectives import ppo_targets
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.types import Prompts, Responses, RolloutBatch, Sampled
from tests.made import Make

BETA, TEMPERATURE, EOS = 0.7, 0.8, 2
PROMPT = [1, 3, 4]


def every_response(length: int) -> Sampled:
    """All responses of at most `length` tokens that end with the EOS or at the limit."""
    rows: list[list[int]] = [[]]
    for _ in range(length):
        rows = [
            longer for row in rows for longer in ([row] if row[-1:] == [EOS] else [[*row, token] for token in range(7)])
        ]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in rows])
    return Sampled(ids, mask, torch.tensor([row[-1] == EOS for row in rows]), torch.zeros(ids.shape))


def distributions(model: Any, sampled: Sampled) -> Tensor:
    """(rows, tokens, V) log-probs of the state before each token, from the model's plain output."""
    prompt = torch.tensor(PROMPT).expand(len(sampled.ids), -1)
    logits = model(input_ids=torch.cat([prompt, sampled.ids], 1)).logits[:, len(PROMPT) - 1 : -1]
    log_p: Tensor = (logits / TEMPERATURE).log_softmax(-1)
    return log_p


def chosen(distributions: Tensor, sampled: Sampled) -> Tensor:
    """(rows, tokens) of the tokens that were drawn, 0 in padding."""
    return torch.where(sampled.mask, distributions.gather(-1, sampled.ids.unsqueeze(-1)).squeeze(-1), 0.0)


def log_p(model: Any, sampled: Sampled) -> Tensor:
    """Of each response."""
    return chosen(distributions(model, sampled), sampled).sum(1)


class Case:
    """A trainer, all responses of its policy, and their scores."""

    def __init__(self, make_trainer: Make, new_model: Make, length: int, ppo: dict[str, Any], **kl: Any) -> None:
        self.policy, self.reference = new_model(seed=1, spread=0.25), new_model(seed=2, spread=0.25)
        self.sampler = copy.deepcopy(self.policy)  # the policy that the rollout is of
        self.sampled = every_response(length)
        rows = len(self.sampled.ids)
        self.scores = 2 * torch.randn(rows, generator=torch.Generator().manual_seed(5))
        self.trainer: PPOTrainer = make_trainer(
            policy=self.policy,
            reference=self.reference,
            reward=lambda prompts, responses: self.scores.tolist(),
            shaping=ScoreShaping(),
            rollout={"temperature": TEMPERATURE, "max_new_tokens": length},
            ppo={"lam": 1.0, "gamma": 1.0, "vf_coef": 0.0} | ppo,
            kl=kl,
        )
        prompts = Prompts(["ab"] * rows, [PROMPT] * rows, [{}] * rows, [()] * rows)
        responses = Responses(prompts, ["a"] * rows, self.sampled.rows())
        self.rollout: RolloutBatch = self.trainer.rollouts.assess(responses, self.sampled)

    def gradient(self, total: Tensor) -> Tensor:
        parameters = list(self.policy.parameters())
        grads = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in grads])

    def taken(self) -> Tensor:
        """Expected gradient of the trainer's loss."""
        p = log_p(self.sampler, self.sampled).exp().detach()
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
        targets = ppo_targets(self.rollout, BETA, self.trainer.settings)
        layout, tokens = self.rollout.layout, targets.flat(self.rollout.device)
        passes = [layout.pack([row]) for row in range(len(p))]
        losses = [self.trainer.loss(tokens.at(rows.places), rows).policy for rows in passes]
        return self.gradient((p * torch.stack(losses)).sum())

    def true(self, beta: float = BETA, scores: float = 1.0) -> Tensor:
        """Of -scores E[score] + beta KL(policy || reference)."""
        mine, other = log_p(self.policy, self.sampled), log_p(self.reference, self.sampled).detach()
        return self.gradient((mine.exp() * (beta * (mine - other) - scores * self.scores)).sum())

    def discounted(self, gamma: float) -> Tensor:
        """Of the losses of discounted returns: ratio times the return from each token on, beside beta KL(s_t).

        The return counts the score and the KL of *later* states, each discounted from that token; there is no
        gamma^t in front. Ratio and KL(s_t) are the policy's as it is now, all else is the sampler's.
        """
        mask = self.sampled.mask
        now, ref = distributions(self.policy, self.sampled), distributions(self.reference, self.sampled).detach()
        old = distributions(self.sampler, self.sampled).detach()
        later = (old.exp() * (old - ref)).sum(-1)
        returns = torch.zeros(mask.shape)
        for row, length in enumerate(mask.sum(1).tolist()):
            for t in range(length):
                costs = sum(gamma ** (k - t) * float(later[row, k]) for k in range(t + 1, length))
                returns[row, t] = gamma ** (length - 1 - t) * float(self.scores[row]) - BETA * costs
        ratio = (chosen(now, self.sampled) - chosen(old, self.sampled)).exp()
        per_token = BETA * (now.exp() * (now - ref)).sum(-1) - ratio * returns
        p = chosen(old, self.sampled).sum(1).exp()
        return self.gradient((p.unsqueeze(1) * torch.where(mask, per_token, 0.0)).sum())

    def move(self, size: float) -> None:
        """A step of the policy, so that it is no longer the one that sampled."""
        noise = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(size * torch.randn(parameter.shape, generator=noise))

    def reverse_kl(self) -> Tensor:
        """Of KL(reference || policy)."""
        mine, other = log_p(self.policy, self.sampled), log_p(self.reference, self.sampled).detach()
        return self.gradient((other.exp() * (other - mine)).sum())


def assert_parallel(found: Tensor, wanted: Tensor) -> None:
    """The same up to a positive factor: advantages are whitened, and Adam is blind to scale."""
    torch.testing.assert_close(found / found.norm(), wanted / wanted.norm(), rtol=1e-3, atol=1e-4)


UNBIASED = pytest.mark.parametrize(("placement", "estimator"), [("reward", "k1"), ("rao_blackwell", "exact")])


@pytest.mark.parametrize("whiten_rewards", [False, True])
@pytest.mark.parametrize("length", [1, 2])
@UNBIASED
def test_the_true_gradient(
    make_trainer: Make, new_model: Make, placement: str, estimator: str, length: int, whiten_rewards: bool
) -> None:
    ppo = {"whiten_rewards": whiten_rewards}
    case = Case(make_trainer, new_model, length, ppo, placement=placement, estimator=estimator)
    wanted = case.true()
    for part in (case.true(scores=0.0), case.true(beta=0.0)):
        assert float(part.norm() / wanted.norm()) > 0.2  # neither part is lost beside the other
    assert_parallel(case.taken(), wanted)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])
@UNBIASED
def test_the_true_gradient_of_discounted_returns(
    make_trainer: Make, new_model: Make, placement: str, estimator: str, gamma: float
) -> None:
    case = Case(make_trainer, new_model, 3, {"gamma": gamma}, placement=placement, estimator=estimator)
    wanted = case.discounted(gamma)
    if gamma == 1.0:
        assert_parallel(wanted, case.true())
    assert_parallel(case.taken(), wanted)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_gradient_of_discounted_returns_after_a_step(make_trainer: Make, new_model: Make, gamma: float) -> None:
    ppo = {"gamma": gamma, "cliprange": 1e3}
    case = Case(make_trainer, new_model, 3, ppo, placement="rao_blackwell", estimator="exact")
    at_the_sampler = case.discounted(gamma)
    case.move(0.1)
    wanted = case.discounted(gamma)
    assert float((wanted - at_the_sampler).norm() / wanted.norm()) > 0.2
    assert_parallel(case.taken(), wanted)


@pytest.mark.parametrize(
    ("placement", "estimator", "steps", "kl", "reverse"),
    [
        ("loss", "k2", 1, BETA, 0.0),
        ("loss", "exact", 1, BETA, 0.0),
        ("loss", "k1", 2, 0.0, 0.0),  # pulls nowhere
        ("loss", "k3", 1, 0.0, BETA),  # the other direction
        ("reward", "k3", 1, BETA, -BETA),  # the difference of both
        ("reward", "exact", 1, 0.0, 0.0),  # a baseline of its own token
    ],
)
def test_what_another_kl_pulls_to(
    make_trainer: Make, new_model: Make, placement: str, estimator: str, steps: int, kl: float, reverse: float
) -> None:
    case = Case(make_trainer, new_model, steps, {}, placement=placement, estimator=estimator)
    assert_parallel(case.taken(), case.true(beta=kl) + reverse * case.reverse_kl())


def test_a_value_of_the_state_is_a_baseline_and_moves_no_expectation(make_trainer: Make, new_model: Make) -> None:
    case = Case(make_trainer, new_model, 2, {}, placement="reward", estimator="k1")
    first = case.sampled.ids[:, :1].float()  # what the state before the second token is told by
    values = torch.cat([torch.full_like(first, 3.0), first], 1) * case.sampled.mask
    case.rollout = replace(case.rollout, values=values)
    assert_parallel(case.taken(), case.true())
