"""The order of streams and events of an accelerator, which mocks record."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

from bighorn.offloading import AcceleratorCopies

DEVICE = torch.device("cuda", 1)


@pytest.mark.parametrize("outward", [True, False], ids=["to-host", "to-device"])
def test_each_direction_has_a_stream(outward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients follow the calls that the device was given; weights do not wait for them."""
    log = MagicMock()
    streams = iter((log.to_host, log.to_device))
    monkeypatch.setattr(torch, "Stream", lambda device: next(streams) if device == DEVICE else None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")
    copies = AcceleratorCopies(DEVICE)
    pairs: Any = [(log.host, log.device)]
    event: Any = copies.to_host(pairs) if outward else copies.to_device(pairs)
    stream, copied = (call.to_host, call.host.copy_(log.device, non_blocking=True))
    if not outward:
        stream, copied = (call.to_device, call.device.copy_(log.host, non_blocking=True))
    follows = [stream.wait_stream("current of cuda:1")] if outward else []
    assert log.mock_calls == [
        *follows,
        stream.__enter__(),
        copied,
        stream.__exit__(None, None, None),
        stream.record_event(),
    ]
    assert event is (log.to_host if outward else log.to_device).record_event()


def test_the_memory_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    empty = torch.empty

    def note(size: int, **options: Any) -> Tensor:
        asked.update(options)
        return empty(size, dtype=options["dtype"])

    monkeypatch.setattr(torch, "Stream", MagicMock())
    monkeypatch.setattr(torch, "empty", note)
    assert AcceleratorCopies(DEVICE).pinned(100).nbytes == 100
    assert asked == {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}


def test_torch_has_what_is_used() -> None:
    for name in ("wait_stream", "record_event", "__enter__", "__exit__"):
        assert hasattr(torch.Stream, name)
    for name in ("synchronize", "wait"):
        assert hasattr(torch.Event, name)
