"""One tiny random model of every architecture family, through everything that is done with a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import cache_utils

from rlhf_kl.errors import InputError
from rlhf_kl.models import decoding
from rlhf_kl.models.decoding import pick_tokens
from rlhf_kl.models.lm import LM, enable_recompute
from rlhf_kl.models.lora import AdapterReference, add_adapter, load_adapter, merge
from rlhf_kl.models.pretrained import Access, load_causal_lm, load_reward_model, save_model
from rlhf_kl.models.scratch import classifier_from_lm, initialise_head
from rlhf_kl.models.tokens import encode_all, pad
from rlhf_kl.models.value import freeze, store_frozen
from rlhf_kl.ops import packing
from rlhf_kl.ops.packing import Layout, Packed, text_layout
from rlhf_kl.rewards.model import RewardModel
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import move, problem, two_prompts

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
GATED = {**WIDE, "intermediate_size": 24, "num_key_value_heads": 1}
SLIDING = {"head_dim": 8, "sliding_window": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "gpt_neox": {**WIDE, "intermediate_size": 24},
    "opt": {**WIDE, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "llama": {**GATED, "tie_word_embeddings": True},
    "mistral": {**GATED, "sliding_window": 4},
    "qwen2": GATED,
    "qwen3": {**GATED, "head_dim": 8},
    "gemma2": {**GATED, **SLIDING, "query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0},  # its logits reach it
    "gemma3_text": {**GATED, **SLIDING},
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


def adapted(folder: Path) -> Any:
    """The model with a new adapter."""
    modules = ["q_proj", "down_proj"] if folder.name == "falcon_h1" else None  # peft refuses its other projections
    return add_adapter(load_causal_lm(str(folder)), r=2, alpha=4.0, target_modules=modules, ref=str(folder), seed=1)


def read(lm: LM, row: tuple[int, ...] = (1, 3, 4, 5, 6)) -> torch.Tensor:
    """Logits at all states of a text but the last."""
    with torch.no_grad():
        rows = text_layout([row], [1], torch.device("cpu")).pack([0])
        result: torch.Tensor = lm.head().logits(lm(rows))
    return result


def test_sampling_and_passes_agree_with_its_own_float64_logits(
    folder: Path, letters: Any, own_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is the one that the bare text's logits give for the same random number.

    Each prompt has two responses, and a row that has finished leaves the batch.
    """
    monkeypatch.setitem(decoding.COMPACT_BELOW, "cpu", 1.0)
    lm, prompts = LM(load_causal_lm(str(folder))), encode_all(letters, TEXTS * 2)
    noise = uniforms(6, 8, 0, "noise")
    sampled = lm.sample(prompts, noise, Sampling(max_new_tokens=8, temperature=0.9, eos_ids=[2, 5], pad_id=0))
    padded, _ = pad(prompts, 0, left=True)
    ids, lengths = torch.cat([padded, sampled.ids], 1), sampled.mask.sum(1)
    assert lengths.min() < lengths.max()
    layout = Layout(ids, padded.shape[1], torch.tensor(list(map(len, prompts))), lengths)
    with torch.no_grad():
        passed = lm.head().logits(lm(layout.pack(range(6)))).split(lengths.tolist())
    for i, length in enumerate(lengths.tolist()):
        row = torch.cat([torch.tensor(prompts[i]), sampled.ids[i, :length]])
        own = own_logits(lm.model, row)[-length - 1 : -1]
        torch.testing.assert_close(passed[i].double(), own, rtol=1e-4, atol=1e-4)
        tokens, logprobs = pick_tokens(own, noise[i, :length], 0.9)
        assert tokens.tolist() == sampled.ids[i, :length].tolist()
        torch.testing.assert_close(sampled.logprobs[i, :length], logprobs, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_is_off_is_the_start_and_merged_is_close(folder: Path, letters: Any, tmp_path: Path) -> None:
    start = read(LM(load_causal_lm(str(folder))))
    policy = adapted(folder)
    reference = AdapterReference(policy, keep_start=False)
    assert torch.equal(read(LM(policy)), start)
    move(policy, seed=2, by=0.1)
    trained = read(LM(policy))
    assert float((trained - start).abs().max()) > 1e-2
    assert torch.equal(read(reference), start)
    save_model(policy, letters, tmp_path)
    again = load_adapter(load_causal_lm(str(folder)), tmp_path)
    assert torch.equal(read(LM(again)), trained)
    torch.testing.assert_close(read(LM(merge(policy))), trained, rtol=1e-3, atol=1e-3)


def test_layers_that_are_recomputed_have_the_same_gradients(folder: Path) -> None:
    rows = text_layout([[1, 3, 4, 5, 6], [1, 4]], [2, 1], torch.device("cpu")).pack([0, 1])
    gradients, calls = [], []
    for recompute in (False, True):
        model = load_causal_lm(str(folder))
        if recompute:
            enable_recompute(model)
        attention = next(module for name, module in model.named_modules() if name.endswith(("attn", "attention")))
        count = [0]
        attention.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        lm = LM(model)
        lm.head().logits(lm(rows)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
        calls.append(count[0])
        assert not model.training
    assert calls == [1, 2]  # once forward; once more backward
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def classifier(folder: Path, letters: Any) -> RewardModel:
    model = classifier_from_lm(load_causal_lm(str(folder)), letters)
    initialise_head(model.score, 0)
    return RewardModel(model, letters)


@pytest.mark.parametrize("folder", [name for name in FAMILIES if name not in WITHOUT_CLASSIFIER], indirect=True)
def test_its_reward_model_scores_the_last_token_and_is_saved(folder: Path, letters: Any, tmp_path: Path) -> None:
    reward, responses = classifier(folder, letters), ["a", "cd", ""]
    together = reward.score(TEXTS, responses).tolist()
    alone = [float(reward.score([text], [response])) for text, response in zip(TEXTS, responses, strict=True)]
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-4)
    assert len({round(score, 3) for score in together}) == 3
    save_model(reward.model, letters, tmp_path)
    again = RewardModel(load_reward_model(str(tmp_path)), letters)
    assert again.score(TEXTS, responses).tolist() == pytest.approx(together, abs=1e-6)


@pytest.mark.parametrize("name", WITHOUT_CLASSIFIER)
def test_a_family_without_a_classifier_is_refused_by_name(folders: Folders, letters: Any, name: str) -> None:
    model, title = load_causal_lm(str(folders[name])), name.title().replace("_", "")
    with pytest.raises(InputError, match=f" {title}ForCausalLM"):
        classifier_from_lm(model, letters)


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
    policy = adapted(folders["llama"])
    move(policy, seed=2, by=0.1)
    save_model(policy, letters, tmp_path / "adapter")
    models = {str(folder): load_causal_lm(str(folder)) for folder in folders.values()}
    models[str(tmp_path / "adapter")] = policy
    outcome = subprocess.run(
        [sys.executable, "-c", PLAIN_TRANSFORMERS, *models], capture_output=True, text=True, check=True, timeout=240
    )
    result = json.loads(outcome.stdout.splitlines()[-1])
    sampling = Sampling(max_new_tokens=8, temperature=1e-6, eos_ids=[2], pad_id=0)  # all but greedy
    for folder, model in models.items():
        sampled = LM(model).sample([[1, 3, 4, 5]], torch.full((1, 8), 0.5), sampling)
        ids = sampled.ids[0][sampled.mask[0]].tolist()
        assert result[folder] == [ids, letters.decode(ids, skip_special_tokens=True)], folder


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
    one, same = (classifier(folder, letters).score(TEXTS, ["", "a", "b"]).tolist() for folder in (source, other))
    assert one == same


def test_weights_that_belong_nowhere_are_fatal(folders: Folders, letters: Any, tmp_path: Path) -> None:
    save_model(load_causal_lm(str(folders["qwen2"])), letters, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["v_head.summary.weight"] = torch.zeros(1, 16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = problem(load_causal_lm, str(tmp_path))
    assert "v_head.summary.weight" in message


def test_code_that_comes_with_a_model_runs_only_where_allowed(folders: Folders, letters: Any, tmp_path: Path) -> None:
    save_model(load_causal_lm(str(folders["gpt2"])), letters, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class Own(GPT2Config):\n    model_type = 'own'\n"
        "class OwnLM(GPT2LMHeadModel):\n    config_class = Own\n"
    )
    assert "run.trust_remote_code" in problem(load_causal_lm, str(tmp_path))
    model = load_causal_lm(str(tmp_path), Access(remote_code=True))
    assert torch.equal(logits_of(model), logits_of(load_causal_lm(str(folders["gpt2"]))))


def test_pickled_weights_are_loaded_only_where_allowed(folders: Folders, letters: Any, tmp_path: Path) -> None:
    model = load_causal_lm(str(folders["gpt_neox"]))
    save_model(model, letters, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "run.allow_pickle" in problem(load_causal_lm, str(tmp_path))
    loaded = load_causal_lm(str(tmp_path), Access(pickle=True))
    assert torch.equal(logits_of(loaded), logits_of(model))


# ---- rows with the same prompt: a pass that reads it once computes what a pass over whole rows computes


def states_and_gradient(lm: LM, passes: list[Packed]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of all response tokens by number, and the gradient of a weighted sum of them."""
    weights = torch.linspace(-1, 1, sum(len(rows.numbers) for rows in passes) * 16).view(-1, 16)
    states = torch.zeros_like(weights)
    lm.zero_grad()
    for rows in passes:
        hidden = lm.hidden(rows)
        states[rows.numbers] = hidden.detach()
        (hidden * weights[rows.numbers]).sum().backward()
    return states, torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])


def same(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """States and gradient, to what another order of sums changes."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3 * float(expected[1].abs().max()))


def test_states_and_gradients_are_those_of_whole_rows(folder: Path) -> None:
    lm, batch = LM(load_causal_lm(str(folder))), two_prompts()
    expected = states_and_gradient(lm, [batch.pack(range(6))])
    for passes in ([batch.pack_shared([4, 0, 2, 1, 3, 5])], list(batch.passes(range(6), most_rows=2, most_tokens=99))):
        assert all(rows.prompts is not None for rows in passes)
        same(states_and_gradient(lm, passes), expected)


def test_what_all_prompts_begin_with_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts that differ at their end: states and gradients, and samples with their log-probs."""
    lm, width = LM(load_causal_lm(str(folder))), 9
    lengths, responses = torch.tensor([9, 8, 7, 9]), torch.tensor([3, 1, 2, 4])
    ids = torch.zeros(4, width + 4, dtype=torch.long)
    for row, (length, response) in enumerate(zip(lengths.tolist(), responses.tolist(), strict=True)):
        ids[row, width - length : width + response] = torch.arange(length + response) % 4 + 3
        ids[row, width - 1] = 3 + row
    batch = Layout(ids, width, lengths, responses)
    prompts = [row[width - length : width].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    noise, sampling = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)), Sampling(5, 1.0, [2], 0)
    expected = states_and_gradient(lm, [batch.pack(range(4))])
    sampled = lm.sample(prompts, noise, sampling)
    monkeypatch.setitem(packing.PASS_OVERHEAD, "cpu", 10)
    (rows,) = batch.passes(range(4), most_rows=9, most_tokens=999)
    assert rows.prompts is not None
    assert rows.prompts.prefix.tolist() == [3, 4, 5, 6, 3, 4]
    same(states_and_gradient(lm, [rows]), expected)
    again = lm.sample(prompts, noise, sampling)
    assert torch.equal(again.ids, sampled.ids)
    torch.testing.assert_close(again.logprobs, sampled.logprobs, rtol=1e-4, atol=1e-4)


def test_bfloat16_with_fewer_casts_gives_the_same_bits(folder: Path, letters: Any) -> None:
    """Frozen layers that are stored in bfloat16, beside plain autocast and peft."""
    noise, sampling = uniforms(6, 8, 0, "noise"), Sampling(max_new_tokens=8, temperature=0.9, eos_ids=[2], pad_id=0)
    for kind in ("frozen", "trained", "adapter"):
        found = []
        for stored in (False, True):
            model = adapted(folder) if kind == "adapter" else load_causal_lm(str(folder))
            if kind == "adapter":
                for module in model.modules():
                    if hasattr(module, "cast_input_dtype_enabled"):
                        assert not module.cast_input_dtype_enabled
                        module.cast_input_dtype_enabled = not stored
                with torch.no_grad():
                    for key, parameter in model.named_parameters():
                        if "lora_B" in key:
                            parameter.normal_(generator=torch.Generator().manual_seed(len(key)))
            elif kind == "frozen":
                freeze(model)
            if stored:
                store_frozen(model, torch.bfloat16)
                assert (torch.bfloat16 in {p.dtype for p in model.parameters()}) == (kind != "trained")
            lm = LM(model, torch.bfloat16)
            drawn = lm.sample(encode_all(letters, TEXTS * 2), noise, sampling)
            logits = lm.head().logits(lm(text_layout([(1, 3, 4, 5, 6)], [1], torch.device("cpu")).pack([0])))
            if kind != "frozen":
                logits.square().mean().backward()
                drawn = (*drawn[:4], *(p.grad for p in model.parameters() if p.requires_grad))
            found.append((logits.detach(), *(x for x in drawn if x is not None)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
