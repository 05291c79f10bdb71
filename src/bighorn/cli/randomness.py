"""The generators that code in a training step may draw from: torch's, Python's and NumPy's."""

import random
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seed all three."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - the global generator is the one to be reproducible


def state() -> dict[str, Any]:
    """The state of all three, in types that ``torch.load(weights_only=True)`` accepts."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    kind, keys, *rest = numpy_state
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
    }


def restore(state: dict[str, Any]) -> None:
    """Continue all three from what :func:`state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
