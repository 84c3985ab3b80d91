"""TRL's RLOO or GRPO on a policy, a reward model and prompts: the peer of `scripts/bench_groups.py`.

Its argument is JSON: `method` (rloo or grpo), `policy`, `reward` and `prompts` (folders, and a .jsonl file), `beta`,
`dtype`, `seed`, `updates`, `batch`, `group`, `minibatches`, `max_new_tokens`, `learning_rate` (falls linearly).

The work of an update is that of `rlhf-kl train`: one pass over the batch, in as many optimizer steps as there are
minibatches. A text that is cut off pays 1. bfloat16 is TRL's own mixed precision: the weights stay float32,
the layers run under autocast, those of the reward model too. Texts are padded on the right for the reward model,
since GPT-2's positions are absolute.

The last line is JSON: `curve` (after each update the seconds since the start, the mean score, and the KL per token:
k1 for RLOO, k3 for GRPO), `median_update_s` without the first two updates, `peak_rss_mb` and `threads`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

METHODS = {"rloo": (RLOOConfig, RLOOTrainer), "grpo": (GRPOConfig, GRPOTrainer)}


class Scorer:
    """Scores of prompts with their responses and an EOS, as `rlhf-kl train` has them of the same reward model."""

    def __init__(self, folder: str, end: int, dtype: torch.dtype) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
        self.end, self.dtype = end, dtype
        self.__name__ = "score"  # TRL names its metrics after the function

    @torch.no_grad()
    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        """One score per response, less 1 where it has no EOS."""
        texts = [prompt + text + self.tokenizer.eos_token for prompt, text in zip(prompts, completions, strict=True)]
        batch = self.tokenizer(texts, return_tensors="pt", padding=True)
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(**batch).logits[:, 0].tolist()
        return [score - (ids[-1] != self.end) for score, ids in zip(scores, completion_ids, strict=True)]


class Curve(TrainerCallback):
    """Notes time, score and KL at the end of each update."""

    def __init__(self) -> None:
        self.points: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:  # the last log is a summary
            seconds = time.perf_counter() - self.start
            self.points.append({"seconds": seconds, "score": logs["reward"], "kl": logs["kl"]})


def train(args: SimpleNamespace, folder: str) -> list[dict[str, float]]:
    """The curve of a run."""
    config, trainer = METHODS[args.method]
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    settings = config(
        output_dir=folder,
        seed=args.seed,
        beta=args.beta,
        learning_rate=args.learning_rate,
        per_device_train_batch_size=args.batch // args.minibatches,
        steps_per_generation=args.minibatches,
        num_iterations=1,
        num_generations=args.group,
        max_completion_length=args.max_new_tokens,
        max_steps=args.updates * args.minibatches,
        logging_steps=args.minibatches,
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        activation_checkpointing=False,  # it saves memory and costs time
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.policy, padding_side="left")
    curve = Curve()
    made = trainer(
        model=args.policy,
        reward_funcs=Scorer(args.reward, tokenizer.eos_token_id, getattr(torch, args.dtype)),
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines if line.strip()]),
        processing_class=tokenizer,
        callbacks=[curve],
    )
    made.remove_callback(PrinterCallback)  # a line for every update
    made.train()
    return curve.points


def main() -> None:
    """Train, and print the result."""
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        curve = train(args, folder)
    result = {
        "curve": curve,
        "median_update_s": median(after["seconds"] - before["seconds"] for before, after in pairwise(curve[1:])),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
