"""The measurements of ``bighorn bench --device cuda``: device time with cold caches, and wall time of many steps."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bighorn_workbench.measure import LEAST_ROUNDS, Change, beside, nothing, take_turns

WARM_UP = 10
"""Steps of each optimizer that are not counted, while clocks rise, and allocators and launchers warm up."""

SWEEP_BYTES = 1 << 30
"""The bytes written before each step: more than any cache."""

MARGIN = 3
"""The device sleeps this many times as long as the host takes to enqueue a step."""

LEAST_SLEEP = 1e-3
"""Seconds; a minimum for steps that cost the host almost nothing, since a single interrupt takes longer than they
do."""

TRIES = 4
"""Samples in a row for which the host may be too late, each with twice the sleep of the previous one."""

CALIBRATION_CYCLES = 10_000_000
MOST_ROUNDS = 40
HOST_STEPS = 20
STEPS_IN_A_ROW = 50
LEAST_REPEATS, MOST_REPEATS = 3, 7


class HostBehindError(RuntimeError):
    """The host cannot be ahead of the device in some work, so that its device time is not known."""


def facts() -> dict[str, Any]:
    """The properties of the device, for the provenance of the measurements."""
    found = torch.cuda.get_device_properties()
    return {
        "device": found.name,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda or torch.version.hip,
    }


def step_times(
    baseline: Optimizer, optimizer: Optimizer, seconds: float, changes: Sequence[Change] = (nothing, nothing)
) -> dict[str, Any]:
    """As :func:`bighorn_workbench.measure.step_times`, with device time, wall time and host time of a step.

    Device time and wall time are measured for ``seconds`` each. Caches are cold for device time, and as the previous
    step left them for wall time. If :class:`DeviceTimer` rejects the step, `ms`, `baseline_ms` and `ratio` are None,
    and `host_ahead` is false.
    """
    both = [(each.step, change) for each, change in zip((baseline, optimizer), changes, strict=True)]
    for number in range(WARM_UP):
        for step, change in both:
            change(number)
            step()
    hosts = [host_seconds(*each) for each in both]
    sweep = scratch()
    timers = [DeviceTimer(step, host, sweep, change) for (step, change), host in zip(both, hosts, strict=True)]
    times: dict[str, Any] = {"rounds": 0, "ms": None, "baseline_ms": None, "ratio": None, "host_ahead": False}
    try:
        baseline_seconds, step_seconds = take_turns(timers, seconds, LEAST_ROUNDS, MOST_ROUNDS)
        times = {"rounds": len(step_seconds), **beside(baseline_seconds, step_seconds), "host_ahead": True}
    except HostBehindError:
        pass
    wall_samples = [partial(wall_seconds, *each) for each in both]
    their_walls, walls = take_turns(wall_samples, seconds, LEAST_REPEATS, MOST_REPEATS)
    return {
        **times,
        "baseline_refused_samples": timers[0].refused,
        "refused_samples": timers[1].refused,
        "host_ms": 1e3 * hosts[1],
        **beside(their_walls, walls, "wall_"),
    }


class DeviceTimer:
    """Device time of some work, with cold caches and a host that is ahead of the device.

    The device sleeps, then writes `SWEEP_BYTES`, then does the work, between two events. If the host enqueues the work
    more slowly than the device does it, events alone would count the time that the device waits for launches. A
    sample therefore counts only if the device has not reached the first event when the host has enqueued the last
    one. Otherwise the sample is rejected, and the sleep is doubled for the next one.

    Args:
        work: A function that enqueues the work.
        host: Seconds that the host takes to enqueue it.
        sweep: Memory on the device, larger than its caches.
        change: A function that is called before each sample, with its number. Default: one that changes nothing.

    Attributes:
        refused: The number of rejected samples.
    """

    def __init__(self, work: Callable[[], object], host: float, sweep: Tensor, change: Change = nothing) -> None:
        self.refused = 0
        self._work, self._sweep, self._change, self._numbers = work, sweep, change, itertools.count()
        self._cycles = int(max(MARGIN * host, LEAST_SLEEP) * cycles_per_second())

    def __call__(self) -> float:
        """Return the seconds of one sample.

        Raises:
            HostBehindError: `TRIES` samples in a row are rejected. The work itself waits for the device, or launches
                more than the device's queue holds, so that no sleep is long enough.
        """
        for _ in range(TRIES):
            self._change(next(self._numbers))
            start, stop = events()
            torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
            self._sweep.zero_()
            start.record()
            self._work()
            stop.record()
            ahead = not start.query()  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            if ahead:
                return 1e-3 * float(start.elapsed_time(stop))
            self.refused += 1
            self._cycles *= 2
        raise HostBehindError(f"{TRIES} samples in a row began before the host had enqueued them")


def wall_seconds(step: Callable[[], object], change: Change) -> float:
    """Return the seconds of a step, a mean of `STEPS_IN_A_ROW`.

    As in a training loop, the slower of host and device limits the steps between two synchronizations. These are all
    steps, or, with a change, a single one, so that the change is not timed.
    """
    in_a_row = STEPS_IN_A_ROW if change is nothing else 1
    timed = 0.0
    for number in range(STEPS_IN_A_ROW // in_a_row):
        change(number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(in_a_row):
            step()
        torch.cuda.synchronize()
        timed += time.perf_counter() - start
    return timed / STEPS_IN_A_ROW


def cycles_per_second() -> float:
    """Return the rate at which `torch.cuda._sleep` counts: the device's clock, which changes with load."""
    start, stop = events()
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
    stop.record()
    torch.cuda.synchronize()
    return CALIBRATION_CYCLES / (1e-3 * float(start.elapsed_time(stop)))


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """Return two events that record times."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, stop


def scratch() -> Tensor:
    """Return `SWEEP_BYTES` of memory on the device."""
    return torch.empty(SWEEP_BYTES, dtype=torch.uint8, device="cuda")


def temporaries(step: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator allocates during a step, beyond those allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def host_seconds(step: Callable[[], object], change: Change = nothing) -> float:
    """Return the seconds until a step that begins on an idle device returns, a median.

    On a busy device, a full queue would make the host wait. The time of a step that synchronizes includes device time.
    """
    times = []
    for number in range(HOST_STEPS):
        change(number)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)
