"""Rows of prompt and response without gaps, split into passes with little padding.

A causal model does not see later tokens, so a row that starts at column 0 needs no attention mask: padding after its
last token changes nothing. Only the states that a response token was drawn from are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

# Fixed cost of a pass, in tokens: padding a row is cheaper than another pass if it adds fewer tokens.
PASS_OVERHEAD = {"cpu": 96, "cuda": 8192}
WORTH_SHARING = 0.1  # share of a batch's tokens that must repeat another row's prompt
LEAST_SPARED = {
    "cpu": 0,
    "cuda": PASS_OVERHEAD["cuda"],
}  # tokens that sharing spares: prompts are read in a pass before
CPU = torch.device("cpu")
KEYS_AND_VALUES = 4  # tokens of a copied prompt (keys and values only) that take the memory of one computed token


def send(device: torch.device, *columns: Tensor) -> list[Tensor]:
    """Columns of one type on the device: by one transfer to a GPU, for which the host does not wait."""
    if device.type != "cuda":
        return [x.to(device) for x in columns]
    joined = torch.cat([x.flatten() for x in columns]).pin_memory().to(device, non_blocking=True)
    parts = joined.split([x.numel() for x in columns])
    return [part.view(x.shape) for part, x in zip(parts, columns, strict=True)]


def pass_overhead(device: torch.device) -> int:
    """Cost of another pass on this device, in tokens."""
    return PASS_OVERHEAD.get(device.type, PASS_OVERHEAD["cuda"])


class Packed(NamedTuple):
    """Some rows of a batch for one forward pass, and the places of their N response tokens."""

    ids: Tensor  # (B', L) long: prompt and response without a gap from column 0 on
    states: Tensor  # (N,) long, into the B' * L positions: the state that each response token was drawn from
    places: Tensor  # (N,) long, into the B * T places of the whole batch's responses
    numbers: Tensor  # (N,) long: the same, counting the response tokens of the whole batch only
    prompts: SharedPrompts | None = None  # if several rows have the same prompt; `ids` are then responses

    def unshared(self) -> Packed:
        """The same states in whole rows, each with its own prompt."""
        if self.prompts is None:
            return self
        prompts = self.prompts.without_prefix()
        ids = torch.cat([prompts.ids[prompts.copies], self.ids], 1)
        lengths = prompts.mask.sum(1)[prompts.copies]
        source = torch.arange(ids.shape[1], device=ids.device) + (prompts.ids.shape[1] - lengths).unsqueeze(1)
        ids = ids.gather(1, source.clamp_max(ids.shape[1] - 1))
        row, token = self.states // (self.ids.shape[1] + 1), self.states % (self.ids.shape[1] + 1)
        return Packed(ids, row * ids.shape[1] + lengths[row] - 1 + token, self.places, self.numbers)


class SharedPrompts(NamedTuple):
    """Prompts without repeated computation: the common prefix once, then the rest of each different prompt once.

    In a pass with them, `states` are places in a grid (B', T). Column t is the state that response token t was drawn
    from; for token 0 it is the prompt's last state. The pass's `ids` (B', T - 1) are the response tokens.
    """

    prefix: Tensor  # (C,) long: the common prefix of all prompts
    ids: Tensor  # (U, R) long: the rest of each different prompt, padded on the left
    mask: Tensor  # (U, R) bool
    copies: Tensor  # (B',) long: the prompt of each row

    def without_prefix(self) -> SharedPrompts:
        """The same, every different prompt whole."""
        common = len(self.prefix)
        rest = self.ids.shape[1]
        padding = rest - self.mask.sum(1, keepdim=True)
        source = torch.arange(common + rest, device=self.ids.device) - padding  # place in a row without padding
        columns = torch.where(source < common, source, source + padding).clamp_min(0)
        ids = torch.cat([self.prefix.expand(len(self.ids), -1), self.ids], 1).gather(1, columns)
        return SharedPrompts(self.prefix[:0], ids, source >= 0, self.copies)


class DifferentPrompts:
    """The prompts of some rows by number, in the order of their tokens: long prompts are compared once."""

    def __init__(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """`prompts`: the tokens of each row's prompt."""
        different = sorted(set(prompts))
        number = {prompt: i for i, prompt in enumerate(different)}
        self.numbers = [number[prompt] for prompt in prompts]  # of each row's prompt
        self.lengths = [len(prompt) for prompt in different]  # by number, in tokens
        self.same = [same_tokens(a, b) for a, b in pairwise(different)]  # as the next prompt

    def common(self, numbers: Collection[int], device: torch.device) -> int:
        """Tokens of the common prefix of these prompts to be read once; 0 if that saves nothing."""
        lengths = [self.lengths[number] for number in numbers]
        common = min([*self.same[min(numbers) : max(numbers)], min(lengths) - 1])
        return common if common * (len(lengths) - 1) > pass_overhead(device) else 0


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two rows of tokens."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def share_prompts(prompts: Sequence[tuple[int, ...]], device: torch.device) -> SharedPrompts:
    """The prompts of some rows, in the rows' order: without repeats, `copies` is 0, 1, 2, ..."""
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}
    common = DifferentPrompts(prompts).common(range(len(number)), device)
    rests = [prompt[common:] for prompt in number]
    width = max(map(len, rests))
    prefix, ids, mask, copies = send(
        device,
        torch.tensor(prompts[0][:common], dtype=torch.long),
        torch.tensor([[0] * (width - len(rest)) + list(rest) for rest in rests]),
        torch.tensor([[0] * (width - len(rest)) + [1] * len(rest) for rest in rests]),
        torch.tensor([number[prompt] for prompt in prompts]),
    )
    return SharedPrompts(prefix, ids, mask.bool(), copies)


class Layout:
    """Positions of the tokens of a batch; plans every pass over it without reading from the device."""

    def __init__(
        self,
        ids: Tensor,
        prompt_width: int,
        prompt_lengths: Tensor,
        response_lengths: Tensor,
        device: torch.device = CPU,
        begin: int = 0,
    ) -> None:
        """`ids` (B, P + T): prompts padded on the left to P = `prompt_width`, responses on the right to T.

        `prompt_lengths` and `response_lengths` (B,) count real tokens. `device`: of the passes; all else is on the CPU.
        `begin`: the row whose first response token has number 0.
        """
        self.ids, self.prompt_width, self.device = ids, prompt_width, device
        self.prompts, self.responses = prompt_lengths, response_lengths
        self.first = self.responses.cumsum(0) - self.responses  # number of each row's first response token
        self.first -= int(self.first[begin])
        # The last token is drawn but never read.
        self.lengths: list[int] = (self.prompts + self.responses - 1).clamp_min(1).tolist()
        self.tokens = int(self.responses.sum())

    @property
    def response_ids(self) -> Tensor:
        """(B, T) long."""
        return self.ids[:, self.prompt_width :]

    @cached_property
    def chosen(self) -> Tensor:
        """The same as (B * T,), on the device of the passes."""
        return send(self.device, self.response_ids.flatten())[0]

    def grid(self, figures: Tensor) -> Tensor:
        """Figures (n, N) of the response tokens as (n, B, T) on the CPU; zeros in padding."""
        grid = torch.zeros(len(figures), *self.response_ids.shape)
        grid[:, torch.arange(grid.shape[2]) < self.responses.unsqueeze(1)] = figures.cpu()
        return grid

    def pack(self, rows: Sequence[int]) -> Packed:
        """These rows as one pass."""
        picked = torch.as_tensor(rows)
        prompts, responses = self.prompts[picked], self.responses[picked]
        length = max(self.lengths[row] for row in rows)
        columns = torch.arange(length)
        source = (self.prompt_width - prompts).unsqueeze(1) + columns
        source.clamp_max_(self.ids.shape[1] - 1)
        owner, place = _response_tokens(responses)
        states = owner * length + prompts[owner] + place - 1
        return self._sent(self.ids[picked].gather(1, source), states, picked[owner], place)

    def _sent(
        self, ids: Tensor, states: Tensor, rows: Tensor, place: Tensor, prompts: SharedPrompts | None = None
    ) -> Packed:
        """A pass whose tokens have these rows and places in their row (N,)."""
        columns = ids, states, rows * self.response_ids.shape[1] + place, self.first[rows] + place
        ids, states, places, numbers = send(self.device, *columns)
        return Packed(ids, states, places, numbers, prompts)

    @cached_property
    def prompt_tokens(self) -> list[tuple[int, ...]]:
        """The prompt of each row."""
        ids = self.ids[:, : self.prompt_width].tolist()
        return [tuple(row[self.prompt_width - n :]) for row, n in zip(ids, self.prompts.tolist(), strict=True)]

    @cached_property
    def different_prompts(self) -> DifferentPrompts:
        """The prompts of the rows, each once."""
        return DifferentPrompts(self.prompt_tokens)

    def pack_shared(self, rows: Sequence[int]) -> Packed:
        """These rows as one pass that reads the common parts of their prompts once."""
        picked = torch.as_tensor(rows)
        responses = self.responses[picked]
        length = int(responses.max())
        owner, place = _response_tokens(responses)
        prompts = share_prompts([self.prompt_tokens[row] for row in rows], self.device)
        ids = self.response_ids[picked, : length - 1]
        return self._sent(ids, owner * length + place, picked[owner], place, prompts)

    def passes(self, rows: Sequence[int], *, most_rows: int, most_tokens: int, share: bool = True) -> Iterator[Packed]:
        """The rows in passes: in those of `groups`, or where the prompts have enough in common, which reads it once."""
        if share and len(rows):
            prompts = self.different_prompts
            numbers = [prompts.numbers[row] for row in rows]
            common = prompts.common(set(numbers), self.device)
            read = common + sum(prompts.lengths[number] - common for number in set(numbers))
            every = sum(prompts.lengths[number] for number in numbers)
            worth = WORTH_SHARING * sum(self.lengths[row] for row in rows)
            if every - read > max(worth, LEAST_SPARED.get(self.device.type, LEAST_SPARED["cuda"])):
                for group in group_lengths(
                    self.responses[list(rows)].tolist(),
                    most_rows=most_rows,
                    most_tokens=most_tokens - common,
                    overhead=pass_overhead(self.device) + common,
                    prompts=[(number, prompts.lengths[number] - common) for number in numbers],
                ):
                    yield self.pack_shared([rows[i] for i in group])
                return
        yield from map(self.pack, self.groups(rows, most_rows=most_rows, most_tokens=most_tokens))

    def groups(self, rows: Sequence[int], *, most_rows: int, most_tokens: int) -> list[list[int]]:
        """The rows in groups of near-equal length: see `group_lengths`."""
        lengths = [self.lengths[row] for row in rows]
        overhead = pass_overhead(self.device)
        groups = group_lengths(lengths, most_rows=most_rows, most_tokens=most_tokens, overhead=overhead)
        return [[rows[i] for i in group] for group in groups]


def split_groups(groups: Sequence[list[int]], count: int) -> list[list[int]]:
    """`count` groups, which are at least as many as there are, by halving the largest."""
    split = list(groups)
    while len(split) < count:
        largest = max(split, key=len)
        split.remove(largest)
        split += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return split


def _response_tokens(responses: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place in its row (N,) of every response token, from the lengths (B,)."""
    owner = torch.repeat_interleave(torch.arange(len(responses)), responses)
    return owner, torch.arange(len(owner)) - (responses.cumsum(0) - responses)[owner]


def text_layout(rows: Sequence[Sequence[int]], starts: Sequence[int], device: torch.device) -> Layout:
    """The layout of plain texts, whose tokens from `starts` (at least 1) on are scored."""
    prompt, response = max(starts), max(len(row) - start for row, start in zip(rows, starts, strict=True))
    gaps = [(prompt - start, response + start - len(row)) for row, start in zip(rows, starts, strict=True)]
    ids = torch.tensor([[0] * left + [*row] + [0] * right for row, (left, right) in zip(rows, gaps, strict=True)])
    lengths = torch.tensor([len(row) for row in rows])
    return Layout(ids, prompt, torch.tensor(starts), lengths - torch.tensor(starts), device)


def idle_pass(device: torch.device) -> Packed:
    """A pass over one token that reads no state: for a process that only has to take part."""
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    return Packed(nothing.new_zeros(1, 1), nothing, nothing, nothing)


def pack_last(rows: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Texts as one pass that reads the state of each one's last token."""
    width = max(map(len, rows))
    ids, states = send(
        device,
        torch.tensor([[*row] + [0] * (width - len(row)) for row in rows]),
        torch.tensor([i * width + len(row) - 1 for i, row in enumerate(rows)]),
    )
    return Packed(ids, states, states, states)


def group_lengths(
    lengths: Sequence[int],
    *,
    most_rows: int,
    most_tokens: int,
    overhead: int,
    prompts: Sequence[tuple[int, int]] | None = None,
) -> list[list[int]]:
    """Indices of `lengths` in groups, shortest first, with the fewest tokens, padding included, plus `overhead` each.

    A group has at most `most_rows` members and `most_tokens` tokens, but at least one member. `prompts`: number and
    length of what stands before each one; a group reads equal ones once, and copies their keys and values. Exact, by
    dynamic programming over the sorted lengths.
    """
    before = prompts or [(0, 0)] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], before[i]))
    best = [0.0] + [float("inf")] * len(order)  # cost of the first k
    start = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        widest = 0
        different = set[int]()
        for size in range(1, min(most_rows, end) + 1):
            number, width = before[order[end - size]]
            different.add(number)
            widest = max(widest, width)
            tokens = len(different) * widest + size * longest
            if size > 1 and tokens + size * (widest // KEYS_AND_VALUES) > most_tokens:
                break
            cost = best[end - size] + tokens + overhead
            if cost < best[end]:
                best[end], start[end] = cost, end - size
    groups = []
    end = len(order)
    while end:
        groups.append(order[start[end] : end])
        end = start[end]
    return groups[::-1]
