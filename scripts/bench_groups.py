"""Seconds of an update, and to a score at equal KL: `rlhf-kl train` beside RLOO, GRPO and PPO of TRL.

    python scripts/bench_groups.py [FOLDER] [--model llama] [--dtype bfloat16]

`make bench-trl` makes an environment with TRL (--peer-python names another) and runs this. Both sides do the same work
with the same policy, reward model, prompts and number of threads (OMP_NUM_THREADS): --epochs passes over each batch in
--minibatches optimizer steps, with the same group size, lengths and peak learning rate, which falls linearly there and
as `adaptive` has it here; a text that is cut off pays 1. Ours has its defaults otherwise. Seconds to a score count from
the start of the command; beside them stands what passed before the first update: imports and models on both sides, on
ours the reference samples too. The first row is there when its line is on the terminal: ours is written to
metrics.jsonl after the held-out evaluation of the start, which follows it and counts for all later rows. TRL gives a
policy no positions, so that padding would shift GPT-2's: of the prompts only those of the most usual length are used,
by both sides.

The models: `reviews`, the built-in one; `llama`, of 43M parameters with random weights, which has seconds an update but
no score that means anything; `smollm2` (135M), `gemma3` (270M) and `qwen` (two layers of 0.5B), by the shapes and
vocabularies of small models of today; `gpt2`, of GPT-2 small's shape, beside TRL's PPO: its last release is 1.12.0, in
an environment of its own that --peer-python names.

A peer's constant beta is first searched for, on seed 0, until the KL over the last fifth of the run is within a tenth
of the target; --betas rloo=0.3 gives it. Each seed then runs one side after the other. The KL is the estimate that
the peer logs: k1 for its RLOO; k3 for its GRPO, where it is a mean over the optimizer steps, and for ours. Finished
runs in FOLDER (runs/bench-trl/MODEL-DTYPE) are used again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from bench import SHAPES, World, floors, random_world, run_alone

from rlhf_kl.builtin.world import world_file
from rlhf_kl.models.pretrained import load_tokenizer
from rlhf_kl.run.log import read_jsonl, write_json
from rlhf_kl.text import text_table

PEERS = ("rloo", "grpo", "ppo")
SIDES = ("gae", "rloo", "grpo", "TRL rloo", "TRL grpo")
MORE_SIDES = ("gae separate", "TRL ppo")  # each with a value model of the reward model's size
PHASES = ("rollout", "score", "train")
WINDOW = 5  # updates whose mean is "the score"
SEARCH = 5  # most runs that look for a peer's beta
NEAR = 0.1  # of the target
ROOT = Path(__file__).resolve().parents[1]
LLAMA = {
    "vocab_size": 16000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 1472,
    "tie_word_embeddings": False,
}
# Small models of today, by the shapes of their configs, with a small scorer: their vocabularies are what costs.
TODAY: dict[str, dict[str, Any]] = {
    "smollm2": {"model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 640, "num_hidden_layers": 18}
    | {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048}
    | {"query_pre_attn_scalar": 256, "sliding_window": 512},
    # A Llama, as transformers reads the tokenizer of a Qwen2 as byte pairs whatever its file holds.
    "qwen": {"model_type": "llama", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 2}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "tie_word_embeddings": True}
    | {"attention_bias": True},
}
SCORER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
DEFAULTS: dict[str, dict[str, Any]] = {
    "reviews": {"score": 2.5},
    # A small rate, so that no response learns to end, and any beta: no KL is compared.
    "llama": {"seeds": [0, 1], "batch": 32, "updates": 12, "learning_rate": 1e-6, "betas": ["rloo=0.1", "grpo=0.1"]},
    **dict.fromkeys(
        TODAY,
        {"seeds": [0], "batch": 16, "updates": 12, "max_new_tokens": 24, "learning_rate": 1e-6}
        | {"betas": ["rloo=0.1"], "sides": ["rloo", "TRL rloo"]},
    ),
    # As the last release of TRL's PPO was compared: one optimizer step in each of two passes.
    "gpt2": {"seeds": [0], "batch": 16, "group": 1, "epochs": 2, "minibatches": 1, "updates": 8, "max_new_tokens": 32}
    | {"learning_rate": 1e-6, "betas": ["ppo=0.1"], "sides": ["gae", "gae separate", "TRL ppo"]},
}
SETTINGS = """
extends: ppo_adaptive.yaml
eval: {every: 100000}
checkpoint: {every: 100000, keep: 1}
tracking: {tensorboard: false, samples_every: 100000}
"""


class Run(NamedTuple):
    """What is compared."""

    start: float  # seconds of the command before the first update
    first_row: float  # of the command, until the figures of the first update are shown
    seconds: list[float]  # of the command, at the end of each update
    total: float  # of the whole command
    scores: list[float]  # of the reward model, less 1 where the text was cut off
    kl: float  # per token, over the last fifth
    spent: list[float]  # seconds of an update and of its PHASES: medians without the first two
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


def our_run(args: argparse.Namespace, side: str, seed: int) -> Run:
    """A run of `rlhf-kl train` in a process of its own."""
    folder = args.folder / f"{side.replace(' ', '-')}-s{seed}"
    advantage, _, value = side.partition(" ")
    start = folder.with_suffix(".start")  # seconds of the command: before those of the run, to its first line, all
    if not (folder / "summary.json").exists():
        config, held_out = args.folder / "base.yaml", args.folder / "held_out.jsonl"
        config.write_text(SETTINGS, encoding="utf-8")
        with args.prompts.open(encoding="utf-8") as lines:
            other = " ".join([json.loads(next(lines))["prompt"]] * 2)  # no prompt, but of words that the model knows
        held_out.write_text(json.dumps({"text": other, "prompt": other}) + "\n", encoding="utf-8")
        settings = {
            "run.device": args.device,
            "run.dtype": args.dtype,
            "run.seed": seed,
            "policy.model": args.policy,
            "reward.model": args.reward,
        }
        settings |= {"data.prompts": args.prompts, "data.column": "prompt", "reward.missing_eos_penalty": 1.0}
        settings |= {"eval.texts": held_out, "eval.prompts": held_out, "ppo.advantage": advantage}
        settings |= {"rollout.batch_size": args.batch, "rollout.max_new_tokens": args.max_new_tokens}
        settings |= {"rollout.samples_per_prompt": 1 if advantage == "gae" else args.group}
        settings |= {"policy.value": value or "features"}
        settings |= {
            "ppo.epochs": args.epochs,
            "ppo.minibatch_size": args.batch // args.minibatches,
            "kl.target": args.target,
        }
        settings |= {"ppo.learning_rate": args.learning_rate, "ppo.total_episodes": args.batch * args.updates}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "rlhf_kl", "train", "--config", str(config), "--overwrite"]
        began = time.time()
        shown = seconds_to_line(rf"\s*1/{args.updates} ", [*command, "--output-dir", str(folder), *words])
        file = folder / "summary.json"  # written at the run's end
        counted = json.loads(file.read_text(encoding="utf-8"))["seconds"]
        start.write_text(f"{file.stat().st_mtime - counted - began} {shown} {time.time() - began}\n", encoding="utf-8")
    loading, shown, total = map(float, start.read_text(encoding="utf-8").split())
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "time/step_s" in row]
    return Run(
        loading + rows[0]["time/elapsed_s"] - rows[0]["time/step_s"],
        shown,
        [loading + row["time/elapsed_s"] for row in rows],
        total,
        [row["objective/scores"] - 1 + row["rollout/eos_rate"] for row in rows],
        fmean(row["kl/k3"] for row in rows[-len(rows) // 5 :]),
        [median(row[f"time/{name}_s"] for row in rows[2:]) for name in ("step", "rollout", "score", "update")],
        rows[-1]["perf/peak_memory_mb"],
    )


def seconds_to_line(pattern: str, command: Sequence[str]) -> float:
    """Runs a command; returns after how many seconds a line of its messages began with a pattern."""
    began, found, lines = time.time(), math.nan, []
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]  # see `run_alone`
    with subprocess.Popen(shell, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        for line in running.stderr or ():
            lines.append(line)
            if math.isnan(found) and re.match(pattern, line):
                found = time.time() - began
    if running.returncode or math.isnan(found):
        raise SystemExit(f"error: {' '.join(command)} failed:\n{''.join(lines)[-2000:]}")
    return found


def peer_run(args: argparse.Namespace, method: str, beta: float, seed: int) -> Run:
    """A run of the peer."""
    file = args.folder / f"trl-{method}-{beta:.4g}-s{seed}.json"
    if not file.exists():
        options = json.dumps(vars(args) | {"method": method, "beta": beta, "seed": seed + 1}, default=str)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        script = str(ROOT / "scripts" / "peer_trl.py")
        began = time.time()
        found = json.loads(run_alone([args.peer_python, script, options], env=environment).splitlines()[-1])
        found |= {"start": found["curve"][0]["began"] - began, "total": time.time() - began}
        file.write_text(json.dumps(found), encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    curve = found["curve"]
    return Run(
        found["start"],
        found["start"] + curve[0]["seconds"],
        [found["start"] + point["seconds"] for point in curve],
        found["total"],
        [point["score"] for point in curve],
        fmean(point["kl"] for point in curve[-len(curve) // 5 :]),
        [found[f"{name}_s"] for name in ("update", *PHASES)],
        found["peak_memory_mb"],
    )


def is_near(kl: float, target: float) -> bool:
    """Whether a run landed at the target."""
    return abs(kl / target - 1) <= NEAR


def find_beta(args: argparse.Namespace, method: str, beta: float) -> float:
    """A constant beta whose run on seed 0 ends near the target: KL as a power of beta, through the last two runs."""
    tried: list[tuple[float, float]] = []
    found = False
    while not found and len(tried) < SEARCH:
        kl = peer_run(args, method, beta, 0).kl
        print(f"TRL {method}, beta {beta:.4g}: KL {kl:.4g}", flush=True)
        tried.append((math.log(beta), math.log(max(kl, 1e-6) / args.target)))
        found = is_near(kl, args.target)
        power = -1.0
        if len(tried) > 1 and tried[-1][0] != tried[-2][0]:
            power = (tried[-1][1] - tried[-2][1]) / (tried[-1][0] - tried[-2][0])
        beta *= math.exp(-tried[-1][1] / min(-0.3, power))
    print(f"TRL {method} {'landed' if found else 'did not land'} near the target in {len(tried)} runs", flush=True)
    return math.exp(min(tried, key=lambda point: abs(point[1]))[0])


def figures(run: Run, score: float | None) -> dict[str, float]:
    """Those of the table, of one run."""
    found = {"update_s": run.spent[0], "score": run.score, "kl": run.kl, "memory_mb": run.memory_mb}
    return found if score is None else found | {"seconds_to_the_score": run.seconds_to(score)}


def summary(found: Sequence[Run], score: float | None) -> dict[str, Any]:
    """The figures of the table, of a side: seconds are medians."""

    def over_seeds(values: Iterable[float]) -> dict[str, float]:
        every = list(values)
        return {"mean": fmean(every)} | ({"sd": stdev(every)} if len(every) > 1 else {})

    known = {"update_s": median(run.spent[0] for run in found), "start_s": median(run.start for run in found)}
    known |= {
        "first_row_s": median(run.first_row for run in found),
        "last_row_s": median(run.seconds[-1] for run in found),
    }
    known |= {"all_s": median(run.total for run in found)}
    if score is not None:
        known["seconds_to_the_score"] = median(run.seconds_to(score) for run in found)
    means = {name: over_seeds(getattr(run, name) for run in found) for name in ("score", "kl", "memory_mb")}
    return {**known, **means}


def spread(values: Iterable[float], places: int) -> str:
    """Mean and standard deviation."""
    every = list(values)
    text = f"{fmean(every):.{places}f}"
    return f"{text} ({stdev(every):.{places}f})" if len(every) > 1 else text


def table(runs: dict[str, list[Run]], score: float | None) -> str:
    """One row for each side: mean (standard deviation) over the seeds, of the seconds the median over all of them."""
    head = [
        "",
        "seconds an update",
        *PHASES,
        "from the command to the first row",
        "to the last",
        "to the end",
        "memory, MB",
        "KL",
    ]
    if score is not None:
        head += ["score", f"median seconds to {score:g}", "before the first update", "reached"]
    rows = []
    for side, found in runs.items():
        row = [side, *(f"{median(each):.3g}" for each in zip(*(run.spent for run in found), strict=True))]
        totals = ([run.first_row, run.seconds[-1], run.total] for run in found)
        row += [f"{median(column):.1f}" for column in zip(*totals, strict=True)]
        row += [spread((run.memory_mb for run in found), 0), spread((run.kl for run in found), 3)]
        if score is not None:
            times = [run.seconds_to(score) for run in found]
            middle = median(math.inf if math.isnan(each) else each for each in times)
            row += [spread((run.score for run in found), 2), "not reached" if math.isinf(middle) else f"{middle:.1f}"]
            row.append(f"{median(run.start for run in found):.1f}")
            row.append(f"{sum(not math.isnan(each) for each in times)} of {len(found)}")
        rows.append(row)
    return text_table(head, rows)


def same_length(args: argparse.Namespace) -> None:
    """Of the prompts those with the most usual number of tokens."""
    lines = [line for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = load_tokenizer(str(args.policy))([json.loads(line)["prompt"] for line in lines])["input_ids"]
    ((usual, _),) = Counter(map(len, rows)).most_common(1)
    args.prompts = args.folder / "prompts.jsonl"
    kept = [line for line, row in zip(lines, rows, strict=True) if len(row) == usual]
    args.prompts.write_text("\n".join(kept) + "\n", encoding="utf-8")


def make_models(args: argparse.Namespace) -> None:
    """The policy, reward model and prompts of --model."""
    if args.model != "reviews":
        folder = args.folder / args.model
        if not (folder / "prompts.jsonl").exists():  # written last
            shape = LLAMA if args.model == "llama" else (SHAPES | TODAY)[args.model]
            shape = shape | ({"num_hidden_layers": args.layers} if args.layers else {})
            random_world(folder, shape, [16] * 512, SCORER if args.model in TODAY else None)
        scores = folder / "scorer" if args.model in TODAY else folder
        args.policy, args.reward, args.prompts = folder / "policy", scores / "reward", folder / "prompts.jsonl"
    else:
        args.policy, args.reward, packed = (
            Path(world_file("builtin:reviews", part)) for part in ("policy", "reward", "prompts")
        )
        args.prompts = args.folder / "all_prompts.jsonl"
        args.prompts.write_bytes(gzip.decompress(packed.read_bytes()))  # the peer reads it too


def make_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="of the runs, another one for other settings")
    add("--peer-python", default=str(ROOT / ".venv-trl-1.16" / "bin" / "python"), help="of the peer's environment")
    add("--model", choices=DEFAULTS, default="reviews", help="has its own defaults")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--layers", type=int, help="instead of the model's own number")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the layers' computation")
    add(
        "--sides",
        nargs="+",
        choices=(*SIDES, *MORE_SIDES),
        default=SIDES,
        metavar="SIDE",
        help=f"of {', '.join(SIDES + MORE_SIDES)}",
    )
    add("--seeds", nargs="+", type=int, default=list(range(5)))
    add("--betas", nargs="+", default=[], metavar="METHOD=BETA", help="of the peer, instead of looking for it")
    add("--score", type=float, help="seconds to which are in the table")
    add("--target", type=float, default=0.1, help="KL, nats per token")
    add("--updates", type=int, default=60)
    add("--batch", type=int, default=64, help="responses per update")
    add("--group", type=int, default=4, help="responses per prompt")
    add("--epochs", type=int, default=1, help="passes over each batch")
    add("--minibatches", type=int, default=4, help="optimizer steps per pass")
    add("--max-new-tokens", type=int, default=48)
    add("--learning-rate", type=float, default=2e-4)
    return parser


def main(words: Sequence[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = make_parser()
    parser.set_defaults(**DEFAULTS[parser.parse_args(words).model])
    args = parser.parse_args(words)
    args.folder = (args.folder or ROOT / "runs" / "bench-trl" / f"{args.model}-{args.dtype}").resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    make_models(args)
    same_length(args)
    print(f"{torch.get_num_threads()} threads, {args.dtype}", flush=True)
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
            print(f"{side}, seed {seed}: {run.spent[0]:.3g} s an update, KL {run.kl:.4g}", flush=True)
    print("\nbetas of TRL:", ", ".join(f"{name} {beta:.4g}" for name, beta in betas.items()))
    for side in [side for side in args.sides if args.score is not None and not side.startswith("TRL ")]:
        landed = sum(is_near(run.kl, args.target) for run in runs[side])
        print(f"{side}: {landed} of {len(args.seeds)} runs landed near the target, without a search")
    print(table(runs, args.score))
    rows = {
        side: {f"{side}-s{n}": figures(run, args.score) for n, run in zip(args.seeds, runs[side], strict=True)}
        for side in runs
    }
    sides = {side: summary(found, args.score) for side, found in runs.items()}
    write_json(args.folder / "bench_groups.json", {"rows": rows, "summary": sides})
    world = World(args.policy, args.reward, args.prompts, args.batch, args.max_new_tokens, args.epochs)
    sizes: Any = SimpleNamespace(device=args.device, microbatch=args.batch // args.minibatches)
    least = floors(world, sizes, "none", args.dtype, args.max_new_tokens)
    print("the matrix products alone, at this machine's rate for them and responses of full length:", end=" ")
    print(", ".join(f"{key} {value:.3g}" for key, value in least.items()))


if __name__ == "__main__":
    main()
