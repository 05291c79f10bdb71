"""The error that the command line prints as a message."""


class InputError(ValueError):
    """Wrong input. The message names the option or file, what is wrong with it and the remedy."""
