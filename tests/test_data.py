"""common/data/ and load_tokenizer: from rows to messages, ids and batches; and the response to bad input."""

import functools
import gzip
import io
import itertools
import json
import random
import re
import struct
import zlib
from types import SimpleNamespace

import processes
import pyarrow.parquet
import pytest
import torch
from helpers import bot, user
from templates import CHATML, FAMILIES, GPT2, QWEN, SPECIAL, byte_tokenizer, family, piece_tokenizer
from tokenizers import processors

from common import responses
from common.batches import Comparison, Document, Row, collate, make_blocks, pack, pack_evenly
from common.errors import InputError
from common.data import auxiliary, chat, comparisons, demonstrations, formats, message_columns, mixtures
from common.data import progress, prompt_sets, splits, tiny
from common.loading import pretrained


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
    assert message_columns.sft_messages(formats.in_our_columns(row)[0]) == (messages, all_turns)


ASK, LIKERT = "Name a colour.", {"correctness": 3, "coherence": 4, "complexity": 1, "verbosity": 1}
MARKS = f"{ASK}\n<extra_id_1>Assistant\nRed.\n<extra_id_1>User\nAnother one."
TURNS = [user(ASK), bot("Red."), user("Another one.")]
RATED = {"fine-grained_score": 4.0, "annotations": {"helpfulness": {"Rating": "4"}}}
SETS = {  # rows of a public set as they are -> prompt, responses, best first, and more of the comparison
    "UltraFeedback": ([{"source": "sharegpt", "instruction": ASK, "models": ["x", "y"], "completions": [
        {"model": "x", "response": "No.", "overall_score": 2.5, **RATED},
        {"model": "y", "response": "Red.", "overall_score": 8.0, **RATED}]}],
        TURNS[:1], ["Red.", "No."], {"label_scores": [8.0, 2.5]}),
    "UltraFeedback, binarized": ([{"prompt": ASK, "prompt_id": "0a", "score_chosen": 8.0, "chosen": TURNS[:2],
        "score_rejected": 6.5, "messages": TURNS[:2], "rejected": [TURNS[0], bot("No.")]}],
        TURNS[:1], ["Red.", "No."], {"label_scores": [8.0, 6.5]}),
    "HelpSteer2": ([{"prompt": MARKS, "response": text, "helpfulness": score, **LIKERT}
        for text, score in (("Blue.", 4), ("No.", 1))], TURNS, ["Blue.", "No."], {"label_scores": [4.0, 1.0]}),
    "HelpSteer2, preferences": ([{"prompt": MARKS, "response_1": "No.", "response_2": "Blue.",
        "preference_strength": 2, "preference_statement": "The second names one."}],
        TURNS, ["Blue.", "No."], {"label_scores": [2.0, 0.0]}),
    "HelpSteer2, the first one": ([{"prompt": ASK, "response_1": "Red.", "response_2": "No.",
        "preference_strength": -3}], TURNS[:1], ["Red.", "No."], {"label_scores": [0.0, -3.0]}),
    "SHP": ([{"domain": "askculinary_train", "history": ASK, "labels": label, "score_ratio": 3.0,
        f"human_ref_{a}": "Red.", f"human_ref_{b}": "No.", f"score_{a}": 12, f"score_{b}": 4}
        for label, a, b in ((1, "A", "B"), (0, "B", "A"))],
        TURNS[:1], ["Red.", "No."], {"label_scores": [12.0, 4.0]}),
    "Orca's pairs": ([{"system": "s", "question": ASK, "chosen": "Red.", "rejected": "No."}],
        [SYSTEM, TURNS[0]], ["Red.", "No."], {}),
    "Nectar": ([{"prompt": f"\n\nHuman: {ASK}\n\nAssistant: ", "num_responses": 2, "turns": 1, "answers": [
        {"answer": text, "model": "x", "rank": rank} for text, rank in (("No.", 2.0), ("Red.", 1.0))]}],
        TURNS[:1], ["Red.", "No."], {"label_scores": [-1.0, -2.0]}),
    "PKU-SafeRLHF": ([{"prompt": ASK, "response_0": "No.", "response_1": "Red.", "better_response_id": 1,
        "is_response_0_safe": True, "is_response_1_safe": False, "safer_response_id": 0}],
        TURNS[:1], ["Red.", "No."], {"is_safe": [False, True]}),
    "GSM8K": ([{"question": "2 and 3 apples?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}],
        [user("2 and 3 apples?")], ["2 + 3 = <<2+3=5>>5\n#### 5"], {}),
    "system and KTO": ([{"system": "s", "prompt": "a", "completion": text, "label": text == "b"}
        for text in "bc"], [SYSTEM, user("a")], ["b", "c"], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_rows_of_public_sets_are_read_as_they_are(name, tmp_path):
    rows, prompt, texts, more = SETS[name]
    spec, tokenizer = write(tmp_path / "r.jsonl", rows), byte_tokenizer()
    assert demonstrations.load_sft(spec, tokenizer, 500)[0].messages == [*prompt, bot(texts[0])]
    (asked,) = prompt_sets.load_prompts(spec, "train", tokenizer, 500)
    assert asked.turns == prompt and asked.row.data.keys() >= rows[0].keys()  # which a scorer may read
    if len(texts) == 2:
        for c in comparisons.load(spec, "train", tokenizer, 500):
            assert (c.prompt, c.texts) == (prompt, texts)
            found = {"is_safe": comparisons.column(c, "is_safe"), **c._asdict()}
            assert {key: found[key] for key in more} == more


def test_errors_and_docs_show_the_same_valid_rows(tmp_path):
    docs = (processes.ROOT / "docs" / "use" / "data.md").read_text()
    for kind, rows in formats.EXAMPLES.items():
        wanted = formats.WrongColumns({"a": 1}, kind).wanted
        assert all(row in wanted and row in docs for row in rows.splitlines())
    label = {"prompt": "2 + 2?", "completion": "4", "label": True}  # the other one of a pair
    for kind, load in (
        ("SFT", demonstrations.load_sft),
        ("preference", comparisons.load),
        ("prompt", prompt_sets.load_prompts),
    ):
        rows = list(map(json.loads, formats.EXAMPLES[kind].splitlines()))
        path = write(tmp_path / f"{kind}.jsonl", rows + [label] * (kind == "preference"))
        options = {"split": "train", "tokenizer": byte_tokenizer()}
        options["max_tokens" if kind == "prompt" else "max_length"] = 500
        assert len(load(path, **options)) == len(rows)


def test_the_first_item_is_shown_as_it_is_trained_on(tokenizer, tmp_path, capsys, monkeypatch):
    """One shortened example; with --preview N, N whole examples, and then the program ends."""
    words = " ".join(["ant"] * 100)
    sft = write(
        tmp_path / "sft.jsonl", [{"prompt": f"copy {x}", "completion": words} for x in ("ant", "owl")]
    )
    args = SimpleNamespace(dataset=sft, eval_dataset="tiny", max_length=120, max_new_tokens=50, scorer="runs/reward",
        min_score_gap=0.0, max_pairs_per_prompt=None, balance_categories=False)  # fmt: skip

    def load_sft():
        load = functools.partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=120)
        splits.train_and_held_out(sft, "tiny", load, tokenizer)

    load_sft()
    out = capsys.readouterr().out
    start = "(sft.jsonl:1, 107 tokens): <|bos|> <|user|> copy ant <|end|> <|assistant|>>>>ant"
    assert f"{sft}: 2 to train on, 1,000 held out" in out and start in out
    assert out.count("(sft.jsonl:") == 1 and " [...] " in out and out.endswith("ant <|end|><<<\n")
    opened = "<|bos|> <|user|> copy ant <|end|> <|assistant|>"
    monkeypatch.setattr(splits, "n_shown", 2)
    with pytest.raises(SystemExit) as stop:
        load_sft()
    out = capsys.readouterr().out
    assert stop.value.code == 0 and out.count(f">>>{words} <|end|><<<") == 2
    args.dataset = write(tmp_path / "p.jsonl", [{"prompt": "copy ant", "chosen": "ant", "rejected": "owl"}])
    for load, lines in ((comparisons.load_split, (opened, "ant <|end|>", "owl <|end|>")),
                        (prompt_sets.train_and_held_out, (opened,))):  # fmt: skip
        with pytest.raises(SystemExit):
            load(args, tokenizer)
        shown = capsys.readouterr().out.splitlines()[-len(lines) :]
        assert tuple(line.split("tokens): ")[1] for line in shown) == lines


def test_comparisons_without_scores_are_kept_by_a_score_gap_and_counted(tokenizer, tmp_path, capsys):
    pair = {"chosen": "ant", "rejected": "owl"}
    rows = [{**pair, "prompt": f"copy {x}"} for x in ("cat", "dog")]
    scores = (("a", 1), ("b", 3), ("c", 3))
    scored = [{**pair, "prompt": f"first {x}", "chosen_score": score, "rejected_score": 0} for x, score in scores]
    args = SimpleNamespace(dataset=write(tmp_path / "gap.jsonl", [*rows, *scored]), eval_dataset="tiny", max_length=120,
        min_score_gap=2.0, max_pairs_per_prompt=None, balance_categories=False)  # fmt: skip
    progress.note.cache_clear()
    assert len(comparisons.load_split(args, tokenizer)[0]) == 4
    assert "--min-score-gap: 2 of 4 comparisons have no scores and are kept" in capsys.readouterr().out


def test_a_folder_is_refused_if_some_of_its_files_would_not_be_read(tmp_path):
    """datasets takes train.jsonl as the training split, and then leaves out files without a split's name."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "test"):
        write(folder / f"{name}.jsonl", [{"prompt": f"copy {name}", "completion": "ant"}])
    assert [row.data["prompt"] for row in mixtures.load_rows(str(folder), "sft")] == ["copy train"]
    (folder / ".cache").mkdir()
    for name in ("dataset_infos.json", ".cache/x.jsonl", "LICENSE.txt"):
        (folder / name).write_text("{}")
    assert [row.data["prompt"] for row in mixtures.load_rows(str(folder), "sft")] == ["copy train"]
    write(folder / "more.jsonl", [{"prompt": "copy cat", "completion": "cat"}])
    with pytest.raises(InputError, match="rows: more.jsonl would not be read. Name files"):
        mixtures.load_rows(str(folder), "sft")


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
        ({"instruction": "", "input": "a", "output": "b"}, [user("a"), bot("b")]),
    ],
)  # fmt: skip
def test_no_part_of_a_row_is_lost_silently(row, messages):
    assert message_columns.sft_messages(row)[0] == messages


THOUGHT = {**bot("b"), "reasoning_content": "t"}
NOT_READ = [  # (reader, rows, what of them is named, and in how many)
    ("sft", [{"prompt": "a", "completion": "b", "system_prompt": "s", "id": None, "tools": []},
             {"prompt": "b", "completion": "b", "id": 0}], "id (1), system_prompt (1)"),
    ("sft", [{"prompt": "a", "completion": "b", "input": "i", "instruction": "x"}],
     "input (1), instruction (1)"),
    ("sft", [{"prompt": "a", "completion": "b", "score": 1, "rating": "better", "chosen": None}],
     "rating (1), score (1)"),
    ("sft", [{"messages": [{**user("a"), "name": "n"}, {**bot("b"), "logprobs": [0.5]}], "prompt": "a"}] * 2,
     "messages.logprobs (2), messages.name (2), prompt (2)"),
    ("sft", [{"messages": [user("a"), THOUGHT], "tools": [{"name": "f"}]}],
     "messages.reasoning_content (1), tools (1)"),
    ("sft", [{"messages": [{**user(""), "content": [{"type": "text", "text": "a", "cache": 1}]}, bot("b")]}],
     "messages.content.cache (1)"),
    ("sft", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "mark": "x"}]}],
     "conversations.mark (1)"),
    ("sft", [{"prompt": "a", "responses": [{"text": "b", "score": 1, "model": "m"}]}], "responses.model (1)"),
    ("sft", [{"prompt": "a", "chosen": "b", "rejected": "c", "\xe9": 1}], r"rejected (1), \xe9 (1)"),
    ("sft", [{"messages": [SYSTEM, user("a"), bot("b")], "system": "t"}], "system (1)"),
    ("pairs", [{"prompt": "a", "chosen": "b", "rejected": "c", "chosen_is_safe": True, "chosen_gold": 1.0,
                "rejected_is_safe": True, "score": 1, "label": False, "category": "x"}], "label (1), score (1)"),
    ("pairs", [{"prompt": "a", "responses": SCORED, "margin": 1.0, "completion": "x"}],
     "completion (1), margin (1)"),
    ("pairs", [{"prompt": "a", "completion": x, "label": x == "b", "id": 1} for x in "bc"], "id (1)"),
    ("pairs", [{"instruction": "a", "completions": [{"response": x, "overall_score": i, "model": "m"}
                for i, x in enumerate("bc")]}], "completions.model (1)"),
    ("prompts", [{"prompt": "a", "chosen": "b", "rejected": "c", "category": "x", "is_safety": True}],
     "chosen (1), rejected (1)"),
    ("prompts", [{"messages": [user("a"), bot("b")], "answer": "b"}], "answer (1)"),
]  # fmt: skip


def load_rows_as(reader, spec, tokenizer):
    """The documents, comparisons or prompts of a data set."""
    load = {"sft": demonstrations.load_sft, "pairs": comparisons.load, "prompts": prompt_sets.load_prompts}[reader]
    limit = {"max_tokens" if reader == "prompts" else "max_length": 500}
    return load(spec, split="train", tokenizer=tokenizer, **limit)


@pytest.mark.parametrize("reader, rows, named", NOT_READ)
def test_unused_columns_are_named_once(reader, rows, named, tmp_path, capsys):
    spec, tokenizer = write(tmp_path / "r.jsonl", rows), byte_tokenizer()
    progress.note.cache_clear()
    for _ in range(2):
        load_rows_as(reader, spec, tokenizer)
    out = capsys.readouterr().out
    assert [line.split("rows): ")[1] for line in out.splitlines() if "r.jsonl: not read" in line] == [named]


def test_nothing_is_reported_for_the_tiny_world_or_fully_read_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny, "SIZES", dict.fromkeys(tiny.SIZES, (300, 100)))  # all rows of a kind have its columns
    spec = write(tmp_path / "r.jsonl", [{"prompt": "a", "completion": "b", "label": True, "history": []}])
    demonstrations.load_sft(spec, byte_tokenizer(), 500)
    for reader in ("sft", "pairs", "prompts"):
        load_rows_as(reader, "tiny:seed=1", tiny.tokenizer())
    assert "not read" not in capsys.readouterr().out


def test_a_column_used_in_a_condition_counts_as_read(tmp_path, capsys):
    spec = write(tmp_path / "r.jsonl", [{"prompt": "a", "completion": "b", "votes": 3}])
    demonstrations.load_sft(f"{spec}?votes>=2", byte_tokenizer(), 500)
    assert "not read" not in capsys.readouterr().out


# -- messages: what changes what is learnt is used, or the row is refused --------------------------
@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("columns", ["messages", "completion"])
def test_a_thought_that_the_template_renders_is_learnt(key, columns, tmp_path):
    tokenizer = load(family("Qwen3"), tmp_path)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% set thought = ", "{% set thought = m." + key + " if m." + key + " is defined else "
    )
    answer = {**bot("b"), key: "two and two"}
    row = {"messages": [user("a"), answer]} if columns == "messages" else {"prompt": "a", "completion": [answer]}
    (document,) = demonstrations.load_sft(write(tmp_path / "r.jsonl", [row]), tokenizer, 500)
    learnt = targets(tokenizer, document.ids.tolist(), document.response_mask.tolist())
    assert learnt == ["<think>\ntwo and two\n</think>\n\nb<|im_end|>"]
    with pytest.raises(InputError, match=f"an answer has {key}"):
        pair = {"prompt": "a", "chosen": [answer], "rejected": [bot("c")]}
        comparisons.load(write(tmp_path / "p.jsonl", [pair]), "train", tokenizer, 500)
    pair = {"prompt": "a", "chosen": [{**bot("b"), key: ""}], "rejected": [{**bot("c"), key: None}]}  # no thought
    [read] = comparisons.load(write(tmp_path / "p.jsonl", [pair]), "train", tokenizer, 500)
    assert read.texts == ["b", "c"]


def test_a_thought_that_is_not_text_drops_the_row(tmp_path, capsys):
    tokenizer = load(family("Qwen3"), tmp_path)
    thought = "'' + m.reasoning_content if m.reasoning_content is defined else "
    tokenizer.chat_template = tokenizer.chat_template.replace("{% set thought = ", "{% set thought = " + thought)
    rows = [{"messages": [user("a"), {**THOUGHT, "reasoning_content": x}]} for x in ("t", ["t"], 5)]
    assert len(demonstrations.load_sft(write(tmp_path / "r.jsonl", rows), tokenizer, 500)) == 1
    assert "the chat template refuses the dialogue" in capsys.readouterr().out


def test_a_thought_that_generation_opens_differently_is_refused(tmp_path):
    tokenizer = load(family("Nemotron 3"), tmp_path)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% set thought = ", "{% set thought = m.reasoning_content if m.reasoning_content is defined else "
    )
    with pytest.raises(InputError, match="changes the answer or does not put it directly after its prompt"):
        demonstrations.load_sft(write(tmp_path / "r.jsonl", [{"messages": [user("a"), THOUGHT]}]), tokenizer, 500)


@pytest.mark.parametrize("flag, no", [("weight", 0), ("train", False), ("weight", 0.0), ("loss", False)])
def test_an_answer_marked_as_not_learnt_has_no_loss(flag, no, tmp_path):
    tokenizer = byte_tokenizer()

    def learnt(*flags):
        answers = [{**bot(text), flag: value} for text, value in zip(("one", "two", "three"), flags)]
        rows = [{"messages": [turn for answer in answers for turn in (user("a"), answer)]}]
        (document,) = demonstrations.load_sft(write(tmp_path / "r.jsonl", rows), tokenizer, 500)
        return targets(tokenizer, document.ids.tolist(), document.response_mask.tolist())

    assert learnt(1, None, True) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert learnt(no, 1, 1) == ["two<|im_end|>", "three<|im_end|>"]
    assert learnt(1, 1, no) == ["one<|im_end|>", "two<|im_end|>"]
    with pytest.raises(InputError, match="no answer is left to learn"):
        learnt(no, no, no)
    with pytest.raises(InputError, match=f"{flag} of a message is 0.5"):
        learnt(1, 1, 0.5)


@pytest.mark.parametrize("role", "human user prompter User".split())
@pytest.mark.parametrize("other", "gpt chatgpt bing bard assistant model".split())
def test_known_names_of_roles_are_read(role, other):
    turns = [{"from": "system", "value": "s"}, {"from": role, "value": "a"}, {"from": other, "value": "b"}]
    assert message_columns.sft_messages({"conversations": turns}) == ([SYSTEM, user("a"), bot("b")], True)


@pytest.mark.parametrize("role", "function_call observation tool function ipython critic".split())
@pytest.mark.parametrize("key, content", [("from", "value"), ("role", "content")])
def test_a_turn_of_another_role_drops_the_row(role, key, content, tmp_path):
    turns = [("user", "a"), (role, "x"), ("assistant", "b")]
    row = {"messages": [{key: name, content: text} for name, text in turns]}
    with pytest.raises(InputError, match=f"a message has role '{role}'"):
        demonstrations.load_sft(write(tmp_path / "r.jsonl", [row]), byte_tokenizer(), 500)


@pytest.mark.parametrize("label, kept", [(True, 1), (1, 1), (None, 1), (False, 0), (0, 0), ("maths", 0)])
@pytest.mark.parametrize("row", [
    {"messages": [user("a"), bot("b")]}, {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
])  # fmt: skip
def test_only_completions_with_a_true_label_are_learnt_whatever_their_columns(label, kept, row, tmp_path):
    other = {"prompt": "x", "completion": "y"}
    spec = write(tmp_path / "r.jsonl", [{**row, "label": label}, other])
    assert len(demonstrations.load_sft(spec, byte_tokenizer(), 500)) == 1 + kept


def test_the_error_for_an_unreadable_column_says_how_to_rename_it(tmp_path):
    for name, row in {"label": {"prompt": "a", "completion": "b", "label": "maths"},
                      "history": {"instruction": "a", "output": "b", "history": "long"}}.items():  # fmt: skip
        spec = write(tmp_path / "r.jsonl", [row])
        with pytest.raises(InputError, match=f"--columns {name}=my_{name}"):
            demonstrations.load_sft(spec, byte_tokenizer(), 500)
        assert demonstrations.load_sft(f"{spec}?{name}=my_{name}", byte_tokenizer(), 500)


@pytest.mark.parametrize("reader", ["sft", "pairs", "prompts"])
def test_history_is_the_turns_before_an_instruction(reader, tmp_path):
    answer = {"chosen": "b", "rejected": "c"} if reader == "pairs" else {"output": "b"}
    row = {"system": "s", "instruction": "a", "input": "i", "history": [["h", "g"]], **answer}
    (item,) = load_rows_as(reader, write(tmp_path / "r.jsonl", [row]), byte_tokenizer())
    prompt = {"sft": lambda: item.messages[:-1], "pairs": lambda: item.prompt, "prompts": lambda: item.turns}
    assert prompt[reader]() == [SYSTEM, user("h"), bot("g"), user("a\n\ni")]
    with pytest.raises(InputError, match=r"history.* is not a list of \[question, answer\]"):
        load_rows_as(reader, write(tmp_path / "q.jsonl", [{**row, "history": [["h"]]}]), byte_tokenizer())


MORE = [user("h"), bot("g"), user("a")]
SHARED = {  # prompt columns beside chosen and rejected -> the prompt; None: refused
    "a system turn": ([SYSTEM, user("a")], [user("a")], [SYSTEM, user("a")]),
    "its last question alone": ("a", MORE, MORE),
    "its first question alone": (" h", MORE, MORE),
    "the same": (MORE, MORE, MORE),
    "a dialogue's opening": ("\n\nHuman: a\n\nAssistant:", [user("a")], [user("a")]),
    "another question": ("x", MORE, None),
    "another answer": ([user("h"), bot("x"), user("a")], MORE, None),
    "another system turn": ([{**SYSTEM, "content": "t"}, user("a")], [SYSTEM, user("a")], None),
    "no more than a system turn": (None, [SYSTEM, user("a")], [SYSTEM, user("a")]),
}


@pytest.mark.parametrize("name", SHARED)
def test_policy_and_reward_model_see_the_same_prompt_of_a_dialogue(name, tmp_path):
    beside, dialogue, expected = SHARED[name]
    row = {"prompt": beside, "chosen": [*dialogue, bot("b")], "rejected": [*dialogue, bot("c")]}
    other = {"prompt": "q", "chosen": "b", "rejected": "c"}
    spec, tokenizer = write(tmp_path / "r.jsonl", [other, row]), byte_tokenizer()
    for reader, prompt in (("sft", lambda x: x.messages[:-1]), ("pairs", lambda x: x.prompt),
                           ("prompts", lambda x: x.turns)):  # fmt: skip
        found = [prompt(item) for item in load_rows_as(reader, spec, tokenizer)]
        assert found == [[user("q")], expected][: 1 + (expected is not None)], reader


@pytest.mark.parametrize("row, expected", [
    ({"prompt": "a", "completion": None, "chosen": "b", "rejected": "c"}, [user("a"), bot("b")]),
    ({"messages": None, "prompt": "a", "completion": "b", "label": None}, [user("a"), bot("b")]),
    ({"prompt": None, "instruction": "a", "input": None, "output": "b"}, [user("a"), bot("b")]),
    ({"prompt": "a", "responses": None, "chosen": "b"}, [user("a"), bot("b")]),
    ({"instruction": None, "chosen": TALK}, TALK),
    ({"messages": [{**user("a"), "from": None, "tool_calls": None, "weight": None}, bot("b")]},
     [user("a"), bot("b")]),
])  # fmt: skip
def test_a_null_column_counts_as_missing(row, expected):
    assert message_columns.sft_messages(row)[0] == expected


PAIRS_OF_SETS = {  # rows of public sets -> prompt, responses, best first
    "RewardBench 2": ({"id": "1", "prompt": "a", "chosen": ["b"], "rejected": ["c", "d", "e"], "num_correct": 1,
                       "subset": "Math"}, [user("a")], ["b", "c", "d", "e"]),
    "LLaMA-Factory": ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"},
                       {"from": "human", "value": "a"}], "chosen": {"from": "gpt", "value": "b"},
                       "rejected": {"from": "gpt", "value": "c"}}, MORE, ["b", "c"]),
    "OpenAI's summaries": ({"info": {"id": "t3", "post": "p", "title": "t", "subreddit": "r", "site": None,
                            "article": None}, "summaries": [{"text": "c", "policy": "x", "note": None},
                            {"text": "b", "policy": "y", "note": None}], "choice": 1, "worker": "w"},
                           [user("SUBREDDIT: r/r\n\nTITLE: t\n\nPOST: p\n\nTL;DR:")], ["b", "c"]),
    "OpenAI's news": ({"info": {"id": "t3", "post": None, "title": "t", "article": "p"}, "choice": 0,
                       "summaries": [{"text": "b"}, {"text": "c"}]}, [user("p\n\nTL;DR:")], ["b", "c"]),
    "UltraInteract": ({"task": "Math", "trajectory": [{"from": "user", "value": "a"}], "chosen": "b",
                       "rejected": "c", "parent_id": "0"}, [user("a")], ["b", "c"]),
    "dialogues with a label": ([{"messages": [*MORE, bot(x)], "label": x == "b"} for x in "cb"], MORE, ["b", "c"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS_OF_SETS)
def test_pairs_of_more_public_sets_are_read(name, tmp_path):
    rows, prompt, texts = PAIRS_OF_SETS[name]
    rows, tokenizer = rows if isinstance(rows, list) else [rows], byte_tokenizer()
    spec = write(tmp_path / "r.jsonl", rows)
    (c,) = comparisons.load(spec, "train", tokenizer, 500)
    assert (c.prompt, c.texts, c.ranks[0]) == (prompt, texts, 0)
    assert prompt_sets.load_prompts(spec, "train", tokenizer, 500)[0].turns == prompt
    assert demonstrations.load_sft(spec, tokenizer, 500)[0].messages == [*prompt, bot("b")]


POST = {"subreddit": "r", "title": "t", "post": "p"}
POST_AS_PROMPT = "SUBREDDIT: r/r\n\nTITLE: t\n\nPOST: p\n\nTL;DR:"
TLDR = {  # forms of one post of Reddit with the summary " b", and the columns that nobody reads
    "comparisons": ({"info": {"id": "t3", **POST, "site": None, "article": None}, "summaries": [
        {"text": " c", "policy": "sup1", "note": "n"}, {"text": " b", "policy": "ref", "note": None}], "choice": 1,
        "worker": "w", "batch": "batch3", "split": "train", "extra": {"confidence": 7}},
        ["batch", "extra", "info.id", "split", "summaries.note", "summaries.policy", "worker"]),
    "TL;DR": ({"id": "t3", **POST, "summary": "b"}, ["id"]),
    "prompt, completion": ({"prompt": POST_AS_PROMPT, "completion": " b"}, []),
    "pairs": ({"prompt": POST_AS_PROMPT, "chosen": " b", "rejected": " c"}, ["rejected"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TLDR)
def test_all_forms_of_a_summary_give_the_same_prompt_and_the_same_demonstration(name, tmp_path, capsys):
    row, unread = TLDR[name]
    progress.note.cache_clear()
    spec = write(tmp_path / "r.jsonl", [row])
    (document,) = demonstrations.load_sft(spec, byte_tokenizer(), 500)
    assert document.messages == [user(POST_AS_PROMPT), bot(" b")]
    not_read = {line.partition(": not read as demonstrations (with the number of rows): ")[2]
                for line in capsys.readouterr().out.splitlines()} - {""}  # fmt: skip
    named = sorted(column.partition(" (")[0] for line in not_read for column in line.split(", "))
    assert named == unread
    (prompt,) = prompt_sets.load_prompts(spec, "train", byte_tokenizer(), 500)
    assert prompt.turns == [user(POST_AS_PROMPT)]
    if name in ("comparisons", "pairs"):
        (c,) = comparisons.load(spec, "train", byte_tokenizer(), 500)
        assert (c.prompt, c.texts) == ([user(POST_AS_PROMPT)], [" b", " c"])
        assert c.key == document.key  # so a post is held out of all of them or of none


# -- files and mixtures --------------------------------------------------------------------
A, B = {"prompt": "a", "completion": "b, \xe9"}, {"prompt": "c", "completion": None}
FILES = {  # (content, the places of A and B)
    "r.jsonl": (f"\n{json.dumps(A)}\n  \n{json.dumps(B)}", (2, 4)),
    "r.jsonl.gz": (f"{json.dumps(A)}\n{json.dumps(B)}\n", (1, 2)),
    "r.json": (json.dumps([A, B], indent=1), (1, 2)),
    "data.json": (json.dumps({"version": 1, "data": [A, B]}), (1, 2)),
    "lines.json": (f"{json.dumps(A)}\n\n{json.dumps(B)}\n", (1, 3)),
    "r.csv": ('\ufeffprompt,completion\r\na,"b, \xe9"\r\nc,\r\n', (2, 3)),  # as a spreadsheet writes it
    "C:\\data\\x.csv": ('prompt;completion\na;"b, \xe9"\nc;\n', (2, 3)),
    "r.parquet": (None, (1, 2)),
}


@pytest.mark.parametrize("name", FILES)
def test_file_formats_give_the_rows_and_their_places(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, places = FILES[name]
    if content is None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([A, B]), name)
    else:
        with (gzip.open if name.endswith("gz") else open)(name, "wb") as file:
            file.write(content.encode())
    rows = [Row(f"{name}:{place}", row) for place, row in zip(places, (A, B))]
    assert mixtures.load_rows(name, "sft") == rows and mixtures.load_rows(f"{name}:0.5,{name}:0.5", "sft") == rows * 2


def test_lines_of_a_text_file_are_prompts_or_text_and_no_demonstrations(tokenizer, tmp_path):
    (tmp_path / "r.txt").write_text("copy ant\r\n\nfirst owl")
    for kind, name in (("prompts", "prompt"), ("text", "text")):
        rows = mixtures.load_rows(str(tmp_path / "r.txt"), kind)
        assert rows == [Row("r.txt:1", {name: "copy ant"}), Row("r.txt:3", {name: "first owl"})]
    empty = write(tmp_path / "empty.jsonl", [{"prompt": None, "completion": "b"}])
    with pytest.raises(InputError, match=r"match no format of SFT rows \(empty: \['prompt'\]\)"):
        demonstrations.load_sft(empty, "train", byte_tokenizer(), 500)
    with pytest.raises(InputError, match=r"columns \['text'\] match no format of SFT rows.*--columns old=new"):
        demonstrations.load_sft(str(tmp_path / "r.txt"), tokenizer, 64)


# -- columns renamed and rows chosen in the name of a data set ------------------------------------
TABLE = """question,answer_a,answer_b,prompt,votes,lang,ok,chosen_score
q1,4,5,old,3,EN,TRUE,1.5
q2,x,y,old,10,de,False,
q3,v,w,old,,en,,-2
"""


@pytest.mark.parametrize(
    "items, kept",
    [("", "123"), ("votes>=3", "12"), ("votes>=9.5", "2"), ("votes==3.0", "1"), ("lang==en", "13"),
     ("votes>=3&lang==en", "1"), ("chosen_score>=-2&ok==true", "1")],
)  # fmt: skip
def test_a_data_sets_name_renames_columns_and_chooses_rows(items, kept, tmp_path, capsys):
    (tmp_path / "t.csv").write_text(TABLE)
    plain = f"{tmp_path / 't.csv'}"
    items = f"question=prompt&{items}".strip("&")
    spec = mixtures.with_columns(f"tiny:seed=1,{plain}:0.5", items.replace("&", " , "))
    few = mixtures.with_columns(f"{plain}:0.00005,{plain}:0.5", "b=c")  # Python writes 5e-05
    assert [weight for _, _, weight in mixtures.sources(few)] == [5e-5, 0.5]
    [(_, [item], weight)] = mixtures.sources(f"{plain}?b==c:1.2.3e-5")  # no number, so part of the value
    assert (item, weight) == (("b", "==", "c:1.2.3e-5"), None)
    assert spec == f"tiny:seed=1,{plain}?{items}:0.5"
    assert [(name, weight) for name, _, weight in mixtures.sources(spec)] == [("tiny:seed=1", None), (plain, 0.5)]
    rows = mixtures.load_rows(spec.split(",")[1], "sft")
    assert [row.data["prompt"] for row in rows] == [f"q{n}" for n in kept]
    assert all("question" not in row.data for row in rows)
    n_dropped = [int(n) for n in re.findall(r"dropped (\d+) of \d rows", capsys.readouterr().out)]
    assert sum(n_dropped) == 3 - len(kept) and len(n_dropped) == items.count("&")


def test_csv_cells_are_text_except_in_columns_that_hold_json(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    spec = f"{tmp_path / 't.csv'}?question=prompt&answer_a=completion&ok=label"
    names = ("completion", "label", "chosen_score")
    found = [[row.data.get(name) for name in names] for row in mixtures.load_rows(spec, "sft")]
    assert found == [["4", True, "1.5"], ["x", False, None], ["v", None, "-2"]]
    cells = {"prompt": "a", "response": "b", "helpfulness": "3", "score": ""}  # of a public set
    assert formats.from_csv(cells)[0]["score"] == "3"  # formats.number reads it


def test_a_renamed_column_leaves_rows_that_lack_it_as_they_are(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"question": "q", "prompt": null}\n{"question": null, "prompt": "p"}')
    rows = mixtures.load_rows(f"{tmp_path / 'r.jsonl'}?question=prompt", "prompts")
    assert [row.data["prompt"] for row in rows] == ["q", "p"]


@pytest.mark.parametrize(
    "dataset", ["", "tiny,", "pairs.csv", "C:\\data\\x.csv", "tiny?category", "tiny:sed=1"]
)
def test_a_mistyped_data_set_name_is_an_error(dataset):
    with pytest.raises(InputError, match="^--eval-dataset"):
        mixtures.sources_of(SimpleNamespace(dataset="tiny", offline_data=None, eval_dataset=dataset))
    mixtures.sources_of(SimpleNamespace(dataset="tiny:seed=1,org/name?a=b", eval_dataset=None))


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
    mixed = mixtures.load_rows(spec, "sft")
    chosen = {n: [row.data["i"] for row in mixed if row.data["n"] == n] for n in "ab"}
    assert tuple(map(len, chosen.values())) == counts
    assert all(len(set(i)) == len(i) for i in chosen.values())
    assert mixtures.load_rows(spec, "sft") == mixed
    assert mixtures.load_rows(", ".join(paths), "sft") == sum((mixtures.load_rows(x, "sft") for x in paths), [])
    for part in chosen.values():  # a part is from all over the file, not its head
        assert len(part) == 100 or max(part) > 80
    write(tmp_path / "a.jsonl", [{"prompt": f"p{i // 2}"} for i in range(300)])
    some = [row.data["prompt"] for row in mixtures.load_rows(f"{paths[0]}:0.5,{paths[1]}:0.5", "sft")[:100]]
    assert len(set(some)) == 50  # completions of a prompt stay together
    for name in ("messages", "conversations"):
        talks = [[user(f"copy {i}"), bot(text)] for i in range(100) for text in "ab"]
        rows = [{name: talk, "label": i % 2 == 0} for i, talk in enumerate(talks)]
        path = str(write(tmp_path / f"{name}.jsonl", rows))
        half = [row.data[name][0]["content"] for row in mixtures.load_rows(f"{path}:0.5,{paths[1]}:0.5", "sft")[:100]]
        assert len(half) == 100 and len(set(half)) == 50


@pytest.mark.parametrize("preference, learnt", [(None, "b"), (0.5, "b"), (0.51, "b"), (0.49, "c"), (0, "c")])
def test_of_a_pair_with_a_soft_label_the_likelier_answer_is_learnt(preference, learnt):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "preference": preference}
    assert message_columns.sft_messages(row)[0] == [user("a"), bot(learnt)]


def test_a_mixture_takes_rows_of_all_system_prompts(tmp_path):
    """Its rows are chosen by a hash of the question. Of messages before a pair the last one is part of it."""
    system = lambda i: {"role": "system", "content": f"persona {i % 4}"}
    rows = [{"messages": [system(i), user(f"q{i}")], "chosen": "a", "rejected": "b"} for i in range(400)]
    others = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(400)]
    spec = f"{write(tmp_path / 'a.jsonl', rows)}:0.25,{write(tmp_path / 'b.jsonl', others)}:0.5"
    mixed = mixtures.load_rows(spec, "preferences")
    personas = [row.data["messages"][0]["content"] for row in mixed if "messages" in row.data]
    assert len(personas) == 200 and min(map(personas.count, {f"persona {i}" for i in range(4)})) > 30
    dialogues = [{"messages": [system(0), user(f"q{i // 2}"), bot(f"a{i}")]} for i in range(80)]
    spec = f"{write(tmp_path / 'a.jsonl', dialogues)}:0.25,{write(tmp_path / 'b.jsonl', others)}:2.5"
    mixed = mixtures.load_rows(spec, "sft")
    asked = [row.data["messages"][1]["content"] for row in mixed if "messages" in row.data]
    assert sorted(map(asked.count, set(asked))) == [2] * 20  # completions of a prompt stay together


@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "answer": "x", "chosen": "b", "rejected": "y"},
        {"question": "a", "answer": "x", "responses": SCORED},
        {"instruction": "a", "output": "x", "chosen": "b", "rejected": "y"},
        {"prompt": "a", "completion": "x", "chosen": "b", "rejected": "y"},
    ],
)
def test_a_pair_or_a_ranking_trains_its_better_answer_beside_a_reference_answer(row):
    converted, _ = formats.in_our_columns(row)
    assert message_columns.sft_messages(converted) == ([user("a"), bot("b")], False)


def test_a_public_format_may_have_its_prompt_as_messages():
    """HelpSteer3, its columns renamed to those of HelpSteer2."""
    row = {"prompt": [user("a")], "response_1": "b", "response_2": "c", "preference_strength": -2}
    converted, _ = formats.in_our_columns(row)
    assert [x["text"] for x in converted["responses"]] == ["b", "c"] and converted["prompt"] == [user("a")]


def test_only_the_most_frequent_reasons_for_dropped_rows_are_listed(tmp_path, capsys):
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b", "rating": i} for i in range(30)]
    rows += [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 2 + [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    comparisons.load(write(tmp_path / "r.jsonl", rows), "train", byte_tokenizer(), 500)
    lines = capsys.readouterr().out.splitlines()
    [first] = [i for i, line in enumerate(lines) if "dropped 32 of 33 rows" in line]
    assert "2: the responses are the same" in lines[first + 1] and "11 other reasons" in lines[first + 21]


def test_a_condition_tells_large_ids_apart(tmp_path):
    """As floats, 2^53 and 2^53 + 1 are equal."""
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "id": 2**53 + i} for i in range(2)])
    assert [row.data["id"] for row in mixtures.load_rows(f"{path}?id=={2**53 + 1}", "sft")] == [2**53 + 1]


def test_a_mixture_part_without_rows_is_an_error(tmp_path):
    paths = [write(tmp_path / f"{n}.jsonl", [{"n": n, "i": i} for i in range(9)]) for n in "ab"]
    with pytest.raises(InputError, match=r"a\.jsonl: the weight 0\.01 gives it no row"):
        mixtures.load_rows(f"{paths[0]}:0.01,{paths[1]}:0.99", "sft")


@pytest.mark.parametrize(
    "spec, value, weight",
    [("t.csv?time==12:30", "12:30", None), ("t.csv?time==12:30:15", "12:30:15", None),
     ("t.csv?time==12:30:0.5", "12:30", 0.5), ("t.csv?lang==en:7.0", "en", 7), ("t.csv?n>=2:7.0", "2", 7),
     ("t.csv?n==2:0.5", "2", 0.5)],
)  # fmt: skip
def test_a_value_may_hold_a_colon(spec, value, weight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("time,lang,n\n12:30,en,2\n")
    ((_, [(_, _, found)], w),) = mixtures.sources(spec)
    assert (found, w) == (value, weight)


def test_long_cells_of_a_csv_are_read(tmp_path):
    (tmp_path / "t.csv").write_text("prompt,completion\na," + "b" * 200_000 + "\n")
    (row,) = mixtures.load_rows(str(tmp_path / "t.csv"), "sft")
    assert row.data["completion"] == "b" * 200_000


def test_tiny_takes_options_and_the_split():
    options = mixtures.load_rows("tiny:length_bias=0.6:seed=3", "preferences", "test")
    expected = tiny.rows("preferences", "test", seed=3, length_bias=0.6)
    assert [row.data for row in options] == expected != tiny.rows("preferences", "test", seed=3)
    half = mixtures.load_rows("tiny:seed=1:0.5,tiny:seed=2:0.5", "prompts", "test")
    assert len(half) == 2000 and half[0].data == tiny.rows("prompts", "test", seed=1)[0]
    assert mixtures.is_tiny("tiny:length_bias=0.6, tiny") and not mixtures.is_tiny("tiny,a.jsonl")


@pytest.mark.parametrize(
    "spec, asked",
    [
        ("org/name", ("org/name", None, "test")),
        ("org/name[train_sft]", ("org/name", None, "train_sft")),
        ("org/name[main/train]", ("org/name", "main", "train")),
        ("org/name[train[:10%]]", ("org/name", None, "train[:10%]")),
        ("org/name[main/train[10:20]]", ("org/name", "main", "train[10:20]")),
    ],
)
def test_hub_names_carry_configuration_and_split(spec, asked, monkeypatch):
    import datasets

    def load_dataset(name, config=None, *, split):
        assert (name, config, split) == asked
        return [{"prompt": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert mixtures.load_rows(spec, "sft", split="test") == [Row("org/name:1", {"prompt": "a"})]


# -- bad input: an InputError that names it --------------------------------------------------
GOOD = b'{"prompt": "copy ant", "completion": "ant"}\n'


def damaged_parquet():
    """A file whose footer has the right place and length, but says nothing that can be read."""
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([A]), file)
    content = bytearray(file.getvalue())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    content[start : start + 4] = b"\xff" * 4
    return bytes(content)


packed = functools.partial(gzip.compress, mtime=0)  # without the hour: each process must see the same names


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("r.jsonl", None, "r.jsonl"),  # missing
        ("r.parquet", None, "r.parquet"),
        ("r.jsonl", b"", "empty"),
        ("r.jsonl", b"\n \n", "empty"),
        ("r.jsonl.gz", packed(b""), "empty"),
        ("r.xlsx", GOOD, "not one of .jsonl"),
        *[(f"r.{kind}", b"", "empty") for kind in ("txt", "csv")],
        ("r.json", b"", r"r\.json:1: not valid JSON"),
        ("r.json", GOOD[:20], r"r\.json:1: not valid JSON"),
        ("r.json", b'[{"prompt": "a"}, 3]', r"r\.json:2: .*expected an object, got int"),
        ("r.csv", b"prompt,completion\na,b\nc,d,e\n", r"r\.csv:3: .*more cells than column names"),
        ("r.csv", b'prompt,completion\na,"b\n', r"r\.csv:2: .*end of data"),
        ("r.csv", "prompt\n\xe9\n".encode("latin-1"), r"r\.csv:.*UTF-8"),
        ("r.csv?b=prompt", b"a,c\n1,2\n", r"\?b=prompt: no row has that column, only \['a', 'c'\]"),
        ("r.csv?a>=2", b"a,c\n1,2\n", "no row meets its conditions"),
        ("r.csv", b"prompt,completion,prompt\na,b,c\n", r"r\.csv:1: .*\['prompt'\] appear twice"),
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
        ("r.parquet", damaged_parquet(), r"r\.parquet"),
    ],
)
def test_unreadable_file_is_an_input_error_that_names_it(name, content, says, tmp_path):
    if content is not None:
        (tmp_path / name.partition("?")[0]).write_bytes(content)
    with pytest.raises(InputError, match=says):
        mixtures.load_rows(str(tmp_path / name), "sft")


def test_a_file_that_cannot_be_opened_is_not_called_invalid(tmp_path):
    """What the system says, for example that there is no permission, is the reason."""
    with pytest.raises(FileNotFoundError):
        list(formats.read_file(tmp_path / "r.jsonl"))


@pytest.mark.parametrize(
    "spec",
    ["", "tiny,,tiny", "tiny:0.5,tiny", "tiny:0,tiny:1", "tiny:speed=1", "tiny:length_bias=long",
     "tiny:length_bias=nan", "tiny:length_bias=", "tiny:seed=1.5", "tiny:label=honesty", "tiny:commands=a",
     "tiny:hazards=some"],
)  # fmt: skip
def test_bad_dataset_argument_is_an_input_error(spec):
    with pytest.raises(InputError, match="--dataset"):
        mixtures.load_rows(spec, "preferences", "test")


def test_hub_failure_is_an_input_error(monkeypatch):
    import datasets

    def load_dataset(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("no such thing")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="org/name.*no such thing"):
        mixtures.load_rows("org/name", "sft")


# -- bad rows: dropped, counted and named ----------------------------------------------------
@pytest.mark.parametrize(
    "row, why",
    [
        ({"query": "a", "answer": "b"}, "answer.*query.*"),  # unknown columns are listed
        ({}, "format of SFT rows"),
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
        ({"prompt": "a", "completion": "b", "label": False}, "its label is false"),
        ({"prompt": "copy ant", "completion": "ant <|end|> fox"}, "the text contains a special token"),
        ({"prompt": "<|assistant|> hi", "completion": "b"}, "the text contains a special token"),
        (
            {"prompt": "what is the capital of france and why", "completion": "paris has been"},
            "check --model",
        ),
    ],
)
def test_unusable_row_is_dropped_counted_and_named(row, why, tokenizer, tmp_path, capsys):
    rows = mixtures.load_rows(write(tmp_path / "r.jsonl", [json.loads(GOOD), row]), "sft")
    (document,) = demonstrations.sft_documents(rows, tokenizer, 64, "mine")
    out = capsys.readouterr().out
    assert document.row.where == "r.jsonl:1"
    assert "mine: dropped 1 of 2 rows" in out and "r.jsonl:2" in out
    with pytest.raises(InputError, match=rf"(?s){why}.*r\.jsonl:2"):  # alone, it is why there is nothing
        demonstrations.sft_documents(rows[1:], tokenizer, 64, "mine")


WRONG = [None, 3, -1.5, True, 10**400, float("inf"), "", " \n", "\ud800", {}, {"a": 1}, [], [[]], [3], [None]]
WRONG += [[["x"]], [user("x"), None], [{"role": "user"}], [{"role": 1, "content": "x"}], [user(["x"])]]


MAY_BE_BLANK = {"role", "from", "content", "value", "instruction", "input"}


def places(value, path=()):
    """The paths of all values in a row: columns, messages, their role and content, ..."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_types_and_missing_columns_only_drop_the_row(name, tokenizer):
    good, row = Row("r:1", json.loads(GOOD)), FORMATS[name][0]
    for path, value in itertools.product(places(row), WRONG):
        inside = bad = json.loads(json.dumps(row))  # a copy that shares no turns
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value
        rows = [good, Row("r:2", formats.in_our_columns(bad)[0])]
        kept = len(demonstrations.sft_documents(rows, tokenizer, 64, "r")) == 2
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
        assert len(demonstrations.sft_documents([good, Row("r:2", rest)], tokenizer, 64, "r")) == 1, key


def test_long_response_is_cut_and_a_prompt_needs_room_for_one_token(tokenizer, capsys):
    """copy ant bear cat -> <bos> <user> copy ant bear cat <end> <assistant> | ant bear cat <end>: 8 + 4."""
    row = [Row("r:1", {"prompt": "copy ant bear cat", "completion": "ant bear cat"})]
    for length, kept in ((12, 4), (11, 3), (9, 1)):
        (document,) = demonstrations.sft_documents(row, tokenizer, length, "r")
        assert len(document.ids) == length and int(document.response_mask.sum()) == kept
        assert (document.ids[-1] == tokenizer.eos_token_id) == (length == 12)  # a cut answer has no end
        assert ("cut" in capsys.readouterr().out) == (length < 12)
    with pytest.raises(InputError, match="8 tokens"):
        demonstrations.sft_documents(row, tokenizer, 8, "r")


# -- encode: a tokenizer of bytes, whose merges join a line break with "h" and with another one ------
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
    ids, mask = chat.encode(tokenizer, [user("reverse ant fox"), bot("fox ant")])
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
    progress.note.cache_clear()
    tokenizer = load(family(name), tmp_path)
    dialogue = [user("hi"), bot("hello"), user("how?"), bot("hah é")]  # a last character of two tokens
    ids, mask = chat.encode(tokenizer, dialogue, all_turns=True)
    whole = tokenizer.apply_chat_template(dialogue, return_dict=False)
    whole += [tokenizer.eos_token_id] * (name in NO_END_TOKEN)
    assert ids == whole[: len(ids)] or name == "Qwen3.5"
    opened, end = OPENED.get(name, ""), tokenizer.eos_token
    answers = [f"{opened}hello{'' if name in NO_END_TOKEN else end}", f"{opened}hah é{end}"]
    assert targets(tokenizer, ids, mask) == answers[name in LAST_ALONE :]
    last = chat.encode(tokenizer, dialogue)
    assert last[0] == ids and targets(tokenizer, *last) == answers[1:]
    start = last[1].index(True)
    rendered = chat._rendered.cache_info().misses
    responses = chat.encode_responses(tokenizer, dialogue[:3], ["hah é", "no", " no"])
    assert chat._rendered.cache_info().misses == rendered + 2  # but for the new ones, each is made once
    assert responses[0] == ids[:start] and responses[1][0] == ids[start:]
    generation = [chat.prompt_ids(tokenizer, dialogue[:i]) for i in (1, 3)]
    if name not in ("DeepSeek R1 distills", "Gemma 4", "Nemotron 3"):
        assert generation[1] == ids[:start] and (
            generation[0] == ids[: mask.index(True)] or name in LAST_ALONE
        )


def test_an_answer_that_also_occurs_in_the_opening_is_found_and_learnt(tmp_path):
    tokenizer = load(family("DeepSeek R1 distills"), tmp_path)  # its answers begin with <|Assistant|>
    learnt = targets(tokenizer, *chat.encode(tokenizer, [user("one letter"), bot("A")]))
    assert learnt == ["A" + tokenizer.eos_token]


def test_the_end_that_a_template_does_not_write_is_not_learnt_after_an_answer_of_weight_0():
    tokenizer = byte_tokenizer(NO_END)
    for weight, learnt, end in ((0, ["one\n"], False), (1, ["one\n", "two\n<|im_end|>"], True)):
        talk = [user("a"), bot("one"), user("b"), {**bot("two"), "weight": weight}]
        ids, mask = chat.encode(tokenizer, talk, all_turns=True)
        assert targets(tokenizer, ids, mask) == learnt
        assert ids[-1] == tokenizer.eos_token_id and mask[-1] is end


def test_a_template_line_can_switch_thinking_off(tmp_path):
    tokenizer = load(family("Qwen3", first="{% set enable_thinking = false %}"), tmp_path)
    ids, mask = chat.encode(tokenizer, HELLO[:2])
    assert targets(tokenizer, ids, mask) == ["hello<|im_end|>"]
    assert tokenizer.decode(chat.prompt_ids(tokenizer, HELLO[:1])).endswith("<think>\n\n</think>\n\n")


def test_template_that_refuses_a_dialogue_drops_the_row(capsys):
    tokenizer = byte_tokenizer(REFUSES)
    rows = [Row("r:1", {"messages": HELLO})]
    rows += [Row("r:2", {"messages": [{"role": "system", "content": "s"}, *HELLO]})]
    (document,) = demonstrations.sft_documents(rows, tokenizer, 500, "r")
    assert document.row.where == "r:1" and "no system turn" in capsys.readouterr().out


def test_a_template_that_rewrites_a_prompt_or_drops_the_answers_thought_is_refused():
    rewrites = byte_tokenizer("{{ messages|length }}" + CHATML), "a"
    for tokenizer, answer in (rewrites, (family("DeepSeek R1 distills"), "<think>a</think>b")):
        with pytest.raises(ValueError, match="changes the answer or does not put it directly after its prompt"):
            chat.encode(tokenizer, [user("hi"), bot(answer)])


def test_an_answer_of_which_the_template_drops_a_part_drops_the_row():
    """Whether or not the template opens the answer as for generation; white space may differ."""
    cuts = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].strip() }}")
    for answer, learnt in (("<think>a</think>\n\n42", None), (" 42\n", "42")):
        if learnt:
            tokenizer = byte_tokenizer(cuts)
            ids, mask = chat.encode(tokenizer, [user("hi"), bot(answer)])
            assert tokenizer.decode([i for i, kept in zip(ids, mask) if kept]) == "42<|im_end|>"
        else:
            with pytest.raises(ValueError, match="changes the answer"):
                chat.encode(byte_tokenizer(cuts), [user("hi"), bot(answer)])


