"""Rows of prompt and response laid side by side, and split into passes that hardly pad.

A causal model never looks to the right, so a row that starts at column 0 needs no attention mask: what stands
behind its last token changes nothing. Only the states that a response token was drawn from are ever read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# What a pass costs whatever its size, in tokens: as long as that is more, padding a row is cheaper.
PASS_OVERHEAD = {"cpu": 96, "cuda": 8192}
WORTH_SHARING = 0.25  # share of a batch's tokens that must repeat another row's prompt
KEYS_AND_VALUES = 4  # tokens of a copied prompt, which has keys and values only, that take the memory of one read


def pass_overhead(device: torch.device) -> int:
    """Tokens whose time a further pass takes on this device."""
    return PASS_OVERHEAD.get(device.type, PASS_OVERHEAD["cuda"])


class Packed(NamedTuple):
    """Some rows of a batch as one forward pass reads them, and where its N response tokens belong."""

    ids: Tensor  # (B', L) long: prompt and response without a gap from column 0 on
    states: Tensor  # (N,) long, into the B' * L positions: the state that each response token was drawn from
    places: Tensor  # (N,) long, into the B * T places of the whole batch's responses
    numbers: Tensor  # (N,) long: the same, counting the response tokens of the whole batch only
    prompts: SharedPrompts | None = None  # where several rows have the same prompt; `ids` are then responses


class SharedPrompts(NamedTuple):
    """The different prompts of a pass, each read once; `states` then count through a grid (B', T).

    Column t of the grid is the state that response token t was drawn from: of token 0 the prompt's last one. The
    pass's `ids` (B', T - 1) are the response tokens behind the prompts.
    """

    ids: Tensor  # (U, P) long, padded on the left
    mask: Tensor  # (U, P) bool
    copies: Tensor  # (B',) long: the prompt of each row


class Layout:
    """Where the tokens of a batch lie; works out every pass over it without asking the device."""

    def __init__(self, ids: Tensor, prompt_width: int, prompt_lengths: Tensor, response_lengths: Tensor) -> None:
        """`ids` (B, P + T): prompts padded on the left to P = `prompt_width`, responses on the right to T.

        `prompt_lengths` and `response_lengths` (B,) count real tokens.
        """
        self.ids, self.prompt_width = ids, prompt_width
        self.prompts, self.responses = prompt_lengths.cpu(), response_lengths.cpu()
        self.first = self.responses.cumsum(0) - self.responses  # number of each row's first response token
        # The last token is chosen but never read.
        self.lengths: list[int] = (self.prompts + self.responses - 1).clamp_min(1).tolist()
        self.tokens = int(self.responses.sum())

    @property
    def response_ids(self) -> Tensor:
        """(B, T) long."""
        return self.ids[:, self.prompt_width :]

    def pack(self, rows: Sequence[int]) -> Packed:
        """These rows as one pass."""
        picked, device = torch.as_tensor(rows), self.ids.device
        prompts, responses = self.prompts[picked], self.responses[picked]
        length = max(self.lengths[row] for row in rows)
        columns = torch.arange(length)
        source = (self.prompt_width - prompts).unsqueeze(1) + columns
        source.clamp_max_(self.ids.shape[1] - 1)
        owner, place = _response_tokens(responses)
        states = owner * length + prompts[owner] + place - 1
        places = picked[owner] * (self.ids.shape[1] - self.prompt_width) + place
        numbers = self.first[picked][owner] + place
        ids = self.ids[picked.to(device)].gather(1, source.to(device))
        return Packed(ids, states.to(device), places.to(device), numbers.to(device))

    @cached_property
    def same_prompt(self) -> list[int]:
        """For each row, the first row that has the same prompt."""
        ids = self.ids[:, : self.prompt_width].tolist()
        first: dict[tuple[int, tuple[int, ...]], int] = {}
        keys = [(length, tuple(row)) for length, row in zip(self.prompts.tolist(), ids, strict=True)]
        return [first.setdefault(key, row) for row, key in enumerate(keys)]

    def pack_shared(self, rows: Sequence[int]) -> Packed:
        """These rows as one pass that reads each different prompt once."""
        picked, device = torch.as_tensor(rows), self.ids.device
        firsts = list(dict.fromkeys(self.same_prompt[row] for row in rows))
        copies = torch.tensor([firsts.index(self.same_prompt[row]) for row in rows], device=device)
        lengths, responses = self.prompts[firsts], self.responses[picked]
        width, length = int(lengths.max()), int(responses.max())
        mask = torch.arange(width) >= (width - lengths).unsqueeze(1)
        prompts = SharedPrompts(
            self.ids[firsts, self.prompt_width - width : self.prompt_width], mask.to(device), copies
        )
        owner, place = _response_tokens(responses)
        states, places = owner * length + place, picked[owner] * self.response_ids.shape[1] + place
        numbers = self.first[picked][owner] + place
        ids = self.response_ids[picked.to(device), : length - 1]
        return Packed(ids, states.to(device), places.to(device), numbers.to(device), prompts)

    def passes(self, rows: Sequence[int], *, most_rows: int, most_tokens: int, share: bool = True) -> Iterator[Packed]:
        """The rows in passes of near-equal length: see `group_lengths`.

        Where rows have prompts in common and that spares enough, in passes that read each prompt once (`share`).
        """
        once = {self.same_prompt[row] for row in rows}
        repeated = sum(int(self.prompts[row]) for row in rows) - sum(int(self.prompts[row]) for row in once)
        if share and repeated > WORTH_SHARING * sum(self.lengths[row] for row in rows):
            for group in self._by_prompt(rows, most_rows=most_rows, most_tokens=most_tokens):
                yield self.pack_shared(group)
            return
        lengths = [self.lengths[row] for row in rows]
        overhead = pass_overhead(self.ids.device)
        for group in group_lengths(lengths, most_rows=most_rows, most_tokens=most_tokens, overhead=overhead):
            yield self.pack([rows[i] for i in group])

    def _by_prompt(self, rows: Sequence[int], *, most_rows: int, most_tokens: int) -> Iterator[list[int]]:
        """The rows in groups, those with the same prompt side by side."""
        group: list[int] = []
        prompts, longest, width = set[int](), 0, 0
        for row in sorted(rows, key=lambda row: (self.same_prompt[row], int(self.responses[row]))):
            mine = {self.same_prompt[row]}
            size = max(longest, int(self.responses[row]))
            wide = max(width, int(self.prompts[row]))
            tokens = len(prompts | mine) * wide + (len(group) + 1) * (size + wide // KEYS_AND_VALUES)
            if group and (len(group) >= most_rows or tokens > most_tokens):
                yield group
                group, prompts, longest, width = [], set(), 0, 0
                size, wide = int(self.responses[row]), int(self.prompts[row])
            group.append(row)
            prompts, longest, width = prompts | mine, size, wide
        if group:
            yield group


def _response_tokens(responses: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place in its row (N,) of every response token, from the lengths (B,)."""
    owner = torch.repeat_interleave(torch.arange(len(responses)), responses)
    return owner, torch.arange(len(owner)) - (responses.cumsum(0) - responses)[owner]


