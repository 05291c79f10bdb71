"""What only a GPU can show: `pytest -m gpu`. Everything in this file makes its tensors there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import test_backends
from bighorn import Lamb, kernels
from cases import CASES, Case, Kind, set_gradients
from contract import BY_ID, figures
from leaves import Layout, arranged

STATUS = kernels.status()["triton"]
CUDA = STATUS.device == "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(STATUS.device == "cpu", reason=f"no GPU that Triton serves: {STATUS.detail}"),
]
needs_cuda = pytest.mark.skipif(not CUDA, reason="about torch.cuda")
BACKENDS = ("triton", "foreach", "reference")


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    torch.set_default_device(STATUS.device)
    yield
    torch.set_default_device(None)


# ---- the tests of all backends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "case"),
    [pytest.param(b, case, id=f"{b}-{case.id}") for b in BACKENDS for case in CASES if case.runs_on(b)],
)
def test_a_step_equals_the_float64_reference(backend: str, case: Case) -> None:
    test_backends.check_steps(backend, case)


@pytest.mark.parametrize("stacked", [False, True])
def test_trust_ratio_table(stacked: bool) -> None:
    test_backends.test_trust_ratio_table_in_every_backend("triton", stacked)


@pytest.mark.parametrize("size", [100, 300_000])
@pytest.mark.parametrize("extreme", test_backends.EXTREMES)
def test_norms_neither_overflow_nor_vanish(extreme: str, size: int, kind: Kind) -> None:
    test_backends.test_norms_neither_overflow_nor_vanish(extreme, size, kind, "triton")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", ["skip", "came-skip", "came-float32-states-int8-everything"])
def test_skip_nonfinite(case: str, bad: float, first: bool) -> None:
    test_backends.test_skip_nonfinite_changes_nothing_and_counts("triton", BY_ID[case], bad, first)


def test_layouts(kind: Kind) -> None:
    test_backends.test_the_layout_in_memory_changes_nothing_but_rounding(kind, "triton")


# ---- a device of its own ------------------------------------------------------------------------------------------

SHAPES = ((1000, 1000), (4097,), (64, 3, 7, 7), (17,), (1,), (0,))
OPTIONS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "backend": "triton"}


def parameters(seed: int = 0, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Parameter]:
    torch.manual_seed(seed)
    return [Parameter(torch.randn(shape)) for shape in shapes]


def gradients(seed: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    return [p.detach() for p in parameters(1000 + seed, shapes)]


def same(first: list[Parameter], second: list[Parameter]) -> bool:
    return all(a.equal(b) for a, b in zip(first, second, strict=True))


def trained(kind: Kind, steps: int = 3, wait: Callable[[], None] = lambda: None, **options: Any) -> list[Parameter]:
    """Parameters after some steps with gradients that lie elsewhere each time; `wait` comes before each."""
    params = parameters()
    optimizer = kind(params, **{**OPTIONS, **options})
    for step in range(steps):
        wait()
        set_gradients(params, gradients(step))
        optimizer.step()
    return params


@needs_cuda
@pytest.mark.parametrize("backend", ["triton", "foreach"])
def test_the_host_never_waits(backend: str, kind: Kind) -> None:
    params = parameters()
    lr = torch.tensor(0.1)
    optimizer = kind(params, **{**OPTIONS, "lr": lr, "backend": backend, "max_grad_norm": 1.0, "skip_nonfinite": True})
    scale, found = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(4):
        moved = gradients(step)  # elsewhere at each step
        set_gradients(params, moved)
        optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[union-attr]
        lr.mul_(0.9)
        torch.cuda.set_sync_debug_mode("default" if step == 0 else "error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.telemetry().skipped == 0


@needs_cuda
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "skip_nonfinite": True}], ids=["plain", "clipped"])
def test_a_graph_replays_steps(options: dict[str, Any], kind: Kind) -> None:
    """Five steps with a learning rate that changes equal eager ones, and steps between the replays disturb nothing."""
    runs: list[list[Parameter]] = []
    for replays in (False, True):
        params, lr = parameters(), torch.tensor(0.0)
        static = [torch.zeros_like(p) for p in params]
        optimizer = kind(params, **OPTIONS | options | {"lr": lr})
        graph = torch.cuda.CUDAGraph()

        def step(
            seed: int, held: list[Tensor], *, params: Any = params, lr: Any = lr, optimizer: Any = optimizer
        ) -> None:
            for p, g, values in zip(params, held, gradients(seed), strict=True):
                p.grad = g.copy_(values)
            lr.fill_(0.1 / (seed + 1))
            optimizer.step()

        for seed in range(3):
            step(seed, [torch.empty_like(p) for p in params])
        if replays:
            set_gradients(params, static)
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(3, 8):
            if replays and seed != 5:
                for g, values in zip(static, gradients(seed), strict=True):
                    g.copy_(values)
                lr.fill_(0.1 / (seed + 1))
                graph.replay()
            else:
                step(seed, [torch.empty_like(p) for p in params])
        assert all(optimizer.state[p]["step"] == 8 for p in params)
        runs.append(params)
    assert same(*runs)


def test_the_same_bits_from_run_to_run(kind: Kind) -> None:
    runs = [trained(kind, max_grad_norm=1.0) for _ in range(3)]
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@needs_cuda
def test_a_step_belongs_to_the_current_stream(kind: Kind) -> None:
    """Gradients are there only when the stream, which has waited first, has made them."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        params = trained(kind, wait=nap)
    torch.cuda.current_stream().wait_stream(side)
    assert same(params, trained(kind))


