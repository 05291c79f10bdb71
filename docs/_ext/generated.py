"""The parts of pages that are written from the code, in plain Markdown: `make docs` runs this module before the site.

    python docs/_ext/generated.py

A part stands between `<!-- make docs: KIND ARGUMENTS -->` and `<!-- end of make docs -->`; `KINDS` has the functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
if __name__ == "__main__":  # the sources beside this file, and not what is installed
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "workbench" / "src")]

import reference  # noqa: E402

PART = re.compile(r"(<!-- make docs: (\w+)(?: ([^\n]*))? -->\n).*?(<!-- end of make docs -->)", re.DOTALL)


def tagged(text: str, prefix: str) -> dict[str, list[str]]:
    """Return the code lines of a source by the last part of their tags; a line may carry several."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        code, _, comment = line.partition("  # ")
        for name in re.findall(rf"\b{prefix}-(\w+)", comment if code.strip() else ""):
            found.setdefault(name, []).append(code.strip())
    return found


def code_by_tag(name: str) -> list[str]:
    """Return the lines of an algorithm's reference by tag."""
    prefix = name.upper()
    code = tagged((ROOT / "src/bighorn/_kernels/reference" / f"{name}.py").read_text(), prefix)
    rows = [f"| `{prefix}-{tag}` | {cells(lines)} |" for tag, lines in code.items()]
    return [f"| tag | code of `_kernels/reference/{name}.py` |", "|---|---|", *rows, ""]


def cells(lines: list[str]) -> str:
    return "<br>".join(f"`{line}`" for line in lines).replace("|", "\\|")


def command_help() -> list[str]:
    """Return what every command of the command line prints as its help."""
    import click

    from bighorn_workbench.commands import bighorn

    group, lines = click.Context(bighorn, info_name="bighorn", terminal_width=82), []
    for name in bighorn.list_commands(group):
        command = bighorn.get_command(group, name)
        assert command is not None
        text = command.get_help(click.Context(command, info_name=name, parent=group, terminal_width=82))
        lines += [f"## bighorn {name}", "", "```text", text, "```", ""]
    return lines


def names_of_pages(patterns: str) -> list[str]:
    """Return the pages that match a list of patterns, in its order."""
    return list(dict.fromkeys(path.stem for pattern in patterns.split() for path in sorted(DOCS.glob(f"{pattern}.md"))))


def list_of_pages(patterns: str) -> list[str]:
    """Return links to pages, by their titles."""
    pages = names_of_pages(patterns)
    titles = [(DOCS / f"{name}.md").read_text().partition("\n")[0].removeprefix("# ") for name in pages]
    return [*(f"* [{title}]({name}.md)" for name, title in zip(pages, titles, strict=True)), ""]


def references(paths: str) -> list[str]:
    """Return the reference of some names; of all public names of a module for MODULE.*."""
    every = [path for path, _ in reference.public()]
    wanted: list[str] = []
    for path in paths.split():
        inner = [name for name in every if name.startswith(path[:-1])] if path.endswith("*") else [path]
        wanted += inner
    return [line for path in wanted for line in reference.reference(path)]


def class_reference(path: str) -> list[str]:
    """Return the reference of a class whose options are in a table of the page."""
    return reference.reference(path, tabled=True)


KINDS: dict[str, Callable[[str], list[str]]] = {
    "options": reference.options,
    "class": class_reference,
    "reference": references,
    "methods": reference.methods,
    "code": code_by_tag,
    "commands": lambda _: command_help(),
    "pages": list_of_pages,
}


def written(text: str) -> str:
    """Return a page with its generated parts."""
    return PART.sub(lambda part: f"{part[1]}\n{chr(10).join(KINDS[part[2]](part[3] or ''))}\n{part[4]}", text)


if __name__ == "__main__":
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(written(page.read_text()))
