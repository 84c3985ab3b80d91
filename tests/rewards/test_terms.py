"""A sum whose terms have each their own scale, by numbers of hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.terms import term_figures
from tests.made import BATCH

WIDE, NARROW = [100.0, 300.0, 100.0, 300.0], [0.1, 0.1, 0.3, 0.3]  # mean 200, spread 100; mean 0.2, spread 0.1


def sum_of(**weights: float) -> Scorers:
    return Scorers(*(Scorer(f"terms.{name}", lambda _: torch.empty(0), weight) for name, weight in weights.items()))


def tensors(**scores: list[float | None]) -> dict[str, Any]:
    of = {name: [math.nan if x is None else x for x in each] for name, each in scores.items()}
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in of.items()}


def test_each_term_is_centred_and_scaled_before_its_weight() -> None:
    scorers = sum_of(wide=1.0, narrow=-2.0)
    scorers.fit(tensors(wide=WIDE, narrow=NARROW))
    found = scorers.add_up(tensors(wide=[500.0, 200.0], narrow=[0.2, 0.3]))
    assert found["terms.wide"].tolist() == [3.0, 0.0]
    assert found["terms.narrow"].tolist() == pytest.approx([0.0, -2.0])
    assert found["reward"].tolist() == pytest.approx([3.0, -2.0])
    assert found["raw.wide"].tolist() == [500.0, 200.0]


def test_what_a_term_does_not_score_counts_as_the_mean_of_the_reference() -> None:
    """Its scale is that of the responses which it scores."""
    scorers = sum_of(some=1.0, all=1.0)
    scorers.fit(tensors(some=[None, 100.0, 300.0, None], all=[1.0, 2.0, 3.0, 4.0]))
    found = scorers.add_up(tensors(some=[None, 300.0, None], all=[2.5, 2.5, None]))
    assert found["reward"][:2].tolist() == [0.0, 1.0]
    assert found["reward"].isnan().tolist() == found["terms.all"].isnan().tolist() == [False, False, True]
    assert found["terms.some"].isnan().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("terms", "key"),
    [
        ({"a": [3.0] * 4, "b": NARROW}, "reward.terms.a: "),
        ({"a": [None, 3.0, None, None], "b": NARROW}, "reward.terms.a: "),
        ({"a": [None] * 4, "b": NARROW}, "reward.terms.a: "),
        ({"a": [0.1, 0.4, 0.2, 0.9], "b": [1.9, 1.6, 1.8, 1.1]}, "reward: "),  # b = 2 - a
    ],
)
def test_terms_without_a_scale_are_told_by_their_key(terms: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError) as caught:
        sum_of(a=1.0, b=1.0).fit(tensors(**terms))
    assert str(caught.value).startswith(key)


def test_a_term_of_weight_0_needs_no_scale_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def fails(prompts: list[str], responses: list[str]) -> list[float]:
        raise ValueError

    watched = Scorer("terms.watched", PluginReward(fails), 0.0)
    scorers = Scorers(Scorer("terms.a", PluginReward(lambda p, r: [1.0, 2.0, 3.0])), watched)
    values = scorers(BATCH)
    scorers.fit({"a": values["raw.a"], "watched": values["raw.watched"]})
    assert scorers(BATCH)["reward"].tolist() == pytest.approx([-(1.5**0.5), 0.0, 1.5**0.5])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["reward.terms.watched"]  # once


def test_the_shares_of_a_sum_by_hand() -> None:
    """wide + 100 narrow, uncorrelated: variances 100^2 and 10^2. With `each` they are equal."""
    scorers, raw = sum_of(wide=1.0, narrow=100.0), tensors(wide=WIDE, narrow=NARROW)
    before = term_figures(raw, scorers.add_up(raw))
    assert before["wide"]["share"] == pytest.approx(1e4 / (1e4 + 100))
    assert before["narrow"]["share"] == pytest.approx(100 / (1e4 + 100))
    assert before["wide"] | {"share": 0} == {
        "mean": 200.0,
        "std": 100.0,
        "scored": 1.0,
        "share": 0,
        "correlation": {"narrow": pytest.approx(0.0)},
    }
    scorers = sum_of(wide=1.0, narrow=1.0)
    scorers.fit(raw)
    assert [found["share"] for found in term_figures(raw, scorers.add_up(raw)).values()] == pytest.approx([0.5, 0.5])
    again = sum_of(wide=1.0, narrow=1.0)
    again.scale(term_figures(raw, scorers.add_up(raw)))  # as a resumed run
    assert torch.equal(again.add_up(raw)["reward"], scorers.add_up(raw)["reward"])


def test_terms_that_work_against_each_other_and_some_that_score_little() -> None:
    """a and b = -a / 2, whose sum is a / 2; c scores two responses, and a constant has no correlation."""
    raw = tensors(a=WIDE, b=[-x / 2 for x in WIDE], c=[None, 300.0, None, 100.0], d=[7.0] * 4)
    found = term_figures(raw, sum_of(a=1.0, b=1.0, c=0.0, d=1.0).add_up(raw))
    assert [found[name]["share"] for name in "abcd"] == pytest.approx([2.0, -1.0, 0.0, 0.0])
    assert (found["c"]["scored"], found["c"]["mean"], found["d"]["std"]) == (0.5, 200.0, 0.0)
    assert found["a"]["correlation"] == {"b": pytest.approx(-1.0), "c": None, "d": None}
    assert term_figures({"d": raw["d"]}, sum_of(d=1.0).add_up({"d": raw["d"]}))["d"]["share"] is None


def test_a_sum_without_a_scale_is_what_it_was() -> None:
    found = sum_of(a=0.3, b=1.0).add_up(tensors(a=[0.1], b=[0.7]))
    assert found["reward"].tolist() == [0.3 * 0.1 + 0.7]
    assert Scorers(Scorer("reward", lambda _: torch.empty(0))).add_up({}) == {}
