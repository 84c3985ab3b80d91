"""What needs no TRL."""

from __future__ import annotations

import math
import runpy
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_kl.control import Guard, ScheduledKL
from rlhf_kl.errors import InputError
from rlhf_kl.integrations import trl
from rlhf_kl.integrations.trl import KLBudget, RolloutKL

HALF = [0.5, 0.5, 0.5]


class Trainer:
    """Two responses of two and one tokens; `passes` are the probabilities that its models give, in turn."""

    accelerator = SimpleNamespace(reduce=lambda figures, reduction: figures, unwrap_model=lambda model: model)
    model = SimpleNamespace(training=True)
    args = SimpleNamespace(per_device_train_batch_size=2)
    ref_model = None

    def __init__(self, beta: float, own: int, passes: list[list[list[float]]]) -> None:
        self.beta, self.own, self.masked = beta, own, 0
        self.passes = iter(torch.tensor(rows).log() for rows in passes)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return next(self.passes), None, None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with torch.no_grad():
            for _ in range(self.own):
                self._get_per_token_logps_and_entropies()
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        mask[: self.masked] = 0
        return {f"{part}_{name}": mask for part in ("prompt", "completion") for name in ("ids", "mask")}


def measure(
    beta: float, own: int, *passes: list[list[float]], masked: int = 0
) -> tuple[list[dict[str, float]], RolloutKL]:
    recorded: list[dict[str, float]] = []
    trainer: Any = Trainer(beta, own, list(passes))
    trainer.masked = masked
    rollouts = RolloutKL(trainer, recorded.append)
    generate: Callable[[Any], Any] = trainer._generate_and_score_completions
    generate([])
    return recorded, rollouts


POLICY, REFERENCE = [HALF, HALF], [[0.25, 0.5, 0.1], [0.5, 0.1, 0.1]]
K3 = 0.5 - 1 + 0.6931472  # of the one token whose probabilities differ, by a factor of 2


@pytest.mark.parametrize(
    ("beta", "own", "passes"),
    [
        (0.1, 2, (POLICY, REFERENCE)),
        (0.1, 1, (REFERENCE, POLICY)),
        (0.0, 1, (POLICY, REFERENCE)),
        (0.0, 0, (REFERENCE, POLICY)),
    ],
    ids=["RLOO", "GRPO", "RLOO, beta 0", "GRPO, beta 0"],
)
def test_k3_of_a_rollout_by_hand(beta: float, own: int, passes: Any) -> None:
    """Three tokens in two responses; TRL's own passes are used, what is missing is computed."""
    recorded, _ = measure(beta, own, *passes)
    assert recorded == [{"token": pytest.approx(K3 / 3), "sequence": pytest.approx(K3 / 2)}]


def test_after_an_update_a_response_counts_by_its_ratio() -> None:
    """The longer response becomes half as likely: weights 1/2 and 1, so 1/2 of 2 tokens, and 1 of 1."""
    _, rollouts = measure(0.1, 2, POLICY, REFERENCE, [[0.25, 0.5, 0.5], HALF])
    assert rollouts.after_update() == {"token": pytest.approx(0.0), "sequence": pytest.approx(0.0)}
    _, rollouts = measure(0.1, 2, POLICY, REFERENCE, [[0.5, 0.25, 0.5], HALF])
    second = 2 - 1 - 0.6931472  # the second token's, now half as likely as under the reference
    assert rollouts.after_update() == {
        "token": pytest.approx((K3 + second) / 2 / 2),
        "sequence": pytest.approx((K3 + second) / 2 / 1.5),
    }


def test_responses_that_are_masked_do_not_count() -> None:
    """`mask_truncated_completions`: they once halved the KL per response, and where all were, it was 0."""
    recorded, _ = measure(0.1, 2, POLICY, [HALF, [0.25, 0.5, 0.5]], masked=1)
    assert recorded == [{"token": pytest.approx(K3), "sequence": pytest.approx(K3)}]
    recorded, _ = measure(0.1, 2, POLICY, REFERENCE, masked=2)
    assert all(math.isnan(kl) for kl in recorded[0].values())


def test_an_update_of_several_rollouts_counts_all_their_episodes(caplog: pytest.LogCaptureFixture) -> None:
    """And one without tokens moves nothing: its KL was once 0, which lowered beta."""
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(steps_per_generation=1, generation_batch_size=8),
        num_iterations=1,
        beta=0.1,
        accelerator=SimpleNamespace(is_main_process=True),
        lr_scheduler=SimpleNamespace(get_last_lr=lambda: [1e-5]),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=None,
        _generate_and_score_completions=None,
    )
    law = ScheduledKL(coef=0.1, end_coef=1.0, total_episodes=320)
    budget = KLBudget(trainer, Guard(law), 0.1, "token", False, None)
    budget._update([0.05, math.nan, 0.05, 0.05], SimpleNamespace())
    assert law.episodes_seen == 32
    assert trainer.beta == pytest.approx(0.1 + 0.9 * 32 / 320)
    budget._update([math.nan], SimpleNamespace())
    assert law.episodes_seen == 32
    assert "no-tokens" in caplog.text


def test_importing_it_needs_no_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert "KLBudget" in runpy.run_path(str(trl.__file__))


def test_what_a_trainer_lacks_is_one_line() -> None:
    """A trainer is known by what it has, not by its class or TRL's version."""
    trainer = SimpleNamespace(beta=0.1, num_iterations=1, accelerator=None, _metrics={}, _step=0)
    with pytest.raises(InputError) as caught:
        KLBudget.attach(trainer)
    (problem,) = caught.value.problems
    assert "SimpleNamespace has no _get_per_token_logps_and_entropies, _generate_and_score_completions" in problem
