"""`make mutants`: plants each fault in a copy of the packages, and checks that tests find it.

A fault that no test finds means that a test was lost. The faults of C are compiled; the run takes most of an hour.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from tests.mutation.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "src" / "bighorn", ROOT / "workbench" / "src" / "bighorn_workbench")
BUILD = ROOT / "build" / "mutants"
"""The sources of C with a fault, and the objects compiled from them."""


def compile_library(package: Path) -> None:
    """Compile the library of a package; only sources that changed since the last call are compiled."""
    tree = BUILD / "tree"
    (tree / "src" / "bighorn" / "_kernels").mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "CMakeLists.txt", tree)
    copied = tree / "src" / "bighorn" / "_kernels" / "csrc"
    copied.mkdir(exist_ok=True)
    sources = list((package / "_kernels" / "csrc").iterdir())
    for gone in {each.name for each in copied.iterdir()} - {each.name for each in sources}:
        (copied / gone).unlink()
    for source in sources:
        target = copied / source.name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            shutil.copyfile(source, target)
    objects = BUILD / "objects"
    for command in (f"cmake -S {tree} -B {objects}", f"cmake --build {objects} -j 2"):
        subprocess.run(shlex.split(command), check=True, capture_output=True)
    shutil.copy(objects / "libbighorn.so", package / "_kernels")


def first_failure(site: Path, tests: str) -> str | None:
    """Return the first test that fails with the packages in a folder; None if all pass.

    Raises:
        RuntimeError: pytest did not run, or found no test.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    path = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(
        [*command, *shlex.split(tests)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode > 1:  # below 0, the fault has ended the process
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"the process ended with {done.returncode}"


def copies() -> Path:
    """Return a new folder with both packages."""
    site = BUILD / "site"
    shutil.rmtree(site, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(package, site / package.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for hook in Path(sysconfig.get_path("purelib")).glob("_editable_*bighorn.py"):
        (site / hook.name).touch()  # replaces the hook that would find an editable install first
    return site


def plant(fault: Fault, site: Path) -> None:
    """Replace the text of a fault.

    Raises:
        RuntimeError: The file does not have the text exactly once.
    """
    path = site / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise RuntimeError(f"{fault.file} has {text.count(fault.right)} times {fault.right!r}: write the fault anew")
    path.write_text(text.replace(fault.right, fault.wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help="parts of the names of faults; default: all")
    parser.add_argument("--sound", action="store_true", help="run the tests without the faults: they must pass")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.families or any(part in fault.family for part in given.families)]
    survived = []
    for fault in chosen:
        start, site = time.monotonic(), copies()
        if not given.sound:
            plant(fault, site)
        compile_library(site / "bighorn")
        finder = first_failure(site, fault.tests)
        print(f"{time.monotonic() - start:4.0f} s  {fault.family}: {finder or 'NOT FOUND'}", flush=True)
        if finder is None:
            survived.append(fault.family)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} faults were found")
    return len(chosen) - len(survived) if given.sound else len(survived)


if __name__ == "__main__":
    sys.exit(main())
