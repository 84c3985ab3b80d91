import json
import math
import random
from itertools import pairwise
from statistics import fmean

import pytest
import typer

from rlhf_kl.commands.simulate import simulate
from rlhf_kl.control import AdaptiveKL, FixedKL, Guard
from rlhf_kl.control.plant import Plant, example_scores, simulate_plant, tilt_law
from rlhf_kl.control.verdict import tail_error
from rlhf_kl.errors import InputError

TARGET, LENGTH = 0.1, 20.0
SATURATING = tilt_law(example_scores())


class ClippedPlant(Plant):
    """Its sqrt(KL) rises by at most 0.25 per update, as that of a policy whose updates are clipped."""

    def advance(self, coef):
        before = self.root_kl
        super().advance(coef)
        self.root_kl = min(self.root_kl, before + 0.25)


def ideal_coef(law, kl):
    """The beta at which a falling `law` gives `kl` nats per sequence, by bisection in log(beta)."""
    low, high = -12.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if law(math.exp(middle)) > kl else (low, middle)
    return math.exp(high)


LAWS = {"gaussian": lambda coef: 0.5 / coef**2, "saturating": SATURATING}  # of scores with a spread of 1


def test_first_order_approach_in_the_root():
    plant = Plant(lambda coef: 1.0 / coef**2, speed=0.5, noise=0.0)
    rows = simulate_plant(Guard(FixedKL(coef=1.0)), plant, updates=3)
    assert [math.sqrt(row.kl) for row in rows] == pytest.approx([0.0, 0.5, 0.75])


def test_the_saturating_plant_flattens():
    slopes = [math.log(SATURATING(b / 1.1) / SATURATING(b * 1.1)) / math.log(1.21) for b in (3.0, 0.5, 0.15)]
    assert slopes == sorted(slopes, reverse=True)
    assert slopes[0] == pytest.approx(2.0, abs=0.2)
    assert slopes[-1] < 0.6


def test_without_a_penalty_the_kl_goes_where_the_least_beta_leads():
    scores = example_scores()
    law, limit = SATURATING, math.log(1024 / scores.count(max(scores)))  # the best
    assert law(0.0) == law(1e-300) == pytest.approx(limit, rel=1e-3)
    rows = simulate_plant(Guard(FixedKL(coef=0.0)), Plant(law, noise=0.0), updates=80)
    assert all(a.kl < b.kl for a, b in pairwise(rows[:30]))
    assert rows[-1].kl == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("sigma", "speed"), [(0.5, 0.1), (1.0, 0.2), (2.0, 0.4)])
def test_adaptive_holds_the_target_on_every_plant(law, sigma, speed):
    def equilibrium(coef):
        return LAWS[law](coef / sigma)

    ideal = ideal_coef(equilibrium, TARGET * LENGTH)
    errors = []
    for start in (0.1, 0.3, 1.0, 3.0, 10.0):
        plant = ClippedPlant(equilibrium, speed=speed, length=LENGTH, seed=7)
        control = Guard(AdaptiveKL(coef=ideal * start, target=TARGET, min_coef=1e-5, max_coef=1e3))
        ratios = [row.kl / TARGET for row in simulate_plant(control, plant)]
        errors.append(tail_error(ratios))
        assert max(ratios) < 1.65  # measured, with its noise
    # 5 % noise alone gives 0.04
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.15


@pytest.mark.parametrize("start", [1.0, 0.3, 3.0])
def test_where_overshoots_are_scaled_back_beta_finds_the_one_that_holds_and_keeps_it(start):
    """A policy with the momentum, the noise and the rollouts of a real run; b is 0.2, and beta follows no rollout."""
    holding, moves, misses, coefs = 0.2, [], [], []
    for seed in range(4):
        draw = random.Random(seed).gauss
        law = AdaptiveKL(coef=start * holding, target=TARGET)
        law.observe_solved(start * holding, 1.0)
        control, x, step = Guard(law), 0.0, 0.0
        for number in range(60):
            before, coef, noise = x, control.beta, draw(1.0, 0.045)
            pace = 0.15 if x < 0.8 else 0.06
            drive = -math.tanh(1.5 * math.log(max(x, 0.05)) + math.log(coef / holding))
            step = 1.65 * pace if number == 0 else 0.4 * step + 0.6 * pace * (drive + draw(0.0, 0.3))
            x = max(0.0, x + step)
            kl, after = (TARGET * noise * distance**2 for distance in (before, x))
            control.step(kl, 64, (kl, after, after))
            x *= control.distance_kept()
            if number >= 15:
                moves.append(abs(control.beta / coef - 1.0))
            if number >= 30:
                coefs.append(math.log(control.beta / holding))
                misses.append(abs(before**2 - 1.0))
    assert fmean(moves) < 0.1
    assert fmean(misses) < 0.06
    assert abs(fmean(coefs)) < 0.1


