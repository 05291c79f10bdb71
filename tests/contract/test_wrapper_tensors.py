"""Tensors without memory: wrappers of other tensors, tensors without values, and freed tensors.

Their address is 0; compiled kernels would read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import Parameter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from bighorn import Lamb
from bighorn import _kernels as kernels
from tests.support.cases import Kind
from tests.support.processes import group_of_one

pytestmark = pytest.mark.long

SHAPE = (70, 80)


class Float8Weight(torch.Tensor):
    """A wrapper like torchao's WeightWithDynamicFloat8CastTensor: operations on it return plain tensors."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Float8Weight:
        made: Float8Weight = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.held = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: Any = None
    ) -> Any:
        del types
        args, kwargs = tree_map_only(cls, lambda wrapper: wrapper.held, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keeps = func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.view.default)
        return cls(out) if keeps else out


def values(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def plain(tensor: Tensor) -> Tensor:
    return tensor.held if isinstance(tensor, Float8Weight) else tensor


def train(kind: Kind, params: Sequence[Tensor], grads: Callable[[int], Tensor], **options: Any) -> Any:
    optimizer = kind([(f"w{i}", p) for i, p in enumerate(params)], lr=0.1, weight_decay=0.1, **options)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = grads(100 * i + step)
        optimizer.step()
    return optimizer


OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": 0.5, "skip_nonfinite": True},
    "int8": {"state_dtype": "int8"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_float8_weights(options: dict[str, Any], kind: Kind) -> None:
    """The two weights both have the address 0, so they once seemed to share memory."""
    ours, theirs = [[Parameter(values(i)) for i in range(3)] for _ in range(2)]
    wrapped = [Parameter(Float8Weight(p.detach())) for p in ours[:2]] + ours[2:]
    optimizer = train(kind, wrapped, values, **options)
    train(kind, theirs, values, **options, backend="reference")
    for p, q in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(p, q)
    # Another backend steps the plain one; an 8-bit code may differ by one.
    torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=0.1 if "state_dtype" in options else 1e-5)
    assert "group 0: reference 2 tensors" in optimizer.explain()
    assert "without memory" in optimizer.explain()


def test_it_is_said_once_that_wrappers_are_stepped_slowly(kind: Kind) -> None:
    kernels._warn_of.cache_clear()
    params = [Parameter(Float8Weight(values(i))) for i in range(2)]
    with pytest.warns(UserWarning, match=r"wrappers without memory of their own \(Float8Weight\)") as told:
        train(kind, params, values)
    assert len(told) == 1
    train(kind, params, values, backend="reference")


class NoNewTensors(Float8Weight):
    """A wrapper like torchao's Int8QuantizedTrainingLinearWeight: its operations make no tensors of other shapes."""

    def new_zeros(self, *_: Any, **__: Any) -> Tensor:
        raise NotImplementedError


def test_a_wrapper_of_which_no_state_can_be_made_is_named(kind: Kind) -> None:
    wrapped, alone = Parameter(NoNewTensors(values(0))), Parameter(torch.ones(3))
    optimizer = kind([("w", wrapped), ("b", alone)], lr=0.1)
    wrapped.grad, alone.grad = values(1), torch.ones(3)
    with pytest.raises(ValueError, match=r"^w is a NoNewTensors, of which no state of torch\.float32 can be made"):
        optimizer.step()
    assert alone.equal(torch.ones(3))
    assert not optimizer.state


@pytest.mark.parametrize("where", ["grad", "state"])
def test_wrappers_beside_a_plain_parameter(where: str, kind: Kind) -> None:
    """A gradient may become a wrapper from one step to the next."""
    wrapped, alone = Parameter(values(0)), Parameter(values(0))
    ours, theirs = train(kind, [wrapped], values), train(kind, [alone], values, backend="reference")
    for p, optimizer in ((wrapped, ours), (alone, theirs)):
        p.grad = values(7)
        if p is wrapped and where == "grad":
            p.grad = Float8Weight(values(7))
        if p is wrapped and where == "state":
            optimizer.state[p]["exp_avg"] = Float8Weight(optimizer.state[p]["exp_avg"])
        optimizer.step()
    torch.testing.assert_close(wrapped, alone)


def unchanged(params: list[Parameter], optimizer: Any, message: str) -> None:
    before = [p.detach().clone() for p in params if p.data_ptr()]
    steps = [float(state["step"]) for state in optimizer.state.values()]
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert [p.equal(q) for p, q in zip([p for p in params if p.data_ptr()], before, strict=True)] == [True] * len(
        before
    )
    assert [float(state["step"]) for state in optimizer.state.values()] == steps


def test_values_that_are_not_there(kind: Kind) -> None:
    """A gradient without values is refused by name, before another parameter changes; AdamW raises as well."""
    params = [Parameter(values(i)) for i in range(2)]
    optimizer = train(kind, params, values)
    params[1].grad = FakeTensorMode().from_tensor(values(3))
    unchanged(params, optimizer, r"(?s)w1 cannot be stepped.*FakeTensor")
    params[1].grad = values(3)
    optimizer.step()


def test_a_model_of_no_values(kind: Kind) -> None:
    """Memory of such a model is predicted by tracing."""
    with FakeTensorMode():
        optimizer = train(kind, [Parameter(torch.randn(SHAPE)) for _ in range(2)], lambda _: torch.randn(SHAPE))
    assert optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"].shape == SHAPE


@pytest.mark.parametrize("where", ["a parameter", "grad", "grad beside none", "state"])
@pytest.mark.parametrize("backend", ["auto", "foreach", "reference"])
@pytest.mark.parametrize("cached", [False, True])
def test_freed_memory(where: str, backend: str, cached: bool, kind: Kind) -> None:
    """The error does not depend on a plan of the previous step; torch.optim.AdamW(fused=False) crashes the process."""
    params = [Parameter(values(i)) for i in range(2)]
    optimizer = train(kind, params, values, backend=backend)
    if not cached:
        optimizer.load_state_dict(optimizer.state_dict())
    freed, name = {
        "a parameter": (params[1].data, "w1 has"),
        "grad": (params[1].grad, "the gradient of w1 has"),
        "grad beside none": (params[1].grad, "the gradient of w1 has"),
        "state": (optimizer.state[params[1]]["exp_avg"], "state 'exp_avg' of w1 has"),
    }[where]
    if where == "grad beside none":
        params[0].grad = None
    assert freed is not None
    freed.untyped_storage().resize_(0)
    unchanged(params, optimizer, f"^{name} no memory")


def test_a_gradient_without_memory_of_its_own_is_refused() -> None:
    weight = Parameter(torch.ones(3))
    optimizer = Lamb([weight], lr=0.1, backend="cpu")
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    before = weight.detach().clone()

    def inside(grad: Tensor) -> Tensor:
        weight.grad = grad
        for backend, message in (("cpu", "without memory"), ("auto", "cannot be stepped")):
            other = Lamb([weight], lr=0.1, backend=backend)
            for refusing in (optimizer, other) if backend == "cpu" else (other,):
                with pytest.raises(ValueError, match=rf"^param_groups\[0\]\.params\[0\].*{message}"):
                    refusing.step()
        weight.grad = None
        return grad

    torch.func.vmap(inside)(torch.ones(2, 3))
    assert weight.equal(before)


def test_backends_that_need_memory(kind: Kind) -> None:
    for backend in ("cpu", "foreach"):
        with pytest.raises(ValueError, match=r"(?s)cannot serve.*without memory"):
            kind([Parameter(Float8Weight(values(0)))], lr=0.1, backend=backend)


def test_shards_of_float8_weights(kind: Kind) -> None:
    """Torchao's fully_shard makes DTensors with such a wrapper as local tensor on each rank."""
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        here = [values(i) for i in range(2)]
        sharded = [Parameter(DTensor.from_local(Float8Weight(part.clone()), mesh, [Shard(0)])) for part in here]
        alone = [Parameter(part) for part in here]
        train(kind, sharded, lambda seed: DTensor.from_local(values(seed), mesh, [Shard(0)]))
        train(kind, alone, values, backend="reference")
        for p, q in zip(sharded, alone, strict=True):
            torch.testing.assert_close(plain(p.to_local()), q)  # type: ignore[attr-defined]


# ---- models whose parameters are swapped -----------------------------------------------------------------------------


def swapped(net: nn.Module) -> Any:
    """Let every conversion swap parameters' tensors, which torch otherwise does for wrappers and DTensors."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    return net


def of_wrappers(net: nn.Module) -> nn.Module:
    values = net.get_parameter("0.weight").detach()
    net.get_submodule("0").weight = Parameter(TwoTensor(values, values))  # type: ignore[no-untyped-call]
    return net


SWAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "plain": swapped,
    "fully_shard": fully_shard,
    "tensor-parallel": lambda net: parallelize_module(net, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()}),
    "wrappers": of_wrappers,
}


@pytest.mark.parametrize("way", SWAPPED)
def test_a_model_moves_and_is_cast_after_steps(way: str) -> None:
    """A weak reference to a parameter once made `model.cpu()` fail: "Couldn't swap Linear.weight"."""
    with group_of_one():
        try:
            net = SWAPPED[way](nn.Sequential(nn.Linear(8, 8)))
            optimizer = Lamb(net.named_parameters(), lr=0.1)
            of_fsdp = way == "fully_shard"  # its forward keeps the dtype of the first call
            for convert in (nn.Module.cpu, nn.Module.float if of_fsdp else nn.Module.double, nn.Module.float):
                convert(net)
                before = [param.detach().clone() for param in net.parameters()]
                net(torch.ones(2, 8, dtype=before[0].dtype)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                optimizer.telemetry()
                for param, old in zip(net.parameters(), before, strict=True):
                    assert not param.equal(old)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
