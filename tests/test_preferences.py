"""common/preferences.py: rows -> comparisons -> batches that share prompts, and what is left out and why."""

import collections
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from common import batches, comparisons, dist, evaluation, generate, losses, models, tiny
from common.batches import Comparison, Row, collate_comparisons, labelled_pairs, my_comparison_batches
from common.comparisons import _comparison, epoch_order, seq_logprobs
from common.errors import InputError


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def responses(**scores):
    return [{"text": text.replace("_", " "), "score": score} for text, score in scores.items()]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.fixture
def load(tmp_path, tokenizer):
    """load(rows, ...) -> comparisons, from a file p.jsonl that holds the rows."""

    def load(rows, max_length=64, **options):
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return comparisons.load(str(tmp_path / "p.jsonl"), "train", tokenizer, max_length, **options)

    return load


def pair(prompt="copy ant", chosen="ant", rejected="cat", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


GOOD = pair("copy owl", "owl", "pig")  # a row that stays, so that not every file ends in an error

# -- row formats: (row, prompt messages, texts) ------------------------------------------------
TALK = [user("ant"), bot("bear"), user("cat")]
HH = "\n\nHuman: ant\n\nAssistant: bear\n\nHuman: cat\n\nAssistant:"
SCORED = responses(dog=1, eel_fox=3.5, goat=-2)
SYSTEM = {"role": "system", "content": "so"}
PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "dog"}]}]
PAIR_FORMATS = {
    "content in parts": ({"prompt": "cat", "chosen": PARTS, "rejected": [bot("eel")]}, [user("cat")]),
    "system column": (
        {"system": "so", "prompt": "cat", "chosen": "dog", "rejected": "eel"},
        [SYSTEM, user("cat")],
    ),
    "system column beside dialogues": (
        {"system": "so", "chosen": HH + " dog", "rejected": HH + " eel"},
        [SYSTEM, *TALK],
    ),
    "prompt + texts": ({"prompt": "cat", "chosen": "dog", "rejected": "eel"}, [user("cat")]),
    "instruction + texts": ({"instruction": "cat", "chosen": "dog", "rejected": "eel"}, [user("cat")]),
    "prompt + answers as messages": (
        {"prompt": "cat", "chosen": [bot("dog")], "rejected": [bot("eel")]},
        [user("cat")],
    ),
    "prompt messages + texts": ({"prompt": TALK, "chosen": "dog", "rejected": "eel"}, TALK),
    "prompt messages + answers": ({"prompt": TALK, "chosen": [bot("dog")], "rejected": [bot("eel")]}, TALK),
    "HH prompt + texts": ({"prompt": HH, "chosen": "dog", "rejected": "eel"}, TALK),
    "HH dialogues": ({"chosen": HH + " dog", "rejected": HH + " eel"}, TALK),
    "HH dialogues beside their prompt": (
        {"prompt": HH, "chosen": HH + " dog", "rejected": HH + " eel"},
        TALK,
    ),
    "message lists": ({"chosen": [*TALK, bot("dog")], "rejected": [*TALK, bot("eel")]}, TALK),
    "message lists beside their prompt": (
        {"prompt": "cat", "chosen": [*TALK, bot("dog")], "rejected": [*TALK, bot("eel")]},
        TALK,
    ),
}
RANKING_FORMATS = {
    "instruction, input, system": (
        {"instruction": "cat", "input": "owl", "system": "so", "responses": SCORED},
        [SYSTEM, user("cat\n\nowl")],
    ),
    "prompt": ({"prompt": "cat", "responses": SCORED}, [user("cat")]),
    "instruction": ({"instruction": "cat", "responses": SCORED}, [user("cat")]),
    "prompt messages": ({"prompt": TALK, "responses": SCORED}, TALK),
    "HH prompt": ({"prompt": HH, "responses": SCORED}, TALK),
}


@pytest.mark.parametrize("name", PAIR_FORMATS)
def test_pairs_of_every_row_format(name, load):
    row, prompt = PAIR_FORMATS[name]
    (c,) = load([row])
    assert (c.prompt, c.texts, c.ranks.tolist()) == (prompt, ["dog", "eel"], [0, 1])
    assert (c.source, c.row.where, c.row.data) == ("p.jsonl", "p.jsonl:1", row)
    assert (c.rating, c.margin, c.preference, c.grades, c.category) == (None,) * 5
    assert c.messages == [*prompt, bot("dog")]


@pytest.mark.parametrize("name", RANKING_FORMATS)
def test_rankings_of_every_row_format_are_best_first(name, load):
    row, prompt = RANKING_FORMATS[name]
    (c,) = load([row])
    assert (c.prompt, c.texts) == (prompt, ["eel fox", "dog", "goat"])
    assert (c.ranks.tolist(), c.grades, c.kept) == ([0, 1, 2], [3.5, 1, -2], (1, 0, 2))


