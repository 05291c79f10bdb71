"""Layer-wise steps in plain torch on a CPU: rows in batches whose norms are computed together, batches in pieces.

The optimizer adds the arithmetic of a batch: the sums of a layer, and the step that follows from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic

import torch
from torch import Tensor

from bighorn.kernels.arithmetic import compute_dtype, count_step, write
from bighorn.kernels.bucket import Bucket, rows_with_grad
from bighorn.kernels.codec import NEAREST, dequantize, quantize
from bighorn.kernels.foreach.lists import ListStepper
from bighorn.kernels.foreach.pieces import (
    Slot,
    Workspace,
    groups,
    memory_order,
    piece_bytes,
    pieces,
    store_pieces,
    workspace,
)
from bighorn.kernels.options import Options
from bighorn.kernels.reference.stepper import needs_rng_key
from bighorn.kernels.rounding import AUX_STATE, dither, load_weight, random_bits, rng_key, store_weight
from bighorn.square_sums import no_square_sums

# The slots of the workspace, in pieces. WIDE and X overlap, as x follows all norms.
WIDE: Slot = (0, 2)
X: Slot = (0, 1)
G: Slot = (2, 3)
MOMENTS: tuple[Slot, ...] = ((3, 4), (4, 5), (5, 6))
U: Slot = (6, 16)
SIZE = 16  # of the workspace

BATCH = 4
"""Pieces of the rows whose norms are computed together: few enough for phase 2 to find x and u in a CPU's cache."""


@dataclass
class Piece:
    """Whole rows, or a part of one, as flat tensors in their memory order."""

    rows: slice
    x: list[Tensor]
    moments: list[list[Tensor]]
    """The moments that the optimizer names; one that the state does not have is an empty list."""
    state: list[dict[str, Tensor]]
    """The state of each tensor, flat; what is in blocks, in rows."""
    row_offsets: list[int]
    """The position of each tensor's first element in its parameter."""


