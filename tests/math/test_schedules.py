"""Compares each schedule with values from formulas."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import bighorn
from bighorn import schedules
from bighorn.schedules import (
    Chain,
    Cosine,
    Exponential,
    Inverse,
    NaturalExp,
    PiecewiseConstant,
    Polynomial,
    RelativeStep,
    Scaled,
    Schedule,
    Values,
    WarmUp,
    large_batch,
    scaled_lr,
)
from bighorn.schedules import _values as values
from tests.support.processes import LIMIT
from tests.support.tables import for_every

# ---- formulas ----------------------------------------------------------------------------------------------------

# A schedule and its values at some steps: the first, both sides of D or of a boundary, and far beyond.
FORMULAS: list[tuple[Schedule, dict[int, float]]] = [
    (
        Exponential(0.1, 0.9, 4),
        {0: 0.1, 1: 0.1 * 0.9**0.25, 3: 0.1 * 0.9**0.75, 4: 0.09, 5: 0.1 * 0.9**1.25, 8: 0.081, 40: 0.1 * 0.9**10},
    ),
    (
        Exponential(0.1, 0.9, 4, staircase=True),
        {0: 0.1, 3: 0.1, 4: 0.09, 5: 0.09, 7: 0.09, 8: 0.081, 43: 0.1 * 0.9**10},
    ),
    (Exponential(1e-5, 10.0, 100), {0: 1e-5, 50: 1e-5 * math.sqrt(10), 100: 1e-4, 500: 1.0}),
    (
        NaturalExp(0.1, 0.9),
        {0: 0.1, 1: 0.1 * math.exp(-0.9), 2: 0.1 * math.exp(-1.8), 10: 0.1 * math.exp(-9), 10**6: 0.0},
    ),
    (
        NaturalExp(0.1, 0.9, stair_steps=4),
        {0: 0.1, 3: 0.1, 4: 0.1 * math.exp(-3.6), 5: 0.1 * math.exp(-3.6), 9: 0.1 * math.exp(-7.2)},
    ),
    (Inverse(0.1, 0.5, 4), {0: 0.1, 2: 0.1 / 1.25, 3: 0.1 / 1.375, 4: 0.1 / 1.5, 5: 0.1 / 1.625, 40: 0.1 / 6}),
    (Inverse(0.1, 0.5, 4, staircase=True), {0: 0.1, 3: 0.1, 4: 0.1 / 1.5, 7: 0.1 / 1.5, 8: 0.1 / 2, 43: 0.1 / 6}),
    (
        Cosine(0.1, 4),
        {0: 0.1, 1: 0.05 * (1 + math.sqrt(0.5)), 2: 0.05, 3: 0.05 * (1 - math.sqrt(0.5)), 4: 0.0, 5: 0.0, 99: 0.0},
    ),
    (Cosine(0.1, 6, end_lr=0.01), {0: 0.1, 2: 0.01 + 0.045 * 1.5, 3: 0.055, 4: 0.01 + 0.045 * 0.5, 6: 0.01, 7: 0.01}),
    (Polynomial(0.1, 4), {0: 0.1, 1: 0.075, 3: 0.025, 4: 0.0, 5: 0.0, 99: 0.0}),
    (
        Polynomial(0.1, 4, end_lr=0.01, power=0.5),
        {0: 0.1, 1: 0.09 * math.sqrt(0.75) + 0.01, 3: 0.09 * 0.5 + 0.01, 4: 0.01, 5: 0.01, 99: 0.01},
    ),
    (Polynomial(0.01, 4, end_lr=0.1), {0: 0.01, 1: 0.0325, 4: 0.1, 5: 0.1}),
    (
        Polynomial(0.1, 4, end_lr=0.01, power=2.0, update_decay_steps=True),
        {
            0: 0.1,
            3: 0.09 / 16 + 0.01,
            4: 0.01,
            5: 0.09 * (3 / 8) ** 2 + 0.01,  # D is 8 from here on
            7: 0.09 / 64 + 0.01,
            8: 0.01,
            9: 0.09 * (3 / 12) ** 2 + 0.01,  # D is 12
            12: 0.01,
            13: 0.09 * (3 / 16) ** 2 + 0.01,
        },
    ),
    (WarmUp(0.1, 4), {0: 0.0, 1: 0.025, 3: 0.075, 4: 0.1, 5: 0.1, 99: 0.1}),
    (WarmUp(0.1, 4, from_zero=False), {0: 0.025, 2: 0.075, 3: 0.1, 4: 0.1, 99: 0.1}),
    (WarmUp(0.1, 1, from_zero=False), {0: 0.1, 1: 0.1}),
    (PiecewiseConstant([2, 5], [0.3, 0.2, 0.1]), {0: 0.3, 1: 0.3, 2: 0.2, 4: 0.2, 5: 0.1, 6: 0.1, 99: 0.1}),
    (PiecewiseConstant([], [0.3]), {0: 0.3, 99: 0.3}),
    (Values([0.3, 0.0, 0.1]), {0: 0.3, 1: 0.0, 2: 0.1}),
    (RelativeStep(), {0: 0.01, 9999: 0.01, 39999: 0.005}),
    (RelativeStep(warmup_init=True), {0: 1e-6, 2: 3e-6, 39999: 0.005}),
    (Scaled(WarmUp(0.1, 4), 0.5), {0: 0.0, 1: 0.0125, 4: 0.05, 99: 0.05}),
    (2 * WarmUp(0.1, 2).then(Polynomial(0.1, 4), at=2), {1: 0.1, 3: 0.15}),
    (WarmUp(0.1, 2).then(Polynomial(0.1, 4), at=2), {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.075, 5: 0.025, 6: 0.0, 7: 0.0}),
    (Polynomial(0.1, 4).after_warmup(2), {0: 0.05, 1: 0.1, 2: 0.1, 3: 0.075, 5: 0.025, 6: 0.0, 7: 0.0}),
    (
        WarmUp(0.1, 2).then(Cosine(0.1, 2), at=2).then(PiecewiseConstant([1], [0.2, 0.3]), at=3),
        {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.2, 4: 0.3, 99: 0.3},
    ),
    (
        WarmUp(0.1, 2).then(Cosine(0.1, 2).then(PiecewiseConstant([], [0.2]), at=1), at=2),
        {0: 0.0, 1: 0.05, 2: 0.1, 3: 0.2, 99: 0.2},
    ),
]
EACH = for_every("schedule", [schedule for schedule, _ in FORMULAS], ids=repr)


@for_every(("schedule", "expected"), FORMULAS, ids=[repr(schedule) for schedule, _ in FORMULAS])
def test_formula(schedule: Schedule, expected: dict[int, float]) -> None:
    for step, value in expected.items():
        assert schedule(step) == pytest.approx(value, rel=1e-14, abs=1e-300 if value else 1e-17), step


def test_every_schedule_is_in_the_table() -> None:
    kinds = {thing for thing in map(vars(schedules).get, schedules.__all__) if isinstance(thing, type)}
    assert {type(schedule) for schedule, _ in FORMULAS} == kinds - {Schedule}


# ---- objects -----------------------------------------------------------------------------------------------------


@EACH
def test_a_schedule_is_a_value(schedule: Schedule) -> None:
    forwards = schedule.as_list(3)
    assert [schedule(step) for step in (2, 1, 0)] == forwards[::-1]
    assert all(type(value) is float for value in forwards)
    for twin in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule), eval(repr(schedule))):
        assert twin == schedule
        assert hash(twin) == hash(schedule)
        assert twin.as_list(3) == forwards
    assert schedule != WarmUp(0.7, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.lr = 1.0  # type: ignore[attr-defined]


def test_as_list_of_nothing() -> None:
    assert WarmUp(0.1, 2).as_list(0) == []


@for_every("number", [1, np.float32(1), np.float64(1), torch.tensor(1.0), torch.tensor(1), Fraction(1)])
def test_other_kinds_of_numbers_are_the_same_schedule(number: Any) -> None:
    assert repr(Exponential(number, number, 3)) == "Exponential(lr=1.0, decay_rate=1.0, decay_steps=3, staircase=False)"
    assert Values([number]) == Values((1.0,))


@pytest.mark.parametrize("steps", [np.int64(3), torch.tensor(3)])
def test_other_kinds_of_integers_are_the_same_step(steps: Any) -> None:
    assert repr(WarmUp(1.0, steps)) == "WarmUp(lr=1.0, warmup_steps=3, from_zero=True)"
    assert WarmUp(1.0, 6)(steps) == 0.5


@for_every(
    "values",
    [
        [0.5, 0.25, 1],
        (0.5, 0.25, 1),
        (value for value in (0.5, 0.25, 1.0)),
        np.array([0.5, 0.25, 1.0], dtype=np.float16),
        torch.tensor([0.5, 0.25, 1.0], dtype=torch.bfloat16, requires_grad=True),
        list(torch.tensor([0.5, 0.25, 1.0])),
        {0.5: "a dict's keys come in order, and so do its", 0.25: "views", 1.0: ""}.__iter__(),
    ],
    ids=lambda values: type(values).__name__,
)
def test_values_of_any_iterable(values: Iterable[float]) -> None:
    assert Values.of(values) == Values((0.5, 0.25, 1.0))


def test_a_list_that_changes_later_does_not_change_the_schedule() -> None:
    values, boundaries = [0.1, 0.2], [1]
    kept, pieces = Values.of(values), PiecewiseConstant(boundaries, values)
    values[0], boundaries[0] = 9.0, 9
    assert kept.as_list(2) == pieces.as_list(2) == [0.1, 0.2]


def test_any_callable_can_follow() -> None:
    schedule = WarmUp(0.1, 2).then(lambda step: step, at=2)
    assert schedule.as_list(5) == [0.0, 0.05, 0.0, 1.0, 2.0]


def test_a_schedule_after_no_warmup_is_itself() -> None:
    schedule = Cosine(0.1, 4)
    assert schedule.after_warmup(0) is schedule


@pytest.mark.process
def test_schedules_need_no_torch() -> None:
    """A new interpreter runs the module without the package, which imports torch."""
    code = f"""
