"""MindSpore's schedules: the equal schedules of bighorn, MindSpore's examples, and errors."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest

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

Pair = tuple[schedules.Schedule, schedules.Schedule]
PAIRS: tuple[Pair, ...] = (
    (PolynomialDecayLR(0.1, 0.01, 4, 0.5), schedules.Polynomial(0.1, 4, 0.01, 0.5)),
    (PolynomialDecayLR(0.1, 0.01, 4, 0.5, True), schedules.Polynomial(0.1, 4, 0.01, 0.5, update_decay_steps=True)),
    (WarmUpLR(0.1, 4), schedules.WarmUp(0.1, 4)),
    (CosineDecayLR(0.01, 0.1, 4), schedules.Cosine(0.1, 4, end_lr=0.01)),
    (ExponentialDecayLR(0.1, 0.9, 4), schedules.Exponential(0.1, 0.9, 4)),
    (ExponentialDecayLR(0.1, 0.9, 4, True), schedules.Exponential(0.1, 0.9, 4, staircase=True)),
    (NaturalExpDecayLR(0.1, 0.9, 4), schedules.NaturalExp(0.1, 0.9)),
    (NaturalExpDecayLR(0.1, 0.9, 4, True), schedules.NaturalExp(0.1, 0.9, stair_steps=4)),
    (InverseDecayLR(0.1, 0.9, 4), schedules.Inverse(0.1, 0.9, 4)),
    (InverseDecayLR(0.1, 0.9, 4, True), schedules.Inverse(0.1, 0.9, 4, staircase=True)),
)
"""Each schedule with each switch, and bighorn's, which `tests/math/test_schedules.py` computes again."""


@for_every(("theirs", "ours"), PAIRS)
def test_it_is_ours_and_a_value(theirs: schedules.Schedule, ours: schedules.Schedule) -> None:
    assert isinstance(theirs, schedules.Schedule)
    assert theirs.as_list(14) == ours.as_list(14)
    assert copy.deepcopy(theirs) == pickle.loads(pickle.dumps(theirs)) == eval(repr(theirs)) == theirs
    assert len({theirs, copy.copy(theirs)}) == 1
    assert theirs.after_warmup(2)(2) == ours(0)


POLYNOMIAL = {"learning_rate": 0.1, "end_learning_rate": 0.01, "decay_steps": 4, "power": 0.5}
DECAY = {"learning_rate": 0.1, "decay_rate": 0.9, "decay_steps": 4}
GOOD: dict[Any, dict[str, Any]] = {
    PolynomialDecayLR: POLYNOMIAL,
    CosineDecayLR: {"min_lr": 0.01, "max_lr": 0.1, "decay_steps": 4},
    WarmUpLR: {"learning_rate": 0.1, "warmup_steps": 4},
    **dict.fromkeys((ExponentialDecayLR, NaturalExpDecayLR, InverseDecayLR), DECAY),
}
INTEGERS = ((4.0, TypeError, " must be an integer"), (True, TypeError, " must be an integer"), (0, ValueError, "=0"))
FLOATS = (
    (1, TypeError, " must be a float"),
    ("0.1", TypeError, " must be a float"),
    (-0.1, ValueError, "=-0.1"),
    (math.nan, ValueError, "=nan"),
    (0.0, ValueError, "=0.0"),
)
ERRORS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (kind, {name: wrong}, error, f"{name}{message}")
    for kind, arguments in GOOD.items()
    for name, value in arguments.items()
    for wrong, error, message in (INTEGERS if isinstance(value, int) else FLOATS)
    if not (wrong == 0.0 and name in ("end_learning_rate", "min_lr"))
]
ERRORS += [(kind, {"is_stair": 1}, TypeError, "is_stair must be") for kind, given in GOOD.items() if given is DECAY]
ERRORS += [
    (PolynomialDecayLR, {"update_decay_steps": 1}, TypeError, "update_decay_steps must be"),
    (CosineDecayLR, {"min_lr": 0.2}, ValueError, "min_lr=0.2 must be below max_lr=0.1"),
]


@for_every(("kind", "arguments", "error", "message"), ERRORS)
def test_errors(kind: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        kind(**{**GOOD[kind], **arguments})


def test_the_least_values_are_taken() -> None:
    assert PolynomialDecayLR(0.1, 0.0, 1, 1.0).as_list(2) == [0.1, 0.0]
    assert CosineDecayLR(0.0, 0.1, 1).as_list(2) == [0.1, 0.0]