def text_layout(rows: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> Layout:
    """The layout of plain texts, whose tokens from `starts` (at least 1) on are the ones to score."""
    prompt, response = max(starts), max(len(row) - start for row, start in zip(rows, starts, strict=True))
    ids = torch.zeros(len(rows), prompt + response, dtype=torch.long)
    for line, row, start in zip(ids, rows, starts, strict=True):
        line[prompt - start : prompt - start + len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(row) for row in rows])
    return Layout(ids.to(device), prompt, torch.tensor(starts), lengths - torch.tensor(starts))


def pack_last(rows: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Texts as one pass that reads the state of each one's last token."""
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    states = (torch.arange(len(rows)) * ids.shape[1] + lengths - 1).to(device)
    return Packed(ids.to(device), states, states, states)


def group_lengths(lengths: Sequence[int], *, most_rows: int, most_tokens: int, overhead: int) -> list[list[int]]:
    """Indices of `lengths` in groups, shortest first, so that padded tokens plus `overhead` a group are fewest.

    A group has at most `most_rows` members and `most_tokens` padded tokens, but at least one member. Exact, by
    dynamic programming over the sorted lengths.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    best = [0.0] + [float("inf")] * len(order)  # cost of the first k
    start = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        for size in range(1, min(most_rows, end) + 1):
            if size > 1 and size * longest > most_tokens:
                break
            cost = best[end - size] + size * longest + overhead
            if cost < best[end]:
                best[end], start[end] = cost, end - size
    groups, end = [], len(order)
    while end:
        groups.append(order[start[end] : end])
        end = start[end]
    return groups[::-1]
