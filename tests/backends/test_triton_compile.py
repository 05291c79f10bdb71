"""Triton's kernels without a GPU: every variant compiles for several GPUs, and a fake GPU records launches.

`test_triton_versions.py` runs this file under other versions of Triton. The tests that are not slow compile a few
variants that together have every value of every constant.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bighorn import Came, Lamb
from bighorn._kernels.triton import came_launches, device, launch_group, tiles
from tests.support import kernel_variants
from tests.support.cases import Kind
from tests.support.fake_gpu import Driver, compiled_while_numbers_change
from tests.support.kernel_compilation import (
    TARGETS,
    all_in_amdgcn,
    build,
    found_in_amdgcn,
    found_in_ptx,
    source,
    spilled_by_amdgcn,
    spilled_by_ptxas,
)
from tests.support.kernel_variants import Variant
from tests.support.triton_compat import VERSION, missing
from tests.support.triton_interpreter import compiled

NO_SPILLS = (3, 6)
"""The ptxas of older versions of Triton may spill a few bytes to memory."""

PARTS = 16
"""The number of tests that compile all variants for a target in `make slow`."""


# ---- compiled ahead of time -----------------------------------------------------------------------------------------


@compiled
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "part", [pytest.param(None, id="few"), *(pytest.param(part, marks=[pytest.mark.slow]) for part in range(PARTS))]
)
def test_kernels_compile_without_spills_and_move_128_bits(part: int | None, target: str, tmp_path: Path) -> None:
    if reason := missing(TARGETS[target][0]):
        pytest.skip(reason)
    every = kernel_variants.variants_for(target)
    few = kernel_variants.covering()
    compile_all([each for each in every if each.id in few] if part is None else every[part::PARTS], tmp_path)


@compiled
@pytest.mark.slow
def test_the_language_has_what_kernels_need(tmp_path: Path) -> None:
    """`make test` runs it with the oldest Triton, and compiles more with the newest."""
    compile_all(kernel_variants.language(), tmp_path)


def compile_all(chosen: list[Variant], folder: Path) -> None:
    failures = []
    for variant in chosen:
        try:
            compile_and_check(variant, folder)
        except Exception:
            failures.append(f"{variant.id}:\n{traceback.format_exc()}")
    assert not failures, f"{len(failures)} of {len(chosen)} variants fail\n" + "\n".join(failures)
    print(f"{len(chosen)} variants compiled")


def compile_and_check(variant: Variant, folder: Path) -> None:
    backend = TARGETS[variant.target][0]
    constants = dict(variant.constants)
    options = dict(variant.options)
    kernel = build(variant.kernel, variant.pointers, constants, options, variant.target)
    spilled = spilled_by_ptxas(kernel, folder) if backend == "cuda" else spilled_by_amdgcn(kernel)
    for registers in device.WITHOUT_SPILLS if backend == "cuda" else ():  # as `device.compiled` does
        if spilled:
            more = options | {"maxnreg": registers}
            kernel = build(variant.kernel, variant.pointers, constants, more, variant.target)
            spilled = spilled_by_ptxas(kernel, folder)
    if VERSION < NO_SPILLS:
        if spilled:
            print(f"{variant.id} spills {spilled} bytes")
        return
    assert spilled == 0
    wide = lamb_wide(variant.name, constants) if variant.name in LAMB else least_wide(variant.name, constants)
    found = found_in_ptx(kernel) if backend == "cuda" else all_in_amdgcn(kernel)
    assert all(a >= b for a, b in zip(found, wide, strict=True)), (found, wide)
    if variant.name in LAMB and backend == "cuda":
        assert found == wide
    # Other kernels have no basic block that both loads and stores.
    plain = variant.name == "lamb_moments" and not constants["M_FORM"]
    if plain and wide[1] and backend == "hip":
        stores = wide[1] // 2
        assert found_in_amdgcn(kernel) == (wide[0] - stores, stores)


LAMB = ("square_sums", "lamb_factors", "lamb_moments", "shard_totals", "lamb_norms", "lamb_apply")
KEPT = {"kahan": 16, "master": 32}
"""Bits of aux state per element that are read 128 at a time; kahan8's are read 64 at a time."""


