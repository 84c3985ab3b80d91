"""Prompts and responses as turns of a conversation, written with the tokenizer's chat template."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rlhf_kl.errors import InputError, nearest

if TYPE_CHECKING:  # it imports torch
    from rlhf_kl.types import Conversation, Prompt

OF_SYSTEM = ("system", "developer")  # roles of a message before the turns
SENTINEL = "a text that no template has"
# The role that a template writes, by tokenizer and what else decides it: it is found once, not for every row.
_ROLES: WeakKeyDictionary[Any, dict[str, str | None]] = WeakKeyDictionary()


def is_conversation(value: Any) -> bool:
    """Whether a column's value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def plain_text(prompt: Prompt) -> str:
    """The text of a prompt; of several turns it has one paragraph for each: "user: ..."."""
    return prompt if isinstance(prompt, str) else "\n\n".join(f"{role}: {content}" for role, content in prompt)


def turns_of(prompt: Prompt) -> Conversation:
    """The turns of a prompt."""
    return (("user", prompt),) if isinstance(prompt, str) else prompt


class Unusable(Exception):
    """A row that is left out, for the reason that is its text."""


def split_conversation(messages: Sequence[Mapping[str, Any]]) -> tuple[Prompt | None, str | None]:
    """The prompt before the last answer, and that answer; None for each that is missing.

    A single user turn is a plain text. A longer prompt has an optional message of the system, or of the developer (a
    newer word for it), then turns. Errors: Unusable for any other shape.
    """
    turns = [(str(message["role"]), _content(message)) for message in messages]
    roles = [role for role, _ in turns[turns[0][0] in OF_SYSTEM :]]  # without a system message
    in_turn = roles == ["user" if i % 2 == 0 else "assistant" for i in range(len(roles))]
    if not roles or not (in_turn or [role for role, _ in turns] == ["assistant"]):
        raise Unusable(f"roles out of turn: {', '.join(role for role, _ in turns)}")
    answer = turns[-1][1] if roles[-1] == "assistant" else None
    before = tuple(turns[: len(turns) - (answer is not None)])
    if not before:
        return None, answer
    return before[0][1] if [role for role, _ in before] == ["user"] else before, answer


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message: a text, or parts of text, which are joined."""
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    for part in parts:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"):
            raise Unusable("a message that is not text alone")
    if message.get("tool_calls"):
        raise Unusable("a tool call")
    return "".join(part["text"] for part in parts)


def chat_prompt(tokenizer: Any, prompt: Prompt, system: str | None, options: Mapping[str, Any]) -> str:
    """A prompt as the tokenizer's chat template writes it, up to where the answer begins.

    `system` comes first, unless a conversation has its own system message. `options`: variables of the template.
    Errors: InputError where the template leaves that message out.
    """
    turns = _turns(prompt, system)
    text = _apply(tokenizer, turns, options, answer=True)
    if _leaves_out(tokenizer, turns, options, answer=True):
        roles = dict.fromkeys((turns[0]["role"], "system"))
        raise InputError(f"chat template: it leaves out the message of a {' or '.join(roles)}")
    return text


def chat_exchange(tokenizer: Any, prompt: Prompt, response: str, system: str | None, options: Mapping[str, Any]) -> str:
    """Prompt and answer as the tokenizer's chat template writes them; without a system message that it refuses."""
    turns = [*_turns(prompt, system), {"role": "assistant", "content": response}]
    try:
        return _apply(tokenizer, turns, options, answer=False)
    except InputError:
        if not _leaves_out(tokenizer, turns, options, answer=False):
            raise
        return _apply(tokenizer, turns[1:], options, answer=False)


def exchange_lacks_system(tokenizer: Any, prompt: Prompt, system: str | None) -> bool:
    """Whether the chat template leaves the system message of this prompt, or else `system`, out of an exchange."""
    return _leaves_out(tokenizer, _turns(prompt, system), {}, answer=False)


def opening(tokenizer: Any, system: str | None, options: Mapping[str, Any]) -> str:
    """What a prompt has behind the text that the template writes before an answer: `<think>` of a model that reasons.

    A policy is asked with it, so it is no part of its responses.
    """
    asked, exchange = (
        chat_prompt(tokenizer, "a", system, options),
        chat_exchange(tokenizer, "a", SENTINEL, system, options),
    )
    before, found, _ = exchange.rpartition(SENTINEL)
    return asked[len(before) :] if found and asked.startswith(before) else ""


def without_opening(response: str, opened: str) -> str | None:
    """A response without the `opening` that it repeats, whatever line breaks surround it; None if it does not."""
    word, text = opened.strip(), response.lstrip()
    if not word or not text.startswith(word):
        return None
    return text.removeprefix(word).removeprefix(opened[len(opened.rstrip()) :])


def require_chat_template(tokenizer: Any, where: str, options: Iterable[str] = ()) -> None:
    """Errors: InputError where the tokenizer has no chat template, or where that reads no variable of these names."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise InputError(f"{where}: the tokenizer has no chat template")
    words = set(re.findall(r"[^\W\d]\w*", str(template)))
    problems = [
        f"data.chat_options.{name}: the chat template reads no variable of this name"
        + (f"; did you mean {close}?" if (close := nearest(name, words)) else "")
        for name in options
        if name not in words
    ]
    if problems:
        raise InputError(*problems)


def _turns(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    turns = [{"role": role, "content": content} for role, content in turns_of(prompt)]
    own = system is None or turns[0]["role"] in OF_SYSTEM
    return turns if own else [{"role": "system", "content": str(system)}, *turns]


def _apply(tokenizer: Any, messages: list[dict[str, str]], options: Mapping[str, Any], *, answer: bool) -> str:
    """Messages in the words of the template; a developer's is the system's where the template does not write it."""
    first, *rest = messages
    if first["role"] in OF_SYSTEM:
        role = _role_in_front(tokenizer, first["role"], options, answer=answer)
        messages = [first | {"role": role or "system"}, *rest]
    return _written(tokenizer, messages, options, answer=answer)


def _leaves_out(tokenizer: Any, messages: list[dict[str, str]], options: Mapping[str, Any], *, answer: bool) -> bool:
    role = messages[0]["role"]
    return role in OF_SYSTEM and _role_in_front(tokenizer, role, options, answer=answer) is None


def _role_in_front(tokenizer: Any, role: str, options: Mapping[str, Any], *, answer: bool) -> str | None:
    """The role in which the template writes such a message in front of the turns; None where in none."""
    known = _ROLES.setdefault(tokenizer, {})
    key = repr((tokenizer.chat_template, role, options, answer))
    if key not in known:
        tries = (tried for tried in (role, "system") if _writes(tokenizer, tried, options, answer=answer))
        known[key] = next(tries, None)
    return known[key]


def _writes(tokenizer: Any, role: str, options: Mapping[str, Any], *, answer: bool) -> bool:
    """Whether the content of a message in front changes the text; not where the template refuses the message."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}][: 1 if answer else 2]
    texts = set[str]()
    for content in ("b", "c"):
        with contextlib.suppress(InputError):
            texts.add(_written(tokenizer, [{"role": role, "content": content}, *turns], options, answer=answer))
    return len(texts) > 1


def _written(tokenizer: Any, messages: list[dict[str, str]], options: Mapping[str, Any], *, answer: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer, **options)
    except Exception as error:  # the template is other people's code
        raise InputError(f"chat template: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return text
