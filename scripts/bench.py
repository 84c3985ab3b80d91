"""Speed and memory of `rlhf-kl train`: `python scripts/bench.py [PART...] [--models gpt2 ...] [--out bench.json]`.

Every figure comes from runs of the command line, each in a process of its own, and from their metrics.jsonl: times
are medians over a run's updates without the first two. The parts:

phases  samples/s, tokens/s, peak memory, and the seconds of rollout, scoring and update beside their floor: operations
        of the matrix products over the rate at which this machine multiplies such matrices (the LM head at its own
        rate, in float32), and the bytes that decoding reads over the rate at which it copies memory
several one process beside one for each GPU (two on a CPU), there also with sharded weights; only if it is named

The models, all by default:

reviews     built-in; 64 rows, 4 epochs, at most 48 new tokens
gpt2        GPT-2 small's shape (124M), random weights; 16 rows, prompts of 8 to 24 tokens, 32 new ones, 2 epochs
llama       a Llama of 43M at the same sizes
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.benchmark import Timer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_kl.builtin.world import world_file
from rlhf_kl.data.files import read_rows
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head, new_gpt2

SHAPES: dict[str, dict[str, Any]] = {  # of models with random weights, beside what both have
    "gpt2": {"hidden_size": 768, "layers": 12, "heads": 12, "vocab_size": 50257},
    "llama": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000},
}
LLAMA = {"intermediate_size": 1408, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 1}
MODELS = ("reviews", *SHAPES)
DTYPES = ("float32", "bfloat16")
WARM_UP = 2  # updates that no median counts
CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}  # logits in one chunk: rlhf_kl.ops.head.LOGIT_ELEMENTS
PROGRAM = ("-m", "rlhf_kl")  # after `python`
CONFIG = """
extends: ppo_adaptive.yaml
reward: {normalize: false, clip: null}
kl: {controller: {kind: fixed, coef: 0.1}, ceiling: null}
ppo: {lr_schedule: constant}
eval: {every: 100000}
checkpoint: {every: 100000, keep: 1}
tracking: {tensorboard: false, samples_every: 100000}
"""


@dataclass(frozen=True)
class World:
    """Models and prompts of a benchmark, in folders, and the sizes of its runs."""

    policy: Path
    reward: Path
    prompts: Path
    batch: int = 16
    length: int = 32  # most new tokens
    epochs: int = 2
    learning_rate: float = 1e-6  # small: lengths stay those of the model
    penalty: float = 0.0  # of a response that does not end

    def prompt_ids(self) -> list[list[int]]:
        """The prompts' tokens."""
        texts = [row["prompt"] for row in read_rows(self.prompts)]
        return list(load_tokenizer(str(self.policy))(texts)["input_ids"])


