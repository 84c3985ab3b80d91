from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.errors import InputError
from rlhf_kl.models.pretrained import load_reward_model, load_tokenizer
from rlhf_kl.models.value import freeze
from rlhf_kl.rewards.model import RewardModel, TextFormat, text_format


@pytest.fixture
def model(tiny_reward_folder: Path) -> RewardModel:
    folder = str(tiny_reward_folder)
    return RewardModel(freeze(load_reward_model(folder)), load_tokenizer(folder))


def scores(model: RewardModel, prompts: list[str], responses: list[str]) -> list[float]:
    return model.score(prompts, responses).tolist()


def test_a_score_is_the_classifiers_logit_at_the_eos_or_at_the_end_of_the_text(model: RewardModel) -> None:
    bare = RewardModel(model.model, model.tokenizer, form=TextFormat(append_eos=False))
    for reward, ids in ((model, [1, 3, 4, 5, 6, 2]), (bare, [1, 3, 4, 5, 6])):  # bos abcd eos
        assert reward.encode(["ab"], ["cd"]) == [ids]
        with torch.no_grad():
            hidden = model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
            expected = float(model.model.score(hidden))
        assert scores(reward, ["ab"], ["cd"]) == pytest.approx([expected], abs=1e-5)
        assert scores(reward, ["ab"], ["c"]) != pytest.approx([expected], abs=1e-5)


PROMPTS = ["a", "abcd", "bb", "d", "cab"]
RESPONSES = ["b", "", "dcbadcba", "a", "cc"]


