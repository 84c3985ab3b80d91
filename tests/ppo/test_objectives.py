"""Targets and losses against tables worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.ops.head import Head
from rlhf_kl.ppo.objectives import Loss, Tokens, ppo_targets
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.training.trainer import ppo_settings
from rlhf_kl.types import RolloutBatch
from tests.made import rollout

BETA = 0.5
MASK = torch.tensor([[True, True, False], [True, False, False]])
# Two responses, of two tokens and of one; what stands in padding must count for nothing.
ROLLOUT = rollout(
    MASK,
    logprobs=torch.tensor([[-1.0, -2.0, 9.0], [-1.0, 9.0, 9.0]]),
    ref_logprobs=torch.tensor([[-1.5, -1.0, 7.0], [-3.0, 7.0, 7.0]]),
    exact_kl=torch.tensor([[0.1, 0.3, 9.0], [0.5, 9.0, 9.0]]),
    scores={"reward": torch.tensor([50.0, 70.0])},
    shaped_scores=torch.tensor([1.0, 3.0]),
)


def targets(batch: RolloutBatch = ROLLOUT, ppo: Any = None, value: str = "features", **kl: Any) -> Tokens:
    settings = {"ppo": {"lam": 1.0, "gamma": 1.0} | (ppo or {}), "kl": kl, "policy": {"value": value}}
    return ppo_targets(batch, BETA, ppo_settings(TrainConfig.model_validate(settings)))


def assert_tokens(x: Tensor, first: float, second: float, other: float) -> None:
    torch.testing.assert_close(x, torch.tensor([[first, second, 0.0], [other, 0.0, 0.0]]), rtol=1e-4, atol=1e-5)


def test_tokens_of_an_engine_weigh_as_policy_over_sampler_at_most_2() -> None:
    """1.5 and 0.5 times as likely as they were drawn, and 5 times; padding counts for nothing."""
    ratios = torch.tensor([[1.5, 0.5, 9.0], [5.0, 9.0, 9.0]])
    batch = replace(ROLLOUT, drawn=ROLLOUT.logprobs - ratios.log())
    settings = {"ppo": {"lam": 1.0, "gamma": 1.0}, "rollout": {"engine": "vllm"}}
    found = ppo_targets(batch, BETA, ppo_settings(TrainConfig.model_validate(settings))).advantages
    own = targets(batch).advantages
    assert_tokens(found / own.where(MASK, torch.ones(())), 1.5, 0.5, 2.0)


@pytest.mark.parametrize(
    ("placement", "estimator", "returns"),
    [
        # k1 is 0.5, -1 and 2 nats: rewards -0.25, 1 + 0.5 and 3 - 1
        ("reward", "k1", (1.25, 1.5, 2.0)),
        # k2 is 0.125, 0.5 and 2
        ("reward", "k2", (0.6875, 0.75, 2.0)),
        ("reward", "importance", (0.77176, 1.18394, -4.38906)),  # exp(lr) lr
        ("reward", "exact", (0.8, 0.85, 2.75)),
        # the KL of the state that a token leads to: 0.3 for the first, none for the last ones
        ("rao_blackwell", "exact", (0.85, 1.0, 3.0)),
        ("loss", "k1", (1.0, 1.0, 3.0)),
        ("loss", "exact", (1.0, 1.0, 3.0)),
    ],
)
def test_returns_with_the_kl_in_its_place(placement: str, estimator: str, returns: tuple[float, float, float]) -> None:
    """Values are 0 and lambda is 1: a return is the sum of the rewards to come."""
    made = targets(placement=placement, estimator=estimator)
    assert_tokens(made.returns, *returns)
    assert (made.kl_weight == 0.0) == (placement == "reward")


def test_advantages_are_whitened_and_so_is_the_weight_of_the_kl_in_the_loss() -> None:
    """1, 1 and 3 have the mean 5/3 and the spread sqrt(8)/3; beta is divided by the same spread."""
    made = targets(placement="loss", estimator="k2")
    assert_tokens(made.advantages, -math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2))
    assert made.kl_weight == pytest.approx(BETA * 3 / math.sqrt(8))


@pytest.mark.parametrize("ppo", [{}, {"whiten_rewards": True}])
@pytest.mark.parametrize("score", [0.0, 3.0])
@pytest.mark.parametrize("placement", ["reward", "loss", "rao_blackwell"])
def test_equal_scores_and_no_kl_move_nothing(placement: str, score: float, ppo: dict[str, Any]) -> None:
    """A reward that nothing has found yet: whitening once made full steps of the rounding errors of the KL."""
    rounding = torch.tensor([[1e-7, 3e-8, 0.0], [-1e-7, 0.0, 0.0]])
    equal = replace(
        ROLLOUT,
        shaped_scores=torch.full((2,), score),
        ref_logprobs=ROLLOUT.logprobs + rounding,
        exact_kl=rounding.abs(),
        values=torch.where(MASK, torch.tensor([[0.01, -0.02, 0.0], [0.03, 0.0, 0.0]]), 0.0),
    )
    made = targets(equal, placement=placement, ppo=ppo)
    assert float(made.advantages.abs().max()) == 0.0
    assert made.kl_weight == 0.0
    near = replace(equal, shaped_scores=torch.tensor([score, score + 0.01]))
    assert float(targets(near, placement=placement, ppo=ppo).advantages.abs().max()) > 0.5


def test_whitened_rewards_scale_score_and_kl_alike() -> None:
    """Rewards 0, 1 and 3 have the spread sqrt(14)/3. Advantages are whitened behind it: nothing else changes."""
    plain, whitened = (targets(placement="loss", estimator="k2", ppo={"whiten_rewards": on}) for on in (False, True))
    assert_tokens(whitened.returns, *(x * 3 / math.sqrt(14) for x in (1.0, 1.0, 3.0)))
    torch.testing.assert_close(whitened.advantages, plain.advantages)
    assert whitened.kl_weight == pytest.approx(plain.kl_weight)


@pytest.mark.parametrize(
    ("value", "ppo", "returns"),
    [
        ("head", {}, (1.0, 1.0, 3.0)),
        ("head", {"gamma": 0.5}, (0.5, 1.0, 3.0)),
        # lambda 0: a return is the reward and the value of the next state
        ("head", {"lam": 0.0}, (2.0, 1.0, 3.0)),
        ("features", {"lam": 0.0}, (1.0, 1.0, 3.0)),  # its own lambda is 1
        ("features", {"critic_lam": 0.0}, (2.0, 1.0, 3.0)),
        ("head", {"critic_lam": 0.5}, (1.5, 1.0, 3.0)),
        ("head", {"critic_lam": 0.0, "gamma": 0.5}, (1.0, 1.0, 3.0)),  # half of the value of the next state
    ],
)
def test_returns_with_values(value: str, ppo: dict[str, Any], returns: tuple[float, float, float]) -> None:
    batch = replace(ROLLOUT, values=torch.tensor([[1.0, 2.0, 5.0], [1.0, 5.0, 5.0]]))
    made = targets(batch, ppo, value, placement="loss", estimator="k2")
    assert_tokens(made.returns, *returns)
    if ppo.keys() == {"critic_lam"}:
        # The policy's own lambda is 1: advantages 0, -1 and 2, of mean 1/3 and spread sqrt(14)/3.
        assert_tokens(made.advantages, *(x / math.sqrt(14) for x in (-1.0, -4.0, 5.0)))


# One token in each of two rows; the policy's two tokens are equally likely now, the reference says 1 : 3.
FIRST = {name: value[:, :1] for name, value in vars(ROLLOUT).items() if isinstance(value, Tensor) and value.dim() == 2}
QUARTER = torch.full((2, 1), math.log(0.25))
PAIR = replace(ROLLOUT, **FIRST | {"logprobs": QUARTER, "ref_logprobs": QUARTER, "values": torch.zeros(2, 1)})
HALVES = torch.zeros(2, 2)
QUARTERS = torch.tensor([0.25, 0.75]).log()


def losses(
    advantages: list[float], values: Tensor | None = None, weight: float = 0.0, logits: Tensor = HALVES, **config: Any
) -> Loss:
    old = (PAIR.response_ids, PAIR.logprobs, PAIR.ref_logprobs, PAIR.values)
    own = (torch.tensor(advantages).unsqueeze(1), torch.full((2, 1), 2.0), torch.ones(2, 1))
    return loss_of_pass(Tokens(weight, *old, *own).flat(PAIR.device), logits, QUARTERS.expand(2, 2), values, **config)


def loss_of_pass(x: Tokens, logits: Tensor, ref_logits: Tensor, values: Tensor | None = None, **config: Any) -> Loss:
    """That of the trainer, for a policy and a reference with these logits (N, V)."""
    identity = Head(lambda hidden: hidden, 2)

    class Policy:
        head = staticmethod(lambda: identity)

        def __call__(self, rows: Any) -> Tensor:
            return logits

    model = SimpleNamespace(policy=Policy(), value=None if values is None else lambda *_: values)
    reference = SimpleNamespace(at=lambda numbers: ref_logits, head=lambda: identity)
    settings = ppo_settings(TrainConfig.model_validate(config))
    trainer = SimpleNamespace(model=model, reference=reference, settings=settings)
    return PPOTrainer.loss(trainer, x, SimpleNamespace(numbers=None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("advantages", "policy", "clipped"),
    [
        ([1.0, 0.0], -1.2, 1.0),  # twice as likely as when it was drawn: cut off at 1 + 0.2
        ([-1.0, 0.0], 2.0, 0.0),
        ([0.5, -2.0], -0.6 + 4.0, 1.0),
    ],
)
def test_the_clipped_surrogate(advantages: list[float], policy: float, clipped: float) -> None:
    made = losses(advantages)
    assert float(made.policy) == pytest.approx(policy, rel=1e-5)
    assert float(made.clipped) == clipped
    assert float(made.value) == 0.0
    assert float(made.approx_kl) == pytest.approx(2 * (2 - 1 - math.log(2)), rel=1e-5)
    assert float(made.max_logratio) == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "nats"),
    [
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", math.log(2) - 0.5),
        ("importance", 2 * math.log(2)),
        ("exact", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
    ],
)
def test_the_kl_in_the_loss_has_its_weight(estimator: str, nats: float) -> None:
    kl = {"placement": "loss", "estimator": estimator}
    assert float(losses([0.0, 0.0], weight=3.0, kl=kl).policy) == pytest.approx(3.0 * 2 * nats, rel=1e-5)
    assert float(losses([0.0, 0.0], weight=0.0, kl=kl).policy) == 0.0


def test_the_temperature_is_that_of_the_rollout() -> None:
    """Logits 0 and log 9 are 1 : 3 at temperature 2, as they were when the token was drawn."""
    logits = torch.tensor([[0.0, math.log(9)]]).expand(2, 2)
    made = losses([1.0, 1.0], logits=logits, rollout={"temperature": 2.0})
    assert float(made.policy) == pytest.approx(-2.0, rel=1e-5)
    assert float(made.max_logratio) == pytest.approx(0.0, abs=1e-6)


def test_the_value_loss_is_clipped_around_the_rollouts_values() -> None:
    """Returns are 2, values were 0 and move by 0.2 at most: 1 and 2 both count as 0.2."""
    made = losses([0.0, 0.0], values=torch.tensor([1.0, 2.0]))
    assert float(made.value) == pytest.approx(0.5 * (1.8**2 + 1.8**2), rel=1e-5)


def test_a_token_without_weight_has_no_kl_in_the_loss() -> None:
    zeros = torch.zeros(2)
    ref = torch.tensor([math.log(0.25)] * 2)
    old = torch.tensor([math.log(0.5)] * 2)
    weights = torch.tensor([1.0, 0.0])
    tokens = Tokens(3.0, torch.zeros(2, dtype=torch.long), old, ref, zeros, zeros, zeros, weights)
    made = loss_of_pass(tokens, torch.zeros(2, 2), torch.zeros(2, 2), kl={"placement": "loss", "estimator": "k2"})
    assert float(made.policy) == pytest.approx(3.0 * math.log(2) ** 2 / 2, rel=1e-5)