class Batch(Generic[Options]):
    """Consecutive rows of a bucket, whose norms are computed together."""

    moments: ClassVar[tuple[str, ...]]
    """The names of the moments in the state."""

    def __init__(self, bucket: Bucket[Options], rows: slice) -> None:
        self.bucket: Bucket[Options] = bucket
        self.rows = rows
        self.dtype = compute_dtype(bucket.params[0])
        self.piece_size = piece_bytes() // self.dtype.itemsize
        self.orders = [memory_order(x) for x in bucket.params[rows]]
        self.stored, self.in_blocks = bucket.state["exp_avg"][0].dtype, "exp_avg_scale" in bucket.state
        self.needs_rng_key = needs_rng_key(bucket)
        self.pieces = list(self._cut())

    @property
    def divides_rows(self) -> bool:
        """Whether a piece can be a part of a large row."""
        return True

    def step(self, space: Workspace, grad_scale: Tensor | float, apply_mask: Tensor | None) -> None:
        """Run both phases, with temporaries in `space`: the norms of all pieces, then the parameters of all pieces."""
        raise NotImplementedError

    def _cut(self) -> Iterator[Piece]:
        """Yield the pieces of the parameters and their state, whose addresses are the same at each step."""
        params, state = self.bucket.params[self.rows], self.bucket.state
        row_starts = self.bucket.row_offsets[self.rows] or [0] * len(params)
        moments = [self._flat(None if self.in_blocks else state.get(name)) for name in self.moments]
        by_rows = [name for name in state if "scale" in name or (name == "exp_avg" and self.bucket.options.packed)]
        like_params = {name: self._pieces(each[self.rows]) for name, each in state.items() if name not in by_rows}
        for (rows, x), *of_piece in zip(self._pieces(params), *moments, strict=False):
            starts = [
                int(part.storage_offset()) - int(whole.storage_offset())
                for part, whole in zip(x, params[rows], strict=True)
            ]
            parts = {name: next(rest)[1] for name, rest in like_params.items()}
            parts |= {name: rows_of(x, starts, state[name][self.rows][rows]) for name in by_rows}
            yield Piece(
                rows,
                [each.view(-1) for each in x],
                of_piece,
                [in_rows({name: part[i] for name, part in parts.items()}) for i in range(len(x))],
                [start + first for start, first in zip(starts, row_starts[rows], strict=True)],
            )

    def _pieces(self, tensors: list[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield pieces of this batch's tensors, which are shaped like parameters, in the parameters' memory order."""
        ordered = [x.permute(order) for x, order in zip(tensors, self.orders, strict=True)]
        return pieces(ordered, self.piece_size, cut=self.divides_rows, deep=not self.in_blocks)

    def _flat(self, tensors: list[Tensor] | None) -> Iterator[list[Tensor]]:
        if tensors is None:
            return itertools.repeat([])
        return ([x.view(-1) for x in piece] for _, piece in self._pieces(tensors[self.rows]))

    def _gradients(self, space: Workspace, scale: Tensor | float, copy: bool) -> Iterator[list[Tensor]]:
        """Yield the scaled gradients of each piece, without decay; without `copy` they may be the gradients."""
        grads = [grad for grad in self.bucket.grads[self.rows] if grad is not None]
        unscaled = isinstance(scale, float) and scale == 1
        for _, piece in self._pieces(grads):
            flat = [each.contiguous().view(-1) for each in piece]
            g = space.load(G, flat, self.dtype, copy=copy or not unscaled)
            if not unscaled:
                torch._foreach_mul_(g, scale)
            yield g

    def _weights(self, piece: Piece) -> list[Tensor]:
        """Return the values that the parameters of a piece stand for: themselves, or float32 from their aux state."""
        kept = AUX_STATE[self.bucket.options.weight_rounding]
        if not kept:
            return piece.x
        return [
            load_weight(x, {name: state[name] for name in kept}) for x, state in zip(piece.x, piece.state, strict=True)
        ]

    def _store_weights(self, piece: Piece, values: list[Tensor], t: Tensor, apply_mask: Tensor | None) -> None:
        """Round the parameters of a piece, and store the aux state of their rounding mode."""
        rounding = self.bucket.options.weight_rounding
        if rounding == "nearest":
            store_pieces(piece.x, values, apply_mask)
            return
        for i, (x, value) in enumerate(zip(piece.x, values, strict=True)):
            bits = random_bits(*self._positions(piece, i, t)) if rounding == "stochastic" else None
            for name, new in store_weight(value, x.dtype, rounding, bits).items():
                write(x if name == "x" else piece.state[i][name], new, apply_mask)

    def _moments(self, space: Workspace, piece: Piece, copy: bool) -> list[list[Tensor]]:
        """Return the moments of a piece to compute in: themselves, or copies if their dtype or `copy` requires that."""
        if self.in_blocks:
            names = [name for name in self.moments if name in self.bucket.state]
            decoded = [[dequantize(name, state).flatten() for state in piece.state] for name in names]
            return decoded + [[]] * (len(self.moments) - len(names))
        slots = zip(MOMENTS, piece.moments, strict=False)
        return [space.load(slot, tensors, self.dtype, copy) for slot, tensors in slots]

    def _store_moments(
        self,
        space: Workspace,
        piece: Piece,
        moments: list[list[Tensor]],
        t: Tensor,
        apply_mask: Tensor | None,
        discard: bool = False,
    ) -> None:
        """Store moments unless `discard` is set, and round them to the values that are (or would be) stored."""
        if self.in_blocks:
            self._encode(piece, moments, t, apply_mask, discard)
            return
        for tensors, values in zip(piece.moments, moments, strict=True):
            if values is not tensors:
                self._round(space, values)
                if not discard:
                    store_pieces(tensors, values, apply_mask)

    def _encode(
        self, piece: Piece, moments: list[list[Tensor]], t: Tensor, apply_mask: Tensor | None, discard: bool
    ) -> None:
        for i, (x, stored) in enumerate(zip(piece.x, piece.state, strict=True)):
            if len(stored["exp_avg"]) == 0:
                continue
            state, shape = dict(stored), (len(stored["exp_avg"]), x.numel() // len(stored["exp_avg"]))
            shifts = dither(*self._positions(piece, i, t)).view(shape) if self.needs_rng_key else NEAREST
            for name, values in reversed([*zip(self.moments, moments, strict=True)]):  # m may be relative to v
                if values:
                    new = quantize(name, values[i].view(shape), state, shifts)
                    state |= new
                    values[i].copy_(dequantize(name, state).flatten())
                    for key, value in new.items() if not discard else ():
                        write(stored[key], value, apply_mask)

    def _round(self, space: Workspace, values: list[Tensor]) -> None:
        """Round the values of a moment to the dtype that it is stored in."""
        if values and self.stored != self.dtype:
            torch._foreach_copy_(values, space.copies(WIDE, values, self.stored))

    def _positions(self, piece: Piece, i: int, t: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the arguments of `random_bits` for a tensor of a piece, at the steps `t` of the batch's rows."""
        row, first = piece.rows.start + i, piece.row_offsets[i]
        key = rng_key(self.bucket.options.rounding_seed, self.bucket.param_ids[self.rows.start + row])
        return key, t[row], torch.arange(first, first + piece.x[i].numel())


class LayerwiseStepper(ListStepper[Options]):
    """A layer-wise optimizer for some buckets on one device; on a CPU, shards are stepped by the reference."""

    batch: type[Batch[Options]]

    def refresh(self) -> None:
        """Divide the tensors into pieces, or into groups on an accelerator."""
        super().refresh()
        self.batches = [] if self.in_lists else [self._batches(bucket) for bucket in self.buckets]

    def _batches(self, bucket: Bucket[Options]) -> list[Batch[Options]]:
        limit = BATCH * piece_bytes() // torch.float32.itemsize
        return [self.batch(bucket, rows) for rows in groups(bucket.params, limit)]

    def prepare(self) -> None:
        """Do everything that can fail, before any kernel of a step writes."""
        if not self.in_lists:
            workspace(SIZE)

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares."""
        if self.in_lists:
            return super().square_sum()
        grads = [grad for bucket in self.buckets for grad in bucket.grads if grad is not None]
        space = workspace(SIZE)
        sums = [space.square_sums(WIDE, piece) for _, piece in pieces(grads, piece_bytes() // 8)]
        return torch.cat(sums or [no_square_sums(0, device=torch.device("cpu"))]).sum(dim=0)

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of every bucket, as `reference.Stepper.step`."""
        if self.in_lists:
            super().step(grad_scale, apply_mask)
            return
        space = workspace(SIZE)
        for bucket, all_rows in zip(self.buckets, self.batches, strict=True):
            present = bucket.with_grad()
            for batch in all_rows if present is bucket else self._batches(present):
                batch.step(space, grad_scale, apply_mask)
            if present is not bucket and present.params:
                rows = [bucket.metrics[i] for i in rows_with_grad(bucket.grads)]
                torch._foreach_copy_(rows, list(present.metrics.unbind()))
            count_step(bucket.unique_steps, apply_mask)


def rows_of(parts: list[Tensor], starts: list[int], state: list[Tensor]) -> list[Tensor]:
    """Return the scales or codes that belong to parts of tensors: all, or those of some rows of a single tensor."""
    return [
        each if start == 0 and len(part) == len(each) else each.narrow(0, start // max(part[0].numel(), 1), len(part))
        for part, start, each in zip(parts, starts, state, strict=True)
    ]


def in_rows(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a tensor's state with codes in rows, as their scales are, and all other tensors flat."""
    codes = [name.removesuffix("_scale") for name in state if "scale" in name]
    flat = {name: each.view(-1) for name, each in state.items() if name not in codes and "scale" not in name}
    return flat | {name: each.flatten(1) for name, each in state.items() if name not in flat}
