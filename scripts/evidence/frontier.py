"""Score over KL beside the best that any policy can do at that KL (Ziegler et al. 2019, figure 3), with errors.

    python scripts/evidence/frontier.py FOLDER     reads the runs of FOLDER/../harm and methods

The optimum is estimated by tilting samples of the reference (`rlhf_kl.control.tilt`), its error by leaving out prompts
in blocks. TinyStories' runs (stories_methods.yaml) are trained here. The share of a run is its gain over the optimum's
at its own KL, at updates 3 to 12 and at the last ten. Into FOLDER/frontier.json and two pictures.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from common import ROOT, Runs, finished, once, program, scorers, trained, with_error
from transformers import AutoTokenizer

from rlhf_kl.control.tilt import centre_groups, solve_tilt
from rlhf_kl.data.rows import read_texts
from rlhf_kl.report.drawing import Chart, Line, marks, save_sheet
from rlhf_kl.report.one_run import RunResult
from rlhf_kl.run.log import write_json
from rlhf_kl.training import sets

STORIES = 128  # prompts of them
SAMPLES = 8  # of the reference for a prompt
BLOCKS = 10  # of prompts
EARLY = slice(2, 12)  # updates 3 to 12
MIN_ESS = 10.0  # effective samples below which the tilt is not trusted
POINTS = 40
SHOWN = ("kl", "gain", "best", "share")

Score = Callable[[Sequence[str], Sequence[str]], list[float]]


class Reward(NamedTuple):
    """A reward, and the runs that are trained on it."""

    title: str
    score: Score
    prompts: str
    runs: Runs


class Reference(NamedTuple):
    """Scores of its samples, and the prompt of each."""

    scores: list[float]
    groups: list[str]

    def without(self, block: int) -> Reference:
        """All but one block of the prompts."""
        numbers = {group: i % BLOCKS for i, group in enumerate(dict.fromkeys(self.groups))}
        kept = [i for i, group in enumerate(self.groups) if numbers[group] != block]
        return Reference([self.scores[i] for i in kept], [self.groups[i] for i in kept])

    def best(self, kl: float) -> float:
        """The most that any policy gains at `kl` nats per response; NaN where the samples do not tell."""
        solution = solve_tilt(centre_groups(self.scores, self.groups), kl, min_ess=MIN_ESS)
        return math.nan if solution.extrapolated or kl > solution.limit else solution.tilt.gain

    def best_with_error(self, kl: float) -> tuple[float, float]:
        """The same with its standard error, a jackknife's; NaN where the samples, or a part of them, do not tell."""
        left = [self.without(block).best(kl) for block in range(BLOCKS)]
        if not all(map(math.isfinite, left)):
            return math.nan, math.nan
        return self.best(kl), math.sqrt(BLOCKS - 1) * pstdev(left)


def sampled(run: RunResult, file: Path, prompts: str) -> list[dict[str, Any]]:
    """Responses of the run's reference to its training prompts."""
    words = ["generate", "--run", str(run.path), "--with-reference", "--samples", str(SAMPLES), "--prompts", prompts]
    rows = once(file, lambda: [{key: row[key] for key in ("prompt", "reference")} for row in program(*words)])
    return list(rows)


def reached(run: RunResult, part: slice, reference: Reference) -> dict[str, float]:
    """KL in nats per response and gain of some updates, and the share of the optimum's gain."""
    rows = run.updates[part]
    kl, score = (fmean(row[key] for row in rows) for key in ("kl/sequence", "objective/scores"))
    error = math.hypot(*(row["objective/scores_stderr"] for row in rows)) / len(rows)
    gain, best = score - fmean(reference.scores), reference.best(kl)
    return {"kl": kl, "gain": gain, "gain_error": error, "best": best, "share": gain / best}


