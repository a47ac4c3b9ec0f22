"""Data sets in standard formats -> token ids. docs/data.md has a table of row formats, one JSON line each.

`load_rows` reads `tiny`, hub names, files (formats.py) and mixtures of them; `sft_documents` turns rows into
token ids with a response mask, batches.py those into batches. A row that cannot be used is counted and named
(file:row: why), a file with none that can is an InputError. Tokens are made in one way everywhere: the chat
template renders the whole dialogue, which is tokenised as one text and begins, up to an answer, with exactly
the ids that generation starts from.
"""

import bisect
import contextlib
import functools
import itertools
import math
import re
import zlib
from datetime import datetime
from pathlib import Path

import jinja2
import torch

from common import dist, formats, metrics, tiny
from common.batches import Comparison, Document, Row, a_part, split
from common.errors import InputError
from common.formats import WrongColumns, columns

# -- rows ------------------------------------------------------------------------------------------
PART = re.compile(r"(.+?)(?:\?(.+?))?(?::(\d*\.?\d+))?")  # of a mixture: source ? items : weight
ITEM = re.compile(r"(.+?)(==|>=|=)(.+)")  # column=name renames, the others are conditions
QUESTION = ("prompt", "instruction", "input")  # the columns that `question` reads
TINY = {"seed": r"[-+]?\d+", "length_bias": r"[-+]?\d*\.?\d+(e-?\d+)?", "label": "helpfulness|safety"}
TINY |= {"kind": "|".join(tiny.SIZES), "commands": rf"(\b({'|'.join(tiny.COMMANDS)})\b\+?)+"}


def load_rows(spec: str, kind: str, split: str = "train") -> list[Row]:
    """All rows of `spec`, sources as in docs/data.md with commas between them, the same on every rank.

    kind, split: which rows of `tiny` (tiny.SIZES; "train" or "test"); split is the hub's default too."""
    listed = sources(spec)
    names = [Path(source).name for source, *_ in listed]  # files of one name are told apart by their folders
    names = [source if names.count(name) > 1 else name for name, (source, *_) in zip(names, listed)]
    parts = [_read(source, name, items, kind, split) for name, (source, items, _) in zip(names, listed)]
    weights = [weight for *_, weight in listed if weight is not None]
    if weights:
        if len(weights) < len(parts) or min(weights) <= 0:
            raise InputError(f"--dataset {spec!r}: give every part a weight above 0, or none of them")
        # The largest mixture of these proportions that needs no row twice
        scale = min(len(rows) / weight for rows, weight in zip(parts, weights))
        sizes = [round(weight * scale) for weight in weights]
        parts = [a_part(rows, size, _prompt_or_place) for rows, size in zip(parts, sizes)]
    rows = list(itertools.chain(*parts))
    fingerprint = dist.seed_of(*(zlib.crc32(repr(row.data).encode()) for row in rows))
    dist.barrier()  # some machines read for longer than a collective may last
    if len(set(dist.gather([fingerprint]))) > 1:
        raise InputError(f"{spec}: ranks read different rows; give all nodes the same file")
    return rows


def _prompt_or_place(row):
    """What tells which rows a mixture takes (a_part hashes it): completions of one prompt stay together, no
    sorted file is cut at its end."""
    prompt = [row.data.get(column) for column in QUESTION]
    return repr(prompt) if any(prompt) else row.where


def sources(spec: str) -> list[tuple[str, list[tuple[str, str, str]], float | None]]:
    """(source, its items as (column, sign, name or value), weight) of every part of load_rows' `spec`.
    InputError for a part that cannot be, a file that is none."""
    parts = []
    for part in spec.split(","):
        found = PART.fullmatch(part.strip())
        items = [ITEM.fullmatch(item) for item in (found and found[2] or "").split("&") if item]
        if not found or not all(items):
            raise InputError(f"--dataset {spec!r}: wanted a, a,b, a:0.7,b:0.3 or a?old=new&score>=2")
        source = found[1]
        if is_tiny(source):
            _tiny_options(source)
        elif Path(source).is_file() != source.lower().endswith(formats.SUFFIXES):
            wanted = f"none of {', '.join(formats.SUFFIXES)} (a spreadsheet: save it as CSV UTF-8)"
            raise InputError(f"--dataset {source}: no such file, or {wanted}")
        parts.append((source, [item.groups() for item in items], found[3] and float(found[3])))
    return parts


def sources_of(args) -> list[str]:
    """The sources of all data sets of a command. InputError for one that cannot be there."""
    specs = [spec for name, spec in vars(args).items() if name.endswith(("dataset", "_data"))]
    return [source for spec in specs if spec is not None for source, *_ in sources(spec)]


