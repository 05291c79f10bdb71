"""TailOverlap in a single process; test_overlap_ranks.py tests several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer, SparseAdam

from bighorn import Came, Lamb, TailOverlap
from tests.support.overlap_runs import Make, backward, batch, distributed, loss, network
from tests.support.processes import group_of_one


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with group_of_one():
        yield


class Wire:
    """A replacement for `torch.distributed.all_reduce` whose result is available after `wait()`."""

    def __init__(self, params: list[Tensor]) -> None:
        self.params = params
        self.before = [p.detach().clone() for p in params]
        self.moved: list[int] = []
        """The number of stepped parameters at each wait."""

    def all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Work:
        return Work(self, tensor)


class Work:
    def __init__(self, wire: Wire, tensor: Tensor) -> None:
        self.wire, self.tensor, self.arrived = wire, tensor, tensor.clone()
        tensor.numpy().fill(math.nan)  # without a wait there is no gradient; numpy changes no version counter

    def wait(self) -> None:
        moved = [not p.equal(before) for p, before in zip(self.wire.params, self.wire.before, strict=True)]
        self.wire.moved.append(sum(moved))
        self.tensor.numpy()[...] = self.arrived.numpy()


def waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """Return the number of parameters in each bucket of the third step, and the number stepped before its wait."""
    ddp = distributed(network())
    overlap = TailOverlap(ddp, make(ddp.module))
    for step in range(3):
        wire = Wire([p.detach() for p in ddp.parameters()])
        with monkeypatch.context() as patched:
            patched.setattr(dist, "all_reduce", wire.all_reduce)
            backward(loss(ddp, batch(step)))
        sizes = [len(flight.params) for flight in overlap._in_flight]
        overlap.step()
        overlap.zero_grad()
        assert all(p.isfinite().all() for p in ddp.parameters())
    assert len(sizes) > 3
    return sizes, wire.moved


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Lamb(model.parameters(), lr=0.01),
        lambda model: Came(model.parameters(), lr=0.01),
        lambda model: AdamW(model.parameters(), lr=0.01),
        lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    ],
    ids=["Lamb", "Came", "AdamW", "SGD"],
)
def test_a_bucket_is_stepped_before_the_next_is_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, moved = waits(make, monkeypatch)
    assert moved == [sum(sizes[:i]) for i in range(len(sizes))]


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
def test_a_global_norm_needs_all_gradients_first(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, moved = waits(lambda model: Lamb(model.parameters(), lr=0.01, **options), monkeypatch)
    assert moved == [0] * len(sizes)


def test_a_step_without_gradients_on_the_wire_is_the_optimizers_own() -> None:
    """torch.distributed.checkpoint takes such a step to create the state."""
    ddp = distributed(network())
    optimizer = Lamb(ddp.parameters(), lr=0.0)
    overlap = TailOverlap(ddp, optimizer)
    overlap.step()
    assert not optimizer.state
    for p in ddp.parameters():
        p.grad = torch.zeros_like(p)
    overlap.step()
    assert all(optimizer.state[p]["step"] == 0 for p in ddp.parameters())


def test_a_parameter_that_is_not_the_models_is_stepped_too() -> None:
    ddp, other = distributed(network()), nn.Parameter(torch.ones(3))
    overlap = TailOverlap(ddp, AdamW([*ddp.parameters(), other]))
    backward(loss(ddp, batch(0)) + other.sum())
    overlap.step()
    assert not other.eq(1).any()


def test_gradients_are_there_again_whatever_happens() -> None:
    ddp = distributed(network())
    optimizer = AdamW(ddp.parameters())
    overlap = TailOverlap(ddp, optimizer)
    backward(loss(ddp, batch(0)))
    grads = [p.grad for p in ddp.parameters()]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        overlap.step()
    assert all(p.grad is grad for p, grad in zip(ddp.parameters(), grads, strict=True))


def test_plans_are_kept_however_many_buckets_there_are() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)])
    ddp = distributed(model, bucket_cap_mb=1e-4)
    optimizer = Lamb(model.named_parameters(), lr=0.01)
    overlap = TailOverlap(ddp, optimizer)
    plans: list[set[int]] = []
    for step in range(4):
        backward(loss(ddp, batch(step).float()))
        buckets = len(overlap._in_flight)
        overlap.step()
        overlap.zero_grad()
        plans.append({id(plan) for plan in optimizer._steps.last})
        names = optimizer.telemetry().names
    assert buckets > 20
    assert plans[2] == plans[3]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert optimizer.telemetry().trust_ratio.gt(0).all()


# ---- with a scaler ------------------------------------------------------------------------------------------------


def scaled(
    module: nn.Module, make: Make, **options: Any
) -> tuple[TailOverlap, torch.amp.GradScaler, Callable[[], None]]:
    """Return an overlap with a scaler, and a function that makes gradients."""
    ddp, scaler = distributed(module, **options), torch.amp.GradScaler("cpu", init_scale=64.0)
    return (
        TailOverlap(ddp, make(module), scaler=scaler),
        scaler,
        lambda: backward(scaler.scale(loss(ddp, batch(0).float()))),
    )


def test_a_step_that_has_failed_is_repeated_with_the_same_scale() -> None:
    state: list[Tensor] = []
    for lr in (-1.0, 0.1):
        module = network(torch.float32)
        overlap, _, send = scaled(module, lambda module: Lamb(module.parameters(), lr=0.1))
        send()
        overlap.optimizer.param_groups[0]["lr"] = lr
        if lr < 0:
            with pytest.raises(ValueError, match=r"lr=-1.0"):
                overlap.step()
            overlap.optimizer.param_groups[0]["lr"] = 0.1
        overlap.step()
        state.append(overlap.optimizer.state[module.get_parameter("0.0.weight")]["exp_avg"])
    assert state[0].equal(state[1])


def test_gradients_that_a_failed_step_has_unscaled_are_not_unscaled_again() -> None:
    overlap, scaler, send = scaled(network(torch.float32), lambda m: SGD(m.parameters(), lr=0.1))
    send()
    overlap.optimizer.param_groups[0]["lr"] = "0.1"
    with pytest.raises(TypeError):
        overlap.step()
    overlap.optimizer.param_groups[0]["lr"] = 0.1
    for use in (overlap.synchronize, overlap.step):
        with pytest.raises(RuntimeError, match=r"a step that has failed.*overlap.zero_grad\(\)"):
            use()
    overlap.zero_grad()
    scaler.update()
    send()
    overlap.step()


@pytest.mark.parametrize("make", [Lamb, SGD], ids=["unscales", "is-unscaled"])
def test_a_scaler_where_new_tensors_are_float64(make: Callable[..., Optimizer]) -> None:
    overlap, scaler, send = scaled(network(torch.float32), lambda m: make(m.parameters(), lr=0.1))
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(2):
            send()
            overlap.step()
            scaler.update()
            overlap.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("make", [Lamb, SGD], ids=["unscales", "is-unscaled"])
def test_a_parameter_that_is_not_the_models_is_unscaled_too(make: Callable[..., Optimizer]) -> None:
    other, alone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    overlap, scaler, send = scaled(network(torch.float32), lambda module: make([*module.parameters(), other], lr=0.1))
    plain = make([alone], lr=0.1)
    for factor in (1.0, math.inf):
        send()
        backward(scaler.scale(other.square().sum() * factor))
        overlap.step()
        scaler.update()
        overlap.zero_grad()
        if math.isfinite(factor):
            backward(alone.square().sum())
            plain.step()
        assert torch.equal(other, alone)


class Foreign(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WaitsTwice(Foreign):
    """Wait for all gradients, as for their norm, then for each part again, and subtract the gradients."""

    @torch.no_grad()
    def step_in_parts(self, parts: list[list[Tensor]], wait: Callable[[int], None]) -> None:
        for i in range(len(parts)):
            wait(i)
        for i, part in enumerate(parts):
            wait(i)
            for p in part:
                p.sub_(cast(Tensor, p.grad))


def test_a_part_that_is_waited_for_twice_is_unscaled_once() -> None:
    module, alone = network(torch.float32), network(torch.float32)
    overlap, _, send = scaled(module, lambda module: WaitsTwice(module.parameters()))
    send()
    overlap.step()
    backward(loss(alone, batch(0).float()))
    for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
        assert ours.equal(theirs - cast(Tensor, theirs.grad))


class Mixed(nn.Module):
    """A module of two dtypes, which has two buckets in the first step of a static graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 4), nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(value).double())
        return result


