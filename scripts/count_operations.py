"""What an update of `rlhf-kl train` asks of a GPU, counted without one: `python scripts/count_operations.py`.

A small model on a GPU waits for Python, so what counts is how many operations Python starts, how many kernels they
launch, and how often the host waits for the device. They do not depend on the width of a model. So this is SmolLM2's
shape (30 layers of a Llama) a few numbers wide, on the fake device of `tests/fake_cuda`, in ppo_adaptive.yaml's
settings but for these: 32 responses of 24 tokens, rloo with four responses a prompt, a reward model of two layers, and
one minibatch. With the four that are the default, training passes and optimizer count four times.

operations  as Python sees them (a `TorchDispatchMode`), on the CPU too. In a pass without gradients a linear layer is
            one; `with parts` counts what it is made of
kernels     operations on the device that are no view; one that takes many tensors is one
waits       the host reads from the device, or copies to it without pinned memory

Sampling is one CUDA graph on a GPU, replayed for each token. (--layers 2 --out FOLDER)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench import random_world

from rlhf_kl.run.log import write_json
from rlhf_kl.text import text_table

ROOT = Path(__file__).resolve().parents[1]
FAKE = ROOT / "tests" / "fake_cuda"
LAYERS = 30
SHAPE = {"model_type": "llama", "vocab_size": 128, "hidden_size": 24, "intermediate_size": 32}
SHAPE |= {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
SCORER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BATCH = 32
SETTINGS = {"ppo.advantage": "rloo", "rollout.samples_per_prompt": 4, "rollout.max_new_tokens": 24}
SETTINGS |= {"rollout.batch_size": BATCH, "rollout.reference_samples": BATCH, "ppo.total_episodes": BATCH}
SETTINGS |= {"run.device": "cuda", "eval.column": "prompt", "eval.responses": 2, "tracking.tensorboard": False}
COLUMNS = ("operations", "with parts", "kernels", "waits")  # of `tests/fake_cuda/counts.py`
SAMPLING = "sampling"


def command(folder: Path, layers: int, minibatches: int) -> list[str]:
    """The words of a run with one update; its model is made in `folder`."""
    place = folder / f"{layers}-layers"
    if not (place / "held_out.jsonl").exists():
        random_world(place, SHAPE | {"num_hidden_layers": layers}, [12] * 64, SCORER)
        (place / "held_out.jsonl").write_text(json.dumps({"prompt": "w0 w1"}) + "\n", encoding="utf-8")
    given = {"policy.model": place / "policy", "reward.model": place / "scorer" / "reward"}
    given |= {"data.prompts": place / "prompts.jsonl", "ppo.minibatch_size": BATCH // minibatches}
    given |= dict.fromkeys(("eval.texts", "eval.prompts"), place / "held_out.jsonl")
    words = [word for key, value in (SETTINGS | given).items() for word in ("--set", f"{key}={value}")]
    return ["train", "--config", "ppo_adaptive.yaml", "--output-dir", str(place / f"{minibatches}"), *words]


def build_device(folder: Path) -> Path:
    """The library that tells torch of a device. Errors: SystemExit without g++."""
    library, torch_folder = folder / "device.so", Path(torch.__file__).parent
    headers = [f"-I{torch_folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    build = ["g++", "-shared", "-fPIC", "-std=c++20", *headers, FAKE / "device.cpp", "-o", library]
    if subprocess.run(build, check=False).returncode:
        raise SystemExit("error: g++ builds the fake device")
    return library


def run_there(folder: Path, commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """What `tests/fake_cuda/device.py` tells of command lines, all in one process. Errors: SystemExit if it fails."""
    files = [build_device(folder), folder / "commands.json", folder / "result.json"]
    files[1].write_text(json.dumps(commands), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, FAKE / "device.py", *files], cwd=folder, env=environment, check=False)
    if done.returncode:
        raise SystemExit("error: the process on the fake device failed")
    found: dict[str, Any] = json.loads(files[2].read_text(encoding="utf-8"))
    return found


def counts(outcome: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The columns of each phase of the update, and of all but sampling."""
    phases = outcome["phases"]["1"]
    others = [sum(column) for column in zip(*(row for name, row in phases.items() if name != SAMPLING), strict=True)]
    every = {**phases, "outside of sampling": others}
    return {name: dict(zip(COLUMNS, row, strict=True)) for name, row in every.items()}


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, help="folder of count_operations.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        outcomes = run_there(Path(name), [command(Path(name), args.layers, count) for count in (1, 4)])["commands"]
    for outcome in outcomes:
        if outcome["code"]:
            raise SystemExit(f"error: {outcome['output']}")
    one, four = map(counts, outcomes)
    rows = one | {f"{key}, four minibatches": four[key] for key in ("training passes", "outside of sampling")}
    print(text_table(["", *COLUMNS], [[name, *map(str, row.values())] for name, row in rows.items()]))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "count_operations.json", {"phases": rows})


if __name__ == "__main__":
    main()
