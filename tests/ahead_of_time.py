"""Triton's kernels compiled for GPUs that need not be there, and what is read in the result."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from bighorn.kernels.triton import device

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
POINTERS = {
    # What kernels are handed; every other argument is a constant.
    "rows": "*i64",
    "grads": "*i64",
    "owners": "*i32",
    "hyper": "*fp64",
    "grad_scale": "*fp64",
    "commit": "*i1",
    "sums": "*fp64",
    "squares": "*fp64",
    "factors": "*fp64",
    "tiles": "*i32",
    "pieces": "*i32",
    "packs": "*i32",
    "partials": "*fp32",
    "line_sums": "*fp64",
    "roots": "*fp32",
    "lines": "*fp64",
}


def build(kernel: Any, constants: dict[str, Any], target: str) -> Any:
    """A kernel, compiled as `launch` compiles it, with the tables aligned as the allocator aligns them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, arch, warp_size = TARGETS[target]
    source = ASTSource(
        kernel,
        {argument: POINTERS.get(argument, "constexpr") for argument in kernel.arg_names},
        {argument: value for argument, value in constants.items() if argument in kernel.arg_names},
        {(i,): [["tt.divisibility", 16]] for i, argument in enumerate(kernel.arg_names) if argument in POINTERS},
    )
    return triton.compile(
        source, GPUTarget(backend, arch, warp_size), device.compile_options(backend, warp_size, constants)
    )


def found_in_ptx(kernel: Any) -> tuple[int, int]:
    """Loads and stores of 128 bits."""
    found = Counter(re.findall(r"\b(ld|st)\.global\S*\.(?:v4\.[bf]32|v2\.[bf]64)\b", kernel.asm["ptx"]))
    return found["ld"], found["st"]


def spilled_by_ptxas(kernel: Any, folder: Path) -> int:
    """The bytes of local memory that a thread uses."""
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))


def spilled_by_amdgcn(kernel: Any) -> int:
    """The registers that are kept in memory."""
    return sum(map(int, re.findall(r"[sv]gpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"])))


def all_in_amdgcn(kernel: Any) -> tuple[int, int]:
    """Loads and stores of 128 bits, those from tables too."""
    loads, stores = (kernel.asm["amdgcn"].count(f"global_{way}_dwordx4") for way in ("load", "store"))
    return loads, stores


def found_in_amdgcn(kernel: Any) -> tuple[int, int]:
    """Loads and stores of 128 bits in the basic block that has the most of both: tables are read before it."""
    blocks = re.split(r"^\.LBB", kernel.asm["amdgcn"], flags=re.MULTILINE)
    loads, stores = max(
        ([block.count(f"global_{way}_dwordx4") for way in ("load", "store")] for block in blocks), key=min
    )
    return loads, stores
