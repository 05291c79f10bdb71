"""MindSpore's schedules: its own examples, formulas implemented again, errors, and the dataclass interface."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bighorn import schedules
from bighorn.compat.mindspore import (
    CosineDecayLR,
    ExponentialDecayLR,
    InverseDecayLR,
    NaturalExpDecayLR,
    PolynomialDecayLR,
    WarmUpLR,
)
from tests.support.tables import for_every

DECAYS = (ExponentialDecayLR, NaturalExpDecayLR, InverseDecayLR)


def polynomial(s: int, *, update: bool) -> float:
    decay_steps = 4.0
    if update:
        decay_steps *= max(math.ceil(s / 4), 1)
    return float((0.1 - 0.01) * (1 - min(s, decay_steps) / decay_steps) ** 0.5 + 0.01)


CASES: dict[str, tuple[schedules.Schedule, Callable[[int], float]]] = {
    "polynomial": (PolynomialDecayLR(0.1, 0.01, 4, 0.5), lambda s: polynomial(s, update=False)),
    "polynomial-update": (PolynomialDecayLR(0.1, 0.01, 4, 0.5, True), lambda s: polynomial(s, update=True)),
    "warm-up": (WarmUpLR(0.1, 4), lambda s: 0.1 * min(s, 4) / 4),
    "cosine": (CosineDecayLR(0.01, 0.1, 4), lambda s: 0.01 + 0.045 * (1 + math.cos(min(s, 4) / 4 * math.pi))),
    "exponential": (ExponentialDecayLR(0.1, 0.9, 4), lambda s: 0.1 * 0.9 ** (s / 4)),
    "exponential-stair": (ExponentialDecayLR(0.1, 0.9, 4, True), lambda s: 0.1 * 0.9 ** (s // 4)),
    "natural": (NaturalExpDecayLR(0.1, 0.9, 4), lambda s: 0.1 * math.exp(-0.9 * s)),
    "natural-stair": (NaturalExpDecayLR(0.1, 0.9, 4, True), lambda s: 0.1 * math.exp(-0.9 * (s // 4 * 4))),
    "inverse": (InverseDecayLR(0.1, 0.9, 4), lambda s: 0.1 / (1 + 0.9 * s / 4)),
    "inverse-stair": (InverseDecayLR(0.1, 0.9, 4, True), lambda s: 0.1 / (1 + 0.9 * (s // 4))),
}


@for_every("name", CASES)
def test_formulas(name: str) -> None:
    schedule, formula = CASES[name]
    assert schedule.as_list(14) == pytest.approx([formula(step) for step in range(14)], rel=1e-14)


@for_every(
    ("schedule", "printed"),
    [
        (ExponentialDecayLR(0.1, 0.9, 4), 0.09486833),
        (NaturalExpDecayLR(0.1, 0.9, 4, True), 0.1),
        (InverseDecayLR(0.1, 0.9, 4, True), 0.1),
        (CosineDecayLR(0.01, 0.1, 4), 0.055),
        (PolynomialDecayLR(0.1, 0.01, 4, 0.5), 0.07363961),
        (WarmUpLR(0.1, 2), 0.1),
    ],
)
def test_what_its_documents_print(schedule: schedules.Schedule, printed: float) -> None:
    """Each example of the documentation computes step 2, given as a tensor."""
    assert schedule(torch.tensor(2, dtype=torch.int32)) == pytest.approx(printed, abs=1e-8)  # type: ignore[arg-type]


@for_every("name", CASES)
def test_they_are_dataclasses_like_ours(name: str) -> None:
    schedule = CASES[name][0]
    assert isinstance(schedule, schedules.Schedule)
    assert copy.deepcopy(schedule) == pickle.loads(pickle.dumps(schedule)) == eval(repr(schedule)) == schedule
    assert len({schedule, copy.copy(schedule)}) == 1
    assert schedule.after_warmup(2)(2) == schedule(0)


POLYNOMIAL = {"learning_rate": 0.1, "end_learning_rate": 0.01, "decay_steps": 4, "power": 0.5}
DECAY = {"learning_rate": 0.1, "decay_rate": 0.9, "decay_steps": 4}
COSINE = {"min_lr": 0.01, "max_lr": 0.1, "decay_steps": 4}
WARM_UP = {"learning_rate": 0.1, "warmup_steps": 4}


def errors() -> list[tuple[Any, dict[str, Any], type[Exception], str]]:
    rows: list[tuple[Any, dict[str, Any], type[Exception], str]] = []
    good: list[tuple[Any, dict[str, Any]]] = [(PolynomialDecayLR, POLYNOMIAL), (CosineDecayLR, COSINE)]
    good += [(WarmUpLR, WARM_UP), *((decay, DECAY) for decay in DECAYS)]
    for kind, arguments in good:
        for name, value in arguments.items():
            if isinstance(value, int):
                rows += [
                    (kind, {**arguments, name: 4.0}, TypeError, f"{name} must be an integer"),
                    (kind, {**arguments, name: True}, TypeError, f"{name} must be an integer"),
                    (kind, {**arguments, name: 0}, ValueError, f"{name}=0"),
                ]
                continue
            rows += [
                (kind, {**arguments, name: 1}, TypeError, f"{name} must be a float"),
                (kind, {**arguments, name: "0.1"}, TypeError, f"{name} must be a float"),
                (kind, {**arguments, name: -0.1}, ValueError, f"{name}=-0.1"),
                (kind, {**arguments, name: math.nan}, ValueError, f"{name}=nan"),
            ]
            if name not in ("end_learning_rate", "min_lr"):
                rows.append((kind, {**arguments, name: 0.0}, ValueError, f"{name}=0.0"))
    rows += [(decay, {**DECAY, "is_stair": 1}, TypeError, "is_stair must be True or False") for decay in DECAYS]
    rows.append((PolynomialDecayLR, {**POLYNOMIAL, "update_decay_steps": 1}, TypeError, "update_decay_steps must be"))
    rows.append((CosineDecayLR, {**COSINE, "min_lr": 0.2}, ValueError, "min_lr=0.2 must be below max_lr=0.1"))
    return rows


@for_every(("kind", "arguments", "error", "message"), errors())
def test_errors(kind: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        kind(**arguments)


def test_the_least_values_are_taken() -> None:
    assert PolynomialDecayLR(0.1, 0.0, 1, 1.0).as_list(2) == [0.1, 0.0]
    assert CosineDecayLR(0.0, 0.1, 1).as_list(2) == [0.1, 0.0]
