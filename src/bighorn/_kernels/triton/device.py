"""Triton and its devices: all dependencies of this backend on CUDA, ROCm and XPU, and on the absence of a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

DEVICES = ("cuda", "xpu")  # torch calls ROCm cuda
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (3, 3)
TRUE = ("1", "true", "yes", "on", "y")  # the values that Triton accepts in its variables
THREADS = 256  # LANES of the kernels
WITHOUT_SPILLS = (128, 255)
"""Limits of registers for a kernel that spills them to memory.

From CUDA 13.1 on, ptxas spills 8 to 24 bytes of some kernels so that one more program fits, unless it gets a limit.
"""
FEWER_REGISTERS = (128, 80, 64)
"""Limits with which two, three and four programs fit on a multiprocessor."""

trial_step: Callable[[torch.device], float] | None = None
"""`trial.lamb_step`, which depends on this module; the package sets it on import."""


def unsupported_reason(param: Tensor) -> str | None:
    """The reason why no algorithm of this backend can serve a tensor, or None."""
    device = param.device
    if interpreted():
        if device.type != "cpu":
            return "TRITON_INTERPRET is set, and the interpreter reads the memory of the CPU alone: unset it"
    elif device.type not in DEVICES:
        return f"it is on {device}, not on a GPU"
    if param.dtype not in DTYPES:
        return f"its dtype is {param.dtype}"
    return broken(device)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in TRUE


def status() -> tuple[bool, str, str]:
    """Return whether it works on this machine, the device or the reason why not, and the type of the device."""
    device = _device()
    reason = broken(device) if device else "torch sees no GPU here"
    if device is None or reason:
        return False, reason or "", "cpu"
    name = "the interpreter, for tests" if device.type == "cpu" else torch.get_device_module(device).get_device_name()
    return True, f"Triton {_version()} on {name}", device.type


def _device() -> torch.device | None:
    if interpreted():
        return torch.device("cpu")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and device.type in DEVICES else None


def _version() -> str:
    import triton

    return str(triton.__version__)


def broken(device: torch.device) -> str | None:
    """The reason why Triton does not work on a device of this machine, or None."""
    reason = missing(device)
    if reason or device.type == "cpu" or capturing(device):  # the trial synchronizes, which breaks a graph's capture
        return reason
    return trial_failure(device)


@functools.cache
def missing(device: torch.device) -> str | None:
    """The reason why Triton, or its driver for a device, cannot be used on this machine, or None."""
    try:
        version = _version()
    except Exception as error:  # a wrong installation can raise any error
        return f"Triton does not import ({error}): install the version that this torch asks for"
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        return (
            f"Triton {version} is older than {'.'.join(map(str, OLDEST))}: install a newer torch, which brings its own"
        )
    if device.type == "cpu":
        return None
    try:
        _platform(device)
    except Exception as error:
        return f"Triton does not work on {device}: {error}"
    return None


@functools.cache
def trial_failure(device: torch.device) -> str | None:
    """Return the error of compiling, loading and running LAMB's kernels on a device, or None.

    A version of Triton that cannot compile them, a missing C compiler or a driver that is too old show only then. The
    trial takes a second or two once, and 0.05 s from Triton's cache on disk.
    """
    assert trial_step is not None
    try:
        found = trial_step(device)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"a trial step on {device} with Triton {_version()} failed ({type(error).__name__}: {lines[-1]})"
    if not abs(found - 0.9) < 1e-5:
        return f"a trial step on {device} with Triton {_version()} gave {found} in place of 0.9"
    return None


Launch = Callable[[int, tuple[Tensor, ...]], object]
"""A function that launches a number of programs of a kernel with these tables."""


def compiled(kernel: Any, tables: tuple[Tensor, ...], constants: dict[str, Any]) -> Launch:
    """Return a kernel with these constants, compiled and loaded for tables like these, at multiples of 16 bytes."""
    named = {name: constants[name] for name in kernel.arg_names if name in constants}
    backend, warp_size = _platform(tables[0].device)
    options = compile_options(warp_size)
    if interpreted():
        return lambda programs, tables: kernel.run(*tables, grid=(programs,), warmup=False, **named, **options)

    def load(options: dict[str, Any]) -> Any:
        ready = kernel.run(*tables, grid=(1,), warmup=True, **named, **options)
        _ = ready.run  # loads it
        return ready

    ready = with_more_programs(load, options) if backend == "cuda" else load(options)
    # At each launch, the kernel's own `run` would look up this compiled kernel, which takes five times as long.
    return lambda programs, tables: ready[programs, 1, 1](*tables, *named.values())


def with_more_programs(load: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> Any:
    """Return a compiled kernel, with the least limit of registers with which it does not spill them to memory.

    ptxas takes registers to save instructions, although a program that waits for memory needs others beside it.
    """
    kernel = load(options)
    for registers in WITHOUT_SPILLS:
        if kernel.n_spills:
            kernel = load(options | {"maxnreg": registers})
    for registers in FEWER_REGISTERS:
        if kernel.n_regs > registers:
            smaller = load(options | {"maxnreg": registers})
            if smaller.n_spills:
                break
            kernel = smaller
    return kernel


def compile_options(warp_size: int) -> dict[str, Any]:
    """Return the options for compiling a kernel for a device with warps of `warp_size` threads."""
    # Triton enables the fusion of multiplications with additions by default before 3.8, and disables it from 3.8 on.
    return {"num_warps": THREADS // warp_size, "enable_fp_fusion": True}


@functools.cache
def _platform(device: torch.device) -> tuple[str, int]:
    """Return Triton's name of a device's platform, and the number of threads of a warp."""
    if interpreted():
        return "", THREADS
    from triton.runtime import driver

    with guard(device):
        target = driver.active.get_current_target()
    return str(target.backend), int(target.warp_size)


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context whose launches use this device, on its current stream."""
    if device.type == "cpu":
        return contextlib.nullcontext()
    manager: AbstractContextManager[object] = torch.get_device_module(device).device(device)
    return manager


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream for launches, or None for a device without streams."""
    stream: torch.Stream | None = None
    if device.type != "cpu":
        stream = torch.get_device_module(device).current_stream(device)
    return stream


def capturing(device: torch.device) -> bool:
    """Whether launches are being recorded into a graph."""
    module = torch.get_device_module(device)
    return hasattr(module, "is_current_stream_capturing") and bool(module.is_current_stream_capturing())
