"""One tiny random model of every architecture family, through everything that is done with a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import cache_utils

from rlhf_kl.errors import InputError
from rlhf_kl.models import decoding
from rlhf_kl.models.decoding import pick_tokens
from rlhf_kl.models.lm import TransformersLM, enable_recompute
from rlhf_kl.models.load import load_causal_lm, load_reward_model, load_tokenizer, save_model
from rlhf_kl.models.lora import AdapterReference, add_adapter, load_adapter, merge
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.models.text import encode, pad
from rlhf_kl.ops.packing import Layout, text_layout
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import PromptBatch, Sampling

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
GATED = {**WIDE, "intermediate_size": 24, "num_key_value_heads": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "gpt_neox": {**WIDE, "intermediate_size": 24},
    "opt": {**WIDE, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "llama": {**GATED, "tie_word_embeddings": True},
    "mistral": {**GATED, "sliding_window": 4},
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 8},
    "gemma2": {
        **GATED,
        "head_dim": 8,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 2.0,  # its logits reach that far
    },
    "gemma3_text": {**GATED, "head_dim": 8, "sliding_window": 4},
    "phi": GATED,
    "phi3": {**GATED, "pad_token_id": 0},
    "cohere": {**GATED, "logit_scale": 0.5},
    "granite": {**GATED, "logits_scaling": 4.0},
}
if hasattr(cache_utils, "LinearAttentionLayer"):  # layers with a running state beside attention
    FAMILIES["qwen3_5_text"] = {
        **GATED,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        **{f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")},
        **{f"linear_num_{name}_heads": 2 for name in ("key", "value")},
    }
    mamba = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_n_groups": 1, "mamba_d_head": 8, "mamba_d_state": 8}
    FAMILIES["falcon_h1"] = {**GATED, "head_dim": 8, **mamba, "lm_head_multiplier": 0.5}
WITHOUT_CLASSIFIER = [name for name in ("cohere", "granite", "falcon_h1") if name in FAMILIES]
TEXTS = ["abcd", "d", "bbcaab"]
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, letters: Any) -> Folders:
    """A model of each family on disk, with weights large enough to tell positions and tokens apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        special = {"bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(name, vocab_size=len(letters), **special, **sizes)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        made[name] = tmp_path_factory.mktemp("families") / name
        save_model(model, letters, made[name])
    return made


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, folders: Folders) -> Path:
    return folders[request.param]


def logits_of(model: Any, text: str = "abcd") -> torch.Tensor:
    ids = torch.tensor([[1, *("abcd".index(letter) + 3 for letter in text)]])
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return result


def read(lm: TransformersLM, row: tuple[int, ...] = (1, 3, 4, 5, 6)) -> torch.Tensor:
    """Logits at all states of a text but the last."""
    with torch.no_grad():
        rows = text_layout([row], [1], torch.device("cpu")).pack([0])
        result: torch.Tensor = lm.states(rows, lambda logits, _: logits(slice(None)))
    return result


def batch_of(letters: Any, texts: list[str]) -> PromptBatch:
    ids, mask = pad([encode(letters, text) for text in texts], letters.pad_token_id, left=True)
    return PromptBatch(texts, ids, mask)


