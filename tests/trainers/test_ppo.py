from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_kl.kl_controllers import GuardedController
from rlhf_kl.models import prefix_sharing
from rlhf_kl.models.actor_critic import choose_way
from rlhf_kl.models.critic import FeatureCritic
from rlhf_kl.reward_functions import ScoreShaping
from rlhf_kl.trainers.ppo import PPOTrainer, Targets, Update

Make = Callable[..., Any]


def weights(module: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def plain_sgd(model: Any) -> Any:
    """A step of size 1 along the gradient: what moved is the gradient itself."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


# ---- it learns ----


def test_it_learns_to_write_one_letter(make_trainer: Make) -> None:
    trainer: PPOTrainer = make_trainer(rollout={"batch_size": 64}, ppo={"total_episodes": 20 * 64})
    rows = [trainer.update(step).row for step in range(1, 21)]
    scores = [row["objective/scores"] for row in rows]
    assert scores[0] < 2.5
    assert sum(scores[-3:]) / 3 > scores[0] + 2.0
    for row in rows:
        for key in ("policy/loss", "value/loss", "kl/token", "policy/grad_norm"):
            assert math.isfinite(row[key]), (row["step"], key)
    assert rows[0]["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["kl/token"] > 0.05


def test_a_larger_beta_keeps_it_nearer(make_trainer: Make) -> None:
    kls = []
    for coef in (0.01, 3.0):
        trainer = make_trainer(kl={"controller": {"kind": "fixed", "coef": coef}})
        trainer.controller = GuardedController(_Recorder(coef))
        kls.append([trainer.update(step).row["kl/token"] for step in range(1, 9)][-1])
    assert kls[1] < 0.5 * kls[0]


@pytest.mark.parametrize(
    ("placement", "estimator"),
    [
        *(("reward", name) for name in ("k1", "k2", "k3", "abs", "exact", "importance")),
        *(("loss", name) for name in ("k1", "k2", "k3", "abs", "exact", "importance")),
        ("rao_blackwell", "exact"),
    ],
)
def test_every_estimator_works_wherever_it_may_stand(make_trainer: Make, placement: str, estimator: str) -> None:
    trainer = make_trainer(
        kl={"placement": placement, "estimator": estimator}, ppo={"epochs": 1}, rollout={"batch_size": 16}
    )
    for step in (1, 2, 3):
        row = trainer.update(step).row
        assert math.isfinite(row["policy/loss"])
        assert not row["alerts"]
    assert row["kl/exact"] > 0


# ---- one minibatch ----


@pytest.fixture
def rolled(make_trainer: Make) -> Callable[..., tuple[PPOTrainer, Update, Targets]]:
    """A trainer, a rollout with responses of unequal length, and targets; nothing trained yet."""

    def make(**ppo: Any) -> tuple[PPOTrainer, Update, Targets]:
        trainer: PPOTrainer = make_trainer(
            optimizer=plain_sgd,
            ppo={"max_grad_norm": 1e9, "learning_rate": 1.0, "vf_coef": 1.0} | ppo,
            kl={"placement": "rao_blackwell", "estimator": "exact"},
        )
        before = copy.deepcopy(trainer.core.state_dict())
        update = trainer.update(1)
        trainer.core.load_state_dict(before)
        assert len(set(update.rollout.lengths.tolist())) > 3
        return trainer, update, trainer.targets(update.rollout, 0.5)

    return make


def step_taken(trainer: PPOTrainer, update: Update, targets: Targets, rows: Tensor) -> Tensor:
    """The gradient of a minibatch; the trainer is put back."""
    before = copy.deepcopy(trainer.core.state_dict())
    start = weights(trainer.core)
    trainer.minibatch(update.rollout, targets, rows, 1)
    moved = start - weights(trainer.core)
    trainer.core.load_state_dict(before)
    return moved


def test_the_size_of_a_microbatch_is_no_part_of_the_result(rolled: Make) -> None:
    rows = torch.arange(16)
    found = []
    for size in (16, 8, 1):
        trainer, update, targets = rolled(microbatch_size=size)
        found.append(step_taken(trainer, update, targets, rows))
    assert float(found[0].norm()) > 0.01
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


def test_passes_of_their_own_size_have_room_and_change_nothing(rolled: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(16)
    whole, narrow = [], []
    for room, passes in ((1 << 30, whole), (4 * 60 * 1000, narrow)):
        monkeypatch.setattr("rlhf_kl.models.activations.ROOM", {"cpu": room})
        monkeypatch.setattr("rlhf_kl.models.activations.kept_per_token", lambda _model: 1000)
        monkeypatch.setattr("rlhf_kl.models.activations.parameter_count", lambda _model: 0)
        trainer, update, targets = rolled(microbatch_size=None)
        passes += [trainer.training_passes(update.rollout, rows, 16), step_taken(trainer, update, targets, rows)]
    sizes, narrow_sizes = ([packed.ids.numel() for packed in passes[0]] for passes in (whole, narrow))
    assert max(narrow_sizes) <= 60 < sum(sizes)
    assert len(sizes) < len(narrow_sizes)
    torch.testing.assert_close(narrow[1], whole[1], rtol=1e-3, atol=1e-5)


def test_a_token_counts_the_same_in_every_row(rolled: Make) -> None:
    """The gradient of two rows is theirs weighted by length, and not the mean of their means."""
    trainer, update, targets = rolled(microbatch_size=1)
    lengths = update.rollout.lengths
    short, long = int(lengths.argmin()), int(lengths.argmax())
    a, b = float(lengths[short]), float(lengths[long])
    assert b >= 3 * a
    one, other, both = (
        step_taken(trainer, update, targets, torch.tensor(rows)) for rows in ([short], [long], [short, long])
    )
    torch.testing.assert_close(both, (a * one + b * other) / (a + b), rtol=1e-3, atol=1e-5)


def test_the_order_of_rows_is_no_part_of_the_result(rolled: Make) -> None:
    trainer, update, targets = rolled()
    straight = step_taken(trainer, update, targets, torch.arange(16))
    turned = step_taken(trainer, update, targets, torch.arange(16).flip(0))
    torch.testing.assert_close(turned, straight, rtol=1e-3, atol=1e-5)


def test_a_gradient_that_is_not_finite_is_left_out(rolled: Make) -> None:
    trainer, update, targets = rolled()
    before = weights(trainer.core)
    bad = replace(targets, returns=torch.full_like(targets.returns, torch.nan))
    _, finite = trainer.minibatch(update.rollout, bad, torch.arange(16), 1)
    assert not finite
    assert torch.equal(weights(trainer.core), before)
    _, finite = trainer.minibatch(update.rollout, targets, torch.arange(16), 1)
    assert finite  # nothing of the bad gradient is left over


def test_the_gradient_is_scaled_down_to_its_largest_norm(rolled: Make) -> None:
    trainer, update, targets = rolled(max_grad_norm=0.01)
    moved = step_taken(trainer, update, targets, torch.arange(16))
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_before_its_first_step_the_policy_agrees_with_its_rollout(make_trainer: Make) -> None:
    assert make_trainer(rollout={"temperature": 0.7}).update(1).row["policy/logratio_first_max"] < 1e-3


# ---- what is kept from sampling ----


class _Drifts(nn.Module):
    """A policy that says something else while it decodes from its cache."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, **arguments: Any) -> Any:
        output = self.inner(**arguments)
        if arguments.get("past_key_values") is not None:
            output.logits = output.logits * 1.01
        return output


def test_a_policy_that_decodes_otherwise_is_asked_again(make_trainer: Make, new_model: Make) -> None:
    trainer = make_trainer(policy=_Drifts(new_model(seed=3, spread=0.1)))
    rows = [trainer.update(step).row for step in (1, 2)]
    assert [[a for a in row["alerts"] if a.startswith("slower-scoring")] != [] for row in rows] == [True, False]
    assert all(row["policy/logratio_first_max"] < 1e-5 for row in rows)


def test_a_run_that_goes_on_with_other_functions_says_so(make_trainer: Make) -> None:
    first, second = make_trainer(), make_trainer()
    state = first.state_dict()
    second.load_state_dict(state)
    assert second.notes == []
    second.load_state_dict(state | {"compiled": state["compiled"] + 1})
    assert second.notes[0].startswith("other-functions: ")


def test_whether_decoding_agrees_is_asked_once_a_run(make_trainer: Make, new_model: Make) -> None:
    """Near the limit other weights would say otherwise, and a resumed run go another way."""
    whole = make_trainer(policy=_Drifts(new_model(seed=3, spread=0.1)))
    whole.update(1)
    resumed = make_trainer(policy=new_model(seed=3, spread=0.1))
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.listener(4) is None
    assert make_trainer().listener(4) is not None


def test_the_policy_is_asked_once_where_sampling_and_training_agree(make_trainer: Make) -> None:
    trainer = make_trainer(ppo={"epochs": 1, "minibatch_size": 32, "microbatch_size": 32})
    trainer.update(1)
    passes = []
    trainer.core.policy.register_forward_hook(lambda _model, _args, output: passes.append(output.past_key_values))
    row = trainer.update(2).row
    assert sum(cache is None for cache in passes) == 1  # the training pass
    assert row["policy/logratio_first_max"] < 1e-4


# ---- memory ----


def test_no_pass_has_more_logits_than_there_is_room_for(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_kl.rollout import reference

    monkeypatch.setattr(reference, "PASS_ELEMENTS", {"cpu": 7 * 20})
    monkeypatch.setattr(reference, "KEPT_ELEMENTS", 0)
    monkeypatch.setattr("rlhf_kl.trainers.ppo.KEPT_ELEMENTS", 0)
    trainer = make_trainer()
    trainer.reference_logits.head_elements = 0
    sizes: list[int] = []
    for model in (trainer.core.policy, trainer.reference):
        model.lm_head.register_forward_hook(lambda _head, _args, output: sizes.append(output.shape[:-1].numel()))
    update = trainer.update(1)
    assert int(update.rollout.mask.sum()) > 5 * 20
    assert max(sizes) <= max(20, len(update.rollout))  # decoding: one state a row
    assert sum(size > 20 for size in sizes) <= update.rollout.mask.shape[1]


@pytest.mark.parametrize("value", ["head", "critic"])
def test_beginnings_that_are_read_once_change_nothing(
    make_trainer: Make, new_model: Make, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Five prompts for 32 rows; the ceiling's own pass and the loss on the exact KL read them too."""
    rows, read = [], []
    for pays in (False, True):
        policy = new_model(seed=3, spread=0.3)
        choose_way(policy)
        monkeypatch.setitem(prefix_sharing.LAYING_OUT, "cpu", 0.0 if pays else math.inf)
        trainer: PPOTrainer = make_trainer(
            policy=policy,
            critic=FeatureCritic(16, 0.0, 1.0, 0) if value == "critic" else None,
            kl={
                "placement": "loss",
                "estimator": "exact",
                "target": 0.005,
                "ceiling": {"value": 0.02},
                "controller": {"kind": "fixed", "coef": 0.1},
            },
        )
        seen: list[int] = []
        policy.transformer.h[0].ln_2.register_forward_hook(lambda *args, seen=seen: seen.append(args[2].numel()))
        rows.append([trainer.update(step).row for step in (1, 2, 3)])
        read.append(sum(seen))
    assert read[1] < 0.8 * read[0]
    for whole, once in zip(*rows, strict=True):
        for name, number in whole.items():
            if isinstance(number, float) and not name.startswith(("time/", "policy/logratio")):
                assert once[name] == pytest.approx(number, rel=1e-3, abs=1e-5, nan_ok=True), name


def test_of_the_size_of_the_logits_training_keeps_the_logits_alone(make_trainer: Make) -> None:
    trainer = make_trainer()
    rollout = trainer.update(1).rollout
    packed = rollout.layout.pack(list(range(16)))
    logits = len(packed.states) * 7
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.losses(rollout, trainer.targets(rollout, 0.1), packed, 1)
    assert sum(size == logits for size in kept.values()) == 1


# ---- one update ----


def test_an_update_depends_on_seed_and_step_alone(make_trainer: Make) -> None:
    one, same = make_trainer(), make_trainer()
    torch.manual_seed(1)
    first = one.update(3)
    torch.manual_seed(2)
    again = same.update(3)
    assert torch.equal(first.rollout.response_ids, again.rollout.response_ids)
    assert torch.equal(weights(one.core), weights(same.core))
    other = make_trainer(run={"seed": 1}).update(3)
    assert other.responses != first.responses


class _Recorder:
    """A controller that only writes down what it is told."""

    def __init__(self, coef: float = 0.2) -> None:
        self.coef = coef
        self.told: list[tuple[float, int]] = []
        self.heard: list[tuple[float, float, float]] = []

    def update(self, kl: float, episodes: int) -> None:
        self.told.append((kl, episodes))
        self.coef *= 2

    def observe_update(self, kl_before: float, kl_after: float, kl_whole: float) -> None:
        assert len(self.heard) == len(self.told)  # before the update that it belongs to
        self.heard.append((kl_before, kl_after, kl_whole))


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_controller_hears_what_is_logged_once_a_rollout(make_trainer: Make, unit: str) -> None:
    recorder = _Recorder()
    trainer = make_trainer(controller=GuardedController(recorder), kl={"unit": unit})
    updates = [trainer.update(step) for step in (1, 2, 3)]
    assert recorder.told == [(update.row[f"kl/{unit}"], 32) for update in updates]
    assert [before for before, _, _ in recorder.heard] == [kl for kl, _ in recorder.told]
    assert [after for _, after, _ in recorder.heard] == [update.row["kl/after_update"] for update in updates]
    assert [update.row["kl/coef"] for update in updates] == pytest.approx([0.2, 0.4, 0.8])
    assert [update.row["kl/coef_next"] for update in updates] == pytest.approx([0.4, 0.8, 1.6])
    for update in updates:
        rollout = update.rollout
        per_row = [float(kl[mask].sum()) for kl, mask in zip(rollout.exact_kl, rollout.mask, strict=True)]
        assert update.row["kl/sequence"] == pytest.approx(sum(per_row) / 32, rel=1e-5, abs=1e-9)
        assert update.row["kl/token"] == pytest.approx(sum(per_row) / int(rollout.mask.sum()), rel=1e-5, abs=1e-9)


def test_the_row_describes_the_policy_that_sampled_it(make_trainer: Make) -> None:
    """With a huge step the KL of the row is still that of before."""
    trainer = make_trainer(ppo={"learning_rate": 0.1})
    assert trainer.update(1).row["kl/token"] == pytest.approx(0.0, abs=1e-5)
    assert trainer.update(2).row["kl/token"] > 0.1


@pytest.mark.parametrize("separate", [True, False])
def test_a_warm_up_trains_the_value_function_only(make_trainer: Make, new_model: Make, separate: bool) -> None:
    """Also one that is a head on the policy's own trunk."""
    trunk = {"value_trunk": new_model(seed=8, spread=0.1).base_model} if separate else {}
    trainer = make_trainer(**trunk, ppo={"value_warmup": 1})
    learns = trainer.core.value_trunk if separate else trainer.core.value_head
    policy, value = weights(trainer.core.policy), weights(learns)
    trainer.update(1)
    assert torch.equal(weights(trainer.core.policy), policy)
    assert not torch.equal(weights(learns), value)
    trainer.update(2)
    assert not torch.equal(weights(trainer.core.policy), policy)


def test_the_value_function_learns_the_returns(make_trainer: Make, new_model: Make) -> None:
    """A score that the prompt alone decides can be told from the first token on."""

    def of_prompt(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [2.0 * len(prompt) for prompt in prompts]

    ppo = {"value_warmup": 100, "vf_coef": 1.0, "cliprange_value": 10.0, "lam": 1.0, "learning_rate": 1e-2}
    trunk = new_model(seed=8, spread=0.1).base_model
    trainer = make_trainer(value_trunk=trunk, ppo=ppo, reward=of_prompt, shaping=ScoreShaping(mean=4.8, std=2.0))
    explained = [trainer.update(step).row["value/explained_variance"] for step in range(1, 13)]
    assert explained[0] == pytest.approx(0.0, abs=1e-3)  # the head starts at zero
    assert explained[-1] > 0.5


def test_an_update_ends_early_once_it_has_moved_too_far(make_trainer: Make) -> None:
    free, short = make_trainer(ppo={"epochs": 4}), make_trainer(ppo={"epochs": 4, "max_update_kl": 1e-9})
    assert free.update(1).row["policy/epochs"] == 4
    assert short.update(1).row["policy/epochs"] == 1


def test_the_critics_lambda_changes_the_returns_and_not_the_advantages(make_trainer: Make) -> None:
    own, same = make_trainer(ppo={"critic_lam": 0.0, "lam": 0.9}), make_trainer(ppo={"lam": 0.9})
    rollout = own.update(1).rollout
    rollout = replace(rollout, values=rollout.mask * torch.linspace(-1, 1, rollout.mask.shape[1]))
    a, b = own.targets(rollout, 0.1), same.targets(rollout, 0.1)
    assert torch.equal(a.advantages, b.advantages)
    assert not torch.allclose(a.returns, b.returns)


def test_a_learning_rate_that_falls(make_trainer: Make) -> None:
    trainer = make_trainer(ppo={"lr_schedule": "linear", "total_episodes": 128, "learning_rate": 1e-3})
    rates = [trainer.update(step).row["policy/learning_rate"] for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_a_reward_function_that_breaks_is_named(make_trainer: Make) -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [float("nan")] * len(responses)

    from rlhf_kl.errors import InputError

    with pytest.raises(InputError, match="not a finite number"):
        make_trainer(reward=broken).update(1)


# ---- the belt ----


def moved_far(trainer: PPOTrainer, updates: int) -> list[dict[str, Any]]:
    return [trainer.update(step).row for step in range(1, updates + 1)]


def test_without_a_ceiling_this_run_goes_far(make_trainer: Make) -> None:
    """What the next two tests hold back."""
    rows = moved_far(make_trainer(ppo={"learning_rate": 1e-2}), 6)
    assert rows[-1]["kl/token"] > 0.2
    assert rows[-1]["kl/sequence"] > 1.0
    assert {row["kl/backtrack_factor"] for row in rows} == {1.0}
    assert rows[0]["kl/ceiling"] is None


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_a_ceiling_shortens_the_updates_that_would_cross_it(make_trainer: Make, unit: str) -> None:
    ceiling = 0.1 if unit == "token" else 0.5
    recorder = _Recorder(0.01)
    trainer = make_trainer(
        controller=GuardedController(recorder, max_coef=0.02),
        ppo={"learning_rate": 1e-2},
        kl={"unit": unit, "target": ceiling / 2, "ceiling": {"value": ceiling, "action": "backtrack"}},
    )
    rows = moved_far(trainer, 6)
    assert max(row[f"kl/{unit}"] for row in rows) < 1.6 * ceiling  # the old states read a little low
    assert min(row["kl/backtrack_factor"] for row in rows) < 1.0
    for row, (_, after, whole) in zip(rows, recorder.heard, strict=True):
        assert (whole > after) == (row["kl/backtrack_factor"] < 1)
    assert all(row["kl/after_update"] <= 1.001 * max(ceiling * 2, row[f"kl/{unit}"]) for row in rows)
    assert rows[0]["kl/ceiling"] == ceiling


def test_from_above_the_ceiling_it_comes_back(make_trainer: Make, new_model: Make) -> None:
    """A policy that starts far from its reference, with a reward that pulls nowhere near."""
    trainer = make_trainer(
        policy=new_model(seed=3, spread=0.15),
        reference=new_model(seed=3, spread=0.1),
        controller=GuardedController(_Recorder(1e-3), max_coef=1e-3),
        kl={"target": 0.005, "ceiling": {"value": 0.01, "action": "backtrack"}},
        ppo={"learning_rate": 1e-3},
    )
    kls = [row["kl/token"] for row in moved_far(trainer, 10)]
    assert kls[0] > 0.02
    assert kls[-1] < 0.5 * kls[0]


# ---- state ----


def test_a_trainer_goes_on_from_its_state(make_trainer: Make) -> None:
    kl = {"controller": {"kind": "adaptive", "coef": 0.05}, "ceiling": {"value": "1.5x"}}
    one = make_trainer(kl=kl)
    for step in (1, 2, 3):
        one.update(step)
    state = json.loads(json.dumps(one.state_dict()))
    other = make_trainer(kl=kl)
    other.core.load_state_dict(one.core.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    other.load_state_dict(state)
    assert other.state_dict() == one.state_dict()
    for step in (4, 5):
        a, b = one.update(step).row, other.update(step).row
        for key in a:
            if not key.startswith(("time/", "perf/")):
                assert a[key] == b[key] or (a[key] != a[key] and b[key] != b[key]), key
    assert torch.equal(weights(one.core), weights(other.core))


# ---- a critic on features


def with_critic(make_trainer: Make, new_model: Make, **sections: Any) -> Any:
    """A trainer whose value function reads features of the reference."""
    critic = FeatureCritic(16, mean=0.0, scale=1.0, seed=0)
    policy = new_model(seed=3, spread=0.1)
    return make_trainer(policy=policy, critic=critic, **sections)


def test_the_critic_learns_the_returns(make_trainer: Make, new_model: Make) -> None:
    """As far as sixteen numbers of an untrained model tell the prompt."""

    def of_prompt(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [2.0 * len(prompt) for prompt in prompts]

    shaping = ScoreShaping(mean=4.8, std=2.0)
    ppo = {"critic_learning_rate": 1e-2}
    trainer = with_critic(make_trainer, new_model, reward=of_prompt, shaping=shaping, ppo=ppo)
    explained = [trainer.update(step).row["value/explained_variance"] for step in range(1, 13)]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert sum(explained[-6:]) / 6 > 0.35


def test_a_critic_is_fitted_after_its_values_were_used(make_trainer: Make, new_model: Make) -> None:
    """The first policy step is the same whatever the critic then learns: no advantage knows its own return."""
    policies = []
    for rate in (1e-3, 1e-1):
        trainer = with_critic(make_trainer, new_model, ppo={"critic_learning_rate": rate})
        before = weights(trainer.core.critic)
        trainer.update(1)
        assert not torch.equal(weights(trainer.core.critic), before)
        policies.append(weights(trainer.core.policy))
    assert torch.equal(*policies)


def test_a_warm_up_trains_the_critic_only(make_trainer: Make, new_model: Make) -> None:
    trainer = with_critic(make_trainer, new_model, ppo={"value_warmup": 1})
    policy, value = weights(trainer.core.policy), weights(trainer.core.critic)
    row = trainer.update(1).row
    assert row["policy/epochs"] == 0
    assert math.isnan(row["policy/logratio_first_max"])  # nobody asked the policy
    assert math.isfinite(row["value/loss"])
    assert torch.equal(weights(trainer.core.policy), policy)
    assert not torch.equal(weights(trainer.core.critic), value)
    trainer.update(2)
    assert not torch.equal(weights(trainer.core.policy), policy)


def test_the_ceiling_cuts_the_policy_and_not_its_critic(make_trainer: Make, new_model: Make) -> None:
    """The critic of a run whose every update is cut to next to nothing still learns."""
    kl = {"target": 1e-7, "ceiling": {"value": 2e-7, "action": "backtrack"}}  # beta is constant
    trainer = with_critic(make_trainer, new_model, kl=kl, ppo={"learning_rate": 0.1})
    value = weights(trainer.core.critic)
    row = trainer.update(1).row
    assert row["kl/backtrack_factor"] < 0.1
    free = with_critic(make_trainer, new_model, ppo={"learning_rate": 0.1})
    free.update(1)
    assert torch.equal(weights(trainer.core.critic), weights(free.core.critic))
    assert not torch.equal(weights(trainer.core.critic), value)
