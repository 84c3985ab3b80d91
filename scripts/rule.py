"""The target that a chain recommends. The limits of the rule were chosen with seeds 0 to 7 in sight, 8 to 10 unseen.

    python scripts/rule.py FOLDER [REAL]    REAL: as --real of bench_control.py; default: RLHF_KL_REAL, else the hub

Chains of 20 updates a target: chain.yaml with seeds 2 to 10, and TinyStories-656K with four rewards of
stress_rewards.py. Into FOLDER/rule.json: the target that each chain recommends alone, and its figures at every target.
In the built-in world these have the true score of 1,024 held-out responses, its standard error, and whether the
recommended target is within two of them of the chain's best.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import hypot
from pathlib import Path
from typing import Any

from bench_control import REAL

from rlhf_kl.run.log import write_json

HERE = Path(__file__).resolve().parent
KEPT = ("scores", "perplexity_cost", "distinct_share", "kl")
STORIES = ("glad", "brief", "spoken", "easy")
CHAINS = {f"built-in-s{seed}": ("chain.yaml", seed, "") for seed in range(2, 11)} | {
    f"{reward}-s{seed}": ("chain_stories.yaml", seed, reward) for reward in STORIES for seed in range(3)
}
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}  # two chains at once


def program(*words: str) -> str:
    """The output of a command."""
    command = [sys.executable, "-m", "rlhf_kl", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT).stdout


def judged(name: str, folder: Path, real: str | None) -> dict[str, Any]:
    """A chain's recommendation and figures."""
    config, seed, reward = CHAINS[name]
    sets = [f"{key}={(Path(real) / path).absolute()}" for key, path in REAL.items() if real] if reward else []
    sets += [f"reward.kind={HERE}/stress_rewards.py:{reward}"] if reward else []
    options = [word for each in sets for word in ("--set", each)]
    place = ["--seed", str(seed), "--output-dir", str(folder / name), "--resume"]
    program("compare", "--config", str(HERE / config), "--chain", "--updates", "20", *place, *options)
    found = json.loads((folder / name / "compare.json").read_text(encoding="utf-8"))
    seeds = {variant: entry["seeds"][str(seed)] for variant, entry in found["variants"].items()}
    result = {variant: {key: figures[key] for key in KEPT} for variant, figures in seeds.items()}
    advice: dict[str, Any] = {"recommended": found["recommended"]}
    if reward:
        return advice | result
    for run in (folder / name / "runs").iterdir():
        evaluation = json.loads(program("eval", "--run", str(run), "--samples", "1024", "--json", "--quiet"))
        true = {"gold": evaluation["gold"], "gold_error": evaluation["standard_errors"]["gold"]}
        result[run.name.rpartition("-s")[0]] |= true
    best, own = max(result.values(), key=lambda at: at["gold"]), result.get(f"target-{advice['recommended']:g}")
    near = own is not None and best["gold"] - own["gold"] <= 2 * hypot(best["gold_error"], own["gold_error"])
    return advice | {"near_the_best": near} | result


def main() -> None:
    """Run the chains, two at a time."""
    folder, real = Path(sys.argv[1]), [*sys.argv[2:], os.environ.get("RLHF_KL_REAL")][0]
    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(CHAINS, pool.map(lambda name: judged(name, folder, real), CHAINS), strict=True))
    write_json(folder / "rule.json", {"seeds": sorted({seed for _, seed, _ in CHAINS.values()})} | results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
