"""```{pages}: a toctree by patterns, which a page need not match yet."""

from __future__ import annotations

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.directives.other import TocTree
from sphinx.util.matching import patfilter


class Pages(TocTree):
    content: StringList

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # at every build, since a page that fits may have been added
        found = [name for pattern in self.content for name in patfilter(sorted(self.env.found_docs), pattern)]
        self.content = StringList(dict.fromkeys(found), source="index")
        return super().run()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("pages", Pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
