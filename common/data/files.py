"""Read and write the files of a run.

A file that cannot be read gives one clear line. A file is written whole or not at all.
"""

import contextlib
import json
import os
from pathlib import Path

from common.errors import InputError

MEND = "Repair it, or start again with --overwrite."


# -- read ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def reading(path, mend: str = MEND):
    """Turn errors in a file, or in its content, into one line that names it and says what to do about it.

    Inside the block, use the content as far as it has to be valid: a missing key or a wrong type then raises
    InputError here, not a traceback later.

    mend: the advice at the end of the message."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: cannot be read ({reason[:160]}). {mend}") from None


def read_text(flag, path) -> str:
    """Read the text file that a flag names. Raises InputError if there is none, or if it is not UTF-8."""
    with reading(f"{flag} {path}", "Name a text file in UTF-8."):
        return Path(path).read_text("utf-8-sig")


def read_json(path, mend: str = MEND, check=lambda value: None) -> dict:
    """Read the object in a .json file; return {} if the file does not exist.

    check: function that uses the object as far as it has to be valid.

    Raises InputError if the content is not a JSON object, or if `check` fails."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _object(Path(path).read_bytes(), path, mend, check)
    return {}


def read_jsonl(path, mend: str = MEND, check=lambda row: None) -> list[dict]:
    """Read the rows of a .jsonl file, each as in read_json; return [] if the file does not exist.

    A last line that a crash cut short is skipped. Any other invalid line raises InputError, because the
    rows after it must not get lost."""
    rows = []
    lines = []
    with contextlib.suppress(FileNotFoundError):
        lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        forgiven = InputError if number == len(lines) and line.startswith(b"{") else ()
        with contextlib.suppress(forgiven):
            rows += [_object(line, f"{path}:{number}", mend, check)] if line.strip() else []
    return rows


def _object(text: bytes, where, mend, check) -> dict:
    """Parse and check a JSON object; every reader of files that runs wrote uses this function."""
    with reading(where, mend):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, got {type(value).__name__}")
        check(value)
    return value


# -- write -----------------------------------------------------------------------------------------
def to_json(value, **options) -> str:
    """Serialise a value as standard JSON, which has no NaN or infinity: they become null."""
    text = json.dumps(value, **options)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), **options)
    return text


def write_json(path, value):
    """Write a value to `path` as JSON, whole or not at all."""
    replace(path, to_json(value, indent=2) + "\n")


def write_jsonl(path, rows: list[dict]):
    """Write rows to `path`, one JSON object per line, whole or not at all."""
    replace(path, _lines(rows))


def append_jsonl(path, rows: list[dict], sync=True):
    """Append rows to `path`. With `sync` they are on the disk when this returns."""
    _write(path, "a", _lines(rows), sync)


def replace(path, text: str):
    """Write `text` to `path`, whole or not at all; it is on the disk when this returns."""
    temporary = f"{path}.tmp"
    _write(temporary, "w", text, sync=True)
    os.replace(temporary, path)
    flush(Path(path).parent)


def flush(path):
    """Write a file, or a folder after a rename in it, to the disk, so that a later rename or removal cannot
    reach the disk first. Raises OSError if that fails for a file: the disk may be full."""
    is_folder = Path(path).is_dir()
    with contextlib.suppress(OSError if is_folder else ()):  # not every file system can for folders
        number = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)  # Windows flushes what it may write
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _lines(rows):
    return "".join(to_json(row, ensure_ascii=False) + "\n" for row in rows)


def _write(path, mode, text, sync):
    try:
        with open(path, mode, encoding="utf-8", errors="replace") as file:  # half a character becomes `?`
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:  # that of a full disk does not name the file
        raise OSError(error.errno, error.strerror, str(path)) from None
