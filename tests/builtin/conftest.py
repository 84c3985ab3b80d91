from random import Random

import pytest

from rlhf_kl.builtin.generator import write_response
from rlhf_kl.builtin.grammar import openings


@pytest.fixture(scope="session")
def write_review():
    """A prompt and a response to it, in a mood drawn uniformly."""

    def write(rng: Random) -> tuple[str, str]:
        prompt = openings()[int(rng.random() * len(openings()))]
        return prompt, write_response(rng, prompt, rng.uniform(-1, 1))

    return write
