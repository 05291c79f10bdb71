"""The memory that steps need on a CUDA device, and very large tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came
from tests.support.cases import Kind, set_gradients
from tests.support.gpu_steps import GPU, OPTIONS, gradients, needs_cuda, parameters
from tests.support.optimizer_runs import figures

pytestmark = [*GPU, needs_cuda]


def test_a_step_needs_little_memory(kind: Kind) -> None:
    """The limit includes memory between steps: 2% of the parameters for CAME, 16 MB for others, 1 MB of tables."""
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
    assert extra <= (0.02 * size + (1 << 20) if kind is Came else 16 << 20)


@pytest.mark.slow
def test_many_steps_take_no_more_memory(kind: Kind) -> None:
    """10,000 steps with moving gradients and a changing learning rate use no more memory of device or host."""
    shapes = ((30, 40), (17,), (2, 3, 5))
    params = parameters(0, shapes)
    optimizer = kind(params, **OPTIONS, max_grad_norm=1.0)
    used: list[tuple[int, int]] = []
    for step in range(10_001):
        set_gradients(params, [torch.ones_like(p) for p in params])
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()
        if step in (1000, 10_000):
            torch.cuda.synchronize()
            set_gradients(params, [None for _ in params])
            used.append((torch.cuda.memory_allocated(), resident_memory()))
    (device, host), (device_later, host_later) = used
    assert device_later <= device
    assert host_later <= host + (8 << 20)


def resident_memory() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
