"""rejection_sampling.py in one process: its parts, what a run leaves behind, the variants, resuming, and bad
input."""

import collections
import json
import math
import shutil
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, flags
from safetensors.torch import load_file
from scorers import (
    CPU,
    TOKENIZER,
    A,
    B,
    C,
    Plain,
    assert_error,
    assert_only_the_last_version_is_rounded,
    assert_same_versions,
    contents,
    in_bfloat16,
    make_scorer,
    named,
    prompt,
    question,
    read_json,
    row,
    rows_of,
    scorer_that_notes,
    smaller_model,
    succeeds,
    write_rows,
)
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import rejection_sampling as rs
from common import data, generate, metrics, models, pool, tiny
from common.batches import collate, make_blocks
from common.errors import InputError
from common.metrics import read_jsonl
from common.run import parse

GOLD = "common.tiny:gold_scorer"
K, PROMPTS, ASKED, SWEPT = 4, 12, 6, 3
END = TOKENIZER.eos_token_id


# -- parts: what they are given ----------------------------------------------------------
def make_args(**options):
    return rs.Args(**{"max_new_tokens": 8, "max_length": 64, "scorer": GOLD, **options})


def texts(rows):
    return [r["response"] for r in rows]


def chosen(pool, threshold=None, iteration=1, prompts=(A, B), **options):
    return rs.select(pool, prompts, iteration, threshold, make_args(**options))


# -- select ------------------------------------------------------------------------------
def test_the_best_response_of_each_prompt_is_selected():
    pool = [
        row(A, "ant", 1.0),
        row(B, "bear", -3.0),
        row(A, "cat", 2.0),
        row(B, "cat", -2.0),
        row(A, "dog", 0),
    ]
    assert chosen(pool) == [pool[2], pool[3]]  # B's best is worse than A's worst


def test_of_responses_with_the_same_score_the_first_is_selected():
    assert texts(chosen([row(A, "ant", 1.0), row(A, "cat", 2.0), row(A, "dog", 2.0)])) == ["cat"]


def test_unfinished_and_empty_responses_are_never_selected():
    bad = [row(A, "ant", 9.0, finished=False), row(A, "", 9.0), row(A, " ", 9.0)]
    pool = [*bad, row(A, "cat", -1.0), row(B, "dog", 9.0, finished=False)]
    assert texts(chosen(pool)) == ["cat"] == texts(chosen(pool, threshold=-5.0))
    assert chosen(bad) == [] == chosen(bad, threshold=0.0)
    why = rs.why_none(bad, (A, B), 1, None, make_args())
    assert why == "iteration 1: no response ended within --max-new-tokens 8"


def test_of_equal_responses_to_a_prompt_one_counts():
    pool = [row(A, "ant", 1.0, chunk=7), row(A, "ant ", 1.0), row(A, "cat", 1.0), row(B, "ant", 1.0)]
    assert chosen(pool, threshold=0.0) == [pool[0], pool[2], pool[3]]


def test_a_cut_response_does_not_stand_in_for_the_same_words_ended():
    pool = [row(A, "ant", 1.0, finished=False), row(A, "ant", 1.0)]
    assert chosen(pool, threshold=0.0) == [pool[1]]


def test_candidates_are_those_of_all_iterations_or_of_the_last():
    pool = [row(A, "ant", 5.0), row(B, "bear", 5.0), row(A, "cat", 1.0, 2)]
    assert texts(chosen(pool, iteration=2)) == ["ant", "bear"]
    assert texts(chosen(pool, iteration=2, candidates="last")) == ["cat"]


def test_a_threshold_keeps_all_that_reach_it():
    pool = [
        row(A, "ant", 0.5),
        row(A, "cat", 0.49999),
        row(A, "dog", 0.7),
        row(B, "bear", 0.5),
        row(B, "eel", 0),
    ]
    assert texts(chosen(pool, threshold=0.5)) == ["ant", "dog", "bear"]
    assert len(chosen(pool, threshold=-1.0)) == 5 and texts(chosen(pool, threshold=0.7)) == ["dog"]


def test_of_a_threshold_that_nothing_reaches_best_and_median_are_told():
    pool = [row(A, "ant", 1.5), row(A, "cat", 0.25), row(A, "dog", -2.0), row(A, "eel", 9, finished=False)]
    assert chosen(pool, threshold=2.0) == []
    why = rs.why_none(pool, (A, B), 1, 2.0, make_args())
    assert why.endswith("no response reaches --threshold 2: of 3 the best has 1.5, the median 0.25")


def test_a_row_of_a_prompt_that_is_not_in_the_set_is_never_selected():
    pool = [row(C, "eel", 9.0, scorer=None), row(A, "ant", 1.0)]
    assert texts(chosen(pool)) == ["ant"] == texts(chosen(pool, threshold=0.0))


# -- prompts and chunks ------------------------------------------------------------------
MANY = [prompt(f"copy {a} {b}") for a in tiny.ANIMALS[:5] for b in tiny.ANIMALS[:2]]


def keys(prompts):
    return [p.key for p in prompts]


def rounds(n, count, **options):
    return [
        keys(generate.fresh_prompts(MANY, n or len(MANY), i, options.get("seed", 0)))
        for i in range(1, count + 1)
    ]


def test_prompts_are_fresh_until_the_set_is_used_up_and_then_in_another_order():
    one, two, three, four = rounds(5, 4)
    assert sorted(one + two) == sorted(three + four) == sorted(keys(MANY)) and one + two != three + four
    assert one + two != keys(MANY) and rounds(5, 4) == [one, two, three, four] != rounds(5, 4, seed=1)


def test_prompts_that_do_not_fill_a_round_begin_the_next_one_and_none_is_dropped():
    one, two, three, four, five = rounds(4, 5)  # 20 places: two passes of 10
    left = set(keys(MANY)) - {*one, *two}
    assert set(three[:2]) == left and all(len(set(some)) == 4 for some in (one, two, three, four, five))
    assert sorted(three[2:] + four + five) == sorted(keys(MANY))  # the second pass, whole


def test_without_a_number_or_with_too_large_a_one_a_round_has_all_prompts():
    for n in (None, 99):
        assert [sorted(some) for some in rounds(n, 3)] == [sorted(keys(MANY))] * 3


# -- an earlier run's pool ---------------------------------------------------------------
def test_a_pool_without_the_column_of_scores_is_an_error_that_names_it(tmp_path):
    bare = {key: value for key, value in row(A, "ant").items() if key not in ("score", "scorer")}
    path = write_rows(tmp_path / "pool.jsonl", [bare])
    with pytest.raises(InputError, match="lacks a column of .*scorer"):
        rs.take_pool(path, [A], TOKENIZER)


