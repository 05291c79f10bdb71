"""The processes of a run: one alone, or those that torchrun started."""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bighorn.cli.errors import InputError


@dataclass(frozen=True)
class Ranks:
    """Which process this is. All methods do nothing special for a process alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> "Ranks":
        """Meet the other processes that torchrun started, if it did."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        """Part from the other processes."""
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and writes files."""
        return self.rank == 0

    @property
    def launcher(self) -> list[str]:
        """What starts as many processes, on one machine: the words before ``bighorn``."""
        return ["torchrun", "--nproc-per-node", str(self.size), "--no-python"] if self.size > 1 else []

    def check(self, batch_size: int) -> None:
        """Refuse a batch that cannot be split evenly."""
        if batch_size % self.size:
            raise InputError(f"--batch-size {batch_size} cannot be split over {self.size} processes: take a multiple.")

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with its gradients averaged over the processes."""
        return nn.parallel.DistributedDataParallel(model) if self.size > 1 else model

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a float tensor over the processes."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return bool(self.mean(torch.tensor(float(flag)))) if self.size > 1 else flag

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = Ranks()
