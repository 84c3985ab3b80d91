"""Runs that go wrong: what is skipped, what is turned back, what ends."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.commands.load import Loader
from rlhf_kl.errors import GuardStop
from rlhf_kl.models.load import save_model
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.rewards.plugin import PluginReward
from rlhf_kl.rewards.scorer import Scorer, Scorers
from rlhf_kl.rollout.collect import Rollouts
from rlhf_kl.run.checkpoint import checkpoints
from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.trainers.ceiling import Ceiling, CeilingResult
from rlhf_kl.trainers.ppo import PPOTrainer

Train = Callable[..., dict[str, Any]]


@pytest.fixture
def nan_scores(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`nan_scores(3, 4)`: the reward model's score is not finite in updates 3 and 4."""

    def spoil(*steps: int) -> None:
        roll_out, score = Rollouts.__call__, Scorers.__call__
        now = [0]

        def noting(self: Rollouts, step: int) -> Any:
            now[0] = step
            try:
                return roll_out(self, step)
            finally:
                now[0] = 0  # evaluations are not spoilt

        def spoilt(*arguments: Any) -> Any:
            scores = score(*arguments)
            if now[0] in steps:
                scores.values["reward"][1] = math.inf
            return scores

        monkeypatch.setattr(Rollouts, "__call__", noting)
        monkeypatch.setattr(Scorers, "__call__", spoilt)

    return spoil


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}
        for row in read_jsonl(folder / "metrics.jsonl")
    ]


def weights(folder: Path, step: int) -> dict[str, Any]:
    return load_file(folder / "checkpoints" / f"step-{step:06d}" / "model.safetensors")


def alerts(row: dict[str, Any], name: str) -> list[str]:
    return [alert for alert in row["alerts"] if alert.startswith(name)]


def test_an_update_with_a_score_that_is_not_finite_is_skipped_and_reported(
    train: Train, tmp_path: Path, nan_scores: Callable[..., None]
) -> None:
    nan_scores(3, 5)
    train(tmp_path / "run", "checkpoint.every=1")
    found = rows(tmp_path / "run")
    assert [bool(alerts(row, "update-skipped")) for row in found[:6]] == [False, False, True, False, True, False]
    assert "a score was not finite" in alerts(found[2], "update-skipped")[0]
    assert found[2]["policy/loss"] is None
    assert found[2]["objective/scores"] is None
    assert found[2]["kl/token"] is not None
    # No checkpoint of a skipped update; nothing was learned from it.
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2, 4, 6]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["objective/scores"] is not None


