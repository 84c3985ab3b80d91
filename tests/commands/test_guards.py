"""Runs that go wrong: what is skipped, what is turned back, what ends."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhf_kl.errors import GuardStop, RunFailed
from rlhf_kl.ppo.rollout import Rollouts
from rlhf_kl.ppo.step import PPOTrainer
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.run import saving
from rlhf_kl.run.checkpoint import Checkpoint, checkpoints
from rlhf_kl.training.loop import TrainLoop
from tests.runs import Train, rows


def alerts(row: dict[str, Any], name: str) -> list[str]:
    return [alert for alert in row["alerts"] if alert.startswith(name)]


def test_a_scorer_that_fails_is_told_once_and_ends_nothing(train: Train, tmp_path: Path, tiny_run: Path) -> None:
    """All through; the run is otherwise the one that has no scorers."""
    (tmp_path / "two.py").write_text(
        "def broken(prompts, responses):\n    raise OSError('no route to the judge')\n"
        "def fine(prompts, responses):\n"
        f"    with open('{tmp_path}/calls', 'a') as calls:\n        calls.write('x' * len(responses))\n"
        "    return [float(len(response)) for response in responses]\n"
    )
    summary = train(
        tmp_path / "run", *(f"eval.scorers.{name}.kind={tmp_path}/two.py:{name}" for name in ("broken", "fine"))
    )
    found, other = rows(tmp_path / "run"), rows(tiny_run)
    assert [len(alerts(row, "scorer-failed")) for row in found[:6]] == [1, 0, 0, 0, 0, 0]
    assert "eval.scorers.broken: raised OSError: " in alerts(found[0], "scorer-failed")[0]
    evaluated = [row for row in found if "eval/perplexity" in row]
    assert [row["eval/broken"] for row in evaluated] == [None] * 4
    assert all(row["eval/fine"] > 1 for row in evaluated)
    assert summary["closing"]["fine"] == (evaluated[0]["eval/fine"], evaluated[-1]["eval/fine"])
    assert "broken" not in summary["closing"]
    # 24 in each evaluation, and 7 more to each prompt that people read; four times as many at the end.
    assert len((tmp_path / "calls").read_text()) == 4 * (24 + 2 * 7) + 3 * 24
    found[0]["alerts"].pop(0)
    names = {f"eval/{name}{end}" for name in ("broken", "fine") for end in ("", "_stderr")}
    assert [{key: row[key] for key in row if key not in names} for row in found] == other


@pytest.mark.quick
def test_scores_that_are_not_finite_turn_the_run_back_and_then_end_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From update 3 on; evaluations are not spoilt."""
    roll_out, score = Rollouts.__call__, Scorers.__call__

    def spoilt(*arguments: Any) -> Any:
        scores = score(*arguments)
        scores["reward"][1] = math.inf
        return scores

    def noting(self: Rollouts, step: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if step > 2:
                patch.setattr(Scorers, "__call__", spoilt)
            return roll_out(self, step)

    monkeypatch.setattr(Rollouts, "__call__", noting)
    with pytest.raises(GuardStop, match=r"2 updates in a row .* update 6, again after") as caught:
        train(tmp_path / "run", "ppo.max_skipped=2", "checkpoint.every=1")
    found = rows(tmp_path / "run")
    assert [len(alerts(row, "update-skipped")) for row in found] == [0, 0, 1, 1, 1, 1]
    assert "score" in alerts(found[2], "update-skipped")[0]
    assert "controller of update 2, " in alerts(found[3], "rolled-back")[0]
    assert found[2]["policy/loss"] is found[2]["objective/scores"] is None
    assert found[2]["kl/token"] is not None
    assert caught.value.exit_code == 3
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == str(caught.value)
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2]  # none of a skipped update
    assert not (tmp_path / "run" / "final").exists()


def test_a_policy_that_overflows_ends_the_run_and_spares_the_checkpoints(train: Train, tmp_path: Path) -> None:
    """No patching: at such a rate every log-prob after the first update is NaN."""
    with pytest.raises(GuardStop, match=r"log-prob .*no checkpoint"):
        train(tmp_path / "run", "ppo.learning_rate=1e12", "kl.ceiling=null")
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(alerts(row, "update-skipped") for row in found)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_weights_that_are_lost_turn_the_run_back_at_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimize = PPOTrainer.optimize

    def losing(self: PPOTrainer, rollout: Any, targets: Any, step: int) -> Any:
        result = optimize(self, rollout, targets, step)
        if step in (3, 5):
            with torch.no_grad():
                self.model.trained[0][0, 0] = torch.inf
        return result

    monkeypatch.setattr(PPOTrainer, "optimize", losing)
    train(tmp_path / "run", "checkpoint.every=1", "kl.ceiling=null")
    lost = [(len(alerts(row, "weights-lost")), len(alerts(row, "rolled-back"))) for row in rows(tmp_path / "run")[:6]]
    assert lost == [(step in (3, 5),) * 2 for step in range(1, 7)]
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2, 4, 6]


