"""The changes that make a plan invalid are detected, by torch's guards and, without these, by attributes."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bighorn.optim import plan_cache
from bighorn.optim.plan_cache import Guard, alike, alike_by_attributes
from tests.support.tables import for_every

BOTH = pytest.mark.parametrize("ask", [alike, alike_by_attributes])


def base() -> Tensor:
    return torch.arange(6.0).view(2, 3)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "dtype": lambda: base().bfloat16(),
    "shape": lambda: base()[:1],
    "dims": lambda: base()[0],
    "strides": lambda: base().t().contiguous().t(),
    "device": lambda: base().to("meta"),
    "layout": lambda: base().to_sparse(),
    "negated": lambda: torch._neg_view(base()),
    "type": lambda: torch.nn.Parameter(base(), requires_grad=False),
}


def test_torch_answers() -> None:
    assert plan_cache.TensorGuards is not None


@BOTH
def test_tensors_of_the_same_kind_are_alike(ask: Callable[[list[Tensor]], Guard]) -> None:
    question = ask([base(), base()[0]])
    assert question([base() + 1, torch.zeros(3)])


@BOTH
@for_every("change", OTHERS)
def test_whatever_kernels_are_told_of_a_tensor_makes_a_difference(
    ask: Callable[[list[Tensor]], Guard], change: str
) -> None:
    question = ask([base(), base()])
    assert not question([base(), OTHERS[change]()])


@BOTH
def test_a_conjugated_tensor_is_another(ask: Callable[[list[Tensor]], Guard]) -> None:
    number = torch.ones(2, dtype=torch.complex64)
    assert not ask([number])([number.conj()])


@BOTH
@for_every("counts", [(0, 1), (1, 0), (2, 1), (1, 2)])
def test_another_number_of_tensors_is_never_alike(
    ask: Callable[[list[Tensor]], Guard], counts: tuple[int, int]
) -> None:
    asked, given = counts
    assert not ask([base()] * asked)([base()] * given)


@BOTH
def test_no_tensors_are_alike(ask: Callable[[list[Tensor]], Guard]) -> None:
    assert ask([])([])


@pytest.mark.parametrize("guards", [True, False], ids=["torch's", "by attributes"])
def test_a_check_of_one_tensor_does_not_keep_its_memory(guards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guards:
        monkeypatch.setattr(plan_cache, "TensorGuards", None)
    tensor = base()
    check, kept = alike([tensor]), weakref.ref(tensor)
    assert check([base()])
    assert not check([base().bfloat16()])
    del tensor
    assert kept() is None
