"""Errors that one line explains, so that the command line can show them without a traceback."""


class UserError(ValueError):
    """What was asked for cannot work. The message names the key, the value and what would work. Exit status 2."""


class RunError(RuntimeError):
    """The run cannot go on, and one line says why (a full disk, a damaged file). Exit status 1."""
