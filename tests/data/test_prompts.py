from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from rlhf_kl.config.schema.training import PromptsSection
from rlhf_kl.data.chat import chat_exchange, opening, plain_text, without_opening
from rlhf_kl.data.prepare import prepare_prompts
from rlhf_kl.data.prompts import PromptStream
from rlhf_kl.data.rows import PromptRow
from rlhf_kl.models.scratch import train_tokenizer
from rlhf_kl.training.resolved import decided_chat
from rlhf_kl.types import Prompt, Prompts
from tests.made import Make, numbers, problem

TEXTS = ["a", "ab", "abc", "abcd", "b", "bb", "bbb"]


@pytest.fixture
def stream(prompts_of: Make) -> Make:
    return lambda seed=0: PromptStream(prompts_of(*TEXTS), 3, seed)


def test_every_prompt_comes_once_before_any_comes_again(stream: Make) -> None:
    prompts = stream()
    seen = [text for step in range(1, 8) for text in prompts.batch(step).texts]
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == sorted(TEXTS)
    assert seen[:7] != seen[7:14]


def test_a_batch_depends_on_seed_and_step_alone(stream: Make) -> None:
    forward = [stream().batch(step).texts for step in (1, 2, 5)]
    one = stream()
    assert [one.batch(step).texts for step in (5, 2, 1)] == forward[::-1]
    assert stream(seed=1).batch(1).texts + stream(seed=1).batch(2).texts != (forward[0] + forward[1])


def prepare(prompts: Sequence[Prompt], tokenizer: Any, room: int | None, **form: Any) -> tuple[Prompts, str]:
    """`form`: as in a config's `data`."""
    chat, options = form.pop("chat_template", False), form.pop("chat_options", {})
    rows = [PromptRow(plain_text(each), {}, () if isinstance(each, str) else each) for each in prompts]
    return prepare_prompts(rows, tokenizer, room, chat=chat, options=options, **form)


def test_prompts_that_cannot_be_answered_are_left_out_and_counted(letters: Any) -> None:
    prompts, note = prepare(["ab", "", "abcd", " \n", "abc"], letters, 4)
    assert prompts.texts == ["ab", "abc"]
    assert prompts.ids == [[1, 3, 4], [1, 3, 4, 5]]
    assert numbers(note)[:5] == [3, 5, 2, 1, 4]  # of five; empty; longer than the four tokens
    assert prepare(["ab", "abc"], letters, 4)[1] == ""
    assert prepare(["ab" * 99], letters, None)[1] == ""


def test_where_none_is_left_the_reasons_are_given(letters: Any) -> None:
    assert numbers(problem(prepare, ["", "abcd", "abcde"], letters, 4))[:3] == [3, 1, 2]
    assert "rollout.max_new_tokens" in problem(prepare, ["ab"], letters, 0)


def test_prompts_of_which_the_tokenizer_makes_no_tokens() -> None:
    vocabulary = {token: i for i, token in enumerate(["<bos>", "<eos>", "a", "b"])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    prompts, note = prepare(["ab", "\u6587", "<bos>"], tokenizer, None)
    assert prompts.ids == [[0, 2, 3], [0]]  # a bos that is written is a prompt
    assert numbers(note) == [1, 3, 1]
    assert numbers(problem(prepare, ["\u6587", "-"], tokenizer, 9)) == [2, 2]


def test_only_the_first_tokens_of_a_prompt(letters: Any) -> None:
    prompts, _ = prepare(["abcd", "d", "dcba"], letters, 6, first_tokens=2)
    assert prompts.texts == ["ab", "d", "dc"]
    assert prompts.ids == [[1, 3, 4], [1, 6], [1, 6, 5]]


def test_the_first_tokens_end_with_a_whole_character() -> None:
    """A cut through one once made a prompt end in a character that it never had, and in more tokens than asked for."""
    tokenizer = train_tokenizer(["abc"], 259, 64)  # bytes
    cut, _ = prepare(["ab\u6211c", "\u6211\u6211", "ab\ufffdc"], tokenizer, None, first_tokens=5)
    assert cut.texts == ["ab\u6211", "\u6211", "ab\ufffd"]
    cut, _ = prepare(["ab\u6211c", "\u6211\u6211"], tokenizer, None, first_tokens=4)
    assert cut.texts == ["ab", "\u6211"]


CHAT = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}d{% endif %}"


