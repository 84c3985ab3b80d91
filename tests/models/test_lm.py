from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, GPT2LMHeadModel

from rlhf_kl.errors import InputError
from rlhf_kl.models import logits as logits_module
from rlhf_kl.models.lm import LM, cache_name, check_head, enable_recompute, recomputing
from rlhf_kl.ops.packing import Packed, pack_last, text_layout
from rlhf_kl.seeding import uniforms
from rlhf_kl.types import Sampling
from tests.made import Make

TEXTS = [[1, 3, 4, 5, 6, 3, 2], [1, 6], [1, 5, 5, 0, 4]]
STARTS = [4, 1, 1]  # of the tokens whose states are read
TOKENS = 3 + 1 + 4


def packed(*rows: int) -> Packed:
    return text_layout(TEXTS, STARTS, torch.device("cpu")).pack(rows or (0, 1, 2))


def test_a_pass_makes_no_logits(new_model: Make) -> None:
    """Only the head does, for the states that it is asked for."""
    lm, events = LM(new_model()), []
    lm.register_forward_hook(lambda *_: events.append("pass"))
    lm.model.lm_head.register_forward_hook(lambda _, __, output: events.append(len(output)))
    hidden = lm(packed())
    assert events == ["pass"]
    lm.head().logits(hidden[:2])
    assert events == ["pass", 2]


def test_gradients_are_those_of_the_models_own_pass(new_model: Make) -> None:
    gradients = []
    for own in (False, True):
        model = new_model(seed=1)
        if own:
            logits = model(input_ids=torch.tensor([TEXTS[0]])).logits[0, 3:-1]
        else:
            logits = LM(model).head().logits(LM(model)(packed(0)))
        logits.log_softmax(-1)[:, 3].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert float(gradients[0].norm()) > 0.1
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


class FullSize(TorchDispatchMode):
    """Notes the operations that make a tensor of one size."""

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.size, self.made = size, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.layout == torch.strided and result.shape == self.size:
            self.made.append(func._schema.name.partition("::")[2])
        return result


@pytest.mark.parametrize(("tied", "words"), [(True, 64), (True, 7), (False, 64)])
def test_tied_embeddings_have_one_gradient_of_full_size_where_a_pass_has_few_words(
    monkeypatch: pytest.MonkeyPatch, tied: bool, words: int
) -> None:
    monkeypatch.setattr(logits_module, "LARGE", 0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

    def gradients(lm: bool) -> tuple[list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=words, tie_word_embeddings=tied, **sizes)
        model = AutoModelForCausalLM.from_config(config)
        weight = model.get_input_embeddings().weight
        if lm:
            logits = LM(model).head().logits(LM(model)(packed(0, 0)))
        else:
            logits = model(input_ids=torch.tensor([TEXTS[0]] * 2)).logits[:, 3:-1].flatten(0, 1)
        with FullSize(tuple(weight.shape)) as full:
            logits.log_softmax(-1)[:, 3].sum().backward(retain_graph=True)
            logits.log_softmax(-1)[:, 3].sum().backward()  # of a second pass
        assert weight.grad is not None
        assert weight.grad.layout == torch.strided
        return [p.grad for p in model.parameters() if p.grad is not None], full.made

    found, made = gradients(lm=True)
    for ours, own in zip(found, gradients(lm=False)[0], strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
    assert ("embedding_dense_backward" in made) == (not tied or words == 7)


class Louder(GPT2LMHeadModel):
    """Does something to its logits that its config does not tell."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., 3] += 0.5
        return output


class Forgetful(GPT2LMHeadModel):
    """Begins anew behind its cache."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        name = cache_name(self.transformer)

        def forget(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {name: None, "attention_mask": None, "position_ids": None}

        self.transformer.register_forward_pre_hook(forget, with_kwargs=True)


class Headless(GPT2LMHeadModel):
    """Names no head."""

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Louder, "differ by 0.5"),
        (Headless, "state by state"),
        (Forgetful, "behind its cache"),
    ],
)
def test_a_model_whose_logits_are_not_its_heads_is_refused(
    new_model: Make, kind: type[GPT2LMHeadModel], words: str
) -> None:
    model = new_model(spread=0.1)
    check_head(model)
    other = kind(model.config).eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(InputError, match=f".*{kind.__name__}.*{words}"):
        check_head(other)


def test_a_model_without_a_key_value_cache_is_refused() -> None:
    """It computes the right logits, but nothing could be sampled from it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("openai-gpt", vocab_size=7, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(InputError, match=r"OpenAIGPTLMHeadModel .*state by state"):
        check_head(AutoModelForCausalLM.from_config(config).eval())


def test_what_is_inside_a_layer_that_is_computed_again_keeps_its_mode() -> None:
    """In training mode the router of these experts multiplies what it reads by noise."""
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        router_jitter_noise=0.5,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[1, 3, 4, 5, 6]])
    plain = model(input_ids=ids, use_cache=False).logits
    enable_recompute(model)
    with recomputing(model):
        again = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(again, plain)
    assert not any(module.training for module in model.modules())


def test_sampling_keeps_its_cache(new_model: Any, prompts_of: Any) -> None:
    """Layers that are computed again have none: only passes with gradients are such."""
    prompts, noise = prompts_of("ab", "c"), uniforms(2, 6, 0, "x")
    drawn, read = [], []
    for recompute in (False, True):
        lm = LM(new_model())
        if recompute:
            enable_recompute(lm.model)
        lm.hidden(pack_last([[1, 3]], lm.device)).sum().backward()
        lm.model.transformer.register_forward_pre_hook(
            lambda _, __, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        drawn.append(lm.sample(prompts.ids, noise, Sampling(6, 1.0, [], 0)))
    assert torch.equal(drawn[0].ids, drawn[1].ids)
    assert read == [3, 1, 1, 1, 1, 1] * 2


def test_an_architecture_that_cannot_is_refused(new_model: Any) -> None:
    model = new_model()
    model.supports_gradient_checkpointing = False
    with pytest.raises(InputError, match="does not support"):
        enable_recompute(model)
