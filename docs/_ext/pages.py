"""Lists of pages as tables of contents of the site: each `<!-- make docs: pages NAMES -->`, under its heading."""

from __future__ import annotations

import re

from generated import names_of_pages
from sphinx.application import Sphinx

LIST = re.compile(r"(?:^## (.*)\n+)?^<!-- make docs: pages (.*) -->$", re.MULTILINE)


def add(app: Sphinx, name: str, content: list[str]) -> None:
    """Add a hidden table of contents after each list of a page."""
    del app, name
    for caption, patterns in LIST.findall(content[0]):
        options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        content[0] += "\n".join(["", "```{toctree}", *options, "", *names_of_pages(patterns), "```", ""])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
