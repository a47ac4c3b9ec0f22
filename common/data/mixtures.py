"""Read the rows of data sets: `tiny`, files (formats.py), names on the hub, and mixtures of them.

`load_rows` reads the data sets that --dataset and similar flags name (docs/use/data.md). Every rank holds all
rows.
"""

import itertools
import math
import re
import zlib
from pathlib import Path

from common import dist
from common.batches import Row
from common.errors import InputError
from common.data import formats, message_columns, progress, tiny
from common.data.formats import columns

# A part of a mixture: source?items:weight or source:weight. After items, the weight has a decimal point or
# an exponent, because a value may contain a colon
PART = re.compile(r"(.+?)(?:\?(.+?)(?::(\d*\.\d+|\d*\.?\d+e-\d+))?|:(\d*\.?\d+(?:e-\d+)?))?")
ITEM = re.compile(r"(.+?)(==|>=|=)(.+)")  # = renames a column, the other signs are conditions
QUESTION = ("prompt", "instruction", "input")  # columns that message_columns.question reads

TINY = {  # the options of tiny: name -> pattern of its values
    "seed": r"[-+]?\d+", "length_bias": r"[-+]?\d*\.?\d+(e-?\d+)?", "label": "helpfulness|safety",
    "kind": "|".join(tiny.SIZES), "commands": rf"(\b({'|'.join(tiny.COMMANDS)})\b\+?)+", "hazards": "only|no"
}  # fmt: skip


def load_rows(spec: str, kind: str, split: str = "train") -> list[Row]:
    """Load all rows of a data set, the same on every rank.

    spec: sources with commas between them, as in docs/use/data.md.
    kind, split: the rows of `tiny` to load (tiny.SIZES; "train" or "test"). split is also the hub's default
      split.

    Raises InputError if a source cannot be read, if a weight gives its source no row, or if ranks read
    different rows."""
    listed = sources(spec)
    names = [Path(source).name for source, *_ in listed]  # files of one name are shown with their folders
    names = [source if names.count(name) > 1 else name for name, (source, *_) in zip(names, listed)]
    data_sets = [_read(source, name, items, kind, split) for name, (source, items, _) in zip(names, listed)]
    weights = [weight for *_, weight in listed if weight is not None]
    if weights:
        if len(weights) < len(data_sets) or min(weights) <= 0:
            raise InputError(f"{_flag(spec)}: give every part a weight above 0, or give no weights")
        # The largest mixture with these proportions that uses no row twice
        scale = min(len(rows) / weight for rows, weight in zip(data_sets, weights))
        sizes = [round(weight * scale) for weight in weights]
        if 0 in sizes:
            source, _, weight = listed[sizes.index(0)]
            why = f"the weight {weight:g} gives it no row. Raise the weight or leave the part out"
            raise InputError(f"{_flag(source)}: {why}")
        data_sets = [random_subset(rows, size, _prompt_or_place) for rows, size in zip(data_sets, sizes)]
    rows = list(itertools.chain.from_iterable(data_sets))
    fingerprint = dist.seed_of(*(zlib.crc32(repr(row.data).encode()) for row in rows))
    dist.barrier()  # some machines read for longer than the timeout of a collective
    if len(set(dist.gather([fingerprint]))) > 1:
        raise InputError(f"{spec}: ranks read different rows. Give all nodes the same file")
    return rows


def random_subset(items, n, name=lambda item: item.key):
    """Choose a deterministic random subset of n items, kept in their original order.

    Items are chosen by a hash of their name, so a mixture or a sorted file is sampled evenly.
    items: prompts, comparisons, rows, or anything that `name` turns into a string."""
    chosen = sorted(range(len(items)), key=lambda i: zlib.crc32(name(items[i]).encode()))[:n]
    return [items[i] for i in sorted(chosen)]


def _prompt_or_place(row):
    """Return the key of a row in a mixture; random_subset takes rows by a hash of it.

    Completions of one prompt have the same key, so they stay together. Other rows have their place as the
    key, so that a sorted file is sampled evenly."""
    prompt = [row.data.get(column) for column in QUESTION]
    dialogues = [x for x in map(row.data.get, message_columns.DIALOGUES) if isinstance(x, list)]
    prompt += [x if message_columns.is_dialogue(x[-1:]) else x[:-1] for x in dialogues]  # without the answer
    return repr(prompt) if any(prompt) else row.where


def sources(spec: str) -> list[tuple[str, list[tuple[str, str, str]], float | None]]:
    """Parse the `spec` of load_rows into a list of (source, items, weight).

    Items are (column, sign, name or value). The weight is None if the spec gives no weight. Raises
    InputError if a part cannot be parsed, or if it names a file that does not exist or has an unknown
    type."""
    results = []
    for part in spec.split(","):
        match = PART.fullmatch(part.strip())
        items = [ITEM.fullmatch(item) for item in (match and match[2] or "").split("&") if item]
        if not match or not all(items):
            raise InputError(f"{_flag(spec)}: not of the form a, a,b, a:0.7,b:0.3 or a?old=new&score>=2:0.5")
        source = match[1]
        weight = match[3] or match[4]
        flags.setdefault(source, flags.get(spec, "--dataset"))
        if is_tiny(source):
            _tiny_options(source)
        elif Path(source).is_file() != source.lower().endswith(formats.SUFFIXES):
            wanted = f"not one of {', '.join(formats.SUFFIXES)} (save a spreadsheet as CSV UTF-8)"
            raise InputError(f"{_flag(source)}: no such file, or {wanted}")
        results.append((source, [item.groups() for item in items], weight and float(weight)))
    return results


