"""The guide's table of what fits: `python scripts/memory_table.py`. Each cell is what `doctor --device-memory` says."""

from __future__ import annotations

import json
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.commands.fitting import ADAPTER, SHARDS, Outlined, fitting_changes, outliner
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.training.footprint import Place

COUNTS, SIZES = (1, 8), (24, 40, 80)  # devices, and GB of each
PROMPT, RESPONSE, BATCH = 256, 256, 64  # tokens, tokens, responses
LLAMA = {"model_type": "llama", "num_attention_heads": 32}
SHAPES: dict[str, dict[str, Any]] = {  # of their configs
    "Qwen2.5 0.5B": {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864}
    | {"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Llama 3.2 1B": LLAMA
    | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_key_value_heads": 8, "tie_word_embeddings": True},
    "Llama 3.2 3B": {"model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192}
    | {"num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "Mistral 7B": {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Llama 2 13B": {"model_type": "llama", "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824}
    | {"num_hidden_layers": 40, "num_attention_heads": 40},
}
WORDS = {SHARDS: "shard", "policy.gradient_checkpointing=true": "recompute", "rollout.engine=vllm": "engine"}


def cell(words: list[str] | None) -> str:
    """What to change, in a word or two."""
    if words is None or ADAPTER in words:
        return "no"
    short = [WORDS.get(word, word) for word in words]
    short = [re.sub(r"rollout.engine_options.gpu_memory_utilization=", "", word) for word in short]
    return ", ".join(re.sub(r"ppo.microbatch_size=(\d+)", r"\1 in a pass", word) for word in short) or "fits"


def planned(shape: dict[str, Any], folder: Path, lora: dict[str, Any] | None) -> tuple[TrainConfig, Outlined]:
    """The config of a run of this shape, and what outlines its models."""
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    config = TrainConfig.model_validate(
        {
            "run": {"dtype": "bfloat16"},
            "policy": {"model": str(folder), "lora": lora},
            "reward": {"kind": "http", "url": "http://127.0.0.1"},
            "data": {"prompts": "builtin:reviews"},
            "eval": {"texts": "builtin:reviews", "scorers": {"gold": None}},
            "rollout": {"batch_size": BATCH, "max_new_tokens": RESPONSE},
        }
    )
    return config, outliner(config, PROMPT)


@cache
def rows() -> list[list[str]]:
    """The cells of the table."""
    found = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            for trained, lora in (("whole", None), ("adapter", {})):
                config, models = planned(shape, Path(folder), lora)
                places = [Place(torch.device("cuda"), n, size * 10**9, PROMPT) for n in COUNTS for size in SIZES]
                found.append([name, trained, *(cell(fitting_changes(config, models, place)) for place in places)])
    return found


def table() -> str:
    """The table in Markdown."""
    head = ["model", "trained", *(f"{count} x {size} GB" for count in COUNTS for size in SIZES)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows())) + "\n"


if __name__ == "__main__":
    print(table(), end="")
