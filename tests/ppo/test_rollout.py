from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.distributed import Ranks
from rlhf_kl.models.lm import LM
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.models.tokens import decode_responses
from rlhf_kl.models.value import ActorCritic, FeatureCritic, HeadValue, frozen_lm
from rlhf_kl.ops.head import LOGIT_ELEMENTS
from rlhf_kl.ops.logprobs import TokenStats
from rlhf_kl.ops.packing import CPU
from rlhf_kl.ppo import states as reference_module
from rlhf_kl.ppo.rollout import RolloutParts, Rollouts, exact_kl_now, measure, response_layout, rows_at_once, sample
from rlhf_kl.ppo.states import ReferenceStates, StateFeatures
from rlhf_kl.rewards.model import RewardModel, TextFormat
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rewards.shaping import ScoreShaping
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Prompts, Responses, RolloutBatch, Sampled, Sampling
from tests.made import Make

TEXTS = ("ab", "abcdab", "d", "cccc", "ba", "cd", "aaaa", "b")
SAMPLING = Sampling(12, 0.8, [2], 0)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class Setup(NamedTuple):
    model: ActorCritic
    reference: ReferenceStates
    responses: Responses
    sampled: Sampled
    prompts: PromptStream
    tokenizer: Any

    def parts(self, scorers: Scorers) -> RolloutParts:
        return RolloutParts(tokenizer=self.tokenizer, scorers=scorers, prompts=self.prompts, sampling=SAMPLING)

    def measure(self) -> tuple[TokenStats, Tensor]:
        return measure(self.model, self.reference, response_layout(self.responses.prompts.ids, self.sampled, CPU), 0.8)

    def assess(self, reward: Any, shaping: ScoreShaping | None = None) -> Any:
        shaping = shaping or ScoreShaping()
        scorers = reward if isinstance(reward, Scorers) else Scorers(Scorer("reward", PluginReward(reward)))
        return Rollouts(self.parts(scorers), self.model, self.reference, shaping).assess(self.responses, self.sampled)


@pytest.fixture
def setup(new_model: Make, prompts_of: Make, letters: Any) -> Setup:
    policy, value = LM(new_model(seed=3)), HeadValue(16)
    torch.nn.init.ones_(value.head.weight)
    reference = ReferenceStates(frozen_lm(new_model(seed=2), torch.float32, torch.device("cpu")))
    responses = sample(policy, prompts_of(*TEXTS), uniforms(len(TEXTS), 12, 0, "x"), SAMPLING, letters)
    stream = PromptStream(prompts_of(*TEXTS), 6, 0)
    return Setup(ActorCritic(policy, value), reference, *responses, stream, letters)


def lengths(prompts: Any, responses: Any) -> list[float]:
    return [float(len(response)) for response in responses]


def test_against_each_row_alone(setup: Setup, own_logits: Make) -> None:
    """By one pass of either model over the bare text, in float64."""
    stats, values = setup.measure()
    prompts, sampled = setup.responses.prompts, setup.sampled
    assert not sampled.mask.all()
    assert all((tensor[~sampled.mask] == 0).all() for tensor in (*stats, values))
    for row, live in enumerate(sampled.mask):
        ids = sampled.ids[row, live]
        whole = torch.cat([torch.tensor(prompts.ids[row]), ids])
        own = [own_logits(lm.model, whole)[-len(ids) - 1 : -1] / 0.8 for lm in (setup.model.policy, setup.reference.lm)]
        policy, reference = (Categorical(logits=logits) for logits in own)
        torch.testing.assert_close(stats.logprobs[row, live].double(), policy.log_prob(ids), **CLOSE)
        torch.testing.assert_close(stats.ref_logprobs[row, live].double(), reference.log_prob(ids), **CLOSE)
        torch.testing.assert_close(stats.exact_kl[row, live].double(), kl_divergence(policy, reference), **CLOSE)
        torch.testing.assert_close(stats.entropy[row, live].double(), policy.entropy(), **CLOSE)
        with torch.no_grad():
            states = setup.model.policy.model.base_model(input_ids=whole.unsqueeze(0)).last_hidden_state[0]
        torch.testing.assert_close(values[row, live], states[-len(ids) - 1 : -1].sum(1), **CLOSE)


