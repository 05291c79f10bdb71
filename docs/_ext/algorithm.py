"""```{algorithm} FILE TAG: pseudo-code, each line in its colour beside the lines of FILE that carry its tag.

A line of the body is `name | formula`, where `name` is a tag's last part, or `| words`. The code is read from FILE when
the site is built, and a tag on one side alone fails the build, so that page and code cannot drift apart.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.utils.math import latex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[2]
COLOURS = 6


def tagged(text: str, prefix: str) -> dict[str, list[str]]:
    """The code lines of a source by the last part of their tags; a line may carry several."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        code, _, comment = line.partition("  # ")
        for name in re.findall(rf"\b{prefix}-(\w+)", comment if code.strip() else ""):
            found.setdefault(name, []).append(code.strip())
    return found


class Algorithm(SphinxDirective):
    has_content = True
    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        path, prefix = self.arguments
        self.env.note_dependency(ROOT / path)
        code = tagged((ROOT / path).read_text(), prefix)
        lines = [line.partition("|")[::2] for line in self.content if line.strip()]
        names = list(dict.fromkeys(name.strip() for name, _ in lines if name.strip()))
        if set(names) != set(code):
            raise self.error(f"{path} has the tags {sorted(code)}, the page {sorted(names)}")
        left = {name: sum(other.strip() == name for other, _ in lines) for name in names}
        rows = []
        for name, formula in ((name.strip(), formula) for name, formula in lines):
            if not name:
                rows.append(f'<tr class="colour-0"><td colspan="3">{formula_html(formula)}</td></tr>')
                continue
            left[name] -= 1  # each formula of a tag has one line of code beside it, the last one all that remain
            beside, code[name] = (code[name][:1], code[name][1:]) if left[name] else (code[name], [])
            rows.append(
                f'<tr class="colour-{names.index(name) % COLOURS + 1}"><td>{formula_html(formula)}</td>'
                f'<td><code class="chip">{prefix}-{name}</code></td><td>{python_html(beside)}</td></tr>'
            )
        head = "<thead><tr><th>pseudo-code</th><th>tag</th><th>code</th></tr></thead>"
        table = f'<div class="algorithm"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'
        return [nodes.raw("", table, format="html")]


def formula_html(text: str) -> str:
    """A line of pseudo-code: words, and formulas between dollars; two blanks before it indent it once."""
    depth = (len(text) - len(text.lstrip()) - 1) // 2
    parts = text.strip().split("$")
    html = "".join(latex2mathml.tex2mathml(part) if i % 2 else escape(part) for i, part in enumerate(parts))
    return f'<span style="padding-left:{1.2 * depth:g}em">{html}</span>'


def python_html(lines: list[str]) -> str:
    return str(highlight("\n".join(lines), PythonLexer(), HtmlFormatter()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("algorithm", Algorithm)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
