"""Parameters and gradients of the table of cases. A new difficult tensor is one line in `ZOO`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Fill = Literal["normal", "big", "small", "zero"]
Grad = Literal[
    "normal", "tiny", "minute", "huge", "zero", "zero-rows", "zero-columns", "ladder", "constant", "none", "late", "gap"
]
Layout = Literal["plain", "transposed", "columns", "strided", "gaps", "channels_last", "misaligned", "expanded", "lazy"]

SCALES: Mapping[Grad, float] = {"tiny": 1e-3, "minute": 1e-8, "huge": 1e6, "zero": 0.0}


@dataclass(frozen=True)
class Leaf:
    """One parameter and the kind of its gradients."""

    name: str
    shape: tuple[int, ...]
    fill: Fill = "normal"
    grad: Grad = "normal"
    layout: Layout = "plain"
    grad_layout: Layout = "plain"
    dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    group: int = 0

    def has_gradient(self, step: int) -> bool:
        return not (self.grad == "none" or (self.grad == "late" and step == 0) or (self.grad == "gap" and step == 1))


def of_kind(values: Tensor, grad: Grad) -> Tensor:
    """Return normal values as gradients of a kind."""
    if grad == "ladder":
        return values.sign() * torch.logspace(-12, 6, values.numel(), dtype=values.dtype).view(values.shape)
    if grad == "constant":
        return torch.full_like(values, 0.3)
    if grad == "zero-rows":
        values[::2] = 0
    elif grad == "zero-columns":
        values[..., ::2] = 0
    return values * SCALES.get(grad, 1.0)


def double(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def ordinal(tensor: Tensor) -> Tensor:
    """Return the rank of each 16-bit float among all floats of its dtype; differences of ranks are in ulps."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -32768 - bits, bits)


def arranged(values: Tensor, layout: Layout) -> Tensor:
    """Return a copy of the values in a memory layout."""
    if layout == "transposed":
        return values.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "columns":  # of each matrix, one after the other
        return values.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "strided":
        wide = torch.full((*values.shape[:-1], 2 * values.shape[-1]), 7.0, dtype=values.dtype)
        return wide[..., ::2].copy_(values)
    if layout == "gaps":  # columns of a wider matrix
        wide = torch.full((*values.shape[:-1], values.shape[-1] + 3), 7.0, dtype=values.dtype)
        return wide[..., : values.shape[-1]].copy_(values)
    if layout == "channels_last":
        return values.clone(memory_format=torch.channels_last)
    if layout == "misaligned":
        return torch.zeros(values.numel() + 1, dtype=values.dtype)[1:].view(values.shape).copy_(values)
    if layout == "expanded":
        return values.flatten()[:1].clone().expand(values.shape)
    if layout == "lazy":  # views that torch conjugates or negates when they are read
        if values.is_complex():
            return values.conj().resolve_conj().conj()
        return torch._neg_view(values.neg())
    return values.clone(memory_format=torch.contiguous_format)


# ---- collections ---------------------------------------------------------------------------------------------------


