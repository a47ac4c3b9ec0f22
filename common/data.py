"""Data sets in standard formats -> token ids. docs/data.md has a table of row formats, one JSON line each.

`load_rows` reads `tiny`, hub names, files (formats.py) and mixtures of them; `sft_documents` turns rows into
token ids with a response mask, batches.py those into batches. A row that cannot be used is counted and named
(file:row: why), a file with none that can is an InputError. Tokens are made in one way everywhere: the chat
template renders the whole dialogue, which is tokenised as one text and begins, up to an answer, with exactly
the ids that generation starts from.
"""

import bisect
import collections
import contextlib
import functools
import itertools
import json
import re
import zlib
from datetime import datetime
from pathlib import Path

import jinja2
import torch

from common import dist, formats, metrics, tiny
from common.batches import Comparison, Document, Row, random_subset, split
from common.errors import InputError
from common.formats import WrongColumns, columns

# -- rows ------------------------------------------------------------------------------------------
# Of a mixture: source ? items : weight, with a point, for items may hold a colon; or source : weight
PART = re.compile(r"(.+?)(?:\?(.+?)(?::(\d*\.\d+))?|:(\d*\.?\d+))?")
ITEM = re.compile(r"(.+?)(==|>=|=)(.+)")  # column=name renames, the others are conditions
QUESTION = ("prompt", "instruction", "input")  # the columns that `question` reads
DIALOGUES = ("messages", "conversations", "context_messages", "trajectory")  # columns of messages
TINY = {  # the options of tiny: name -> what it may be
    "seed": r"[-+]?\d+", "length_bias": r"[-+]?\d*\.?\d+(e-?\d+)?", "label": "helpfulness|safety",
    "kind": "|".join(tiny.SIZES), "commands": rf"(\b({'|'.join(tiny.COMMANDS)})\b\+?)+",
}  # fmt: skip


def load_rows(spec: str, kind: str, split: str = "train") -> list[Row]:
    """All rows of `spec`, sources as in docs/data.md with commas between them, the same on every rank.

    kind, split: which rows of `tiny` (tiny.SIZES; "train" or "test"); split is the hub's default too."""
    listed = sources(spec)
    names = [Path(source).name for source, *_ in listed]  # files of one name are told apart by their folders
    names = [source if names.count(name) > 1 else name for name, (source, *_) in zip(names, listed)]
    data_sets = [_read(source, name, items, kind, split) for name, (source, items, _) in zip(names, listed)]
    weights = [weight for *_, weight in listed if weight is not None]
    if weights:
        if len(weights) < len(data_sets) or min(weights) <= 0:
            raise InputError(f"{_flag(spec)}: give every part a weight above 0, or none of them")
        # The largest mixture of these proportions that needs no row twice
        scale = min(len(rows) / weight for rows, weight in zip(data_sets, weights))
        sizes = [round(weight * scale) for weight in weights]
        if 0 in sizes:
            source, _, weight = listed[sizes.index(0)]
            why = f"the weight {weight:g} gives it no row: raise it, or leave it out"
            raise InputError(f"{_flag(source)}: {why}")
        data_sets = [random_subset(rows, size, _prompt_or_place) for rows, size in zip(data_sets, sizes)]
    rows = list(itertools.chain(*data_sets))
    fingerprint = dist.seed_of(*(zlib.crc32(repr(row.data).encode()) for row in rows))
    dist.barrier()  # some machines read for longer than a collective may last
    if len(set(dist.gather([fingerprint]))) > 1:
        raise InputError(f"{spec}: ranks read different rows; give all nodes the same file")
    return rows


def _prompt_or_place(row):
    """The key of a row in a mixture, which random_subset hashes: completions of one prompt stay together, no
    sorted file is cut at its end."""
    prompt = [row.data.get(column) for column in QUESTION]
    return repr(prompt) if any(prompt) else row.where


