"""Flat tensors in one process; test_flat_ranks.py tests several."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Came, FlatLayout, Fragment, Lamb, Lars
from tests.support.cases import Kind

LAYOUT = FlatLayout([[Fragment("0.weight", (2, 3), 6), Fragment("0.bias", (2,), 2, start=6)]])


def flat() -> Parameter:
    return Parameter(torch.arange(8.0))


def test_exclusions_have_the_names_of_whole_parameters() -> None:
    seen = []

    def excluded(name: str, param: torch.Tensor) -> bool:
        seen.append((name, tuple(param.shape)))
        return param.dim() < 2

    parameter = flat()
    group: dict[str, Any] = {"params": [parameter], "flat_layout": LAYOUT}
    optimizer = Lamb([group], lr=0.1, weight_decay=0.1, exclude_from_weight_decay=excluded)
    assert group["flat_layout"] is LAYOUT
    parameter.grad = torch.zeros(8)
    optimizer.step()
    assert set(seen) == {("0.weight", (2, 3)), ("0.bias", (2,))}
    assert parameter[6:].equal(flat()[6:])
    assert not parameter[1:6].equal(flat()[1:6])
    with pytest.raises(ValueError, match=r"(?s)exclude_from_weight_decay.*'gain'"):
        Lamb([group], lr=0.1, exclude_from_weight_decay=["gain"])
    Lamb([group], lr=0.1, exclude_from_weight_decay=["bias"])


def test_what_flat_tensors_cannot_have() -> None:
    with pytest.raises(TypeError, match=r"flat_layout must be a bighorn\.FlatLayout, not list"):
        Lamb([{"params": [flat()], "flat_layout": [[]]}], lr=0.1)
    with pytest.raises(ValueError, match=r"fragments for 1 flat tensors, but params has 2"):
        Lamb([{"params": [flat(), flat()], "flat_layout": LAYOUT}], lr=0.1)
    for other in (flat().view(2, 4).detach(), flat().detach()[::2], flat().detach() + 1j):
        with pytest.raises(ValueError, match=r"a plain, contiguous, real tensor of one dim"):
            Lamb([{"params": [other.requires_grad_()], "flat_layout": LAYOUT}], lr=0.1)
    with pytest.raises(ValueError, match=r"another dtype or device than params\[0\]"):
        Lamb([{"params": [flat(), flat().half().detach()], "flat_layout": FlatLayout([[], []])}], lr=0.1)
    in_blocks: list[tuple[Any, str]] = [(Lamb, "int4"), (Came, "int8")]
    for kind, state_dtype in in_blocks:
        with pytest.raises(
            ValueError, match=rf'state_dtype="{state_dtype}" keeps blocks of rows, and flat tensors cut'
        ):
            kind([{"params": [flat()], "flat_layout": LAYOUT}], lr=0.1, state_dtype=state_dtype)
    groups: list[dict[str, Any]] = [{"params": [flat()]}, {"params": [], "flat_layout": FlatLayout([])}]
    with pytest.raises(ValueError, match=r"gives an empty flat tensor"):
        Lamb(groups, lr=0.1)


def test_a_pickled_optimizer_steps_on(kind: Kind) -> None:
    parameter = flat()
    optimizer = kind([{"params": [parameter], "flat_layout": LAYOUT}], lr=0.1)
    parameter.grad = torch.ones(8)
    optimizer.step()
    tensor, other = pickle.loads(pickle.dumps((parameter, optimizer)))
    tensor.grad = parameter.grad.clone()
    optimizer.step()
    other.step()
    assert tensor.equal(parameter)
    assert other.telemetry().names == ("0.weight", "0.bias")
    moments = 1 if kind is Lars else 2
    assert kind.state_bytes([{"params": [parameter], "flat_layout": LAYOUT}]) == {
        "0.weight": 4 + 24 * moments,
        "0.bias": 4 + 8 * moments,
    }


def test_averages_of_flat_tensors_are_vectors() -> None:
    """Fragments have the order of the flat tensor; the momentum has its size."""
    layout = FlatLayout([[Fragment("b", (8, 9), 72, start=12), Fragment("a", (4,), 4), Fragment("c", (9, 8), 72, 90)]])
    group: dict[str, Any] = {"params": [Parameter(torch.ones(170))], "flat_layout": layout}
    optimizer = Came([group], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.arange(170.0)
    optimizer.step()
    state = next(iter(optimizer.state.values()))
    sizes = {
        "exp_avg": 170,
        "exp_avg_sq": 4,
        **{f"exp_avg_{of}_{line}": 17 for of in ("sq", "res") for line in ("row", "col")},
    }
    assert {name: len(value) for name, value in state.items() if name != "step"} == sizes
    rows = torch.cat([torch.arange(12.0, 84).view(8, 9), torch.zeros(0, 9)]).square().mean(1)
    torch.testing.assert_close(state["exp_avg_sq_row"][:8], 0.001 * rows)
    assert Came.state_bytes([group]) == {"b": 4 + 4 * (72 + 2 * 17), "a": 4 + 4 * 8, "c": 4 + 4 * (72 + 2 * 17)}
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq_col"] = saved["state"][0]["exp_avg_sq_col"][1:]
    with pytest.raises(
        ValueError, match=r"state 'exp_avg_sq_col' of .* has shape \(16,\), but the parameter needs \(17,\)"
    ):
        optimizer.load_state_dict(saved)


def test_explain_names_the_backend_of_each_fragment() -> None:
    """On one rank no parameter is cut."""
    group = {"params": [Parameter(torch.ones(72))], "flat_layout": FlatLayout([[Fragment("a", (8, 9), 72)]])}
    assert "cpu       1 tensor, 72 elements" in Came([group], lr=0.1).explain()


def test_every_backend_steps_flat_tensors(kind: Kind, backend: str) -> None:
    """The fragments of a flat tensor step like parameters, and padding does not change."""
    torch.manual_seed(0)
    whole = [Parameter(torch.randn(40, 30)), Parameter(torch.randn(20))]
    layout = FlatLayout([[Fragment("0", (40, 30), 1200), Fragment("1", (20,), 20, start=1203)]])
    flat = Parameter(torch.cat([whole[0].detach().flatten(), torch.ones(3), whole[1].detach()]))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 0.5, "exclude_from_weight_decay": ["1"]}
    ours = kind([{"params": [flat], "flat_layout": layout}], backend=backend, **options)
    theirs = kind([("0", whole[0]), ("1", whole[1])], backend="reference", **options)
    for _ in range(3):
        for param in whole:
            param.grad = torch.randn_like(param)
        grads = [param.grad.flatten() for param in whole if param.grad is not None]
        flat.grad = torch.cat([grads[0], torch.full((3,), 9.0), grads[1]])
        ours.step()
        theirs.step()
    torch.testing.assert_close(flat[:1200], whole[0].flatten(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat[1203:], whole[1], rtol=1e-5, atol=1e-6)
    assert flat[1200:1203].eq(1).all()
