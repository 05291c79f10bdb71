"""The ctypes interface of the C library: it takes tables of addresses, and one call serves the whole model.

The library does not depend on torch or Python. This module determines the properties of the process that it needs: the
number of threads, the OpenMP runtime to borrow them from, and the instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.resources
import math
import os
import sys
import threading
from array import array
from pathlib import Path
from typing import Any

import torch

from bighorn._kernels.cpu import abi

LIBRARY_NAME = "libbighorn.dll" if os.name == "nt" else "libbighorn.so"  # as CMake names a module
CSRC = Path(__file__).parents[1] / "csrc"
SCRATCH_BYTES = 8 << 20  # u is kept for the last chunks of a tensor up to this size, for all threads together

NO_BLOCKS = "the C library keeps no momentum of LARS in blocks"

ISAS = {"v2": 2, "v3": 3, "v4": 4}

TEAMS = (
    {"parallel": "GOMP_parallel"},
    {
        "fork_call": "__kmpc_fork_call",
        "push_num_threads": "__kmpc_push_num_threads",
        "global_thread_num": "__kmpc_global_thread_num",
    },
)
"""The functions of OpenMP runtimes that start a team, by the fields of RunConfig: GNU's functions; LLVM's and
Intel's."""
NUMBERS = {"thread_num": "omp_get_thread_num", "num_threads": "omp_get_num_threads"}


# ---- the library and the machine ------------------------------------------------------------------------------


def load_library() -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason why there is none."""
    # In an editable install the library is in site-packages, the sources are elsewhere; importlib.resources finds both.
    path = Path(str(importlib.resources.files("bighorn._kernels").joinpath(LIBRARY_NAME)))
    if not path.is_file():
        return None, f"{LIBRARY_NAME} was not built: install a C compiler, then reinstall bighorn from source"
    try:
        library = ctypes.CDLL(str(path))
        fields = abi.fields_of(library)
        declare(library, abi.structures_of(fields))
    except (OSError, AttributeError, KeyError) as error:  # AttributeError: it was built from older sources
        return None, f"{LIBRARY_NAME} does not load: {error}; reinstall bighorn from source"
    if (present := sources()) is not None and library.bighorn_sources() != present:
        return None, f"{LIBRARY_NAME} was built from other sources than these; reinstall bighorn from source"
    if abi.checksum(fields) != abi.VERSION or abi.unknown_options(fields):
        return None, f"{LIBRARY_NAME} has other structures than this package; reinstall bighorn from source"
    return library, str(path)


def sources() -> bytes | None:
    """Return the digest of the C sources beside this package, as CMakeLists.txt computes it; None without sources.

    In an editable install, sources can change without a rebuild, and a library with other tables would crash.
    """
    paths = sorted(path for path in CSRC.glob("*") if path.suffix in {".c", ".h"})
    digests = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    return hashlib.sha256(digests.encode()).hexdigest().encode() if paths else None


def declare(library: ctypes.CDLL, structures: abi.Structures) -> None:
    """Declare the argument and result types of the library's functions."""
    address, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    run = ctypes.POINTER(structures["RunConfig"])
    library.bighorn_sources.restype = ctypes.c_char_p
    library.bighorn_isa.argtypes = []
    library.bighorn_advance.argtypes = [address, count]
    library.bighorn_square_sum.argtypes = [run, address, address, count, address]
    library.bighorn_square_sum.restype = number
    library.bighorn_layer_chunks.argtypes = [address, address, address, count]
    library.bighorn_layer_chunks.restype = count
    library.bighorn_factored_workspace.argtypes = [address, address, address, count, ctypes.c_int]
    library.bighorn_factored_workspace.restype = count


def runtime() -> ctypes.CDLL | None:
    """Return the library with torch's OpenMP runtime: the process, or on Windows a DLL that it loaded."""
    if sys.platform == "win32":
        find = ctypes.WinDLL("kernel32").GetModuleHandleW
        find.argtypes, find.restype = [ctypes.c_wchar_p], ctypes.c_void_p
        handle = find("libiomp5md.dll")  # loads nothing: another runtime's threads would compete with torch's
        return ctypes.CDLL("libiomp5md.dll", handle=handle) if handle else None
    return ctypes.CDLL(None)


