"""The error that the command line prints as a message."""

import click


class InputError(click.ClickException, ValueError):
    """Wrong input. The message names the option or file, what is wrong with it and the remedy."""
