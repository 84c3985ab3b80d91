"""Seconds to a score at equal KL: `rlhf-kl train` beside RLOO and GRPO of TRL.

    python scripts/bench_groups.py FOLDER --peer-python PYTHON --peer-script FILE [--policy DIR --reward DIR ...]

PYTHON is that of an environment with TRL; the script takes --method rloo|grpo --policy DIR ... and prints
`RESULT {json}`. Both sides get the same policy, reward model, prompts, group size, lengths, optimizer steps and peak
learning rate, which falls linearly there and as `adaptive` has it here; a text that is cut off pays 1. Ours has its
defaults otherwise, and its seconds hold the reference samples and the closing evaluation.

Two things are mended for the peer: its script pads texts for the reward model as the tokenizer says, which shifts
GPT-2's positions where that is on the left, so it gets a copy that pads on the right; and TRL gives a policy no
positions, so that padded prompts are shifted as well: of the prompts only those of the most usual length are used,
by both sides.

A peer's constant beta is first searched for, on seed 0, until the KL over the last fifth of the run is within a tenth
of the target; --betas rloo=0.3 gives it. Each seed then runs one side after the other. The KL is the estimate that
the peer logs: k1 for its RLOO; k3 for its GRPO, where it is a mean over the optimizer steps, and for ours. Finished
runs in FOLDER are used again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from bench import run_alone

from rlhf_kl.commands.world import World
from rlhf_kl.models.load import load_tokenizer
from rlhf_kl.report.table import text_table
from rlhf_kl.run.display import TrainingDisplay
from rlhf_kl.run.jsonl import read_jsonl

PEERS = ("rloo", "grpo")
SIDES = ("gae", "rloo", "grpo", *(f"TRL {name}" for name in PEERS))
WINDOW = 5  # updates whose mean is "the score"
SEARCH = 5  # most runs that look for a peer's beta
NEAR = 0.1  # of the target, as a logarithm
SETTINGS = """
extends: ppo_adaptive.yaml
eval: {every: 100000}
checkpoint: {every: 100000, keep: 1}
tracking: {tensorboard: false, samples_every: 100000}
"""


class Run(NamedTuple):
    """What is compared."""

    seconds: list[float]  # since the start, at the end of each update
    scores: list[float]  # of the reward model, less 1 where the text was cut off
    kl: float  # per token, over the last fifth
    samples_per_s: float
    memory_mb: float

    @property
    def score(self) -> float:
        """Over the last fifth."""
        return fmean(self.scores[-len(self.scores) // 5 :])

    def seconds_to(self, score: float) -> float:
        """Until the mean score of some updates is there; nan where it never is."""
        for end in range(WINDOW, len(self.scores) + 1):
            if fmean(self.scores[end - WINDOW : end]) >= score:
                return self.seconds[end - 1]
        return math.nan


def our_run(args: argparse.Namespace, advantage: str, seed: int) -> Run:
    """A run of `rlhf-kl train` in a process of its own."""
    folder = args.folder / f"{advantage}-s{seed}"
    if not (folder / "summary.json").exists():
        config, held_out = args.folder / "base.yaml", args.folder / "held_out.jsonl"
        config.write_text(SETTINGS, encoding="utf-8")
        held_out.write_text(json.dumps({"text": "x", args.column: "x"}) + "\n", encoding="utf-8")
        settings = {"run.seed": seed, "run.dtype": args.dtype, "policy.model": args.policy, "reward.model": args.reward}
        settings |= {"data.prompts": args.prompts, "data.column": args.column, "reward.missing_eos_penalty": 1.0}
        settings |= {"eval.texts": held_out, "eval.prompts": held_out, "ppo.advantage": advantage}
        settings |= {"rollout.batch_size": args.batch, "rollout.max_new_tokens": args.max_new_tokens}
        settings |= {"rollout.samples_per_prompt": 1 if advantage == "gae" else args.group}
        settings |= {"ppo.minibatch_size": args.batch // args.steps, "kl.target": args.target}
        settings |= {"ppo.learning_rate": args.learning_rate, "ppo.total_episodes": args.batch * args.updates}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "rlhf_kl", "train", "--config", str(config), "--quiet", "--overwrite"]
        run_alone([*command, "--output-dir", str(folder), *words])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "time/step_s" in row]
    times = [row["time/step_s"] for row in rows]
    start = summary["seconds"] - sum(times)
    return Run(
        [start + sum(times[: i + 1]) for i in range(len(times))],
        [row["objective/scores"] - 1 + row["rollout/eos_rate"] for row in rows],
        fmean(row["kl/k3"] for row in rows[-len(rows) // 5 :]),
        args.batch / median(times[2:]),
        rows[-1]["perf/peak_memory_mb"],
    )


def peer_run(args: argparse.Namespace, method: str, beta: float, seed: int) -> Run:
    """A run of the peer."""
    file = args.folder / f"trl-{method}-{beta:.4g}-s{seed}.json"
    if not file.exists():
        options = {"method": method, "policy": args.policy, "reward": args.peer_reward, "prompts": args.prompts}
        options |= {"column": args.column, "updates": args.updates, "batch": args.batch, "group": args.group}
        options |= {"iterations": args.steps, "max-new-tokens": args.max_new_tokens, "beta": beta, "seed": seed + 1}
        options |= {"learning-rate": args.learning_rate, "output-dir": args.folder / "trl"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        output = run_alone([args.peer_python, args.peer_script, *words], cwd=args.folder, env=environment)
        lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
        file.write_text(lines[-1].removeprefix("RESULT "), encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    curve = found["curve"]
    return Run(
        [point["t"] for point in curve],
        [point["score"] for point in curve],
        fmean(point["kl_token"] for point in curve[-len(curve) // 5 :]),
        args.batch / found["median_update_s"],
        found["peak_rss_mb"],
    )


def find_beta(args: argparse.Namespace, method: str, beta: float) -> float:
    """A constant beta whose run on seed 0 ends near the target: KL as a power of beta, through the last two runs."""
    tried: list[tuple[float, float]] = []
    for _ in range(SEARCH):
        kl = peer_run(args, method, beta, 0).kl
        print(f"TRL {method}, beta {beta:.4g}: KL {kl:.4g}", flush=True)
        tried.append((math.log(beta), math.log(max(kl, 1e-6) / args.target)))
        if abs(tried[-1][1]) < NEAR:
            break
        power = -1.0
        if len(tried) > 1 and tried[-1][0] != tried[-2][0]:
            power = (tried[-1][1] - tried[-2][1]) / (tried[-1][0] - tried[-2][0])
        beta *= math.exp(-tried[-1][1] / min(-0.3, power))
    return math.exp(min(tried, key=lambda point: abs(point[1]))[0])


def spread(values: Iterable[float], places: int) -> str:
    """Mean and standard deviation."""
    every = list(values)
    text = f"{fmean(every):.{places}f}"
    return f"{text} ({stdev(every):.{places}f})" if len(every) > 1 else text


def table(runs: dict[str, list[Run]], score: float) -> str:
    """One row for each side: mean (standard deviation) over the seeds, of the seconds the median over all of them."""
    head = ["", f"median seconds to {score:g}", "reached", "score", "KL", "samples/s", "memory, MB"]
    rows = []
    for side, found in runs.items():
        times = [run.seconds_to(score) for run in found]
        middle = median(math.inf if math.isnan(each) else each for each in times)
        reached = f"{sum(not math.isnan(each) for each in times)} of {len(found)}"
        figures = [spread((getattr(run, name) for run in found), places) for name, places in COLUMNS]
        rows.append([side, "not reached" if math.isinf(middle) else f"{middle:.1f}", reached, *figures])
    return text_table(head, rows)


COLUMNS = (("score", 2), ("kl", 3), ("samples_per_s", 1), ("memory_mb", 0))


def keep_settings(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Runs are used again for the settings that they were made with, and for no others."""
    free = ("folder", "seeds", "sides", "betas", "score", "peer_python", "peer_script")
    settings = {key: str(value) for key, value in vars(args).items() if key not in free}
    file = args.folder / "settings.json"
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != settings:
        changed = [f"--{key.replace('_', '-')} {before[key]}" for key in before if before[key] != settings.get(key)]
        parser.error(f"{args.folder} holds runs with {', '.join(changed)}: choose another folder")
    file.write_text(json.dumps(settings), encoding="utf-8")


