"""Helpers of the tests of the command line."""

import gzip
import html.parser
import re
import shlex
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner, Result
from torch import Tensor

from bighorn_workbench.commands import bighorn

Invoke = Callable[..., Result]
"""The type of the fixture `invoke`; it takes words of the command line and `code`, the expected exit code."""


def call(*words: object) -> Result:
    """Run ``bighorn`` in this process; unexpected exceptions are raised."""
    result = CliRunner().invoke(bighorn, [str(word) for word in words], prog_name="bighorn")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def changed(words: Sequence[Any], *others: Any) -> list[Any]:
    """Return words of a command with other values of some options, since an option may be given once."""
    kept = list(words)
    for flag in others[::2]:
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    return [*kept, *others]


def resuming(output: str) -> list[str]:
    """Return the words after ``bighorn`` of the command that an interrupted run printed, split like in a shell."""
    return shlex.split(output.partition("Resume with:\n")[2].partition("\n")[0])[1:]


def write_idx(folder: Path) -> Path:
    """Write the four idx files of a tiny set of images that a network can distinguish, half of them gzipped."""
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


def write_text(path: Path, ending: str = "") -> None:
    """Write 400 lines of arithmetic, from which a language model learns in a few steps."""
    ends = (7 if ending and number % 3 == 0 else ending for number in range(400))
    path.write_text("".join(f"{n} times {n} is {n * n}{end}.\n" for n, end in enumerate(ends)))


def without_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001 - torch's signature
    return input


class Page(html.parser.HTMLParser):
    """Collects the text of a page and the resources that it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.loads += [value or "" for name, value in attrs if name in {"src", "href", "xlink:href", "srcset", "data"}]

    def handle_data(self, data: str) -> None:
        self.text += f" {data.strip()}"


def assert_self_contained(path: Path) -> Page:
    page = Page(path)
    assert all(load.startswith(("data:", "#")) for load in page.loads)
    assert not {"script", "link", "iframe", "base"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", path.read_text())
    assert "prefers-color-scheme: dark" in path.read_text()
    return page
