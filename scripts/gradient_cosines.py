"""Examples: which way each KL choice pushes, against the true gradient of KL(pi || ref).

    python scripts/gradient_cosines.py [--seeds 0,1,2,3,4] [--spreads 0.2,1.0]

Models of two steps over seven symbols with independent random logits, both steps depending on all before:
every response is enumerated, so the gradients are expectations and have no noise. A cosine of 1 is the
direction of the true gradient, `zero` a gradient that vanishes. The cosines differ from model to model;
k1 in the reward, rao_blackwell (both 1) and k1 in the loss (zero) do not. k2 and exact in the loss leave out
that a symbol changes the KL of later states: for a single step they would be 1 too.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from rlhf_kl.ops.advantages import gae
from rlhf_kl.ops.kl import ESTIMATORS
from rlhf_kl.ops.logprobs import chosen_logprobs, exact_kl
from rlhf_kl.ops.reward_shaping import kl_of_next_states, shape_rewards

SYMBOLS = 7
FIRST, SECOND = (grid.reshape(-1) for grid in torch.meshgrid(*[torch.arange(SYMBOLS)] * 2, indexing="ij"))
RESPONSES = torch.stack([FIRST, SECOND], 1)  # (49, 2)
MASK = torch.ones_like(RESPONSES, dtype=torch.bool)
VANISHED = 1e-5  # of the true gradient's length: float32 inside the ops

CHOICES = [
    *(("reward", name) for name in (*ESTIMATORS, "exact")),
    *(("loss", name) for name in (*ESTIMATORS, "exact")),
    ("rao_blackwell", "exact"),
]


def logits_of(model: Tensor) -> Tensor:
    """(49, 2, 7): row 0 of `model` (8, 7) is the first step, row 1 + a the step after symbol a."""
    return torch.stack([model[torch.zeros_like(FIRST)], model[1 + FIRST]], 1)


def penalty(model: Tensor, reference: Tensor, placement: str, estimator: str) -> Tensor:
    """A scalar whose gradient in `model` is the expected gradient of the KL term of PPO's first step."""
    logits, ref_logits = logits_of(model), logits_of(reference)
    logprobs, ref_logprobs = (chosen_logprobs(x, RESPONSES) for x in (logits, ref_logits))
    exact = exact_kl(logits, ref_logits)
    per_token = exact if estimator == "exact" else ESTIMATORS[estimator](logprobs, ref_logprobs)
    total = torch.zeros_like(logprobs)
    if placement in ("loss", "rao_blackwell"):
        total = total + per_token
    if placement in ("reward", "rao_blackwell"):
        paid = per_token.detach()
        if placement == "rao_blackwell":
            paid = kl_of_next_states(paid, MASK, 1.0)
        rewards = shape_rewards(torch.zeros(len(paid)), paid, MASK, 1.0)
        advantages, _ = gae(rewards, torch.zeros_like(rewards), MASK, gamma=1.0, lam=1.0)
        total = total - advantages * logprobs
    probability = logprobs.detach().sum(1).exp()  # of each response, sampled from the policy
    return (probability * total.sum(1)).sum()


def true_kl(model: Tensor, reference: Tensor) -> Tensor:
    """KL(pi || ref) over whole responses."""
    logprobs, ref_logprobs = (chosen_logprobs(logits_of(x), RESPONSES).sum(1) for x in (model, reference))
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum()


def cosine(gradient: Tensor, true: Tensor) -> float | None:
    """Of two gradients; None where the first vanishes."""
    if gradient.norm() < VANISHED * true.norm():
        return None
    return float((gradient * true).sum() / (gradient.norm() * true.norm()))


def example(seed: int, spread: float) -> tuple[float, list[float | None]]:
    """The KL of a random pair of models and the cosine of each choice."""
    random = torch.Generator().manual_seed(seed)
    reference = torch.randn(1 + SYMBOLS, SYMBOLS, generator=random)
    model = reference + spread * torch.randn(1 + SYMBOLS, SYMBOLS, generator=random)
    model.requires_grad_(True)
    kl = true_kl(model, reference)
    (true,) = torch.autograd.grad(kl, model)
    cosines = []
    for placement, estimator in CHOICES:
        (gradient,) = torch.autograd.grad(penalty(model, reference, placement, estimator), model)
        cosines.append(cosine(gradient, true))
    return float(kl.detach()), cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--spreads", default="0.2,1.0", help="how far the policy's logits lie from the reference's")
    asked = parser.parse_args()
    seeds = [int(item) for item in asked.seeds.split(",")]
    print("cosine of the expected gradient with that of KL(pi || ref), 2 steps of 7 symbols, enumerated")
    for spread in (float(item) for item in asked.spreads.split(",")):
        columns = [example(seed, spread) for seed in seeds]
        print(f"\n{f'logits {spread:g} from the reference':<30}" + "".join(f"{f'seed {s}':>9}" for s in seeds))
        print(f"{'KL, nats per response':<30}" + "".join(f"{kl:>9.3f}" for kl, _ in columns))
        for i, (placement, estimator) in enumerate(CHOICES):
            cells = (cosines[i] for _, cosines in columns)
            shown = "".join(f"{'zero':>9}" if c is None else f"{c:>9.3f}" for c in cells)
            print(f"{f'{estimator} in {placement}':<30}{shown}")


if __name__ == "__main__":
    main()
