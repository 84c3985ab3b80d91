"""A reward that can be checked: does a review mention what its place is known for?"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_kl.builtin.parser import parse_response


def mentions(prompts: Sequence[str], responses: Sequence[str], known_for: Sequence[str]) -> list[float]:  # noqa: ARG001  every reward function gets prompts
    """1 where a well-formed sentence is about the noun in the prompt's column `known_for`, else 0."""
    return [
        float(any(noun in sentence.aspects for sentence in parse_response(response) if sentence.wellformed))
        for response, noun in zip(responses, known_for, strict=True)
    ]
