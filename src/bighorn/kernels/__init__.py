"""The backends, and the only module that determines which of them work on this machine.

A backend is a package with `unsupported_reason(param, options)` and one class per algorithm, each in its own file. The
class is instantiated with buckets when tensors change, and then steps them. `bucket.py` describes its input, and
`reference` computes the expected result.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from bighorn.kernels import cpu, foreach, reference, triton
from bighorn.kernels.bucket import Bucket, Shard
from bighorn.kernels.cpu import library
from bighorn.kernels.cpu.library import cores
from bighorn.kernels.options import AnyOptions, CameOptions, LambOptions, LarsOptions
from bighorn.kernels.storage import has_memory
from bighorn.kernels.triton import device

__all__ = [
    "BACKENDS",
    "Backend",
    "Bucket",
    "CameOptions",
    "Kernel",
    "LambOptions",
    "LarsOptions",
    "ShardKernel",
    "Status",
    "cores",
    "pick",
    "status",
]


class Kernel(Protocol):
    """An algorithm on one backend, instantiated for some buckets on one device."""

    def refresh(self) -> None:
        """Read the buckets again, after parameters have moved, or gradients have become of other dtypes or strides."""

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


@dataclass(frozen=True)
class Backend:
    """An implementation of the kernels: a field for each algorithm, None if the backend has no kernels for it."""

    unsupported_reason: Callable[[Tensor, Any], str | None]
    """The reason why it cannot serve a tensor, or None."""

    unsupported_shard_reason: Callable[[Shard, Any], str | None]
    """The reason why it cannot serve a shard of a tensor that it could serve whole, or None."""

    lamb: Callable[[list[Bucket[LambOptions]]], Kernel]
    came: Callable[[list[Bucket[CameOptions]]], Kernel]
    lars: Callable[[list[Bucket[LarsOptions]]], Kernel]

    @classmethod
    def of(cls, package: Any) -> Backend:
        """Return the backend of a package, which has a class for each algorithm that it serves."""
        algorithms = [field.name for field in fields(cls) if not field.name.startswith("unsupported")]
        kernels: dict[str, Any] = {name: getattr(package, name.capitalize(), None) for name in algorithms}
        return cls(package.unsupported_reason, package.unsupported_shard_reason, **kernels)


BACKENDS = {
    "cpu": Backend.of(cpu),
    "triton": Backend.of(triton),
    "foreach": Backend.of(foreach),
    "reference": Backend.of(reference),
}
"""The backends by name, in the order in which `auto` prefers them."""

SERVES_WRAPPERS = "reference"
"""The backend that serves wrapper tensors; the others need tensors with memory of their own (`storage.has_memory`)."""

SERVES_CUT_ROWS = ("foreach", "reference")
"""The backends that serve shards of matrices that begin or end inside a row."""

SERVES_STRIDED = "cpu"
"""The backend that serves parameters whose memory has gaps or an order unlike their state's; the others need copies."""


@dataclass(frozen=True)
class Status:
    """Whether a backend works on this machine, and the device that it runs on or the reason why it does not work."""

    available: bool
    detail: str
    device: str = "cpu"
    """The type of a device on which the backend can be tried."""


def status() -> dict[str, Status]:
    """Return every backend's status on this machine.

    Example:
        >>> status()["reference"].available
        True
    """
    return {
        "cpu": Status(library.LIBRARY is not None, library.describe()),
        "triton": Status(*device.status()),
        "foreach": Status(True, "plain torch, any device"),
        "reference": Status(True, "the specification, any device"),
    }


def pick(
    backend: str,
    param: Tensor,
    options: AnyOptions,
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
        reason = _unsupported_reason(backend, param, options, shard, solid)
        if reason:
            raise ValueError(f'backend="{backend}" cannot serve this tensor: {reason}. Use backend="auto".')
        return backend, "asked for"
    refusals: list[str] = []
    for name in BACKENDS:
        reason = _unsupported_reason(name, param, options, shard, solid)
        if not reason:
            return name, "; ".join(refusals) or "the fastest here"
        if name == "triton" and param.device.type in device.DEVICES and reason == device.broken(param.device):
            _warn_of(reason)
        refusals.append(f"not {name}: {reason}")
    raise AssertionError("the reference serves every tensor")


@functools.cache
def _warn_of(failure: str) -> None:
    """Warn once that the kernels of a GPU cannot be used, and why."""
    warnings.warn(
        f"bighorn steps without Triton's kernels, which is slower: {failure}. `bighorn doctor` shows more; "
        'backend="foreach" silences this warning.',
        stacklevel=2,
    )


def _unsupported_reason(name: str, param: Tensor, options: AnyOptions, shard: Shard | None, solid: bool) -> str | None:
    backend = BACKENDS[name]
    if getattr(backend, options.algorithm) is None:
        return f"it has no kernels for {options.algorithm}"
    if name != SERVES_WRAPPERS and not solid:
        return "its tensors are wrappers without memory of their own"
    if shard is not None and shard.elements is not None and name not in SERVES_CUT_ROWS:
        return "ranks hold parts of its rows"
    reason = backend.unsupported_reason(param, options)
    return reason if reason or shard is None else backend.unsupported_shard_reason(shard, options)
