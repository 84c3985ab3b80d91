"""The memory of a run by arithmetic, beside sums by hand for a Llama of 1704 numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.config.schema import TrainConfig
from rlhf_kl.errors import InputError
from rlhf_kl.models.lm import Trunk
from rlhf_kl.training.footprint import Footprint, Parts, Place
from rlhf_kl.training.outlines import Outlines, Sizes, build, kept_by_pass, outlines

LLAMA = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LAYER = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16 + 2 * 8  # attention: 8 to 8 twice and 8 to 4 twice; 8 to 16; two norms
ROOT = 2 * 32 * 8 + 8  # embeddings, the head, and the last norm
ALL = 2 * LAYER + ROOT
CPU, GPU = torch.device("cpu"), torch.device("cuda")
KEPT = 1000.0  # bytes of a row, for round sums
ONCE = 0.65 * KEPT / 2


def write_shape(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return str(folder)


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """`planned({"policy": {"shard": True}}, processes=2)`: the parts of each phase, for rows of 4 + 4 tokens."""

    @cache
    def models(changes: str) -> Outlines:
        found = outlines(config_of(json.loads(changes)), 4)
        known = {name: getattr(found, name) for name in ("policy", "reference", "value") if getattr(found, name)}
        frozen = {name: [replace(one, kept=KEPT) for one in getattr(found, name)] for name in ("rewards", "watched")}
        return replace(found, **{name: replace(one, kept=KEPT) for name, one in known.items()}, **frozen)

    def config_of(changes: dict[str, dict[str, Any]]) -> TrainConfig:
        usual: dict[str, dict[str, Any]] = {
            "policy": {"model": write_shape(tmp_path / "policy")},
            "reward": {"kind": "http", "url": "http://127.0.0.1"},
            "data": {"prompts": "builtin:reviews"},
            "eval": {"texts": "builtin:reviews", "scorers": {"gold": None}, "responses": 2},
            "rollout": {"batch_size": 8, "max_new_tokens": 4, "samples_per_prompt": 2},
            "ppo": {"advantage": "rloo"},
        }
        if "reward" in changes:
            del usual["reward"]
        sections = {name: usual.get(name, {}) | changes.get(name, {}) for name in {*usual, *changes}}
        return TrainConfig.model_validate(sections)

    def phases(
        changes: dict[str, dict[str, Any]] | None = None, processes: int = 1, device: torch.device = CPU
    ) -> dict[str, Parts]:
        config = config_of(changes or {})
        return Footprint(config, models(json.dumps(changes or {})), Place(device, processes, 1e6, 4)).phases()

    return phases


REST = {"weights": 4 * ALL, "frozen models": 4 * ALL, "moments": 8 * ALL, "states": 4 * 32 * (8 + 32)}
CACHE = 2 * 4 * 2 * 4  # bytes of a token: keys and values, in float32, of two layers with one head of size 4
LOGITS = 4 * 32  # bytes of a token


def test_a_whole_model_in_one_process(planned: Any) -> None:
    found = planned()
    assert found["models loaded"] == {"weights": 4 * ALL, "frozen models": 4 * ALL}
    assert found["at rest"] == found["scoring"] == found["checkpoint"] == REST
    # Eight rows of eight tokens, where one layer's cache grows; six copies of the logits of eight tokens.
    assert found["sampling"] == REST | {"cache": 8 * 8 * CACHE * 1.5, "logits": 6 * 8 * LOGITS}
    # Eight rows at once; the logits of 32 tokens of both models, and six pieces of these.
    read = {"activations": pytest.approx(8 * ONCE), "logits": (2 + 6) * 32 * LOGITS}
    assert found["reading"] == found["KL after the update"] == REST | read
    # A minibatch of two rows in one pass: logits, their gradient and the reference's, and six pieces.
    begin = {"activations": 2 * KEPT, "logits": (3 + 6) * 8 * LOGITS}
    assert found["training pass"] == REST | begin
    # Texts of 2666 tokens: more than 16 responses, with what is kept of them.
    texts = {"activations": pytest.approx(2666 / 8 * ONCE), "logits": 2666 * LOGITS}
    assert found["evaluation"] == REST | texts


def test_logits_exist_in_chunks_unless_those_of_the_reference_are_kept(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of 8 tokens; of 26 where they grow with the model, so of 32 tokens nothing is kept; or of 53."""
    monkeypatch.setattr("rlhf_kl.ops.head.LOGIT_ELEMENTS", {"cpu": 8 * 32, "cuda": 64 * 32})
    found = planned()
    assert found["at rest"] == REST | {"states": 4 * 32 * 8}
    assert found["reading"]["logits"] == (8 + 8 + 6 * 32) * LOGITS
    monkeypatch.setattr("rlhf_kl.ops.head.PER_PARAMETER", 1.0)
    found = planned()
    assert found["at rest"] == REST
    assert found["reading"]["logits"] == (8 + 32 + 6 * 32) * LOGITS