@pytest.fixture
def run(capsys):
    app = typer.Typer()
    app.command()(simulate)

    def call(*arguments):
        app(list(arguments), standalone_mode=False)
        return capsys.readouterr()

    return call


def rows_of(output):
    return json.loads(output.out)


def test_a_kl_that_is_not_a_number_is_null_and_said(run):
    output = run("--kl", "0.1,nan,0.2", "--json")
    rows = rows_of(output)
    assert list(rows[0]) == ["step", "kl", "coef", "coef_next"]
    assert rows[1]["kl"] is None
    assert rows[1]["coef"] == rows[1]["coef_next"]
    assert "step 2: kl-not-finite" in output.err


def test_table_conclusion_and_picture(run, tmp_path):
    picture = tmp_path / "sub" / "loop.png"
    output = run("--controller", "threshold", "--target", "0.1", "--kl", "0.01,0.1,0.2,nan", "--plot", str(picture))
    lines = output.out.splitlines()
    assert lines[2].split() == ["update", "KL", "KL/target", "beta", "next", "beta"]
    assert ["in range" in line for line in lines[3:7]] == [False, True, False, False]
    assert lines[8].endswith(" 1 of 4 updates")
    assert lines[9].startswith("too short ")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kls", "word"),
    [
        ([0.01] * 5 + [0.11] * 15, "settled: in range from update 6 "),
        ([0.01] * 5 + [0.2] * 15, "not settled: off by 100% "),
    ],
)
def test_whether_the_kl_settled(run, kls, word):
    output = run("--controller", "fixed", "--target", "0.1", "--kl", ",".join(map(str, kls)))
    assert any(line.startswith(word) for line in output.out.splitlines())


def test_a_long_run_is_shown_by_a_row_in_three(run):
    lines = run("--updates", "60").out.splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["1", "3", "6"]
    assert all(len(line) <= 80 for line in lines)


def test_the_runs_own_controller_and_sizes(run, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "rollout: {batch_size: 32}\n"
        "ppo: {total_episodes: 320, minibatch_size: 32}\n"
        "kl: {target: 0.05, controller: {kind: ziegler, coef: 0.4, horizon: 64}}\n"
    )
    rows = rows_of(run("--config", str(file), "--json"))
    assert len(rows) == 10
    assert rows[0]["coef"] == 0.4
    assert rows[0]["coef_next"] == pytest.approx(0.36)  # KL 0: 1 - 0.2 * 32/64
    shorter = rows_of(run("--config", str(file), "--set", "kl.controller.horizon=320", "--json"))
    assert shorter[0]["coef_next"] == pytest.approx(0.392)
    other = rows_of(run("--config", str(file), "--controller", "threshold", "--kl", "0.2", "--json"))
    assert other[0]["coef_next"] == pytest.approx(0.6)
    slow = run("--config", str(file), "--set", "kl.controller.horizon=100000", "--json")
    assert "ZieglerKL can move beta only from 0.4 " in slow.err


def test_the_updates_of_a_config_are_those_in_which_the_controller_moves(run, tmp_path):
    file = tmp_path / "mine.yaml"
    sizes = "rollout: {batch_size: 64}\nppo: {total_episodes: 640, value_warmup: 2}\n"
    file.write_text(sizes + "kl: {controller: {kind: schedule, coef: 0.1, end_coef: 0.9}}\n")
    expected = [0.1 * (2 + i) for i in range(8)]
    rows = rows_of(run("--config", str(file), "--json"))
    assert [row["coef_next"] for row in rows] == pytest.approx(expected)
    given = rows_of(run("--config", str(file), "--kl", "0.1,0.2", "--json"))  # the schedule is still the config's
    assert [row["coef_next"] for row in given] == pytest.approx(expected[:2])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--kl", "0.1,x"], "--kl"),
        (["--kl", "-0.1"], "--kl"),
        (["--set", "kl.target=0.1"], "--config"),
        (["--coef", "-1"], "coef"),
        (["--updates", "3", "--plot", "loop.nonsense"], "--plot"),
    ],
)
def test_bad_input_is_one_line(run, arguments, word):
    with pytest.raises(InputError, match=word) as caught:
        run(*arguments)
    assert len(caught.value.problems) == 1