@pytest.mark.parametrize("factor", [1.0, math.inf])
def test_the_first_step_of_a_static_graph_has_a_verdict(factor: float) -> None:
    overlap, scaler, send = scaled(Mixed(), lambda m: SGD(m.parameters(), lr=0.1), static_graph=True)
    overlap.optimizer.param_groups[0]["params"][0].register_hook(lambda grad: grad * factor)
    for scale in (64.0, 64.0) if math.isfinite(factor) else (32.0, 16.0):
        before = [p.detach().clone() for p in overlap.optimizer.param_groups[0]["params"]]
        send()
        overlap.step()
        moved = [not p.equal(old) for p, old in zip(overlap.optimizer.param_groups[0]["params"], before, strict=True)]
        assert moved == [math.isfinite(factor)] * len(moved)
        scaler.update()
        assert scaler.get_scale() == scale
        overlap.zero_grad()


# ---- refusals -----------------------------------------------------------------------------------------------------


class InParts(Foreign):
    def step_in_parts(self, parts: list[list[Tensor]], wait: Callable[[int], None]) -> None:
        for i in range(len(parts)):
            wait(i)
        with torch.no_grad():
            for p in (p for part in parts for p in part):
                p.fill_(7)


def zero(params: list[nn.Parameter]) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.13 itself uses torch.jit.script
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(params, SGD, lr=0.1)