def test_a_template_that_reads_only_parts_of_messages_is_refused(tmp_path):
    parts = CHATML.replace("{{ m.content }}", "{% for x in m.content %}{{ x.text }}{% endfor %}")
    with pytest.raises(InputError, match="the chat template fails: it leaves out the text of an answer"):
        load(byte_tokenizer(parts), tmp_path)


def test_system_turns_tell_questions_apart_if_nothing_else_is_said():
    system = lambda text: {"role": "system", "content": text}
    one, other, blank = ([system("text 1")], [system("text 2")], [system("text 1"), user(" ")])
    key = lambda *prompts: list(splits.held_out_keys(prompts))
    assert key(one) != key(other) and key(one) != key([]) and key(blank) != key([user(" ")])
    assert key([system("text 1"), user("q")]) == key([user("q")])


def test_spellings_of_one_text_in_unicode_are_one_question():
    """Composed, decomposed or of full width."""
    key = lambda text: list(splits.held_out_keys([[user(text)]]))
    assert key("caf\u00e9") == key("cafe\u0301") != key("cafe")
    assert key("\uff23\uff2f\uff30\uff39 ant") == key("copy ant")


@pytest.mark.parametrize("cell, condition, meets", [
    (struct.unpack("f", struct.pack("f", 0.7))[0], ">=0.7", True),  # 0.69999998808 in a float32 column
    (struct.unpack("f", struct.pack("f", 0.9))[0], "==0.9", True), (0.69999, ">=0.7", False), (0.7, "==0.70001", False),
    (1500000500.0, "==1500000000", False), (2000001.0, ">=2000002", False), (12345678, "==12345679", False), (12345678, ">=12345679", False), ("nan", "==nan", True), (float("nan"), ">=0", False),
    ("EN", "==en", True), ("1.0", "==1", True), (None, "==none", False), ("x", ">=1", False), (True, "==true", True),
])  # fmt: skip
def test_a_condition_compares_text_then_numbers_of_which_float32_has_seven_digits(cell, condition, meets):
    assert mixtures._meets(cell, condition[:2], condition[2:]) is meets


