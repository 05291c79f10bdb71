"""The number of examples of an attack and its seed; neither depends on the speed of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis

SEED = int(os.environ.get("ATTACK_SEED", "0"))
"""`make test` uses the default; `make attack` counts up from its own first seed."""

SHARE = 1 if "ATTACK_SEED" in os.environ else 3
"""`make test` runs a third of the examples: its seed is fixed, so they only find what a change has broken."""

Attack = TypeVar("Attack", bound=Callable[..., Any])


def tries(number: int, steps: int = 10) -> Callable[[Attack], Attack]:
    """Set the number of examples in `make attack`; a state machine takes at most `steps` steps in each.

    No state is kept between runs, and no example has a time limit. A failure is shrunk, and printed with its seed.
    """
    settings = hypothesis.settings(
        max_examples=-(-number // SHARE),
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    return lambda attack: hypothesis.seed(SEED)(settings(attack))
