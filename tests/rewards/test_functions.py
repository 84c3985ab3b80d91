from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_kl.data.chat import Conversation
from rlhf_kl.errors import InputError
from rlhf_kl.models import prefix_sharing
from rlhf_kl.models.actor_critic import freeze
from rlhf_kl.models.load import load_reward_model, load_tokenizer
from rlhf_kl.reward_functions import (
    ResponseTraits,
    RewardModel,
    ScoreShaping,
    TextFormat,
    WeightedSum,
    bind_reward,
    checked_scores,
    response_traits,
    text_format,
)

PROMPTS, RESPONSES = ["p", "q", "r"], ["first", "second", "third"]


def problem(reward: Callable[..., Any]) -> str:
    with pytest.raises(InputError) as caught:
        checked_scores(reward, PROMPTS, RESPONSES, "mine.py:score")
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith("reward mine.py:score: ")
    return str(caught.value)


def returns(value: Any) -> Callable[..., Any]:
    return lambda prompts, responses: value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high", True, [1.0]])
def test_a_score_that_is_no_finite_number_names_its_sample(value: Any) -> None:
    message = problem(returns([1.0, value, 2.0]))
    assert "'second'" in message
    assert repr(value) in message


def test_a_number_too_large_for_float32_names_its_sample() -> None:
    assert "'third'" in problem(returns([1.0, 2.0, 1e300]))


@pytest.mark.parametrize("value", [[1.0, 2.0], [1.0] * 4, []])
def test_too_few_or_too_many_scores(value: list[float]) -> None:
    assert f"returned {len(value)} scores for 3 responses" in problem(returns(value))


@pytest.mark.parametrize("value", [None, 3.0])
def test_something_that_is_no_list(value: Any) -> None:
    assert f"returned {type(value).__name__}, not one number per response" in problem(returns(value))


def test_a_table_of_scores_instead_of_a_column() -> None:
    problem(returns(torch.zeros(3, 2)))


def test_whatever_it_raises_is_told() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        return [1 / 0 for _ in responses]

    assert "raised ZeroDivisionError: division by zero" in problem(broken)
    assert "raised TypeError" in problem(lambda responses: [1.0])


def test_a_function_or_class_that_exits_does_not_end_the_program() -> None:
    def leaves(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        if RESPONSES[1] in responses:
            sys.exit(3)
        return [1.0] * len(responses)

    class Leaves:
        def __init__(self) -> None:
            sys.exit(3)

    for function in (leaves, bind_reward(leaves, {}, 5.0)):
        assert f"raised SystemExit: 3 on the response {RESPONSES[1]!r} to the prompt" in problem(function)
    with pytest.raises(InputError, match="reward Leaves: cannot be made: raised SystemExit: 3"):
        bind_reward(Leaves, {})


def test_a_generator_that_breaks_half_way() -> None:
    def broken(prompts: Sequence[str], responses: Sequence[str]) -> Any:
        yield 1.0
        raise KeyError("word")

    assert "raised KeyError" in problem(broken)


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.0, -3.5],
        (1, 2.0, -3.5),
        torch.tensor([1, 2.0, -3.5]),
        torch.tensor([1, 2.0, -3.5]).numpy(),
        [torch.tensor(1), torch.tensor(2.0), torch.tensor(-3.5)],
    ],
    ids=["list", "tuple", "tensor", "array", "scalars"],
)
def test_numbers_of_every_make_are_taken(value: Any) -> None:
    scores = checked_scores(returns(value), PROMPTS, RESPONSES, "x")
    assert scores.tolist() == [1.0, 2.0, -3.5]
    assert scores.dtype == torch.float32


def test_a_generator_is_taken_too() -> None:
    scores = checked_scores(lambda p, r: (float(len(x)) for x in r), PROMPTS, RESPONSES, "x")
    assert scores.tolist() == [5.0, 6.0, 5.0]


