"""New small models: a GPT-2 from scratch, and a reward model from a language model's trunk."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

from rlhf_kl.errors import InputError
from rlhf_kl.models.load import SAFE, Access, switch_dropout_off
from rlhf_kl.models.quiet import quiet_transformers


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


def classifier_from_lm(lm: Any, tokenizer: Any, key: str, access: Access = SAFE) -> Any:
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
        raise InputError(f"{key}: transformers has no sequence classifier for a {type(lm).__name__}") from error
    switch_dropout_off(model)
    return model.float()
