"""The devices whose trainings must equal the CPU's: the stand-in in each of its modes, torch_xla and a GPU.

Another accelerator changes `torch.accelerator`, pinned memory and seeds for all tests of a process, so each mode of the
stand-in has a separate process, in which `conftest.py` calls the tests of the mode.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from bighorn._capabilities import capabilities
from tests.device import stand_in
from tests.support.gpu_steps import GPU, STATUS

Test = TypeVar("Test", bound=Callable[..., object])


class Device(NamedTuple):
    """A device, its backend, and the relative error of another order of sums."""

    name: str
    type: str
    backend: str = "foreach"
    rtol: float = 1e-5

    @property
    def is_stand_in(self) -> bool:
        return self.name in stand_in.MODES

    @property
    def has_float64(self) -> bool:
        return self.name in (stand_in.COMPLETE, "xla", "gpu")


CPU = Device("cpu", "cpu")

os.environ.setdefault("PJRT_DEVICE", "CPU")
XLA: Any = importlib.import_module("torch_xla") if importlib.util.find_spec("torch_xla") else None
"""A process has one runtime."""

DEVICES = {
    **{
        mode: pytest.param(
            Device(mode, "npu"),
            id=mode,
            marks=[
                pytest.mark.process,
                pytest.mark.skipif(stand_in.why_absent() is not None, reason=str(stand_in.why_absent())),
                pytest.mark.filterwarnings("ignore:Device do not support double dtype now"),
            ],
        )
        for mode in stand_in.MODES
    },
    "xla": pytest.param(
        Device("xla", "xla", rtol=1e-4),
        id="xla",
        marks=[
            pytest.mark.process,
            pytest.mark.skipif(XLA is None, reason="torch_xla is not installed; `make xla` installs it"),
        ],
    ),
    "gpu": pytest.param(Device("gpu", STATUS.device, "triton", rtol=1e-4), id="gpu", marks=GPU),
}


def on(*names: str) -> Callable[[Test], Test]:
    """Return a decorator of tests that run on some of the devices."""

    def mark(test: Test) -> Test:
        chosen = pytest.mark.parametrize("device", [DEVICES[name] for name in names], indirect=True)
        marked: Test = chosen(pytest.mark.usefixtures("device")(test))
        return marked

    return mark


def begin(mode: str, **_: object) -> None:
    """Register the stand-in; the query of its capabilities waits once in a process, so it comes before any test."""
    stand_in.begin(mode)
    capabilities(torch.device("npu:0"))  # with the index, as a tensor has it


@contextmanager
def without_waits(device: Device, knows: bool = True) -> Iterator[None]:
    """Check that the host does not wait for a device in a block; a block that XLA `knows` compiles no graph.

    XLA computes pending operations at both ends: with torch_xla 2.9, a read of AdamW's state after `clip_grad_norm_`
    without a `sync` returns another tensor.
    """
    if device.is_stand_in and knows:
        with stand_in.counted() as found:
            yield
        assert not stand_in.waits(found)
    elif device.type == "xla":
        graphs = Graphs()
        yield
        new, all_, on_the_host = graphs.end()
        assert new <= (not knows)
        assert not knows or (all_, on_the_host) == (1, [])
    elif device.type == "cuda" and knows:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield


class Graphs:
    """Counts of XLA: compiled graphs, all graphs, and operations on the host.

    XLA measures executions later, in another thread, so their metric does not count a step.
    """

    def __init__(self) -> None:
        self.metrics: Any = importlib.import_module("torch_xla.debug.metrics")
        XLA.sync(wait=True)
        self.metrics.clear_all()

    def end(self) -> tuple[int, int, list[str]]:
        """Return the counts since the beginning."""
        XLA.sync(wait=True)
        new, known = (self.metrics.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
        return new, new + known, [name for name in self.metrics.counter_names() if name.startswith("aten::")]