def test_functions_and_classes_get_their_options() -> None:
    def words(prompts: Sequence[str], responses: Sequence[str], goal: int = 5) -> list[float]:
        return [float(goal - len(response)) for response in responses]

    class Words:
        def __init__(self, goal: int) -> None:
            self.goal = goal

        def __call__(self, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
            return words(prompts, responses, self.goal)

    for made in (bind_reward(words, {"goal": 6}), bind_reward(Words, {"goal": 6})):
        assert made(PROMPTS, RESPONSES) == [1.0, 0.0, 1.0]


# ---- the scale of the score ----


def fit(scores: list[float], *, normalize: bool = True, **options: Any) -> ScoreShaping:
    return ScoreShaping(**options).fit(torch.tensor(scores), normalize=normalize)


def traits(ended: list[bool], lengths: list[int] | None = None, repeated: list[float] | None = None) -> ResponseTraits:
    rows = len(ended)
    return ResponseTraits(
        torch.tensor(ended), torch.tensor(lengths or [1] * rows), torch.tensor(repeated or [0.0] * rows)
    )


def test_reference_samples_get_mean_zero_and_spread_one() -> None:
    raw = [10.0, 14.0, 18.0, 22.0]
    shaped = fit(raw)(torch.tensor(raw), traits([True] * 4))
    assert float(shaped.mean()) == pytest.approx(0, abs=1e-6)
    assert float(shaped.std(correction=0)) == pytest.approx(1)


def test_clip_and_penalty_come_after_the_scale() -> None:
    shaping = fit([0.0, 10.0], clip=2.0, missing_eos_penalty=0.5)
    assert shaping(torch.tensor([5.0, 100.0, -100.0]), traits([True, True, False])).tolist() == [0.0, 2.0, -2.5]


def test_scores_may_be_left_as_they_are() -> None:
    shaping = fit([0.0, 10.0], normalize=False)
    assert shaping(torch.tensor([7.0]), traits([True])).tolist() == [7.0]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0, 1e6])
def test_a_constant_score_teaches_nothing(value: float, normalize: bool) -> None:
    with pytest.raises(InputError, match="constant"):
        fit([value] * 5, normalize=normalize)


def test_small_differences_are_no_constant() -> None:
    assert fit([1e-5, 2e-5]).std == pytest.approx(5e-6, rel=1e-3)


def test_its_state_makes_the_same_shaping() -> None:
    shaping = fit([0.0, 10.0], clip=2.0, missing_eos_penalty=0.5)
    assert ScoreShaping(**shaping.state_dict()) == shaping


def test_penalties_are_taken_off_by_name() -> None:
    shaping = fit([0.0, 10.0], missing_eos_penalty=0.5, length_penalty=0.01, repetition_penalty=2.0)
    found = traits([True, False], lengths=[10, 20], repeated=[0.25, 0.0])
    terms = shaping.penalties(found)
    assert {name: term.tolist() for name, term in terms.items()} == {
        "missing_eos": [0.0, 0.5],
        "length": pytest.approx([0.1, 0.2]),
        "repetition": [0.5, 0.0],
    }
    assert shaping(torch.tensor([5.0, 5.0]), found).tolist() == pytest.approx([-0.6, -0.7])
    assert fit([0.0, 10.0]).penalties(found) == {}


@pytest.mark.parametrize(
    ("tokens", "repeated"),
    [([1, 2, 3, 4, 5], 0.0), ([7, 7, 7, 7, 7], 2 / 3), ([1, 2, 3, 9, 1, 2, 3], 1 / 5), ([1, 2], 0.0), ([], 0.0)],
)
def test_a_run_of_three_tokens_that_comes_again_is_repeated(tokens: list[int], repeated: float) -> None:
    ids = torch.tensor([[*tokens, 7, 7, 7, 7]])  # padding is no part of it
    mask = torch.arange(ids.shape[1]).unsqueeze(0) < len(tokens)
    found = response_traits(ids, mask, torch.tensor([True]))
    assert found.lengths.tolist() == [len(tokens)]
    assert float(found.repeated) == pytest.approx(repeated)


def test_a_sum_of_scorers_that_misbehave_names_the_one() -> None:
    good, bad = returns([1.0, 2.0, 3.0]), returns([1.0])
    assert WeightedSum({"x": (2.0, good), "y": (-0.5, good)})(PROMPTS, RESPONSES) == [1.5, 3.0, 4.5]
    with pytest.raises(InputError, match="reward y: returned 1 scores"):
        WeightedSum({"x": (1.0, good), "y": (1.0, bad)})(PROMPTS, RESPONSES)
    with pytest.raises(InputError, match=r"range of float32; the largest of its terms: x 3, y 3e\+300"):
        WeightedSum({"x": (1.0, good), "y": (1e300, good)})(PROMPTS, RESPONSES)


