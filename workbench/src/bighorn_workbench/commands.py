"""The command group: one line per command, whose module is imported when the command is called.

Nothing here imports ``bighorn``, and so torch, until then: ``bighorn --help`` and completions take a tenth of a second.
"""

import io
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click
from click.shell_completion import CompletionItem

from bighorn_workbench.interrupts import end_imports

COMMANDS = {
    "train": "Train a model with LAMB, CAME or one of torch's optimizers.",
    "compare": "Compare optimizers, each tuned with the same number of trials.",
    "lr-find": "Find a learning rate to start from, by runs at fixed rates.",
    "bench": "Time optimizer steps beside torch's and other packages'.",
    "memory": "Predict to the byte what a model and its optimizer need.",
    "doctor": "Say which backends work here, and why others do not.",
}
"""The first line of each command's help; its module has its name."""


class LazyGroup(click.Group):
    """Imports a command from its module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Name the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command, or suggest the nearest name."""
        if cmd_name not in COMMANDS and ctx.resilient_parsing:
            return None  # None, since the shell is requesting completions
        if cmd_name not in COMMANDS:
            from bighorn_workbench.values import suggestion

            ctx.fail(f"No such command {cmd_name!r}; {suggestion(cmd_name, COMMANDS)}")
        if cmd_name == "compare" and find_spec("optuna") is None:
            raise click.ClickException("compare needs Optuna: pip install optuna")
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"bighorn_workbench.{name}"), name)
        end_imports()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the table of commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command, and options of the group."""
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def main(self, *args: Any, **more: Any) -> Any:
        """Run the command line; an error of the system ends in one message, or silently if it is a closed pipe."""
        try:
            return super().main(*args, **more)
        except OSError as error:
            click.ClickException(str(error)).show()
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a Ctrl-C ends in one word, without a traceback, and a user's sys.exit() is an error."""
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            if error.code:
                raise
            raise click.ClickException("code of the task or the model has called sys.exit().") from None
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(128 + signal.SIGINT) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="bighorn", prog_name="bighorn")
def bighorn() -> None:
    """LAMB, CAME and LARS for PyTorch: train with them, and compare and time them on your own machine."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names can be invalid in the terminal's encoding
    if not os.environ.get("COLUMNS", "80").strip("0"):
        del os.environ["COLUMNS"]  # rich prints nothing at a width of 0, which stands for an unknown one
    from bighorn_workbench.environment import check_variables

    check_variables()
