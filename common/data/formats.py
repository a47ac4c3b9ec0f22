"""Read data files, and convert rows of public data sets to the columns of docs/use/data.md."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import math
import re
import sys
import zlib
from pathlib import Path

from common.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")  # files that can be read
NOT_TEXT = set(  # columns whose values are not just text or numbers, so that a .csv file has JSON there
    """messages conversations context_messages trajectory history responses label is_safety chosen_is_safe
    rejected_is_safe chosen_behavior_logprobs rejected_behavior_logprobs tags completions answers
    is_response_0_safe is_response_1_safe info summaries choice turns""".split()
)

EXAMPLES = {  # rows that error messages show, by kind; docs/use/data.md has more
    "SFT": """{"prompt": "2 + 2?", "completion": "4"}
{"instruction": "Translate.", "input": "chat", "output": "cat"}
{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}""",
    "preference": """{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
{"prompt": "2 + 2?", "completion": "5", "label": false}
{"instruction": "2 + 2?", "responses": [{"text": "4", "score": 0.9}, {"text": "22", "score": 0.0}]}""",
    "prompt": '{"prompt": "2 + 2?"}',
}


class WrongColumns(ValueError):
    """A row whose columns fit no format of its kind. wanted: examples of rows that fit, for the message."""

    def __init__(self, row, kind):
        empty = [name for name, cell in row.items() if cell in (None, "")]
        why = f" (empty: {columns(empty)})" if empty else ""
        super().__init__(f"columns {columns(row)} match no format of {kind} rows{why}")
        examples = " or ".join(EXAMPLES[kind].splitlines())
        self.wanted = f"; expected {examples}; rename columns with --columns old=new"


def columns(row) -> str:
    """List a row's columns, or other names, for a message: the first sixteen in alphabetical order."""
    return f"[{', '.join(ascii(str(name)[:40]) for name in sorted(row, key=str)[:16])}]"


def unreadable(name, value, why) -> ValueError:
    """Return the error for a cell that cannot be used.

    The column may have another meaning in the user's file, so the message says how to rename it."""
    mend = f"if the column means something else, rename it: --columns {name}=my_{name}"
    return ValueError(f"{name} {repr(value)[:40]} is {why}; {mend}")


def number(value, name="score") -> float:
    """Convert a number, or the text of a number, to float; True becomes 1.

    Raises ValueError if the value is not a finite number."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(float(value)):
            return float(value)
    raise unreadable(name, value, "not a finite number")


# -- record which columns are read -----------------------------------------------------------------
class Cells(dict):
    """A row, or an object inside a row, that records which of its columns are read. Null counts as missing.

    read: set of the paths read so far in the whole row, such as `messages.role`.
    prefix: the path of this object with a dot behind it; empty for the row itself.
    passes: function that says whether the chat template uses a key of a message that nothing else reads."""

    def __contains__(self, name):
        return dict.get(self, name) is not None

    def __getitem__(self, name):
        self.read.add(self.prefix + name)
        return dict.__getitem__(self, name)

    def get(self, name, default=None):
        return self[name] if name in self else default


def cells(value, read=None, passes=lambda key: True, prefix=""):
    """Wrap a row and all objects inside it as Cells; a value that is Cells already stays as it is."""
    read = set() if read is None else read
    if isinstance(value, list):
        return [cells(item, read, passes, prefix) for item in value]
    if not isinstance(value, dict) or isinstance(value, Cells):
        return value
    made = Cells({name: cells(item, read, passes, f"{prefix}{name}.") for name, item in value.items()})
    made.read = read
    made.passes = passes
    made.prefix = prefix
    return made


def unread(row: dict, read, prefix=""):
    """Yield the paths of the values in a row that nothing has read.

    If a cell was read whole, nothing inside it counts as unread."""
    for name, value in row.items():
        path = f"{prefix}{name}"
        if path not in read and value not in (None, "", [], {}):
            yield path
        elif isinstance(value, dict | list) and any(other.startswith(f"{path}.") for other in read):
            for item in value if isinstance(value, list) else [value]:
                yield from unread(item, read, f"{path}.") if isinstance(item, dict) else ()


# -- public sets -----------------------------------------------------------------------------------
def _dialogue(prompt):
    """Convert a dialogue with HelpSteer2's marks to one with HH-RLHF's. A single turn has no marks."""
    names = {"\n<extra_id_1>User\n": "\n\nHuman: ", "\n<extra_id_1>Assistant\n": "\n\nAssistant: "}
    pieces = re.split("(" + "|".join(names) + ")", prompt) if isinstance(prompt, str) else [prompt]
    return prompt if len(pieces) == 1 else "\n\nHuman: " + "".join(names.get(part, part) for part in pieces)


def _post(info):
    """Render a Reddit post as OpenAI's prompt for a TL;DR (arXiv:2009.01325, table 4), or an article."""
    if "post" not in info:
        return f"{info['article']}\n\nTL;DR:"
    return f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}\n\nTL;DR:"


