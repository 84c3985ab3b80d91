"""TRL's RLOO, GRPO or PPO on a policy, a reward model and prompts: the peer of `scripts/bench_groups.py`.

Its argument is JSON: `method` (rloo, grpo, or ppo, which ends with TRL 1.12), `policy`, `reward` and `prompts`
(folders, and a .jsonl file), `beta`, `device` (cpu or cuda), `dtype`, `seed`, `updates`, `batch`, `group`, `epochs`,
`minibatches`, `max_new_tokens`, `learning_rate` (falls linearly).

The work of an update is that of `rlhf-kl train`: as many passes over the batch and as many optimizer steps in each.
PPO trains a value model as large as the reward model, and has no phases in the result. A text that is cut off pays 1.
bfloat16 is mixed precision: the weights stay float32, the layers run under autocast, those of the reward model too. PPO
of TRL 1.12 ignores `bf16`, so all of it runs under autocast, and its frozen weights are bfloat16. Texts are padded on
the right for the reward model, since GPT-2's positions are absolute.

The last line is JSON: `curve` (after each update the seconds since the start, the mean score, and the KL per token:
k1 for RLOO and PPO, k3 for GRPO), `update_s` and its phases `rollout_s`, `score_s` and `train_s` (medians without the
first two updates), `peak_memory_mb` (of the GPU, or of the process) and `threads`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import trl
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)


def classifier(folder: str, dtype: torch.dtype = torch.float32) -> Any:
    """A reward or value model."""
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=dtype)


class Scorer:
    """Scores of prompts with their responses and an EOS, as `rlhf-kl train` has them of the same reward model."""

    def __init__(self, folder: str, end: int, dtype: torch.dtype, device: str) -> None:
        self.model = classifier(folder).eval().to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        self.end, self.dtype = end, dtype
        self.__name__ = "score"  # TRL names its metrics after the function

    @torch.no_grad()
    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """One score per response, less 1 where it has no EOS."""
        texts = [prompt + text + self.tokenizer.eos_token for prompt, text in zip(prompts, completions, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True).to(self.model.device)
        with torch.autocast(self.model.device.type, self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(**batch).logits[:, 0].tolist()
        return [score - (ids[-1] != self.end) for score, ids in zip(scores, completion_ids, strict=True)]


class Curve(TrainerCallback):
    """Notes time, score and KL at the end of each update, and the seconds of its phases."""

    def __init__(self, length: int) -> None:
        """`length`: of a response that is not cut."""
        self.length = length
        self.points: list[dict[str, float]] = []
        self.spent = Counter[str]()

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, its seconds added to a phase."""

        def wrapper(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.spent[phase] += time.perf_counter() - start

        return wrapper

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start, self.began = time.perf_counter(), time.time()

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        seconds = time.perf_counter() - self.start
        if "reward" in logs:  # the last log is a summary
            self.points.append(
                {"began": self.began, "seconds": seconds, "score": logs["reward"], "kl": logs["kl"], **self.spent}
            )
        elif "objective/kl" in logs:  # of PPO, summed over a response
            kl = logs["objective/kl"] / self.length
            self.points.append({"began": self.began, "seconds": seconds, "score": logs["objective/scores"], "kl": kl})


def train(args: SimpleNamespace, folder: str) -> list[dict[str, float]]:
    """The curve of a run."""
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    tokenizer, curve = AutoTokenizer.from_pretrained(args.policy, padding_side="left"), Curve(args.max_new_tokens)
    if args.method == "ppo":
        train_ppo(args, folder, prompts, tokenizer, curve)
        return curve.points
    config, trainer = (getattr(trl, f"{args.method.upper()}{part}") for part in ("Config", "Trainer"))
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second before transformers 5.2x
    recompute = next(name for name in names if name in config.__dataclass_fields__)
    settings = config(
        output_dir=folder,
        seed=args.seed,
        beta=args.beta,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch // args.minibatches,
        steps_per_generation=args.minibatches,
        num_iterations=args.epochs,
        num_generations=args.group,
        max_completion_length=args.max_new_tokens,
        max_steps=args.updates * args.minibatches,
        logging_steps=args.minibatches,
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        **{recompute: False},  # it saves memory and costs time
        use_cpu=args.device == "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    made = trainer(
        model=args.policy,
        reward_funcs=Scorer(args.reward, tokenizer.eos_token_id, getattr(torch, args.dtype), args.device),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[curve],
    )
    made.remove_callback(PrinterCallback)  # a line for every update
    made._generate = curve.timed("rollout", made._generate)
    made._generate_and_score_completions = curve.timed("rollout and score", made._generate_and_score_completions)
    made.train()
    return curve.points


def train_ppo(args: SimpleNamespace, folder: str, prompts: list[str], tokenizer: Any, curve: Curve) -> None:
    """The same with PPO."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    needed = args.batch * args.updates
    rows = [{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts]
    data = Dataset.from_list((rows * (needed // len(rows) + 1))[:needed])
    settings = PPOConfig(
        output_dir=folder,
        seed=args.seed,
        kl_coef=args.beta,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch // args.minibatches,
        gradient_accumulation_steps=args.minibatches,
        num_mini_batches=args.minibatches,
        num_ppo_epochs=args.epochs,
        total_episodes=needed,
        local_rollout_forward_batch_size=args.batch,
        response_length=args.max_new_tokens,
        temperature=1.0,
        stop_token="eos",
        missing_eos_penalty=1.0,
        use_cpu=args.device == "cpu",
        report_to=[],
        save_strategy="no",
        num_sample_generations=0,
        logging_steps=1,
        disable_tqdm=True,
    )
    dtype, language_model = getattr(torch, args.dtype), AutoModelForCausalLM.from_pretrained
    models = {"model": language_model(args.policy, dtype=torch.float32), "value_model": classifier(args.reward)}
    models |= {"ref_model": language_model(args.policy, dtype=dtype), "reward_model": classifier(args.reward, dtype)}
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        train_dataset=data,
        eval_dataset=data.select(range(args.batch)),
        callbacks=[curve],
        **models,
    )
    # Without a cache of casts: weights change inside.
    with torch.autocast(args.device, dtype, enabled=dtype == torch.bfloat16, cache_enabled=False):
        trainer.train()


def main() -> None:
    """Train, and print the result."""
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        curve = train(args, folder)

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if args.device == "cuda":
        peak = torch.cuda.max_memory_allocated()

    def spent(name: str) -> float:
        return median(after.get(name, math.nan) - before.get(name, math.nan) for before, after in pairwise(curve[1:]))

    result = {
        "curve": curve,
        "update_s": spent("seconds"),
        "rollout_s": spent("rollout"),
        "score_s": spent("rollout and score") - spent("rollout"),
        "train_s": spent("seconds") - spent("rollout and score"),
        "peak_memory_mb": peak / 2**20,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
