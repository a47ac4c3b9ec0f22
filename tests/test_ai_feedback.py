"""common/programs/ai_feedback.py: labels, ratings and revisions of a labeler with known answers; small random
models compared with plain softmax; the run directory; and the scripts that read its files."""

import collections
import datetime
import functools
import math
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import gold_labeler
import processes
import pyarrow.parquet
import pytest
import tiny_families
import torch
from gold_labeler import GoldLabeler
from processes import ROOT, flags
from helpers import (
    CPU, TOKENIZER, A, B, assert_error, contents, make_scorer, read_json, rows_of, smaller_model, succeeds,
    write_rows,
)  # fmt: skip
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as backends
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import common.run.run
from common import dist, models
from common.batches import Row
from common.errors import InputError
from common.responses import Prompt, Response
from common.sampler import sample
from common.data import comparisons, message_columns, tiny
from common.data.comparisons import load
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import measures, next_token, scorers
from common.run.cli import parse
from common.programs import ai_feedback as ai
from common.programs import evaluate

TESTS = ROOT / "tests"
PLAIN = ai.Args(model="m")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def args_of(task="label", **options):
    return ai.Args(**{"task": task, "model": "gold_labeler:exact", **options})


def run(folder, dataset, task="label", **options):
    """Run the command in this process; return the rows and metrics that it writes."""
    options = {"output_dir": str(folder), "dataset": str(dataset), **options}
    ai.main(args_of(task, **options))
    return SimpleNamespace(
        rows=read_jsonl(folder / "rows.jsonl"),
        failed=read_jsonl(folder / "failed.jsonl"),
        summary=read_json(folder / "summary.json"),
        text=(folder / "rows.jsonl").read_text(),
    )


def script(folder, dataset, task="label", ranks=1, **options):
    """Run the command as a process."""
    options = {"model": "gold_labeler:exact", "dataset": dataset, "output_dir": folder, **options}
    options = {name: value for name, value in options.items() if value is not None}
    return processes.script("common.programs.ai_feedback", task, *flags(**options), cwd=TESTS, ranks=ranks)


def item(prompt="copy ant bear", texts=("ant bear", "ant"), human=1.0, number=0):
    return ai.Item(number, f"rows:{number}", {}, [{"role": "user", "content": prompt}], list(texts), human)


def language_model(folder, **options):
    return ai.LanguageModel(str(folder), CPU, ai.Args(**options))


def labels(labeler, items, **options):
    args = args_of(**options)
    return list(ai.label(items, labeler, ai.load_principles(args), args))


