from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_kl.models.pretrained import load_causal_lm, load_tokenizer
from rlhf_kl.models.scratch import classifier_from_lm, train_tokenizer
from rlhf_kl.models.tokens import (
    decode_behind,
    decode_responses,
    encode,
    encode_behind,
    pad,
    position_ids,
    special_ids,
    text_of_each,
)
from tests.made import Make


def test_bos_stands_in_front_once_where_the_tokenizers_own_call_puts_it(letters: Any) -> None:
    assert encode(letters, "abc") == [1, 3, 4, 5]
    assert encode(letters, "abc", bos=False) == [3, 4, 5]
    assert encode(letters, "<bos>a") == encode(letters, "<bos>a", bos=True) == [1, 3]
    bare = copy.deepcopy(letters)  # as those of GPT-2 and Pythia, which have a bos and add none
    bare.backend_tokenizer.post_processor = processors.Sequence([])
    for tokenizer in (letters, bare):
        assert encode(tokenizer, "ab") == tokenizer("ab")["input_ids"]
    assert encode(bare, "ab") == [3, 4]
    assert encode(bare, "ab", bos=True) == [1, 3, 4]


@pytest.mark.parametrize(("left", "row", "kept"), [(True, [9, 5], [False, True]), (False, [5, 9], [True, False])])
def test_rows_are_padded_on_one_side_and_the_mask_comes_from_lengths(
    left: bool, row: list[int], kept: list[bool]
) -> None:
    """A text may hold the pad token."""
    ids, mask = pad([[5], [3, 9]], 9, left=left)
    assert ids.tolist() == [row, [3, 9]]
    assert mask.tolist() == [kept, [True, True]]


def test_positions_count_real_tokens_only() -> None:
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, False, False]])
    assert position_ids(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_an_ordinary_token_that_ends_a_response_is_in_its_text(letters: Any) -> None:
    """As a line break that a model's generation config names; those made for the end are not."""
    assert decode_responses(letters, [[3, 4, 5], [3, 2], [3, 2, 0]], [2, 5]) == ["abc", "a", "a"]


def test_special_are_those_of_the_template_too_but_no_blanks_and_no_words(letters: Any) -> None:
    chat = copy.deepcopy(letters)
    chat.add_tokens(["<think>", "<other>", "  "])
    chat.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    names = ["<think>", "<other>", "  ", "<|user|>", "a"]
    ids = dict(zip(names, chat.convert_tokens_to_ids(names), strict=True))
    own = {0, 1, 2, ids["<|user|>"]}
    assert special_ids(chat) == own
    chat.chat_template = "{% for m in messages %}  <|user|>a<think>{% endfor %}"
    assert special_ids(chat) == own | {ids["<think>"]}


SENTENCES = ["the room was clean", "the food was cold", "the room was cold and the food was clean"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES, vocab_size=300, context=64)


def test_each_token_has_a_text_of_its_own(tokenizer: Any) -> None:
    """A part of a character has its bytes, an id that no token has its number."""
    *words, first, second = text_of_each(tokenizer, encode(tokenizer, "the é", bos=False))
    assert ("".join(words), first, second) == ("the ", "<0xC3>", "<0xA9>")
    assert text_of_each(tokenizer, [99_999]) == ["#99999"]
    names = ["a", "\u2581a", "<0xC3>", "<0xA9>", "\n"]  # as those of SentencePiece
    other = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    space = decoders.Replace("\u2581", " ")
    other.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    found = text_of_each(PreTrainedTokenizerFast(tokenizer_object=other), range(5))
    assert found == ["a", " a", "<0xC3>", "<0xA9>", "\n"]


@pytest.mark.parametrize("text", ["the room was clean", " leading space", "naïve café 🙂\nline", "", "a  b "])
def test_any_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(encode(tokenizer, text, bos=False)) == text


def test_saved_and_loaded_it_is_the_same(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}) == 3
    text = "the food was café"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.padding_side == "left"
    assert again.pad_token_id == tokenizer.pad_token_id


def test_a_response_keeps_special_tokens_but_for_eos_pad_and_bos(letters: Any) -> None:
    """A reward may look for `<think>`, or for the end of a turn of another model."""
    tokenizer = copy.deepcopy(letters)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<end>"]})
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "<end>"])
    rows = [[think, 3, end], [1, 4, think, 2]]
    assert decode_responses(tokenizer, rows, [2]) == ["<think>a<end>", "b<think>"]
    assert decode_responses(tokenizer, rows, [2, end]) == ["<think>a", "b<think>"]


def test_a_seed_makes_the_same_weights_and_leaves_the_global_stream_alone(new_model: Make) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (new_model(seed=seed, spread=0.0) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.transformer.wte.weight, other.transformer.wte.weight)


def test_embeddings_are_tied_and_generation_samples_from_the_whole_policy(new_model: Make, letters: Any) -> None:
    model = new_model()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.generation_config.top_k == 0
    assert model.config.eos_token_id == letters.eos_token_id
    assert not model.training


def test_a_classifier_keeps_the_trunk_of_its_language_model(tiny_folder: Path, letters: Any) -> None:
    model = classifier_from_lm(load_causal_lm(str(tiny_folder)), letters)
    trunk = load_causal_lm(str(tiny_folder)).base_model.state_dict()
    assert model.config.num_labels == 1
    assert model.score.out_features == 1
    for name, tensor in model.base_model.state_dict().items():
        assert torch.equal(tensor, trunk[name])


def like_llama() -> Tokenizer:
    """Its normalizer puts a space in front of a text, which its decoder strips."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


def like_mistral() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


def like_bert() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    return made


def like_gpt2() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


@pytest.fixture(params=[like_llama, like_mistral, like_bert, like_gpt2])
def kind(request: pytest.FixtureRequest) -> Any:
    made = request.param()
    teacher = trainers.WordPieceTrainer if request.param is like_bert else trainers.BpeTrainer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if request.param is like_gpt2 else list("a.0\n")
    special = ["<s>", "</s>", "<unk>", "<pad>"]
    made.train_from_iterator(SENTENCES, teacher(special_tokens=special, vocab_size=400, initial_alphabet=alphabet))
    names = dict(zip(("bos_token", "eos_token", "unk_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **names)


@pytest.mark.parametrize("cut", range(1, 6))
def test_prompt_and_response_together_are_the_text_whatever_the_tokenizer(kind: Any, cut: int) -> None:
    """What a scorer reads is what the policy wrote: no first space is lost, and its tokens come back."""
    text = "the food was cold and the room was clean"
    ids = encode(kind, text, bos=False)
    prompt, row = ids[:cut], ids[cut:]
    (response,) = decode_responses(kind, [[*row, 1]], [1])
    both = kind.decode(prompt, clean_up_tokenization_spaces=False) + response
    assert both == text
    assert encode(kind, both, bos=False) == ids
    if response.startswith(" "):  # a word's beginning: alone it is the same tokens
        assert encode_behind(kind, response) == row


def test_a_response_that_begins_inside_a_word_gets_no_space_in_front(kind: Any) -> None:
    row = encode_behind(kind, "food was")
    assert "".join(decode_behind(kind, [row])).strip() == "food was"
    if not isinstance(kind.backend_tokenizer.model, models.WordPiece):  # which writes a space before each word
        assert decode_behind(kind, [row]) == ["food was"]
    assert decode_behind(kind, [[]]) == [""]
