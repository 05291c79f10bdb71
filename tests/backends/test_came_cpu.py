"""CAME in the C library, on each way in which it divides tensors; the table of cases has its options and dtypes.

The shapes give tiles of many small matrices, of many short rows, of a part of wide rows and of a part of tall columns;
all threads share tensors above a million elements.
"""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from bighorn import Came
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from bighorn._kernels.cpu.library import loaded
from bighorn._kernels.cpu.tensors import TYPES
from bighorn._kernels.options import CameOptions
from tests.backends.test_backends import check_steps
from tests.support.case_options import CAME_DTYPES, CAME_OPTIONS
from tests.support.case_tensors import Grad, Leaf
from tests.support.cases import Case
from tests.support.tables import for_every

STATUS = kernels.status()["cpu"]
pytestmark = pytest.mark.skipif(not STATUS.available, reason=f"backend cpu: {STATUS.detail}")

GRADS: tuple[Grad, ...] = ("zero", "zero-rows", "zero-columns", "minute", "huge", "ladder", "constant")
SHAPES = (
    *[(1, 1), (1, 17), (17, 1), (3, 3), (3, 17), (17, 3), (17, 17), (1, 1000), (1000, 1), (3, 1000), (1000, 3)],
    *[(256, 257), (257, 256), (17, 256), (257, 17), (1000, 257), (130, 1000)],
    *[(24, 20, k, k) for k in (1, 2, 3, 5, 7)],
    *[(64, 80, 1, 1), (512, 1, 3, 3), (3, 70, 50), (3, 5, 1500), (3, 1500, 5), (512, 1, 1), (0, 3), (3, 0)],
    *[(0,), (1,), (17,), (1000,), (5000,), (9001,), ()],
)
SMALL = (
    *(Leaf(str(shape), shape) for shape in SHAPES),
    *(Leaf(f"{grad} {s}", s, grad=grad) for grad in GRADS for s in [(9, 31), (70, 90), (8, 20, 3, 3)]),
    Leaf("channels-last", (12, 20, 3, 3), layout="channels_last", grad_layout="channels_last"),
)
LARGE = (
    *(Leaf(str(shape), shape) for shape in [(2000, 1100), (30522, 16), (16, 30522)]),
    Leaf("whole-rows", (258, 8200)),
    Leaf("divided-rows", (258, 32_800)),
    Leaf("groups", (3, 900, 800)),
    Leaf("shared", (1700, 1800)),
    Leaf("shared-wide", (5, 220_000)),
    Leaf("shared-groups", (5, 700, 600)),
    Leaf("shared-tall", (220_000, 5)),
    Leaf("shared-kernels", (400, 300, 3, 3)),
    Leaf("shared-convolution", (400, 300, 3, 3), layout="channels_last", grad_layout="channels_last"),
)
FACTORS = ("matrix", "last_two")


def case(leaves: tuple[Leaf, ...], name: str, factor: str, dtypes: str = "float32") -> Case:
    param, grad, few_bits = {**CAME_DTYPES, "float32": (torch.float32, torch.float32, {})}[dtypes]
    options = {**CAME_OPTIONS[name], "factor": factor, "exclude_from_weight_decay": None}
    kept = tuple(leaf for leaf in leaves if grad != torch.float16 or leaf.grad not in ("huge", "ladder"))
    return Case(f"tiles-{dtypes}", {**options, **few_bits}, kept, ({},), param, grad, Came)


OF_TILES = ("published", "everything", "no-memory", "no-clip")
"""Options that run with all shapes; the others run with few in the table of cases, and with all in `make slow`."""
COMPILED = [name for name, options in CAME_OPTIONS.items() if not options.items() & CameOptions.rare.items()]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OF_TILES)) for name in COMPILED]
)
def test_a_step_equals_the_float64_reference(factor: str, name: str) -> None:
    # The terms of a constant gradient's sum are all rounded alike, and the residual squares the clip by that sum.
    check_steps("cpu", case(SMALL, name, factor), roundings=1.25 if name == "large-eps" else 1)


@pytest.mark.parametrize("leaf", LARGE, ids=lambda leaf: leaf.name)
@pytest.mark.parametrize("factor", ["matrix", pytest.param("last_two", marks=[pytest.mark.slow])])
def test_large_tensors(factor: str, leaf: Leaf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGHORN_NUM_THREADS", "3")
    check_steps("cpu", case((leaf,), "everything", factor), steps=1)


DTYPES = (
    *("bfloat16", "float16", "float32-grads-float16", "float32-states-bfloat16", "bfloat16-states-bfloat16"),
    *("float16-states-float16", "float32-states-int8-all", "bfloat16-states-int8"),
)


@for_every(("dtypes", "factor"), itertools.product(DTYPES, FACTORS))
def test_every_dtype(dtypes: str, factor: str) -> None:
    check_steps("cpu", case(SMALL, "everything", factor, dtypes))


IN_EACH_SET = [
    case(SMALL, "everything", "last_two", "bfloat16"),
    case(SMALL, "everything", "matrix", "float16-states-float16"),
    case(SMALL, "everything", "last_two", "bfloat16-states-int8"),
]
"""The cases for each instruction set, in `test_threads.py`."""


def test_narrow_matrices_of_each_width() -> None:
    """The usual widths have separate loops."""
    leaves = tuple(Leaf(f"width-{width}", (1500, width)) for width in range(1, 18))
    check_steps("cpu", case(leaves, "published", "last_two"))


def workspace(shape: tuple[int, int, int], threads: int) -> int:
    """Return the bytes of workspace for a tensor, without creating the tensor."""
    matrices, height, width = shape
    weights, row, gradient = (library.STRUCTURES[name] for name in ("Weights", "FactoredSlot", "Gradient"))
    rows = (row * 1)(row(weights=weights(type=TYPES[torch.float32]), matrices=matrices, height=height, width=width))
    gradients = (gradient * 1)(gradient(size=matrices * height * width))
    return 8 * int(loaded().bighorn_factored_workspace(rows, None, gradients, 1, ctypes.c_int(threads)))


EDGE_SIZES = (1, 2, 3, 9, 31, 32, 63, 64, 65, 127, 129, 192, 200, 257, 1000, 1024, 1025, 30522, 3_000_000)


@for_every("matrices", [1, 3, 50, 100_000])
def test_temporaries_are_small(matrices: int) -> None:
    """The limit includes the buffers of eight threads; three of a thread hold a row of at most 32,768 elements."""
    for height, width in itertools.product(EDGE_SIZES, EDGE_SIZES):
        buffers = 8 * ((17 << 10) + 3 * max(2 << 10, min(width, 32 << 10)))
        allowed = 4 * (buffers + max(1 << 18, 0.02 * matrices * height * width))
        assert workspace((matrices, height, width), threads=8) <= allowed, (matrices, height, width)
