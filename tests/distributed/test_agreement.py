"""Ranks whose optimizers differ, in real processes: their sums belong to different tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bighorn.optim.agreement import described_option
from tests.support.processes import assert_ended_well, outcomes

SCRIPT = """
    import sys, torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from bighorn import Came, Lamb, Lars
    from bighorn_workbench.ranks import end_process_group

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def half(named):
        return [{"params": named[:2]}, {"params": named[2:]}]

    # On rank 1: the parameters, options, and what both ranks are to say.
    ways = {
        "order": (lambda named: named[::-1], {}, "rank 0 has param_groups[0]: 0.weight", "1.bias"),
        "groups": (half, {}, "rank 0 has param_groups[0]: 1.weight", "rank 1 has param_groups[1]: lr=0.1"),
        "fewer": (lambda named: named[:2], {}, "rank 0 has param_groups[0]: 1.weight", "rank 1 has nothing more"),
        "options": (list, {"eps": (1e-3, 1e-3)}, "eps=(1e-30, 1e-16)", "rank 1 has param_groups[0]: eps=(0.001"),
        "clip": (list, {"max_grad_norm": 1.0}, "rank 0 has max_grad_norm=None", "rank 1 has max_grad_norm=1.0"),
        "exclusion": (list, {"exclude_from_weight_decay": ["bias"]}, "0.bias", "(decays, adapts)", "(adapts)"),
    }

    def refused(optimizer, *texts):
        try:
            optimizer.step()
        except ValueError as error:
            assert all(text in str(error) for text in texts), error
        else:
            raise AssertionError("it was not refused")
        assert not optimizer.state

    for kind in (Lamb, Came, Lars):
        for name, (change, options, *texts) in ways.items():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            fully_shard(net)
            before = [p.full_tensor().clone() for p in net.parameters()]
            if kind is not Came and name == "options":
                options, texts = {"eps": 0.001}, ["eps=1e-0", "rank 1 has param_groups[0]: eps=0.001"]
            named = list(net.named_parameters())
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            ours = kind(change(named), lr=0.1, **options) if rank == 1 else kind(named, lr=0.1)
            refused(ours, "first difference", *texts)
            assert all(p.full_tensor().equal(q) for p, q in zip(net.parameters(), before))

            alike = kind(named[:2], lr=0.1)
            alike.step()
            other = named[2:] if rank == 0 else named[:1:-1]
            alike.add_param_group({"params": other})
            try:
                alike.step()
            except ValueError as error:
                assert "rank 1 has param_groups[1]: 1.bias" in str(error), error
            else:
                raise AssertionError("a group that differs was not refused")
    end_process_group()
"""


def test_ranks_that_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    """Without the check, CAME's first tensor became 783.66 instead of 585.89, without a message."""
    assert_ended_well(outcomes(SCRIPT, [[rank, tmp_path / "store"] for rank in range(2)]))


def on_gpu(index: int) -> Tensor:
    with FakeTensorMode():
        return torch.empty((), device=f"cuda:{index}")


def test_a_learning_rate_on_each_ranks_own_gpu_is_the_same_option() -> None:
    assert described_option(on_gpu(0)) == described_option(on_gpu(1)) == "a tensor on cuda"
    assert described_option(torch.tensor(0.5)) == described_option(0.5) != described_option(torch.tensor(0.25))


def test_no_value_on_a_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "item", lambda _: pytest.fail("the host would wait for the GPU"))
    assert described_option(on_gpu(0))
