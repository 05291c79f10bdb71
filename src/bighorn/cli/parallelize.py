"""A model in several processes: replicated in each of them, or sharded."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from bighorn.cli.errors import InputError
from bighorn.cli.ranks import Ranks
from bighorn.cli.tasks.text import GPT


def parallelize(model: nn.Module, parallel: str, ranks: Ranks) -> nn.Module:
    """Shard or wrap a model that is identical in every process; gradients are averaged over the processes.

    Returns:
        The module to call for outputs.

    Raises:
        InputError: The model cannot be divided in this way, or not among this number of processes.
    """
    if parallel == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if not isinstance(model, GPT):
        raise InputError(f"--parallel {parallel} is for --task text: leave it out, or train that.")
    if parallel == "tp":
        _shard_layers(model, ranks.size)
        return model
    sizes = (1, ranks.size) if parallel == "fsdp" else _copies(ranks)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards"))
    mesh = mesh["shards"] if parallel == "fsdp" else mesh
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _copies(ranks: Ranks) -> tuple[int, int]:
    """Return the number of copies of the model, and the number of processes that share each of them."""
    copies = ranks.machines if ranks.machines > 1 else 2
    if ranks.size % copies or ranks.size // copies < 2:
        raise InputError(
            f"--parallel hsdp needs several processes on each machine, or an even number of 4 or more on one, not "
            f"{ranks.size} in all: take fsdp, or other processes."
        )
    return copies, ranks.size // copies


def _shard_layers(model: GPT, processes: int) -> None:
    """Shard the heads of attention and the neurons of the perceptron over the processes."""
    if model.heads % processes:
        raise InputError(
            f"--parallel tp divides {model.heads} heads of attention, which {processes} processes cannot share evenly: "
            "take 2."
        )
    mesh = init_device_mesh("cpu", (processes,))
    split = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**split, "out": RowwiseParallel(), "down": RowwiseParallel()})
