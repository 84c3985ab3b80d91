"""Kills runs and resumes them: `python scripts/crash_test.py [--kills 50] [--seed 0] [--run 'train --config my.yaml']`.

Each trial starts a run in a process of its own, ends that with SIGKILL at a random moment, resumes, and compares the
finished run with one that was never interrupted: weights, value function, checkpoints, rows (timings aside), samples,
summary. Exit 1 where a run differs; its folder stays.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_kl.run.jsonl import read_jsonl

SMALL = "builtin:reviews-small"
RUNS = (
    "train --config smoke.yaml --set ppo.total_episodes=96 --set checkpoint.every=2",
    f"sft --config sft_reviews.yaml --set policy.model={SMALL} --set data.texts={SMALL} --set sft.epochs=0.2"
    " --set checkpoint.every=4 --set 'eval={every: 8, max_documents: 10}'",
    f"reward-model --config reward_reviews.yaml --set policy.model={SMALL} --set data.pairs={SMALL}"
    " --set reward_model.epochs=0.3 --set checkpoint.every=4 --set 'eval={every: 8, max_pairs: 20}'",
)


def start(command: str, folder: Path) -> subprocess.Popen[bytes]:
    """A run that goes on with what there is in its folder."""
    words = [sys.executable, "-m", "rlhf_kl", *shlex.split(command), "--output-dir", str(folder), "--resume"]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def left_behind(folder: Path) -> dict[str, Any]:
    """Everything about a finished run that must not depend on whether it was interrupted."""

    def timeless(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))}

    summary = json.loads((folder / "summary.json").read_text())
    summary = {key: value for key, value in summary.items() if key not in ("seconds", "config", "git")}
    return {
        "rows": [timeless(row) for row in read_jsonl(folder / "metrics.jsonl")],
        "samples": read_jsonl(folder / "samples.jsonl"),
        "summary": summary | {"final": timeless(summary["final"])},
        **{str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))},
    }


def finish(command: str, folder: Path) -> dict[str, Any] | str:
    """What a run leaves once it is finished, or why it cannot be."""
    if code := start(command, folder).wait():
        return f"exit code {code}: {folder.with_suffix('.log').read_text()[-2000:]}"
    return left_behind(folder)


def main() -> int:
    """Kill, resume and compare; the last line says how many of the runs are the same."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", action="append", metavar="COMMAND", help="instead of the built-in ones")
    options = parser.parse_args()
    chance, commands = random.Random(options.seed), options.run or RUNS
    work, same = Path(tempfile.mkdtemp(prefix="crash-test-")).resolve(), 0
    whole: dict[str, tuple[dict[str, Any], float]] = {}
    for number in range(options.kills):
        command, trial = commands[number % len(commands)], work / f"trial-{number}"
        if command not in whole:
            began = time.monotonic()
            result = finish(command, work / f"uninterrupted-{len(whole)}")
            if isinstance(result, str):
                sys.exit(f"the uninterrupted run ended with {result}")
            whole[command] = result, time.monotonic() - began
        expected, seconds = whole[command]
        process = start(command, trial)
        time.sleep(chance.uniform(0.2, 1.0) * seconds)
        process.kill()  # a run that has ended already is finished again below
        process.wait()
        found = finish(command, trial)
        if isinstance(found, str):
            wrong = found
        else:
            wrong = ", ".join(key for key in {**expected, **found} if expected.get(key) != found.get(key))
        same += not wrong
        print(f"{number + 1}/{options.kills} {command.split()[0]}: {wrong or 'same'}", file=sys.stderr, flush=True)
        if not wrong:
            shutil.rmtree(trial)
    print(f"all {options.kills} {same}")
    if same == options.kills:
        shutil.rmtree(work)
    return int(same < options.kills)


if __name__ == "__main__":
    sys.exit(main())