def test_gradients_count_where_they_are_more(planned: Any) -> None:
    """With passes of one row a pass finds the gradients of another one; with many rows the end is the larger moment."""
    one = planned({"ppo": {"advantage": "rloo", "microbatch_size": 1}})["training pass"]
    assert one == REST | {"activations": KEPT, "logits": (3 + 6) * 4 * LOGITS, "gradients": 4 * ALL}
    in_reward = {"placement": "reward", "estimator": "k1"}
    assert planned({"kl": in_reward})["training pass"] == REST | {"gradients": 4 * ALL}  # no logits of the reference


def test_shards_divide_what_is_trained_and_gather_one_layer(planned: Any) -> None:
    sharded = {"policy": {"shard": True}, "reference": {"shard": True}}
    found = planned(sharded, processes=2)
    rest = {"weights": 2 * ALL, "frozen models": 2 * 2 * LAYER + 4 * ROOT, "moments": 4 * ALL, "states": 4 * 16 * 40}
    assert found["at rest"] == found["models loaded"] | {"moments": 4 * ALL, "states": 4 * 16 * 40} == rest
    assert found["sampling"]["gathered"] == 4 * ALL  # one whole model
    assert found["reading"]["gathered"] == 4 * (2 * LAYER + ROOT)  # this layer and the next
    assert found["training pass"]["gathered"] == 4 * (2 * LAYER + ROOT)
    # Own gradients, and whole ones of the largest layer and of the root, with what is sent of them.
    assert found["training pass"]["gradients"] == 2 * ALL + 4 * 2 * (LAYER + ROOT)
    assert found["checkpoint"] == rest | {"copy": 3 * 2 * ALL}  # on a CPU in this memory
    assert planned(sharded, processes=2, device=GPU)["checkpoint"] == rest | {"gathered": 4 * 32 * 8}
    eight = planned(sharded, processes=4)
    assert eight["at rest"]["moments"] == 2 * ALL


def test_an_adapter_trains_little_and_is_its_own_reference(planned: Any) -> None:
    found = planned({"policy": {"lora": {"r": 2}}})
    adapter = 2 * 2 * (2 * (8 + 8) + 2 * (8 + 4) + 3 * (8 + 16))  # of both layers
    rest = {"weights": 4 * (ALL + adapter), "frozen models": 4 * adapter, "moments": 8 * adapter}
    assert found["at rest"] == REST | rest
    half = planned({"policy": {"lora": {"r": 2}}, "run": {"dtype": "bfloat16"}}, device=GPU)
    layers = 2 * (LAYER - 16)  # without norms, which stay float32
    assert half["models loaded"]["weights"] == half["at rest"]["weights"]  # rounded before they come
    assert half["at rest"]["weights"] == pytest.approx(4 * (ALL + adapter) - 2 * layers, rel=0.02)
    assert half["at rest"]["frozen models"] == 4 * adapter + 2 * 2 * 32 * 8  # rounded heads of both
    exact = planned({"policy": {"lora": {"r": 2}}, "run": {"dtype": "float16"}}, device=GPU)
    assert exact["at rest"] == half["at rest"] | {"frozen models": 4 * adapter}  # no head is rounded


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_copy_what_is_trained_unless_it_is_sharded(planned: Any, dtype: str) -> None:
    half = {"run": {"dtype": dtype}}
    assert planned(half)["reading"]["copies"] == 2 * 2 * LAYER
    assert "copies" not in planned(half | {"policy": {"shard": True}}, processes=2)["reading"]
    assert planned(half)["at rest"]["frozen models"] == 2 * 2 * LAYER + 4 * ROOT