def sources(spec: str) -> list[tuple[str, list[tuple[str, str, str]], float | None]]:
    """(source, its items as (column, sign, name or value), weight) of every part of load_rows' `spec`.
    InputError for a part that cannot be, a file that is none."""
    results = []
    for part in spec.split(","):
        match = PART.fullmatch(part.strip())
        items = [ITEM.fullmatch(item) for item in (match and match[2] or "").split("&") if item]
        if not match or not all(items):
            raise InputError(f"{_flag(spec)}: wanted a, a,b, a:0.7,b:0.3 or a?old=new&score>=2:0.5")
        source, weight = match[1], match[3] or match[4]
        flags.setdefault(source, flags.get(spec, "--dataset"))
        if is_tiny(source):
            _tiny_options(source)
        elif Path(source).is_file() != source.lower().endswith(formats.SUFFIXES):
            wanted = f"none of {', '.join(formats.SUFFIXES)} (a spreadsheet: save it as CSV UTF-8)"
            raise InputError(f"{_flag(source)}: no such file, or {wanted}")
        results.append((source, [item.groups() for item in items], weight and float(weight)))
    return results


def sources_of(args) -> list[str]:
    """The sources of all data sets of a command, whose flags errors name from now on. InputError for one that
    cannot be there."""
    names = [name for name in vars(args) if name.endswith(("dataset", "_data"))]
    names = [name for name in names if getattr(args, name) is not None]
    flags.clear()
    flags.update({getattr(args, name): f"--{name.replace('_', '-')}" for name in names})
    return [source for name in names for source, *_ in sources(getattr(args, name))]


flags = {}  # a data set, or a part of one -> the flag that gave it


def _flag(spec):
    return f"{flags.get(spec, '--dataset')} {spec}"


def with_columns(spec: str, columns: str) -> str:
    """`spec` with the items of "question=prompt,score>=2" in every part that is not tiny."""
    specs = []
    for source, items, weight in sources(spec):
        items = ["".join(item) for item in items] + ([] if is_tiny(source) else columns.split(","))
        specs.append(f"{source}{'?' * bool(items)}{'&'.join(items)}{'' if weight is None else f':{weight}'}")
    return ",".join(specs)


def is_tiny(spec: str) -> bool:
    """True if all of a data set comes from the tiny world, so that its gold scores are defined."""
    return all(re.split("[:?]", part.strip())[0] == "tiny" for part in spec.split(","))


def _read(source, name, items, kind, split):
    path = Path(source)
    if is_tiny(source):
        options = _tiny_options(source)
        kind = options.pop("kind", kind)
        name, rows = f"tiny/{kind}", enumerate(tiny.rows(kind, split, **options), 1)
    elif path.is_file():
        rows = formats.read_file(path)
    else:
        import datasets

        name, _, part = source.removesuffix("]").partition("[")
        config, _, part = part.rpartition("/")
        try:
            rows = enumerate(datasets.load_dataset(name, config or None, split=part or split), 1)
        except Exception as error:  # no such name, no such split, no network, ...
            raise InputError(f"{_flag(source)}: no such file, and the hub gave: {error}") from error
    if kind == "prompts" and path.suffix.lower() == ".txt":
        items = [("text", "=", "prompt"), *items]
    rows = _select([Row(f"{name}:{place}", row) for place, row in rows], items, source)
    read_as = formats.from_csv if path.suffix.lower() == ".csv" else formats.in_our_columns
    conditions, made = {column for column, sign, _ in items if sign != "="}, []
    for row in rows:
        values, used = read_as(row.data)
        made.append(Row(row.where, values, frozenset(conditions | used)))
    return made


def _select(rows, items, source):
    """The rows that meet the conditions among `items`, with the columns that these rename, item by item."""
    for column, sign, value in items:
        there = {name for row in rows for name, cell in row.data.items() if cell is not None}
        if column not in there:
            raise InputError(f"{source}?{column}{sign}{value}: no row has that column, of {columns(there)}")
        if sign == "=":
            for i, row in enumerate(rows):
                if row.data.get(column) not in (None, ""):
                    cells = {name: cell for name, cell in row.data.items() if name != column}
                    rows[i] = row._replace(data={**cells, value: row.data[column]})
        else:
            n, rows = len(rows), [row for row in rows if _meets(row.data.get(column), sign, value)]
            note(f"{source}: {column}{sign}{value} dropped {n - len(rows):,} of {n:,} rows")
    if not rows:
        raise InputError(f"{source}: the data set is empty{', or no row meets its conditions' * bool(items)}")
    return rows


