"""docs/adding-an-optimizer.md, applied to a copy of the package: the page's tests must pass there, on all backends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import bighorn
from bighorn import _kernels as kernels
from bighorn._kernels.cpu import library
from tests.support.processes import LIMIT

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-optimizer.md"
COMPILER = os.environ.get("CC") or "cc"
OF_THE_COPY = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
sys.path.insert(0, "src")
"""
OPTIONS = f"""{OF_THE_COPY}
import runpy
runpy.run_module("tests.csrc.options_header", run_name="__main__")
"""
TESTS = f"""{OF_THE_COPY}
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "test_lion.py"]))
"""
MOST_LINES = 300
"""The lines of the optimizer on all backends that are not blank."""


def edit(path: Path, *replacements: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in replacements:
        assert text.count(old) == 1, (path.name, old)
        text = text.replace(old, new)
    path.write_text(text)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


def applied_to(package: Path) -> int:
    """Apply the page to a copy of the package, and return the number of lines of the optimizer that are not blank."""
    reference, optim, foreach, cpu, triton, triton_layout, triton_kernels, _ = blocks("py")
    header, rule, loops = blocks("c")
    new = {
        "_optim/lion.py": optim,
        "_kernels/reference/lion.py": reference,
        "_kernels/foreach/lion.py": foreach,
        "_kernels/cpu/lion.py": cpu,
        "_kernels/csrc/lion.h": header,
        "_kernels/csrc/lion.c": rule,
        "_kernels/csrc/lion_loops.c": loops,
        "_kernels/triton/lion.py": triton,
        "_kernels/triton/lion_layout.py": triton_layout,
        "_kernels/triton/lion_kernels.py": triton_kernels,
    }
    for path, text in new.items():
        (package / path).write_text(text)
    for backend in kernels.BACKENDS:
        line = f"from bighorn._kernels.{backend}.lars import Lars\n"
        edit(
            package / "_kernels" / backend / "__init__.py",
            (line, f"{line}from bighorn._kernels.{backend}.lion import Lion\n"),
            ('"lars": Lars}', '"lars": Lars, "lion": Lion}'),
        )
    line = "from bighorn._optim.lars import Lars, LarsTelemetry\n"
    edit(
        package / "__init__.py",
        (line, f"{line}from bighorn._optim.lion import Lion\n"),
        ('    "LossScaler",\n', '    "Lion",\n    "LossScaler",\n'),
    )
    return sum(bool(line.strip()) for text in new.values() for line in text.splitlines())


def compile_library(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the library of a package for the least instruction set."""
    csrc = package / "_kernels" / "csrc"
    monkeypatch.setattr(library, "CSRC", csrc)
    digest = (library.sources() or b"").decode()
    command = [COMPILER, "-std=gnu11", "-O0", "-Wall", "-Wextra", "-Werror", "-fopenmp-simd", "-ffp-contract=off"]
    command += ["-fPIC", "-shared", "-fvisibility=hidden", "-DISA=base", f'-DSOURCES="{digest}"']
    command += [*map(str, csrc.glob("*.c")), "-lm", "-lpthread", "-o", str(package / "_kernels" / library.LIBRARY_NAME)]
    subprocess.run(command, check=True, timeout=LIMIT)


def run(program: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run a program in a folder, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_newcomer_who_follows_the_page_gets_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if library.sources() is None or shutil.which(COMPILER) is None:
        pytest.skip("needs the C sources and a compiler")
    pytest.importorskip("triton")
    package = tmp_path / "src" / "bighorn"
    shutil.copytree(Path(bighorn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    assert applied_to(package) <= MOST_LINES
    if (formatter := Path(sys.executable).with_name("clang-format")).exists():
        style = f"--style=file:{PAGE.parents[1] / '.clang-format'}"
        new = [str(path) for path in (package / "_kernels" / "csrc").glob("lion*")]
        subprocess.run([formatter, style, "--dry-run", "--Werror", *new], check=True, timeout=LIMIT)
    repository = str(PAGE.parents[1])
    run(OPTIONS, tmp_path, {"PYTHONPATH": os.pathsep.join([repository, os.environ.get("PYTHONPATH", "")])})
    compile_library(package, monkeypatch)
    (tmp_path / "test_lion.py").write_text(blocks("py")[-1])
    for interpreted in ({}, {"TRITON_INTERPRET": "1"}):
        assert "5 passed" in run(TESTS, tmp_path, interpreted)