def openmp(runtime: ctypes.CDLL | None) -> dict[str, int]:
    """Return the addresses of a runtime's functions by the fields of RunConfig; none if it lacks one of each kind."""
    for functions in ({**team, **NUMBERS} for team in TEAMS):
        if runtime and all(hasattr(runtime, name) for name in functions.values()):
            return {field: ctypes.cast(runtime[name], ctypes.c_void_p).value or 0 for field, name in functions.items()}
    return {}


def cores() -> int:
    """Return the number of cores that this process may use: by affinity, and by its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))


def threads() -> int:
    """Return the team size for the next call: `BIGHORN_NUM_THREADS`, or torch's number of threads up to `CORES`."""
    if not OPENMP or _forked:
        return 1
    asked = os.environ.get("BIGHORN_NUM_THREADS")
    if not asked:
        return min(torch.get_num_threads(), CORES)
    if not asked.isdecimal() or not 1 <= int(asked) <= 1024:
        raise ValueError(f"BIGHORN_NUM_THREADS={asked!r} in the environment must be a number of threads, 1 to 1024")
    return int(asked)


def isa() -> int:
    """Return the x86-64 level to use (2 to 4; 0 elsewhere): the machine's, or a lower one of `BIGHORN_ISA` (v2, v3)."""
    level = int(LIBRARY.bighorn_isa()) if LIBRARY else 0
    asked = os.environ.get("BIGHORN_ISA")
    if not asked:
        return level
    if asked not in ISAS:
        raise ValueError(f"BIGHORN_ISA={asked!r} in the environment must be one of {', '.join(ISAS)}")
    return min(level, ISAS[asked])


def describe() -> str:
    """Return one line for `bighorn.status`."""
    if LIBRARY is None:
        return LIBRARY_DETAIL
    count = threads()
    team = (
        f"{count} thread{'s' * (count > 1)} of torch's OpenMP"
        if OPENMP
        else "1 thread (no OpenMP runtime in the process)"
    )
    return f"{team}, instruction set {f'x86-64-v{isa()}' if isa() else 'of the build'}"


def _after_fork() -> None:
    # A forked child does not have the runtime's workers, and would wait for them forever.
    global _forked
    _forked = True


LIBRARY, LIBRARY_DETAIL = load_library()
STRUCTURES: abi.Structures = abi.structures_of(abi.fields_of(LIBRARY)) if LIBRARY else {}
OPENMP = openmp(runtime())
CORES = cores()
_forked = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Scratch(threading.local):
    """Each thread's scratch, which is allocated once."""

    def __init__(self) -> None:
        self.tensor = torch.empty(SCRATCH_BYTES // 4, dtype=torch.float32, device="cpu")


SCRATCH = Scratch()


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the library, after `unsupported` has found that there is one."""
    assert LIBRARY is not None, LIBRARY_DETAIL
    return LIBRARY


@functools.cache
def layer_step(algorithm: str) -> Any:
    """Return the function that steps the slots of a layer-wise optimizer."""
    function = loaded()[f"bighorn_{algorithm}_step"]
    address, count = ctypes.c_void_p, ctypes.c_int64
    run = ctypes.POINTER(STRUCTURES["RunConfig"])
    tables = [address] * 5
    scratch, number = (address, address, count), ctypes.c_int
    function.argtypes = [run, *tables, count, ctypes.c_double, *scratch, number, address, number]
    return function


def run() -> Any:
    """Return the configuration of the next call."""
    return _run_on(threads(), isa())


@functools.cache
def _run_on(threads: int, isa: int) -> Any:
    return STRUCTURES["RunConfig"](**OPENMP, threads=threads, isa=isa)


def address(values: array[int] | array[float]) -> int:
    """Return the address of an array's values."""
    return values.buffer_info()[0]
