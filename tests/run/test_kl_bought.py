from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.run.kl_bought import KLBought

BATCH, TOKENS = 64, 30.0
SIGMA = 2.0  # of the reference's scores
# The tilt of Gaussian scores, where the gain is sigma sqrt(2 KL), as far as samples might show it: 4.5 nats.
CURVE = [{"coef": SIGMA / g, "kl": g**2 / 2, "gain": SIGMA * g} for g in (3 * 0.85**i for i in range(24, -1, -1))]

Row = dict[str, Any]
MakeRow = Callable[[int], Row]


def _watch(*, goal: bool = True, curve: Any = CURVE, warns: bool = True, batch: int = BATCH, **kl: Any) -> KLBought:
    sections = {"kl": {"target": 3.0, "unit": "sequence"} | kl, "rollout": {"batch_size": batch}}
    config = TrainConfig.model_validate(sections | {"ppo": {"minibatch_size": batch}})
    return KLBought(
        config, curve=curve, mean=1.0, mean_stderr=0.05, spread=SIGMA, learning_rate=1e-3,
        target=config.kl.target_value if goal else None, warns=warns,
    )  # fmt: skip


def _run(watch: KLBought, make_row: MakeRow, updates: int = 40, first: int = 1) -> list[tuple[int, str]]:
    """(update, alert)."""
    raised = []
    for step in range(first, first + updates):
        row = {"step": step, **make_row(step)}
        raised += [(step, alert) for alert in watch(row)]
    return raised


def _rows(share: Callable[[int], float] | float, seed: int = 0, kl: Callable[[int], float] | float = 3.0) -> MakeRow:
    """Updates whose score is worth `share` of the KL by the Gaussian law, with the noise of batches of 64."""
    rng = random.Random(seed)

    def row(step: int) -> Row:
        level = kl if isinstance(kl, float) else kl(step)
        part = share if isinstance(share, float) else share(step)
        gain = SIGMA * math.sqrt(2 * part * level)
        return {
            "kl/sequence": level * (1 + rng.gauss(0, 0.1)),
            "kl/token": level / TOKENS * (1 + rng.gauss(0, 0.1)),
            "kl/coef": 0.1,
            "objective/scores_shaped": 1.0 + gain + rng.gauss(0, SIGMA / math.sqrt(BATCH)),
            # The standard error of a mean per token where k1 of a response varies by sqrt(2 KL).
            "kl/k1_stderr": math.sqrt(2 * level) / math.sqrt(BATCH) / TOKENS,
            "rollout/tokens": int(BATCH * TOKENS),
            "rollout/response_length": TOKENS,
        }

    return row


# ---- the figure ----


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 1.0])
def test_the_share_by_the_gaussian_law(share: float) -> None:
    row = {"kl/sequence": 2.0, "kl/token": 0.1, "objective/scores_shaped": 1.0 + SIGMA * math.sqrt(2 * share * 2.0)}
    assert _watch().share(row) == pytest.approx(share, rel=0.01)


def test_the_share_is_between_nothing_and_all() -> None:
    assert _watch().share({"kl/sequence": 2.0, "objective/scores_shaped": -1.0}) == 0.0
    assert _watch().share({"kl/sequence": 1.0, "objective/scores_shaped": 6.0}) == 1.0


def test_beyond_the_samples_the_share_is_a_lower_bound() -> None:
    """A gain of 4 sigma costs 8 nats by the law; the samples end at 3 sigma."""
    share = _watch().share({"kl/sequence": 16.0, "objective/scores_shaped": 1.0 + 4 * SIGMA})
    assert share is not None
    assert 4.5 / 16 < share < 8 / 16


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"kl/sequence": math.nan, "objective/scores_shaped": 2.0},
        {"kl/sequence": 2.0, "objective/scores_shaped": None},
        {"kl/sequence": 0.0, "objective/scores_shaped": 1.0},
        # A batch of 64 measures the gain with an error of sigma / 8, the price of which is 1/128 nats.
        {"kl/sequence": 0.01, "objective/scores_shaped": 1.3},
    ],
)
def test_unknown_is_none(row: Row) -> None:
    assert _watch().share(row) is None
    assert _watch()(row) == []


def test_scores_that_are_all_alike_say_nothing() -> None:
    assert _run(_watch(curve=[]), _rows(0.0)) == []
    assert _watch(curve=[]).share(_rows(0.5)(1)) is None


# ---- the alert ----


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_buys_score_is_silent(seed: int) -> None:
    """The KL is there after twelve updates, the score comes later: at first a tenth of what the KL could buy."""
    rows = _rows(lambda step: min(0.7, 0.16 + 0.01 * step), seed, lambda step: 3.0 * min(1.0, step / 12))
    assert _run(_watch(), rows, 100) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.0, 0.04])
