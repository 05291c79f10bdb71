"""The host during a step on a device: it never waits, sends nothing, and makes a bounded number of calls of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from bighorn import Came, Lamb, Lars
from bighorn import _square_sums as square_sums
from bighorn._kernels.foreach import lists
from tests.device import stand_in
from tests.device.calls import Calls
from tests.device.devices import Device, on
from tests.device.stand_in import COMPLETE, MODES
from tests.support.case_options import is_matrix
from tests.support.models import bert

Shapes = Sequence[tuple[int, ...]]

# BERT's 197 tensors without the pooler, with a width of 64: all are smaller than a piece.
BERT: Shapes = tuple(tuple(min(size // 12, 1000) if size > 2 else size for size in shape) for shape in bert(12, 768))
FEW: Shapes = [(128, 64), (128,), (128, 128), (128,), (10, 128), (10,)]


@dataclass(frozen=True)
class Row:
    """An optimizer, the temporary bytes of a parameter, and the most calls of torch in a step for BERT's tensors.

    One row of each kind of step has the calls, since a change of a common path moves them all.
    """

    make: Callable[[list[Parameter]], Optimizer]
    temporary: int
    calls: int | None = None
    dtype: torch.dtype = torch.float32


def lamb(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Lamb([(str(i), p) for i, p in enumerate(params)], lr=0.01, weight_decay=0.01, **options)


def came(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Came(params, lr=0.01, weight_decay=0.01, **options)


def lars(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Lars(params, lr=0.01, weight_decay=0.01, **options)


LOW = torch.bfloat16

ROWS = {
    "adamw-of-torch": Row(lambda params: torch.optim.AdamW(params, foreach=True), 4, 8),
    "lamb": Row(lamb(), 4, 38),
    "lamb-clip": Row(lamb(max_grad_norm=1.0), 4, 49),
    "lamb-skip": Row(lamb(skip_nonfinite=True), 4),
    "lamb-hyperball": Row(lamb(hyperball=True, exclude_from_weight_decay=is_matrix), 8, 103),
    "lamb-cautious": Row(lamb(cautious=True), 8),
    "lamb-amsgrad": Row(lamb(second_moment="amsgrad"), 4),
    "lamb-float64": Row(lamb(), 8, dtype=torch.float64),
    "lamb-int8": Row(lamb(state_dtype="int8"), 16, 167),
    "lamb-bfloat16": Row(lamb(state_dtype="bfloat16"), 8),
    "lamb-stochastic": Row(lamb(weight_rounding="stochastic"), 12, 95, dtype=LOW),
    "lamb-kahan": Row(lamb(weight_rounding="kahan"), 12, dtype=LOW),
    "lamb-master": Row(lamb(weight_rounding="master"), 12, dtype=LOW),
    "came": Row(came(), 4, 124),
    "came-cautious": Row(came(cautious=True), 8),
    "came-float64": Row(came(), 8, dtype=torch.float64),
    "came-int8": Row(came(state_dtype="int8"), 16, 222),
    "came-int4": Row(came(state_dtype="int4"), 26),
    "came-stochastic": Row(came(weight_rounding="stochastic"), 12, 236, dtype=LOW),
    "came-kahan": Row(came(weight_rounding="kahan"), 12, dtype=LOW),
    "came-master": Row(came(weight_rounding="master"), 12, dtype=LOW),
    "lars": Row(lars(), 4, 30),
    "lars-clip": Row(lars(max_grad_norm=1.0), 4),
    "lars-int8": Row(lars(state_dtype="int8"), 16),
}


def set_up(row: Row, shapes: Shapes) -> tuple[list[Parameter], Optimizer]:
    """Return parameters and an optimizer with its state."""
    params = [Parameter((torch.randn(shape) * 0.02).to("npu", row.dtype)) for shape in shapes]
    optimizer = row.make(params)
    new_gradients(params)
    optimizer.step()
    return params, optimizer


def new_gradients(params: list[Parameter], leave_out: Sequence[int] = ()) -> None:
    for i, param in enumerate(params):
        param.grad = None if i in leave_out else (torch.randn(param.shape) * 1e-3).to("npu", param.dtype)


def steady_waits(name: str, leave_out: Sequence[int] = ()) -> dict[str, int]:
    """Return waits and pageable copies of a step in the steady state, after which the learning rate changes."""
    params, optimizer = set_up(ROWS[name], FEW)
    for lr in (0.01, 0.02):
        new_gradients(params, leave_out)
        optimizer.param_groups[0]["lr"] = lr
        with stand_in.counted() as found:
            optimizer.step()
    return stand_in.waits(found)


@on(*MODES)
@pytest.mark.parametrize("name", ROWS)
def test_a_step_waits_for_nothing_and_sends_nothing(device: Device, name: str) -> None:
    if not device.has_float64 and ROWS[name].dtype == torch.float64:
        pytest.skip("parameters in float64")
    found = steady_waits(name)
    assert not found, f"{found}"


@on(*MODES)
@pytest.mark.parametrize("name", ["lamb", "came", "lars"])
def test_nor_does_one_in_which_a_gradient_is_missing(name: str) -> None:
    found = steady_waits(name, leave_out=[2])
    assert not found, f"{found}"


@cache
def calls_of(name: str, shapes: Shapes = BERT) -> Counter[str]:
    params, optimizer = set_up(ROWS[name], shapes)
    calls = Calls()
    for _ in range(2):  # the first step in the mode makes a new plan
        new_gradients(params)
        calls.found.clear()
        with calls:
            optimizer.step()
    return calls.found


@on(COMPLETE)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.calls is not None])
def test_calls_of_torch_are_no_more_than_they_were(name: str) -> None:
    found, most = calls_of(name), ROWS[name].calls
    assert most is not None
    assert found.total() <= most, f"{found.total()} calls: {found.most_common(12)}"


@on(COMPLETE)
@pytest.mark.parametrize("name", ["adamw-of-torch", "lamb", "lamb-int8", "came", "lars"])
def test_calls_of_torch_do_not_grow_with_tensors_or_their_size(name: str) -> None:
    """In pieces that fit a CPU's cache, Lamb made 4,829 calls for the 152 tensors of ViT-S."""
    few, large, many = (
        calls_of(name, shapes).total() for shapes in (((16, 1024),), ((2048, 1024),), ((16, 1024),) * 50)
    )
    assert few == large == many


