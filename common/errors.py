"""Errors that end a run with one line instead of a traceback; `run.launch` prints them."""


class InputError(ValueError):
    """A mistake that the user can correct. The message is one line: mistake, place and remedy."""


class NothingToLearn(InputError):
    """An iteration has no usable responses. The program skips it, and gives up after several in a row."""


class Diverged(InputError):
    """Training has diverged. The program adds to the message where the last checkpoint is."""


class NotFinite(Diverged):
    """A loss or gradient is not finite. The optimiser step was not taken."""
