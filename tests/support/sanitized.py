"""`make sanitize`: tests of the C library under AddressSanitizer and UndefinedBehaviorSanitizer.

A finding of a sanitizer ends the process. The sanitizers also prevent vectorization, so float32 sums round differently
and some comparisons with the reference miss their bounds: a failed assertion is reported as expected.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SANITIZED, WORKBENCH = ROOT / "build" / "sanitized", ROOT / "workbench" / "src"


def environment() -> Mapping[str, str]:
    """Return the variables for `python -S`, which skips the editable install and imports the sanitized library."""
    preloaded = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "ASAN_OPTIONS": "detect_leaks=0",  # leaks of Python and torch
        "LD_PRELOAD": " ".join(preloaded),
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join(map(str, (SANITIZED, WORKBENCH, sysconfig.get_path("purelib")))),
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def command(*arguments: str) -> list[str]:
    """Return the command of pytest for `environment()`."""
    return [sys.executable, "-S", "-m", "pytest", "--capture=sys", "-p", "no:cacheprovider", *arguments]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Any:
    """Report a failed assertion as expected, if this module is a plugin of pytest."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(AssertionError):
        report.outcome, report.wasxfail = "skipped", "sums are not vectorized under sanitizers"
    return report


def main() -> int:
    """Run pytest with the arguments of the command line."""
    run = command("-p", "tests.support.sanitized", *sys.argv[1:])
    return subprocess.run(run, cwd=ROOT, env={**os.environ, **environment()}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
