"""```{command-help}: what every command of the command line says of itself."""

from __future__ import annotations

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bighorn_workbench.commands import bighorn


class CommandHelp(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        group = click.Context(bighorn, info_name="bighorn", terminal_width=88)
        sections = []
        for name in bighorn.list_commands(group):
            command = bighorn.get_command(group, name)
            assert command is not None
            text = command.get_help(click.Context(command, info_name=name, parent=group, terminal_width=88))
            section = nodes.section("", nodes.title("", f"bighorn {name}"), ids=[f"bighorn-{name}"])
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return list(sections)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