def test_a_prompt_as_a_turn_of_a_chat(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = CHAT
    prompts, _ = prepare(["ab"], chatty, 10, chat_template=True, system="c")
    assert prompts.texts == ["ab"]  # what a reward function sees
    assert prompts.ids == [[5, 2, 3, 4, 2, 6]]  # c, eos, a, b, eos, d: a bos only where the template writes one
    assert "no chat template" in problem(prepare, ["ab"], letters, 10, chat_template=True)
    chatty.chat_template = "{{ raise_exception('no system') }}"
    assert "no system" in problem(prepare, ["ab"], chatty, 10, chat_template=True)


def test_auto_uses_the_template_for_conversations_where_there_is_one(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = CHAT
    text, talk = PromptRow("ab", {}), PromptRow("ab", {}, (("user", "ab"),))
    several = PromptRow("abc", {}, (("user", "a"), ("assistant", "b"), ("user", "c")))
    plain, turn = [1, 3, 4], [3, 4, 2, 6]
    form, system = (PromptsSection(prompts="p.jsonl", system=system) for system in (None, "c"))
    assert decided_chat(form, [talk, text], chatty)
    assert prepare_prompts([talk, text], chatty, 20, chat=True)[0].ids == [turn, turn]
    assert not decided_chat(form, [text], chatty)
    never = form.model_copy(update={"chat_template": False})
    assert not decided_chat(never, [talk], chatty)
    assert not decided_chat(form, [talk, several], letters)
    prompts, note = prepare_prompts([talk, several], letters, 20, chat=False)
    assert (prompts.ids, numbers(note)) == ([plain], [1, 2, 1])
    assert decided_chat(system, [talk], chatty)
    assert "data.system" in problem(decided_chat, system, [talk], letters)


def test_variables_of_a_chat_template(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "<bos>" + CHAT + "{% if enable_thinking is defined and not enable_thinking %}cc{% endif %}"
    assert prepare(["a"], chatty, 10, chat_template=True)[0].ids == [[1, 3, 2, 6]]
    quick, _ = prepare(["a"], chatty, 10, chat_template=True, chat_options={"enable_thinking": False})
    assert quick.ids == [[1, 3, 2, 6, 5, 5]]
    chat: Any = (prepare, ["a"], chatty, 10)
    words = problem(*chat, chat_template=True, chat_options={"enable_thinkin": False})
    assert "data.chat_options.enable_thinkin: " in words
    assert "did you mean enable_thinking?" in words
    assert "chat template: TypeError" in problem(*chat, chat_template=True, chat_options={"messages": []})


def test_several_turns_in_the_words_of_a_chat_template(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = CHAT
    several = (("user", "a"), ("assistant", "b"), ("user", "c"))
    own = (("system", "d"), ("user", "a"))
    prompts, _ = prepare([several, own], chatty, 20, chat_template=True, system="c")
    assert prompts.texts == ["user: a\n\nassistant: b\n\nuser: c", "system: d\n\nuser: a"]
    # The configured system message, three turns, the answer's beginning; then one that has its own
    assert prompts.ids == [[5, 2, 3, 2, 4, 2, 5, 2, 6], [6, 2, 3, 2, 6]]
    assert "first_tokens" in problem(prepare, [several], chatty, 20, chat_template=True, first_tokens=2)


TURN = "{{ m['role'] }}:{{ m['content'] }};"
REFUSES = "{{ raise_exception('a role') }}"


@pytest.mark.parametrize(
    ("written", "role"),
    [
        (TURN, "developer"),
        ("{% if m['role'] == 'developer' %}" + REFUSES + "{% endif %}" + TURN, "system"),
        ("{% if m['role'] in ('system', 'user', 'assistant') %}" + TURN + "{% endif %}", "system"),
        ("{% if m['role'] in ('user', 'assistant') %}" + TURN + "{% endif %}", "developer or system"),
        ("{% if m['role'] not in ('user', 'assistant') %}" + REFUSES + "{% endif %}" + TURN, "a role"),
    ],
)
def test_a_developer_message_is_the_systems_where_the_template_does_not_write_it(
    letters: Any, written: str, role: str
) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "{% for m in messages %}" + written + "{% endfor %}"
    asked = (("developer", "a "), ("user", "b"))
    if " " in role:
        assert role in problem(prepare, [asked], chatty, None, chat_template=True)
        return
    prompts, _ = prepare([asked], chatty, None, chat_template=True, system="c")  # it has its own
    assert prompts.rendered == [f"{role}:a ;user:b;"]
    assert chat_exchange(chatty, asked, "d", None, {}) == f"{role}:a ;user:b;assistant:d;"


def test_a_system_message_that_the_template_leaves_out_is_told(letters: Any) -> None:
    """Of the config, or of a conversation: else the policy would be asked without it."""
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    told = problem(prepare, ["b"], chatty, None, chat_template=True, system="a")
    assert told.startswith("chat template: ")
    assert told.endswith("system")
    assert problem(prepare, [(("system", "a"), ("user", "b"))], chatty, None, chat_template=True) == told


def test_a_system_message_may_be_written_in_other_letters(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "{% for m in messages %}{{ m['content'] | upper }};{% endfor %}"
    assert prepare(["b"], chatty, None, chat_template=True, system="a")[0].rendered == ["A;B;"]


def test_a_template_that_asks_only_behind_a_user_writes_an_exchange(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    last = "messages[-1]['role'] == 'assistant'"
    refuses = "{% if add_generation_prompt and " + last + " %}{{ raise_exception('last must be user') }}{% endif %}"
    chatty.chat_template = refuses + "{% for m in messages %}" + TURN + "{% endfor %}"
    for role in ("system", "developer"):
        said = chat_exchange(chatty, ((role, "a"), ("user", "b")), "d", None, {})
        assert said == f"{role}:a;user:b;assistant:d;"


def test_a_template_is_probed_once_for_all_rows(letters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = "{% for m in messages %}" + TURN + "{% endfor %}"
    calls, write = [], chatty.apply_chat_template
    monkeypatch.setattr(chatty, "apply_chat_template", lambda *args, **more: calls.append(0) or write(*args, **more))
    prepare(["a"], chatty, None, chat_template=True, system="c")
    one = len(calls)
    prepare(["a", "b", "c"], chatty, None, chat_template=True, system="c")
    assert len(calls) - one == 3
    chatty.chat_template = "{% for m in messages[1:] %}" + TURN + "{% endfor %}"  # another template is another case
    assert "leaves out" in problem(prepare, ["a"], chatty, None, chat_template=True, system="c")


@pytest.mark.parametrize(
    ("header", "asked", "opened"),
    [
        ("", "", ""),
        ("b", "b", ""),
        ("b", "b<think>\n", "<think>\n"),
        ("b<think>\n\n</think>", "b<think>\n", ""),  # the template writes a thought of its own
        ("", "d", "d"),
    ],
)
def test_what_a_prompt_opens_is_what_the_template_writes_before_no_answer(
    letters: Any, header: str, asked: str, opened: str
) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}" + header + "{% endif %}{{ m['content'] }}<eos>"
        "{% endfor %}{% if add_generation_prompt %}" + asked + "{% endif %}"
    )
    assert opening(chatty, None, {}) == opened


def test_a_response_without_what_the_prompt_opens() -> None:
    for response in ("<think>\nso", "<think>so", "\n<think>\nso"):
        assert without_opening(response, "<think>\n") == "so"
    assert without_opening("<think>\n\nso", "<think>\n") == "\nso"
    assert without_opening("so", "<think>\n") is without_opening("so", "") is without_opening(" so", "\n") is None


def test_a_batch_knows_how_its_prompts_were_asked(letters: Any) -> None:
    chatty = copy.deepcopy(letters)
    chatty.chat_template = CHAT
    prompts, _ = prepare(["a", "b"], chatty, 10, chat_template=True, system="c")
    assert prompts.pick([1, 0, 1]).rendered == ["c<eos>b<eos>d", "c<eos>a<eos>d", "c<eos>b<eos>d"]
    assert prepare(["a", "b"], letters, 10)[0].pick([1]).rendered == []  # as its text is