def sources_of(args) -> list[str]:
    """Return the sources of all data sets of a command, and remember their flags for error messages.

    Raises InputError as `sources` does."""
    names = [name for name in vars(args) if name.endswith(("dataset", "_data"))]
    names = [name for name in names if getattr(args, name) is not None]
    flags.clear()
    flags.update({getattr(args, name): f"--{name.replace('_', '-')}" for name in names})
    return [source for name in names for source, *_ in sources(getattr(args, name))]


flags = {}  # a data set, or a source of it -> the flag that names it


def _flag(spec):
    """Return the flag and its data set for an error message."""
    return f"{flags.get(spec, '--dataset')} {spec}"


def with_columns(spec: str, columns: str) -> str:
    """Add items like "question=prompt,score>=2" to every source of `spec` except `tiny`."""
    specs = []
    for source, items, weight in sources(spec):
        items = ["".join(item) for item in items]
        items += [] if is_tiny(source) else map(str.strip, columns.split(","))
        specs.append(f"{source}{'?' * bool(items)}{'&'.join(items)}{'' if weight is None else f':{weight}'}")
    return ",".join(specs)


def is_tiny(spec: str) -> bool:
    """Return whether a data set comes only from the tiny world, so that its gold scores are defined."""
    return all(re.split("[:?]", part.strip())[0] == "tiny" for part in spec.split(","))


def _read(source, name, items, kind, split):
    """Read one source: the rows that meet its conditions, in our columns."""
    path = Path(source)
    if is_tiny(source):
        options = _tiny_options(source)
        kind = options.pop("kind", kind)
        name = f"tiny/{kind}"
        rows = enumerate(tiny.rows(kind, split, **options), 1)
    elif path.is_file():
        rows = formats.read_file(path)
    else:
        import datasets

        name, _, part = source.removesuffix("]").partition("[")
        config, _, part = part.rpartition("/")
        try:
            rows = enumerate(datasets.load_dataset(name, config or None, split=part or split), 1)
        except Exception as error:  # no such name, no such split, no network, ...
            raise InputError(f"{_flag(source)}: no such file of rows, and the hub failed: {error}") from error
        if path.is_dir() and not config:
            _check_folder(name, datasets.load_dataset_builder(name).config.data_files)
    if kind == "prompts" and path.suffix.lower() == ".txt":
        items = [("text", "=", "prompt"), *items]
    rows = _select([Row(f"{name}:{place}", row) for place, row in rows], items, source)
    read_as = formats.from_csv if path.suffix.lower() == ".csv" else formats.in_our_columns
    conditions = {column for column, sign, _ in items if sign != "="}
    made = []
    for row in rows:
        values, used = read_as(row.data)
        made.append(Row(row.where, values, frozenset(conditions | used)))
    return made


def _check_folder(folder, read):
    """Raise InputError if datasets reads only some files of a local folder: it goes by their names. Hidden
    files and those that may be metadata (.json, .txt) do not count. read: {split: paths of its files}."""
    paths = {Path(path).resolve() for of_split in (read or {}).values() for path in of_split}
    there = [path for path in sorted(Path(folder).rglob("[!.]*")) if "/." not in path.as_posix()]
    there = [path for path in there if path.suffix.lower() in (".jsonl", ".gz", ".csv", ".parquet")]
    if missing := [path.name for path in there if path.resolve() not in paths]:
        raise InputError(f"{folder}: {', '.join(missing[:3])} would not be read. Name files: A.jsonl,B.jsonl")


def _select(rows, items, source):
    """Apply the items of a source in order: rename columns, and keep the rows that meet the conditions.

    The number of rows that each condition drops is printed. Raises InputError for a column that no row
    has, or if no row is left."""
    for column, sign, value in items:
        there = {name for row in rows for name, cell in row.data.items() if cell is not None}
        if column not in there:
            raise InputError(f"{source}?{column}{sign}{value}: no row has that column, only {columns(there)}")
        if sign == "=":
            for i, row in enumerate(rows):
                if row.data.get(column) not in (None, ""):
                    cells = {name: cell for name, cell in row.data.items() if name != column}
                    rows[i] = row._replace(data={**cells, value: row.data[column]})
        else:
            n = len(rows)
            rows = [row for row in rows if _meets(row.data.get(column), sign, value)]
            progress.note(f"{source}: {column}{sign}{value} dropped {n - len(rows):,} of {n:,} rows")
    if not rows:
        raise InputError(f"{source}: the data set is empty{', or no row meets its conditions' * bool(items)}")
    return rows


def _meets(cell, sign, value):
    """Return whether a cell meets a condition; an empty cell meets no condition.

    For ==, cell and value are compared as text in any case first, then as numbers. A fraction in a float32
    column has only seven digits."""
    if sign == "==" and cell is not None and str(cell).lower() == value.lower():
        return True
    try:
        number, limit = float(cell), float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    is_close = isinstance(cell, float) and limit % 1 != 0 and math.isclose(number, limit, rel_tol=1e-7)
    return is_close or (number == limit and abs(limit) < 2**53 if sign == "==" else number >= limit)


def _tiny_options(source):
    """Parse "tiny:key=value:key=value" into arguments of tiny.rows, and perhaps `kind`.

    Raises InputError for an option that `tiny` does not have."""
    options = dict(item.partition("=")[::2] for item in source.split(":")[1:])
    if not all(re.fullmatch(TINY.get(name, "(?!)"), value) for name, value in options.items()):
        raise InputError(f"{_flag(source)}: options are {', '.join(TINY)}; values: docs/use/data.md")
    kinds = {"seed": int, "length_bias": float}
    return {name: kinds.get(name, str)(value) for name, value in options.items()}
