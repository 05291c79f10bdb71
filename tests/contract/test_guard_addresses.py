"""Changes of addresses that a plan's guards detect."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from bighorn import Lamb
from bighorn.optim.plan_cache import GuardInputs, PlanGuards, addresses
from tests.support.tables import for_every


def tensors() -> list[Tensor]:
    return [torch.ones(2, 3), torch.nn.Parameter(torch.ones(4)), torch.ones(()), torch.ones(0)]


def states() -> list[dict[str, Any]]:
    return [{"step": torch.zeros(()), "exp_avg": torch.ones(3)}, {}, {"exp_avg": torch.ones(5)}]


class Whereabouts:
    """Guards that compare only parameters and state."""

    def __init__(self, params: list[Tensor], dicts: list[dict[str, Any]]) -> None:
        self.guards = PlanGuards(inputs(params, dicts))

    def hold(self, params: list[Tensor], dicts: list[dict[str, Any]]) -> bool:
        return self.guards.hold(inputs(params, dicts))


def inputs(params: list[Tensor], dicts: list[dict[str, Any]]) -> GuardInputs:
    return GuardInputs([], None, params, [], dicts, addresses(params, *map(dict.values, dicts)))


def test_what_has_not_moved_is_there_in_new_lists_and_dicts() -> None:
    params, dicts = tensors(), states()
    lay = Whereabouts(params, dicts)
    assert lay.hold(params, dicts)
    assert lay.hold(list(params), [dict(values) for values in dicts])
    assert Whereabouts([], []).hold([], [])


def test_another_object_of_the_same_memory_will_do() -> None:
    params, dicts = tensors(), states()
    lay = Whereabouts(params, dicts)
    dicts[0]["exp_avg"] = dicts[0]["exp_avg"].detach()
    assert lay.hold([params[0].view(2, 3), *params[1:]], dicts)


class Things(NamedTuple):
    params: list[Tensor]
    dicts: list[dict[str, Any]]


MOVES: dict[str, Callable[[Things], object]] = {
    "a parameter's data": lambda of: setattr(of.params[1], "data", torch.ones(4)),
    "a parameter": lambda of: operator.setitem(of.params, 0, torch.ones(2, 3)),
    "one more": lambda of: of.params.append(torch.ones(1)),
    "one less": lambda of: of.params.pop(),
    "freed": lambda of: of.params[0].untyped_storage().resize_(0),
    "order": lambda of: of.params.reverse(),
    "a state's data": lambda of: setattr(of.dicts[2]["exp_avg"], "data", torch.ones(5)),
    "a state": lambda of: of.dicts[0].update(exp_avg=torch.ones(3)),
    "a state more": lambda of: of.dicts[1].update(exp_avg=torch.ones(3)),
    "a state less": lambda of: of.dicts[2].clear(),
    "the last dict": lambda of: of.dicts.pop(),
}


@for_every("move", MOVES)
def test_what_has_moved_is_seen(move: str) -> None:
    of = Things(tensors(), states())
    lay = Whereabouts(*of)
    MOVES[move](of)
    assert not lay.hold(*of)
    assert Whereabouts(*of).hold(*of)


def test_things_of_the_users_own_may_lie_among_the_state_and_change() -> None:
    params, dicts = tensors(), states()
    dicts[0]["seen"] = 7
    lay = Whereabouts(params, dicts)
    dicts[0]["seen"] = "eight"
    assert lay.hold(params, dicts)
    dicts[0]["exp_avg"] = torch.ones(3)
    assert not lay.hold(params, dicts)


def test_a_thing_of_the_users_own_in_place_of_a_tensor_is_seen() -> None:
    params, dicts = tensors(), states()
    lay = Whereabouts(params, dicts)
    dicts[2]["exp_avg"] = "none"
    assert not lay.hold(params, dicts)


def test_a_gradient_without_memory_of_its_own_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([weight], lr=0.1, backend="cpu")
    for _ in range(2):
        weight.grad = torch.ones(3)
        optimizer.step()
    before = weight.detach().clone()

    def inside(grad: Tensor) -> Tensor:
        weight.grad = grad
        for backend, message in (("cpu", "without memory"), ("auto", "cannot be stepped")):
            other = Lamb([weight], lr=0.1, backend=backend)
            for refusing in (optimizer, other) if backend == "cpu" else (other,):
                with pytest.raises(ValueError, match=rf"^param_groups\[0\]\.params\[0\].*{message}"):
                    refusing.step()
        weight.grad = None
        return grad

    torch.func.vmap(inside)(torch.ones(2, 3))
    assert weight.equal(before)
