"""The counts of `ledger.py`: instruments that each count one step of a row, and cachegrind for the C library."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bighorn
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from ledger_steps import Events, steps_of

PACKAGE = str(Path(bighorn.__file__).parent)

Names = dict[str, Counter[str]]
"""For each count, what was counted, by name."""

WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")
"""The operations for which a host waits for a device."""

RACES = "wait"
"""The functions whose opcodes and calls of C are not counted: whether they wait depends on which thread is first."""

NO_CALLS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Code whose calls are not counted, but its opcodes: versions of Python differ in when such code is called."""


class Calls:
    """The calls of functions of the package, and its calls of functions in C, except calls by `map` and the like."""

    def __init__(self) -> None:
        self.names: Names = {"calls": Counter(), "c_calls": Counter()}

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, called: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            if event == "call" and frame.f_code.co_name not in NO_CALLS:
                self.names["calls"][_function(frame)] += 1
            elif event == "c_call" and frame.f_code.co_name != RACES:
                self.names["c_calls"][called.__qualname__] += 1


class Opcodes:
    """The opcodes of the package's functions."""

    def __init__(self) -> None:
        self.names: Names = {"opcodes": Counter()}

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, *_: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == RACES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._note

    def _note(self, frame: FrameType, event: str, _: object) -> Any:
        self.names["opcodes"][_function(frame)] += event == "opcode"
        return self._note


class TorchCalls(TorchFunctionMode):
    """The calls of torch's functions, methods and properties, also by `map` and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Names = {"torch_calls": Counter()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the call; a property is the owner of its `__get__`."""
        owner = getattr(getattr(function, "__self__", None), "__name__", "")
        self.names["torch_calls"][f"{owner} {function.__name__}".strip()] += 1
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of torch's dispatcher, and what they allocate, wait for and send."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        counts = ("ops", "allocations", "allocated_bytes", "waits", "collectives", "collective_bytes")
        self.names: Names = {name: Counter() for name in counts}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation. An output that shares no memory with an input was allocated."""
        result, name = op(*args, **(kwargs or {})), op._schema.name.partition("::")[2]
        given, found = _storages((args, kwargs)), _storages(result)
        new = {key: size for key, size in found.items() if key not in given}
        self.names["ops"][name] += 1
        self.names["allocations"][name] += len(new)
        self.names["allocated_bytes"][name] += sum(new.values())
        self.names["waits"][name] += name in WAITS
        if op.namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.names["collectives"][name] += 1
            self.names["collective_bytes"][name] += sum(t.nbytes for t in tree_leaves(args) if isinstance(t, Tensor))
        return result


def _storages(tree: Any) -> dict[int, int]:
    """The bytes of all storages, by identity. Distributed tensors have none, and their shards are other arguments."""
    plain = [leaf for leaf in tree_leaves(tree) if type(leaf) in (Tensor, torch.nn.Parameter)]
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}


def _function(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_code.co_name}"


def _of_events(events: Events) -> Names:
    """Launches, copies and tables that a stand-in has recorded."""
    names: Names = {}
    sizes = {"copies": "copy_bytes", "tables": "table_bytes"}
    for name, size in events:
        names.setdefault(name if name in sizes else "launches", Counter())[name] += 1
        names.setdefault(sizes.get(name, "programs"), Counter())[name] += size
    return names


WARM = 3
"""The steps before the one that is counted, with the same instrument: a plan holds for a state of torch's modes."""


def names_in(row: str) -> Names:
    """Return what each instrument counts in a step of a row."""
    names: Names = {}
    gc.collect()
    gc.disable()  # it can call functions of the package at any time
    try:
        with steps_of(row) as (steps, events):
            for kind in (Calls, Opcodes, TorchCalls, Operations):
                for _ in range(WARM + 1):
                    instrument, step = kind(), next(steps)
                    events.clear()
                    with instrument:
                        step()
                names |= instrument.names | _of_events(events)
    finally:
        gc.enable()
    return {count: +found for count, found in names.items() if found.total()}


# ---- the C library --------------------------------------------------------------------------------------------

KERNELS = [f"{name} kernel {stored}" for name in ("lamb", "came") for stored in ("float32", "bfloat16", "int8", "int4")]
KERNELS += ["lars kernel float32", "lars kernel bfloat16"]
KERNEL_ELEMS = 512 * 512
CACHES = ("--I1=32768,8,64", "--D1=32768,8,64", "--LL=1048576,16,64")
COMPILER = os.environ.get("CC") or "cc"


def kernels_unavailable() -> str:
    """The reason why the C library is not counted here, or an empty string."""
    if not kernels.status()["cpu"].available:
        return f"backend cpu: {kernels.status()['cpu'].detail}"
    if library.isa() < 3:
        return "the processor has less than x86-64-v3"
    missing = [tool for tool in ("valgrind", COMPILER) if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else ""


def library_compiler() -> str:
    """The compiler that has left its name in the C library."""
    content = b"" if library.LIBRARY is None else Path(library.LIBRARY_DETAIL).read_bytes()
    found = re.search(rb"GCC: [ -~]+|clang version [ -~]+", content)
    return found[0].decode() if found else "unknown"


@contextlib.contextmanager
def kernel_program() -> Iterator[Path]:
    """Build `ledger_kernels.c` with the installed C library, in a folder that ends with the program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied = shutil.copy(library.LIBRARY_DETAIL, folder)
        source = Path(__file__).with_name("ledger_kernels.c")
        flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{library.CSRC}", "-Wl,-rpath,$ORIGIN"]
        subprocess.run([COMPILER, *flags, str(source), copied, "-o", str(folder / "steps")], check=True)
        yield folder / "steps"


def count_kernel(program: Path, row: str, passes: int = 0) -> dict[str, float]:
    """Return instructions and cache misses of a step for each element, with more passes over the gradient if asked."""
    optimizer, _, stored = row.split()
    valgrind, found = shutil.which("valgrind") or "valgrind", program.with_name("counts")
    command = [valgrind, "--tool=cachegrind", "--cache-sim=yes", *CACHES, f"--cachegrind-out-file={found}", "./steps"]
    totals = []
    for steps in ("2", "4"):  # two steps more, so that the start of the program cancels
        arguments = [optimizer, stored, steps, str(passes)]
        # An environment would move the stack.
        subprocess.run([*command, *arguments], cwd=program.parent, env={}, capture_output=True, check=True)
        lines = dict(line.split(": ") for line in found.read_text().splitlines() if line.startswith(("ev", "su")))
        totals.append(dict(zip(lines["events"].split(), map(int, lines["summary"].split()), strict=True)))
    step = {name: (total - totals[0][name]) / 2 / KERNEL_ELEMS for name, total in totals[1].items()}
    return {
        "instructions": round(step["Ir"], 5),
        "d1_misses": round(step["D1mr"] + step["D1mw"], 5),
        "ll_misses": round(step["DLmr"] + step["DLmw"], 5),
    }
