"""The files of a run: read with one clear line for what cannot be, and written whole or not at all."""

import contextlib
import json
import os
from pathlib import Path

from common.errors import InputError

MEND = "Mend it, or begin anew with --overwrite."


# -- read ------------------------------------------------------------------------------------------
def read_json(path, wanted=None, mend: str = MEND) -> dict:
    """The object in a .json file; {} if there is no file.

    wanted: {key: the type of its value}, or a function that raises a ValueError for what is wrong. mend: what
      to do about a file that is broken. InputError for one that is no JSON, no object, or not as wanted."""
    try:
        text = Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return _object(text, path, wanted, mend)


def read_jsonl(path, wanted=None, mend: str = MEND) -> list[dict]:
    """The rows of a .jsonl file, each as read_json has it; no file: no rows. A last line that a crash cut
    short is left out. InputError for any other that is no row: what stands behind it must not be lost."""
    rows, lines = [], []
    with contextlib.suppress(FileNotFoundError):
        lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        is_cut = number == len(lines) and line.startswith(b"{")
        row = _object(line, f"{path}:{number}", wanted, mend, is_cut) if line.strip() else None
        rows += [] if row is None else [row]
    return rows


def _object(text: bytes, where, wanted, mend, may_be_cut=False) -> dict | None:
    """The one reader of JSON that runs wrote. None: it is cut, and may be."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if may_be_cut:
            return None
        why = "it is empty" if not text.strip() else f"not JSON ({error})"
        raise InputError(f"{where}: {why}. {mend}") from None
    try:
        check(value, {})
        wanted(value) if callable(wanted) else check(value, wanted or {})
    except ValueError as error:
        raise InputError(f"{where}: {error}. {mend}") from None
    return value


def check(value, wanted: dict):
    """ValueError unless it is an object that has values of these types: {key: type}."""
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, wanted an object")
    for key, kind in wanted.items():
        if not isinstance(value.get(key), kind):
            shown = f"{key!r} is {repr(value[key])[:40]}" if key in value else f"there is no {key!r}"
            raise ValueError(f"{shown}, wanted {getattr(kind, '__name__', kind)}")


# -- write -----------------------------------------------------------------------------------------
def to_json(value, **options) -> str:
    """JSON that every reader takes: NaN and infinity, which it does not have, become null."""
    text = json.dumps(value, **options)
    if "NaN" in text or "Infinity" in text:
        text = json.dumps(json.loads(text, parse_constant=lambda _: None), **options)
    return text


def write_json(path, value):
    replace(path, to_json(value, indent=2) + "\n")


def write_jsonl(path, rows: list[dict]):
    replace(path, _lines(rows))


def append_jsonl(path, rows: list[dict], sync=True):
    """Append rows to `path`, with `sync` on the disk when this returns."""
    _write(path, "a", _lines(rows), sync)


def replace(path, text: str):
    """Write `text` to `path`, whole or not at all, on the disk when this returns."""
    temporary = f"{path}.tmp"
    _write(temporary, "w", text, sync=True)
    os.replace(temporary, path)
    sync_folder(Path(path).parent)


def sync_folder(folder):
    """After a rename in it: what is renamed or removed later is so on the disk later."""
    with contextlib.suppress(OSError):  # not every file system can
        number = os.open(folder, os.O_RDONLY)
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
    except OSError as error:  # of a full disk it does not say which file
        raise OSError(error.errno, error.strerror, str(path)) from None
