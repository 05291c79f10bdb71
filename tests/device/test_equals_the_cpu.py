"""A training on a device ends where the same training ends on the CPU, and no step waits for the device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bighorn import Came, Lamb, Lars, LossScaler, WindowScale, offload, release_gradients
from bighorn.compat import mindformers, mindspore, npu_bridge, pytorch_fused_lamb, torch_npu
from tests.device.devices import CPU, Device, on, without_waits
from tests.device.stand_in import MODES
from tests.device.trainings import (
    OPTIONS,
    STEADY,
    STEPS,
    Loop,
    assert_close,
    assert_equals_the_cpu,
    gradients,
    loss_of,
    network,
    optimizer_of,
    plain,
    results,
    set_gradients,
)
from tests.support.cases import Kind
from tests.support.processes import group_of_one

# ---- loops ----------------------------------------------------------------------------------------------------------


def missing(net: nn.Module, optimizer: Any, device: Device) -> None:
    """Each set of gradients is a separate graph of XLA, whose graphs have no optional tensors."""
    for step, leave_out in enumerate([None, None, 1, 1, None, 1, None]):
        set_gradients(net, step, leave_out=leave_out)
        with without_waits(device, step > 4):
            optimizer.step()


def huge(net: nn.Module, optimizer: Any, device: Device) -> None:
    """The squares of gradients overflow float32."""
    set_gradients(net, 0, 1e20)
    with without_waits(device, knows=False):
        optimizer.step()


def scaled(name: str) -> Loop:
    def loop(net: nn.Module, optimizer: Any, device: Device) -> None:
        """One step overflows, with the same graph as the other steps."""
        scaler = SCALERS[name](device.type)
        waits = name != "scaler" or isinstance(optimizer, torch.optim.AdamW)
        for step in range(STEPS):
            scaler.scale(torch.ones((), device=device.type))
            set_gradients(net, step, torch.inf if step == 3 else float(scaler.get_scale()))
            with without_waits(CPU if waits else device, step >= STEADY):
                scaler.step(optimizer)
                scaler.update()
        assert scaler.get_scale() == 512

    return loop


SCALERS: dict[str, Callable[[str], Any]] = {
    "scaler": lambda _: LossScaler(WindowScale(1024.0, growth_interval=100)),
    "scaler-with-a-limit": lambda _: LossScaler(WindowScale(1024.0, growth_interval=100), max_consecutive_overflows=2),
    "scaler-of-torch": lambda device: torch.amp.GradScaler(device, init_scale=1024.0),
}


def released(net: nn.Module, optimizer: Any, device: Device) -> None:
    release_gradients(net, optimizer)
    for step in range(STEPS):
        loss = loss_of(net, step)
        with without_waits(device, step >= STEADY):
            loss.backward()
            optimizer.step()


class Training(NamedTuple):
    """The options of an optimizer, the dtype of weights, and a loop."""

    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float32
    loop: Loop = plain


LOW, HALF = torch.bfloat16, torch.float16
TRAININGS = {
    **{name: Training(options) for name, options in OPTIONS.items()},
    "nearest": Training({}, LOW),
    "stochastic": Training({"weight_rounding": "stochastic"}, LOW),
    "stochastic-float16": Training({"weight_rounding": "stochastic"}, HALF),
    "kahan": Training({"weight_rounding": "kahan"}, LOW),
    "kahan-float16": Training({"weight_rounding": "kahan"}, HALF),
    "master": Training({"weight_rounding": "master"}, LOW),
    "missing": Training(loop=missing),
    "huge": Training({"max_grad_norm": 0.1}, loop=huge),
    "release": Training(loop=released),
    **{name: Training({"max_grad_norm": 0.1}, loop=scaled(name)) for name in SCALERS},
}


def skip_without(device: Device, name: str) -> None:
    if device.name == "xla" and name == "scaler-of-torch":
        pytest.skip("it passes, and takes 1 to 3 minutes: torch_xla compiles a graph for each value of the scale")
    if device.name == "no float64" and name == "scaler-of-torch":
        pytest.skip("torch's GradScaler.unscale_ needs float64 on every device but Apple's")


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training(device: Device, kind: Kind, name: str) -> None:
    skip_without(device, name)
    options, dtype, loop = TRAININGS[name]

    def make(net: nn.Module, each: Device) -> Any:
        return optimizer_of(kind, net, each, **options)

    assert_equals_the_cpu(device, make, loop, dtype, coded="state_dtype" in options)


@pytest.mark.parametrize("name", ["plain", *SCALERS])
def test_adamw_of_torch(device: Device, name: str) -> None:
    skip_without(device, name)
    loop = scaled(name) if name in SCALERS else plain
    assert_equals_the_cpu(device, lambda net, _: torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True), loop)


@on(*MODES, "gpu")
def test_a_clip_over_two_devices(device: Device, kind: Kind) -> None:
    """Their sums of squares have other forms where the device has no float64."""

    def make(net: nn.Module, each: Device) -> Any:
        net[:2].to("cpu")  # type: ignore[index]
        return optimizer_of(kind, net, each, max_grad_norm=0.1, backend="foreach")

    assert_equals_the_cpu(device, make, huge)


@pytest.mark.parametrize("options", ["plain", "int8"])
@pytest.mark.parametrize("route", ["there-there", "there-cpu", "cpu-there"])
def test_checkpoints(device: Device, kind: Kind, route: str, options: str) -> None:
    """A run that is saved, and loaded on the same or another device, ends like a run on the CPU."""
    first, second = (device if each == "there" else CPU for each in route.split("-"))
    nets = network(first), network(second), network(CPU)
    before, after, still = (
        optimizer_of(kind, net, each, **OPTIONS[options]) for net, each in zip(nets, (first, second, CPU), strict=True)
    )
    plain(nets[0], before, first, range(2))
    file = io.BytesIO()
    torch.save([nets[0].state_dict(), before.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, map_location="cpu" if second is CPU else None, weights_only=True)
    nets[1].load_state_dict(weights)
    after.load_state_dict(state)
    for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        for name, value in after.state[ours].items():
            assert value.device.type == second.type, name
            assert value.cpu().equal(before.state[theirs][name].cpu()), name
    for step in range(2, STEPS):
        set_gradients(nets[1], step)
        with without_waits(second, knows=False):
            after.step()
    plain(nets[2], still, CPU)
    assert_close(results(nets[1], after), results(nets[2], still), device.rtol, coded=options == "int8")


# ---- offload --------------------------------------------------------------------------------------------------------


class Offload(NamedTuple):
    """An optimizer that steps on the CPU, while the device's copies arrive as late as streams let them."""

    make: Any = Lamb
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float32
    factor: float = 1.0
    """Of gradients."""


