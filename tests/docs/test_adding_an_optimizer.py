"""docs/adding-an-optimizer.md, applied to a copy of the package: the page's test must pass there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import bighorn
from tests.support.processes import LIMIT

PAGE = Path(__file__).parents[2] / "docs" / "adding-an-optimizer.md"
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
sys.path.insert(0, "src")
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".", "test_lion.py"]))
"""


def edit(path: Path, *replacements: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in replacements:
        assert old in text, (path.name, old)
        text = text.replace(old, new)
    path.write_text(text)


def test_a_newcomer_who_follows_the_page_gets_there(tmp_path: Path) -> None:
    options, reference, foreach, field, optim, test = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    package = tmp_path / "src" / "bighorn"
    shutil.copytree(Path(bighorn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    kernels = package / "kernels"

    [old] = re.findall(r"^Options = TypeVar.*\n", (kernels / "options.py").read_text(), re.M)
    edit(kernels / "options.py", (old, options))
    for backend, text in (("reference", reference), ("foreach", foreach)):
        (kernels / backend / "lion.py").write_text(text)
        line = f"from bighorn.kernels.{backend}.lamb import Lamb\n"
        edit(kernels / backend / "__init__.py", (line, line + line.replace("lamb", "lion").replace("Lamb", "Lion")))
    (package / "optim" / "lion.py").write_text(optim)
    line = "from bighorn.optim.lamb import Lamb, LambTelemetry\n"
    edit(
        package / "__init__.py",
        (line, line + "from bighorn.optim.lion import Lion\n"),
        ('"Lamb",\n', '"Lamb",\n    "Lion",\n'),
    )
    table = (kernels / "__init__.py").read_text()
    [came] = re.findall(r"^    came: Callable.*\n", table, re.M)
    edit(
        kernels / "__init__.py",
        ("options import CameOptions, LambOptions", "options import CameOptions, LambOptions, LionOptions"),
        ('    "LambOptions",\n', '    "LambOptions",\n    "LionOptions",\n'),
        ("LambOptions | CameOptions", "LambOptions | CameOptions | LionOptions"),
        (came, came + field),
    )
    (tmp_path / "test_lion.py").write_text(test)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
