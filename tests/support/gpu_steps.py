"""Helpers of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import _kernels as kernels
from tests.support.cases import Kind, set_gradients

STATUS = kernels.status()["triton"]

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(STATUS.device == "cpu", reason=f"no GPU that Triton serves: {STATUS.detail}"),
]
"""The marks of every file in tests/gpu."""

needs_cuda = pytest.mark.skipif(STATUS.device != "cuda", reason="about torch.cuda")

SHAPES = ((1000, 1000), (4097,), (64, 3, 7, 7), (17,), (1,), (0,))
OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "backend": "triton"}


def parameters(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Parameter]:
    torch.manual_seed(seed)
    return [Parameter(torch.randn(shape)) for shape in shapes]


def gradients(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    return [p.detach() for p in parameters(1000 + seed, shapes)]


def same(first: list[Parameter], second: list[Parameter]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def trained(kind: Kind, steps: int = 3, wait: Callable[[], None] = lambda: None, **options: Any) -> list[Parameter]:
    """Return parameters after some steps, each with gradients at new addresses; `wait` is called before each step."""
    params = parameters()
    optimizer = kind(params, **{**OPTIONS, **options})
    for step in range(steps):
        wait()
        set_gradients(params, gradients(step))
        optimizer.step()
    return params


def nap() -> None:
    """Keep the current stream busy for some milliseconds."""
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
