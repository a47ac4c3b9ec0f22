"""Apply a function to every row: share the work between the ranks, drop the rows it rejects, and report them.

A function rejects a row by raising ValueError. Dropped rows are counted and named (file:row: why), and a
data set without a usable row raises InputError. Columns that no reader used are named too, so that nothing
vanishes silently.
"""

import collections
import functools
import itertools

from common import dist
from common.batches import split
from common.errors import InputError
from common.data import chat, formats, progress


def read(rows, reader, name: str, kind: str, tokenizer=None) -> list:
    """Call reader(row) for every row; return the results, with the ValueError of each row that raised one.

    The reader gets the row's data as formats.Cells. Columns that it did not use are printed once for each
    data set, with the number of rows that have them.

    kind: the kind of rows, for that line.
    tokenizer: its chat template may use further keys of a message."""
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
            progress.note(f"{source}: not read as {kind} (with the number of rows): {', '.join(named)}")
    return results


def cells_of(row, paths, tokenizer=None):
    """Wrap a row as formats.Cells, which add every path that is read to `paths`.

    Messages keep the keys that the tokenizer's chat template uses."""
    return formats.cells(row, paths, functools.partial(_template_reads, tokenizer))


@functools.lru_cache(maxsize=1000)
def _template_reads(tokenizer, key):
    """Return whether the chat template's output changes if messages have this key."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with_key = [{**turn, key: "a value"} for turn in turns]
    return tokenizer is not None and chat.render(tokenizer, turns) != chat.render(tokenizer, with_key)


def value_or_error(function, argument):
    """Return function(argument), or the ValueError that it raises."""
    try:
        return function(argument)
    except ValueError as error:
        return error


def map_over_ranks(items, work, size: int = 64):
    """Yield (x, work(x)) for every x in order, with the work shared between the ranks.

    If work(x) raises ValueError, the error is yielded as its result. If x is itself a ValueError, no work
    is done and (x, True) is yielded. Each rank works on `size` items at a time, then all ranks exchange
    their results, so every rank has to iterate to the end."""
    for chunk in split(items, size * dist.world_size()):
        my_items = chunk[size * dist.rank() :][:size]
        results = [isinstance(x, ValueError) or value_or_error(work, x) for x in my_items]
        yield from zip(chunk, dist.gather(results))


def map_rows(rows, make, name: str, shared=None) -> list:
    """Apply `make` to every row and drop those that raise ValueError; print how many, why and where.

    rows: rows, or items with an attribute `row`.
    shared: the (x, y) that map_over_ranks yields for each row. `make` is then called as make(row, (x, y)),
      and a row is also dropped if x or y is a ValueError.

    Raises InputError if no row is left."""
    made = []
    dropped = {}
    wanted = ""
    pairs = zip(rows, shared or itertools.repeat(()))
    for row, given in progress.progress(len(rows), 0, f"tokenise {name}", pairs, lines=False):
        try:
            # An earlier step may have rejected the row already
            if errors := [x for x in given if isinstance(x, ValueError)]:
                raise errors[0]
            made.append(make(row, given) if shared else make(row))
        except ValueError as error:
            dropped.setdefault(str(error), []).append(getattr(row, "row", row).where)
            wanted = getattr(error, "wanted", wanted)
    if dropped and dist.is_main():
        print(f"{name}: dropped {len(rows) - len(made):,} of {len(rows):,} rows")
        for why, where in sorted(dropped.items(), key=lambda item: -len(item[1]))[:20]:
            print(f"  {len(where):,}: {why} ({', '.join(where[:3])}{', ...' if len(where) > 3 else ''})")
        if len(dropped) > 20:
            print(f"  and {len(dropped) - 20:,} other reasons")
    if not made:
        why = "; ".join(f"{reason[:300]} ({where[0]})" for reason, where in list(dropped.items())[:4])
        raise InputError(f"{name}: no usable row among its {len(rows)}: {why}{wanted}")
    return made
