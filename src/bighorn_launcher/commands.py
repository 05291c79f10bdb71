"""The command group: one line per command, whose module is imported when the command is called."""

import io
import os
import signal
import sys
from importlib import import_module
from typing import Any

import click

from bighorn.cli.environment import check_variables, package_version
from bighorn.cli.errors import InputError
from bighorn.cli.values import suggestion

COMMANDS = {
    "train": "bighorn.cli.train",
    "compare": "bighorn.cli.compare",
    "lr-find": "bighorn.cli.lr_find",
    "bench": "bighorn.cli.bench",
    "memory": "bighorn.cli.memory",
    "doctor": "bighorn.cli.doctor",
}


class LazyGroup(click.Group):
    """Imports a command from its module when it is called, and prints an :class:`InputError` as one message."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Name the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or suggest the nearest name."""
        if cmd_name not in COMMANDS and ctx.resilient_parsing:
            return None  # None, since the shell is requesting completions
        if cmd_name not in COMMANDS:
            ctx.fail(f"No such command {cmd_name!r}; {suggestion(cmd_name, COMMANDS)}")
        command: click.Command = getattr(import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the command line; an error of the system ends in one message, or silently if it is a closed pipe."""
        try:
            return super().main(*args, **more)
        except OSError as error:
            click.ClickException(str(error)).show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; wrong input ends in one message, without a traceback."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_version("bighorn"), prog_name="bighorn")
def bighorn() -> None:
    """LAMB and CAME for PyTorch: train with them, and compare and time them on your own machine."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names can be invalid in the terminal's encoding
    if not os.environ.get("COLUMNS", "80").strip("0"):
        del os.environ["COLUMNS"]  # rich prints nothing at a width of 0, which stands for an unknown one
    check_variables()
