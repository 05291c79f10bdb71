"""Cases of the table on the device, compared with the float64 reference on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tests.device import stand_in
from tests.support.cases import Case, Optimizer, set_gradients


def moved(tensor: Tensor) -> Tensor:
    """Return a tensor on the device with the same values and the same layout in memory."""
    plain = tensor.detach()
    conjugated, negated = plain.is_conj(), plain.is_neg()
    plain = plain.conj() if conjugated else plain
    plain = torch._neg_view(plain) if negated else plain
    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage())
    there = whole.to("npu").as_strided(plain.shape, plain.stride(), plain.storage_offset())
    there = torch._neg_view(there) if negated else there
    return there.conj() if conjugated else there


def on_host(values: Any) -> Any:
    """Return telemetry or a state with its tensors on the CPU."""
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return dataclasses.replace(values, **on_host(vars(values)))
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


class Mirror:
    """An optimizer of the device with the interface of one of the CPU, for the CPU's comparisons.

    A step sends the gradients alone; after it, the parameters and the state are copied back.
    """

    def __init__(self, case: Case, parameters: Sequence[Parameter], backend: str) -> None:
        self.parameters = list(parameters)
        self.there = [Parameter(moved(parameter)) for parameter in parameters]
        self.optimizer: Optimizer = case.optimizer(self.there, backend)
        self.param_groups = self.optimizer.param_groups
        self.state: dict[Tensor, Mapping[str, Tensor]] = {}
        self.waits: list[dict[str, int]] = []

    def step(self) -> None:
        gradients = [None if each.grad is None else moved(each.grad) for each in self.parameters]
        set_gradients(self.there, gradients)
        with stand_in.counted() as found:
            self.optimizer.step()
        self.waits.append(stand_in.waits(found))
        for parameter, there in zip(self.parameters, self.there, strict=True):
            assert there.stride() == parameter.stride()
            parameter.data.copy_(there.detach())
            if there in self.optimizer.state:
                self.state[parameter] = on_host(self.optimizer.state[there])

    def telemetry(self) -> Any:
        return on_host(self.optimizer.telemetry())