def test_a_pool_of_other_prompts_is_an_error_and_of_some_it_is_said(tmp_path, capsys):
    path = write_rows(tmp_path / "pool.jsonl", [row(A, "ant"), row(C, "eel"), row(C, "dog"), row(B, "bear")])
    assert len(rs.take_pool(path, [A, B, C], TOKENIZER)) == 4 and capsys.readouterr().out == ""
    assert len(rs.take_pool(path, [A, B], TOKENIZER)) == 4
    assert "2 of 4 rows answer prompts that are not in --dataset" in capsys.readouterr().out
    with pytest.raises(InputError, match="none of its 4 rows"):
        rs.take_pool(path, [prompt("copy toad")], TOKENIZER)
    path.write_text("")
    with pytest.raises(InputError, match="none of its 0 rows"):
        rs.take_pool(path, [A], TOKENIZER)


def test_ids_of_another_tokenizer_are_encoded_anew(tmp_path, capsys):
    right = [row(A, "ant cat"), row(A, "ant", finished=False), row(B, "bear")]
    wrong = [{**r, "response_ids": r["response_ids"][::-1] + [9, 9]} for r in right[:2]] + right[2:]
    path = write_rows(tmp_path / "pool.jsonl", wrong)
    assert (
        rs.take_pool(path, [A, B], TOKENIZER) == right
    )  # an end token for what had ended, for the other none
    assert "2 responses were written in other tokens, encoded anew" in capsys.readouterr().out


# -- documents and steps -----------------------------------------------------------------
def test_a_document_is_the_prompt_and_the_ids_that_were_sampled_end_token_included():
    sampled = {**row(A, "ant cat"), "response_ids": [50, 51, END]}  # not what the text would be encoded as
    (document,) = rs.make_documents([sampled], [B, A], TOKENIZER, make_args())
    assert document.ids.tolist() == [*A.ids, 50, 51, END] and document.ids.dtype == torch.int32
    assert document.response_mask.tolist() == [False] * len(A.ids) + [True] * 3
    assert document.messages == [*A.turns, {"role": "assistant", "content": "ant cat"}]
    batch = collate([[document, document]], TOKENIZER.pad_token_id)
    assert batch.input_ids[0, 1:][batch.action_mask[0]].tolist() == [50, 51, END] * 2


def test_a_student_learns_the_text_in_its_own_tokens():
    sampled = {**row(A, "ant cat"), "response_ids": [50, 51, END]}
    (document,) = rs.make_documents([sampled], [A], TOKENIZER, make_args(student="other"))
    assert document.ids.tolist() == [*A.ids, *row(A, "ant cat")["response_ids"]]
    assert document.response_mask.sum() == 3


def test_a_document_that_is_too_long_is_dropped_and_named(capsys):
    rows, long = [row(A, "ant"), row(B, "bear " * 8)], len(B.ids) + 9
    assert len(rs.make_documents(rows, [A, B], TOKENIZER, make_args(max_length=long))) == 2
    assert len(rs.make_documents(rows, [A, B], TOKENIZER, make_args(max_length=long - 1))) == 1
    out = capsys.readouterr().out
    assert "dropped 1 of 2 rows" in out and f"longer than {long - 1} tokens" in out and "prompts:2" in out
    with pytest.raises(InputError, match="none of 2 selected responses can be trained on: longer than 3"):
        rs.make_documents(rows, [A, B], TOKENIZER, make_args(max_length=3))


def nll(model, documents, without_end=False):
    """Mean over all response tokens, each document in a row of its own, by plain transformers."""
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
    documents = rs.make_documents(rows, MANY, TOKENIZER, args)
    blocks, model = (
        make_blocks(documents, args.max_length, args.packing),
        pool.load("tiny", TOKENIZER, args, CPU),
    )
    assert [len(blocks) == 10, len(blocks) < 6] == [not packing, packing]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss, norm = rs.update(model, optimizer, blocks, TOKENIZER.pad_token_id, args, CPU)
    plain, both = tiny.model(), [(d.ids.tolist(), len(p.ids)) for d, p in zip(documents, MANY)]
    want = nll(plain, both)
    want.mean().backward()
    squares = sum(float(p.grad.double().square().sum()) for p in plain.parameters())
    assert loss == pytest.approx(want.mean().item(), abs=1e-5)
    assert norm == pytest.approx(math.sqrt(squares), rel=1e-4)
    assert abs(nll(plain, both, without_end=True).mean() - want.mean()) > 1e-2  # the end token is learnt


# -- a small run -------------------------------------------------------------------------
OPTIONS = {"scorer": GOLD, "prompts_per_iteration": PROMPTS, "n_samples": K, "iterations": 2}
OPTIONS |= {"eval_prompts": ASKED, "sweep_prompts": SWEPT, "chunk_prompts": 5, "temperatures": (0.7, 1.0)}
OPTIONS |= {"max_new_tokens": 8, "max_length": 64, "batch_size": 2, "micro_batch_size": 1, "save_every": 3}
OPTIONS |= {"epochs": 2}
ONE_STEP = {"batch_size": 100, "micro_batch_size": 100, "epochs": 1, "warmup_ratio": 0, "save_every": 0}
FILES = "args.json best_of_n.png checkpoint curves.jsonl metrics.jsonl metrics.png model pool.jsonl"
FILES = {*FILES.split(), "samples.jsonl", "summary.json", "versions"}
ROW = "prompt response response_ids finished iteration model temperature chunk score scorer".split()
CLOCK = ("time_s", "perf/sample_s", "perf/score_s", "perf/tokens_per_s")
SCORERS = """
def of_training(wrong):
    def scorer(prompts, responses, rows):
        train = any(row["split"] == "train" for row in rows)
        return wrong(responses) if train else [0.0] * len(responses)
    return scorer

def boom(responses):
    raise KeyError("boom")

nan = of_training(lambda responses: [float("nan")] * len(responses))
raises = of_training(boom)
few = of_training(lambda responses: [0.0] * (len(responses) - 1))
text = of_training(lambda responses: ["good"] * len(responses))

def shortest(prompts, responses, rows):
    return [-float(len(response.split())) for response in responses]
"""


