"""A GPT-2's layers by the compiled functions: a pass with its gradients, and decoding token by token."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from rlhf_kl.kernels.logits import ADDRESS, FLOATS, SIZE, address, check, compiled, head_logits, plain, threads

EMBEDDINGS = 2  # the first of the tensors, whose gradients are added up row by row


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, SIZE) for name in ("layers", "hidden", "inner", "heads")),
        ("eps", ADDRESS),
        ("scaling", ADDRESS),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, SIZE) for name in ("rows", "sequences", "states")),
        *((name, ADDRESS) for name in ("ids", "positions", "starts", "at")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("slots", SIZE), ("capacity", SIZE), ("keys", ADDRESS), ("values", ADDRESS)]


@dataclass(frozen=True)
class Weights:
    """A GPT-2's tensors in the order that the compiled functions read them, and what they need to know besides."""

    tensors: Sequence[Tensor]  # token and position embeddings, last norm; of each layer norm, qkv, out, norm, up, down
    heads: int
    eps: Sequence[float]  # of all norms
    scaling: Sequence[float]  # of each layer's attention scores

    @property
    def hidden(self) -> int:
        """Size of a hidden state."""
        return self.tensors[0].shape[1]

    @property
    def inner(self) -> int:
        """Width of the feed-forward part."""
        return self.tensors[12].shape[1]

    def fit(self, lanes: int) -> bool:
        """Whether compiled functions whose vectors have so many numbers can work with these tensors."""
        return (
            all(type(x) in (Tensor, Parameter) and plain(x) for x in self.tensors)
            and self.hidden % lanes == 0
            and self.inner % lanes == 0
            and self.inner >= self.hidden
            and self.hidden % self.heads == 0
            and len(set(self.eps)) == 1
        )


class Rows(NamedTuple):
    """Sequences one after the other without padding, and the rows of them that are read."""

    ids: Tensor  # (rows,) long
    positions: Tensor  # (rows,) long, in its sequence
    starts: Tensor  # (sequences + 1,) long
    at: Tensor  # (states,) long, rising

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor, states: Tensor) -> Rows:
        """Of rows `ids` (B, L) padded on the right, `states` (N,) rising through the B * L places of the grid."""
        ids, lengths = ids.long(), mask.sum(1)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        places = mask.flatten().nonzero().squeeze(1)
        at = (mask.flatten().cumsum(0) - 1).index_select(0, states)
        return cls(ids.flatten().index_select(0, places), places % ids.shape[1], starts, at)


def _shape(weights: Weights) -> tuple[_Shape, Any]:
    eps = torch.tensor([weights.eps[0]], **FLOATS)
    scaling = torch.tensor(list(weights.scaling), **FLOATS)
    sizes = (len(weights.scaling), weights.hidden, weights.inner, weights.heads)
    return _Shape(*sizes, eps.data_ptr(), scaling.data_ptr()), (eps, scaling)


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ADDRESS * len(tensors))(*(x.data_ptr() for x in tensors))


def _batch(rows: Rows) -> _Batch:
    pointers = (x.data_ptr() for x in rows)
    return _Batch(len(rows.ids), len(rows.starts) - 1, len(rows.at), *pointers)


def _forward(weights: Weights, rows: Rows, *, backward: bool, cache: _Cache | None = None) -> tuple[Tensor, Tensor]:
    """What the LM head reads (states, H), and what the pass keeps for its gradients.

    Errors: IndexError for a token or a position that the model does not know.
    """
    tokens, positions = len(weights.tensors[0]), len(weights.tensors[1])
    if len(rows.ids) and (int(rows.ids.min()) < 0 or int(rows.ids.max()) >= tokens):
        raise IndexError(f"a token beyond the model's {tokens}")
    if len(rows.ids) and int(rows.positions.max()) >= positions:
        raise IndexError(f"a row longer than the model's {positions} positions")
    (shape, _alive), batch = _shape(weights), _batch(rows)
    kept = torch.empty(compiled().gpt2_kept(ctypes.byref(shape), ctypes.byref(batch), int(backward)), **FLOATS)
    hidden = torch.empty(len(rows.at), weights.hidden, **FLOATS)
    check(
        compiled().gpt2_forward(
            ctypes.byref(shape),
            ctypes.byref(batch),
            _pointers(weights.tensors),
            address(kept),
            int(backward),
            None if cache is None else ctypes.byref(cache),
            address(hidden),
            threads(),
        )
    )
    return hidden, kept


