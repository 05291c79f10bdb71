"""Random cases, three steps each, on every CPU backend, compared with the float64 reference."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.backends.test_backends import check_steps
from tests.support.attack_settings import tries
from tests.support.cases import Case
from tests.support.random_cases import cases

ROUNDINGS = 4.0
"""Factor of the tolerances: rounding errors average out less in tensors with fewer elements than the table's."""


@pytest.mark.parametrize("backend", ["foreach", "cpu"], indirect=True)
@tries(300)
@given(case=cases())
def test_a_random_case_equals_the_float64_reference(backend: str, case: Case) -> None:
    if case.runs_on(backend):
        check_steps(backend, case, ROUNDINGS)
