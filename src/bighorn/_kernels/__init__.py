"""The backends, and the only module that determines which of them work on this machine.

A backend is a package whose `ALGORITHMS` has a class for each algorithm. The class is instantiated with buckets when
tensors change, and then steps them. `bucket.py` describes its input, and `reference` computes the expected result.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bighorn._kernels import cpu, foreach, reference, triton
from bighorn._kernels.bucket import Bucket, Shard
from bighorn._kernels.cpu import library
from bighorn._kernels.cpu.library import NO_BLOCKS, cores
from bighorn._kernels.options import KernelOptions
from bighorn._kernels.storage import has_memory
from bighorn._kernels.triton import device

__all__ = [
    "BACKENDS",
    "Bucket",
    "Kernel",
    "KernelOptions",
    "ShardKernel",
    "Status",
    "cores",
    "kernel",
    "pick",
    "status",
]


class Kernel(Protocol):
    """An algorithm on one backend, instantiated for some buckets on one device."""

    @property
    def reads_tensors(self) -> bool:
        """Whether the next step reads the parameters and states in the buckets; the constructor and `refresh` do."""

    @staticmethod
    def unsupported_reason(param: Tensor, options: Any, shard: Shard | None) -> str | None:
        """The reason why it cannot serve a tensor, or a shard, or None; of a shard, the same on every rank."""

    def refresh(self) -> None:
        """Read the buckets again, after parameters moved or gradients changed their dtypes."""

    def prepare(self) -> None:
        """Do everything that can fail, before any kernel of a step writes."""

    def square_sum(self) -> Tensor:
        """Return the sum of all gradients' squares, 0-dim, in float64 if the device supports it."""

    def step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> None:
        """Make one step of whole tensors, in place; nothing is written if `apply_mask` is False."""


class ShardKernel(Kernel, Protocol):
    """A kernel that also serves shards."""

    def sharded_step(self, grad_scale: Tensor | float = 1.0, apply_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Make one step of shards; it yields 1-dim sums, which must be added up over all ranks, in place, to continue.

        The number of sums and their sizes are the same on every rank.
        """


ALGORITHMS: Mapping[str, Mapping[str, type[Any]]] = {
    "cpu": cpu.ALGORITHMS,
    "triton": triton.ALGORITHMS,
    "foreach": foreach.ALGORITHMS,
    "reference": reference.ALGORITHMS,
}
"""The classes of each backend, by the names of algorithms. `auto` prefers backends in this order."""

BACKENDS = tuple(ALGORITHMS)


def kernel(backend: str, algorithm: str) -> Any:
    """Return the class of an algorithm on a backend; None if the backend has none.

    Example:
        >>> kernel("reference", "lamb").__name__
        'Lamb'
    """
    return ALGORITHMS[backend].get(algorithm)


SERVES_WRAPPERS = "reference"
"""The backend that serves wrapper tensors; the others need tensors with memory of their own (`storage.has_memory`)."""

SERVES_CUT_ROWS = ("foreach", "reference")
"""The backends that serve shards of matrices that begin or end inside a row."""

SERVES_RARE = ("foreach", "reference")
"""The backends that serve options of few users (`KernelOptions.rare`); the others have no compiled kernels for them."""


@dataclass(frozen=True)
class Status:
    """Whether a backend works on this machine, and the device that it runs on or the reason why it does not work."""

    available: bool
    detail: str
    device: str = "cpu"
    """The type of a device on which the backend can be tried."""


def status(backends: Iterable[str] = BACKENDS) -> dict[str, Status]:
    """Return the status of backends on this machine. Default: of all.

    Example:
        >>> status()["reference"].available
        True
    """
    found = {
        "cpu": lambda: Status(library.LIBRARY is not None, library.describe()),
        "triton": lambda: Status(*device.status()),
        "foreach": lambda: Status(True, "plain torch, any device"),
        "reference": lambda: Status(True, "the specification, any device"),
    }
    return {name: found[name]() for name in backends}


def pick(
    backend: str,
    param: Tensor,
    options: KernelOptions,
    shard: Shard | None = None,
    solid: bool | None = None,
) -> tuple[str, str]:
    """Return the name of the backend that serves a tensor, and the reason for the choice.

    Args:
        backend: "auto", or the name of the requested backend.
        param: The tensor as the backend would see it.
        options: The options of its bucket.
        shard: Its position in the whole tensor. Default: None, which means all of it.
        solid: Whether it, its gradient and its state have memory of their own. Default: None, which tests `param`.

    Raises:
        ValueError: The requested backend cannot serve it.
    """
    if solid is None:
        solid = has_memory(param)
    if backend != "auto":
        reason = unsupported_reason(backend, param, options, shard, solid)
        if reason:
            raise ValueError(f'backend="{backend}" cannot serve this tensor: {reason}. Use backend="auto".')
        return backend, "asked for"
    refusals: list[str] = []
    for name in BACKENDS:
        reason = unsupported_reason(name, param, options, shard, solid)
        if not reason:
            if name == SERVES_WRAPPERS and not solid and not param.is_meta:
                _warn_of(
                    f"weights that are wrappers without memory of their own ({type(param).__name__}) are stepped one "
                    "at a time, by the reference, which is slower: explain() names them. "
                    f'backend="{SERVES_WRAPPERS}" silences this warning.'
                )
            return name, "; ".join(refusals) or "the fastest here"
        if name == "triton" and param.device.type in device.DEVICES and reason == device.broken(param.device):
            _warn_of(
                f"bighorn steps without Triton's kernels, which is slower: {reason}. `python -m bighorn` shows more; "
                'backend="foreach" silences this warning.'
            )
        if name == "cpu" and reason == NO_BLOCKS and param.device.type == "cpu":
            _warn_of(
                "a step of Lars with a momentum in blocks takes about 15 times as long on a CPU as one in float32: "
                f"{reason}. Use state_dtype=None or torch.bfloat16 there; "
                'backend="foreach" silences this warning.'
            )
        refusals.append(f"not {name}: {reason}")
    raise AssertionError("the reference serves every tensor")


@functools.cache
def _warn_of(slowness: str) -> None:
    """Warn once that steps are slow, and why."""
    warnings.warn(slowness, stacklevel=2)


def unsupported_reason(
    name: str, param: Tensor, options: KernelOptions, shard: Shard | None, solid: bool
) -> str | None:
    """The reason why a backend cannot serve a tensor, or a shard, or None. Arguments are as in `pick`."""
    served = kernel(name, options.algorithm)
    if served is None:
        return f"it has no kernels for {options.algorithm}"
    if name != SERVES_WRAPPERS and not solid:
        return "its tensors are wrappers without memory of their own"
    if shard is not None and shard.elements is not None and name not in SERVES_CUT_ROWS:
        return "ranks hold parts of its rows"
    for option, value in options.rare.items() if name not in SERVES_RARE else ():
        if getattr(options, option) == value:
            return f"{option}={value!r} has no compiled kernel"
    reason: str | None = served.unsupported_reason(param, options, shard)
    return reason
