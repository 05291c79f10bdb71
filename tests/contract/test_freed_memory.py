"""An optimizer keeps no tensor that its program has let go, as when moments and weights leave a GPU for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing import reductions
from torch.nn import Parameter

from bighorn import Lars
from tests.support.cases import Kind, Optimizer
from tests.support.processes import group_of_one

StorageWeakRef: Any = reductions.StorageWeakRef

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "int8", "min_8bit_size": 64},
    {"weight_rounding": "master"},
    {"stacked": True},
    {"grad_centralization": True},
)


def made(kind: Kind, backend: str, options: dict[str, Any]) -> tuple[list[Parameter], Optimizer]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "weight_rounding" in options else torch.float32
    params = [Parameter(torch.randn(3, 12, 16).to(dtype)), Parameter(torch.randn(16, 12).t().to(dtype))]
    of_group = {name: value for name, value in options.items() if name in ("stacked", "grad_centralization")}
    whole = {name: value for name, value in options.items() if name not in of_group}
    return params, kind([{"params": params, **of_group}], lr=0.01, weight_decay=0.1, backend=backend, **whole)


def step(optimizer: Optimizer, params: list[Parameter], t: int) -> None:
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(10 * t + i)
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
    optimizer.step()


Away = Callable[[Optimizer, list[Parameter]], list[Any]]
"""A function that puts copies in place of tensors, as a move to another device does, and returns what is kept alive."""


def goes_on(kind: Kind, backend: str, options: dict[str, Any], away: Away) -> Optimizer:
    """Take steps as a twin takes them whose tensors stay, and return the optimizer."""
    if kind is Lars and backend == "cpu" and "state_dtype" in options:
        pytest.skip("the C library keeps no momentum of LARS in blocks")
    (params, optimizer), (twins, twin) = made(kind, backend, options), made(kind, backend, options)
    for t in range(4):
        step(optimizer, params, t)
        step(twin, twins, t)
        if t == 1:
            assert away(optimizer, params) == []
    assert all(param.equal(other) for param, other in zip(params, twins, strict=True))
    return optimizer


def moments_away(optimizer: Optimizer, _: list[Parameter]) -> list[str]:
    refs = []
    for state in optimizer.state.values():
        for name in state:
            refs.append((name, ref(state[name])))
            state[name] = state[name].clone()
    return [name for name, each in refs if name != "step" and each() is not None]


def weights_away(_: Optimizer, params: list[Parameter]) -> list[Any]:
    storages = [StorageWeakRef(param.untyped_storage()) for param in params]
    for param in params:
        param.data = torch.empty_like(param).copy_(param)
    return [each for each in storages if not each.expired()]


@pytest.mark.parametrize("backend", ["cpu", "foreach", "reference"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_moments_that_were_moved_away_are_freed_at_once(kind: Kind, backend: str, options: dict[str, Any]) -> None:
    optimizer = goes_on(kind, backend, options, moments_away)
    refs = [ref(value) for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    optimizer.state.clear()
    assert [each for each in refs if each() is not None] == []


@pytest.mark.parametrize("backend", ["cpu", "foreach"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_that_were_moved_away_are_freed_at_once(kind: Kind, backend: str, options: dict[str, Any]) -> None:
    goes_on(kind, backend, options, weights_away)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    with group_of_one():
        yield DeviceMesh("cpu", [0])


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_shards_that_were_moved_away_are_freed_at_once(
    kind: Kind, options: dict[str, Any], one_rank: DeviceMesh
) -> None:
    """As FSDP2's `model.to()` moves them."""

    def sharded(tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, one_rank, [Shard(0)])

    param = Parameter(sharded(torch.ones(12, 16)))
    optimizer = kind([param], lr=0.01, **options)
    for t in range(3):
        param.grad = sharded(torch.full((12, 16), 1.0 + t))
        optimizer.step()
        before = StorageWeakRef(local_of(param).untyped_storage())
        moved = Parameter(sharded(local_of(param).clone()))
        swap: Any = torch.utils.swap_tensors
        swap(param, moved)
        del moved
        states = [StorageWeakRef(local_of(v).untyped_storage()) for v in optimizer.state[param].values() if v.dim()]
        optimizer.state[param] = {
            name: distribute_tensor(local_of(value).clone(), one_rank, value.placements) if value.dim() else value
            for name, value in optimizer.state[param].items()
        }
        assert before.expired()
        assert all(each.expired() for each in states)


def test_a_parameter_that_was_replaced_is_freed_by_the_next_step(kind: Kind) -> None:
    params = [Parameter(torch.randn(12, 16)) for _ in range(2)]
    optimizer = kind(params, lr=0.01)
    gone: list[Any] = []
    for t in range(4):
        step(optimizer, params, t)
        assert [each for each in gone if not each.expired()] == []
        gone = [StorageWeakRef(params[1].untyped_storage())]
        del optimizer.state[params[1]]
        params[1] = optimizer.param_groups[0]["params"][1] = Parameter(torch.randn(12, 16))


def test_a_state_stays_in_the_dict_that_a_program_holds(kind: Kind, backend: str) -> None:
    """After moments were replaced, the next step once made new dicts, and a program's own moved nothing any more."""
    params, optimizer = made(kind, backend, {})
    step(optimizer, params, 0)
    held = [optimizer.state[param] for param in params]
    for state in held:
        state.update({name: value.clone() for name, value in state.items()})
    step(optimizer, params, 1)
    assert all(optimizer.state[param] is state for param, state in zip(params, held, strict=True))
    assert [int(state["step"]) for state in held] == [2, 2]
