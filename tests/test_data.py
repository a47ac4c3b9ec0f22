"""common/data.py and load_tokenizer: rows -> messages -> ids -> batches, and how bad input is answered."""

import functools
import gzip
import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from templates import CHATML, FAMILIES, GPT2, SPECIAL, byte_tokenizer, family

from common import data, loading, tiny
from common.batches import Document, Row, collate, pack
from common.errors import InputError


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(text)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


# -- row formats: (row, its messages, whether every assistant turn is a target) ------------
HH = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"
TALK = [user("a"), bot("b"), user("c"), bot("d")]
SYSTEM, TOOLS = {"role": "system", "content": "s"}, {**bot("b"), "tool_calls": [{"id": 1}]}
SCORED = [{"text": "worse", "score": -2.0}, {"text": "b", "score": 1}, {"text": "mid", "score": 0.5}]
FORMATS = {
    "messages": ({"messages": TALK}, TALK, True),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, TALK[:2], True),
    "messages with a system turn": ({"messages": [SYSTEM, *TALK], "prompt": "x"}, [SYSTEM, *TALK], True),
    "prompt, completion": ({"prompt": "a", "completion": "b", "extra": 1}, [user("a"), bot("b")], False),
    "prompt, completion as messages": ({"prompt": TALK[:3], "completion": [bot("d")]}, TALK, False),
    "HH prompt, completion": ({"prompt": HH[:-1], "completion": "d"}, TALK, False),
    "instruction, output": ({"instruction": "a", "output": "b"}, [user("a"), bot("b")], False),
    "instruction, input, output": (
        {"instruction": "a", "input": "i", "output": "b"}, [user("a\n\ni"), bot("b")], False),
    "instruction, no input": ({"instruction": "a", "input": "", "output": "b"}, TALK[:2], False),
    "prompt, responses": ({"prompt": "a", "responses": SCORED}, [user("a"), bot("b")], False),
    "instruction, responses": ({"instruction": "a", "responses": SCORED}, [user("a"), bot("b")], False),
    "prompt, chosen": ({"prompt": "a", "chosen": "b", "rejected": "x"}, [user("a"), bot("b")], False),
    "prompt, chosen as messages": ({"prompt": TALK[:3], "chosen": TALK[3:]}, TALK, False),
    "chosen as messages": ({"chosen": TALK, "rejected": TALK[:2]}, TALK, False),
    "HH chosen": ({"chosen": HH, "rejected": "x"}, TALK, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_sft_messages_of_every_row_format(name):
    row, messages, all_turns = FORMATS[name]
    assert data.sft_messages(row) == (messages, all_turns)


IMAGE = {**user(""), "content": [{"type": "text", "text": "a"}, {"type": "image", "url": "x"}]}


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"system": "s", "messages": TALK}, [SYSTEM, *TALK]),
        ({"system": "s", "prompt": "a", "completion": "b", "label": True}, [SYSTEM, user("a"), bot("b")]),
        ({"system": "s", "prompt": "a", "chosen": "b", "rejected": "c"}, [SYSTEM, user("a"), bot("b")]),
        ({"system": "t", "messages": [SYSTEM, *TALK]}, [SYSTEM, *TALK]),  # the messages' own stays
        ({"system": None, "messages": TALK}, TALK),
        ({"messages": [{**user(""), "content": [{"type": "text", "text": x} for x in "ac"]}, bot("b")]},
         [user("ac"), bot("b")]),
        ({"messages": [user("a"), {**bot("b"), "tool_calls": None}]}, [user("a"), bot("b")]),
        ({"instruction": "a", "input": "i", "responses": SCORED}, [user("a\n\ni"), bot("b")]),
    ],
)  # fmt: skip
def test_nothing_of_a_row_is_lost_without_a_word(row, messages):
    assert data.sft_messages(row)[0] == messages


def test_columns_that_nothing_reads_are_named_once_for_a_data_set(tmp_path, capsys):
    rows = [{"prompt": "a", "system_prompt": "s", "id": None}, {"prompt": "b", "answer": 4}]
    spec = write(tmp_path / "r.jsonl", rows)
    for split in ("train", "test"):
        data.load_rows(spec, "sft", split)
    assert capsys.readouterr().out == f"{spec}: columns ['answer', 'system_prompt'] are not read\n"
    for kind in tiny.SIZES:
        data.load_rows("tiny", kind)
    assert not capsys.readouterr().out


