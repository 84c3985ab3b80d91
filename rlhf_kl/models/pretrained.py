"""Loads models and tokenizers from a folder and checks them: every problem is reported."""

from __future__ import annotations

import contextlib
import hashlib
import io
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
from rlhf_kl.hub import first_line, model_on_hub
from rlhf_kl.memory import memory_is_full
from rlhf_kl.models.labels import check_label
from rlhf_kl.models.lm import check_head, takes_ready_masks
from rlhf_kl.models.norms import fuse_norms
from rlhf_kl.shell import shell_command
from rlhf_kl.types import Sampling

Model = Any  # transformers models are untyped


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load reports and progress bars; what matters of them is checked here."""
    before, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
        if bars:
            transformers.logging.enable_progress_bar()


@dataclass(frozen=True)
class Access:
    """How models are loaded: permissions to run other people's code, and where weights stay.

    `mapped`: in their file, in its dtype, and shared with other processes, until they are sharded; else in float32.
    """

    remote_code: bool = False
    pickle: bool = False
    mapped: bool = False


SAFE = Access()
NO_TOKENIZER = (
    "there is no tokenizer.json, and no files to create one from "
    "(vocab.json and merges.txt; tokenizer.model where sentencepiece is installed)"
)
CLASSIFIES = "SequenceClassification"  # in the names of architectures


def _load(cls: Any, ref: str, access: Access) -> Model:
    model_on_hub(ref, pickled=access.pickle)
    try:
        # float32 for any checkpoint dtype: in bf16 master weights, small updates are lost by rounding.
        with quiet_transformers(), contextlib.redirect_stdout(io.StringIO()):
            model, report = cls.from_pretrained(
                ref,
                dtype="auto" if access.mapped else torch.float32,
                use_safetensors=None if access.pickle else True,
                trust_remote_code=access.remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        if memory_is_full(error):
            raise
        raise InputError(f"{ref}: cannot be loaded: {_load_failure(error)}") from error
    problems = {
        "weights are missing and would be random": report["missing_keys"],
        "weights that belong to no part of the model": report["unexpected_keys"],
        "weights of another shape": report["mismatched_keys"],
    }
    for problem, keys in problems.items():
        names = sorted(key if isinstance(key, str) else str(key[0]) for key in keys)
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise InputError(f"{ref}: {problem}: {shown}")
    switch_dropout_off(model)
    return fuse_norms(model)


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
        if generation is not None:
            model.generation_config = _valid_generation(generation)
        if hasattr(model, "peft_config"):
            # The adapter alone; otherwise peft compares the vocabulary with that on the hub.
            model.save_pretrained(folder, selected_adapters=["default"], save_embedding_layers=False, **given)
            if generation is not None:
                model.generation_config.save_pretrained(folder)
            (folder / "README.md").unlink(missing_ok=True)  # an empty model card
        else:
            model.save_pretrained(folder, **given)
        tokenizer.save_pretrained(folder)


def save_generation(model: Model, sampling: Sampling) -> str:
    """Give a policy the generation config of its rollouts, to be saved with it. Returns what that changes, in words.

    Settings of its checkpoint that would sample otherwise (top-p, a repetition penalty) are left out.
    """
    before = model.generation_config.to_diff_dict()
    special = {"bos_token_id": before.get("bos_token_id"), "pad_token_id": sampling.pad_id}
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=0, eos_token_id=sampling.eos_ids, **special
    )
    after = model.generation_config.to_dict()
    own = {key: value for key, value in before.items() if not key.endswith(("_token_id", "_version"))}
    told = {key: value for key, value in own.items() if key == "do_sample" or not isinstance(value, bool)}
    return ", ".join(f"{key} {value} -> {after.get(key)}" for key, value in told.items() if value != after.get(key))


def _valid_generation(config: GenerationConfig) -> GenerationConfig:
    """A generation config that transformers saves: older ones have a temperature without `do_sample`."""
    for change in ({}, {"do_sample": True}):
        config.update(**change)
        with contextlib.suppress(ValueError):
            config.validate(strict=True)
            return config
    special = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GenerationConfig(**special)


@contextlib.contextmanager
def read_as_float32(model: Model) -> Iterator[None]:
    """Inside, each module's weights are float32 while it computes: of mapped weights, one module's at a time."""
    stored: dict[torch.nn.Parameter, torch.Tensor] = {}

    def widen(module: torch.nn.Module, _: Any) -> None:
        for parameter in module.parameters(recurse=False):
            stored[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = stored.pop(parameter)

    narrow = [m for m in model.modules() if any(p.dtype != torch.float32 for p in m.parameters(recurse=False))]
    with contextlib.ExitStack() as hooks:
        for module in narrow:
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


def load_causal_lm(ref: str, access: Access = SAFE) -> Model:
    """A causal language model in float32 from a folder or hub id. Errors: InputError with the reason."""
    model = _load(AutoModelForCausalLM, ref, access)
    with blame(ref), read_as_float32(model):
        check_head(model)
        model.ready_masks = takes_ready_masks(model)
    return model


def load_reward_model(ref: str, access: Access = SAFE, label: str | None = None) -> Model:
    """A sequence classifier in float32, with one output or with several, of which `label` names one.

    Errors: InputError if the head would be random (a causal LM's folder), or if no output is chosen.
    """
    architectures = _architectures(ref)
    if architectures and not any(CLASSIFIES in name for name in architectures):
        raise InputError(
            f"{ref}: is a {architectures[0]}, not a sequence classifier: "
            f"its reward head would be random; train one with `{shell_command()} reward-model`"
        )
    model = _load(AutoModelForSequenceClassification, ref, access)
    with blame(ref):
        check_label(model, label)
    return model


def is_classifier(folder: str) -> bool:
    """Whether the config of a local folder names a sequence classifier."""
    return any(CLASSIFIES in name for name in _architectures(folder))


def _architectures(ref: str) -> list[str]:
    file = Path(ref) / "config.json"
    if not file.is_file():
        return []
    try:
        return [str(name) for name in json.loads(file.read_text(encoding="utf-8")).get("architectures") or []]
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{ref}: cannot be loaded: config.json: {first_line(error)}") from error


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
    check_tokens(model, tokenizer, rows)


def check_tokens(model: Model, tokenizer: Any, rows: Sequence[Sequence[int]]) -> None:
    """Errors: InputError for a token id in `rows` that is beyond the model's embeddings."""
    size = model.get_input_embeddings().weight.shape[0]
    largest = max((max(row, default=0) for row in rows), default=0)
    if largest >= size:
        named = f"token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r})"
        raise InputError(f"{named} is outside the model's {size}: is this the model's tokenizer?")


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
    """The torch dtype of `run.dtype`; float32 for auto."""
    found: torch.dtype = torch.float32 if name == "auto" else getattr(torch, name)
    return found


def parameter_count(model: torch.nn.Module) -> int:
    """Number of parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def size_words(model: torch.nn.Module) -> str:
    """The parameters of a model that is trained; of an adapter its own, and those of the model below it."""
    count = parameter_count(model)
    if not hasattr(model, "peft_config"):
        return f"{count:,} parameters"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)  # the start's too
    return f"an adapter of {trained:,} parameters on a model of {count - adapters:,}"


def model_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types and shapes of all tensors, and some thousand numbers of each; on any device.

    As float32, whatever their dtype: a run may go on with weights that are stored in another one.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        digest.update(f"{name} {dtype} {tuple(tensor.shape)}\0".encode())
        # An odd distance, so that numbers of all columns are among them.
        numbers = tensor.detach().reshape(-1)[:: tensor.numel() // 4096 | 1]
        digest.update(numbers.to("cpu", dtype).contiguous().view(torch.uint8).numpy())
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
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
