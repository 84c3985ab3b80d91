"""Models and tokenizers from a folder or the hub, with every silent failure of loading made loud."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf_kl.errors import InputError
from rlhf_kl.models.actor_critic import choose_way

Model = Any  # transformers models are untyped


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load reports and progress bars: what matters of them is checked and said by us."""
    before = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()


def _check_folder(ref: str, what: str) -> None:
    folder = Path(ref)
    if not folder.is_dir():
        return
    if not (folder / "config.json").is_file():
        raise InputError(f"{what} {ref}: the folder has no config.json, so it holds no transformers model")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        hint = " (pickled weights are not loaded: convert them to safetensors)" if pickled else ""
        raise InputError(f"{what} {ref}: the folder holds no weights (*.safetensors){hint}")


def _load(cls: Any, ref: str, what: str, allowed_missing: tuple[str, ...] = (), **kwargs: Any) -> Model:
    _check_folder(ref, what)
    try:
        # float32 whatever the checkpoint's dtype: in bf16 master weights small updates round away.
        with quiet_transformers(), contextlib.redirect_stdout(io.StringIO()):
            model, report = cls.from_pretrained(
                ref, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **kwargs
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{what} {ref}: cannot be loaded: {_first_line(error)}") from error
    missing = sorted(key for key in report["missing_keys"] if not key.endswith(allowed_missing or ("\0",)))
    if missing:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise InputError(f"{what} {ref}: weights are missing and would be random: {shown}")
    if report.get("mismatched_keys"):
        raise InputError(f"{what} {ref}: weights of another shape: {sorted(map(str, report['mismatched_keys']))[:4]}")
    _switch_dropout_off(model)
    return model


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _switch_dropout_off(model: Model) -> None:
    """Dropout makes the log-probs of one and the same policy differ: off in every model, for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.eval()


def save_model(model: Model, tokenizer: Any, folder: Path) -> None:
    """A folder that plain transformers loads: safetensors, config, tokenizer, generation_config."""
    with quiet_transformers():
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)


def load_causal_lm(ref: str, what: str = "model") -> Model:
    """A causal language model in float32 from a folder or hub id. Errors: InputError with the reason."""
    model = _load(AutoModelForCausalLM, ref, what)
    choose_way(model)
    return model


def load_reward_model(ref: str, what: str = "reward.model") -> Model:
    """A sequence classifier with one output in float32.

    Errors: InputError where the head would be random (a causal LM's folder) or has several outputs.
    """
    folder = Path(ref)
    if folder.is_dir() and (folder / "config.json").is_file():
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            architectures = config.get("architectures") or []
        except (ValueError, AttributeError) as error:
            raise InputError(f"{what} {ref}: cannot be loaded: config.json: {_first_line(error)}") from error
        if architectures and not any("SequenceClassification" in name for name in architectures):
            raise InputError(
                f"{what} {ref}: is a {architectures[0]}, not a sequence classifier: "
                "its reward head would be random; train one with `rlhf-kl reward-model`"
            )
    model = _load(AutoModelForSequenceClassification, ref, what)
    if model.config.num_labels != 1:
        raise InputError(f"{what} {ref}: has {model.config.num_labels} outputs, a reward model has one")
    return model


def load_tokenizer(ref: str, what: str = "model") -> Any:
    """The tokenizer of a model, padding on the left, with a pad token. Masks never look at the pad *id*."""
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(ref)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise InputError(f"{what} {ref}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(f"{what} {ref}: its tokenizer has neither a pad nor an eos token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_ids(model: Model, tokenizer: Any) -> list[int]:
    """Every token id that ends a text: those of the generation config and the tokenizer's own."""
    found: list[int] = []
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for item in (configured, tokenizer.eos_token_id):
        for token in item if isinstance(item, list) else [item]:
            if token is not None and token not in found:
                found.append(int(token))
    return found


def context_length(model: Model) -> int | None:
    """Most tokens the model can take in, or None where its config does not say."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "n_ctx"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def parameter_count(model: torch.nn.Module) -> int:
    """Number of parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
