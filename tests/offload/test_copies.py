"""The order of streams and events of an accelerator, with fakes that record it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bighorn.offloading import AcceleratorCopies
from bighorn.offloading.copies import Pairs

DEVICE = torch.device("cuda", 1)
log: list[object] = []


class Event:
    def __init__(self, stream: str) -> None:
        self.stream = stream


class Stream:
    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE
        self.name = f"stream {len([entry for entry in log if entry == 'made'])}"
        log.append("made")

    def wait_stream(self, other: object) -> None:
        log.append((self.name, "waits for", other))

    def record_event(self) -> Event:
        log.append((self.name, "records"))
        return Event(self.name)

    def __enter__(self) -> None:
        log.append((self.name, "enter"))

    def __exit__(self, *_: object) -> None:
        log.append((self.name, "exit"))


class Recorded:
    """A replacement for a tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def copy_(self, source: Recorded, non_blocking: bool = False) -> None:
        assert non_blocking
        log.append((source.name, "to", self.name))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> AcceleratorCopies:
    log.clear()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"current of {device}")
    return AcceleratorCopies(DEVICE)


def pairs() -> Pairs:
    found: Any = [(Recorded(f"host {i}"), Recorded(f"device {i}")) for i in range(2)]
    return found  # type: ignore[no-any-return]


def test_gradients_follow_what_the_device_was_given(copies: AcceleratorCopies) -> None:
    event: Any = copies.to_host(pairs())
    assert log[2:] == [
        ("stream 0", "waits for", "current of cuda:1"),
        ("stream 0", "enter"),
        ("device 0", "to", "host 0"),
        ("device 1", "to", "host 1"),
        ("stream 0", "exit"),
        ("stream 0", "records"),
    ]
    assert event.stream == "stream 0"


def test_weights_have_a_stream_of_their_own(copies: AcceleratorCopies) -> None:
    event: Any = copies.to_device(pairs())
    assert log[2:] == [
        ("stream 1", "enter"),
        ("host 0", "to", "device 0"),
        ("host 1", "to", "device 1"),
        ("stream 1", "exit"),
        ("stream 1", "records"),
    ]
    assert event.stream == "stream 1"


def test_the_memory_is_page_locked(copies: AcceleratorCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    empty = torch.empty

    def note(size: int, **options: Any) -> Tensor:
        asked.update(options)
        return empty(size, dtype=options["dtype"])

    monkeypatch.setattr(torch, "empty", note)
    assert copies.pinned(100).nbytes == 100
    assert asked == {"dtype": torch.uint8, "device": "cpu", "pin_memory": True}


def test_torch_has_what_is_used() -> None:
    for name in ("wait_stream", "record_event", "__enter__", "__exit__"):
        assert hasattr(torch.Stream, name)
    for name in ("synchronize", "wait"):
        assert hasattr(torch.Event, name)
