"""The memory of device and host with ``bighorn.offload``, from shapes alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from bighorn.cli.display import quantity
from bighorn.cli.footprint import OURS, Named
from bighorn.cli.models import Weights

BUCKET_BYTES = 10_000_000
"""The default of ``bucket_mb``."""

OFFLOAD_HEAD = ("with bighorn.offload", "device", "host", "with masters")


@dataclass(frozen=True)
class OffloadBytes:
    """The bytes of a training whose optimizer is offloaded.

    Attributes:
        device: All weights, and the most gradients that are on the device at a time.
        host: The trained weights, all gradients and the state.
        host_with_masters: The same with ``masters=True``; None if no weights are of 16 bits.
    """

    device: int
    host: int
    host_with_masters: int | None = None


def as_masters(params: Named) -> Named:
    """Return parameters as ``masters=True`` lets the optimizer step them: those of 16 bits in float32."""
    return [(name, param.float() if param.element_size() < 4 else param) for name, param in params]


def offload_bytes(
    weights: Weights, states: Mapping[str, int], of_masters: Mapping[str, int]
) -> dict[str, OffloadBytes]:
    """Return the bytes for each optimizer, given those of its state, and of its state for float32 masters."""
    gradients = [param.nbytes for _, param in weights.trainable]
    total = sum(gradients)
    # A bucket is sent with the gradient that fills it.
    on_device = min(total, 2 * (BUCKET_BYTES + max(gradients)))
    wide = sum(param.nbytes for _, param in as_masters(weights.trainable))
    masters = sum(param.numel() * 4 for _, param in weights.trainable if param.element_size() < 4)

    def with_masters(name: str) -> int | None:
        # Optimizers of torch want gradients of their parameter's dtype.
        return total + (total if name in OURS else wide) + masters + of_masters[name] if masters else None

    return {
        name: OffloadBytes(weights.frozen_bytes + total + on_device, 2 * total + state, with_masters(name))
        for name, state in states.items()
    }


def offload_rows(offloaded: Mapping[str, OffloadBytes]) -> list[tuple[str, ...]]:
    """Return the bytes of each optimizer as text."""
    return [
        (
            name,
            f"{quantity(each.device)}B",
            f"{quantity(each.host)}B",
            "-" if each.host_with_masters is None else f"{quantity(each.host_with_masters)}B",
        )
        for name, each in offloaded.items()
    ]
