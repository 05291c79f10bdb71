"""The memory of device and host with ``bighorn.offload``, from shapes alone."""

from collections.abc import Mapping

from bighorn.cli.display import quantity
from bighorn.cli.footprint import OURS, Named
from bighorn.cli.models import Weights

BUCKET_BYTES = 10_000_000
"""The default of ``bucket_mb``."""

OFFLOAD_HEAD = ("with bighorn.offload", "device", "host", "with masters")


def as_masters(params: Named) -> Named:
    """Return parameters as ``masters=True`` lets the optimizer step them: those of 16 bits in float32."""
    return [(name, param.float() if param.element_size() < 4 else param) for name, param in params]


def offload_bytes(name: str, weights: Weights, state: int, of_masters: int) -> dict[str, int | None]:
    """Return the bytes on device and host in a training whose optimizer is offloaded.

    The device has all weights, and the most gradients that are there at a time. The host has the trained weights, all
    gradients and the state.

    Args:
        name: The optimizer.
        weights: The weights of the model.
        state: The bytes of its state.
        of_masters: The bytes of its state for float32 masters.

    Returns:
        The bytes of ``device``, ``host`` and ``host_with_masters``, that is with ``masters=True``; the last is None if
        no weights are of 16 bits.
    """
    gradients = [param.nbytes for _, param in weights.trainable]
    total = sum(gradients)
    # A bucket is sent with the gradient that fills it.
    on_device = min(total, 2 * (BUCKET_BYTES + max(gradients)))
    masters = sum(param.numel() * 4 for _, param in weights.trainable if param.element_size() < 4)
    # Optimizers of torch want gradients of their parameter's dtype.
    on_host = total if name in OURS else sum(param.nbytes for _, param in as_masters(weights.trainable))
    return {
        "device": weights.frozen_bytes + total + on_device,
        "host": 2 * total + state,
        "host_with_masters": total + on_host + masters + of_masters if masters else None,
    }


def offload_rows(offloaded: Mapping[str, Mapping[str, int | None]]) -> list[tuple[str, ...]]:
    """Return the bytes of each optimizer as text."""
    return [
        (name, *("-" if size is None else f"{quantity(size)}B" for size in each.values()))
        for name, each in offloaded.items()
    ]