def other_tokenizer():
    """The same words with other ids."""
    backend = json.loads(TOKENIZER.backend_tokenizer.to_str())
    words = backend["model"]["vocab"]
    order = [word for word in words if not word.startswith("<|")]
    words |= dict(zip(order, sorted((words[word] for word in order), reverse=True)))
    names = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|end|>", "unk_token": "<|unk|>"}
    special = ["<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), extra_special_tokens=special, **names
    )
    tokenizer.chat_template = tiny.CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with prompts, of which two are held out too, SFT rows, scorers and a model that ends its
    responses; flags for a run on them that takes a second."""
    folder, asked = tmp_path_factory.mktemp("small"), tiny.rows("prompts", "test")[:10]
    train = [*tiny.rows("prompts", "train")[:40], *asked[:2]]
    write_rows(folder / "train.jsonl", [{"prompt": r["prompt"], "split": "train"} for r in train])
    write_rows(folder / "test.jsonl", [{**r, "split": "test"} for r in asked])
    write_rows(folder / "sft.jsonl", tiny.rows("sft", "train")[:400])
    smaller_model(folder / "base")
    (folder / "mine.py").write_text(SCORERS)
    some = {
        "max_length": 64,
        "batch_size": 8,
        "micro_batch_size": 8,
        "max_steps": 60,
        "lr": 1e-2,
        "epochs": 9,
    }
    some |= {
        "model": folder / "base",
        "sample_prompts": 0,
        "save_every": 0,
        "eval_every": 0,
        "output_dir": folder / "sft",
    }
    succeeds(processes.script("sft", *flags(dataset=folder / "sft.jsonl", **some), plots=False))
    options = {
        "model": folder / "sft",
        "dataset": folder / "train.jsonl",
        "eval_dataset": folder / "test.jsonl",
    }
    return SimpleNamespace(folder=folder, options={**OPTIONS, **{k: str(v) for k, v in options.items()}})


def run(small, folder, *more, moment=None, plots=False, **options):
    given = {**small.options, "output_dir": folder, **options}
    given = flags(**{key: value for key, value in given.items() if value is not None})
    return processes.script("rejection_sampling", *given, *more, moment=moment, cwd=small.folder, plots=plots)


def without_plots(monkeypatch):
    for name in ("plot_metrics", "plot_best_of_n"):
        monkeypatch.setattr(metrics, name, lambda *_: None)


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


def documents_of(rows):
    return [
        (data.prompt_ids(TOKENIZER, r["prompt"]) + r["response_ids"], -len(r["response_ids"])) for r in rows
    ]


def plain_nll(folder, rows):
    """Of the responses of pool rows, mean over tokens."""
    model, both = AutoModelForCausalLM.from_pretrained(folder), documents_of(rows)
    with torch.no_grad():
        return nll(model, [(ids, len(ids) + start) for ids, start in both]).mean().item()


def test_a_run_leaves_the_whole_run_directory(small, whole):
    folder = whole.folder
    assert {path.name for path in folder.iterdir()} == FILES
    assert {path.name for path in (folder / "versions").iterdir()} == {"0.json", "1", "1.json", "2", "2.json"}
    for name in ("metrics.png", "best_of_n.png"):
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    written = read_json(folder / "args.json")
    assert written["stage"] == "rejection_sampling" and written["args"]["n_samples"] == K
    assert "best of 4: at most 0.64 nats" in whole.ended.out  # log 4 - 3/4
    assert f"wrote {folder}/model" in whole.ended.out and "version 2:" in whole.ended.out
    summary = folder / "summary.json"
    others = [path for path in folder.rglob("*") if path.is_file() and path != summary]
    assert all(path.stat().st_mtime_ns <= summary.stat().st_mtime_ns for path in others)


def test_the_pool_holds_every_response_ever_sampled(small, whole):
    pool = pool_of(whole.folder)
    assert len(pool) == 2 * PROMPTS * K and all(list(r) == ROW for r in pool)
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
        assert r["score"] == tiny.gold_score(question(r), r["response"]) and r["scorer"].startswith(
            f"{GOLD}@"
        )
        assert TOKENIZER.decode(r["response_ids"], skip_special_tokens=True) == r["response"]
        assert 1 <= len(r["response_ids"]) <= 8 and r["finished"] <= (r["response_ids"][-1] == END)
    assert 0.2 < sum(r["finished"] for r in pool) / len(pool)


def test_no_prompt_of_the_pool_is_held_out(small, whole, tmp_path):
    held_out = {r["prompt"] for r in read_jsonl(small.folder / "test.jsonl")}
    train = [r["prompt"] for r in read_jsonl(small.folder / "train.jsonl")]
    options = {
        "prompts_per_iteration": None,
        "iterations": 1,
        "n_samples": 1,
        "max_new_tokens": 6,
        "epochs": 1,
    }
    ended = succeeds(run(small, tmp_path / "all", sweep_prompts=0, **options))
    assert "dropped 2 of 42 rows" in ended.out and "held-out" in ended.out
    asked = {question(r) for r in pool_of(tmp_path / "all")}
    assert len(asked) == 40 and asked == set(train) - held_out
    assert {question(r) for r in read_jsonl(whole.folder / "samples.jsonl")} <= held_out
    # without --eval-dataset 5 % of the 42 are held out
    succeeds(run(small, tmp_path / "share", eval_dataset=None, sweep_prompts=0, **options))
    asked, samples = pool_of(tmp_path / "share"), read_jsonl(tmp_path / "share" / "samples.jsonl")
    assert len(asked) == 40 and {question(r) for r in asked} == set(train) - {question(r) for r in samples}
    assert len(samples) == 2 * 2  # of two versions


def test_the_saved_models_load_in_plain_transformers_and_differ(small, whole):
    folders = (
        small.folder / "sft/model",
        *(whole.folder / name for name in ("versions/1", "versions/2", "model")),
    )
    base, one, two, final = (load_file(folder / "model.safetensors") for folder in folders)
    assert set(base) == set(one) == set(two) == set(final)
    assert all(torch.equal(two[name], final[name]) for name in two)
    assert not [
        name for name in base if torch.equal(base[name], one[name]) or torch.equal(one[name], two[name])
    ]
    model, tokenizer = (x.from_pretrained(folders[-1]) for x in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model) is LlamaForCausalLM and tokenizer.get_vocab() == TOKENIZER.get_vocab()
    ids = tokenizer.apply_chat_template(
        A.turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert ids["input_ids"][0].tolist() == A.ids and model.generate(**ids, max_new_tokens=4).shape[0] == 1


def test_from_bfloat16_versions_are_float32_and_the_last_one_is_studied_as_exported(
    small, tmp_path, monkeypatch
):
    source = in_bfloat16(models.find_model(small.options["model"]), tmp_path / "source")
    options = {**small.options, "model": str(source), "output_dir": str(tmp_path / "run"), **ONE_STEP}
    without_plots(monkeypatch)
    assert_only_the_last_version_is_rounded(rs, rs.Args(**options), monkeypatch)


def test_samples_and_curves_are_those_of_every_version(whole):
    samples, curves = (read_jsonl(whole.folder / f"{name}.jsonl") for name in ("samples", "curves"))
    assert [s["version"] for s in samples] == [v for v in (0, 1, 2) for _ in range(ASKED)]
    assert len({question(s) for s in samples}) == ASKED and all(s["category"] for s in samples)
    assert all(s["score"] == tiny.gold_score(question(s), s["response"]) for s in samples)
    assert [(c["policy"], c["temperature"]) for c in curves] == [
        (f"version {v}", t) for v in (0, 1, 2) for t in (0.7, 1.0)
    ]
    for version in (0, 1, 2):
        study, mine = read_json(whole.folder / f"versions/{version}.json"), curves[2 * version :][:2]
        assert study["samples"] == [
            {k: v for k, v in s.items() if k != "version"} for s in samples if s["version"] == version
        ]
        (best,) = [c for c in mine if c["chosen"]]
        assert best["temperature"] == study["temperature"] and best["best"] == max(c["best"] for c in mine)
        for c in mine:
            assert len(c["max"]) == len(c["median"]) == K and c["max"] == sorted(c["max"])
            assert c["max"][0] == pytest.approx(c["median"][0])  # of one sample, both are the mean
            assert 0 <= c["finished"] <= 1


def test_the_temperature_is_the_one_whose_responses_that_ended_are_best(monkeypatch):
    """At 0.7 all end and the best of two scores 2; at 1.0 it scores 4, but never ends."""
    said = {0.7: [("ant", True), ("ant ant", True)], 1.0: [("", True), ("ant ant ant ant", False)]}

    def answers(model, tokenizer, prompts, n, max_new_tokens, temperature, *_):
        return [[generate.Response([END], *some) for some in said[temperature][:n]] for _ in prompts]

    monkeypatch.setattr(generate, "sample_responses", answers)
    args = make_args(eval_prompts=0, sweep_prompts=2, n_samples=2, temperatures=(1.0, 0.7))
    model = pool.load("tiny", TOKENIZER, args, CPU)
    found = rs.study(model, TOKENIZER, [A, B, C], scorer_that_notes([]), 0, args, CPU)
    assert found["temperature"] == 0.7 and found["samples"] == []
    assert [c["max"] for c in found["curves"]] == [[2.0, 4.0], [1.5, 2.0]]  # of 1 and of 2 responses
    assert [c["finished"] for c in found["curves"]] == [0.5, 1.0]


def test_versions_that_other_scorers_scored_are_not_compared():
    """--resume may bring another scorer, whose scores say nothing beside the first one's."""
    samples = [[{"score": x} for x in some] for some in ((0.0, 1.0), (2.0, 2.0), (9.0, 7.0))]
    of = lambda *scorers: {
        v: {"samples": rows, "curves": [], "temperature": 1.0, "scorer": scorer}
        for v, (rows, scorer) in enumerate(zip(samples, scorers))
    }
    same = rs.figures(of("a", "a", "a"), 2)
    assert same["eval/score_over_first"] == 7.5 and same["eval/score_over_before"] == 6.0
    assert not [key for key in rs.figures(of("a", "a", "b"), 2) if "over" in key]
    assert {key for key in rs.figures(of("b", "a", "b"), 2) if "over" in key} == {
        key for key in same if "over_first" in key
    }


