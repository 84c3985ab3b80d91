"""Speed and memory of `rlhf-kl train`: `python scripts/bench.py [PART...] [--device cuda] [--out bench.json]`.

Every figure comes from runs of the command line, each in a process of its own, and from their metrics.jsonl:

phases    samples/s, tokens/s and peak memory of the three kinds of value function, split into rollout, scoring
          and update, beside the floor: the operations that the job must do over the rate at which this machine
          multiplies matrices of these shapes, and the bytes that decoding must read over its memory's rate,
          both measured in the same minutes
growth    how time and memory go with batch, response length, model size, vocabulary and what all prompts share
flat      whether they stay the same over many updates
agree     whether the fast ways of computing learn what the plain ones do: runs of both, the same seeds
peer      against TRL's PPO, alternating, with --peer-python (an environment that holds it) and --peer-script
          (run with --policy DIR --reward DIR --prompts FILE ..., it prints `RESULT {json}`)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from rlhf_kl.kernels.build import library
from rlhf_kl.kernels.logits import HeadLogits, plain_matrix

from rlhf_kl.run.files import check_writable

PEER_DTYPE = "float32"  # what the peer's script computes in
PARTS = ("phases", "growth", "flat", "agree", "peer")
FLOOR_ROWS = 32  # of the products whose rate makes the floor of training
END_LOGIT = 40.0  # below zero: of the end of a text in a policy that never ends one
AXES = ("batch", "length", "hidden", "vocabulary", "shared")  # of growth
VALUES = ("features", "head", "separate")  # value functions, the default first
SCRIPT_REWARD = '''def count(prompts, responses):
    """Something to score where no reward model is needed."""
    return [float(sum(map(ord, response)) % 101) for response in responses]
'''
# The command line without its short cuts: no compiled functions, transformers' own forward and cache at every step and
# position, one padded pass over all rows, and policy, reference and reward model asked again for every figure. Still
# computed in one operation or in chunks: GELU and log-probs.
PLAIN_WAYS = """
from rlhf_kl import reward_functions
from rlhf_kl.commands import parts
from rlhf_kl.models import actor_critic, compiled, load
from rlhf_kl.ops import logprobs, packing
from rlhf_kl.rollout import decoding, features, reference, sampling
from rlhf_kl.trainers import ppo

packing.group_lengths = reward_functions.group_lengths = lambda rows, **_: [list(range(len(rows)))] if rows else []
features._recall = lambda layout, *_: list(range(len(layout.lengths)))
load.choose_way = lambda model: setattr(model, actor_critic.PLAIN, "asked for")
reward_functions.try_last_mlp = reward_functions.choose_trunk_way = parts.choose_trunk_way = lambda *_: None
compiled.library = logprobs.library = sampling.library = lambda: None
decoding.gpt2_step = decoding.reserve = lambda *_: None
reference.KEPT_ELEMENTS = 0
ppo.PPOTrainer.listener = lambda *_: None

from rlhf_kl.cli import main

main()
"""
# What an update costs without what the peer does not do: no ceiling, no controller, no evaluation in between.
BARE: dict[str, Any] = {
    "extends": "ppo_adaptive.yaml",
    "rollout": {"reference_samples": 64},
    "reward": {"normalize": False, "clip": None},
    "kl": {"controller": {"kind": "fixed", "coef": 0.1}, "ceiling": None},
    "eval": {"every": 100000, "max_documents": 8},
    "checkpoint": {"every": 100000, "keep": 1},
    "tracking": {"tensorboard": False, "samples_every": 100000},
}


@dataclass(frozen=True)
class Shape:
    """What decides how many operations a model takes."""

    hidden: int
    layers: int
    vocabulary: int

    @property
    def body(self) -> float:
        """Operations for one token on its way through the layers, attention left out (it is small here)."""
        return 2 * 12 * self.layers * self.hidden**2

    @property
    def mlp(self) -> float:
        """Of these, the operations of one layer's MLP."""
        return 2.0 * 8 * self.hidden**2

    @property
    def head(self) -> float:
        """Operations for the logits of one state."""
        return 2.0 * self.hidden * self.vocabulary

    @property
    def weights(self) -> float:
        """Parameters that decoding one token reads."""
        return 12 * self.layers * self.hidden**2 + self.hidden * self.vocabulary


