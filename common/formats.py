"""What people have -> rows in the columns of docs/data.md: files of several kinds, rows of public sets."""

import contextlib
import csv
import gzip
import io
import itertools
import json
import re
import zlib
from pathlib import Path

from common.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".txt", ".parquet")  # of the files that can be read
NOT_TEXT = set(  # the columns that something here reads, and that hold no text
    """messages conversations context_messages responses label score margin preference is_safety chosen_score
    rejected_score score_chosen score_rejected chosen_is_safe rejected_is_safe chosen_gold rejected_gold
    chosen_utility rejected_utility chosen_behavior_logprobs rejected_behavior_logprobs tags helpfulness
    completions answers is_response_0_safe is_response_1_safe""".split()
)
TEXT = "system prompt instruction input completion output text category subset chosen rejected rating".split()

EXAMPLES = {  # of each kind of row those that an error shows; docs/data.md has more
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


# -- public sets -----------------------------------------------------------------------------------
def _dialogue(prompt):
    """HelpSteer2's marks between turns -> HH-RLHF's. A single turn has none."""
    names = {"\n<extra_id_1>User\n": "\n\nHuman: ", "\n<extra_id_1>Assistant\n": "\n\nAssistant: "}
    parts = re.split("(" + "|".join(names) + ")", prompt)
    return prompt if len(parts) == 1 else "\n\nHuman: " + "".join(names.get(part, part) for part in parts)


ROLES = {"human": "user", "gpt": "assistant"}
PUBLIC = {  # the columns by which a row of a public set is known -> what it is in our columns
    "conversations": lambda row: {"messages": [  # ShareGPT
        {**m, "role": ROLES.get(m["from"], m["from"]), "content": m.get("value")} if "from" in m else m
        for m in row["conversations"]]},
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
}  # fmt: skip


def in_our_columns(row: dict) -> dict:
    """A row of a public set, with our columns beside its own; any other, or one that has them, as it is."""
    there = {name for name, value in row.items() if value is not None}
    for names, convert in PUBLIC.items():
        if set(names.split()) <= there:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
                ours = convert(row)
                if not there & (ours.keys() - set(names.split())):
                    return {**row, **ours}
    return row


# -- files -----------------------------------------------------------------------------------------
BROKEN = (ValueError, TypeError, RecursionError, csv.Error, EOFError, gzip.BadGzipFile, zlib.error)


def read_file(path: Path):
    """(place, row) of every row of a file: its line, its number in a list, its row in a spreadsheet."""
    place, kind = 1, "JSON" if ".json" in path.name else path.suffix[1:]
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

        return pyarrow.parquet.read_table(file).to_pylist()
    text = file.read().decode("utf-8-sig")
    if suffix == ".txt":
        return ({"text": line.rstrip("\r\n")} if line.strip() else () for line in io.StringIO(text))
    if suffix == ".csv":  # below the names; some countries' spreadsheets write ;
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return itertools.chain([()], rows)
    rows = json.loads(text)
    return rows.get("data", [rows]) if isinstance(rows, dict) else rows


def from_csv(row: dict) -> dict:
    """in_our_columns of a row of a .csv file, whose cells are text: an empty one is None, in a column of
    NOT_TEXT it is what JSON reads."""
    row = {name: cell or None for name, cell in row.items()}
    for name in NOT_TEXT & {name for name, cell in row.items() if isinstance(cell, str)}:
        with contextlib.suppress(ValueError):
            row[name] = json.loads(row[name].lower() if row[name].lower() in ("true", "false") else row[name])
    return in_our_columns(row)
