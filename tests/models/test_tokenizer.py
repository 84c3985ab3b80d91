from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_kl.models.load import load_tokenizer
from rlhf_kl.models.scratch import train_tokenizer
from rlhf_kl.models.text import encode

TEXTS = ["the room was clean", "the food was cold", "the room was cold and the food was clean"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TEXTS, vocab_size=300, context=64)


def test_the_three_special_tokens_are_distinct(tokenizer: Any) -> None:
    ids = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert len(ids) == 3
    assert None not in ids


@pytest.mark.parametrize("text", ["the room was clean", " leading space", "naïve café 🙂\nline", "", "a  b "])
def test_any_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text, bos=False)) == text


def test_frequent_words_are_one_token(tokenizer: Any) -> None:
    assert len(encode(tokenizer, "the room was clean", bos=False)) <= 6
    assert len(tokenizer) <= 300


def test_calling_it_puts_bos_in_front_and_no_eos_behind(tokenizer: Any) -> None:
    ids = tokenizer("the room")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in ids


def test_saved_and_loaded_it_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    text = "the food was café"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.padding_side == "left"
    assert again.pad_token_id == tokenizer.pad_token_id
