from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import cases
from bighorn import kernels


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test starts with the same seed and thread count and leaves the caller's thread count as it was."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=cases.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; one that does not work here is skipped with its own reason."""
    name: str = request.param
    status = kernels.status().get(name)
    if status is None or not status.available:
        pytest.skip(f"backend {name}: {status.detail if status else 'unknown to kernels.status()'}")
    return name
