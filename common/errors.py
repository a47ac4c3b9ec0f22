"""The error that ends a run with one line in place of a traceback (run.launch prints it)."""


class InputError(ValueError):
    """Something the user can mend. The message is one line: what, where, how to mend it."""