def test_the_figures_are_those_of_pool_and_samples(small, whole):
    rows, pool = read_jsonl(whole.folder / "metrics.jsonl"), pool_of(whole.folder)
    kinds = ["eval/score", "pool/rows", "loss/nll"]
    order = [next(i for i, key in enumerate(kinds) if key in r) for r in rows]
    steps = [rows_of(whole.folder, "loss/nll")]
    first, second = (sum(r["iteration"] == i for r in steps[0]) for i in (1, 2))
    assert order == [0, 1, *[2] * first, 0, 1, *[2] * second, 0] and min(first, second) > 3
    assert [r["step"] for r in steps[0]] == [*range(1, first + second + 1)]
    assert all(math.isfinite(v) for r in rows for v in r.values())
    for i, r in enumerate(rows_of(whole.folder, "pool/rows"), 1):
        new, so_far = pool_of(whole.folder, i), [x for x in pool if x["iteration"] <= i]
        best = collections.defaultdict(lambda: -math.inf)
        for x in new:
            best[question(x)] = max(best[question(x)], x["score"])
        picked = best_of(so_far)
        want = {"pool/rows": len(so_far), "pool/new": PROMPTS * K, "pool/selected": len(picked)}
        want |= {"pool/finished": sum(x["finished"] for x in new) / len(new)}
        want |= {"pool/score": sum(x["score"] for x in new) / len(new)}
        want |= {"pool/best": sum(best.values()) / PROMPTS, "pool/temperature": new[0]["temperature"]}
        want |= {"pool/selected_score": sum(x["score"] for x in picked) / len(picked)}
        want |= {"pool/earlier": sum(x["iteration"] < i for x in picked) / len(picked)}
        assert {key: r[key] for key in want} == pytest.approx(want) and r["iteration"] == i
    scores = [
        [s["score"] for s in read_json(whole.folder / f"versions/{v}.json")["samples"]] for v in range(3)
    ]
    means = [sum(x) / ASKED for x in scores]
    evals = rows_of(whole.folder, "eval/score")
    assert [r["eval/score"] for r in evals] == pytest.approx(means)
    assert "eval/score_over_first" not in evals[0]
    assert evals[2]["eval/score_over_first"] == pytest.approx(means[2] - means[0])
    assert evals[2]["eval/score_over_before"] == pytest.approx(means[2] - means[1])
    summary = read_json(whole.folder / "summary.json")
    assert (summary["steps"], summary["pool"]) == (first + second, len(pool))
    assert summary["kl_bound"] == pytest.approx(math.log(4) - 0.75) and set(summary["versions"]) == {*"012"}
    plain = {key: value for key, value in evals[2].items() if key not in ("step", "iteration", "time_s")}
    assert summary["versions"]["2"] == plain and summary["categories"][0]["prompts"] == ASKED


def test_on_the_tiny_world_the_gold_score_is_told_too(small, tmp_path):
    tiny_world = {"dataset": "tiny", "eval_dataset": None, "iterations": 1, "epochs": 1}
    succeeds(run(small, tmp_path, plots=True, **tiny_world))
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert all(s["gold"] == s["score"] and s["perfect"] == tiny.perfect_score(question(s)) for s in samples)
    last = rows_of(tmp_path, "eval/score")[-1]
    assert last["gold/score"] == last["eval/score"] and last["gold/perfect"] >= 1.0
    assert len(samples) == 2 * ASKED and len(pool_of(tmp_path)) == PROMPTS * K


