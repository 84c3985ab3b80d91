from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rlhf_kl.ops import head as module
from rlhf_kl.ops import logprobs
from rlhf_kl.ops.head import Head, in_chunks, token_kl, token_logprobs, token_stats
from rlhf_kl.ops.logprobs import chosen_logprobs, compare_distributions, exact_kl, logprobs_and_kl
from tests.made import Make


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(0)
    return 2 * torch.randn(3, 4, 7, generator=noise), 2 * torch.randn(3, 4, 7, generator=noise)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_against_the_categorical_distribution(logits: tuple[torch.Tensor, torch.Tensor], temperature: float) -> None:
    policy, reference = (Categorical(logits=x / temperature) for x in logits)
    ids = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(1))
    result = compare_distributions(*logits, ids, temperature)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(result.logprobs, policy.log_prob(ids), **close)
    torch.testing.assert_close(result.ref_logprobs, reference.log_prob(ids), **close)
    torch.testing.assert_close(result.entropy, policy.entropy(), **close)
    torch.testing.assert_close(result.exact_kl, kl_divergence(policy, reference), **close)
    p, (log_p, log_q) = policy.probs, (x.logits for x in (policy, reference))
    for variance, x in ((result.k1_variance, log_p - log_q), (result.logprob_variance, log_p)):
        torch.testing.assert_close(variance, (p * x**2).sum(-1) - (p * x).sum(-1) ** 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(exact_kl(*logits, temperature), kl_divergence(policy, reference), **close)
    torch.testing.assert_close(chosen_logprobs(logits[0], ids, temperature), policy.log_prob(ids), **close)


def test_summed_log_probs_are_the_loss_of_transformers(new_model: Make) -> None:
    model, ids = new_model(), torch.tensor([[1, 3, 4, 5, 6, 3, 3, 2], [1, 6, 5, 4, 3, 6, 6, 2]])
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids)
    mean = -chosen_logprobs(output.logits[:, :-1], ids[:, 1:]).mean()
    torch.testing.assert_close(mean, output.loss)