OFFLOADS = {
    "lamb": Offload(),
    "came": Offload(Came),
    "lars": Offload(Lars),
    "master": Offload(Came, {"weight_rounding": "master"}, LOW),
    "scaler": Offload(),
    "clip": Offload(options={"max_grad_norm": 0.1}),
    "clip-of-offload": Offload(torch.optim.AdamW),
    "clip-1e25": Offload(options={"max_grad_norm": 1e24, "eps": 1e22}, factor=1e25),
    "clip-1e-25": Offload(options={"max_grad_norm": 1e-26, "eps": 1e-28}, factor=1e-25),
}


@on(*MODES, "gpu")
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload(device: Device, name: str) -> None:
    kind, options, dtype, factor = OFFLOADS[name]

    def make(net: nn.Module, _: Device) -> Any:
        if kind is torch.optim.AdamW:
            return torch.optim.AdamW(net.parameters(), lr=0.01)
        return optimizer_of(kind, net, CPU, **options)

    def loop(net: nn.Module, optimizer: Any, each: Device) -> Any:
        scaler = LossScaler(WindowScale(1024.0)) if name == "scaler" else None
        clip = 0.1 if name == "clip-of-offload" else None
        there = each is device
        if there:
            optimizer = offload(net, optimizer, bucket_mb=0.0005, scaler=scaler, max_grad_norm=clip)
        for step in range(STEPS):
            loss = loss_of(net, step, factor)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if clip and not there:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            if scaler and not there:
                scaler.step(optimizer)
            else:
                optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()
        if there:
            optimizer.synchronize()
        return optimizer

    assert_equals_the_cpu(device, make, loop, dtype)


