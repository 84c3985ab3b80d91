"""The default: learns during the run how the KL depends on beta, and chooses beta accordingly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeAlias

from pydantic import Field

from rlhf_kl.control.base import FIRST_STEP, Law, Positive, clip
from rlhf_kl.control.verdict import BAND

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]

# Fitted with `StepModel` to recorded runs: the paces, the noise and the spreads. The rest was chosen on the runs of
# scripts/bench_control.py and on simulated plants: the fewest that hold the KL.
DISTANCES = (0.05, 100.0)  # smaller and larger x are treated as equal: at 0 a KL has no gradient, and no logarithm
USUAL_PACE = 0.2  # of x per update, before a step was observed
PACE_BOUNDS = (1e-4, 0.5)
SAMPLING_NOISE = 0.3  # of x measured on a single response, before it was learned
NOISE_RATE = 0.1  # of learning the noise from how far measurements lie from their predictions
JUMP = 0.3  # of x: too large for noise. The target is far, or a rollback or other prompts moved the policy
RESTRAINT = 0.03  # cost of a change of log beta by 1, relative to a step error in paces
# Near the target, where the run scales overshoots back: the least changes of beta that held the KL as well.
CALM = 0.04  # the same cost, as a step error of x
HELD_MOVE = 0.1  # log beta changes by this at most while the KL is in band
EDGE = 0.5  # standard deviations above 1 that are aimed at, since what is higher by chance is cut off
SHRINKAGE = 0.3  # of a gap to the target that is small beside its own uncertainty
GRID_STEP = 0.1  # of log b
CANDIDATES = 30  # falls of log beta that are compared, and as many rises
PACES = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of the guess
PRIOR_SPREAD = 2.0  # of log b around the log of the starting beta,
SOLVED_SPREAD = 0.75  # and around that of a beta that was solved from samples: farther away it hardly matters
SPENT = 0.85  # share of the pace: above it, a lower beta has no further effect


class Situation(NamedTuple):
    """The start of a policy update."""

    distance: float  # x = sqrt(KL/target)
    step: float  # of x in the update before
    log_coef: float


class StepModel(NamedTuple):
    """Constants of step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + log(beta_k / b)), and of learning a and b.

    `scripts/fit_adaptive.py` fits them to recorded runs, with whole plants held out.
    """

    momentum: float = 0.4  # m
    distance_power: float = 1.5  # s
    noise: float = 0.25  # of a step measured at the rollout's own states, in paces
    wander: float = 0.125  # share of the belief that moves to either neighbour on the grid of log b every update
    pace_spread: float = 0.5  # of log a around its first guess
    tails: float = 8.0  # degrees of freedom of Student's t: an outlier has little weight


@dataclass(kw_only=True, eq=False)
class AdaptiveKL(Law):
    """Predictive control of x = sqrt(KL/target), the policy's distance from its reference.

    A step of x carries momentum (that of Adam, and of values fitted to the old beta). Its drive is the balance of
    penalty and score. Whitened advantages and Adam bound the drive on both sides:

        step_k = m step_{k-1} - (1 - m) a tanh(s log x_k + log(beta_k / b))

    b is the beta that holds the target and a the pace. Both differ from run to run and b wanders, so the controller
    keeps a belief about the pair (`Belief`) and learns from every step it observes. The wanted x is a share
    `approach` nearer to 1. The next beta is the one with the least expected squared distance to it: so an uncertain
    belief leads to careful changes, and if no beta would change the step, beta stays. log beta changes
    by -down to up per update.

    `observe_update` gets the KL before and after the update at the same states: the step without sampling noise.
    If it is not called, steps are differences of successive measurements. A Kalman filter
    estimates the distance itself from the prediction and the measurement, whose noise is learned.

    Where the run scales the policy back (`scale`), single rollouts that are too high are no work for beta. Near the
    target it then follows only what lasts, in small steps, and leaves overshoots to the scaling.

    Consequences: a cold start needs no special rule, since a rising KL is predicted and is not an error. The first
    steps correct a starting beta that is wrong by a factor of ten. An update that a ceiling has cut still counts with
    its full length. No error is integrated. The first update starts where the KL has no gradient, so it shows the
    pace but nothing about b.
    """

    model: ClassVar = StepModel()
    target: Positive = 0.1
    approach: Annotated[float, Field(gt=0, lt=1)] = 0.3
    down: Positive = 1.2
    up: Positive = 1.8

    state_names = ("coef", "distance", "variance", "noise", "last_step", "observed", "unobserved", "updates", "scales")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.start_coef = self.coef
        self.solved: tuple[float, float] | None = None  # the arguments of `observe_solved`
        self.may_lower = True  # of `observe_progress`
        self.distance: float | None = None  # x of the policy that samples next, as predicted
        self.variance = 0.0  # of that prediction
        self.noise: float | None = None  # variance of a measured x
        self.last_step = 0.0  # the last change of x, before any cut
        self.observed: tuple[float, float] | None = None  # this update's step: without and with a cut
        self.unobserved: tuple[float, float, float, float] | None = None  # the start of a step that was not measured
        self.updates = 0
        self.scales = False  # whether `scale` is called

    @cached_property
    def _belief(self) -> Belief:
        """Created at its first use: the check of a config needs no numpy."""
        coef = self.start_coef if self.solved is None else self.solved[0]
        return Belief(self.model, clip(coef, *self.bounds), self.spread, *self.bounds, USUAL_PACE)

    @property
    def spread(self) -> float:
        """Of log b around its first guess; also how far from the believed b beta has an effect."""
        share = 0.0 if self.solved is None else self.solved[1]
        return PRIOR_SPREAD + share * (SOLVED_SPREAD - PRIOR_SPREAD)

    def observe_solved(self, coef: float, share: float) -> None:
        self.solved = coef, share

    def observe_progress(self, rises: bool) -> None:
        self.may_lower = rises

    def observe_update(self, kl_before: float, kl_after: float, kl_uncut: float) -> None:
        before = self._distance_of(kl_before)
        self.observed = (self._distance_of(kl_uncut) - before, self._distance_of(kl_after) - before)

    def observe_rate(self, factor: float) -> None:
        self._belief.pace = clip(self._belief.pace * factor, *PACE_BOUNDS)
        self.last_step *= factor

    def predict(self, kl: float) -> float:
        """The step of x that the next update is expected to make, from a policy with this measured KL."""
        return self._belief.mean_step(Situation(self._distance_of(kl), self.last_step, math.log(self.coef)))

    def update(self, kl: float, episodes: int) -> None:
        distance = self._locate(self._distance_of(kl), episodes)
        here = Situation(distance, self.last_step, math.log(self.coef))
        self.updates += 1
        model_error = (self.model.noise * self._belief.mean_pace) ** 2
        if self.observed is not None:
            uncut, kept = self.observed
            self._learn(uncut, here)
        else:
            uncut = kept = self._belief.mean_step(here)
            model_error += self._belief.expected_miss(uncut, here)
            self.unobserved = (*here, self.variance)
        self.observed = None
        self.distance, self.last_step = max(0.0, distance + kept), uncut
        self.variance += model_error
        if self.updates > 1:
            here = Situation(self.distance, self.last_step, math.log(self.coef))
            self._move(self._best_move(here, cut=kept < uncut))

    def scale(self) -> float:
        self.scales = True
        if self.distance is None or self.updates < 2:
            return 1.0
        sure = 1.0 + math.sqrt(self.variance)  # to scale back what is only noise would keep the KL below its target
        share = min(1.0, sure / max(DISTANCES[0], self.distance))
        self.distance *= share
        return share

    def log_steps(self, episodes: int) -> tuple[float, float]:
        return self.down, self.up

    def state_dict(self) -> dict[str, Any]:
        belief = {
            "pace": self._belief.pace,
            "probabilities": self._belief.probabilities.tolist(),
            "log_holding": [float(self._belief.log_holding[0]), float(self._belief.log_holding[-1])],
        }
        return super().state_dict() | {"belief": belief}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import numpy as np

        super().load_state_dict({name: value for name, value in state.items() if name != "belief"})
        self._belief.pace = float(state["belief"]["pace"])
        self._belief.probabilities = np.array(state["belief"]["probabilities"])
        low, high = state["belief"]["log_holding"]  # of the run that saved it: the grid depends on the start
        self._belief.log_holding = np.linspace(low, high, len(self._belief.probabilities))

    def _distance_of(self, kl: float) -> float:
        return min(math.sqrt(max(self._finite(kl), 0.0) / self.target), DISTANCES[1])

    def _locate(self, measured: float, episodes: int) -> float:
        """The distance of the policy that has sampled, from the prediction and the measurement."""
        noise = SAMPLING_NOISE**2 / max(1, episodes) if self.noise is None else self.noise
        error = 0.0 if self.distance is None else measured - self.distance
        expected = self.variance + noise
        if self.distance is None or abs(error) > JUMP * (1.0 + math.sqrt(expected)):
            located, self.variance, gain = measured, noise, 1.0
        else:
            gain = self.variance / expected
            located = self.distance + gain * error
            self.variance *= 1.0 - gain
            self.noise = max(0.1 * noise, noise + NOISE_RATE * (error * error - expected))
        if self.unobserved is not None:
            *past, variance = self.unobserved
            self.last_step += gain * error
            self._learn(measured - past[0], Situation(*past), variance + noise)
            self.unobserved = None
        return located

    def _learn(self, step: float, at: Situation, added_variance: float = 0.0) -> None:
        belief = self._belief
        first = self.updates <= 1  # also of an unobserved one: the next update learns it before it counts itself
        guess = clip(abs(step) / ((1.0 - self.model.momentum) * FIRST_STEP), *PACE_BOUNDS)
        if guess > belief.pace or (first and at.distance < JUMP):
            belief.pace = guess
        if not first:
            belief.update(step, at, math.hypot(self.model.noise * belief.pace, math.sqrt(added_variance)))

    def _best_move(self, at: Situation, *, cut: bool) -> float:
        """The change of log beta whose next step is expected to be nearest to the wanted one.

        `cut`: the ceiling cut the last update, which no chance explains.
        """
        gap, down, up, restraint = 1.0 - at.distance, self.down, self.up, RESTRAINT * self._belief.mean_pace
        if self.scales:
            edge = 1.0 + EDGE * math.sqrt(self.variance)
            at = at._replace(distance=min(at.distance, edge))
            gap = edge - at.distance
            if not cut and abs(1.0 - at.distance) < math.sqrt(1.0 + BAND) - 1.0:
                down, up, restraint = min(HELD_MOVE, down), min(HELD_MOVE, up), CALM
        wanted = self.approach * gap**3 / (gap**2 + SHRINKAGE * self.variance)
        moves = sorted([0.0, *_shares(-down), *_shares(up)], key=abs)  # ties: the smallest
        if self.solved is None:
            if self._belief.drive_share(at) > SPENT:
                moves = [move for move in moves if move >= 0.0]
        else:
            # Outside of this range every move goes towards it. While the target is far a lower beta does not help.
            believed, far = self._belief.mean_log_holding, gap > JUMP
            low = min(believed - (0.0 if far else self.spread), at.log_coef)
            high = max(believed + (-self.spread if far else self.spread), at.log_coef)
            moves = [move for move in moves if low <= at.log_coef + move <= high]

        if not self.may_lower:
            start = min(self.start_coef, self.solved[0] if self.solved else self.start_coef)
            least = min(0.0, math.log(start) - at.log_coef)  # back to its start, and not farther
            moves = [move for move in moves if move >= least]

        def cost(move: float) -> float:
            miss = self._belief.expected_miss(wanted, at._replace(log_coef=at.log_coef + move))
            return miss + (restraint * move) ** 2

        return min(moves, key=cost)


class Belief:
    """Probabilities of the pair (log b, a): the log of the beta that holds the target, and the pace.

    A histogram filter: Bayes' rule on a grid, without linearising (Thrun, Burgard & Fox 2005, Probabilistic
    Robotics, section 4.1). `pace` is a guess of a, which PACES multiplies.
    """

    def __init__(
        self, model: StepModel, coef: float, spread: float, min_coef: float, max_coef: float, pace: float
    ) -> None:
        import numpy as np

        self.model, self.pace, self.paces = model, pace, np.array(PACES)
        low, high = math.log(min_coef) - 1.0, math.log(max_coef) + 1.0
        points = math.ceil((high - low) / GRID_STEP) + 1
        self.log_holding: Floats = np.linspace(low, high, points)
        paces = _normalised(np.exp(-0.5 * (np.log(self.paces) / model.pace_spread) ** 2))
        distance = (self.log_holding - math.log(coef)) / spread
        self.probabilities: Floats = np.outer(_normalised(np.exp(-0.5 * distance**2)), paces)

    @property
    def mean_pace(self) -> float:
        """The mean of a."""
        return self.pace * float(self.probabilities.sum(0) @ self.paces)

    @property
    def mean_log_holding(self) -> float:
        """The mean of log b."""
        return float(self.probabilities.sum(1) @ self.log_holding)

    def mean_step(self, at: Situation) -> float:
        """The expected step."""
        return float((self.probabilities * self._steps(at)).sum())

    def drive_share(self, at: Situation) -> float:
        """The expected drive over the pace, in [-1, 1]."""
        return float(self.probabilities.sum(1) @ self._drive(at))

    def expected_miss(self, wanted: float, at: Situation) -> float:
        """Expected squared difference between the step and the wanted one."""
        return float((self.probabilities * (self._steps(at) - wanted) ** 2).sum())

    def update(self, step: float, at: Situation, noise: float) -> None:
        """Learn from a step that was measured with this standard deviation."""
        import numpy as np

        error = (step - self._steps(at)) / noise
        tails, wander = self.model.tails, self.model.wander
        likely = self.probabilities * (1.0 + error**2 / tails) ** (-(tails + 1.0) / 2.0)
        padded = np.concatenate([likely[:1], likely, likely[-1:]])  # log b wanders to its neighbours
        self.probabilities = _normalised(wander * (padded[:-2] + padded[2:]) + (1.0 - 2.0 * wander) * likely)

    def _steps(self, at: Situation) -> Floats:
        """The next step under each log b (rows) and pace (columns)."""
        drive = self._drive(at)[:, None] * (self.pace * self.paces)
        steps: Floats = self.model.momentum * at.step + (1.0 - self.model.momentum) * drive
        return steps

    def _drive(self, at: Situation) -> Floats:
        """The drive under each log b, in paces."""
        import numpy as np

        balance = self.model.distance_power * math.log(max(at.distance, DISTANCES[0])) + at.log_coef - self.log_holding
        drive: Floats = -np.tanh(balance)
        return drive


def _shares(most: float) -> list[float]:
    """Changes of log beta to compare, up to the largest."""
    return [most * i / CANDIDATES for i in range(1, CANDIDATES + 1)]


def _normalised(weights: Floats) -> Floats:
    total: Floats = weights / weights.sum()
    return total