class _Trunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Weights, rows: Rows, *tensors: Tensor) -> Tensor:
        hidden, kept = _forward(weights, rows, backward=True)
        ctx.weights, ctx.rows, ctx.kept = weights, rows, kept
        ctx.save_for_backward(*tensors)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, grad, kept = ctx.saved_tensors, grad.contiguous(), ctx.kept
        if kept is None:
            raise RuntimeError("the gradients of this pass were asked for before, which used up what it had kept")
        ctx.kept = None
        (shape, _alive), batch = _shape(ctx.weights), _batch(ctx.rows)
        grads = [torch.zeros_like(x) if i < EMBEDDINGS else torch.empty_like(x) for i, x in enumerate(tensors)]
        check(
            compiled().gpt2_backward(
                ctypes.byref(shape),
                ctypes.byref(batch),
                _pointers(tensors),
                _pointers(grads),
                address(kept),
                address(grad),
                threads(),
            )
        )
        return (None, None, *grads)


def read(weights: Weights, rows: Rows) -> Tensor:
    """What the LM head reads (states, H), with gradients where they are on."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in weights.tensors):
        hidden: Tensor = _Trunk.apply(weights, rows, *weights.tensors)
        return hidden
    return _forward(weights, rows, backward=False)[0]


class Decoder:
    """Continues sequences token by token. Made for one rollout: it holds a copy of the weights as they are."""

    def __init__(self, weights: Weights, head: Tensor, slots: int, length: int, *, kept: bool = True) -> None:
        """Room for `slots` sequences of `length` tokens, which the model knows, as it does what the head can say.

        Without `kept` the logits of a step are gone with the next: large blocks that come and go between small ones
        that stay would leave holes that nothing fits in.
        """
        self.weights, self.head, self.kept = weights, head, kept
        self.logits: Tensor | None = None
        self.shape, self._alive = _shape(weights)
        self.pointers = _pointers(weights.tensors)
        lanes, size = compiled().lanes(), weights.hidden // weights.heads
        self.capacity = -(-length // lanes) * lanes
        wide = (len(weights.scaling), slots, weights.heads)
        # A little more than is used: the last value of a slot is read in whole vectors.
        self.keys = torch.zeros(*wide, size, self.capacity, **FLOATS)
        self.room = torch.zeros(self.keys.numel() + lanes, **FLOATS)
        self.values = self.room[: self.keys.numel()].view(*wide, self.capacity, size)
        self.cache = _Cache(slots, self.capacity, self.keys.data_ptr(), self.room.data_ptr())
        self.packed = torch.empty(compiled().gpt2_packed(ctypes.byref(self.shape)), **FLOATS)
        compiled().gpt2_pack(ctypes.byref(self.shape), self.pointers, address(self.packed), threads())
        self.slots = torch.arange(slots, device="cpu")
        self.lengths = torch.zeros_like(self.slots)  # tokens that each slot holds

    def read(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Begin with rows `ids` (slots, P) padded on the right: logits (slots, V) behind each, and hidden states."""
        self.lengths = mask.sum(1)
        first = torch.arange(len(ids), device="cpu") * ids.shape[1]
        rows = Rows.of(ids, mask, first + self.lengths - 1)
        hidden, _ = _forward(self.weights, rows, backward=False, cache=self.cache)
        return self._logits(hidden), hidden

    def take(self, layers: Sequence[tuple[Tensor, Tensor]], mask: Tensor) -> None:
        """Begin with keys and values (slots, heads, P, size) a layer, of rows padded on the left as `mask` says."""
        self.lengths, width = mask.sum(1), mask.shape[1]
        from_left = (torch.arange(width, device="cpu") + (width - self.lengths).unsqueeze(1)).clamp_max(width - 1)
        for layer, (keys, values) in enumerate(layers):
            at = from_left[:, None, :, None].expand_as(keys)
            self.keys[layer, ..., :width] = keys.gather(2, at).transpose(2, 3) * self.weights.scaling[layer]
            self.values[layer, :, :, :width] = values.gather(2, at)

    def keep(self, rows: Tensor) -> None:
        """Only these of the sequences go on."""
        self.slots, self.lengths = self.slots.index_select(0, rows), self.lengths.index_select(0, rows)

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One more token each (b,): logits (b, V) and what the LM head reads (b, H)."""
        hidden, tokens = torch.empty(len(tokens), self.weights.hidden, **FLOATS), tokens.contiguous()
        check(
            compiled().gpt2_step(
                ctypes.byref(self.shape),
                self.pointers,
                address(self.packed),
                ctypes.byref(self.cache),
                SIZE(len(tokens)),
                address(tokens),
                address(self.slots),
                address(self.lengths),
                address(hidden),
                threads(),
            )
        )
        self.lengths = self.lengths + 1
        return self._logits(hidden), hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.kept:
            return head_logits(hidden, self.head)
        if self.logits is None:
            self.logits = torch.empty(len(hidden), len(self.head), **FLOATS)
        return head_logits(hidden, self.head, self.logits)
