from __future__ import annotations

import math
import random
import re
from collections import Counter
from statistics import pstdev
from typing import Any

import pytest
import torch

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import LM
from rlhf_kl.ppo.reference import (
    ReferenceSamples,
    ReferenceScores,
    reference_responses,
    sample_prompts,
    sample_rounds,
    score_samples,
)
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.training.start import starting_coef
from rlhf_kl.types import Prompts, Responses, Sampled, Sampling
from tests.made import Make

PROMPTS = ["a", "bc", "dddd", "ab", "cd"]


@pytest.fixture(scope="module")
def gaussian() -> ReferenceScores:
    """Scores of spread 1 within prompts, whose means differ by much more."""
    rng = random.Random(0)
    groups = [i // 32 for i in range(4096)]
    return ReferenceScores([10.0 * (g % 3) + rng.gauss(0, 1) for g in groups], groups, 30.0)


def test_the_tilt_follows_the_gaussian_law_where_kl_is_small(gaussian: ReferenceScores) -> None:
    curve = [point for point in gaussian.summary()["tilt"] if 0.01 < point["kl"] < 1.0]
    assert len(curve) > 5
    for point in curve:
        assert point["kl"] == pytest.approx(1 / (2 * point["coef"] ** 2), rel=0.15)
        assert point["gain"] == pytest.approx(math.sqrt(2 * point["kl"]), rel=0.1)


def test_constant_scores_buy_nothing() -> None:
    result = ReferenceScores([1.0] * 64, [0] * 64, 5.0).summary()
    assert result["tilt"] == []
    assert result["best_of_n"][-1]["gain"] == 0.0


@pytest.mark.parametrize("samples", [2, 31, 33, 100, 320, 1024])
@pytest.mark.parametrize("prompts", [1, 2, 31, 32, 33, 5000])
def test_there_are_as_many_samples_as_were_asked_for(prompts: int, samples: int) -> None:
    groups = sample_prompts(prompts, samples, seed=0)
    assert len(groups) == samples
    assert set(groups) <= set(range(prompts))
    sizes = Counter(groups).values()
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(prompts, max(samples // 8, min(60, samples // 2)))
    others = sample_prompts(prompts, samples, seed=0, number=1)
    assert set(groups).isdisjoint(others) == (prompts >= 2 * len(sizes))


def test_responses_are_drawn_and_scored_a_rollouts_batch_at_a_time(
    new_model: Make, letters: Any, prompts_of: Make
) -> None:
    lm, groups, table = LM(new_model(seed=3)), [2, 2, 2, 0, 0, 0, 4], prompts_of(*PROMPTS)
    sizes: list[int] = []

    def count(prompts: list[str], responses: list[str]) -> list[float]:
        sizes.append(len(responses))
        return [float(len(prompt)) for prompt in prompts]

    def drawn() -> Any:
        stream = PromptStream(table, 3, 0)
        return reference_responses(lm, stream, groups, Sampling(5, 1.0, [2], 0), letters, seed=0)

    scorers = Scorers(Scorer("reward", PluginReward(count)), Scorer("scorers.never", PluginReward(count)))
    samples = score_samples(drawn(), groups, scorers, ScoreShaping())
    assert sizes == [3, 3, 1]
    assert samples.scores.tolist() == [4.0] * 3 + [1.0] * 3 + [2.0]
    texts = [text for responses, _ in drawn() for text in responses.texts]
    assert samples.lengths.tolist() == [len(row) for responses, _ in drawn() for row in responses.ids]
    whole = PromptStream(table, 7, 0)
    [(once, _)] = reference_responses(lm, whole, groups, Sampling(5, 1.0, [2], 0), letters, seed=0)
    assert once.texts == texts  # noise belongs to a response, not to its place in a batch
    assert len(set(texts[:3])) > 1


def samples_of(scores: list[float], shaping: ScoreShaping) -> ReferenceSamples:
    rows = len(scores)
    penalties = shaping.penalties([[1] * 4] * rows, torch.tensor([True] * (rows - 1) + [False]))
    return ReferenceSamples(torch.tensor(scores), torch.full((rows,), 4), penalties, [0] * rows)


def test_the_scale_is_fitted_to_the_samples_and_penalties_come_off() -> None:
    shaping = ScoreShaping(missing_eos_penalty=0.5)
    scores, fitted = samples_of([1.0, 3.0, 5.0, 7.0], shaping).shaped(shaping, normalize=True)
    assert (scores.mean, scores.length) == (pytest.approx(-0.5 / 4), 4.0)
    assert scores.shaped[3] + 0.5 == pytest.approx(-scores.shaped[0])
    assert (fitted.mean, fitted.std) == (4.0, pytest.approx(math.sqrt(5)))


def test_scores_that_all_lie_at_the_clip_teach_nothing() -> None:
    samples = samples_of([11.0, 12.0, 13.0], ScoreShaping())
    with pytest.raises(InputError, match="clipped at 10, all 3 "):
        samples.shaped(ScoreShaping(clip=10.0), normalize=False)


def test_the_first_beta_comes_from_the_samples(gaussian: ReferenceScores) -> None:
    sure, guess = gaussian.solve(0.5), gaussian.solve(7.0)
    assert sure.coef == pytest.approx(1.0, rel=0.1)  # sigma^2 / (2 beta^2) = 0.5
    assert (sure.note, sure.known) == ("", 1.0)
    for advantage, factor in (("rloo", 1.0), ("grpo", 3 / 4)):  # a mean of four that holds each score itself
        ppo, rollout = {"advantage": advantage, "scale_by_group_std": False}, {"samples_per_prompt": 4}
        config = TrainConfig.model_validate({"ppo": ppo, "rollout": rollout, "kl": {"target": 0.5 / 30}})
        assert starting_coef(config, gaussian).coef == pytest.approx(factor * sure.coef)
    assert re.fullmatch(r"starting beta \S+ is a guess: .* for \d\d% of the target's KL", guess.note)
    assert 0.1 < guess.known < 1.0
    unknown = ReferenceScores([1.0] * 64, [0] * 64, 5.0).solve(0.5)
    assert (unknown.coef, unknown.known) == (0.1, 0.0)
    assert "equal scores" in unknown.note
    # One of 64 has the top score: no tilt has more than log(64) = 4.2 nats; one of four has log 4.
    topped = ReferenceScores([float(i) for i in range(64)], list(range(64)), 5.0)
    assert "this reward may need only 46% of your KL target, by 64" in topped.solve(9.0).note
    assert (topped.solve(9.0).known, topped.solve(5.0).note) == (0.0, "")  # 83 % asks for nothing
    fours = ReferenceScores([float(i % 4 == 0) for i in range(64)], [i // 4 for i in range(64)], 5.0).solve(6.0)
    assert fours.note == "the 64 reference samples tell nothing above 23% of your KL target"
    assert fours.known == pytest.approx(math.log(4) / 6)


def test_the_error_of_the_mean_is_that_of_its_prompts() -> None:
    """Means of prompts vary by 1, responses to one prompt by a tenth: 400 prompts count, and not 12800 responses."""
    rng = random.Random(0)
    groups = [i // 32 for i in range(12800)]
    levels = [rng.gauss(0, 1) for _ in range(400)]
    scores = [levels[group] + rng.gauss(0, 0.1) for group in groups]
    assert ReferenceScores(scores, groups, 30.0).mean_stderr == pytest.approx(1 / 20, rel=0.1)
    assert ReferenceScores(scores, list(range(12800)), 30.0).mean_stderr == pytest.approx(1 / math.sqrt(12800), rel=0.1)
    assert ReferenceScores([0.0, 2.0, 4.0, 6.0], [7] * 4, 30.0).mean_stderr == pytest.approx(math.sqrt(20 / 3) / 2)


def test_a_reference_sample_keeps_its_prompt_where_another_has_no_score() -> None:
    ids, mask = torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 2, dtype=torch.bool)
    sampled = Sampled(ids, mask, mask[:, 0], torch.zeros(3, 2))
    prompts = Prompts(["a", "b", "c"], sampled.rows(), [{}] * 3, [()] * 3)
    responses = Responses(prompts, ["x", "y", "z"], sampled.rows())

    def scorers(*_: Any) -> Any:
        return {"reward": torch.tensor([1.0, math.nan, 3.0])}

    drawn: Any = iter([(responses, sampled)])
    found = score_samples(drawn, [7, 8, 9], scorers, ScoreShaping(length_penalty=1.0))  # type: ignore[arg-type]
    assert found.groups == [7, 9]
    assert found.penalties["length"].tolist() == found.lengths.tolist() == [2, 2]


@pytest.mark.parametrize(("prompts", "samples", "count"), [(200, 480, 4), (1000, 1024, 4), (5, 480, 4), (200, 128, 1)])
def test_rounds_share_out_the_samples_of_each_prompt(prompts: int, samples: int, count: int) -> None:
    groups = sample_prompts(prompts, samples, seed=0)
    rounds = sample_rounds(groups)
    assert len(rounds) == count
    assert sorted(i for rows in rounds for i in rows) == list(range(samples))
    for rows in rounds:
        drawn = Counter(groups[i] for i in rows)
        assert drawn.keys() == set(groups)
        assert min(drawn.values()) >= 2


@pytest.mark.slow
def test_samples_are_enough_where_others_like_them_give_the_same_mean_and_beta() -> None:
    """Against the spread of log beta over many such draws; few values, few prompts or a large spread need more."""

    def draw(prompts: int, each: int, between: float, seed: int, values: int = 0) -> ReferenceScores:
        dice = random.Random(seed)
        groups = [prompt for prompt in range(prompts) for _ in range(each)]
        offsets = [dice.gauss(0.0, between) for _ in range(prompts)]
        scores = [offsets[prompt] + dice.gauss(0.0, 1.0) for prompt in groups]
        return ReferenceScores([float(x > 1) for x in scores] if values else scores, groups, 10.0)

    def coef(scores: ReferenceScores) -> float:
        return scores.solve(0.5)[0]

    for prompts, each, between in ((60, 8, 0.3), (60, 2, 0.3), (120, 2, 0.1), (24, 2, 0.1)):
        draws = [draw(prompts, each, between, seed) for seed in range(60)]
        error = pstdev(math.log(coef(scores)) for scores in draws)
        share = sum(scores.are_enough(coef) for scores in draws[36:]) / 24
        mean_error = pstdev(scores.mean for scores in draws) / draws[0].spread
        assert share > 0.8 if max(error, mean_error) < 0.07 else share < 0.5 if max(error, mean_error) > 0.13 else True
    assert not draw(6, 80, 0.0, 0).are_enough(coef)
    assert draw(60, 8, 0.0, 0).are_enough(lambda _: 0.0)  # a run without a penalty has no beta to estimate
    assert not draw(60, 8, 0.0, 0, values=2).are_enough(coef)