def text_of(question):
    return ai.fill(question.template, question.values)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Forty pairs of the tiny world."""
    some = tiny.rows("preferences", "train")[:40]
    names = ("prompt", "chosen", "rejected", "category", "is_safety")
    return write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", [{n: r[n] for n in names} for r in some])


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """Twenty responses of the tiny world."""
    some = tiny.rows("sft", "train")[:20]
    rows = [{"prompt": r["prompt"], "response": r["completion"], "category": r["category"]} for r in some]
    return write_rows(tmp_path_factory.mktemp("responses") / "responses.jsonl", rows)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    some = [{"prompt": r["prompt"]} for r in tiny.rows("prompts", "train")[:40]]
    return write_rows(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", some)


# -- models that label --------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["Llama 4", "Mistral 3 (multimodal)"])
def test_a_labeler_is_loaded_as_the_policies_are(kind, tmp_path):
    tiny_families.save(kind, tmp_path)
    question = ai.Question("copy ant bear", {}, "")
    labeler = language_model(tmp_path)
    [found] = labeler.probabilities([question], ("ant", "bear"))
    policy = pretrained.load_policy(str(tmp_path), labeler.tokenizer)
    ids = torch.tensor([labeler.encode(question, 4)])
    last = policy(input_ids=ids).logits[0, -1].softmax(-1)
    want = [last[labeler.tokenizer.convert_tokens_to_ids(word)].item() for word in ("ant", "bear")]
    assert found.tolist() == pytest.approx(want, rel=1e-3)


def test_a_labeler_without_some_of_its_weights_is_refused(tmp_path):
    folder = str(smaller_model(tmp_path))
    weights = load_file(f"{folder}/model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="1 of its weights are missing, such as .*down_proj"):
        language_model(folder)


# -- label: probabilities ------------------------------------------------------------------
def test_the_preference_is_the_mean_of_both_orders_worked_by_hand():
    """copy ant bear: "ant bear" has gold 2, "ant" has gold 1. With a place bias of 2 the log-odds of "1" are
    1 + 2 in one order and -1 + 2 in the other."""
    labeler = GoldLabeler(place_bias=2.0, mass=0.5)
    (found,) = labels(labeler, [item()])
    assert found["ai"]["orders"] == pytest.approx([0.95257413, 1 - 0.73105858], abs=1e-8)
    assert found["preference"] == pytest.approx((0.95257413 + 0.26894142) / 2, abs=1e-8)
    assert found["ai"]["mass"] == pytest.approx(0.5) and set(found["ai"]) == {"orders", "mass"}
    first, second = labeler.asked
    assert [first.values["first"], first.values["second"]] == ["ant bear", "ant"]
    assert [second.values["first"], second.values["second"]] == ["ant", "ant bear"]
    assert first.template == second.template and first.opening == ai.TEXTS["ending"]


def test_a_labeler_that_answers_too_few_questions_loses_no_pair():
    class Short(GoldLabeler):
        def probabilities(self, questions, options):
            return super().probabilities(questions, options)[:2]

        def generate(self, questions, *options):
            return super().generate(questions, *options)[:1]

    words = "--model: the labeler answered {} questions"
    with pytest.raises(InputError, match=words.format("2 of 4")):
        labels(Short(), [item(), item()])
    with pytest.raises(InputError, match=words.format("1 of 4")):
        labels(Short(), [item(), item()], chain_of_thought=True)
    for texts in ((), ("ant",)):  # answers, or only critiques and revisions
        args = args_of("revise")
        with pytest.raises(InputError, match=words.format("1 of 2")):
            list(ai.revise([item(texts=texts), item(texts=texts)], Short(), ai.load_principles(args), args))
    with pytest.raises(InputError, match=words.format("1 of 4")):
        list(ai.sample([item(), item()], {"short": Short()}, (), args_of("sample")))


def test_too_little_probability_in_either_order_is_no_answer():
    class Lopsided(GoldLabeler):
        def probabilities(self, questions, options):
            return super().probabilities(questions, options) * torch.tensor([[1.0], [0.2]])

    assert labels(Lopsided(), [item()], min_mass=0.2)[0]["ai"]["mass"] == pytest.approx(0.2)
    failed = {"human": 1.0, "failed": f"the labeler chose neither 1 nor 2{ai.UNASKED}"}
    assert labels(Lopsided(), [item()], min_mass=0.21) == [failed]
    assert labels(gold_labeler.mute(), [item(), item()]) == [failed] * 2
    assert labels(GoldLabeler(), []) == []


# -- label: measures -----------------------------------------------------------------------
def labelled(human, orders):
    return {"human": human, "preference": sum(orders) / 2, "ai": {"orders": orders, "mass": 1.0}}


ROWS = [
    labelled(1.0, [0.9, 0.7]),  # right in both orders
    labelled(0.0, [0.4, 0.2]),  # right in both
    labelled(0.75, [0.8, 0.4]),  # right; the order decides
    labelled(1.0, [0.7, 0.3]),  # a tie; the order decides
    labelled(0.0, [0.8, 0.6]),  # wrong in both
    labelled(0.5, [0.9, 0.9]),  # the human has no opinion
    labelled(None, [0.1, 0.3]),  # unlabelled
]


def test_alignment_counts_ties_half_and_has_wilsons_interval():
    """3.5 of 5 are correct; twice, because 5 are too few for an interval. Wilson: (p + z2/2n -+ z sqrt(p(1-p)/n +
    z2/4n2)) / (1 + z2/n), z = 1.96, p = 0.7: (0.7 + 0.19208) / 1.38416 = 0.644492; sqrt(0.021 + 0.009604) =
    0.174940; 1.96 * 0.174940 / 1.38416 = 0.247719. Of 10 and p = 1: n / (n + z2) to 1."""
    twice = ai.metrics_of(ROWS * 2, [])
    assert twice["alignment_low"] == pytest.approx(0.396773, abs=2e-4)
    assert twice["alignment_high"] == pytest.approx(0.892211, abs=2e-4)
    assert measures.wilson(1.0, 10) == pytest.approx((10 / (10 + 1.96**2), 1), abs=1e-3)
    found = ai.metrics_of(ROWS, [{"human": 1.0, "failed": f"the labeler chose neither 1 nor 2{ai.UNASKED}"}])
    assert found["alignment_n"] == 5 and "alignment_low" not in found
    assert found["alignment"] == 0.7 and found["alignment/n"] == 5
    # single orders: 2 + 2 + 1 + 1 + 0 of 10
    assert found["alignment/one_order"] == 0.6
    assert (found["rows"], found["failed"], found["mass"]) == (7, 1, 1.0)


def test_order_sensitivity_and_position_bias_by_hand():
    """For each row, a = P(first text) when it is shown first, b when it is shown second. The mean probability of
    the first position is the mean of a and 1 - b."""
    found = ai.metrics_of(ROWS, [])
    assert found["position/decides"] == pytest.approx(2 / 7)
    a, b = (0.9, 0.4, 0.8, 0.7, 0.8, 0.9, 0.1), (0.7, 0.2, 0.4, 0.3, 0.6, 0.9, 0.3)
    assert found["position/first"] == pytest.approx((sum(a) + 7 - sum(b)) / 14)


def test_only_a_biased_labeler_shows_position_bias(pairs, tmp_path):
    exact = run(tmp_path / "exact", pairs).summary
    assert exact["position/decides"] == 0 and exact["position/first"] == pytest.approx(0.5)
    assert exact["alignment"] == exact["alignment/one_order"] > 0.6
    biased = run(tmp_path / "biased", pairs, model="gold_labeler:biased").summary
    assert biased["position/decides"] > 0.3 and biased["position/first"] > 0.7
    assert biased["alignment"] == exact["alignment"] > biased["alignment/one_order"]


# -- label: rows -----------------------------------------------------------------------------
def test_human_labels_come_from_pairs_soft_labels_and_rankings_and_may_be_missing(tmp_path):
    ranking = [{"text": "ant", "score": 1}, {"text": "bear", "score": 3}, {"text": "ant bear", "score": 2}]
    dialogue = "\n\nHuman: copy ant bear\n\nAssistant: "
    rows = [
        {"prompt": "copy ant bear", "chosen": "ant bear", "rejected": "ant"},
        {"prompt": "copy ant bear", "chosen": "ant", "rejected": "ant bear", "preference": 0.25},
        {"prompt": "copy ant bear", "responses": ranking},
        {
            "instruction": "copy ant bear",
            "responses": [{"text": "ant"}, {"text": "ant bear"}, {"text": "cat"}],
        },
        {"chosen": f"{dialogue}ant bear", "rejected": f"{dialogue}cat"},
    ]
    found = run(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows)).rows
    assert [r["row"] for r in found] == [0, 1, 2, 3, 4]
    assert all(r["prompt"] == [{"role": "user", "content": "copy ant bear"}] for r in found)
    assert [(r["chosen"], r["rejected"], r["human"]) for r in found[:2]] == [
        ("ant bear", "ant", 1.0),
        ("ant", "ant bear", 0.25),
    ]
    assert [r["preference"] for r in found[:2]] == pytest.approx([sigmoid(1), sigmoid(-1)])
    score = {r["text"]: r["score"] for r in ranking}
    drawn = found[2]["chosen"], found[2]["rejected"]
    assert drawn[0] != drawn[1] and found[2]["human"] == (score[drawn[0]] > score[drawn[1]])
    assert (found[3]["chosen"], found[3]["rejected"], found[3]["human"]) == ("ant", "ant bear", None)
    assert (found[4]["chosen"], found[4]["rejected"], found[4]["human"]) == ("ant bear", "cat", 1.0)


def test_a_pair_is_drawn_from_a_ranking_by_the_rows_place_without_ties():
    texts = [{"text": t, "score": s} for t, s in zip("abcd", (1, 1, 2, 3))]
    values = {"prompt": "p", "responses": texts}
    found = [comparisons.pair_of(values, f"file:{i}") for i in range(200)]
    assert found == [comparisons.pair_of(values, f"file:{i}") for i in range(200)]
    drawn = {(*pair, label) for _, pair, label in found}
    score = {r["text"]: r["score"] for r in texts}
    every = [(a, b) for a in "abcd" for b in "abcd" if score[a] != score[b]]
    assert drawn == {(a, b, float(score[a] > score[b])) for a, b in every}  # all of them, in both orders
    for scores, why in (((2, 2), "no response is better"), ((2, None), "not a list of")):
        with pytest.raises(ValueError, match=why):
            some = [{"text": t, "score": s} for t, s in zip("ab", scores)]
            comparisons.pair_of({"prompt": "p", "responses": some}, "file:1")


def test_failed_rows_are_counted_and_go_to_failed_jsonl_only(tmp_path, monkeypatch):
    rows = [{"prompt": "copy ant bear", "chosen": f"ant {w}", "rejected": "cat"} for w in ("bear", "um", "eel")]

    class Shy(GoldLabeler):
        def probabilities(self, questions, options):
            out = super().probabilities(questions, options)
            shy = ["um" in text_of(question) for question in questions]
            return torch.where(torch.tensor(shy)[:, None], 0.04 * out, out)

    monkeypatch.setattr(gold_labeler, "shy", Shy, raising=False)
    path = write_rows(tmp_path / "pairs.jsonl", rows)
    found = run(tmp_path / "run", path, model="gold_labeler:shy")
    assert [r["row"] for r in found.rows] == [0, 2] and found.summary["rows"] == 2
    assert [(r["row"], r["failed"]) for r in found.failed] == [(1, f"the labeler chose neither 1 nor 2{ai.UNASKED}")]
    assert found.summary["failed"] == 1 and found.summary["mass"] == pytest.approx(1)
    assert "preference" not in found.failed[0]
    low = run(tmp_path / "low", path, model="gold_labeler:shy", min_mass=0.03)
    assert len(low.rows) == 3 and low.failed == []


def test_the_rows_are_soft_labels_for_load(pairs, tmp_path):
    found = run(tmp_path / "run", pairs, model="gold_labeler:noisy").rows
    comparisons = load(str(tmp_path / "run" / "rows.jsonl"), "train", TOKENIZER, 64)
    assert len(comparisons) == len(found) == 40
    unlike = 0
    for c, r in zip(comparisons, found):
        assert c.texts == [r["chosen"], r["rejected"]] and c.prompt == r["prompt"]
        assert c.preference == r["preference"] and c.category == r["category"]
        assert c.ranks.tolist() == [int(c.preference < 0.5), int(c.preference > 0.5)]
        unlike += r["preference"] < 0.5
    assert unlike > 3  # the labeler's word counts, not the human's


def test_max_rows_takes_a_sample_whose_rows_know_their_places(pairs, tmp_path):
    all_rows = {r["row"]: r for r in run(tmp_path / "all", pairs).rows}
    some = run(tmp_path / "some", pairs, max_rows=10).rows
    places = [r["row"] for r in some]
    assert len(places) == 10 and places == sorted(places) and places != list(range(10))
    assert some == [all_rows[i] for i in places]


# -- constitution ----------------------------------------------------------------------------
@pytest.fixture
def constitution(tmp_path):
    path = tmp_path / "principles.txt"
    path.write_text("\n  Be kind.\nBe {first}, brief.\n\nBe true.\n")
    return path


PRINCIPLES = ("Be kind.", "Be {first}, brief.", "Be true.")
DEFAULT_PRINCIPLES = ai.load_principles(PLAIN)


def asked_by(monkeypatch, make=GoldLabeler):
    """The labelers of the commands that follow, for --model gold_labeler:noted."""
    made = []
    monkeypatch.setattr(gold_labeler, "noted", lambda: made.append(make()) or made[-1], raising=False)
    return made


def principles_asked(labeler):
    """{prompt and responses: principle}"""
    out = {}
    for question in labeler.asked:
        match = re.search(r"better by this principle: (.*)\n", text_of(question))
        key = (question.values["prompt"], *sorted((question.values["first"], question.values["second"])))
        assert out.setdefault(key, match[1]) == match[1]  # the same in both orders
    return out


def test_each_pair_is_judged_by_one_principle_that_the_seed_draws(pairs, constitution, tmp_path, monkeypatch):
    made = asked_by(monkeypatch)
    options = {"model": "gold_labeler:noted", "constitution": str(constitution)}
    for name, more in (("a", {}), ("b", {"chunk_rows": 7}), ("c", {"seed": 1})):
        run(tmp_path / name, pairs, **options, **more)
    a, b, c = map(principles_asked, made)
    assert set(a.values()) == set(PRINCIPLES) and a == b != c
    assert ai.TEXTS["base"] not in text_of(made[0].asked[0])


@pytest.mark.parametrize(
    "text, words",
    [(b"", ": no principle found"), (b"\n  \n", ": no principle found"), (b"Be kind\xe9.", "in UTF-8"), (None, "No such file")],
)
def test_a_constitution_without_principles_is_an_error(text, words, pairs, tmp_path):
    path = tmp_path / "principles.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(InputError, match=words):
        run(tmp_path / "run", pairs, constitution=str(path))
    assert not (tmp_path / "run").exists()


def test_without_a_constitution_pairs_have_no_principle():
    labeler = GoldLabeler()
    labels(labeler, [item()])
    assert not any(principle in text_of(labeler.asked[0]) for principle in DEFAULT_PRINCIPLES)
    assert len(DEFAULT_PRINCIPLES) == 4


# -- templates -------------------------------------------------------------------------------
def test_each_name_is_replaced_once_and_texts_with_braces_stay(tmp_path):
    values = {"first": "{second} {first}", "second": "{x} {} {{first}} {0}"}
    assert ai.fill("{first}|{second}|{other}|{{first}}", values) == (
        "{second} {first}|{x} {} {{first}} {0}|{other}|{{second} {first}}"
    )
    labeler = GoldLabeler()
    (tmp_path / "principles").write_text("by {first}")
    texts = ("ant {second}", "{prompt} {principle} { }")
    labels(labeler, [item(texts=texts)], constitution=str(tmp_path / "principles"))
    text = text_of(labeler.asked[0])
    assert "Response 1:\nant {second}\n\nResponse 2:\n{prompt} {principle} { }\n\n" in text
    assert "by this principle: by {first}\n" in text


@pytest.mark.parametrize("chain_of_thought", [False, True])
@pytest.mark.parametrize("n, preamble", [(0, "base"), (1, "detailed"), (8, "base")])
def test_the_preamble_and_the_given_number_of_examples_precede_the_pair(n, preamble, chain_of_thought):
    labeler = GoldLabeler()
    labels(labeler, [item()], examples=n, preamble=preamble, chain_of_thought=chain_of_thought)
    text = text_of(labeler.asked[0])
    for i, example in enumerate(ai.TEXTS["examples"]):
        thoughts = f"Comparison of the responses: {example['thoughts']}\n" if chain_of_thought else ""
        block = (
            f"Conversation:\n{example['prompt']}\n\nResponse 1:\n{example['first']}\n\nResponse 2:\n"
            f"{example['second']}\n\nWhich response is better, 1 or 2?\n{thoughts}"
            f"Better response: {example['better']}\n\n"
        )
        assert (block in text) == (i < n)
        assert example["thoughts"] not in text or (chain_of_thought and i < n)
    own = "Conversation:\ncopy ant bear\n\nResponse 1:\nant bear\n\nResponse 2:\nant\n\n"
    assert text.startswith(ai.TEXTS[preamble] + "\n\nConversation:") and text.endswith(
        own + "Which response is better, 1 or 2?"
    )
    assert len(ai.TEXTS["examples"]) == 8 and [e["better"] for e in ai.TEXTS["examples"]].count("1") == 4


def test_a_dialogue_is_written_as_lines_with_roles():
    lines = (("user", "hi"), ("assistant", "yes"), ("user", "copy ant"))
    turns = [{"role": role, "content": content} for role, content in lines]
    assert message_columns.transcript(turns) == "user: hi\nassistant: yes\nuser: copy ant"
    assert message_columns.transcript(turns[-1:]) == "copy ant"


# -- chain of thought --------------------------------------------------------------------------
class Thinker:
    """A labeler that writes one of `texts` per pass. `odds` gives P("1") for the rationale in the opening, and
    `mass` the total probability of both options (1 for a rationale that is not in it)."""

    def __init__(self, texts, odds, mass=()):
        self.texts, self.odds, self.passes, self.openings = list(texts), odds, [], []
        self.mass = dict(mass)

    def generate(self, questions, max_new_tokens, temperature, seed):
        self.passes.append((temperature, seed, [q.opening for q in questions]))
        text = self.texts[len(self.passes) - 1]
        return [(text(q) if callable(text) else text, False) for q in questions]

    def probabilities(self, questions, options):
        self.openings.append([q.opening for q in questions])
        names = [next(name for name in self.odds if name in q.opening) for q in questions]
        p = [(self.odds[name], self.mass.get(name, 1.0)) for name in names]
        return torch.tensor([[x * mass, (1 - x) * mass] for x, mass in p], dtype=torch.float64)


def test_chain_of_thought_takes_two_passes_and_is_greedy():
    labeler = Thinker(["so it is"], {"so it is": 0.8})
    (found,) = labels(labeler, [item()], chain_of_thought=True, temperature=0.9)
    ((temperature, _, openings),) = labeler.passes
    assert temperature == 0 and openings == ["Comparison of the responses:"] * 2
    assert labeler.openings == [["Comparison of the responses: so it is\nBetter response:"] * 2]
    assert found["ai"]["orders"] == pytest.approx([0.8, 0.2]) and found["preference"] == pytest.approx(0.5)
    assert found["ai"]["rationales"] == ["so it is"] * 2


def test_an_empty_rationale_in_one_order_fails_only_its_pair():
    text = lambda q: "" if q.values["first"] == "cat" else "hm"
    items = [item(), item(texts=("ant", "cat")), item()]
    found = labels(Thinker([text], {":": 0.8}), items, chain_of_thought=True)
    assert found[1]["failed"] == f"the labeler chose neither 1 nor 2{ai.UNASKED}"
    assert "preference" in found[0] and "preference" in found[2]


def test_chains_have_equal_weight_whatever_probability_they_give_the_options():
    """The paper averages distributions: 0.95 with a mass of 1 and 0.05 with a mass of 0.08 have the mean 0.5.
    Adding up their probabilities would give 0.88."""
    labeler = Thinker(["one", "two"], {"one": 0.95, "two": 0.05}, mass={"two": 0.08})
    (label,) = labels(labeler, [item()], chain_of_thought=True, chains=2)
    assert label["ai"]["orders"] == pytest.approx([0.5, 0.5]) and label["ai"]["mass"] == pytest.approx(0.54)


def test_a_chain_without_an_answer_does_not_count():
    for second in ({"mass": {"two": 0.04}}, {"texts": ["one", ""]}):
        labeler = Thinker(**{"texts": ["one", "two"], "odds": {"one": 0.9, "two": 0.1, ":": 0.1}, **second})
        (label,) = labels(labeler, [item()], chain_of_thought=True, chains=2)
        assert label["ai"]["orders"] == pytest.approx([0.9, 0.1])
    labeler = Thinker(["one", "two"], {"one": 0.9, "two": 0.1}, mass={"one": 0.04, "two": 0.04})
    (label,) = labels(labeler, [item()], chain_of_thought=True, chains=2)
    assert label["failed"] == f"the labeler chose neither 1 nor 2{ai.UNASKED}"


def test_several_chains_average_the_preferences_of_sampled_rationales():
    labeler = Thinker(["one", "two", "three"], {"one": 0.9, "two": 0.6, "three": 0.3})
    (found,) = labels(labeler, [item()], chain_of_thought=True, chains=3, temperature=0.9)
    assert [t for t, _, _ in labeler.passes] == [0.9] * 3
    assert len({seed for _, seed, _ in labeler.passes}) == 3
    assert found["ai"]["orders"] == pytest.approx([0.6, 0.4]) and found["ai"]["mass"] == pytest.approx(1)
    again = Thinker(["one", "two", "three"], labeler.odds)
    labels(again, [item()], chain_of_thought=True, chains=3, temperature=0.9)
    assert again.passes == labeler.passes
    other = Thinker(["one", "two", "three"], labeler.odds)
    labels(other, [item()], chain_of_thought=True, chains=3, temperature=0.9, seed=1)
    assert {s for _, s, _ in other.passes}.isdisjoint(s for _, s, _ in labeler.passes)


# -- the language model ----------------------------------------------------------------------
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>"]
MERGES = {  # how " 10" is written
    "bytes": [],  # " ", "1", "0"
    "spaced": [("Ġ", str(i)) for i in range(1, 10)],  # " 1", "0"
    "whole": [("1", "0")],  # " ", "10"
    "one": [("1", "0"), ("Ġ", "10"), *[("Ġ", str(i)) for i in range(1, 10)]],  # " 10"
}


def tokens_of(kind):
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, MERGES[kind])]
    backend = Tokenizer(backends.BPE({token: i for i, token in enumerate(vocabulary)}, MERGES[kind]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "eos_token": "<end>", "extra_special_tokens": SPECIAL[2:]}
    result = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    result.chat_template = TEMPLATE
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{kind of MERGES: a folder with a small random Llama and this tokenizer}"""
    folder = tmp_path_factory.mktemp("labelers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    for kind in MERGES:
        words = tokens_of(kind)
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=len(words), max_position_embeddings=2048, initializer_range=0.4, eos_token_id=1,
            **shape,
        )  # fmt: skip
        for part in (LlamaForCausalLM(config), words):
            part.save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def model_of(folders):
    return {kind: language_model(folders / kind) for kind in MERGES}


