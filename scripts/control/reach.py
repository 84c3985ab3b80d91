"""Whether some constant beta holds a row's target: a short search, whose result is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from control.rows import Planner, is_complete, started
from rlhf_kl.config.compare import PlannedRun
from rlhf_kl.report.control import BAND, tail
from rlhf_kl.report.verdict import text_table
from rlhf_kl.run.log import write_json
from rlhf_kl.text import format_number

FILE = "reach.json"
TRIES = 6  # constant betas a row
STEP = (1.5, 10.0)  # least and largest factor between betas while all of them lie on one side of the target
SAME = 0.03  # relative difference of two mean KLs that counts as none
INNER = (0.15, 0.85)  # part of a bracket that the next beta lies in


class Try(NamedTuple):
    """What a constant beta led to, over the second half of the updates."""

    coef: float
    level: float  # mean KL/target
    tail_error: float


class Reach(NamedTuple):
    """Whether a target can be held by a constant beta."""

    tries: list[Try]

    @property
    def best(self) -> Try:
        return min(self.tries, key=lambda one: one.tail_error)

    @property
    def reachable(self) -> bool:
        return self.best.tail_error <= BAND

    def __str__(self) -> str:
        """The lowest tail error, and the beta that it had."""
        shown = f"{format_number(self.best.tail_error)} at {format_number(self.best.coef)}"
        return shown if self.reachable else f"NO: {shown}"


def next_coef(tries: Sequence[Try]) -> float | str | None:
    """The constant beta to try next; the first is auto, and None ends the search.

    A larger beta means a lower KL. Betas that are 3x apart would miss the target: at rest the KL falls as 1/beta to
    1/beta², so within 25 % lies a range of betas no wider than 1.3x to 1.7x.
    """
    if not tries:
        return "auto"
    if len(tries) >= TRIES or Reach(list(tries)).reachable:
        return None
    above = max((one for one in tries if one.level > 1.0), default=None)  # by beta: the nearest to the target
    below = min((one for one in tries if one.level <= 1.0), default=None)
    if above is None or below is None:
        if len(tries) > 1 and abs(tries[-1].level / tries[-2].level - 1.0) < SAME:
            return None  # another beta changes nothing
        level = (above or below or tries[0]).level
        factor = min(max(level if level > 1.0 else 1.0 / max(level, 1e-9), STEP[0]), STEP[1])
        coef = above.coef * factor if above else min(tries).coef / factor
    elif above.coef >= below.coef:  # noise: no bracket is left
        return None
    else:
        low, high = (math.log(min(max(one.level, 1e-3), 1e3)) for one in (above, below))
        share = min(max(low / (low - high) if low > high else 0.5, INNER[0]), INNER[1])
        coef = above.coef * (below.coef / above.coef) ** share
    return float(f"{coef:.3g}")


def tried(planned: PlannedRun) -> Try | None:
    """What a finished run shows, or one that a guard stopped; None of any other."""
    run = started(planned)
    if run is None or not run.updates:
        return None
    coef = float(run.updates[0]["kl/coef"])
    if is_complete(planned, run):
        error = run.figures.tail_error
        return Try(coef, fmean(tail(run.ratios)), math.inf if error is None else error)
    return Try(coef, math.inf, math.inf) if run.status == "stopped by a guard" else None


def search(
    planner: Planner, names: Sequence[str], train: Callable[[list[PlannedRun]], object], *, anew: bool = False
) -> dict[str, Reach]:
    """The reach of each row, one run a row at a time, and kept; rows whose runs are not finished are left out.

    train: trains runs, or does nothing where only what there is shall be read. anew: use nothing that there is.
    """
    known = {} if anew else read_reach(planner)
    tries: dict[str, list[Try]] = {name: [] for name in names if name not in known}
    while tries:
        runs = {}
        for name, before in tries.items():
            if (coef := next_coef(before)) is None:
                known[name] = Reach(before)
                keep(planner, name, known[name])
            else:
                runs[name] = planner.constant(name, coef)
        if new := [run for run in runs.values() if anew or tried(run) is None]:
            train(new)
        tries = {name: [*tries[name], one] for name, run in runs.items() if (one := tried(run)) is not None}
    return {name: known[name] for name in names if name in known}


def read_reach(planner: Planner) -> dict[str, Reach]:
    """What is kept beside the runs, for the same `--set`."""
    return {
        name: Reach([Try(coef, _number(level), _number(error)) for coef, level, error in row["tries"]])
        for name, row in _kept(planner).items()
        if row["set"] == list(planner.sets)
    }


def keep(planner: Planner, name: str, reach: Reach) -> None:
    """Write the reach of a row beside the runs."""
    row = {"set": list(planner.sets), "tries": [list(one) for one in reach.tries]}
    write_json(planner.out / FILE, _kept(planner) | {name: row})


def _kept(planner: Planner) -> dict[str, Any]:
    path = planner.out / FILE
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return rows


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def reach_table(known: Mapping[str, Reach]) -> str:
    """A line a row: the best constant beta, and all that were tried with their mean KL/target."""
    body = [
        [
            name,
            "yes" if reach.reachable else "NO",
            format_number(reach.best.coef),
            format_number(reach.best.tail_error),
            ", ".join(f"{format_number(one.coef)}: {format_number(one.level, 2)}" for one in sorted(reach.tries)),
        ]
        for name, reach in known.items()
    ]
    return text_table(("reachable by a constant beta", "", "beta", "tail error", "tried: KL/target"), body)
