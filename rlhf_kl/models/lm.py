"""The one interface to a causal language model: sample from it, or read it at chosen states.

Precision and memory are decided only here. The layers run under autocast if the run uses bfloat16 or float16; their
hidden states become float32, and the LM head runs outside of autocast: the logits of a real model are far from 0
(GPT-2's near -70), where bfloat16 has steps of 0.5 (see `logits`). Nothing holds all logits of a batch (`ops.head`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from rlhf_kl.errors import InputError
from rlhf_kl.hub import first_line
from rlhf_kl.models.decoding import attends_to_everything, decode, keeps_each_token
from rlhf_kl.models.logits import (
    Project,
    RoundedHead,
    TiedHead,
    can_shift,
    decoding_head,
    final_logits,
    is_tied,
    learns_few,
    rounding_product,
    rows_of_words,
)
from rlhf_kl.models.tokens import position_ids
from rlhf_kl.ops.head import Head, token_logprobs
from rlhf_kl.ops.packing import Packed, SharedPrompts, share_prompts, text_layout
from rlhf_kl.sharding import has_shards
from rlhf_kl.types import Sampled, Sampling
from rlhf_kl.ui import log

FLOAT16_ENDS = "float16 ends at 65504: set run.dtype to float32, or to bfloat16 on a device that computes in it"
SAME_LOGITS = 1e-3  # largest difference of a logit over the largest logit, in float32

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Trunk(nn.Module):
    """A causal transformer of the transformers library without its head.

    Rows begin at column 0. Attention is causal, so padding after a row's last token needs no mask.
    """

    graphs = True  # whether its steps may be CUDA graphs: so until one cannot be captured
    within: Sequence[nn.Module] = ()  # modules that hold shards of what it reads, see `sharding`

    def __init__(
        self, model: Any, dtype: torch.dtype = torch.float32, active: Context = contextlib.nullcontext
    ) -> None:
        """`dtype`: of the layers' computation; `active`: a context for every pass (the switch of an adapter)."""
        super().__init__()
        self.model, self.dtype, self.active = model, dtype, active
        self.cache_name = cache_name(self.base.base_model)

    @property
    def module(self) -> nn.Module:
        """The model of transformers (or peft), which is saved."""
        return self.model  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def base(self) -> Any:
        """The model of transformers, an adapter's layers inside it."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    @property
    def shares_prompts(self) -> bool:
        """Whether a pass can read a prompt once for several rows."""
        return keeps_each_token(self.base.config)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the layers: autocast where they compute in 16 bits."""
        if self.dtype != torch.float32:
            torch.clear_autocast_cache()  # the end of a block clears nothing inside another one, which may be older
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def recording(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the layers: without gradients nothing is kept for them, which saves a tenth of a small pass.

        FSDP keeps what it gathers in a pass for the next one, which may have gradients.
        """
        return contextlib.nullcontext() if torch.is_grad_enabled() or has_shards(self) else torch.inference_mode()

    def hidden(self, rows: Packed) -> Tensor:
        """Last hidden states (N, H) at the states of `rows`."""
        if rows.prompts is not None and not self.shares_prompts:
            rows = rows.unshared()
        with self.active(), self.precision(), self.recording():
            states = self._read(rows.ids) if rows.prompts is None else self._read_behind(rows.prompts, rows.ids)
        return states.flatten(0, 1).index_select(0, rows.states)

    def _read(self, ids: Tensor) -> Tensor:
        """Hidden states (B, L, H) of rows that begin at column 0."""
        with recomputing(self.model):
            # A mask of ones: without a mask, some models guess one from the ids.
            output = self.base.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _read_behind(self, prompts: SharedPrompts, ids: Tensor) -> Tensor:
        """Hidden states (B, T, H): of each row's prompt the last one, then those of its response tokens `ids`."""
        last, cache, mask = self.read_prompts(prompts)
        if not ids.shape[1]:
            return last.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids, dtype=torch.bool)], 1)
        states, _ = self.step(ids, mask, position_ids(mask)[:, -ids.shape[1] :], cache)
        return torch.cat([last.unsqueeze(1), states], 1)

    def read_prompts(self, prompts: SharedPrompts) -> tuple[Tensor, Any, Tensor]:
        """Hidden states (B, H) after the prompts of the rows, the cache to continue from, and its mask (B, C + R).

        The common part of prompts goes through the layers once; its keys and values are copied to the rows.
        """
        if not attends_to_everything(self.base.config):
            prompts = prompts.without_prefix()  # padding after the prefix would count in a layer's window
        cache, mask = None, prompts.mask
        if len(prompts.prefix):
            ids = prompts.prefix.unsqueeze(0)
            whole = torch.ones_like(ids, dtype=torch.bool)
            _, cache = self.step(ids, whole, position_ids(whole), None)
            cache.reorder_cache(torch.zeros(len(mask), dtype=torch.long, device=ids.device))
            mask = torch.cat([whole.expand(len(mask), -1), mask], 1)
        positions = position_ids(mask)[:, len(prompts.prefix) :]
        hidden, cache = self.step(prompts.ids, mask, positions, cache)
        hidden = hidden[:, -1]
        if len(prompts.copies) > len(prompts.ids):
            cache.reorder_cache(prompts.copies)
            hidden, mask = hidden[prompts.copies], mask[prompts.copies]
        return hidden, cache, mask

    def step(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Hidden states (B, n, H) of `ids` (B, n) behind a cache, and the cache with the keys and values of all."""
        given = {"position_ids": positions, self.cache_name: cache}
        output = self.base.base_model(input_ids=ids, attention_mask=mask, use_cache=True, **given)
        return output.last_hidden_state, getattr(output, self.cache_name)

    @property
    def ready_masks(self) -> bool:
        """Whether a step takes its mask in four dimensions, which transformers need not look through.

        `models.pretrained` tries a model that it loads, and notes the result on it; copies have it too.
        """
        return getattr(self.base, "ready_masks", False)

    def give_up_graphs(self, reason: str) -> None:
        """Start each kernel of a step from Python from now on."""
        self.graphs = False
        log.info(f"steps of sampling are started from Python, since no CUDA graph holds them: {reason}")


def cache_name(model: nn.Module) -> str:
    """What a model calls its cache, as an argument and in its output: `cache` from transformers 5.24 on."""
    named, known = inspect.signature(model.forward).parameters, BaseModelOutputWithPast.__dataclass_fields__
    return next(name for names in (named, known) for name in ("past_key_values", "cache") if name in names)


class LM(Trunk):
    """A causal language model: the policy, the reference, or the policy with its adapter switched off."""

    rounded: RoundedHead | None = None
    tied: TiedHead | None = None

    def forward(self, rows: Packed) -> Tensor:
        """As `hidden`: a pass that is trained on calls the module itself, as FSDP needs."""
        with rows_of_words(self.base, rows.ids):
            return self.hidden(rows)

    def head(self) -> Head:
        """What makes logits of its hidden states, for the weights as they are now."""
        layer = self.base.get_output_embeddings()
        product = rounding_product(layer.weight.device) if self._rounds(layer) else None
        if product is not None:
            self.rounded = self.rounded or RoundedHead(layer, product)
            return self._finished(self.rounded.now())

        if self.tied is None and is_tied(self.base):
            self.tied = TiedHead(layer)

        def exact(hidden: Tensor) -> Tensor:
            if self.tied is not None and learns_few(layer.weight, len(hidden)):
                return self.tied(hidden.float())
            # Switching an adapter takes longer than a head, so only where the head has one.
            switch = contextlib.nullcontext() if type(layer) is nn.Linear else self.active()
            with switch, torch.autocast(hidden.device.type, enabled=False):
                logits: Tensor = layer(hidden.float())
            return logits.float()

        return self._finished(exact)

    def _finished(self, project: Project) -> Head:
        config = self.model.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return Head(lambda hidden: final_logits(project(hidden), config), int(config.vocab_size), parameters)

    def _rounds(self, layer: nn.Module) -> bool:
        """Whether products of the head may round."""
        return self.dtype == torch.bfloat16 and can_shift(layer, self.model.config.get_text_config())

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], noise: Tensor, sampling: Sampling) -> Sampled:
        """One response to each prompt's tokens; `noise` (B, max_new_tokens) in [0, 1) decides those of the response."""
        shared = share_prompts(list(map(tuple, prompts)), self.device)
        layer = self.base.get_output_embeddings()
        # In 16 bits, a step's states differ from those of a full pass by rounding, which would change the ratios.
        keep = self.dtype == torch.float32
        head = self._finished(decoding_head(layer)) if self._rounds(layer) else self.head()
        with self.active(), self.precision():
            return decode(self, head, shared, noise, sampling, keep_states=keep)


@torch.no_grad()
def check_range(model: Any, dtype: torch.dtype) -> None:
    """Errors: InputError for a weight that would be infinite in `dtype`."""
    for name, x in model.named_parameters() if dtype == torch.float16 else ():
        largest = max(map(abs, torch.stack(x.aminmax()).tolist()))
        if largest > torch.finfo(dtype).max:
            raise InputError(f"{name} has a weight of {largest:.3g}, and {FLOAT16_ENDS}")


@torch.no_grad()
def check_head(model: Any) -> None:
    """Compare the logits computed here with those of the model's own forward pass, on a small batch.

    Errors: InputError if they differ, since every figure would be wrong, or if there is no cache to sample with.
    """
    lm, ids = LM(model), trial_ids(model)
    whole = torch.ones_like(ids, dtype=torch.bool)
    states = torch.arange(12, device=ids.device)
    try:
        ours = lm.head().logits(lm(Packed(ids, states, states, states)))
        cache, positions = None, position_ids(whole)
        for start, end in itertools.pairwise((0, 3, 4, 5, 6)):
            last, cache = lm.step(ids[:, start:end], whole[:, :end], positions[:, start:end], cache)
    except (AttributeError, TypeError) as error:
        raise InputError(f"a {type(model).__name__} cannot be read state by state: {error}") from error
    own = model(input_ids=ids, attention_mask=whole, use_cache=False).logits.float()
    behind, most = lm.head().logits(last[:, -1]), SAME_LOGITS * max(1.0, float(own.abs().max()))
    gap = float((ours.view_as(own) - own).abs().max()) if ours.numel() == own.numel() else float("inf")
    if not gap <= most:
        raise InputError(
            f"the logits of a {type(model).__name__} are not its LM head applied to its last hidden "
            f"states (they differ by {gap:.2g}), so they cannot be computed in float32"
        )
    gap = float((behind - own[:, -1]).abs().max())
    if not gap <= most:
        raise InputError(
            f"the logits of a {type(model).__name__} behind its cache are not those of the whole text (they differ by "
            f"{gap:.2g}), so nothing can be sampled from it"
        )


def trial_ids(model: Any) -> Tensor:
    """Two rows of six tokens, (2, 6), to try a model on."""
    size = model.config.get_text_config().vocab_size
    return torch.randint(size, (2, 6), generator=torch.Generator().manual_seed(0)).to(next(model.parameters()).device)


@torch.no_grad()
def takes_ready_masks(model: Any) -> bool:
    """Whether a step of a checked model is right with a mask of four dimensions."""
    if not attends_to_everything(model.config):
        return False
    lm, ids = LM(model), trial_ids(model)
    mask = torch.ones_like(ids, dtype=torch.bool)
    for padding in (0, 2):
        mask[0, :padding] = False
        last = ids[:, -1:], position_ids(mask)[:, -1:]
        _, short = lm.step(ids[:, :-1], mask[:, :-1], position_ids(mask)[:, :-1], None)
        expected, _ = lm.step(last[0], mask, last[1], copy.deepcopy(short))
        try:
            found, _ = lm.step(last[0], mask[:, None, None], last[1], short)
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                return False
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError):
            return False
    return True


def enable_recompute(model: Any) -> None:
    """Gradient checkpointing: layers keep no activations and recompute them in the backward pass.

    Errors: InputError if the architecture does not support it.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    # transformers 5.2x renamed it and warns about the old name.
    enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise InputError(f"{first_line(error)}") from error


@contextlib.contextmanager
def recomputing(model: Any) -> Iterator[None]:
    """A forward pass whose layers are recomputed later, if that was switched on and gradients are enabled.

    Layers recompute only in training mode, in which they reject the cache that sampling needs, so they are in it for
    this pass only. Their submodules are not: a router of experts, for example, would draw noise.
    """
    modules = model.modules() if torch.is_grad_enabled() else ()
    layers = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def negative_log_likelihood(lm: LM, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """Of each token of `rows` from `starts` (at least 1) on, row after row: (N,), in nats."""
    layout = text_layout(rows, starts, lm.device)
    packed = layout.pack(range(len(rows)))
    return -token_logprobs(lm(packed), lm.head(), layout.chosen[packed.places])
