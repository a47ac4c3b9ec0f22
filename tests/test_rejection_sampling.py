"""rejection_sampling.py: the responses that it selects and learns, the files of a run, the variants,
resuming, and bad input."""

import collections
import copy
import functools
import gc
import json
import math
import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from helpers import (
    CPU, PLACE, TOKENIZER, A, B, C, as_killed, assert_error, assert_only_the_last_version_is_rounded,
    assert_same_versions, assert_whole_versions, contents, make_sampled, make_scorer, named, prompt, question,
    read_json, row, rows_of, scorer_that_notes, smaller_model, succeeds, without, write_rows,
)  # fmt: skip
from helpers import run as run_script
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import rejection_sampling as rs
from common import dist, responses
from common.batches import collate, make_blocks
from common.errors import InputError
from common.data import chat, tiny
from common.data.files import read_jsonl
from common.loading import checks, pretrained
from common.scoring import functions, scorers, version_evaluation
from common.run import pool
from common.run.cli import parse

GOLD = "common.data.tiny:gold_scorer"
K, PROMPTS, ASKED, SWEPT = 4, 12, 6, 3
END = TOKENIZER.eos_token_id


def make_args(**options):
    return rs.Args(**{"max_new_tokens": 8, "max_length": 64, "scorer": GOLD, **options})


def tiny_policy():
    return dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)


# -- select ------------------------------------------------------------------------------
def rows_from(text):
    """Rows of the pool: prompt, response, score and any values that are not the default."""
    rows = []
    for part in text.split(", "):
        name, words, score, *other = part.split(" ")
        iteration = 2 if "2nd" in other else 1
        answer = words.strip("'").replace("_", " ")
        rows.append(row(PROMPTS_OF[name], answer, float(score), iteration, finished="cut" not in other))
    return rows


PROMPTS_OF = {"A": A, "B": B, "C": C}
CUT = "A ant 9 cut, A '' 9, A '_' 9, A cat -1, B dog -2 cut"
TWO = "A ant 5, B bear 5, A cat 1 2nd"
SELECTED = {  # the rows, the options, the places of what is selected
    "the best of each": ("A ant 1, B bear -3, A cat 2, B cat -2, A dog 0", {}, [2, 3]),
    "the first of the same score": ("A ant 1, A cat 2, A dog 2", {}, [1]),
    "none that is cut or empty": (CUT, {}, [3]),
    "none that is cut or empty, with a threshold": (CUT, {"threshold": -5.0}, [3]),
    "one of equal ones": ("A ant 1, A ant_ 1, A cat 1, B ant 1", {"threshold": 0.0}, [0, 2, 3]),
    "the same words ended": ("A ant 1 cut, A ant 1", {"threshold": 0.0}, [1]),
    "of all iterations": (TWO, {"iteration": 2}, [0, 1]),
    "of the last iteration": (TWO, {"iteration": 2, "candidates": "last"}, [2]),
    "all that reach": ("A ant 0.5, A cat 0.499, A dog 0.7, B bear 0.5", {"threshold": 0.5}, [0, 2, 3]),
    "none of another prompt": ("C eel 9, A ant 1", {}, [1]),
    "no wrong answer": ("A ant 0, A cat 0, B bear 0, B dog 1", {}, [3]),
    "no wrong answer beside one that was cut": ("A ant 0, A cat 0 cut, B bear 0, B dog 1", {}, [3]),
    "the best of answers that are all right": ("A ant 1, A cat 1, B bear 0, B dog 1", {}, [0, 3]),
    "no wrong answer beside a right one that was cut": ("A ant 0, A cat 1 cut, B bear 0, B dog 1", {}, [3]),
    "the one that ended, above the lowest": ("A ant 1, A cat 2 cut, B bear 0, B dog 1", {}, [0, 3]),
    "the only response, though it is the worst": ("A ant 0, B bear 1", {}, [0, 1]),
    "by the scores of the iteration that counts": (
        "A ant 0, A cat 1, A dog 1 2nd, A eel 1 2nd, B bear 1 2nd, B dog 2 2nd",
        {"iteration": 2, "candidates": "last"},
        [5],
    ),
    "what reaches a threshold, lowest or not": ("A ant 0, A cat 0, B dog 1", {"threshold": 0.0}, [0, 1, 2]),
}


@pytest.mark.parametrize("text, options, places", SELECTED.values(), ids=SELECTED)
def test_selected_are(text, options, places):
    rows, given = rows_from(text), {"threshold": None, "iteration": 1, **options}
    threshold, iteration = given.pop("threshold"), given.pop("iteration")
    candidates = pool.candidates(rows, (A, B), iteration if given.get("candidates") == "last" else None)
    chosen, _ = rs.select(pool.responses_of(candidates, (A, B)), [r["score"] for r in candidates], threshold)
    assert [candidates[i] for i in chosen] == [rows[i] for i in places]


def test_the_message_explains_why_nothing_is_selected():
    def why_none(text, threshold):
        rows = rows_from(text)
        return rs.why_none(pool.responses_of(rows, (A, B)), [r["score"] for r in rows], 1, threshold, make_args())

    for unusable in ("A ant 9 cut", "A ant 9 cut, A '' 9", "A '' 9, A '_' 9"):
        why = why_none(unusable, None)
        assert why.startswith("iteration 1: no response can be selected: each did not end within --max-new-tokens 8, ")
    why = why_none("A ant 1.5, A cat 0.25, A dog -2, A eel 9 cut", 2.0)
    assert why.endswith("no response reaches --threshold 2: of 3 the best has 1.5, the median 0.25")
    why = why_none("A ant 0, A cat 0, B bear 0, B dog 0", None)
    assert why == "iteration 1: every response that ended has the lowest score, 0"
    why = why_none("A ant 0, A cat 1 cut, B bear 0, B dog 0", None)
    assert why == "iteration 1: every response that ended has the lowest score, 0"


