"""Every variant of every kernel of the library, recorded from its launches.

Nothing is compiled: optimizers step small CPU tensors as if on a GPU, and each call of `device.compiled` is recorded. A
new kernel, constant or table needs no line here; a new option needs one in `lamb_options` or `options_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from bighorn._kernels.triton import came, came_launches, device, lamb, launch_group, tiles
from tests.support.buckets import LAYOUTS, Cuts, bucket, on_ranks
from tests.support.cases import Kind, set_gradients
from tests.support.covering_cases import fewest
from tests.support.kernel_compilation import TARGETS

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAUNCHED = "sm_90"
"""The target of `fake_gpu.py`, which compiles each kernel that it launches."""

STORES = {
    "ROUNDING": {"lamb_apply", "lars_apply", "came_apply", "came_move"},
    "M_FORM": {"lamb_moments", "lars_apply", "came_average", "came_move"},
}
"""The kernels that store what a constant describes, the weights or the momentum; others only load it."""

ROUNDINGS = ("kahan", "kahan8", "stochastic", "master")
STATES = (F32, BF16, "int8", "int4")


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants, for one target."""

    kernel: Any
    pointers: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    """The kernel's constants."""
    options: tuple[tuple[str, Any], ...]
    """The compiler's options."""
    target: str

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def id(self) -> str:
        return "-".join([self.name, self.target, *(f"{key}={value}" for key, value in self.constants + self.options)])

    def traits(self) -> set[tuple[object, ...]]:
        """Return properties that can fail: a kernel for AMD and for `LAUNCHED`, and each value of a kernel's constant.

        Kernels for dtypes of one width differ in functions that all kernels share, and so do kernels that only load
        weights of several rounding modes; each target has each dtype and mode. Some versions have no linker for AMD.
        """
        of_nvidia = TARGETS[self.target][0] == "cuda"
        has: set[tuple[object, ...]] = set() if of_nvidia and self.target != LAUNCHED else {(self.name, self.target)}
        for key, value in self.constants + self.options if of_nvidia else ():
            width = getattr(value, "primitive_bitwidth", None)
            loads = key == "ROUNDING" and self.name not in STORES[key]
            has.add(("", key, value) if loads else (self.name, key, width or str(value)))
            if width or key == "ROUNDING":
                has.add((self.target, key, str(value)))
        return has


@cache
def variants() -> list[Variant]:
    """Return all variants, in a fixed order; this takes seconds."""
    found: dict[str, Variant] = {}
    for (kernel, pointers, constants), (target, gpu) in itertools.product(recorded(), TARGETS.items()):
        options = device.compile_options(gpu[2])
        own = tuple((name, constants[name]) for name in kernel.arg_names if name in constants)
        variant = Variant(kernel, pointers, own, tuple(options.items()), target)
        found.setdefault(variant.id, variant)
    return list(found.values())


def variants_for(target: str) -> list[Variant]:
    return [variant for variant in variants() if variant.target == target]


@cache
def covering() -> set[str]:
    """Return the ids of variants that together have every trait."""
    return fewest({variant.id: (variant.traits(), 1.0) for variant in variants()})


def language() -> list[Variant]:
    """Return variants for `LAUNCHED` with each kernel, and each value of a constant where it is loaded and stored."""
    every = {variant.id: variant for variant in variants_for(LAUNCHED)}
    traits: dict[str, set[tuple[object, ...]]] = {
        id_: {(key, str(value), each.name in STORES.get(key, ())) for key, value in each.constants} | {(each.name,)}
        for id_, each in every.items()
    }
    chosen = fewest({id_: (has, 1.0) for id_, has in traits.items()})
    return [variant for id_, variant in every.items() if id_ in chosen]


# ---- recording ------------------------------------------------------------------------------------------------------

Request = tuple[Any, tuple[str, ...], dict[str, Any]]
"""A kernel, the types of its tables, and the constants of the launch."""


