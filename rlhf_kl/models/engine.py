"""Responses by vLLM: `rollout.engine: vllm`. Each process has an engine of its own for its own rows.

vLLM has its own copy of a model's weights, and other kernels: its log-probs differ from those that the trainer computes
for the same tokens, so the losses weigh each token by their ratio (see `ppo.objectives`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_kl.errors import InputError, ServiceFailed
from rlhf_kl.hub import first_line
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import TRAINED, active_adapter, has_adapter
from rlhf_kl.models.tokens import pad
from rlhf_kl.sharding import full, has_shards, names_in_turn
from rlhf_kl.types import Sampled, Sampling

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, to one of which vLLM rounds up
MEMORY = 0.3  # of a GPU: the trainer needs the rest
ENVIRONMENT = {  # set where the user has not
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the weights are in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay where they are
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def require_engine(name: str | None) -> None:
    """Errors: InputError for an engine that is not installed."""
    if name is not None and find_spec(name) is None:
        raise InputError(f"rollout.engine: {name} is not installed: pip install 'rlhf-kl[{name}]'")


class VLLM:
    """Draws responses as `LM.sample` does, by the weights of the model that it has loaded last."""

    def __init__(self, policy: LM, longest: int, options: Mapping[str, Any]) -> None:
        """`longest`: tokens of prompt and response together; `options`: further ones of `vllm.LLM`.

        All processes call together. Errors: InputError for a model or options that it refuses.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        settings = {
            "dtype": str(policy.dtype).removeprefix("torch."),
            "gpu_memory_utilization": MEMORY,
            "hf_overrides": {"architectures": [type(policy.base).__name__]},
            "load_format": "dummy",  # the weights come before each rollout
            "logprobs_mode": "processed_logprobs",  # with the temperature
            "max_model_len": longest,
            "skip_tokenizer_init": True,
        }
        if dist.is_initialized() and dist.get_world_size() > 1:
            settings["distributed_executor_backend"] = "external_launcher"  # a device for each process
            if policy.device.index is not None:
                os.environ["LOCAL_RANK"] = str(policy.device.index)
        with tempfile.TemporaryDirectory() as folder, failing():
            policy.base.config.save_pretrained(folder)
            from vllm import LLM

            ranks = [config.r for config in policy.model.peft_config.values()] if has_adapter(policy.model) else [0]
            room = next((size for size in RANKS if size >= max(ranks)), None)
            self.takes_adapters = max(ranks) > 0 and room is not None and takes_adapters(type(policy.base).__name__)
            if self.takes_adapters:
                settings |= {"enable_lora": True, "max_lora_rank": room}
            try:
                self.llm = LLM(folder, **(settings | dict(options)))
            except (TypeError, ValueError) as error:
                raise InputError(f"rollout.engine: vllm, with these engine_options: {error}") from error
        if "distributed_executor_backend" in settings:
            atexit.register(self.llm.llm_engine.engine_core.shutdown)  # before the group, which it needs, is left
        self.shapes = shapes_of(policy)
        self.base: Any = None  # the model whose frozen weights it has
        self.request: Any = None  # for the adapter that is used

    def fits(self, model: LM) -> bool:
        """Whether it can have the weights of a model: those of the policy's architecture."""
        return shapes_of(model) == self.shapes

    def load(self, model: LM) -> None:
        """Take over the weights of a model as they are now; an adapter as an adapter, where vLLM knows the model so.

        All processes call together, and none stops before the others. Errors: ServiceFailed.
        """
        adapter = active_adapter(model)
        weights, tensors = weights_of(model, None if self.takes_adapters else adapter), {}
        if adapter and self.takes_adapters:
            named = model.model.named_parameters()
            tensors = {name: full(tensor) for name, tensor in named if f".{adapter}." in name}
        with failing():
            if not (self.takes_adapters and self.base is model.base):  # else that is frozen, and here already
                try:
                    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
                finally:
                    deque(weights, maxlen=0)  # gathered with the others to the end, also after an error
                self.llm.apply_model(pack_again)
                self.base = model.base
            self.request = self._take(model, adapter, tensors) if adapter and tensors else None
            self.llm.reset_prefix_cache()  # it was filled by other weights

    def _take(self, model: LM, adapter: str, tensors: dict[str, Tensor]) -> Any:
        """Take over an adapter; returns what requests that use it name. vLLM reads one from a folder."""
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:
            options = {"selected_adapters": [adapter], "save_embedding_layers": False, "state_dict": tensors}
            model.model.save_pretrained(folder, **options)
            place = folder if adapter == TRAINED else os.path.join(folder, adapter)
            self.llm.llm_engine.add_lora(LoRARequest(adapter, 1, place, load_inplace=True))
        return LoRARequest(adapter, 1, place)

    def sample(self, prompts: Sequence[Sequence[int]], noise: Tensor, sampling: Sampling) -> Sampled:
        """One response to each prompt's tokens. The seed of a request is the first number of its row of `noise`."""
        from vllm import SamplingParams

        asked = [{"prompt_token_ids": list(ids)} for ids in prompts]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=[token for token in sampling.eos_ids if token >= 0],
                ignore_eos=True,  # the ids above are all that end a response
                logprobs=0,  # that of the token alone
                detokenize=False,
                seed=int(first * 2**53) >> 1,
            )
            for first in noise[:, 0].tolist()
        ]
        with failing():
            every = self.llm.generate(asked, params, use_tqdm=False, lora_request=self.request)
        found = [each.outputs[0] for each in every]
        rows = [list(one.token_ids) for one in found]
        steps = [(token, each) for one in found for token, each in zip(one.token_ids, one.logprobs, strict=True)]
        ids, mask = pad(rows, sampling.pad_id, left=False)
        logprobs = torch.zeros(mask.shape)
        logprobs[mask] = torch.tensor([each[token].logprob for token, each in steps])
        ended = torch.tensor([row[-1] in sampling.eos_ids for row in rows])
        return Sampled(ids, mask, ended, logprobs)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Errors: ServiceFailed for any of vLLM's."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise ServiceFailed(f"rollout.engine: vllm: {first_line(error)}") from error


def takes_adapters(architecture: str) -> bool:
    """Whether vLLM reads models of this class with an adapter beside them."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    known = ModelRegistry.models.get(architecture)
    return known is not None and bool(supports_lora(known.load_model_cls()))


def shapes_of(model: LM) -> dict[str, torch.Size]:
    """The shapes of a model's weights, without its adapter, by their names in its checkpoint."""
    named = model.base.named_parameters()
    return {name.replace(".base_layer.", "."): tensor.shape for name, tensor in named if ".lora_" not in name}


def pack_again(model: Any) -> None:
    """On a CPU vLLM multiplies by packed copies of weights; reloading leaves that of a tied head as it was."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def weights_of(model: LM, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model by their names in its checkpoint, this adapter added to copies of them, in float32.

    Of a sharded one those of a layer at a time: all processes read this together, to its end.
    """
    base, shards = model.base, has_shards(model)
    for name in names_in_turn(model, base):
        layer, wrapped, rest = name.partition(".base_layer.")
        tensor = base.get_parameter(name)
        tensor = tensor.clone() if shards else tensor  # vLLM keeps some until the last one has come
        if wrapped and rest == "weight" and adapter is not None:
            yield f"{layer}.weight", tensor.float() + base.get_submodule(layer).get_delta_weight(adapter)
        elif wrapped:
            yield f"{layer}.{rest}", tensor
        elif ".lora_" not in name:
            yield name, tensor
