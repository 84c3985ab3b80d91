from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import processors

from rlhf_kl.models.load import model_fingerprint, texts_fingerprint, tokenizer_fingerprint


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
    assert texts_fingerprint(["\ud800"]) != texts_fingerprint(["\ud801"])  # halves of characters, as files may hold