def test_full_memory_ends_the_run_with_the_key_to_lower_and_a_resumed_one_goes_on_with_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = PPOTrainer.loss

    def limited(self: PPOTrainer, tokens: Any, rows: Any) -> Any:  # the device holds three rows of a training pass
        if len(rows.ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return losses(self, tokens, rows)

    monkeypatch.setattr(PPOTrainer, "loss", limited)
    for changes in ((), ("ppo.microbatch_size=4",)):
        with pytest.raises(RunFailed) as caught:
            train(tmp_path / "run", *changes, resume=bool(changes))
        assert (caught.value.exit_code, "ppo.microbatch_size" in str(caught.value)) == (1, True)
        assert len(str(caught.value).splitlines()) == 1
    train(tmp_path / "run", "ppo.microbatch_size=2", resume=True)
    train(tmp_path / "small", "ppo.microbatch_size=2")
    assert rows(tmp_path / "run") == rows(tmp_path / "small")


def test_full_memory_keeps_the_checkpoint_and_names_the_keys_of_what_did_not_fit(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While responses are drawn in the fourth update, and before any update."""
    sample, calls = Rollouts.sample, list[int]()

    def limited(self: Rollouts, step: int) -> Any:
        calls.append(step)
        if step == 4 and calls.count(4) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return sample(self, step)

    monkeypatch.setattr(Rollouts, "sample", limited)
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "run", "checkpoint.every=1")
    assert all(key in str(caught.value) for key in ("rollout.batch_size", "rollout.max_new_tokens", "step 3"))
    assert checkpoints(tmp_path / "run" / "checkpoints")[-1].step == 3
    train(tmp_path / "run", "checkpoint.every=1", resume=True)
    assert calls == [1, 2, 3, 4, 4, 5, 6]
    monkeypatch.setattr("rlhf_kl.training.start.check_policy", lambda *_: torch.empty(1 << 60))
    with pytest.raises(RunFailed) as caught:
        train(tmp_path / "other")
    assert all(key in str(caught.value) for key in ("rollout.batch_size", "ppo.microbatch_size"))


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def background(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The setting; in the background a checkpoint takes longer than an update."""
    write = saving.save_checkpoint

    def slow(*parts: Any) -> Any:
        time.sleep(0.3)
        return write(*parts)

    if request.param:
        monkeypatch.setattr(saving, "save_checkpoint", slow)
    return f"checkpoint.background={request.param}"


def test_the_best_checkpoint_is_kept_beside_the_newest(train: Train, tmp_path: Path, background: str) -> None:
    settings = ("checkpoint={every: 1, keep: 1, best: objective/scores}", background, "eval.every=100")
    summary = train(tmp_path / "run", *settings)
    measured = {row["step"] - 1: row["objective/scores"] for row in rows(tmp_path / "run")[1:6]}
    best = max(measured, key=measured.__getitem__)
    assert summary["best_checkpoint"] == {"step": best, "metric": "objective/scores", "value": measured[best]}
    assert [c.step for c in checkpoints(tmp_path / "run" / "checkpoints")] == sorted({best, 6})


@pytest.mark.quick
def test_a_rollback_to_the_start_forgets_what_was_learned_since(train: Train, tmp_path: Path, background: str) -> None:
    """Policy, Adam's moments, critic and controller: the checkpoint of the crossing holds none of it."""
    settings = ("kl.target=0.002", "kl.ceiling={value: 0.004, action: rollback}", "ppo.learning_rate=1e-2")
    train(tmp_path / "run", *settings, "kl.controller={kind: fixed, coef: 0.1}", "policy.value=features", background)
    found = rows(tmp_path / "run")[:6]
    above = [row["step"] for row in found if row["kl/token"] > 0.004]
    assert above[0] == 2  # of updates 1 and 2 nothing is left
    for row in found:
        assert bool(alerts(row, "rolled-back")) == (row["step"] in above)
        assert (row["kl/coef_next"] > row["kl/coef"]) == (row["step"] in above)
    start, turned = (tmp_path / "run" / "checkpoints" / f"step-{step:06d}" for step in (0, 2))
    for file in ("model-00001.safetensors", "optimizer-00001.safetensors"):
        before, after = load_file(start / file), load_file(turned / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    before, after = (
        json.loads((c / "state.json").read_text())["tracked"][0]["trainer"]["controller"] for c in (start, turned)
    )
    assert after == before | {"beta": 2 * before["beta"], "raised": 2.0}


@pytest.mark.quick
@pytest.mark.parametrize(("now", "saved", "after"), [(0.25, 1.0, 0.25), (1.0, 0.5, 0.5)])
def test_a_rate_that_was_lowered_stays_lower_when_a_run_goes_back(now: float, saved: float, after: float) -> None:
    rate = SimpleNamespace(factor=now)
    run = SimpleNamespace(restore=lambda *_: setattr(rate, "factor", saved))
    loop: Any = SimpleNamespace(trainer=SimpleNamespace(rate=SimpleNamespace(adaptive=rate)), run=run)
    TrainLoop.go_back(loop, Checkpoint(Path("step-000001")))
    assert rate.factor == after