def test_without_studies_the_first_temperature_is_used(small, tmp_path):
    options = {"eval_prompts": 0, "sweep_prompts": 0, "iterations": 1, "temperatures": (0.9, 0.7)}
    succeeds(run(small, tmp_path, plots=True, **options))
    assert {r["temperature"] for r in pool_of(tmp_path)} == {0.9}
    assert read_jsonl(tmp_path / "samples.jsonl") == read_jsonl(tmp_path / "curves.jsonl") == []
    assert not (tmp_path / "best_of_n.png").exists() and (tmp_path / "summary.json").exists()


# -- what is learnt, and from where ------------------------------------------------------
@pytest.mark.parametrize("start_from, candidates", [("base", "all"), ("last", "last"), ("base", "last")])
def test_the_loss_is_that_of_the_best_responses_under_the_model_started_from(
    small, tmp_path, start_from, candidates
):
    options = {**ONE_STEP, "start_from": start_from, "candidates": candidates, "prompts_per_iteration": 30}
    succeeds(run(small, tmp_path, **options))  # 30 of 40: the second iteration sees some prompts again
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
    tokens = [sum(len(ids) for ids, _ in documents_of(some)) for some in rows]
    assert 0 < len(rows[1]) < len(rows[0]) < len(usable)
    first, second = rows_of(tmp_path, "loss/nll")
    assert [first["optim/lr"], second["optim/lr"]] == [1e-3, 5e-4]
    assert [first["data/tokens"], second["data/tokens"]] == tokens
    base = small.folder / "sft" / "model"
    assert first["loss/nll"] == pytest.approx(plain_nll(base, rows[0]), abs=1e-4)
    assert second["loss/nll"] < plain_nll(base, rows[1]) - 0.01  # it goes on from the first
    assert rows_of(tmp_path, "pool/rows")[0]["pool/selected"] == len(rows[0])


def captured(small, folder, monkeypatch, **options):
    """[(start, [documents of each stage])] of each iteration of a run in this process that learns nothing."""
    seen = []

    def fine_tune(start, stages, tokenizer, iteration, log, step, *_):
        seen.append((start, stages))
        shutil.copytree(models.find_model(start), folder / "versions" / str(iteration))
        return step + 1

    monkeypatch.setattr(rs, "fine_tune", fine_tune)
    without_plots(monkeypatch)
    rs.main(rs.Args(**{**small.options, "output_dir": str(folder), **options}))
    return seen


def test_as_many_rows_of_the_sft_dataset_are_learnt_beside_the_selected_ones(small, tmp_path, monkeypatch):
    data_set = str(small.folder / "sft.jsonl")
    seen = captured(small, tmp_path / "run", monkeypatch, sft_dataset=data_set, threshold=(-9.0, 1.0))
    rows = {(r["prompt"], r["completion"]) for r in read_jsonl(data_set)}
    drawn = []
    for number, (_, stages) in enumerate(seen, 1):
        assert len(stages) == 2
        for tau, documents in zip((-9.0, 1.0), stages):
            some = by_prompt(r for r in pool_of(tmp_path / "run") if r["iteration"] <= number)
            n = sum(r["score"] >= tau for of_one in some.values() for r in of_one.values())
            said = [(d.messages[0]["content"], d.messages[-1]["content"]) for d in documents]
            assert len(said) == 2 * n and set(said[n:]) <= rows and len(set(said[n:])) == n
            assert all(text in some[asked] for asked, text in said[:n])
            assert all(d.ids[d.response_mask].tolist()[-1] == END for d in documents)
            drawn.append(said[n:])
    assert all(a[: len(b)] != b[: len(a)] for a, b in zip(drawn, drawn[1:]))  # anew for each fine-tuning


def test_a_student_learns_what_the_policy_always_samples(small, tmp_path, monkeypatch):
    student = str(smaller_model(tmp_path / "student", seed=5))
    seen = captured(small, tmp_path / "run", monkeypatch, student=student)
    pool = pool_of(tmp_path / "run")
    assert {r["model"] for r in pool} == {small.options["model"]} and len(pool) == 2 * PROMPTS * K
    assert [start for start, _ in seen] == [student] * 2
    got = [(d.messages[0]["content"], d.messages[-1]["content"]) for d in seen[1][1][0]]
    assert sorted(got) == sorted((question(r), r["response"]) for r in best_of(pool))
    studies = [read_json(tmp_path / f"run/versions/{v}.json") for v in (0, 1)]
    assert max(s["tokens"] for s in studies[0]["samples"]) == 8  # the student's: it does not end yet
    assert sum(r["finished"] for r in pool) > 2 * sum(c["finished"] for c in studies[0]["curves"])


def test_for_a_student_the_policys_own_temperature_is_used(small, tmp_path, monkeypatch):
    def study(model, tokenizer, held_out, scorer, version, *_):
        return {"samples": [], "curves": [], "temperature": 0.6 if version == "teacher" else 0.9}

    monkeypatch.setattr(rs, "study", study)
    captured(small, tmp_path / "own", monkeypatch, student=str(small.folder / "base"))
    captured(small, tmp_path / "plain", monkeypatch)
    used = [{r["temperature"] for r in pool_of(tmp_path / name)} for name in ("own", "plain")]
    assert used == [{0.6}, {0.9}]


def test_every_call_of_the_sampler_has_a_seed_of_its_own(small, tmp_path, monkeypatch):
    seeds, plain = [], generate.sample_responses

    def noted(model, tokenizer, prompts, n, max_new_tokens, temperature, seed, *more):
        seeds.append(seed)
        return plain(model, tokenizer, prompts, n, max_new_tokens, temperature, seed, *more)

    monkeypatch.setattr(generate, "sample_responses", noted)
    captured(small, tmp_path / "run", monkeypatch)
    assert len(seeds) == 3 * (1 + 2) + 2 * 3 == len(set(seeds))  # of each version three rounds; three chunks
    captured(small, tmp_path / "again", monkeypatch, seed=1)
    assert len(set(seeds)) == len(seeds) == 30


def test_every_block_is_learnt_once_in_each_pass_and_each_pass_has_another_order(tmp_path, monkeypatch):
    args, seen = make_args(packing=False, epochs=3, batch_size=4, output_dir=str(tmp_path), save_every=0), []

    def update(model, optimizer, blocks, *_):
        seen.append([document.messages[0]["content"] for (document,) in blocks])
        return 1.0, 1.0

    monkeypatch.setattr(rs, "update", update)
    documents = rs.make_documents([row(p, "ant") for p in MANY], MANY, TOKENIZER, args)
    log, want = metrics.Metrics(tmp_path), sorted(p.turns[0]["content"] for p in MANY)
    assert rs.fine_tune("tiny", [documents], TOKENIZER, 1, log, 5, args, CPU) == 5 + 9
    assert [len(batch) for batch in seen] == [4, 4, 2] * 3
    passes = [[text for batch in seen[i : i + 3] for text in batch] for i in (0, 3, 6)]
    assert [sorted(texts) for texts in passes] == [want] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert [r["step"] for r in rows_of(tmp_path, "loss/nll")] == [*range(6, 15)]
    assert (tmp_path / "versions" / "1" / "config.json").exists()


