"""Fingerprints of models and texts, to detect a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

NUMBERS = 4096  # of each tensor


def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, types and shapes of all tensors, and some thousand numbers of each; on any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        # An odd distance, so that numbers of all columns are among them.
        numbers = tensor.detach().reshape(-1)[:: tensor.numel() // NUMBERS | 1]
        digest.update(numbers.cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over its vocabulary, rules, special tokens and chat template."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"vocab": tokenizer.get_vocab()}
    rules |= {"truncation": None, "padding": None}  # of the last call
    parts = [rules, tokenizer.special_tokens_map, tokenizer.chat_template]
    return texts_fingerprint([json.dumps(parts, sort_keys=True, default=str)])


def texts_fingerprint(texts: Iterable[str]) -> str:
    """SHA-256 over texts in their order."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