def test_the_size_of_a_pass_changes_nothing(setup: Setup, rows_read: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole, values), passes = setup.measure(), rows_read()
    monkeypatch.setattr(reference_module, "PASS_ROWS", 1)
    stats, again = setup.measure()
    for one, other in zip((*stats, again), (*whole, values), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert set(passes) == {1}


def test_kl_of_the_moved_policy_at_the_old_states(setup: Setup, new_model: Make) -> None:
    rollout = setup.assess(lengths)
    policy = setup.model.policy
    torch.testing.assert_close(exact_kl_now(policy, setup.reference, rollout, 0.8), rollout.exact_kl, **CLOSE)
    moved = LM(new_model(seed=4))
    now = exact_kl_now(moved, setup.reference, rollout, 0.8)
    torch.testing.assert_close(now, setup._replace(model=ActorCritic(moved)).measure()[0].exact_kl, **CLOSE)
    assert float((now - rollout.exact_kl).abs().max()) > 0.01


def test_the_rollout_is_made_of_its_parts(setup: Setup) -> None:
    (prompts, texts, *_), sampled = setup.responses, setup.sampled
    one = PluginReward(lambda p, r: [1.0] * len(r))
    reward = Scorers(Scorer("terms.x", PluginReward(lengths), 2.0), Scorer("terms.y", one), Scorer("scorers.z", one))
    rollout = setup.assess(reward, ScoreShaping(mean=1.0, std=2.0, missing_eos_penalty=0.5))
    assert torch.equal(rollout.response_ids, sampled.ids)
    assert torch.equal(rollout.mask, sampled.mask)
    for ids, mask, prompt in zip(rollout.prompt_ids, rollout.prompt_mask, prompts.ids, strict=True):
        assert ids[-len(prompt) :].tolist() == ids[mask].tolist() == prompt
    assert torch.equal(rollout.ended, sampled.ended)
    assert (rollout.prompts, rollout.responses) == (list(TEXTS), texts)
    assert rollout.scores["reward"].tolist() == [2.0 * len(text) + 1.0 for text in texts]
    assert rollout.scores["terms.x"].tolist() == [2.0 * len(text) for text in texts]
    assert {*rollout.scores} == {"reward", "terms.x", "terms.y", "raw.x", "raw.y"}  # the other one never trains
    assert 0 < int(sampled.ended.sum()) < len(TEXTS)
    missing = [0.0 if ended else 0.5 for ended in sampled.ended]
    assert rollout.penalties["missing_eos"].tolist() == missing
    assert rollout.shaped_scores.tolist() == [len(text) - less for text, less in zip(texts, missing, strict=True)]
    stats, values = setup.measure()
    for name, tensor in (stats._asdict() | {"values": values}).items():
        torch.testing.assert_close(getattr(rollout, name), tensor, rtol=1e-4, atol=1e-5)


@pytest.fixture
def sampler(setup: Setup) -> Make:
    def make(ranks: Ranks | None = None) -> Make:
        return Rollouts(setup.parts(Scorers()), setup.model, setup.reference, ScoreShaping(), ranks=ranks).sample

    return make


class Part(Ranks):
    """A process with some rows of its own."""

    def __init__(self, rows: range) -> None:
        self.rows = rows

    def mine(self, rows: Any) -> Any:
        return rows[self.rows.start : self.rows.stop]


def drawn(sampled: tuple[Responses, Sampled]) -> list[tuple[str, str]]:
    responses, _ = sampled
    return list(zip(responses.prompts.texts, responses.texts, strict=True))


def test_processes_draw_their_rows_of_the_same_batch(sampler: Make) -> None:
    whole = drawn(sampler()(2))
    assert drawn(sampler(Part(range(2)))(2)) + drawn(sampler(Part(range(2, 6)))(2)) == whole


def roll_out(setup: Setup, letters: Any, noise: str, eos: tuple[int, ...] = (2,)) -> RolloutBatch:
    sampling = Sampling(6, 0.8, list(eos), 0)
    noises = uniforms(len(TEXTS), 6, 0, noise)
    responses, sampled = sample(setup.model.policy, setup.responses.prompts, noises, sampling, letters)
    rollout: RolloutBatch = setup._replace(responses=responses, sampled=sampled).assess(lengths)
    return rollout


@pytest.mark.parametrize("elements", [1 << 25, 1])
def test_its_logits_are_those_of_its_own_pass(
    setup: Setup, letters: Any, own_logits: Make, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rollout that was read last, in any order of its tokens; stored where they fit into a chunk."""
    monkeypatch.setitem(LOGIT_ELEMENTS, "cpu", elements)
    monkeypatch.setattr("rlhf_kl.ops.head.PER_PARAMETER", 0.0)
    for noise, eos in (("x", ()), ("y", ()), ("z", (2,))):  # the first two have as many tokens
        rollout = roll_out(setup, letters, noise, eos)
        mask = torch.cat([rollout.prompt_mask, rollout.mask], 1)
        own = []
        for row, keep, length in zip(rollout.input_ids, mask, rollout.lengths.tolist(), strict=True):
            own.append(own_logits(setup.reference.lm.model, row[keep])[-length - 1 : -1])
        expected, order = torch.cat(own), torch.randperm(rollout.layout.tokens)
        result = setup.reference.head().logits(setup.reference.at(order))
        assert (setup.reference.kept is not setup.reference.hidden) == (elements > 1)
        torch.testing.assert_close(result.double(), expected[order], rtol=1e-4, atol=1e-4)
        assert not result.requires_grad


def test_a_rollout_costs_one_reading_of_its_rows(setup: Setup, letters: Any) -> None:
    rows: list[int] = []
    trunk = setup.reference.lm.model.base_model
    trunk.register_forward_pre_hook(lambda _, __, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    for noise in ("x", "y"):
        rollout = roll_out(setup, letters, noise)
        for _ in range(2):
            exact_kl_now(setup.model.policy, setup.reference, rollout, 0.8)
    assert sum(rows) == 2 * len(TEXTS)


@pytest.fixture
def reward(new_model: Make, letters: Any, monkeypatch: pytest.MonkeyPatch) -> RewardModel:
    """An untrained reward model that reads the policy's letters."""
    model = classifier_from_lm(new_model(seed=5, hidden_size=8), letters)
    initialise_head(model.score, seed=1)
    monkeypatch.setattr("rlhf_kl.rewards.model.SCORING_ROWS", 2)
    return RewardModel(model.eval(), letters)


def read_alone(model: Any, prefix: torch.Tensor) -> torch.Tensor:
    """The last state of one unpadded text in plain transformers, scaled to mean 0 and spread 1."""
    state = model.base_model(input_ids=prefix.unsqueeze(0)).last_hidden_state[0, -1]
    return (state - state.mean()) / (state.var(correction=0) + 1e-5).sqrt()


class World:
    """A policy, its reference, and a critic that reads the reference and perhaps a reward model."""

    def __init__(self, new_model: Make, prompts: Prompts, rewards: list[RewardModel]) -> None:
        self.policy, self.prompts, self.rewards = LM(new_model(seed=3)), prompts, rewards
        self.reference = ReferenceStates(frozen_lm(new_model(seed=2), torch.float32, torch.device("cpu")))
        self.critic = FeatureCritic(16 + 8 * len(rewards), mean=0.5, scale=2.0, seed=0)
        torch.nn.init.normal_(self.critic.outer.weight, generator=torch.Generator().manual_seed(0))
        self.features = StateFeatures(self.critic, rewards)

    def values(self, sampled: Sampled) -> Tensor:
        layout = response_layout(self.prompts.ids, sampled, CPU)
        self.reference.read(layout)
        return self.features.read(layout, self.reference)


SCORED: dict[str, Make] = {
    "as written": lambda prompts, responses: (prompts, responses),
    "without an end": lambda prompts, responses: (prompts, responses),
    "other texts": lambda prompts, responses: (prompts, ["d" + response for response in responses]),
    "fewer texts": lambda prompts, responses: (prompts[1:], responses[1:]),
    "more texts": lambda prompts, responses: ([*prompts, "a"], [*responses, "b"]),
}


@pytest.mark.parametrize("scored", [None, *SCORED])
def test_values_are_those_of_each_state_alone(
    new_model: Make, prompts_of: Make, reward: RewardModel, letters: Any, scored: str | None
) -> None:
    """Against one pass over each prefix, which cannot know what comes later; however the responses were scored."""
    prompts = prompts_of(*TEXTS[:5])
    world = World(new_model, prompts, [reward] if scored else [])
    sampled = world.policy.sample(prompts.ids, uniforms(5, 6, 0, "x"), Sampling(6, 0.8, [2], 0))
    sampled.ids[2] = torch.tensor([2] + [0] * (sampled.ids.shape[1] - 1))  # a response that is empty: of its text
    sampled.mask[2, 1:] = False  # without an end, the last token of the prompt is what is scored
    responses = decode_responses(letters, sampled.rows(), [2])
    assert responses[2] == ""
    if scored:
        reward.form = TextFormat(append_eos=scored != "without an end")
        reward.score(*SCORED[scored](prompts.texts, responses))
    values = world.values(sampled)
    models = [world.reference.lm.model, *(reward.model for reward in world.rewards)]
    checked = 0
    for row in range(5):
        prompt = torch.tensor(prompts.ids[row])
        for place in range(int(sampled.mask[row].sum())):
            prefix = torch.cat([prompt, sampled.ids[row, :place]])
            expected = world.critic(torch.cat([read_alone(model, prefix) for model in models]))
            torch.testing.assert_close(values[row, place], expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > 5
    assert bool((values[~sampled.mask] == 0).all())


def test_what_a_reward_model_read_is_not_read_again(
    new_model: Make, prompts_of: Make, reward: RewardModel, letters: Any
) -> None:
    prompts = prompts_of(*TEXTS[:5])
    world = World(new_model, prompts, [reward])
    ids = torch.tensor([[3, 4, 5, 6, 3, 2]]).repeat(5, 1)  # letters, then the end: tokens that texts keep
    every = torch.ones_like(ids, dtype=torch.bool)
    sampled = Sampled(ids, every, every[:, 0], torch.zeros(ids.shape))
    responses = decode_responses(letters, sampled.rows(), [2])
    reward.score(prompts.texts, responses)
    rows: list[int] = []
    reward.model.base_model.register_forward_hook(lambda _, __, output: rows.append(len(output.last_hidden_state)))
    for _ in range(2):
        world.values(sampled)
    assert not rows
    reward.score(prompts.texts, ["d", *responses[1:]])
    rows.clear()
    world.values(sampled)
    assert rows == [1], "the one that was scored in other tokens, and no other"


def test_a_rollout_reads_its_reward_model_once(
    new_model: Make, prompts_of: Make, reward: RewardModel, letters: Any
) -> None:
    """The critic's features are the states from scoring."""
    prompts, sampling = prompts_of(*TEXTS[:4]), Sampling(6, 0.8, [2], 0)
    world = World(new_model, prompts, [reward])
    parts = RolloutParts(
        tokenizer=letters,
        scorers=Scorers(Scorer("reward", reward)),
        prompts=PromptStream(prompts, 4, 0),
        sampling=sampling,
    )
    model = ActorCritic(world.policy, critic=world.critic)
    rollouts = Rollouts(parts, model, world.reference, ScoreShaping(), world.features)
    ids = torch.tensor([[3, 4, 5, 6, 3, 2]]).repeat(4, 1)
    every = torch.ones_like(ids, dtype=torch.bool)
    responses = Responses(prompts, decode_responses(letters, ids.tolist(), [2]), ids.tolist(), letters)
    read: list[int] = []
    reward.model.base_model.register_forward_hook(lambda _, __, output: read.append(len(output.last_hidden_state)))
    for _ in range(2):
        read.clear()
        rollouts.assess(responses, Sampled(ids, every, every[:, 0], torch.zeros(ids.shape)))
        assert sum(read) == 4


def test_short_responses_beside_the_rollouts_are_drawn_together(prompts_of: Make) -> None:
    """Long ones as the run's own, since a batch may be small for its memory."""
    for batch, longest, rows in ((16, 40, 64), (16, 100, 40), (8, 1500, 8), (128, 40, 128), (0, 9000, 1)):
        assert rows_at_once(batch, prompts_of("a", "abc"), Sampling(longest - 4, 1.0, [2], 0)) == rows
