"""The kernels compile with every supported version of Triton; `make test` and `make slow` unpack the versions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.triton_interpreter import compiled

pytest.importorskip("triton")

OLDEST = "3.3.1"
OTHERS = ("3.4.0", "3.5.1", "3.6.0", "3.8.0", "3.9.0")
"""The version in constraints.txt is not listed, since the whole test suite runs with it."""

UNPACKED = Path(sys.prefix) / "tritons"
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@compiled
@pytest.mark.parametrize(
    ("version", "which"),
    [
        (OLDEST, "language"),
        *(pytest.param(version, "covering", marks=SLOW) for version in (OLDEST, *OTHERS)),
    ],
)
def test_the_kernels_compile_and_launch(version: str, which: str) -> None:
    """The output has the reason if a Triton does not support a target, and the spilled bytes before 3.6.

    `make test` compiles what shows whether the language has all that kernels need: Triton's cache is empty on a new
    machine. `make slow` compiles about 100 variants that together have every value of every constant. All 3,600 take
    an hour of processor time for each version: only the Triton of constraints.txt compiles them.
    """
    folder = UNPACKED / version
    if not folder.is_dir():
        pytest.skip(f"no Triton {version} beside the environment: `make .venv/tritons/{version}` unpacks it")
    file = Path(__file__).with_name("test_triton_compile.py")
    more = ["-k", "not spills or few", "-n", "auto"] if which == "covering" else ["-k", "not spills"]
    # Warnings of other versions are not failures.
    command = [sys.executable, "-m", "pytest", str(file), "-W", "default", "-rsP", *more]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=1700 if which == "covering" else 800,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert f"triton {version}" in done.stdout
    assert sum(map(int, re.findall(r"^(\d+) variants compiled$", done.stdout, re.MULTILINE))) > 25


def test_make_unpacks_them() -> None:
    makefile = Path(__file__).parents[2].joinpath("Makefile").read_text()
    for name, versions in (("TRITONS", (OLDEST,)), ("MORE_TRITONS", OTHERS)):
        assert re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE).group(1).split() == [*versions]  # type: ignore[union-attr]