@needs_cuda
def test_tables_in_flight_are_not_written_over(kind: Kind) -> None:
    """The host is steps ahead of the device, and each step has uploaded other addresses."""
    warm = trained(kind, steps=9)
    torch.cuda.synchronize()
    nap()
    assert same(warm, trained(kind, steps=9))


def nap() -> None:
    """Keep the current stream busy for some milliseconds."""
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]


@needs_cuda
def test_a_step_needs_little_memory(kind: Kind) -> None:
    """Scratch that is kept between steps included: 16 MB for LAMB, 2% of the parameters for CAME, tables in 1 MB."""
    shapes = ((5000, 5000), (3000, 7000), (3, 100, 100))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    params = parameters(0, shapes)
    optimizer = kind(params, **OPTIONS, max_grad_norm=1.0)
    set_gradients(params, gradients(0, shapes))
    optimizer.step()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    size = sum(param.nbytes for param in params)
    states = sum(value.nbytes for param in params for value in optimizer.state[param].values())
    extra = torch.cuda.max_memory_allocated() - before - 2 * size - states
    assert extra <= (16 << 20 if kind is Lamb else 0.02 * size + (1 << 20))


@needs_cuda
def test_a_compiled_training_step_is_compiled_once(kind: Kind) -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    net = torch.nn.Linear(64, 64)
    optimizer = kind(net.parameters(), **OPTIONS)

    def train(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()

    compiled = torch.compile(train, backend=counter)
    for step in range(3):
        compiled(torch.randn(8, 64))
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
    count = counter.frame_count
    for step in range(4):
        compiled(torch.randn(8, 64))
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
    assert counter.frame_count == count > 0
    assert all(state["step"] == 7 for state in optimizer.state.values())


def test_nothing_is_compiled_again_when_numbers_change(kind: Kind) -> None:
    import triton

    compiled: list[Any] = []
    params = parameters()
    optimizer = kind(params, **OPTIONS)
    for step in range(4):
        group = optimizer.param_groups[0]
        group["lr"], group["weight_decay"] = 0.1 / (step + 1), 0.1 * step
        group["betas"] = (0.9, 0.99 + step / 1000, 0.999)[: len(group["betas"])]
        set_gradients(params, gradients(step))
        optimizer.step()
        triton.knobs.runtime.jit_post_compile_hook = lambda *_, **found: compiled.append(found)
    triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == []


def test_parameters_on_several_devices(kind: Kind) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    runs = []
    for places in ((0, 0), (0, 1)):
        params = [Parameter(p.detach().to(f"{STATUS.device}:{places[i % 2]}")) for i, p in enumerate(parameters())]
        optimizer = kind(params, **OPTIONS, max_grad_norm=1.0)
        for step in range(2):
            set_gradients(params, [g.to(p.device) for p, g in zip(params, gradients(step), strict=True)])
            optimizer.step()
        runs.append([p.detach().cpu() for p in params])
    for one, two in zip(*runs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)  # the sum for the clip has another order


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2**31 + 12_345,), (2**21 + 7, 1025)], ids=["vector", "matrix"])
def test_elements_beyond_the_reach_of_32_bits(shape: tuple[int, ...], kind: Kind) -> None:
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB")
    results = []
    for backend in ("triton", "foreach"):
        torch.manual_seed(0)
        param = Parameter(torch.randn(shape, dtype=torch.bfloat16))
        param.grad = torch.randn(shape, dtype=torch.bfloat16)
        optimizer = kind([param], **{**OPTIONS, "backend": backend, "state_dtype": torch.bfloat16})
        optimizer.step()
        results.append((param.detach().flatten()[-20_000:].clone(), *figures(optimizer.telemetry()).values()))
        del param, optimizer
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("layout", ["plain", "transposed", "misaligned"])
def test_gradients_in_another_order_are_not_misread(layout: Layout, kind: Kind) -> None:
    """With the parameter's own order as it is; the whole table of layouts runs above."""
    results = []
    for backend in ("triton", "reference"):
        (param,) = parameters(0, ((300, 500),))
        (g,) = gradients(0, ((300, 500),))
        param.grad = arranged(g, layout)
        kind([param], **{**OPTIONS, "backend": backend}).step()
        results.append(param.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)
