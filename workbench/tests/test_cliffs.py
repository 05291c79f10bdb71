"""The parameter sets of the table `cliffs` of `workbench/benchmarks/bench_tables.py`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import cliffs
from bighorn import Came, Lamb
from bighorn_workbench.measure import Copy, ParamSet, contiguous
from cliffs import CLIFFS

SMALL: dict[str, list[tuple[int, ...]]] = {
    "experts": [(4, 5, 6)],
    "channels_last": [(4, 3, 2, 2), (4,)],
    "alternating": [(4, 3, 2, 2)] * 2,
}


@pytest.fixture
def small_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, each in CLIFFS.items():
        monkeypatch.setitem(CLIFFS, name, replace(each, shapes=partial(list, SMALL.get(name, [(6, 4)] * 3))))


def params_of(param_set: ParamSet) -> list[Tensor]:
    drawn = [torch.randn(shape, dtype=param_set.dtype) for shape in param_set.shapes()]
    params = [param_set.layout(tensor) for tensor in drawn]
    for param, tensor in zip(params, drawn, strict=True):
        assert torch.equal(param, tensor)
        param.grad = param_set.grad_layout(tensor)
    return params


@pytest.mark.usefixtures("small_sets")
def test_layouts_and_dtypes_are_what_the_names_say() -> None:
    strides = {name: params_of(param_set)[0].stride() for name, param_set in CLIFFS.items()}
    assert strides["channels_last"] == (12, 1, 6, 3)
    assert strides["gaps"] == (8, 1)
    assert strides["transposed"] == strides["transposed_both"] == (1, 6)
    gradients = {name: params_of(CLIFFS[name])[0].grad for name in ("transposed", "transposed_both")}
    assert [grad is not None and grad.stride() for grad in gradients.values()] == [(4, 1), (1, 6)]
    assert all(strides[name] == (4, 1) for name in ("missing", "moved", "tall", "wide", "million", "float64"))
    assert [name for name, param_set in CLIFFS.items() if param_set.dtype is not None] == ["float64"]
    refused = {name for name, param_set in CLIFFS.items() if not param_set.on_cuda}
    assert refused == {"alternating", "channels_last", "gaps", "transposed"}


@pytest.mark.usefixtures("small_sets")
def test_gradients_alternate_between_two_memory_orders() -> None:
    [first, second] = params_of(CLIFFS["alternating"])
    change = cliffs.alternating([first, second])
    strides = []
    for step in range(3):
        change(step)
        assert first.grad is not None
        strides.append(first.grad.stride())
    assert strides == [(12, 4, 2, 1), (12, 1, 6, 3), (12, 4, 2, 1)]


def test_another_tenth_of_the_gradients_is_missing_at_each_step() -> None:
    params = params_of(ParamSet(lambda: [(2,)] * 500))
    grads = [param.grad for param in params]
    change = cliffs.missing(params)
    sets = []
    for step in range(3):
        change(step)
        sets.append({i for i, param in enumerate(params) if param.grad is None})
        assert all(param.grad is None or param.grad is grad for param, grad in zip(params, grads, strict=True))
    assert all(30 < len(each) < 70 for each in sets)
    assert len(set(map(frozenset, sets))) == 3


def test_storage_moves_and_keeps_its_values() -> None:
    params = params_of(ParamSet(lambda: [(2, 3)] * 2))
    before, values = [param.data_ptr() for param in params], [param.clone() for param in params]
    cliffs.moved(params)(0)
    assert all(param.data_ptr() != address for param, address in zip(params, before, strict=True))
    assert all(map(torch.equal, params, values))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_the_note_about_torch_holds(fused: bool) -> None:
    """Without it, `cliffs.WRONG_BASELINE` can go."""
    weights, grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).view(3, 4)

    def stepped(layout: Copy, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Tensor:
        param = layout(weights)
        param.grad = grad.clone()
        optimizer = make([param])
        for _ in range(2):
            optimizer.step()
        return param

    def adamw(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=fused)

    layouts = contiguous, cliffs.transposed
    right = torch.equal(*(stepped(layout, adamw) for layout in layouts))
    assert right is not fused
    for ours in (Lamb, Came):
        make = partial(ours, lr=0.1, weight_decay=0.1)
        torch.testing.assert_close(*(stepped(layout, make) for layout in layouts))
