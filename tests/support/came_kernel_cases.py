"""Tensors and options for tests of CAME's kernels without an optimizer.

A new option is one line in `OPTIONS`, and a new difficult tensor one in `MAIN`, `EDGES` or `VECTORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bighorn.kernels import Bucket, CameOptions, Kernel, codec
from tests.support.case_tensors import Layout, arranged

Make = Callable[[list[Bucket[CameOptions]]], Kernel]
Factor = Literal["matrix", "last_two"]
Grad = Literal["normal", "zero", "zero-rows", "zero-columns", "tiny", "huge", "ladder", "constant"]

LOW = (torch.bfloat16, torch.float16)
STEPS = 10
DEFAULTS = CameOptions(
    lr=0.1,
    betas=(0.9, 0.999, 0.9999),
    eps=(1e-30, 1e-16),
    clip_threshold=1.0,
    weight_decay=0.1,
    decay_rate=None,
    bias_correction=False,
    scale_parameter=False,
    scale_eps=1e-3,
    maximize=False,
    factor="matrix",
)


@dataclass(frozen=True)
class Leaf:
    """A parameter and the kind of its gradients, which are in its memory order."""

    name: str
    shape: tuple[int, ...]
    grad: Grad = "normal"
    zero: bool = False
    layout: Layout = "plain"

    def values(self, dtype: torch.dtype) -> Tensor:
        values = torch.randn(self.shape, dtype=torch.float64) * (0.0 if self.zero else 0.5)
        return arranged(values.to(dtype), self.layout)

    def gradient(self, dtype: torch.dtype) -> Tensor:
        g = torch.randn(self.shape, dtype=torch.float64)
        if self.grad == "zero-rows":
            g[::2] = 0
        elif self.grad == "zero-columns":
            g[..., ::2] = 0
        elif self.grad == "ladder":
            g = g.sign() * torch.logspace(-12, 6, g.numel(), dtype=torch.float64).view(g.shape)
        elif self.grad == "constant":
            g.fill_(0.3)
        g = g * {"zero": 0.0, "tiny": 1e-12, "huge": 1e6}.get(self.grad, 1.0)
        return arranged(g.to(dtype), self.layout)


MAIN = (
    Leaf("plain", (7, 5)),
    Leaf("plain.too", (7, 5)),
    Leaf("conv", (4, 3, 3, 5), layout="channels_last"),
    Leaf("pointwise", (6, 5, 1, 1)),
    Leaf("cube", (4, 3, 6)),
    Leaf("transposed", (5, 9), layout="transposed"),
    Leaf("long", (3, 600)),
)
EDGES = (
    Leaf("zero", (6, 4), zero=True),
    Leaf("zero.grad", (5, 4), grad="zero"),
    Leaf("zero.both", (5, 2), grad="zero", zero=True),
    Leaf("zero.rows", (8, 4), grad="zero-rows"),
    Leaf("zero.columns", (4, 8), grad="zero-columns"),
    Leaf("tiny", (6, 5), grad="tiny"),
    Leaf("huge", (6, 5), grad="huge"),
    Leaf("ladder", (9, 6), grad="ladder"),
    Leaf("constant", (5, 6), grad="constant"),
    Leaf("row", (1, 9)),
    Leaf("column", (19, 1)),
    Leaf("one", (1, 1)),
    Leaf("ones", (1, 1, 1, 1)),
)
EMPTY = (Leaf("empty.rows", (0, 3)), Leaf("empty.columns", (3, 0)))
VECTORS = (
    Leaf("vector", (17,)),
    Leaf("vector.too", (17,)),
    Leaf("number", ()),
    Leaf("single", (1,)),
    Leaf("nothing", (0,)),
    Leaf("vector.zero", (9,), grad="zero"),
    Leaf("vector.zero.both", (9,), grad="zero", zero=True),
    Leaf("vector.ladder", (31,), grad="ladder"),
    Leaf("matrix", (4, 3)),
)
LEAVES: dict[Factor | None, tuple[Leaf, ...]] = {
    "matrix": (*MAIN, *EDGES, *EMPTY),
    "last_two": (*MAIN, *EDGES, *EMPTY),
    None: VECTORS,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "published": {},
    "no-decay": {"weight_decay": 0.0},
    "betas": {"betas": (0.5, 0.9, 0.99)},
    "no-second-memory": {"betas": (0.9, 0.0, 0.0)},
    "eps": {"eps": (1e-3, 1e-2)},
    "no-clip": {"clip_threshold": 1e9},
    "hard-clip": {"clip_threshold": 0.2},
    "decay-rate": {"decay_rate": 0.8},
    "scale-parameter": {"scale_parameter": True, "lr": 0.02},
    "scale-eps": {"scale_parameter": True, "scale_eps": 0.7},
    "bias-correction": {"bias_correction": True},
    "maximize": {"maximize": True},
    "tensor-lr": {"lr": torch.tensor(0.1, dtype=torch.float64)},
    "everything": {
        "decay_rate": 0.8,
        "scale_parameter": True,
        "bias_correction": True,
        "maximize": True,
        "clip_threshold": 0.5,
        "betas": (0.8, 0.5, 0.99),
    },
}


@dataclass(frozen=True)
class Case:
    """Options, and the tensors that kernels step with them."""

    id: str
    options: CameOptions
    leaves: tuple[Leaf, ...]

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        return [leaf.values(dtype) for leaf in self.leaves]

    def gradients(self, dtype: torch.dtype) -> list[Tensor]:
        return [leaf.gradient(dtype) for leaf in self.leaves]


CASES = [
    Case(f"{factor}-{name}", replace(DEFAULTS, factor=factor, **options), leaves)
    for factor, leaves in LEAVES.items()
    for name, options in OPTIONS.items()
]


def marks(factor: Factor | None, name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: each option is quick with one way to factor a matrix, and slow with the other."""
    turn = ("matrix", "last_two")[list(OPTIONS).index(name) % 2]
    return [] if factor in (turn, None) or name in ("published", "everything") else [pytest.mark.slow]


