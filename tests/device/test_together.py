"""Tensors that a device steps together equal, bit for bit, tensors that the CPU steps one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb
from bighorn._kernels.foreach.lamb import LambGroup
from tests.device.devices import on
from tests.device.stand_in import COMPLETE

SHAPES = [(8, 300), (), (7,), (5, 0), (0,), (3, 4, 5), (6, 300), (2, 20), (1, 1), (4, 2, 3, 3), (3, 300)]
LOW = torch.bfloat16
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.float32, {"state_dtype": "int8", "min_8bit_size": 0}),
    "int4": (torch.float32, {"state_dtype": "int4", "min_8bit_size": 0}),
    "bfloat16": (torch.float32, {"state_dtype": "bfloat16"}),
    "stochastic": (LOW, {"weight_rounding": "stochastic"}),
    "kahan": (LOW, {"weight_rounding": "kahan"}),
    "master": (LOW, {"weight_rounding": "master"}),
    "int8-stochastic": (LOW, {"state_dtype": "int8", "min_8bit_size": 0, "weight_rounding": "stochastic"}),
    "int8-kahan": (torch.float16, {"state_dtype": "int8", "min_8bit_size": 0, "weight_rounding": "kahan"}),
}
MISSING, NOT_FINITE = 2, 3
"""Steps in which a gradient is missing, and in which one is infinite if such steps are skipped."""


def stepped(device: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """Return parameters and state after steps without norms, since their last bits depend on the order of sums."""
    random = torch.Generator().manual_seed(1)
    params = [Parameter(torch.randn(shape, generator=random).to(device, dtype)) for shape in SHAPES]
    params += [
        Parameter(torch.randn(4, 2, 3, 3, generator=random).to(device, dtype, memory_format=torch.channels_last))
    ]
    optimizer = Lamb(params, lr=0.01, weight_decay=0.1, trust_ratio_bounds=(1.0, 1.0), backend="foreach", **options)
    for step in range(5):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=random)
            if step == NOT_FINITE and i == 0 and options["skip_nonfinite"]:
                grad[0, 0] = float("inf")
            param.grad = None if step == MISSING and i in (2, 6) else grad.to(device, dtype)
        optimizer.step()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return [each.detach().cpu() for each in (*params, *state)]


@on(COMPLETE)
@pytest.mark.parametrize("skip", [False, True], ids=["", "skip"])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_together_are_what_they_are_alone(way: str, skip: bool) -> None:
    dtype, options = WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LambGroup, "fuses", False)  # torch's fused Adam rounds differently
        ours, theirs = (stepped(device, dtype, {**options, "skip_nonfinite": skip}) for device in ("npu", "cpu"))
    assert len(ours) == len(theirs)
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our.dtype == their.dtype
        assert torch.equal(our, their), f"{i}: {our} {their}"
