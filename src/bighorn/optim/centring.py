"""Gradient centralization, before a step of any backend: gradients without the means of their rows.

A row is what one index of dim 0 selects, in a stacked parameter of each slice. A norm for clipping is that of the
gradients themselves.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bighorn.kernels.bucket import Shard
from bighorn.square_sums import square_sums


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
        return self.shard.box(self.to).contiguous().sum(dim=self._inner, keepdim=True)

    def is_split(self) -> bool:
        """Whether other ranks have elements of the same rows."""
        return self.shard.splits(self._inner)

    def spread(self, sums: Tensor) -> Tensor:
        """Return sums of this rank's rows at their positions in those of the whole tensor."""
        return self.shard.spread(sums, self._inner)

    def cut(self, sums: Tensor) -> Tensor:
        """Return this rank's rows of the sums of the whole tensor."""
        return self.shard.cut(sums, self._inner)

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
    def _inner(self) -> tuple[int, ...]:
        return tuple(range(self.first, len(self.shard.shape)))


def centre(gradients: Iterable[Centred]) -> Generator[Tensor, None, None]:
    """Write all gradients without the means.

    If other ranks have elements of the same rows, it yields one tensor, to be added up over all ranks in place.
    """
    split: list[tuple[Centred, Tensor]] = []
    for each in gradients:
        sums = each.sums()
        if each.is_split():
            split.append((each, each.spread(sums)))
        else:
            each.write(sums)
    if not split:
        return
    yield (all_sums := torch.cat([sums.flatten() for _, sums in split]))
    for (each, sums), whole in zip(split, torch.split(all_sums, [sums.numel() for _, sums in split]), strict=True):
        each.write(each.cut(whole.view_as(sums)))


def square_sum(gradients: Iterable[Centred], device: torch.device) -> Tensor:
    """Return the sum of the squares of the gradients themselves on this rank, as `square_sums.square_sum`."""
    return square_sums([each.grad for each in gradients if each.grad is not None], device).sum(dim=0)