def test_a_sum_says_what_each_term_adds() -> None:
    total, parts = WeightedSum({"x": (2.0, returns([1.0, 2.0, 3.0])), "y": (-1.0, returns([0.0, 1.0, 5.0]))}).score(
        PROMPTS, RESPONSES
    )
    assert total.tolist() == [2.0, 3.0, 1.0]
    assert {name: part.tolist() for name, part in parts.items()} == {"x": [2.0, 4.0, 6.0], "y": [0.0, -1.0, -5.0]}


# ---- reward models ----


@pytest.fixture
def model(tiny_reward_folder: Path) -> RewardModel:
    folder = str(tiny_reward_folder)
    return RewardModel(freeze(load_reward_model(folder)), load_tokenizer(folder))


def test_a_score_is_the_classifiers_logit_at_the_eos(model: RewardModel) -> None:
    ids = torch.tensor([[1, 3, 4, 5, 6, 2]])  # bos abcd eos
    with torch.no_grad():
        hidden = model.model.base_model(input_ids=ids).last_hidden_state[0, -1]
        expected = float(model.model.score(hidden))
    assert model(["ab"], ["cd"]) == pytest.approx([expected], abs=1e-5)
    assert model(["ab"], ["c"]) != pytest.approx([expected], abs=1e-5)


