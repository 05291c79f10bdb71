"""The generators that code in a training step may draw from: torch's, also on a GPU, Python's and NumPy's."""

import random
from typing import Any

import numpy as np
import torch


def seed(value: int) -> None:
    """Seed all of them."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - the global generator is the one to be reproducible


def state(device: torch.device) -> dict[str, Any]:
    """The state of all of them, with a GPU's for ``cuda``, as ``torch.load(weights_only=True)`` accepts it."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    kind, keys, *rest = numpy_state
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {
        **on_gpu,
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest],
    }


def fits(state: dict[str, Any], device: torch.device) -> bool:
    """Whether :func:`state` returned this for a device of the same type."""
    return ("cuda" in state) == (device.type == "cuda")


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Continue all of them from what :func:`state` returned for a device of the same type."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))  # noqa: NPY002
