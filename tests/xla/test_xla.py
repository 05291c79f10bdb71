"""Steps on torch_xla equal the CPU's, and each is one graph, as AdamW's. `make xla` runs them on XLA's own CPU runtime.

A process has one runtime. Without torch_xla, these tests are skipped.
"""

from __future__ import annotations

import io
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Lamb, LossScaler, WindowScale, schedules
from bighorn.capabilities import capabilities
from bighorn.kernels.rounding import load_weight
from tests.support.cases import Kind

os.environ.setdefault("PJRT_DEVICE", "CPU")
torch_xla: Any = pytest.importorskip("torch_xla", reason="torch_xla is not installed; `make xla` installs it")
metrics: Any = pytest.importorskip("torch_xla.debug.metrics")

pytestmark = pytest.mark.process

SHAPES = [(6, 300), (7,), (), (3, 4, 5)]
STEPS = 5
STEADY = 2
"""The steps that compile: one that creates the state, and one that finds it on the device."""

LOW = torch.bfloat16
SMALL_STATE: dict[str, Any] = {"min_8bit_size": 0}
WAYS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "plain": (torch.float32, {}),
    "reference": (torch.float32, {"backend": "reference"}),
    "clip-skip": (torch.float32, {"max_grad_norm": 0.1, "skip_nonfinite": True}),
    "schedule": (torch.float32, {"lr": schedules.Cosine(0.05, 8)}),
    "int8": (torch.float32, {"state_dtype": "int8", **SMALL_STATE}),
    "int4": (torch.float32, {"state_dtype": "int4", **SMALL_STATE}),
    "bfloat16": (torch.float32, {"state_dtype": "bfloat16"}),
    "stochastic": (LOW, {"weight_rounding": "stochastic"}),
    "stochastic-float16": (torch.float16, {"weight_rounding": "stochastic"}),
    "kahan": (LOW, {"weight_rounding": "kahan"}),
    "kahan-float16": (torch.float16, {"weight_rounding": "kahan"}),
    "master": (LOW, {"weight_rounding": "master"}),
}

CLOSE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative tolerances: the CPU adds up in another order, and may round to the neighbour."""


class Graphs:
    """What XLA did: graphs that it compiled, graphs in all, and operations that it computed on the host.

    It measures executions later, in another thread, so that their own metric is no count of a step.
    """

    def __init__(self) -> None:
        torch_xla.sync(wait=True)
        metrics.clear_all()

    def end(self) -> tuple[int, int, list[str]]:
        """Return the counts since the beginning."""
        torch_xla.sync(wait=True)
        new, known = (metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
        return new, new + known, [name for name in metrics.counter_names() if name.startswith("aten::")]


class Training:
    """Parameters, their optimizer and the gradients of each step, on one device."""

    def __init__(self, kind: Any, device: str, dtype: torch.dtype, **options: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        values = [(torch.randn(shape, generator=generator) * 0.3).to(dtype) for shape in SHAPES]
        self.params = [Parameter(value.to(device)) for value in values]
        chosen = {"lr": 0.05, "weight_decay": 0.1, "backend": "foreach", **options}
        self.optimizer: Any = kind(self.params, **(options if kind is torch.optim.AdamW else chosen))

    def set_gradients(self, step: int, leave_out: int | None = None, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(step)
        for i, param in enumerate(self.params):
            grad = torch.randn(param.shape, generator=generator) * factor
            param.grad = None if i == leave_out else grad.to(param.dtype).to(param.device)

    def steps(self, numbers: range) -> list[tuple[int, int, list[str]]]:
        found = []
        for step in numbers:
            self.set_gradients(step)
            graphs = Graphs()
            self.optimizer.step()
            found.append(graphs.end())
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and state on the CPU; a compensated weight as the value that it stands for."""
        found: dict[str, Tensor] = {}
        for i, param in enumerate(self.params):
            state = {name: value.cpu() for name, value in self.optimizer.state.get(param, {}).items()}
            x = param.detach().cpu()
            if "compensation" in state:
                x = load_weight(x, {"compensation": state.pop("compensation")})
            found |= {f"{i} {name}": value for name, value in {"x": x, **state}.items()}
        return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], coded: bool = False) -> None:
    """Check that tensors agree; one code in 50 may be its neighbour, by which a weight of `coded` state moves."""
    assert ours.keys() == theirs.keys()
    for name, our in ours.items():
        their = theirs[name]
        assert our.dtype == their.dtype, name
        if our.dtype.is_floating_point:
            rtol, atol = max(CLOSE[our.dtype], 1e-2 * coded), 1e-3 if coded else 1e-6
            far = ~torch.isclose(our, their, rtol=rtol, atol=atol)
            assert not far.any(), f"{name}: {our[far]} {their[far]}"
        else:
            apart = (our.int() - their.int()).abs()
            assert apart.max() <= 1, f"{name}: {apart.max()}"
            assert (apart != 0).float().mean() <= 0.02, f"{name}: {(apart != 0).sum()} of {apart.numel()} codes"


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_cpus_in_one_graph(kind: Kind, way: str) -> None:
    dtype, options = WAYS[way]
    here, there = (Training(kind, device, dtype, **options) for device in ("cpu", "xla"))
    for step in range(STEPS):
        here.set_gradients(step)
        here.optimizer.step()
    found = there.steps(range(STEPS))
    assert_equal(there.tensors(), here.tensors(), coded="state_dtype" in options)
    assert found[STEADY:] == [(0, 1, [])] * (STEPS - STEADY), f"compiled, executed, on the host: {found}"
    assert found[0][0] <= 1, f"{found}"
    assert found[1][0] <= 1, f"{found}"
    telemetry, theirs = there.optimizer.telemetry(), here.optimizer.telemetry()
    assert telemetry.skipped == theirs.skipped == 0
    for name in here.optimizer.algorithm.kernel_options_type.metrics:
        mine, its = (getattr(each, name).cpu() for each in (telemetry, theirs))
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_a_clip_of_gradients_whose_squares_overflow_float32() -> None:
    here, there = (Training(Lamb, device, torch.float32, max_grad_norm=0.1) for device in ("cpu", "xla"))
    for training in (here, there):
        training.set_gradients(0, factor=1e20)
        training.optimizer.step()
    assert_equal(there.tensors(), here.tensors())