def with_columns(spec: str, columns: str) -> str:
    """`spec` with the items of "question=prompt,score>=2" in every part that is not tiny."""
    parts = []
    for source, items, weight in sources(spec):
        items = ["".join(item) for item in items] + ([] if is_tiny(source) else columns.split(","))
        parts.append(f"{source}{'?' * bool(items)}{'&'.join(items)}{'' if weight is None else f':{weight}'}")
    return ",".join(parts)


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

        name, _, part = source.rstrip("]").partition("[")
        config, _, part = part.rpartition("/")
        try:
            rows = enumerate(datasets.load_dataset(name, config or None, split=part or split), 1)
        except Exception as error:  # no such name, no such split, no network, ...
            raise InputError(f"--dataset {source}: no such file, and the hub gave: {error}") from error
    if kind == "prompts" and path.suffix.lower() == ".txt":
        items = [("text", "=", "prompt"), *items]
    rows = _select([Row(f"{name}:{place}", row) for place, row in rows], items, source)
    read = {*formats.TEXT, *formats.NOT_TEXT, *" ".join(formats.PUBLIC).split()}
    unread = {name for row in rows for name, value in row.data.items() if value is not None} - read
    if unread:
        _note(f"{source}: columns {columns(unread)} are not read")
    read_as = formats.from_csv if path.suffix.lower() == ".csv" else formats.in_our_columns
    return [row._replace(data=read_as(row.data)) for row in rows]


def _select(rows, items, source):
    """The rows that meet the conditions among `items`, with the columns that these rename, item by item."""
    for column, sign, value in items:
        there = {name for row in rows for name, cell in row.data.items() if cell is not None}
        if column not in there:
            raise InputError(f"{source}?{column}{sign}{value}: no row has that column, of {columns(there)}")
        if sign == "=":
            for i, row in enumerate(rows):
                has_value = row.data.get(column) not in (None, "")
                if has_value or column in row.data and value not in row.data:
                    rest = {name: cell for name, cell in row.data.items() if name != column}
                    rows[i] = row._replace(data={**rest, value: row.data[column]})
        else:
            n, rows = len(rows), [row for row in rows if _meets(row.data.get(column), sign, value)]
            _note(f"{source}: {column}{sign}{value} dropped {n - len(rows):,} of {n:,} rows")
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
def _note(text):
    """Print it on rank 0, once."""
    if dist.is_main():
        print(text)


def _tiny_options(source):
    """The options of tiny.rows, and perhaps `kind`, in "tiny:key=value:key=value"."""
    options = dict(item.partition("=")[::2] for item in source.split(":")[1:])
    if not all(re.fullmatch(TINY.get(name, "(?!)"), value) for name, value in options.items()):
        wanted = "seed=1, length_bias=0.6, label=safety, kind=rankings and commands=copy+ends"
        raise InputError(f"--dataset {source}: tiny takes options like {wanted} (docs/data.md)")
    kinds = {"seed": int, "length_bias": float}
    return {name: kinds.get(name, str)(value) for name, value in options.items()}


# -- rows -> messages ------------------------------------------------------------------------------
def sft_messages(row: dict) -> tuple[list[dict], bool]:
    """(messages ending in the assistant's turn, whether every assistant turn is a target) of an SFT row.
    ValueError says what is wrong with it. docs/data.md lists the columns."""
    if row.get("messages") is not None:
        return check_messages(row["messages"], row.get("system")), True
    asked = question(row)
    if "completion" in row and "prompt" in row:
        if row.get("label", True) not in (True,):
            raise ValueError("its label is not true, so the completion is not learnt")
        asked, answer = row["prompt"], row["completion"]
    elif "output" in row and "instruction" in row:
        asked, answer = question({**row, "prompt": None}), row["output"]
    elif "responses" in row and asked is not None:
        texts, scores = ranking(row["responses"])
        answer = texts[scores.index(max(scores))] if texts else None
    elif "chosen" in row and (is_dialogue(row["chosen"]) or not row.keys() & {"prompt", "instruction"}):
        asked, answer = [], turns(row["chosen"])  # with or without its prompt beside it
    elif "chosen" in row:
        answer = row["chosen"]
    else:
        raise WrongColumns(row, "SFT")
    messages = turns(asked, "user") + turns(answer, "assistant")
    return check_messages(messages, row.get("system")), False


def question(row):
    """The column `prompt`, or `instruction` with the text of `input` behind it; None without either."""
    if row.get("prompt") is not None or "instruction" not in row:
        return row.get("prompt")
    text, extra = row["instruction"], row.get("input")
    if not isinstance(extra, str | None):
        raise ValueError(f"input is {type(extra).__name__}, wanted text")
    return f"{text}\n\n{extra}" if isinstance(text, str) and extra else text


