"""One JSON of speed, memory and KL on this machine's GPUs, to be pasted into an issue.

    python scripts/gpu_report.py [--out gpu-report.json] [--updates 20] [--device cpu]

Runs `rlhf-kl train` on the built-in model and on GPT-2 small's shape with random weights, in float32 and bfloat16, on
one GPU and on all of them, there also with the weights spread. Medians leave out the first two updates. A run that
fails has its last words instead of figures. Exit 1 where one failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from bench import SHAPES, WARM_UP, random_world

from rlhf_kl.run.jsonl import read_jsonl
from rlhf_kl.run.versions import git_revision, versions

TARGET = 0.1  # nats per token


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The reported figures of a run, from its rows."""
    steady, tail = rows[WARM_UP:] or rows, rows[len(rows) // 2 :]
    speeds = ("perf/samples_per_s", "perf/tokens_per_s", "time/rollout_s", "time/score_s", "time/update_s")
    return {key.partition("/")[2]: median(row[key] for row in steady) for key in speeds} | {
        "peak_memory_mb": max(row["perf/peak_memory_mb"] for row in rows),
        "updates": len(rows),
        "kl_over_target": fmean(row["kl/token"] for row in tail) / TARGET,
        "score": fmean(row["objective/scores"] for row in tail),
        "logratio_first_max": max(row["policy/logratio_first_max"] for row in rows),
        "held": rows[-1]["dist/held"],
    }


def run(about: dict[str, Any], settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run, and its reported figures."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(about["processes"])]
    command = [sys.executable, *(launch if about["processes"] > 1 else []), "-m", "rlhf_kl", "train", "--quiet"]
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command += ["--config", "ppo_adaptive.yaml", "--output-dir", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("error:")] or lines[-3:]
        return {**about, "failed": done.returncode, "words": told}
    return about | figures([row for row in read_jsonl(folder / "metrics.jsonl") if row.get("kl/token") is not None])


def main() -> int:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=["reviews", "gpt2"], default=["reviews", "gpt2"])
    parser.add_argument("--processes", type=int, help="default: as many as there are GPUs")
    args = parser.parse_args()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if args.device == "cuda" and not gpus:
        parser.error("no CUDA device is available here; --device cpu tries the script out")
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    report: dict[str, Any] = {"gpus": gpus, "cuda": torch.version.cuda, "machine": machine, "versions": versions(),
                              "revision": git_revision(Path(__file__).parent), "runs": []}  # fmt: skip
    common = {"run.device": args.device, "kl.target": TARGET, "ppo.total_episodes": 64 * args.updates}
    counts = dict.fromkeys((1, args.processes or max(1, len(gpus))))
    with tempfile.TemporaryDirectory() as folder:
        own: dict[str, dict[str, Any]] = {"reviews": {}}
        if "gpt2" in args.models:
            world = random_world(Path(folder), SHAPES["gpt2"], [8, 16, 24] * 40)
            own["gpt2"] = {"policy.model": world.policy, "reward.model": world.reward, "data.prompts": world.prompts,
                           "eval.texts": world.prompts, "eval.column": "prompt", "rollout.max_new_tokens": 32,
                           "reward.missing_eos_penalty": 0.0, "ppo.learning_rate": 1e-5}  # fmt: skip
        kinds = [(model, dtype, count, shard) for model in args.models for dtype in ("float32", "bfloat16")
                 for count in counts for shard in ((False, True) if count > 1 else (False,))]  # fmt: skip
        for number, (model, dtype, count, shard) in enumerate(kinds):
            about = {"model": model, "dtype": dtype, "processes": count, "sharded": shard}
            settings = {**common, "run.dtype": dtype, "policy.shard": shard, "reference.shard": shard, **own[model]}
            report["runs"].append(run(about, settings, Path(folder) / f"run-{number}"))
            print(json.dumps(report["runs"][-1]), flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{args.out}: paste it into an issue")
    return int(any("failed" in each for each in report["runs"]))


if __name__ == "__main__":
    sys.exit(main())