def test_a_reward_model_in_a_sum_whose_scores_are_not_finite(
    train: Train, tmp_path: Path, tiny_reward_folder: Path, tiny_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its NaNs of updates 3 and 4: two updates are skipped, and the evaluation between them has no score."""
    roll_out, score, now = Rollouts.__call__, RewardModel.__call__, [0]

    def noting(self: Rollouts, step: int) -> Any:
        now[0] = step
        return roll_out(self, step)

    def spoilt(self: RewardModel, *arguments: Any) -> Any:
        scores = score(self, *arguments)
        scores[-1] = torch.inf if now[0] in (3, 4) else scores[-1]
        return scores

    monkeypatch.setattr(Rollouts, "__call__", noting)
    monkeypatch.setattr(RewardModel, "__call__", spoilt)
    terms = f"{{rm: {{kind: model, model: '{tiny_reward_folder}'}}, a: {{kind: '{tiny_data.reward}', weight: 0.5}}}}"
    train(tmp_path / "run", f"reward={{kind: sum, terms: {terms}}}", "eval.every=2")
    found = rows(tmp_path / "run")
    assert [bool(alerts(row, "update-skipped")) for row in found[:6]] == [False, False, True, True, False, False]
    assert "a score was not finite" in alerts(found[2], "update-skipped")[0]
    assert [row["eval/scores"] is None for row in found if "eval/scores" in row] == [False, False, True, False]
    assert [bool(alerts(row, "eval-scores")) for row in found[:6]] == [False, False, False, False, True, False]
    assert found[4]["eval/perplexity"] is not None


def test_a_gold_scorer_that_fails_is_reported_once_and_ends_nothing(
    train: Train, tmp_path: Path, tiny_run: Path
) -> None:
    """All through; the run is otherwise the one that has no gold scorer."""
    (tmp_path / "gold.py").write_text("def broken(prompts, responses):\n    raise OSError('no route to the judge')\n")
    summary = train(tmp_path / "run", f"reward.gold='{tmp_path}/gold.py:broken'")
    found, other = rows(tmp_path / "run"), rows(tiny_run)
    assert [len(alerts(row, "gold-failed")) for row in found[:6]] == [1, 0, 0, 0, 0, 0]
    assert "reward.gold: raised OSError: no route to the judge (" in alerts(found[0], "gold-failed")[0]
    assert {row.get("objective/gold") for row in found} == {row.get("eval/gold") for row in found} == {None}
    assert summary["reference"]["gold"] is None
    assert found[0]["alerts"][1:] == other[0]["alerts"]
    assert found[1:] == other[1:]


def test_a_gold_scorer_that_fails_now_and_then_is_reported_where_it_begins_to(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In updates 2, 3, 5 and 6; a run that is resumed behind update 2 says no more than one that never ended."""
    roll_out, now = Rollouts.__call__, [0]

    def noting(self: Rollouts, step: int) -> Any:
        now[0] = step
        return roll_out(self, step)

    def moody(prompts: Any, responses: Any) -> list[float]:
        return [float("nan") if now[0] in (2, 3, 5, 6) else 1.0] * len(responses)

    monkeypatch.setattr(Rollouts, "__call__", noting)
    own, gold = Loader.scorers, Scorer("gold", PluginReward(moody), 0.0)
    monkeypatch.setattr(Loader, "scorers", lambda *arguments: Scorers(*own(*arguments).trained.scorers, gold))
    settings = ("checkpoint.every=1", "eval.every=100")
    train(tmp_path / "whole", *settings)
    found = rows(tmp_path / "whole")
    assert [len(alerts(row, "gold-failed")) for row in found[:6]] == [0, 1, 0, 0, 1, 0]
    assert [row["objective/gold"] for row in found[:6]] == [1.0, None, None, 1.0, None, None]
    crashed = Path(shutil.copytree(tmp_path / "whole", tmp_path / "crashed"))
    (crashed / "summary.json").unlink()
    shutil.rmtree(crashed / "final")
    for checkpoint in checkpoints(crashed / "checkpoints")[2:]:
        shutil.rmtree(checkpoint.path)
    train(crashed, *settings, resume=True)
    assert rows(crashed) == found


def test_a_run_with_skipped_updates_resumes_exactly(
    train: Train, tmp_path: Path, nan_scores: Callable[..., None]
) -> None:
    nan_scores(2, 3, 4)
    setting = ("checkpoint.every=1",)
    train(tmp_path / "whole", *setting)
    crashed = Path(shutil.copytree(tmp_path / "whole", tmp_path / "crashed"))
    (crashed / "summary.json").unlink()
    shutil.rmtree(crashed / "final")
    for checkpoint in checkpoints(crashed / "checkpoints")[1:]:
        shutil.rmtree(checkpoint.path)
    train(crashed, *setting, resume=True)
    assert rows(crashed) == rows(tmp_path / "whole")
    assert "back to the policy of update 1" in alerts(rows(crashed)[3], "rolled-back")[0]


@pytest.mark.quick
def test_several_in_a_row_turn_the_run_back_once(train: Train, tmp_path: Path, nan_scores: Callable[..., None]) -> None:
    nan_scores(3, 4, 5)
    train(tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [len(alerts(row, "rolled-back")) for row in found[:6]] == [0, 0, 0, 0, 1, 0]
    assert "3 updates in a row" in alerts(found[4], "rolled-back")[0]
    assert "back to the policy of update 2" in alerts(found[4], "rolled-back")[0]
    assert found[5]["policy/loss"] is not None


def test_and_stop_it_the_second_time(train: Train, tmp_path: Path, nan_scores: Callable[..., None]) -> None:
    nan_scores(3, 4, 5, 6)
    with pytest.raises(GuardStop, match=r"2 updates in a row .* update 6, again after") as caught:
        train(tmp_path / "run", "ppo.max_skipped=2")
    assert caught.value.exit_code == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == str(caught.value)
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    assert not (tmp_path / "run" / "final").exists()


def test_a_policy_that_overflows_ends_the_run_and_spares_the_checkpoints(train: Train, tmp_path: Path) -> None:
    """No patching: at such a rate every log-prob after the first update is NaN."""
    with pytest.raises(GuardStop, match=r"log-prob of the policy was not finite .* no checkpoint to go back to"):
        train(tmp_path / "run", "ppo.learning_rate=1e12", "kl.ceiling=null")
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(alerts(row, "update-skipped") for row in found)
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("ceiling", [False, True])
def test_weights_that_are_lost_turn_the_run_back_at_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ceiling: bool
) -> None:
    """A ceiling that shortens updates undoes this one, which is cheaper."""
    optimize = PPOTrainer.optimize

    def losing(self: PPOTrainer, rollout: Any, targets: Any, step: int) -> Any:
        result = optimize(self, rollout, targets, step)
        if step in (3, 5):
            with torch.no_grad():
                self.model.trained[0][0, 0] = torch.inf
        return result

    monkeypatch.setattr(PPOTrainer, "optimize", losing)
    train(tmp_path / "run", "checkpoint.every=1", *([] if ceiling else ["kl.ceiling=null"]))
    found = rows(tmp_path / "run")
    lost = [False, False, True, False, True, False]
    assert [bool(alerts(row, "rolled-back")) for row in found[:6]] == ([False] * 6 if ceiling else lost)
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == (
        [1, 2, 3, 4, 5, 6] if ceiling else [1, 2, 4, 6]
    )
    if ceiling:
        assert [row["kl/backtrack_factor"] == 0.0 for row in found[:6]] == lost


@pytest.mark.parametrize("value", ["features", "head"])
def test_a_gradient_that_is_not_finite_is_skipped_and_reported(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """The losses of update 3 are NaN: its steps are left out, and its checkpoint."""
    optimize = PPOTrainer.optimize

    def spoilt(self: PPOTrainer, rollout: Any, targets: Any, step: int) -> Any:
        if step == 3:
            targets = replace(targets, advantages=targets.advantages * torch.nan)
        return optimize(self, rollout, targets, step)

    monkeypatch.setattr(PPOTrainer, "optimize", spoilt)
    train(tmp_path / "run", "checkpoint.every=1", f"policy.value={value}")
    found = rows(tmp_path / "run")
    assert [len(alerts(row, "update-skipped")) for row in found[:6]] == [0, 0, 1, 0, 0, 0]
    assert "a gradient was not finite" in alerts(found[2], "update-skipped")[0]
    assert found[2]["policy/loss"] is None
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2, 4, 5, 6]


def test_a_ceiling_undoes_an_update_that_overflows(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", "ppo.learning_rate=1e12", "ppo.total_episodes=32", "ppo.epochs=1")
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path / "run", 2).values())


