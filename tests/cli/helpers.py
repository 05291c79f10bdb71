"""What the tests of the command line share beside their fixtures."""

import html.parser
import re
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

Invoke = Callable[..., Result]
"""Of the fixture `invoke`: words of the command line, and `code`, the exit code to expect."""


class Page(html.parser.HTMLParser):
    """Collects what a page says and what it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.tags: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
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
