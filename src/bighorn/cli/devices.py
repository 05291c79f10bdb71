"""The devices that `--device` can name."""

import torch

from bighorn.cli.errors import InputError

DEVICES = ("cpu", "cuda")


def check(device: str) -> None:
    """Refuse `cuda` on a machine without a CUDA device.

    Raises:
        InputError: torch sees no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise InputError(
            f"--device cuda: torch sees no CUDA device here (torch {torch.__version__} {built}). Use a machine with "
            "one, or --device cpu."
        )


def device_name(device: str) -> str:
    """The model name of a GPU, such as "NVIDIA H100 80GB HBM3", and "cpu" for the CPU."""
    return torch.cuda.get_device_name() if device == "cuda" else device
