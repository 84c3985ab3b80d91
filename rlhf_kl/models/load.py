"""Loads models and tokenizers from a folder and checks them: every problem is reported."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from rlhf_kl.errors import InputError, blame
from rlhf_kl.hub import first_line
from rlhf_kl.memory import memory_is_full
from rlhf_kl.models.lm import check_head
from rlhf_kl.program import shell_command
from rlhf_kl.types import Sampling

Model = Any  # transformers models are untyped


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load reports and progress bars; what matters of them is checked here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@dataclass(frozen=True)
class Access:
    """Permissions to load a model in ways that can run other people's code."""

    remote_code: bool = False
    pickle: bool = False


SAFE = Access()
NO_TOKENIZER = (
    "there is no tokenizer.json, and no files to create one from "
    "(vocab.json and merges.txt; tokenizer.model where sentencepiece is installed)"
)


def _load(cls: Any, folder: str, access: Access) -> Model:
    try:
        # float32 for any checkpoint dtype: in bf16 master weights, small updates are lost by rounding.
        with quiet_transformers():
            model, report = cls.from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=None if access.pickle else True,
                trust_remote_code=access.remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if memory_is_full(error):
            raise
        raise InputError(f"{folder}: cannot be loaded: {_load_failure(error)}") from error
    problems = {
        "weights are missing and would be random": report["missing_keys"],
        "weights that belong to no part of the model": report["unexpected_keys"],
        "weights of another shape": report["mismatched_keys"],
    }
    for problem, keys in problems.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise InputError(f"{folder}: {problem}: {shown}")
    switch_dropout_off(model)
    return model


def _load_failure(error: Exception) -> str:
    if "trust_remote_code" in str(error):
        return "it contains code: read it, then set run.trust_remote_code; for a run: --trust-remote-code"
    if "instantiate the backend tokenizer" in str(error):  # transformers adds several lines
        return NO_TOKENIZER
    return first_line(error)


def switch_dropout_off(model: Model) -> None:
    """Switch dropout off permanently: with it, the log-probs of one policy differ between passes."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        # Attention stores its dropout as a number, and so does OPT, which skips whole layers in training mode.
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    model.eval()


def save_model(model: Model, tokenizer: Any, folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Save a folder for plain transformers: safetensors, config, tokenizer, generation_config.

    For a model with an adapter, only the adapter is saved; it names its base. `tensors` replace those of the model.
    """
    given = {} if tensors is None else {"state_dict": tensors}
    generation = getattr(model, "generation_config", None)  # a classifier has none
    with quiet_transformers():
        if generation is not None and not _can_be_saved(generation):
            special = {name: getattr(generation, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            model.generation_config = GenerationConfig(**special)
        if hasattr(model, "peft_config"):
            # The adapter alone; otherwise peft compares the vocabulary with that on the hub.
            model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False, **given)
            if generation is not None:
                model.generation_config.save_pretrained(folder)
            (folder / "README.md").unlink(missing_ok=True)  # an empty model card
        else:
            model.save_pretrained(folder, **given)
        tokenizer.save_pretrained(folder)


def _can_be_saved(config: GenerationConfig) -> bool:
    """Whether transformers saves a generation config; older ones have a temperature without `do_sample`."""
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def save_generation(model: Model, sampling: Sampling) -> None:
    """Give a policy the generation config of its rollouts, to be saved with it.

    Settings of its checkpoint that would sample otherwise (top-p, a repetition penalty) are left out.
    """
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=0,
        bos_token_id=model.generation_config.bos_token_id,
        eos_token_id=sampling.eos_ids,
        pad_token_id=sampling.pad_id,
    )


def load_causal_lm(folder: str, access: Access = SAFE) -> Model:
    """A causal language model in float32. Errors: InputError with the reason."""
    model = _load(AutoModelForCausalLM, folder, access)
    with blame(folder):
        check_head(model)
    return model


