"""Convert files of several kinds and rows of public data sets to the columns of docs/use/data.md."""

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

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")  # of the files that can be read
NOT_TEXT = set(  # the columns that something here reads, and that hold neither text nor numbers alone
    """messages conversations context_messages trajectory history responses label is_safety chosen_is_safe
    rejected_is_safe chosen_behavior_logprobs rejected_behavior_logprobs tags completions answers
    is_response_0_safe is_response_1_safe info summaries choice turns""".split()
)

EXAMPLES = {  # of each kind of row those that an error shows; docs/use/data.md has more
    "SFT": """{"prompt": "2 + 2?", "completion": "4"}
{"instruction": "Translate.", "input": "chat", "output": "cat"}
{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}""",
    "preference": """{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
{"prompt": "2 + 2?", "completion": "5", "label": false}
{"instruction": "2 + 2?", "responses": [{"text": "4", "score": 0.9}, {"text": "22", "score": 0.0}]}""",
    "prompt": '{"prompt": "2 + 2?"}',
}


class WrongColumns(ValueError):
    """A row that is none of its kind, of EXAMPLES. wanted: what would be."""

    def __init__(self, row, kind):
        super().__init__(f"columns {columns(row)} are no {kind} row")
        examples = " or ".join(EXAMPLES[kind].splitlines())
        self.wanted = f"; wanted {examples}; --columns old=new renames columns"


def columns(row) -> str:
    """A row's columns (or these names), the first sixteen, for messages."""
    return f"[{', '.join(ascii(str(name)[:40]) for name in sorted(row, key=str)[:16])}]"


def unreadable(name, value, why) -> ValueError:
    """What is wrong with a cell, which may mean something else in this file than here."""
    mend = f"if it means something else, --columns {name}=my_{name}"
    return ValueError(f"{name} {repr(value)[:40]} is {why}; {mend}")


def number(value, name="score") -> float:
    """A number, or the text of one; 1 of true. ValueError for what is none, or is not finite."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(float(value)):
            return float(value)
    raise unreadable(name, value, "no number")


# -- what of a row is read -------------------------------------------------------------------------
class Cells(dict):
    """A row, or an object inside of one, as its reader sees it: null is as no value at all. It notes what is
    asked for, `messages.role` for one inside.

    read: these paths, of the whole row. prefix: this object's own, with a dot. passes: whether the chat
    template reads a key of messages that nothing here does."""

    def __contains__(self, name):
        return dict.get(self, name) is not None

    def __getitem__(self, name):
        self.read.add(self.prefix + name)
        return dict.__getitem__(self, name)

    def get(self, name, default=None):
        return self[name] if name in self else default


def cells(value, read=None, passes=lambda key: True, prefix=""):
    """`value` with all objects inside of it as Cells; Cells as they are."""
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
    """The paths of what a row holds and nobody read. Inside of a cell that was read whole there are none."""
    for name, value in row.items():
        path = f"{prefix}{name}"
        if path not in read and value not in (None, "", [], {}):
            yield path
        elif isinstance(value, dict | list) and any(other.startswith(f"{path}.") for other in read):
            for item in value if isinstance(value, list) else [value]:
                yield from unread(item, read, f"{path}.") if isinstance(item, dict) else ()


# -- public sets -----------------------------------------------------------------------------------
def _dialogue(prompt):
    """HelpSteer2's marks between turns -> HH-RLHF's. A single turn has none."""
    names = {"\n<extra_id_1>User\n": "\n\nHuman: ", "\n<extra_id_1>Assistant\n": "\n\nAssistant: "}
    pieces = re.split("(" + "|".join(names) + ")", prompt)
    return prompt if len(pieces) == 1 else "\n\nHuman: " + "".join(names.get(part, part) for part in pieces)


def _post(info):
    """A post of Reddit as OpenAI asks for its TL;DR (arXiv:2009.01325, table 4), or an article."""
    if "post" not in info:
        return f"{info['article']}\n\nTL;DR:"
    return f"SUBREDDIT: r/{info['subreddit']}\n\nTITLE: {info['title']}\n\nPOST: {info['post']}\n\nTL;DR:"


PUBLIC = {  # the columns by which a row of a public set is known -> what it is in our columns
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
    "chosen rejected": lambda row: {"responses": [  # RewardBench 2: lists of texts; + refuses all others
        {"text": "" + text, "score": int(i < len(row["chosen"]))}
        for i, text in enumerate([] + row["chosen"] + row["rejected"])]},
    "info summaries choice": lambda row: {"prompt": _post(row["info"]), "responses": [  # OpenAI's summaries
        {"text": x["text"], "score": int(i == row["choice"])} for i, x in enumerate(row["summaries"])]},
    # TL;DR's own summaries; a space stands before the texts of `summaries`, too
    "subreddit title post summary": lambda row: {"prompt": _post(row), "completion": " " + row["summary"]},
    "turns": lambda row: {"prompt": "" + dict.get(row, "turns")[0]},  # MT-Bench; evaluate.py reads them all
}  # fmt: skip


def in_our_columns(row: dict) -> tuple[dict, set[str]]:
    """(a row of a public set with our columns beside its own, the paths of ours and of what they are made
    of); (the row as it is, nothing) of any other, or of one that has ours."""
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
BROKEN = (ValueError, TypeError, RecursionError, csv.Error, EOFError, gzip.BadGzipFile, zlib.error)


def read_file(path: Path):
    """(place, row) of every row of a file: its line, its number in a list, its row in a spreadsheet."""
    place = 1
    kind = "JSON" if ".json" in path.name else path.suffix[1:]
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            for row in _rows(file, path.suffix.lower()):
                if not isinstance(row, dict | tuple):
                    raise TypeError(f"{type(row).__name__}, wanted an object")
                if None in row:
                    raise TypeError("more cells than names above: put a text that holds commas in quotes")
                if row != ():
                    yield place, row
                place += 1
    except UnicodeDecodeError as error:
        line = place + error.object.count(b"\n", 0, error.start)
        raise InputError(f"{path}:{line}: not utf-8: save it so (spreadsheets as CSV UTF-8)") from None
    except BROKEN as error:
        raise InputError(f"{path}:{place}: not {kind} ({error}), mend or drop it") from None


def _rows(file, suffix):
    """The rows of a file; () for a line that is none."""
    if suffix in (".jsonl", ".gz"):
        return (json.loads(line) if line.strip() else () for line in file)
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(file).to_pylist()  # which refuses a name that is there twice
    text = file.read().decode("utf-8-sig")
    if suffix == ".txt":
        return ({"text": line.rstrip("\r\n")} if line.strip() else () for line in io.StringIO(text))
    if suffix == ".csv":  # below the names; some countries' spreadsheets write ;
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        csv.field_size_limit(sys.maxsize)
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = [name for name in rows.fieldnames or () if name]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"columns {columns(twice)} twice")
        return itertools.chain([()], rows)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        return (json.loads(line) if line.strip() else () for line in text.splitlines())  # it is JSON lines
    return rows.get("data", [rows]) if isinstance(rows, dict) else rows


def from_csv(row: dict) -> tuple[dict, set[str]]:
    """in_our_columns of a row of a .csv file, whose cells are text: an empty one is None, in a column of
    NOT_TEXT it is what JSON reads."""
    row = {name: cell or None for name, cell in row.items()}
    for name in NOT_TEXT & {name for name, cell in row.items() if isinstance(cell, str)}:
        with contextlib.suppress(ValueError):
            row[name] = json.loads(row[name].lower() if row[name].lower() in ("true", "false") else row[name])
    return in_our_columns(row)