def test_noise_is_named_soon_after_the_kl_is_there_and_once(seed: int, share: float) -> None:
    rows = _rows(share, seed, lambda step: 3.0 * min(1.0, step / 12))  # half of the target in update 6
    [(step, alert)] = _run(_watch(), rows, 100)
    assert 13 <= step <= 16
    assert alert.startswith("kl-not-bought: over the last 8 updates the gain in score needs at most ")
    assert "\n" not in alert


def test_nothing_is_said_of_a_kl_far_below_its_target() -> None:
    assert _run(_watch(), _rows(0.0, kl=1.2)) == []
    assert len(_run(_watch(), _rows(0.0, kl=2.4))) == 1


def test_the_target_is_in_the_unit_of_the_config() -> None:
    for unit, target in (("sequence", 3.0), ("token", 0.1)):
        assert len(_run(_watch(unit=unit, target=target), _rows(0.0))) == 1
        assert _run(_watch(unit=unit, target=3 * target), _rows(0.0)) == []


def test_without_a_target_the_kl_has_to_be_large() -> None:
    assert _run(_watch(goal=False), _rows(0.0, kl=1.0)) == []  # 0.03 nats per token
    assert len(_run(_watch(goal=False), _rows(0.0, kl=6.0))) == 1


def test_few_responses_prove_nothing() -> None:
    """Two responses at a time, and the same score may be luck."""
    assert len(_run(_watch(), _rows(0.03))) == 1
    assert _run(_watch(batch=2), _rows(0.03)) == []


def test_nothing_is_said_where_the_samples_end() -> None:
    """At 60 nats even 3.5 sigma is only known to cost 6 nats or more."""
    gain = 1.0 + 3.5 * SIGMA
    assert _run(_watch(), lambda step: _rows(0.0, kl=60.0)(step) | {"objective/scores_shaped": gain}) == []


def test_a_policy_that_starts_away_from_its_reference_is_not_warned_of() -> None:
    assert _run(_watch(warns=False), _rows(0.0)) == []


def test_it_comes_again_only_after_it_has_cleared() -> None:
    waves = {True: 0.02, False: 0.5}
    assert len(_run(_watch(), _rows(lambda step: waves[step // 20 != 1]), 60)) == 2
    waves[False] = 0.11  # above the threshold, not by the margin
    assert len(_run(_watch(), _rows(lambda step: waves[step // 20 != 1]), 60)) == 1


def test_the_updates_are_counted_from_where_the_kl_is_there() -> None:
    [(step, _)] = _run(_watch(), _rows(0.0, kl=lambda step: 1e-4 if step == 7 else 3.0), 20)
    assert step == 15


def test_skipped_updates_are_left_out() -> None:
    rows = _rows(0.0)
    lost = {"kl/sequence": math.nan, "objective/scores_shaped": math.nan}
    assert len(_run(_watch(), lambda step: rows(step) | (lost if step % 2 else {}), 20)) == 1


@pytest.mark.parametrize("cut", [3, 9, 15, 30])
def test_rows_read_again_lead_to_the_same_alerts(cut: int) -> None:
    """As a resumed run does it: from the rows of its folder."""
    make, whole = _rows(lambda step: 0.02 if step // 20 != 1 else 0.5), _watch()
    rows = [make(step) for step in range(60)]
    expected = [whole(row) for row in rows]
    again = _watch()
    for row in json.loads(json.dumps(rows[:cut])):
        again(row)
    assert [again(row) for row in rows[cut:]] == expected[cut:]


# ---- the mend ----


def _words(coef: float, **kl: Any) -> str:
    rows = _rows(0.0)
    [(_, alert)] = _run(_watch(**kl), lambda step: rows(step) | {"kl/coef": coef})
    return alert


def test_a_penalty_noisier_than_the_score_is_mended_first() -> None:
    """k1 of a response varies by sqrt(6) = 2.45 at 3 nats: times 2 by 4.9, the scores by 2."""
    words = _words(2.0, placement="reward")
    assert "Set kl.placement: rao_blackwell with kl.estimator: exact, since beta times k1 varies by 4.9 " in words
    assert "between responses, the score by 2.0; or lower ppo.learning_rate (0.001, say to 0.0003)" in words


@pytest.mark.parametrize(
    ("coef", "kl"),
    [
        (0.5, {"placement": "reward"}),
        (2.0, {"placement": "rao_blackwell", "estimator": "exact"}),
        (2.0, {"placement": "loss", "estimator": "k2"}),
    ],
)
def test_else_the_step_is_too_large_or_the_batch_too_small(coef: float, kl: dict[str, str]) -> None:
    words = _words(coef, **kl)
    assert "rao_blackwell" not in words
    assert ". Lower ppo.learning_rate (0.001, say to 0.0003) or raise rollout.batch_size (64, say to 256)" in words
