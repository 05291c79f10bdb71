"""Trainings of a small network with given gradients, on any device.

Gradients of a backward through matrices have other last bits on each device, from which CAME makes a thousandth of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bighorn import schedules
from bighorn._kernels.rounding import load_weight
from tests.device.devices import CPU, Device, without_waits
from tests.support.cases import Kind
from tests.support.optimizer_runs import figures

STEPS = 5
STEADY = 2
"""The first step after the state was created and found on the device."""

Loop = Callable[[nn.Module, Any, Device], Any]
"""Trains, and returns the optimizer with the state if it is another one."""

SMALL: dict[str, Any] = {"min_8bit_size": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reference": {"backend": "reference"},
    "clip": {"max_grad_norm": 0.1},
    "skip": {"skip_nonfinite": True, "max_grad_norm": 0.1},
    "centralized": {"grad_centralization": True, "max_grad_norm": 0.1},
    "schedule": {"lr": schedules.Cosine(0.05, 8)},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8", **SMALL},
    "int4": {"state_dtype": "int4", **SMALL},
}


class Odd(nn.Module):
    """A scalar, and a tensor of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.cube = Parameter(torch.empty(())), Parameter(torch.empty(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar + self.cube.sum()


def network(device: Device, dtype: torch.dtype = torch.float32, last: Callable[[], nn.Module] = Odd) -> nn.Sequential:
    first = (nn.Linear(9, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 90, bias=False), nn.Tanh())
    net, generator = nn.Sequential(*first, last()), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return net.to(device.type, dtype)


def gradients(net: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in net.parameters()]


def set_gradients(net: nn.Module, step: int, factor: float = 1.0, leave_out: int | None = None) -> None:
    for i, (param, grad) in enumerate(zip(net.parameters(), gradients(net, step), strict=True)):
        param.grad = None if i == leave_out else (factor * grad).to(param.dtype).to(param.device)


def loss_of(net: nn.Module, step: int, factor: float = 1.0) -> Any:
    """Return a loss with the gradients of a step, independent of the network's output."""
    first = next(net.parameters())
    loss = 0 * net(torch.ones(4, 9).to(first.device, first.dtype)).square().mean()
    for param, grad in zip(net.parameters(), gradients(net, step), strict=True):
        loss = loss + (param * (factor * grad).to(param.device, param.dtype)).sum()
    return loss


def optimizer_of(kind: Kind, net: nn.Module, device: Device, **options: Any) -> Any:
    chosen = {"lr": 0.05, "weight_decay": 0.1, "backend": device.backend, **options}
    central = chosen.pop("grad_centralization", False)
    optimizer = kind(net.named_parameters(), **chosen)
    for group in optimizer.param_groups:
        group["grad_centralization"] = central
    return optimizer


def plain(net: nn.Module, optimizer: Any, device: Device, steps: Iterable[int] = range(STEPS)) -> None:
    for step in steps:
        set_gradients(net, step)
        with without_waits(device, step >= STEADY):
            optimizer.step()


def results(net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return weights, state and telemetry on the CPU; a compensated weight includes its compensation."""
    found: dict[str, Tensor] = {}
    for name, param in net.named_parameters():
        state = {key: value.cpu() for key, value in optimizer.state[param].items() if isinstance(value, Tensor)}
        x = param.detach().cpu()
        if "compensation" in state:
            x = load_weight(x, {"compensation": state.pop("compensation")})
        found |= {f"{name} {key}": value for key, value in {"weight": x, **state}.items()}
    if hasattr(optimizer, "telemetry"):
        telemetry = optimizer.telemetry()
        found["telemetry skipped"] = torch.tensor(float(telemetry.skipped))
        for key, values in figures(telemetry).items():
            found |= {
                f"telemetry {key} {name}": value for name, value in zip(telemetry.names, values.cpu(), strict=True)
            }
    return found


CLOSE = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative tolerances: a value may be rounded to the neighbour."""


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float, coded: bool = False) -> None:
    """Check that tensors agree; one code in 50 may be its neighbour, which moves a weight of `coded` state."""
    assert ours.keys() == theirs.keys()
    for name, our in ours.items():
        their = theirs[name]
        assert our.dtype == their.dtype, name
        if our.dtype.is_floating_point:
            close = max(CLOSE.get(our.dtype, 1e-4 if name.startswith("telemetry") else rtol), 1e-2 * coded)
            size = float(their.abs().max()) if their.numel() else 0.0
            far = ~torch.isclose(our, their, rtol=close, atol=size * (1e-3 if coded else 2e-6))
            # A weight near 0 may have been rounded to the neighbour while it was larger.
            few = far.numel() // 50 if our.dtype in CLOSE else 0
            assert far.sum() <= few, f"{name}: {our[far]} {their[far]}"
            torch.testing.assert_close(our, their, rtol=close, atol=size * close, msg=name)
        else:
            apart = (our.int() - their.int()).abs()
            assert apart.max() <= 1, f"{name}: {apart.max()}"
            assert (apart != 0).float().mean() <= 0.02, f"{name}: {(apart != 0).sum()} of {apart.numel()} codes"


def assert_equals_the_cpu(
    device: Device,
    make: Callable[[nn.Module, Device], Any],
    loop: Loop = plain,
    dtype: torch.dtype = torch.float32,
    coded: bool = False,
) -> None:
    """Check that a training moves the weights, and ends on a device as on the CPU."""
    ends = []
    for each in (CPU, device):
        net = network(each, dtype)
        optimizer = make(net, each)
        ends.append(results(net, loop(net, optimizer, each) or optimizer))
    assert_close(ends[1], ends[0], device.rtol, coded)
    before = network(device, dtype).named_parameters()
    assert not all(ends[1][f"{name} weight"].equal(param.detach().cpu()) for name, param in before)