# -- files and mixtures --------------------------------------------------------------------
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.parquet"])
def test_file_formats_give_the_rows_and_their_places(name, tmp_path):
    rows = [{"prompt": f"p{i}", "completion": "é\n"} for i in range(3)]
    if name.endswith("parquet"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    else:
        write(tmp_path / name, rows)
    expected = [Row(f"{name}:{i + 1}", row) for i, row in enumerate(rows)]
    assert data.load_rows(str(tmp_path / name), "sft") == expected


def test_blank_lines_are_skipped_but_counted(tmp_path):
    (tmp_path / "r.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}')
    where = [row.where for row in data.load_rows(str(tmp_path / "r.jsonl"), "text")]
    assert where == ["r.jsonl:2", "r.jsonl:4"]


def test_mixture_without_weights_is_all_rows_in_order(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"i": i} for i in range(3)])
    b = write(tmp_path / "b.jsonl", [{"i": i} for i in range(10, 12)])
    assert [row.data["i"] for row in data.load_rows(f"{a}, {b}", "sft")] == [0, 1, 2, 10, 11]


@pytest.mark.parametrize(
    "weights, counts",
    [
        ((0.7, 0.3), (100, 43)),  # a is used up: 100 / 0.7 = 142.9 rows in all, of which 0.3 are 42.9
        ((7, 3), (100, 43)),  # proportions, whatever their sum
        ((0.2, 0.8), (25, 100)),  # now b is used up: 100 / 0.8 = 125
        ((0.5, 0.5), (100, 100)),
    ],
)
def test_mixture_with_weights_keeps_proportions_without_repeats(weights, counts, tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", [{"n": n, "i": i} for i in range(100)]) for n in "ab"]
    spec = ",".join(f"{path}:{weight}" for path, weight in zip(paths, weights))
    mixed = data.load_rows(spec, "sft")
    chosen = {n: [row.data["i"] for row in mixed if row.data["n"] == n] for n in "ab"}
    assert tuple(map(len, chosen.values())) == counts
    assert all(len(set(i)) == len(i) for i in chosen.values())
    assert data.load_rows(spec, "sft") == mixed
    for part in chosen.values():  # a part is from all over the file, not its head
        assert len(part) == 100 or max(part) > 80


def test_tiny_takes_options_and_the_split():
    options = data.load_rows("tiny:length_bias=0.6:seed=3", "preferences", "test")
    expected = tiny.rows("preferences", "test", seed=3, length_bias=0.6)
    assert [row.data for row in options] == expected != tiny.rows("preferences", "test", seed=3)
    half = data.load_rows("tiny:seed=1:0.5,tiny:seed=2:0.5", "prompts", "test")
    assert len(half) == 2000 and half[0].data == tiny.rows("prompts", "test", seed=1)[0]
    assert data.is_tiny("tiny:length_bias=0.6, tiny") and not data.is_tiny("tiny,a.jsonl")


@pytest.mark.parametrize(
    "spec, asked",
    [
        ("org/name", ("org/name", None, "test")),
        ("org/name[train_sft]", ("org/name", None, "train_sft")),
        ("org/name[main/train]", ("org/name", "main", "train")),
    ],
)
def test_hub_names_carry_configuration_and_split(spec, asked, monkeypatch):
    import datasets

    def load_dataset(name, config=None, *, split):
        assert (name, config, split) == asked
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data.load_rows(spec, "sft", split="test") == [Row("org/name:1", {"prompt": "a"})]


# -- bad input: an InputError that names it --------------------------------------------------
GOOD = b'{"prompt": "copy ant", "completion": "ant"}\n'
packed = functools.partial(gzip.compress, mtime=0)  # without the hour: each process must see the same names


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("r.jsonl", None, "r.jsonl"),  # missing
        ("r.parquet", None, "r.parquet"),
        ("r.jsonl", b"", "empty"),
        ("r.jsonl", b"\n \n", "empty"),
        ("r.jsonl.gz", packed(b""), "empty"),
        ("r.txt", GOOD, "none of .jsonl"),
        ("r.jsonl", GOOD + b'{"prompt": \n', r"r\.jsonl:2"),  # broken JSON
        ("r.jsonl", GOOD + b"[1, 2]\n", r"r\.jsonl:2"),  # no object
        ("r.jsonl", GOOD + b"null\n", r"r\.jsonl:2"),
        ("r.jsonl", GOOD + b'{"prompt": "\xe9"}\n', r"r\.jsonl:2"),  # Latin-1, not UTF-8
        ("r.jsonl", GOOD + b'{"a":' + b"[" * 100000 + b"\n", r"r\.jsonl:2"),  # nested too deep to parse
        ("r.jsonl.gz", packed(GOOD * 9)[:-12], r"r\.jsonl\.gz"),  # truncated
        ("r.jsonl.gz", packed(GOOD * 9)[:-8] + b"\0" * 8, r"r\.jsonl\.gz"),  # wrong checksum
        ("r.jsonl.gz", packed(GOOD)[:12] + b"\xff" * 20, r"r\.jsonl\.gz"),  # damaged in the middle
        ("r.jsonl.gz", GOOD, r"r\.jsonl\.gz"),  # not compressed at all
        ("r.parquet", GOOD, r"r\.parquet"),
        ("r.parquet", b"", r"r\.parquet"),
    ],
)
def test_unreadable_file_is_an_input_error_that_names_it(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        data.load_rows(str(tmp_path / name), "sft")


@pytest.mark.parametrize(
    "spec",
    ["", "tiny,,tiny", "tiny:0.5,tiny", "tiny:0,tiny:1", "tiny:speed=1", "tiny:length_bias=long",
     "tiny:length_bias=nan", "tiny:length_bias=", "tiny:seed=1.5", "tiny:label=honesty", "tiny:commands=a"],
)  # fmt: skip
def test_bad_dataset_argument_is_an_input_error(spec):
    with pytest.raises(InputError, match="--dataset"):
        data.load_rows(spec, "preferences", "test")


def test_hub_failure_is_an_input_error(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("no such thing")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="org/name.*no such thing"):
        data.load_rows("org/name", "sft")


# -- bad rows: dropped, counted and named ----------------------------------------------------
@pytest.mark.parametrize(
    "row, why",
    [
        ({"question": "a", "answer": "b"}, "answer.*question"),  # unknown columns are listed
        ({}, "no SFT row"),
        ({"prompt": "a", "completion": None}, "no response"),
        ({"prompt": "a", "completion": " \n"}, "no response"),
        ({"messages": [user("a")]}, "no response"),
        ({"messages": [user("a"), bot("b"), user("c")]}, "no response"),
        ({"prompt": "a", "responses": []}, "no response"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: "}, "no response"),
        ({"messages": [bot("b")]}, "no prompt"),
        ({"prompt": " ", "completion": "b"}, "no prompt"),
        ({"prompt": "a " * 70, "completion": "b"}, "64"),  # the prompt fills the 64 tokens
        ({"prompt": "a\ud800", "completion": "b"}, "surrogate"),
        ({"prompt": "a", "completion": "\udfff b"}, "surrogate"),
        ({"chosen": "plain text", "rejected": "x"}, "Human"),
        ({"messages": [user("a"), bot(" "), user("c"), bot("d")]}, "an earlier answer is empty"),
        ({"chosen": HH.replace(" b", "")}, "an earlier answer is empty"),
        ({"messages": [user("a"), TOOLS]}, "tool_calls"),
        ({"messages": [IMAGE, bot("b")]}, "a part of type 'image'"),
        ({"messages": [{**user("a"), "content": None}, bot("b")]}, "content of a message is null"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", **TOOLS}]}, "tool_calls"),
        ({"system": 5, "prompt": "a", "completion": "b"}, "system is int"),
        ({"prompt": "a", "completion": "b", "label": False}, "its label is not true"),
    ],
)
def test_unusable_row_is_dropped_counted_and_named(row, why, tokenizer, tmp_path, capsys):
    rows = data.load_rows(write(tmp_path / "r.jsonl", [json.loads(GOOD), row]), "sft")
    (document,) = data.sft_documents(rows, tokenizer, 64, "mine")
    out = capsys.readouterr().out
    assert document.row.where == "r.jsonl:1"
    assert "mine: dropped 1 of 2 rows" in out and "r.jsonl:2" in out
    with pytest.raises(InputError, match=rf"(?s){why}.*r\.jsonl:2"):  # alone, it is why there is nothing
        data.sft_documents(rows[1:], tokenizer, 64, "mine")


WRONG = [None, 3, -1.5, True, 10**400, float("inf"), "", " \n", "\ud800", {}, {"a": 1}, [], [[]], [3], [None]]
WRONG += [[["x"]], [user("x"), None], [{"role": "user"}], [{"role": 1, "content": "x"}], [user(["x"])]]


MAY_BE_BLANK = {"role", "from", "content", "value", "instruction", "input"}


def places(value, path=()):
    """The path of everything inside a row: columns, messages, their role and content, ..."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_types_and_missing_columns_drop_a_row_and_nothing_else_is_raised(name, tokenizer):
    good, row = Row("r:1", json.loads(GOOD)), FORMATS[name][0]
    for path, value in itertools.product(places(row), WRONG):
        inside = bad = json.loads(json.dumps(row))  # a copy that shares no turns
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        kept = len(data.sft_documents([good, Row("r:2", bad)], tokenizer, 64, "r")) == 2
        unread = path[0] in ("extra", "rejected") or (path[0] == "prompt" and "messages" in row)
        unread |= path[-1] == "text" and path[1] != 1 and isinstance(value, str)  # not the best one's
        if unread or (path[-1] == "input" and value in (None, "")):
            assert kept, (path, value)
        elif value in ("", " \n") and path[-1] in MAY_BE_BLANK:
            pass  # beside other text a turn may be blank; where it is the only one, see the test above
        elif path[-1] not in ("role", "from", "score"):  # a role may be any text, a score any number
            assert not kept, (path, value)
    for key in {"messages"} if "messages" in row else set(row) - {"extra", "rejected", "input"}:
        rest = {k: v for k, v in row.items() if k != key}
        assert len(data.sft_documents([good, Row("r:2", rest)], tokenizer, 64, "r")) == 1, key


def test_long_response_is_cut_and_a_prompt_needs_room_for_one_token(tokenizer, capsys):
    """copy ant bear cat -> <bos> <user> copy ant bear cat <end> <assistant> | ant bear cat <end>: 8 + 4."""
    row = [Row("r:1", {"prompt": "copy ant bear cat", "completion": "ant bear cat"})]
    for length, kept in ((12, 4), (11, 3), (9, 1)):
        (document,) = data.sft_documents(row, tokenizer, length, "r")
        assert len(document.ids) == length and int(document.response_mask.sum()) == kept
        assert (document.ids[-1] == tokenizer.eos_token_id) == (length == 12)  # a cut answer has no end
        assert ("cut" in capsys.readouterr().out) == (length < 12)
    with pytest.raises(InputError, match="8 tokens"):
        data.sft_documents(row, tokenizer, 8, "r")


# -- encode: a tokenizer of bytes, whose merges join a line break with "h" and with another one ------
WITH_BOS = "<s>" + CHATML.replace("<|im_end|>\n", "<|im_end|>")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + CHATML


def targets(tokenizer, ids, mask):
    """The text of each run of target tokens."""
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for keep, run in runs if keep]


HELLO = [user("hi"), bot("hello"), user("how"), bot("hah")]


def test_encode_of_the_tiny_tokenizer_token_by_token(tokenizer):
    ids, mask = data.encode(tokenizer, [user("reverse ant fox"), bot("fox ant")])
    tokens = "<|bos|> <|user|> reverse ant fox <|end|> <|assistant|> fox ant <|end|>".split()
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert mask == [False] * 7 + [True] * 3


OPENED = {  # what an answer's tokens begin with, where it is not its text
    "GLM-4.6": "\n<think></think>\n", "Falcon-instruct": " ", "gpt-oss": "<|channel|>final<|message|>",
    "Qwen3": "<think>\n\n</think>\n\n", "Qwen3.5": "\n</think>\n\n",
}  # fmt: skip
LAST_ALONE, NO_END_TOKEN = ("Qwen3", "Qwen3.5", "gpt-oss"), ("GLM-4.6", "Falcon-instruct", "Solar")


@pytest.mark.parametrize("name", FAMILIES)
def test_training_ids_are_the_whole_dialogues_and_begin_with_generations(name, tmp_path, capsys):
    data._note.cache_clear()
    tokenizer = load(family(name), tmp_path)
    dialogue = [user("hi"), bot("hello"), user("how?"), bot("hah é")]  # a last character of two tokens
    ids, mask = data.encode(tokenizer, dialogue, all_turns=True)
    whole = tokenizer.apply_chat_template(dialogue, return_dict=False)
    whole += [tokenizer.eos_token_id] * (name in NO_END_TOKEN)
    assert ids == whole[: len(ids)] or name == "Qwen3.5"
    opened, end = OPENED.get(name, ""), tokenizer.eos_token
    answers = [f"{opened}hello{'' if name in NO_END_TOKEN else end}", f"{opened}hah é{end}"]
    assert targets(tokenizer, ids, mask) == answers[name in LAST_ALONE :]
    last = data.encode(tokenizer, dialogue)
    assert last[0] == ids and targets(tokenizer, *last) == answers[1:]
    start = last[1].index(True)
    rendered = data._rendered.cache_info().misses
    responses = data.encode_responses(tokenizer, dialogue[:3], ["hah é", "no", " no"])
    assert data._rendered.cache_info().misses == rendered + 2  # but for the new ones, each is made once
    assert responses[0] == ids[:start] and responses[1][0] == ids[start:]
    generation = [data.prompt_ids(tokenizer, dialogue[:i]) for i in (1, 3)]
    said = capsys.readouterr().out.splitlines()[-1]
    if name in ("DeepSeek R1 distills", "Gemma 4", "Nemotron 3"):
        assert said.startswith("in generation alone the chat template writes")
    else:
        assert generation[1] == ids[:start] and (
            generation[0] == ids[: mask.index(True)] or name in LAST_ALONE
        )
        assert said.startswith("the chat template rewrites earlier answers") == (name in LAST_ALONE)


def test_a_template_is_told_not_to_think_by_a_line_in_front(tmp_path):
    tokenizer = load(family("Qwen3", first="{% set enable_thinking = false %}"), tmp_path)
    ids, mask = data.encode(tokenizer, HELLO[:2])
    assert targets(tokenizer, ids, mask) == ["hello<|im_end|>"]
    assert tokenizer.decode(data.prompt_ids(tokenizer, HELLO[:1])).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [CHATML, WITH_BOS, NO_END], ids=["chatml", "with bos", "no end"])
@pytest.mark.parametrize("adds_bos", [False, True])  # the template's word counts
def test_training_sees_the_ids_that_generation_starts_from(template, adds_bos):
    tokenizer = byte_tokenizer(template, adds_bos=adds_bos)
    for i in (1, 3):
        prompt = data.prompt_ids(tokenizer, HELLO[:i])
        ids, mask = data.encode(tokenizer, HELLO[: i + 1])
        answer = tokenizer("hello" if i == 1 else "hah", add_special_tokens=False)["input_ids"]
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"] if template == NO_END else []
        assert ids == prompt + answer + newline + [tokenizer.eos_token_id]
        assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        assert ids.count(tokenizer.bos_token_id) == (template == WITH_BOS)
    if template == CHATML and not adds_bos:  # tokenised as one text, "\nh" would be one token
        whole = tokenizer(tokenizer.apply_chat_template(HELLO[:2], tokenize=False))["input_ids"]
        assert whole[:-1] != data.encode(tokenizer, HELLO[:2])[0][:-1]


def test_template_that_refuses_a_dialogue_drops_the_row(capsys):
    tokenizer = byte_tokenizer(REFUSES)
    rows = [Row("r:1", {"messages": HELLO})]
    rows += [Row("r:2", {"messages": [{"role": "system", "content": "s"}, *HELLO]})]
    (document,) = data.sft_documents(rows, tokenizer, 500, "r")
    assert document.row.where == "r:1" and "no system turn" in capsys.readouterr().out


def test_a_template_that_rewrites_a_prompt_or_drops_the_answers_thought_is_refused():
    rewrites = byte_tokenizer("{{ messages|length }}" + CHATML), "a"
    for tokenizer, answer in (rewrites, (family("DeepSeek R1 distills"), "<think>a</think>b")):
        with pytest.raises(ValueError, match="does not write the answer as it is right after its prompt"):
            data.encode(tokenizer, [user("hi"), bot(answer)])


def test_white_space_that_a_tokenizer_joins_at_the_end_of_a_text_alone_is_as_in_generation():
    turns = "{% for m in messages %}{{ m.role }}:\n\n{{ m.content }}\n{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant:\n\n{% endif %}"
    tokenizer = byte_tokenizer(turns + asked, words=GPT2, eos_token="</s>")
    ids, mask = data.encode(tokenizer, HELLO)
    assert data.prompt_ids(tokenizer, HELLO[:3]) == ids[: mask.index(True)]


# -- load_tokenizer ----------------------------------------------------------------------------
def load(tokenizer, path, **options):
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return loading.load_tokenizer(str(path), **options)


@pytest.mark.parametrize(
    "special, pad, expected, added",
    [
        (SPECIAL, "</s>", "</s>", 0),  # nothing to mend
        (SPECIAL, None, "<|pad|>", 1),
        (SPECIAL, "<|im_end|>", "<|pad|>", 1),
        ((*SPECIAL, "<|reserved_0|>"), None, "<|reserved_0|>", 0),
        ((*SPECIAL, "[PAD]", "<|reserved_0|>"), "<|im_end|>", "[PAD]", 0),
    ],
)
def test_padding_is_never_the_end_token(special, pad, expected, added, tmp_path):
    tokenizer = byte_tokenizer(special=special, eos_token="</s>" if pad else "<|im_end|>", pad_token=pad)
    size = len(tokenizer)
    loaded = load(tokenizer, tmp_path)
    assert loaded.pad_token == expected and loaded.eos_token == "<|im_end|>"
    assert loaded.pad_token_id not in (None, loaded.eos_token_id) and len(loaded) == size + added


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<|eob|>"])
def test_the_end_token_is_the_one_that_the_template_writes(end, tmp_path, capsys):
    special = ("<s>", "</s>", "<|im_start|>", end)
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", end), special, eos_token="</s>", pad_token="</s>")
    loaded = load(tokenizer, tmp_path)
    assert loaded.eos_token == end and end in capsys.readouterr().out
    assert loaded.pad_token == "</s>"  # which is another one now, so it may stay
    ids, mask = data.encode(loaded, HELLO)
    assert targets(loaded, ids, mask) == ["hah" + end]


def test_tokenizer_without_template_needs_a_file(tmp_path):
    bare = byte_tokenizer(None)
    with pytest.raises(InputError, match="--chat-template"):
        load(bare, tmp_path)
    with pytest.raises(InputError, match="nowhere.jinja"):
        load(bare, tmp_path, chat_template=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "mine.jinja").write_text(CHATML)
    loaded = load(bare, tmp_path, chat_template=str(tmp_path / "mine.jinja"))
    assert targets(loaded, *data.encode(loaded, HELLO)) == ["hah<|im_end|>"]


@pytest.mark.parametrize("template", ["{% for m in %}", "{{ raise_exception('never') }}"])
def test_template_that_renders_nothing_is_an_input_error(template, tmp_path):
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(InputError, match="template"):
        load(byte_tokenizer(), tmp_path, chat_template=str(tmp_path / "mine.jinja"))


def test_tokenizer_that_could_never_end_a_response_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="end token"):
        load(byte_tokenizer(NO_END, special=(), bos_token=None, eos_token=None, pad_token=None), tmp_path)


# -- pack and collate --------------------------------------------------------------------------
def first_fit_decreasing(lengths, size):
    """The definition: longest first, each into the first block with room."""
    blocks = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for block in blocks:
            if sum(lengths[j] for j in block) + lengths[i] <= size:
                block.append(i)
                break
        else:
            blocks.append([i])
    return blocks


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 31, 32, 33, 200])
@pytest.mark.parametrize("longest", [3, 40, 100])
def test_pack_is_first_fit_decreasing(n, longest):
    rng = random.Random(n * 1000 + longest)
    lengths = [rng.randint(1, longest) for _ in range(n)]
    blocks = pack(lengths, 100)
    assert blocks == first_fit_decreasing(lengths, 100)
    assert sorted(i for block in blocks for i in block) == list(range(n))
    assert all(sum(lengths[i] for i in block) <= 100 for block in blocks)


def test_pack_by_hand_and_its_limit():
    # 7, then 5 opens a block, 4 beside it (9), 3 beside the 7 (10), 2 fits neither, 1 beside 5 and 4
    assert pack([4, 1, 7, 2, 5, 3], 10) == [[2, 5], [4, 0, 1], [3]]
    assert pack([10, 10], 10) == [[0], [1]]
    with pytest.raises(ValueError, match="11"):
        pack([3, 11], 10)


def document(ids, n_prompt, prompt="a"):
    mask = torch.arange(len(ids)) >= n_prompt
    return Document(torch.tensor(ids, dtype=torch.int32), mask, [user(prompt), bot("b")], Row("f:1", {}))


def test_collate_by_hand():
    """Two documents in row 0, the second all response: its first token must not be predicted from the first
    document. Row 1 is shorter and padded with 9."""
    a, b, c = document([1, 2, 3], 2), document([4, 5], 0), document([6, 7], 1)
    batch = collate([[a, b], [c]], pad_id=9)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 0, 1] and batch.position_ids[1, :2].tolist() == [0, 1]
    assert batch.position_ids[1, 2:].min() > 0  # padding begins no document
    # index t is the action token t + 1: 3 is a target, 4 (no context of its own) is not, 5 and 7 are
    assert batch.action_mask.tolist() == [[False, True, False, True], [True, False, False, False]]


def test_collate_of_no_blocks_is_one_row_without_actions():
    batch = collate([], pad_id=9)
    assert batch.input_ids.shape[0] == 1 and batch.input_ids.shape[1] >= 2
    assert batch.action_mask.shape == (1, batch.input_ids.shape[1] - 1) and not batch.action_mask.any()


# -- held-out documents ------------------------------------------------------------------------
def prompts_of(documents):
    return {d.messages[0]["content"].strip() for d in documents}


@pytest.mark.parametrize(
    "n_prompts, share, most, held",
    [(100, 0.05, 500, 5), (100, 0.5, 20, 20), (3, 0.05, 500, 1), (1, 0.5, 9, 0)],
)  # of a single prompt nothing is held out
def test_hold_out_splits_by_prompt(n_prompts, share, most, held):
    documents = [document([1, i % 3], 1, f"{i % n_prompts}" + " " * (i % 2)) for i in range(3 * n_prompts)]
    train, test = data.hold_out(documents, share, most)
    assert not prompts_of(train) & prompts_of(test) and len(prompts_of(test)) == held
    assert len(train) + len(test) == len(documents) and prompts_of(train + test) == prompts_of(documents)
    again = data.hold_out(documents[::-1], share, most)[1]
    assert prompts_of(again) == prompts_of(test)  # whatever the order of the rows


def test_training_documents_with_held_out_prompts_are_dropped_and_counted(capsys):
    train = [document([1, 2], 1, prompt) for prompt in ("a", "b", " a ", "c")]
    kept = data.without_prompts_of(train, [document([5, 6], 1, "a")], "mine")
    assert prompts_of(kept) == {"b", "c"} and "2 of 4" in capsys.readouterr().out
    with pytest.raises(InputError, match="mine"):
        data.without_prompts_of(train, train, "mine")


def test_rows_in_words_that_the_tokenizer_does_not_know_are_refused(tokenizer, capsys):
    """Whoever forgets --model trains the tiny world's model, which reads English as <|unk|> <|unk|>."""
    english = {"prompt": "what is the capital of france and why", "completion": "paris has been since ages"}
    rows = [Row("r:1", json.loads(GOOD)), Row("r:2", english)]
    assert len(data.sft_documents(rows, tokenizer, 64, "r")) == 1
    reason = "1: the tokenizer knows few of its words: is it the right --model? (r:2)"
    assert reason in capsys.readouterr().out
    with pytest.raises(InputError, match="none of its 1 rows can be used.*--model"):
        data.sft_documents(rows[1:], tokenizer, 64, "r")
    data.check_known(tokenizer, [tokenizer.unk_token_id, 5])  # one word of two
    gpt2 = SimpleNamespace(unk_token_id=7, eos_token_id=7)  # whose end token is the unknown one too
    data.check_known(gpt2, [7, 7, 7])


def test_text_that_holds_a_special_token_is_dropped_and_named(tokenizer, capsys):
    """`<|end|>` in an answer would end it there, `<|assistant|>` in a question would open one."""
    rows = [Row("r:1", json.loads(GOOD))]
    rows += [Row("r:2", {"prompt": "copy ant", "completion": "ant <|end|> fox"})]
    rows += [Row("r:3", {"prompt": "<|assistant|> hi", "completion": "b"})]
    assert len(data.sft_documents(rows, tokenizer, 64, "r")) == 1
    assert "2: the text holds a special token" in capsys.readouterr().out