def write_prompts(file: Path, vocabulary: int, lengths: Sequence[int]) -> Path:
    """Prompts of random words."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary - 2, (n,), generator=generator).tolist() for n in lengths]
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return file


def write_models(model: Any, tokenizer: Any, place: Path) -> tuple[Path, Path]:
    """Folders of a policy and of a reward model with the same trunk and a random head."""
    classifier = classifier_from_lm(model, tokenizer)
    initialise_head(classifier.score, seed=0)
    for name, part in (("policy", model), ("reward", classifier)):
        save_model(part, tokenizer, place / name)
    return place / "policy", place / "reward"


def random_world(
    place: Path,
    shape: Mapping[str, Any],
    lengths: Sequence[int],
    reward: Mapping[str, Any] | None = None,
    **sizes: int,
) -> World:
    """A model with random weights over words w0, w1, ...; it practically never ends a text.

    `reward`: the shape of a Llama that scores; None = the policy's trunk does.
    """
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(shape["vocab_size"] - 2))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    model = new_gpt2(**shape, context=1024, tokenizer=tokenizer, seed=0) if "layers" in shape else shaped(shape)
    if reward is None:
        folders = write_models(model, tokenizer, place)
    else:
        save_model(model, tokenizer, place / "policy")
        write_models(shaped({"vocab_size": len(words)} | reward), tokenizer, place / "scorer")
        folders = place / "policy", place / "scorer" / "reward"
    return World(*folders, write_prompts(place / "prompts.jsonl", len(words), lengths), **sizes)


def shaped(shape: Mapping[str, Any]) -> Any:
    """A Llama, or the `model_type` of the shape, with random weights."""
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 1024}
    if "model_type" not in shape:
        return LlamaForCausalLM(LlamaConfig(**(LLAMA | shape), **{k: v for k, v in ends.items() if k not in LLAMA}))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, **ends))


def make_world(name: str, args: argparse.Namespace, place: Path) -> World:
    """The world of a model, with the sizes of the command line."""
    if name in SHAPES:
        lengths = torch.randint(8, 25, (512,), generator=torch.Generator().manual_seed(0)).tolist()
        world = random_world(place, SHAPES[name], lengths)
    else:
        parts = (Path(world_file("builtin:reviews", part)) for part in ("policy", "reward", "prompts"))
        world = World(*parts, 64, 48, 4, 2e-4, 1.0)
    return replace(world, batch=args.batch or world.batch, length=args.length or world.length)


def run_alone(command: Sequence[str], **options: Any) -> str:
    """What a command prints. It is the child of a small shell: a child of ours would inherit our peak memory."""
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def train(
    settings: Mapping[str, Any], place: Path, processes: int = 1, program: Sequence[str] = PROGRAM
) -> list[dict[str, Any]]:
    """The rows of a run of `rlhf-kl train` in processes of its own; its folder is deleted."""
    file, out = place / "bench.yaml", place / "run"
    shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
    file.write_text(CONFIG, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launch if processes > 1 else []), *program, "train", "--quiet"]
    command += ["--config", str(file), "--output-dir", str(out)]
    run_alone([*command, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(out)
    return [row for row in rows if "time/step_s" in row]


def our_run(
    world: World,
    args: argparse.Namespace,
    place: Path,
    value: str,
    dtype: str,
    processes: int = 1,
    more: Mapping[str, Any] | None = None,
    program: Sequence[str] = PROGRAM,
) -> dict[str, Any]:
    """Medians over the updates of one run, the first ones left out. `more`: settings on top."""
    settings: dict[str, Any] = {}
    settings |= {"run.device": args.device, "run.dtype": dtype}
    settings |= {"policy.model": world.policy, "policy.value": value, "reward.model": world.reward}
    settings |= {"reward.missing_eos_penalty": world.penalty, "rollout.max_new_tokens": world.length}
    held_out = place / "held_out.jsonl"  # something else than prompts: those are all trained on
    held_out.write_text(json.dumps({"prompt": "w0 w1"}) + "\n", encoding="utf-8")
    settings |= {"data.prompts": world.prompts, "eval.texts": held_out, "eval.prompts": held_out}
    settings |= {"kl.placement": args.placement, "data.column": "prompt", "eval.column": "prompt"}
    settings |= {"rollout.batch_size": world.batch, "rollout.reference_samples": world.batch}
    settings |= {"ppo.minibatch_size": world.batch, "ppo.microbatch_size": args.microbatch or "null"}
    settings |= {"ppo.total_episodes": world.batch * args.updates, "ppo.epochs": world.epochs}
    settings |= {"ppo.learning_rate": world.learning_rate, **(more or {})}
    rows = train(settings, place, processes, program)
    steady, phases = rows[WARM_UP:], ("step", "rollout", "score", "update")
    run = {f"{name}_s": statistics.median(row[f"time/{name}_s"] for row in steady) for name in phases}
    length = statistics.fmean(row["rollout/response_length"] for row in steady)
    samples = world.batch / run["step_s"]
    rates = {"samples_per_s": samples, "tokens_per_s": samples * length}
    return run | rates | {"length": length, "peak_memory_mb": rows[-1]["perf/peak_memory_mb"]}


def timed(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, as without other jobs on the machine."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=0.1).times)


def product_rate(matrices: Counter[tuple[int, int]], rows: int, device: str, dtype: str) -> float:
    """Operations per second over products of `rows` rows: forward, and both of the backward pass."""
    kind, operations, spent = getattr(torch, dtype), 0.0, 0.0
    for (n, k), count in matrices.items():
        x, w, grad = (torch.randn(*size, device=device).to(kind) for size in ((rows, k), (n, k), (rows, n)))
        operations += 3 * 2.0 * rows * k * n * count
        spent += count * sum(timed(lambda a=a, b=b: a @ b) for a, b in ((x, w.T), (grad, w), (grad.T, x)))
    return operations / spent


def layer_matrices(model: Any) -> Counter[tuple[int, int]]:
    """How often a model's layers have a matrix of each shape (n, k), embeddings and LM head left out."""
    parts = [part for part in model.base_model.modules() if not isinstance(part, torch.nn.Embedding)]
    weights = [part.weight for part in parts if isinstance(getattr(part, "weight", None), torch.Tensor)]
    return Counter(tuple(weight.shape) for weight in weights if weight.dim() == 2)


