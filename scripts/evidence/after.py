"""What the runs of harm.yaml did to their policy: the loss on answers and on stories, and answers to three prompts.

    python scripts/evidence/after.py FOLDER [RUNS]     RUNS: a comparison's folder, default FOLDER/../harm

Losses are measured by transformers alone, text by text, so that the difference to the reference has a paired error.
Of eight answers to a prompt the one with the median score is shown. Into FOLDER/after.json. Stories: those of
RLHF_KL_REAL, else of the hub. Finished parts are used again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import MODEL, ROOT, finished, once, program, real, with_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_kl.data.rows import read_texts
from rlhf_kl.report.one_run import RunResult
from rlhf_kl.run.log import write_json
from rlhf_kl.training import sets

STORIES, LONGEST = 30, 192  # texts, and tokens of one
PROMPTS = ("Write a goodbye to a colleague.", "What helps against a headache?", "Describe a winter evening.")
ANSWERS = 8


def texts() -> dict[str, list[str]]:
    """Answers as a person would write them, and stories."""
    answers = (ROOT / "configs" / "smollm2" / "texts.txt").read_text(encoding="utf-8").split("\n")
    ref = real("data/tinystories-1000/stories.jsonl", "roneneldan/TinyStories")
    split = "test" if Path(ref).is_file() else "validation"
    stories = sets.load("--stories", ref, split, partial(read_texts, column="text"))
    return {"answers": [line for line in answers if line.strip()], "stories": list(islice(stories, STORIES))}


@torch.inference_mode()
def losses(model: str, documents: dict[str, list[str]]) -> dict[str, list[list[float]]]:
    """Of each text: the sum of its tokens' losses in nats, and their number."""
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    network.float()
    found: dict[str, list[list[float]]] = {name: [] for name in documents}
    for name, lines in documents.items():
        for line in lines:
            ids = tokenizer(line, return_tensors="pt").input_ids[:, :LONGEST]
            logits = network(ids).logits[0, :-1]
            total = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            found[name].append([float(total), ids.shape[1] - 1])
    return found


def risen(own: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> dict[str, float]:
    """Nats per token above the reference, with the standard error over texts, and the perplexity."""
    tokens = sum(count for _, count in reference)
    rises = [a - b for (a, _), (b, _) in zip(own, reference, strict=True)]
    mean = sum(rises) / tokens
    rest = [rise - mean * count for rise, (_, count) in zip(rises, reference, strict=True)]
    error = math.sqrt(sum(x * x for x in rest) * len(rest) / (len(rest) - 1)) / tokens
    return {"nats": mean, "error": error, "perplexity": math.exp(sum(total for total, _ in own) / tokens)}


def answers(run: RunResult, file: Path, *options: str) -> Any:
    """What it answers to the three prompts."""
    prompts = file.parent / "prompts.jsonl"
    prompts.write_text("".join(f"{json.dumps({'prompt': prompt})}\n" for prompt in PROMPTS), encoding="utf-8")
    words = ["generate", "--run", str(run.path), "--prompts", str(prompts), "--samples", str(ANSWERS), "--scores"]
    return once(file, lambda: program(*words, "--plugins", *options))


def median_text(rows: Sequence[dict[str, Any]], prompt: str, who: str = "") -> str:
    """The answer whose score is the lower median."""
    score, text = (f"{who}_score", who) if who else ("score", "response")
    own = sorted((row for row in rows if row["prompt"] == prompt), key=lambda row: row[score])
    return str(own[(len(own) - 1) // 2][text]).strip()


def main() -> None:
    """Measure each run, and write means over seeds."""
    folder = Path(sys.argv[1]).resolve()
    source = Path(sys.argv[2]) if len(sys.argv) > 2 else folder.parent / "harm"
    folder.mkdir(parents=True, exist_ok=True)
    documents = texts()
    before = once(folder / "start.json", lambda: losses(MODEL, documents))
    result: dict[str, Any] = {"seeds": []}
    start: dict[str, Any] = {name: risen(before[name], before[name]) for name in documents}
    for variant, runs in finished(source).items():
        entry: dict[str, list[Any]] = {name: [] for name in documents}
        for seed, run in runs.items():
            final, name = str(run.path / "final"), run.path.name
            after = once(folder / f"{name}.json", lambda final=final: losses(final, documents))
            for kind in documents:
                entry[kind].append(risen(after[kind], before[kind]))
            rows = answers(run, folder / f"{name}-answers.json", "--with-reference")
            if seed == min(runs):
                shown = {prompt: median_text(rows, prompt) for prompt in PROMPTS}
                start.setdefault("texts", {}).setdefault(
                    variant.split("-")[0], {prompt: median_text(rows, prompt, "reference") for prompt in PROMPTS}
                )
            result["seeds"] = sorted({*result["seeds"], seed})
        means = {kind: {key: fmean(one[key] for one in found) for key in found[0]} for kind, found in entry.items()}
        # Texts are the same for all seeds: their error does not shrink with more of them; seeds have one of their own.
        spread = {kind: with_error([one["nats"] for one in found])["error"] for kind, found in entry.items()}
        result[variant] = means | {"error_of_seeds": spread, "texts": shown}
    write_json(folder / "after.json", result | {"start": start})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