def test_sampling_and_passes_agree_with_its_own_float64_logits(
    folder: Path, letters: Any, own_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is the one that the bare text's logits give for the same random number.

    Each prompt has two responses, and a row that has finished leaves the batch.
    """
    monkeypatch.setattr(decoding, "COMPACT_BELOW", 1.0)
    lm, prompts = TransformersLM(load_causal_lm(str(folder))), batch_of(letters, TEXTS * 2)
    noise = uniforms(6, 8, 0, "noise")
    sampled = lm.sample(prompts, noise, Sampling(max_new_tokens=8, temperature=0.9, eos_ids=[2, 5], pad_id=0))
    ids, lengths = torch.cat([prompts.ids, sampled.ids], 1), sampled.mask.sum(1)
    assert lengths.min() < lengths.max()
    layout = Layout(ids, prompts.ids.shape[1], prompts.mask.sum(1), lengths)
    with torch.no_grad():
        passed = lm.states(layout.pack(range(6)), lambda logits, _: logits(slice(None))).split(lengths.tolist())
    for i, length in enumerate(lengths.tolist()):
        row = torch.cat([prompts.ids[i, prompts.mask[i]], sampled.ids[i, :length]])
        own = own_logits(lm.model, row)[-length - 1 : -1]
        torch.testing.assert_close(passed[i].double(), own, rtol=1e-4, atol=1e-4)
        tokens, logprobs = pick_tokens(own, noise[i, :length], 0.9)
        assert tokens.tolist() == sampled.ids[i, :length].tolist()
        torch.testing.assert_close(sampled.logprobs[i, :length], logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite"])
def test_what_comes_behind_the_head_is_part_of_the_logits(folders: Folders, name: str, own_logits: Any) -> None:
    """A soft cap, a factor, a divisor: far from nothing in these models."""
    model, row = load_causal_lm(str(folders[name])), (1, 3, 4, 5, 6)
    with torch.no_grad():
        bare = model.lm_head(model.base_model(input_ids=torch.tensor([row[:-1]])).last_hidden_state[0])
    logits, own = read(TransformersLM(model), row), own_logits(model, row[:-1])
    assert float((bare - own).abs().max()) > 0.3
    torch.testing.assert_close(logits.double(), own, rtol=1e-4, atol=1e-4)


def test_it_is_saved_as_it_is(folder: Path, letters: Any, tmp_path: Path) -> None:
    model = load_causal_lm(str(folder))
    save_model(model, letters, tmp_path)
    assert torch.equal(logits_of(load_causal_lm(str(tmp_path))), logits_of(model))


def test_an_adapter_that_is_off_is_the_start_and_merged_is_close(folder: Path, letters: Any, tmp_path: Path) -> None:
    start = read(TransformersLM(load_causal_lm(str(folder))))
    base = load_causal_lm(str(folder))
    modules = ["q_proj", "down_proj"] if folder.name == "falcon_h1" else None  # peft refuses its other projections
    policy = add_adapter(base, r=2, alpha=4.0, target_modules=modules, ref=str(folder), what="policy.lora", seed=1)
    reference = AdapterReference(policy, keep_start=False)
    assert torch.equal(read(TransformersLM(policy)), start)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    trained = read(TransformersLM(policy))
    assert float((trained - start).abs().max()) > 1e-2
    assert torch.equal(read(reference), start)
    save_model(policy, letters, tmp_path)
    again = load_adapter(load_causal_lm(str(folder)), tmp_path, "policy.model")
    assert torch.equal(read(TransformersLM(again)), trained)
    torch.testing.assert_close(read(TransformersLM(merge(policy))), trained, rtol=1e-3, atol=1e-3)


def test_layers_that_are_recomputed_have_the_same_gradients(folder: Path) -> None:
    rows = text_layout([[1, 3, 4, 5, 6], [1, 4]], [2, 1], torch.device("cpu")).pack([0, 1])
    gradients, calls = [], []
    for recompute in (False, True):
        model = load_causal_lm(str(folder))
        if recompute:
            enable_recompute(model, "policy.gradient_checkpointing")
        attention = next(module for name, module in model.named_modules() if name.endswith(("attn", "attention")))
        count = [0]
        attention.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        TransformersLM(model).states(rows, lambda logits, _: logits(slice(None))).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        calls.append(count[0])
        assert not model.training
    assert calls == [1, 2]  # once forward; once more backward
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("folder", [name for name in FAMILIES if name not in WITHOUT_CLASSIFIER], indirect=True)
def test_its_reward_model_scores_the_last_token_and_is_saved_as_it_is(
    folder: Path, letters: Any, tmp_path: Path
) -> None:
    model = classifier_from_lm(load_causal_lm(str(folder)), letters, "policy.model")
    initialise_head(model.score, 0)
    reward = RewardModel(model, letters)
    together = reward(TEXTS, ["a", "cd", ""]).tolist()
    alone = [float(reward([text], [response])) for text, response in zip(TEXTS, ["a", "cd", ""], strict=True)]
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-4)
    assert len({round(score, 3) for score in together}) == 3
    save_model(model, letters, tmp_path)
    assert RewardModel(load_reward_model(str(tmp_path)), letters)(TEXTS, ["a", "cd", ""]).tolist() == pytest.approx(
        together, abs=1e-6
    )


@pytest.mark.parametrize("name", WITHOUT_CLASSIFIER)
def test_a_family_without_a_classifier_is_refused_by_name(folders: Folders, letters: Any, name: str) -> None:
    model, title = load_causal_lm(str(folders[name])), name.title().replace("_", "")
    with pytest.raises(InputError, match=f"has no sequence classifier for a {title}ForCausalLM"):
        classifier_from_lm(model, letters, "policy.model")


PLAIN_TRANSFORMERS = """
import json, sys
sys.modules["rlhf_kl"] = None  # as if it had never been installed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
result = {}
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[1, 3, 4, 5]])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    result[folder] = [made[0, 4:].tolist(), tokenizer.decode(made[0, 4:], skip_special_tokens=True)]
print(json.dumps(result))
"""


def test_plain_transformers_writes_the_same_text(folders: Folders, letters: Any, tmp_path: Path) -> None:
    """Whole models and an adapter, in a process that cannot import this package."""
    base = load_causal_lm(str(folders["llama"]))
    policy = add_adapter(
        base, r=2, alpha=4.0, target_modules=None, ref=str(folders["llama"]), what="policy.lora", seed=1
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    save_model(policy, letters, tmp_path / "adapter")
    models = {str(folder): load_causal_lm(str(folder)) for folder in folders.values()}
    models[str(tmp_path / "adapter")] = policy
    outcome = subprocess.run(
        [sys.executable, "-c", PLAIN_TRANSFORMERS, *models], capture_output=True, text=True, check=True, timeout=240
    )
    result = json.loads(outcome.stdout.splitlines()[-1])
    prompt = PromptBatch(["abc"], torch.tensor([[1, 3, 4, 5]]), torch.ones(1, 4, dtype=torch.bool))
    sampling = Sampling(max_new_tokens=8, temperature=1e-6, eos_ids=[2], pad_id=0)  # all but greedy
    for folder, model in models.items():
        sampled = TransformersLM(model).sample(prompt, torch.full((1, 8), 0.5), sampling)
        ids = sampled.ids[0][sampled.mask[0]].tolist()
        assert result[folder] == [ids, letters.decode(ids, skip_special_tokens=True)], folder


# ---- tied embeddings under either name ----


def test_tied_weights_are_found_under_either_name(folders: Folders, letters: Any, tmp_path: Path) -> None:
    """A checkpoint may store the one tensor as the head or as the embeddings: nothing may become random."""
    source = folders["llama"]
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    other = tmp_path / "head"
    save_model(load_causal_lm(str(source)), letters, other)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(load_causal_lm(str(other))), logits_of(load_causal_lm(str(source))))
    scores = []
    for folder in (source, other):
        model = classifier_from_lm(load_causal_lm(str(folder)), letters, "policy.model")
        initialise_head(model.score, 0)
        scores.append(RewardModel(model, letters)(TEXTS, ["", "a", "b"]).tolist())
    assert scores[0] == scores[1]


def test_the_real_model_is_the_same_as_shipped_and_saved_again(real_data: Path) -> None:
    """Its file holds `lm_head.weight` alone; plain transformers gives such a classifier random embeddings."""
    names = ("TinyStories-656K", "TinyStories-656K-resaved")
    shipped, resaved = (str(real_data / "models" / name) for name in names)
    tokenizer = load_tokenizer(shipped)
    ids = torch.tensor([encode(tokenizer, "Once upon a time, there was a little dog.")])
    logits, scores = [], []
    for folder in (shipped, resaved):
        lm = load_causal_lm(folder)
        with torch.no_grad():
            logits.append(lm(input_ids=ids).logits)
        model = classifier_from_lm(lm, tokenizer, "policy.model")
        initialise_head(model.score, 0)
        scores.append(RewardModel(model, tokenizer)(["Once", "Tim was"], [" upon", " sad."]).tolist())
    assert torch.equal(*logits)
    assert scores[0] == scores[1]


# ---- what must not load ----


def problem_of(load: Callable[..., Any], folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        load(str(folder), "policy.model")
    return str(caught.value)


def test_weights_that_belong_nowhere_are_fatal(folders: Folders, letters: Any, tmp_path: Path) -> None:
    save_model(load_causal_lm(str(folders["qwen2"])), letters, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["v_head.summary.weight"] = torch.zeros(1, 16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = problem_of(load_causal_lm, tmp_path)
    assert "belong to no part of the model: v_head.summary.weight" in message


def test_code_that_comes_with_a_model_does_not_run_unless_allowed(
    folders: Folders, letters: Any, tmp_path: Path
) -> None:
    from rlhf_kl.models.load import Access

    save_model(load_causal_lm(str(folders["gpt2"])), letters, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class Own(GPT2Config):\n    model_type = 'own'\n"
        "class OwnLM(GPT2LMHeadModel):\n    config_class = Own\n"
    )
    assert "run.trust_remote_code" in problem_of(load_causal_lm, tmp_path)
    model = load_causal_lm(str(tmp_path), "policy.model", Access(remote_code=True))
    assert torch.equal(logits_of(model), logits_of(load_causal_lm(str(folders["gpt2"]))))


def test_pickled_weights_are_loaded_only_where_allowed(folders: Folders, letters: Any, tmp_path: Path) -> None:
    from rlhf_kl.models.load import Access

    model = load_causal_lm(str(folders["gpt_neox"]))
    save_model(model, letters, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "run.allow_pickle" in problem_of(load_causal_lm, tmp_path)
    loaded = load_causal_lm(str(tmp_path), "policy.model", Access(pickle=True))
    assert torch.equal(logits_of(loaded), logits_of(model))
