"""The files of a run: read with one clear line for what cannot be, and written whole or not at all."""

import contextlib
import json
import os
from pathlib import Path

from common.errors import InputError

MEND = "Mend it, or begin anew with --overwrite."


# -- read ------------------------------------------------------------------------------------------
@contextlib.contextmanager
def reading(path, mend: str = MEND):
    """Turn what goes wrong with a file's content into one line that names the file and what to do about it.

    Use the content inside as far as it must be right: a missing key or a value of another type is then an
    InputError here, and no traceback later."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path}: cannot be read ({reason[:160]}). {mend}") from None


def read_json(path, mend: str = MEND, check=lambda value: None) -> dict:
    """The object in a .json file; {} if there is no file. InputError for one that is no JSON or no object, or
    that check(object), which uses it as far as it must be right, cannot take."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _object(Path(path).read_bytes(), path, mend, check)
    return {}


def read_jsonl(path, mend: str = MEND, check=lambda row: None) -> list[dict]:
    """The rows of a .jsonl file, each as read_json has it; no file: no rows. A last line that a crash cut
    short is left out. InputError for any other that is no row: what stands behind it must not be lost."""
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
    """The one reader of JSON that runs wrote."""
    with reading(where, mend):
        value = json.loads(text)
        if not isinstance(value, dict):
            raise TypeError(f"{type(value).__name__}, wanted an object")
        check(value)
    return value


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