def pointers(tables: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return Triton's names of the types of tables."""
    from triton.runtime.jit import mangle_type

    return tuple(map(mangle_type, tables))


def recorded() -> list[Request]:
    """Return the variants that the library compiles for whole tensors and for shards."""
    requests: list[Request] = []

    def note(kernel: Any, tables: tuple[Tensor, ...], constants: dict[str, Any]) -> Any:
        requests.append((kernel, pointers(tables), constants))
        return lambda *_: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "DEVICES", ("cpu",))
        patch.setattr(launch_group, "compiled", note)
        patch.setattr(came_launches, "area_of", lambda _: tiles.AREA)  # the tiles of large models
        for kind, x, g, options in (*lamb_options(), *options_of(Came), *options_of(Lars)):
            step(kind, x, g, options)
        make_shards()
    return requests


def lamb_options() -> Iterator[tuple[Kind, torch.dtype, torch.dtype, dict[str, Any]]]:
    """Yield the optimizer, the dtypes of parameters and gradients, and the options."""
    modes: list[dict[str, Any]] = [
        *({"decay_mode": mode} for mode in ("ratio", "l2", "decoupled")),
        {"hyperball": True, "weight_decay": 0.0},
    ]
    for x, g in itertools.product((F32, BF16, F16), repeat=2):
        for mode, moments in itertools.product(modes, (F32, BF16, "int8", *(["int4"] if g == x else []))):
            yield Lamb, x, g, {**mode, "state_dtype": moments}
    for x, g, moments, rounding in itertools.product((BF16, F16), (F32, BF16), STATES, ROUNDINGS):
        yield Lamb, x, g, {"state_dtype": moments, "weight_rounding": rounding}


def options_of(kind: Kind) -> Iterator[tuple[Kind, torch.dtype, torch.dtype, dict[str, Any]]]:
    """Yield the counterpart of `lamb_options` for CAME or LARS."""
    also = [F16] if kind is Came else []
    for x, g in itertools.product((F32, BF16, F16), repeat=2):
        for average in (F32, BF16, *also, "int8", *(["int4"] if g == x else [])):
            yield kind, x, g, {"state_dtype": average}
    for x, g, average, rounding in itertools.product((BF16, F16), (F32, BF16), (*STATES, *also), ROUNDINGS):
        yield kind, x, g, {"state_dtype": average, "weight_rounding": rounding}
    for x, rounding in ((F32, "nearest"), (BF16, "nearest"), (BF16, "kahan"), (F16, "kahan8")) if kind is Came else ():
        yield kind, x, x, {"state_dtype": F32, "weight_rounding": rounding, "scale_parameter": True}


def step(kind: Kind, x: torch.dtype, g: torch.dtype, options: dict[str, Any]) -> None:
    """Take one step of a matrix and a vector."""
    params = [Parameter(torch.ones(shape, dtype=x)) for shape in ((4, 6), (3,))]  # rows of an odd size have no 4 bits
    if options["state_dtype"] in ("int8", "int4"):
        options = {**options, "min_8bit_size": 1}
    options = {"weight_decay": 0.1, **options}
    optimizer = kind(params, lr=0.1, max_grad_norm=1.0, backend="triton", **options)
    set_gradients(params, [torch.zeros(param.shape, dtype=g) for param in params])
    optimizer.step()


def make_shards() -> None:
    """Make kernels for each way to shard tensors; random bits depend on it, too."""
    kept: list[dict[str, Any]] = [{}, *({"dtype": BF16, "weight_rounding": rounding} for rounding in ROUNDINGS)]
    for (factor, shapes, cuts), options in itertools.product(LAYOUTS.values(), kept):
        small = [tuple(min(size, 30) for size in shape) for shape in shapes]
        ends: list[Cuts] = [{dim: [min(end, 11) for end in each] for dim, each in cut.items()} for cut in cuts]
        for average in (F32, torch.int8) if all(set(cut) == {0} for cut in cuts) else (F32,):
            whole = bucket("came", *small, factor=factor, state_dtype=average, **options)
            came.Came(on_ranks(whole, ends)[:1])
    lamb.Lamb(on_ranks(bucket("lamb", (7, 30)), [{1: [11]}])[:1])
    for rounding in ROUNDINGS:
        lamb.Lamb(on_ranks(bucket("lamb", (7, 30), dtype=BF16, weight_rounding=rounding), [{1: [11]}])[:1])
