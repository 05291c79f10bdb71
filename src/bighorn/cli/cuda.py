"""What ``bighorn bench --device cuda`` measures, and how: by the device's own clock, with cold caches."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from bighorn.cli.errors import InputError
from bighorn.cli.measure import LEAST_ROUNDS

WARM_UP = 10
"""Steps of each optimizer that are not counted: clocks rise, and allocators and launchers settle."""

SWEEP_BYTES = 1 << 30
"""Written before each step: more than any cache holds, and time enough for the host to be ahead of the device."""

HOST_STEPS = 20


def check() -> None:
    """Refuse a machine without a CUDA device."""
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise InputError(
            f"--device cuda: torch sees no CUDA device here (torch {torch.__version__} {built}). Run it on a machine "
            "with one, or leave --device out."
        )


def facts() -> dict[str, Any]:
    """The device, for the figures' provenance, with the speed of a copy there."""
    found = torch.cuda.get_device_properties()
    return {
        "device": found.name,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
        "copy_bytes_per_s": copy_speed(),
    }


def rounds(first: Optimizer, second: Optimizer, seconds: float) -> tuple[list[float], list[float]]:
    """As :func:`bighorn.cli.measure.rounds`, but in seconds of the device."""
    sweep = torch.empty(SWEEP_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(WARM_UP):
        first.step()
        second.step()
    times: tuple[list[float], list[float]] = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < LEAST_ROUNDS:
        for optimizer, mine in zip((first, second), times, strict=True):
            mine.append(elapsed(optimizer.step, lambda: sweep.zero_()))
    return times


def elapsed(work: Callable[[], object], before: Callable[[], object]) -> float:
    """Seconds that the device takes for ``work``, after something else was put in its queue."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in "12")  # type: ignore[no-untyped-call]
    before()
    start.record()
    work()
    stop.record()
    torch.cuda.synchronize()
    return 1e-3 * float(start.elapsed_time(stop))


def copy_speed() -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    source, target = (torch.empty(SWEEP_BYTES, dtype=torch.uint8, device="cuda") for _ in "12")
    times = [elapsed(lambda: target.copy_(source), lambda: source.zero_()) for _ in range(WARM_UP + HOST_STEPS)]
    return 2 * SWEEP_BYTES / statistics.median(times[WARM_UP:])


def temporaries(step: Callable[[], object]) -> int:
    """Bytes that torch's allocator hands out during a step, at most, beyond those that it has handed out before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_seconds(step: Callable[[], object]) -> float:
    """Seconds that the host takes for a step that it does not wait for, the median of some."""
    torch.cuda.synchronize()
    times = []
    for _ in range(HOST_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)
