"""Instructions of compiled GPU kernels for each element that a thread steps, without a GPU.

    python benchmarks/gpu_instructions.py [TARGET]   # sm_90 by default

A line for each kernel: the instructions in its largest loop over aligned tensors divided by a thread's elements, the
registers, and the barriers of an iteration. Subroutines are not counted: a GPU divides 0 in one, and numbers near the
ends of float32. It issues at most one instruction per cycle in each of a multiprocessor's four schedulers: an H100 (132
multiprocessors, 1.755 GHz) executes 30e12 a second, counted for single threads, which is 9 for each byte that its
memory moves.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from bighorn import Came, Lamb
from bighorn._kernels.triton import came_launches, device, launch_group, tiles
from tests.support import kernel_variants
from tests.support.kernel_compilation import TARGETS, build
from tests.support.triton_compat import BINARIES

KERNELS = ("lamb_moments", "lamb_apply", "came_squares", "came_average", "came_apply")
THREADS = device.THREADS


def launches(kind: Any, dtype: torch.dtype, state: Any) -> Iterator[tuple[Any, tuple[str, ...], dict[str, Any]]]:
    """Yield the kernels that a step of large parameters launches, each once."""
    found: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {}

    def note(kernel: Any, tables: tuple[torch.Tensor, ...], constants: dict[str, Any]) -> Any:
        own = {name: constants[name] for name in kernel.arg_names if name in constants}
        if kernel.fn.__name__ in KERNELS:
            found.setdefault(f"{kernel.fn.__name__} {own}", (kernel, kernel_variants.pointers(tables), own))
        return lambda *_: None

    with (
        mock.patch.object(device, "DEVICES", ("cpu",)),
        mock.patch.object(launch_group, "compiled", note),
        mock.patch.object(came_launches, "area_of", return_value=tiles.AREA),
    ):
        kernel_variants.step(kind, dtype, dtype, {"state_dtype": state})
    yield from found.values()


def compiled(request: tuple[Any, tuple[str, ...], dict[str, Any]], options: dict[str, Any], target: str) -> Any:
    """Return a kernel's code, and the registers that it takes and spills."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(build(*request, options, target).asm["cubin"])
        code, usage = (
            subprocess.run([BINARIES / "cuobjdump", option, binary], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    registers, stack, local = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK", "LOCAL"))
    return SimpleNamespace(code=code, n_regs=registers, n_spills=stack + local)


def report(request: tuple[Any, tuple[str, ...], dict[str, Any]], target: str) -> str:
    """Return the line of a kernel."""
    kernel, _, constants = request
    found = device.with_more_programs(
        lambda options: compiled(request, options, target), device.compile_options(TARGETS[target][2])
    )
    at = [
        (int(address, 16), text) for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", found.code, re.M)
    ]
    jumps = [(int(to[1], 16), address) for address, text in at if (to := re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text))]
    loops = [[text for address, text in at if first <= address <= last] for first, last in jumps if first < last]
    wide = [loop for loop in loops if any("LDG.E.128" in text for text in loop)]  # the others are for unaligned tensors
    loop = max(wide, key=len, default=[])
    block = constants.get("TILE_BLOCK", constants.get("BLOCK", THREADS))
    return (
        f"{kernel.fn.__name__:14} {len(loop) * THREADS / block:7.1f} an element, {found.n_regs:>4} registers, "
        f"{sum('BAR.SYNC' in text for text in loop)} barriers for {block:,} elements"
    )


def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "sm_90"
    for kind in (Lamb, Came):
        for dtype in (torch.float32, torch.bfloat16):
            for state in (dtype, "int8", "int4"):
                print(f"{kind.__name__}, {dtype}, state {state}")
                for launch in launches(kind, dtype, state):
                    if state == dtype or launch[2].get("M_FORM") != "":  # rows of int4 and int8 alone
                        print("   ", report(launch, target))


if __name__ == "__main__":
    main()
