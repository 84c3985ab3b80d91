"""The picture of step 4 of the tutorial: total reward over KL, and the KL over beta by the formula and by runs.

    python scripts/tutorial_pictures.py      .github/images/tutorial.png, in a second

The runs are those of scripts/results/what_beta_does.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_kl.report.drawing import ORDERED, Chart, Line, marks, save_sheet

ROOT = Path(__file__).resolve().parents[1]
BETAS = (0.05, 0.1, 0.2, 0.5)
GAIN = 2.0  # of the score for a KL of 1: score = GAIN sqrt(KL)
MOST = 128.0  # KL of the picture


def total(kl: float, beta: float) -> float:
    """Score less penalty."""
    return GAIN * kl**0.5 - beta * kl


def best_kl(beta: float) -> float:
    """The KL of the highest total: its derivative, GAIN / (2 sqrt(KL)) - beta, is 0."""
    return (GAIN / (2 * beta)) ** 2


def main() -> None:
    """Draw the file."""
    kls = [MOST * i / 400 for i in range(401)]
    totals, tops = [], []
    for tint, beta in zip(ORDERED[::2] + ORDERED[1:2], BETAS, strict=True):
        totals.append(Line(f"β {beta:g}", tint, kls, [total(kl, beta) for kl in kls]))
        top = best_kl(beta)
        if top <= MOST:
            tops.append(marks("", tint, [top], [total(top, beta)]))
    smooth = [0.05 * 10 ** (i / 40) for i in range(41)]
    runs = json.loads((ROOT / "scripts" / "results" / "what_beta_does.json").read_text(encoding="utf-8"))["figures"]
    tried = sorted((float(name.removeprefix("beta-")), figures["kl"]["mean"]) for name, figures in runs.items())
    charts = [
        Chart("total", "2 sqrt(KL) - beta KL", "total reward", [*totals, *tops], xlabel="KL",
              ylim=(-5.0, 17.0), subtitle="dots: the highest points"),
        Chart("formula", "KL of the highest total", "KL", [Line("", "kl", smooth, [best_kl(b) for b in smooth])],
              xlabel="beta", log="xy", subtitle="logarithmic axes"),
        Chart("runs", "KL of real runs", "KL, nats per token", [Line("", "kl", *zip(*tried, strict=True), marker="o")],
              xlabel="beta", log="xy", subtitle="logarithmic axes"),
    ]  # fmt: skip
    save_sheet(charts, ROOT / ".github" / "images" / "tutorial.png", columns=3)


if __name__ == "__main__":
    main()