# ---- memory ----


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that holds three rows of a training pass."""
    losses = PPOTrainer.losses

    def limited(self: PPOTrainer, tokens: Any, rows: Any) -> Any:
        if len(rows.ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return losses(self, tokens, rows)

    monkeypatch.setattr(PPOTrainer, "losses", limited)


@pytest.mark.usefixtures("small_device")
def test_full_memory_halves_the_microbatch_and_the_run_goes_on(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run")
    train(tmp_path / "small", "ppo.microbatch_size=2")
    found = rows(tmp_path / "run")
    assert len(alerts(found[0], "out-of-memory")) == 2  # 8 -> 4 -> 2, once and for all
    for row in found:
        row["alerts"] = [alert for alert in row.get("alerts", []) if not alert.startswith("out-of-memory")]
    for row, twin in zip(found, rows(tmp_path / "small"), strict=True):
        assert row == twin | {"alerts": twin.get("alerts", [])}  # nothing of the failed passes is left in a gradient
    # The choice is part of the checkpoint: a resumed run does not try again.
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["trainer"]["microbatch"] == 2


# ---- the best checkpoint ----


def test_the_best_checkpoint_is_kept_beside_the_newest(train: Train, tmp_path: Path) -> None:
    settings = ("checkpoint={every: 1, keep: 1, best: objective/scores}", "eval.every=100")
    summary = train(tmp_path / "run", *settings)
    measured = {row["step"] - 1: row["objective/scores"] for row in rows(tmp_path / "run")[1:6]}
    best = max(measured, key=lambda step: measured[step])
    assert summary["best_checkpoint"] == {"step": best, "metric": "objective/scores", "value": measured[best]}
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == sorted({best, 6})


def test_the_lowest_perplexity_is_the_best(train: Train, tmp_path: Path) -> None:
    summary = train(tmp_path / "run", "checkpoint={every: 1, keep: 1, best: eval/perplexity}", "eval.every=1")
    measured = {row["step"] - 1: row["eval/perplexity"] for row in rows(tmp_path / "run") if row["step"] > 1}
    best = min(measured, key=lambda step: measured[step])
    assert summary["best_checkpoint"]["step"] == best
    assert best in [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")]


# ---- the ceiling that rolls back ----

ROLLBACK = ("kl.target=0.002", "kl.ceiling={value: 0.004, action: rollback}", "ppo.learning_rate=1e-2")


def test_a_rollback_to_the_start_forgets_what_was_learned_since(train: Train, tmp_path: Path) -> None:
    """Policy, Adam's moments, critic and controller: the checkpoint of the crossing holds none of it."""
    settings = (*ROLLBACK, "policy.value=features", "kl.controller={kind: pid, coef: 0.1}", "checkpoint.every=2")
    train(tmp_path / "run", *settings)
    first = next(row["step"] for row in rows(tmp_path / "run") if alerts(row, "rolled-back"))
    assert first == 2  # of updates 1 and 2 nothing is left
    start, turned = (tmp_path / "run" / "checkpoints" / f"step-{step:06d}" for step in (0, 2))
    for file in ("model.safetensors", "optimizer.safetensors"):
        before, after = load_file(start / file), load_file(turned / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    before, after = (json.loads((c / "state.json").read_text())["trainer"]["controller"] for c in (start, turned))
    assert after == before | {"coef": 2 * before["coef"], "raised": 2.0}


@pytest.mark.parametrize("controller", ["{kind: schedule, coef: 0.1, end_coef: 0.11}", "{kind: fixed, coef: 0.1}"])
def test_a_raised_beta_stays_raised(train: Train, tmp_path: Path, controller: str) -> None:
    train(tmp_path / "run", *ROLLBACK, f"kl.controller={controller}")
    found = rows(tmp_path / "run")[:-1]
    times = 0
    for row in found:
        assert row["kl/coef"] / 2**times == pytest.approx(0.105, abs=0.006)
        times += len(alerts(row, "rolled-back"))
    assert times > 1


def test_a_run_with_rollbacks_resumes_exactly(train: Train, tmp_path: Path) -> None:
    settings = (*ROLLBACK, "kl.controller={kind: schedule, coef: 0.1}", "checkpoint={every: 2, keep: 10}")
    train(tmp_path / "whole", *settings)
    assert sum(len(alerts(row, "rolled-back")) for row in rows(tmp_path / "whole")[:-1]) > 1
    for kept in (0, 2, 4):
        crashed = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"crashed-{kept}"))
        (crashed / "summary.json").unlink()
        shutil.rmtree(crashed / "final")
        for checkpoint in checkpoints(crashed / "checkpoints"):
            if checkpoint.step > kept:
                shutil.rmtree(checkpoint.path)
        train(crashed, *settings, resume=True)
        assert rows(crashed) == rows(tmp_path / "whole")


