"""Errors for checkpoints: each names the wrong value, and the optimizer stays unchanged."""

from __future__ import annotations

import copy
import math
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


@pytest.mark.parametrize("sizes", [[2], [1, 2], [2, 1]], ids=str)
def test_groups_of_other_sizes_name_both_and_the_remedy(kind: Kind, sizes: list[int]) -> None:
    parameters, optimizer = stepped(kind, "reference")
    others = kind([{"params": [Parameter(torch.ones(2)) for _ in range(size)]} for size in sizes], lr=0.1)
    numbers = re.escape(f"{sizes} parameters, and this optimizer's have [{len(parameters)}]")
    with refused(parameters, optimizer, ValueError, f"{numbers}: make the groups of the run that saved them"):
        optimizer.load_state_dict(others.state_dict())


@for_every("state", [{}, {"model": 1}, "state"], ids=str)
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
    parameters, optimizer = stepped(kind)
    sgd = torch.optim.SGD(parameters, momentum=0.9, nesterov=True)
    with refused(parameters, optimizer, (ValueError, TypeError), "dampening" if kind is Lars else "momentum"):
        optimizer.load_state_dict(sgd.state_dict())


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


# ---- edited by hand ----------------------------------------------------------------------------------------------

SHAPE = (64, 80)
Edit = Callable[[dict[str, Any]], object]


def top(**values: Any) -> Edit:
    return lambda saved: saved.update(values)


def group(**values: Any) -> Edit:
    return lambda saved: saved["param_groups"][0].update(values)


def state(**values: Any) -> Edit:
    return lambda saved: saved["state"][0].update(values)


def codes(scales: Any) -> Edit:
    return state(exp_avg=torch.ones(SHAPE, dtype=torch.int8), exp_avg_scale=scales)


STEPS: list[Any] = ["x", None, math.nan, math.inf, -1, -1.0, torch.tensor(math.nan), torch.tensor(1e38), torch.ones(2)]
STEPS += [torch.tensor(1j), [], torch.tensor([]), torch.empty(1, device="meta"), torch.tensor(1.0).to_sparse()]
MOMENTS: list[Any] = ["x", None, 1.0, torch.ones(3), torch.ones(SHAPE, dtype=torch.int64)]
MOMENTS += [torch.ones(SHAPE, dtype=torch.complex64), torch.ones(SHAPE).to_sparse(), torch.ones(SHAPE, device="meta")]
EDITS: dict[str, tuple[str, Edit]] = {
    "no-state": ("'state'", lambda saved: saved.pop("state")),
    "no-groups": ("'param_groups'", lambda saved: saved.pop("param_groups")),
    "state-list": ("'state'", top(state=[])),
    "groups-dict": ("'param_groups'", top(param_groups={})),
    "group-text": (r"param_groups\[0\]", top(param_groups=["x"])),
    "no-params": (r"param_groups\[0\].*'params'", lambda saved: saved["param_groups"][0].pop("params")),
    "params-text": ("'params'", group(params="abc")),
    "params-short": ("(?i)group", group(params=[0])),
    "params-twice": ("1", group(params=[0, 0, 2])),
    "params-lists": (r"its params hold \[0\], where an index or a name must be", group(params=[[0], 1, 2])),
    "params-texts": ("param_groups", group(params=["a", "b", "c"])),
    "no-group": ("groups", lambda saved: saved["param_groups"].clear()),
    "names-short": (r"param_groups\[0\].*2 names for 3 parameters", group(param_names=["a", "b"])),
    "names-numbers": ("param_names", group(param_names=[1, 2, 3])),
    "names-number": (r"param_groups\[0\].*in a list", group(param_names=3)),
    "names-text": (r"param_groups\[0\].*in a list", group(param_names="abc")),
    "names-tensor": (r"param_groups\[0\].*in a list", group(param_names=torch.ones(3))),
    "names-twice": (r"param_groups\[0\].*2 parameters called 'a'", group(param_names=["a", "b", "a"])),
    "names-lists": ("param_names", group(param_names=[[], [], []])),
    "amsgrad": ("amsgrad", group(amsgrad=0.5)),
    "fused": ("fused", group(fused=0.5)),
    "unknown-number": ("3", lambda saved: saved["param_groups"][0].update({3: 1})),
    **{
        f"version-{version!r}": (
            rf"param_groups\[0\] cannot be used: format_version={version!r}, but this bighorn reads 1 and older",
            group(format_version=version),
        )
        for version in (2, 99, 0, "1", None, True, 1.0)
    },
    "count-text": ("schedule_step", group(schedule_step="x")),
    "count-negative": (r"param_groups\[0\].*schedule_step=-1", group(schedule_step=-1)),
    "count-none": ("schedule_step", group(schedule_step=None)),
    **{
        f"{name}-{value!r}": (name, group(**{name: value}))
        for name in ("lr", "betas", "eps", "weight_decay", "maximize", "stacked", "weight_rounding", "rounding_seed")
        for value in ("x", math.nan, -1)
    },
    "entry-text": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: "x"})),
    "entry-none": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: None})),
    "entry-tensor": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: torch.ones(3)})),
    "entry-of-no-parameter": (
        "damaged: it has a state of 99",
        lambda saved: saved["state"].update({99: saved["state"][0]}),
    ),
    "entry-of-nothing": ("state of 7", lambda saved: saved["state"].update({7: {}})),
    **{f"step-{index}": ("'step'", state(step=value)) for index, value in enumerate(STEPS)},
    **{f"moment-{index}": ("'exp_avg'", state(exp_avg=value)) for index, value in enumerate(MOMENTS)},
    "scales-without-codes": ("'exp_avg'", state(exp_avg_scale=torch.ones(2))),
    "scales-sparse": ("'exp_avg_scale'", codes(torch.ones(64, 1).to_sparse())),
    "scales-without-values": ("'exp_avg_scale'", codes(torch.ones(64, 1, device="meta"))),
}


@pytest.mark.parametrize("named", [True, False])
@for_every("edit", EDITS)
def test_an_edited_checkpoint_is_refused(edit: str, named: bool, kind: Kind) -> None:
    message, change = EDITS[edit]
    params = [Parameter(torch.ones(shape)) for shape in (SHAPE, (5,), (4, 4))]
    optimizer = kind(list(zip("abc", params, strict=True)) if named else params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    with refused(params, optimizer, ValueError, message):
        optimizer.load_state_dict(saved)
    optimizer.step()
