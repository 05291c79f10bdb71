"""Whether the tensors of a plan still are what and where they were. It is asked at every step, so in few sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bighorn.kernels.addresses import Whereabouts, without_address

State = dict[str, Any]
Guard = Callable[[Sequence[Tensor]], bool]

TensorGuards: Any = None
with suppress(ImportError):
    # What torch.compile asks of its inputs, in 0.06 us a tensor where reading the same attributes from Python takes
    # 0.7. It is no public name, so there is a way without it; both may go when torch offers the question itself.
    from torch._C._dynamo.guards import TensorGuards


@dataclass(frozen=True)
class Fingerprint:
    """What must be as it was for a plan to hold: which tensors, in which groups, where they lie, and how."""

    facts: list[object]
    """How many parameters each group has, and how gradients are distributed."""
    params: Guard
    grads: Guard
    """Gradients may move, but not change their dtype or strides."""
    without_address: int
    """Nor may their memory be freed."""
    whereabouts: Whereabouts
    """Of parameters and state."""

    @classmethod
    def of(cls, facts: list[object], params: list[Tensor], grads: list[Tensor], states: list[State]) -> Fingerprint:
        """Of tensors as they are now. That `params` are the same objects is the caller's to check."""
        return cls(facts, alike(params), alike(grads), without_address(grads), Whereabouts(params, states))

    def holds(self, facts: list[object], params: list[Tensor], grads: list[Tensor], states: list[State]) -> bool:
        """Whether all is as it was."""
        return (
            self.facts == facts
            and self.params(params)
            and self.grads(grads)
            and self.without_address == without_address(grads)
            and self.whereabouts.hold(params, states)
        )


def alike(tensors: Sequence[Tensor]) -> Guard:
    """A question: do these tensors have the types, dtypes, devices, shapes, strides and bits that `tensors` have?"""
    if TensorGuards is None:
        return alike_by_attributes(tensors)
    if not tensors:
        return lambda others: not others
    check, count = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check, len(tensors)
    return lambda others: len(others) == count and check(*others)


def alike_by_attributes(tensors: Sequence[Tensor]) -> Guard:
    """The same question where torch does not answer it."""
    attributes = _attributes(tensors)
    return lambda others: attributes == _attributes(others)


def _attributes(tensors: Sequence[Tensor]) -> list[object]:
    return [(type(t), t.dtype, t.device, t.layout, t.shape, _strides(t), t.is_neg(), t.is_conj()) for t in tensors]


def _strides(tensor: Tensor) -> object:
    return tensor.stride() if tensor.layout is torch.strided else None