# -- documents and steps -----------------------------------------------------------------
MANY = [prompt(f"copy {a} {b}") for a in tiny.ANIMALS[:5] for b in tiny.ANIMALS[:2]]


def test_a_document_is_the_prompt_and_the_ids_that_were_sampled_end_token_included():
    sampled = {**row(A, "ant cat"), "response_ids": [50, 51, END]}  # not what the text would be encoded as
    (document,) = responses.documents(pool.responses_of([sampled], [B, A]))
    assert document.ids.tolist() == [*A.ids, 50, 51, END] and document.ids.dtype == torch.int32
    assert document.response_mask.tolist() == [False] * len(A.ids) + [True] * 3
    batch = collate([[document, document]], TOKENIZER.pad_token_id)
    assert batch.input_ids[0, 1:][batch.action_mask[0]].tolist() == [50, 51, END] * 2


def nll(model, documents, without_end=False):
    """Mean loss over all response tokens, one document per row, by plain transformers."""
    parts = []
    for ids, start in documents:
        x = torch.tensor([ids[:-1] if without_end else ids])
        logits = model(input_ids=x).logits[0, start - 1 : -1]
        parts.append(F.cross_entropy(logits, x[0, start:], reduction="none"))
    return torch.cat(parts)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 64])
def test_loss_and_gradient_of_a_step_are_those_of_the_formula(packing, micro_batch_size):
    args = make_args(packing=packing, micro_batch_size=micro_batch_size, max_grad_norm=0.0)
    rows = [row(p, " ".join(tiny.ANIMALS[: 1 + i % 6])) for i, p in enumerate(MANY)]
    documents = responses.documents(pool.responses_of(rows, MANY))
    blocks, model = make_blocks(documents, args.max_length, args.packing), tiny_policy()
    assert [len(blocks) == 10, len(blocks) < 6] == [not packing, packing]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, norm = rs.update(model, optimizer, blocks, args)
    plain, both = tiny.model(), [(d.ids.tolist(), len(p.ids)) for d, p in zip(documents, MANY)]
    want = nll(plain, both)
    want.mean().backward()
    squares = sum(float(p.grad.double().square().sum()) for p in plain.parameters())
    assert loss == pytest.approx(want.mean().item(), abs=1e-5)
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-4)
    assert abs(nll(plain, both, without_end=True).mean() - want.mean()) > 1e-2  # the end token is learnt


def test_every_epoch_sees_each_block_once_in_its_own_order():
    args = make_args(packing=False, epochs=3, batch_size=4, lr_decay=0.5, warmup_ratio=0)
    parts = (MANY, MANY[:4], MANY[:4])
    stages = [responses.documents(pool.responses_of([row(p, "ant") for p in some], MANY)) for some in parts]
    plan = rs.plan_steps(stages, 1, args)
    steps = [[document.messages[0]["content"] for (document,) in blocks] for _, blocks in plan]
    assert [len(step) for step in steps] == [4, 4, 2] * 3 + [4] * 6
    passes = [sum(steps[i : i + 3], []) for i in (0, 3, 6)]
    assert [sorted(texts) for texts in passes] == [sorted(p.turns[0]["content"] for p in MANY)] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]
    other = rs.plan_steps(stages, 2, args)  # nor does another iteration repeat them
    assert [[document.messages[0]["content"] for (document,) in blocks] for _, blocks in other] != steps
    assert [plan[i][0] for i in (0, 9, 12)] == [args.lr, args.lr / 2, args.lr / 4]  # a stage lower each time
    assert rs.plan_steps([[]], 1, args) == []  # nothing was selected


# -- a version's evaluation ---------------------------------------------------------------------
@pytest.mark.parametrize("shift", [0, -10])
def test_the_chosen_temperature_has_the_best_finished_responses(monkeypatch, shift):
    """At 0.7 all end and the best of two scores 2; at 1.0 it scores 4, but never ends. Also if all scores are lower."""
    said = {0.7: [("ant", True), ("ant ant", True)], 1.0: [("", True), ("ant ant ant ant", False)]}

    def sample_responses(model, tokenizer, prompts, *, n, temperature, **options):
        return [(p, responses.Response([END], *answer)) for p in prompts for answer in said[temperature][:n]]

    monkeypatch.setattr(responses, "sample_responses", sample_responses)
    args = make_args(eval_prompts=0, sweep_prompts=2, n_samples=2, temperatures=(1.0, 0.7))
    score = lambda prompts, texts, rows: [float(len(text.split()) + shift) for text in texts]
    scorer = scorers.Scorer("words", "1", functions.Term(score))
    sweep = version_evaluation.RejectionSamplingEvaluation([A, B, C], scorer, TOKENIZER, args)
    evaluation = sweep(tiny_policy(), 0, {})
    assert evaluation["temperature"] == 0.7 and evaluation["samples"] == []
    assert [c["chosen"] for c in evaluation["curves"]] == [False, True]
    unshifted = [[x - shift for x in c["max"]] for c in evaluation["curves"]]
    assert unshifted == [[2.0, 4.0], [1.5, 2.0]]  # of 1 and of 2 responses
    assert [c["finished"] for c in evaluation["curves"]] == [0.5, 1.0]