def floors(world: World, args: argparse.Namespace, value: str, dtype: str, length: float) -> dict[str, Any]:
    """Least seconds of each phase for responses of a mean length, every row read whole; attention's products are small.

    Scoring reads the reference, the reward model and a separate value function, and takes two logits.
    """
    model, device, batch = load_causal_lm(str(world.policy)), args.device, world.batch
    matrices, (vocabulary, hidden) = layer_matrices(model), model.get_output_embeddings().weight.shape
    weights, chunk = sum(n * k * count for (n, k), count in matrices.items()), CHUNK_ELEMENTS[device] // vocabulary
    prompt = statistics.fmean(map(len, world.prompt_ids()))
    tokens, states = batch * (prompt + length - 1), batch * length
    source, target = torch.ones(2, 1 << 26, device=device)
    rates = {
        "layers": product_rate(matrices, min(int(tokens), 2048), device, dtype),
        "head": product_rate(Counter([(vocabulary, hidden)]), min(int(states), chunk), device, "float32"),
        "memory": 2 * source.numel() * 4 / timed(lambda: target.copy_(source)),
    }
    body, head = 2 * weights * tokens / rates["layers"], 2 * hidden * vocabulary * states / rates["head"]
    shared = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    cached = 2 * model.config.num_hidden_layers * hidden * shared / model.config.num_attention_heads  # of a token
    read = (weights + batch * cached * (prompt + length / 2)) * (
        4 if dtype == "float32" else 2
    ) + hidden * vocabulary * 4  # in a step
    trunks = 2 if value == "separate" else 1
    again = (args.microbatch or 1) * length > chunk  # a pass has several chunks: their logits are computed twice
    return {
        "rollout_s": max(body + head, body * prompt * batch / tokens + length * read / rates["memory"]),
        "score_s": (1 + trunks) * body + 2 * head,
        "update_s": world.epochs * (3 * trunks * body + (3 + again) * head),
        **{f"{name}_giga_per_s": rate / 1e9 for name, rate in rates.items()},
    }


def show(figures: dict[str, Any]) -> dict[str, Any]:
    """Print figures in one line and return them."""
    words = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in figures.items()}
    print(", ".join(f"{key} {word}" for key, word in words.items()), flush=True)
    return figures


def phases(args: argparse.Namespace, worlds: Mapping[str, World], place: Path) -> Iterator[dict[str, Any]]:
    """Where the time goes, and how much of it is the machine's."""
    for name, world in worlds.items():
        for value, dtype in product(args.values, args.dtypes):
            run = show({"model": name, "value": value, "dtype": dtype, **our_run(world, args, place, value, dtype)})
            least = floors(world, args, value, dtype, run["length"])
            shares = {f"share_of_{key}": least[key] / run[key] for key in ("rollout_s", "score_s", "update_s")}
            yield run | show({f"floor_of_{key}" if key in run else key: least[key] for key in least} | shares)


def several(args: argparse.Namespace, worlds: Mapping[str, World], place: Path) -> Iterator[dict[str, Any]]:
    """What more processes bring; a run that fails has its last words instead of figures."""
    count = torch.cuda.device_count() if args.device == "cuda" else 2
    kinds = [(1, False), (count, False), (count, True)] if count > 1 else [(1, False)]
    for (name, world), dtype, (processes, shard) in product(worlds.items(), args.dtypes, kinds):
        label = {"model": name, "dtype": dtype, "processes": processes, "sharded": shard}
        try:
            shards = {"policy.shard": shard, "reference.shard": shard}
            yield show(label | our_run(world, args, place, args.values[0], dtype, processes, shards))
        except SystemExit as error:
            yield show({**label, "failed": str(error)})


PARTS = {"phases": phases, "several": several}
DEFAULT_PART = "phases"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: {DEFAULT_PART}")
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--values", nargs="+", choices=["features", "head", "separate"], default=["features", "separate"])
    add("--placement", choices=["reward", "rao_blackwell"], default="reward", help="of the KL")
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--updates", type=int, default=12, help=f"of a run; more than {WARM_UP}")
    add("--batch", type=int, help="responses per update, instead of the model's own number")
    add("--length", type=int, help="most new tokens, instead of the model's own number")
    add("--microbatch", type=int, help="most responses in a training pass; default: as many as there is room for")
    add("--out", type=Path, default=Path("bench.json"))
    args = parser.parse_args(words)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
    return args


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts of the command line."""
    args = parse_arguments(words)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    machine = {"device": gpus if args.device == "cuda" else "cpu", "load": os.getloadavg()[0]}
    machine |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": version("transformers")}
    results: dict[str, Any] = {"machine": show(machine)}
    with tempfile.TemporaryDirectory(prefix="rlhf-kl-bench-") as folder:
        worlds = {name: make_world(name, args, Path(folder) / name) for name in args.models}
        for part in args.parts or [DEFAULT_PART]:
            print(f"\n{part}", flush=True)
            results[part] = list(PARTS[part](args, worlds, Path(folder)))
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
