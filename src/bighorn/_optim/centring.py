"""Gradient centralization, before a step of any backend: gradients without the means of their rows.

One index of dim 0, of each slice in a stacked parameter, selects a row. Norms for clipping are taken before centring.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bighorn._kernels.bucket import Shard


class Centred(NamedTuple):
    """A gradient, and where to write it without the means."""

    grad: Tensor | None
    """None if the parameter takes no part in the step."""
    to: Tensor
    """Of the gradient's shape, in the dtype of the arithmetic; each step uses it again."""
    shard: Shard
    first: int
    """The first dim over which means are taken."""

    def sums(self) -> Tensor:
        """Return the sums of the rows' elements on this rank, with their dims kept as 1."""
        if self.grad is None:
            self.to.zero_()
        else:
            self.to.copy_(self.grad)
        # The last bits of a sum must depend neither on the gradient's strides nor on the parameter's, which `to` has.
        return self.shard.box(self.to).contiguous().sum(dim=self.inner, keepdim=True)

    def write(self, sums: Tensor) -> None:
        """Write the gradient without the means, from the sums of whole rows."""
        if self.grad is None:
            return
        mean = sums / math.prod(self.shard.shape[self.first :])
        if self.shard.elements is None:
            self.to.sub_(mean)
        else:
            self.to.copy_(self.shard.unbox(self.shard.box(self.to) - mean))

    @property
    def inner(self) -> tuple[int, ...]:
        """The dims over which means are taken."""
        return tuple(range(self.first, len(self.shard.shape)))


def centre(gradients: Iterable[Centred]) -> Generator[Tensor, None, None]:
    """Write all gradients without the means.

    If other ranks have elements of the same rows, it yields one tensor, to be added up over all ranks in place.
    """
    split: list[tuple[Centred, Tensor]] = []
    for each in gradients:
        sums = each.sums()
        if each.shard.splits(each.inner):
            split.append((each, each.shard.spread(sums, each.inner)))
        else:
            each.write(sums)
    if not split:
        return
    yield (all_sums := torch.cat([sums.flatten() for _, sums in split]))
    for (each, sums), whole in zip(split, torch.split(all_sums, [sums.numel() for _, sums in split]), strict=True):
        each.write(each.shard.cut(whole.view_as(sums), each.inner))
