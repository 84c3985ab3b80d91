from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rlhf_kl.errors import MemoryFull
from rlhf_kl.rollout.collect import non_finite_figure
from rlhf_kl.trainers.guards import Microbatch, all_finite
from rlhf_kl.types import RolloutBatch


def device_of(rows: int, calls: list[int]) -> Callable[[int], str]:
    """A pass that fits into memory with at most `rows` rows."""

    def attempt(size: int) -> str:
        calls.append(size)
        if size > rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    return attempt


def test_a_microbatch_is_halved_until_it_fits_and_stays_so() -> None:
    microbatch, calls, undone = Microbatch(16), [], []
    assert microbatch.fit(device_of(5, calls), lambda: undone.append(1)) == "done"
    assert calls == [16, 8, 4]
    assert len(undone) == 2
    assert microbatch.fit(device_of(5, calls), lambda: None) == "done"
    assert calls[3:] == [4]
    assert microbatch.halved == 4


def test_a_single_row_that_does_not_fit_is_the_end() -> None:
    microbatch, calls = Microbatch(3), []
    with pytest.raises(MemoryFull, match="one row does not fit"):
        microbatch.fit(device_of(0, calls), lambda: None)
    assert calls == [3, 1]


def test_other_errors_are_not_taken_for_full_memory() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        Microbatch(8).fit(lambda _: (_ for _ in ()).throw(RuntimeError("shape")), lambda: None)


def rollout() -> RolloutBatch:
    grid, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    ids, row = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2)
    per_token = [grid] * 7
    return RolloutBatch(ids, mask, ids, mask, *per_token, {"reward": row}, row, mask[:, 0], ["a"] * 2, ["b"] * 2)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("logprobs", "log-prob of the policy"),
        ("ref_logprobs", "log-prob of the reference"),
        ("exact_kl", "KL"),
        ("values", "value"),
        ("shaped_scores", "score"),
    ],
)
def test_one_number_spoils_a_rollout(field: str, said: str, value: float) -> None:
    clean = rollout()
    assert non_finite_figure(clean) is None
    spoilt = getattr(clean, field).clone()
    spoilt[(1,) * spoilt.dim()] = value
    found = non_finite_figure(replace(clean, **{field: spoilt}))
    assert found is not None
    assert said in found
    beyond = {"reward": torch.tensor([0.0, torch.inf])}  # a clip may hide it in the shaped scores
    assert non_finite_figure(replace(clean, scores=beyond)) == "a score"


def test_all_finite() -> None:
    assert all_finite([])
    assert all_finite([torch.zeros(2), torch.ones(3, 3)])
    assert not all_finite([torch.zeros(2), torch.tensor([[1.0, torch.nan]])])
    assert not all_finite([torch.tensor(-torch.inf)])
