"""Optimizers load an edited state dict completely, or raise a documented error and stay unchanged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from tests.support.attack_settings import tries
from tests.support.cases import KINDS, Kind, Optimizer
from tests.support.damage import edits
from tests.support.error_checks import same, snapshot

DOCUMENTED = (TypeError, ValueError)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"state_dtype": "int8", "min_8bit_size": 1},
    {"state_dtype": torch.bfloat16},
    {"max_grad_norm": 1.0},
]


def stepped(kind: Kind, options: dict[str, Any]) -> tuple[list[Parameter], Optimizer]:
    generator = torch.Generator().manual_seed(1)
    named = [(f"p{i}", Parameter(torch.randn(s, generator=generator))) for i, s in enumerate(((4, 3), (5,), (2, 2, 3)))]
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:], "weight_decay": 0.5}]
    optimizer: Optimizer = kind(groups, lr=0.1, weight_decay=0.1, **options)
    parameters = [p for _, p in named]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    return parameters, optimizer


def refused(parameters: list[Parameter], optimizer: Optimizer, call: Callable[[], object]) -> bool:
    """Return whether the call was refused, and check that a refused call changed nothing."""
    before = snapshot(parameters, optimizer)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except DOCUMENTED:
        unchanged = same(snapshot(parameters, optimizer), before)
    else:
        return False
    assert unchanged, "the optimizer has refused a state, and has changed"
    return True


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@tries(400)
@given(data=st.data())
def test_an_edited_state_is_loaded_or_refused(kind: Kind, data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(OPTIONS))
    parameters, optimizer = stepped(kind, options)
    state = data.draw(edits(copy.deepcopy(optimizer.state_dict())))
    if not refused(parameters, optimizer, lambda: optimizer.load_state_dict(state)):
        refused(parameters, optimizer, optimizer.step)
        copy.deepcopy(optimizer.state_dict())
