from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bighorn.cli.commands import bighorn
from cli.helpers import Invoke, write_idx


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``bighorn`` in this process, in an empty folder; unexpected exceptions are raised."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(bighorn, [str(word) for word in arguments], prog_name="bighorn")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run


@pytest.fixture
def idx_folder(tmp_path: Path) -> Path:
    """The four idx files of a tiny set of images that a network can tell apart, half of them gzipped."""
    return write_idx(tmp_path / "idx")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(400)))
    return path
