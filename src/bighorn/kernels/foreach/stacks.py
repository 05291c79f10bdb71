"""Small tensors of several shapes as one, and a large one in pieces, for factored algorithms in plain torch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

Index = tuple[slice, ...]
ALL = slice(None)


def batches(params: dict[int, Tensor], limit: int, small: int) -> Iterator[list[list[int]]]:
    """Yield rows to process together, by shape: up to `small` elements each and `limit` in all, or a single one."""
    by_shape = defaultdict[torch.Size, list[int]](list)
    for i, x in params.items():
        if 0 < x.numel() <= small:
            by_shape[x.shape].append(i)
        else:
            yield [[i]]
    batch: list[list[int]] = []
    left = limit
    for shape, rows in by_shape.items():
        while rows:
            count = left // max(shape.numel(), 1)
            if not count:
                yield batch
                batch, left = [], limit
                continue
            batch.append(rows[:count])
            left -= len(batch[-1]) * shape.numel()
            rows = rows[count:]
    if batch:
        yield batch


class Stack:
    """Tensors as one: those of one shape along a new dim 0, or those of several shapes flat, shape after shape.

    Args:
        tensors: The tensors, by shape.
        counts: The number of tensors of each shape.
        in_place: Whether a single tensor stays as it is in memory. Otherwise sums have the order of a row-major copy,
            as beside other tensors.
    """

    def __init__(self, tensors: list[Tensor], counts: Sequence[int], in_place: bool) -> None:
        self.tensors = tensors
        firsts = itertools.accumulate(counts, initial=0)
        self.shapes = [(count, *tensors[i].shape) for i, count in zip(firsts, counts, strict=False)]
        self.copied = len(tensors) > 1 or not (in_place or tensors[0].is_contiguous())
        if not self.copied:
            self.whole = tensors[0].unsqueeze(0)
        elif len(counts) == 1:
            self.whole = torch.stack(tensors).contiguous()
        else:
            self.whole = torch.cat([each.reshape(-1) for each in tensors])


def stacked(columns: Mapping[str, list[Tensor]], rows: list[list[int]], in_place: bool) -> dict[str, Stack]:
    """Return the tensors of some rows of each column as one; 0-dim tensors are vectors of one element."""
    counts, order = list(map(len, rows)), [i for of_shape in rows for i in of_shape]
    return {
        name: Stack([tensors[i] if tensors[i].dim() else tensors[i].view(1) for i in order], counts, in_place)
        for name, tensors in columns.items()
    }


def slices(shape: torch.Size, limit: int, deep: bool) -> Iterator[Index]:
    """Yield the indices of pieces of about `limit` elements along the outermost dims; if not `deep`, of dim 0."""
    size = math.prod(shape[1:])
    count = max(limit // max(size, 1), 1)
    for i in range(0, shape[0], count):
        if deep and size > limit:
            yield from ((slice(i, i + 1), *inner) for inner in slices(shape[1:], limit, deep))
        else:
            yield (slice(i, i + count), *[ALL] * (len(shape) - 1))
