"""A GPU that is only pretended: Triton compiles for it and launches, and nothing runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from bighorn.kernels.triton import device


class Driver:
    """An H100 as far as Triton's launcher looks; what is launched there is noted down, and never runs."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.utils = self
        self.get_current_device = self.get_current_stream = lambda *_: 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, _: Any) -> Any:
        return lambda programs, *_: self.launched.append((source.fn.__name__, programs))

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}


@contextlib.contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Tensors of the CPU count as that GPU's."""
    from triton.runtime import driver as real

    from bighorn.kernels.triton import came_kernels, common_kernels, lamb_kernels

    pretended = Driver()
    monkeypatch.setattr(real, "_active", pretended)
    monkeypatch.setattr(device, "DEVICES", ("cpu",))
    device._warp_size.cache_clear()
    yield pretended
    device._warp_size.cache_clear()
    for module in (came_kernels, common_kernels, lamb_kernels):
        for thing in vars(module).values():
            if hasattr(thing, "device_caches"):
                thing.device_caches.clear()
