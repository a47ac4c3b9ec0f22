"""Print progress bars, tables and notes while rows are read and steps are taken. Only rank 0 prints."""

import functools
import math
import sys

from tqdm import tqdm

from common import dist


@functools.cache
def note(text):
    """Print a text on rank 0, unless it has been printed before."""
    if dist.is_main():
        print(text)


def progress(total: int, start: int, name: str, rows=None, lines=True):
    """Return a progress bar over `total` steps, or one that iterates over `rows`.

    On a terminal it is a tqdm bar. Elsewhere it prints about twenty plain lines, or nothing with lines=False.
    On ranks other than 0 it is silent. Show at most three metrics with `set_postfix`, refresh=False.

    start: the number of steps that are done already."""
    options = {"total": total, "initial": start, "desc": name, "unit": "step" if lines else "row"}
    if sys.stderr.isatty():
        return tqdm(rows, dynamic_ncols=True, leave=lines, disable=not dist.is_main(), **options)
    options.update(miniters=math.ceil(total / 20), mininterval=0, maxinterval=60, ncols=0)
    # With delay=0 tqdm prints an empty bar first
    return Lines(rows, disable=not (lines and dist.is_main()), delay=1e-9, **options)


class Lines(tqdm):
    """A progress bar for log files: it prints lines."""

    shown = 0

    def display(self, msg=None, pos=None):
        if msg is None and self.n > self.shown:  # "" is a request to wipe the bar
            self.shown = self.n
            print(self, file=self.fp, flush=True)


def print_table(rows: list[dict]):
    """Print rows that have the same keys as a table, on rank 0."""
    if not rows or not dist.is_main():
        return
    shown = lambda x: f"{x:.1f}" if isinstance(x, float) else str(x)
    lines = [list(rows[0]), *(list(map(shown, row.values())) for row in rows)]
    widest = lambda i: max(len(line[i]) for line in lines)
    widths = list(map(widest, range(len(rows[0]))))
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
