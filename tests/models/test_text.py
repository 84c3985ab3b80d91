from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tokenizers import processors

from rlhf_kl.models.text import decode_responses, encode, encode_all, pad, position_ids


def test_bos_stands_in_front_exactly_once(letters: Any) -> None:
    assert encode(letters, "abc") == [1, 3, 4, 5]
    assert encode(letters, "abc", bos=False) == [3, 4, 5]
    assert encode(letters, "<bos>a") == encode(letters, "<bos>a", bos=True) == [1, 3]


def test_bos_stands_only_where_the_tokenizers_own_call_puts_it(letters: Any) -> None:
    """Those of GPT-2 and Pythia have a bos, and add none."""
    bare = copy.deepcopy(letters)
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    for tokenizer in (letters, bare):
        assert encode(tokenizer, "ab") == tokenizer("ab")["input_ids"]
    assert encode(bare, "ab") == [3, 4]
    assert encode(bare, "ab", bos=True) == [1, 3, 4]


def test_many_texts_are_encoded_as_one_by_one(letters: Any) -> None:
    texts = ["a", "", "dcba"]
    assert encode_all(letters, texts) == [encode(letters, text) for text in texts]
    assert encode_all(letters, []) == []


@pytest.mark.parametrize("left", [True, False])
def test_rows_are_padded_on_the_side_that_is_asked_for(left: bool) -> None:
    ids, mask = pad([[5], [3, 4]], 9, left=left)
    assert ids.tolist() == [[9, 5] if left else [5, 9], [3, 4]]
    assert mask.tolist() == [[False, True] if left else [True, False], [True, True]]


def test_the_mask_comes_from_lengths_even_where_the_text_holds_the_pad_token() -> None:
    ids, mask = pad([[9, 9], [3]], 9, left=False)
    assert ids.tolist() == [[9, 9], [3, 9]]
    assert mask.tolist() == [[True, True], [True, False]]


def test_responses_are_read_without_special_tokens(letters: Any) -> None:
    ids, mask = torch.tensor([[3, 4, 2, 0], [2, 0, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    assert decode_responses(letters, ids, mask) == ["ab", ""]


def test_positions_count_real_tokens_only() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]