def test_an_optimizer_with_a_method_for_it_is_accepted() -> None:
    ddp = distributed(network())
    overlap = TailOverlap(ddp, InParts(ddp.parameters()))
    backward(loss(ddp, batch(0)))
    overlap.step()
    assert all(p.eq(7).all() for p in ddp.parameters())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (LBFGS, "LBFGS.*direction"),
        (SparseAdam, "SparseAdam.*sparse"),
        (Foreign, "Foreign.*step_in_parts"),
        (zero, "ZeroRedundancyOptimizer.*between ranks"),
        (lambda params: SGD(params[1:]), "trainable parameter 0.0.weight"),
    ],
    ids=["LBFGS", "SparseAdam", "foreign", "ZeRO", "incomplete"],
)
def test_refused_optimizers(make: Callable[[list[nn.Parameter]], Optimizer], reason: str) -> None:
    ddp = distributed(network())
    with pytest.raises(ValueError, match=reason):
        TailOverlap(ddp, make(list(ddp.parameters())))
    TailOverlap(ddp, SGD(ddp.parameters()))


def test_refused_models() -> None:
    net = network()
    optimizer = SGD(net.parameters())
    with pytest.raises(TypeError, match=r"DistributedDataParallel, not Sequential.*gradient_as_bucket_view"):
        TailOverlap(net, optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, not list"):
        TailOverlap(distributed(net), [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"scaler must be a torch.amp.GradScaler, not float"):
        TailOverlap(distributed(net), optimizer, scaler=2.0)  # type: ignore[arg-type]
    lookup = nn.ModuleDict({"table": nn.Embedding(3, 3, sparse=True)})
    with pytest.raises(ValueError, match=r"table has sparse gradients.*sparse=False"):
        TailOverlap(distributed(lookup), SGD(lookup.parameters()))
    delayed = distributed(
        net,
        delay_all_reduce_named_params=[("0.0.weight", net.get_parameter("0.0.weight"))],
        param_to_hook_all_reduce=net.get_parameter("0.0.bias"),
        bucket_cap_mb=1,  # torch 2.7 refuses a fraction
    )
    with pytest.raises(ValueError, match="delay_all_reduce_named_params"):
        TailOverlap(delayed, optimizer)


def test_a_closure_is_refused() -> None:
    ddp = distributed(network())
    optimizer = AdamW(ddp.parameters())
    overlap = TailOverlap(ddp, optimizer)
    with pytest.raises(ValueError, match=r"call the closure, then overlap.step"):
        overlap.step(lambda: 1.0)
    with pytest.raises(ValueError, match=r"call the closure, then overlap.step"):
        optimizer.step(lambda: 1.0)
    optimizer.step(None)


def test_a_scaler_that_is_not_enabled_is_none() -> None:
    ddp = distributed(network())
    overlap = TailOverlap(ddp, SGD(ddp.parameters()), scaler=torch.amp.GradScaler("cpu", enabled=False))
    backward(loss(ddp, batch(0)))
    overlap.step()
    assert overlap._in_flight == []
