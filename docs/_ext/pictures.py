"""Pictures of the site as part of its pages, in the page's colours, so that they follow its light and dark mode."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx


def inline(svg: str, words: str) -> str:
    """A picture without colours of its own; the page defines them (`site.css`)."""
    svg = re.sub(r"<style>.*?</style>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' aria-label="[^"]*"', "", svg, count=1)
    return svg.replace("<svg", f'<svg class="picture" aria-label="{escape(words)}"', 1)


def replace(app: Sphinx, tree: nodes.document, _: str) -> None:
    if app.builder.format != "html":
        return
    for image in list(tree.findall(nodes.image)):
        path = Path(app.srcdir) / image["uri"]
        if path.suffix == ".svg" and path.is_file():
            image.replace_self(nodes.raw("", inline(path.read_text(), image.get("alt", "")), format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("doctree-resolved", replace)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
