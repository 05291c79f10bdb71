"""The memory of offload: slabs are allocated at once, the device has two buckets of gradients, and state one copy."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bighorn import Came, Lamb
from tests.support.offloading import loss_of, network, offloaded, train
from tests.support.slow_copies import SlowCopies


class Chain(nn.Module):
    """Many weights of one size; backward makes each gradient when it reaches the weight."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(count)])
        self.alive: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def forward(self) -> Tensor:
        total = torch.zeros((), requires_grad=True)
        for weight in self.weights:
            total = Link.apply(total, weight, self)  # type: ignore[no-untyped-call]
        return total


class Link(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor, chain: Chain) -> Tensor:
        ctx.chain, ctx.size = chain, weight.shape
        return total.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made, chain = torch.ones(ctx.size), ctx.chain
        chain.alive.append(weakref.ref(made.untyped_storage()))
        chain.peak = max(chain.peak, sum(ref() is not None for ref in chain.alive))
        return grad, made, None


def test_the_device_holds_gradients_of_two_buckets() -> None:
    """A bucket has four gradients, and copies are far slower than the backward pass."""
    chain = Chain(count=40, size=1000)
    optimizer = offloaded(
        chain,
        torch.optim.SGD(chain.parameters(), lr=1.0),
        bucket_mb=0.016,
        copies=SlowCopies(bandwidth=1e6, seed=None),
    )
    for _ in range(2):
        chain().backward()
        optimizer.step()
    optimizer.synchronize()
    assert 4 <= chain.peak <= 2 * 4 + 1
    assert all(weight.eq(-2).all() for weight in chain.weights)


def test_slabs_are_made_at_once() -> None:
    net, copies = network(), SlowCopies()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1), copies=copies)
    made = list(copies.pinned_bytes)
    assert len(made) <= 5
    size = sum(param.nbytes for param in net.parameters())
    assert sum(made) < 2.5 * size  # weights and gradients
    train(net, optimizer, range(3))
    assert copies.pinned_bytes == made


def test_slabs_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bighorn.offloading._params.SLAB_BYTES", 4096)
    net, copies = network(), SlowCopies()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1), copies=copies)
    assert max(copies.pinned_bytes) == 25_216  # one tensor, with the bytes up to the next cache line
    assert sorted(copies.pinned_bytes)[-3] <= 4096
    assert len(copies.pinned_bytes) > 4
    train(net, optimizer, range(2))


def test_weights_and_gradients_have_one_copy_and_one_address() -> None:
    net = network()
    optimizer = offloaded(net, Came(net.parameters(), lr=0.1))
    hosts = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    addresses = [param.data_ptr() for param in hosts]
    for step in range(3):
        loss_of(net, step).backward()
        optimizer.step()
        assert [param.grad for param in hosts] == [None] * len(hosts)
    assert [param.data_ptr() for param in hosts] == addresses
    assert not set(addresses) & {param.data_ptr() for param in net.parameters()}


def test_gradients_are_freed_when_forgotten() -> None:
    net = network()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1), copies=SlowCopies(bandwidth=1e6))
    loss_of(net, 0).backward()
    held = [weakref.ref(grad) for bucket in optimizer._current.buckets for grad in bucket.device_grads]
    assert held
    optimizer.zero_grad()
    gc.collect()
    for direction in (optimizer._copies.outward, optimizer._copies.inward):  # type: ignore[attr-defined]
        assert not direction.waiting
        assert direction.begun.empty()
    assert [ref() for ref in held] == [None] * len(held)