def test_ids_are_the_rendered_prompt_and_responses_with_their_end_token(load, tokenizer):
    (c,) = load([{"prompt": TALK, "responses": SCORED}])
    words = "<|bos|> <|user|> ant <|end|> <|assistant|> bear <|end|> <|user|> cat <|end|> <|assistant|>"
    assert tokenizer.convert_ids_to_tokens(c.prompt_ids.tolist()) == words.split()
    texts = [tokenizer.convert_ids_to_tokens(ids.tolist()) for ids in c.response_ids]
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
    assert first.grades == [3.0, 1.0] and second.grades == [0.5, -1.0]


@pytest.mark.parametrize(
    "preference, ranks, pairs",
    [
        (1, [0, 1], [(0, 1)]),
        (0.6, [0, 1], [(0, 1)]),
        (0.5, [0, 0], []),
        (0.4, [1, 0], [(1, 0)]),
        (0, [1, 0], [(1, 0)]),
    ],
)
def test_a_soft_label_counts_as_its_likelier_side(preference, ranks, pairs, load):
    (c,) = load([pair(preference=preference)])
    assert (c.texts, c.ranks.tolist(), c.preference) == (["ant", "cat"], ranks, preference)
    assert labelled_pairs(c) == pairs


# -- what is left out, and why ------------------------------------------------------------------
def why(capsys):
    """{reason: rows} as printed."""
    lines = capsys.readouterr().out.splitlines()
    return {
        line.split(": ", 1)[1].rpartition(" (")[0]: int(line.split(":")[0])
        for line in lines
        if line[:1] == " "
    }


FOUR = "significantly better, better, slightly better, negligibly better"
REASONS = [  # (row, part of the reason)
    (pair(chosen="cat"), "the responses are the same"),
    (pair(chosen=" cat\n"), "the responses are the same"),
    ({"prompt": "copy ant", "responses": responses(ant=1) + responses(ant=3)}, "are the same"),
    ({"prompt": "copy ant", "chosen": "ant"}, "columns ['chosen', 'prompt'] are no preference row"),
    ({"prompt": "copy ant", "completion": "ant"}, "are no preference row"),
    ({"chosen": "ant", "rejected": "cat"}, "neither a list of messages nor a dialogue"),
    ({"responses": SCORED}, "no prompt"),
    (pair(prompt=" "), "no prompt"),
    (pair(prompt=5), "not {role, content}"),
    (pair(rating="much better"), f"rating 'much better' is none of {FOUR}"),
    (pair(rating=3), "rating 3 is none of"),
    (pair(preference=1.2), "preference 1.2 is no number from 0 to 1"),
    (pair(preference=-0.1), "preference -0.1 is no number from 0 to 1"),
    (pair(preference=float("nan")), "preference nan is no number"),
    (pair(preference="0.7"), "preference '0.7' is no number"),
    (pair(preference=[0.7]), "preference [0.7] is no number"),
    (pair(margin=-1), "margin -1 is no number from 0 to inf"),
    (pair(margin=float("inf")), "margin inf is no number"),
    (pair(margin="1"), "margin '1' is no number"),
    (pair(chosen_score=2, rejected_score=float("nan")), "rejected_score nan is no number"),
    (pair(chosen_score="good", rejected_score=1), "chosen_score 'good' is no number"),
    ({"prompt": "copy ant", "responses": responses(ant=1)}, "a ranking needs two responses or more"),
    ({"prompt": "copy ant", "responses": []}, "a ranking needs two responses or more"),
    ({"prompt": "copy ant", "responses": None}, "are no preference row"),
    ({"prompt": "copy ant", "responses": 7}, "responses is no list of {text, score}"),
    ({"prompt": "copy ant", "responses": ["ant", "cat"]}, "responses is no list of {text, score}"),
    ({"prompt": "copy ant", "responses": [{"text": "ant"}, {"text": "cat"}]}, "no list of {text, score}"),
    ({"prompt": "copy ant", "responses": responses(ant=1, cat=float("nan"))}, "no list of {text, score}"),
    ({"prompt": "copy ant", "responses": [{"text": 5, "score": 1}, *SCORED]}, "no list of {text, score}"),
    ({"prompt": "copy ant", "responses": responses(ant=1, cat=1)}, "no response is better than another"),
    ({"chosen": HH + " dog", "rejected": HH.replace("cat", "owl") + " eel"}, "have different prompts"),
    ({"chosen": [user("ant"), bot("dog")], "rejected": [user("owl"), bot("eel")]}, "have different prompts"),
    (pair(chosen=""), "an empty side"),
    (pair(rejected=[]), "an empty side"),
    (pair(rejected=None), "an empty side"),
    (pair(chosen=7), "an empty side"),
    (pair(chosen="  "), "no response"),
    ({"chosen": HH + " ", "rejected": HH + " eel"}, "no response"),
    (pair(chosen=[bot("ant"), bot("ant")]), "chosen or rejected is not one answer"),
    (pair(chosen="ant <|end|> ant"), "the text holds a special token"),
    (pair(chosen="ant " * 60), "longer than 64 tokens (--max-length)"),
    (pair(prompt="ant " * 60), "longer than 64 tokens (--max-length)"),
    (pair(prompt=[user("ant"), bot(""), user("cat")]), "an earlier answer is empty"),
    ({"chosen": HH.replace(" bear", "") + " dog", "rejected": HH + " eel"}, "an earlier answer is empty"),
    (pair(chosen=[{**bot("ant"), "tool_calls": [{}]}]), "a message has tool_calls"),
    (pair(rejected=[{**bot(""), "content": [{"type": "image"}]}]), "a part of type 'image'"),
    ({"prompt": "copy ant", "completion": "ant", "label": True}, "both a true and a false completion"),
    ({"prompt": "copy ant", "completion": "ant", "label": None}, "label is neither true nor false"),
]


