"""Errors that end a run with one line in place of a traceback: `run.launch` prints them."""


class InputError(ValueError):
    """Something the user can mend. The message is one line: what, where, how to mend it."""


class NothingToLearn(InputError):
    """An iteration whose responses teach nothing. The program skips it and continues, unless too many do."""


class Diverged(InputError):
    """Training has left the range in which it can succeed. The program adds where the last checkpoint is."""


class NotFinite(Diverged):
    """A loss or a gradient that is not finite: the optimiser step was not taken."""