def _meets(cell, sign, value):
    """Compared as numbers, or, where one is none, with == as text. A cell without a value meets nothing."""
    try:
        return float(cell) == float(value) if sign == "==" else float(cell) >= float(value)
    except (TypeError, ValueError, OverflowError):
        return sign == "==" and cell is not None and str(cell).lower() == value.lower()


@functools.cache
def note(text):
    """Print it on rank 0, once."""
    if dist.is_main():
        print(text)


def _tiny_options(source):
    """The options of tiny.rows, and perhaps `kind`, in "tiny:key=value:key=value"."""
    options = dict(item.partition("=")[::2] for item in source.split(":")[1:])
    if not all(re.fullmatch(TINY.get(name, "(?!)"), value) for name, value in options.items()):
        wanted = "seed=1, length_bias=0.6, label=safety, kind=rankings and commands=copy+ends"
        raise InputError(f"{_flag(source)}: tiny takes options like {wanted} (docs/data.md)")
    kinds = {"seed": int, "length_bias": float}
    return {name: kinds.get(name, str)(value) for name, value in options.items()}


# -- rows -> messages ------------------------------------------------------------------------------
ALIASES = {
    "system": "system developer", "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard claude model bot ai",
}  # fmt: skip
ROLES = {alias: role for role, aliases in ALIASES.items() for alias in aliases.split()}
FLAGS = ("weight", "train", "training", "loss")  # keys of a message, false or 0 where it is not learnt
CALLS = ("tool_calls", "function_call")
MALFORMED = "a message is not {role, content} with text in both"


def read(rows, reader, name: str, kind: str, tokenizer=None) -> list:
    """reader(row) of every row, whose data it gets as formats.Cells, or the ValueError that it raises. What
    rows hold and the reader did not ask for is printed, once for each data set, and in how many rows it is.

    kind: of rows, for that line. tokenizer: whose chat template may read more keys of a message."""
    results, unread = [], collections.defaultdict(collections.Counter)
    for row in metrics.progress(len(rows), 0, f"read {name}", rows, lines=False):
        paths = set(row.read)
        results.append(value_or_error(reader, row._replace(data=cells_of(row.data, paths, tokenizer))))
        if not isinstance(results[-1], ValueError) and not row.where.startswith("tiny/"):
            unread[row.where.rpartition(":")[0]].update(set(formats.unread(row.data, paths)))
    for source, counts in unread.items():
        named = [f"{ascii(path)[1:-1][:60] or 'no name'} ({n:,})" for path, n in sorted(counts.items())]
        if named:
            note(f"{source}: not read as {kind} (in so many rows): {', '.join(named)}")
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
    return tokenizer is not None and render(tokenizer, turns) != render(tokenizer, with_key)


def sft_messages(row: dict) -> tuple[list[dict], bool]:
    """(messages ending in the assistant's turn, whether every assistant turn is a target) of an SFT row. A
    turn that is no target has `weight` 0. ValueError says what is wrong with the row. docs/data.md lists the
    columns."""
    row = formats.cells(row)
    if "label" in row and "chosen" not in row and "responses" not in row:
        if row["label"] not in (False, True):
            raise formats.unreadable("label", row["label"], "neither true nor false")
        if not row["label"]:
            raise ValueError("its label is not true, so the completion is not learnt")
    dialogue = dialogue_of(row)
    if dialogue and dialogue[-1]["role"] == "assistant":
        return check_messages(dialogue, row), True
    if "completion" in row and prompt_of(row):
        answer = turns(row["completion"], "assistant")
        if sum(turn["role"] == "assistant" for turn in answer) > 1:
            raise ValueError("the completion has several answers: write the dialogue as messages")
        messages = answered(row, answer)
    elif "output" in row and "instruction" in row:
        messages = answered(row, row["output"], instruction(row))
    elif "responses" in row and prompt_of(row) is not None:
        texts, scores = ranking(row["responses"])
        messages = answered(row, texts[scores.index(max(scores))] if texts else None)
    elif "chosen" in row:
        messages = answered(row, row["chosen"])
    elif row.keys() & {*DIALOGUES, "completion", "output", "responses", "chosen"} and prompt_of(row):
        raise ValueError("no response")
    else:
        raise WrongColumns(row, "SFT")
    return check_messages(messages, row), False


