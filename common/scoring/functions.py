"""Use the user's own functions as scorers: --scorer FILE.py:function or module:function.

Each rank calls the function with its own rows (docs/use/scorers.md):
fn(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float], or {part: list[float]}.

`module:function=text` calls function(text) once and scores with the function that it returns; for example
common.programs.ai_feedback:rater=MODEL is an AI judge.

If only the order of responses matters, a function may compare two of them. Its attribute `pairwise` is then
True: fn(duels: list[(prompt messages, a, b)]) -> list of log odds log P(a beats b) / P(b beats a), as in
common.programs.pairwise:oracle=RUN.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import math
import os
import re
import runpy
import sys
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from common import responses
from common.errors import InputError
from common.data import formats, message_columns, mixtures

NAMED = r"(?:(?:[A-Za-z]:[\\/])?[^:*]+\.py|[\w.]+):\w+"  # FILE.py:function or module:function
WANTED = "expected module:function or FILE.py:function"
# Scripts log these as reward/NAME, so no part may have such a name
LOGGED = {"score", "deviation", "normalised", "gated", "gold", "chosen", "rejected", "margin"}


class Term(NamedTuple):
    function: object
    name: str = ""  # as given to --scorer
    text: str | None = None  # if given, function(text) is the scorer


def term_of(spec) -> Term | None:
    """Find the function that --scorer names; None if it names a model. Raises InputError for anything that
    looks like a function but does not name exactly one."""
    name = "" if os.path.isdir(spec) else spec.strip()  # a folder is a model, whatever its name looks like
    if match := re.fullmatch(rf"({NAMED})(?:=(.+))?", name):
        return Term(named_function("--scorer", match[1]), name, match[2])
    if re.search(rf"{NAMED}|\.py$", name):
        only = ", one function only: it may return {part: numbers}, which are summed"
        raise InputError(f"--scorer {spec}: {WANTED}{only if re.search('[*+]', spec) else ''}")
    return None


def compares(term) -> bool:
    """Return whether the function compares two responses."""
    return getattr(term.function, "pairwise", False)


def named_function(flag, spec):
    """Import the function `FILE.py:function` or `module:function`; modules in the working directory are found
    too. Raises InputError, which names `flag`, if that fails."""
    place, _, name = spec.rpartition(":")
    sys.path.append(os.getcwd())
    try:
        is_file = place.endswith(".py")
        function = (_run(Path(place).resolve()) if is_file else vars(importlib.import_module(place)))[name]
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        raise InputError(f"{flag} {spec}: {type(error).__name__}: {error}; {WANTED}") from error
    if not callable(function):
        raise InputError(f"{flag} {spec} is {type(function).__name__}, {WANTED}")
    return function


@functools.cache
def _run(file) -> dict:
    """Run a file and return its globals. The file can import other files in its folder."""
    sys.path.append(str(file.parent))
    return runpy.run_path(str(file))


def try_functions(args):
    """Try the functions of --scorer and --safety-scorer on the first prompt of --dataset, with two answers of
    which one is empty: a mistake then shows within seconds. `module:function=text` is not tried, because it
    may load a model."""
    if not (getattr(args, "iterations", 1) or getattr(args, "eval_prompts", 1)):
        return  # DPO on given pairs scores nothing
    specs = [getattr(args, name, None) or "" for name in ("scorer", "safety_scorer")]
    terms = [term for term in map(term_of, specs) if term and term.text is None]
    prompts = []
    answers = [responses.Response([], text, True) for text in ("The answer is 1. (A made-up answer.)", "")]
    split = getattr(args, "split", "train")
    for row in mixtures.load_rows(args.dataset, "prompts", split)[:1] if terms else ():
        with contextlib.suppress(ValueError):  # a row without a prompt, which its reader reports
            prompts.append(responses.Prompt([], message_columns.prompt_turns(row.data), row))
    for term, prompt in itertools.product(terms, prompts):
        given = _call(term, [(prompt, *answers)] if compares(term) else [(prompt, x) for x in answers])
        if not all(math.isfinite(x) for by_part in given for x in by_part.values()):
            raise InputError(f"--scorer {term.name} returned {given} for made-up answers, not finite numbers")


def _call(term, batch) -> list[dict[str, float]]:
    """Call a function on a batch of (prompt, response), or of (prompt, a, b) if it compares. Returns one
    {part: number} for each; the part is "" if the function returns a list.

    Raises InputError if the function raises, or returns anything but a number for each of the batch, or if a
    part has a name in LOGGED."""
    questions = [prompt.question for prompt, *_ in batch]
    texts = [response.written or response.text for _, response, *_ in batch]
    # Copies: changes that a function makes must not reach the next response, the pool or the data
    rows = [copy.deepcopy({**prompt.row.data, "messages": prompt.turns}) for prompt, *_ in batch]
    did = "raised"
    n = len(batch)
    try:
        if compares(term):
            texts_b = [b.written or b.text for _, _, b in batch]
            given = term.function([(row["messages"], a, b) for row, a, b in zip(rows, texts, texts_b)])
        else:
            given = term.function(questions, texts, rows)
        did = f"returned {repr(given)[:80]}, expected {n} numbers or {{part: {n} numbers}}:"
        by_part = given if isinstance(given, dict) else {"": given}
        by_part = {str(part): _numbers(values) for part, values in by_part.items()}
        lengths = [len(column) for column in by_part.values()]
        if set(lengths) != {n}:
            raise ValueError(f"the lengths are {lengths}")
        if taken := sorted(by_part.keys() & LOGGED):
            raise ValueError(f"reward/{taken[0]} is a metric of our own: give the part another name")
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        line = error.__traceback__.tb_next  # the function's own line, or None
        did += f" in line {line.tb_lineno}," if line and did == "raised" else ""
        where = f"{batch[0][0].row.where}, columns {formats.columns(rows[0])}"
        question = f"{n} responses, the first {texts[0][:80]!r} to {questions[0][:80]!r}"
        why = f"{did} {type(error).__name__}: {error}; called with {question} ({where})"
        raise InputError(f"--scorer {term.name} {why}") from error
    return [dict(zip(by_part, parts_of_one)) for parts_of_one in zip(*by_part.values())]


def _numbers(values) -> list[float]:
    """Convert a function's result to floats: a list, an array, a tensor, or anything else with an order.

    Raises TypeError for text, and for sets and mappings, because their order says nothing."""
    if isinstance(values, str | bytes | bytearray | Set | Mapping):
        raise TypeError(f"expected a list, not a {type(values).__name__}")
    values = [x.item() if hasattr(x, "item") else x for x in values]  # elements of tensors and arrays
    if any(isinstance(x, str | bytes) for x in values):  # float("1") would hide the mistake
        raise TypeError("expected numbers, not text")
    return [float(x) for x in values]
