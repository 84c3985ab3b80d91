"""Speed and memory of `rlhf-kl train`: `python scripts/bench.py [PART...] [--models gpt2 ...] [--out bench.json]`.

Every figure comes from runs of the command line, each in a process of its own, and from their metrics.jsonl: times
are medians over a run's updates without the first two. The parts:

phases  samples/s, tokens/s, peak memory, and the seconds of rollout, scoring and update beside their floor: operations
        of the matrix products over the rate at which this machine multiplies such matrices (the LM head at its own
        rate, in float32), and the bytes that decoding reads over the rate at which it copies memory
groups  8 responses to each of 2 prompts of 200 tokens beside 16 different prompts of 200 (gpt2 and llama only)
peer    pairs of runs in turn with another trainer: --peer-python is the python of its environment, --peer-script a
        script that takes --policy DIR --reward DIR --prompts FILE ... and prints `RESULT {json}`

The models, all by default:

reviews     built-in; 64 rows, 4 epochs, at most 48 new tokens; reviews-48 has an end that is never drawn: 48 each
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
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.benchmark import Timer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_kl.commands.world import World as BuiltIn
from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head, new_gpt2

PARTS = ("phases", "groups", "peer")
SHAPES: dict[str, dict[str, Any]] = {  # of models with random weights, beside what both have
    "gpt2": {"hidden_size": 768, "layers": 12, "heads": 12, "vocab_size": 50257},
    "llama": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 32000},
}
LLAMA = {"intermediate_size": 1408, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 1}
MODELS = ("reviews", "reviews-48", *SHAPES)
DTYPES = ["float32", "bfloat16"]
WARM_UP = 2  # updates that no median counts
CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}  # logits in one chunk: rlhf_kl.models.logits.LOGIT_ELEMENTS
CONFIG = """
reward: {normalize: false, clip: null}  # nothing that the peer does not do
kl: {controller: {kind: fixed, coef: 0.1}, ceiling: null}
ppo: {lr_schedule: constant}
eval: {every: 100000}
checkpoint: {every: 100000, keep: 1}
tracking: {tensorboard: false, samples_every: 100000}
"""


@dataclass(frozen=True)
class World:
    """Models and prompts of a benchmark, in folders that both sides can read, and the sizes of its runs."""

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
        lines = self.prompts.read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["prompt"] for line in lines if line.strip()]
        return list(load_tokenizer(str(self.policy))(texts)["input_ids"])


def endless(world: World, place: Path) -> World:
    """The same GPT-2 with an end that it never draws: in the LM head it gets a row with a logit of -40 everywhere."""
    model, tokenizer = load_causal_lm(str(world.policy)), load_tokenizer(str(world.policy))
    torch.manual_seed(0)
    with torch.no_grad():
        prompts = [torch.tensor([row]) for row in world.prompt_ids()[:64]]
        texts = [model.generate(prompt, do_sample=True, max_new_tokens=32) for prompt in prompts]
        states = torch.cat([model.transformer(text).last_hidden_state[0] for text in texts])
        square = 1.001 * states.T @ states / len(states) + 1e-6 * torch.eye(states.shape[1])  # least squares
        model.lm_head.weight[tokenizer.eos_token_id] = torch.linalg.solve(square, -40.0 * states.mean(0))
    save_model(model, tokenizer, place / "policy")
    return replace(world, policy=place / "policy", penalty=0.0)


def write_prompts(file: Path, vocabulary: int, lengths: Sequence[int], copies: int = 1) -> Path:
    """Prompts of random words, `copies` of each."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary - 2, (n,), generator=generator).tolist() for n in lengths]
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows]
    file.write_text("".join(line * copies for line in lines), encoding="utf-8")
    return file


def write_models(model: Any, tokenizer: Any, place: Path) -> tuple[Path, Path]:
    """Folders of a policy and of a reward model with the same trunk and a random head."""
    classifier = classifier_from_lm(model, tokenizer)
    initialise_head(classifier.score, seed=0)
    for name, part in (("policy", model), ("reward", classifier)):
        save_model(part, tokenizer, place / name)
    return place / "policy", place / "reward"


