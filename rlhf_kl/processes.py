"""The processes that train one policy together; by default this one alone."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """One process of a group. Everything that crosses processes goes through here."""

    count: int = 1
    index: int = 0

    @property
    def writes(self) -> bool:
        """Whether this one writes the run's folder."""
        return self.index == 0

    def rows(self, total: int) -> slice:
        """Rows of a global batch of `total` that belong to this process."""
        share = total // self.count
        return slice(self.index * share, (self.index + 1) * share)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest value of each element over all processes."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The rows (first dimension) of all processes, in their order."""
        return x