ZOO = (
    Leaf("plain.weight", (7, 5)),
    Leaf("plain.bias", (17,)),
    Leaf("scalar", ()),
    Leaf("empty", (0,)),
    Leaf("empty.weight", (3, 0)),
    Leaf("one", (1,)),
    Leaf("page.bias", (4097,)),
    Leaf("zero.weight", (6, 4), fill="zero"),
    Leaf("zero.bias", (9,), grad="zero"),
    Leaf("zero.both", (5, 2), fill="zero", grad="zero"),
    Leaf("none.weight", (4, 2), grad="none"),
    Leaf("late.weight", (5, 3), grad="late"),
    Leaf("gap.bias", (13,), grad="gap"),
    Leaf("big.weight", (8, 8, 3), fill="big"),
    Leaf("tiny.weight", (12, 3), grad="tiny"),
    Leaf("minute.bias", (11,), grad="minute"),
    Leaf("transposed.weight", (5, 9), layout="transposed"),
    Leaf("strided.weight", (6, 7), layout="strided", grad_layout="transposed"),
    Leaf("gaps.weight", (5, 6), layout="gaps", grad_layout="gaps"),
    Leaf("columns.weight", (2, 6, 3), layout="columns"),
    Leaf("conv.weight", (4, 3, 3, 5), layout="channels_last"),
    Leaf("conv2.weight", (3, 2, 3, 3), grad_layout="channels_last"),
    Leaf("conv3.weight", (2, 4, 3, 2), layout="channels_last", grad_layout="channels_last"),
    Leaf("misaligned.bias", (31,), layout="misaligned", grad_layout="misaligned"),
    Leaf("expanded.weight", (4, 6), grad_layout="expanded"),
    Leaf("column.weight", (19, 1), grad_layout="strided"),
    Leaf("empty.rows", (0, 3)),
    Leaf("pointwise.weight", (6, 5, 1, 1), layout="channels_last"),
    Leaf("negated.weight", (7, 3), grad_layout="lazy"),
)

LARGE = (
    Leaf("blocks.weight", (70, 1001)),
    Leaf("blocks.bias", (8192,)),
    Leaf("blocks.odd", (8193,), layout="misaligned"),
    Leaf("blocks.transposed", (130, 129), layout="transposed"),
    Leaf("blocks.gaps", (67, 130), layout="gaps", grad_layout="transposed"),
    Leaf("blocks.wide", (3, 20_001)),
)

BLOCKS = (
    # Tensors of 4096 elements or more, which int8 takes: rows of less than a block, one, a few, and odd ends.
    Leaf("rows.weight", (41, 100)),
    Leaf("row.weight", (1, 4100)),
    Leaf("column.weight", (19, 1)),  # quantized only if all tensors are: 4,100 rows take minutes when interpreted
    Leaf("odd.weight", (16, 257), layout="transposed"),
    Leaf("strided.weight", (9, 600), layout="strided", grad_layout="transposed"),
    Leaf("conv.weight", (24, 20, 3, 3), layout="channels_last"),
    Leaf("deep.weight", (2, 9, 256), grad="late"),
    Leaf("zero.weight", (64, 64), fill="zero", grad="zero"),
    Leaf("tiny.weight", (8, 513), grad="tiny"),
    Leaf("bias", (4200,)),
    Leaf("small.weight", (20, 9)),
)

EDGES = (
    Leaf("zero.rows", (8, 4), grad="zero-rows"),
    Leaf("zero.columns", (4, 8), grad="zero-columns"),
    Leaf("huge.weight", (6, 5), grad="huge"),
    Leaf("ladder.weight", (9, 6), grad="ladder"),
    Leaf("ladder.bias", (31,), grad="ladder"),
    Leaf("constant.weight", (5, 6), grad="constant"),
    Leaf("row.weight", (1, 9)),
    Leaf("ones.weight", (1, 1, 1, 1)),
)

FEW = tuple(
    leaf
    for leaf in ZOO
    if leaf.name
    in {"plain.weight", "page.bias", "empty", "zero.weight", "zero.bias", "strided.weight", "big.weight", "conv.weight"}
)

MIXED = (
    Leaf("float32.weight", (9, 5)),
    Leaf("bfloat16.weight", (9, 5), dtype=torch.bfloat16),
    Leaf("float16.bias", (33,), dtype=torch.float16),
    Leaf("bfloat16.bias", (21,), dtype=torch.bfloat16, grad_dtype=torch.float32),
    Leaf("float32.bias", (40,), grad_dtype=torch.bfloat16),
    Leaf("complex64.weight", (4, 3), dtype=torch.complex64),
    Leaf("conjugated.weight", (5, 2), dtype=torch.complex64, grad_layout="lazy"),
    Leaf("bfloat16.conv", (2, 3, 3, 3), dtype=torch.bfloat16, layout="channels_last"),
)
