"""Memory of each GPU by the estimate of `rlhf-kl doctor`, for Qwen 2.5's shapes: computed, not measured.

    python scripts/memory_table.py [FILE]    FILE: the table as JSON

64 responses of 256 tokens behind prompts of 256, four responses in a training pass. What is trained, its gradients and
Adam's moments are float32, the layers compute in bfloat16, and frozen ones are stored in it where nothing is sharded;
the reward is a function, so a reward model adds its weights. The arithmetic is in rlhf_kl/commands/memory.py.
tests/commands/test_memory.py compares it with a profiler's peak on a CPU, and tests/processes/test_memory.py with the
bytes of the tensors in two processes.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.commands.memory import estimate_memory
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.lm import LM
from rlhf_kl.models.load import parameter_count
from rlhf_kl.models.lora import add_adapter
from rlhf_kl.models.value import store_frozen
from rlhf_kl.report.verdict import text_table
from rlhf_kl.rewards.scorer import Scorers
from rlhf_kl.run.log import write_json

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
GPUS = (1, 4, 8)
TOKENS, BATCH, ROWS = 512, 64, 4


def estimate(shape: dict[str, Any], gpus: int, *, lora: bool, shard: bool) -> float:
    """GiB of one GPU."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape))
        if lora:
            model = add_adapter(model, r=16, alpha=32.0, target_modules=None, ref="x", seed=0)
    reference = model if lora else copy.deepcopy(model).requires_grad_(False)
    if not shard:
        store_frozen(reference, torch.bfloat16)
    config = TrainConfig.model_validate({
        "run": {"dtype": "bfloat16"},
        "policy": {"model": "x", "shard": shard, "lora": {} if lora else None},
        "reference": {"shard": shard},
        "reward": {"kind": "x.py:f"},
        "data": {"prompts": "x"},
        "eval": {"texts": "x"},
        "rollout": {"batch_size": BATCH, "max_new_tokens": TOKENS // 2},
    })  # fmt: skip
    prompts = SimpleNamespace(longest=TOKENS // 2)
    with FakeTensorMode(allow_non_fake_inputs=True):  # tensors without memory, in which autocast works
        policy = LM(model.to_empty(device="cpu"), torch.bfloat16)
        parts: Any = SimpleNamespace(policy=policy, reference=LM(reference), scorers=Scorers(), prompts=prompts)
        memory = estimate_memory(config, parts, torch.device("cuda"), gpus)
    return memory.total(min(ROWS, memory.minibatch)) / 2**30


def main() -> None:
    """Print the table, and write it."""
    rows, found = [], {}
    for name, shape in SHAPES.items():
        with torch.device("meta"):
            numbers = parameter_count(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **shape)))
        for lora in (False, True):
            for shard in (False, True):
                kind, spread = "adapter" if lora else "everything", "shards" if shard else "copies"
                gib = {n: estimate(shape, n, lora=lora, shard=shard) for n in GPUS if n > 1 or not shard}
                found.setdefault(f"{name}, {kind}", {})[spread] = {f"{n} GPU": each for n, each in gib.items()}
                cells = [f"{gib[n]:.1f}" if n in gib else "" for n in GPUS]
                rows.append([name, f"{numbers / 1e9:.2f}B", kind, spread, *cells])
    print(text_table(["model", "parameters", "trained", "on each GPU", *(f"{n} GPU, GiB" for n in GPUS)], rows))
    if sys.argv[1:]:
        write_json(Path(sys.argv[1]), found)


if __name__ == "__main__":
    main()
