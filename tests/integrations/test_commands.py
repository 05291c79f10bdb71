"""`python -m bighorn.integrations.timm`: its usage and errors, for which timm need not be installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import Outcome, outcomes

USAGE = "usage: python -m bighorn.integrations.timm SCRIPT [arguments of the script]\n"


def run(*arguments: str, without_timm: bool = False) -> Outcome:
    lines = ["import runpy, sys", "sys.modules['timm'] = None"][: 1 + without_timm]
    start = "; ".join([*lines, "runpy.run_module('bighorn.integrations.timm', run_name='__main__', alter_sys=True)"])
    [ended] = outcomes(start, [arguments])
    return ended


def test_help_is_printed() -> None:
    done = run("--help")
    assert (done.code, done.errors) == (0, "")
    assert done.output.startswith(USAGE)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "error: SCRIPT is missing\n"),
        (("absent.py", "--opt", "lamb"), "error: absent.py is no file\n"),
        (("--opt", "lamb"), "error: --opt is no file\n"),
        ((str(Path(__file__).parent),), f"error: {Path(__file__).parent} is no file\n"),
    ],
)
def test_a_script_that_is_none_is_named(arguments: tuple[str, ...], error: str) -> None:
    done = run(*arguments)
    assert (done.code, done.output) == (1, "")
    assert done.errors.startswith(USAGE)
    assert done.errors.endswith(f"\n\n{error}")


def test_without_timm_one_line_says_so() -> None:
    done = run(__file__, without_timm=True)
    assert (done.code, done.output) == (1, "")
    assert done.errors.startswith("error: timm cannot be imported: ")
    assert done.errors.count("\n") == 1
