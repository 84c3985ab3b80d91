"""Fit the constants of `adaptive` to recorded runs, with whole plants held out.

    python scripts/fit_adaptive.py home='runs/bench_control/runs/adaptive-*' stories='runs/stories/*' ...

Each argument is a plant: a name, and the folders of its runs. The controller is fed a run's KLs and betas as they
were, corrected by the ceiling's forecast, and predicts every step of x = sqrt(KL/target) before it is told of it. A
run's error is the root mean square of the predictions' errors over that of the guess that each step equals the last
one; a plant's is the geometric mean of its runs'. Steps that the ceiling cut are left out.

For each plant the constants of `StepModel` are fitted to all the others, one after the other over a grid until none
improves the worst plant's error, and tested on the plant itself. Printed: that error for the fitted constants, for
those in force, and the constants themselves. `approach`, `down`, `up`, RESTRAINT and CALM decide what is done with
a prediction: `bench_control.py` judges them.
"""

from __future__ import annotations

import argparse
import glob
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rlhf_kl.control.adaptive import AdaptiveKL, StepModel
from rlhf_kl.control.base import COEF_SPAN
from rlhf_kl.control.ceiling import KLForecast
from rlhf_kl.monitors.facts import is_update
from rlhf_kl.run.log import read_jsonl
from rlhf_kl.text import text_table

GRID: dict[str, tuple[float, ...]] = {
    "momentum": (0.2, 0.3, 0.4, 0.5, 0.6),
    "distance_power": (0.75, 1.0, 1.5, 2.0, 3.0),
    "noise": (0.1, 0.15, 0.25, 0.4),
    "wander": (0.03, 0.06, 0.125, 0.25),
    "pace_spread": (0.25, 0.5, 1.0),
    "tails": (4.0, 8.0, 16.0, 64.0),
}
WARMUP = 2  # updates that are not judged: nothing was observed before them


class Observed(NamedTuple):
    """One update of a recorded run; KL over its target."""

    kl: float
    kl_after: float  # before it was scaled
    scale: float  # of the way from the reference, after it
    coef: float
    rate: float
    whole: bool  # not cut by the ceiling


Run = list[Observed]


def read_plant(pattern: str) -> list[Run]:
    """The runs in the folders that a pattern names; those without a KL that is controlled are left out."""
    known = ("kl/error", "kl/after_update", "kl/scale", "kl/coef", "policy/learning_rate")
    runs = []
    for folder in sorted(glob.glob(pattern)):
        rows = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if is_update(row)]
        if len(rows) > 10 and all(row.get(key) is not None for key in known for row in rows):
            runs.append([
                Observed(row["kl/error"] + 1.0, row["kl/after_update"] / row["kl/target"] / row["kl/scale"] ** 2,
                         row["kl/scale"], row["kl/coef"], row["policy/learning_rate"],
                         row["kl/backtrack_factor"] == 1.0)
                for row in rows
            ])  # fmt: skip
    return runs


def error(run: Run, model: StepModel) -> float:
    """Root mean square error of the predicted steps over that of the last step as a guess."""
    controller = AdaptiveKL(
        coef=run[0].coef,
        target=1.0,
        min_coef=min(COEF_SPAN[0] * run[0].coef, *(update.coef for update in run)),
        max_coef=max(COEF_SPAN[1] * run[0].coef, *(update.coef for update in run)),
    )
    controller.model = model
    controller.observe_solved(run[0].coef, 1.0)
    forecast = KLForecast(target=1.0)
    misses, guesses = [], []
    for number, (update, last) in enumerate(zip(run, [run[0], *run], strict=False)):
        controller.observe_rate(update.rate / last.rate)
        controller.coef = update.coef
        guess, predicted = controller.last_step, controller.predict(update.kl)
        forecast.observe(update.kl)
        after = max(0.0, update.kl + forecast.gain * (update.kl_after - update.kl))
        made = math.sqrt(after) - math.sqrt(max(0.0, update.kl))
        if number >= WARMUP and update.whole:
            misses.append((made - predicted) ** 2)
            guesses.append((made - guess) ** 2)
        controller.observe_update(update.kl, after, after)
        controller.update(update.kl, 64)
        if controller.distance is not None:
            controller.distance *= update.scale
        forecast.made = (update.kl, update.kl_after * update.scale**2)
    return math.sqrt(fmean(misses) / fmean(guesses)) if misses else 1.0


def plant_error(runs: Sequence[Run], model: StepModel) -> float:
    """Geometric mean over its runs."""
    return math.exp(fmean(math.log(error(run, model)) for run in runs))


def worst(plants: Mapping[str, list[Run]], model: StepModel) -> float:
    """The error of the plant that is predicted worst, and a little of the mean, which breaks ties."""
    errors = [plant_error(runs, model) for runs in plants.values()]
    return max(errors) + 0.1 * fmean(errors)


def fit(plants: Mapping[str, list[Run]]) -> StepModel:
    """Coordinate descent over GRID from the constants in force."""
    best = StepModel()
    lowest, before = worst(plants, best), math.inf
    while lowest < before:
        before = lowest
        for name, values in GRID.items():
            for value in values:
                model = best._replace(**{name: value})
                if model != best and (found := worst(plants, model)) < lowest:
                    best, lowest = model, found
    return best


def main() -> None:
    """Read the plants, leave each out once, and print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plants", nargs="+", metavar="NAME=FOLDERS")
    named = dict(text.partition("=")[::2] for text in parser.parse_args().plants)
    plants = {name: read_plant(pattern) for name, pattern in named.items()}
    if len(plants) < 2 or not all(plants.values()):
        parser.error(
            "two plants or more, each with finished runs: " + ", ".join(f"{n} {len(r)}" for n, r in plants.items())
        )
    body = []
    for name, runs in plants.items():
        model = fit({other: others for other, others in plants.items() if other != name})
        body.append([name, str(len(runs)), f"{plant_error(runs, StepModel()):.3f}", f"{plant_error(runs, model):.3f}",
                     *(f"{value:g}" for value in model)])  # fmt: skip
        print(f"{name}: done", flush=True)
    everything = fit(plants)
    body.append(["(all)", "", f"{worst(plants, StepModel()):.3f}", f"{worst(plants, everything):.3f}",
                 *(f"{value:g}" for value in everything)])  # fmt: skip
    body.append(["in force", "", "", "", *(f"{value:g}" for value in StepModel())])
    print(text_table(("held out", "runs", "in force", "fitted", *StepModel._fields), body))


if __name__ == "__main__":
    main()
