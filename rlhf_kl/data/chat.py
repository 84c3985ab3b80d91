"""Prompts as turns of a chat, in the words of the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_kl.errors import InputError

Messages = Sequence[Mapping[str, Any]]


def is_conversation(value: Any) -> bool:
    """Whether a column's value is a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def single_turn(messages: Messages) -> tuple[str, str | None] | None:
    """What the user says and what the assistant answers (None = nothing yet).

    None for a conversation of any other shape: several turns, a system message, content that is no text.
    """
    roles, contents = [m.get("role") for m in messages], [m.get("content") for m in messages]
    if roles not in (["user"], ["user", "assistant"]) or not all(isinstance(c, str) for c in contents):
        return None
    return str(contents[0]), str(contents[1]) if len(contents) > 1 else None


def chat_prompt(tokenizer: Any, prompt: str, system: str | None = None) -> str:
    """A prompt as the tokenizer's chat template writes it, up to where the answer begins."""
    return _apply(tokenizer, _turns(prompt, system), answer=True)


def chat_exchange(tokenizer: Any, prompt: str, response: str, system: str | None = None) -> str:
    """Prompt and answer as the tokenizer's chat template writes them."""
    return _apply(tokenizer, [*_turns(prompt, system), {"role": "assistant", "content": response}], answer=False)


def require_chat_template(tokenizer: Any, where: str) -> None:
    """Errors: InputError where the tokenizer brings no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{where}: the tokenizer has no chat template")


def _turns(prompt: str, system: str | None) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": prompt}]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def _apply(tokenizer: Any, messages: list[dict[str, str]], *, answer: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    except Exception as error:  # the template is somebody's code
        raise InputError(f"chat template: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    return text
