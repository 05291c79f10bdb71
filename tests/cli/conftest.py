import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from bighorn.cli.commands import bighorn
from cli.helpers import Invoke


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
    folder = tmp_path / "idx"
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, count in (("train", 64), ("t10k", 16)):
        labels = random.integers(0, 10, count).astype(np.uint8)
        images = random.integers(0, 50, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 4] = 255
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2xBBI", 8, 1, count) + labels.tobytes())
        content = struct.pack(">2xBB3I", 8, 3, count, 28, 28) + images.tobytes()
        (folder / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(400)))
    return path
