"""Where the KL is paid: trains the runs of estimators.yaml or stories_estimators.yaml, and says what they show.

    python scripts/evidence/estimators.py FOLDER estimators.yaml

Of each variant: score, true score, the error of holding the target, the highest KL over the target, and the noise of
beta: how much its logarithm changes in an update, on average over the second half. Into FOLDER/estimators.json.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from common import trained, with_error

from rlhf_kl.report.one_run import RunResult
from rlhf_kl.run.log import write_json

FIGURES = ("kl", "tail_error", "peak", "scores", "gold", "perplexity")


def noise_of_beta(run: RunResult) -> float:
    """Mean size of the change of log beta from one update to the next, over the second half of the run."""
    betas = [row["kl/coef"] for row in run.updates[len(run.updates) // 2 :] if row["kl/coef"] > 0]
    return fmean(abs(math.log(after / before)) for before, after in pairwise(betas))


def main() -> None:
    """Train the runs, and write means with standard errors."""
    folder = Path(sys.argv[1]).resolve()
    result: dict[str, Any] = {"seeds": []}
    for variant, runs in trained(sys.argv[2], folder).items():
        every = [run.figures | {"noise_of_beta": noise_of_beta(run)} for run in runs.values()]
        known = [name for name in (*FIGURES, "noise_of_beta") if all(one.get(name) is not None for one in every)]
        result[variant] = {name: with_error([one[name] for one in every]) for name in known}
        verdicts = [one["verdict"] for one in every]
        result[variant] |= {"held": verdicts.count("held"), "runs": len(verdicts)}
        result["seeds"] = sorted({*result["seeds"], *runs})
    write_json(folder / "estimators.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