def test_batches_order_and_smaller_passes_change_nothing(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch, rows_read: Callable[[], list[int]]
) -> None:
    together = scores(model, PROMPTS, RESPONSES)
    alone = [scores(model, [p], [r])[0] for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    monkeypatch.setattr("rlhf_kl.rewards.model.SCORING_ROWS", 2)
    assert scores(model, PROMPTS[::-1], RESPONSES[::-1]) == pytest.approx(together[::-1], abs=1e-5)
    monkeypatch.setattr("rlhf_kl.rewards.model.SCORING_ROWS", 1)
    passes = rows_read()
    assert scores(model, PROMPTS, RESPONSES) == pytest.approx(together, abs=1e-5)
    assert max(passes) == 1
    assert scores(model, [], []) == []  # as a process without texts has


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_kept_states_are_those_of_each_text_alone(
    model: RewardModel, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of any size, with the longest text between others; keeping them changes no score."""
    expected = scores(model, PROMPTS, RESPONSES)
    monkeypatch.setattr("rlhf_kl.rewards.model.SCORING_ROWS", rows)
    keeping = RewardModel(model.model, model.tokenizer)
    keeping.keeps_states = True
    assert scores(keeping, PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)
    assert keeping.kept is not None
    layout, states = keeping.kept
    texts = model.encode(PROMPTS, RESPONSES)
    assert [ids[layout.prompt_width - n :] for ids, n in zip(layout.ids.tolist(), layout.prompts, strict=True)] == [
        [*text, *[0] * (layout.response_ids.shape[1] + int(n) - len(text))]
        for text, n in zip(texts, layout.prompts, strict=True)
    ]
    for ids, first, found in zip(texts, layout.prompts, states.split(layout.responses.tolist()), strict=True):
        with torch.no_grad():
            own = model.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(found, own[first - 1 :], rtol=1e-4, atol=1e-5)
    assert layout.prompts.tolist() == [len(prompt) + 1 for prompt in PROMPTS]  # with the bos
    assert model.kept is None


def test_a_prompt_of_several_responses_is_read_once(model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = ["abcdabcdabcdabcd"] * 3 + ["dcbadcbadcbadcba"] * 3
    responses = ["a", "bb", "", "dada", "c", "ab"]
    alone = [scores(model, [p], [r])[0] for p, r in zip(prompts, responses, strict=True)]
    read: list[int] = []
    inner = model.trunk.step

    def step(ids: torch.Tensor, *args: Any) -> Any:
        read.append(ids.numel())
        return inner(ids, *args)

    monkeypatch.setattr(model.trunk, "step", step)
    assert scores(model, prompts, responses) == pytest.approx(alone, abs=1e-5)
    assert 2 * 17 <= sum(read) <= 2 * 17 + 6 * 5  # each prompt with its bos, and responses with their ends, padded


@pytest.mark.parametrize("pad", [None, 0, 1, 2, 3, 4])
def test_any_token_may_be_the_pad_token_of_the_classifier(
    model: RewardModel, tiny_reward_folder: Path, pad: int | None
) -> None:
    """Its own forward pass, which the head is compared with, never scores a pad token."""
    classifier = load_reward_model(str(tiny_reward_folder))
    classifier.config.pad_token_id = pad
    assert scores(RewardModel(classifier, model.tokenizer), ["ab"], ["c"]) == scores(model, ["ab"], ["c"])
    assert classifier.config.pad_token_id == pad


def test_a_token_that_the_model_lacks_is_told(model: RewardModel) -> None:
    """A tokenizer may have gained tokens that the embedding has no rows for."""
    wider = copy.deepcopy(model.tokenizer)
    wider.add_tokens(["<new>", "[PAD]"])
    wider.pad_token = "[PAD]"  # which a decoder's rows do not have
    scorer = RewardModel(model.model, wider)
    assert scores(scorer, ["ab"], ["c"]) == scores(model, ["ab"], ["c"])
    with pytest.raises(InputError, match=r"token 7 \('<new>'\)"):
        scores(scorer, ["ab"], ["<new>"])


def test_a_head_that_reads_more_than_the_last_state_is_refused(model: RewardModel, tiny_reward_folder: Path) -> None:
    classifier = load_reward_model(str(tiny_reward_folder))
    own = classifier.score.forward
    classifier.score.forward = lambda states: own(states) + states.numel()
    with pytest.raises(InputError, match=r"GPT2ForSequenceClassification .*head"):
        RewardModel(classifier, model.tokenizer)


def test_the_head_of_a_bfloat16_model_computes_in_float32(model: RewardModel) -> None:
    """Scores far from 0 have coarse steps in bfloat16; on the same states they differ by the layers alone."""
    with torch.no_grad():
        shifted = copy.deepcopy(model.model)
        shifted.transformer.ln_f.weight[0], shifted.transformer.ln_f.bias[0] = 0.0, 1.0
        shifted.score.weight[0, 0] = -70.0
    half = RewardModel(shifted, model.tokenizer, dtype=torch.bfloat16)
    half.keeps_states = True
    found = scores(half, PROMPTS, RESPONSES)
    assert half.kept is not None
    layout, states = half.kept
    last = states[layout.responses.cumsum(0) - 1].double()
    expected = (last @ shifted.score.weight.double().T).squeeze(1).tolist()
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(torch.tensor(expected).bfloat16().tolist(), abs=1e-2)


def test_scores_beyond_float16_are_told_once_with_the_way_out(model: RewardModel, caplog: Any) -> None:
    with torch.no_grad():
        large = copy.deepcopy(model.model)
        large.transformer.h[0].mlp.c_fc.bias.fill_(100.0)
        large.transformer.h[0].mlp.c_proj.weight[:, 0] = 1000.0
    for dtype, told in ((torch.bfloat16, 0), (torch.float16, 1)):
        reward = RewardModel(large, model.tokenizer, dtype=dtype)
        for _ in range(2):
            assert all(map(math.isinf, scores(reward, PROMPTS, RESPONSES))) == bool(told)
        assert sum("run.dtype" in line for line in caplog.messages) == told


def test_a_text_beyond_the_context_keeps_its_end(model: RewardModel) -> None:
    long = "abcd" * 20
    (row,) = model.encode([long], ["dd"])
    assert len(row) == 32
    assert row[-3:] == [6, 6, 2]
    assert scores(model, [long], ["dd"]) == pytest.approx(scores(model, ["c" + long], ["dd"]), abs=1e-5)


def test_the_format_is_what_is_asked_for_then_what_the_folder_says(model: RewardModel) -> None:
    assert text_format(model.model) == TextFormat(chat=False, append_eos=True)
    model.model.config.rlhf_kl_format = {"chat": True, "append_eos": False}
    assert text_format(model.model) == TextFormat(chat=True, append_eos=False)
    assert text_format(model.model, chat=False, append_eos=True) == TextFormat(chat=False, append_eos=True)


def test_a_chat_format_reads_every_turn(tiny_reward_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    scorer = RewardModel(load_reward_model(str(tiny_reward_folder)), tokenizer, form=TextFormat(chat=True))
    said = (("user", "a"), ("assistant", "b"), ("user", "c"))
    assert scorer.encode([said, "d"], ["ab", "a"]) == [[3, 2, 4, 2, 5, 2, 3, 4, 2], [6, 2, 3, 2]]


def test_a_chat_format_without_system_messages_is_told_once(
    tiny_reward_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    tokenizer.chat_template = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}<eos>{% endfor %}"
    scorer = RewardModel(load_reward_model(str(tiny_reward_folder)), tokenizer, form=TextFormat(chat=True))
    assert scorer.encode(["a"], ["b"]) == [[3, 2, 4, 2]]
    assert not capsys.readouterr().err
    for _ in range(2):
        assert scorer.encode(["a", (("system", "d"), ("user", "a"))], ["b", "b"]) == [[3, 2, 4, 2]] * 2
    assert capsys.readouterr().err.count("system messages") == 1


@pytest.mark.parametrize("listed", [[0, 1, 2], [2, 0, 1], ["2", "1", "0"]])  # the numbers of id2label
def test_a_label_of_several_is_scored_by_its_odds(letters: Any, listed: list[Any]) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    labels = {number: ["bad", "so", "good"][int(number)] for number in listed}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=7, n_embd=8, n_layer=1, n_head=1, n_positions=32, id2label=labels, **special)
    classifier = GPT2ForSequenceClassification(config).eval()
    scorer = RewardModel(classifier, letters, label="good")
    with torch.no_grad():
        odds = classifier(input_ids=torch.tensor([[1, 3, 4, 2]])).logits[0].softmax(0)
    assert scores(scorer, ["a"], ["b"]) == pytest.approx([float(torch.log(odds[2] / (1 - odds[2])))], abs=1e-5)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
@pytest.mark.parametrize("encoder", [False, True])
def test_an_output_of_independent_ones_is_the_score_itself(letters: Any, encoder: bool, problem: str) -> None:
    """Log-odds against outputs that do not exclude it are another number, and here even another order."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    own: dict[str, Any] = {"id2label": {0: "kind", 1: "short", 2: "true"}, "pad_token_id": 0, "initializer_range": 1.0}
    if encoder:
        config = BertConfig(vocab_size=7, max_position_embeddings=32, problem_type=problem, **own, **SIZES)
        classifier: Any = BertForSequenceClassification(config).eval()
    else:
        own |= {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
        classifier = GPT2ForSequenceClassification(GPT2Config(vocab_size=7, problem_type=problem, **own)).eval()
    scorer = RewardModel(classifier, letters, label="short")
    rows = scorer.encode(PROMPTS, RESPONSES)
    with torch.no_grad():
        outputs = torch.cat([classifier(input_ids=torch.tensor([row])).logits for row in rows])
    expected = outputs[:, 1]
    assert scores(scorer, PROMPTS, RESPONSES) == pytest.approx(expected.tolist(), abs=1e-4)
    assert f"'short' ({problem})" in scorer.words()
    classifier.config.problem_type = None
    exclusive = RewardModel(classifier, letters, label="short")
    odds = outputs.log_softmax(1)[:, 1] - torch.log1p(-outputs.softmax(1)[:, 1])
    assert scores(exclusive, PROMPTS, RESPONSES) == pytest.approx(odds.tolist(), abs=1e-3)
    assert expected.argsort().tolist() != odds.argsort().tolist()
    assert re.match("the log-odds .*'short' .* 2 other", exclusive.words())


@pytest.mark.parametrize("types", [1, 2])
def test_a_pair_is_read_in_the_tokenizers_pair_form_with_its_token_types(letters: Any, types: int) -> None:
    """A classifier of pairs tells the second text by its separator, and by token types where it has such."""
    from tokenizers import processors
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "num_labels": 1, "max_position_embeddings": 12, "type_vocab_size": types}
    encoder = BertForSequenceClassification(BertConfig(**sizes, pad_token_id=0, initializer_range=1.0, **SIZES)).eval()
    tokenizer = copy.deepcopy(letters)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    scorer = RewardModel(encoder, tokenizer, form=TextFormat(pair=True))
    rows = {("a", "bc"): ([1, 3, 2, 4, 5, 2], 3), ("", "d"): ([1, 2, 6, 2], 2), ("cc", ""): ([1, 5, 5, 2, 2], 4)}
    prompts, responses = zip(*rows, strict=True)
    assert scorer.encode(prompts, responses) == [row for row, _ in rows.values()]
    with torch.no_grad():
        expected = []
        for row, first in rows.values():
            kinds = torch.tensor([[0] * first + [min(1, types - 1)] * (len(row) - first)])
            expected.append(float(encoder(input_ids=torch.tensor([row]), token_type_ids=kinds).logits))
    assert scores(scorer, list(prompts), list(responses)) == pytest.approx(expected, abs=1e-5)
    glued = RewardModel(encoder, tokenizer)
    assert scores(glued, ["a"], ["bc"]) != pytest.approx(expected[:1], abs=1e-2)
    (long,) = scorer.encode(["abcdabcdabcdabcd"], ["dd"])  # it loses the prompt's beginning
    assert long == [1, 4, 5, 6, 3, 4, 5, 6, 2, 6, 6, 2]
    assert scorer.has_types == (types == 2)


def test_a_decoder_reads_no_pairs(model: RewardModel) -> None:
    with pytest.raises(InputError, match=r"text_pair: .*GPT2ForSequenceClassification"):
        RewardModel(model.model, model.tokenizer, form=TextFormat(pair=True))


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(("named", "read"), [(None, 16), (12, 12), (500, 16)])
def test_a_roberta_reads_as_much_as_it_has_positions_for(letters: Any, named: int | None, read: int) -> None:
    """Its positions begin behind the pad id. It reads no more than its tokenizer's limit either."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    special = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    config = RobertaConfig(vocab_size=7, num_labels=1, max_position_embeddings=18, **special, **SIZES)
    tokenizer = copy.deepcopy(letters)
    if named is not None:
        tokenizer.model_max_length = named
    scorer = RewardModel(RobertaForSequenceClassification(config).eval(), tokenizer)
    assert [len(row) for row in scorer.encode(["ab", "abcd" * 9], ["c", "d"])] == [4, read]
    assert scorer.score(["ab", "abcd" * 9], ["c", "d"]).isfinite().all()


def test_an_encoder_brings_its_own_special_tokens(letters: Any) -> None:
    """It reads its first token, and text beyond its context loses its beginning."""
    from tokenizers import processors
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=7, num_labels=1, max_position_embeddings=6, pad_token_id=0, **SIZES)
    encoder = BertForSequenceClassification(config).eval()
    tokenizer = copy.deepcopy(letters)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    scorer = RewardModel(encoder, tokenizer)
    assert scorer.encode(["ab", "abcd"], ["c", "abcd"]) == [[1, 3, 4, 5, 2], [1, 3, 4, 5, 6, 2]]
    with torch.no_grad():
        expected = float(encoder(input_ids=torch.tensor([[1, 3, 4, 5, 2]])).logits)
    assert scores(scorer, ["ab", "abcd"], ["c", "abcd"])[0] == pytest.approx(expected, abs=1e-5)