def random_world(place: Path, shape: Mapping[str, Any], lengths: Sequence[int], **sizes: int) -> World:
    """A GPT-2 or Llama with random weights over words w0, w1, ...; it practically never ends a text."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(shape["vocab_size"] - 2))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    if "layers" in shape:
        model = new_gpt2(**shape, context=1024, tokenizer=tokenizer, seed=0)
    else:
        model = LlamaForCausalLM(LlamaConfig(**(LLAMA | shape), pad_token_id=0, max_position_embeddings=1024))
    folders = write_models(model, tokenizer, place)
    return World(*folders, write_prompts(place / "prompts.jsonl", len(words), lengths), **sizes)


def make_world(name: str, args: argparse.Namespace, place: Path) -> World:
    """The world of a model, with the sizes of the command line."""
    if name in SHAPES:
        lengths = torch.randint(8, 25, (512,), generator=torch.Generator().manual_seed(0)).tolist()
        world = random_world(place, SHAPES[name], lengths)
    else:
        parts = BuiltIn("builtin:reviews")
        world = World(parts.policy(), parts.reward_model(), parts.file("prompts"), 64, 48, 4, 2e-4, 1.0)
        world = world if name == "reviews" else endless(world, place)
    return replace(world, batch=args.batch or world.batch, length=args.length or world.length)


def run_alone(command: Sequence[str], **options: Any) -> str:
    """What a command prints. It is the child of a small shell: a child of ours would inherit our peak memory."""
    shell = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def train(base: str, settings: Mapping[str, Any], place: Path) -> list[dict[str, Any]]:
    """The rows of a run of `rlhf-kl train` in a process of its own; its folder is deleted."""
    file, out = place / "bench.yaml", place / "run"
    file.write_text(f"extends: {base}\n{CONFIG}", encoding="utf-8")
    command = [sys.executable, "-m", "rlhf_kl", "train", "--config", str(file), "--output-dir", str(out), "--quiet"]
    run_alone([*command, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))])
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(out)
    return [row for row in rows if "time/step_s" in row]


def our_run(world: World, args: argparse.Namespace, place: Path, value: str, dtype: str, seed: int) -> dict[str, Any]:
    """Medians over the updates of one run, the first ones left out."""
    settings = {"run.device": args.device, "run.dtype": dtype, "run.seed": seed}
    settings |= {"policy.model": world.policy, "policy.value": value, "reward.model": world.reward}
    settings |= {"reward.missing_eos_penalty": world.penalty, "rollout.max_new_tokens": world.length}
    held_out = place / "held_out.jsonl"  # something else than prompts: those are all trained on
    held_out.write_text(json.dumps({"prompt": "w0 w1"}) + "\n", encoding="utf-8")
    settings |= {"data.prompts": world.prompts, "eval.texts": held_out, "eval.prompts": held_out}
    settings |= {"kl.placement": args.placement, "data.column": "prompt", "eval.column": "prompt"}
    settings |= {"rollout.batch_size": world.batch, "rollout.reference_samples": world.batch}
    settings |= {"ppo.minibatch_size": world.batch, "ppo.microbatch_size": args.microbatch or "null"}
    settings |= {"ppo.total_episodes": world.batch * args.updates, "ppo.epochs": world.epochs}
    rows = train("ppo_adaptive.yaml", settings | {"ppo.learning_rate": world.learning_rate}, place)
    steady, phases = rows[WARM_UP:], ("step", "rollout", "score", "update")
    run = {f"{name}_s": statistics.median(row[f"time/{name}_s"] for row in steady) for name in phases}
    length = statistics.fmean(row["rollout/response_length"] for row in steady)
    samples = world.batch / run["step_s"]
    rates = {"samples_per_s": samples, "tokens_per_s": samples * length}
    return run | rates | {"length": length, "peak_memory_mb": rows[-1]["perf/peak_memory_mb"]}


def peer_run(world: World, args: argparse.Namespace, place: Path, _: str, dtype: str, seed: int) -> dict[str, Any]:
    """Seconds per update and peak memory of a run of the peer."""
    options = {"policy": world.policy, "reward": world.reward, "prompts": world.prompts, "column": "prompt"}
    options |= {"batch": world.batch, "epochs": world.epochs, "max-new-tokens": world.length, "updates": args.updates}
    options |= {"learning-rate": world.learning_rate, "kl-coef": 0.1, "missing-eos-penalty": world.penalty}
    options |= {"device": args.device, "dtype": dtype, "seed": seed + 1, "output-dir": place / "peer"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    lines = run_alone([args.peer_python, args.peer_script, *words], cwd=place, env=environment).splitlines()
    result = json.loads([line for line in lines if line.startswith("RESULT ")][-1].removeprefix("RESULT "))
    return {"step_s": result["median_update_s"], "peak_memory_mb": result["peak_cuda_mb"] or result["peak_rss_mb"]}


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

    Scoring reads the policy, the reference, the reward model and a separate value function, and takes two logits.
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
        "score_s": (2 + trunks) * body + 2 * head,
        "update_s": world.epochs * (3 * trunks * body + (3 + again) * head),
        **{f"{name}_giga_per_s": rate / 1e9 for name, rate in rates.items()},
    }


def ratios(ours: Mapping[str, float], peer: Mapping[str, float]) -> dict[str, float]:
    """How many times as fast as the peer a run is, and what part of the peer's memory it takes."""
    return {"speed": peer["step_s"] / ours["step_s"], "memory": ours["peak_memory_mb"] / peer["peak_memory_mb"]}


