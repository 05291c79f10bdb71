"""Reports change nothing: a run with every report at every point equals the run without, also in its errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from bighorn import telemetry
from bighorn.schedules import Cosine
from tests.support.cases import Kind, Optimizer
from tests.support.optimizer_runs import assert_same_everything, backward, figures, model

REPORTS: dict[str, Callable[[Optimizer], object]] = {
    "explain": lambda optimizer: optimizer.explain(),
    "telemetry": lambda optimizer: optimizer.telemetry(),
    "as_dict": lambda optimizer: optimizer.telemetry().as_dict(),
    "scalars": telemetry.scalars,
    "repr": repr,
    "dir": dir,
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "state_bytes": lambda optimizer: type(optimizer).state_bytes(optimizer.param_groups[0]["params"]),
    "deepcopy": copy.deepcopy,
}


def written(optimizer: Optimizer, **options: Any) -> None:
    optimizer.param_groups[0].update(options)


def stepped_one(net: nn.Module, optimizer: Optimizer) -> None:
    backward(net)
    optimizer.step_param(next(net.parameters()))


def stepped(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    backward(net)
    optimizer.step()


Action = Callable[[nn.Module, Optimizer], object]

HISTORY: list[tuple[str, Action]] = [
    ("first step", stepped),
    ("a number written", lambda _, optimizer: written(optimizer, lr=0.2)),
    ("a step at a number", stepped),
    ("a schedule written", lambda _, optimizer: written(optimizer, lr=Cosine(0.1, 9))),
    ("a step of a schedule", stepped),
    ("an option that needs another plan", lambda _, optimizer: written(optimizer, grad_centralization=True)),
    ("a step of another plan", stepped),
    ("a parameter ahead of the others", stepped_one),
    ("the rest of the step", lambda _, optimizer: optimizer.step()),
    ("an option removed", lambda _, optimizer: optimizer.param_groups[0].pop("weight_decay")),
    ("a step with a default", stepped),
    ("a checkpoint", lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))),
    ("a step after a checkpoint", stepped),
    ("a misspelt option", lambda _, optimizer: written(optimizer, weight_decya=0.1)),
    ("an error", stepped),
    ("a correction", lambda _, optimizer: optimizer.param_groups[0].pop("weight_decya")),
    ("a step after an error", stepped),
]


def outcome(action: Callable[..., object], *args: object) -> str | None:
    try:
        action(*args)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def made(kind: Kind) -> tuple[nn.Module, Optimizer]:
    net = model()
    return net, kind(list(net.named_parameters()), lr=0.1, weight_decay=0.1)


def own(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_changes_nothing(report: str, kind: Kind, backend: str) -> None:
    if backend == "triton":
        pytest.skip("reports do not depend on kernels, whose interpreter takes long")
    (ours, one), (theirs, two) = made(kind), made(kind)
    for at, act in HISTORY:
        before = [(list(group), own(group)) for group in one.param_groups], dict(one.state), one.telemetry()
        outcome(REPORTS[report], one)
        after = [(list(group), own(group)) for group in one.param_groups], dict(one.state), one.telemetry()
        assert before[:2] == after[:2], at
        assert before[2].names == after[2].names, at
        assert all(a.equal(b) for a, b in zip(figures(before[2]).values(), figures(after[2]).values(), strict=True)), at
        assert outcome(act, ours, one) == outcome(act, theirs, two), at
        assert_same_everything(list(ours.parameters()), one, list(theirs.parameters()), two)
