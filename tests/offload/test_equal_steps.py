"""Offloaded steps equal the same optimizer on the CPU, bit for bit, for every option of the table of cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bighorn import Came, Lamb, Lars
from tests.support.case_tensors import LARGE
from tests.support.cases import CASES, Case, allow_gradients_of, set_gradients
from tests.support.covering_cases import covering
from tests.support.offloading import Make, Twins, backward_with, loss_of, network, offloaded, train
from tests.support.optimizer_runs import assert_bitwise, assert_same_everything, copies
from tests.support.processes import group_of_one

STEPS = 3


def needs_all(case: Case) -> bool:
    return bool(case.options.get("max_grad_norm") or case.options.get("skip_nonfinite"))


def large(case: Case) -> bool:
    return case.leaves is LARGE


def rows() -> list[Any]:
    quick = covering(case for case in CASES if not large(case))
    return [pytest.param(case, id=case.id, marks=[] if case.id in quick else [pytest.mark.slow]) for case in CASES]


@pytest.mark.parametrize("case", rows())
def test_every_case(case: Case) -> None:
    plain = case.parameters()
    device = copies(plain)
    # Host tensors have no gaps, and gradients have the order of their parameters. Kernels divide large tensors of other
    # layouts into other pieces, whose sums round differently, and LARS's momentum depends on the sums.
    dense = large(case) or case.kind is Lars
    plain = copies(plain) if dense else plain
    for leaf, param in zip(case.leaves, device, strict=True):
        if case.gradient_dtype(leaf) != param.dtype:
            allow_gradients_of(param, case.gradient_dtype(leaf))
    ours = case.optimizer(plain, "auto")
    model = nn.ParameterList(device)
    theirs = offloaded(model, case.optimizer(device, "auto"), bucket_mb=case.size * 4e-6 / 5)
    for step in range(STEPS):
        set_gradients(plain, case.gradients(step))
        for param in plain if dense else ():
            if param.grad is not None:
                param.grad = torch.empty_like(param, dtype=param.grad.dtype).copy_(param.grad)
        case.set_lr(ours, step)
        ours.step()
        case.set_lr(theirs, step)
        backward_with(device, case.gradients(step))
        theirs.step()
        theirs.zero_grad()
        assert all(param.grad is None for param in device)
    theirs.synchronize()
    if needs_all(case) and case.dtypes() & {torch.float64, torch.complex128}:
        # The device adds up squares in another order than the kernels, which matters in float64.
        for a, b in zip(device, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
        return
    assert_same_everything(plain, ours, device, theirs)
    assert theirs.state_dict().keys() == ours.state_dict().keys()


MAKES: dict[str, Make] = {
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "AdamW-fused": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, fused=True),
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.1),
    "NAdam": lambda net: torch.optim.NAdam(net.parameters(), lr=0.1),
    "Adafactor": lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1),
    "Lamb": lambda net: Lamb(net.named_parameters(), lr=0.1),
    "Came": lambda net: Came(net.named_parameters(), lr=0.1),
    "Lars": lambda net: Lars(net.named_parameters(), lr=0.1, trust_coefficient=0.3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_a_training(name: str, dtype: torch.dtype) -> None:
    twins = Twins(MAKES[name], lambda: network().to(dtype))
    for step in range(6):
        for net, optimizer in twins:
            # One step lacks some gradients.
            loss = loss_of(net, step) if step != 3 else net[0](torch.ones(9, dtype=dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal()


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.05}, {"skip_nonfinite": True}], ids=str)
def test_arrival_in_any_order(options: dict[str, Any]) -> None:
    """Results do not depend on the sizes of buckets or their times of arrival, also in float64."""
    found = []
    for bucket_mb in (1e-4, 0.003, 0.02, 25):
        net = network().double()
        inner = Lamb(net.named_parameters(), lr=0.1, **options)
        optimizer = offloaded(net, inner, bucket_mb=bucket_mb)
        train(net, optimizer, range(4))
        optimizer.synchronize()
        found.append(list(net.parameters()))
    for other in found[1:]:
        assert_bitwise(found[0], other)


def test_a_graph_from_before_the_step_is_refused() -> None:
    net = network()
    optimizer = offloaded(net, Lamb(net.parameters(), lr=0.1))
    before = loss_of(net, 1)
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.synchronize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_write_into_a_shard_is_noticed() -> None:
    """A distributed tensor does not count the writes into its shard."""
    with group_of_one():
        net: Any = nn.Linear(3, 2, bias=False)
        mesh, placements = init_device_mesh("cpu", (1,)), [Shard(0)]
        net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh, placements))
        optimizer = offloaded(net, Lamb(net.parameters(), lr=0.0))
        for value in (0.5, 0.25):
            with torch.no_grad():
                net.weight.to_local().fill_(value)
            net.weight.grad = distribute_tensor(torch.ones(2, 3), mesh, placements)
            optimizer.step()
            optimizer.synchronize()
            assert net.weight.full_tensor().unique().tolist() == [value]
