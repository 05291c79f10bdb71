"""How the buckets of a step are divided into parts, and the last bucket of a backward pass."""

from __future__ import annotations

import threading

import pytest
import torch

from bighorn import Lamb
from bighorn.offloading._step import TransferBucket, step_parts
from tests.support.offloading import loss_of, network, offloaded
from tests.support.processes import LIMIT
from tests.support.slow_copies import SlowCopies


@pytest.mark.parametrize(
    ("buckets", "sizes"), [(0, []), (1, [1]), (2, [1, 1]), (9, [1, 2, 3, 2, 1]), (21, [1, 2, 4, 7, 4, 2, 1])]
)
def test_parts_grow_and_shrink(buckets: int, sizes: list[int]) -> None:
    given = [TransferBucket([], [], None) for _ in range(buckets)]
    parts = step_parts(given)
    assert [len(part) for part in parts] == sizes
    assert [bucket for part in parts for bucket in part] == given


def test_backward_ends_while_two_buckets_are_in_flight() -> None:
    net, copies, go = network(), SlowCopies(seed=None), threading.Event()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1), bucket_mb=0.027, copies=copies)
    loss_of(net, 0).backward()
    count = len(optimizer._current.buckets)
    optimizer.step()
    copy = copies.outward.copy
    sent, released = [], []

    def hold(pairs: list[tuple[torch.Tensor, torch.Tensor]], arrival: object) -> None:
        sent.append(len(pairs))
        if len(sent) == count - 1:
            released.append(go.wait(LIMIT))
        copy(pairs, arrival)  # type: ignore[arg-type]

    copies.outward.copy = hold  # type: ignore[method-assign]
    loss_of(net, 1).backward()
    go.set()
    optimizer.step()
    optimizer.synchronize()
    assert len(sent) == count
    assert released == [True], "backward() has waited for a copy"
