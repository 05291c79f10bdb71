"""Random rows of the table of cases: several rows of `case_options.py` at once, for parameters of any shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tests.support.case_options import DTYPES
from tests.support.case_tensors import Fill, Grad, Layout, Leaf
from tests.support.cases import CAME, LAMB, LARS, Case

NAMES = ("conv1.bias", "big.weight", "plain.weight", "norm.scale", "late.bias")
"""The first two are always present, since an exclusion that matches no name is refused."""

# The table tests what random cases leave out: a mask that rounding flips, a gradient that is almost its mean and is
# divided by its own size, and a compensation that ends at a tie of two subnormal numbers.
NOISY = {"cautious", "grad_centralization"}
PRECISIONS = sorted(DTYPES.keys() - {"float16-weights-kahan"})
FILLS: Sequence[Fill] = ("normal", "big", "small", "zero")
GRADS: Sequence[Grad] = ("normal", "tiny", "minute", "zero", "none", "late", "gap")
LAYOUTS: Sequence[Layout] = ("plain", "transposed", "strided", "channels_last", "misaligned")
GRAD_LAYOUTS: Sequence[Layout] = (*LAYOUTS, "lazy")
"""Layouts without "expanded", since the rounding errors of equal elements add up."""
SIZES = (0, 1, 2, 3, 5, 7, 8, 16, 17, 31, 64, 65, 129, 257, 1025, 4097)
MOST = 9000
"""The most elements of a tensor, enough for blocks and for tensors that threads share."""

FEWEST = 5
"""The fewest elements of a nonempty tensor with a trust ratio."""


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw shapes of 0 to 5 dims, some of them 0 or 1."""
    shape: tuple[int, ...] = ()
    for _ in range(draw(st.integers(0, 5))):
        room = MOST // max(1, torch.Size(shape).numel())
        shape += (draw(st.sampled_from([size for size in SIZES if size <= room])),)
    return shape


def fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    return {"channels_last": len(shape) == 4, "strided": len(shape) > 0}.get(layout, True)


@st.composite
def leaves(draw: st.DrawFn, name: str, groups: Sequence[Mapping[str, Any]]) -> Leaf:
    shape, group = draw(shapes()), draw(st.integers(0, len(groups) - 1))
    stacked = groups[group].get("stacked")
    # If an update of few elements cancels, its ratio is rounding noise; those in `case_tensors.py` do not cancel.
    assume(torch.Size(shape[1:] if stacked else shape).numel() not in range(1, FEWEST))
    assume(not stacked or len(shape) >= 2)
    return Leaf(
        name,
        shape,
        fill=draw(st.sampled_from(FILLS)),
        grad=draw(st.sampled_from(GRADS)),
        layout=draw(st.sampled_from([layout for layout in LAYOUTS if fits(layout, shape)])),
        grad_layout=draw(st.sampled_from([layout for layout in GRAD_LAYOUTS if fits(layout, shape)])),
        group=group,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw compatible options of up to three rows, a row of groups and a row of dtypes."""
    table = draw(st.sampled_from((LAMB, CAME, LARS)))
    rows, of_groups = table.options, table.groups
    options: dict[str, Any] = {}
    steady = sorted(name for name in rows if not rows[name].keys() & NOISY)
    for row in draw(st.lists(st.sampled_from(steady), min_size=1, max_size=3)):
        options |= rows[row]
    dtype, grad_dtype, precision = DTYPES[draw(st.sampled_from(PRECISIONS))] if draw(st.booleans()) else FLOAT32
    options |= precision
    steady = sorted(name for name in of_groups if not any(group.keys() & NOISY for group in of_groups[name]))
    groups = of_groups[draw(st.sampled_from(steady))] if draw(st.booleans()) else ({},)
    # If decay and gradient cancel, a low-precision moment is rounding noise.
    assume("state_dtype" not in options or all(each.get("decay_mode") != "l2" for each in (options, *groups)))
    if table is LARS and "state_dtype" in options:
        options["weight_decay"] = 0.0
    count = draw(st.integers(2, len(NAMES)))
    found = Case(
        f"random-{draw(st.integers(0, 2**20))}",
        options,
        tuple(draw(leaves(name, groups)) for name in NAMES[:count]),
        groups,
        dtype,
        grad_dtype,
        table.kind,
    )
    on_ball = any(each.get("hyperball") for each in (options, *groups))  # where a matrix of zeros is refused
    assume(not on_ball or all(leaf.fill != "zero" for leaf in found.leaves))
    assume(constructible(found))
    return found


FLOAT32: tuple[torch.dtype, torch.dtype, Mapping[str, Any]] = (torch.float32, torch.float32, {})


def constructible(case: Case) -> bool:
    """Whether the constructor accepts the options together."""
    try:
        case.optimizer(case.parameters(), "reference")
    except ValueError:
        return False
    return True
