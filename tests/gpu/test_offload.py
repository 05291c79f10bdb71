"""Offload of a larger network: the same training with any buckets, and the memory of the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bighorn import Lamb, offload
from tests.support.gpu_steps import GPU, STATUS

pytestmark = GPU


def network(blocks: int = 6, width: int = 256) -> Any:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(blocks)]
    return nn.Sequential(*layers).to(STATUS.device)


def loss_of(net: Any, step: int) -> Any:
    dtype = next(net.parameters()).dtype
    inputs = torch.randn(32, net[0][0].in_features, device="cpu", generator=torch.Generator("cpu").manual_seed(step))
    return (net(inputs.to(STATUS.device, dtype)) - 1).square().mean()


def test_a_training_is_the_same_with_any_buckets() -> None:
    nets = network(), network()
    whole = offload(nets[0], Lamb(nets[0].named_parameters(), lr=0.01), bucket_mb=1000)
    parts = offload(nets[1], Lamb(nets[1].named_parameters(), lr=0.01), bucket_mb=0.3)
    for step in range(20):
        for net, optimizer in zip(nets, (whole, parts), strict=True):
            loss_of(net, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    parts.synchronize()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert {value.device.type for state in parts.state.values() for value in state.values()} == {"cpu"}


@pytest.mark.skipif(STATUS.device != "cuda", reason="needs torch.cuda's counts of memory")
def test_the_memory_of_the_device() -> None:
    """Beyond weights and activations, the device holds gradients of two buckets and the temporaries of a layer."""
    width, blocks, bucket_mb = 1024, 24, 8.0
    net = network(blocks, width)
    optimizer = offload(net, Lamb(net.named_parameters(), lr=0.01), bucket_mb=bucket_mb)
    largest, peaks = 4 * width**2, []
    loss_of(net, 0).backward()  # cuBLAS keeps a workspace for each thread, 32 MiB on an H100
    optimizer.step()
    optimizer.zero_grad()
    for keeps in (False, True):
        loss = loss_of(net, 0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if keeps:
            with optimizer.accumulate():
                loss.backward()
        else:
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    assert peaks[0] < 2 * (bucket_mb * 1e6 + largest) + 2 * largest
    assert peaks[1] > 3 * peaks[0]
