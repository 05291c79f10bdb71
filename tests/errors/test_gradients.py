"""Errors for gradients, and the step after each error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from tests.support.cases import Kind, allow_gradients_of
from tests.support.error_checks import refused, stepped


def test_sparse_gradients_name_the_remedy(kind: Kind, backend: str) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = kind(embedding.parameters(), lr=0.1, backend=backend)
    embedding(torch.tensor([1, 2])).sum().backward()
    with refused([embedding.weight], optimizer, RuntimeError, "sparse.*(dense|SparseAdam|sparse=False)"):
        optimizer.step()


def test_a_gradient_of_another_shape(kind: Kind, backend: str) -> None:
    """Torch refuses the assignment, but does not detect a parameter that changes after it."""
    parameter = Parameter(torch.ones(4, 3))
    parameter.grad = torch.ones(4, 3)
    parameter.data = parameter.data.view(3, 4)
    optimizer = kind([parameter], lr=0.1, backend=backend)
    with refused([parameter], optimizer, (ValueError, RuntimeError), r"shape.*\(4, 3\)|\(4, 3\).*shape"):
        optimizer.step()


def test_a_gradient_on_another_device(kind: Kind, backend: str) -> None:
    """Torch accepts a gradient on another device if the parameter, of a subclass, has its own `grad`."""
    parameters, optimizer = stepped(kind, backend)

    class Elsewhere(Parameter):
        @property
        def grad(self) -> Tensor:  # type: ignore[override]
            return torch.ones(5, device="meta")

    foreign = Elsewhere(torch.ones(5))
    optimizer.add_param_group({"params": [foreign]})
    with refused([*parameters, foreign], optimizer, (ValueError, RuntimeError), "device|meta"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.float8_e5m2], ids=str)
def test_a_gradient_of_another_kind_than_its_parameter(kind: Kind, backend: str, dtype: torch.dtype) -> None:
    parameters, optimizer = stepped(kind, backend)
    parameters[1].grad = None
    allow_gradients_of(parameters[1], None)
    parameters[1].grad = torch.ones(5).to(dtype)
    with refused(parameters, optimizer, (ValueError, RuntimeError, TypeError), str(dtype)):
        optimizer.step()


def test_a_step_after_a_refused_one_is_right(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    others, other = stepped(kind, backend)
    good = parameters[0].grad
    parameters[0].grad = torch.ones(4, 3).to_sparse()
    with refused(parameters, optimizer, RuntimeError, "sparse"):
        optimizer.step()
    parameters[0].grad = good
    optimizer.step()
    other.step()
    assert all(a.equal(b) for a, b in zip(parameters, others, strict=True))