def dialogue_of(row) -> list[dict]:
    """The messages of the first of DIALOGUES that a row has."""
    return next((turns(row[name]) for name in DIALOGUES if row.get(name)), [])


def prompt_of(row, text=None) -> list[dict] | None:
    """The messages before an answer, by the row's columns of a dialogue, or of a question, with `history`
    before it; None without these. text: read in place of them all but `history`."""
    dialogue = dialogue_of(row) if text is None else []
    while dialogue and dialogue[-1]["role"] == "assistant":
        dialogue.pop()
    if dialogue:
        return dialogue
    text = question(row) if text is None else text
    if text is None:
        return None
    history, earlier = row.get("history", []), []
    if history in ("", text):  # SHP's is the prompt itself
        history = []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise formats.unreadable("history", history, "no list of [question, answer]")
        earlier += turns(turn[0], "user") + turns(turn[1], "assistant")
    return earlier + turns(text, "user")


def question(row):
    """The column `prompt`, or the row's `instruction`; None without either."""
    if "prompt" in row:
        return row["prompt"]
    return instruction(row) if "instruction" in row else None


def instruction(row):
    """The column `instruction` with the text of `input` behind it."""
    text, extra = row["instruction"], row.get("input")
    if not isinstance(extra, str | None):
        raise ValueError(f"input is {type(extra).__name__}, wanted text")
    return f"{text}\n\n{extra}" if isinstance(text, str) and extra else text


def answered(row, answer, text=None) -> list[dict]:
    """The messages of the row's prompt and this answer, which may be a whole dialogue: of a prompt beside it
    a system turn alone may not be in it. text: as of prompt_of."""
    prompt = prompt_of(row, text)
    if prompt is not None and not is_dialogue(answer):
        return prompt + turns(answer, "assistant")
    dialogue = turns(answer)
    there = [(turn["role"], turn["content"].strip()) for turn in dialogue]
    missing = [turn for turn in prompt or [] if (turn["role"], turn["content"].strip()) not in there]
    if any(turn["role"] != "system" for turn in missing) or missing and there[0][0] == "system":
        raise ValueError("the prompt is not that of the dialogue beside it")
    return missing + dialogue


def is_dialogue(value):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ROLES.get(str(value[0].get("role") or value[0].get("from")).lower()) != "assistant"
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def ranking(responses) -> tuple[list[str], list[float]]:
    """(texts, scores) of a column of {text, score}."""
    with contextlib.suppress(TypeError, KeyError, ValueError):
        texts, scores = [r["text"] for r in responses], [formats.number(r["score"]) for r in responses]
        if all(isinstance(text, str) for text in texts):
            return texts, scores
    raise ValueError("responses is no list of {text, score}")


