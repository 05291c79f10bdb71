"""Random cases, three steps each, on every backend of the CPU against the float64 reference."""

from __future__ import annotations

import pytest
from hypothesis import given

from attack.random_cases import cases
from attack.tries import tries
from cases import Case
from test_backends import check_steps

ROUNDINGS = 4.0
"""In tensors of few elements errors of rounding do not average out as in those of the table."""


@pytest.mark.parametrize("backend", ["foreach", "cpu"], indirect=True)
@tries(300)
@given(case=cases())
def test_a_random_case_equals_the_float64_reference(backend: str, case: Case) -> None:
    if case.runs_on(backend):
        check_steps(backend, case, ROUNDINGS)
