from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlhf_kl.errors import InputError
from rlhf_kl.models.lora import add_adapter, load_adapter, merge
from rlhf_kl.models.pretrained import (
    context_length,
    eos_ids,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    model_fingerprint,
    save_generation,
    save_model,
    texts_fingerprint,
    tokenizer_fingerprint,
)
from rlhf_kl.types import Sampling
from tests import made


@pytest.fixture
def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


@pytest.fixture
def copied_reward(tiny_reward_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_reward_folder, tmp_path / "copy"))


def edit(folder: Path, change: Callable[[dict[str, Any]], None], name: str = "config.json") -> None:
    values = json.loads((folder / name).read_text())
    change(values)
    (folder / name).write_text(json.dumps(values))


def problem(load: Callable[..., Any], folder: Path) -> str:
    words = made.problem(load, str(folder))
    assert words.startswith(str(folder))
    return words


def test_a_whole_folder_loads_in_float32_with_dropout_off(copied: Path) -> None:
    def bf16_with_dropout(config: dict[str, Any]) -> None:
        config.update(dtype="bfloat16", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)

    tensors = load_file(copied / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, copied / "model.safetensors", metadata={"format": "pt"})
    edit(copied, bf16_with_dropout)
    model, ids = load_causal_lm(str(copied)), torch.tensor([[1, 3, 4]])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():  # equal in training mode too: there is no dropout left
        assert torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_folder_that_is_not_whole(copied: Path) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be loaded" in problem(load_causal_lm, copied)
    path.unlink()
    assert "holds no weights" in problem(load_causal_lm, copied)
    torch.save({}, copied / "pytorch_model.bin")
    assert "pickled" in problem(load_causal_lm, copied)
    (copied / "config.json").unlink()
    assert "config.json" in problem(load_causal_lm, copied)


@pytest.mark.parametrize(
    ("load", "name"), [(load_causal_lm, "h.0.attn.c_attn.weight"), (load_reward_model, "score.weight")]
)
def test_a_tensor_that_is_missing_would_be_random(load: Callable[..., Any], name: str, copied_reward: Path) -> None:
    tensors = load_file(copied_reward / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if not key.endswith(name)}
    save_file(kept, copied_reward / "model.safetensors", metadata={"format": "pt"})
    assert name in problem(load, copied_reward)


@pytest.mark.parametrize("load", [load_causal_lm, load_reward_model, load_tokenizer])
def test_a_config_that_is_not_json(load: Callable[..., Any], copied_reward: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        (copied_reward / name).write_text("{")
    assert "cannot be loaded" in problem(load, copied_reward)


def test_a_causal_lm_is_no_reward_model(copied: Path) -> None:
    assert "random" in problem(load_reward_model, copied)
    edit(copied, lambda config: config.pop("architectures"))
    assert "score.weight" in problem(load_reward_model, copied)


def test_a_classifier_with_two_outputs(copied_reward: Path) -> None:
    tensors = load_file(copied_reward / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(2, 1)
    save_file(tensors, copied_reward / "model.safetensors", metadata={"format": "pt"})
    edit(copied_reward, lambda c: c.update(id2label={"0": "x", "1": "y"}, label2id={"x": 0, "y": 1}))
    assert "2 outputs" in problem(load_reward_model, copied_reward)


def test_a_tokenizer_without_a_pad_token_pads_with_its_eos(copied: Path) -> None:
    edit(copied, lambda config: config.pop("pad_token"), "tokenizer_config.json")
    assert load_tokenizer(str(copied)).pad_token == "<eos>"
    edit(copied, lambda config: config.pop("eos_token"), "tokenizer_config.json")
    assert load_tokenizer(str(copied)).pad_token == "<bos>"
    edit(copied, lambda config: config.pop("bos_token"), "tokenizer_config.json")
    assert "no special token" in problem(load_tokenizer, copied)


def test_every_token_that_ends_a_text_is_known() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2)
    several = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 2]))
    assert eos_ids(several, tokenizer) == [5, 2]
    none = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    assert eos_ids(none, tokenizer) == [2]
    with pytest.raises(InputError, match="end-of-text"):
        eos_ids(none, SimpleNamespace(eos_token_id=None))