@pytest.mark.parametrize(
    "row, reason", REASONS, ids=[f"{i} {reason[-30:]}" for i, (_, reason) in enumerate(REASONS)]
)
def test_rows_that_cannot_be_used_are_counted_and_named(row, reason, load, capsys):
    (c,) = load([GOOD, row])
    assert c.texts == ["owl", "pig"]
    printed = capsys.readouterr().out
    assert "p.jsonl: dropped 1 of 2 rows" in printed and "  1: " in printed
    assert reason in printed and "(p.jsonl:2)" in printed


MALFORMED = [
    pair(chosen=["ant"], rejected=["cat"]),  # a list that holds text, not messages
    pair(margin=10**400),  # an integer beyond float
    {"prompt": "copy ant", "responses": responses(ant=10**400, cat=1)},
    pair(preference=True),  # not the number 1
    {"prompt": "copy ant", "responses": responses(ant=True, cat=0)},
]


@pytest.mark.parametrize("row", MALFORMED)
def test_malformed_values_are_a_reason_and_no_crash(row, load):
    (c,) = load([GOOD, row])
    assert c.texts == ["owl", "pig"]


def test_a_score_as_text_of_a_number_is_read(load):
    """As data.sft_messages reads it."""
    (c,) = load([{"prompt": "copy ant", "responses": responses(ant="3", cat="10")}])
    assert c.texts == ["cat", "ant"] and c.grades == [10.0, 3.0]


def test_labels_of_single_completions_make_pairs_of_a_prompt_that_has_both(load, capsys):
    rows = [("ant", "dog", True), ("ant", "cat", False), ("owl", "dog", True), ("ant", "eel", 1)]
    rows += [("ant", "fox", 0), ([user("ant")], [bot("pig")], True), ([user("ant")], [bot("owl")], False)]
    found = load([dict(zip(("prompt", "completion", "label"), row)) for row in rows])
    of_first = [(1, "dog", "cat"), (1, "dog", "fox"), (4, "eel", "cat"), (4, "eel", "fox")]
    expected = [(f"p.jsonl:{n}", [better, worse]) for n, better, worse in [*of_first, (6, "pig", "owl")]]
    assert [(c.row.where, c.texts) for c in found] == expected
    assert why(capsys) == {"a label makes a pair where its prompt has both a true and a false completion": 1}


def test_reasons_are_counted_one_by_one(load, capsys):
    load([GOOD, pair(chosen="cat"), pair("copy eel", "cat"), pair(rating="good"), pair(chosen="")])
    rating = f"rating 'good' is none of {FOUR}"
    assert why(capsys) == {"the responses are the same": 2, rating: 1, "an empty side": 1}


def test_nothing_left_is_an_error_with_the_reasons_and_places(load):
    with pytest.raises(InputError) as error:
        load([pair(chosen="cat"), pair(chosen=""), pair(chosen="cat")])
    message = str(error.value)
    assert "none of its 3 rows can be used" in message
    assert "the responses are the same (p.jsonl:1)" in message and "an empty side (p.jsonl:2)" in message


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


def test_a_soft_label_of_a_half_contradicts_nothing(load):
    assert len(load([pair(preference=0.5), pair(), pair()])) == 3


@pytest.mark.parametrize("gap, kept", [(0.0, 3), (0.5, 3), (0.51, 2), (2.0, 2), (2.01, 1)])
def test_min_score_gap_of_pairs(gap, kept, load, capsys):
    rows = [
        pair("copy ant", chosen_score=1.5, rejected_score=1.0),  # 0.5
        pair("copy bear", chosen_score=1.0, rejected_score=-1.0),  # 2
        pair("copy cat"),  # no scores: nothing to go by
    ]
    assert len(load(rows, min_score_gap=gap)) == kept
    reasons = why(capsys)
    assert reasons == (
        {f"the scores differ by less than {gap} (--min-score-gap)": 3 - kept} if kept < 3 else {}
    )