def printable(value) -> str | None:
    """A category as text, in which half a character becomes `?`."""
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def is_dialogue(value):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value[0].get("role") != "assistant"
    return isinstance(value, str) and value.startswith("\n\nHuman:")


def role(message) -> str | None:
    return message.get("role") if isinstance(message, dict) else None


def ranking(responses) -> tuple[list[str], list[float]]:
    """(texts, scores) of a column of {text, score}."""
    with contextlib.suppress(TypeError, KeyError, ValueError, OverflowError):
        texts, scores = [r["text"] for r in responses], [float(r["score"]) for r in responses]
        if all(isinstance(text, str) for text in texts) and all(map(math.isfinite, scores)):
            return texts, scores
    raise ValueError("responses is no list of {text, score}")


def turns(value, role=None):
    """The messages in a column: a list of them; the text of one turn of `role`; in a prompt, or without a
    role, an HH-RLHF dialogue, "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    if isinstance(value, list):
        return value
    if role and not (role == "user" and is_dialogue(value)):
        if value is None:
            raise ValueError("no prompt" if role == "user" else "no response")
        return [{"role": role, "content": value}]
    parts = re.split(r"\n\n(Human|Assistant): ?", value) if isinstance(value, str) else [""]
    if parts[0].strip() or len(parts) < 3:
        raise ValueError("neither a list of messages nor a dialogue of \\n\\nHuman: and \\n\\nAssistant:")
    if role and not parts[-1].strip():  # "\n\nAssistant:" at its end only opens the answer
        parts = parts[:-2]
    names = {"Human": "user", "Assistant": "assistant"}
    return [{"role": names[who], "content": text} for who, text in zip(parts[1::2], parts[2::2])]


MALFORMED = "a message is not {role, content} with text in both"


def text_of(message: dict) -> str:
    """The content of a message; of one in parts, their text. ValueError rather than losing anything."""
    content = message.get("content")
    if message.get("tool_calls"):
        raise ValueError("a message has tool_calls, which are not supported")
    if isinstance(content, list) and content:
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"a message has a part of type {repr(kind)[:40]}, wanted text")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError("the content of a message is null" if content is None else MALFORMED)
    return content


def check_messages(messages, system=None) -> list[dict]:
    """The messages, ending in the assistant's turn, as {role, content}, after the text of the column `system`
    unless they have a system turn. ValueError says what is wrong with them."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("no messages")
    if not all(isinstance(role(message), str) for message in messages):
        raise ValueError(MALFORMED)
    messages = [{"role": message["role"], "content": text_of(message)} for message in messages]
    *earlier, last = [(m["role"], m["content"].strip()) for m in messages]
    if last[0] != "assistant" or not last[1]:
        raise ValueError("no response")
    if ("assistant", "") in earlier:
        raise ValueError("an earlier answer is empty")
    if not any(text for _, text in earlier):
        raise ValueError("no prompt")
    if system and all(m["role"] != "system" for m in messages):
        if not isinstance(system, str):
            raise ValueError(f"system is {type(system).__name__}, wanted text")
        messages = [{"role": "system", "content": system}, *messages]
    if re.search("[\ud800-\udfff]", "".join(m["role"] + m["content"] for m in messages)):
        raise ValueError("a lone surrogate in the text, which no tokenizer can encode")
    return messages


def check_prompt(messages: list, system=None) -> list[dict]:
    """check_messages for what an answer follows."""
    return check_messages([*messages, {"role": "assistant", "content": "an answer"}], system)[:-1]


def transcript(messages: list[dict]) -> str:
    """Messages as one text: a single one is its text, several are lines of `role: text`."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{m['role']}: {m['content']}" for m in messages)


# -- messages -> token ids -------------------------------------------------------------------------
SPECIAL = "the text holds a special token, which would end or open a turn in its middle"


def prompt_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The ids that a response to `messages` follows: the rendered turns and the opening of an answer."""
    text = _render(tokenizer, messages, add_generation_prompt=True)
    starts = [start for start, _ in _answers(tokenizer, messages, text).values()]
    return _tokenize(tokenizer, text, starts)[0]