def load_reward_model(folder: str, access: Access = SAFE) -> Model:
    """A sequence classifier in float32. Errors: InputError if its head would be random (a causal LM's folder)."""
    if not is_classifier(folder):
        raise InputError(
            f"{folder}: is no sequence classifier: its reward head would be random; "
            f"train one with `{shell_command()} reward-model`"
        )
    return _load(AutoModelForSequenceClassification, folder, access)


def is_classifier(folder: str) -> bool:
    """Whether the config of a folder names a sequence classifier. Errors: InputError where that is no JSON."""
    file = Path(folder) / "config.json"
    if not file.is_file():  # an adapter
        return False
    try:
        architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures") or []
    except ValueError as error:
        raise InputError(f"{folder}: cannot be loaded: config.json: {first_line(error)}") from error
    return any("SequenceClassification" in name for name in architectures)


def check_label(model: Model, label: str | None) -> None:
    """Errors: InputError if a model has several outputs and `label` names none, or has one output and a label."""
    names = [str(name) for name in model.config.id2label.values()]
    if model.config.num_labels != 1 and label not in names:
        given = "reward.label names none of them" if label is None else f"none of them is {label!r}"
        raise InputError(f"has {len(names)} outputs ({', '.join(names[:6])}), and {given}")
    if model.config.num_labels == 1 and label is not None:
        raise InputError(f"has only one output, so reward.label must be null: {label!r}")


def load_tokenizer(ref: str, access: Access = SAFE) -> Any:
    """The tokenizer of a model, padding on the left, with a pad token. Masks do not depend on the pad *id*."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(ref, trust_remote_code=access.remote_code)
    except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError) as error:
        raise InputError(f"{ref}: its tokenizer cannot be loaded: {_load_failure(error)}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # some models get an empty tokenizer if they have none
        raise InputError(f"{ref}: its tokenizer cannot be loaded: {NO_TOKENIZER}")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        stand_in = tokenizer.eos_token or tokenizer.bos_token or tokenizer.unk_token
        if stand_in is None:
            raise InputError(f"{ref}: its tokenizer has no special token, so there is none for padding")
        tokenizer.pad_token = stand_in
    return tokenizer


def check_vocabulary(model: Model, tokenizer: Any, rows: Sequence[Sequence[int]]) -> None:
    """Errors: InputError for a token id, special or in `rows`, beyond the model's embeddings.

    A tokenizer may have more tokens than the model (for images, say) if none of them is used.
    """
    size = model.get_input_embeddings().weight.shape[0]
    special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    beyond = [f"{name} ({token})" for name, token in special.items() if token is not None and token >= size]
    if beyond:
        raise InputError(f"the tokenizer's {', '.join(beyond)} is outside the model's {size} tokens")
    largest = max((max(row, default=0) for row in rows), default=0)
    if largest >= size:
        raise InputError(f"token {largest} is outside the model's {size}: is this the model's tokenizer?")


def eos_ids(model: Model, tokenizer: Any) -> list[int]:
    """Every token id that ends a text: those of the generation config and the tokenizer's own.

    Errors: InputError if there is none, since no response could end.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    known = list(dict.fromkeys(int(token) for token in ids if token is not None))
    if not known:
        raise InputError("policy.model: neither its generation config nor its tokenizer names an end-of-text token")
    return known


def context_length(model: Model) -> int | None:
    """Maximum number of tokens for the model, or None if its config has no such number."""
    config = model.config.get_text_config()
    found = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "n_ctx"))
    limit = next((value for value in found if isinstance(value, int) and value > 0), None)
    for name, module in model.named_modules():  # RoBERTa and its kin count positions from behind the pad id
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit = min(limit or module.num_embeddings, module.num_embeddings - module.padding_idx - 1)
    return limit


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype of `run.dtype`."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def parameter_count(model: torch.nn.Module) -> int:
    """Number of parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types and shapes of all tensors, and some thousand numbers of each; on any device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        # An odd distance, so that numbers of all columns are among them.
        numbers = tensor.detach().reshape(-1)[:: tensor.numel() // 4096 | 1]
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
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