import sys, types
package = sys.modules["bighorn"] = types.ModuleType("bighorn")
package.__path__ = [{bighorn.__path__[0]!r}]
from bighorn.schedules import Values
assert Values.of([1.0])(0) == 1.0 and "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT)


# ---- errors ------------------------------------------------------------------------------------------------------

NUMBERS = "it must be a finite number"
COUNTS = "it must be an integer, at least"

untyped: Any = schedules  # for calls that mypy would refuse

BAD: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: Cosine(math.nan, 4), ValueError, f"lr=nan is out of range: {NUMBERS} at least 0"),
    (lambda: Cosine(-0.1, 4), ValueError, f"lr=-0.1 is out of range: {NUMBERS} at least 0"),
    (lambda: Cosine(10**400, 4), ValueError, "is out of range"),
    (lambda: untyped.Cosine("0.1", 4), TypeError, "lr must be a number, not '0.1' (str)"),
    (lambda: Cosine(True, 4), TypeError, "lr must be a number, not True (bool)"),
    (lambda: untyped.Cosine(torch.ones(2), 4), TypeError, "lr must be a number, not [1.0, 1.0] (list)"),
    (lambda: Cosine(0.1, 4, end_lr=-1.0), ValueError, "end_lr=-1.0 is out of range"),
    (lambda: Cosine(0.1, 0), ValueError, f"decay_steps=0 is out of range: {COUNTS} 1"),
    (lambda: untyped.Cosine(0.1, 4.0), TypeError, "decay_steps must be an integer, not 4.0 (float)"),
    (lambda: Exponential(0.1, 0.0, 4), ValueError, f"decay_rate=0.0 is out of range: {NUMBERS} above 0"),
    (lambda: untyped.Exponential(0.1, 0.9, 4, staircase=1), TypeError, "staircase must be True or False, not 1 (int)"),
    (lambda: NaturalExp(0.1, 0.9, 0), ValueError, f"stair_steps=0 is out of range: {COUNTS} 1"),
    (lambda: Inverse(0.1, -0.9, 4), ValueError, f"decay_rate=-0.9 is out of range: {NUMBERS} above 0"),
    (lambda: Polynomial(0.1, 4, power=0), ValueError, f"power=0 is out of range: {NUMBERS} above 0"),
    (
        lambda: untyped.Polynomial(0.1, 4, update_decay_steps=None),
        TypeError,
        "update_decay_steps must be True or False",
    ),
    (lambda: WarmUp(0.1, 0), ValueError, f"warmup_steps=0 is out of range: {COUNTS} 1"),
    (lambda: untyped.WarmUp(0.1, 3, from_zero="no"), TypeError, "from_zero must be True or False, not 'no' (str)"),
    (lambda: untyped.RelativeStep(1), TypeError, "warmup_init must be True or False, not 1 (int)"),
    (lambda: PiecewiseConstant([3, 3], [1, 2, 3]), ValueError, "boundaries=(3, 3) must ascend, each step once"),
    (lambda: PiecewiseConstant([0], [1, 2]), ValueError, f"boundaries[0]=0 is out of range: {COUNTS} 1"),
    (lambda: untyped.PiecewiseConstant([1.5], [1, 2]), TypeError, "boundaries[0] must be an integer, not 1.5"),
    (lambda: PiecewiseConstant([1], [1]), ValueError, "values must be one more than boundaries, but they are 1 for 1"),
    (lambda: PiecewiseConstant([1], [1, -1]), ValueError, "values[1]=-1 is out of range"),
    (lambda: untyped.PiecewiseConstant(3, [1, 2]), TypeError, "boundaries must be a list or a tuple"),
    (lambda: Values([]), ValueError, "values is empty"),
    (lambda: Values.of([0.1, math.nan]), ValueError, f"values[1]=nan is out of range: {NUMBERS} at least 0"),
    (lambda: untyped.Values.of(["0.1"]), TypeError, "values[0] must be a number, not '0.1' (str)"),
    (
        lambda: untyped.Values.of("0123"),
        TypeError,
        "values must be numbers in an order, as a list or a generator, not '0123'",
    ),
    (lambda: Values.of({0.1, 0.2}), TypeError, "values must be numbers in an order"),
    (lambda: Values.of({0: 0.1}), TypeError, "values must be numbers in an order"),
    (lambda: untyped.Values.of(0.1), TypeError, "values must be numbers in an order"),
    (lambda: Values.of(torch.tensor(0.1)), TypeError, "values must be numbers in an order"),
    (lambda: Values.of(torch.ones(2, 2)), TypeError, "values[0] must be a number, not [1.0, 1.0] (list)"),
    (lambda: Values.of(torch.ones(2, dtype=torch.bool)), TypeError, "values[0] must be a number, not True (bool)"),
    (lambda: Values.of(torch.ones(2, dtype=torch.cfloat)), TypeError, "values[0] must be a number, not (1+0j)"),
    (lambda: untyped.Values(iter([0.1])), TypeError, "values must be a list or a tuple of numbers"),
    (lambda: untyped.WarmUp(0.1, 3).then(0.1, at=3), TypeError, "second must be a schedule or another callable"),
    (lambda: WarmUp(0.1, 3).then(Cosine(0.1, 3), at=0), ValueError, f"at=0 is out of range: {COUNTS} 1"),
    (lambda: Cosine(0.1, 3).after_warmup(-1), ValueError, f"warmup_steps=-1 is out of range: {COUNTS} 0"),
    (lambda: Cosine(0.1, 3).as_list(-1), ValueError, f"steps=-1 is out of range: {COUNTS} 0"),
    (lambda: Cosine(0.1, 3)(-1), ValueError, f"step=-1 is out of range: {COUNTS} 0"),
    (lambda: untyped.Cosine(0.1, 3)(1.0), TypeError, "step must be an integer, not 1.0 (float)"),
    (lambda: Cosine(0.1, 3)(True), TypeError, "step must be an integer, not True (bool)"),
    (lambda: Values([0.1] * 3)(3), ValueError, "step=3 is past the end of a schedule of 3 values, for steps 0 to 2"),
    (lambda: Exponential(1.0, 10.0, 1)(400), ValueError, f"Exponential(...)(400)=inf is out of range: {NUMBERS}"),
    (lambda: WarmUp(0.1, 1).then(lambda step: -step, at=1)(3), ValueError, "Chain(...)(3)=-2 is out of range"),
    (lambda: WarmUp(0.1, 1) * -1, ValueError, f"factor=-1 is out of range: {NUMBERS}"),
    (lambda: untyped.WarmUp(0.1, 1) * "x", TypeError, "factor must be a number, not 'x' (str)"),
    (lambda: scaled_lr(0.1, 1, 4, "square"), ValueError, "rule='square' is not known: use 'sqrt' or 'linear'"),
    (lambda: untyped.scaled_lr(0.1, 1, 4, ["sqrt"]), ValueError, "is not known: use 'sqrt' or 'linear'"),
    (lambda: scaled_lr(0.1, 0, 4), ValueError, f"base_batch=0 is out of range: {COUNTS} 1"),
    (lambda: untyped.scaled_lr(0.1, 4, 2.5), TypeError, "batch must be an integer, not 2.5"),
    (lambda: scaled_lr(math.nan, 1, 4), ValueError, "base_lr=nan is out of range"),
    (lambda: large_batch(0.1, 1, 2, steps=0, base_warmup=0.1), ValueError, "steps=0 is out of range"),
    (lambda: large_batch(0.1, 1, 2, steps=9, base_warmup=-0.1), ValueError, "base_warmup=-0.1 is out of range"),
    (
        lambda: large_batch(0.1, 1, 20, steps=9, base_warmup=0.1),
        ValueError,
        "becomes 2 of it at batch 20, which leaves no",
    ),
]


