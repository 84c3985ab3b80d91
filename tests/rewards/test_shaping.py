from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.rewards.shaping import ScoreShaping, repeated_share


def fit(scores: list[float], *, normalize: bool = True, **options: Any) -> ScoreShaping:
    return ScoreShaping(**options).fit(torch.tensor(scores), normalize=normalize)


def test_reference_samples_get_mean_zero_and_spread_one() -> None:
    raw = [10.0, 14.0, 18.0, 22.0]
    shaped = fit(raw)(torch.tensor(raw), {})
    assert float(shaped.mean()) == pytest.approx(0, abs=1e-6)
    assert float(shaped.std(correction=0)) == pytest.approx(1)
    assert fit([1e-5, 2e-5]).std == pytest.approx(5e-6, rel=1e-3)  # small differences are no constant


@pytest.mark.parametrize(("offset", "size"), [(0.0, 1e-30), (0.0, 1e30), (1e8, 1.0)])
def test_scores_of_any_size_have_their_scale(offset: float, size: float) -> None:
    """Those of functions, which are float64: in float32 a step at 1e8 is 8."""
    raw = torch.tensor([offset + size * x for x in (1.0, 2.0, 3.0, 6.0)], dtype=torch.float64)
    shaped = ScoreShaping().fit(raw, normalize=True)(raw, {})
    assert shaped.tolist() == pytest.approx([-2 / 3.5**0.5, -1 / 3.5**0.5, 0.0, 3 / 3.5**0.5], abs=1e-6)


def test_scores_that_differ_by_rounding_alone_have_no_scale() -> None:
    """As those of a reward model that gives every text the same, but for its padding."""
    with pytest.raises(InputError, match="about the score"):
        fit([0.7, 0.7 + 6e-8, 0.7 - 6e-8])


def test_clip_and_penalty_come_after_the_scale() -> None:
    shaping = fit([0.0, 10.0], clip=2.0, missing_eos_penalty=0.5)
    penalties = shaping.penalties([[1]] * 3, torch.tensor([True, True, False]))
    assert shaping(torch.tensor([5.0, 100.0, -100.0]), penalties).tolist() == [0.0, 2.0, -2.5]


@pytest.mark.parametrize("value", [0.0, 3.0, 1e6])
def test_equal_scores_have_no_scale(value: float) -> None:
    with pytest.raises(InputError, match="finds no scale"):
        fit([value] * 5, normalize=True)
    as_it_is = fit([value] * 5, normalize=False)
    assert as_it_is(torch.tensor([7.0]), {}).tolist() == [7.0]


def test_penalties_are_taken_off_by_name() -> None:
    shaping = fit([0.0, 10.0], missing_eos_penalty=0.5, length_penalty=0.01, repetition_penalty=2.0)
    twice, ended = [1, 2, 3, 9, 1, 2, 3, 8, 7, 6], torch.tensor([True, False])
    terms = shaping.penalties([twice, list(range(20))], ended)
    assert {name: term.tolist() for name, term in terms.items()} == {
        "missing_eos": [0.0, 0.5],
        "length": pytest.approx([0.1, 0.2]),
        "repetition": pytest.approx([0.25, 0.0]),  # one of eight runs
    }
    assert shaping(torch.tensor([5.0, 5.0]), terms).tolist() == pytest.approx([-0.35, -0.7])
    assert fit([0.0, 10.0]).penalties([[1], [2]], ended) == {}


@pytest.mark.parametrize(
    ("tokens", "repeated"),
    [([1, 2, 3, 4, 5], 0.0), ([7, 7, 7, 7, 7], 2 / 3), ([1, 2, 3, 9, 1, 2, 3], 1 / 5), ([1, 2], 0.0), ([], 0.0)],
)
def test_a_run_of_three_tokens_that_comes_again_is_repeated(tokens: list[int], repeated: float) -> None:
    assert repeated_share(tokens) == pytest.approx(repeated)


def test_the_share_that_the_clip_cuts_off() -> None:
    raw = torch.tensor([0.0, 2.0, -2.5, 7.0, 40.0])
    assert ScoreShaping(clip=5.0).clipped(raw.tolist()) == pytest.approx(0.4)
    assert ScoreShaping(mean=2.0, std=10.0, clip=3.0).clipped(raw.tolist()) == 0.0  # 40 alone, which stays the highest
    assert ScoreShaping().clipped(raw.tolist()) == 0.0


def test_a_clip_loses_what_it_makes_equal() -> None:
    """The rare 1 among zeros is cut to 5, and stays apart from them."""
    rare = torch.tensor([1.0] + [0.0] * 99)
    assert ScoreShaping(clip=5.0).fit(rare, normalize=True).clipped(rare.tolist()) == 0.0
    several = torch.tensor([3.0, 4.0, -9.0, 1.0])
    assert ScoreShaping(clip=2.0).clipped(several.tolist()) == 0.5
    assert ScoreShaping().clipped(several.tolist()) == 0.0
