"""The backends, and the one place that finds out which of them work here.

A backend is a package with `why_not(param, options)` and one class per algorithm, in a file of its own, that is made
from buckets when tensors change and then steps them; `bucket.py` says what it is handed, `reference` what it must
compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bighorn.kernels import cpu, foreach, reference, triton
from bighorn.kernels.bucket import Bucket, CameOptions, LambOptions
from bighorn.kernels.cpu import library
from bighorn.kernels.triton import device

__all__ = ["BACKENDS", "Backend", "Bucket", "CameOptions", "Kernel", "LambOptions", "Status", "pick", "status"]


class Kernel(Protocol):
    """An algorithm on one backend, made for some buckets on one device."""

    def prepare(self) -> None:
        """Do whatever can fail, before any kernel of a step writes."""

    def square_sum(self) -> Tensor:
        """The sum of all gradients' squares, 0-dim, in float64 where the device has it."""

    def step(self, grad_scale: Tensor | float = 1.0, commit: Tensor | None = None) -> None:
        """One step, in place; nothing is written where `commit` is False."""


@dataclass(frozen=True)
class Backend:
    """Where an algorithm runs. A new algorithm is a new field."""

    why_not: Callable[[Tensor, Any], str | None]
    """Why it cannot serve such a tensor, or None."""

    lamb: Callable[[list[Bucket[LambOptions]]], Kernel]
    came: Callable[[list[Bucket[CameOptions]]], Kernel]


BACKENDS = {
    "cpu": Backend(cpu.why_not, cpu.Lamb, cpu.Came),
    "triton": Backend(triton.why_not, triton.Lamb, reference.Came),  # its why_not refuses CAME
    "foreach": Backend(foreach.why_not, foreach.Lamb, foreach.Came),
    "reference": Backend(reference.why_not, reference.Lamb, reference.Came),
}
"""By name, in the order in which `auto` prefers them."""


@dataclass(frozen=True)
class Status:
    """Whether a backend works on this machine, and what it runs on or why it does not."""

    available: bool
    detail: str
    device: str = "cpu"
    """The type of a device on which it can be tried."""


def status() -> dict[str, Status]:
    """Every backend's status on this machine.

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


def pick(backend: str, param: Tensor, options: LambOptions | CameOptions) -> tuple[str, str]:
    """The name of the backend that serves such a tensor, and why.

    Args:
        backend: "auto", or the one that is asked for.
        param: The tensor as the backend would see it.
        options: Its bucket's options.

    Raises:
        ValueError: The backend that is asked for cannot serve it.
    """
    if backend != "auto":
        reason = BACKENDS[backend].why_not(param, options)
        if reason:
            raise ValueError(f'backend="{backend}" cannot serve this tensor: {reason}. Use backend="auto".')
        return backend, "asked for"
    refusals: list[str] = []
    for name, candidate in BACKENDS.items():
        reason = candidate.why_not(param, options)
        if not reason:
            return name, "; ".join(refusals) or "the fastest here"
        refusals.append(f"not {name}: {reason}")
    raise AssertionError("the reference serves every tensor")
