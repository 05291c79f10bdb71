"""A study with a torn or damaged file continues, or is refused with one message and left unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.attack_settings import tries
from tests.support.damage import damaged_bytes
from workbench.tests.command_line import call
from workbench.tests.test_commands import QUICK


def compare(path: Path) -> tuple[int, str]:
    """Return the exit code and the output of a comparison that continues a study."""
    result = call("compare", *QUICK["compare"], "--study", path)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a complete study."""
    path = tmp_path_factory.mktemp("study") / "study.jsonl"
    code, output = compare(path)
    assert code == 0, output
    return path


@pytest.mark.usefixtures("lost_runs_are_free")
@tries(45)
@given(damage=damaged_bytes())
def test_a_damaged_study(study: Path, damage: Callable[[bytes], bytes]) -> None:
    path = study.with_name("damaged.jsonl")
    path.write_bytes(damage(study.read_bytes()))
    before = path.read_bytes()
    code, output = compare(path)
    assert code in {0, 1}, output
    assert "Traceback" not in output
    if code:
        assert output.startswith("Error: "), output
        assert path.read_bytes() == before