def test_json_lines_in_a_json_file_may_contain_the_separators_of_unicode(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps({"prompt": f"a{c}b"}, ensure_ascii=False) + "\r\n" for c in "\u2028\x85"), "utf-8")
    assert [row.data["prompt"] for row in mixtures.load_rows(str(path), "prompts", "train")] == ["a\u2028b", "a\x85b"]


def test_a_column_turns_that_is_text_is_no_question_of_mt_bench():
    row = {"instruction": "Write", "output": "x", "turns": "multi"}
    assert formats.in_our_columns(row) == (row, set())
    assert formats.in_our_columns({"turns": ["one", "two"]})[0]["prompt"] == "one"


def test_white_space_that_is_no_part_of_an_offset_is_tokenised_as_in_generation():
    """Offsets without the space of " h", as the tokenizers library has them by default: from its offset alone, the token
    does not span the start of the answer."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
                               "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids, mask = chat.encode(tokenizer, [user("a"), bot("hi")])
    asked = chat.prompt_ids(tokenizer, [user("a")])
    assert ids[: len(asked)] == asked and tokenizer.convert_ids_to_tokens(asked)[-1] == "Ġ"
    assert mask == [i >= len(asked) for i in range(len(ids))]


def test_white_space_merged_only_at_the_end_of_a_text_is_tokenised_as_in_generation():
    turns = "{% for m in messages %}{{ m.role }}:\n\n{{ m.content }}\n{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant:\n\n{% endif %}"
    tokenizer = byte_tokenizer(turns + asked, words=GPT2, eos_token="</s>")
    ids, mask = chat.encode(tokenizer, HELLO)
    assert chat.prompt_ids(tokenizer, HELLO[:3]) == ids[: mask.index(True)]


# -- load_tokenizer ----------------------------------------------------------------------------
def load(tokenizer, path, **options):
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return pretrained.load_tokenizer(str(path), **options)


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
    ids, mask = chat.encode(loaded, HELLO)
    assert targets(loaded, ids, mask) == ["hah" + end]


ENDS = {  # added tokens that are common ones, what the template writes after an answer, the end token
    "white space": (["\n\n", "\n", "  "], "\n\n<|im_end|>\n", "<|im_end|>"),
    "white space alone": (["\n\n", "\n"], "\n\n", "</s>"),
    "a mark before the end": (["</answer>"], "</answer><|im_end|>\n", "<|im_end|>"),
    "no special one": (["<end>"], "<end>\n", "<end>"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_an_added_token_is_the_end_token_only_if_no_special_token_ends_a_turn(kind, tmp_path):
    added, after, end = ENDS[kind]
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>\n", after), eos_token="</s>", pad_token="<s>")
    tokenizer.add_tokens(added)
    loaded = load(tokenizer, tmp_path)
    assert loaded.eos_token == end
    ids, mask = chat.encode(loaded, [user("a\n\nb"), bot("c\n\nd")])  # which a blank line does not spoil
    assert targets(loaded, ids, mask) == ["c\n\nd" + after.partition(end)[0] + end]


def test_tokenizer_without_template_needs_a_file(tmp_path):
    bare = byte_tokenizer(None)
    with pytest.raises(InputError, match="--chat-template"):
        load(bare, tmp_path)
    with pytest.raises(InputError, match="nowhere.jinja"):
        load(bare, tmp_path, chat_template=str(tmp_path / "nowhere.jinja"))
    (tmp_path / "mine.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="--chat-template .*mine.jinja: .* in UTF-8"):
        load(bare, tmp_path, chat_template=str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").write_text(CHATML)
    loaded = load(bare, tmp_path, chat_template=str(tmp_path / "mine.jinja"))
    assert targets(loaded, *chat.encode(loaded, HELLO)) == ["hah<|im_end|>"]


def test_of_several_templates_the_default_is_used_and_a_missing_default_is_an_error(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": NO_END}
    loaded = load(tokenizer, tmp_path / "default")
    assert targets(loaded, *chat.encode(loaded, HELLO)) == ["hah<|im_end|>"]
    tokenizer.chat_template = {"rag": CHATML, "tool_use": NO_END}
    with pytest.raises(InputError, match="no default.*--chat-template FILE"):
        load(tokenizer, tmp_path / "none")


HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NEOX = {"eos_token": "<|endoftext|>", "pad_token": None}  # Pythia's: one token for everything
ASKED = [{"role": "system", "content": "so"}, user("hi"), bot("hello"), user("how")]
WRITTEN = {  # tokenizer, ASKED as its makers publish the format, an answer's tokens, begin tokens
    "llama3": (
        byte_tokenizer(None, LLAMA_3, False, QWEN, bos_token=LLAMA_3[0], eos_token=LLAMA_3[1], pad_token=None),
        f"{LLAMA_3[0]}{HEAD.format('system')}so<|eot_id|>{HEAD.format('user')}hi<|eot_id|>"
        f"{HEAD.format('assistant')}hello<|eot_id|>{HEAD.format('user')}how<|eot_id|>{HEAD.format('assistant')}",
        "hello<|eot_id|>", 1,
    ),
    "llama2": (
        piece_tokenizer(None, pad_token=None, unk_token="<unk>"),
        "<s>[INST] <<SYS>>\nso\n<</SYS>>\n\nhi [/INST] hello </s><s>[INST] how [/INST]", "hello </s>", 2,
    ),
    "chat": (
        byte_tokenizer(None, ("<|endoftext|>",), bos_token="<|endoftext|>", **NEOX),
        "so\n\nHuman: hi\n\nAssistant: hello<|endoftext|>\n\nHuman: how\n\nAssistant:",
        " hello<|endoftext|>", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_the_templates_of_the_docs_write_the_published_formats(name, tmp_path):
    """One begin token per question, also if the tokenizer adds one to every text by itself (Llama 2's)."""
    bare, written, answer, begins = WRITTEN[name]
    file = processes.ROOT / "docs" / "templates" / f"{name}.jinja"
    loaded = load(bare, tmp_path, chat_template=str(file))
    assert loaded.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == written
    ids, mask = chat.encode(loaded, ASKED[:3])
    assert targets(loaded, ids, mask) == [answer]
    assert ids == loaded.apply_chat_template(ASKED[:3], return_dict=False)[: len(ids)]
    assert chat.prompt_ids(loaded, ASKED[:2]) == ids[: mask.index(True)]
    prompt = chat.prompt_ids(loaded, ASKED)
    assert prompt.count(loaded.bos_token_id) == begins  # Llama 2's, one a question
    ids, mask = chat.encode(loaded, [*ASKED, bot("hah")], all_turns=True)
    assert targets(loaded, ids, mask) == [answer, answer.replace("hello", "hah")]
    assert loaded.pad_token_id not in (None, loaded.eos_token_id) and answer.endswith(loaded.eos_token)


def test_llama_2s_template_refuses_turns_that_do_not_alternate(tmp_path):
    file = processes.ROOT / "docs" / "templates" / "llama2.jinja"
    loaded = load(WRITTEN["llama2"][0], tmp_path, chat_template=str(file))
    with pytest.raises(ValueError, match="user and assistant in turn"):
        chat.encode(loaded, [user("a"), user("b"), bot("c")])


def test_a_template_whose_end_token_would_be_plain_text_is_refused(tmp_path):
    """Llama 3's for a tokenizer with other tokens: the model would learn to spell `<|eot_id|>`."""
    file = processes.ROOT / "docs" / "templates" / "llama3.jinja"
    for name in ("chat", "llama2"):
        with pytest.raises(InputError, match=r"the chat template writes '<\|eot_id\|>', plain text"):
            load(WRITTEN[name][0], tmp_path, chat_template=str(file))


@pytest.mark.parametrize("template", ["{% for m in %}", "{{ raise_exception('never') }}"])
def test_template_that_renders_nothing_is_an_input_error(template, tmp_path):
    (tmp_path / "mine.jinja").write_text(template)
    with pytest.raises(InputError, match="template"):
        load(byte_tokenizer(), tmp_path, chat_template=str(tmp_path / "mine.jinja"))


def test_tokenizer_that_could_never_end_a_response_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="end-of-sequence token"):
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
    with pytest.raises(ValueError, match="101"):
        pack([*lengths, 101], 100)