def test_temperatures_are_compared_with_top_p_and_versions_answer_without(monkeypatch):
    asked = []

    def sample_responses(model, tokenizer, prompts, *, n=1, seed, max_new_tokens, slots, **options):
        asked.append((n, options))
        return [(p, responses.Response([END], "ant", True)) for p in prompts for _ in range(n)]

    monkeypatch.setattr(responses, "sample_responses", sample_responses)
    args = make_args(eval_prompts=2, sweep_prompts=2, n_samples=2, temperatures=(0.9, 0.7), top_p=0.8)
    version_evaluation.RejectionSamplingEvaluation([A, B], scorer_that_notes([]), TOKENIZER, args)(tiny_policy(), 0, {})
    compared = [(2, {"temperature": temperature, "top_p": 0.8}) for temperature in (0.9, 0.7)]
    assert asked == [(1, {}), *compared]


def test_versions_with_equal_weights_give_equal_samples_but_other_sweeps():
    """Their paired difference is 0, so that a gain is the training's."""
    args = make_args(eval_prompts=2, sweep_prompts=2, n_samples=4, temperatures=(1.0,))
    seen = []
    evaluate = version_evaluation.RejectionSamplingEvaluation([A, B], scorer_that_notes(seen), TOKENIZER, args)
    first, second = (evaluate(tiny_policy(), version, {}) for version in (0, 1))
    assert first["samples"] == second["samples"]
    swept = [[text for _, text in seen[start : start + 8]] for start in (2, 12)]  # after two samples each
    assert len(seen) == 20 and swept[0] != swept[1]


def test_versions_scored_by_different_scorers_are_not_compared():
    """--resume may change the scorer, and scores of different scorers cannot be compared."""
    samples = [[{"score": x} for x in scores] for scores in ((0.0, 1.0), (2.0, 2.0), (9.0, 7.0))]
    sweep = version_evaluation.RejectionSamplingEvaluation([], scorer_that_notes([]), TOKENIZER, make_args())

    def figures(*scorers):
        evaluations = [{"samples": x, "curves": [], "scorer": scorer} for x, scorer in zip(samples, scorers)]
        return sweep.metrics_of(dict(enumerate(evaluations)), 2)

    same = figures("a", "a", "a")
    assert same["eval/score_over_first"] == 7.5 and same["eval/score_over_before"] == 6.0
    assert not [key for key in figures("a", "a", "b") if "over" in key]
    over_first = {key for key in same if "over_first" in key}
    assert {key for key in figures("b", "a", "b") if "over" in key} == over_first


# -- a small run -------------------------------------------------------------------------
OPTIONS = {"scorer": GOLD, "prompts_per_iteration": PROMPTS, "n_samples": K, "iterations": 2}
OPTIONS |= {"eval_prompts": ASKED, "sweep_prompts": SWEPT, "chunk_prompts": 5, "temperatures": (0.7, 1.0)}
OPTIONS |= {"max_new_tokens": 8, "max_length": 64, "batch_size": 2, "micro_batch_size": 1, "save_every": 3}
OPTIONS |= {"epochs": 2}
ONE_STEP = {"batch_size": 100, "micro_batch_size": 100, "epochs": 1, "warmup_ratio": 0, "save_every": 0}
FILES = "args.json best_of_n.png checkpoint curves.jsonl metrics.jsonl metrics.png model pool.jsonl"
FILES += " samples.jsonl summary.json versions"
ROW = "prompt response response_ids finished iteration model temperature chunk score scorer".split()
SCORERS = """
def nan(prompts, responses, rows):
    tried = len(rows) == 2  # before the run begins
    return [float("nan") if row["split"] == "train" and not tried else 0.0 for row in rows]

def shortest(prompts, responses, rows):
    return {"words": [-float(len(response.split())) for response in responses]}
"""


def other_tokenizer():
    """The same words with other ids."""
    tokenizer = copy.deepcopy(TOKENIZER)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = backend["model"]["vocab"]
    words = [word for word in ids if not word.startswith("<|")]
    ids.update(zip(words, sorted((ids[word] for word in words), reverse=True)))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_sampled(tmp_path_factory.mktemp("small"), "sft", SCORERS, OPTIONS)


run = functools.partial(run_script, "rejection_sampling")