# ---- sharded parameters ---------------------------------------------------------------------------------------------


@on(*MODES, "gpu")
@pytest.mark.parametrize("options", ["plain", "skip", "int8"])
def test_fsdp2_of_one_rank(device: Device, kind: Kind, options: str) -> None:
    """With one rank, gloo copies nothing, so it reads no memory of the stand-in."""
    alone, sharded = (network(each, last=lambda: nn.Linear(90, 3)) for each in (CPU, device))
    theirs = optimizer_of(kind, alone, CPU, **OPTIONS[options])
    plain(alone, theirs, CPU)
    with group_of_one("nccl" if device.type == "cuda" else "gloo"):
        fully_shard(sharded, mesh=init_device_mesh(device.type, (1,)))
        ours = optimizer_of(kind, sharded, device, **OPTIONS[options])
        for step in range(STEPS):
            sharded(torch.ones(4, 9).to(device.type)).square().mean().backward()
            for param, grad in zip(sharded.parameters(), gradients(alone, step), strict=True):
                assert isinstance(param.grad, DTensor)
                param.grad.to_local().copy_(grad.to(device.type))
            with without_waits(device, step >= STEADY):
                ours.step()
            ours.zero_grad()
        ends = {name: param.to_local().detach().cpu() for name, param in sharded.named_parameters()}  # type: ignore[attr-defined]
    assert_close(
        ends, {name: param.detach() for name, param in alone.named_parameters()}, device.rtol, options == "int8"
    )


# ---- faces of other systems -----------------------------------------------------------------------------------------

FACES: dict[str, Callable[[list[Any]], Any]] = {
    "NpuFusedLamb": lambda named: torch_npu.NpuFusedLamb(params_of(named), lr=0.05, weight_decay=0.1),
    "NpuFusedLamb-global-norm": lambda named: torch_npu.NpuFusedLamb(
        params_of(named), lr=0.05, use_global_grad_norm=True
    ),
    "mindspore-Lamb": lambda named: mindspore.Lamb(named, 0.05, weight_decay=0.1),
    "mindformers-Came": lambda named: mindformers.Came(named, 0.05, weight_decay=0.1),
    "mindformers-Came-relative": lambda named: mindformers.Came(
        named, weight_decay=0.1, relative_step=True, warmup_init=True
    ),
    "npu_bridge-LAMBOptimizer": lambda named: npu_bridge.LAMBOptimizer(0.05, 0.1, params=named),
    "pytorch_fused_lamb-Lamb": lambda named: pytorch_fused_lamb.Lamb(params_of(named), 0.05),
}


def params_of(named: list[Any]) -> list[Any]:
    return [param for _, param in named]


@on(*MODES, "gpu")
@pytest.mark.parametrize("name", FACES)
def test_faces(device: Device, name: str) -> None:
    def loop(net: nn.Module, optimizer: Any, each: Device) -> None:
        for step in range(STEPS):
            loss, given = loss_of(net, step), []
            if name.startswith("mind"):
                given = [torch.autograd.grad(loss, list(net.parameters()))]
            else:
                loss.backward()
            with without_waits(each, step >= STEADY):
                (optimizer if given else optimizer.step)(*given)
            optimizer.zero_grad()

    assert_equals_the_cpu(device, lambda net, _: FACES[name](list(net.named_parameters())), loop)


@on(*MODES)
def test_the_clip_of_npu_fused_lamb(device: Device) -> None:
    norms = []
    for each in (CPU, device):
        net = network(each)
        set_gradients(net, 0)
        norms.append(torch_npu.NpuFusedLamb(net.parameters(), lr=0.05).clip_grad_norm_fused_(0.1).cpu())
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