@pytest.mark.parametrize("n, multiple", [(64, 8), (64, 64), (200, 8), (5, 8), (0, 4), (31, 3)])
def test_even_packing_balances_ranks_and_keeps_every_document(n, multiple):
    rng = random.Random(n)
    lengths = [rng.randint(20, 400) for _ in range(n)]
    blocks = pack_evenly(lengths, 512, multiple)
    sizes = [sum(lengths[i] for i in block) for block in blocks]
    assert sorted(i for block in blocks for i in block) == list(range(n))
    assert len(blocks) == n if n < multiple else len(blocks) % multiple == 0
    assert max(sizes, default=0) <= 512
    if (n, multiple) in ((64, 8), (200, 8)):
        per_rank = [sum(sorted(sizes)[rank::8]) for rank in range(8)]
        assert sum(per_rank) / 8 / max(per_rank) > 0.95
        first_fit = sorted(sum(lengths[i] for i in block) for block in pack(lengths, 512))
        assert sum(first_fit) / 8 / max(sum(first_fit[rank::8]) for rank in range(8)) < 0.95


def test_blocks_are_filled_first_fit_or_packed_evenly_for_ranks():
    documents = [document(list(range(1, n + 1)), 1) for n in (9, 5, 5, 3, 3, 3)]
    of = lambda length, n: [[len(d.ids) for d in block] for block in make_blocks(documents, length, multiple=n)]
    assert of(14, 0) == [[9, 5], [5, 3, 3, 3]]
    assert of(14, 1) == of(14, 2) == of(14, 0)  # the shortest row first would need more rows
    assert of(14, 4) == [[9], [5, 3], [5], [3, 3]]
    assert of(20, 0) == [[9, 5, 5], [3, 3, 3]]  # a batch of 2 x 19 tokens
    assert of(20, 1) == of(20, 2) == [[9, 3, 3], [5, 5, 3]]  # 2 x 15


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
    train, test = splits.hold_out(documents, share, most)
    assert not prompts_of(train) & prompts_of(test) and len(prompts_of(test)) == held
    assert len(train) + len(test) == len(documents) and prompts_of(train + test) == prompts_of(documents)
    again = splits.hold_out(documents[::-1], share, most)[1]
    assert prompts_of(again) == prompts_of(test)  # whatever the order of the rows


