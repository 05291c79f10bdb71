"""Reports: one self-contained HTML file with the results of a command, and the command that reproduces them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jinja2
from markupsafe import Markup

from bighorn_workbench.environment import environment


@dataclass(frozen=True)
class Section:
    """A section of the page: a heading, some text, and a figure or a table.

    Attributes:
        heading: The heading.
        text: A sentence or two below the heading.
        figure: A function of :mod:`bighorn_workbench.reports.plots` with its arguments.
        head: The table's column names; the first column is text, the others are numbers.
        rows: The table's cells.
        code: Lines of a program.
    """

    heading: str
    text: str = ""
    figure: Callable[..., str] | None = None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    code: str = ""

    @property
    def drawn(self) -> Markup:
        """The figure, which the page scales to the width of a screen."""
        return Markup(self.figure() if self.figure else "")


def render(
    title: str,
    lead: str,
    tiles: Mapping[str, str],
    sections: Sequence[Section],
    commands: Sequence[str],
    settings: Mapping[str, object],
    device: str = "cpu",
) -> str:
    """Render a report.

    Args:
        title: The heading: the answer.
        lead: The sentences below it: how sure it is, and of what.
        tiles: The most important figures.
        sections: The body.
        commands: The commands that produced the results, in order.
        settings: Every option's value, defaults included.
        device: The device of the runs. Default: "cpu".
    """
    loader = jinja2.PackageLoader("bighorn_workbench.reports", ".")
    template = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html.j2")
    return template.render(
        title=title.replace("+-", "±"),
        lead=lead.replace("+-", "±"),
        tiles=tiles,
        sections=sections,
        commands=commands,
        settings={
            name.replace("_", " "): _in_words(value)
            for name, value in settings.items()
            if value is not None and value != ()
        },
        environment=environment(device),
    )


def _in_words(value: object) -> object:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else value
