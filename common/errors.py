"""Errors that end a run with one line in place of a traceback: `run.launch` prints them."""


class InputError(ValueError):
    """Something the user can mend. The message is one line: what, where, how to mend it."""


class NotFinite(InputError):
    """A loss or a gradient that is not finite: the optimiser step was not taken."""