PUBLIC = {  # columns that identify a public data set -> function that gives its row in our columns
    "question answer": lambda row: {"prompt": row["question"], "completion": row["answer"]},  # GSM8K
    "prompt response helpfulness": lambda row: {  # HelpSteer2
        "prompt": _dialogue(row["prompt"]), "completion": row["response"], "score": row["helpfulness"]},
    "prompt response_1 response_2 preference_strength": lambda row: {  # HelpSteer2's preferences, -3 to 3
        "prompt": _dialogue(row["prompt"]), "responses": [
            {"text": row["response_1"], "score": 0},
            {"text": row["response_2"], "score": row["preference_strength"]}]},
    "prompt answers": lambda row: {  # Nectar
        "responses": [{"text": x["answer"], "score": -x["rank"]} for x in row["answers"]]},
    "question chosen rejected": lambda row: {"prompt": row["question"]},  # Orca's pairs
    "prompt response_0 response_1 better_response_id": lambda row: {"responses": [  # PKU-SafeRLHF
        {"text": row[f"response_{i}"], "score": int(int(row["better_response_id"]) == i),
         "is_safe": row[f"is_response_{i}_safe"]} for i in (0, 1)]},
    "history human_ref_A human_ref_B score_A score_B": lambda row: {"prompt": row["history"], "responses": [
        {"text": row[f"human_ref_{x}"], "score": row[f"score_{x}"]} for x in "AB"]},  # SHP
    "instruction completions": lambda row: {  # UltraFeedback
        "responses": [{"text": x["response"], "score": x["overall_score"]} for x in row["completions"]]},
    "chosen rejected": lambda row: {"responses": [  # RewardBench 2: lists of texts; + fails for others
        {"text": "" + text, "score": int(i < len(row["chosen"]))}
        for i, text in enumerate([] + row["chosen"] + row["rejected"])]},
    "info summaries choice": lambda row: {"prompt": _post(row["info"]), "responses": [  # OpenAI's summaries
        {"text": x["text"], "score": int(i == row["choice"])} for i, x in enumerate(row["summaries"])]},
    # TL;DR's own summaries; a space comes first because the texts of `summaries` begin with one
    "subreddit title post summary": lambda row: {"prompt": _post(row), "completion": " " + row["summary"]},
    "turns": lambda row: {"prompt": "" + ([] + dict.get(row, "turns"))[0]},  # MT-Bench; evaluate.py reads all
}  # fmt: skip


def in_our_columns(row: dict) -> tuple[dict, set[str]]:
    """Convert a row of a public data set to our columns.

    Returns (the row with our columns added, the paths of the added columns and of the columns that they
    come from). Any other row, and a row that has our columns already, is returned unchanged with an empty
    set."""
    there = {name for name, value in row.items() if value is not None}
    for names, convert in PUBLIC.items():
        if set(names.split()) <= there:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
                read = set()
                converted = convert(cells(row, read))
                if not there & (converted.keys() - set(names.split())):
                    return {**row, **converted}, read | converted.keys()
    return row, set()


# -- files -----------------------------------------------------------------------------------------
BROKEN = (ValueError, TypeError, RecursionError, csv.Error, EOFError, OSError, zlib.error)


def read_file(path: Path):
    """Yield (place, row) for every row of a file.

    place: the line, the number in a list, or the row of a spreadsheet, counted from 1.

    Raises InputError that names the file and the place of a row that cannot be read."""
    place = 1
    kind = "JSON" if ".json" in path.name else path.suffix[1:]
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        try:
            for row in _rows(file, path.suffix.lower()):
                if not isinstance(row, dict | tuple):
                    raise TypeError(f"expected an object, got {type(row).__name__}")
                if None in row:
                    raise TypeError("more cells than column names: put texts that contain commas in quotes")
                if row != ():
                    yield place, row
                place += 1
        except UnicodeDecodeError as error:
            line = place + error.object.count(b"\n", 0, error.start)
            raise InputError(f"{path}:{line}: not UTF-8. Save it as UTF-8 (spreadsheet: CSV UTF-8)") from None
        except BROKEN as error:
            raise InputError(f"{path}:{place}: not valid {kind} ({error}). Correct or remove it") from None


def _rows(file, suffix):
    """Return an iterator over the rows of an open file; a line without a row gives ()."""
    if suffix in (".jsonl", ".gz"):
        return (json.loads(line) if line.strip() else () for line in file)
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file).to_pylist()  # it refuses duplicate names
    text = file.read().decode("utf-8-sig")
    if suffix == ".txt":
        return ({"text": line.rstrip("\r\n")} if line.strip() else () for line in io.StringIO(text))
    if suffix == ".csv":  # line 1 has the names; spreadsheets of some countries write ;
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        csv.field_size_limit(sys.maxsize)
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = [name for name in rows.fieldnames or () if name]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"columns {columns(twice)} appear twice")
        return itertools.chain([()], rows)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return (json.loads(line) if line.strip() else () for line in text.split("\n"))  # it holds JSON lines
    return rows.get("data", [rows]) if isinstance(rows, dict) else rows


def from_csv(row: dict) -> tuple[dict, set[str]]:
    """Convert a row of a .csv file to our columns, as in_our_columns does. All its cells are text.

    An empty cell becomes None. A cell in a column of NOT_TEXT is parsed as JSON if it is valid JSON."""
    row = {name: cell or None for name, cell in row.items()}
    for name in NOT_TEXT & {name for name, cell in row.items() if isinstance(cell, str)}:
        with contextlib.suppress(ValueError):
            row[name] = json.loads(row[name].lower() if row[name].lower() in ("true", "false") else row[name])
    return in_our_columns(row)
