"""Errors for unknown keywords of constructors; optimizers and compatibility layers have other tests for these."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from bighorn._scaling.policies import ScalePolicy
from bighorn.compat import mindspore
from bighorn.schedules._schedule import Schedule
from tests.support.tables import for_every


def kinds_of(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield from kinds_of(each)
        if not inspect.isabstract(each):
            yield each


KINDS = [kind for base in (Schedule, ScalePolicy) for kind in kinds_of(base)]


def test_all_are_here() -> None:
    assert mindspore.CosineDecayLR in KINDS
    assert len(KINDS) >= 16


@for_every("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_misspelt_keyword_suggests_the_nearest(kind: type[Any]) -> None:
    for name in (field.name for field in fields(kind)):
        with pytest.raises(TypeError, match=rf"{kind.__name__} got an unknown .*'{name}x' \(did you mean '{name}'\?\)"):
            kind(**{f"{name}x": 1})
