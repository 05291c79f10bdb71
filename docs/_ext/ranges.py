"""Ranges of figures in tables, such as (0.90-0.99), are not broken at their hyphen."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

RANGE = re.compile(r"(\(\d[\d.]*-\d[\d.]*\))")


def marked(text: str) -> list[nodes.Node]:
    """Return a text as nodes, with each range in one of a class that site.css keeps in one line."""
    parts = enumerate(RANGE.split(text))
    return [nodes.inline("", part, classes=["range"]) if at % 2 else nodes.Text(part) for at, part in parts if part]


class Ranges(SphinxPostTransform):
    default_priority = 900
    formats = ("html",)

    def run(self, **_: Any) -> None:
        for table in self.document.findall(nodes.table):
            for text in list(table.findall(nodes.Text)):
                text.parent.replace(text, marked(text))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Ranges)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