def test_layers_that_are_computed_again_keep_their_inputs(planned: Any) -> None:
    single = {"ppo": {"advantage": "rloo", "microbatch_size": 1}}
    found = planned(single | {"policy": {"gradient_checkpointing": True}})["training pass"]
    assert found["activations"] == 4 * 8 * 2 * 8 + KEPT / 2  # eight tokens, two layers, and one of them again


def test_an_engine_takes_its_share_and_samples(planned: Any) -> None:
    found = planned({"rollout": {"engine": "vllm"}})
    assert found["sampling"] == found["at rest"] == REST | {"engine": 0.3e6}
    options = {"engine": "vllm", "engine_options": {"gpu_memory_utilization": 0.5}}
    assert planned({"rollout": options})["at rest"]["engine"] == 0.5e6
    assert "engine" not in found["models loaded"]


def test_a_value_function_and_scorers(planned: Any, tmp_path: Path) -> None:
    reward = write_shape(tmp_path / "reward", architectures=["LlamaForSequenceClassification"], num_labels=1)
    scored = {"reward": {"kind": "model", "model": reward}, "ppo": {"advantage": "gae"}}
    classifier = 2 * LAYER + 32 * 8 + 8 + 8  # a row of scores in place of a head
    found = planned(scored)
    assert found["at rest"]["frozen models"] == 4 * (ALL + classifier)
    assert found["scoring"]["activations"] == pytest.approx(8 * ONCE)
    tokens, texts = 32, 64
    assert found["at rest"]["states"] == 4 * (tokens * (8 + 32) + tokens * (8 + 8) + texts * 8)  # features of both
    separate = planned(scored | {"policy": {"value": "separate"}})
    trunk = classifier - 8
    assert separate["at rest"]["weights"] == 4 * (ALL + trunk)
    assert separate["at rest"]["moments"] == 8 * (ALL + trunk)
    assert separate["training pass"]["activations"] == 2 * 2 * KEPT
    watched = planned({"eval": {"scorers": {"gold": None, "other": {"model": reward}}}})
    assert watched["at rest"]["frozen models"] == 4 * (ALL + classifier)
    assert watched["scoring"] == REST | watched["at rest"]


def test_the_ceiling_keeps_the_weights_where_the_reference_is_another_model(planned: Any, tmp_path: Path) -> None:
    other = {"reference": {"model": write_shape(tmp_path / "other")}}
    assert planned(other)["training pass"]["ceiling"] == 4 * ALL
    assert "ceiling" not in planned(other | {"kl": {"ceiling": None}})["training pass"]


# ---- outlines


def really_kept(model: Any, dtype: torch.dtype, rows: int) -> int:
    """Bytes that autograd keeps of rows of six tokens, of a model with numbers and without a cache."""
    own, trunk = {p.untyped_storage()._cdata for p in model.parameters()}, Trunk(model, dtype)
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), trunk.precision():
        model.base_model(input_ids=torch.zeros(rows, 6, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for number, storage in kept.items() if number not in own)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "off"), [("llama", 0.0), ("qwen2", 0.0), ("gemma3_text", 0.0), ("gpt2", 0.1)])
def test_what_a_pass_keeps_is_what_autograd_keeps(kind: str, off: float, dtype: torch.dtype, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "head_dim": 32}
    few = {"hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    folder = write_shape(tmp_path / kind, **{"model_type": kind} | (few if kind == "gpt2" else wide))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    found, rough = kept_by_pass(folder, AutoModelForCausalLM, False, dtype, 6)
    assert not rough
    assert found == pytest.approx(really_kept(model, dtype, 3) - really_kept(model, dtype, 2), rel=off)


def test_an_architecture_that_looks_at_numbers_is_counted_roughly(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 2}
    folder = write_shape(tmp_path / "moe", **experts)
    found, rough = kept_by_pass(folder, AutoModelForCausalLM, False, torch.float32, 6)
    assert rough
    assert found == 6 * 4 * 2 * 18 * 8  # tokens, bytes, layers, and 18 hidden sizes: see `kept_per_token`
    assert "Traceback" not in capfd.readouterr().err


def test_the_sizes_of_a_model(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build(write_shape(tmp_path / "llama"), AutoModelForCausalLM, False)
    assert Sizes.of(model) == Sizes(2 * LAYER, ROOT, LAYER)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be built"):
        build(str(tmp_path), AutoModelForCausalLM, False)
