"""The one kind of error the command line reports."""


class InputError(ValueError):
    """Wrong input. The message names the option or file, what is wrong with it and the remedy."""
