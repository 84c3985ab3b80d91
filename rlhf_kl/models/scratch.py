"""New small models: a GPT-2 and its tokenizer from scratch, and a reward model from a language model's trunk."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import SAFE, Access, quiet_transformers, switch_dropout_off

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> Any:
    """A byte-level BPE tokenizer (Radford et al. 2019) with distinct pad, bos and eos.

    Calling it adds bos at the start. The caller adds eos, since a prompt must not end with it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = SPECIAL["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **SPECIAL,
    )


def new_gpt2(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, context: int, tokenizer: Any, seed: int
) -> Any:
    """A GPT-2 with random weights and tied embeddings, deterministic for a seed; no dropout."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=context,
        n_embd=hidden_size,
        n_layer=layers,
        n_head=heads,
        # The tanh form in one fused operation; "gelu_new" computes the same in seven.
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
    model.generation_config.do_sample = True
    model.generation_config.top_k = 0  # the default of 50 would not sample from the policy
    return model.eval()


def classifier_from_lm(lm: Any, tokenizer: Any, access: Access = SAFE) -> Any:
    """A one-output sequence classifier on the trunk of a causal LM; its head is still to be initialised.

    Errors: InputError where the architecture has no sequence classifier.
    """
    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=access.remote_code)
        model.base_model.load_state_dict(lm.base_model.state_dict())
    except (ValueError, RuntimeError) as error:
        raise InputError(f"transformers has no sequence classifier for a {type(lm).__name__}") from error
    switch_dropout_off(model)
    return model.float()


def initialise_head(score: nn.Linear, seed: int) -> None:
    """N(0, 1/(d+1)) weights (Huang et al. 2023, reward head initialisation), drawn for this head alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        score.weight.copy_(torch.randn(score.weight.shape, generator=generator) / (score.in_features + 1) ** 0.5)
        if score.bias is not None:
            score.bias.zero_()
