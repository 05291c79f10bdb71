"""The checks of the kinds of tensors, by torch's guards and, without these, by attributes.

test_events.py has what a plan makes of them, and of addresses.
"""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bighorn._optim import plan_cache
from bighorn._optim.plan_cache import Guard, alike, alike_by_attributes
from tests.support.tables import for_every


def base() -> Tensor:
    return torch.arange(6.0).view(2, 3)


NUMBERS = torch.ones(2, dtype=torch.complex64)
TENSORS: dict[str, tuple[list[Tensor], list[Tensor], bool]] = {
    "other values": ([base(), base()[0]], [base() + 1, torch.zeros(3)], True),
    "none": ([], [], True),
    "one more": ([base()], [base(), base()], False),
    "one less": ([base(), base()], [base()], False),
    "one more than none": ([], [base()], False),
    "dtype": ([base(), base()], [base(), base().bfloat16()], False),
    "shape": ([base(), base()], [base(), base()[:1]], False),
    "dims": ([base(), base()], [base(), base()[0]], False),
    "strides": ([base(), base()], [base(), base().t().contiguous().t()], False),
    "device": ([base(), base()], [base(), base().to("meta")], False),
    "layout": ([base(), base()], [base(), base().to_sparse()], False),
    "negated": ([base(), base()], [base(), torch._neg_view(base())], False),
    "type": ([base(), base()], [base(), torch.nn.Parameter(base(), requires_grad=False)], False),
    "conjugated": ([NUMBERS], [NUMBERS.conj()], False),
}


def test_torch_answers() -> None:
    assert plan_cache.TensorGuards is not None


@pytest.mark.parametrize("ask", [alike, alike_by_attributes])
@for_every("kinds", TENSORS)
def test_tensors_are_alike(kinds: str, ask: Callable[[list[Tensor]], Guard]) -> None:
    asked, given, same = TENSORS[kinds]
    assert ask(asked)(given) == same


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