def test_training_documents_with_held_out_prompts_are_dropped_and_counted(capsys):
    train = [document([1, 2], 1, prompt) for prompt in ("a", "b", " a ", "c")]
    kept = splits.without_prompts_of(train, [document([5, 6], 1, "a")], "mine")
    assert prompts_of(kept) == {"b", "c"} and "2 of 4" in capsys.readouterr().out
    with pytest.raises(InputError, match="mine"):
        splits.without_prompts_of(train, train, "mine")


WORDS = "ant bear cat dog eel fox goat hen ibis jay".split()
SPELLINGS = [  # one question, as rows of several kinds ask it
    {"prompt": "copy ant Bear"},
    {"prompt": " copy  ant\r\nbear\n"},
    {"prompt": [SYSTEM, user("copy ant bear")]},
    {"system": "answer badly", "prompt": "COPY ant\u00a0bear"},
    {"instruction": "copy", "input": "ant bear"},
    {"prompt": "\n\nHuman: copy ant bear\n\nAssistant:"},
    {"messages": [{"role": "developer", "content": "s"}, user("copy ant bear")]},
]


@pytest.mark.parametrize("row", SPELLINGS, ids=str)
def test_questions_match_across_formats_case_white_space_and_system_turns(row, tokenizer):
    """As a document, a prompt or a comparison."""
    turns = message_columns.prompt_turns(row)
    document = Document(torch.zeros(1), torch.ones(1), [*turns, bot("b")], Row("f:1", row))
    pair = Comparison(turns, ["a", "b"], None, [], torch.tensor([0, 1]), "f", Row("f:1", row))
    items = [document, pair, responses.Prompt([], turns, Row("f:1", row))]
    [question] = splits.questions(document_of(user("copy ant bear")))
    assert all(list(splits.questions(item)) == [question] for item in items)
    assert [question] != list(splits.questions(document_of(user("copy ant"))))
    train = [document_of(user("copy ant")), *items]
    kept = splits.without_prompts_of(train, [document_of(user("Copy Ant bear"))], "mine")
    assert kept == train[:1]


