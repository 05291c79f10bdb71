"""A process group for tensors on the stand-in: collectives of gloo on copies in the host's memory.

torch refuses gloo for tensors of such a device ("No backend type associated with device type npu"): an accelerator has
its own backend, as Ascend has HCCL.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from tests.device import stand_in

BACKEND = "staged"


class StagedGroup(dist.ProcessGroup):
    """Collectives that wait for the device, and are complete when they return."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:  # type: ignore[override]
        options = options or dist.AllreduceOptions()
        mean = options.reduceOp == dist.ReduceOp.AVG
        if mean:
            options.reduceOp = dist.ReduceOp.SUM
        hosts = [tensor.cpu() for tensor in tensors]
        self.gloo.allreduce(hosts, options).wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host / self.size() if mean else host)
        return done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        hosts = [tensor.cpu() for tensor in tensors]
        self.gloo.broadcast(hosts, options).wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _options: Any = None) -> Any:  # type: ignore[override]
        for row, tensor in zip(outputs, inputs, strict=True):
            hosts = [torch.empty(each.shape, dtype=each.dtype) for each in row]
            self.gloo.allgather([hosts], [tensor.cpu()]).wait()
            for each, host in zip(row, hosts, strict=True):
                each.copy_(host)
        return done(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, _options: Any = None) -> Any:
        self.allgather([list(output.chunk(self.size()))], [tensor])
        return done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], _options: Any = None) -> Any:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return done(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any) -> Any:
        whole = tensor.clone()
        single = dist.AllreduceOptions()
        single.reduceOp = options.reduceOp
        self.allreduce([whole], single)
        output.copy_(whole.chunk(self.size())[self.rank()])
        return done(output)


def done(result: object) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


def join(mode: str, rank: int, world: int, store: str) -> None:
    """Register the stand-in in this process, and make it a rank of the default process group."""
    stand_in.begin(mode)
    dist.Backend.register_backend(BACKEND, StagedGroup, devices=["npu"])
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=world)