def same_length(args: argparse.Namespace) -> None:
    """Of the prompts those with the most usual number of tokens."""
    lines = [line for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = load_tokenizer(str(args.policy))([json.loads(line)[args.column] for line in lines])["input_ids"]
    ((usual, _),) = Counter(map(len, rows)).most_common(1)
    args.prompts = args.folder / "prompts.jsonl"
    kept = [line for line, row in zip(lines, rows, strict=True) if len(row) == usual]
    args.prompts.write_text("\n".join(kept) + "\n", encoding="utf-8")


def pads_right(args: argparse.Namespace) -> None:
    """A copy of the reward model, for the peer, whose tokenizer pads on the right."""
    args.peer_reward = args.folder / "reward"
    if not args.peer_reward.exists():
        shutil.copytree(args.reward, args.peer_reward)
        tokenizer = load_tokenizer(str(args.reward))
        tokenizer.padding_side = "right"
        tokenizer.save_pretrained(args.peer_reward)


def make_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="of the runs")
    add("--peer-python", required=True, help="python of the peer's environment")
    add("--peer-script", required=True, type=lambda file: str(Path(file).resolve()), help="the script that runs it")
    add("--policy", help="default: the built-in one; needs --reward and --prompts")
    add("--reward", help="folder of a reward model")
    add("--prompts", help="a .jsonl file")
    add("--column", default="prompt", help="of the prompts")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of ours")
    add("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help=f"of {', '.join(SIDES)}")
    add("--seeds", nargs="+", type=int, default=list(range(5)))
    add("--betas", nargs="+", default=[], metavar="METHOD=BETA", help="of the peer, instead of looking for it")
    add("--score", type=float, default=2.5)
    add("--target", type=float, default=0.1, help="KL, nats per token")
    add("--updates", type=int, default=60)
    add("--batch", type=int, default=64, help="responses per update")
    add("--group", type=int, default=4, help="responses per prompt")
    add("--steps", type=int, default=4, help="optimizer steps per update")
    add("--max-new-tokens", type=int, default=48)
    add("--learning-rate", type=float, default=2e-4)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = make_parser()
    args = parser.parse_args(words)
    given = [args.policy, args.reward, args.prompts]
    if any(given) and not all(given):
        parser.error("--policy, --reward and --prompts come together")
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.policy:
        world = World("builtin:reviews", TrainingDisplay())
        args.policy, args.reward, args.prompts = world.policy(), world.reward_model(), world.file("prompts")
    keep_settings(args, parser)
    same_length(args)
    pads_right(args)
    betas = {name: float(beta) for name, _, beta in (text.partition("=") for text in args.betas)}
    for name in PEERS:
        if f"TRL {name}" in args.sides and name not in betas:
            betas[name] = find_beta(args, name, 0.3)
    runs: dict[str, list[Run]] = {side: [] for side in args.sides}
    for seed in args.seeds:
        for side in args.sides:
            peer = side.removeprefix("TRL ")
            run = our_run(args, side, seed) if peer == side else peer_run(args, peer, betas[peer], seed)
            runs[side].append(run)
            figures: dict[str, Any] = {"seconds": run.seconds_to(args.score), "score": run.score, "kl": run.kl}
            print(f"{side}, seed {seed}: " + ", ".join(f"{k} {v:.4g}" for k, v in figures.items()), flush=True)
    print("\nbetas of TRL:", ", ".join(f"{name} {beta:.4g}" for name, beta in betas.items()))
    print(table(runs, args.score))


if __name__ == "__main__":
    main()
