"""vLLM's interface with a plain model of transformers behind it: `install()` puts it in place of the package.

vLLM itself is in tests/integrations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kl.models.lm import LM
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling


class PlainLLM:
    """A model with weights of its own, which takes new ones one by one."""

    def __init__(self, folder: str, **settings: Any) -> None:
        if "nonsense" in settings:
            raise TypeError("unexpected option 'nonsense'\nand more lines")
        assert settings["hf_overrides"] == {"architectures": ["GPT2LMHeadModel"]}
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.model.to(getattr(torch, settings.get("own_dtype", "float32")))

    def collective_rpc(self, method: str, kwargs: Any) -> None:
        assert method == "reload_weights"
        left = dict(self.model.named_parameters())
        for name, tensor in kwargs["weights_iterator"]:
            self.take(left.pop(name), tensor)
        assert not left

    @torch.no_grad()
    def take(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.copy_(tensor)

    def apply_model(self, function: Callable[[Any], Any]) -> None:
        function(self.model)

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, asked: Any, params: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
        assert lora_request is None  # of this architecture vLLM reads no adapters
        found = []
        for request, one in zip(asked, params, strict=True):
            noise = uniforms(1, one.max_tokens, one.seed, "x")
            assert min(one.stop_token_ids, default=0) >= 0
            settings = Sampling(one.max_tokens, one.temperature, one.stop_token_ids, 0)
            drawn = LM(self.model).sample([request["prompt_token_ids"]], noise, settings)
            each = [
                {int(i): SimpleNamespace(logprob=float(p))}
                for i, p in zip(drawn.ids[0], drawn.logprobs[0], strict=True)
            ]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=drawn.ids[0].tolist(), logprobs=each)]))
        return found


def modules() -> dict[str, Any]:
    """The modules of the package, by name."""
    vllm, executor, models = (
        ModuleType(name) for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models")
    )
    vllm.__spec__ = ModuleSpec("vllm", None)
    vllm.__dict__.update(LLM=PlainLLM, SamplingParams=SimpleNamespace)
    models.__dict__.update(ModelRegistry=SimpleNamespace(models={}), supports_lora=lambda _: False)
    return {each.__name__: each for each in (vllm, executor, models)}


def install() -> None:
    """For the rest of this process, where there is no vLLM."""
    if find_spec("vllm") is None:
        sys.modules.update(modules())
