"""Rollouts by vLLM, in this process: `rollout.engine: vllm`.

vLLM has its own copy of the policy's weights, and other kernels: its log-probs differ from those that the trainer
computes for the same tokens, so the losses weigh each token by their ratio (see `ppo.objectives`).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlhf_kl.errors import InputError, ServiceFailed
from rlhf_kl.hub import first_line
from rlhf_kl.models.lm import LM
from rlhf_kl.models.lora import TRAINED
from rlhf_kl.models.tokens import pad
from rlhf_kl.types import Sampled, Sampling

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
    """Samples from a policy as `LM.sample` does; each call begins with the weights as they are then."""

    def __init__(self, policy: LM, longest: int, options: Mapping[str, Any]) -> None:
        """`longest`: tokens of prompt and response together; `options`: further ones of `vllm.LLM`.

        Errors: InputError for a model or options that it refuses.
        """
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.policy = policy
        settings = {
            "dtype": str(policy.dtype).removeprefix("torch."),
            "gpu_memory_utilization": 0.3,  # the trainer needs the rest
            "hf_overrides": {"architectures": [type(policy.base).__name__]},
            "load_format": "dummy",  # the weights come before each rollout
            "logprobs_mode": "processed_logprobs",  # with the temperature
            "max_model_len": longest,
            "skip_tokenizer_init": True,
        }
        with tempfile.TemporaryDirectory() as folder, failing():
            policy.base.config.save_pretrained(folder)
            from vllm import LLM

            try:
                self.llm = LLM(folder, **(settings | dict(options)))
            except (TypeError, ValueError) as error:
                raise InputError(f"rollout.engine: vllm, with these engine_options: {error}") from error

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
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights_of(self.policy)})
            self.llm.apply_model(pack_again)
            self.llm.reset_prefix_cache()  # it was filled by other weights
            found = [each.outputs[0] for each in self.llm.generate(asked, params, use_tqdm=False)]
        rows = [list(one.token_ids) for one in found]
        steps = [(token, each) for one in found for token, each in zip(one.token_ids, one.logprobs, strict=True)]
        ids, mask = pad(rows, sampling.pad_id, left=False)
        logprobs = torch.zeros(mask.shape)
        logprobs[mask] = torch.tensor([each[token].logprob for token, each in steps])
        ended = torch.tensor([row[-1] in sampling.eos_ids for row in rows])
        device = self.policy.device
        return Sampled(ids.to(device), mask.to(device), ended.to(device), logprobs.to(device))


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Errors: ServiceFailed for any of vLLM's."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise ServiceFailed(f"rollout.engine: vllm: {first_line(error)}") from error


def pack_again(model: Any) -> None:
    """On a CPU vLLM multiplies by packed copies of weights; reloading leaves that of a tied head as it was."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


@torch.no_grad()
def weights_of(policy: LM) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy by their names in its checkpoint, an adapter added to copies of them, in float32."""
    modules = dict(policy.base.named_modules())
    for name, tensor in policy.base.named_parameters():
        layer, wrapped, rest = name.partition(".base_layer.")
        if not wrapped and ".lora_" not in name:
            yield name, tensor
        elif wrapped and rest == "weight":
            yield f"{layer}.weight", tensor.float() + modules[layer].get_delta_weight(TRAINED)
        elif wrapped:
            yield f"{layer}.{rest}", tensor