def test_batches_and_order_change_nothing(model: RewardModel, tiny_reward_folder: Path) -> None:
    prompts = ["a", "abcd", "bb", "d", "cab"]
    responses = ["b", "", "dcbadcba", "a", "cc"]
    together = model(prompts, responses)
    alone = [model([p], [r])[0] for p, r in zip(prompts, responses, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5)
    by_two = RewardModel(model.model, model.tokenizer, rows=2)
    assert by_two(prompts[::-1], responses[::-1]) == pytest.approx(together[::-1], abs=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_texts_that_begin_alike_are_scored_and_kept_as_ever(
    model: RewardModel, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """In passes of three, with the longest text between two others."""
    prompts, responses = ["abbaabba" + end for end in ("a", "cb", "", "d")], ["b", "dcbadcba", "a", ""]
    by_three = RewardModel(model.model, model.tokenizer, rows=3)
    if keep:
        by_three.keep_states()
    seen: list[int] = []
    by_three.trunk.ln_f.register_forward_hook(lambda *args: seen.append(args[2].shape[:-1].numel()))
    found = []
    for share in (math.inf, 0.0):
        monkeypatch.setitem(prefix_sharing.LAYING_OUT, "cpu", share)
        seen.clear()
        found.append((by_three(prompts, responses), by_three.read, sum(seen)))
    (whole, states, padded), (once, again, distinct) = found
    assert once == pytest.approx(whole, abs=1e-5)
    assert distinct < 0.75 * padded
    assert (states is None) == (again is None) == (not keep)
    for a, b in zip(states or [], again or [], strict=True):
        assert a.ids == b.ids
        torch.testing.assert_close(a.states[: len(a.ids)], b.states[: len(b.ids)], rtol=1e-4, atol=1e-5)


def test_trying_ways_leaves_the_pad_token_as_it_was(tiny_reward_folder: Path) -> None:
    classifier = load_reward_model(str(tiny_reward_folder))
    classifier.config.pad_token_id = 5
    RewardModel(classifier, load_tokenizer(str(tiny_reward_folder)))
    assert classifier.config.pad_token_id == 5


def test_a_head_that_wants_more_than_states_reads_whole_texts(tiny_reward_folder: Path) -> None:
    classifier = load_reward_model(str(tiny_reward_folder))
    own = classifier.score.forward

    def of_rows(states: torch.Tensor) -> torch.Tensor:
        rows, _, _ = states.shape
        return own(states).view(rows, -1, 1)

    classifier.score.forward = of_rows
    reward = RewardModel(classifier, load_tokenizer(str(tiny_reward_folder)))
    assert not reward.by_states
    assert reward(["ab"], ["cd"]) == pytest.approx(reward(["a"], ["bcd"]))


def test_a_text_beyond_the_context_keeps_its_end(model: RewardModel) -> None:
    long = "abcd" * 20
    (row,) = model.encode([long], ["dd"])
    assert len(row) == 32
    assert row[-3:] == [6, 6, 2]
    assert model([long], ["dd"]) == pytest.approx(model(["c" + long], ["dd"]), abs=1e-5)


@pytest.mark.parametrize("stand_in", ["eos_token", "bos_token"])
def test_a_pad_token_that_is_another_one_changes_no_score(
    model: RewardModel, tiny_reward_folder: Path, stand_in: str
) -> None:
    """transformers scores the last token that is not the pad id: with pad = eos never the EOS."""
    prompts, responses = ["a", "abcd", "bb"], ["b", "", "dcbadcba"]
    expected = model(prompts, responses)
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    tokenizer.pad_token = getattr(tokenizer, stand_in)
    again = RewardModel(load_reward_model(str(tiny_reward_folder)), tokenizer)
    assert again(prompts, responses) == pytest.approx(expected, abs=1e-6)


def test_a_classifier_may_end_on_the_text_itself(model: RewardModel, tiny_reward_folder: Path) -> None:
    folder = str(tiny_reward_folder)
    bare = RewardModel(load_reward_model(folder), load_tokenizer(folder), form=TextFormat(append_eos=False))
    assert bare.encode(["ab"], ["c"]) == [[1, 3, 4, 5]]
    with torch.no_grad():
        hidden = model.model.base_model(input_ids=torch.tensor([[1, 3, 4, 5]])).last_hidden_state[0, -1]
        assert bare(["ab"], ["c"]) == pytest.approx([float(model.model.score(hidden))], abs=1e-5)


def test_the_format_is_what_is_asked_for_then_what_the_folder_says(model: RewardModel) -> None:
    assert text_format(model.model) == TextFormat(chat=False, append_eos=True)
    model.model.config.rlhf_kl_format = {"chat": True, "append_eos": False}
    assert text_format(model.model) == TextFormat(chat=True, append_eos=False)
    assert text_format(model.model, chat=False, append_eos=True) == TextFormat(chat=False, append_eos=True)


def test_a_chat_format_reads_every_turn(tiny_reward_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_reward_folder))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    scorer = RewardModel(load_reward_model(str(tiny_reward_folder)), tokenizer, form=TextFormat(chat=True))
    said = Conversation([("user", "a"), ("assistant", "b"), ("user", "c")])
    assert scorer.encode([said, "d"], ["ab", "a"]) == [[1, 3, 2, 4, 2, 5, 2, 3, 4, 2], [1, 6, 2, 3, 2]]


def test_a_label_of_several_is_scored_by_its_odds(tiny_reward_folder: Path, letters: Any) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=7,
        n_embd=8,
        n_layer=1,
        n_head=1,
        n_positions=32,
        pad_token_id=0,
        id2label={0: "bad", 1: "so", 2: "good"},
    )
    classifier = GPT2ForSequenceClassification(config).eval()
    scorer = RewardModel(classifier, letters, label="good")
    with torch.no_grad():
        odds = classifier(input_ids=torch.tensor([[1, 3, 4, 2]])).logits[0].softmax(0)
    assert scorer(["a"], ["b"]) == pytest.approx([float(torch.log(odds[2] / (1 - odds[2])))], abs=1e-5)


def test_an_encoder_brings_its_own_special_tokens(letters: Any) -> None:
    """It reads its first token, and text beyond its context loses its beginning."""
    from tokenizers import processors
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        num_labels=1,
        max_position_embeddings=6,
        pad_token_id=0,
    )
    encoder = BertForSequenceClassification(config).eval()
    tokenizer = copy.deepcopy(letters)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    scorer = RewardModel(encoder, tokenizer)
    assert scorer.encode(["ab", "abcd"], ["c", "abcd"]) == [[1, 3, 4, 5, 2], [1, 3, 4, 5, 6, 2]]
    with torch.no_grad():
        expected = float(encoder(input_ids=torch.tensor([[1, 3, 4, 5, 2]])).logits)
    assert scorer(["ab", "abcd"], ["c", "abcd"])[0] == pytest.approx(expected, abs=1e-5)