def lamb_wide(name: str, constants: dict[str, Any]) -> tuple[int, int]:
    """Return a thread's numbers of 128-bit loads and stores, on the main path and for misaligned gradients."""
    if name not in ("lamb_moments", "lamb_apply"):
        return (1, 0) if name == "square_sums" else (0, 0)
    each = constants["BLOCK"] // device.THREADS
    bits = [constants[name].primitive_bitwidth if name in constants else 0 for name in ("X", "G", "S", "V")]
    x, g, m, v, kept = (each * width // 128 for width in (*bits, KEPT.get(constants["ROUNDING"], 0)))
    if name == "lamb_apply":
        return x + kept + m + v, x + kept
    moved = x + kept + m + v
    return 2 * moved + g, 2 * moved


def least_wide(name: str, constants: dict[str, Any]) -> tuple[int, int]:
    """Return the minimum numbers of 128-bit loads and stores of a thread."""
    each = constants.get("TILE_BLOCK", constants.get("BLOCK", 8 * device.THREADS)) // device.THREADS
    bits = [*(constants[key].primitive_bitwidth if key in constants else 0 for key in ("X", "G", "S"))]
    widths = (*bits, 32, KEPT.get(constants.get("ROUNDING", ""), 0))
    at_once = constants.get("VECTOR", 16)  # beside int4, as many as of the wider of X and G: 64 bits of the other
    x, g, s, v, kept = (each * width // 128 if at_once * width >= 128 else 0 for width in widths)
    coded, s = bool(constants.get("M_FORM")), s // 2 if constants.get("M_FORM") == "int4" else s
    return {
        "lars_norms": (2 * (x + kept) + g, 0),
        "lars_apply": (2 * (x + kept + s) + g, 2 * (x + kept + s)),
        "came_squares": (g, 0),
        "came_update_squares": (g, 0),
        "came_average": (g + s, 0 if coded else s),
        "came_apply": (x + kept + s, x + kept),
        "came_second_moment": (g + v, v),
        "came_move": (x + kept + g + v + (0 if coded else s), x + kept + (0 if coded else s)),
    }.get(name, (0, 0))


@compiled
def test_a_new_layout_compiles_every_kernel_again() -> None:
    """Triton's cache key does not include constants of other modules, such as columns of tables."""
    for variant in kernel_variants.variants_for(kernel_variants.LAUNCHED):
        constants = dict(variant.constants)
        assert constants["_SOURCES"] == launch_group.SOURCES
        keys = {source(variant.kernel, variant.pointers, constants | {"_SOURCES": number}).hash() for number in (1, 2)}
        assert len(keys) == 2, variant.name


# ---- compiled, and launched on a fake GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registers", "spills_below", "limits", "taken"),
    [
        (64, 0, [], None),
        (72, 0, [64], 64),
        (170, 0, [128, 80, 64], 64),
        (170, 81, [128, 80], 128),  # spills with 80
        (80, 100, [128, 80], 128),  # spills for one more program
        (80, 200, [128, 255, 128], 255),
    ],
)
def test_a_kernel_has_few_registers_and_does_not_spill(
    registers: int, spills_below: int, limits: list[int], taken: int | None
) -> None:
    seen: list[int | None] = []

    def load(options: dict[str, Any]) -> Any:
        limit = options.get("maxnreg")
        seen.append(limit)
        used = limit or registers
        return SimpleNamespace(limit=limit, n_regs=used, n_spills=2 if used < spills_below else 0)

    assert device.with_more_programs(load, {}).limit == taken
    assert seen == [None, *limits]


@pytest.mark.parametrize(("backend", "limits"), [("cuda", [None, 128, 80, 64]), ("hip", [None])])
def test_kernels_of_amd_get_no_limit_of_registers(
    backend: str, limits: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's compiler has no such option."""
    seen: list[dict[str, Any]] = []

    class Kernel:
        arg_names = ("table_ptr", "BLOCK")

        def run(self, *_: Any, **options: Any) -> Any:
            seen.append(options)
            return SimpleNamespace(run=None, n_spills=0, n_regs=options.get("maxnreg", 170))

    monkeypatch.setattr(device, "_platform", lambda _: (backend, 32))
    monkeypatch.setattr(device, "interpreted", lambda: False)
    device.compiled(Kernel(), (torch.zeros(1),), {"BLOCK": 8, "CHUNK": 9})
    assert [options["BLOCK"] for options in seen] == [8] * len(seen)
    assert [options.get("maxnreg") for options in seen] == limits


@compiled
@pytest.mark.parametrize(
    ("kind", "launches", "compilations"),
    # Each kernel compiles once; kernels for averages of squares and of residuals, and for all tensors, compile twice.
    [(Lamb, 5, 5), (Came, 2 + 8 + 4, 12)],
    ids=["lamb", "came"],
)
def test_nothing_is_compiled_again_when_numbers_change(
    kind: Kind, launches: int, compilations: int, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiles of variants, which Triton's cache has.
    monkeypatch.setattr(came_launches, "area_of", lambda _: tiles.AREA)
    names = compiled_while_numbers_change(kind, monkeypatch)
    assert len(driver.launched) == 4 * launches
    assert len(names) == compilations
    assert set(names) == {name for name, _ in driver.launched}