def test_a_reason_names_what_is_wrong_with_a_pair_scored_against_its_label(load, capsys):
    load([GOOD, pair(chosen_score=1, rejected_score=3)])
    assert "differ by less than 0.0" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "gap, scores, ranks",
    [
        (0.0, [3.0, 2.6, 2.6, 1.0], [0, 1, 1, 2]),  # equal scores are ties
        (0.5, [3.0, 2.75, 1.0], [0, 0, 1]),
        (0.25, [3.0, 2.75, 1.0], [0, 1, 2]),  # exactly the gap is enough
        (0.5, [3.0, 2.75, 2.5, 2.25], None),  # a chain: each too close to the one before, all ties
        (0.5, [3.0, 2.75, 2.5, 1.0], [0, 0, 0, 1]),
    ],
)
def test_min_score_gap_of_rankings(gap, scores, ranks, load, capsys):
    texts = ["dog", "eel", "fox", "goat"][: len(scores)]
    mixed = [{"text": t, "score": s} for t, s in list(zip(texts, scores))[::-1]]
    rows = [GOOD, {"prompt": "copy ant", "responses": mixed}]
    found = [c for c in load(rows, min_score_gap=gap) if len(c.texts) > 2]
    if ranks is None:
        assert not found and why(capsys) == {"no response is better than another": 1}
    else:
        assert found[0].ranks.tolist() == ranks
        assert dict(zip(found[0].texts, found[0].grades)) == dict(zip(texts, scores))


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


def test_a_ranking_loses_the_later_one_of_two_equal_texts_alone(load, capsys):
    rows = [{"prompt": "copy ant", "responses": responses(ant=1, cat=2, dog=0) + responses(ant=3)}]
    (c,) = load(rows)
    assert (c.texts, c.grades, c.kept) == (["cat", "ant", "dog"], [2, 1, 0], (1, 0, 2))
    assert "left out 1 responses of rankings" in capsys.readouterr().out


def test_a_ranking_loses_its_long_responses_alone(load):
    long = {"text": "pig " * 60, "score": 9}
    (c,) = load([{"prompt": "copy ant", "responses": [*SCORED[:2], long, SCORED[2]]}])
    assert c.texts == ["eel fox", "dog", "goat"] and c.ranks.tolist() == [1, 2, 3] and c.kept == (1, 0, 3)
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
    a, b = load(
        [
            pair(
                chosen_gold=3.0, rejected_gold=-1.0, chosen_is_safe=True, rejected_is_safe=False, category="c"
            ),
            {"prompt": "copy eel", "responses": ranking},
        ]
    )
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
    """Prompts of 6 and 7 tokens, 6.5 on average; pairs better/worse of 2/4, and of the ranking eel fox (3
    tokens), dog (2), goat (2): 3/2, 3/2, 2/2."""
    loaded = load([pair(rejected="cat cat cat"), {"prompt": "copy eel eel", "responses": SCORED}])
    other = [c._replace(source="a") for c in loaded[:1]]
    table = comparisons.statistics(loaded + other)
    assert [row["data"] for row in table] == ["a", "p.jsonl"]
    assert table[1] == {
        "data": "p.jsonl",
        "rows": 2,
        "pairs": 4,
        "prompt_tokens": 6.5,
        "chosen_tokens": (2 + 3 + 3 + 2) / 4,
        "rejected_tokens": (4 + 2 + 2 + 2) / 4,
    }


def labelled(categories):
    empty = torch.zeros(1, dtype=torch.int32)
    row = Row("f:1", {})
    return [
        Comparison([], ["", ""], empty, [empty, empty], torch.tensor([0, 1]), "f", row, category=c)
        for c in categories
    ]


def test_epoch_order_is_every_comparison_once_or_every_category_equally_often():
    comparisons = labelled(["a"] * 900 + ["b"] * 90 + [None] * 10)

    def order(balanced, seed=0):
        return epoch_order(comparisons, torch.Generator().manual_seed(seed), balanced)

    assert sorted(order(False)) == list(range(1000)) != order(False)
    assert order(False) == order(False) != order(False, seed=1)
    drawn = order(True)
    assert len(drawn) == 1000 and drawn == order(True)
    count = collections.Counter(comparisons[i].category for i in drawn)
    for category in ("a", "b", None):  # 333 +- 15 of each
        assert abs(count[category] - 1000 / 3) < 60
    assert len({i for i in drawn if comparisons[i].category is None}) == 10


# -- batches ------------------------------------------------------------------------------------
V, PAD, END = 61, 0, 2
SMALL = {"vocab_size": V, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": END}


class Words:  # all that load_scorer and load_policy ask of a tokenizer
    pad_token_id, eos_token_id = PAD, END

    def __len__(self):
        return V


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "max_position_embeddings": 64,
    }
    if request.param == "gpt2":
        config = GPT2Config(**SMALL, **sizes)
    else:
        config = LlamaConfig(**SMALL, **sizes, intermediate_size=48, num_key_value_heads=2, pad_token_id=PAD)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def scorer(folder):
    return models.load_scorer(folder, Words(), 2)


def comparison(seed, prompt, *lengths, samples=()):
    generator = torch.Generator().manual_seed(seed)

    def ids(n, last=None):
        x = torch.randint(3, V, (n,), generator=generator, dtype=torch.int32)
        x[-1] = x[-1] if last is None else last
        return x

    return labelled(["c"])[0]._replace(
        prompt_ids=ids(prompt),
        response_ids=[ids(n, END) for n in lengths],
        texts=["t"] * len(lengths),
        ranks=torch.arange(len(lengths)),
        samples=tuple(ids(n) for n in samples),  # a sample that was cut has no end token
    )


