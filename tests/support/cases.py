"""The table of cases: every option, shape, layout and dtype with which optimizers are tested, for every backend.

`case_options.py` has its rows, and `case_tensors.py` its parameters.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn import _kernels as kernels
from bighorn._kernels.options import LambOptions
from bighorn._optim.came import CameAlgorithm
from bighorn._optim.lamb import LambAlgorithm
from bighorn._optim.lars import LarsAlgorithm
from tests.support.case_options import (
    CAME_DTYPES,
    CAME_GROUPS,
    CAME_OPTIONS,
    DTYPES,
    LAMB_GROUPS,
    LAMB_OPTIONS,
    LARS_GROUPS,
    LARS_OPTIONS,
    in_blocks,
)
from tests.support.case_tensors import BLOCKS, EDGES, FEW, LARGE, MIXED, ZOO, Leaf, arranged, double, of_kind

Optimizer: TypeAlias = Lamb | Came | Lars
Kind: TypeAlias = type[Lamb] | type[Came] | type[Lars]
KINDS: tuple[Kind, ...] = (Lamb, Came, Lars)

BACKENDS = ("reference", "foreach", "cpu", *sorted(set(kernels.status()) - {"reference", "foreach", "cpu"}))

LEFT_OUT: Mapping[str, Mapping[str, object]] = {"cpu": LambOptions.rare, "triton": LambOptions.rare}
"""Options, with their values, that a backend leaves to another one."""


DOUBLE = {torch.float64, torch.complex128}
"""Dtypes of parameters that compiled backends leave to another one."""


def leaves_out(backend: str, options: Mapping[str, object]) -> bool:
    return any(options.get(option) == value for option, value in LEFT_OUT.get(backend, {}).items())


def serving(backend: str, dtype: torch.dtype) -> str:
    """Return the `backend` argument: "auto" if the backend leaves parameters of the dtype to another one."""
    return "auto" if backend in LEFT_OUT and dtype in DOUBLE else backend


class ExactLamb(Lamb):
    """Lamb that also accepts float64 parameters with state in blocks, to compute expected results."""

    class Unrestricted(LambAlgorithm):
        def unsupported_reason(self, *_: object) -> None:
            return None

    algorithm = Unrestricted()


class ExactCame(Came):
    """Came without the same check."""

    class Unrestricted(CameAlgorithm):
        def unsupported_reason(self, *_: object) -> None:
            return None

    algorithm = Unrestricted()


class ExactLars(Lars):
    """Lars without the same check."""

    class Unrestricted(LarsAlgorithm):
        def unsupported_reason(self, *_: object) -> None:
            return None

    algorithm = Unrestricted()


EXACT: Mapping[Kind, Kind] = {Lamb: ExactLamb, Came: ExactCame, Lars: ExactLars}


LRS = (0.1, 0.05, 0.2, 0.08)
"""A rate for each step; rates are large because the rounding of a parameter hides a small step."""


@dataclass(frozen=True, eq=False)
class Case:
    """Parameters, their gradients, and the options of their optimizer."""

    id: str
    options: Mapping[str, Any]
    leaves: tuple[Leaf, ...]
    groups: tuple[Mapping[str, Any], ...] = ({},)
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    kind: Kind = Lamb

    def of(self, kind: Kind) -> Case:
        """Return the case for another optimizer."""
        return replace(self, kind=kind)

    @property
    def size(self) -> int:
        return sum(torch.Size(leaf.shape).numel() for leaf in self.leaves)

    def dtypes(self) -> set[torch.dtype]:
        return {d for leaf in self.leaves for d in (leaf.dtype or self.dtype, self.gradient_dtype(leaf))}

    def gradient_dtype(self, leaf: Leaf) -> torch.dtype:
        return leaf.grad_dtype or self.grad_dtype or leaf.dtype or self.dtype

    def runs_on(self, backend: str) -> bool:
        """Whether the backend supports the options and dtypes of the case."""
        if backend == "cpu" and self.kind is Lars and in_blocks(self.options):
            return False
        if backend in LEFT_OUT and DOUBLE & {leaf.dtype or self.dtype for leaf in self.leaves}:
            return False
        groups = (self.options, *self.groups)
        return not any(leaves_out(backend, group) for group in groups)

    def in_double(self) -> Case:
        """Return the case with parameters and gradients in float64."""
        options = {name: value for name, value in self.options.items() if name != "weight_rounding"}
        leaves = tuple(
            replace(leaf, dtype=double(leaf.dtype) if leaf.dtype else None, grad_dtype=None) for leaf in self.leaves
        )
        return replace(
            self, leaves=leaves, options=options, dtype=double(self.dtype), grad_dtype=None, kind=EXACT[self.kind]
        )

    def parameters(self) -> list[Parameter]:
        parameters = []
        for index, leaf in enumerate(self.leaves):
            dtype = leaf.dtype or self.dtype
            values = self._normal(f"x{index}", leaf.shape, dtype)
            values = values * {"normal": 0.5, "big": 3.0, "small": 1e-3, "zero": 0.0}[leaf.fill]
            parameters.append(Parameter(arranged(values.to(dtype), leaf.layout)))
        return parameters

    def gradients(self, step: int) -> list[Tensor | None]:
        """Return newly allocated gradients for a step."""
        gradients: list[Tensor | None] = []
        for index, leaf in enumerate(self.leaves):
            if not leaf.has_gradient(step):
                gradients.append(None)
                continue
            dtype = self.gradient_dtype(leaf)
            values = of_kind(self._normal(f"g{index}.{step}", leaf.shape, dtype), leaf.grad) * (1 + step / 2)
            gradients.append(arranged(values.to(dtype), leaf.grad_layout))
        return gradients

    def optimizer(self, parameters: Sequence[Parameter], backend: str, **options: Any) -> Optimizer:
        groups: list[dict[str, Any]] = [{"params": [], **group} for group in self.groups]
        for leaf, parameter in zip(self.leaves, parameters, strict=True):
            groups[leaf.group]["params"].append((leaf.name, parameter))
        return self.kind(groups, **{"lr": LRS[0], "backend": backend, **self.usual(), **self.options, **options})

    def usual(self) -> dict[str, Any]:
        """Return options for every case; at LARS's default of 1e-3, the rounding of a parameter hides a step."""
        return {"weight_decay": 0.1, **({"trust_coefficient": 1.0} if issubclass(self.kind, Lars) else {})}

    def set_lr(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of a step, unless a schedule computes it."""
        if "lr" not in self.options:
            set_lr(optimizer, LRS[step])

    def _normal(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{self.id}/{key}".encode()))
        values = torch.randn(shape, generator=generator, dtype=double(dtype), device="cpu")
        return values.to(torch.get_default_device())


def set_gradients(parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None
        if gradient is not None and gradient.dtype != parameter.dtype:
            allow_gradients_of(parameter, gradient.dtype)
        parameter.grad = gradient


HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
REFUSES_GRAD_DTYPES = f"torch {torch.__version__} refuses gradients of another dtype than their parameter's"
needs_grad_dtype = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason=REFUSES_GRAD_DTYPES)
"""Skips a test before torch 2.10."""


def allow_gradients_of(parameter: Parameter, dtype: torch.dtype | None) -> None:
    """Allow gradients of another dtype, None for any; skip the test if torch has no `grad_dtype`."""
    if not HAS_GRAD_DTYPE:
        pytest.skip(REFUSES_GRAD_DTYPES)
    parameter.grad_dtype = dtype


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


# ---- the table -----------------------------------------------------------------------------------------------------


def _stackable(leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    # The update of a slice of one element may cancel to nothing; its trust ratio is then noise.
    return tuple(leaf for leaf in leaves if len(leaf.shape) >= 2 and leaf.shape[1:] != (1,))


@dataclass(frozen=True)
class Rows:
    """The rows of the table for one optimizer."""

    kind: Kind
    prefix: str
    options: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, tuple[Mapping[str, Any], ...]]
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype, Mapping[str, Any]]]
    with_dtypes: tuple[str, ...]
    """Keys of `options` that are combined with every dtype."""
    with_sizes: tuple[str, ...]
    """Keys of `options` that are combined with mixed dtypes and with large tensors."""
    with_edges: tuple[str, ...] = ()
    """Keys of `options` that are combined with gradients whose rows, columns or elements are far apart in size."""

    def cases(self) -> Iterator[Case]:
        for name, options in self.options.items():
            yield self._case(name, options, ZOO)
        for name, groups in self.groups.items():
            stacked = any(group.get("stacked") for group in groups)
            leaves = _stackable(ZOO) if stacked else ZOO
            if any(group.get("grad_centralization") for group in groups):
                # Equal gradients centralise to rounding noise, whose direction is arbitrary.
                leaves = tuple(leaf for leaf in leaves if leaf.grad_layout != "expanded")
            yield self._case(
                name, {}, tuple(replace(leaf, group=i % len(groups)) for i, leaf in enumerate(leaves)), groups
            )
        stacked_group = ({"stacked": True},)
        for name, (dtype, grad_dtype, precision) in self.dtypes.items():
            few = BLOCKS if in_blocks(precision) else FEW
            for option in self.with_dtypes:
                options = {**self.options[option], **precision}
                if options.get("second_moment") == "adagrad" and options.get("state_dtype") == torch.bfloat16:
                    continue  # refused: sums would stop growing
                yield self._case(f"{name}-{option}", options, few, ({},), dtype, grad_dtype)
            yield self._case(f"{name}-stacked", precision, _stackable(few), stacked_group, dtype, grad_dtype)
        for option in self.with_sizes:
            yield self._case(f"mixed-{option}", self.options[option], MIXED)
            yield self._case(f"large-{option}", self.options[option], LARGE)
        for option in self.with_edges:
            yield self._case(f"edges-{option}", self.options[option], EDGES)
        yield self._case("large-stacked", {}, _stackable(LARGE), stacked_group)
        yield self._case("large-centralised", {}, LARGE, ({"grad_centralization": True},))
        yield self._case("large-bfloat16", {}, LARGE, ({},), torch.bfloat16)
        yield self._case("large-float64", {}, LARGE, ({},), torch.float64)

    def _case(self, name: str, *rest: Any) -> Case:
        return Case(f"{self.prefix}{name}", *rest).of(self.kind)


LAMB = Rows(
    Lamb,
    "",
    LAMB_OPTIONS,
    LAMB_GROUPS,
    DTYPES,
    with_dtypes=("paper-v5", "adamw", "everything", "cautious", "adagrad", "hyperball"),
    with_sizes=("paper-v5", "adamw", "clip-skip", "amsgrad", "decoupled", "cautious", "hyperball"),
)

CAME = Rows(
    Came,
    "came-",
    CAME_OPTIONS,
    CAME_GROUPS,
    CAME_DTYPES,
    with_dtypes=("published", "last-two", "everything", "cautious"),
    with_sizes=("published", "last-two", "clip-skip", "cautious"),
    with_edges=("last-two", "everything"),
)

LARS = Rows(
    Lars,
    "lars-",
    LARS_OPTIONS,
    LARS_GROUPS,
    DTYPES,
    with_dtypes=("paper", "everything"),
    with_sizes=("paper", "everything"),
)

CASES = (*LAMB.cases(), *CAME.cases(), *LARS.cases())
