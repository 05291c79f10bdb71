"""Errors for checkpoints."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from bighorn import Came, ConvertedStateWarning, Lamb, Lars
from tests.support.cases import KINDS, Kind
from tests.support.error_checks import refused, stepped, weights
from tests.support.tables import for_every


def test_a_checkpoint_of_another_model(kind: Kind, backend: str) -> None:
    parameters, optimizer = stepped(kind, backend)
    others = [Parameter(torch.ones(n)) for n in (2, 3, 4)]
    other = kind(others, lr=0.7, backend=backend)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    other.step()
    with refused(parameters, optimizer, ValueError, "shape"):
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))


@pytest.mark.parametrize("sizes", [[2], [1, 2], [2, 1]], ids=str)
def test_groups_of_other_sizes_name_both_and_the_remedy(kind: Kind, sizes: list[int]) -> None:
    parameters, optimizer = stepped(kind, "reference")
    others = kind([{"params": [Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes], lr=0.1)
    numbers = re.escape(f"{sizes} parameters, and this optimizer's have [{len(parameters)}]")
    with refused(parameters, optimizer, ValueError, f"{numbers}: make the groups of the run that saved them"):
        optimizer.load_state_dict(others.state_dict())


NO_CHECKPOINT: list[Any] = [
    {},
    {"state": {}},
    {"model": 1},
    "state",
    {"state": None, "param_groups": None},
    {"state": {}, "param_groups": {}},
    {"state": {}, "param_groups": [None]},
    {"state": {}, "param_groups": [{}]},
    {"state": {}, "param_groups": [{"params": None}]},
]


@for_every("state", NO_CHECKPOINT, ids=str)
def test_what_is_no_checkpoint(state: Any, kind: Kind) -> None:
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, (ValueError, TypeError, KeyError), "param_groups|state"):
        optimizer.load_state_dict(state)


PARTS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "no-step": (["step"], {}, "'step'"),
    "no-exp_avg": (["exp_avg"], {}, "'exp_avg'"),
    "no-exp_avg_sq": (["exp_avg_sq"], {}, "'exp_avg_sq'"),
    "misspelt": (["exp_avg_sq"], {"exp_avg_sqr": torch.ones(4, 3)}, "'exp_avg_sq'"),
    "nothing-but-step": (["exp_avg", "exp_avg_sq"], {}, "'exp_avg'"),
    "codes-without-scales": ([], {"exp_avg": torch.ones(4, 3, dtype=torch.int8)}, "'exp_avg'.*int8"),
}


@for_every("part", PARTS)
def test_a_part_of_a_state(part: str, kind: Kind, backend: str) -> None:
    """Such a state would take steps of a wrong size; it is loaded, or a part of it is deleted."""
    missing, more, named = PARTS[part]
    parameters, optimizer = stepped(kind, backend)
    state = copy.deepcopy(optimizer.state_dict())
    if not {*missing} <= state["state"][0].keys():
        return
    for each in (state["state"][0], optimizer.state[parameters[0]]):
        for name in missing:
            del each[name]
        each.update(more)
    with refused(parameters, optimizer, ValueError, named):
        optimizer.step()
    fresh = weights()
    other = kind(fresh, lr=0.1, backend=backend)
    with refused(fresh, other, ValueError, named):
        other.load_state_dict(state)


@pytest.mark.parametrize("name", ["exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col"])
def test_a_statistic_that_is_missing_or_of_another_shape(name: str) -> None:
    parameters, optimizer = stepped(Came)
    for value, message in ((None, f"{name}'.*Load the matching"), (torch.ones(4, 3), f"{name}'.*shape.*options")):
        state = copy.deepcopy(optimizer.state_dict())
        del state["state"][2][name]
        state["state"][2] |= {} if value is None else {name: value}
        with refused(parameters, optimizer, ValueError, message):
            optimizer.load_state_dict(state)


def test_scales_that_are_missing_or_of_another_shape(kind: Kind) -> None:
    """The error does not depend on the group's state_dtype; scales of another block size have another shape."""
    for at_hand in (None, "int8"):
        for scale in ({}, {"exp_avg_scale": torch.ones(3)}, {"exp_avg_scale": torch.ones(64, 2)}):
            parameter = Parameter(torch.ones(64, 64))
            optimizer = kind([parameter], lr=0.1, state_dtype="int8")
            parameter.grad = torch.ones(64, 64)
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
            state["param_groups"][0]["state_dtype"] = at_hand
            del state["state"][0]["exp_avg_scale"]
            state["state"][0] |= scale
            message = "exp_avg.*blocks are not of 256" if scale else "exp_avg.*int8|lacks 'exp_avg_scale'"
            with refused([parameter], optimizer, ValueError, message):
                optimizer.load_state_dict(state)


