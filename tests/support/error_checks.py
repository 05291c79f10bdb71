"""Checks of errors: bad input raises at once, with the type of error that torch raises, and names the cause.

The types are TypeError for wrong types and unknown keywords, ValueError for values, RuntimeError for sparse gradients.
Parameters, state, step counts and groups stay unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from tests.support.cases import Kind, Optimizer

Errors: TypeAlias = "type[Exception] | tuple[type[Exception], ...]"


def weights() -> list[Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (5,), (4, 3, 3, 3))]


def stepped(kind: Kind, backend: str = "auto", **options: Any) -> tuple[list[Parameter], Optimizer]:
    """Return parameters and their optimizer after a step, with gradients for the next one."""
    parameters = weights()
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, backend=backend, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def snapshot(parameters: Sequence[Tensor], optimizer: Optimizer) -> Any:
    state = [(p in optimizer.state) and dict(optimizer.state[p]) for p in parameters]
    return copy.deepcopy(([p.detach() for p in parameters], state, optimizer.state_dict()))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, DTensor) and isinstance(b, DTensor):
        return a.placements == b.placements and same(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.allclose(a, b, 0, 0, equal_nan=True)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b)) or (a != a and b != b)


@contextmanager
def refused(parameters: Sequence[Tensor], optimizer: Optimizer, error: Errors, message: str) -> Iterator[None]:
    """Check that the block raises an error whose message matches, and changes nothing."""
    before = snapshot(parameters, optimizer)
    with pytest.raises(error, match=f"(?is){message}"):
        yield
    assert same(snapshot(parameters, optimizer), before), "something changed"