def test_a_model_that_cannot_be_packed_is_refused_before_anything_is_sampled(small, tmp_path, monkeypatch):
    def refuse(model):
        raise InputError("use --no-packing")

    monkeypatch.setattr(models, "check_packing", refuse)
    with pytest.raises(InputError, match="--no-packing"):
        captured(small, tmp_path / "run", monkeypatch)
    assert not (tmp_path / "run").exists()
    captured(small, tmp_path / "run", monkeypatch, packing=False)
    assert len(pool_of(tmp_path / "run")) == 2 * PROMPTS * K


def test_a_student_with_other_tokens_learns_the_text_in_its_own(small, tmp_path):
    own, options = other_tokenizer(), {**ONE_STEP, "iterations": 1, "lr": 1e-4}
    smaller_model(tmp_path / "student", own)
    ended = succeeds(run(small, tmp_path / "run", student=tmp_path / "student", **options))
    assert f"{tmp_path}/student has other tokens" in ended.out and "encoded anew" in ended.out
    pool, both = pool_of(tmp_path / "run"), []
    assert {r["model"] for r in pool} == {small.options["model"]}
    for r in best_of(pool):
        ids, mask = data.encode(own, [*r["prompt"], {"role": "assistant", "content": r["response"]}])
        both.append((ids, mask.index(True)))
        assert ids[-1] == own.eos_token_id and ids[mask.index(True)] != r["response_ids"][0]
    with torch.no_grad():
        want = nll(AutoModelForCausalLM.from_pretrained(tmp_path / "student"), both).mean().item()
    (row,) = rows_of(tmp_path / "run", "loss/nll")
    assert row["loss/nll"] == pytest.approx(want, abs=1e-4)
    saved = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert saved.get_vocab() == own.get_vocab() != TOKENIZER.get_vocab()


# -- a scorer that is a model ------------------------------------------------------------
def test_the_scores_of_a_reward_model_are_those_of_plain_transformers(small, tmp_path):
    make_scorer(tmp_path / "scorer")
    one = {"iterations": 1, "score_batch_size": 7}
    succeeds(run(small, tmp_path / "run", scorer=tmp_path / "scorer", max_new_tokens=3, **one))
    plain, pool = Plain(tmp_path / "scorer"), pool_of(tmp_path / "run")
    assert len({r["scorer"] for r in pool}) == 1 and pool[0]["scorer"].startswith(f"{tmp_path}/scorer@")
    with torch.no_grad():
        for r in pool:
            ids = data.prompt_ids(TOKENIZER, r["prompt"]) + r["response_ids"]
            ids += [END] * (not r["finished"])  # scored as if it had ended where it was cut
            want = plain.model(input_ids=torch.tensor([ids])).logits.item()
            assert r["score"] == pytest.approx(want, abs=1e-4)
    assert {r["finished"] for r in pool} == {True, False} and len({r["score"] for r in pool}) > PROMPTS


# -- alternation: the pool and the model of an earlier run -------------------------------
def go_on(small, whole, folder, *more, moment=None, **options):
    options = {"policy": whole.folder, "pool": whole.folder / "pool.jsonl", "iterations": 1, **options}
    return run(small, folder, *more, moment=moment, **options)


def test_a_run_goes_on_from_the_pool_and_the_model_of_another(small, whole, tmp_path):
    old = contents(whole.folder)
    ended = succeeds(go_on(small, whole, tmp_path / "run", scorer="mine:shortest", plots=True))
    assert "pool: 96 responses that another scorer scored are scored again" in ended.out
    pool = pool_of(tmp_path / "run")
    assert collections.Counter(r["iteration"] for r in pool) == {1: 48, 2: 48, 3: 48}
    plain = lambda rows: [{k: v for k, v in r.items() if k not in ("score", "scorer")} for r in rows]
    assert plain(pool[:96]) == plain(pool_of(whole.folder)) and contents(whole.folder) == old
    assert {r["model"] for r in pool[96:]} == {str(whole.folder)}
    assert len({r["scorer"] for r in pool}) == 1 and pool[0]["scorer"].startswith("mine:shortest@")
    assert all(r["score"] == -len(r["response"].split()) for r in pool)
    versions = {path.name for path in (tmp_path / "run" / "versions").iterdir()}
    assert versions == {"2.json", "3", "3.json"}
    assert [r["iteration"] for r in rows_of(tmp_path / "run", "pool/rows")] == [3]
    assert set(read_json(tmp_path / "run" / "summary.json")["versions"]) == {"2", "3"}
    # Another model's version 2 answers the same questions as the run before
    asked = [
        [question(s) for s in read_json(f / "versions/2.json")["samples"]]
        for f in (whole.folder, tmp_path / "run")
    ]
    assert asked[0] == asked[1]
    # and once more
    options = {"policy": tmp_path / "run", "pool": tmp_path / "run" / "pool.jsonl"}
    succeeds(go_on(small, whole, tmp_path / "again", **options, scorer="mine:shortest", candidates="last"))
    pool = pool_of(tmp_path / "again")
    assert [r["iteration"] for r in pool] == [i for i in (1, 2, 3, 4) for _ in range(48)]
    assert {r["model"] for r in pool[144:]} == {str(tmp_path / "run")}


def test_with_the_same_scorer_the_old_scores_stay(small, whole, tmp_path):
    altered = [{**r, "score": 50.0 + i} for i, r in enumerate(pool_of(whole.folder))]
    path = write_rows(tmp_path / "pool.jsonl", altered)
    ended = succeeds(go_on(small, whole, tmp_path / "run", pool=path))
    assert "scored again" not in ended.out and pool_of(tmp_path / "run")[:96] == altered


def test_a_run_that_goes_on_from_another_resumes_to_the_same_bits(small, whole, tmp_path):
    options = {"scorer": "mine:shortest"}
    succeeds(go_on(small, whole, tmp_path / "whole", **options))
    for moment in ("pool 2", "studied 3"):
        assert go_on(small, whole, tmp_path / moment, moment=moment, **options).code == -9
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


