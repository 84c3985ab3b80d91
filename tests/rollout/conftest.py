from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlhf_kl.models.text import encode, pad
from rlhf_kl.types import PromptBatch


@pytest.fixture(scope="session")
def prompts_of(letters: Any) -> Callable[..., PromptBatch]:
    """`prompts_of("ab", "a")`: a left-padded batch."""

    def make(*texts: str) -> PromptBatch:
        ids, mask = pad([encode(letters, text) for text in texts], letters.pad_token_id, left=True)
        return PromptBatch(list(texts), ids, mask)

    return make
