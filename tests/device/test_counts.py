"""What the host does for a step on a device: it never waits, it sends nothing, and it calls torch a bounded number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bighorn import Came, Lamb, Lars
from bighorn_workbench.shapes import SHAPES
from tests.device import stand_in
from tests.device.stand_in import STAND_IN

pytestmark = STAND_IN

Shapes = Sequence[tuple[int, ...]]

# BERT's tensors without the pooler's, 197, with a width of 64, so that all are smaller than a piece.
BERT: Shapes = tuple(
    tuple(min(size // 12, 1000) if size > 2 else size for size in shape) for shape in SHAPES["bert_base"]()
)[:197]
FEW: Shapes = [(128, 64), (128,), (128, 128), (128,), (10, 128), (10,)]


@dataclass(frozen=True)
class Row:
    """An optimizer, and the calls of torch in a step that it takes for BERT's tensors."""

    make: Callable[[list[Parameter]], Optimizer]
    calls: int
    dtype: torch.dtype = torch.float32


def lamb(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Lamb(params, lr=0.01, weight_decay=0.01, **options)


def came(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Came(params, lr=0.01, weight_decay=0.01, **options)


def lars(**options: Any) -> Callable[[list[Parameter]], Optimizer]:
    return lambda params: Lars(params, lr=0.01, weight_decay=0.01, **options)


LOW = torch.bfloat16

ROWS = {
    "adamw-of-torch": Row(lambda params: torch.optim.AdamW(params, foreach=True), 8),
    "lamb": Row(lamb(), 56),
    "lamb-clip": Row(lamb(max_grad_norm=1.0), 74),
    "lamb-skip": Row(lamb(skip_nonfinite=True), 89),
    "lamb-int8": Row(lamb(state_dtype="int8"), 390),
    "lamb-float16": Row(lamb(state_dtype="float16"), 264),
    "lamb-bfloat16": Row(lamb(state_dtype="bfloat16"), 64),
    "lamb-stochastic": Row(lamb(weight_rounding="stochastic"), 117, LOW),
    "lamb-kahan": Row(lamb(weight_rounding="kahan"), 104, LOW),
    "lamb-master": Row(lamb(weight_rounding="master"), 79, LOW),
    "came": Row(came(), 199),
    "came-int8": Row(came(state_dtype="int8"), 421),
    "came-int4": Row(came(state_dtype="int4"), 549),
    "came-stochastic": Row(came(weight_rounding="stochastic"), 317, LOW),
    "came-kahan": Row(came(weight_rounding="kahan"), 255, LOW),
    "came-master": Row(came(weight_rounding="master"), 221, LOW),
    "lars": Row(lars(), 39),
    "lars-int8": Row(lars(state_dtype="int8"), 202),
}

VIEWS = {
    *("view", "as_strided", "select", "slice", "split", "split_with_sizes", "permute", "t", "transpose", "expand"),
    *("squeeze", "unsqueeze", "detach", "alias", "unbind", "_unsafe_view", "_reshape_alias", "unfold"),
    *("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh"),
}
"""Operations that give the device nothing to do."""


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch that give the device something to do; a call for a list of tensors is one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = tree_leaves((args, kwargs or {}, result))
        if name not in VIEWS and any(isinstance(each, Tensor) and each.device.type == "npu" for each in tensors):
            self.found[name] += 1
        return result


def set_up(row: Row, shapes: Shapes) -> tuple[list[Parameter], Optimizer]:
    """Return parameters and an optimizer that has its state."""
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


@pytest.mark.parametrize("name", ROWS)
def test_a_step_waits_for_nothing_and_sends_nothing(name: str) -> None:
    found = steady_waits(name)
    assert not found, f"{found}"


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


@pytest.mark.parametrize("mode", ["complete"], indirect=True)
@pytest.mark.parametrize("name", ROWS)
def test_calls_of_torch_are_no_more_than_they_were(name: str) -> None:
    found = calls_of(name)
    assert found.total() <= ROWS[name].calls, f"{found.total()} calls: {found.most_common(12)}"


@pytest.mark.parametrize("mode", ["complete"], indirect=True)
@pytest.mark.parametrize("name", ["adamw-of-torch", "lamb", "came", "lars"])
def test_calls_of_torch_do_not_grow_with_the_size_of_tensors(name: str) -> None:
    """Pieces that fit a CPU's cache are many calls for a device: 4,829 of Lamb for the 152 tensors of ViT-S."""
    small, large = (calls_of(name, ((size, 1024), (size,))).total() for size in (16, 2048))
    assert large <= 1.5 * small, f"{large} calls, and {small} for a small matrix"


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
