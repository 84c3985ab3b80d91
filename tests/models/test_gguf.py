"""A model in a GGUF file, written here with the package's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer
from rlhf_kl.training.load import Loader
from tests.runs import Cli, sets

WORDS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(97, 123)), "\u2581"]


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, max_position_embeddings=64)).eval()


@pytest.fixture
def written(tmp_path: Path, llama: Any) -> Callable[[Any], Path]:
    """`written(quantisation)`: the file of the Llama."""

    def write(kind: Any) -> Path:
        file, config = tmp_path / "tiny.gguf", llama.config
        writer = gguf.GGUFWriter(file, "llama")
        writer.add_context_length(64)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(len(WORDS))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(WORDS)
        writer.add_token_scores([0.0] * len(WORDS))
        writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, tensor in llama.state_dict().items():
            array = permuted(name, tensor, config).numpy().astype(np.float32)
            type_ = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(array, type_), raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


def permuted(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """GGUF stores the rows of queries and keys in the order of the first Llama's rotary positions."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    heads = config.num_attention_heads
    return tensor.view(heads, 2, len(tensor) // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


@pytest.mark.parametrize(("kind", "near"), [("F32", 1e-5), ("Q8_0", 0.05)])
def test_its_weights_and_words_are_those_of_the_file(
    written: Callable[[Any], Path], llama: Any, kind: str, near: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = written(gguf.GGMLQuantizationType[kind])
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / file.name).write_bytes(b"GGUF, another file of this name")
    monkeypatch.chdir(tmp_path / "here")
    folder = Loader().folder(str(file))
    ids = torch.tensor([[1, 5, 9, 4, 7]])
    with torch.no_grad():
        torch.testing.assert_close(load_causal_lm(folder)(ids).logits, llama(ids).logits, rtol=0, atol=near)
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(file.parent / "again")  # an ordinary folder
    assert load_tokenizer(folder)("cab")["input_ids"][-3:] == [5, 3, 4]
    assert Loader().folder(str(file)) == folder  # converted once


def test_a_missing_file_is_not_looked_for_on_the_hub(written: Callable[[Any], Path]) -> None:
    file = written(gguf.GGMLQuantizationType.F32)
    with pytest.raises(InputError, match=r"^no such file: .*tinny\.gguf.*/tiny\.gguf"):
        Loader().folder(str(file.with_name("tinny.gguf")))


@pytest.mark.parametrize(("content", "words"), [(b"nothing", "no GGUF file"), (b"GGUF\x03\0\0\0", "cannot be read")])
def test_another_file_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(InputError, match=words):
        Loader().folder(str(tmp_path / "x.gguf"))


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLHF_KL_CACHE", str(tmp_path / "file"))
    with pytest.raises(InputError, match="RLHF_KL_CACHE") as caught:
        Loader().folder(str(tmp_path / "x.gguf"))
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(f"{tmp_path / 'file'}/gguf")


def test_without_its_package_the_way_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(InputError, match="pip install gguf"):
        Loader().folder(str(tmp_path / "x.gguf"))


def test_a_run_trains_it_and_saves_a_folder(
    rlhf_kl: Cli, written: Callable[[Any], Path], tmp_path: Path, tiny_settings: dict[str, Any]
) -> None:
    import yaml

    file = written(gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny_settings))
    changes = sets(f"policy.model={file}", "ppo.total_episodes=16")
    outcome = rlhf_kl("train", "--config", tmp_path / "run.yaml", "--output-dir", tmp_path / "run", *changes)
    assert outcome.code == 0, outcome
    assert load_causal_lm(str(tmp_path / "run" / "final")).config.model_type == "llama"
