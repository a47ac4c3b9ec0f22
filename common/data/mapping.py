"""Apply a function to every row: share the work over the ranks, drop the rows that it refuses, and say so.

A function refuses a row with a ValueError. What was dropped is counted and named (file:row: why); a data set
without a usable row is an InputError. Columns that no reader asked for are named too: nothing vanishes.
"""

import collections
import functools
import itertools

from common import dist
from common.batches import split
from common.errors import InputError
from common.data import chat, formats, progress


def read(rows, reader, name: str, kind: str, tokenizer=None) -> list:
    """reader(row) of every row, whose data it gets as formats.Cells, or the ValueError that it raises. What
    rows hold and the reader did not ask for is printed, once for each data set, and in how many rows it is.

    kind: of rows, for that line. tokenizer: whose chat template may read more keys of a message."""
    results = []
    unread = collections.defaultdict(collections.Counter)
    for row in progress.progress(len(rows), 0, f"read {name}", rows, lines=False):
        paths = set(row.read)
        results.append(value_or_error(reader, row._replace(data=cells_of(row.data, paths, tokenizer))))
        if not isinstance(results[-1], ValueError) and not row.where.startswith("tiny/"):
            unread[row.where.rpartition(":")[0]].update(set(formats.unread(row.data, paths)))
    for source, counts in unread.items():
        named = [f"{ascii(path)[1:-1][:60] or 'no name'} ({n:,})" for path, n in sorted(counts.items())]
        if named:
            progress.note(f"{source}: not read as {kind} (in so many rows): {', '.join(named)}")
    return results


def cells_of(row, paths, tokenizer=None):
    """The row as formats.Cells, which note in `paths` what is read; its messages keep the keys that the chat
    template reads."""
    return formats.cells(row, paths, functools.partial(_template_reads, tokenizer))


@functools.lru_cache(maxsize=1000)
def _template_reads(tokenizer, key):
    """Whether the chat template writes something else where messages have this key."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_key = [{**turn, key: "a value"} for turn in turns]
    return tokenizer is not None and chat.render(tokenizer, turns) != chat.render(tokenizer, with_key)


def value_or_error(function, argument):
    """function(argument), or the ValueError that it raises."""
    try:
        return function(argument)
    except ValueError as error:
        return error


def map_over_ranks(items, work, size: int = 64):
    """(x, work(x)) of every x, one after the other, with the ValueError where it raises one; (x, True) where
    x is one. Each rank works for `size` at a time, then all get all: every rank must ask for all."""
    for chunk in split(items, size * dist.world_size()):
        my_items = chunk[size * dist.rank() :][:size]
        results = [isinstance(x, ValueError) or value_or_error(work, x) for x in my_items]
        yield from zip(chunk, dist.gather(results))


def map_rows(rows, make, name: str, shared=None) -> list:
    """Apply make(row) to every row, or to items that have a row; with `shared`, the (x, y) of map_over_ranks
    for each row, make(row, (x, y)). Rows that raise ValueError are dropped; how many, why and where is
    printed. InputError if none is left."""
    made = []
    dropped = {}
    wanted = ""
    pairs = zip(rows, shared or itertools.repeat(()))
    for row, given in progress.progress(len(rows), 0, f"tokenise {name}", pairs, lines=False):
        try:
            if errors := [x for x in given if isinstance(x, ValueError)]:
                raise errors[0]
            made.append(make(row, given) if shared else make(row))
        except ValueError as error:
            dropped.setdefault(str(error), []).append(getattr(row, "row", row).where)
            wanted = getattr(error, "wanted", wanted)
    if dropped and dist.is_main():
        print(f"{name}: dropped {len(rows) - len(made):,} of {len(rows):,} rows")
        for why, where in dropped.items():
            print(f"  {len(where):,}: {why} ({', '.join(where[:3])}{', ...' if len(where) > 3 else ''})")
    if not made:
        why = "; ".join(f"{reason[:300]} ({where[0]})" for reason, where in list(dropped.items())[:4])
        raise InputError(f"{name}: none of its {len(rows)} rows can be used: {why}{wanted}")
    return made