@pytest.mark.parametrize("moment, rows, checkpoint, versions", MOMENTS, ids=[m[0] for m in MOMENTS])
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(
    small, whole, tmp_path, moment, rows, checkpoint, versions
):
    killed = run(small, tmp_path, moment=moment.removesuffix(" and a part"))
    assert killed.code == -9 and not (tmp_path / "summary.json").exists()
    path = tmp_path / "pool.jsonl"
    if "part" in moment:
        path.write_bytes(path.read_bytes()[:-50])
    assert len(read_jsonl(path)) == rows
    assert {p.name for p in (tmp_path / "versions").iterdir()} == set(versions.split())
    latest = tmp_path / "checkpoint" / "latest"
    if checkpoint or "2.json" not in versions and "2" not in versions.split():
        assert (latest.read_text() if latest.exists() else None) == checkpoint
    ended = succeeds(run(small, tmp_path, "--resume"))
    assert ("the last line is cut" in ended.out) == ("part" in moment)
    assert_same_result(tmp_path, whole.folder)


def test_a_run_with_thresholds_and_sft_rows_resumes_to_the_same_bits(small, tmp_path):
    options = {"threshold": (0, 0.5), "sft_dataset": small.folder / "sft.jsonl", "start_from": "last"}
    options |= {"candidates": "last", "lr_decay": 0.5, "epochs": 1, "save_every": 2, "iterations": 2}
    succeeds(run(small, tmp_path / "whole", **options))
    last = rows_of(tmp_path / "whole", "loss/nll")[-1]["step"]
    assert run(small, tmp_path / "killed", moment=f"row {last - 1}", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


def test_a_run_with_a_student_resumes_to_the_same_bits(small, tmp_path):
    options = {"student": "tiny", "epochs": 1, "save_every": 1}
    succeeds(run(small, tmp_path / "whole", **options))
    assert run(small, tmp_path / "killed", moment="pool 5", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


def test_a_run_killed_twice_resumes_to_the_same_bits(small, whole, tmp_path):
    for more, moment in (([], "pool 2"), (["--resume"], "row 2"), (["--resume"], "row 4")):
        assert run(small, tmp_path, *more, moment=moment).code == -9
    succeeds(run(small, tmp_path, "--resume"))
    assert_same_result(tmp_path, whole.folder)


def test_resume_of_a_finished_run_says_so_and_changes_nothing(small, whole):
    state = lambda: {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")}
    before, ended = state(), succeeds(run(small, whole.folder, "--resume"))
    assert state() == before and "finished" in ended.out


def test_a_run_in_the_way_is_an_error_and_overwrite_replaces_it(small, whole, tmp_path):
    assert_error(run(small, whole.folder), "finished", "--overwrite", "--resume")
    assert run(small, tmp_path, moment="row 6", seed=5).code == -9
    assert_error(run(small, tmp_path), "unfinished", "--overwrite", "--resume")
    succeeds(run(small, tmp_path, "--overwrite"))
    assert_same_result(tmp_path, whole.folder)


def test_a_nan_loss_stops_before_the_step_and_leaves_the_pool(small, whole, tmp_path):
    one_micro_batch = {"micro_batch_size": 2}
    assert_error(
        run(small, tmp_path, moment="nan 2", **one_micro_batch), "iteration 1, step 2", "nan", "pool.jsonl"
    )
    assert pool_of(tmp_path) and not (tmp_path / "model").exists() and len(rows_of(tmp_path, "loss/nll")) == 1
    succeeds(run(small, tmp_path, "--resume", **one_micro_batch))
    got, want = ([r["loss/nll"] for r in rows_of(f, "loss/nll")][:4] for f in (tmp_path, whole.folder))
    assert got == pytest.approx(want, abs=1e-4)


# -- bad input ---------------------------------------------------------------------------
OF_TRAINING = [
    ("mine:nan", ["mine:nan gives nan for"]),
    ("mine:raises", ["--scorer mine:raises raised KeyError: 'boom'; at prompt", "train.jsonl:"]),
    ("mine:few", ["--scorer mine:few gave 47 scores for 48 responses"]),
    ("mine:text", ["--scorer mine:text raised ValueError", "'good'"]),
]


@pytest.mark.parametrize("scorer, words", OF_TRAINING)
def test_a_scorer_that_fails_is_one_line_and_the_pool_is_kept(small, whole, tmp_path, scorer, words):
    assert_error(run(small, tmp_path, scorer=scorer), *words)
    pool = pool_of(tmp_path)
    assert len(pool) == 48 and all(r["score"] is r["scorer"] is None for r in pool)
    assert [r["prompt"] for r in pool] == [r["prompt"] for r in pool_of(whole.folder, 1)]
    assert not (tmp_path / "versions" / "1").exists()
    if scorer == "mine:nan":  # another scorer goes on with it
        succeeds(run(small, tmp_path, "--resume"))
        kept = [r["response"] for r in pool_of(tmp_path, 1)]
        assert kept == [r["response"] for r in pool] and (tmp_path / "model").exists()


def test_a_threshold_out_of_reach_is_skipped_and_a_lower_one_goes_on(small, whole, tmp_path):
    best = max(r["score"] for r in best_of(pool_of(whole.folder, 1)))
    ended = run(small, tmp_path, threshold=(98, 99))
    assert_error(ended, "iteration 2: no response reaches --threshold 98", "2 iteration(s) in a row")
    assert "iteration 1: no response reaches --threshold 98: of " in ended.out
    assert f" the best has {best:.3g}, the median " in ended.out
    assert pool_of(tmp_path, 1) == pool_of(whole.folder, 1) and not rows_of(tmp_path, "loss/nll")
    (row,) = rows_of(tmp_path, "iterations/skipped")
    assert (row["iteration"], row["iterations/skipped"], row["pool/selected"]) == (1, 1, 0)
    folders = small.folder / "sft/model", tmp_path / "versions/1"
    first, skipped = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(x, skipped[name]) for name, x in first.items())
    ended = succeeds(run(small, tmp_path, "--resume", threshold=(0, 99)))
    assert "resuming with another threshold" in ended.out and "reaches --threshold 99" in ended.out
    assert {r["iteration"] for r in rows_of(tmp_path, "loss/nll")} == {2} and (tmp_path / "model").exists()


def test_if_no_response_ended_this_is_one_line(small, tmp_path):
    ended = run(small, tmp_path, max_new_tokens=1, iterations=1)  # one that ended at once has no words
    assert_error(ended, "iteration 1: no response ended within --max-new-tokens 1")
    assert len(pool_of(tmp_path)) == 48 and not (tmp_path / "versions" / "1").exists()


@pytest.fixture(scope="module")
def bad(small):
    """Beside the good files, some that cannot be used."""
    good = json.dumps(row(A, "ant"))
    (small.folder / "broken.jsonl").write_text(f'{good}\n{{"prompt": "copy ant", "chos\n{good}\n')
    write_rows(small.folder / "strange.jsonl", [row(A, "ant")])
    (small.folder / "empty.jsonl").write_text("")
    write_rows(
        small.folder / "same.jsonl", [{"prompt": r["prompt"]} for r in tiny.rows("prompts", "test")[:2]]
    )
    write_rows(small.folder / "long.jsonl", [{"prompt": "copy " + "ant " * 60}])
    make_scorer(small.folder / "reward model")
    smaller_model(small.folder / "other tokens", other_tokenizer())
    (small.folder / "unfinished").mkdir()
    (small.folder / "unfinished" / "args.json").write_text("{}")
    return small


BAD = [
    ({"scorer": "sft"}, ["sft", "LlamaForCausalLM", "reward.py or advantage_model.py"]),
    ({"scorer": "tiny"}, ["tiny", "causal language model", "reward.py"]),
    ({"scorer": "mine:nothing"}, ["mine:nothing", "module:function"]),
    ({"scorer": "nothing:score"}, ["nothing:score", "No module", "module:function"]),
    ({"scorer": "runs/reward"}, ["runs/reward", "python reward.py"]),
    ({"scorer": "unfinished"}, ["unfinished", "--resume"]),
    ({"model": "reward model"}, ["reward model", "causal language model"]),
    ({"policy": "reward model"}, ["reward model", "causal language model"]),
    ({"policy": "other tokens"}, ["other tokens", "another vocabulary than --model"]),
    ({"student": "reward model"}, ["reward model", "causal language model"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"pool": "nothing.jsonl"}, ["--pool nothing.jsonl", "no such file"]),
    ({"pool": "broken.jsonl"}, ["broken.jsonl:2", "no row of a pool"]),
    ({"pool": "strange.jsonl"}, ["strange.jsonl", "none of its 1 rows"]),
    ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"dataset": "empty.jsonl"}, ["empty.jsonl", "empty"]),
    ({"dataset": "same.jsonl"}, ["same.jsonl", "every prompt is in the held-out set"]),
    ({"dataset": "long.jsonl"}, ["long.jsonl:1", "longer than 56 tokens"]),
    ({"sft_dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"max_length": 8}, ["--max-length 8", "more than --max-new-tokens"]),
    ({"threshold": (1, 0)}, ["--threshold", "rise"]),
    ({"temperatures": (0.7, 0)}, ["--temperatures", "above 0"]),
    ({"n_samples": 0}, ["--n-samples 0", "1 or more"]),
    ({"batch_size": 3, "micro_batch_size": 2}, ["--batch-size 3", "--micro-batch-size 2"]),
    ({"candidates": "best"}, ["--candidates", "best"]),
    ({"sav_every": 1}, ["--sav-every", "did you mean --save-every"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=named)
def test_bad_input_is_one_line_that_says_what_and_where(bad, tmp_path, options, words):
    assert_error(run(bad, tmp_path / "out", **options), *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"threshold": (0.0, math.nan)}, ["--threshold", "finite"]),
        ({"threshold": (0.0, math.inf)}, ["--threshold", "finite"]),
        ({"temperatures": ()}, ["--temperatures", "one or more"]),
        ({"temperatures": (-1.0,)}, ["--temperatures"]),
        ({"top_p": 0.0}, ["--top-p 0.0"]),
        ({"top_p": 1.5}, ["--top-p 1.5"]),
        ({"max_length": 32}, ["--max-length 32"]),
        ({"iterations": 0}, ["--iterations 0"]),
        ({"prompts_per_iteration": 0}, ["--prompts-per-iteration 0"]),
        ({"slots": 0}, ["--slots 0"]),
        ({"lr_decay": 0.0}, ["--lr-decay 0.0"]),
        ({"epochs": 0.0}, ["--epochs 0.0"]),
        ({"sweep_prompts": -1}, ["--sweep-prompts -1"]),
        ({"eval_prompts": -1}, ["--eval-prompts -1"]),
        ({"micro_batch_size": 0}, ["--micro-batch-size 0"]),
        ({"student": "runs/sft", "start_from": "last"}, ["--student is the policy"]),
        ({"chunk_prompts": 0}, ["--chunk-prompts 0"]),
        ({"score_batch_size": 0}, ["--score-batch-size 0"]),
    ],
    ids=named,
)
def test_numbers_that_make_no_sense_are_named_before_anything_is_loaded(options, words):
    with pytest.raises(InputError) as error:
        rs.check(rs.Args(**options))
    assert all(word in str(error.value) for word in words)


def test_overwrite_with_bad_input_leaves_the_old_run(bad, whole):
    before = contents(whole.folder)
    for options in ({"dataset": "nothing.jsonl"}, {"scorer": "sft"}, {"pool": "broken.jsonl"}):
        assert_error(run(bad, whole.folder, "--overwrite", **options))
    inside = {"pool": whole.folder / "pool.jsonl", "policy": whole.folder}
    for name, path in inside.items():
        assert_error(
            run(bad, whole.folder, "--overwrite", **{name: path}), f"--overwrite would remove --{name}"
        )
    assert contents(whole.folder) == before


def test_bad_input_ends_a_real_python_in_the_same_way(tmp_path):
    ended = processes.python(ROOT / "rejection_sampling.py", cwd=tmp_path)  # without runs/sft
    assert_error(ended, "runs/sft", "python sft.py")
    assert len(ended.err.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


# -- recipes -----------------------------------------------------------------------------
def test_recipes_have_the_papers_numbers():
    assert list(rs.RECIPES) == ["tiny", "base", "llama2", "rest"] and rs.RECIPES["tiny"][1] == rs.Args()
    args = parse(rs.RECIPES, [])
    assert (args.model, args.scorer, args.dataset) == ("runs/sft", "runs/reward", "tiny")
    assert (args.threshold, args.candidates, args.start_from) == ((), "all", "base")
    args = parse(rs.RECIPES, ["llama2"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (2e-5, 64, 4096, 2.0)
    assert (args.weight_decay, args.iterations, args.threshold) == (0.1, 4, ())
    assert (args.candidates, args.start_from, args.prompts_per_iteration) == ("all", "base", None)
    assert 10 <= args.n_samples <= 100 and {1.2, 1.3} <= set(args.temperatures)
    args = parse(rs.RECIPES, ["rest"])
    assert args.threshold == (0.0, 0.5, 1.0) and args.lr_decay == 0.5 and args.sft_dataset == "tiny"
    assert (args.candidates, args.start_from, args.output_dir) == ("last", "last", "runs/rest")
    args = parse(rs.RECIPES, ["rest", "--threshold", "2", "3", "--temperatures", "0.5"])
    assert (args.threshold, args.temperatures) == ((2.0, 3.0), (0.5,))


def test_an_unknown_recipe_is_one_line_with_the_nearest_name(small):
    ended = processes.script("rejection_sampling", "lama2", cwd=small.folder)
    assert_error(ended, "lama2", "did you mean 'llama2'", "rest")
