"""Links to Markdown files outside of docs, such as notebooks beside result files: the site offers the files."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

OUTSIDE = re.compile(r"\]\((\.\./[^)#\s]+\.md)(?:#[^)\s]*)?\)")


def replace(app: Sphinx, name: str, content: list[str]) -> None:
    """Mark the links as files, since MyST would look for pages of the site."""
    del app, name
    content[0] = OUTSIDE.sub(r"](path:\1)", content[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
