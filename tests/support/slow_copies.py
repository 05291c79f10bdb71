"""A stand-in for a device: its memory is the CPU's, and threads copy at a given bandwidth."""

from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor

from bighorn.offloading._copies import Pairs


class SlowArrival:
    """The end of copies in a thread."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        self.ended.wait()
        if self.error is not None:
            raise self.error

    wait = synchronize


@torch.no_grad()
def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy; the variables of this loop end with it, and keep no memory alive once the arrival is known."""
    for target, source in pairs:
        target.copy_(source)


class Direction:
    """A thread that copies in one direction; a copy reads and writes memory when it runs, not when it is enqueued."""

    def __init__(self, bandwidth: float, delay: float, seed: int | None) -> None:
        self.bandwidth, self.delay = bandwidth, delay
        self.random = None if seed is None else random.Random(seed)
        self.begun: queue.SimpleQueue[tuple[list[tuple[Tensor, Tensor]], SlowArrival]] = queue.SimpleQueue()
        self.waiting: list[tuple[list[tuple[Tensor, Tensor]], SlowArrival]] = []
        self.bytes = 0
        self.error: BaseException | None = None
        """The error that the next copy raises."""
        threading.Thread(target=self.serve, daemon=True).start()

    def begin(self, pairs: list[tuple[Tensor, Tensor]]) -> SlowArrival:
        arrival = SlowArrival()
        self.begun.put((pairs, arrival))
        return arrival

    def serve(self) -> None:
        while True:
            while not self.waiting or not self.begun.empty():
                self.waiting.append(self.begun.get())
            pairs, arrival = self.waiting.pop(self.next())
            if self.random is not None:
                time.sleep(self.random.random() * self.delay)
            self.copy(pairs, arrival)
            del pairs, arrival

    def next(self) -> int:
        """Return the index of a random waiting copy; copies to the same memory stay in order."""
        chosen = 0 if self.random is None else self.random.randrange(len(self.waiting))
        targets = {target.data_ptr() for target, _ in self.waiting[chosen][0]}
        return next(
            i for i, (pairs, _) in enumerate(self.waiting) if targets & {target.data_ptr() for target, _ in pairs}
        )

    def copy(self, pairs: list[tuple[Tensor, Tensor]], arrival: SlowArrival) -> None:
        size, began = sum(source.nbytes for _, source in pairs), time.perf_counter()
        try:
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            copy_all(pairs)
        except BaseException as error:
            arrival.error = error
        self.bytes += size
        pairs.clear()  # an ended copy keeps no memory alive
        time.sleep(max(0.0, size / self.bandwidth - (time.perf_counter() - began)))
        arrival.ended.set()


class SlowCopies:
    """The copies of the stand-in.

    Args:
        bandwidth: Bytes a second, in each direction.
        delay: The longest random delay before a copy, in seconds.
        seed: The seed of delays and of the order of copies; None: neither is random.
    """

    def __init__(self, bandwidth: float = float("inf"), delay: float = 0.002, seed: int | None = 0) -> None:
        self.outward, self.inward = Direction(bandwidth, delay, seed), Direction(bandwidth, delay, seed)
        self.pinned_bytes: list[int] = []

    def pinned(self, nbytes: int) -> Tensor:
        self.pinned_bytes.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)  # NaN in every dtype of gradients

    def to_host(self, pairs: Pairs) -> Any:
        return self.outward.begin(list(pairs))

    def to_device(self, pairs: Pairs) -> Any:
        return self.inward.begin([(device, host) for host, device in pairs])

    def settle(self) -> None:
        """Without a seed: return when all copies have ended, and the threads hold nothing of theirs."""
        for begin in (self.to_host, self.to_device):
            begin([(torch.zeros(1), torch.zeros(1))]).synchronize()