def chart(slug: str, title: str, reference: Reference, ends: dict[str, list[dict[str, float]]]) -> Chart:
    """Points of runs with errors below the curve of the optimum with its band."""
    most = max(one["kl"] for found in ends.values() for one in found)
    roots = [math.sqrt(most) * 1.05 * (i + 1) / POINTS for i in range(POINTS)]
    curve = [(root, *reference.best_with_error(root * root)) for root in roots]
    known = [(root, gain, error) for root, gain, error in curve if math.isfinite(gain)]
    x, y, error = map(list, zip(*known, strict=True))
    low, high = ([gain + sign * e for gain, e in zip(y, error, strict=True)] for sign in (-1, 1))
    lines = [Line("best at this KL", "ink", x, y, low, high, marker="")]
    for (name, found), tint, marker in zip(ends.items(), ("s1", "s3", "s5", "s6", "s9", "s7"), "os^Dv*", strict=False):
        gains, errors = [one["gain"] for one in found], [one["gain_error"] for one in found]
        band = [[gain + sign * e for gain, e in zip(gains, errors, strict=True)] for sign in (-1, 1)]
        points = marks(name, tint, [math.sqrt(one["kl"]) for one in found], gains, marker)
        lines.append(points._replace(low=band[0], high=band[1]))
    return Chart(slug, title, "score gained", lines, xlabel="square root of the KL (nats per response)")


def told(values: list[float]) -> dict[str, float | None]:
    """Mean and standard error over the seeds; None for both where a value is not known."""
    return with_error(values) if all(map(math.isfinite, values)) else {"mean": None, "error": None}


def beginnings(run: RunResult, folder: Path) -> Path:
    """A file of prompts as the run had them: the first tokens of stories."""
    tokenizer = AutoTokenizer.from_pretrained(run.path / "final")
    texts = sets.load("--stories", run.config.data.prompts, "train", partial(read_texts, column="text"))[:STORIES]
    cut = [tokenizer(text).input_ids[: run.config.data.first_tokens] for text in texts]
    lines = [json.dumps({"prompt": tokenizer.decode(ids, skip_special_tokens=True)}) for ids in cut]
    file = folder / "stories.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    """Sample the references, judge the runs, draw."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    harm, methods = (finished(folder.parent / name) for name in ("harm", "methods"))
    stories = trained("stories_methods.yaml", folder / "stories_methods")
    glad = runpy.run_path(str(ROOT / "scripts" / "stress_rewards.py"))["glad"]
    chat = str(ROOT / "configs" / "smollm2" / "prompts.jsonl")
    rewards = {
        name: Reward(title, scorers()[name], chat, {k: v for k, v in (harm | methods).items() if k.startswith(name)})
        for name, title in (("positive", "VADER"), ("easy", "readability"), ("plain", "rule"))
    }
    rewards["glad"] = Reward("TinyStories", glad, "", stories)
    result: dict[str, Any] = {"seeds": []}
    charts = []
    for name, reward in rewards.items():
        if not reward.runs:
            continue
        some = next(iter(next(iter(reward.runs.values())).values()))
        prompts = reward.prompts or str(beginnings(some, folder))
        kind = "chat" if reward.prompts else "stories"
        rows = sampled(some, folder / f"{kind}.json", prompts)
        texts, groups = [row["reference"] for row in rows], [row["prompt"] for row in rows]
        reference = Reference(reward.score(groups, texts), groups)
        ends: dict[str, list[dict[str, float]]] = {}
        title = reward.title
        for variant, runs in reward.runs.items():
            found = {seed: (reached(run, EARLY, reference), reached(run, slice(-10, None), reference))
                     for seed, run in runs.items()}  # fmt: skip
            result["seeds"] = sorted({*result["seeds"], *found})
            result[variant] = {
                part: {key: told([one[i][key] for one in found.values()]) for key in ("kl", "gain", "best", "share")}
                for i, part in enumerate(("early", "end"))
            }
            kl = result[variant]["end"]["kl"]["mean"]
            error = reference.best_with_error(kl)[1]
            result[variant]["end"]["best"]["error"] = error if math.isfinite(error) else None
            short = variant.partition("-")[2]
            if short != "none":  # far to the right of what samples tell
                ends[short] = [end for _, end in found.values()]
            if (share := result[variant]["end"]["share"]["mean"]) is not None and short[0].isdigit():
                title = f"{reward.title}: {share:.0%} of the best"  # at the highest target where it is known
        charts.append(chart(name, title, reference, ends))
    write_json(folder / "frontier.json", result)
    for dark in (False, True):
        save_sheet(charts, folder / f"frontier{'-dark' * dark}.png", dark=dark, columns=2 if len(charts) > 1 else 1)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
