"""Compilation of Triton's kernels for GPUs that are not present, and checks of the compiled code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.triton_compat import BINARIES

TARGETS = {
    "sm_90": ("cuda", 90, 32),
    "sm_80": ("cuda", 80, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


def build(kernel: Any, pointers: Sequence[str], constants: dict[str, Any], options: dict[str, Any], target: str) -> Any:
    """Compile a kernel as `device.compiled` does."""
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source(kernel, pointers, constants), GPUTarget(*TARGETS[target]), options)


def source(kernel: Any, pointers: Sequence[str], constants: dict[str, Any]) -> Any:
    """Return the source that Triton compiles: tables come first, and are aligned as the allocator aligns them."""
    from triton.compiler import ASTSource

    tables = dict(zip(kernel.arg_names, pointers, strict=False))
    signature = {argument: tables.get(argument, "constexpr") for argument in kernel.arg_names}
    aligned: list[Any] = [["tt.divisibility", 16]]
    # A launch gives constants empty lists, and shares the cache if these are the same.
    attributes = {(i,): aligned if i < len(pointers) else [] for i in range(len(kernel.arg_names))}
    return ASTSource(kernel, signature, constants, attributes)


def found_in_ptx(kernel: Any) -> tuple[int, int]:
    """Return the numbers of 128-bit loads and stores; one of 256 bits (Triton 3.9 on sm_100) counts twice."""
    found: Counter[str] = Counter()
    for way, count, size in re.findall(r"\b(ld|st)\.global\S*\.v(\d)\.[bf](\d+)\b", kernel.asm["ptx"]):
        found[way] += int(count) * int(size) // 128
    return found["ld"], found["st"]


def spilled_by_ptxas(kernel: Any, folder: Path) -> int:
    """Return the bytes of local memory that a thread uses."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    command = [str(BINARIES / "cuobjdump"), "-res-usage", str(binary)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))


def spilled_by_amdgcn(kernel: Any) -> int:
    """Return the number of vector registers in memory, or the bytes of memory that a thread uses.

    Scalar registers spill to lanes of vector registers, not to memory.
    """
    return max(map(int, re.findall(r"(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"])))


def all_in_amdgcn(kernel: Any) -> tuple[int, int]:
    """Return the numbers of 128-bit loads and stores, with the loads of tables."""
    loads, stores = (kernel.asm["amdgcn"].count(f"global_{way}_dwordx4") for way in ("load", "store"))
    return loads, stores


def found_in_amdgcn(kernel: Any) -> tuple[int, int]:
    """Return 128-bit loads and stores in the basic block with the most of both; tables are loaded before it.

    LLVM may move its last stores to a later block, as of float16 weights with bfloat16 moments on the ball (3.7.1).
    """
    counts: list[tuple[int, int]] = []
    for block in re.split(r"^\.LBB", kernel.asm["amdgcn"], flags=re.MULTILINE):
        loads, stores = (block.count(f"global_{way}_dwordx4") for way in ("load", "store"))
        if loads or not counts:
            counts.append((loads, stores))
        else:
            counts[-1] = (counts[-1][0], counts[-1][1] + stores)
    return max(counts, key=lambda both: (min(both), sum(both)))  # a misaligned gradient has a separate block