@for_every(("make", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_errors(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert type(caught.value) is error
    assert message in str(caught.value)


def test_an_endless_iterable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_VALUES", 100)
    assert len(Values.of(itertools.repeat(0.1, 100)).as_list(100)) == 100
    with pytest.raises(
        ValueError, match="go on after 100 steps, perhaps without an end: give a schedule or a function"
    ):
        Values.of(itertools.repeat(0.1))


# ---- large batches -----------------------------------------------------------------------------------------------

BATCHES = [512 * 2**i for i in range(7)]

# arXiv:1904.00962v5, Table 4: the learning rate and the share of warm-up, by batch size.
BERT = [(5 / (2 ** (3 - i / 2) * 10**3), Fraction(1, share)) for i, share in enumerate((320, 160, 80, 40, 20, 10, 5))]
# Table 5: the learning rate, and the epochs of warm-up among 90.
RESNET = [(4 / (2 ** (3 - i / 2) * 100), Fraction(5, 16) * 2**i / 90) for i in range(7)]


@pytest.mark.parametrize(("rows", "base_steps"), [(BERT, 10**6), (RESNET, 90 * 2502)], ids=["BERT", "ResNet-50"])
def test_large_batch_gives_the_tables_of_the_paper(rows: list[tuple[float, Fraction]], base_steps: int) -> None:
    base_lr, base_warmup = rows[0]
    for batch, (lr, warmup) in zip(BATCHES, rows, strict=True):
        steps = base_steps * 512 // batch
        schedule = large_batch(base_lr, 512, batch, steps=steps, base_warmup=float(base_warmup))
        assert isinstance(schedule, Chain)
        assert schedule.at == round(warmup * steps)
        assert max(schedule(schedule.at - 1), schedule(schedule.at)) == pytest.approx(lr, rel=1e-14)
        # A linear rise, then a linear fall that would reach 0 one step after the last.
        assert schedule(0) == pytest.approx(lr / schedule.at)
        assert schedule(steps - 1) == pytest.approx(lr / (steps - schedule.at))
        assert schedule(steps) == 0


def test_large_batch_without_warmup_and_by_the_linear_rule() -> None:
    assert large_batch(0.1, 10, 40, steps=8, base_warmup=0.0, rule="linear") == Polynomial(0.4, 8)