def encode(tokenizer, messages: list[dict], all_turns: bool = False) -> tuple[list[int], list[bool]]:
    """(ids, response mask) of a dialogue that ends with the assistant's turn, rendered up to the last
    answer's end token, which is added where the template writes none. Targets are the last answer, or every
    one, from where generation begins it to its end token. ValueError says why a dialogue has no such form."""
    if any(special_tokens(tokenizer).search(message["content"]) for message in messages):
        raise ValueError(SPECIAL)
    text = _render(tokenizer, messages)
    answers = _answers(tokenizer, messages, text)
    if len(messages) - 1 not in answers:
        raise ValueError("the chat template does not write the answer as it is right after its prompt")
    if len(answers) < sum(message["role"] == "assistant" for message in messages[1:]):
        all_turns = False  # the template rewrites earlier ones
    ids, ends = _tokenize(tokenizer, text, [start for start, _ in answers.values()])
    mask = [False] * len(ids)
    for start, end in list(answers.values())[0 if all_turns else -1 :]:
        last = min(bisect.bisect_left(ends, end), len(ends) - 1)  # or one of several bytes of a character
        tokens = slice(bisect.bisect_right(ends, start), bisect.bisect_right(ends, ends[last]))
        mask[tokens] = [True] * len(mask[tokens])
    ids, mask = ids[: tokens.stop], mask[: tokens.stop]
    if ids[-1] != tokenizer.eos_token_id:  # the template ends no turns, but the model must learn to
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
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
        done = _render(tokenizer, messages[: i + 1])
        opening = before = _render(tokenizer, messages[:i], add_generation_prompt=True)
        if not done.startswith(opening):  # only generation opens a thought, in DeepSeek R1's and Gemma 4's
            before = _render(tokenizer, messages[:i])
        answer, end, _ = done[len(before) :].partition(tokenizer.eos_token)
        content = messages[i]["content"]
        content = content if content in answer else content.strip()
        start = 0 if before == opening else answer.rfind(content)
        if start >= 0 and text.startswith(before + answer + end):
            answers[i] = len(before) + start, len(before + answer + end)
    return answers


class Clock(datetime):
    """The clock of chat templates that write the date (strftime_now). It stands where the run began: texts of a
    resumed run, or of one that lasts over midnight, are then the same ones."""

    began = datetime.now()

    @classmethod
    def now(cls, tz=None):
        return cls.began


def _render(tokenizer, messages, add_generation_prompt=False):
    turns = tuple((message["role"], message["content"]) for message in messages)
    return _rendered(tokenizer, str(tokenizer.chat_template), turns, add_generation_prompt)


@functools.lru_cache(maxsize=256)  # the responses to a prompt share the renderings of its turns
def _rendered(tokenizer, _, turns, opened):
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = Clock  # what strftime_now asks
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except jinja2.TemplateError as error:  # raised by templates that refuse a role or an order of roles
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


def tried(function, argument):
    """function(argument), or the ValueError that it raises."""
    try:
        return function(argument)
    except ValueError as error:
        return error


def by_shares(rows, begin, work, size: int = 64):
    """(x = begin(row), work(x)) of every row, one after the other, with ValueErrors that were raised in their
    place. Each rank works for `size` rows at a time, then all get all: every rank must ask for all rows."""
    for chunk in split(rows, size * dist.world_size()):
        begun = [tried(begin, row) for row in chunk]
        mine = begun[size * dist.rank() :][:size]
        yield from zip(begun, dist.gather([isinstance(x, ValueError) or tried(work, x) for x in mine]))


def made_of(rows, make, name: str, shared=None) -> list:
    """make(row) of every row, or of things that have one; make(row, x, y) with the (x, y) of by_shares. Where
    there is a ValueError, reason and places are printed. InputError if nothing is left."""
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
    tokens = by_shares(rows, lambda row: sft_messages(row.data), lambda x: encode(tokenizer, *x))
    documents = made_of(rows, document, name, tokens)
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
    held = set(ranked[: max(1, min(most, round(share * len(ranked))))]) if len(ranked) > 1 else set()
    sides = [], []
    for document, (question, _) in zip(documents, firsts):
        sides[question in held].append(document)
    return sides


def without_prompts_of(documents: list[Document], held_out: list[Document], name: str) -> list[Document]:
    """`documents`, comparisons or prompts without those that teach an answer to a question of `held_out`,
    whose figures they would flatter."""

    def other(document):
        if not held.isdisjoint(document.questions):
            flags = "(--eval-dataset, --hold-out-rehearsed)"
            raise ValueError(f"the prompt is in the held-out set {flags}, or that of an earlier answer is")
        return document

    held = {question for d in held_out for question in d.questions}
    return made_of(documents, other, name)


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
        prompt = check_prompt([{"role": "text", "content": text}])
        if special_tokens(tokenizer).search(text):
            raise ValueError(SPECIAL)
        ids = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id][: args.max_length])
        # What is held out is told by the turns before an answer: here the text
        return Document(ids, torch.ones(len(ids), dtype=torch.bool), [*prompt, {}], row)

    return made_of(load_rows(args.ptx_dataset, "text"), document, args.ptx_dataset)


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
