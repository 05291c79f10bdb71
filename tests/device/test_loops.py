"""What surrounds steps gives on a device what it gives on the CPU: scalers, release, checkpoints, offload, faces."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bighorn
from bighorn import Lamb, LossScaler, WindowScale, offload, release_gradients, schedules
from bighorn.compat import mindformers, mindspore, npu_bridge, pytorch_fused_lamb, torch_npu
from tests.device import stand_in
from tests.device.moved import on_host
from tests.device.stand_in import STAND_IN
from tests.support.cases import Kind
from tests.support.optimizer_runs import figures
from tests.support.processes import group_of_one

pytestmark = STAND_IN

STEPS = 4
CLOSE: Any = {"rtol": 1e-5, "atol": 2e-6}
"""The CPU and the device add up in other orders, and on the CPU `foreach` uses torch's fused Adam."""

Loop = Callable[[nn.Module, Any], object]


def network(device: str, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 70), nn.Tanh(), nn.LayerNorm(70), nn.Linear(70, 90), nn.Tanh(), nn.Linear(90, 3))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return net.to(device, dtype)


def gradients(step: int) -> list[Tensor]:
    """Return the gradients of a network; those of a backward through matrices have other last bits on each device.

    CAME makes of a last bit of a gradient a thousandth of a step.
    """
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator) for param in network("meta").parameters()]


def loss_of(net: nn.Module, step: int) -> Any:
    """Return a loss with these gradients; the model's output has no part in them."""
    first = next(net.parameters())
    loss = 0 * net(torch.ones(4, 9).to(first.device, first.dtype)).square().mean()
    for param, grad in zip(net.parameters(), gradients(step), strict=True):
        loss = loss + (param * grad.to(param.device, param.dtype)).sum()
    return loss


def optimizer_of(kind: Kind, net: nn.Module, **options: Any) -> Any:
    chosen = {"lr": 0.05, "weight_decay": 0.1, "backend": "foreach", **options}
    return kind(net.named_parameters(), **chosen)


