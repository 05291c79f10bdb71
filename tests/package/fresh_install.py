"""`python tests/package/fresh_install.py DIST` installs the wheels and the sdists of a folder in fresh environments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
STEP = """
import pathlib, torch, bighorn
from importlib.util import find_spec
assert "site-packages" in bighorn.__file__, bighorn.__file__
assert (pathlib.Path(bighorn.__file__).parent / "py.typed").is_file()
more = [name for name in ("bighorn_workbench", "click", "matplotlib", "numpy", "rich", "sklearn") if find_spec(name)]
assert not more, more
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
optimizer = bighorn.Lamb([param], lr=0.1, weight_decay=0.1, backend="cpu")
optimizer.step()
assert torch.allclose(param, torch.full((3,), 0.9)), param
"""

Run = Callable[..., str]
"""Runs a program of an environment, and returns its output."""


@contextmanager
def environment() -> Iterator[Run]:
    """Yield a fresh environment."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)

        def run(program: str, *arguments: object) -> str:
            words = [str(folder / "venv" / "bin" / program), *map(str, arguments)]
            ended = subprocess.run(words, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            return str(ended.stdout)

        yield run


def check(library: Path, workbench: Path) -> None:
    """Take a step with the library alone, then train on the command line."""
    with environment() as run:
        install = ("-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS)
        run("python", *install, library)
        run("python", "-c", STEP)
        status = run("python", "-m", "bighorn")
        assert "cpu        works" in status, status
        run("python", *install, workbench)
        train(run)


def check_extra(library: Path) -> None:
    """Install the extra of the commands, which requires the workbench of the same version."""
    with environment() as run:
        found = ("--find-links", library.parent, f"{library}[study]")
        run("python", "-m", "pip", "install", "--quiet", "--constraint", CONSTRAINTS, *found)
        train(run)
        run("bighorn", "compare", "--help")


def train(run: Run) -> None:
    run("bighorn", "doctor", "--require", "cpu")
    run("bighorn", "train", "--steps", "20", "--report", "run.html")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    ((wheel, sdist), (workbench_wheel, workbench_sdist)) = (
        (next(folder.glob(f"{name}-*.whl")), next(folder.glob(f"{name}-*.tar.gz")))
        for name in ("bighorn", "bighorn_workbench")
    )
    assert "-py3-none-manylinux" in wheel.name, wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".so" in name] == ["bighorn/_kernels/libbighorn.so"], names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"bighorn"}, names
    for library, workbench in ((wheel, workbench_wheel), (sdist, workbench_sdist)):
        check(library, workbench)
        print(f"{library.name}: installed alone, stepped; with {workbench.name}: trained")
    check_extra(wheel)
    print(f"{wheel.name}[study]: installed, trained")


if __name__ == "__main__":
    main()
