"""Where the tensors of a model lie: whole in every process, or in shards."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bighorn.cli.errors import InputError
from bighorn.cli.ranks import Ranks
from bighorn.cli.tasks.text import GPT


def place(model: nn.Module, parallel: str, ranks: Ranks) -> nn.Module:
    """The model as it is to be called: its own parameters in their places, and gradients averaged over the processes.

    Every process has made the same model.

    Raises:
        InputError: For a model or a number of processes that cannot be divided in this way.
    """
    if ranks.size == 1:
        return model
    if parallel == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not isinstance(model, GPT):
        raise InputError(f"--parallel {parallel} is for --task text: leave it out, or train that.")
    if parallel == "tp":
        _divide_layers(model, ranks.size)
        return model
    sizes = (1, ranks.size) if parallel == "fsdp" else _copies(ranks)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards"))
    mesh = mesh["shards"] if parallel == "fsdp" else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _copies(ranks: Ranks) -> tuple[int, int]:
    """How many copies of the model there are, and among how many processes each is sharded."""
    copies = ranks.machines if ranks.machines > 1 else 2
    if ranks.size % copies or ranks.size // copies < 2:
        raise InputError(
            f"--parallel hsdp needs several processes on each machine, or an even number of 4 or more on one, not "
            f"{ranks.size} in all: take fsdp, or other processes."
        )
    return copies, ranks.size // copies


def _divide_layers(model: GPT, processes: int) -> None:
    """Each process has some heads of attention and some neurons of the perceptron."""
    if model.heads % processes:
        raise InputError(
            f"--parallel tp divides {model.heads} heads of attention, which {processes} processes cannot share evenly: "
            "take 2."
        )
    mesh = init_device_mesh("cpu", (processes,))
    split = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**split, "out": RowwiseParallel(), "down": RowwiseParallel()})