def test_kl_to_itself_is_zero_and_never_below(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    policy, _ = logits
    assert float(exact_kl(policy, policy).abs().max()) == 0.0
    near = policy + 1e-5 * torch.randn(policy.shape, generator=torch.Generator().manual_seed(2))
    assert (exact_kl(policy, near) >= 0).all()


@pytest.mark.parametrize("elements", [1, 7, 15, 10**6])
def test_the_size_of_a_chunk_changes_nothing(
    logits: tuple[torch.Tensor, torch.Tensor], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.zeros(3, 4, dtype=torch.long)
    whole = compare_distributions(*logits, ids)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    for a, b in zip(compare_distributions(*logits, ids), whole, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(exact_kl(*logits), whole.exact_kl)
    policy = logits[0].clone().requires_grad_()
    exact_kl(policy, logits[1]).sum().backward()
    expected = logits[0].double().requires_grad_()
    kl_divergence(Categorical(logits=expected), Categorical(logits=logits[1].double())).sum().backward()
    torch.testing.assert_close(policy.grad, expected.grad.float(), rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


def test_nothing_of_the_size_of_the_logits_is_kept_but_the_logits(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    policy, reference = logits[0].clone().requires_grad_(), logits[1]
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() >= policy.numel():
            kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        exact_kl(policy, reference)
    assert set(kept) == {x.untyped_storage().data_ptr() for x in (policy, reference)}


def test_a_forbidden_token_adds_nothing(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    """A logit of -inf in both, as models write it for tokens that must not come."""
    policy, reference = (x.clone() for x in logits)
    policy[..., 2] = reference[..., 2] = -torch.inf
    kept = [0, 1, 3, 4, 5, 6]
    smaller = kl_divergence(Categorical(logits=policy[..., kept]), Categorical(logits=reference[..., kept]))
    torch.testing.assert_close(exact_kl(policy, reference), smaller)
    result = compare_distributions(policy, reference, torch.zeros(3, 4, dtype=torch.long))
    torch.testing.assert_close(result.exact_kl, smaller)
    torch.testing.assert_close(result.entropy, Categorical(logits=policy[..., kept]).entropy())
    alone = compare_distributions(policy[..., kept], reference[..., kept], torch.zeros(3, 4, dtype=torch.long))
    torch.testing.assert_close(result.k1_variance, alone.k1_variance)
    torch.testing.assert_close(result.logprob_variance, alone.logprob_variance)


@pytest.mark.parametrize("in_reference_too", [True, False])
def test_a_forbidden_token_leaves_the_gradient_finite(
    logits: tuple[torch.Tensor, torch.Tensor], in_reference_too: bool
) -> None:
    policy, reference = (x.clone() for x in logits)
    policy[..., 2] = -torch.inf
    if in_reference_too:
        reference[..., 2] = -torch.inf
    policy.requires_grad_()
    exact_kl(policy, reference).sum().backward()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()


def test_a_token_that_the_reference_never_gives_is_infinitely_far() -> None:
    policy, reference = torch.zeros(3), torch.tensor([0.0, 0.0, -torch.inf])
    assert float(exact_kl(policy, reference)) == torch.inf


def test_bfloat16_logits_are_compared_in_float32(logits: tuple[torch.Tensor, torch.Tensor]) -> None:
    halves = [x.bfloat16() for x in logits]
    ids = torch.zeros(3, 4, dtype=torch.long)
    expected = Categorical(logits=halves[0].float()).log_prob(ids)
    result = chosen_logprobs(halves[0], ids)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(compare_distributions(*halves, ids).logprobs, expected)


def test_exact_kl_is_differentiable_in_both_arguments() -> None:
    noise = torch.Generator().manual_seed(3)
    pair = [torch.randn(2, 7, generator=noise, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def divergence(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return kl_divergence(Categorical(logits=policy), Categorical(logits=reference)).sum()

    expected = torch.autograd.grad(divergence(*pair), pair)
    result = torch.autograd.grad(exact_kl(*pair).sum(), pair)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("elements", [1, 15, 10**6])
def test_gradients_of_chosen_logprobs_are_those_of_numbers_close_by(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against finite differences in double precision of torch's own cross entropy."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    noise = torch.Generator().manual_seed(3)
    logits = (2 * torch.randn(5, 7, generator=noise)).requires_grad_()
    ids, weights = torch.randint(7, (5,), generator=noise), torch.randn(5, generator=noise)
    (weights * chosen_logprobs(logits, ids, 0.7)).sum().backward()

    def total(x: torch.Tensor) -> torch.Tensor:
        return -(weights.double() * torch.nn.functional.cross_entropy(x / 0.7, ids, reduction="none")).sum()

    step, expected = 1e-6, torch.zeros(5, 7, dtype=torch.float64)
    for row in range(5):
        for column in range(7):
            shift = torch.zeros(5, 7, dtype=torch.float64)
            shift[row, column] = step
            plain = logits.detach().double()
            expected[row, column] = (total(plain + shift) - total(plain - shift)) / (2 * step)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), expected, rtol=1e-4, atol=1e-5)


SUMS = Head(lambda x: x.sum(1, keepdim=True) + torch.arange(5), 5)


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1, 1, 1, 1]), (3, [3, 1]), (4, [4]), (99, [4])])
def test_chunks_come_in_order_and_are_joined(monkeypatch: pytest.MonkeyPatch, rows: int, sizes: list[int]) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 5 * rows + 4)
    hidden, seen = torch.arange(8.0).view(4, 2), []

    def read(hidden: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(hidden))
        return hidden.sum(1), second

    sums, seconds = in_chunks(read, SUMS, hidden, hidden[:, 1])
    assert sums.tolist() == [1.0, 5.0, 9.0, 13.0]
    assert seconds.tolist() == [1.0, 3.0, 5.0, 7.0]
    assert seen == sizes


def test_no_state_gives_no_result() -> None:
    (nothing,) = in_chunks(lambda x: (x.sum(1),), SUMS, torch.zeros(0, 2))
    assert nothing.shape == (0,)
    ids, states = torch.zeros(0, dtype=torch.long), torch.zeros(0, 2)
    assert {each.shape for each in token_stats(states, SUMS, ids, states, SUMS, 1.0)} == {(0,)}
    assert {each.shape for each in token_kl(states, SUMS, ids, states, SUMS, 1.0)} == {(0,)}


def test_chunks_are_computed_again_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no more logits are kept than those of one chunk; a single one is kept."""
    hidden, weight = torch.ones(7, 4, requires_grad=True), torch.ones(6, 4)
    calls: list[int] = []

    def logits(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x @ weight.T

    for rows, twice in ((2, True), (99, False)):
        monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 6 * rows)
        calls.clear()
        found = token_logprobs(hidden, Head(logits, 6), torch.zeros(7, dtype=torch.long))
        forward = len(calls)
        found.sum().backward()
        assert len(calls) == forward * (1 + twice)


@pytest.mark.parametrize("rows", [2, 99])
def test_figures_and_gradients_are_those_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setitem(module.LOGIT_ELEMENTS, "cpu", 6 * rows)
    torch.manual_seed(0)
    weight, ref_weight = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    hidden, ref, ids = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4), torch.randint(6, (7,))
    head, ref_head = Head(lambda x: x @ weight.T, 6), Head(lambda x: x @ ref_weight.T, 6)
    logits, ref_logits = hidden @ weight.T, ref @ ref_weight.T
    expected = logprobs_and_kl(logits, ref_logits, ids, 0.7)
    found = token_kl(hidden, head, ids, ref, ref_head, 0.7)
    alone = token_logprobs(hidden, head, ids, 0.7)
    for one, other in zip((*found, alone), (*expected, chosen_logprobs(logits, ids, 0.7)), strict=True):
        torch.testing.assert_close(one, other)
    weights = torch.linspace(-1, 1, 7)
    gradients = [
        torch.autograd.grad((weights * logprobs).sum() + kl.sum(), (hidden, weight))
        for logprobs, kl in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    stats = token_stats(hidden, head, ids, ref, ref_head, 0.7)
    for one, other in zip(stats, compare_distributions(logits, ref_logits, ids, 0.7), strict=True):
        torch.testing.assert_close(one, other)
    assert not stats.exact_kl.requires_grad
