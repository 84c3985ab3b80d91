"""Rows that begin alike, each beginning counted once: what a causal model says of one never depends on what follows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """Where some of the beginnings stand in a grid of rows and columns, G places in all."""

    number: Tensor  # (G,) long: which one stands at a place; at padding any
    places: Tensor  # (n,) long: where each stands first
    repeats: Tensor  # (R,) long: the places where one stands again


class Prefixes(NamedTuple):
    """The M distinct beginnings of some rows (B, L), each standing for the token that it ends with.

    Those of one row lie in order, so a token stands behind everything that it looks at; those that all rows have
    come first.
    """

    shape: torch.Size  # (B, L)
    ids: Tensor  # (M,) long: the tokens
    positions: Tensor  # (M,) long: their columns
    common: int  # tokens that all rows begin with
    grid: Grid  # of all M in the B * L
    own: Grid  # of the others, counted from 0, in the B * (L - common) places behind those

    @property
    def repeated(self) -> float:
        """Share of the tokens that only repeat, with all that stands before them, what another row has."""
        repeats = len(self.grid.repeats)
        return repeats / max(1, repeats + len(self.ids))


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
    number[order] = above.masked_fill(ordered < 0, -1)
    grid = _grid(number, new, order, device)
    # The first of the sorted rows has them first, if all have: then they are new in no other.
    common = int(((new.sum(0) == 1) & mask.all(0)).cumprod(0).sum())
    positions = grid.places % length
    return Prefixes(
        torch.Size((rows, length)),
        ids.flatten()[grid.places.cpu()].to(device),
        positions,
        common,
        grid,
        _grid(number[:, common:] - common, new[:, common:], order, device) if common else grid,
    )


def _grid(number: Tensor, new: Tensor, order: Tensor, device: torch.device) -> Grid:
    """From the number at each place (B, L), negative at padding, and with rows in `order` whether it is new there."""
    columns = number.shape[1]
    first = torch.empty_like(new)
    first[order] = new
    places = (order.unsqueeze(1) * columns + torch.arange(columns)).masked_select(new)
    repeats = ((number >= 0) & ~first).flatten().nonzero().squeeze(1)
    return Grid(number.clamp_min(0).flatten().to(device), places.to(device), repeats.to(device))
