"""What each way of paying for KL really descends, by enumerating every response.

A policy of three steps over a vocabulary of seven, one table of logits per prefix: all 343 responses are
listed, so that expectations over the policy's samples are sums and gradients come out exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_kl.ops.advantages import gae, grpo, rloo
from rlhf_kl.ops.kl import estimate_kl, kl_of_next_states, shape_rewards
from rlhf_kl.ops.logprobs import chosen_logprobs, exact_kl
from rlhf_kl.ops.losses import policy_loss
from rlhf_kl.ops.masked import whiten

VOCABULARY, BETA = 7, 0.3


class Tables:
    """Logits of every state of a policy of `steps` tokens, and all its responses."""

    def __init__(self, steps: int, seed: int) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.tables = [
            torch.randn(VOCABULARY**t, VOCABULARY, generator=noise, dtype=torch.float64) for t in range(steps)
        ]
        self.ids = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * steps).view(-1, steps)
        self.mask = torch.ones_like(self.ids, dtype=torch.bool)

    def parameters(self) -> list[Tensor]:
        return [table.requires_grad_() for table in self.tables]

    def logits(self) -> Tensor:
        """(responses, steps, V): of the state before each token."""
        prefix = torch.zeros(len(self.ids), dtype=torch.long)
        states = []
        for t, table in enumerate(self.tables):
            states.append(table[prefix])
            prefix = prefix * VOCABULARY + self.ids[:, t]
        return torch.stack(states, 1)

    def log_p(self) -> Tensor:
        """(responses,): written without the package's own functions."""
        return self.logits().log_softmax(-1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1).sum(1)


