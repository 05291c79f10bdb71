"""`python tests/package/fresh_install.py DIST` installs the wheel and the sdist of a folder in fresh environments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
STEP = """
import pathlib, torch, bighorn
assert "site-packages" in bighorn.__file__, bighorn.__file__
assert (pathlib.Path(bighorn.__file__).parent / "py.typed").is_file()
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
optimizer = bighorn.Lamb([param], lr=0.1, weight_decay=0.1, backend="cpu")
optimizer.step()
assert torch.allclose(param, torch.full((3,), 0.9)), param
"""


def check(archive: Path) -> None:
    """Install an archive, take a step with the C library, and train on the command line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        scripts = folder / "venv" / "bin"

        def run(program: str, *arguments: str) -> None:
            subprocess.run([scripts / program, *arguments], cwd=folder, check=True)

        run("python", "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), f"{archive}[cli]")
        run("python", "-c", STEP)
        run("bighorn", "doctor", "--require", "cpu")
        run("bighorn", "train", "--steps", "20", "--report", "run.html")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert "-py3-none-manylinux" in wheel.name, wheel.name
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if ".so" in name]
    assert libraries == ["bighorn/kernels/libbighorn.so"], libraries
    for archive in (wheel, sdist):
        check(archive)
        print(f"{archive.name}: installed, stepped, trained")


if __name__ == "__main__":
    main()