def turns(value, role=None):
    """The messages in a column: a list of them, or one; the text of one turn of `role`; in a prompt, or
    without a role, an HH-RLHF dialogue, "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    if isinstance(value, list | dict):
        return [message(turn) for turn in (value if isinstance(value, list) else [value])]
    column = "prompt" if role == "user" else "response"
    if role and value is None:
        raise ValueError(f"no {column}")
    if role and not isinstance(value, str):
        raise ValueError(f"the {column} is {type(value).__name__}, wanted text or messages")
    if role and not (role == "user" and is_dialogue(value)):
        return [{"role": role, "content": value}]
    pieces = re.split(r"\n\n(Human|Assistant): ?", value) if isinstance(value, str) else [""]
    if pieces[0].strip() or len(pieces) < 3:
        raise ValueError("neither a list of messages nor a dialogue of \\n\\nHuman: and \\n\\nAssistant:")
    if role and not pieces[-1].strip():  # "\n\nAssistant:" at its end only opens the answer
        pieces = pieces[:-2]
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[who], "content": text} for who, text in zip(pieces[1::2], pieces[2::2])]


def message(value) -> dict:
    """A message, or one of ShareGPT's, as {role, content}, with `weight` 0 where it says that it is not to be
    learnt, and with the keys that the chat template reads. ValueError rather than losing anything else."""
    value = formats.cells(value)
    name = isinstance(value, dict) and (value["role"] if "role" in value else value.get("from"))
    if not isinstance(name, str):
        raise ValueError(MALFORMED)
    if name.strip().lower() not in ROLES:
        raise ValueError(f"a message of role {repr(name)[:40]}, wanted system, user or assistant")
    for key in CALLS:
        if value.get(key):
            raise ValueError(f"a message has {key}, which are not supported")
    made = {"role": ROLES[name.strip().lower()], "content": text_of(value)}
    for key in FLAGS:
        if key in value and value[key] not in (0, 1):
            raise ValueError(f"{key} {repr(value[key])[:40]} of a message, wanted 0 or 1")
        if key in value and not value[key]:
            made["weight"] = 0
    read_keys = {"role", "from", "content", "value", *FLAGS, *CALLS}
    more = [key for key in value if key in value and key not in read_keys and value.passes(key)]
    return {**made, **{key: value[key] for key in more}}


def text_of(message: dict) -> str:
    """The content of a message; of one in parts, their text. ValueError rather than losing anything."""
    content = message["content"] if "content" in message else message.get("value")
    if isinstance(content, list) and content:
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a message has a part of type {repr(kind)[:40]}, wanted text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message is null" if content is None else MALFORMED)
    return content


def check_messages(messages, row=None) -> list[dict]:
    """Messages, ending in the assistant's turn, as `message` gives them, after the text of the row's column
    `system` unless they have a system turn. ValueError says what is wrong with them."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages")
    messages = [message(turn) for turn in messages]
    *earlier, last = [(m["role"], m["content"].strip()) for m in messages]
    if last[0] != "assistant" or not last[1]:
        raise ValueError("no response")
    if ("assistant", "") in earlier:
        raise ValueError("an earlier answer is empty")
    if not any(text for _, text in earlier):
        raise ValueError("no prompt")
    if row and all(m["role"] != "system" for m in messages) and row.get("system"):
        if not isinstance(row["system"], str):
            raise ValueError(f"system is {type(row['system']).__name__}, wanted text")
        messages = [{"role": "system", "content": row["system"]}, *messages]
    if re.search("[\ud800-\udfff]", "".join(str(x) for m in messages for x in m.values())):
        raise ValueError("a lone surrogate in the text, which no tokenizer can encode")
    return messages


def check_prompt(messages: list, row=None) -> list[dict]:
    """check_messages for what an answer follows."""
    return check_messages([*messages, {"role": "assistant", "content": "an answer"}], row)[:-1]


def transcript(messages: list[dict]) -> str:
    """Messages as one text: a single one is its text, several are lines of `role: text`."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


# -- messages -> token ids -------------------------------------------------------------------------
SPECIAL = "the text holds a special token, which would end or open a turn in its middle"


class Rewritten(ValueError):
    """A chat template writes an answer in another way than it is."""


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The ids that a response to `messages` follows: the rendered turns and the opening of an answer."""
    text = render(tokenizer, messages, add_generation_prompt=True)
    starts = [start for start, _ in _answers(tokenizer, messages, text).values()]
    return _tokenize(tokenizer, text, starts)[0]


def encode(tokenizer, messages: list[dict], all_turns: bool = False) -> tuple[list[int], list[bool]]:
    """(ids, response mask) of a dialogue that ends with the assistant's turn, rendered up to the last
    answer's end token, which is added where the template writes none. Targets are the last answer, or every
    one, from where generation begins it to its end token. ValueError says why a dialogue has no such form."""
    if any(special_tokens(tokenizer).search(str(text)) for turn in messages for text in turn.values()):
        raise ValueError(SPECIAL)
    text = render(tokenizer, messages)
    answers = _answers(tokenizer, messages, text)
    if len(messages) - 1 not in answers:
        raise Rewritten("the chat template does not write the answer as it is right after its prompt")
    if len(answers) < sum(message["role"] == "assistant" for message in messages[1:]):
        all_turns = False  # the template rewrites earlier ones
    ids, ends = _tokenize(tokenizer, text, [start for start, _ in answers.values()])
    mask = [False] * len(ids)
    for i in list(answers)[0 if all_turns else -1 :]:
        start, end = answers[i]
        last = min(bisect.bisect_left(ends, end), len(ends) - 1)  # or one of several bytes of a character
        tokens = slice(bisect.bisect_right(ends, start), bisect.bisect_right(ends, ends[last]))
        mask[tokens] = [messages[i].get("weight") != 0] * len(mask[tokens])
    ids, mask = ids[: tokens.stop], mask[: tokens.stop]
    if ids[-1] != tokenizer.eos_token_id:  # the template ends no turns, but the model must learn to
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, messages[-1].get("weight") != 0]
    if not any(mask):
        raise ValueError("no answer is left to learn: their weight is 0")
    return ids, mask


