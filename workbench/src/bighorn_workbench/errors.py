"""The error that the command line prints as a message."""

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

import click


class InputError(click.ClickException, ValueError):
    """Wrong input. The message names the option or file, what is wrong with it and the remedy."""

    def format_message(self) -> str:
        """Return the message as a terminal may have it."""
        return visible(self.message)


@contextmanager
def after(error: BaseException) -> Iterator[None]:
    """Add an error of the block, which saves results after another error, to that error's message."""
    try:
        yield
    except InputError as another:
        raise InputError(f"{error}\n{another}".lstrip()) from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one that it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def visible(text: str) -> str:
    r"""Return a text with control characters as escapes: names of files and users' code may hold orders to a terminal.

    Surrogates are escaped too, since no encoding has them. Line breaks and tabs are kept.

    Example:
        >>> visible("loss\x1b[2J")
        'loss\\x1b[2J'
    """
    return "".join(each.encode("unicode_escape").decode() if _is_order(each) else each for each in text)


def _is_order(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf", "Cs")
