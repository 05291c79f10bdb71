"""Ranks whose optimizers differ are refused, since their sums belong to different tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from bighorn._distributed.sharding import described_option
from tests.support.cases import Kind
from tests.support.ranks import ranks
from tests.support.tables import for_every

Named = list[tuple[str, Tensor]]


def half(named: Named) -> list[dict[str, Any]]:
    return [{"params": named[:2]}, {"params": named[2:]}]


def reversed_order(named: Named) -> Named:
    return named[::-1]


def fewer(named: Named) -> Named:
    return named[:2]


@for_every(
    ("change", "options", "texts"),
    [
        (reversed_order, {}, ["rank 0 has param_groups[0]: 0.weight", "1.bias"]),
        (half, {}, ["rank 0 has param_groups[0]: 1.weight", "rank 1 has param_groups[1]: lr=0.1"]),
        (fewer, {}, ["rank 0 has param_groups[0]: 1.weight", "rank 1 has nothing more"]),
        (list, {"weight_decay": 0.5}, ["rank 0 has param_groups[0]: ", "rank 1 has param_groups[0]: weight_decay=0.5"]),
        (list, {"max_grad_norm": 1.0}, ["rank 0 has max_grad_norm=None", "rank 1 has max_grad_norm=1.0"]),
        (list, {"exclude_from_weight_decay": ["bias"]}, ["0.bias", "(decays, adapts)", "(adapts)"]),
    ],
)
@ranks(2)
def test_ranks_that_differ_are_refused_on_every_rank(
    kind: Kind, change: Callable[[Named], Any], options: dict[str, Any], texts: list[str]
) -> None:
    """Without the check, CAME's first tensor silently became 783.66 instead of 585.89."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(net)
    before = [p.full_tensor().clone() for p in net.parameters()]  # type: ignore[attr-defined]
    named: Named = list(net.named_parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    differs = dist.get_rank() == 1
    optimizer = kind(change(named) if differs else named, lr=0.1, **options if differs else {})
    with pytest.raises(ValueError, match="first difference") as refused:
        optimizer.step()
    assert all(text in str(refused.value) for text in texts), refused.value
    assert not optimizer.state
    assert all(p.full_tensor().equal(q) for p, q in zip(net.parameters(), before, strict=True))  # type: ignore[attr-defined]


@ranks(2)
def test_a_group_that_differs_is_refused(kind: Kind) -> None:
    """Names can have a surrogate, which represents a byte that is not text, and has no encoding."""
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(net)
    named: Named = [(f"{name}\udc80", param) for name, param in net.named_parameters()]
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer = kind(named[:2], lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": named[2:] if dist.get_rank() == 0 else named[:1:-1]})
    with pytest.raises(ValueError, match=r"rank 1 has param_groups\[1\]: 1.bias"):
        optimizer.step()


def on_gpu(index: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty((), device=f"cuda:{index}")


def test_a_learning_rate_on_each_ranks_own_gpu_is_the_same_option() -> None:
    assert described_option(on_gpu(0)) == described_option(on_gpu(1)) == "a tensor on cuda"
    assert described_option(torch.tensor(0.5)) == described_option(0.5) != described_option(torch.tensor(0.25))


def test_no_value_on_a_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "item", lambda _: pytest.fail("the host would wait for the GPU"))
    assert described_option(on_gpu(0))
