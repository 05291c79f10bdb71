from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.gpu_steps import STATUS


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    """Create the tensors of each test on the GPU."""
    torch.set_default_device(STATUS.device)
    yield
    torch.set_default_device(None)