def temporaries(name: str, shapes: Shapes) -> int:
    """Return the peak bytes of a step's temporaries."""
    _, optimizer = set_up(ROWS[name], shapes)
    optimizer.step()
    with stand_in.counted():
        optimizer.step()
    return stand_in.peak_bytes()


MATRICES: Shapes = [(512, 512)] * 6
ELEMENTS = 512 * 512


@on(COMPLETE)
@pytest.mark.parametrize("name", ROWS)
def test_temporaries_are_bounded(name: str) -> None:
    peak = temporaries(name, MATRICES)
    assert peak <= 1.03 * ROWS[name].temporary * ELEMENTS * len(MATRICES), f"{peak / ELEMENTS / len(MATRICES)}"


@on(COMPLETE)
@pytest.mark.parametrize("name", [name for name in ROWS if name != "adamw-of-torch"])
def test_a_large_model_is_stepped_in_groups(name: str) -> None:
    """A group takes the temporaries of its largest tensor and at most `GROUP_BYTES`, which is two tensors here."""
    of_tensor = ROWS[name].temporary * ELEMENTS
    calls = calls_of(name, tuple(MATRICES)).total()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "GROUP_BYTES", 2 * of_tensor)
        assert temporaries(name, MATRICES) <= 3.1 * of_tensor
        calls_of.cache_clear()
        assert calls < calls_of(name, tuple(MATRICES)).total() <= 2 * calls
    calls_of.cache_clear()


@on(*MODES)
@pytest.mark.parametrize("name", ["lamb", "came", "lars"])
def test_norms_without_float64_take_few_scaled_copies(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(square_sums, "SCALED_AT_ONCE", ELEMENTS)
        assert temporaries(name, MATRICES) <= 1.03 * 4 * ELEMENTS * (len(MATRICES) + 1)


@on(*MODES)
def test_the_counts_see_a_wait_and_a_copy() -> None:
    value = torch.ones(3).to("npu")
    with stand_in.counted() as found:
        value.sum().item()
        value.copy_(torch.zeros(3))
    assert stand_in.waits(found) == {"wait for item": 1, stand_in.PAGEABLE: 1}
    with stand_in.counted() as found:
        value.copy_(torch.zeros(3).pin_memory(), non_blocking=True)
        host = torch.empty(3).pin_memory().copy_(value, non_blocking=True)
    assert not stand_in.waits(found)
    assert host.view(torch.uint8).eq(0xAA).all(), "a copy to the host arrives with the next wait"
    torch.accelerator.synchronize()
    assert host.equal(torch.zeros(3))
