"""Each edited checkpoint raises an error that names the wrong value, and the optimizer stays unchanged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.support.cases import Kind
from tests.support.error_checks import refused
from tests.support.tables import for_every

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


STEPS: tuple[Any, ...] = (
    "x",
    None,
    math.nan,
    math.inf,
    -1,
    -1.0,
    torch.tensor(math.nan),
    torch.tensor(1e38),
    torch.ones(2),
    torch.tensor(1j),
    [],
    torch.tensor([]),
    torch.empty(1, device="meta"),
    torch.tensor(1.0).to_sparse(),
)
MOMENTS: tuple[Any, ...] = (
    "x",
    None,
    1.0,
    torch.ones(3),
    torch.ones(SHAPE, dtype=torch.int64),
    torch.ones(SHAPE, dtype=torch.complex64),
    torch.ones(SHAPE).to_sparse(),
    torch.ones(SHAPE, device="meta"),
)
EDITS: dict[str, tuple[str, Edit]] = {
    "no-state": ("'state'", lambda saved: saved.pop("state")),
    "no-groups": ("'param_groups'", lambda saved: saved.pop("param_groups")),
    "state-list": ("'state'", top(state=[])),
    "state-text": ("'state'", top(state="x")),
    "groups-dict": ("'param_groups'", top(param_groups={})),
    "groups-none": ("'param_groups'", top(param_groups=None)),
    "group-text": (r"param_groups\[0\]", top(param_groups=["x"])),
    "no-params": (r"param_groups\[0\].*'params'", lambda saved: saved["param_groups"][0].pop("params")),
    "params-text": ("'params'", group(params="abc")),
    "params-short": ("(?i)group", group(params=[0])),
    "params-twice": ("1", group(params=[0, 0, 2])),
    "params-lists": (r"its params hold \[0\], where an index or a name must be", group(params=[[0], 1, 2])),
    "params-texts": ("param_groups", group(params=["a", "b", "c"])),
    "one-group-more": (
        "groups",
        lambda saved: saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0])),
    ),
    "no-group": ("groups", lambda saved: saved["param_groups"].clear()),
    "names-short": (r"param_groups\[0\].*2 names for 3 parameters", group(param_names=["a", "b"])),
    "names-numbers": ("param_names", group(param_names=[1, 2, 3])),
    "names-number": (r"param_groups\[0\].*in a list", group(param_names=3)),
    "names-text": (r"param_groups\[0\].*in a list", group(param_names="abc")),
    "names-tensor": (r"param_groups\[0\].*in a list", group(param_names=torch.ones(3))),
    "names-twice": (r"param_groups\[0\].*2 parameters called 'a'", group(param_names=["a", "b", "a"])),
    "names-lists": ("param_names", group(param_names=[[], [], []])),
    "misspelt-option": ("'weight_decays' .did you mean 'weight_decay'", group(weight_decays=0.1)),
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
    "betas-out-of-range": ("betas", group(betas=(2.0, 2.0))),
    "entry-text": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: "x"})),
    "entry-list": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: [1]})),
    "entry-none": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: None})),
    "entry-tensor": ("damaged: its state of 0 is a", lambda saved: saved["state"].update({0: torch.ones(3)})),
    "entry-of-no-parameter": (
        "damaged: it has a state of 99",
        lambda saved: saved["state"].update({99: saved["state"][0]}),
    ),
    "entry-of-nothing": ("state of 7", lambda saved: saved["state"].update({7: {}})),
    **{f"step-{index}": ("'step'", state(step=value)) for index, value in enumerate(STEPS)},
    **{f"moment-{index}": ("'exp_avg'", state(exp_avg=value)) for index, value in enumerate(MOMENTS)},
    "codes-without-scales": ("'exp_avg'", state(exp_avg=torch.ones(SHAPE, dtype=torch.int8))),
    "scales-without-codes": ("'exp_avg'", state(exp_avg_scale=torch.ones(2))),
    "scales-of-another-shape": ("'exp_avg'", codes(torch.ones(1, 64, 1))),
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
