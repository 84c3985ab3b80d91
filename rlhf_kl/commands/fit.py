"""Checks of `rlhf-kl doctor`: do learning rate, texts and number type fit the model and the machine?"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_kl.commands.finding import Finding
from rlhf_kl.commands.training import learning_rate
from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.models.lm import TransformersLM
from rlhf_kl.models.load import compute_dtype, context_length, parameter_count
from rlhf_kl.models.lora import has_adapter
from rlhf_kl.models.text import encode_all
from rlhf_kl.trainers.optim import usual_learning_rate
from rlhf_kl.trainers.sft import negative_log_likelihood

RATE_FACTOR = 5.0  # rates in use lie within a factor of 3 of the usual one
TIMED_ROWS, TIMED_TOKENS = 4, 64


def rate_finding(config: TrainConfig, policy: Any) -> Finding:
    """Whether the learning rate is near the usual one for a policy of this size."""
    rate, adapter, size = learning_rate(config, policy), has_adapter(policy), parameter_count(policy)
    usual = usual_learning_rate(size, adapter=adapter)
    words = f"{rate:.2g} for {'an adapter on ' if adapter else ''}{_short(size)} parameters"
    if config.ppo.learning_rate == "auto":
        return Finding("fine", "rate", f"learning rate {words}, chosen by size (auto)")
    ratio = rate / usual
    if 1 / RATE_FACTOR <= ratio <= RATE_FACTOR:
        return Finding("fine", "rate", f"learning rate {words}; usual is about {usual:.2g}")
    side = f"{ratio:.2g} times" if ratio > 1 else f"{1 / ratio:.2g} times less than"
    words = f"learning rate {words}: {side} the usual {usual:.2g}"
    return Finding("doubtful", "rate", words, f"ppo.learning_rate={usual:g}, or auto")


def perplexity_finding(perplexity: float, texts: Sequence[str], tokenizer: Any) -> Finding:
    """Whether the policy predicts the held-out texts better than their token frequencies do."""
    by_frequency = frequency_perplexity(encode_all(tokenizer, texts, bos=False))
    words = f"held-out perplexity {perplexity:.2f} on {len(texts)} texts"
    if perplexity < by_frequency:
        return Finding("fine", "eval", f"{words}; token frequencies alone give {by_frequency:.0f}")
    return Finding(
        "doubtful",
        "eval",
        f"{words}, no better than token frequencies alone ({by_frequency:.0f}): the policy does not write such texts",
        "eval.texts: texts like those that the policy was trained on",
    )


def frequency_perplexity(rows: Sequence[Sequence[int]]) -> float:
    """exp(entropy) of the token frequencies: the perplexity of a model that knows only these."""
    counts = Counter(token for row in rows for token in row)
    total = sum(counts.values())
    return math.exp(-sum(n / total * math.log(n / total) for n in counts.values())) if total else 1.0


def dtype_finding(config: TrainConfig, lm: TransformersLM) -> Finding:
    """Whether bfloat16 suits this device; on a CPU its speed is measured."""
    dtype, device = config.run.dtype, lm.device
    if dtype == "bfloat16" and device.type == "cpu":
        ratio = seconds_of_pass(lm, "bfloat16") / seconds_of_pass(lm, "float32")
        words = f"bfloat16 on this CPU: {TIMED_ROWS * TIMED_TOKENS} tokens take {ratio:.2g} times as long as in float32"
        if ratio < 1:
            return Finding("fine", "dtype", f"{words}, and is less exact; master weights float32")
        return Finding("doubtful", "dtype", f"{words}, and is less exact", "run.dtype=float32")
    if dtype == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding("doubtful", "dtype", "this GPU only emulates bfloat16", "run.dtype=float32")
    return Finding("fine", "dtype", f"{dtype} on {device}; master weights float32")


@torch.no_grad()
def seconds_of_pass(lm: TransformersLM, dtype: str) -> float:
    """Seconds of the faster of two passes over the same tokens: the first may include setup."""
    length = min(TIMED_TOKENS, context_length(lm.model) or TIMED_TOKENS)
    vocabulary = int(lm.model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (TIMED_ROWS, length), generator=torch.Generator().manual_seed(0)).tolist()
    reader, times = TransformersLM(lm.model, compute_dtype(dtype)), []
    for _ in range(2):
        began = time.perf_counter()
        negative_log_likelihood(reader, ids, [1] * len(ids))
        times.append(time.perf_counter() - began)
    return min(times)


def _short(count: int) -> str:
    """1234567 as 1.2M."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
