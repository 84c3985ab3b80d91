"""Does forgetting follow the forward KL (RL's Razor, 2509.04259)? SmolLM2's runs, and fine-tuning on the same texts.

    python scripts/evidence/razor.py FOLDER     reads FOLDER/../harm, again, methods, after and frontier

Forgetting is the rise of the loss above the reference's, in nats per token, on two kinds of texts: answers, which are
near what the runs are asked for, and stories, which are not. KLs are those of held-out prompts. The arms of `sft` learn
the reference's own best answers by VADER's score. R² of a straight line through all runs, and through those of one
method alone, and for the logarithms. Into FOLDER/razor.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import correlation, linear_regression
from typing import Any

import yaml
from after import losses, risen, texts
from common import HERE, MODEL, ROOT, finished, once, program, run_program, scorers
from frontier import sampled

from rlhf_kl.run.log import write_json

ARMS = {"sft-1": (1e-5, 2), "sft-2": (3e-5, 2), "sft-3": (1e-4, 2), "sft-4": (1e-4, 6)}  # learning rate, epochs
SAMPLES = 96
PROMPTS = str(ROOT / "configs" / "smollm2" / "prompts.jsonl")
KLS = ("forward_kl", "kl")


def best_answers(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A file of the best of the reference's answers to each prompt."""
    best: dict[str, tuple[float, str]] = {}
    for row, score in zip(rows, scorers()["positive"]([], [row["reference"] for row in rows]), strict=True):
        best[row["prompt"]] = max(best.get(row["prompt"], (-2.0, "")), (score, row["reference"]))
    file = folder / "best.jsonl"
    lines = [json.dumps({"prompt": prompt, "response": text.strip()}) for prompt, (_, text) in best.items()]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def arm(name: str, folder: Path, answers: Path) -> dict[str, Any]:
    """Fine-tune, and evaluate beside the reference."""
    rate, epochs = ARMS[name]
    place = folder / name
    if not (place / "final").is_dir():
        sets = {"data.texts": answers, "sft.learning_rate": rate, "sft.epochs": epochs}
        options = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        run_program("sft", "--config", str(HERE / "sft.yaml"), "--output-dir", str(place), *options)
    config = folder / f"{name}.yaml"
    models = {"policy": {"model": str(place / "final")}, "reference": {"model": MODEL}}
    config.write_text(yaml.safe_dump({"extends": str(HERE / "smollm2.yaml")} | models), encoding="utf-8")
    words = ("eval", "--config", str(config), "--samples", str(SAMPLES))
    return dict(once(folder / f"{name}.json", lambda: program(*words)))


def lines(points: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Slope and R² of forgetting over each KL."""
    fits: dict[str, Any] = {}
    for kind in ("answers", "stories"):
        for kl in KLS:
            x, y = [point[kl] for point in points], [point[kind] for point in points]
            fits[f"{kind} {kl}"] = {"slope": linear_regression(x, y).slope, "r2": correlation(x, y) ** 2}
    return fits


def main() -> None:
    """Collect the runs, train the arms, fit."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    documents, above = texts(), folder.parent
    before = once(above / "after" / "start.json", lambda: losses(MODEL, documents))
    points: dict[str, dict[str, float]] = {}

    def add(name: str, final: Path, forward_kl: float, kl: float, score: float) -> None:
        found = once(above / "after" / f"{name}.json", lambda: losses(str(final), documents))
        lost = {kind: risen(found[kind], before[kind])["nats"] for kind in documents}
        points[name] = lost | {"forward_kl": forward_kl, "kl": kl, "score": score}

    found = [finished(above / source) for source in ("harm", "again", "methods")]
    rl = [run for variants in found for runs in variants.values() for run in runs.values()]
    for run in rl:
        figures = (run.evaluations[-1][f"eval/{key}"] for key in ("forward_kl_token", "kl_token", "positive"))
        add(run.path.name, run.path / "final", *figures)
    answers = best_answers(folder, sampled(rl[0], above / "frontier" / "chat.json", PROMPTS))
    for name in ARMS:
        own = arm(name, folder, answers)
        add(name, folder / name / "final", own["forward_kl_token"], own["kl_token"], own["positive"])
    kinds = {"rl": [p for name, p in points.items() if name not in ARMS], "sft": [points[name] for name in ARMS]}
    fits = {"all": lines(list(points.values())), **{kind: lines(some) for kind, some in kinds.items()}}
    seeds = sorted({int(name.rpartition("-s")[2]) for name in points if name not in ARMS})
    write_json(folder / "razor.json", {"seeds": seeds, **points, **fits})
    print(json.dumps(fits, indent=1))


if __name__ == "__main__":
    main()
