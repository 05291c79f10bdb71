"""llms.txt of the site: what the project is, and each page with its first sentence, for programs that read docs."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

HEAD = """# Bighorn

> Fused LAMB, CAME and LARS for PyTorch: train with less memory or larger batches.
> Sharded runs match one process up to rounding. Plain torch.optim.Optimizers: `from bighorn import Lamb, Came, Lars`.

"""


def first_sentence(text: str) -> str:
    """The first sentence of a page's text."""
    found = re.match(r".*?\.(?=\s|$)", " ".join(text.split()))
    return found[0] if found else " ".join(text.split())


def entry(name: str, tree: nodes.document) -> str:
    paragraph = next(iter(tree.findall(nodes.paragraph)), None)
    title = next(iter(tree.findall(nodes.title)), None)
    words = first_sentence(paragraph.astext()) if paragraph is not None else ""
    return f"- [{title.astext() if title is not None else name}]({name}.html): {words}"


def write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        pages = sorted(app.env.found_docs)
        lines = [entry(name, app.env.get_doctree(name)) for name in pages]
        Path(app.outdir, "llms.txt").write_text(HEAD + "\n".join(lines) + "\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