BATCHES = {
    "K = 2": [comparison(1, 5, 4, 7)],
    "K = 6": [comparison(2, 6, 3, 8, 1, 5, 2, 4)],
    "several trees a row": [
        comparison(3, 9, 8, 10, 9),
        comparison(4, 3, 2, 4),
        comparison(5, 2, 1, 3),
        comparison(6, 8, 2),
    ],
    "samples": [
        comparison(7, 4, 3, 5, samples=(6, 2)),
        comparison(8, 3, 2, 2),
        comparison(9, 2, 1, 1, samples=(2,)),
    ],
    "samples alone": [comparison(10, 4, samples=(3, 5, 1))],
}


def outputs(scorer, batch):
    return scorer.head_outputs(batch.input_ids, batch.response_ends, batch.position_ids, batch.attention_mask)


def all_ids(comparisons):
    """(prompt, response) of every response, comparison by comparison."""
    return [(c.prompt_ids, ids) for c in comparisons for ids in (*c.response_ids, *c.samples)]


@torch.no_grad()
def plain_outputs(scorer, comparisons):
    """Of every response alone, by a plain forward of the body on prompt + response without masks."""
    rows = [torch.cat(ids).long()[None] for ids in all_ids(comparisons)]
    hidden = [scorer.base_model(input_ids=row, use_cache=False).last_hidden_state for row in rows]
    return torch.stack([h[0, -1] @ scorer.score.weight.T for h in hidden])


