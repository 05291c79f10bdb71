"""Experts: the gradients' norm if each rank has dense parameters on all ranks and others on a mesh of its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from bighorn import Lamb
from tests.support.cases import Kind
from tests.support.ranks import ranks
from tests.support.sharded_runs import assert_close, mesh
from tests.support.tables import for_every

SHAPES = {"dense": (6, 4), "bias": (4,), "layers": (2, 4, 3)}


def values(name: str, step: int) -> Tensor:
    """Return the values of a parameter (step 0), or its gradients."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + 1000 * step)
    shape = SHAPES.get(name, (4, 6))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def experts() -> list[str]:
    """Return the names of all experts, one for each row of the mesh of experts."""
    return [f"expert {index}" for index in range(own_mesh().mesh.shape[0])]


def own_mesh() -> DeviceMesh:
    """Return a mesh whose rows are the experts' meshes, of one rank each or two."""
    world = dist.get_world_size()
    return mesh(world, 1) if world == 2 else mesh(2, 2)


def place(name: str, value: Tensor) -> Tensor:
    """Shard a tensor over all ranks, copy a bias there, and shard an expert over the ranks that hold it."""
    whole = mesh(dist.get_world_size())
    if name.startswith("expert"):
        return distribute_tensor(value, own_mesh()["two"], [Shard(0)], src_data_rank=None)
    return distribute_tensor(value, whole, [Replicate() if name == "bias" else Shard(0)], src_data_rank=None)


def trained(
    kind: Kind, names: list[str], overflow: str, options: dict[str, Any], *, sharded: bool
) -> dict[str, Tensor]:
    """Return parameters after three steps; in the second the gradient of one parameter overflows."""
    params = {name: Parameter(place(name, values(name, 0)) if sharded else values(name, 0)) for name in names}
    stacked = [(name, p) for name, p in params.items() if name == "layers"]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in params.items() if name != "layers"]},
        {"params": stacked, "stacked": True, "grad_centralization": True},
    ]
    optimizer = kind(groups, lr=0.1, weight_decay=0.1, backend="reference", **options)
    for step in range(1, 4):
        for name, p in params.items():
            grad = values(name, step)
            if (name, step) == (overflow, 2):
                grad[0] = math.inf
            p.grad = place(name, grad) if sharded else grad
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@for_every("option", [{"max_grad_norm": 0.5}, {"skip_nonfinite": True}, {"max_grad_norm": 0.5, "skip_nonfinite": True}])
@ranks(2, 4)
def test_one_process_with_all_experts_takes_the_same_steps(kind: Kind, option: dict[str, Any]) -> None:
    """Each rank once clipped by the norm of its own experts, and skipped a step alone."""
    for overflow in ("expert 1", "bias", "layers") if "skip_nonfinite" in option else ("",):
        alone = trained(kind, [*SHAPES, *experts()], overflow, option, sharded=False)
        mine = experts()[own_mesh().get_coordinate()[0]]  # type: ignore[index]
        shared = {**option, "grad_norm_group": dist.group.WORLD}
        ours = trained(kind, [*SHAPES, mine], overflow, shared, sharded=True)
        for name, p in ours.items():
            assert isinstance(p, DTensor)
            assert_close(p, alone[name], 1e-12, f"{name} of {kind.__name__} with an overflow in {overflow}")


@ranks(2, 4)
def test_without_a_process_group_they_are_refused(kind: Kind) -> None:
    """Experts and copies look alike."""
    for option in ({"max_grad_norm": 0.5}, {"skip_nonfinite": True}):
        params = [Parameter(place(name, values(name, 0))) for name in ("dense", "expert 0")]
        with pytest.raises(ValueError, match=r"ranks \[0.*grad_norm_group=torch.distributed.group.WORLD"):
            kind(params, lr=0.1, **option)
        optimizer = kind(params[:1], lr=0.1, **option)
        with pytest.raises(ValueError, match="grad_norm_group"):
            optimizer.add_param_group({"params": params[1:]})
    kind(params, lr=0.1)


@ranks(2)
def test_parameters_that_are_distributed_later_are_refused_at_the_first_step() -> None:
    net = nn.ParameterDict({name: Parameter(values(name, 0)) for name in ("dense", "expert 0")})
    optimizer = Lamb(net.parameters(), lr=0.1, max_grad_norm=0.5)
    for group in optimizer.param_groups:
        group["params"] = [Parameter(place(name, p.detach())) for name, p in net.items()]
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="grad_norm_group"):
        optimizer.step()
    assert not optimizer.state
