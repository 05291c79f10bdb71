"""The measurements of ``bighorn bench``: times, temporaries, errors."""

import ctypes
import itertools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn_workbench.peers import Build
from bighorn_workbench.shapes import SHAPES, Shape

LEAST_ROUNDS = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
RESET_PEAK = Path("/proc/self/clear_refs")
LR = 1e-4  # after hundreds of steps along one gradient, the weights must still have a similar size
ERROR_LR = 0.1  # changes weights by their own size, since otherwise their rounding would hide the error of the step

Copy = Callable[[Tensor], Tensor]
"""A function that returns a copy of a tensor in some layout."""

Change = Callable[[int], None]
"""A function that changes parameters or gradients before the step of this number, and is not timed."""


def contiguous(drawn: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return drawn.clone(memory_format=torch.contiguous_format)


def nothing(step: int) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class ParamSet:
    """The parameters of a measurement.

    Attributes:
        shapes: A function that returns their shapes.
        dtype: Their dtype. Default: None, the dtype of ``--precision``.
        layout: The layout of the parameters. Default: contiguous.
        grad_layout: The layout of the gradients. Default: contiguous.
        change: A function from the parameters to a function that changes something before each step. Default: one that
            changes nothing.
        note: A sentence below the table. Default: none.
        on_cuda: Whether torch's fused AdamW steps it on CUDA, where gradients and state need the parameters' strides.
            Default: True.
    """

    shapes: Callable[[], Iterable[Shape]]
    dtype: torch.dtype | None = None
    layout: Copy = contiguous
    grad_layout: Copy = contiguous
    change: Callable[[list[Tensor]], Change] = lambda _: nothing
    note: str = ""
    on_cuda: bool = True


PARAM_SETS = {name: ParamSet(shapes) for name, shapes in SHAPES.items()}
"""The sets of parameters by name, to which programs may add some for ``bighorn bench``."""


def draw(shapes: Sequence[Shape], scale: float, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """Return normal random tensors, drawn on the device; the same for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(shape, generator=generator, device=device).mul_(scale).to(dtype) for shape in shapes]


PLAIN = ParamSet(tuple)
"""Contiguous parameters and gradients that do not change between steps."""


def prepared(
    build: Build, weights: Sequence[Tensor], grads: Sequence[Tensor], clip: float | None, param_set: ParamSet = PLAIN
) -> tuple[Optimizer, float]:
    """Return an optimizer over copies of ``weights`` and ``grads``, after its first step, and the seconds of that step.

    After it, the state exists and all compilation is done. Gradients are copied, since some steps write to them: apex's
    FusedLAMB stores its update there, and ``clip_grad_norm_`` scales them.
    """
    params = [param_set.layout(weight) for weight in weights]
    for param, grad in zip(params, grads, strict=True):
        param.grad = param_set.grad_layout(grad)
    optimizer = build(params, LR, clip)
    start = time.perf_counter()
    optimizer.step()
    return optimizer, time.perf_counter() - start


def step_times(
    baseline: Optimizer, optimizer: Optimizer, seconds: float, changes: Sequence[Change] = (nothing, nothing)
) -> dict[str, Any]:
    """Return the wall times of the steps of two optimizers, and their ratio, as JSON; `changes` as in `rounds`."""
    baseline_times, times = rounds(baseline, optimizer, seconds, changes)
    return {"rounds": len(times), **beside(baseline_times, times)}


def beside(baseline_times: Sequence[float], times: Sequence[float], prefix: str = "") -> dict[str, dict[str, float]]:
    """Return spreads of the milliseconds of the baseline and of an optimizer, and of the ratio of each round."""
    return {
        f"{prefix}ms": spread(times, 1e3),
        f"baseline_{prefix}ms": spread(baseline_times, 1e3),
        f"{prefix}ratio": spread([ours / other for ours, other in zip(times, baseline_times, strict=True)]),
    }


def rounds(
    first: Optimizer, second: Optimizer, seconds: float, changes: Sequence[Change] = (nothing, nothing)
) -> list[list[float]]:
    """Return the seconds of each step of two optimizers that take turns, for ``seconds`` and at least 5 rounds.

    Both have the same disturbances, and neither optimizer's tensors are in cache unless both fit. Each one's change is
    called directly before its step, with the number of the round: after both changes, only the first step would find
    the objects of its tensors in cache.
    """

    def timed(optimizer: Optimizer, change: Change) -> Callable[[], float]:
        numbers = itertools.count()

        def sample() -> float:
            change(next(numbers))
            start = time.perf_counter()
            optimizer.step()
            return time.perf_counter() - start

        return sample

    return take_turns(list(map(timed, (first, second), changes)), seconds, LEAST_ROUNDS)


def take_turns(
    samples: Sequence[Callable[[], float]], seconds: float, least: int, most: float = math.inf
) -> list[list[float]]:
    """Call ``samples`` in turn for ``seconds``, each from ``least`` to ``most`` times; return all results."""
    results: list[list[float]] = [[] for _ in samples]
    end = time.perf_counter() + seconds
    while len(results[0]) < least or (len(results[0]) < most and time.perf_counter() < end):
        for sample, values in zip(samples, results, strict=True):
            values.append(sample())
    return results


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, 10th and 90th percentile, multiplied with ``scale``: 1e3 for milliseconds."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"p10": scale * deciles[0], "median": scale * deciles[4], "p90": scale * deciles[8]}


@torch.no_grad()
def error(build: Build, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> float:
    """Return the weights' relative error after two steps of a large learning rate: ||ours - exact|| / ||exact||.

    Exact weights come from the same optimizer on float64 tensors, one at a time.
    The second step's gradients are the first's, shifted by one element. Gradients are not clipped.
    """
    params = [weight.clone() for weight in weights]
    _two_steps(build, params, grads)
    difference = total = 0.0
    for param, weight, grad in zip(params, weights, grads, strict=True):
        exact = weight.double()
        _two_steps(build, [exact], [grad.double()])
        difference += float((param - exact).square().sum())
        total += float(exact.square().sum())
    return math.sqrt(difference / total)


def _two_steps(build: Build, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    optimizer = build(params, ERROR_LR, None)
    for shift in (0, 1):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.roll(shift)
        optimizer.step()


def temporaries(step: Callable[[], object]) -> int | None:
    """Return the bytes by which resident memory rises while ``step`` runs; None without Linux and glibc.

    The kernel records the peak and resets it on demand. Memory that malloc has kept would be used again unnoticed, so
    malloc first returns all of it, and the allocations of ``step`` come from the kernel. ``step`` runs in a separate
    thread, so that the scratch memory of each thread counts, too. The result is exact to about a megabyte.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "malloc_trim") or not os.access(RESET_PEAK, os.W_OK):
        return None
    _hold_back(libc, 64 << 10)
    libc.malloc_trim(0)
    RESET_PEAK.write_text("5")
    before = _resident("VmRSS")
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    peak = _resident("VmHWM")
    _hold_back(libc, 32 << 20)  # the threshold of a process that has freed large tensors, as every training run does
    return max(peak - before, 0)


def _hold_back(libc: ctypes.CDLL, size: int) -> None:
    """Make malloc keep freed memory that is smaller than ``size`` bytes."""
    libc.mallopt(M_MMAP_THRESHOLD, size)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * size)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return 1024 * int(kilobytes)
