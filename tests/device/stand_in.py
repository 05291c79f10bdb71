"""The stand-in accelerator of `stand_in.cpp` as torch's device "npu".

`library()` compiles it once into `build/device`; `begin()` registers it, for the rest of the process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import backend_registration, cpp_extension

SOURCE = Path(__file__).with_name("stand_in.cpp")
CACHE = Path(__file__).parents[2] / "build" / "device"

COMPLETE = "complete"
MODES = (COMPLETE, "no float64", "float64 becomes float32")
"""float64 works, as on most accelerators; raises, as on Apple's and Intel's consumer GPUs; or warns, as on Ascend."""

OLDEST_TORCH = (2, 13)
"""The oldest version of torch whose C++ interfaces `stand_in.cpp` was compiled with."""


def why_absent() -> str | None:
    """Return why the stand-in cannot be built here, or None."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        return f"the stand-in device is written for torch {'.'.join(map(str, OLDEST_TORCH))}, not {torch.__version__}"
    if not (Path(cpp_extension.include_paths()[0]) / "ATen" / "ATen.h").exists():
        return "the stand-in device needs torch's C++ headers"
    return None if shutil.which("g++") else "the stand-in device needs g++"


def library() -> Path:
    """Return the compiled stand-in for this torch; the first of several processes compiles it, and others wait."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {torch.__file__}".encode()).hexdigest()[:16]
    path = CACHE / f"stand_in-{key}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_into(path)
    return path


def compile_into(path: Path) -> None:
    """Compile, in 13 s with or without optimization."""
    libraries = cpp_extension.library_paths()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-O1", "-w", str(SOURCE), "-o", f"{folder}/stand_in.so"]
        command += [f"-I{each}" for each in cpp_extension.include_paths()]
        command += [f"-{flag}{each}" for each in libraries for flag in ("L", "Wl,-rpath,")]
        ran = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"stand_in.cpp does not compile with torch {torch.__version__}:\n{ran.stderr[-4000:]}")
        Path(folder, "stand_in.so").rename(path)


_begun: list[Any] = []
"""The library of a process that has the device."""


def begin(mode: str) -> None:
    """Register the device "npu" in this process, with one of `MODES`."""
    loaded = ctypes.CDLL(str(library()))
    loaded.stand_in_counts.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    loaded.stand_in_counts.restype = loaded.stand_in_peak.restype = ctypes.c_size_t
    loaded.stand_in_begin(MODES.index(mode))
    _begun.append(loaded)
    backend_registration.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", device_module(loaded))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend()


class Stream(torch.Stream):
    """A stream of the device; copies and operations do not depend on it."""

    def __new__(cls, device: Any = "npu", **_: int) -> Any:
        return torch.Stream(device)


class Event(torch.Event):
    """An event of the device."""

    def __new__(cls, **_: bool) -> Any:
        return torch.Event("npu")


def device_module(loaded: Any) -> ModuleType:
    """Return `torch.npu`, with the functions that torch calls on a device's module."""
    module: Any = ModuleType("torch.npu")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _device: None
    module.device = module.stream = lambda _chosen: nullcontext()
    module.synchronize = lambda _device=None: loaded.stand_in_synchronize()
    module.manual_seed_all = module.manual_seed = lambda _seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.Stream, module.Event = Stream, Event
    module.current_stream = module.default_stream = lambda device=None: torch.accelerator.current_stream(device)
    return module  # type: ignore[no-any-return]


def counts() -> Counter[str]:
    """Return the counts since `begin()` or the last `counted()` began."""
    loaded = _begun[0]
    text = ctypes.create_string_buffer(loaded.stand_in_counts(None, 0))
    loaded.stand_in_counts(text, len(text))
    lines = [line.split(" ", 1) for line in text.raw.decode().splitlines()]
    return Counter({name: int(times) for times, name in lines})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the device's operations in a block; the counter is filled at its end."""
    found: Counter[str] = Counter()
    _begun[0].stand_in_reset()
    yield found
    found.update(counts())


def peak_bytes() -> int:
    """Return the peak memory of the device since the last `counted()` began, beyond the memory at its start."""
    return int(_begun[0].stand_in_peak())


def waits(found: Counter[str]) -> dict[str, int]:
    """Return the counts of waits for the device, and of copies from memory for which the host must wait."""
    return {name: times for name, times in found.items() if name.startswith("wait") or name == PAGEABLE}


PAGEABLE = "copy to device, pageable"
