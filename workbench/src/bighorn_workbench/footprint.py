"""The size of the optimizer state of each parameter, and with it of weights and gradients, from shapes alone."""

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from bighorn import Came, Lamb, Lars
from bighorn_workbench.optimizers import KINDS, NARROW, NARROW_OF_LAMB, STATE_DTYPES
from bighorn_workbench.peer_state import OF_OTHERS, OF_TORCH

Named = Sequence[tuple[str, Tensor]]
"""Parameters with their names, possibly on the meta device."""


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Attributes:
        trainable: The trainable parameters, on the meta device; others have no gradients, and so no state.
        frozen_bytes: The bytes of all other parameters.
    """

    trainable: Named
    frozen_bytes: int = 0

    @property
    def elements(self) -> int:
        """The number of trainable parameters."""
        return sum(param.numel() for _, param in self.trainable)

    @property
    def gradients(self) -> int:
        """The bytes of all gradients, which only trainable parameters have."""
        return sum(param.nbytes for _, param in self.trainable)

    @property
    def largest(self) -> int:
        """The bytes of the largest gradient."""
        return max(param.nbytes for _, param in self.trainable)

    @property
    def held(self) -> int:
        """The bytes of all weights."""
        return self.frozen_bytes + self.gradients


BUCKET_BYTES = 10_000_000
"""The default of the argument ``bucket_mb`` of ``bighorn.offload``."""


def of_each(size: Callable[[Tensor], int], params: Named) -> dict[str, int]:
    """Return the bytes of state of each parameter, by its name."""
    return {name: size(param) for name, param in params}


FOOTPRINTS: Mapping[str, Callable[..., dict[str, int]]] = {
    "came": Came.state_bytes,
    **{f"came-{short}": partial(Came.state_bytes, state_dtype=STATE_DTYPES[short]) for short in NARROW},
    "lamb": Lamb.state_bytes,
    **{f"lamb-{short}": partial(Lamb.state_bytes, state_dtype=STATE_DTYPES[short]) for short in NARROW_OF_LAMB},
    "lars": Lars.state_bytes,
    "lars-int8": partial(Lars.state_bytes, state_dtype="int8"),
    **{name: partial(of_each, size) for name, size in {**OF_TORCH, **OF_OTHERS}.items()},
}
"""The functions by name: of optimizers in ``bighorn train`` and ``bighorn compare``, and in other packages."""


def predicted(name: str, params: Named, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the state of an optimizer with the given options that it has; only Bighorn's optimizers have any."""
    if name not in OURS:
        return FOOTPRINTS[name](params)
    return FOOTPRINTS[name](params, **{key: options[key] for key in options.keys() & OURS[name]})


OURS = {
    name: frozenset(inspect.signature(kind).parameters)
    for name in FOOTPRINTS
    for kind in KINDS
    if name.startswith(kind.__name__.lower())
}
"""The options of Bighorn's optimizers."""

RELEASING = frozenset((*OURS, "flashoptim"))
"""The optimizers that can step inside backward, when a gradient is complete."""


@dataclass(frozen=True)
class Total:
    """The bytes of an optimizer's state, alone and with weights and gradients.

    Attributes:
        state: The state.
        all: The state, all weights and all gradients.
        released: The state, all weights, and the largest gradient; None for an optimizer that does not step inside
            backward.
    """

    state: int
    all: int
    released: int | None


def total_of(name: str, weights: Weights, state: int) -> Total:
    """Return the totals of an optimizer, for its size of state."""
    released = weights.held + state + weights.largest if name in RELEASING else None
    return Total(state, weights.held + weights.gradients + state, released)


def as_masters(params: Named) -> Named:
    """Return parameters as the optimizer steps them with ``masters=True``: 16-bit ones in float32."""
    return [(name, param.float() if param.element_size() < 4 else param) for name, param in params]


def offload_bytes(name: str, weights: Weights, state: int, of_masters: int) -> dict[str, int | None]:
    """Return the bytes on device and host in a training whose optimizer is offloaded.

    The device has all weights, and the most gradients that exist at a time. The host has the trained weights, all
    gradients and the state.

    Args:
        name: The optimizer.
        weights: The weights of the model.
        state: The bytes of its state.
        of_masters: The bytes of its state for float32 masters.

    Returns:
        The bytes of ``device``, ``host`` and ``host_with_masters``, that is with ``masters=True``; the last is None if
        no weights are of 16 bits. All are None for an optimizer of another package, which is not offloaded here.
    """
    if name in OF_OTHERS:
        return dict.fromkeys(("device", "host", "host_with_masters"))
    total = weights.gradients
    # A bucket is sent with the gradient that fills it.
    on_device = min(total, 2 * (BUCKET_BYTES + weights.largest))
    masters = sum(param.numel() * 4 for _, param in weights.trainable if param.element_size() < 4)
    # Optimizers of torch want gradients of their parameter's dtype.
    on_host = total if name in OURS else sum(param.nbytes for _, param in as_masters(weights.trainable))
    return {
        "device": weights.held + on_device,
        "host": 2 * total + state,
        "host_with_masters": total + on_host + masters + of_masters if masters else None,
    }


@dataclass(frozen=True)
class Kind:
    """Layers of the same shape whose names differ only in numbers.

    Attributes:
        name: Their name with * for numbers; * alone if parameters have no names.
        shape: The shape of each layer.
        count: The number of layers.
        bytes: The state of all of them, by optimizer.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    bytes: Mapping[str, int]

    @property
    def label(self) -> str:
        """The name, count and shape as text."""
        count = f"{self.count} of " if self.count > 1 else ""
        shape = count + ("x".join(map(str, self.shape)) or "scalar")
        return shape if self.name == "*" else f"{self.name}\n{shape}"


def kinds(params: Named, sizes: Mapping[str, Mapping[str, int]]) -> list[Kind]:
    """Return the kinds of layers, those with the most elements first.

    Args:
        params: The parameters.
        sizes: Bytes by the parameter's name, by optimizer.
    """
    members: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, param in params:
        members.setdefault((re.sub(r"\b\d+\b", "*", name), tuple(param.shape)), []).append(name)
    found = [
        Kind(name, shape, len(names), {key: sum(each[one] for one in names) for key, each in sizes.items()})
        for (name, shape), names in members.items()
    ]
    return sorted(found, key=lambda kind: -kind.count * math.prod(kind.shape))
