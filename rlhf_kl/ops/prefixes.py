"""Rows that begin alike, each beginning counted once: what a causal model says of one never depends on what follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Prefixes(NamedTuple):
    """The M distinct beginnings of some rows (B, L), each standing for the token that it ends with.

    Those of one row lie in order, so a token stands behind everything that it looks at.
    """

    shape: torch.Size  # (B, L)
    ids: Tensor  # (M,) long: the tokens
    positions: Tensor  # (M,) long: their columns
    places: Tensor  # (M,) long, into the B * L: where each stands first
    number: Tensor  # (B * L,) long: which of the M stands at a place; padding has the first's
    repeats: Tensor  # (R,) long, into the B * L: the places of tokens where one stands again

    @property
    def repeated(self) -> float:
        """Share of the tokens that only repeat, with all that stands before them, what another row has."""
        return len(self.repeats) / max(1, len(self.repeats) + len(self.ids))

    @property
    def common(self) -> int:
        """Tokens that all rows begin with."""
        rows = self.shape[0]
        at = torch.bincount(self.number[torch.cat([self.places, self.repeats])], minlength=len(self.ids))
        return int((at == rows).sum())


def find_prefixes(ids: Tensor, mask: Tensor) -> Prefixes:
    """The distinct beginnings of the rows of `ids` (B, L), padded on the right; `mask` (B, L) is True at real tokens.

    Sorted rows have what they share with any row before in common with their neighbour: so one comparison each.
    """
    device, (rows, length) = ids.device, ids.shape
    ids, mask = ids.cpu(), mask.cpu()
    known = ids.masked_fill(~mask, -1)
    lists = known.tolist()
    order = torch.tensor(sorted(range(rows), key=lists.__getitem__))
    ordered = known[order]
    again = torch.zeros_like(mask)
    again[1:] = ((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)).cumprod(1).bool()
    new = (ordered >= 0) & ~again
    count = (new.flatten().cumsum(0) - 1).view(rows, length)
    # Shared with the row above, which has it from the one above that: the last new one in the column.
    above = torch.where(new, count, 0).cummax(0).values
    number = torch.empty_like(above)
    number[order] = above.masked_fill(ordered < 0, 0)
    places = (order.unsqueeze(1) * length + torch.arange(length)).masked_select(new)
    first = torch.zeros(rows * length, dtype=torch.bool)
    first[places] = True
    repeats = (mask.flatten() & ~first).nonzero().squeeze(1)
    found = (ids.flatten()[places], places % length, places, number.flatten(), repeats)
    return Prefixes(torch.Size((rows, length)), *(x.to(device) for x in found))