def gradient(loss: Tensor, policy: Tables) -> Tensor:
    grads = torch.autograd.grad(loss, policy.parameters(), retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


def kl_gradient(policy: Tables, reference: Tables) -> Tensor:
    """Of KL(policy || reference) between whole responses."""
    policy.parameters()
    log_p = policy.log_p()
    return gradient((log_p.exp() * (log_p - reference.log_p().detach())).sum(), policy)


def reverse_kl_gradient(policy: Tables, reference: Tables) -> Tensor:
    """Of KL(reference || policy)."""
    policy.parameters()
    log_q = reference.log_p().detach()
    return gradient((log_q.exp() * (log_q - policy.log_p())).sum(), policy)


def objective_gradient(policy: Tables, reference: Tables, scores: Tensor) -> Tensor:
    """Of -E[score] + BETA KL(policy || reference)."""
    policy.parameters()
    p = policy.log_p().exp()
    return BETA * kl_gradient(policy, reference) - gradient((p * scores).sum(), policy)


def discounted_gradient(
    policy: Tables, reference: Tables, scores: Tensor, gamma: float, sampler: Tables | None = None
) -> Tensor:
    """Of -sum over t of E[Q(s_t, a_t)] + BETA KL(s_t), by backward induction over prefixes; no gamma^t in front.

    Q counts the score and the KL of *later* states, each discounted from t. States come from `sampler` (default: the
    policy as it is) and so does what follows an action; the action and the KL are the policy's own.
    """
    policy.parameters()
    sampled = [table.detach().softmax(-1) for table in (sampler or policy).tables]

    def kl_of(tables: list[Tensor], t: int) -> Tensor:
        log_p, log_q = tables[t].log_softmax(-1), reference.tables[t].detach().log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    reach = [torch.ones(1, dtype=torch.float64)]  # probability of each prefix
    for p in sampled:
        reach.append((reach[-1].unsqueeze(1) * p).flatten())
    total, q = torch.zeros((), dtype=torch.float64), scores
    for t in reversed(range(len(sampled))):
        q = q.view(-1, VOCABULARY)
        own = policy.tables[t].softmax(-1)
        total = total + (reach[t] * (BETA * kl_of(policy.tables, t) - (own * q).sum(-1))).sum()
        before = [table.detach() for table in (sampler or policy).tables]
        q = gamma * ((sampled[t] * q).sum(-1) - BETA * kl_of(before, t))
    return gradient(total, policy)


def pieces(policy: Tables, reference: Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs under both (R, T), probability of each response (R,), exact KL of each state (R, T)."""
    policy.parameters()
    logits, ref_logits = policy.logits(), reference.logits().detach()
    logprobs, ref_logprobs = chosen_logprobs(logits, policy.ids), chosen_logprobs(ref_logits, policy.ids)
    return logprobs, ref_logprobs, policy.log_p().exp().detach(), exact_kl(logits, ref_logits)


def in_reward(
    policy: Tables,
    reference: Tables,
    pay: Callable[[Tensor, Tensor, Tensor], Tensor],
    scores: Tensor,
    gamma: float = 1.0,
) -> Tensor:
    """Expected policy gradient where each token pays `pay(logprobs, ref_logprobs, exact)` in its reward."""
    logprobs, ref_logprobs, p, exact = pieces(policy, reference)
    kl = pay(logprobs.detach(), ref_logprobs, exact.detach())
    rewards = shape_rewards(scores, kl, policy.mask, BETA)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), policy.mask, gamma, 1.0)
    surrogate, _ = policy_loss(logprobs, logprobs.detach(), advantages, 0.2)
    return gradient((p.unsqueeze(1) * surrogate).sum(), policy)


def in_loss(policy: Tables, reference: Tables, estimator: str) -> Tensor:
    """Expected gradient of the estimator as a loss on the policy's own samples."""
    logprobs, ref_logprobs, p, _ = pieces(policy, reference)
    return gradient((p.unsqueeze(1) * estimate_kl(logprobs, ref_logprobs, estimator)).sum(), policy)


@pytest.fixture(params=[1, 3], ids=["one step", "three steps"])
def steps(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture
def models(steps: int) -> tuple[Tables, Tables, Tensor]:
    policy, reference = Tables(steps, seed=1), Tables(steps, seed=2)
    noise = torch.Generator().manual_seed(3)
    return policy, reference, 3 * torch.randn(len(policy.ids), generator=noise, dtype=torch.float64)


Models = tuple[Tables, Tables, Tensor]
one_step = pytest.mark.parametrize("steps", [1], indirect=True)
three_steps = pytest.mark.parametrize("steps", [3], indirect=True)
CLOSE = {"rtol": 1e-4, "atol": 1e-7}


def test_k1_in_the_reward_is_the_kl_gradient(models: Models) -> None:
    policy, reference, scores = models
    result = in_reward(policy, reference, lambda p, q, _: estimate_kl(p, q, "k1"), torch.zeros_like(scores))
    torch.testing.assert_close(result, BETA * kl_gradient(policy, reference), **CLOSE)
    with_scores = in_reward(policy, reference, lambda p, q, _: estimate_kl(p, q, "k1"), scores)
    torch.testing.assert_close(with_scores, objective_gradient(policy, reference, scores), **CLOSE)


def test_the_gradient_of_discounted_returns_is_the_objectives_own_where_nothing_is_discounted(models: Models) -> None:
    torch.testing.assert_close(discounted_gradient(*models, 1.0), objective_gradient(*models))


discounts = pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5])


@discounts
def test_k1_in_the_reward_is_the_gradient_of_discounted_returns(models: Models, gamma: float) -> None:
    policy, reference, scores = models
    result = in_reward(policy, reference, lambda p, q, _: estimate_kl(p, q, "k1"), scores, gamma)
    torch.testing.assert_close(result, discounted_gradient(*models, gamma), **CLOSE)


def test_k1_as_a_loss_pulls_nowhere(models: Models) -> None:
    policy, reference, _ = models
    assert float(in_loss(policy, reference, "k1").abs().max()) < 1e-6


@one_step
def test_k2_as_a_loss_is_the_kl_gradient_of_one_step(models: Models) -> None:
    policy, reference, _ = models
    result = in_loss(policy, reference, "k2")
    torch.testing.assert_close(result, kl_gradient(policy, reference), **CLOSE)


@three_steps
def test_over_several_steps_a_loss_misses_what_a_token_does_to_later_states(models: Models) -> None:
    policy, reference, _ = models
    true, result = kl_gradient(policy, reference), in_loss(policy, reference, "k2")
    assert float((result - true).norm() / true.norm()) > 0.05
    last = -(VOCABULARY ** (3 - 1)) * VOCABULARY  # at the last state nothing comes later
    torch.testing.assert_close(result[last:], true[last:], **CLOSE)


@one_step
def test_k3_as_a_loss_is_the_gradient_of_the_other_direction(models: Models) -> None:
    policy, reference, _ = models
    result = in_loss(policy, reference, "k3")
    torch.testing.assert_close(result, reverse_kl_gradient(policy, reference), **CLOSE)
    assert float((result - kl_gradient(policy, reference)).abs().max()) > 1e-2


@one_step
def test_k3_in_the_reward_is_the_difference_of_both_directions(models: Models) -> None:
    policy, reference, scores = models
    result = in_reward(policy, reference, lambda p, q, _: estimate_kl(p, q, "k3"), torch.zeros_like(scores))
    difference = kl_gradient(policy, reference) - reverse_kl_gradient(policy, reference)
    torch.testing.assert_close(result, BETA * difference, **CLOSE)


@one_step
def test_exact_kl_in_the_reward_is_only_a_baseline_for_its_own_token(models: Models) -> None:
    policy, reference, scores = models
    result = in_reward(policy, reference, lambda *given: given[2], torch.zeros_like(scores))
    assert float(result.abs().max()) < 1e-6


@discounts
@pytest.mark.parametrize("moved", [False, True], ids=["at the sampler", "after a step"])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("whitened", [True, False])
def test_exact_kl_in_the_loss_and_of_later_states_in_the_reward_is_the_true_gradient(
    models: Models, whitened: bool, center: bool, moved: bool, gamma: float
) -> None:
    sampler, reference, scores = models
    policy = Tables(len(sampler.tables), seed=1)
    if moved:  # far from a ratio of 1; nothing is clipped here
        step = Tables(len(sampler.tables), seed=4)
        policy.tables = [table + 0.5 * change for table, change in zip(policy.tables, step.tables, strict=True)]
    old_logprobs, _, p, old_kl = (x.detach() for x in pieces(sampler, reference))
    kl = kl_of_next_states(old_kl, policy.mask, gamma)
    rewards = shape_rewards(scores, kl, policy.mask, BETA)
    advantages, _ = gae(rewards, torch.zeros_like(rewards), policy.mask, gamma, 1.0)
    std = torch.ones((), dtype=torch.float64)
    if whitened:
        advantages, std = whiten(advantages, policy.mask, center=center)
        assert abs(float(std) - 1) > 0.05  # else the test could not tell
    logprobs, _, _, exact = pieces(policy, reference)
    surrogate, _ = policy_loss(logprobs, old_logprobs, advantages, 1e6)
    result = gradient((p.unsqueeze(1) * (surrogate + BETA / std * exact)).sum(), policy)
    wanted = discounted_gradient(policy, reference, scores, gamma, sampler)
    torch.testing.assert_close(result * std, wanted, **CLOSE)


@pytest.mark.parametrize("steps", [2], indirect=True)
def test_the_exact_form_has_less_variance_than_k1(models: Models) -> None:
    """Variance of the gradient estimate from a single response; both are unbiased."""
    policy, reference, scores = models
    logprobs, ref_logprobs, p, exact = pieces(policy, reference)
    zeros = torch.zeros_like(logprobs)

    def variance(kl: Tensor, weight: float) -> float:
        rewards = shape_rewards(torch.zeros_like(scores), kl, policy.mask, BETA)
        advantages, _ = gae(rewards, zeros, policy.mask, 1.0, 1.0)
        total = policy_loss(logprobs, logprobs.detach(), advantages, 0.2)[0].sum(1) + weight * exact.sum(1)
        rows = torch.stack([gradient(loss, policy) for loss in total])
        mean = (p.unsqueeze(1) * rows).sum(0)
        torch.testing.assert_close(mean, BETA * kl_gradient(policy, reference), **CLOSE)
        return float((p * (rows - mean).square().sum(1)).sum())

    sampled = variance(estimate_kl(logprobs.detach(), ref_logprobs, "k1"), 0.0)
    assert variance(kl_of_next_states(exact.detach(), policy.mask, 1.0), BETA) < sampled


class Pairs:
    """Every pair of responses to one prompt, as groups of two; the symbol 0 ends a response."""

    def __init__(self, seed: int) -> None:
        self.policy, self.reference = Tables(2, seed), Tables(2, seed + 10)
        ids = self.policy.ids
        count = len(ids)
        self.mask = torch.cat([torch.ones(count, 1, dtype=torch.bool), ids[:, :1] != 0], 1)
        prefix = torch.where(
            self.mask[:, 1], ids[:, 0] * VOCABULARY + ids[:, 1], 0
        )  # what comes after an end is not read
        noise = torch.Generator().manual_seed(seed)
        self.scores = torch.randn(VOCABULARY**2, generator=noise, dtype=torch.float64)[prefix]
        self.rows = torch.cartesian_prod(torch.arange(count), torch.arange(count)).flatten()  # neighbours are a pair
        self.scored = torch.ones(len(self.rows), dtype=torch.bool)

    def true_gradient(self) -> Tensor:
        """Of -E[score] + BETA KL, of whole responses up to their end."""
        logprobs, ref_logprobs, _, _ = pieces(self.policy, self.reference)
        kl = torch.where(self.mask, logprobs - ref_logprobs, 0.0).sum(1)
        return gradient((self.policy.log_p().exp() * (BETA * kl - self.scores)).sum(), self.policy)

    def gradient(self, estimator: Callable[..., tuple[Tensor, Tensor]], placement: str, beta: float = BETA) -> Tensor:
        """The expected gradient of a batch of one group, per response."""
        logprobs, ref_logprobs, p, exact = pieces(self.policy, self.reference)
        live = exact.detach() * self.mask
        pay = {
            "reward": logprobs.detach() - ref_logprobs,
            "rao_blackwell": kl_of_next_states(live, self.mask, 1.0),
            "loss": torch.zeros_like(live),
        }[placement]
        rows = self.rows
        advantages, weights = estimator(self.scores[rows], beta * pay[rows], self.mask[rows], self.scored, 2)
        surrogate, _ = policy_loss(logprobs[rows], logprobs[rows].detach(), advantages, 0.2)
        in_loss = 0.0 if placement == "reward" else beta * exact[rows]
        losses = (weights * (surrogate + in_loss)).sum(1).view(-1, 2).mean(1)
        first, second = rows.view(-1, 2).T
        return gradient((p[first] * p[second] * losses).sum(), self.policy)

    def win_gradient(self) -> Tensor:
        """Of -P(a response scores higher than one of the policy as it is) + P(lower), over the square root of two."""
        logprobs, _, p, _ = pieces(self.policy, self.reference)
        wins = torch.sign(self.scores.unsqueeze(1) - self.scores) @ p / 2**0.5
        return -gradient((torch.where(self.mask, logprobs, 0.0).sum(1) * p * wins).sum(), self.policy)


@pytest.mark.parametrize("placement", ["reward", "rao_blackwell"])
def test_rloo_has_the_gradient_of_score_and_kl(placement: str) -> None:
    pairs = Pairs(1)
    torch.testing.assert_close(pairs.gradient(rloo, placement), pairs.true_gradient())


def test_the_kl_in_the_loss_beside_rloo_leaves_out_later_states() -> None:
    """As beside `gae`: the score's part is right, and the KL's is that of each state by itself."""
    pairs = Pairs(2)
    _, _, p, exact = pieces(pairs.policy, pairs.reference)
    states = gradient((p * torch.where(pairs.mask, exact, 0.0).sum(1)).sum(), pairs.policy)
    score = pairs.gradient(rloo, "reward", beta=0.0)
    torch.testing.assert_close(pairs.gradient(rloo, "loss"), score + BETA * states)


@pytest.mark.parametrize("placement", ["reward", "rao_blackwell"])
def test_the_mean_of_a_group_of_two_halves_the_scores_gradient_and_not_the_kls(placement: str) -> None:
    pairs = Pairs(3)
    score = pairs.gradient(rloo, placement, beta=0.0)
    found = pairs.gradient(partial(grpo, scale_by_group_std=False), placement)
    torch.testing.assert_close(found, pairs.true_gradient() - score / 2)


def test_dividing_by_the_spread_of_two_leaves_only_who_wins() -> None:
    """The known bias of GRPO: how much better a response is does not count. Two scores over their standard deviation
    are plus and minus 1 over the square root of 2."""
    pairs = Pairs(4)
    score = pairs.gradient(rloo, "reward", beta=0.0)
    kl = pairs.true_gradient() - score
    found = pairs.gradient(grpo, "reward")
    torch.testing.assert_close(found, pairs.win_gradient() + kl, rtol=1e-3, atol=1e-4)  # 1e-4 beside the spread
    assert float(torch.cosine_similarity(found - kl, score, dim=0)) < 0.99