def plain_p(labeler, text, opening, *ids):
    """P(the last id | the other ids), by a plain forward of one row."""
    words = labeler.tokenizer
    before = words(f"<user>{text}<end><assistant>{opening}", add_special_tokens=False)["input_ids"]
    before = torch.tensor([[*before, *ids[:-1]]])
    with torch.no_grad():
        return labeler.model(before).logits[0, -1].double().softmax(-1)[ids[-1]].item()


def token(labeler, text):
    found = labeler.tokenizer.convert_tokens_to_ids(text)
    assert found is not None
    return found


ASKED = [
    ai.Question("Rate {x}, now", {"x": x}, "Rating:")
    for x in ("it", "a much longer text than the other ones", "12 34", "é 漢字", "")
]
TEN = tuple(map(str, range(1, 11)))


def test_probabilities_of_one_token_options_are_the_softmax_of_a_plain_forward(model_of):
    got = model_of["spaced"].probabilities(ASKED, ("1", "2"))
    assert got.shape == (5, 2) and got.dtype == torch.float64
    for question, row in zip(ASKED, got.tolist()):
        for option, p in zip("12", row):
            want = plain_p(model_of["spaced"], text_of(question), "Rating:", token(model_of["spaced"], f"Ġ{option}"))
            assert p == pytest.approx(want, rel=1e-4)
    assert (got[:, 0] - got[:, 1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind, space, digit", [("bytes", ["Ġ"], ""), ("spaced", [], "Ġ")])
def test_if_10_is_two_tokens_its_probability_is_the_product_and_1_must_end(
    kind, space, digit, model_of
):
    labeler = model_of[kind]
    got = labeler.probabilities(ASKED, TEN)
    start, zero = [token(labeler, x) for x in space], token(labeler, "0")
    for question, row in zip(ASKED, got.tolist()):
        text = text_of(question)
        one, nine = (token(labeler, f"{digit}{x}") for x in "19")
        p_one = plain_p(labeler, text, "Rating:", *start, one)
        p_zero = plain_p(labeler, text, "Rating:", *start, one, zero)
        assert row[9] == pytest.approx(p_one * p_zero, rel=1e-4)
        assert row[0] == pytest.approx(p_one * (1 - p_zero), rel=1e-4)
        assert row[8] == pytest.approx(plain_p(labeler, text, "Rating:", *start, nine), rel=1e-4)
    assert (got[:, 9] > 0).all() and (got.sum(1) <= 1).all()


@pytest.mark.parametrize("kind, start, ten", [("whole", ["Ġ"], "10"), ("one", [], "Ġ10")])
def test_if_10_is_one_token_it_is_an_ordinary_option(kind, start, ten, model_of):
    labeler, question = model_of[kind], ASKED[1]
    (got,) = labeler.probabilities([question], TEN).tolist()
    start = [token(labeler, x) for x in start]
    one = "1" if kind == "whole" else "Ġ1"
    want = [plain_p(labeler, text_of(question), "Rating:", *start, token(labeler, x)) for x in (one, ten)]
    assert [got[0], got[9]] == pytest.approx(want, rel=1e-4)


def test_a_tokenizer_that_cannot_write_the_options_is_an_input_error(pairs, tmp_path):
    smaller_model(tmp_path / "model")  # the tiny world's words, in which 1 and 2 are unknown
    with pytest.raises(InputError, match="tokenizer has no distinct tokens for 1, 2"):
        run(tmp_path / "run", pairs, model=str(tmp_path / "model"))
    with pytest.raises(InputError, match="tokenizer has no distinct tokens for 1, 2, .*, 10"):
        language_model(tmp_path / "model").probabilities(ASKED, TEN)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_batches_of_any_size_give_the_same_probabilities(size, folders, model_of):
    labeler = language_model(folders / "spaced", batch_size=size)
    want = model_of["spaced"].probabilities(ASKED, TEN)
    torch.testing.assert_close(labeler.probabilities(ASKED, TEN), want, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(labeler.probabilities(ASKED[::-1], TEN), want.flip(0), rtol=1e-4, atol=1e-9)
    assert labeler.probabilities([], TEN).shape == (0, 10) and labeler.generate([], 4, 1.0, 0) == []


def test_the_common_prefix_of_questions_runs_once_and_changes_no_result(model_of, monkeypatch):
    labeler, original, seen = model_of["spaced"], next_token.logprobs, []

    def plain(model, input_ids, where, before=()):
        seen.append((len(before), input_ids.shape[1]))
        first = torch.tensor([before], dtype=torch.long).expand(len(input_ids), -1)
        offset = torch.tensor([[0], [len(before)]])
        return original(model, torch.cat([first, input_ids], 1), where + offset)

    questions = [ai.Question("The same long beginning. {x}", {"x": x}, "Rating:") for x in ("a", "bcd", "")]
    got = labeler.probabilities(questions, TEN)
    monkeypatch.setattr(next_token, "logprobs", plain)
    torch.testing.assert_close(got, labeler.probabilities(questions, TEN), rtol=1e-4, atol=1e-9)
    ((n_before, width),) = seen
    assert n_before == 1 + len("The same long beginning. ") > width  # <user>, then a token a character
    assert (got[0] - got[1]).abs().max() > 1e-4
    # one question alone, of which everything but its last token is the beginning
    torch.testing.assert_close(labeler.probabilities(questions[:1], TEN), got[:1], rtol=1e-4, atol=1e-9)


def test_a_labeler_in_bfloat16_gives_nearly_the_same_probabilities(folders, model_of, monkeypatch):
    monkeypatch.setattr(dist, "compute_dtype_of", lambda device: torch.bfloat16)
    labeler = language_model(folders / "spaced")
    assert {weight.dtype for weight in labeler.model.parameters()} == {torch.bfloat16}
    got, want = (x.probabilities(ASKED, TEN) for x in (labeler, model_of["spaced"]))
    torch.testing.assert_close(got, want, rtol=0.1, atol=1e-3)
    rotary = labeler.model.model.rotary_emb  # stays in fp32
    size = labeler.model.config.head_dim
    want = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    torch.testing.assert_close(rotary.inv_freq.double(), want, rtol=1e-6, atol=0)


def test_special_tokens_in_texts_are_left_out(model_of):
    labeler = model_of["spaced"]
    clean = ai.Question("Say {x}", {"x": "a b"}, "Well c:")
    dirty = ai.Question("Say {x}", {"x": "a<end><user> b<pad>"}, "Well<assistant> c:")
    assert labeler.encode(dirty, 4) == labeler.encode(clean, 4)
    assert torch.equal(labeler.probabilities([dirty], TEN), labeler.probabilities([clean], TEN))
    nested = ai.Question("Say {x}", {"x": "a<e<end>nd><us<pad>er> b"}, "Well<ass<e<end>nd>istant> c:")
    assert labeler.encode(nested, 4) == labeler.encode(clean, 4)  # what is left is no special token either
    ids = labeler.encode(dirty, 4)
    assert [ids.count(labeler.tokenizer.convert_tokens_to_ids(x)) for x in SPECIAL] == [0, 1, 1, 1]


def test_a_question_that_does_not_fit_or_that_the_template_refuses_has_no_answer(folders):
    labeler = language_model(folders / "bytes")
    assert labeler.room == 2048  # the model's positions
    labeler.room = 100
    long, short = (ai.Question("Rate {a}", {"a": "x" * n}, "Rating:") for n in (85, 20))
    n = len(labeler.encode(short, 0))  # <user>Rate xx...<end><assistant>Rating:, a token a letter
    assert n == 3 + 5 + 20 + 7 and labeler.encode(short, 100 - n)
    assert labeler.encode(short, 101 - n) == []
    p = labeler.probabilities([long, short, long], TEN)
    assert (p[[0, 2]] == 0).all() and torch.equal(p[1:2], labeler.probabilities([short], TEN))
    texts = labeler.generate([short, long, short], 30, 0.0, 0)
    assert texts[1] == ("", False) and texts[0] == texts[2] != ("", False)
    labeler.tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert labeler.generate([short], 30, 0.0, 0) == [("", False)]


def test_generated_texts_are_the_samplers_and_repeat_with_the_seed(model_of):
    labeler = model_of["spaced"]
    first, again, other = (labeler.generate(ASKED, 40, 1.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    prompts, end = [labeler.encode(q, 40) for q in ASKED], labeler.tokenizer.eos_token_id
    out = sample(labeler.model, prompts, max_new_tokens=40, stop_ids=[end], pad_id=0, slots=16, seed=1)
    for (text, ended), ids, mask, finished in zip(first, out.response_tokens, out.sample_mask, out.finished):
        assert text == labeler.tokenizer.decode(ids[mask], skip_special_tokens=True).strip()
        assert "<" not in text or "<end>" not in text
        assert ended == finished.item()
    assert {ended for _, ended in labeler.generate(ASKED * 6, 60, 1.0, 3)} == {True, False}


def test_greedy_text_equals_generate(model_of):
    labeler = model_of["spaced"]
    ((text, _),) = labeler.generate(ASKED[:1], 12, 0.0, 5)
    ids = torch.tensor([labeler.encode(ASKED[0], 12)])
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": 1, "pad_token_id": 0}
    want = labeler.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
    assert text == labeler.tokenizer.decode(want, skip_special_tokens=True).strip()


@pytest.mark.parametrize("more", [{}, {"chain_of_thought": True, "chains": 2}])
def test_a_model_labels_and_the_same_seed_gives_the_same_file(more, folders, pairs, tmp_path):
    options = {
        "model": str(folders / "spaced"), "max_rows": 4, "min_mass": 1e-12, "max_new_tokens": 12, **more,
    }  # fmt: skip
    first = run(tmp_path / "a", pairs, **options)
    assert len(first.rows) + len(first.failed) == 4 and first.rows
    assert run(tmp_path / "b", pairs, **options).text == first.text
    for r in first.rows:
        assert 0 < r["preference"] < 1 and ("rationales" in r["ai"]) == bool(more)


def test_a_model_revises_and_another_seed_gives_other_texts(folders, prompts, tmp_path):
    options = {"model": str(folders / "spaced"), "max_rows": 12, "max_new_tokens": 60, "temperature": 1.0}
    first, again, other = (
        run(tmp_path / name, prompts, "revise", seed=seed, **options)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first.text == again.text and first.rows and all(len(r["ai"]["steps"]) == 2 for r in first.rows)
    assert {r["ai"]["first"] for r in first.rows}.isdisjoint(r["ai"]["first"] for r in other.rows)


def test_a_pair_too_long_for_the_labeler_fails(folders, pairs, tmp_path, monkeypatch):
    options = {"model": str(folders / "spaced"), "max_rows": 3, "min_mass": 1e-12}
    whole = run(tmp_path / "whole", pairs, **options)
    monkeypatch.setattr(models, "n_positions", lambda config: 290)
    less = run(tmp_path / "less", pairs, **options)
    assert whole.failed == [] != less.failed and less.summary["failed"] == 3 - len(less.rows)


# -- sample ----------------------------------------------------------------------------------
class Writer:
    """Answers the questions with `texts`, one after the other; a text with a star did not end."""

    def __init__(self, *texts):
        self.texts, self.asked = iter(texts), []

    def generate(self, questions, max_new_tokens, temperature, seed):
        self.asked += [(*question.before, text_of(question)) for question in questions]
        return [(text.strip("*"), "*" not in text) for text, _ in zip(self.texts, questions)]


def test_distinct_answers_of_all_policies_share_a_row_in_turns_and_duplicates_are_counted():
    policies = {"a": Writer("x", "y", "x", "x*", "", "x"), "b": Writer("z", "y", "x", "", "x", "x")}
    system = {"role": "system", "content": "be brief"}
    rows = [item(texts=()), item(texts=(), number=1)]
    rows[0].prompt.insert(0, system)
    one, two = ai.sample(rows, policies, (), args_of("sample", responses=3))
    assert policies["b"].asked == [(system, "copy ant bear")] * 3 + [("copy ant bear",)] * 3
    x, y, z = ({"text": text, "model": model} for text, model in (("x", "a"), ("y", "a"), ("z", "b")))
    assert one == {"responses": [x, z, y], "ai": {"dropped": 3}}  # y, the second of both, is counted for a
    failed = f"fewer than two different responses{ai.UNASKED}"
    assert two == {"responses": [{"text": "x", "model": "b"}], "ai": {"dropped": 5}, "failed": failed}
    assert ai.metrics_of([one, one], [two]) == {"rows": 2, "failed": 1, "dropped": (3 + 3 + 5) / 3}
    values = {"prompt": "copy ant bear", **one}  # what label makes of it
    assert comparisons.pair_of(values, "")[1:] == (["x", "z"], None)  # of two policies


# -- select and hindsight --------------------------------------------------------------------
def selected(tmp_path, prompts_and_tags, **options):
    """The prompts that select takes."""
    rows = [{"prompt": prompt, "tags": list(tags)} for prompt, tags in prompts_and_tags]
    path = write_rows(tmp_path / "tags.jsonl", rows)
    found = run(tmp_path / "tagged", path, "select", model="", overwrite=True, **options)
    return "".join(row["prompt"] for row in found.rows)


def test_rows_with_most_tags_come_first_and_each_chosen_row_adds_a_tag(tmp_path):
    """InsTag's algorithm 1. First pass: d (wxyz), e (vwx) for its v; f (wx), a (yz), b (y), c (z) add nothing.
    Second pass: f, a; b and c add nothing. Third: b, c, whichever comes first."""
    rows = [("b", "y"), ("c", "z"), ("a", "yz"), ("d", "wxyz"), ("e", "vwx"), ("f", "wx")]
    for n, taken in ((None, "de"), (1, "d"), (2, "de"), (4, "adef"), (6, "abcdef"), (9, "abcdef")):
        assert "".join(sorted(selected(tmp_path, rows, max_rows=n))) == taken
    for n, taken in ((3, {"ade", "def"}), (5, {"abdef", "acdef"})):
        assert {"".join(sorted(selected(tmp_path, rows, max_rows=n, seed=seed))) for seed in range(6)} == taken
    # a tag of many rows keeps out no row that has a rare one, and a tag named twice is one tag
    assert selected(tmp_path, [("a", "xz"), ("b", "xy"), ("c", "xx"), ("d", "x")]) == "ab"


def test_the_number_of_tags_is_the_complexity_and_not_the_length_of_a_prompt(tmp_path):
    rows = [("a long story of many words", "x"), ("b", "xy"), ("another long story", "y")]
    for seed in range(6):
        assert selected(tmp_path, rows, max_rows=1, seed=seed) == "b"
    short = [("a long story of many words", "x"), ("b", "x")]
    assert len({selected(tmp_path, short, max_rows=1, seed=seed) for seed in range(6)}) == 2


@pytest.mark.parametrize("n", [1, 5, 12, 30, 60])
def test_select_chooses_the_rows_of_the_papers_loop(n, tmp_path):
    """Algorithm 1 as written in the paper, on random tags; rows with equally many tags come in the seed's order."""
    rng = random.Random(n)
    rows = [{"prompt": str(i), "tags": rng.sample("abcdefghij", rng.choice((1, 1, 2, 3)))} for i in range(50)]
    order = sorted(dist.shuffled(50, 7, "select"), key=lambda i: -len(rows[i]["tags"]))
    taken = []
    while len(taken) < n and order:
        tags = set()
        for i in list(order):
            if len(tags.union(rows[i]["tags"])) > len(tags) and len(taken) < n:
                taken.append(i)
                tags.update(rows[i]["tags"])
                order.remove(i)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = run(tmp_path / "run", path, "select", model="", max_rows=n, seed=7)
    assert [row["row"] for row in found.rows] == sorted(taken) and len(taken) == min(n, 50)


def test_categories_are_balanced_and_dropped_rows_are_reported(tmp_path):
    rows = [{"prompt": f"{name} {i}", "category": name} for name, n in (("p", 5), ("q", 3), (3, 2)) for i in range(n)]
    rows += [{"prompt": "i"}, {"prompt": "j", "tags": "x"}, {"prompt": "k", "tags": [], "completion": "k"}]
    rows += [{"prompt": "l", "tags": ["x"], "category": "p", "completion": "m"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = run(tmp_path / "run", path, "select", model="", max_rows=7, chunk_rows=2)
    assert collections.Counter(row.get("category") for row in found.rows if "tags" not in row) == {
        "p": 2, "q": 2, 3: 2
    }  # fmt: skip
    assert found.rows[-1] == {**rows[13], "row": 13}  # as it was, by its tags
    failed = collections.Counter(row["failed"] for row in found.failed)
    assert failed == {"no tags and no category": 3, "its tags are taken, or --max-rows is reached": 4}


def test_hindsight_says_what_each_response_achieved(tmp_path):
    """The median of the scores -2, -1, 0, 1 is -0.5; that of 5 and 7 is 6."""
    rows = [{"prompt": "copy ant", "response": text, "score": i} for i, text in enumerate("abcd", -2)]
    rows[1] = {"prompt": [{"role": "user", "content": "copy ant"}], "completion": "b", "score": -1.0}
    rows += [{"prompt": "copy eel", "response": text, "score": i} for i, text in ((5, "e"), (7, "f"))]
    rows += [{"prompt": "copy ant"}, {"prompt": "copy cat", "response": "cat", "score": None}]
    rows += [{"prompt": "copy cat", "response": "", "score": 1.0}]  # no prompt to ask, but a bad row
    rows += [{"prompt": "copy cat", "output": "cat", "score": 1.0}]  # nor is this one
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for threshold, bad in ((None, "abe"), (-1.0, "a"), (0.5, "abc")):
        options = {"model": "", "threshold": threshold, "chunk_rows": 2}
        found = run(tmp_path / str(threshold), path, "hindsight", **options).rows
        assert [row.get("completion") for row in found] == [*"abcdef", None] and found[3]["score"] == 1
        for row, text in zip(found, "abcdef-"):
            system = {"role": "system", "content": ai.TEXTS["bad" if text in bad else "good"]}
            prompt = "copy eel" if text in "ef" else "copy ant"
            assert row["prompt"] == [system, {"role": "user", "content": prompt}]
            assert "completion" not in row or message_columns.sft_messages(row)[0] == [
                *row["prompt"], {"role": "assistant", "content": text}
            ]  # fmt: skip
    known = TOKENIZER(f"{ai.TEXTS['good']} {ai.TEXTS['bad']}")["input_ids"]
    assert known.count(TOKENIZER.unk_token_id) == 3  # of "Answer well Answer badly" the tiny world has a word


def test_max_rows_of_hindsight_keeps_the_responses_to_a_prompt_together(tmp_path):
    """A response alone would be its own median, and so always good."""
    rows = [{"prompt": f"copy {a}", "response": f"{a} {i}", "score": i} for i in range(4) for a in tiny.ANIMALS[:10]]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = run(tmp_path / "run", path, "hindsight", model="", max_rows=20).rows
    assert len(found) == 20
    for row in found:
        instruction = ai.TEXTS["bad" if row["score"] < 1.5 else "good"]
        assert row["prompt"][0] == {"role": "system", "content": instruction}


def test_the_next_round_of_hindsight_replaces_the_instruction(tmp_path):
    """Prompts without a response get the instruction to answer well; their answers' scores 1, 2, 3 have the median
    2. A plain row of the same prompt counts as one of its responses, a system turn of the user's own stays."""
    good, bad = ai.TEXTS["good"], ai.TEXTS["bad"]
    prompts = [{"prompt": "copy ant"}, {"prompt": [{"role": "system", "content": f"Be\n\n{good}"}, *item().prompt]}]
    path = write_rows(tmp_path / "prompts.jsonl", prompts)
    plain, own = (row["prompt"] for row in run(tmp_path / "ask", path, "hindsight", model="").rows)
    answered = [{"prompt": plain, "response": text, "score": i} for i, text in ((1, "a"), (3, "b"))]
    answered += [{"prompt": "copy ant", "response": "c", "score": 2}]
    answered += [{"prompt": own, "response": text, "score": i} for i, text in ((-1, "d"), (0, "e"))]
    path = write_rows(tmp_path / "answered.jsonl", answered)
    found = run(tmp_path / "again", path, "hindsight", model="").rows
    assert [row["prompt"][0]["content"] for row in found] == [
        bad, good, good, f"{bad}\n\nBe\n\n{good}", f"{good}\n\nBe\n\n{good}"
    ]  # fmt: skip
    assert [[turn["role"] for turn in row["prompt"]] for row in found] == [["system", "user"]] * 5
    again = write_rows(tmp_path / "rows.jsonl", [{**row, "score": -row["score"]} for row in found])
    found = run(tmp_path / "turned", again, "hindsight", model="").rows
    assert [row["prompt"][0]["content"].split("\n\n")[0] for row in found] == [good, bad, good, good, bad]


# -- rater -----------------------------------------------------------------------------------
def rated(labeler, monkeypatch, *texts):
    """Scores of the rater with this labeler for responses to "copy ant bear"."""
    monkeypatch.setattr(gold_labeler, "mine", lambda: labeler, raising=False)
    rows = [{"messages": item().prompt}] * len(texts)
    return ai.rater("gold_labeler:mine")(["copy ant bear"] * len(texts), list(texts), rows)


def test_a_rating_is_the_expectation_and_its_score_is_scaled_to_1(monkeypatch):
    """copy ant bear: "ant bear" has gold 2, so its ratings are 4 and 5 with mean 1 + 9 * 5 / 13 = 58 / 13; "cat um"
    has gold -0.6: 2 and 3, 1 + 9 * 2.4 / 13 = 34.6 / 13. A rating of 5.5 = 71.5 / 13 is scaled to 0."""
    labeler = GoldLabeler(mass=0.5)
    assert rated(labeler, monkeypatch, "ant bear", "cat um") == pytest.approx([-13.5 / 58.5, -36.9 / 58.5])
    noise = gold_labeler.noise("copy ant bear", "ant bear")
    assert rated(GoldLabeler(noise=1.5), monkeypatch, "ant bear") == pytest.approx([(9 * 1.5 * noise - 13.5) / 58.5])
    assert "Response:\nant bear\n\nWhat is the rating?" in text_of(labeler.asked[0])
    assert {question.opening for question in labeler.asked} == {"Rating:"}
    assert rated(GoldLabeler(mass=0.06), monkeypatch, "ant bear") != [0.0]
    assert rated(GoldLabeler(mass=0.04), monkeypatch, "ant bear") == [0.0]  # no number from 1 to 10
    assert rated(gold_labeler.mute(), monkeypatch, "ant bear") == [0.0]


@pytest.mark.parametrize("place, score", [(0, -1.0), (9, 1.0), (4, -1 / 9)])
def test_ratings_range_from_minus_1_to_1(place, score, monkeypatch):
    class Sure(GoldLabeler):
        def probabilities(self, questions, options):
            return torch.eye(10, dtype=torch.float64)[place].repeat(len(questions), 1) * 0.3

    assert rated(Sure(), monkeypatch, "ant") == [pytest.approx(score)]


def scorer_pairs(rows):
    out = []
    for i, r in enumerate(rows):
        turns = [{"role": "user", "content": r["prompt"]}]
        ids = TOKENIZER(r["response"], add_special_tokens=False)["input_ids"]
        prompt = Prompt([1], turns, Row(f"rows:{i}", {}))
        out.append((prompt, Response(ids, r["response"], True)))
    return out


def test_the_rater_is_a_scorer(responses, folders, monkeypatch):
    monkeypatch.setattr(ai, "Args", functools.partial(ai.Args, min_mass=1e-12))  # of random weights
    rows = read_jsonl(responses)
    turns = [{"role": "user", "content": rows[0]["prompt"]}]
    for model in ("gold_labeler:exact", str(folders / "spaced")):
        spec = f"common.programs.ai_feedback:rater={model}"
        scorer = scorers.load_scorer(spec, TOKENIZER, CPU)
        got = scorers.score(scorer, scorer_pairs(rows), 7)
        assert scorer.name == spec and len(got) == 20 and len(set(got)) > 5
        assert got[0] == pytest.approx(ai.rater(model)([""], [rows[0]["response"]], [{"messages": turns}])[0])


@pytest.mark.parametrize("labeler, want", [("exact", 1.0), ("biased", 0.4505), ("mute", 0.0)])
def test_the_oracle_gives_the_log_odds_of_both_orders_mean(labeler, want):
    """copy ant bear: "ant bear" has gold 2, "ant" 1. P = sigma(1) in both orders: log odds 1; with a place bias
    of 2 (sigma(3) + 1 - sigma(1)) / 2 = 0.61076, log odds 0.4505."""
    spec = f"common.programs.ai_feedback:oracle=gold_labeler:{labeler}"
    oracle = scorers.load_scorer(spec, TOKENIZER, CPU, pairwise=True)
    answers = [Response([], text, True) for text in ("ant bear", "ant")]
    prompt = Prompt([], item().prompt, Row("rows:1", {}))
    duels = [(prompt, *answers), (prompt, *answers[::-1])]
    assert scorers.log_odds(oracle, duels, 8) == pytest.approx([want, -want], abs=1e-4)
    won = scorers.score(oracle, [(prompt, answer) for answer in answers], 8)
    assert won == pytest.approx([sigmoid(want), sigmoid(-want)], abs=1e-4)


def test_evaluate_compares_a_reward_model_a_pairwise_model_and_both_judges(pairs, folders, tmp_path):
    """The judges by hand: with the exact labeler, the oracle's log odds are differences of gold rewards and the
    rater's scores are its ratings. With a random model they are only checked to be numbers."""
    judge = "common.programs.ai_feedback:{}"
    make_scorer(tmp_path / "rm")
    specs = {"reward": tmp_path / "rm", "spaced": judge.format(f"oracle={folders / 'spaced'}")}
    specs["pairwise"] = f"common.programs.pairwise:oracle={smaller_model(tmp_path / 'pm')}"
    specs |= {kind: judge.format(f"{kind}=gold_labeler:exact") for kind in ("rater", "oracle")}
    given = tuple(f"{name}={spec}" for name, spec in specs.items())
    options = {"dataset": str(pairs), "output_dir": str(tmp_path / "run"), "scorer": "common.data.tiny:gold_scorer"}
    evaluate.main(evaluate.Args(scorers=given, **options))
    parts = read_json(tmp_path / "run" / "summary.json")["scorers"]
    assert list(parts) == list(specs)
    rows = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len(rows) == 5 * parts["reward"]["all"]["pairs"] > 150
    differences = []
    for row in [row for row in rows if row["scorer"] in ("rater", "oracle")]:
        prompt, (better, worse) = row["prompt"][-1]["content"], row["responses"]
        if row["scorer"] == "oracle":
            gold = [tiny.gold_score(prompt, r["text"]) for r in (better, worse)]
            differences += row["differences"]
            assert row["differences"] == pytest.approx([gold[0] - gold[1]], abs=1e-6)
        for r in (better, worse) if row["scorer"] == "rater" else ():
            wanted = gold_labeler.rating(tiny.gold_score(prompt, r["text"]))
            assert r["score"] == pytest.approx((wanted - 5.5) / 4.5, abs=1e-6)
    accuracy = parts["oracle"]["all"]["accuracy"]
    assert accuracy == pytest.approx(measures.accuracy([round(d, 6) for d in differences]), abs=0.02)
    assert 0.5 < accuracy < 1 and "mean" in parts["rater"]["all"] and "mean" not in parts["oracle"]["all"]
    of_random = [d for row in rows if row["scorer"] == "spaced" for d in row["differences"]]
    assert all(map(math.isfinite, of_random))


def test_the_raters_version_changes_with_its_model(folders, tmp_path):
    versions = []
    for kind in ("spaced", "bytes"):
        (tmp_path / "model").unlink(missing_ok=True)
        (tmp_path / "model").symlink_to(folders / kind)
        spec = f"common.programs.ai_feedback:rater={tmp_path / 'model'}"
        versions.append(scorers.load_scorer(spec, TOKENIZER, CPU).version)
    assert versions[0] != versions[1]


def test_module_function_text_scores_with_the_returned_function(tmp_path, monkeypatch):
    (tmp_path / "counting.py").write_text(
        "def words(word):\n"
        "    return lambda prompts, responses, rows: [float(r.split().count(word)) for r in responses]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = [scorers.load_scorer(f"counting:words={word}", TOKENIZER, CPU) for word in ("ant", "a:b=c")]
    pairs = [(A, Response([5], "ant bear ant", True)), (B, Response([5], "a:b=c", True))]
    assert [scorers.score(scorer, pairs, 1) for scorer in found] == [[2.0, 0.0], [0.0, 1.0]]
    assert found[0].version != found[1].version


# -- revise ----------------------------------------------------------------------------------
def test_answers_are_criticised_and_revised_and_the_steps_are_kept(constitution, tmp_path, monkeypatch):
    made = asked_by(monkeypatch)
    rows = [{"prompt": "copy ant bear"}, {"prompt": "copy ant knife", "response": "ant knife"}]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    options = {"model": "gold_labeler:noted", "revisions": 3, "constitution": str(constitution)}
    found = run(tmp_path / "run", path, "revise", **options)
    one, two = found.rows
    assert (one["ai"]["first"], one["completion"]) == ("ant bear um", "ant bear")
    assert (two["ai"]["first"], two["completion"]) == ("ant knife", "sorry i refuse")
    for r in found.rows:
        assert len(r["ai"]["steps"]) == 3 and "completion" not in r["ai"]
        for step in r["ai"]["steps"]:
            assert step["critique"] == "there is a needless word" and step["used"] is True
            assert step["revision"] == r["completion"] and step["principle"] in PRINCIPLES
    # One question for an answer, then a critique and a revision of both rows, three times
    asked = made[0].asked
    assert len(asked) == 1 + 3 * (2 + 2) and text_of(asked[0]) == "copy ant bear"
    assert asked[1].values["response"] == "ant bear um" and asked[5].values["response"] == "ant bear"
    assert asked[1].values["principle"] == one["ai"]["steps"][0]["principle"]
    assert f"by this principle: {asked[1].values['principle']}" in text_of(asked[1])
    assert "Critique:\nthere is a needless word" in text_of(asked[3])


def test_each_step_of_each_row_draws_its_own_principle(prompts, tmp_path):
    found = run(tmp_path / "a", prompts, "revise", revisions=2).rows
    steps = [tuple(step["principle"] for step in r["ai"]["steps"]) for r in found]
    assert {p for two in steps for p in two} == set(DEFAULT_PRINCIPLES)
    assert any(first != second for first, second in steps)
    again = run(tmp_path / "b", prompts, "revise", revisions=2, chunk_rows=3).rows
    assert again == found
    other = run(tmp_path / "c", prompts, "revise", revisions=2, seed=1).rows
    assert [tuple(s["principle"] for s in r["ai"]["steps"]) for r in other] != steps


def test_each_step_draws_its_principle_independently():
    """4 * 4 pairs are equally likely: 400 rows should draw every one of them, each about 25 times."""
    drawn = collections.Counter(tuple(ai.draw(DEFAULT_PRINCIPLES, 0, row, r) for r in (0, 1)) for row in range(400))
    assert len(drawn) == 16 and min(drawn.values()) > 5 and max(drawn.values()) < 60


class Reviser(GoldLabeler):
    """`critiques` and `revisions` (text, ended), one a step."""

    def __init__(self, critiques, revisions, first=("start", True)):
        super().__init__()
        self.script = {"critique": [(c, True) for c in critiques], "revision": list(revisions), "first": [first]}

    def generate(self, questions, max_new_tokens, temperature, seed):
        self._note(questions)
        if not questions:
            return []
        values = questions[0].values
        kind = "revision" if "critique" in values else "critique" if "principle" in values else "first"
        return [self.script[kind].pop(0)] * len(questions)


def test_an_unfinished_or_empty_revision_is_not_used():
    labeler = Reviser(
        ["c1", "c2", "", "c4"], [("cut of", False), ("", True), ("after no critique", True), ("good", True)]
    )
    args = args_of("revise", revisions=4)
    (found,) = ai.revise([item(texts=())], labeler, DEFAULT_PRINCIPLES, args)
    assert found["completion"] == "good" and found["ai"]["first"] == "start"
    steps = found["ai"]["steps"]
    assert [s["used"] for s in steps] == [False, False, False, True]
    assert [s["revision"] for s in steps] == ["cut of", "", "after no critique", "good"]
    revised = [q.values["response"] for q in labeler.asked if "critique" in q.values]
    assert revised == ["start"] * 4


def test_a_row_that_never_gets_a_response_fails():
    args = args_of("revise", revisions=1)
    for first in (("", True), ("cut", False)):
        labeler = Reviser(["c"], [("cut", False)], first=first)
        found = ai.revise([item(texts=())], labeler, DEFAULT_PRINCIPLES, args)
        assert list(found) == [{"failed": f"no finished response{ai.UNASKED}"}]
    labeler = Reviser(["c"], [("mended", True)], first=("", True))
    (found,) = ai.revise([item(texts=())], labeler, DEFAULT_PRINCIPLES, args)
    assert found["completion"] == "mended" and found["ai"]["first"] == ""


# -- the run directory -------------------------------------------------------------------------
def test_a_run_leaves_its_arguments_rows_and_a_summary_last(pairs, tmp_path):
    folder = tmp_path / "run"
    ended = succeeds(script(folder, pairs))
    names = {"args.json", "lock", "rows.jsonl", "failed.jsonl", "summary.json"}
    assert {path.name for path in folder.iterdir()} == names
    written, summary = read_json(folder / "args.json"), read_json(folder / "summary.json")
    assert written["stage"] == "ai_feedback label" and written["args"]["task"] == "label"
    assert f"wrote {folder}/rows.jsonl" in ended.out and f"alignment: {summary['alignment']:.4g}" in ended.out
    newest = (folder / "summary.json").stat().st_mtime_ns
    assert all(path.stat().st_mtime_ns <= newest for path in folder.iterdir())
    rows = read_jsonl(folder / "rows.jsonl")
    names = "prompt category is_safety row chosen rejected preference human ai".split()
    assert len(rows) == 40 and all(list(r) == names for r in rows)


@pytest.mark.parametrize("column", ["label", "score"])
def test_completions_of_a_prompt_are_labelled_as_pairs(column, tmp_path, capsys):
    value = {"label": bool, "score": float}[column]
    rows = [{"prompt": "copy ant", "completion": text, column: value(text == "ant")} for text in ("ant", "bear")]
    found = run(tmp_path / "run", write_rows(tmp_path / "kto.jsonl", rows), model="gold_labeler:noisy")
    assert [(r["chosen"], r["rejected"]) for r in found.rows] == [("ant", "bear")]
    assert "not read" not in capsys.readouterr().out  # nor columns that only the program wrote


@pytest.mark.parametrize(
    "bad", [{"model": "gold_labeler:none"}, {"dataset": "none.jsonl"}, {"constitution": "none"}]
)
def test_a_mistake_leaves_the_old_run_as_it_was(bad, pairs, tmp_path):
    folder = tmp_path / "run"
    run(folder, pairs)
    before = contents(folder)
    with pytest.raises((InputError, OSError)):
        run(folder, **{"dataset": pairs, "overwrite": True, **bad})
    assert contents(folder) == before


def test_a_killed_run_resumes_to_the_same_rows(pairs, tmp_path):
    options = {"chunk_rows": 6, "seed": 5}
    whole = run(tmp_path / "whole", pairs, model="gold_labeler:noisy", **options)
    folder = tmp_path / "killed"
    ended = script(folder, pairs, model="gold_labeler:dying", **options)
    assert ended.code == 9 and not (folder / "summary.json").exists()
    assert len(read_jsonl(folder / "partial.jsonl")) == 18  # three chunks of six
    assert not (folder / "rows.jsonl").exists()  # nobody takes them for the data set
    for words, other in (("an unfinished run", {}), ("another script: .ai_feedback label.", {"task": "revise", "resume": True})):
        with pytest.raises(InputError, match=words):
            run(folder, pairs, model="gold_labeler:noisy", **options, **other)
    common.run.run._locks.clear()  # as where this process ends
    with open(folder / "partial.jsonl", "a") as file:  # and the crash cut a line
        file.write(whole.text.splitlines()[18][:50])
    # A second crash, after three more chunks: they do not hang on to the cut line
    assert script(folder, pairs, model="gold_labeler:dying", resume=True, **options).code == 9
    assert (folder / "partial.jsonl").read_text() == "".join(whole.text.splitlines(keepends=True)[:36])
    changed, moved = tmp_path / "changed.jsonl", tmp_path / "moved.jsonl"
    changed.write_text("".join(Path(pairs).read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(InputError, match="content of --dataset"):
        run(folder, changed, model="gold_labeler:noisy", resume=True, **options)
    shutil.copy(pairs, moved)  # the same rows elsewhere are the same input
    found = run(folder, moved, model="gold_labeler:noisy", resume=True, **options)
    assert found.text == whole.text and found.summary == whole.summary and found.failed == whole.failed == []
    assert not (folder / "partial.jsonl").exists()


def test_a_category_may_be_a_date(tmp_path):
    rows = [{"prompt": "copy ant", "chosen": "ant", "rejected": "fox", "category": datetime.date(2026, 1, 2)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = run(tmp_path / "run", str(tmp_path / "rows.parquet"), model="gold_labeler:noisy")
    assert [row["category"] for row in found.rows] == ["2026-01-02"]


def test_an_answer_that_runs_past_a_special_token_has_not_ended(folders, monkeypatch):
    said = [Response([4], "ant", True, True), Response([4], "ant fox", True, False, written="ant<|end|>fox")]
    monkeypatch.setattr(ai, "my_responses", lambda *args, **options: said)
    model = language_model(folders / "spaced")
    questions = [ai.Question("{x}", {"x": "copy ant"})] * 2
    assert model.generate(questions, 4, 1.0, 0) == [("ant", True), ("ant fox", False)]


def test_rows_of_two_ranks_with_gaps_are_completed_and_sorted(pairs, tmp_path):
    """Rank 0 has rows 0, 2, 4, ...: after a crash the file has gaps, is not in order, and its last line may end
    in the middle of a letter."""
    whole, folder = run(tmp_path / "run", pairs, model="gold_labeler:noisy"), tmp_path / "run"
    lines = whole.text.splitlines(keepends=True)
    (folder / "summary.json").unlink()
    half = '{"prompt": "é'.encode()[:-1]
    (folder / "partial.jsonl").write_bytes("".join(lines[i] for i in (0, 2, 4, 1, 7, 6)).encode() + half)
    found = run(folder, pairs, model="gold_labeler:noisy", resume=True)
    assert found.text == whole.text and found.summary == whole.summary


def test_failed_rows_stay_counted_and_are_not_retried(pairs, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no result .*failed.jsonl.: the labeler chose neither 1 nor 2"):
        run(tmp_path / "run", pairs, model="gold_labeler:mute")
    failed = (tmp_path / "run" / "failed.jsonl").read_text()
    assert not (tmp_path / "run" / "summary.json").exists()
    # As the file is before its end: what failed is among the rows
    (tmp_path / "run" / "partial.jsonl").write_text("".join(failed.splitlines(keepends=True)[:30]))
    made = asked_by(monkeypatch)
    found = run(tmp_path / "run", pairs, model="gold_labeler:noted", resume=True, chunk_rows=10)
    assert len(made[0].asked) == 20 and [r["row"] for r in found.rows] == list(range(30, 40))
    assert found.summary["failed"] == 30 and [r["row"] for r in found.failed] == list(range(30))


def test_a_resumed_run_with_fewer_rows_keeps_only_these(pairs, tmp_path):
    options = {"model": "gold_labeler:noisy", "chunk_rows": 2}
    whole = run(tmp_path / "run", pairs, **options)
    fewer = run(tmp_path / "fewer", pairs, **options, max_rows=2)
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "partial.jsonl").write_text(whole.text)
    assert run(tmp_path / "run", pairs, **options, max_rows=2, resume=True).text == fewer.text


def test_counts_are_printed_whole(tmp_path, capsys):
    rows = [{"prompt": f"copy {i}", "category": str(i)} for i in range(10001)]
    run(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows), "select", model="")
    assert "rows: 10001\n" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["label", "revise"])
def test_the_number_of_rows_between_two_writes_changes_nothing(task, pairs, prompts, tmp_path):
    dataset = {"label": pairs, "revise": prompts}[task]
    texts = [run(tmp_path / str(n), dataset, task, model="gold_labeler:noisy", chunk_rows=n).text for n in (1, 7, 64)]
    assert texts[0] == texts[1] == texts[2] != ""


class Dice(GoldLabeler):
    """Its texts show the seed and the place in the batch, as a sampler's do."""

    def generate(self, questions, max_new_tokens, temperature, seed):
        return [(f"{seed} {i}", True) for i in range(len(questions))]


@pytest.mark.parametrize("task, lines", [("revise", 12), ("revise", 9), ("sample", 9)])
def test_a_resumed_run_samples_the_same_texts(
    task, lines, prompts, tmp_path, monkeypatch
):
    """DESIGN: a chunk that was killed is redone whole. With chunks of 6, 12 lines are two chunks; 9 are what
    a crash in the middle of the second write leaves."""
    monkeypatch.setattr(gold_labeler, "dice", Dice, raising=False)
    options = {"model": "gold_labeler:dice", "chunk_rows": 6}
    whole = run(tmp_path / "run", prompts, task, **options)
    (tmp_path / "run" / "summary.json").unlink()
    kept = whole.text.splitlines(keepends=True)[:lines]
    (tmp_path / "run" / "partial.jsonl").write_text("".join(kept))
    assert run(tmp_path / "run", prompts, task, resume=True, **options).text == whole.text


@pytest.mark.parametrize("task, chunk_rows, max_rows", [("label", 1, 3), ("revise", 7, 15), ("sample", 7, 9)])
def test_two_ranks_give_the_rows_of_one(task, chunk_rows, max_rows, pairs, prompts, folders, tmp_path):
    """In chunks of one row, rank 1 has nothing to do. Sampled tasks agree too, in groups of a batch."""
    dataset = {"label": pairs, "revise": prompts, "sample": prompts}[task]
    options = {"model": "gold_labeler:noisy", "chunk_rows": chunk_rows, "max_rows": max_rows}
    if task == "sample":
        options |= {"model": str(folders / "spaced"), "batch_size": 2, "responses": 12, "temperature": 1.0}
    alone = run(tmp_path / "one", dataset, task, **options)
    succeeds(script(tmp_path / "two", dataset, task, ranks=2, **options))
    assert (tmp_path / "two" / "rows.jsonl").read_text() == alone.text
    assert read_json(tmp_path / "two" / "summary.json") == alone.summary


def test_a_run_resumed_with_another_condition_is_refused_because_rows_are_known_by_their_number(pairs, tmp_path):
    rows = [{**row, "score": i} for i, row in enumerate(read_jsonl(pairs))]
    path = write_rows(tmp_path / "scored.jsonl", rows)
    options = {"model": "gold_labeler:noisy", "chunk_rows": 2}
    whole = run(tmp_path / "run", f"{path}?score>=0", **options)
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "partial.jsonl").write_text("".join(whole.text.splitlines(keepends=True)[:4]))
    with pytest.raises(InputError, match="content of --dataset"):
        run(tmp_path / "run", f"{path}?score>=6", resume=True, **options)
    assert run(tmp_path / "run", f"{path}?score>=0", resume=True, **options).text == whole.text


def test_a_run_resumed_on_other_prompts_of_the_same_name_is_refused(pairs, tmp_path):
    """A folder, like a data set of the hub, is known by its name; its rows are compared by their prompts."""
    (tmp_path / "data").mkdir()
    rows, options = read_jsonl(pairs), {"model": "gold_labeler:noisy", "chunk_rows": 2}
    path = write_rows(tmp_path / "data" / "train.jsonl", rows)
    whole = run(tmp_path / "run", tmp_path / "data", **options)
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "partial.jsonl").write_text("".join(whole.text.splitlines(keepends=True)[:4]))
    write_rows(path, rows[1:])
    with pytest.raises(InputError, match="the rows of --dataset are not those of .*Resume with the data"):
        run(tmp_path / "run", tmp_path / "data", resume=True, **options)
    write_rows(path, rows)
    assert run(tmp_path / "run", tmp_path / "data", resume=True, **options).text == whole.text


# -- bad input -----------------------------------------------------------------------------------
def test_a_mistake_on_the_command_line_ends_with_one_clear_line_and_code_2(pairs, tmp_path):
    """The command as a user runs it. Other mistakes are tested in this process, below."""
    assert_error(script(tmp_path / "run", pairs, model=None), "--model", "the name of a labeler")
    make_scorer(tmp_path / "scorer")
    words = "SequenceClassification", "not a causal language model"
    assert_error(script(tmp_path / "run", pairs, model=tmp_path / "scorer"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"min_mass": 0}, "--min-mass 0: expected more than 0, at most 1"),
        ({"min_mass": 1.1}, "--min-mass 1.1: expected more than 0, at most 1"),
        ({"examples": 9}, "--examples 9: expected 0 to 8"),
        ({"other_models": ("gold_labeler:exact",)}, "--other-models .*no names except with sample"),
        ({"task": "sample", "other_models": ("gold_labeler:exact",)}, "--other-models .*expected different models"),
        ({"chains": 2}, "--chains 2: expected 1 without --chain-of-thought"),
        ({"chains": 0, "chain_of_thought": True}, "--chains 0"),
        ({"task": "revise", "revisions": 0}, "--revisions 0"),
        ({"task": "sample", "responses": 0}, "--responses 0"),
        ({"max_rows": 0}, "--max-rows 0"),
        ({"chunk_rows": 0}, "--chunk-rows 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"temperature": -1.0}, "--temperature -1"),
        ({"model": "gold_labeler:none"}, "--model gold_labeler:none: .*expected module:function"),
        ({"model": "no_such_module:none"}, "No module named"),
        ({"model": "gold_labeler:nothing"}, "lacks `probabilities` or `generate`"),
        ({"model": "/nowhere/model"}, "there is no /nowhere/model"),
        ({"output_dir": ""}, "--output-dir is empty"),
    ],
)
def test_arguments_out_of_their_limits_are_named(options, words, pairs, tmp_path):
    with pytest.raises(InputError, match=words):
        options = {"dataset": str(pairs), "output_dir": str(tmp_path / "run"), **options}
        ai.main(args_of(**options))
    assert not (tmp_path / "run").exists()


def test_a_labeler_that_is_no_function_without_arguments_is_an_input_error(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(gold_labeler, "picky", lambda name: GoldLabeler(), raising=False)
    with pytest.raises(InputError, match="--model gold_labeler:picky"):
        run(tmp_path / "run", pairs, model="gold_labeler:picky")


def test_unusable_rows_are_dropped_and_named(tmp_path, capsys):
    good = {"prompt": "copy ant", "chosen": "ant", "rejected": "cat"}
    rows = [good, {**good, "rejected": " ant"}, {**good, "chosen": ""}, {"prompt": "copy ant", "completion": "ant"}]
    rows += [{**good, "preference": 2}, {**good, "prompt": " "}, {**good, "rejected": "eel"}]
    found = run(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows))
    assert [r["row"] for r in found.rows] == [0, 6]
    out = capsys.readouterr().out
    assert "dropped 5 of 7 rows" in out
    for words in ("the responses are the same", "match no format of preference rows", "preference 2", "no prompt"):
        assert words in out


NO_LISTS = [
    "ant", {"a": "b"}, ["ant", "cat"], [None, {"text": "ant"}], [{"text": 1}, {"text": 2}],
    [{"say": "ant"}, {}],
]  # fmt: skip


@pytest.mark.parametrize("responses", NO_LISTS)
def test_responses_that_are_not_lists_of_texts_are_dropped_and_named(responses, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "copy ant", "responses": responses}])
    with pytest.raises(InputError, match="responses is not a list of"):
        run(tmp_path / "run", rows)


def test_a_response_with_a_lone_surrogate_is_dropped_and_named(tmp_path):
    rows = [{"prompt": "copy ant", "response": text} for text in ("ant", "ant \ud800")]
    found = run(tmp_path / "run", write_rows(tmp_path / "rows.jsonl", rows), "revise")
    assert [r["row"] for r in found.rows] == [0]


def test_the_first_word_of_the_command_is_the_task():
    for task in ai.TASKS:
        assert parse(ai.RECIPES, [task, "--model", "m", "--dataset", "tiny"]).task == task
    assert parse(ai.RECIPES, ["--model", "m", "--dataset", "tiny"]).task == "label"


# -- the whole chain -------------------------------------------------------------------------------
def test_labels_train_a_reward_model_revisions_a_policy_and_the_rater_scores_for_ppo(
    pairs, prompts, tmp_path
):
    """Only that they fit together; `rlaif` of tests/benchmarks/experiments.py has sizes that show an effect."""
    few = {
        "max_steps": 3, "batch_size": 8, "micro_batch_size": 8, "max_length": 64, "eval_every": 0,
        "save_every": 0,
    }  # fmt: skip
    base = smaller_model(tmp_path / "base")
    more = {"temperature": 1.0, "max_new_tokens": 8, "max_rows": 12, "responses": 30}
    succeeds(script(tmp_path / "pairs", prompts, "sample", model=base, **more))
    sampled = read_jsonl(tmp_path / "pairs" / "rows.jsonl")
    write_rows(tmp_path / "all.jsonl", sampled + read_jsonl(pairs))
    succeeds(script(tmp_path / "labels", tmp_path / "all.jsonl", model="gold_labeler:noisy"))
    succeeds(script(tmp_path / "revised", prompts, "revise"))

    def trained(name, folder, **options):
        options = {"model": base, "output_dir": tmp_path / folder, **options}
        succeeds(processes.script(name, *flags(**options), cwd=TESTS, plots=False))
        return tmp_path / folder

    labels = tmp_path / "labels" / "rows.jsonl"
    assert all(0 < row["preference"] < 1 for row in read_jsonl(labels))  # soft labels, and learnt as such:
    reward = trained("reward", "reward", dataset=labels, length_prompts=0, **few)
    steps = [row["loss/reward"] for row in rows_of(reward)]
    assert len(steps) == 3 and all(map(math.isfinite, steps))
    policy = trained("sft", "sft", dataset=tmp_path / "revised" / "rows.jsonl", sample_prompts=0, **few)
    few_prompts = [{"prompt": r["prompt"]} for r in tiny.rows("prompts", "test")[:8]]
    test = write_rows(tmp_path / "test.jsonl", few_prompts)
    options = {"model": policy, "dataset": prompts, "eval_dataset": test, "iterations": 1, "max_length": 64}
    options |= {"prompts_per_iteration": 8, "minibatch_size": 16, "max_new_tokens": 8, "value_warmup_steps": 0}
    options["missing_eos_penalty"] = 0
    for number, scorer in enumerate((reward, "common.programs.ai_feedback:rater=gold_labeler:exact")):
        rows = read_jsonl(trained("ppo", f"ppo{number}", scorer=scorer, **options) / "samples.jsonl")
        assert rows and all(math.isfinite(row["score"]) for row in rows)
    for row in rows:  # the rater's
        wanted = gold_labeler.rating(tiny.gold_score(row["prompt"][-1]["content"], row["response"]))
        assert row["score"] == pytest.approx((wanted - 5.5) / 4.5, abs=1e-6)