# Llama-2 chat, Vicuna and Mistral have such files; transformers loads them, but does not save them.
SAMPLING_UNSET = {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}
QWEN = {"do_sample": True, "eos_token_id": [2, 0], "repetition_penalty": 1.1, "temperature": 0.7, "top_k": 20}


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("settings", [SAMPLING_UNSET, QWEN])
def test_a_policy_is_saved_with_the_generation_config_of_its_rollouts(
    copied: Path, letters: Any, tmp_path: Path, settings: dict[str, Any], adapter: bool
) -> None:
    (copied / "generation_config.json").write_text(json.dumps(settings))
    model = load_causal_lm(str(copied))
    if adapter:
        model = add_adapter(model, r=2, alpha=4.0, target_modules=None, ref=str(copied), seed=0)
    changed = save_generation(model, Sampling(8, 1.0, [2, 5], 0))
    assert f"temperature {settings['temperature']} -> 1.0" in changed
    assert "_token_id" not in changed
    save_model(model, letters, tmp_path / "final")
    again = load_adapter(load_causal_lm(str(copied)), tmp_path / "final") if adapter else None
    merged = load_causal_lm(str(tmp_path / "final")) if again is None else merge(again)
    save_model(merged, letters, tmp_path / "merged")
    for name in ("final", "merged"):
        saved = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert saved.pop("transformers_version")
        bos = {"bos_token_id": 1} if "bos_token_id" in settings else {}
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0}
        assert saved == sampled | {"eos_token_id": [2, 5], "pad_token_id": 0} | bos


def test_nothing_is_told_of_a_generation_config_that_sets_nothing(new_model: Callable[..., Any]) -> None:
    assert save_generation(new_model(), Sampling(8, 1.0, [2], 0)) == ""


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        (SAMPLING_UNSET, SAMPLING_UNSET | {"do_sample": True}),
        (SAMPLING_UNSET | {"do_sample": False}, SAMPLING_UNSET | {"do_sample": True}),
        ({"eos_token_id": 2, "length_penalty": 2.0}, {"eos_token_id": 2}),
    ],
)
def test_a_model_that_is_fine_tuned_can_be_saved_whatever_its_generation_config(
    copied: Path, letters: Any, tmp_path: Path, settings: dict[str, Any], saved: dict[str, Any]
) -> None:
    (copied / "generation_config.json").write_text(json.dumps(settings))
    save_model(load_causal_lm(str(copied)), letters, tmp_path / "saved")
    found = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    found.pop("transformers_version")
    assert found == saved
    load_causal_lm(str(tmp_path / "saved")).generation_config.validate(strict=True)


@pytest.mark.parametrize(("name", "limit"), [("roberta", 16), ("mpnet", 16), ("distilbert", 18), ("gpt2", 18)])
def test_positions_that_begin_behind_the_pad_id_are_not_all_there(name: str, limit: int) -> None:
    """Where the embeddings of positions have a row for padding; checked by the classifier's own pass."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "dim": 8}
    heads = {"n_heads": 1, "n_layers": 1, "n_head": 1, "hidden_dim": 8, "max_position_embeddings": 18}
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = AutoConfig.for_model(name, vocab_size=7, num_labels=1, **special, **sizes, **heads)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    assert context_length(model) == limit
    model(input_ids=torch.full((1, limit), 4), attention_mask=torch.ones(1, limit))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, limit + 1), 4), attention_mask=torch.ones(1, limit + 1))


@pytest.mark.parametrize("gone", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_folder_without_a_tokenizer(copied: Path, gone: list[str]) -> None:
    for name in gone:
        (copied / name).unlink()
    result = problem(load_tokenizer, copied)
    assert "no tokenizer.json" in result
    assert not result.endswith(":")


def test_the_smallest_change_of_a_model_is_seen(new_model: Callable[..., Any]) -> None:
    model = new_model()
    before = model_fingerprint(model)
    assert model_fingerprint(new_model()) == before
    with torch.no_grad():
        model.transformer.ln_f.bias[3] = torch.nextafter(model.transformer.ln_f.bias[3], torch.tensor(9.0))
    assert model_fingerprint(model) != before
    assert model_fingerprint(new_model().bfloat16()) != before


def test_another_tokenizer_is_seen(letters: Any) -> None:
    changed = [copy.deepcopy(letters) for _ in range(3)]
    changed[0].chat_template = "x"
    changed[1].backend_tokenizer.post_processor = processors.Sequence([])
    changed[2].add_tokens(["e"])
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in (letters, *changed)}) == 4
    called = copy.deepcopy(letters)
    called(["ab", "c"], truncation=True, max_length=2, padding=True)
    assert tokenizer_fingerprint(called) == tokenizer_fingerprint(letters)


def test_texts_are_told_apart_by_order_and_by_where_they_end() -> None:
    assert texts_fingerprint(["ab", "c"]) == texts_fingerprint(iter(["ab", "c"]))
    assert len({texts_fingerprint(texts) for texts in (["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"])}) == 4
