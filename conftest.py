from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bighorn import _kernels as kernels
from bighorn._kernels.triton.device import interpreted
from tests.support import cases, fake_gpu, selection, triton_interpreter
from tests.support.cases import Kind

if interpreted():
    triton_interpreter.mend()


def pytest_report_header() -> str:
    """Return the versions for the header of a test run."""
    names = [name for name in ("torch", "triton") if importlib.util.find_spec(name)]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


SLOW = pytest.StashKey[dict[str, int]]()
FEW = 5
"""The most tests whose slow cases are listed one by one."""


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Return a line for each test whose cases beyond pairs of values are slow, in a run of a few tests."""
    slow = config.stash.get(SLOW, {})
    lines = [f"{name}: {count} cases beyond pairs of values are slow" for name, count in slow.items()]
    return lines if len(lines) <= FEW else [f"{sum(slow.values())} cases of {len(lines)} tests are slow (make slow)"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select tests, and start the longest first, so that they do not keep one worker busy at the end."""
    selection.one_skip_a_module(config, items)
    config.stash[SLOW] = selection.mark_beyond_pairs(items)
    items.sort(key=lambda item: "in_the_interpreter" not in item.name)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Start every test with the same seed and with one thread, since several workers share the cores.

    Without a GPU, `torch.manual_seed` takes 4 ms (torch 2.13): it formats a traceback for each kind of device.
    """
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_accelerators() -> Iterator[None]:
    """Reset the state that all Accelerators of a process share, including those that transformers creates."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(params=cases.KINDS, ids=lambda kind: kind.algorithm.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each optimizer in turn."""
    optimizer: Kind = request.param
    return optimizer


@pytest.fixture(params=cases.BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; one that does not work on this machine is skipped with the reason."""
    name: str = request.param
    status = kernels.status().get(name)
    if status is not None and "other sources" in status.detail:
        pytest.fail(f"backend {name}: {status.detail}")  # a run that skips everything would look as if it had passed
    reason = selection.why_not(name)
    if reason is not None:
        pytest.skip(reason)
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a module share, for the output of processes that run once."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Driver]:
    """A fake GPU that records launches."""
    with fake_gpu.gpu(monkeypatch) as driver:
        yield driver
