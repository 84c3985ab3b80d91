from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf_kl.models.load import load_causal_lm, save_model
from rlhf_kl.models.scratch import classifier_from_lm

Make = Callable[..., Any]


def test_a_seed_makes_the_same_weights_and_leaves_the_global_stream_alone(new_model: Make) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (new_model(seed=seed, spread=0.0) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


def test_embeddings_are_tied_and_generation_samples_from_the_whole_policy(new_model: Make, letters: Any) -> None:
    model = new_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.generation_config.top_k == 0
    assert model.config.eos_token_id == letters.eos_token_id
    assert not model.training


def test_a_classifier_keeps_the_trunk_of_its_language_model(tiny_folder: Path, letters: Any) -> None:
    model = classifier_from_lm(load_causal_lm(str(tiny_folder)), letters, "policy.model")
    trunk = load_causal_lm(str(tiny_folder)).base_model.state_dict()
    assert model.config.num_labels == 1
    assert model.score.out_features == 1
    for name, tensor in model.base_model.state_dict().items():
        assert torch.equal(tensor, trunk[name])


def test_a_saved_model_gives_the_same_logits_in_plain_transformers(
    new_model: Make, letters: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = new_model(), torch.tensor([[1, 3, 4, 5]])
    save_model(model, letters, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
