"""The build of the C library: includes, exports, and the layout of its structures in ctypes."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import bighorn
from bighorn import Lars
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import abi, library
from tests.csrc import options_header
from tests.csrc.compare import differences

HERE = Path(__file__).parent
ROOT = Path(bighorn.__file__).parent
CSRC = ROOT / "_kernels" / "csrc"
STATUS = kernels.status()["cpu"]
needs_the_library = pytest.mark.skipif(not STATUS.available, reason=f"backend cpu: {STATUS.detail}")


def includes(folder: Path) -> dict[str, set[str]]:
    """Return the units of a folder with the units that each includes; a unit is a .c file, its header, or both."""
    graph: dict[str, set[str]] = {}
    for path in folder.glob("*.[ch]"):
        included = {Path(name).stem for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)}
        graph.setdefault(path.stem, set()).update(included - {path.stem})
    return graph


@pytest.mark.skipif(not CSRC.is_dir(), reason="the C sources are not in wheels")
def test_no_c_files_include_each_other() -> None:
    graph = includes(CSRC)
    TopologicalSorter(graph).prepare()
    assert set().union(*graph.values()) <= set(graph), "a file that is included is gone"


@needs_the_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_the_library_exports_only_what_python_calls() -> None:
    output = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library.LIBRARY_DETAIL],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1].lstrip("_") for line in output.splitlines()}
    called = {
        name for path in (ROOT / "_kernels").rglob("*.py") for name in re.findall(r"\bbighorn_\w+", path.read_text())
    }
    assert exported == called | {"bighorn_lamb_step", "bighorn_lars_step"}  # layer_step builds these names


@needs_the_library
def test_structures_have_the_fields_that_this_package_knows() -> None:
    """After a change of abi.h, the checksum is the new `abi.VERSION`."""
    fields = abi.fields_of(library.loaded())
    assert abi.checksum(fields) == abi.VERSION
    assert abi.unknown_options(fields) == []


@pytest.mark.skipif(library.sources() is None, reason="the package has no C sources")
def test_options_in_c_are_those_of_the_classes() -> None:
    assert options_header.HEADER.read_text() == options_header.written(), "run `make options`"


@needs_the_library
@pytest.mark.parametrize("change", ["type", "order", "added", "removed", "option", "option-type", "unknown"])
def test_a_library_of_another_build_is_refused(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = abi.fields_of(library.loaded())
    structure, name, _ = fields[0]
    changed = {
        "type": [(structure, name, "int32_t"), *fields[1:]],
        "order": [fields[1], fields[0], *fields[2:]],
        "added": [*fields, (fields[-1][0], "another", "int32_t")],
        "removed": fields[:-1],
        "option": [(of, "momentum" if name == "betas" else name, kind) for of, name, kind in fields],
        "option-type": [(of, name, "int32_t" if name == "betas" else kind) for of, name, kind in fields],
        "unknown": [(structure, name, "complex"), *fields[1:]],
    }[change]
    monkeypatch.setattr(abi, "fields_of", lambda _: tuple(changed))
    loaded, detail = library.load_library()
    assert loaded is None
    assert detail.endswith("reinstall bighorn from source")


# ---- sanitizers -------------------------------------------------------------------------------------------------

DRIVERS = HERE.parent / "csrc"
COMPILER = os.environ.get("CC") or "cc"
SANITIZERS = {
    "address-and-undefined": ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread", "-O1"],
}


def compiled(folder: Path, sanitizer: str, sources: list[Path]) -> list[str]:
    """Compile sources for one instruction set, and return the command of the program; skip without a sanitizer."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C compiler: {COMPILER}")
    program = str(folder / "program")
    command = [
        COMPILER,
        "-std=gnu11",
        "-g",
        "-fopenmp-simd",
        "-ffp-contract=off",
        *SANITIZERS[sanitizer],
        "-o",
        program,
    ]
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    # Older sanitizers exit at once if addresses are randomized in too many bits; setarch disables this.
    fixed = ["setarch", platform.machine(), "-R", program]
    starts = [[program], *([fixed] if shutil.which("setarch") else [])]
    if subprocess.run([*command, str(probe)], capture_output=True, check=False).returncode:
        pytest.skip(f"{COMPILER} has no {sanitizer} sanitizer here")
    run = next((each for each in starts if not subprocess.run(each, capture_output=True, check=False).returncode), None)
    if run is None:
        pytest.skip(f"programs with the {sanitizer} sanitizer do not run here")
    inputs = ["-DISA=base", '-DSOURCES=""', f"-I{CSRC}", f"-I{DRIVERS}", *map(str, sources), "-lm", "-lpthread"]
    subprocess.run([*command, *inputs], check=True, timeout=300)
    return run


@pytest.mark.skipif(not CSRC.is_dir(), reason="the C sources are not in wheels")
@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_steps_under_a_sanitizer(sanitizer: str, tmp_path: Path) -> None:
    """The driver runs all loops of one instruction set; `make sanitize` runs tests of the kernels on the others."""
    run = compiled(tmp_path, sanitizer, [DRIVERS / "steps.c", *CSRC.glob("*.c")])
    process = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert differences((DRIVERS / "steps.expected").read_text(), process.stdout) == []


AWAKE = {
    "#include <stdbool.h>": "#include <sched.h>\n#include <stdbool.h>",
    "for (int spin = 0; spin < 4000; spin++) {": "for (;;) {",
    "        relax();": "        sched_yield();",
}
"""Replacements in run.c for threads that never sleep: after a sleep they read the phase in the strongest order."""

BARRIERS: dict[str, dict[str, str]] = {
    "sleeps": {},
    "awake": AWAKE,
    "load": AWAKE | {"memory_order_acquire": "memory_order_relaxed"},
    "store": AWAKE
    | {
        "atomic_store(&barrier->phase, phase + 1)": (
            "atomic_store_explicit(&barrier->phase, phase + 1, memory_order_relaxed)"
        )
    },
}


@pytest.mark.skipif(not CSRC.is_dir(), reason="the C sources are not in wheels")
@pytest.mark.parametrize("barrier", BARRIERS)
def test_the_barrier_orders_memory(barrier: str, tmp_path: Path) -> None:
    """ThreadSanitizer detects both barriers with a weakened memory order, so its silence has meaning.

    It once saw no race on a busy machine, on which every thread slept.
    """
    text = (CSRC / "run.c").read_text()
    for right, other in BARRIERS[barrier].items():
        assert text.count(right) == 1, right
        text = text.replace(right, other)
    source = tmp_path / "run.c"
    source.write_text(text)
    run = compiled(tmp_path, "thread", [DRIVERS / "barrier.c", source])
    process = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    if barrier in {"sleeps", "awake"}:
        assert (process.returncode, process.stdout) == (0, "done\n"), process.stderr[-3000:]
    else:
        assert process.returncode != 0
        assert "ThreadSanitizer: data race" in process.stderr


@needs_the_library
@pytest.mark.parametrize("state_dtype", ["int8", "int4"])
def test_lars_with_state_in_blocks_says_that_it_is_slow(state_dtype: Any) -> None:
    kernels._warn_of.cache_clear()
    params = [Parameter(torch.ones(64, 64))]
    params[0].grad = torch.ones(64, 64)
    for quiet in (Lars(params, lr=0.1), Lars(params, lr=0.1, state_dtype=state_dtype, backend="foreach")):
        quiet.step()
    with pytest.warns(UserWarning, match=r"^a step of Lars .* 15 times .* no momentum of LARS in blocks. Use state_d"):
        Lars(params, lr=0.1, state_dtype=state_dtype).step()
