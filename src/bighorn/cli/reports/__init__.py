"""Reports: one self-contained HTML file with the results of a command, and the command that reproduces them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import jinja2
from markupsafe import Markup

from bighorn.cli.environment import environment


@dataclass(frozen=True)
class Section:
    """A section of the page: a heading, some text, and a figure or a table.

    Attributes:
        heading: The heading.
        text: A sentence or two below the heading.
        figure: An ``<svg>`` element.
        head: The table's column names; the first column is text, the others are numbers.
        rows: The table's cells.
    """

    heading: str
    text: str = ""
    figure: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


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
        title: The heading.
        lead: The sentence below it.
        tiles: The most important figures.
        sections: The body.
        commands: The commands that produced the results, in order.
        settings: Every option's value, defaults included.
        device: The device of the runs. Default: "cpu".
    """
    loader = jinja2.PackageLoader("bighorn.cli.reports", ".")
    template = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("page.html.j2")
    return template.render(
        title=title,
        lead=lead,
        tiles=tiles,
        sections=[asdict(section) | {"figure": Markup(section.figure)} for section in sections],
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
