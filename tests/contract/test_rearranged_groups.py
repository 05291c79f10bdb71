"""Programs that write `param_groups` as torch allows: they reorder, remove, merge, copy and assign groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from bighorn import Lamb, schedules
from tests.support.cases import Kind, Optimizer


def matrices(count: int = 3) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(6, 5)) for _ in range(count)]


def step(optimizer: Optimizer, *params: Parameter) -> None:
    for i, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + i) + param.detach()
    optimizer.step()


def falling(kind: Kind, params: list[Parameter], **options: Any) -> Optimizer:
    """Return an optimizer whose second group has a schedule: 0.4, 0.2, 0.1, ..."""
    a, b, *rest = params
    groups: list[dict[str, Any]] = [{"params": [a]}, {"params": [b], "lr": lambda step: 0.4 / 2**step}]
    return kind([*groups, *({"params": [each]} for each in rest)], lr=0.01, **options)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def reverse(groups: list[Any]) -> None:
    groups.reverse()


def in_order_of_rates(groups: list[Any]) -> None:
    groups.sort(key=lambda group: -float(group["lr"]))


@pytest.mark.parametrize("arrange", [reverse, in_order_of_rates])
def test_schedules_stay_with_their_groups(kind: Kind, arrange: Any) -> None:
    params, twins = matrices(), matrices()
    optimizer, twin = falling(kind, params), falling(kind, twins)
    for _ in range(3):
        step(optimizer, *params)
        step(twin, *twins)
        arrange(optimizer.param_groups)
    assert all(param.equal(other) for param, other in zip(params, twins, strict=True))
    assert sorted(rates(optimizer)) == sorted(rates(twin)) == [0.01, 0.01, 0.1]


def test_an_empty_group_is_removed_and_the_rest_is_saved(kind: Kind) -> None:
    """As DeepSpeed does for LoRA without biases, and ms-swift, which loads a checkpoint before the first step."""
    (param,) = matrices(1)
    groups: list[dict[str, Any]] = [{"params": [param]}, {"params": [], "weight_decay": 0.0}]
    optimizer = kind(groups, lr=0.01)
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    optimizer.load_state_dict(optimizer.state_dict())
    step(optimizer, param)
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(optimizer.state_dict())
    assert copied.state[copied.param_groups[0]["params"][0]]["step"] == optimizer.state[param]["step"] == 1


def test_groups_are_removed_merged_and_added_again(kind: Kind) -> None:
    params = matrices()
    names = ["a", "b", "c"]
    optimizer = kind([{"params": [pair]} for pair in zip(names, params, strict=True)], lr=0.01)
    step(optimizer, *params)
    last = optimizer.param_groups.pop()
    step(optimizer, *params)
    assert [int(optimizer.state[param]["step"]) for param in params] == [2, 2, 1]
    first, second = optimizer.param_groups
    first["params"] += second["params"]
    optimizer.param_groups.remove(second)
    step(optimizer, *params)
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3, 1]
    assert first["param_names"] == ["a", "b"]
    assert optimizer.telemetry().names == ("a", "b")
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [("c", params[2])], "lr": 0.5})
    step(optimizer, *params)
    assert [int(optimizer.state[param]["step"]) for param in params] == [3, 3, 2]
    optimizer.param_groups.append(last | {"params": [params[0]], "param_names": ["a"]})
    step(optimizer, *params)
    assert [int(optimizer.state[param]["step"]) for param in params] == [4, 3, 3]
    assert rates(optimizer) == [0.5, 0.01]


def test_a_longer_list_is_assigned_and_loaded(kind: Kind) -> None:
    """As Lightning's BackboneFinetuning does when a run is resumed after layers were unfrozen."""
    params = matrices()
    saved = kind([{"params": params[:1]}], lr=0.01)
    saved.add_param_group({"params": params[1:], "lr": 0.002})
    step(saved, *params)
    state = copy.deepcopy(saved.state_dict())
    resumed = kind([{"params": params[:1]}], lr=0.01)
    there = [{**group, "params": [params[i] for i in group["params"]]} for group in state["param_groups"]]
    resumed.param_groups = there
    resumed.load_state_dict(state)
    step(resumed, *params)
    assert [int(resumed.state[param]["step"]) for param in params] == [2, 2, 2]
    assert rates(resumed) == [0.01, 0.002]


def test_a_longer_vector_takes_the_place_of_a_vector(kind: Kind) -> None:
    """As splatting does when it adds points, with opacities in a vector."""
    opacities, points = Parameter(torch.ones(5)), Parameter(torch.randn(5, 3))
    optimizer = kind([{"params": [opacities]}, {"params": [points]}], lr=0.01)
    for size in (5, 8, 13):
        step(optimizer, opacities, points)
        for group, old in zip(optimizer.param_groups, (opacities, points), strict=True):
            del optimizer.state[old]
            group["params"][0] = Parameter(torch.ones(size + 3, *old.shape[1:]))
        opacities, points = (group["params"][0] for group in optimizer.param_groups)
    step(optimizer, opacities, points)
    assert len(opacities) == 16
    assert opacities in optimizer.state


def test_copies_of_dicts_and_dicts_that_come_back_keep_their_schedules(kind: Kind) -> None:
    params, twins = matrices(), matrices()
    optimizer, twin = falling(kind, params), falling(kind, twins)
    step(optimizer, *params)
    step(twin, *twins)
    optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
    step(optimizer, *params)
    step(twin, *twins)
    assert optimizer._records.gone == {}  # a program that copies dicts at each step leaves nothing behind
    everything = optimizer.param_groups
    optimizer.param_groups = everything[:1]
    step(optimizer, params[0])
    optimizer.param_groups = everything
    twins[0].grad, twins[1].grad, twins[2].grad = params[0].grad, None, None
    twin.step()
    assert params[0].equal(twins[0])
    assert rates(optimizer)[1] == 0.2
    step(optimizer, *params)
    assert rates(optimizer) == [0.01, 0.1, 0.01]


def test_a_default_schedule_is_for_groups_without_a_rate() -> None:
    first, second = matrices(2)
    optimizer = Lamb([first], lr=schedules.Cosine(0.5, decay_steps=4))
    optimizer.param_groups.append({"params": [second]})
    step(optimizer, first, second)
    step(optimizer, first, second)
    assert rates(optimizer)[0] == rates(optimizer)[1] < 0.5
    assert "max_grad_norm" not in optimizer.param_groups[1]