@dataclass
class World:
    """Models and prompts of a benchmark, in folders that both sides can read."""

    policy: Path
    prompts: Path
    shape: Shape
    prompt_tokens: float
    repeated: float  # share of a batch's prompt tokens that another prompt has, with all before them
    reward: Path | None = None  # None: a function
    config: dict[str, Any] | None = None


@dataclass
class Run:
    """One training run: medians over its updates, the first two left out."""

    samples_per_s: float
    tokens_per_s: float
    step_s: float
    rollout_s: float
    score_s: float
    update_s: float
    length: float
    prompt: float
    batch: int
    epochs: int
    peak_memory_mb: float
    scores: float  # mean of the last third
    kl_sequence: float


# ---------------------------------------------------------------------------------------------- running things


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Mappings laid over each other, the later ones winning."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = out.get(key)
            out[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def run_alone(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as the child of a small shell: a child of ours would inherit *our* peak memory as its own."""
    return subprocess.run(["sh", "-c", '"$@"; exit $?', "sh", *command], capture_output=True, text=True, **options)


def train(config: dict[str, Any], place: Path, *, plain: bool = False) -> list[dict[str, Any]]:
    """Run `rlhf-kl train` in a process of its own; its rows. plain: without any short cut."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "bench.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (place / "scored.py").write_text(SCRIPT_REWARD, encoding="utf-8")
    out = place / "run"
    program = ["-c", PLAIN_WAYS] if plain else ["-m", "rlhf_kl"]
    command = [sys.executable, *program, "train", "--config", str(place / "bench.yaml")]
    done = run_alone([*command, "--output-dir", str(out), "--overwrite", "--quiet"], check=False)
    if done.returncode:
        raise SystemExit(f"error: the run in {place} failed:\n{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "time/step_s" in row]


def measured(config: dict[str, Any], place: Path, world: World) -> Run:
    """Train and sum up."""
    rows = train(config, place)
    steady, last = rows[2:] or rows, rows[-max(1, len(rows) // 3) :]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in steady)

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in last)

    batch, step = config["rollout"]["batch_size"], median("time/step_s")
    length = statistics.fmean(row["rollout/response_length"] for row in steady)
    return Run(
        samples_per_s=batch / step,
        tokens_per_s=batch * length / step,
        step_s=step,
        rollout_s=median("time/rollout_s"),
        score_s=median("time/score_s"),
        update_s=median("time/update_s"),
        length=length,
        prompt=world.prompt_tokens,
        batch=batch,
        epochs=config["ppo"]["epochs"],
        peak_memory_mb=rows[-1]["perf/peak_memory_mb"],
        scores=mean("objective/scores"),
        kl_sequence=mean("kl/sequence"),
    )


# ---------------------------------------------------------------------------------------------- worlds


def built_in() -> World:
    """`builtin:reviews`, built where it is not there yet."""
    from rlhf_kl.commands.world import World as BuiltIn
    from rlhf_kl.models.load import load_tokenizer
    from rlhf_kl.run.display import TrainingDisplay

    world = BuiltIn("builtin:reviews", TrainingDisplay())
    policy, prompts = world.policy(), world.file("prompts")
    tokenizer = load_tokenizer(str(policy))
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    rows = tokenizer(texts)["input_ids"]
    shape = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    return World(
        policy=policy,
        reward=world.reward_model(),
        prompts=prompts,
        shape=Shape(shape["n_embd"], shape["n_layer"], shape["vocab_size"]),
        prompt_tokens=statistics.fmean(len(row) for row in rows),
        repeated=repeated_share(rows, 64),
    )


def repeated_share(rows: Sequence[Sequence[int]], batch: int) -> float:
    """Of the tokens of `batch` rows, the share that another one has as well, with all that stands before them.

    The mean of batches of neighbours: files of prompts have no order.
    """

    def distinct(some: Sequence[Sequence[int]]) -> int:
        return len({tuple(row[: end + 1]) for row in some for end in range(len(row))})

    batches = [rows[start : start + batch] for start in range(0, len(rows) - batch + 1, batch)] or [rows]
    return statistics.fmean(1 - distinct(some) / sum(map(len, some)) for some in batches)


def endless(world: World, place: Path) -> World:
    """The same policy with an end that it never draws: every response has full length.

    The embedding of the end, which is also its row in the LM head, is made to have a very low logit at every state.
    """
    from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model

    tokenizer, model = load_tokenizer(str(world.policy)), load_causal_lm(str(world.policy))
    lines = world.prompts.read_text(encoding="utf-8").splitlines()[:64]
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    most = model.config.n_positions
    torch.manual_seed(0)
    with torch.no_grad():
        texts = [
            model.generate(torch.tensor([ids]), do_sample=True, max_length=min(len(ids) + 32, most))[0]
            for ids in prompts
        ]
        states = torch.cat([model.transformer(ids[None]).last_hidden_state[0] for ids in texts])
        end = model.lm_head.weight[tokenizer.eos_token_id]
        damping = 1e-3 * states.T @ states / len(states) + 1e-6 * torch.eye(states.shape[1])
        square = states.T @ states / len(states) + damping
        end.copy_(torch.linalg.solve(square, -END_LOGIT * states.mean(0)))  # least squares: the same logit everywhere
        highest = float((model.lm_head(states).softmax(-1)[:, tokenizer.eos_token_id]).max())
    if highest > 1e-6:
        raise SystemExit(f"error: a policy that should never end a text would, with probability {highest:.1g}")
    folder = place / "endless"
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return replace(world, policy=folder)


def random_world(
    place: Path, shape: Shape, *, heads: int, prompt: int, response: int, shared: int = 0, prompts: int = 512
) -> World:
    """A GPT-2 with random weights over a vocabulary of numbered words; it practically never ends a text.

    Prompts have `prompt` random tokens each, behind `shared` others that are the same in all.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rlhf_kl.models.load import save_model
    from rlhf_kl.models.scratch import new_gpt2

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(shape.vocabulary - 2))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    model = new_gpt2(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        layers=shape.layers,
        heads=heads,
        context=shared + prompt + response,
        tokenizer=tokenizer,
        seed=0,
    )
    save_model(model, tokenizer, place / "policy")
    file = place / "prompts.jsonl"
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(shape.vocabulary - 2, (prompts, prompt), generator=generator).tolist()
    rows = [[*range(shared), *row] for row in drawn]
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) + "\n" for row in rows)
    return World(place / "policy", file, shape, float(shared + prompt), repeated_share(rows, 64))


def config_for(
    world: World, *, batch: int, length: int, updates: int, device: str, dtype: str, **sections: dict[str, Any]
) -> dict[str, Any]:
    """A config of a run in a world."""
    reward: dict[str, Any] = (
        {"kind": "model", "model": str(world.reward)} if world.reward else {"kind": "scored.py:count", "model": None}
    )
    return merged(
        BARE,
        {
            "run": {"device": device, "dtype": dtype},
            "policy": {"model": str(world.policy)},
            "reward": reward,
            "data": {"prompts": str(world.prompts)},
            "rollout": {"batch_size": batch, "max_new_tokens": length},
            "ppo": {
                "total_episodes": batch * updates,
                "epochs": 4,
                "learning_rate": 2e-4,
                "lr_schedule": "constant",
                "minibatch_size": batch,
            },
            "eval": {"texts": str(world.prompts), "column": "prompt"},
        },
        sections,
    )


# ---------------------------------------------------------------------------------------------- the machine's rates


def timed(call: Callable[[], Any], device: str, seconds: float = 0.4) -> float:
    """Seconds of one call, the shortest of several rounds: what the machine can do when nobody disturbs."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.05:
        call()
        wait()
        count += 1
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def multiply_rate(shape: Shape, rows: int, device: str, dtype: str) -> float:
    """Operations per second over the products of one layer at `rows` tokens, forward and both backward ones.

    By torch or, where it is faster, by the compiled functions.
    """
    kind, h = getattr(torch, dtype), shape.hidden
    total = spent = 0.0
    for k, n in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)):
        x, w, g = (torch.randn(*size, device=device).to(kind) for size in ((rows, k), (k, n), (rows, n)))
        for a, b in ((x, w), (g, w.T), (x.T, g)):
            total += 2.0 * rows * k * n
            ways: list[Callable[[], Any]] = [lambda a=a, b=b: a @ b]  # type: ignore[misc]
            if plain_matrix(x) and library() is not None:
                a, b = a.contiguous(), b.T.contiguous()
                ways.append(lambda a=a, b=b: HeadLogits.apply(a, b))  # type: ignore[misc]
            spent += min(timed(way, device, 0.15) for way in ways)
    return total / spent


def memory_rate(device: str) -> float:
    """Bytes per second that a copy of 256 MiB reads and writes."""
    source = torch.ones(1 << 26, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed(lambda: target.copy_(source), device)


def floors(run: Run, world: World, config: dict[str, Any], device: str, dtype: str) -> dict[str, float]:
    """Least seconds of each phase: operations over the measured rate; decoding also bytes over the memory's.

    What prompts begin with in common has to be read once, wherever they are read.
    """
    shape, value = world.shape, config["policy"].get("value")
    # Nobody reads what the last MLP says of a prompt, or a reward model's of anything but the end of a text.
    states, before = run.batch * run.length, run.batch * (run.prompt * (1 - world.repeated) - 1)
    trunk = (states + before) * shape.body - before * shape.mlp
    forward = trunk + states * shape.head
    texts = before + states + run.batch
    reward = texts * shape.body - (before if value == "features" else texts - run.batch) * shape.mlp
    training_rows = FLOOR_ROWS * int(run.prompt + run.length)
    rate = multiply_rate(shape, training_rows, device, dtype)
    decode_rate = multiply_rate(shape, run.batch, device, dtype)
    bandwidth = memory_rate(device)
    width = 2 if dtype == "bfloat16" else 4
    cache = 2 * shape.layers * shape.hidden * (run.prompt + run.length / 2) * run.batch
    decoded_bytes = run.length * (shape.weights + cache) * width
    beside = trunk if value == "separate" else 0.0
    scored = forward + beside + (reward if world.reward else 0.0)  # the policy's own log-probs come with its samples
    return {
        "multiply_gflops": rate / 1e9,
        "multiply_decode_gflops": decode_rate / 1e9,
        "memory_gb_s": bandwidth / 1e9,
        "rollout_s": max(forward / decode_rate, decoded_bytes / bandwidth),
        "score_s": scored / rate,
        "update_s": 3 * run.epochs * (forward + beside) / rate,
    }


# ---------------------------------------------------------------------------------------------- parts


class Bench:
    """The parts of the benchmark; each prints a table and returns what goes into the JSON file."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self.args, self.place, self.runs = args, place, 0

    def run(self, world: World, config: dict[str, Any]) -> Run:
        """One run in a folder of its own."""
        self.runs += 1
        return measured(config, self.place / f"run-{self.runs}", world)

    def world(self) -> World:
        """What the comparison is about: the built-in world, on a GPU a GPT-2 small with random weights."""
        if self.args.device == "cpu":
            return built_in()
        return random_world(self.place / "gpt2", Shape(768, 12, 50257), heads=12, prompt=64, response=128)

    def config(
        self, world: World, value: str = VALUES[0], dtype: str | None = None, **sections: dict[str, Any]
    ) -> dict[str, Any]:
        """The config of the comparison's run."""
        small = self.args.device == "cpu"
        return config_for(
            world,
            batch=64 if small else 256,
            length=48 if small else 128,
            updates=self.args.updates,
            device=self.args.device,
            dtype=dtype or self.args.dtype,
            policy={"model": str(world.policy), "value": value},
            **sections,
        )

    def phases(self) -> list[dict[str, Any]]:
        """Where the time goes, and how much of it is the machine's."""
        world, found = self.world(), []
        worlds = {"natural": world, "full length": endless(world, self.place)} if world.reward else {"random": world}
        header = f"{'run':<28}{'samples/s':>10}{'tokens/s':>10}{'peak MB':>9}"
        print(header + "".join(f"{name + ' s':>10}{'floor':>7}{'share':>7}" for name in ("rollout", "score", "update")))
        for kind, here in worlds.items():
            for value in VALUES:
                config = self.config(here, value)
                run = self.run(here, config)
                least = floors(run, here, config, self.args.device, self.args.dtype)
                shares = {name: least[f"{name}_s"] / getattr(run, f"{name}_s") for name in PHASES}
                found.append({"lengths": kind, "value": value, **asdict(run), "floors": least, "shares": shares})
                line = f"{f'{kind}, value: {value}':<28}{run.samples_per_s:>10.1f}{run.tokens_per_s:>10.0f}"
                line += f"{run.peak_memory_mb:>9.0f}"
                for name in PHASES:
                    line += f"{getattr(run, f'{name}_s'):>10.3f}{least[f'{name}_s']:>7.3f}{shares[name]:>7.0%}"
                print(line, flush=True)
        last = found[-1]["floors"]
        print(f"matrix products {last['multiply_gflops']:.0f} GFLOP/s, memory {last['memory_gb_s']:.1f} GB/s\n")
        return found

    def growth(self) -> list[dict[str, Any]]:
        """Time and memory against batch, length, model size and vocabulary."""
        base: dict[str, int] = {"batch": 32, "length": 32, "hidden": 128, "layers": 4, "vocabulary": 1000, "shared": 0}
        axes: dict[str, list[dict[str, int]]] = {
            "batch": [{"batch": size} for size in (16, 32, 64, 128)],
            "length": [{"length": size} for size in (16, 32, 64, 128)],
            "hidden": [{"hidden": size} for size in (64, 128, 256, 512)],
            "vocabulary": [
                {"vocabulary": vocabulary, "batch": batch, "hidden": 64}
                for vocabulary, batch in ((1000, 16), (50_000, 16), (50_000, 64), (150_000, 16), (150_000, 64))
            ],
            "shared": [{"shared": tokens} for tokens in (0, 16, 64, 256)],  # a system message
        }
        cases = [case for axis in self.args.axes for case in axes[axis]]
        if self.args.device == "cuda":
            base |= {"batch": 256, "length": 64, "hidden": 512, "layers": 8}
        print("".join(f"{name:>11}" for name in AXES) + f"{'us/token':>11}{'peak MB':>9}{'[B,T,V] MB':>12}")
        found = []
        for case in cases:
            sizes = base | case
            shape = Shape(sizes["hidden"], sizes["layers"], sizes["vocabulary"])
            folder = self.place / ("world-" + "-".join(map(str, sizes.values())))
            world = random_world(
                folder,
                shape,
                heads=sizes["hidden"] // 32,
                prompt=16,
                response=sizes["length"],
                shared=sizes["shared"],
            )
            run = self.run(
                world,
                config_for(
                    world,
                    batch=sizes["batch"],
                    length=sizes["length"],
                    updates=self.args.growth_updates,
                    device=self.args.device,
                    dtype=self.args.dtype,
                    rollout={"reference_samples": 16},
                ),
            )
            per_token = run.step_s / (run.batch * run.length) * 1e6
            logits = run.batch * run.length * shape.vocabulary * 4 / 2**20
            found.append(sizes | {"us_per_token": per_token, "logits_mb": logits, **asdict(run)})
            print(
                "".join(f"{sizes[name]:>11}" for name in AXES)
                + f"{per_token:>11.1f}{run.peak_memory_mb:>9.0f}{logits:>12.0f}",
                flush=True,
            )
        print()
        return found

    def flat(self) -> dict[str, Any]:
        """The first hundred updates of a long run against its last hundred."""
        count = self.args.flat_updates
        config = merged(
            BARE,
            {
                "extends": "smoke.yaml",
                "run": {"device": self.args.device},
                "ppo": {"total_episodes": 16 * count, "learning_rate": 1e-5},
            },
        )
        rows = train(config, self.place / "flat")
        tenth = max(1, len(rows) // 10)

        def per_token(part: Sequence[dict[str, Any]]) -> float:
            """Of the faster updates: other jobs on the machine slow some for many seconds, and never speed one up."""
            times = sorted(row["time/step_s"] / row["rollout/response_length"] / 16 for row in part)
            return times[len(times) // 10] * 1e6

        def memory(part: Sequence[dict[str, Any]]) -> float:
            return float(part[-1]["perf/peak_memory_mb"])

        first, last = rows[tenth : 2 * tenth], rows[-tenth:]
        found = {
            "updates": len(rows),
            "us_per_token": {"first": per_token(first), "last": per_token(last)},
            "peak_memory_mb": {"first": memory(first), "last": memory(last)},
        }
        for name, pair in (("us/token", found["us_per_token"]), ("peak MB", found["peak_memory_mb"])):
            print(
                f"{len(rows)} updates, {name}: {pair['first']:.1f} in the second tenth, {pair['last']:.1f} in the last"
            )
        print()
        return found

    def agree(self) -> dict[str, Any]:
        """Fast and plain runs of the same seeds: how far apart they end, against the spread over seeds."""
        keys = ("objective/scores", "kl/sequence")
        ends: dict[str, list[list[float]]] = {"fast": [], "plain": []}
        first: list[float] = []
        for seed in range(self.args.pairs):
            curves = []
            for way, found in ends.items():
                config = {
                    "extends": "smoke.yaml",
                    "run": {"device": self.args.device, "seed": seed},
                    "rollout": {"batch_size": 32},
                    "ppo": {"minibatch_size": 32, "total_episodes": 32 * self.args.updates},
                    "eval": {"every": 100000},
                }
                rows = train(config, self.place / f"{way}-{seed}", plain=way == "plain")
                last = rows[-max(1, len(rows) // 3) :]
                found.append([statistics.fmean(row[key] for row in last) for key in keys])
                curves.append(rows)
            first.append(max(abs(a - b) for key in keys for a, b in [(rows[0][key] for rows in curves)]))
        print(f"{'seed':<6}" + "".join(f"{f'{key}, {way}':>26}" for key in keys for way in ends))
        for seed in range(self.args.pairs):
            print(f"{seed:<6}" + "".join(f"{ends[way][seed][k]:>26.5f}" for k in range(len(keys)) for way in ends))
        gaps, spreads = {}, {}
        for k, key in enumerate(keys):
            fast, plain = ([run[k] for run in ends[way]] for way in ("fast", "plain"))
            gaps[key] = max(abs(a - b) for a, b in zip(fast, plain, strict=True))
            spreads[key] = statistics.stdev(plain) if len(plain) > 1 else float("nan")
            print(f"{key}: at most {gaps[key]:.2g} apart, spread over seeds {spreads[key]:.2g}")
        print(f"in the first update at most {max(first):.2g} apart\n")
        return {"keys": keys, "ends": ends, "gaps": gaps, "spreads": spreads, "first_update": first}

    def peer(self) -> list[dict[str, Any]]:
        """Pairs of runs, ours and the peer's in turn, in the peer's precision."""
        world, found = self.world(), []
        if world.reward is None:
            world.reward = random_reward(world, self.place)
        worlds = {"natural": world}
        if self.args.device == "cpu":
            worlds["full length"] = endless(world, self.place)
        for kind, here in worlds.items():
            # Scores of responses that may not end are not comparable where nobody can end them.
            penalty = 1.0 if kind == "natural" else 0.0
            for pair in range(self.args.pairs):
                other = self.peer_run(here, penalty, pair)
                line = {"lengths": kind, "pair": pair, "dtype": PEER_DTYPE, "peer": other}
                print(f"{kind}, {PEER_DTYPE}, pair {pair + 1}: peer {describe_peer(other)}", flush=True)
                turn = pair % len(VALUES)  # none is always the first after the peer
                for value in VALUES[turn:] + VALUES[:turn]:
                    config = self.config(
                        here, value, PEER_DTYPE, reward={"missing_eos_penalty": penalty}, run={"seed": pair}
                    )
                    run = self.run(here, config)
                    speed = run.samples_per_s / other["samples_per_s"]
                    memory = run.peak_memory_mb / other["peak_memory_mb"]
                    line[value] = {**asdict(run), "speed_ratio": speed, "memory_ratio": memory}
                    print(
                        f"    value: {value:<9} {run.samples_per_s:7.1f} samples/s = {speed:.2f}x, "
                        f"{run.peak_memory_mb:.0f} MB = {memory:.2f}x, length {run.length:.1f}, "
                        f"score {run.scores:.2f}, KL {run.kl_sequence:.2f}",
                        flush=True,
                    )
                found.append(line)
        for value in VALUES:
            for kind in worlds:
                ratios = [line[value]["speed_ratio"] for line in found if line["lengths"] == kind]
                print(f"value: {value}, {kind}: median {statistics.median(ratios):.2f}x the peer's samples/s")
        print()
        return found

    def peer_run(self, world: World, penalty: float, seed: int) -> dict[str, Any]:
        """One run of the peer."""
        config = self.config(world)
        options = {
            "policy": world.policy,
            "reward": world.reward,
            "prompts": world.prompts,
            "updates": self.args.updates,
            "batch": config["rollout"]["batch_size"],
            "epochs": config["ppo"]["epochs"],
            "max-new-tokens": config["rollout"]["max_new_tokens"],
            "kl-coef": config["kl"]["controller"]["coef"],
            "missing-eos-penalty": penalty,
            "device": self.args.device,
            "seed": seed + 1,
            "output-dir": self.place / "peer",
        }
        command = [self.args.peer_python, self.args.peer_script]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = run_alone(command, check=False, cwd=self.place, env=environment)
        result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not result:
            raise SystemExit(f"error: the peer failed:\n{done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(result[-1].removeprefix("RESULT "))
        curve = answer.pop("curve")
        last = curve[-max(1, len(curve) // 3) :]
        answer["samples_per_s"] = config["rollout"]["batch_size"] / answer["median_update_s"]
        answer["peak_memory_mb"] = answer["peak_cuda_mb"] or answer["peak_rss_mb"]
        answer["scores"] = statistics.fmean(row["objective/scores"] for row in last)
        answer["kl_sequence"] = statistics.fmean(row["kl/sequence"] for row in last)
        return answer


PHASES = ("rollout", "score", "update")


def describe_peer(run: dict[str, Any]) -> str:
    """One line about the peer's run."""
    return (
        f"{run['samples_per_s']:.1f} samples/s, {run['peak_memory_mb']:.0f} MB, "
        f"score {run['scores']:.2f}, KL {run['kl_sequence']:.2f}"
    )


def random_reward(world: World, place: Path) -> Path:
    """A reward model on the policy's own random trunk."""
    from rlhf_kl.models.load import load_causal_lm, load_tokenizer, save_model
    from rlhf_kl.models.scratch import classifier_from_lm

    tokenizer = load_tokenizer(str(world.policy))
    model = classifier_from_lm(load_causal_lm(str(world.policy)), tokenizer, "policy")
    save_model(model, tokenizer, place / "reward")
    return place / "reward"


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures were measured on."""
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "dtype": args.dtype,
        **{package: version(package) for package in ("torch", "transformers")},
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all that can run")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=None, help="bfloat16 on a GPU")
    parser.add_argument("--updates", type=int, default=12, help="of a run")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="what grows")
    parser.add_argument("--growth-updates", type=int, default=4)
    parser.add_argument("--flat-updates", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side")
    parser.add_argument("--peer-python", help="python of an environment with TRL 1.12.0")
    parser.add_argument("--peer-script", help="the script that runs it")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    with_peer = bool(args.peer_python and args.peer_script)
    if "peer" in args.parts and not with_peer:
        parser.error("peer: needs --peer-python and --peer-script")
    args.parts = args.parts or [part for part in PARTS if part != "peer" or with_peer]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is available here: not measured")
    try:
        check_writable(args.out)  # now: after the runs their figures would be lost
    except OSError as error:
        parser.error(f"--out: {args.out}: cannot be written: {error.strerror or error}")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    return args


def main() -> None:
    """Run the parts that were asked for."""
    args = arguments()
    found: dict[str, Any] = {"machine": machine(args)}
    print(", ".join(f"{key} {value}" for key, value in found["machine"].items()) + "\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="rlhf-kl-bench-") as folder:
        bench = Bench(args, Path(folder))
        for part in args.parts:
            found[part] = getattr(bench, part)()
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
