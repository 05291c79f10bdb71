"""The memory of device and host with ``bighorn.offload``, from shapes alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from bighorn.cli.display import quantity
from bighorn.cli.models import Weights

BUCKET_BYTES = 10_000_000
"""The default of ``bucket_mb``."""

OFFLOAD_HEAD = ("with bighorn.offload", "device", "host")


@dataclass(frozen=True)
class OffloadBytes:
    """The bytes of a training whose optimizer is offloaded.

    Attributes:
        device: All weights, and the most gradients that are on the device at a time.
        host: The trained weights, all gradients and the state.
    """

    device: int
    host: int


def offload_bytes(weights: Weights, states: Mapping[str, int]) -> dict[str, OffloadBytes]:
    """Return the bytes for each optimizer, given those of its state."""
    gradients = [param.nbytes for _, param in weights.trainable]
    total = sum(gradients)
    # A bucket is sent with the gradient that fills it.
    on_device = min(total, 2 * (BUCKET_BYTES + max(gradients)))
    return {
        name: OffloadBytes(weights.frozen_bytes + total + on_device, 2 * total + state)
        for name, state in states.items()
    }


def offload_rows(offloaded: Mapping[str, OffloadBytes]) -> list[tuple[str, ...]]:
    """Return the bytes of each optimizer as text."""
    return [(name, f"{quantity(each.device)}B", f"{quantity(each.host)}B") for name, each in offloaded.items()]