def encode_responses(tokenizer, prompt: list[dict], texts: list[str]) -> tuple[list[int], list[list[int]]]:
    """(prompt ids, ids of each response), as `encode` gives them for each of the dialogues."""
    dialogues = [encode(tokenizer, [*prompt, {"role": "assistant", "content": text}]) for text in texts]
    start = min(mask.index(True) for _, mask in dialogues)
    return dialogues[0][0][:start], [ids[start:] for ids, _ in dialogues]


@functools.lru_cache(maxsize=4)
def special_tokens(tokenizer):
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.compile("|".join(map(re.escape, {*added, *tokenizer.all_special_tokens})))


def check_known(tokenizer, ids):
    """ValueError if most of these tokens stand for words that the tokenizer does not know."""
    unknown = tokenizer.unk_token_id  # GPT-2's is another name of its end token
    if unknown not in (None, tokenizer.eos_token_id) and 2 * ids.count(unknown) > len(ids):
        raise ValueError("the tokenizer knows few of its words: is it the right --model?")


def _answers(tokenizer, messages, text) -> dict[int, tuple[int, int]]:
    """{place among the messages: (start, end) in `text`, the rendered dialogue} of the assistant's answers,
    from the end of the opening that generation starts from to that of the end token. Without those that the
    template writes in another way once more turns follow, as templates do that drop thoughts."""
    answers = {}
    for i in range(1, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        done = render(tokenizer, messages[: i + 1])
        opening = before = render(tokenizer, messages[:i], add_generation_prompt=True)
        if not done.startswith(opening):  # only generation opens a thought, in DeepSeek R1's and Gemma 4's
            before = render(tokenizer, messages[:i])
        answer, end, _ = done[len(before) :].partition(tokenizer.eos_token)
        content = messages[i]["content"]
        content = content if content in answer else content.strip()
        start = 0 if before == opening else answer.rfind(content)
        lost = start and messages[i].keys() - {"role", "content", "weight"}  # a thought before it, for one
        if start >= 0 and not lost and text.startswith(before + answer + end):
            answers[i] = len(before) + start, len(before + answer + end)
    return answers


class Clock(datetime):
    """The clock of chat templates that write the date (strftime_now). It stands where the run began: texts of
    a resumed run, or of one that lasts over midnight, are then the same ones."""

    began = datetime.now()

    @classmethod
    def now(cls, tz=None):
        return cls.began


def render(tokenizer, messages, add_generation_prompt=False):
    turns = json.dumps(messages, default=str)
    return _rendered(tokenizer, str(tokenizer.chat_template), turns, add_generation_prompt)


@functools.lru_cache(maxsize=256)  # the responses to a prompt share the renderings of its turns
def _rendered(tokenizer, _, turns, opened):
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Clock  # what strftime_now asks
    try:
        return tokenizer.apply_chat_template(json.loads(turns), tokenize=False, add_generation_prompt=opened)
    except (jinja2.TemplateError, TypeError) as error:  # of one that refuses roles, or a thought in parts
        raise ValueError(f"the chat template refuses it: {error}") from None


def _tokenize(tokenizer, text, starts):
    """(ids of `text`, where in it each token ends), of the text as one; but cut at those of `starts`, where
    answers begin, at which the tokens before would be others than those that generation starts from: inside a
    token, and after two white spaces, which some tokenizers join at the end of a text alone."""
    if not tokenizer.is_fast:
        raise InputError("--model: a tokenizer without tokenizer.json does not say where its tokens end")

    def tokens(cuts):
        ids, spans = [], []
        for begin, end in itertools.pairwise([0, *cuts, len(text)]):
            piece = tokenizer(text[begin:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += piece["input_ids"]
            spans += [(begin + first, begin + last) for first, last in piece["offset_mapping"]]
        return ids, spans

    cuts = [start for start in starts if text[start - 2 : start].isspace()]
    ids, spans = tokens(cuts)
    after = {start: bisect.bisect_right(spans, start, key=lambda span: span[1]) for start in starts}
    inside = [start for start, i in after.items() if i < len(spans) and spans[i][0] < start]
    ids, spans = tokens(sorted({*cuts, *inside})) if inside else (ids, spans)
    return ids, [last for _, last in spans]


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
    """Apply make(row) to every row, or to items that have a row; with map_over_ranks' (x, y) make(row, x, y).
    Rows that raise ValueError are dropped; how many, why and where is printed. InputError if none is left."""
    made, dropped, wanted = [], {}, ""
    pairs = zip(rows, shared or itertools.repeat(()))
    for row, given in metrics.progress(len(rows), 0, f"tokenise {name}", pairs, lines=False):
        try:
            if errors := [x for x in given if isinstance(x, ValueError)]:
                raise errors[0]
            made.append(make(row, *given))
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


def sft_documents(rows: list[Row], tokenizer, max_length: int, name: str) -> list[Document]:
    """Rows -> documents of at most max_length tokens. A longer response is cut (and then has no end token), a
    row without a response, or room for one, is dropped; both are counted. InputError if nothing is left."""

    def document(row, dialogue, tokens):
        nonlocal cut
        (messages, all_turns), (ids, mask) = dialogue, tokens
        check_known(tokenizer, ids)
        if not any(mask[1:max_length]):
            raise ValueError(f"the prompt fills all {max_length} tokens (--max-length)")
        cut += len(ids) > max_length
        ids, mask = torch.tensor(ids[:max_length], dtype=torch.int32), torch.tensor(mask[:max_length])
        return Document(ids, mask, messages, row, all_turns=all_turns)

    cut = 0
    dialogues = read(rows, lambda row: sft_messages(row.data), name, "demonstrations", tokenizer)
    tokens = map_over_ranks(dialogues, lambda x: encode(tokenizer, *x))
    documents = map_rows(rows, document, name, tokens)
    if cut and dist.is_main():
        print(f"{name}: cut {cut:,} of {len(documents):,} documents to {max_length} tokens (--max-length)")
    return documents


def load_sft(spec: str, tokenizer, max_length: int, split="train", held_out=()) -> list[Document]:
    """load_rows and sft_documents, without the prompts of `held_out`."""
    documents = sft_documents(load_rows(spec, "sft", split), tokenizer, max_length, spec)
    return without_prompts_of(documents, held_out, spec)


def hold_out(documents: list[Document], share: float = 0.05, most: int = 500):
    """(training, held-out) documents, comparisons or prompts: by the hash of the first question whose answer
    each teaches, for dialogues that have a later one in common have the first one in common too."""
    firsts, hashes = [next(iter(d.questions.items())) for d in documents], {}
    for question, number in firsts:
        hashes[question] = min(number, hashes.get(question, number))
    ranked = sorted(hashes, key=hashes.get)
    held_out = set(ranked[: max(1, min(most, round(share * len(ranked))))]) if len(ranked) > 1 else set()
    sides = [], []
    for document, (question, _) in zip(documents, firsts):
        sides[question in held_out].append(document)
    return sides


def without_prompts_of(documents: list[Document], held_out: list[Document], name: str) -> list[Document]:
    """`documents`, comparisons or prompts without those that teach an answer to a question of `held_out`,
    whose figures they would flatter."""

    def other(document):
        if not held_out_questions.isdisjoint(document.questions):
            flags = "(--eval-dataset, --hold-out-rehearsed)"
            raise ValueError(f"the prompt is in the held-out set {flags}, or that of an earlier answer is")
        return document

    held_out_questions = {question for d in held_out for question in d.questions}
    return map_rows(documents, other, name)


def train_and_held_out(dataset, eval_dataset, load, tokenizer):
    """(training, held-out) documents; without eval_dataset tiny's own split or a share of the prompts is held
    out. No prompt is on both sides. load: of (spec, split). tokenizer: to show an example with."""
    train = load(dataset, split="train")
    if eval_dataset or is_tiny(dataset):
        held_out = load(eval_dataset or dataset, split="test")
    else:
        train, held_out = hold_out(train)
    train = without_prompts_of(train, held_out, dataset)
    if dist.is_main() and tokenizer:
        print(f"{dataset}: {len(train):,} to train on, {len(held_out):,} held out")
    if tokenizer:
        show(train, tokenizer)
    return train, held_out


n_shown = 0  # training examples that --preview asks for


def show(items, tokenizer):
    """Print the first document, comparison or prompt as it is trained on: special tokens and all, what is
    learnt between >>> and <<<. With --preview as many as it says, whole, and the program ends."""
    for item in items[: n_shown or 1] if dist.is_main() else ():
        if isinstance(item, Comparison):
            chosen, rejected = item.response_ids[0], item.response_ids[-1]
            texts = {"prompt": item.prompt_ids, "chosen": chosen, "rejected": rejected}
        else:
            texts = {type(item).__name__.lower(): item.ids}
        for name, ids in texts.items():
            mask, text = getattr(item, "response_mask", torch.zeros(len(ids))).tolist(), ""
            for learnt, places in itertools.groupby(range(len(ids)), key=mask.__getitem__):
                piece = tokenizer.decode([int(ids[i]) for i in places])
                text += f">>>{piece}<<<" if learnt else piece
            if not n_shown and len(text) > 300:
                text = f"{text[:140]} [...] {text[-140:]}"
            print(f"  {name} ({item.row.where}, {len(ids)} tokens): {text}")
    if n_shown:
        raise SystemExit(0)


# -- rows of PPO's other losses ------------------------------------------------------------------
def text_documents(args, tokenizer):
    """Rows of `text` -> documents in which every token but the first is learnt, the end token included."""

    def document(row):
        text = row.data.get("text")
        if not isinstance(text, str) or not text.strip():
            raise ValueError("no text")
        check_prompt([{"role": "user", "content": text}])
        if special_tokens(tokenizer).search(text):
            raise ValueError(SPECIAL)
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id][: args.max_length])
        # What is held out is told by the turns before an answer: here the text
        messages = [{"role": "text", "content": text}, {}]
        return Document(ids, torch.ones(len(ids), dtype=torch.bool), messages, row)

    name, rows = args.ptx_dataset, load_rows(args.ptx_dataset, "text")
    documents = read(rows, document, name, "text")
    return map_rows(rows, lambda row, document: document._replace(row=row), name, zip(documents))


def stream(documents, size, step, *key):
    """The documents of optimiser step `step` of an endless stream, in an order drawn anew for each pass."""
    n, places = len(documents), range(step * size, (step + 1) * size)
    return [documents[dist.shuffled(n, *key, place // n)[place % n]] for place in places]


def load_extra(args, tokenizer, held_out) -> tuple[dict[str, list[Document]], list[Document]]:
    """({"ptx": documents of --ptx-dataset, "rehearsal": of --rehearsal-data}, or less; held-out text)."""
    extra, held_out_text = {}, []
    if args.ptx_dataset:
        texts = without_prompts_of(text_documents(args, tokenizer), held_out, args.ptx_dataset)
        extra["ptx"], held_out_text = hold_out(texts, share=0.1, most=200)
    if args.rehearsal_data:
        extra["rehearsal"] = load_sft(args.rehearsal_data, tokenizer, args.max_length, held_out=held_out)
    return extra, held_out_text


def next_extra(extra, step, args) -> dict[str, list[Document]]:
    """Of each kind the documents of optimiser step `step`, if its loss counts."""
    sizes = {"ptx": args.ptx_batch_size, "rehearsal": args.rehearsal_batch_size}
    coefs = {"ptx": args.ptx_coef, "rehearsal": args.rehearsal_coef}
    names = [name for name in extra if coefs[name] > 0]
    return {name: stream(extra[name], sizes[name], step, args.seed, name) for name in names}