def test_the_start_stays_to_go_back_to(train: Train, tmp_path: Path) -> None:
    train(tmp_path / "run", *ROLLBACK, "kl.controller={kind: fixed, coef: 0.1}", "checkpoint={every: 2, keep: 1}")
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [0, 6]


def test_rollbacks_that_do_not_help_end_the_run(train: Train, tmp_path: Path) -> None:
    settings = ("kl.target=1e-6", "kl.ceiling={value: 2e-6, action: rollback}", "ppo.learning_rate=1e-2")
    with pytest.raises(GuardStop, match=r"above the ceiling 2e-06 again, after 5 rollbacks, each of which doubled"):
        train(tmp_path / "run", *settings, "kl.controller={kind: fixed, coef: 1e-3}", "ppo.total_episodes=240")
    turned = [row for row in rows(tmp_path / "run") if alerts(row, "rolled-back")]
    assert [row["kl/coef_next"] for row in turned] == pytest.approx([1e-3 * 2**times for times in range(1, 6)])


def test_a_ceiling_that_shortens_in_vain_ends_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where nothing lies between the policy and a reference of another kind: here shortening does nothing."""
    monkeypatch.setattr(Ceiling, "_shorten", lambda *_: CeilingResult(1.0, 1.0, 1.0, 1.0))
    settings = ("kl.target=1e-6", "kl.ceiling.value=2e-6", "kl.controller={kind: fixed, coef: 1e-3}")
    with pytest.raises(GuardStop, match=r"above the ceiling 2e-06 for 10 updates in a row") as caught:
        train(tmp_path / "run", *settings, "ppo.learning_rate=1e-2", "ppo.total_episodes=240")
    assert caught.value.exit_code == 3


def test_a_ceiling_below_a_reference_of_another_architecture_ends_the_run(
    train: Train, tmp_path: Path, new_model: Callable[..., Any], letters: Any
) -> None:
    """No line leads from the policy to it, and a reward that pulls elsewhere does not bring the KL down."""
    wider = new_model(seed=5, spread=1.0, hidden_size=24)
    save_model(wider, letters, tmp_path / "wider")
    settings = (f"reference.model='{tmp_path}/wider'", "kl.target=0.001", "kl.ceiling.value=0.002")
    with pytest.raises(GuardStop, match=r"for 10 updates in a row, although each was shortened"):
        train(tmp_path / "run", *settings, "kl.controller={kind: fixed, coef: 1e-6}", "ppo.total_episodes=320")
    assert {row["kl/pulled_back"] for row in rows(tmp_path / "run")} == {0.0}
    # While the policy is frozen nothing is shortened, and nothing is held against it.
    frozen = (*settings, "kl.controller={kind: fixed, coef: 1e-6}", "ppo.total_episodes=240", "ppo.value_warmup=12")
    assert train(tmp_path / "frozen", *frozen)["stopped_by"] is None
