"""Capabilities of a device are measured: devices that report wrong dtypes, refuse, or have no storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bighorn._capabilities import Capabilities, capabilities

Answer = Callable[[Any, Any], Any]


class Device(TorchFunctionMode):
    """A device whose results are the CPU's, given to a function that changes them."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return self.answer(func, func(*args, **kwargs))


def honest(_: Any, result: Any) -> Any:
    return result


def float32_by_another_name(_: Any, result: Any) -> Any:
    """Like torch_xla on Neuron: tensors report float64, and hold float32."""
    is_wide = isinstance(result, Tensor) and result.dtype == torch.float64
    return result.to(torch.float32).to(torch.float64) if is_wide else result


def squares_first(func: Any, result: Any) -> Any:
    """Like torch_xla: a norm adds up squares in the dtype of the values, where they overflow."""
    is_norm = getattr(func, "__name__", "") == "linalg_vector_norm" and 2.0**64 < result < 2.0**128
    return torch.full_like(result, torch.inf) if is_norm else result


def raises(name: str, error: Exception) -> Answer:
    def answer(func: Any, result: Any) -> Any:
        if getattr(func, "__name__", "") == name:
            raise error
        return result

    return answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(honest, Capabilities(True, True, True, True), id="honest"),
        pytest.param(squares_first, Capabilities(True, False, True, True), id="squares-first"),
        pytest.param(float32_by_another_name, Capabilities(False, False, True, True), id="float64-in-name"),
        pytest.param(
            raises("to", ValueError("no such dtype")), Capabilities(False, False, False, True), id="refuses-dtypes"
        ),
        pytest.param(
            raises("linalg_vector_norm", NotImplementedError("no kernel")),
            Capabilities(False, False, False, True),
            id="no-norm",
        ),
        pytest.param(
            raises("data_ptr", RuntimeError("no storage")), Capabilities(True, True, True, False), id="no-storage"
        ),
    ],
)
def test_what_a_device_does_counts(answer: Answer, expected: Capabilities) -> None:
    with Device(answer):
        assert capabilities.__wrapped__(torch.device("hpu")) == expected