DAMAGE: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a-code-that-is-never-written": ("exp_avg", lambda codes: codes.fill_(-128), "'exp_avg'.*damaged"),
    "an-infinite-scale": ("exp_avg_scale", lambda scales: scales / 0, "'exp_avg'.*infinite.*damaged"),
    "a-scale-below-0": ("exp_avg_scale", lambda scales: -scales, "'exp_avg'.*damaged"),
    "codes-that-are-floats": ("exp_avg", lambda codes: codes.float(), "'exp_avg'.*float32.*damaged"),
    "codes-of-another-shape": ("exp_avg", lambda codes: codes[:32], "'exp_avg'.*damaged"),
    "twice-as-many-codes": ("exp_avg", lambda codes: codes.repeat(1, 2), "'exp_avg'.*(damaged|another model's)"),
}
INT4 = {**DAMAGE, "a-code-that-is-never-written": ("exp_avg", lambda codes: codes.fill_(0x18), "'exp_avg'.*damaged")}


@for_every("damage", DAMAGE)
@pytest.mark.parametrize("at_hand", [None, "int8", "int4"], ids=str)
@pytest.mark.parametrize("saved", ["int8", "int4"])
def test_damaged_codes(damage: str, saved: Literal["int8", "int4"], at_hand: str | None, kind: Kind) -> None:
    name, spoil, message = (DAMAGE if saved == "int8" else INT4)[damage]
    parameter = Parameter(torch.ones(64, 64))
    optimizer = kind([parameter], lr=0.1, state_dtype=saved)
    parameter.grad = torch.ones(64, 64)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = spoil(state["state"][0][name])
    state["param_groups"][0]["state_dtype"] = at_hand
    with refused([parameter], optimizer, ValueError, message):
        optimizer.load_state_dict(state)


def test_a_checkpoint_of_sgd(kind: Kind) -> None:
    others = weights()
    sgd = torch.optim.SGD(others, momentum=0.9, nesterov=True)
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    sgd.step()
    parameters, optimizer = stepped(kind)
    with refused(parameters, optimizer, (ValueError, TypeError), "dampening" if kind is Lars else "momentum"):
        optimizer.load_state_dict(copy.deepcopy(sgd.state_dict()))


def test_a_checkpoint_of_the_other_optimizer(kind: Kind) -> None:
    """The message names the first option that the optimizer does not have."""
    other = KINDS[KINDS.index(kind) - 1]
    parameters, optimizer = stepped(kind)
    _, theirs = stepped(other)
    have, use = (rf"(\w+ {word} )?{other.__name__}( {word} \w+)?" for word in ("and", "or"))
    message = rf"param_groups\[0\].*'\w+', an option of {have} but not of this optimizer: remove it, or use {use}$"
    with refused(parameters, optimizer, ValueError, message):
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))


@pytest.mark.parametrize("kind", [Lamb, Lars], indirect=True)
def test_codes_in_float16_of_an_earlier_version(kind: Kind) -> None:
    params = [("w", Parameter(torch.ones(64, 64)))]
    optimizer = kind(params, lr=0.1)
    params[0][1].grad = torch.ones(64, 64)
    optimizer.step()
    saved = optimizer.state_dict()
    codes = {"exp_avg": torch.ones(64, 64, dtype=torch.float16), "exp_avg_scale": torch.ones(64, 1)}
    saved["state"][0] = {**saved["state"][0], **codes}
    with refused([params[0][1]], optimizer, ValueError, "'exp_avg' of w has scales.*float16.*Load another checkpoint"):
        optimizer.load_state_dict(saved)
    saved["param_groups"][0]["state_dtype"] = "float16"
    with refused([params[0][1]], optimizer, ValueError, 'state_dtype=\'float16\'.*torch.bfloat16, "int8", "int4"'):
        optimizer.load_state_dict(saved)


def test_moments_of_float16_weights_of_another_package() -> None:
    param = Parameter(torch.ones(64, 64, dtype=torch.float16))
    adamw = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones_like(param)
    adamw.step()
    lamb = Lamb([param], lr=0.1)
    with pytest.warns(ConvertedStateWarning):
        lamb.load_state_dict(adamw.state_dict())
    torch.testing.assert_close(lamb.state[param]["exp_avg"], adamw.state[param]["exp_avg"].float())
