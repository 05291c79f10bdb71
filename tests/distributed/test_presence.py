"""Gradients that are missing on one rank: an error on every rank, where each once waited for the other for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.nn import Parameter

from bighorn import FlatLayout, Fragment, Lamb
from tests.support.cases import Kind
from tests.support.ranks import ranks
from tests.support.sharded_runs import Bag, full, mesh
from tests.support.tables import for_every

SHAPES = {"first": (6, 4), "second": (4, 6), "bias": (4,)}


def sharded(*sizes: int) -> Bag:
    bag = Bag(SHAPES, torch.float64)
    bag.place([*SHAPES], mesh(*sizes), [Shard(0)] if len(sizes) == 1 else [*[Shard(0)] * len(sizes)])
    return bag


def set_gradients(bag: Bag, without: tuple[str, ...] = ()) -> None:
    for name, p in bag.named_parameters():
        p.grad = None if name in without else torch.ones_like(p)


def take(way: str, bag: Bag, optimizer: Any) -> None:
    """Take a step of the parameters that have gradients."""
    having = [p for p in bag.parameters() if p.grad is not None]
    if way == "parts":
        optimizer.step_in_parts([having[:1], having[1:]], lambda _: None)
    elif way == "released":
        for p in having:
            optimizer.step_param(p)
        optimizer.step()
    else:
        optimizer.step()


@for_every("way", ["step", "parts", "released"])
@for_every("without", [("second",), ("first",), ("bias",), tuple(SHAPES)])
@for_every("steps_before", [0, 1])
@ranks(2)
def test_every_rank_raises(kind: Kind, way: str, without: tuple[str, ...], steps_before: int) -> None:
    """The message names the parameter and the rank, and nothing has changed."""
    options: dict[str, Any] = {"max_grad_norm": 1.0} if way == "step" and steps_before else {}
    bag = sharded(2)
    optimizer = kind(bag.named_parameters(), lr=0.1, **options)
    for _ in range(steps_before):
        set_gradients(bag)
        take(way, bag, optimizer)
    before = [full(p).detach().clone() for p in bag.parameters()]
    set_gradients(bag, without if dist.get_rank() == 1 else ())
    with pytest.raises(ValueError, match=r"rank 0 has .*, rank 1 has ") as error:
        take(way, bag, optimizer)
    if way != "released":
        assert f"rank 0 has {without[0]} with a gradient, rank 1 has {without[0]} without a gradient" in str(
            error.value
        )
        assert all(full(p).equal(q) for p, q in zip(bag.parameters(), before, strict=True))
        assert {int(state["step"]) for state in optimizer.state.values()} == ({1} if steps_before else set())
    set_gradients(bag, ("first",))  # on all ranks
    if way != "released":
        take(way, bag, optimizer)
        set_gradients(bag)
        take(way, bag, optimizer)
        assert int(optimizer.state[bag.get_parameter("second")]["step"]) == 2 + steps_before


@ranks(2)
def test_parameters_may_leave_a_group_and_change_places(kind: Kind) -> None:
    bag = sharded(2)
    optimizer = kind(bag.named_parameters(), lr=0.1)
    set_gradients(bag)
    optimizer.step()
    (group,) = optimizer.param_groups
    for key in ("params", "param_names"):
        group[key][1:] = group[key][:0:-1]
        group[key].pop()
    set_gradients(bag)
    optimizer.step()
    assert {name: int(optimizer.state[p]["step"]) for name, p in bag.named_parameters()} == {
        "first": 2,
        "second": 1,
        "bias": 2,
    }
    set_gradients(bag, ("bias",) if dist.get_rank() == 0 else ())
    with pytest.raises(ValueError, match="rank 0 has bias without a gradient, rank 1 has bias with a gradient"):
        optimizer.step()


@ranks(4)
def test_ranks_of_both_mesh_dims_raise(kind: Kind) -> None:
    bag = sharded(2, 2)
    optimizer = kind(bag.named_parameters(), lr=0.1)
    set_gradients(bag)
    optimizer.step()
    set_gradients(bag, ("second",) if dist.get_rank() == 3 else ())
    with pytest.raises(ValueError, match="rank 3 has second without a gradient"):
        optimizer.step()


@ranks(2)
def test_a_flat_tensor_without_a_gradient_on_one_rank() -> None:
    """The rank without it raised alone, and the other one waited."""
    place = dist.get_rank() * 6
    flat = Parameter(torch.ones(6))
    optimizer = Lamb(
        [{"params": [flat], "flat_layout": FlatLayout([[Fragment("w", (3, 4), 6, offset=place)]])}], lr=0.1
    )
    flat.grad = torch.ones(6)
    optimizer.step()
    if dist.get_rank() == 1:
        flat.grad = None
    with pytest.raises(ValueError, match="rank 0 has w with a gradient, rank 1 has w without a gradient"):
        optimizer.step()