def plain(net: nn.Module, optimizer: Any) -> None:
    for step in range(STEPS):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def results(kind: Kind, loop: Loop, device: str, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    net = network(device, dtype)
    loop(net, optimizer_of(kind, net, **options))
    return [param.detach().cpu().float() for param in net.parameters()]


def assert_same_training(kind: Kind, loop: Loop, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Check that a loop ends with the same weights on both; a 16-bit weight may differ by a unit in the last place."""
    here, there = (results(kind, loop, device, dtype, options) for device in ("cpu", "npu"))
    assert any(not a.equal(b.detach().float()) for a, b in zip(here, network("cpu", dtype).parameters(), strict=True))
    coded = options.get("state_dtype") in ("int8", "bfloat16")  # a value may get the neighbour of a code
    close = CLOSE if dtype == torch.float32 and not coded else {"rtol": 2e-2, "atol": 2e-2}
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours, theirs, **close)


# ---- options, precision ---------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"max_grad_norm": 0.1},
    "skip": {"skip_nonfinite": True, "max_grad_norm": 0.1},
    "centralised": {"grad_centralization": True, "max_grad_norm": 0.1},
    "schedule": {"lr": schedules.Cosine(0.05, 8)},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8", "min_8bit_size": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_training(kind: Kind, options: str) -> None:
    chosen = dict(OPTIONS[options])
    central = chosen.pop("grad_centralization", False)

    def loop(net: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["grad_centralization"] = central
        plain(net, optimizer)

    assert_same_training(kind, loop, **chosen)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan", "master"])
def test_16_bit_weights(kind: Kind, rounding: str) -> None:
    assert_same_training(kind, plain, torch.bfloat16, weight_rounding=rounding)


def test_a_clip_over_parameters_on_two_devices(kind: Kind) -> None:
    """Their sums of squares have other forms where the device has no float64."""
    ends = []
    for second in ("cpu", "npu"):
        net = network("cpu")
        net[2:].to(second)
        optimizer = optimizer_of(kind, net, max_grad_norm=0.1)
        for param, grad in zip(net.parameters(), gradients(0), strict=True):
            param.grad = (1e20 * grad).to(param.device)
        optimizer.step()
        ends.append([param.detach().cpu() for param in net.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


# ---- scaling --------------------------------------------------------------------------------------------------------


def scaled(make: Callable[[str], Any]) -> Loop:
    def loop(net: nn.Module, optimizer: Any) -> None:
        scaler = make(next(net.parameters()).device.type)
        for step in range(STEPS):
            scaler.scale(loss_of(net, step)).backward()
            if step == 1:
                next(net.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 512

    return loop


SCALERS: dict[str, Callable[[str], Any]] = {
    "bighorn": lambda _: LossScaler(WindowScale(1024.0, growth_interval=100)),
    "bighorn-limit": lambda _: LossScaler(WindowScale(1024.0, growth_interval=100), max_consecutive_overflows=2),
    "torch": lambda device: torch.amp.GradScaler(device, init_scale=1024.0),
}


def skip_torchs(mode: str, scaler: str) -> None:
    if mode == "no float64" and scaler == "torch":
        pytest.skip("torch's GradScaler.unscale_ needs float64 on every device but Apple's")


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaled_loss(mode: str, kind: Kind, scaler: str) -> None:
    skip_torchs(mode, scaler)
    assert_same_training(kind, scaled(SCALERS[scaler]), max_grad_norm=0.1)


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_scaler_with_an_optimizer_of_torch(mode: str, scaler: str) -> None:
    skip_torchs(mode, scaler)
    ends = []
    for device in ("cpu", "npu"):
        net = network(device)
        scaled(SCALERS[scaler])(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        ends.append([param.detach().cpu() for param in net.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_step_with_our_scaler_waits_for_nothing(kind: Kind) -> None:
    net = network("npu")
    optimizer, scaler = optimizer_of(kind, net), LossScaler(WindowScale(1024.0))
    for step in range(STEPS):
        scaler.scale(loss_of(net, step)).backward()
        with stand_in.counted() as found:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    assert not stand_in.waits(found), f"{found}"


# ---- release, telemetry, checkpoints --------------------------------------------------------------------------------


def test_gradient_release(kind: Kind) -> None:
    def released(net: nn.Module, optimizer: Any) -> None:
        release_gradients(net, optimizer)
        for step in range(STEPS):
            with stand_in.counted() as found:
                loss = loss_of(net, step)
                before = stand_in.waits(stand_in.counts())
                loss.backward()
                optimizer.step()
            if next(net.parameters()).device.type == "npu" and step > 1:
                assert stand_in.waits(found) == before, f"{stand_in.waits(found)}, before the step {before}"

    assert_same_training(kind, released)


def test_telemetry(kind: Kind) -> None:
    found = []
    for device in ("cpu", "npu"):
        net = network(device)
        optimizer = optimizer_of(kind, net, skip_nonfinite=True)
        plain(net, optimizer)
        telemetry = optimizer.telemetry()
        assert list(telemetry.names) == [name for name, _ in net.named_parameters()], telemetry.names
        assert telemetry.skipped == 0
        found.append(on_host(figures(telemetry)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", ["plain", "int8"])
@pytest.mark.parametrize("way", ["npu-npu", "npu-cpu", "cpu-npu"])
def test_checkpoints(kind: Kind, way: str, options: str) -> None:
    """A run that moves in the middle ends where one ends that stayed on the CPU."""

    def train(net: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = way.split("-")
    nets = network(first), network(second), network("cpu")
    before, after, still = (optimizer_of(kind, net, **OPTIONS[options]) for net in nets)
    train(nets[0], before, range(2))
    file = io.BytesIO()
    torch.save([nets[0].state_dict(), before.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, map_location=second, weights_only=True)
    nets[1].load_state_dict(weights)
    after.load_state_dict(state)
    for name, value in after.state[nets[1][0].weight].items():
        assert value.device.type == second, name
        assert value.cpu().equal(before.state[nets[0][0].weight][name].cpu()), name
    train(nets[1], after, range(2, STEPS))
    train(nets[2], still, range(STEPS))
    for ours, theirs in zip(nets[1].parameters(), nets[2].parameters(), strict=True):
        close = CLOSE if options == "plain" else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), **close)


# ---- offload --------------------------------------------------------------------------------------------------------

OFFLOADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "own-clip": {"max_grad_norm": 0.1},
    "scaler": {},
    "clip-of-offload": {},
}


@pytest.mark.parametrize("overlap", ["copies", "forward"])
@pytest.mark.parametrize("what", OFFLOADS)
def test_offload(overlap: Any, what: str) -> None:
    """Parameters step on the CPU, while the device's copies arrive as late as streams let them."""
    ends = []
    for device in ("cpu", "npu"):
        net = network(device)
        scaler = LossScaler(WindowScale(1024.0)) if what == "scaler" else None
        optimizer: Any
        if what == "clip-of-offload":
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        else:
            optimizer = optimizer_of(Lamb, net, **OFFLOADS[what])
        if device == "npu":
            clip = 0.1 if what == "clip-of-offload" else None
            optimizer = offload(net, optimizer, overlap=overlap, bucket_mb=0.0005, scaler=scaler, max_grad_norm=clip)
        for step in range(STEPS):
            loss = loss_of(net, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if device == "cpu" and what == "clip-of-offload":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if scaler is not None and device == "cpu":
                scaler.step(optimizer)
            else:
                optimizer.step()
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
        if device == "npu":
            optimizer.synchronize()
        ends.append([param.detach().cpu() for param in net.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_offload_of_gradients_whose_squares_are_out_of_range(size: float) -> None:
    ends = []
    for device in ("cpu", "npu"):
        net = network(device)
        optimizer: Any = optimizer_of(Lamb, net, max_grad_norm=0.1 * size, eps=1e-3 * size)
        if device == "npu":
            optimizer = offload(net, optimizer, overlap="copies", bucket_mb=0.0005)
        for param, grad in zip(net.parameters(), gradients(0), strict=True):
            loss: Any = (param * (size * grad).to(device)).sum()
            loss.backward()
        optimizer.step()
        if device == "npu":
            optimizer.synchronize()
        ends.append([param.detach().cpu() for param in net.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---- sharded parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ["clip", "int8"])
def test_fsdp2_of_one_rank(kind: Kind, options: str) -> None:
    """Gloo, which moves nothing for one rank, reads no memory of the device."""
    plain_net, sharded = network("cpu"), network("npu")
    plain_optimizer = optimizer_of(kind, plain_net, **OPTIONS[options])
    plain(plain_net, plain_optimizer)
    with group_of_one():
        fully_shard(sharded, mesh=init_device_mesh("npu", (1,)))
        optimizer = optimizer_of(kind, sharded, **OPTIONS[options])
        for step in range(STEPS):
            loss = sharded(torch.ones(4, 9).to("npu")).square().mean()
            loss.backward()
            for param, given in zip(sharded.parameters(), gradients(step), strict=True):
                assert isinstance(param.grad, DTensor)
                param.grad.to_local().copy_(given.to("npu"))
            with stand_in.counted() as found:
                optimizer.step()
            optimizer.zero_grad()
        ends = [param.to_local().detach().cpu() for param in sharded.parameters()]  # type: ignore[attr-defined]
    assert not stand_in.waits(found), f"{found}"
    for ours, theirs in zip(ends, plain_net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), **CLOSE)


# ---- faces of other systems -----------------------------------------------------------------------------------------


def face(name: str, net: nn.Module) -> Any:
    named = list(net.named_parameters())
    params = [param for _, param in named]
    if name == "NpuFusedLamb":
        return torch_npu.NpuFusedLamb(params, lr=0.05, weight_decay=0.1)
    if name == "NpuFusedLamb-global-norm":
        return torch_npu.NpuFusedLamb(params, lr=0.05, use_global_grad_norm=True)
    if name == "mindspore-Lamb":
        return mindspore.Lamb(named, 0.05, weight_decay=0.1)
    if name == "mindformers-Came":
        return mindformers.Came(named, 0.05, weight_decay=0.1)
    if name == "mindformers-Came-relative":
        return mindformers.Came(named, weight_decay=0.1, relative_step=True, warmup_init=True)
    if name == "npu_bridge-LAMBOptimizer":
        return npu_bridge.LAMBOptimizer(0.05, 0.1, params=named)
    return pytorch_fused_lamb.Lamb(params, 0.05)


FACES = (
    *("NpuFusedLamb", "NpuFusedLamb-global-norm", "mindspore-Lamb", "mindformers-Came", "mindformers-Came-relative"),
    *("npu_bridge-LAMBOptimizer", "pytorch_fused_lamb-Lamb"),
)


@pytest.mark.parametrize("name", FACES)
def test_faces(name: str) -> None:
    ends = []
    for device in ("cpu", "npu"):
        net = network(device)
        optimizer = face(name, net)
        for step in range(STEPS):
            loss = loss_of(net, step)
            if "mindspore" in name or "mindformers" in name:
                with stand_in.counted() as found:
                    optimizer(torch.autograd.grad(loss, list(net.parameters())))
            else:
                loss.backward()
                with stand_in.counted() as found:
                    optimizer.step()
            optimizer.zero_grad()
        assert not stand_in.waits(found), f"{found}"
        ends.append([param.detach().cpu() for param in net.parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_clip_of_npu_fused_lamb() -> None:
    norms = []
    for device in ("cpu", "npu"):
        net = network(device)
        optimizer = torch_npu.NpuFusedLamb(net.parameters(), lr=0.05)
        loss_of(net, 0).backward()
        norms.append(optimizer.clip_grad_norm_fused_(0.1).cpu())
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)


def test_status_has_a_row_of_the_accelerators_own_steps() -> None:
    (row,) = (row for row in bighorn.status().backends if row.has)
    assert (row.name, row.device.type, row.works) == ("foreach", "npu", True)