def median_ratios(pairs: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Of each kind of run the medians over the pairs."""
    keys = ("speed", "memory")
    return {name: {key: statistics.median(pair[name][key] for pair in pairs) for key in keys} for name in pairs[0]}


def show(figures: dict[str, Any]) -> dict[str, Any]:
    """Print figures in one line and return them."""
    words = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in figures.items()}
    print(", ".join(f"{key} {word}" for key, word in words.items()), flush=True)
    return figures


@dataclass
class Bench:
    """The parts of the benchmark; each prints what it measures and yields what goes into the JSON file."""

    args: argparse.Namespace
    place: Path
    worlds: dict[str, World] = field(default_factory=dict)

    def world(self, name: str) -> World:
        """The world of a model, made once."""
        if name not in self.worlds:
            self.worlds[name] = make_world(name, self.args, self.place / name)
        return self.worlds[name]

    def run(self, label: dict[str, Any], world: World, value: str, dtype: str, seed: int = 0) -> dict[str, Any]:
        """One run, ours or the `value` "peer", printed behind its label."""
        run = (peer_run if value == "peer" else our_run)(world, self.args, self.place, value, dtype, seed)
        return show({**label, "value": value, "dtype": dtype, **run})

    def phases(self) -> Iterator[dict[str, Any]]:
        """Where the time goes, and how much of it is the machine's."""
        for name in self.args.models:
            for value, dtype in self.args.variants:
                run = self.run({"model": name}, self.world(name), value, dtype)
                least = floors(self.world(name), self.args, value, dtype, run["length"])
                shares = {f"share_of_{key}": least[key] / run[key] for key in ("rollout_s", "score_s", "update_s")}
                yield run | show({f"floor_of_{key}" if key in run else key: least[key] for key in least} | shares)

    def groups(self) -> Iterator[dict[str, Any]]:
        """What many responses to one prompt save."""
        for name in [name for name in self.args.models if name in SHAPES]:
            for count in (2, 16):
                file = self.place / f"{name}-{count}.jsonl"
                write_prompts(file, SHAPES[name]["vocab_size"], [200] * count, copies=16 // count)
                world = replace(self.world(name), prompts=file, batch=16)
                for variant in self.args.variants:
                    yield self.run({"model": name, "prompts_of_200": count}, world, *variant)

    def peer(self) -> Iterator[dict[str, Any]]:
        """Pairs of runs in turn: ours with each value function and dtype, and the peer."""
        for name in self.args.models:
            pairs = []
            for number in range(self.args.pairs):
                pairs.append(self.pair(name, number))
                for run, figures in median_ratios(pairs).items():  # so far
                    show({"model": name, "pairs": number + 1, "median of": run, **figures})
            yield {"model": name, "pairs": pairs, "medians": median_ratios(pairs)}

    def pair(self, name: str, number: int) -> dict[str, dict[str, Any]]:
        """One run of each, ours with its ratios; the order turns by one from pair to pair."""
        order = [("peer", self.args.peer_dtype), *self.args.variants]
        turn, label = number % len(order), {"model": name, "pair": number + 1}
        runs = {each: self.run(label, self.world(name), *each, number) for each in order[turn:] + order[:turn]}
        peer = runs[order[0]]
        return {" ".join(each): {**runs[each], **ratios(runs[each], peer)} for each in order}


def make_parser() -> argparse.ArgumentParser:
    """Every option."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all that can run")
    add("--models", nargs="+", choices=MODELS, default=MODELS)
    add("--values", nargs="+", choices=["features", "head", "separate"], default=["features", "separate"])
    add("--placement", choices=["reward", "rao_blackwell"], default="reward", help="of our KL; the peer has `reward`")
    add("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--updates", type=int, default=12, help="of a run")
    add("--batch", type=int, help="responses per update, instead of the model's own number")
    add("--length", type=int, help="most new tokens, instead of the model's own number")
    add("--microbatch", type=int, help="most responses in a training pass; default: as many as there is room for")
    add("--pairs", type=int, default=3, help="runs of each side")
    add("--peer-python", help="python of the peer's environment")
    add("--peer-script", type=os.path.abspath, help="the script that runs the peer")
    add("--peer-dtype", choices=DTYPES, default="float32")
    add("--out", type=Path, default=Path("bench.json"))
    return parser


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked and completed."""
    parser = make_parser()
    args = parser.parse_args(words)
    args.variants = [(value, dtype) for value in args.values for dtype in args.dtypes]
    needs = {
        "peer": not (args.peer_python and args.peer_script) and "--peer-python and --peer-script",
        "groups": not SHAPES.keys() & set(args.models) and "gpt2 or llama among --models",
        "--updates": args.updates <= WARM_UP and f"more than {WARM_UP}: the first {WARM_UP} are not counted",
        "--device": args.device == "cuda" and not torch.cuda.is_available() and "a CUDA device, and there is none",
    }
    needs |= {part: f"to be one of {', '.join(PARTS)}" for part in set(args.parts) - set(PARTS)}
    for name, need in needs.items():
        if need and (name in args.parts or name not in PARTS):
            parser.error(f"{name}: needs {need}")
    args.parts = args.parts or [part for part in PARTS if not needs.get(part)]
    return args


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts of the command line."""
    args = arguments(words)
    machine = {"device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", "load": os.getloadavg()[0]}
    machine |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": version("transformers")}
    results: dict[str, Any] = {"machine": show(machine)}
    with tempfile.TemporaryDirectory(prefix="rlhf-kl-bench-") as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts:
            print(f"\n{part}", flush=True)
            results[part] = list(getattr(bench, part)())
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