def test_adamw_of_torch_takes_as_many_graphs() -> None:
    found = Training(torch.optim.AdamW, "xla", torch.float32, lr=0.05).steps(range(STEPS))
    assert found[STEADY:] == [(0, 1, [])] * (STEPS - STEADY), f"{found}"
    assert (found[0][0], found[1][0]) == (1, 1), f"{found}"


def test_a_gradient_that_is_missing_is_a_graph_of_its_own(kind: Kind) -> None:
    """Each set of gradients is compiled once: XLA has no graph in which a tensor may be absent."""
    missing = [None, None, 1, 1, None, 1, None]
    ends, found = [], []
    for device in ("cpu", "xla"):
        training = Training(kind, device, torch.float32)
        for step, leave_out in enumerate(missing):
            training.set_gradients(step, leave_out)
            graphs = Graphs()
            training.optimizer.step()
            found.append(graphs.end())
        ends.append(training.tensors())
    assert_equal(ends[1], ends[0])
    assert found[-2:] == [(0, 1, [])] * 2, f"{found}"


def test_a_scaled_loss(kind: Kind) -> None:
    """A step that overflows is skipped, and the graph of a step is the same whether it overflows or not."""
    ends, found = [], []
    for device in ("cpu", "xla"):
        training = Training(kind, device, torch.float32, max_grad_norm=0.1)
        scaler = LossScaler(WindowScale(1024.0, growth_interval=100))
        for step in range(STEPS + 1):
            scale = float(scaler.get_scale())
            scaler.scale(torch.ones((), device=device))
            training.set_gradients(step, factor=torch.inf if step == 3 else scale)
            graphs = Graphs()
            scaler.step(training.optimizer)
            scaler.update()
            found.append(graphs.end())
        assert scaler.get_scale() == 512
        ends.append(training.tensors())
    assert_equal(ends[1], ends[0])
    assert found[-3:] == [(0, 1, [])] * 3, f"{found}"


@pytest.mark.parametrize("way", ["plain", "int8"])
@pytest.mark.parametrize("route", ["xla-xla", "xla-cpu", "cpu-xla"])
def test_checkpoints(kind: Kind, route: str, way: str) -> None:
    """A run that moves in the middle ends where one ends that stayed on the CPU."""
    dtype, options = WAYS[way]
    first, second = route.split("-")
    before, after, still = (Training(kind, device, dtype, **options) for device in (first, second, "cpu"))
    before.steps(range(2))
    file = io.BytesIO()
    torch.save([[param.detach() for param in before.params], before.optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, map_location=second if second == "cpu" else None, weights_only=True)
    with torch.no_grad():
        for param, weight in zip(after.params, weights, strict=True):
            param.copy_(weight)
    after.optimizer.load_state_dict(state)
    saved, loaded = before.tensors(), after.tensors()
    for name, value in saved.items():
        assert loaded[name].equal(value), name
    for name, value in after.optimizer.state[after.params[0]].items():
        assert value.device.type == second, name
    after.steps(range(2, 4))
    still.steps(range(4))
    assert_equal(after.tensors(), still.tensors(), coded=way != "plain")


def test_what_the_device_has() -> None:
    """Tensors have no address there; a step that asked for one found every storage freed."""
    found = capabilities(torch.device("xla:0"))
    assert (found.float64, found.bfloat16, found.addresses) == (True, True, False)
