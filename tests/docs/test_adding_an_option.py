"""docs/adding-an-option.md: its changes apply to a copy of the repository, and its tests pass there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from bighorn._kernels.cpu import library
from tests.support.processes import LIMIT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "adding-an-option.md"
RUN = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__.lower()]
sys.path.insert(0, "src")
import pytest
files = ["tests/math/test_formulas.py", "tests/backends/test_backends.py", "tests/errors/test_options.py"]
tables = "test_a_bad_value_at_construction or test_reference_in_float32"  # one test each
names = ["tests/package/test_architecture.py", "-k", f"nesterov or documented_defaults or {tables}"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", *files, *names]))
"""


def changes(page: str) -> list[tuple[str, str, str]]:
    """Return the file and the lines before and after each change of the page."""
    found = []
    for path, lines in re.findall(r"^```diff\n\+\+\+ (\S+)\n(.*?)^```$", page, re.M | re.S):
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines.splitlines() if not line.startswith(other)) for other in "+-"
        )
        found.append((path, before, after))
    return found


def test_a_newcomer_who_follows_the_page_gets_there(tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if library.LIBRARY is not None:  # an editable install keeps it elsewhere; steps 1 to 4 change no C
        shutil.copy(library.LIBRARY._name, tmp_path / "src" / "bighorn" / "_kernels")
    for path, before, after in changes(PAGE.read_text()):
        text = (tmp_path / path).read_text()
        assert text.count(before) == 1, (path, before)
        (tmp_path / path).write_text(text.replace(before, after))
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 9, done.stdout


def test_a_change_is_read_as_two_texts() -> None:
    page = "```diff\n+++ a/b.py\n one\n-two\n+three\n```\n"
    assert changes(page) == [("a/b.py", "one\ntwo\n", "one\nthree\n")]


def test_every_identifier_on_the_pages_exists() -> None:
    """Words in backticks are names of the package or its tests, or are defined on their page."""
    root = PAGE.parents[1]
    paths = [*(root / "src").rglob("*.[pch]*"), *(root / "tests").rglob("*.py"), root / "Makefile"]
    sources = "\n".join(path.read_text(errors="ignore") for path in paths if path.suffix in ("", ".py", ".c", ".h"))
    known = set(re.findall(r"\w+", sources)) | {word for path in paths for word in re.findall(r"\w+", path.name)}
    unknown = []
    for page in (PAGE, PAGE.with_name("adding-an-optimizer.md")):
        text = page.read_text()
        defined = set(re.findall(r"\w+", "\n".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S))))
        prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.M | re.S)
        quotes = [
            quoted for quoted in re.findall(r"`([^`\n]+)`", prose) if not quoted.startswith(("grep", "docs/", ".. "))
        ]
        words = {word for quoted in quotes for word in re.findall(r"[A-Za-z_]\w+", quoted)}
        unknown += [(page.name, word) for word in sorted(words - known - defined)]
    assert not unknown, unknown
