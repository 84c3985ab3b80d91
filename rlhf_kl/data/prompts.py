"""Prompts in an endless order that depends only on the seed and the step."""

from __future__ import annotations

from rlhf_kl.seeding import shuffled
from rlhf_kl.types import Prompts


class PromptStream:
    """Prompts in an endless order, shuffled anew in each pass: it depends only on the seed and the step."""

    def __init__(
        self, table: Prompts, batch_size: int, seed: int, samples: int = 1, longest: int | None = None
    ) -> None:
        """`samples`: responses to each prompt, neighbours in a batch; divides `batch_size`.

        `longest`: tokens of a prompt at most, where others than those of the table may come.
        """
        self.table, self.batch_size, self.seed, self.samples = table, batch_size, seed, samples
        self._longest = longest
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self.table)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self._longest or max(map(len, self.table.ids), default=0)

    def batch(self, step: int, offset: int = 0, rows: int | None = None) -> Prompts:
        """Prompts `offset` to `offset + rows` of the global batch of a step (from 1); of no prompts none."""
        if not len(self):
            return self.table
        start = (step - 1) * self.batch_size + offset
        places = range(start, start + (rows or self.batch_size))
        return self.table.pick([self._index(place // self.samples) for place in places])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self), self.seed, "prompts", epoch).tolist()
        return self._order[place]