def document_of(*turns, all_turns=False):
    return Document(
        torch.zeros(1), torch.ones(1), [*turns, bot("z")], Row("f:1", {}), all_turns=all_turns
    )


def test_every_answer_that_is_learnt_has_its_question_held_out(tokenizer, tmp_path):
    """Every answer of `messages` is learnt, but only the last one after a prompt in messages."""
    talk = [user("ant"), bot("bear"), user("cat"), bot("dog")]
    rows = [{"messages": talk}, {"prompt": talk[:3], "completion": "dog"}, {"messages": talk[2:]}]
    path = write(tmp_path / "rows.jsonl", rows)
    kept = {}
    for held in ([user("ant")], talk[:3], [SYSTEM, user("Cat ")]):
        documents = demonstrations.load_sft(path, tokenizer, 64, held_out=[document_of(*held)])
        kept[held[-1]["content"], len(held)] = [d.row.where[-1] for d in documents]
    assert kept == {("ant", 1): ["2", "3"], ("cat", 3): ["3"], ("Cat ", 2): ["1", "2"]}
    # an answer that is cut off is none the less the last one's, not the first one's
    [cut] = demonstrations.load_sft(write(tmp_path / "one.jsonl", rows[:1]), tokenizer, 6)
    assert len(splits.questions(cut)) == 2


