"""A fake GPU: Triton compiles and launches kernels for it, and none runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn._kernels.triton import device
from tests.support.cases import Kind, set_gradients


class Driver:
    """An H100 for Triton's launcher; it records launches."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, int]] = []
        self.utils = self
        self.get_current_device = self.get_current_stream = lambda *_: 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, _: Any) -> Any:
        """Return a launcher; it takes three sizes of the grid, six values of Triton, and the kernel's arguments."""

        def launch(programs: int, *arguments: Any) -> None:
            assert len(arguments) == 8 + len(source.fn.arg_names)
            self.launched.append((source.fn.__name__, programs))

        return launch

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        from tests.support import triton_compat

        return triton_compat.loaded_binary()

    def unload_module(self, _: int) -> None:
        """Do nothing; Triton calls this from 3.9 on when a kernel is freed."""

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}


@contextlib.contextmanager
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Make Triton treat CPU tensors as tensors of the fake GPU."""
    from bighorn._kernels.triton import (
        came_kernels,
        came_unfactored_kernels,
        common_kernels,
        lamb_kernels,
        lars_kernels,
    )
    from tests.support.triton_compat import use_driver

    pretended = Driver()
    use_driver(pretended, monkeypatch)
    monkeypatch.setattr(device, "DEVICES", ("cpu",))
    device._platform.cache_clear()
    yield pretended
    device._platform.cache_clear()
    for module in (
        came_kernels,
        came_unfactored_kernels,
        common_kernels,
        lamb_kernels,
        lars_kernels,
    ):
        for thing in vars(module).values():
            if hasattr(thing, "device_caches"):
                thing.device_caches.clear()


def compiled_while_numbers_change(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the kernels that were compiled during four steps whose options, gradients and scales change."""
    from tests.support.triton_compat import on_compilation

    compilations: list[str] = []
    on_compilation(lambda *_, fn, **__: compilations.append(fn.name), monkeypatch)
    params = [Parameter(torch.randn(70, 70)), Parameter(torch.randn(9))]
    optimizer = kind(params, lr=0.1, weight_decay=0.1, backend="triton", max_grad_norm=1.0)
    for step in range(4):
        set_gradients(params, [torch.randn(p.shape) for p in params])
        betas = (0.5, *(beta + step / 1e5 for beta in optimizer.param_groups[0]["betas"][1:]))
        optimizer.param_groups[0].update(lr=0.1 / (step + 1), weight_decay=0.2 * step, betas=betas)
        optimizer.grad_scale = torch.tensor(2.0**step)  # type: ignore[union-attr]
        optimizer.found_inf = torch.tensor(0.0)  # type: ignore[union-attr]
        optimizer.step()
    return compilations