def run_here(small, folder, **options):
    """Run in this process, so that functions can be replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rs, "PLOTS", [])
        rs.main(rs.Args(**{**small.options, "output_dir": str(folder / "run"), **options}))


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return SimpleNamespace(folder=folder, ended=succeeds(run(small, folder, plots=True)))


def pool_of(folder, iteration=None):
    rows = read_jsonl(folder / "pool.jsonl")
    return [r for r in rows if iteration in (None, r["iteration"])]


def by_prompt(rows):
    """{prompt: {text: row}} of those that can be trained on."""
    out = collections.defaultdict(dict)
    for r in rows:
        if r["finished"] and r["response"].strip():
            out[question(r)].setdefault(r["response"].strip(), r)
    return out


def best_of(rows):
    return [max(some.values(), key=lambda r: r["score"]) for some in by_prompt(rows).values()]


def plain_nll(folder, rows):
    """Of the responses of pool rows, mean over tokens."""
    prompts = [chat.prompt_ids(TOKENIZER, r["prompt"]) for r in rows]
    documents = [(ids + r["response_ids"], len(ids)) for ids, r in zip(prompts, rows)]
    with torch.no_grad():
        return nll(AutoModelForCausalLM.from_pretrained(folder), documents).mean().item()


def test_a_run_leaves_the_whole_run_directory(small, whole):
    assert_whole_versions(whole, "rejection_sampling", FILES, small.folder / "sft" / "model")


def test_the_pool_holds_every_response_ever_sampled(small, whole):
    pool = pool_of(whole.folder)
    assert len(pool) == 2 * PROMPTS * K and all([key for key in r if key != "written"] == ROW for r in pool)
    counts = collections.Counter((r["iteration"], question(r)) for r in pool)
    assert len(counts) == 2 * PROMPTS and set(counts.values()) == {K}
    assert len({question(r) for r in pool}) == 2 * PROMPTS  # fresh prompts while there are any
    for i in (1, 2):
        numbers = [r["chunk"] for r in pool_of(whole.folder, i)]
        assert numbers == [0] * 5 * K + [1] * 5 * K + [2] * 2 * K
        model = small.folder / "sft" if i == 1 else whole.folder / "versions" / "1"
        temperature = read_json(whole.folder / f"versions/{i - 1}.json")["temperature"]
        told = {(r["model"], r["temperature"]) for r in pool_of(whole.folder, i)}
        assert told == {(str(model), temperature)}
    for r in pool:
        assert r["score"] == tiny.gold_score(question(r), r["response"]) and f"{GOLD}@" in r["scorer"]
        assert TOKENIZER.decode(r["response_ids"], skip_special_tokens=True) == r["response"]
        assert 1 <= len(r["response_ids"]) <= 8 and r["finished"] <= (r["response_ids"][-1] == END)
    assert 0.2 < sum(r["finished"] for r in pool) / len(pool)


def test_no_prompt_of_the_pool_is_held_out(small, whole, tmp_path):
    held_out = {r["prompt"] for r in read_jsonl(small.folder / "test.jsonl")}
    train = {r["prompt"] for r in read_jsonl(small.folder / "train.jsonl")}
    options = {"prompts_per_iteration": None, "iterations": 1, "n_samples": 1, "sweep_prompts": 0}
    assert "dropped 2 of 42 rows" in succeeds(run(small, tmp_path, **options)).out
    prompts = {question(r) for r in pool_of(tmp_path)}
    assert len(prompts) == 40 and prompts == train - held_out
    assert {question(r) for r in read_jsonl(whole.folder / "samples.jsonl")} <= held_out


def test_versions_are_float32_and_the_last_is_evaluated_as_exported(small, tmp_path, monkeypatch):
    assert_only_the_last_version_is_rounded(rs, {**small.options, **ONE_STEP}, tmp_path, monkeypatch)


def test_samples_and_curves_are_those_of_every_version(whole):
    samples, curves = (read_jsonl(whole.folder / f"{name}.jsonl") for name in ("samples", "curves"))
    assert len({question(s) for s in samples}) == ASKED and all(s["category"] for s in samples)
    assert all(s["score"] == tiny.gold_score(question(s), s["response"]) for s in samples)
    evaluations = {v: read_json(whole.folder / f"versions/{v}.json") for v in (0, 1, 2)}
    assert samples == [{"version": v, **s} for v in evaluations for s in evaluations[v]["samples"]]
    assert curves == [curve for evaluation in evaluations.values() for curve in evaluation["curves"]]
    for version, evaluation in evaluations.items():
        policies = {(c["policy"], c["temperature"]) for c in evaluation["curves"]}
        assert policies == {(f"version {version}", 0.7), (f"version {version}", 1.0)}
        (best,) = [c for c in evaluation["curves"] if c["chosen"]]
        assert best["temperature"] == evaluation["temperature"]
        assert best["best"] == max(c["best"] for c in evaluation["curves"])
        for c in evaluation["curves"]:
            assert len(c["max"]) == len(c["median"]) == K and c["max"] == sorted(c["max"])
            assert c["max"][0] == pytest.approx(c["median"][0])  # of one sample, both are the mean


def test_metrics_are_those_of_pool_and_samples(small, whole):
    rows, pool = read_jsonl(whole.folder / "metrics.jsonl"), pool_of(whole.folder)
    kinds = ["eval/score", "pool/rows", "loss/nll"]
    order = [next(i for i, key in enumerate(kinds) if key in r) for r in rows]
    steps = rows_of(whole.folder, "loss/nll")
    first, second = (sum(r["iteration"] == i for r in steps) for i in (1, 2))
    assert order == [0, 1, *[2] * first, 0, 1, *[2] * second, 0] and min(first, second) > 3
    assert [r["step"] for r in steps] == [*range(1, first + second + 1)]
    for i, r in enumerate(rows_of(whole.folder, "pool/rows"), 1):
        new, picked = pool_of(whole.folder, i), best_of(x for x in pool if x["iteration"] <= i)
        best = [max(new[k : k + K], key=lambda x: x["score"]) for k in range(0, len(new), K)]
        means = {"pool/score": (new, "score"), "pool/finished": (new, "finished")}
        means |= {"pool/best": (best, "score"), "pool/selected_score": (picked, "score")}
        want = {key: sum(x[column] for x in rows) / len(rows) for key, (rows, column) in means.items()}
        want |= {"pool/rows": i * PROMPTS * K, "pool/new": PROMPTS * K, "pool/selected": len(picked)}
        want |= {"pool/earlier": sum(x["iteration"] < i for x in picked) / len(picked), "iteration": i}
        assert {key: r[key] for key in want} == pytest.approx(want)
    samples = [read_json(whole.folder / f"versions/{v}.json")["samples"] for v in range(3)]
    means, evals = [sum(s["score"] for s in x) / ASKED for x in samples], rows_of(whole.folder, "eval/score")
    assert [r["eval/score"] for r in evals] == pytest.approx(means)
    assert evals[2]["eval/score_over_first"] == pytest.approx(means[2] - means[0])
    assert evals[2]["eval/score_over_before"] == pytest.approx(means[2] - means[1])
    summary = read_json(whole.folder / "summary.json")
    assert (summary["steps"], summary["pool"]) == (first + second, len(pool))
    assert summary["kl_bound"] == pytest.approx(math.log(4) - 0.75) and set(summary["versions"]) == {*"012"}
    assert summary["versions"]["2"] == without(evals[2], *PLACE)


def test_the_gold_score_is_reported_in_the_tiny_world(small, tmp_path):
    tiny_world = {"dataset": "tiny:commands=copy", "eval_dataset": None, "iterations": 1, "epochs": 1}
    succeeds(run(small, tmp_path, plots=True, **tiny_world))
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert all(s["gold"] == s["score"] and s["perfect"] == tiny.perfect_score(question(s)) for s in samples)
    last = rows_of(tmp_path, "eval/score")[-1]
    assert last["gold/score"] == last["eval/score"] and last["gold/perfect"] >= 1.0
    assert len(samples) == 2 * ASKED and len(pool_of(tmp_path)) == PROMPTS * K


def test_without_a_sweep_the_first_temperature_is_used(small, tmp_path):
    options = {"eval_prompts": 0, "sweep_prompts": 0, "iterations": 1, "temperatures": (0.9, 0.7)}
    succeeds(run(small, tmp_path, plots=True, **options))
    assert {r["temperature"] for r in pool_of(tmp_path)} == {0.9}
    assert read_jsonl(tmp_path / "samples.jsonl") == read_jsonl(tmp_path / "curves.jsonl") == []
    assert (tmp_path / "summary.json").exists()


def test_the_pool_is_sampled_at_the_temperature_that_the_evaluation_chose(small, tmp_path, monkeypatch):
    kind = version_evaluation.RejectionSamplingEvaluation
    evaluate = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *given, **named: {**evaluate(*given, **named), "temperature": 0.7})
    options = {"temperatures": (1.0, 0.7), "sweep_prompts": 0, "eval_prompts": 0, "iterations": 1, "epochs": 0.1}
    run_here(small, tmp_path, **options)
    assert {r["temperature"] for r in pool_of(tmp_path / "run")} == {0.7}


# -- what is learnt, and from where ------------------------------------------------------
def test_another_policys_responses_are_learnt_by_the_base_model(small, tmp_path):
    base, policy = small.folder / "base", small.folder / "sft"
    options = {**ONE_STEP, "iterations": 1, "eval_prompts": 0, "sweep_prompts": 0}
    run_here(small, tmp_path, model=str(base), policy=str(policy), **options)
    pool = pool_of(tmp_path / "run")
    assert {r["model"] for r in pool} == {str(policy)}
    (row,) = rows_of(tmp_path / "run", "loss/nll")
    assert row["loss/nll"] == pytest.approx(plain_nll(base, best_of(pool)), abs=1e-4)
    assert abs(plain_nll(policy / "model", best_of(pool)) - row["loss/nll"]) > 0.1


@pytest.mark.parametrize("start_from, candidates", [("base", "all"), ("last", "last"), ("base", "last")])
def test_the_loss_is_that_of_the_best_under_the_model_started_from(small, tmp_path, start_from, candidates):
    options = {**ONE_STEP, "start_from": start_from, "candidates": candidates, "prompts_per_iteration": 25}
    succeeds(run(small, tmp_path, **options))  # 25 of 40: the second iteration sees some prompts again
    base, one = small.folder / "sft" / "model", tmp_path / "versions" / "1"
    pool = pool_of(tmp_path) if candidates == "all" else pool_of(tmp_path, 2)
    picked, (first, second) = best_of(pool), rows_of(tmp_path, "loss/nll")
    assert first["loss/nll"] == pytest.approx(plain_nll(base, best_of(pool_of(tmp_path, 1))), abs=1e-4)
    losses = {name: plain_nll(folder, picked) for name, folder in (("base", base), ("last", one))}
    assert second["loss/nll"] == pytest.approx(losses[start_from], abs=1e-4)
    assert abs(losses["base"] - losses["last"]) > 1e-3
    row = rows_of(tmp_path, "pool/rows")[1]
    assert row["pool/selected"] == len(picked) and (row["pool/earlier"] > 0) == (candidates == "all")
    other = best_of(pool_of(tmp_path, 2) if candidates == "all" else pool_of(tmp_path))
    assert abs(plain_nll(base, other) - losses["base"]) > 1e-3  # the test can tell them apart


def test_thresholds_that_rise_are_fine_tunings_with_lower_learning_rates(small, tmp_path):
    options = {**ONE_STEP, "threshold": (0, 1), "lr": 1e-3, "lr_decay": 0.5, "iterations": 1}
    succeeds(run(small, tmp_path, **options))
    usable = [r for some in by_prompt(pool_of(tmp_path)).values() for r in some.values()]
    rows = [[r for r in usable if r["score"] >= tau] for tau in (0, 1)]
    tokens = [sum(len(chat.prompt_ids(TOKENIZER, r["prompt"]) + r["response_ids"]) for r in x) for x in rows]
    assert 0 < len(rows[1]) < len(rows[0]) < len(usable)
    first, second = rows_of(tmp_path, "loss/nll")
    assert [first["optim/lr"], second["optim/lr"]] == [1e-3, 5e-4]
    assert [first["data/tokens"], second["data/tokens"]] == tokens
    base = small.folder / "sft" / "model"
    assert first["loss/nll"] == pytest.approx(plain_nll(base, rows[0]), abs=1e-4)
    assert second["loss/nll"] < plain_nll(base, rows[1]) - 0.01  # it goes on from the first
    assert rows_of(tmp_path, "pool/rows")[0]["pool/selected"] == len(rows[0])


def test_an_equal_number_of_sft_rows_is_mixed_with_the_selected_ones(small, tmp_path, monkeypatch):
    drawn, plan_steps = [], rs.plan_steps

    def noted(stages, iteration, args):
        for threshold, documents in zip(args.threshold, stages):
            rows = by_prompt(r for r in pool_of(tmp_path / "run") if r["iteration"] <= iteration)
            n = sum(r["score"] >= threshold for answers in rows.values() for r in answers.values())
            assert len(documents) == 2 * n
            drawn.append([(d.messages[0]["content"], d.messages[-1]["content"]) for d in documents[n:]])
        return plan_steps(stages, iteration, args)

    monkeypatch.setattr(rs, "plan_steps", noted)
    run_here(small, tmp_path, sft_dataset=str(small.folder / "sft.jsonl"), threshold=(-9.0, 1.0))
    rows = {(r["prompt"], r["completion"]) for r in read_jsonl(small.folder / "sft.jsonl")}
    assert len(drawn) == 4 and all(set(pairs) <= rows and len(set(pairs)) == len(pairs) for pairs in drawn)
    assert all(a[: len(b)] != b[: len(a)] for a, b in zip(drawn, drawn[1:]))  # anew for each fine-tuning


def test_every_call_of_the_sampler_has_a_seed_of_its_own(small, tmp_path, monkeypatch):
    seeds, plain = [], responses.sample_responses

    def noted(*args, seed, **options):
        seeds.append(seed)
        return plain(*args, seed=seed, **options)

    monkeypatch.setattr(responses, "sample_responses", noted)
    run_here(small, tmp_path, epochs=0.1)
    # Of each version its answers, always with one seed, and two rounds of the sweep; of two iterations three chunks
    assert len(seeds) == 3 * (1 + 2) + 2 * 3 and len(set(seeds)) == 1 + 3 * 2 + 2 * 3
    run_here(small, tmp_path, overwrite=True, epochs=0.1, seed=1)
    assert len(seeds) == 30 and len(set(seeds)) == 26


def test_one_policy_at_a_time_is_in_memory(small, tmp_path, monkeypatch):
    policies, load = [], pretrained.load_policy

    def noted(*args):
        gc.collect()
        assert not [policy for policy in policies if policy() is not None]
        policy = load(*args)
        policies.append(weakref.ref(next(policy.parameters())))
        return policy

    monkeypatch.setattr(pretrained, "load_policy", noted)
    run_here(small, tmp_path, epochs=1)
    assert len(policies) == 2  # the base model, for each version, which is then studied where it is


def test_a_model_that_cannot_pack_gets_separate_rows(small, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "packs", lambda model: False)
    run_here(small, tmp_path, epochs=0.1)
    assert len(pool_of(tmp_path / "run")) == 2 * PROMPTS * K
    assert json.loads((tmp_path / "run" / "args.json").read_text())["args"]["packing"] is False


# -- distillation ------------------------------------------------------------------------
def distill(small, whole, folder, model, *more, moment=None, **options):
    teachers = {"model": model, "pool": whole.folder / "pool.jsonl", "n_samples": 0, "iterations": 1}
    return run(small, folder, *more, moment=moment, **{**teachers, **options})


def test_the_same_model_trained_on_the_pool_again_gets_the_same_weights(small, whole, tmp_path):
    moments, model = ("studied 1", "row 4", "studied 2"), small.options["model"]
    copies = [f"copy {moment}" for moment in moments]
    succeeds(distill(small, whole, tmp_path / "run", model, moment=copies))
    folders = whole.folder / "model", tmp_path / "run" / "model"
    want, got = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert pool_of(tmp_path / "run") == pool_of(whole.folder)
    files = {path.name for path in (tmp_path / "run").rglob("*")}
    assert {"1.json", "2.json", "samples.jsonl", "summary.json"} <= files and "curves.jsonl" not in files
    # Killed, it goes on to the same bits
    for moment in moments:
        folder = tmp_path / moment
        as_killed(tmp_path / "run", moment, folder)
        succeeds(distill(small, whole, folder, model, "--resume"))
        assert_same_versions(folder, tmp_path / "run", "pool.jsonl", "samples.jsonl", "summary.json")


def test_a_model_with_other_tokens_learns_the_pools_text(small, whole, tmp_path):
    own, options = other_tokenizer(), {**ONE_STEP, "lr": 1e-4}
    smaller_model(tmp_path / "small", own)
    succeeds(distill(small, whole, tmp_path / "run", tmp_path / "small", **options))
    both = []
    for r in best_of(pool_of(whole.folder)):
        ids, mask = chat.encode(own, [*r["prompt"], {"role": "assistant", "content": r["response"]}])
        both.append((ids, mask.index(True)))
        assert ids[-1] == own.eos_token_id and ids[mask.index(True)] != r["response_ids"][0]
    with torch.no_grad():
        want = nll(AutoModelForCausalLM.from_pretrained(tmp_path / "small"), both).mean().item()
    (row,) = rows_of(tmp_path / "run", "loss/nll")
    assert row["loss/nll"] == pytest.approx(want, abs=1e-4)
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_vocab() == own.get_vocab() != TOKENIZER.get_vocab()


# -- alternation: the pool and the model of an earlier run -------------------------------
def go_on(small, whole, folder, *more, moment=None, **options):
    options = {"policy": whole.folder, "pool": whole.folder / "pool.jsonl", "iterations": 1, **options}
    return run(small, folder, *more, moment=moment, **options)


def test_a_run_can_continue_from_another_runs_pool_and_model(small, whole, tmp_path):
    old = contents(whole.folder)
    succeeds(go_on(small, whole, tmp_path / "run", scorer="mine:shortest", plots=True))
    pool = pool_of(tmp_path / "run")
    assert collections.Counter(r["iteration"] for r in pool) == {1: 48, 2: 48, 3: 48}
    plain = lambda rows: [{k: v for k, v in r.items() if k not in ("score", "scorer")} for r in rows]
    assert plain(pool[:96]) == plain(pool_of(whole.folder)) and contents(whole.folder) == old
    assert {r["model"] for r in pool[96:]} == {str(whole.folder)}
    assert len({r["scorer"] for r in pool}) == 1 and pool[0]["scorer"].startswith("mine:shortest@")
    assert all(r["score"] == -len(r.get("written", r["response"]).split()) for r in pool)
    versions = {path.name for path in (tmp_path / "run" / "versions").iterdir()}
    assert versions == {"2.json", "3", "3.json"}
    assert [r["iteration"] for r in rows_of(tmp_path / "run", "pool/rows")] == [3]
    assert set(read_json(tmp_path / "run" / "summary.json")["versions"]) == {"2", "3"}


def test_a_run_that_continues_another_resumes_to_the_same_bits(small, whole, tmp_path):
    options, moments = {"scorer": "mine:shortest"}, ("studied 2", "pool 2", "studied 3")
    copies = [f"copy {moment}" for moment in moments]
    succeeds(go_on(small, whole, tmp_path / "whole", moment=copies, **options))
    assert rows_of(tmp_path / "whole", "reward/words")
    for moment in moments:
        as_killed(tmp_path / "whole", moment, tmp_path / moment)
        succeeds(go_on(small, whole, tmp_path / moment, "--resume", **options))
        assert_same_result(tmp_path / moment, tmp_path / "whole")


# -- resuming ----------------------------------------------------------------------------
def assert_same_result(folder, undisturbed):
    assert_same_versions(folder, undisturbed, "pool.jsonl", "samples.jsonl", "curves.jsonl", "summary.json")
    assert not list(folder.rglob("*.tmp"))
    assert len(list((folder / "checkpoint").glob("step_*"))) == 1


MOMENTS = [  # and what is left then: rows of the pool, checkpoint, versions
    ("pool 1", 20, None, "0.json"),  # after a chunk
    ("pool 2 and a part", 39, None, "0.json"),  # in the middle of one
    ("pool 5", 88, "step_3", "0.json 1 1.json"),
    ("scored 1", 48, None, "0.json"),
    ("row 2", 48, None, "0.json"),  # before the first checkpoint
    ("tensors 3", 48, None, "0.json"),
    ("row 4", 48, "step_3", "0.json"),
    ("export 1", 48, "step_3", "0.json 1.tmp"),
    ("version 1", 48, "step_3", "0.json 1"),
    ("studied 1", 48, "step_3", "0.json 1"),
    ("row 6", 96, "step_3", "0.json 1 1.json"),  # the checkpoint is the one of the iteration before
    ("row 9", 96, "step_7", "0.json 1 1.json"),
    ("version 2", 96, None, "0.json 1 1.json 2"),
    ("model", 96, None, "0.json 1 1.json 2 2.json"),
    ("summary", 96, None, "0.json 1 1.json 2 2.json"),
]


@pytest.fixture(scope="module")
def copied(small, tmp_path_factory):
    """The folder of a run that was copied at every moment."""
    folder = tmp_path_factory.mktemp("copied") / "run"
    succeeds(run(small, folder, moment=[f"copy {' '.join(m[0].split()[:2])}" for m in MOMENTS]))
    return folder


@pytest.mark.parametrize("moment, rows, checkpoint, versions", MOMENTS, ids=[m[0] for m in MOMENTS])
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(
    small, whole, copied, moment, rows, checkpoint, versions
):
    as_killed(copied, moment.removesuffix(" and a part"), copied)
    assert not (copied / "summary.json").exists()
    path = copied / "pool.jsonl"
    if "part" in moment:
        path.write_bytes(path.read_bytes()[:-50])
    assert len(read_jsonl(path)) == rows
    assert {p.name for p in (copied / "versions").iterdir()} == set(versions.split())
    latest = copied / "checkpoint" / "latest"
    if checkpoint or "2.json" not in versions and "2" not in versions.split():
        assert (latest.read_text() if latest.exists() else None) == checkpoint
    succeeds(run(small, copied, "--resume"))
    assert_same_result(copied, whole.folder)


def test_a_run_resumed_with_fewer_iterations_reports_the_version_that_it_exports(small, copied, tmp_path):
    as_killed(copied, "row 9", tmp_path / "run")
    assert (tmp_path / "run" / "versions" / "1.json").exists()
    succeeds(run(small, tmp_path / "run", "--resume", iterations=1))
    summary = read_json(tmp_path / "run" / "summary.json")
    assert [*summary["versions"]] == ["0", "1"]
    assert summary["steps"] == read_json(tmp_path / "run" / "versions" / "1.json")["step"]
    assert {row["version"] for row in read_jsonl(tmp_path / "run" / "samples.jsonl")} == {0, 1}


def test_a_run_with_thresholds_and_sft_rows_resumes_to_the_same_bits(small, tmp_path):
    options = {"threshold": (0, 0.5), "sft_dataset": small.folder / "sft.jsonl", "start_from": "last"}
    options |= {"candidates": "last", "lr_decay": 0.5, "epochs": 1, "save_every": 2, "iterations": 2}
    succeeds(run(small, tmp_path / "whole", **options))
    last = rows_of(tmp_path / "whole", "loss/nll")[-1]["step"]
    assert run(small, tmp_path / "killed", moment=f"row {last - 1}", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


# -- bad input ---------------------------------------------------------------------------
def test_a_failing_scorer_is_one_line_and_the_pool_can_continue_with_another(small, whole, tmp_path):
    assert_error(run(small, tmp_path, scorer="mine:nan"), "mine:nan returned nan for")
    rows = pool_of(tmp_path)
    assert len(rows) == 48 and all(r["score"] is r["scorer"] is None for r in rows)
    assert not (tmp_path / "versions" / "1").exists()
    succeeds(run(small, tmp_path, "--resume"))
    assert pool_of(tmp_path, 1) == pool_of(whole.folder, 1)


def test_an_unreachable_threshold_is_skipped_and_a_lower_one_can_resume(small, whole, tmp_path):
    ended = run(small, tmp_path, threshold=(98, 99))
    assert_error(ended, "iteration 2: no response reaches --threshold 98", "2 iteration(s) in a row")
    assert "iteration 1: no response reaches --threshold 98: of " in ended.out
    assert pool_of(tmp_path, 1) == pool_of(whole.folder, 1) and not rows_of(tmp_path, "loss/nll")
    (row,) = rows_of(tmp_path, "iterations/skipped")
    assert (row["iteration"], row["iterations/skipped"], row["pool/selected"]) == (1, 1, 0)
    first = load_file(small.folder / "sft/model/model.safetensors")
    skipped = load_file(tmp_path / "versions/1/model.safetensors")
    assert all(torch.equal(x, skipped[name]) for name, x in first.items())
    ended = succeeds(run(small, tmp_path, "--resume", threshold=(0, 99)))
    assert "resuming with another threshold" in ended.out and "reaches --threshold 99" in ended.out
    assert {r["iteration"] for r in rows_of(tmp_path, "loss/nll")} == {2} and (tmp_path / "model").exists()


@pytest.fixture(scope="module")
def bad(small):
    """A folder with the usable files and some unusable ones."""
    write_rows(small.folder / "strange.jsonl", [row(A, "ant")])
    shutil.copy(small.folder / "test.jsonl", small.folder / "same.jsonl")
    write_rows(small.folder / "long.jsonl", [{"prompt": "copy " + "ant " * 60}])
    make_scorer(small.folder / "reward model")
    smaller_model(small.folder / "other tokens", other_tokenizer())
    (small.folder / "unfinished").mkdir()
    (small.folder / "unfinished" / "args.json").write_text("{}")
    return small


BAD = [
    ({"scorer": "unfinished"}, ["unfinished", "--resume"]),
    ({"model": "reward model"}, ["reward model", "causal language model"]),
    ({"policy": "reward model"}, ["reward model", "causal language model"]),
    ({"policy": "other tokens"}, ["other tokens", "different vocabulary from --model"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"pool": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"pool": "strange.jsonl"}, ["strange.jsonl", "no usable row among its 1"]),
    ({"dataset": "same.jsonl"}, ["same.jsonl", "the prompt is in the held-out set"]),
    ({"dataset": "long.jsonl"}, ["long.jsonl:1", "longer than 56 tokens"]),
    ({"sft_dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=named)
def test_bad_input_is_reported_in_one_line(bad, tmp_path, options, words):
    assert_error(run(bad, tmp_path / "out", **options), *words)
    assert not (tmp_path / "out").exists()


LIMITS = [
    ({"threshold": (1.0, 0.0)}, ["--threshold", "rise"]),
    ({"threshold": (0.0, math.nan)}, ["--threshold", "finite"]),
    ({"temperatures": ()}, ["--temperatures", "one or more"]),
    ({"temperatures": (0.7, 0.0)}, ["--temperatures", "above 0"]),
    ({"top_p": 1.5}, ["--top-p 1.5"]),
    ({"max_length": 32}, ["--max-length 32", "more than --max-new-tokens"]),
    ({"iterations": 0}, ["--iterations 0"]),
    ({"n_samples": 0, "iterations": 1}, ["--n-samples 0", "without --pool"]),
    ({"n_samples": 0, "pool": "pool.jsonl"}, ["--n-samples 0", "--iterations 1"]),
]


@pytest.mark.parametrize("options, words", LIMITS, ids=named)
def test_numbers_out_of_range_are_named_before_anything_is_loaded(options, words):
    with pytest.raises(InputError) as error:
        rs.check(rs.Args(**options))
    assert all(word in str(error.value) for word in words)


# -- recipes -----------------------------------------------------------------------------
def test_recipes_have_the_papers_numbers():
    assert list(rs.RECIPES) == ["tiny", "base", "large", "llama2", "rest"] and rs.RECIPES["tiny"][1] == rs.Args()
    args = parse(rs.RECIPES, ["llama2"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (2e-5, 64, 4096, 2.0)
    assert (args.weight_decay, args.iterations, args.threshold) == (0.1, 4, ())
    assert (args.candidates, args.start_from, args.prompts_per_iteration) == ("all", "base", None)
    assert 10 <= args.n_samples <= 100 and {1.2, 1.3} <= set(args.temperatures)
    args = parse(rs.RECIPES, ["rest"])
    assert args.threshold == (0.0, 0.5, 1.0) and args.lr_decay == 0.5 and args.sft_dataset == "tiny"
    assert (args.candidates, args.start_from, args.output_dir) == ("last", "last", "runs/rest")