IN_TURN = [pytest.param(case, id=case.id, marks=marks(case.options.factor, case.id.split("-", 1)[1])) for case in CASES]


# ---- buckets -------------------------------------------------------------------------------------------------------


def state_of(x: Tensor, factor: Factor | None, average: torch.dtype | None) -> dict[str, Tensor]:
    """Return a state of zeros with the shapes and dtypes that an optimizer allocates."""
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = {"exp_avg": torch.zeros_like(x, dtype=average or statistics)}
    leading = x.dim() - 1 if factor == "last_two" else 1
    if average == torch.uint8:
        state["exp_avg"] = codec.encode(torch.zeros_like(x), codec.INT4, leading=leading)[0]
    if average in (torch.int8, torch.uint8):
        state["exp_avg_scale"] = torch.zeros(codec.scales_shape(x.shape, leading))
    if factor is None:
        return state | {"exp_avg_sq": torch.zeros_like(x, dtype=statistics)}
    split = 1 if factor == "matrix" else x.dim() - 1
    for name in ("exp_avg_sq", "exp_avg_res"):
        state[f"{name}_row"] = torch.zeros(x.shape[:split], dtype=statistics)
        state[f"{name}_col"] = torch.zeros((*x.shape[: split - 1], *x.shape[split:]), dtype=statistics)
    return state


def bucket_of(tensors: list[Tensor], options: CameOptions, average: torch.dtype | None = None) -> Bucket[CameOptions]:
    states = [state_of(x, options.factor, average) for x in tensors]
    steps = [torch.zeros(()) for _ in tensors]
    return Bucket(
        options=options,
        params=tensors,
        state={name: [state[name] for state in states] for name in states[0]},
        steps=steps,
        unique_steps=steps,
        metrics=torch.zeros(len(tensors), 3),
    )


def largest(a: Tensor) -> float:
    return float(a.double().abs().max()) if a.numel() else 0.0
