"""The order of work in streams and graphs of a CUDA device, and on the host."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.support.cases import Kind, set_gradients
from tests.support.gpu_steps import GPU, OPTIONS, gradients, nap, needs_cuda, parameters, same, trained

pytestmark = [*GPU, needs_cuda]


@pytest.mark.parametrize("backend", ["triton", "foreach"])
def test_the_host_never_waits(backend: str, kind: Kind) -> None:
    params = parameters()
    lr = torch.tensor(0.1)
    optimizer = kind(params, **{**OPTIONS, "lr": lr, "backend": backend, "max_grad_norm": 1.0, "skip_nonfinite": True})
    scale, found = torch.tensor(2.0), torch.tensor(0.0)
    for step in range(4):
        moved = gradients(step)  # at other addresses in each step
        set_gradients(params, moved)
        optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[union-attr]
        lr.mul_(0.9)
        torch.cuda.set_sync_debug_mode("default" if step == 0 else "error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.telemetry().skipped == 0


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "skip_nonfinite": True}], ids=["plain", "clipped"])
def test_a_graph_replays_steps(options: dict[str, Any], kind: Kind) -> None:
    """Five steps with a changing learning rate equal eager ones, and steps between the replays do not affect them."""
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


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0, "skip_nonfinite": True}], ids=["plain", "clipped"])
def test_a_graph_outlives_its_optimizer(options: dict[str, Any], kind: Kind) -> None:
    """The user keeps the state and the gradients; tables and workspace must live as long as the graph."""
    runs: list[list[Parameter]] = []
    for replays in (False, True):
        params = parameters()
        static = gradients(0)
        set_gradients(params, static)
        optimizer = kind(params, **OPTIONS, **options)
        optimizer.step()
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
            state = list(optimizer.state.values())
            del optimizer
            gc.collect()
            noise = overwritten_memory()
            graph.replay()
            del noise, state
        else:
            optimizer.step()
        runs.append(params)
    assert same(*runs)


def overwritten_memory() -> list[Tensor]:
    """Return memory of all sizes of tables and workspace, filled with an invalid address and option."""
    return [torch.full((64 * size,), 1e300, dtype=torch.float64) for size in range(1, 200) for _ in range(10)]


def test_a_step_belongs_to_the_current_stream(kind: Kind) -> None:
    """The stream waits before it makes the gradients, so they are complete only in stream order."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        params = trained(kind, wait=nap)
    torch.cuda.current_stream().wait_stream(side)
    assert same(params, trained(kind))


def test_tables_in_flight_are_not_written_over(kind: Kind) -> None:
    """The host is steps ahead of the device, and each step uploads other addresses."""
    warm = trained(kind, steps=9)
    torch.cuda.synchronize()
    nap()
    assert same(warm, trained(kind, steps=9))


def test_a_table_that_another_stream_reads_is_not_written_over(kind: Kind) -> None:
    """Tables are made on one stream, read and replaced on a late second one, and allocated again on the first."""
    first, second = (torch.cuda.Stream() for _ in "12")  # type: ignore[no-untyped-call]
    runs: list[list[Parameter]] = []
    for late in (False, True):
        params = parameters()
        optimizer = kind(params, **OPTIONS)
        set_gradients(params, gradients(0))
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            optimizer.step()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            if late:
                nap()
            optimizer.step()  # reads the tables of the first stream
            optimizer.param_groups[0]["lr"] = 0.01
            optimizer.step()  # replaces the table of options
        with torch.cuda.stream(first):
            noise = overwritten_memory() if late else []
        torch.cuda.synchronize()
        del noise
        runs.append(params)
    assert same(*runs)
