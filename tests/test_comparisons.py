"""common/data/comparisons.py: rows become comparisons, or are dropped, and why."""

import collections
import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import SYSTEM, TALK, TOKENIZER, bot, user, write_rows

from common.batches import Comparison, Row, labelled_pairs
from common.errors import InputError
from common.losses import ranking_loss
from common.responses import Prompt
from common.data import comparisons
from common.data.comparisons import epoch_order
from common.scoring import measures


def responses(**scores):
    return [{"text": text.replace("_", " "), "score": score} for text, score in scores.items()]


@pytest.fixture
def load(tmp_path):
    """load(rows, ...) -> comparisons, from a file p.jsonl that holds the rows."""

    def load(rows, max_length=64, **options):
        path = str(write_rows(tmp_path / "p.jsonl", rows))
        return comparisons.load(path, "train", TOKENIZER, max_length, **options)

    return load


def pair(prompt="copy ant", chosen="ant", rejected="cat", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


GOOD = pair("copy owl", "owl", "pig")  # a row that stays, so that not every file ends in an error

# -- row formats: (row, prompt messages, texts) ------------------------------------------------
HH = "\n\nHuman: ant\n\nAssistant: bear\n\nHuman: cat\n\nAssistant:"
SCORED = responses(dog=1, eel_fox=3.5, goat=-2)
PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "dog"}]}]
PAIR_FORMATS = {
    "content in parts": ({"prompt": "cat", "chosen": PARTS, "rejected": [bot("eel")]}, [user("cat")]),
    "system column": (
        {"system": "so", "prompt": "cat", "chosen": "dog", "rejected": "eel"}, [SYSTEM, user("cat")]),
    "system column beside dialogues": (
        {"system": "so", "chosen": HH + " dog", "rejected": HH + " eel"}, [SYSTEM, *TALK]),
    "prompt + texts": ({"prompt": "cat", "chosen": "dog", "rejected": "eel"}, [user("cat")]),
    "instruction + texts": ({"instruction": "cat", "chosen": "dog", "rejected": "eel"}, [user("cat")]),
    "prompt + answers as messages": (
        {"prompt": "cat", "chosen": [bot("dog")], "rejected": [bot("eel")]}, [user("cat")]),
    "prompt messages + texts": ({"prompt": TALK, "chosen": "dog", "rejected": "eel"}, TALK),
    "prompt messages + answers": ({"prompt": TALK, "chosen": [bot("dog")], "rejected": [bot("eel")]}, TALK),
    "HH prompt + texts": ({"prompt": HH, "chosen": "dog", "rejected": "eel"}, TALK),
    "HH dialogues": ({"chosen": HH + " dog", "rejected": HH + " eel"}, TALK),
    "HH dialogues and their prompt": ({"prompt": HH, "chosen": HH + " dog", "rejected": HH + " eel"}, TALK),
    "message lists": ({"chosen": [*TALK, bot("dog")], "rejected": [*TALK, bot("eel")]}, TALK),
    "message lists beside their prompt": (
        {"prompt": "cat", "chosen": [*TALK, bot("dog")], "rejected": [*TALK, bot("eel")]}, TALK),
}  # fmt: skip
RANKING_FORMATS = {
    "instruction, input, system": (
        {"instruction": "b", "input": "a", "system": "so", "responses": SCORED}, [SYSTEM, user("b\n\na")]),
    "prompt": ({"prompt": "cat", "responses": SCORED}, [user("cat")]),
    "instruction": ({"instruction": "cat", "responses": SCORED}, [user("cat")]),
    "prompt messages": ({"prompt": TALK, "responses": SCORED}, TALK),
    "HH prompt": ({"prompt": HH, "responses": SCORED}, TALK),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_pairs_of_every_row_format(name, load):
    row, prompt = PAIR_FORMATS[name]
    (c,) = load([row])
    assert (c.prompt, c.texts, c.ranks.tolist()) == (prompt, ["dog", "eel"], [0, 1])
    assert (c.source, c.row.where, c.row.data) == ("p.jsonl", "p.jsonl:1", row)
    assert (c.rating, c.margin, c.preference, c.label_scores, c.category) == (None,) * 5
    assert c.prompt == prompt and c.texts[0] == "dog"


@pytest.mark.parametrize("name", RANKING_FORMATS)
def test_rankings_of_every_row_format_are_best_first(name, load):
    row, prompt = RANKING_FORMATS[name]
    (c,) = load([row])
    assert (c.prompt, c.texts) == (prompt, ["eel fox", "dog", "goat"])
    assert (c.ranks.tolist(), c.label_scores, c.indices) == ([0, 1, 2], [3.5, 1, -2], (1, 0, 2))


def test_ids_are_the_rendered_prompt_and_responses_with_their_end_token(load):
    (c,) = load([{"prompt": TALK, "responses": SCORED}])
    words = "<|bos|> <|user|> ant <|end|> <|assistant|> bear <|end|> <|user|> cat <|end|> <|assistant|>"
    assert TOKENIZER.convert_ids_to_tokens(c.prompt_ids.tolist()) == words.split()
    texts = [TOKENIZER.convert_ids_to_tokens(ids.tolist()) for ids in c.response_ids]
    assert texts == [["eel", "fox", "<|end|>"], ["dog", "<|end|>"], ["goat", "<|end|>"]]
    assert c.n_tokens == 11 + 3 + 2 + 2
    assert c._replace(samples=(torch.zeros(5),)).n_tokens == 18 + 5
    assert {ids.dtype for ids in (c.prompt_ids, *c.response_ids)} == {torch.int32}


def test_optional_columns_are_read(load):
    labels = {"rating": "slightly better", "margin": 2, "preference": 0.75, "category": 7}
    scored = pair(**labels, chosen_score=3, rejected_score=1)
    names_of_another_data_set = pair("copy eel", score_chosen=0.5, score_rejected=-1)
    first, second = load([scored, names_of_another_data_set])
    assert (first.rating, first.margin) == ("slightly better", 2.0)
    assert (first.preference, first.category) == (0.75, "7")
    assert first.label_scores == [3.0, 1.0] and second.label_scores == [0.5, -1.0]


@pytest.mark.parametrize(
    "preference, ranks, pairs",
    [(1, [0, 1], [(0, 1)]), (0.6, [0, 1], [(0, 1)]), (0.5, [0, 0], []), (0.4, [1, 0], [(1, 0)]),
     (0, [1, 0], [(1, 0)])],
)  # fmt: skip
def test_a_soft_label_counts_as_its_more_likely_side(preference, ranks, pairs, load):
    (c,) = load([pair(preference=preference)])
    assert (c.texts, c.ranks.tolist(), c.preference) == (["ant", "cat"], ranks, preference)
    assert labelled_pairs(c) == pairs


# -- what is left out, and why ------------------------------------------------------------------
def why(capsys):
    """{reason: rows} as printed."""
    lines = [line.split(": ", 1) for line in capsys.readouterr().out.splitlines() if line[:1] == " "]
    return {reason.rpartition(" (")[0]: int(number) for number, reason in lines}


FOUR = "significantly better, better, slightly better, negligibly better"
REASONS = [  # (row, part of the reason)
    (pair(chosen="cat"), "the responses are the same"),
    (pair(chosen=" cat\n"), "the responses are the same"),
    ({"prompt": "copy ant", "responses": responses(ant=1) + responses(ant=3)}, "are the same"),
    ({"prompt": "copy ant", "chosen": "ant"}, "columns ['chosen', 'prompt'] match no format of preference rows"),
    ({"prompt": "copy ant", "completion": "ant"}, "match no format of preference rows"),
    ({"chosen": "ant", "rejected": "cat"}, "neither a list of messages nor a dialogue"),
    ({"responses": SCORED}, "no prompt"),
    (pair(prompt=" "), "no prompt"),
    (pair(prompt=5), "the prompt is int, not text or messages"),
    (pair(rating="much better"), f"rating 'much better' is not one of {FOUR}"),
    (pair(preference=1.2), "preference 1.2 is not a number from 0 to 1"),
    (pair(preference=float("nan")), "preference nan is not a finite number"),
    (pair(preference="high"), "preference 'high' is not a finite number"),
    (pair(margin=-1), "margin -1 is not a number from 0 to inf"),
    (pair(margin=float("inf")), "margin inf is not a finite number"),
    (pair(margin="1,5"), "margin '1,5' is not a finite number"),
    (pair(chosen_score=2, rejected_score=float("nan")), "rejected_score nan is not a finite number"),
    (pair(chosen_score="good", rejected_score=1), "chosen_score 'good' is not a finite number"),
    ({"prompt": "copy ant", "responses": responses(ant=1)}, "a ranking needs at least two responses"),
    ({"prompt": "copy ant", "responses": []}, "a ranking needs at least two responses"),
    ({"prompt": "copy ant", "responses": None}, "match no format of preference rows"),
    ({"prompt": "copy ant", "responses": 7}, "responses is not a list of {text, score}"),
    ({"prompt": "copy ant", "responses": ["ant", "cat"]}, "responses is not a list of {text, score}"),
    ({"prompt": "copy ant", "responses": [{"text": "ant"}, {"text": "cat"}]}, "not a list of {text, score}"),
    ({"prompt": "copy ant", "responses": responses(ant=1, cat=float("nan"))}, "not a list of {text, score}"),
    ({"prompt": "copy ant", "responses": [{"text": 5, "score": 1}, *SCORED]}, "not a list of {text, score}"),
    ({"prompt": "copy ant", "responses": responses(ant=1, cat=1)}, "no response is better than another"),
    ({"chosen": HH + " dog", "rejected": HH.replace("cat", "owl") + " eel"}, "have different prompts"),
    ({"chosen": [user("ant"), bot("dog")], "rejected": [user("owl"), bot("eel")]}, "have different prompts"),
    (pair(rejected=[]), "no response"),
    (pair(rejected=None), "no response"),
    (pair(chosen=7), "the response is int, not text or messages"),
    (pair(chosen="  "), "no response"),
    ({"chosen": HH + " ", "rejected": HH + " eel"}, "no response"),
    (pair(chosen=[bot("ant"), bot("ant")]), "have different prompts"),
    (pair(chosen="ant <|end|> ant"), "the text contains a special token"),
    (pair(chosen="ant " * 60), "longer than 64 tokens (--max-length)"),
    (pair(prompt="ant " * 60), "longer than 64 tokens (--max-length)"),
    (pair(prompt=[user("ant"), bot(""), user("cat")]), "an earlier answer is empty"),
    ({"chosen": HH.replace(" bear", "") + " dog", "rejected": HH + " eel"}, "an earlier answer is empty"),
    (pair(chosen=[{**bot("ant"), "tool_calls": [{}]}]), "a message has tool_calls"),
    (pair(rejected=[{**bot(""), "content": [{"type": "image"}]}]), "a part of type 'image'"),
    ({"prompt": "copy ant", "completion": "ant", "label": True}, "no other completion of the same prompt has"),
    ({"prompt": "copy ant", "completion": "ant", "label": None}, "match no format of preference rows"),
    ({"prompt": "copy ant", "completion": "ant", "label": "maths"}, "label 'maths' is not a finite number"),
    ({"question": "copy ant", "completion": "ant", "label": True}, "match no format of preference rows"),
    (pair(chosen=["ant", 5], rejected=["cat"]), ""),  # neither texts nor messages
    (pair(margin=10**400), "margin 1000"),  # an integer beyond float
    ({"prompt": "copy ant", "responses": responses(ant=10**400, cat=1)}, "not a list of {text, score}"),
    (pair(chosen_is_safe="true", rejected_is_safe="false"), "is_safe ['true', 'false'] is neither true nor false"),
    (pair(preference=True), "preference True is not a number from 0 to 1"),
    (pair(chosen_score=1, rejected_score=3), "the scores contradict the label or are within --min-score-gap 0.0"),
    (pair("please tell me what the capital of france is", "paris", "rome"), "check --model"),
]


@pytest.mark.parametrize(
    "row, reason", REASONS, ids=[f"{i} {reason[-30:]}" for i, (_, reason) in enumerate(REASONS)]
)
def test_unusable_rows_are_counted_and_named(row, reason, load, capsys):
    (c,) = load([GOOD, row])
    assert c.texts == ["owl", "pig"]
    printed = capsys.readouterr().out
    assert "p.jsonl: dropped 1 of 2 rows" in printed and "  1: " in printed
    assert reason in printed and "(p.jsonl:2)" in printed


def test_a_score_as_text_of_a_number_is_read(load):
    """As message_columns.sft_messages reads it."""
    (c,) = load([{"prompt": "copy ant", "responses": responses(ant="3", cat="10")}])
    assert c.texts == ["cat", "ant"] and c.label_scores == [10.0, 3.0]


def test_labels_of_single_completions_make_pairs_of_a_prompt_that_has_both(load, capsys):
    rows = [("ant", "dog", True), ("ant", "cat", False), ("owl", "dog", True), ("ant", "eel", 1)]
    rows += [("ant", "fox", 0), ([user("ant")], [bot("pig")], True), ([user("ant")], [bot("owl")], False)]
    found = load([dict(zip(("prompt", "completion", "label"), row)) for row in rows])
    better = ((1, "dog"), (4, "eel"), (6, "pig"))  # and worse: cat, fox and owl
    expected = [(f"p.jsonl:{n}", [text, worse]) for n, text in better for worse in ("cat", "fox", "owl")]
    assert [(c.row.where, c.texts) for c in found] == expected
    assert why(capsys) == {"no other completion of the same prompt has a different label or score": 1}


def test_data_without_a_usable_row_is_an_error_with_reasons_and_places(load):
    with pytest.raises(InputError) as error:
        load([pair(chosen="cat"), pair(chosen=""), pair(chosen="cat")])
    message = str(error.value)
    assert "no usable row among its 3" in message
    assert "the responses are the same (p.jsonl:1)" in message and "no response (p.jsonl:2)" in message


def test_contradicting_rows_are_both_dropped_and_repeated_ones_stay(load, capsys):
    opposite = "another row has the opposite label for the same responses"
    rows = [
        pair("copy ant", "ant", "cat"),
        pair("copy ant", "cat", "ant"),  # against the first
        pair("copy ant", "ant", "dog"),  # other responses
        pair("copy bear", "ant", "cat"),  # another prompt
        pair("copy bear", "ant", "cat"),  # says the same
    ]
    kept = load(rows)
    assert [c.row.where for c in kept] == ["p.jsonl:3", "p.jsonl:4", "p.jsonl:5"]
    assert why(capsys) == {opposite: 2}
    # A soft label contradicts through its likelier side only, a ranking of two is a pair
    soft = [pair(preference=0.8), pair(preference=0.3)]
    soft += [pair("copy eel", preference=0.8), pair("copy eel", preference=0.6)]
    assert [c.row.where for c in load(soft)] == ["p.jsonl:3", "p.jsonl:4"]
    ranked = [pair(), {"prompt": "copy ant", "responses": responses(ant=1, cat=2)}, GOOD]
    assert [c.row.where for c in load(ranked)] == ["p.jsonl:3"]
    assert len(load([pair(preference=0.5), pair(), pair()])) == 3  # a half says nothing against
    spaced = [pair("copy ant", "ant", "cat"), pair("copy ant", "cat ", " ant"), GOOD]
    assert [c.row.where for c in load(spaced)] == ["p.jsonl:3"]


@pytest.mark.parametrize("gap, kept", [(0.0, 3), (0.5, 3), (0.51, 2), (2.0, 2), (2.01, 1)])
def test_min_score_gap_of_pairs(gap, kept, load, capsys):
    rows = [
        pair("copy ant", chosen_score=1.5, rejected_score=1.0),  # 0.5
        pair("copy bear", chosen_score=1.0, rejected_score=-1.0),  # 2
        pair("copy cat"),  # no scores: nothing to go by
    ]
    assert len(load(rows, min_score_gap=gap)) == kept
    reason = f"the scores contradict the label or are within --min-score-gap {gap}"
    assert why(capsys) == ({reason: 3 - kept} if kept < 3 else {})


def test_a_gap_of_exactly_the_minimum_is_kept_and_soft_labels_use_their_own_side(load):
    """0.9 - 0.8 is less than 0.1 in floating point. A label of 0.2 says that the second response is better."""
    scored = lambda prompt, a, b, **more: pair(prompt, chosen_score=a, rejected_score=b, **more)  # noqa: E731
    rows = [scored("copy ant", 0.9, 0.8), scored("copy bear", 0.9, 0.81)]
    rows += [scored("copy cat", 3.0, 8.0, preference=0.2), scored("copy dog", 8.0, 3.0, preference=0.2)]
    rows += [scored("copy eel", 8.0, 3.0, preference=0.8), scored("copy fox", 3.0, 8.0, preference=0.5)]
    assert [c.row.where[-1] for c in load(rows, min_score_gap=0.1)] == ["1", "3", "5", "6"]


def test_margins_by_scores_are_in_the_units_of_their_data_set(load, tmp_path):
    """UltraFeedback's scores go to 10, SHP's to thousands: the largest gap of each data set has the largest margin.
    Two files with the same name are two data sets."""
    loaded = []
    for folder, gaps in (("a", (8.0, 2.0)), ("b", (500.0, 4000.0))):
        (tmp_path / folder).mkdir()
        rows = [pair(f"copy {x}", chosen_score=gap, rejected_score=0) for x, gap in zip(("ant", "cat"), gaps)]
        loaded.append(str(write_rows(tmp_path / folder / "p.jsonl", rows)))
    for order, expected in ((loaded, [3, 0.75, 0.375, 3]), (loaded[::-1], [0.375, 3, 3, 0.75])):
        both = comparisons.load(",".join(order), "train", TOKENIZER, 64)
        assert len({c.source for c in both}) == 2
        margins = [c.margins[0, 1].item() for c in comparisons.with_margins(both, "large")]
        assert margins == pytest.approx(expected)


def test_scores_of_two_data_sets_are_not_compared(load, tmp_path):
    """0 to 4 in one, 0 to 10 in the other: a mediocre 6 is no better than an excellent 4."""
    specs = []
    for name, scores in (("a", {"ant": 4, "cat": 0}), ("b", {"dog": 6, "eel": 9})):
        rows = [{"prompt": "copy ant", "completion": text, "score": score} for text, score in scores.items()]
        specs.append(str(write_rows(tmp_path / f"{name}.jsonl", rows)))
    both = comparisons.load(",".join(specs), "train", TOKENIZER, 64)
    assert [c.texts for c in both] == [["ant", "cat"], ["eel", "dog"]]
    specs = []
    for text, label in (("ant", True), ("cat", False)):  # labels have no unit
        rows = [{"prompt": "copy ant", "completion": text, "label": label}]
        specs.append(str(write_rows(tmp_path / f"{text}.jsonl", rows)))
    assert [c.texts for c in comparisons.load(",".join(specs), "train", TOKENIZER, 64)] == [["ant", "cat"]]


@pytest.mark.parametrize(
    "gap, scores, pairs",
    [
        (0.0, [3.0, 2.6, 2.6, 1.0], [(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)]),  # equal scores are ties
        (0.5, [3.0, 2.75, 1.0], [(0, 2), (1, 2)]),
        (0.25, [3.0, 2.75, 1.0], [(0, 1), (0, 2), (1, 2)]),  # exactly the gap is enough
        (1.0, [8.0, 7.5, 7.0, 6.5], [(0, 2), (0, 3), (1, 3)]),  # what lies between makes no ties
        (0.1, [0.9, 0.8, 0.7, 0.65], [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]),  # 0.9 - 0.8 < 0.1
        (0.1, torch.tensor([8.3, 8.2, 8.15]).tolist(), [(0, 1), (0, 2)]),  # of float32: 0.0999994
        (0.1, [1000.1, 1000.0, 999.95], [(0, 1), (0, 2)]),
        (2.0, [3.0, 2.75, 2.5, 1.5], None),
    ],
)
def test_min_score_gap_of_rankings(gap, scores, pairs, load, capsys):
    texts = ["dog", "eel", "fox", "goat"][: len(scores)]
    mixed = [{"text": t, "score": s} for t, s in list(zip(texts, scores))[::-1]]
    rows = [GOOD, {"prompt": "copy ant", "responses": mixed}]
    found = [c for c in load(rows, min_score_gap=gap) if len(c.texts) > 2]
    if pairs is None:
        assert not found and why(capsys) == {"no response is better than another": 1}
    else:
        c = found[0]
        assert labelled_pairs(c) == pairs and (gap or c.ranks.tolist() == [0, 1, 1, 2])
        assert dict(zip(c.texts, c.label_scores)) == dict(zip(texts, scores))
        # and so they are counted in the loss, among held-out figures, in the tables and by offline DPO
        assert ranking_loss(torch.zeros(len(scores)), c.ranks)[1]["n_rows"] == len(pairs)
        sides = measures.pairs_of([{**comparisons.describe(c), "differences": [0.0] * len(pairs)}])
        assert [(a["text"], b["text"]) for *_, a, b in sides] == [(c.texts[i], c.texts[j]) for i, j in pairs]
        assert comparisons.best_and_worst(c).texts == [c.texts[0], c.texts[-1]]


def test_max_per_prompt_keeps_the_first_rows_of_a_prompt_that_count(load, capsys):
    rows = [
        pair(chosen="dog"),
        pair(chosen="cat"),  # unusable: does not count
        pair(chosen="eel"),
        GOOD,
        pair(" copy ant", chosen="fox"),  # the same prompt
        {"prompt": "copy ant", "responses": responses(goat=1, hen=2)},
    ]
    where = [c.row.where[-1] for c in load(rows, max_per_prompt=2)]
    assert where == ["1", "3", "4"]
    reasons = why(capsys)
    assert reasons.pop("the responses are the same") == 1
    assert reasons == {"the prompt has 2 rows already (--max-pairs-per-prompt)": 2}
    assert len(load(rows)) == 5


def test_a_ranking_loses_only_duplicate_texts_and_long_responses(load, capsys):
    rows = [{"prompt": "copy ant", "responses": responses(ant=1, cat=2, dog=0) + responses(ant=3)}]
    (c,) = load(rows)
    assert (c.texts, c.label_scores, c.indices) == (["cat", "ant", "dog"], [2, 1, 0], (1, 0, 2))
    assert "left out 1 responses of rankings" in capsys.readouterr().out
    long = {"text": "pig " * 60, "score": 9}
    (c,) = load([{"prompt": "copy ant", "responses": [*SCORED[:2], long, SCORED[2]]}])
    assert c.texts == ["eel fox", "dog", "goat"] and c.ranks.tolist() == [1, 2, 3] and c.indices == (1, 0, 3)
    assert comparisons.column(c, "text") == c.texts


def test_length_limit_counts_the_prompt_and_one_response(load):
    """6 tokens of prompt (bos, user, copy, ant, end, assistant), and ant, end; cat, cat, end."""
    row = pair(rejected="cat cat")
    (c,) = load([row], max_length=9)
    assert len(c.prompt_ids) == 6 and list(map(len, c.response_ids)) == [2, 3]
    with pytest.raises(InputError, match="longer than 8 tokens"):
        load([row], max_length=8)


# -- columns, statistics, samples, order --------------------------------------------------------
def test_column_and_describe_of_pairs_and_rankings(load):
    ranking = [
        {"text": "dog", "score": 1, "gold": 0.5, "is_safe": True},
        {"text": "eel fox", "score": 2, "gold": 1.5},
    ]
    safe = {"chosen_is_safe": True, "rejected_is_safe": False}
    rows = [pair(chosen_gold=3.0, rejected_gold=-1.0, category="c", **safe)]
    a, b = load([*rows, {"prompt": "copy eel", "responses": ranking}])
    assert comparisons.column(a, "gold") == [3.0, -1.0] and comparisons.column(b, "gold") == [1.5, 0.5]
    assert comparisons.column(a, "utility") is None and comparisons.column(b, "is_safe") is None
    assert comparisons.describe(a) == {
        "prompt": [user("copy ant")],
        "source": "p.jsonl",
        "category": "c",
        "responses": [
            {"text": "ant", "tokens": 2, "rank": 0, "gold": 3.0, "is_safe": True},
            {"text": "cat", "tokens": 2, "rank": 1, "gold": -1.0, "is_safe": False},
        ],
    }
    assert [r["tokens"] for r in comparisons.describe(b)["responses"]] == [3, 2]


def test_statistics_by_hand(load):
    """Two rows of a prompt of 6 tokens, one of 7; pairs better/worse of 2/4 and 2/3, and of the ranking eel
    fox (3 tokens), dog (2), goat (2): 3/2, 3/2, 2/2."""
    rows = [pair(rejected="cat cat cat"), {"prompt": "copy eel eel", "responses": SCORED}]
    loaded = load([*rows, pair(rejected="dog dog")])
    other = [c._replace(source="a") for c in loaded[:1]]
    table = comparisons.statistics(loaded + other, loaded)
    assert [row["data"] for row in table] == ["a", "p.jsonl", "p.jsonl (held out)"]
    lengths = {"chosen_tokens": (2 + 3 + 3 + 2 + 2) / 5, "rejected_tokens": (4 + 2 + 2 + 2 + 3) / 5}
    numbers = {"rows": 3, "prompts": 2, "pairs": 5, "prompt_tokens": (6 + 7 + 6) / 3, **lengths}
    assert table[1] == {"data": "p.jsonl", **numbers}
    assert table[2] == {**table[1], "data": "p.jsonl (held out)"}


def labelled(categories):
    empty = torch.zeros(1, dtype=torch.int32)
    one = Comparison([], ["", ""], empty, [empty, empty], torch.tensor([0, 1]), "f", Row("f:1", {}))
    return [one._replace(category=c) for c in categories]


def test_epoch_order_is_every_comparison_once_or_every_category_equally_often():
    mixed = labelled(["a"] * 900 + ["b"] * 90 + [None] * 10)

    def order(balanced, seed=0, epoch=0):
        return epoch_order(mixed, balanced, seed, epoch)

    assert sorted(order(False)) == list(range(1000)) != order(False)
    assert order(False) == order(False) != order(False, seed=1) != order(False, epoch=1)
    drawn = order(True)
    assert len(drawn) == 1000 and drawn == order(True) != order(True, epoch=1)
    count = collections.Counter(mixed[i].category for i in drawn)
    for category in ("a", "b", None):  # 333 +- 15 of each
        assert abs(count[category] - 1000 / 3) < 60
    assert len({i for i in drawn if mixed[i].category is None}) == 10


# -- small helpers ------------------------------------------------------------------------------
def test_a_comparisons_key_depends_only_on_its_prompt_and_references_come_later(load):
    rows = [pair("copy ant"), pair(" copy ant\n", "eel", "dog"), pair("copy bear")]
    a, b, c, d = load([*rows, {"chosen": HH + " dog", "rejected": HH + " eel"}])
    assert a.key == b.key != c.key and len({x.key for x in (a, b, c, d)}) == 3
    row = Row("f:1", {})
    assert a.key == Prompt([], [user("copy ant")], row).key  # one key for both
    assert d.key == Prompt([], TALK, row).key
    assert a.ref_logprobs is None


def test_the_fingerprint_is_that_of_the_content_and_not_of_the_files_name_or_the_process(tmp_path):
    """Rows remember which of their columns were read, in a set, whose order differs between processes."""
    rows = [{"prompt": "p", "responses": [{"text": x, "score": s} for x, s in (("a", 3), ("b c d e", 2), ("f", 1))]}]
    paths = [str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name in ("one", "other")]
    fingerprint_of = lambda path, *limits: comparisons.fingerprint(comparisons.load(path, "train", TOKENIZER, *limits))
    one = fingerprint_of(paths[0], 64)
    assert one == fingerprint_of(paths[1], 64) == json.loads(json.dumps(one))
    assert one != fingerprint_of(paths[0], 8) and one != fingerprint_of(paths[0], 64, 1.5)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_held_out_fingerprint_does_not_depend_on_pythons_hash_seed(tmp_path, seed):
    """A row of PKU-SafeRLHF, of which several columns are read."""
    row = {"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": 1, "safer_response_id": 0,
           "is_response_0_safe": True, "is_response_1_safe": False}  # fmt: skip
    path = write_rows(tmp_path / "pku.jsonl", [row])
    code = "import sys, json; from helpers import TOKENIZER; from types import SimpleNamespace as args;"
    code += "from common.data import comparisons; from common.run import identity;"
    code += "held_out = comparisons.fingerprint(comparisons.load(sys.argv[1], 'train', TOKENIZER, 64));"
    code += "print(identity.of_run(args(), held_out)['held-out set'])"
    known = {subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": str(x), "PYTHONPATH": os.pathsep.join(sys.path)}
                            ).stdout for x in (0, seed)}  # fmt: skip
    assert len(known) == 1


def test_completions_that_are_joined_into_a_pair_keep_the_last_assistant_turn_of_their_prompt(load):
    begun = [user("q"), bot("first part")]
    rows = [{"messages": [*begun, bot(text)], "label": label} for text, label in (("cat", True), ("dog", False))]
    (pair_,) = load(rows)
    assert pair_.prompt == begun and pair_.texts == ["cat", "dog"]


@pytest.mark.parametrize("column", ["conversations", "messages"])
def test_completions_that_are_joined_keep_the_system_turn_of_any_dialogue(load, column):
    rows = [{"system": "be brief", column: [user("q"), bot(text)], "score": score} for text, score in (("cat", 1), ("dog", 0))]
    (pair_,) = load(rows)
    assert pair_.prompt == [{"role": "system", "content": "be brief"}, user("q")] and pair_.texts == ["cat", "dog"]
