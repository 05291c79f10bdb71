"""`python -m bighorn.integrations.timm`: its usage and errors, for which timm need not be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

USAGE = "usage: python -m bighorn.integrations.timm SCRIPT [arguments of the script]\n"


def run(*arguments: str, without_timm: bool = False) -> subprocess.CompletedProcess[str]:
    lines = ["import runpy, sys", "sys.modules['timm'] = None"][: 1 + without_timm]
    start = "; ".join([*lines, "runpy.run_module('bighorn.integrations.timm', run_name='__main__', alter_sys=True)"])
    return subprocess.run([sys.executable, "-c", start, *arguments], capture_output=True, text=True, check=False)


def test_help_is_printed() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(USAGE)


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
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(USAGE)
    assert done.stderr.endswith(f"\n\n{error}")


def test_without_timm_one_line_says_so() -> None:
    done = run(__file__, without_timm=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: timm cannot be imported: ")
    assert done.stderr.count("\n") == 1