@pytest.mark.parametrize("before", [[], [SYSTEM]])
def test_a_greeting_before_any_question_is_no_question(before, tokenizer, tmp_path):
    """Else all dialogues of a data set that begins with one would have a question in common."""
    rows = [{"messages": [*before, bot("hello"), user(f"copy {word}"), bot(word)]} for word in WORDS]
    path = write(tmp_path / "rows.jsonl", rows)
    load = functools.partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=64)
    documents = load(path)
    assert [len(splits.questions(d)) for d in documents] == [1] * len(rows)
    assert splits.questions(documents[0]) != splits.questions(documents[1])
    kept = load(path, held_out=[document_of(*before, bot("hello"), user(f"copy {WORDS[0]}"))])
    assert len(kept) == len(rows) - 1


def test_dialogues_with_the_same_first_turn_are_held_out_together(tokenizer, tmp_path):
    """Their first answers answer the same question. No row is lost, and no question is in both splits."""
    rows = []
    for i, word in enumerate(WORDS * 6):
        talk = [user(f"copy {word}"), bot(word), user(f"next {WORDS[i % 7]}"), bot(WORDS[i // 10])]
        rows.append({"messages": [{"role": "system", "content": f"s{i % 3}"}, *talk][i % 2 :]})
    path = write(tmp_path / "rows.jsonl", rows)
    load = functools.partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=64)
    train, held_out = splits.train_and_held_out(path, None, load, None)
    sides = [{q for d in some for q in splits.questions(d)} for some in (train, held_out)]
    assert len(train) == 54 and len(held_out) == 6 and not sides[0] & sides[1]
    one_opening = write(tmp_path / "one.jsonl", [rows[i] for i in range(0, 60, 10)])
    train, held_out = splits.train_and_held_out(one_opening, None, load, None)
    assert len(train) == 6 and not held_out  # as of a single prompt


def test_the_split_of_plain_prompts_is_by_the_hash_of_the_prompt():
    """The published results use this split."""
    prompts = [f"What is {i} + 2?" for i in range(100)]
    _, held_out = splits.hold_out([document_of(user(prompt)) for prompt in prompts])
    key = lambda prompt: zlib.crc32(json.dumps([["user", prompt]]).encode())
    assert prompts_of(held_out) == set(sorted(prompts, key=key)[:5])


def test_a_question_that_rows_spell_differently_is_held_out_by_its_least_hash_in_any_order():
    spellings = [[f"what is {i}?", f"What is {i}?"] for i in range(100)]
    documents = [document_of(user(text)) for both in spellings for text in both]
    key = lambda text: zlib.crc32(json.dumps([["user", text]]).encode())
    least = sorted(spellings, key=lambda both: min(map(key, both)))[:5]
    for order in (documents, documents[::-1]):
        assert prompts_of(splits.hold_out(order)[1]) == {text for both in least for text in both}


def test_no_question_of_hindsight_rows_is_in_both_splits(tokenizer, tmp_path):
    """Their system turn holds the instruction, and a prompt has rows with both instructions."""
    rows = []
    for word, side in itertools.product(WORDS, ("Answer well", "Answer badly")):
        system = {"role": "system", "content": side}
        rows.append({"prompt": [system, user(f"copy {word}")], "completion": word})
    path = write(tmp_path / "rows.jsonl", rows)
    load = functools.partial(demonstrations.load_sft, tokenizer=tokenizer, max_length=64)
    train, held_out = splits.train_and_held_out(path, None, load, None)
    texts = [{d.messages[-2]["content"] for d in some} for some in (train, held_out)]
    assert len(texts[1]) == 1 and len(held_out) == 2 and not texts[0] & texts[1]


def test_neither_plain_text_nor_a_part_of_a_mixture_teaches_a_held_out_question(tokenizer, tmp_path):
    """Neither do the data of PPO's optional losses, or other files of a mixture with other columns."""
    held = write(tmp_path / "held.jsonl", [{"prompt": "copy ant"}])
    texts = write(tmp_path / "texts.jsonl", [{"text": "Copy ant "}, {"text": "ant"}, {"text": "bear cat"}])
    talks = [[user("copy ant"), bot("ant"), user("next ant"), bot("bear")], [user("next cat"), bot("dog")]]
    talks = write(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    pairs = [{"prompt": prompt, "chosen": "dog", "rejected": "eel"} for prompt in ("copy ANT", "cat")]
    pairs = write(tmp_path / "pairs.jsonl", pairs)
    prompts = prompt_sets.load_prompts(held, "train", tokenizer, 64)
    args = SimpleNamespace(ptx_dataset=texts, rehearsal_data=f"{talks},{pairs}", max_length=64)
    extra, held_out_text = auxiliary.load_extra(args, tokenizer, prompts)
    assert sorted(d.messages[0]["content"] for d in [*extra["ptx"], *held_out_text]) == ["ant", "bear cat"]
    assert [d.messages[-2]["content"] for d in extra["rehearsal"]] == ["next cat", "cat"]


def test_a_text_is_known_if_half_of_its_words_are(tokenizer):
    chat.check_known(tokenizer, [tokenizer.unk_token_id, 5])
    with pytest.raises(ValueError, match="does not know most of its words"):
        chat.check_known(tokenizer, [tokenizer.unk_token_id] * 2 + [5])
    gpt2 = SimpleNamespace(unk_token_id=7, eos_token_id=7)  # whose end token is the unknown one too
    chat.check_known(gpt2, [7, 7, 7])