@pytest.mark.parametrize("name", BATCHES)
@torch.no_grad()
def test_responses_that_share_a_prompt_score_as_rows_of_their_own(name, scorer, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)  # rows as long as the longest tree
    comparisons = BATCHES[name]
    expected = plain_outputs(scorer, comparisons)
    shared = collate_comparisons(comparisons, PAD)
    separate = collate_comparisons(comparisons, PAD, share_prompt=False)
    assert shared.sizes == separate.sizes == [len(c.response_ids) + len(c.samples) for c in comparisons]
    torch.testing.assert_close(outputs(scorer, shared), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(outputs(scorer, separate), expected, rtol=0, atol=1e-5)
    assert separate.attention_mask is None and len(separate.input_ids) == sum(shared.sizes)
    if name == "several trees a row":
        assert len(shared.input_ids) == 2  # the longest tree, and the three others in one row
    # The check can fail: without the mask responses see each other, without positions they stand elsewhere
    for damaged in (shared._replace(attention_mask=None), shared._replace(position_ids=None)):
        if len(expected) > 2:
            assert (outputs(scorer, damaged) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("share_prompt", [True, False])
@torch.no_grad()
def test_expected_rewards_are_read_at_each_prompts_last_token(share_prompt, scorer):
    for some in BATCHES.values():
        batch = collate_comparisons(some, PAD, share_prompt)
        got = scorer.head_outputs(
            batch.input_ids, batch.prompt_ends, batch.position_ids, batch.attention_mask
        )
        alone = [
            scorer.base_model(input_ids=c.prompt_ids.long()[None]).last_hidden_state[0, -1] for c in some
        ]
        torch.testing.assert_close(got, torch.stack(alone) @ scorer.score.weight.T, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_ends_point_at_end_tokens_and_positions_follow_the_prompt(name, share_prompt):
    comparisons = BATCHES[name]
    batch = collate_comparisons(comparisons, PAD, share_prompt)
    ids = all_ids(comparisons)
    assert batch.response_ends.shape == (2, len(ids)) and batch.prompt_ends.shape == (2, len(comparisons))
    for (row, column), (prompt, response) in zip(batch.response_ends.T.tolist(), ids):
        start = column + 1 - len(response)
        assert batch.input_ids[row, start : column + 1].tolist() == response.tolist()
        first = len(prompt)
        assert batch.position_ids[row, start : column + 1].tolist() == list(
            range(first, first + len(response))
        )
    labels = [response[-1] == END for _, response in ids]
    assert (batch.input_ids[tuple(batch.response_ends)] == END).tolist() == labels
    for (row, column), c in zip(batch.prompt_ends.T.tolist(), comparisons):
        start = column + 1 - len(c.prompt_ids)
        assert batch.input_ids[row, start : column + 1].tolist() == c.prompt_ids.tolist()
        assert batch.position_ids[row, start : column + 1].tolist() == list(range(len(c.prompt_ids)))


def test_mask_of_a_tree_by_hand(monkeypatch):
    """A prompt of 2, responses of 1 and 2 tokens in a row as long as the other comparison's: columns x x y z
    z and three of padding, which see themselves alone."""
    monkeypatch.setattr(batches, "ROW", 1)
    wide = comparison(1, 4, 2, 2)
    batch = collate_comparisons([comparison(2, 2, 1, 2), wide], PAD)
    assert batch.attention_mask.shape == (2, 1, 8, 8)
    small = [row for row, _ in batch.prompt_ends.T.tolist()][0]
    expected = """1.......
                  11......
                  111.....
                  11.1....
                  11.11...
                  .....1..
                  .....11.
                  .....111"""
    got = ["".join(".1"[int(x)] for x in row) for row in batch.attention_mask[small, 0]]
    assert got == expected.split()


@torch.no_grad()
def test_a_response_changes_no_score_but_its_own(scorer):
    comparisons = BATCHES["several trees a row"]
    before = outputs(scorer, collate_comparisons(comparisons, PAD))
    changed = list(comparisons)
    ids = [x.clone() for x in changed[1].response_ids]
    ids[0][0] = (ids[0][0] - 3 + 7) % (V - 3) + 3
    changed[1] = changed[1]._replace(response_ids=ids)
    difference = (outputs(scorer, collate_comparisons(changed, PAD)) - before).abs().amax(1)
    assert difference[3] > 1e-2  # the first response of the second comparison, after three of the first
    difference[3] = 0
    assert difference.max() < 1e-6


@pytest.mark.parametrize("share_prompt", [True, False])
@torch.no_grad()
def test_padding_changes_nothing(share_prompt, scorer, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)
    comparisons = [comparison(1, 5, 4, 7), comparison(2, 2, 3, 3)]
    results = []
    for pad in (PAD, END, V - 1):  # END: padding may be the end token
        batch = collate_comparisons(comparisons, pad, share_prompt)
        assert (batch.input_ids == pad).any()
        results.append(outputs(scorer, batch))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("share_prompt", [True, False])
def test_an_empty_batch_reads_nothing_and_connects_every_weight(share_prompt, scorer):
    batch = collate_comparisons([], PAD, share_prompt)
    assert batch.sizes == [] and batch.comparisons == [] and batch.input_ids.tolist() == [[PAD, PAD]]
    assert batch.response_ends.shape == batch.prompt_ends.shape == (2, 0)
    scorer.zero_grad()
    got = outputs(scorer, batch)
    assert got.shape == (0, 2)
    losses.bradley_terry_loss(got[:, 0], got[:, 0], n_rows=3)[0].backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_gradients_of_shared_and_separate_rows_are_equal(scorer):
    comparisons = BATCHES["samples"]
    grads = []
    for share in (True, False):
        scorer.zero_grad()
        got = outputs(scorer, collate_comparisons(comparisons, PAD, share))[:, 0]
        (got * torch.linspace(-1, 2, len(got))).sum().backward()
        grads.append([p.grad.clone() for p in scorer.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))


# -- batches and log probabilities over ranks -----------------------------------------------------
def as_rank(monkeypatch, rank, of):
    monkeypatch.setattr(dist, "rank", lambda: rank)
    monkeypatch.setattr(dist, "world_size", lambda: of)


@pytest.mark.parametrize("n, world, size", [(7, 1, 3), (7, 2, 3), (7, 3, 2), (2, 3, 4), (8, 2, 4), (1, 4, 1)])
def test_batches_of_all_ranks_are_a_partition_of_equal_number(n, world, size, monkeypatch):
    comparisons = [comparison(i, 2 + i, 1 + i % 3, 2) for i in range(n)]
    seen, counts = [], set()
    for rank in range(world):
        as_rank(monkeypatch, rank, world)
        mine = list(my_comparison_batches(comparisons, PAD, size, True, "cpu"))
        counts.add(len(mine))
        assert all(len(batch.comparisons) <= size for batch in mine)
        lengths = [c.n_tokens for batch in mine for c in batch.comparisons]
        assert lengths == sorted(lengths, reverse=True)  # like lengths together
        seen += [int(c.prompt_ids.numel()) for batch in mine for c in batch.comparisons]
    assert len(counts) == 1 and counts == {-(-(-(-n // world)) // size)}  # ceil of ceil
    assert sorted(seen) == [2 + i for i in range(n)]


@pytest.fixture(scope="module")
def policy(folder):
    return models.load_policy(folder, Words())


def plain_logprobs(policy, comparisons):
    """log pi(y | x) by log-softmax over a plain forward of each row."""
    out = []
    for c in comparisons:
        values = []
        for ids in c.response_ids:
            row = torch.cat([c.prompt_ids, ids]).long()[None]
            with torch.no_grad():
                logprobs = policy(input_ids=row).logits[0].double().log_softmax(-1)
            places = range(len(c.prompt_ids), row.shape[1])
            values.append(sum(logprobs[t - 1, row[0, t]].item() for t in places))
        out.append(values)
    return out


@pytest.mark.parametrize("size", [1, 3, 50])
def test_seq_logprobs_are_the_sums_of_plain_log_softmax(size, policy):
    comparisons = [comparison(1, 5, 4, 7), comparison(2, 3, 2, 6, 1), comparison(3, 2, 1, 9)]
    got = seq_logprobs(policy, comparisons, PAD, size, "cpu")
    expected = plain_logprobs(policy, comparisons)
    assert [len(x) for x in got] == [2, 3, 2]
    for a, b in zip(got, expected):
        assert a.tolist() == pytest.approx(b, abs=1e-4)


def test_seq_logprobs_of_two_ranks_join_to_those_of_one(policy, monkeypatch):
    """What each of two ranks sends is collected by running them one after the other; one has 4 documents, the
    other 3, but with 2 documents in a batch both make 2 forwards."""
    comparisons = [comparison(1, 5, 4, 7), comparison(2, 3, 2, 6, 1), comparison(3, 2, 1, 9)]
    alone = seq_logprobs(policy, comparisons, PAD, 2, "cpu")
    sent, calls = [], collections.Counter()
    plain = policy.token_logprobs
    for rank in (0, 1):
        as_rank(monkeypatch, rank, 2)
        monkeypatch.setattr(policy, "token_logprobs", lambda *a: calls.update([rank]) or plain(*a))
        # Before rank 1 has run its numbers are missing: zeros stand for them
        rest = [(i, 0.0) for i in range(7)] if rank == 0 else []
        monkeypatch.setattr(dist, "gather", lambda values: sent.extend(values) or rest or list(sent))
        joined = seq_logprobs(policy, comparisons, PAD, 2, "cpu")
    assert calls == {0: 2, 1: 2} and sorted(i for i, _ in sent) == list(range(7))
    assert [i for i, _ in sent] != list(range(7))  # sent in another order
    for a, b in zip(joined, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


# -- log probabilities of responses that share a prompt --------------------------------------------
@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("name", [name for name in BATCHES if "samples" not in name])
@torch.no_grad()
def test_response_logprobs_are_the_sums_of_plain_log_softmax(name, share_prompt, policy, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)  # rows as long as the longest tree
    comparisons = BATCHES[name]
    batch = collate_comparisons(comparisons, PAD, share_prompt)
    got = models.response_logprobs(policy, batch)
    expected = plain_logprobs(policy, comparisons)
    assert got.tolist() == pytest.approx(sum(expected, []), abs=1e-4)
    found = torch.cat(seq_logprobs(policy, comparisons, PAD, 3, "cpu"))
    torch.testing.assert_close(got, found, rtol=0, atol=1e-4)
    if name == "several trees a row" and share_prompt:
        assert len(batch.input_ids) == 2 and [len(c.response_ids) for c in comparisons] == [3, 2, 2, 1]


@pytest.mark.parametrize("share_prompt", [True, False])
@torch.no_grad()
def test_response_logprobs_count_samples_after_the_labelled_responses(share_prompt, policy):
    comparisons = BATCHES["samples"]
    got = models.response_logprobs(policy, collate_comparisons(comparisons, PAD, share_prompt))
    whole = [c._replace(response_ids=[*c.response_ids, *c.samples], samples=()) for c in comparisons]
    expected = sum(plain_logprobs(policy, whole), [])
    assert len(expected) == 9 and got.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("share_prompt", [True, False])
@torch.no_grad()
def test_the_end_token_and_the_first_token_count_in_response_logprobs(share_prompt, policy):
    c = comparison(1, 5, 4, 7)
    got = models.response_logprobs(policy, collate_comparisons([c], PAD, share_prompt)).tolist()
    for k, ids in enumerate(c.response_ids):
        assert ids[-1] == END
        row = torch.cat([c.prompt_ids, ids]).long()
        logprobs = policy(input_ids=row[None]).logits[0].double().log_softmax(-1)
        each = logprobs[torch.arange(4, len(row) - 1), row[5:]]
        assert got[k] == pytest.approx(each.sum().item(), abs=1e-4)
        for wrong in (each[:-1].sum(), each[1:].sum(), each.mean()):  # no end, no first token, a mean
            assert abs(got[k] - wrong.item()) > 0.1


@torch.no_grad()
def test_a_response_follows_the_prompts_last_token_and_not_the_one_before_it_in_the_row(policy):
    """The token before the second and third response is the end of another response."""
    c = comparison(1, 5, 4, 7, 3)
    batch, seen = collate_comparisons([c], PAD), []
    expected = plain_logprobs(policy, [c])[0]

    class Shifted:
        def logprobs_at(self, input_ids, where, targets, *more):
            seen.append(where.clone())
            where[1, 4], where[1, 11] = 8, 15
            return policy.logprobs_at(input_ids, where, targets, *more)

    wrong = models.response_logprobs(Shifted(), batch).tolist()
    columns = [4, 5, 6, 7, 4, *range(9, 15), 4, 16, 17]
    assert [x.tolist() for x in seen] == [[[0] * 14, columns]]
    assert wrong[0] == pytest.approx(expected[0], abs=1e-4)
    assert min(abs(wrong[k] - expected[k]) for k in (1, 2)) > 1e-2


def test_gradients_of_response_logprobs_are_those_of_plain_log_softmax(policy, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)
    comparisons, grads = [comparison(3, 9, 8, 10), comparison(4, 3, 2, 4), comparison(5, 2, 1, 3)], []
    weight = torch.linspace(-1, 2, 6)
    for share in (True, False):
        policy.zero_grad()
        batch = collate_comparisons(comparisons, PAD, share)
        (models.response_logprobs(policy, batch) * weight).sum().backward()
        grads.append([p.grad.clone() for p in policy.parameters()])
    policy.zero_grad()
    for (prompt, response), w in zip(all_ids(comparisons), weight):
        row = torch.cat([prompt, response]).long()
        logprobs = policy(input_ids=row[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (w * logprobs.gather(-1, response.long()[:, None]).sum()).backward()
    for *found, parameter in zip(*grads, policy.parameters()):
        expected = parameter.grad
        for got in found:
            size = 1e-5 * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=size)
    policy.zero_grad()


@pytest.mark.parametrize("share_prompt", [True, False])
def test_response_logprobs_of_an_empty_batch_connect_every_weight(share_prompt, policy):
    policy.zero_grad()
    got = models.response_logprobs(policy, collate_comparisons([], PAD, share_prompt))
    assert got.shape == (0,)
    got.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name
    policy.zero_grad()


@pytest.mark.parametrize("pad", [PAD, END, V - 1])
@torch.no_grad()
def test_padding_changes_no_response_logprob(pad, policy, monkeypatch):
    monkeypatch.setattr(batches, "ROW", 1)
    comparisons = [comparison(1, 5, 4, 7), comparison(2, 2, 3, 3)]
    for share in (True, False):
        batch = collate_comparisons(comparisons, pad, share)
        assert len(batch.input_ids) > 1 and (batch.input_ids == pad).any()
        got = models.response_logprobs(policy, batch).tolist()
        assert got == pytest.approx(sum(plain_logprobs(policy, comparisons), []), abs=1e-4)


# -- small helpers ------------------------------------------------------------------------------
def test_one_of_each_prompt_and_fingerprint():
    a, b, c = (comparison(1, 3, 2, 2)._replace(prompt=[user(x)]) for x in ("x", "y", " x"))
    assert [x.prompt[0]["content"].strip() for x in comparisons.one_of_each_prompt([a, b, c])] == ["x", "y"]
    other = comparison(2, 3, 2, 2)
    numbers = {comparisons.fingerprint(x) for x in ([a], [other], [a, other], [other, a], [])}
    assert len(numbers) == 5 and comparisons.fingerprint([a]) == comparisons.fingerprint([b])


def test_a_comparisons_key_is_its_prompts_alone_and_its_reference_is_unknown_at_first(load):
    a, b, c, d = load(
        [
            pair("copy ant"),
            pair(" copy ant\n", "eel", "dog"),
            pair("copy bear"),
            {"chosen": HH + " dog", "rejected": HH + " eel"},
        ]
    )
    assert a.key == b.key != c.key and len({x.key for x in (a, b, c, d)}) == 3
    row = Row("f:1", {})
    assert a.key == generate.Prompt([], [user("copy ant")], row).key  # one key for both
    assert d.key == generate.Prompt([], TALK, row).key
    assert a.ref_logprobs is None
    before = comparisons.fingerprint([a])
    assert comparisons.fingerprint([a._replace(ref_logprobs=torch.tensor([-1.0, -2.0]))]) == before


@torch.no_grad()
def test_with_samples_only_scores_the_samples(scorer):
    c = comparisons.with_samples_only(comparison(1, 5, 4, 7), [[7, 8, 9], [10]])
    batch = collate_comparisons([c], PAD)
    assert batch.sizes == [2] and c.n_tokens == 5 + 3 + 1
    torch.testing.assert_close(outputs(scorer, batch), plain_outputs(scorer, [c]), rtol=0, atol=1e-5)


def test_a_pair_in_words_that_the_tokenizer_does_not_know_is_refused(tokenizer):
    strange = {
        "prompt": "please tell me what the capital of france is",
        "chosen": "paris",
        "rejected": "rome",
    }
    with pytest.raises(ValueError, match="knows few of its words: is it the right --model"):
        comparisons._comparison(Row("f:1", strange), tokenizer, 64, 0.0)


def test_policy_samples_end_in_the_templates_end_token(tokenizer, monkeypatch):
    ended = [generate.Response([20, 3], "", True), generate.Response([20, 21], "", False)]
    monkeypatch.setattr(generate, "sample_responses", lambda *_, **__: [ended])
    some = [comparisons._comparison(Row("f:1", pair()), tokenizer, 64, 0.0)]
    (((ids,),)) = evaluation.policy_samples(models.load_policy("tiny", tokenizer), some, tokenizer, 2, 9, 1)
    assert ids.tolist() == [20, tokenizer.eos_token_id]


def test_policy_samples_gives_the_responses_that_ended(tokenizer, capsys):
    policy = models.load_policy("tiny", tokenizer)
    rows = [Row("f:1", pair()), Row("f:2", GOOD)]
    comparisons = [_comparison(row, tokenizer, 64, 0.0) for row in rows]
    found = evaluation.policy_samples(policy, comparisons, tokenizer, 8, 60, seed=1)
    n = sum(map(len, found))
    assert 0 < n < 16 and f"{n} of 16 samples ended within 60 tokens" in capsys.readouterr().out
    for ids in [ids for x in found for ids in x]:
        assert ids.dtype == torch.int32 and 1 <= len(ids) <= 60
        assert ids.tolist().index(tokenizer.eos_token_id) == len(ids) - 1
    again = evaluation.policy_samples(policy, comparisons, tokenizer, 8, 60, seed=1)
    other = evaluation.policy_samples(policy, comparisons, tokenizer, 8, 60, seed=2)
    same = [[x.tolist() for x in some] for some in (found[0] + found[1], again[0] + again[1])]
    assert same[0] == same[1] != [x.tolist() for x in other[0] + other[1]]
