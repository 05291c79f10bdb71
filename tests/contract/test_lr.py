"""The contract of torch.optim.Optimizer, on which trainers and schedulers rely: options that change."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, Lamb, Lars
from tests.support.case_tensors import FEW
from tests.support.cases import KINDS, Case, Kind, set_gradients
from tests.support.optimizer_runs import CASE, advance, assert_bitwise, copies, saved_and_loaded
from tests.support.tables import for_every


def test_tensor_lr_is_the_same_as_a_float(kind: Kind, backend: str) -> None:
    case = CASE.of(kind)
    results = []
    for lr in (torch.tensor(0.125), 0.125):
        parameters = case.parameters()
        optimizer = case.optimizer(parameters, backend, lr=lr)
        for step, factor in enumerate((1.0, 0.5)):
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(0.125 * factor)
                else:
                    group["lr"] = 0.125 * factor
            set_gradients(parameters, case.gradients(step))
            optimizer.step()
        results.append(parameters)
        other = case.optimizer(copies(parameters), backend, lr=torch.tensor(0.5))
        other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
        assert other.param_groups[0]["lr"] == 0.125 * 0.5
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-7, atol=1e-8)


def test_each_group_has_a_tensor_lr_of_its_own(kind: Kind) -> None:
    """Torch's schedulers fill it in place. The first group keeps the caller's, since the caller may write into it."""
    lr, parameters = torch.tensor(0.1), copies([Parameter(torch.ones(2))] * 4)
    optimizer = kind([{"params": [p], "lr": lr} for p in parameters[:3]], lr=0.1)
    optimizer.add_param_group({"params": [parameters[3]], "lr": lr})
    assert optimizer.param_groups[0]["lr"] is lr
    assert len({group["lr"].data_ptr() for group in optimizer.param_groups}) == 4
    assert [group["lr"] for group in optimizer.param_groups] == [lr] * 4
    assert kind(parameters, lr=lr).param_groups[0]["lr"] is lr
    first, second = kind([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=lr).param_groups
    assert first["lr"].data_ptr() != second["lr"].data_ptr()


@pytest.mark.parametrize("when", ["construction", "later"])
def test_a_tensor_lr_that_requires_grad_is_detached(when: str, kind: Kind, backend: str) -> None:
    lr = torch.tensor(0.5, requires_grad=True)
    parameter, other = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    parameter.grad, other.grad = torch.ones(3), torch.ones(3)
    optimizer = kind([parameter], lr=lr if when == "construction" else 0.1, backend=backend)
    optimizer.param_groups[0]["lr"] = lr if when == "later" else optimizer.param_groups[0]["lr"]
    optimizer.step()
    kind([other], lr=0.5, backend=backend).step()
    assert_bitwise([parameter], [other])
    assert not optimizer.param_groups[0]["lr"].requires_grad
    copy.deepcopy(optimizer)


CHANGES: dict[Kind, dict[str, Any]] = {
    Lamb: {
        "betas": (0.3, 0.4),
        "eps": 0.5,
        "adapt": False,
        "adam": True,
        "bias_correction": "lr",
        "trust_ratio_bounds": (0.1, 0.2),
        "decay_mode": "decoupled",
        "second_moment": "adagrad",
        "stacked": True,
        "grad_averaging": False,
    },
    Came: {
        "betas": (0.3, 0.4, 0.5),
        "eps": (0.1, 0.5),
        "clip_threshold": 0.3,
        "decay_rate": 0.8,
        "scale_parameter": True,
        "bias_correction": True,
        "state_dtype": "bfloat16",
    },
    Lars: {
        "momentum": 0.3,
        "nesterov": True,
        "trust_coefficient": 0.5,
        "eps": 0.5,
        "denominator": "joint",
        "trust_clip": True,
        "lr_in_momentum": False,
        "adapt": False,
        "stacked": True,
    },
}
for changes in CHANGES.values():
    changes |= {"lr": 0.5, "weight_decay": 0.7, "maximize": True, "grad_centralization": True}


@for_every(("kind", "name"), [(kind, name) for kind in KINDS for name in CHANGES[kind]])
def test_a_value_written_into_a_group_counts_from_the_next_step(name: str, kind: Kind, backend: str) -> None:
    """No earlier step has an effect: a new optimizer with this value takes the same step."""
    change = {name: CHANGES[kind][name]}
    case = Case("written", {}, tuple(leaf for leaf in FEW if len(leaf.shape) >= 2)).of(kind)
    parameters = case.parameters()
    optimizer = case.optimizer(parameters, backend)
    advance(case, parameters, optimizer, range(2))
    others = copies(parameters)
    other = case.optimizer(others, backend)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    unchanged = copies(parameters)
    third = case.optimizer(unchanged, backend)
    third.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.param_groups[0].update(change)
    optimizer.param_groups[0].update(change)
    for tensors, each in ((parameters, optimizer), (others, other), (unchanged, third)):
        set_gradients(tensors, case.gradients(2))
        each.step()
    assert_bitwise(parameters, others)
    assert any(not a.equal(b) for a, b in zip(parameters, unchanged, strict=True)), "the change had no effect"
