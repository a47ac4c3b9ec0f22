"""dpo_iterative.py from start to end: the files of a run, the variants, resuming, oracles, and bad input."""

import collections
import dataclasses
import functools
import inspect
import itertools
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import processes
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from helpers import (
    CPU, PLACE, TOKENIZER, A, as_killed, assert_error, assert_only_the_last_version_is_rounded,
    assert_same_versions, assert_whole_versions, column, make_sampled, make_scorer, named, question,
    read_json, row, rows_of, succeeds, without, write_rows,
)  # fmt: skip
from helpers import run as run_script
from transformers import AutoModelForCausalLM

import dpo_iterative as dpo
from common import dist
from common.errors import InputError
from common.data import chat, comparisons, splits, tiny
from common.data.files import read_jsonl
from common.loading import checks, pretrained
from common.run import checkpoints, versions
from common.run.cli import parse

GOLD = "common.data.tiny:gold_scorer"
K, PROMPTS, ASKED, OFFLINE = 4, 12, 6, 24
END, LOG2 = TOKENIZER.eos_token_id, math.log(2)


# -- a small run -------------------------------------------------------------------------
OPTIONS = {"scorer": GOLD, "iterations": 2, "prompts_per_iteration": PROMPTS, "n_samples": K}
OPTIONS |= {"chunk_prompts": 5, "eval_prompts": ASKED, "max_new_tokens": 8, "max_length": 64, "epochs": 2}
OPTIONS |= {"batch_size": 4, "micro_batch_size": 2, "save_every": 3, "lr": 1e-3, "beta": 0.1}
ONE_STEP = {"batch_size": 100, "micro_batch_size": 7, "epochs": 1, "warmup_ratio": 0, "save_every": 0}
SHORT = {**ONE_STEP, "eval_prompts": 0}
FILES = "args.json checkpoint frontier.png iterations.png metrics.jsonl metrics.png model"
FILES += " pairs.jsonl pool.jsonl samples.jsonl summary.json versions"
ROW = "prompt response response_ids finished iteration model temperature chunk score scorer".split()
SCORERS = """
def same(prompts, responses, rows):
    return [1.0] * len(responses)

def longest(prompts, responses, rows):
    return {"length": [float(len(response)) for response in responses]}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """With pairs and rankings, too."""
    made = make_sampled(tmp_path_factory.mktemp("small"), "first", SCORERS, OPTIONS)
    some = tiny.rows("preferences", "train")[:OFFLINE]
    pairs = [{key: r[key] for key in ("prompt", "chosen", "rejected")} for r in some]
    write_rows(made.folder / "pairs.jsonl", pairs)
    write_rows(made.folder / "rankings.jsonl", tiny.rows("rankings", "train")[:OFFLINE])
    return made


run = functools.partial(run_script, "dpo_iterative")


def in_process(small, folder, **options):
    with mock.patch.object(dpo, "PLOTS", []):
        dpo.main(dpo.Args(**{**small.options, "output_dir": str(folder), **options}))


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return SimpleNamespace(folder=folder, ended=succeeds(run(small, folder, plots=True)))


def test_offline_pairs_need_no_prompts(small, tmp_path):
    options = offline_options(small, max_length=24, max_new_tokens=32)
    in_process(small, tmp_path / "run", **options)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")


def offline_options(small, kind="pairs", **options):
    data_file = str(small.folder / f"{kind}.jsonl")
    return {"iterations": 0, "offline_data": data_file, "eval_prompts": 0, **options}


@pytest.fixture(scope="module")
def offline(small, tmp_path_factory):
    folder, copies = tmp_path_factory.mktemp("offline") / "run", [f"copy {x}" for x in OFFLINE_MOMENTS]
    succeeds(run(small, folder, moment=copies, **offline_options(small)))
    return SimpleNamespace(folder=folder)


def of_iteration(folder, name, iteration=None):
    rows = read_jsonl(folder / f"{name}.jsonl")
    return [r for r in rows if iteration in (None, r["iteration"])]


def trained(folder):
    """The rows of optimiser steps: {iteration: [row]}."""
    out = collections.defaultdict(list)
    for r in rows_of(folder, "loss/dpo"):
        out[r["iteration"]].append(r)
    return dict(out)


def first_losses(folder):
    return [rows[0]["loss/dpo"] for rows in trained(folder).values()]


def best_and_worst(rows, penalty=0.0):
    """{prompt: (best row, worst row)} of the pool's rows, as the script's first lines have it."""
    groups, out = collections.defaultdict(list), {}
    for r in rows:
        groups[question(r)].append((r["score"] - penalty * len(r["response"]), r))
    for asked, some in groups.items():
        best, worst = (max if sign > 0 else min for sign in (1, -1))
        (top, a), (low, b) = best(some, key=lambda x: x[0]), worst(some, key=lambda x: x[0])
        if top > low and a["response"].strip() != b["response"].strip() and a["finished"] and a["response"]:
            out[asked] = a, b
    return out


def plain_logprobs(folder, rows, gamma=1.0):
    """log pi(y | x) of rows of the pool, sum_t gamma^t log pi(y_t | ...), by plain transformers."""
    model, out = AutoModelForCausalLM.from_pretrained(folder), []
    for r in rows:
        x, n = chat.prompt_ids(TOKENIZER, r["prompt"]) + r["response_ids"], len(r["response_ids"])
        x = torch.tensor(x)
        with torch.no_grad():
            logits = model(input_ids=x[None]).logits[0, -n - 1 : -1]
        nll = F.cross_entropy(logits, x[-n:], reduction="none")
        out.append(-(nll * gamma ** torch.arange(n)).sum().item())
    return torch.tensor(out, dtype=torch.float64)


def test_a_run_leaves_the_whole_run_directory(small, whole):
    assert_whole_versions(whole, "dpo_iterative", FILES, small.folder / "first" / "model")


def test_the_pool_holds_every_response_of_every_temperature(small, whole):
    rows, temperatures = of_iteration(whole.folder, "pool"), [1.0, 0.7]
    assert len(rows) == 2 * PROMPTS * K and all([key for key in r if key != "written"] == ROW for r in rows)
    counts = collections.Counter((r["iteration"], question(r), r["temperature"]) for r in rows)
    assert len(counts) == 2 * PROMPTS * 2 and set(counts.values()) == {K // 2}
    assert len({question(r) for r in rows}) == 2 * PROMPTS  # fresh prompts in each iteration
    held_out = {r["prompt"] for r in read_jsonl(small.folder / "test.jsonl")}
    assert not held_out & {question(r) for r in rows}
    for i, model in ((1, small.folder / "first"), (2, whole.folder / "versions" / "1")):
        mine, half = of_iteration(whole.folder, "pool", i), PROMPTS * K // 2
        assert {r["model"] for r in mine} == {str(model)}
        assert [r["temperature"] for r in mine] == [t for t in temperatures for _ in range(half)]
        assert [len(list(some)) for _, some in itertools.groupby(r["chunk"] for r in mine)] == [10, 10, 4] * 2
        assert sorted({r["chunk"] for r in mine}) == [*range(6)]
    for r in rows:
        assert r["score"] == tiny.gold_score(question(r), r["response"])
        assert r["scorer"].startswith(f"{GOLD}@")
        assert TOKENIZER.decode(r["response_ids"], skip_special_tokens=True) == r["response"]
    assert 0.5 < sum(r["finished"] for r in rows) / len(rows)


def test_the_pairs_are_the_best_against_the_worst_response_of_each_prompt(whole):
    for i in (1, 2):
        pairs = of_iteration(whole.folder, "pairs", i)
        want = best_and_worst(of_iteration(whole.folder, "pool", i))
        assert len(pairs) == len(want) > PROMPTS / 2 and {r["source"] for r in pairs} == {f"iteration {i}"}
        for r in pairs:
            best, worst = want[question(r)]
            assert (r["chosen"], r["chosen_score"]) == (best["response"], best["score"])
            assert (r["rejected"], r["rejected_score"]) == (worst["response"], worst["score"])
            assert r["chosen_score"] > r["rejected_score"] and r["category"] == question(r).split()[0]


def test_pairs_of_a_run_are_read_by_the_scorers_and_by_offline_dpo(small, whole, tmp_path):
    path, rows = whole.folder / "pairs.jsonl", read_jsonl(whole.folder / "pairs.jsonl")
    read = comparisons.load(str(path), "train", TOKENIZER, 64)
    usable = [r for r in rows if r["rejected"]]  # a response without words is read by nobody
    assert [c.texts for c in read] == [[r["chosen"], r["rejected"]] for r in usable]
    assert len(read) > PROMPTS
    succeeds(run(small, tmp_path, **offline_options(small, **{**ONE_STEP, "offline_data": path})))
    again = {(question(r), r["chosen"], r["rejected"]) for r in of_iteration(tmp_path, "pairs")}
    assert again < {(question(r), r["chosen"], r["rejected"]) for r in usable}
    assert len(again) == len(usable) - 1  # one of some 22 prompts is held out
    assert first_losses(tmp_path) == [pytest.approx(LOG2, abs=1e-6)]


def test_the_first_loss_is_log_2_and_a_steps_metrics_are_those_of_its_pairs(whole):
    rows = trained(whole.folder)
    assert rows[1][0]["loss/dpo"] == pytest.approx(LOG2, abs=1e-6)
    assert abs(rows[1][0]["reward/chosen"]) < 1e-6 and abs(rows[1][0]["reward/rejected"]) < 1e-6
    assert abs(rows[2][0]["loss/dpo"] - LOG2) > 1e-5  # the reference stays the SFT model
    keys = {"loss/dpo", "train/accuracy", "reward/chosen", "reward/rejected", "reward/margin"}
    keys |= {"logps/chosen", "logps/rejected", "optim/grad_norm", "optim/lr", "data/pairs"}
    for i, some in rows.items():
        n = len(of_iteration(whole.folder, "pairs", i))
        steps = math.ceil(n / 4)
        assert len(some) == 2 * steps
        sizes = [r["data/pairs"] for r in some]
        assert sum(sizes[:steps]) == sum(sizes[steps:]) == n
        assert all(keys <= set(r) and r["optim/grad_norm"] > 0 for r in some)
        assert all(r["reward/margin"] == r["reward/chosen"] - r["reward/rejected"] for r in some)
        assert max(r["optim/lr"] for r in some) == 1e-3 and some[-1]["optim/lr"] < some[1]["optim/lr"]
    assert sum(r["loss/dpo"] for r in rows[1][-3:]) < 3 * LOG2  # it learns


def test_metrics_rows_are_in_order_and_match_the_pool_and_the_pairs(whole):
    rows = read_jsonl(whole.folder / "metrics.jsonl")
    kinds = ["eval/score", "pool/responses", "loss/dpo"]
    order = [next(i for i, key in enumerate(kinds) if key in r) for r in rows]
    first, second = (len(some) for some in trained(whole.folder).values())
    assert order == [0, 1, *[2] * first, 0, 1, *[2] * second, 0]
    steps = [0, 0, *range(1, first + 1), first, *range(first, first + second + 1), first + second]
    assert [r["step"] for r in rows] == steps
    assert all(math.isfinite(v) for r in rows for v in r.values())
    for i, r in enumerate(rows_of(whole.folder, "pool/responses"), 1):
        pool, pairs = (of_iteration(whole.folder, name, i) for name in ("pool", "pairs"))
        want = {"iteration": i, "pool/responses": PROMPTS * K, "pairs/kept": len(pairs)}
        want |= {"pool/score": statistics.mean(x["score"] for x in pool)}
        want |= {"pairs/chosen_score": statistics.mean(x["chosen_score"] for x in pairs)}
        assert {key: r[key] for key in want} == pytest.approx(want)
        assert r["pairs/kept"] + r["pairs/same"] + r["pairs/tied"] + r["pairs/unfinished"] == PROMPTS


def test_a_versions_metrics_are_those_of_its_samples(whole):
    samples, evals = read_jsonl(whole.folder / "samples.jsonl"), rows_of(whole.folder, "eval/score")
    assert [s["version"] for s in samples] == [v for v in (0, 1, 2) for _ in range(ASKED)]
    assert len({question(s) for s in samples}) == ASKED and all(s["category"] for s in samples)
    assert all(s["score"] == tiny.gold_score(question(s), s["response"]) for s in samples)
    mean = lambda v, key: sum(s[key] for s in samples if s["version"] == v) / ASKED
    for v, r in enumerate(evals):
        got = [r["iteration"], r["eval/score"], r["eval/kl"]]
        assert got == pytest.approx([v, mean(v, "score"), mean(v, "kl")])
        assert r["sample/length"] == mean(v, "tokens") and ("sft/score_win" in r) == (v > 0)
        assert ("eval/score_over_before" in r) == (v == 2)
        assert r["policy/sampler_kl"] == pytest.approx(0, abs=1e-8)
        assert r["policy/sampler_ratio_max"] == pytest.approx(1, abs=1e-3)
    assert evals[2]["sft/score_gain"] == pytest.approx(evals[2]["eval/score"] - evals[0]["eval/score"])
    summary = read_json(whole.folder / "summary.json")
    steps = sum(len(some) for some in trained(whole.folder).values())
    assert (summary["steps"], summary["pool"]) == (steps, 2 * PROMPTS * K)
    assert summary["versions"]["2"] == without(evals[2], *PLACE) and set(summary["versions"]) == {*"012"}


def test_the_kl_of_a_sample_is_its_log_ratio_to_the_first_model(small, whole):
    samples = read_jsonl(whole.folder / "samples.jsonl")
    assert all(abs(s["kl"]) < 1e-5 for s in samples if s["version"] == 0)
    last = [s for s in samples if s["version"] == 2 and s["finished"]]
    for s in last:
        s["response_ids"] = TOKENIZER(s["response"], add_special_tokens=False)["input_ids"] + [END]
    last = [s for s in last if len(s["response_ids"]) == s["tokens"]]  # no special token inside
    folders = whole.folder / "versions" / "2", small.folder / "first" / "model"
    ours, first = (plain_logprobs(folder, last) for folder in folders)
    assert len(last) > 2 and [s["kl"] for s in last] == pytest.approx((ours - first).tolist(), abs=1e-3)
    assert max(abs(s["kl"]) for s in last) > 0.05


# -- what is learnt, and from where ------------------------------------------------------
def implicit(folder, first, both, beta=0.1):
    """(mean reward of the chosen, of the rejected, loss) of pairs of pool rows under the model `folder`."""
    rewards = [beta * (plain_logprobs(folder, side) - plain_logprobs(first, side)) for side in zip(*both)]
    loss = -F.logsigmoid(rewards[0] - rewards[1]).mean()
    return [x.mean().item() for x in (*rewards, loss)]


@pytest.mark.parametrize("options", [{}, {"share_prompt": False, "beta": 0.5}], ids=str)
def test_the_second_iteration_continues_from_the_first_with_the_sft_model_as_reference(
    small, tmp_path, options
):
    succeeds(run(small, tmp_path, **SHORT, **options))
    first, rows = small.folder / "first" / "model", trained(tmp_path)
    both = [[*best_and_worst(of_iteration(tmp_path, "pool", i)).values()] for i in (1, 2)]
    assert [rows[i][0]["data/pairs"] for i in (1, 2)] == [len(x) for x in both] and min(map(len, both)) > 6
    start = [plain_logprobs(first, side).mean().item() for side in zip(*both[0])]
    got = [rows[1][0][f"logps/{side}"] for side in ("chosen", "rejected")]
    assert got == pytest.approx(start, abs=1e-3)
    keys, beta = ("reward/chosen", "reward/rejected", "loss/dpo"), options.get("beta", 0.1)
    want = implicit(tmp_path / "versions" / "1", first, both[1], beta)
    assert [rows[2][0][key] for key in keys] == pytest.approx(want, abs=1e-4)
    assert abs(want[2] - LOG2) > 1e-3  # the test can tell it from a model that is its own reference


@pytest.mark.parametrize("start_from", ["sft", "last"])
def test_start_from_sft_learns_all_pairs_so_far_and_start_from_last_the_new_ones(
    small, tmp_path, start_from
):
    offline_data = {"offline_data": small.folder / "pairs.jsonl", "offline_pairs": 5}
    succeeds(run(small, tmp_path, start_from=start_from, **offline_data, **SHORT))
    sources = [collections.Counter(r["source"] for r in of_iteration(tmp_path, "pairs", i)) for i in (1, 2)]
    kept = column(tmp_path, "pairs/kept")  # pairs.jsonl tells each pair once
    assert sources == [{"iteration 1": kept[0], "pairs.jsonl": 5}, {"iteration 2": kept[1]}]
    sizes = [r["data/pairs"] for r in rows_of(tmp_path, "loss/dpo")]
    assert sizes == [kept[0] + 5, kept[1] + (kept[0] + 5) * (start_from == "sft")]
    at_log_2 = [abs(loss - LOG2) < 1e-6 for loss in first_losses(tmp_path)]
    assert at_log_2 == [True, start_from == "sft"]  # begins with the reference itself
    for key in ("pairs/loss", "pairs/accuracy", "pairs/margin"):  # of each version, on the held-out ones
        assert len(column(tmp_path, key)) == 3


def test_with_the_newest_policy_as_reference_every_iteration_begins_at_log_2(small, whole, tmp_path):
    succeeds(run(small, tmp_path, reference="last", **SHORT))
    assert first_losses(tmp_path) == pytest.approx([LOG2] * 2, abs=1e-6)
    assert abs(first_losses(whole.folder)[1] - LOG2) > 1e-5


def test_with_the_newest_policy_as_reference_the_sft_model_can_still_be_the_start(small, tmp_path):
    in_process(small, tmp_path, reference="last", start_from="sft", **SHORT)
    both = [*best_and_worst(of_iteration(tmp_path, "pool", 2)).values()]
    both += best_and_worst(of_iteration(tmp_path, "pool", 1)).values()
    got = trained(tmp_path)[2][0]
    want = implicit(small.folder / "first" / "model", tmp_path / "versions" / "1", both)
    assert [got[key] for key in ("reward/chosen", "reward/rejected", "loss/dpo")] == pytest.approx(want, abs=1e-4)
    assert got["data/pairs"] == len(both) and abs(want[2] - LOG2) > 1e-3


def test_another_model_can_be_the_reference(small, tmp_path):
    base = small.folder / "base"
    succeeds(run(small, tmp_path, reference=base, iterations=1, **SHORT))
    both = [*best_and_worst(of_iteration(tmp_path, "pool", 1)).values()]
    want = implicit(small.folder / "first" / "model", base, both)
    (got,) = rows_of(tmp_path, "loss/dpo")
    keys = ("reward/chosen", "reward/rejected", "loss/dpo")
    assert [got[key] for key in keys] == pytest.approx(want, abs=1e-3) and abs(want[2] - LOG2) > 0.005


def test_optimiser_and_schedule_restart_in_each_iteration(whole):
    iterations = trained(whole.folder)
    assert {*iterations} == {1, 2}
    for rows in iterations.values():
        rates, n = [r["optim/lr"] for r in rows], len(rows)  # 3 % of a few steps: the first one is warm-up
        want = [5e-4, *(1e-3 * (1 + math.cos(math.pi * (place - 1) / (n - 1))) / 2 for place in range(1, n))]
        assert rates == pytest.approx(want)


def test_versions_of_a_bfloat16_model_are_float32_and_the_last_is_evaluated_as_exported(
    small, tmp_path, monkeypatch
):
    assert_only_the_last_version_is_rounded(dpo, {**small.options, **ONE_STEP}, tmp_path, monkeypatch)


# -- who answers -------------------------------------------------------------------------
def ways(folder, iteration):
    """{(model, temperature): responses to each prompt}"""
    counts = collections.Counter(
        (question(r), r["model"], r["temperature"]) for r in of_iteration(folder, "pool", iteration)
    )
    found = collections.defaultdict(set)
    for (_, *way), n in counts.items():
        found[tuple(way)].add(n)
    assert all(len(n) == 1 for n in found.values())  # the same of every prompt
    assert sum(counts.values()) == PROMPTS * K
    return {way: n.pop() for way, n in found.items()}


def test_an_enhancer_samples_half_of_the_responses(small, tmp_path):
    base, options = str(small.folder / "base"), {"temperatures": 0.9, "iterations": 1, **SHORT}
    succeeds(run(small, tmp_path / "model", enhancer=base, **options))
    assert ways(tmp_path / "model", 1) == {(str(small.folder / "first"), 0.9): 2, (base, 0.9): 2}
    tmp_path = tmp_path / "previous"
    succeeds(run(small, tmp_path, enhancer="previous", iterations=3, **SHORT))
    first, one, two = str(small.folder / "first"), *(f"{tmp_path}/versions/{i}" for i in (1, 2))
    assert ways(tmp_path, 1) == {(first, t): 2 for t in (1.0, 0.7)}  # it is its own predecessor
    assert ways(tmp_path, 2) == {(name, t): 1 for name in (one, first) for t in (1.0, 0.7)}
    assert ways(tmp_path, 3) == {(name, t): 1 for name in (two, one) for t in (1.0, 0.7)}
    for i in (1, 2, 3):
        mine = of_iteration(tmp_path, "pool", i)
        assert sorted({r["chunk"] for r in mine}) == [*range(12)]  # 3 of each of 4 ways
        texts = collections.Counter((question(r), r["response"]) for r in mine)
        assert len(texts) > 1.5 * PROMPTS  # no way repeats another one's draws


# -- the reference -----------------------------------------------------------------------
@pytest.fixture
def watched(monkeypatch):
    """The pairs whose reference log probabilities a run in this process computes."""
    seen, of_each = SimpleNamespace(asked=[]), dpo.of_each_comparison

    def noted(forward, model, pairs, *args):
        seen.asked.append([(pair.row.where, *pair.texts) for pair in pairs])
        return of_each(forward, model, pairs, *args)

    monkeypatch.setattr(dpo, "of_each_comparison", noted)
    return seen


def test_the_reference_runs_once_over_each_pair(small, tmp_path, watched):
    in_process(small, tmp_path / "run", start_from="sft", **SHORT)
    once = [key for keys in watched.asked for key in keys]
    kept = column(tmp_path / "run", "pairs/kept")
    assert [len(keys) for keys in watched.asked] == kept and len(set(once)) == len(once)


def test_metrics_on_held_out_pairs_use_the_reference_of_training(small, tmp_path):
    base = small.folder / "base"
    succeeds(run(small, tmp_path, **offline_options(small, reference=base, **ONE_STEP)))
    assert abs(first_losses(tmp_path)[0] - LOG2) > 0.01  # the policy is not the reference
    assert abs(column(tmp_path, "pairs/loss")[0] - LOG2) > 0.01


# -- offline DPO -------------------------------------------------------------------------
def test_offline_dpo_trains_on_the_given_pairs_and_needs_no_oracle(small, offline):
    folder = offline.folder
    keys = {key.split("/")[0] for r in read_jsonl(folder / "metrics.jsonl") for key in r}
    assert not {"pool", "sample"} & keys
    assert of_iteration(folder, "pool") == read_jsonl(folder / "samples.jsonl") == []
    pairs = of_iteration(folder, "pairs")
    assert len(pairs) == OFFLINE - 1
    assert {(r["iteration"], r["source"]) for r in pairs} == {(1, "pairs.jsonl")}
    given = {(r["prompt"], r["chosen"], r["rejected"]) for r in read_jsonl(small.folder / "pairs.jsonl")}
    assert {(question(r), r["chosen"], r["rejected"]) for r in pairs} < given
    assert first_losses(folder) == pytest.approx([LOG2], abs=1e-6) and set(trained(folder)) == {1}
    before, after = (rows_of(folder, "pairs/accuracy")[i] for i in (0, 1))
    assert (before["pairs/accuracy"], before["iteration"], after["iteration"]) == (0.5, 0, 1)
    assert before["pairs/loss"] == pytest.approx(LOG2, abs=1e-6) and before["pairs/margin"] == 0
    assert after["pairs/accuracy"] in (0, 1) and abs(after["pairs/margin"]) > 1e-3  # of one pair
    names = {path.name for path in (folder / "versions").iterdir()}
    assert names == {"0.json", "1", "1.json"} and read_json(folder / "summary.json")["pool"] == 0
    one, two = (load_file(f / "model.safetensors") for f in (small.folder / "first/model", folder / "model"))
    assert not [name for name in one if torch.equal(one[name], two[name])]


def test_offline_dpo_never_looks_for_a_scorer_that_it_does_not_need(small, tmp_path):
    succeeds(run(small, tmp_path / "run", scorer="runs/reward", **offline_options(small, **ONE_STEP)))
    evaluated = offline_options(small, eval_prompts=2, scorer="runs/reward", **ONE_STEP)
    assert_error(run(small, tmp_path / "with", **evaluated), "runs/reward", "python reward.py")


def test_a_ranking_becomes_the_pair_of_its_best_and_worst(small, tmp_path):
    succeeds(run(small, tmp_path, **offline_options(small, "rankings", **ONE_STEP)))
    given, pairs = {}, of_iteration(tmp_path, "pairs")
    for r in read_jsonl(small.folder / "rankings.jsonl"):
        given[r["prompt"]] = {x["text"]: x["score"] for x in r["responses"]}
    assert len(pairs) > 15 and first_losses(tmp_path) == pytest.approx([LOG2], abs=1e-6)
    for r in pairs:
        scores = given[question(r)]
        assert (r["chosen_score"], r["rejected_score"]) == (max(scores.values()), min(scores.values()))
        assert (scores[r["chosen"]], scores[r["rejected"]]) == (r["chosen_score"], r["rejected_score"])
    assert rows_of(tmp_path, "loss/dpo")[0]["data/pairs"] == len(pairs)


def test_offline_pairs_of_the_tiny_world_are_judged_on_its_own_held_out_ones(small, monkeypatch):
    given = comparisons.load(str(small.folder / "pairs.jsonl"), "train", TOKENIZER, 64)
    splits = {"train": given[:15], "test": given[15:]}
    monkeypatch.setattr(comparisons, "load", lambda spec, split, *_: splits[split])
    args = dpo.Args(offline_data="tiny", offline_pairs=7)
    train, judged = comparisons.load_offline(args, TOKENIZER, [])
    texts = {name: [c.texts for c in split] for name, split in splits.items()}
    assert len(train) == 7 and all(c.texts in texts["train"] for c in train)
    assert [c.texts for c in judged] == texts["test"]


def test_pairs_with_held_out_prompts_are_not_trained_on(small, tmp_path):
    rows = read_jsonl(small.folder / "pairs.jsonl")
    held_out = [{"prompt": r["prompt"]} for r in rows[:5]]
    write_rows(tmp_path / "held.jsonl", held_out)
    given = offline_options(small, eval_dataset=tmp_path / "held.jsonl", **ONE_STEP)
    ended = succeeds(run(small, tmp_path / "run", **given))
    asked = {question(r) for r in of_iteration(tmp_path / "run", "pairs")}
    assert asked and not asked & {r["prompt"] for r in held_out}
    assert "the prompt is in the held-out set" in ended.out


def test_no_prompt_of_the_held_out_pairs_is_sampled_and_trained_on(small, tmp_path):
    """If prompts and offline pairs come from one file, or one data set of the hub."""
    pairs = str(small.folder / "pairs.jsonl")
    options = {"offline_data": pairs, "dataset": pairs, "prompts_per_iteration": 20, "iterations": 1}
    succeeds(run(small, tmp_path, **options, **SHORT))
    judged = comparisons.load(pairs, "train", TOKENIZER, 64)
    judged = {c.prompt[-1]["content"] for c in splits.hold_out(judged)[1]}
    assert judged and not judged & {question(r) for r in of_iteration(tmp_path, "pairs")}


def test_cpl_learns_pairs_without_a_reference(small, tmp_path, monkeypatch):
    """Its first loss is that of plain transformers; the more likely side of a soft label is the chosen one, and a label
    of one half says nothing."""
    cpl, sides = processes.patched("dpo_iterative", "cpl", tmp_path), []  # docs/learn/cpl.patch
    given = [{**r, "preference": i % 5 / 4} for i, r in enumerate(read_jsonl(small.folder / "pairs.jsonl"))]
    write_rows(small.folder / "soft.jsonl", given)
    monkeypatch.setattr(cpl, "PLOTS", [])
    monkeypatch.setattr(versions.Versions, "ask", None)  # which dpo_iterative.py asks for the reference
    options = {**without(small.options, "beta"), "alpha": 0.7, "gamma": 0.5, "lam": 0.25}
    offline = {**options, **offline_options(small, "soft", output_dir=f"{tmp_path}/a", **ONE_STEP)}
    cpl.main(cpl.Args(**offline))
    pairs = of_iteration(tmp_path / "a", "pairs")
    assert all(r["preference"] != 0.5 for r in pairs)
    for better in (True, False):
        texts = [r["chosen" if (r["preference"] > 0.5) == better else "rejected"] for r in pairs]
        rows = [{**r, "response_ids": TOKENIZER(x)["input_ids"] + [END]} for r, x in zip(pairs, texts)]
        sides.append(0.7 * plain_logprobs(small.folder / "first/model", rows, gamma=0.5))
    [row] = rows_of(tmp_path / "a", "loss/cpl")
    want = -F.logsigmoid(sides[0] - 0.25 * sides[1]).mean().item()
    assert row["loss/cpl"] == pytest.approx(want, rel=1e-4) and len(pairs) > 15
    cpl.main(cpl.Args(**options, output_dir=f"{tmp_path}/b"))
    assert rows_of(tmp_path / "b", "pairs/chosen_length")


# -- oracles -----------------------------------------------------------------------------
def marked(folder, scorer, **mark):
    """A model folder whose configuration names its kind."""
    for name, value in mark.items():
        setattr(scorer.config, name, value)
    checkpoints.save_model(dist.shard(scorer, CPU), TOKENIZER, folder)
    return folder


@pytest.mark.parametrize("kind", ["reward", "advantage"])
def test_a_reward_model_and_an_advantage_model_are_oracles(small, tmp_path, kind):
    scorer, one = tmp_path / "scorer", {"iterations": 1, **ONE_STEP}
    if kind == "reward":
        make_scorer(scorer)
    else:
        about = {"n_policies": 4, "n_others": 1}  # a score is 3/4 (r - e)
        marked(scorer, pretrained.load_scorer("tiny", TOKENIZER, 2), advantage_model=about)
    succeeds(run(small, tmp_path / "run", scorer=scorer, **one))
    rows = of_iteration(tmp_path / "run", "pool")
    assert len({r["scorer"] for r in rows}) == 1
    assert len({r["score"] for r in rows}) > len(rows) / 2
    want = {asked: best["response"] for asked, (best, _) in best_and_worst(rows).items()}
    assert {question(r): r["chosen"] for r in of_iteration(tmp_path / "run", "pairs")} == want


def test_a_pairwise_oracle_scores_the_share_of_other_responses_beaten(small, tmp_path):
    checkpoints.save_model(dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU), TOKENIZER, tmp_path / "judge")
    judge, tmp_path = f"common.programs.pairwise:oracle={tmp_path / 'judge'}", tmp_path / "run"
    succeeds(run(small, tmp_path, scorer=judge, **{**ONE_STEP, "iterations": 1}))
    groups = collections.defaultdict(list)
    for r in of_iteration(tmp_path, "pool"):
        assert 0 <= r["score"] <= 1
        groups[question(r)].append(r["score"])
    assert all(sum(scores) / K == pytest.approx(0.5) for scores in groups.values())  # a tournament's mean
    assert len({x for scores in groups.values() for x in scores}) > PROMPTS
    evals = column(tmp_path, "eval/score")
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert evals[0] == 0.5 and evals[1] != 0.5  # against version 0's responses
    assert column(tmp_path, "sft/score_tie_margin") == [0.1]  # of probabilities
    assert [s["score"] for s in samples[:ASKED]] == [0.5] * ASKED
    assert all(0 <= s["score"] <= 1 for s in samples)


def test_with_a_length_penalty_the_chosen_responses_are_the_shorter_ones(small, tmp_path):
    """Even though their score by the oracle, which the pool keeps, is the lower one."""
    options = {"scorer": "mine:longest", "length_penalty": 3.0, "iterations": 1}
    succeeds(run(small, tmp_path, **options, **SHORT))
    rows, pairs = (of_iteration(tmp_path, name) for name in ("pool", "pairs"))
    assert all(r["score"] == len(r.get("written", r["response"])) for r in rows)
    assert column(tmp_path, "reward/length") == pytest.approx(column(tmp_path, "pool/score"))
    want = {asked: best["response"] for asked, (best, _) in best_and_worst(rows, 3.0).items()}
    assert {question(r): r["chosen"] for r in pairs} == want and len(pairs) > 4
    assert all(len(r["chosen"]) < len(r["rejected"]) for r in pairs)
    assert all(r["chosen_score"] == pytest.approx(-2 * len(r["chosen"])) for r in pairs)  # less the penalty


# -- resuming ----------------------------------------------------------------------------
def assert_same_result(folder, undisturbed):
    assert_same_versions(folder, undisturbed, "pool.jsonl", "pairs.jsonl", "samples.jsonl", "summary.json")
    assert not list(folder.rglob("*.tmp"))
    assert len(list((folder / "checkpoint").glob("step_*"))) == 1


OFFLINE_MOMENTS = ["pairs 1", "row 5", "older 6", "studied 1", "model"]
MOMENTS = [  # and what is left then: rows of the pool, checkpoint, versions, iterations in pairs.jsonl
    ("studied 0", 0, None, "", 0),
    ("pool 1", 10, None, "0.json", 0),  # after a chunk
    ("pool 2 and a part", 19, None, "0.json", 0),  # in the middle of one
    ("pool 5", 44, None, "0.json", 0),  # of the second temperature
    ("scored 1", 48, None, "0.json", 0),
    ("pairs 1", 48, None, "0.json", 1),
    ("row 2", 48, None, "0.json", 1),  # before the first checkpoint
    ("tensors 3", 48, None, "0.json", 1),
    ("row 4", 48, "step_3", "0.json", 1),
    ("pointer 6", 48, "step_3", "0.json", 1),
    ("older 6", 48, "step_6", "0.json", 1),
    ("export 1", 48, "step_6", "0.json 1.tmp", 1),
    ("version 1", 48, "step_6", "0.json 1", 1),
    ("studied 1", 48, "step_6", "0.json 1", 1),
    ("pool 8", 68, "step_6", "0.json 1 1.json", 1),
    ("scored 2", 96, "step_6", "0.json 1 1.json", 1),
    ("pairs 2", 96, "step_6", "0.json 1 1.json", 2),
    ("row 7", 96, "step_6", "0.json 1 1.json", 2),  # the checkpoint is the one of the iteration before
    ("row 11", 96, "step_9", "0.json 1 1.json", 2),
    ("version 2", 96, "step_12", "0.json 1 1.json 2", 2),
    ("model", 96, "step_12", "0.json 1 1.json 2 2.json", 2),
    ("summary", 96, "step_12", "0.json 1 1.json 2 2.json", 2),
]


@pytest.fixture(scope="module")
def copied(small, tmp_path_factory):
    """The folder of a run that was copied at every moment."""
    folder = tmp_path_factory.mktemp("copied") / "run"
    succeeds(run(small, folder, moment=[f"copy {' '.join(m[0].split()[:2])}" for m in MOMENTS]))
    return folder


@pytest.mark.parametrize("moment, rows, checkpoint, versions, paired", MOMENTS, ids=[m[0] for m in MOMENTS])
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(
    small, whole, copied, moment, rows, checkpoint, versions, paired
):
    as_killed(copied, moment.removesuffix(" and a part"), copied)
    assert not (copied / "summary.json").exists()
    path = copied / "pool.jsonl"
    if "part" in moment:
        path.write_bytes(path.read_bytes()[:-50])
    assert len(read_jsonl(path)) == rows
    assert {p.name for p in (copied / "versions").iterdir()} == set(versions.split())
    assert {r["iteration"] for r in read_jsonl(copied / "pairs.jsonl")} == {*range(1, paired + 1)}
    latest = copied / "checkpoint" / "latest"
    assert (latest.read_text() if latest.exists() else None) == checkpoint
    succeeds(run(small, copied, "--resume"))
    assert_same_result(copied, whole.folder)


@pytest.mark.parametrize("moment", OFFLINE_MOMENTS)
def test_offline_dpo_killed_at_any_moment_resumes_to_the_same_bits(small, offline, tmp_path, moment):
    as_killed(offline.folder, moment, tmp_path)
    succeeds(run(small, tmp_path, "--resume", **offline_options(small)))
    assert_same_result(tmp_path, offline.folder)


def test_a_run_resumed_with_more_iterations_keeps_earlier_prompts_and_pairs(small, tmp_path):
    """A run of two iterations, half of the prompts each, killed in the second and resumed with three."""
    options = {"prompts_per_iteration": "None", "start_from": "sft", **SHORT}
    succeeds(run(small, tmp_path / "run", moment="copy pool 9", iterations=2, **options))
    as_killed(tmp_path / "run", "pool 9", tmp_path / "killed")
    before = [r for r in of_iteration(tmp_path / "killed", "pool") if r["iteration"] == 1]
    succeeds(run(small, tmp_path / "killed", "--resume", iterations=3, **options))
    rows, pairs = (of_iteration(tmp_path / "killed", name) for name in ("pool", "pairs"))
    assert [r for r in rows if r["iteration"] == 1] == before
    of_each = [{question(r) for r in rows if r["iteration"] == i} for i in (1, 2, 3)]
    assert list(map(len, of_each)) == [20, 13, 13] and len(set.union(*of_each)) == 40  # 6 are used twice
    assert {question(r) for r in pairs if r["iteration"] == 1} <= of_each[0]
    learnt = [r["data/pairs"] for r in rows_of(tmp_path / "killed", "loss/dpo") if r["iteration"] == 2]
    n_pairs = sum(r["iteration"] <= 2 for r in pairs)
    assert learnt and sum(learnt) % n_pairs == 0  # those of the first iteration too


def test_each_iteration_gets_new_adapters_also_after_a_kill(small, tmp_path):
    """versions/1 has the first adapters merged into its weights, so a resumed run cannot continue with them."""
    folder, killed, options = tmp_path / "run", tmp_path / "killed", {"lora_rank": 4, "epochs": 1}
    succeeds(run(small, folder, moment="copy version 1", **options))
    as_killed(folder, "version 1", killed)
    other_rank = run(small, killed, "--resume", **{**options, "lora_rank": 8})
    assert_error(other_rank, "was started with another lora_rank: 4 -> 8")
    succeeds(run(small, killed, "--resume", **options))
    assert_same_result(killed, folder)


OTHER_MOMENTS = ["row 4", "pool 17", "pairs 2", "studied 2"]


@pytest.fixture(scope="module")
def other(small, tmp_path_factory):
    """A run with the options that `small` does not use: copied at its moments, and finished."""
    folder, options = tmp_path_factory.mktemp("other") / "run", {"start_from": "sft", "reference": "last"}
    options |= {"enhancer": "previous", "epochs": 1, "length_penalty": 0.02}
    options |= {"offline_data": small.folder / "pairs.jsonl", "offline_pairs": 7, "share_prompt": False}
    succeeds(run(small, folder, moment=[f"copy {moment}" for moment in OTHER_MOMENTS], **options))
    shutil.copytree(folder, f"{folder} at its end")
    return SimpleNamespace(folder=folder, options=options)


@pytest.mark.parametrize("moment", OTHER_MOMENTS)
def test_a_run_with_all_other_options_resumes_to_the_same_bits(small, other, moment):
    as_killed(other.folder, moment, other.folder)
    succeeds(run(small, other.folder, "--resume", **other.options))
    assert_same_result(other.folder, Path(f"{other.folder} at its end"))


def test_a_nan_loss_stops_before_the_step_and_keeps_pool_and_pairs(small, whole, tmp_path):
    one_micro_batch = {"micro_batch_size": 4}
    ended = run(small, tmp_path, moment="nan 2", **one_micro_batch)
    assert_error(ended, "step 2", "nan", "--lr", "checkpoint")
    assert len(of_iteration(tmp_path, "pool")) == PROMPTS * K and of_iteration(tmp_path, "pairs")
    assert not (tmp_path / "model").exists() and len(rows_of(tmp_path, "loss/dpo")) == 1
    succeeds(run(small, tmp_path, "--resume", **one_micro_batch))
    got, want = (column(f, "loss/dpo")[:4] for f in (tmp_path, whole.folder))
    assert got == pytest.approx(want, abs=1e-4)


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(small):
    """A folder with the usable files and some unusable ones."""
    write_rows(small.folder / "pool.jsonl", [row(A, "ant")])
    (small.folder / "unfinished").mkdir()
    (small.folder / "unfinished" / "args.json").write_text("{}")
    make_scorer(small.folder / "a scorer")
    return small


BAD = [
    ({"iterations": 0}, ["--iterations 0", "--offline-data"]),
    ({"scorer": "mine:nothing"}, ["mine:nothing", "module:function"]),
    ({"scorer": "runs/reward"}, ["runs/reward", "python reward.py"]),
    ({"scorer": "unfinished"}, ["unfinished", "--resume"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"model": "a scorer"}, ["a scorer", "causal language model"]),
    ({"reference": "runs/nothing"}, ["runs/nothing"]),
    ({"enhancer": "a scorer"}, ["a scorer", "causal language model"]),
    ({"offline_data": "pool.jsonl"}, ["pool.jsonl:1", "match no format of preference rows"]),
    ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"start_from": "first"}, ["--start-from", "first"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=named)
def test_bad_input_is_reported_in_one_line(bad, tmp_path, options, words):
    assert_error(run(bad, tmp_path / "out", **options), *words)
    assert not (tmp_path / "out").exists()


SKIPPED_MOMENTS = ["version 2", "studied 2", "pairs 3"]


@pytest.fixture(scope="module")
def skipped(small, whole, tmp_path_factory):
    """A run and its options: the prompts of the second of three iterations give no pair."""
    tied = {question(r) for r in of_iteration(whole.folder, "pool", 2)}
    scores = f"[0.0 if p in {tied!r} else tiny.gold_score(p, r) for p, r in zip(prompts, responses)]"
    oracle = f"from common.data import tiny\n\ndef ties(prompts, responses, rows):\n    return {scores}\n"
    (small.folder / "tied.py").write_text(oracle)
    folder, options = tmp_path_factory.mktemp("skipped") / "run", {"scorer": "tied:ties", "iterations": 3}
    copies = [f"copy {moment}" for moment in SKIPPED_MOMENTS]
    ended = succeeds(run(small, folder, moment=copies, **options))
    shutil.copytree(folder, f"{folder} at its end")
    return SimpleNamespace(folder=folder, options=options, ended=ended)


def test_an_iteration_without_a_pair_is_skipped_and_counted(skipped):
    one, two, three = (load_file(skipped.folder / f"versions/{i}/model.safetensors") for i in (1, 2, 3))
    assert all(torch.equal(x, two[name]) and not torch.equal(x, three[name]) for name, x in one.items())
    (row,) = rows_of(skipped.folder, "iterations/skipped")
    assert (row["iteration"], row["iterations/skipped"], row["pairs/tied"]) == (2, 1, PROMPTS)
    assert [n > 0 for n in column(skipped.folder, "pairs/kept")] == [True, False, True]
    assert {r["iteration"] for r in of_iteration(skipped.folder, "pairs")} == {1, 3}
    assert {*trained(skipped.folder)} == {1, 3}
    assert f"iteration 2: no pair in {PROMPTS} prompts" in skipped.ended.out


@pytest.mark.parametrize("moment", SKIPPED_MOMENTS)
def test_a_run_killed_near_a_skipped_iteration_resumes_to_the_same_bits(small, skipped, moment):
    as_killed(skipped.folder, moment, skipped.folder)
    succeeds(run(small, skipped.folder, "--resume", **skipped.options))
    assert_same_result(skipped.folder, Path(f"{skipped.folder} at its end"))


def test_after_five_iterations_without_a_pair_the_run_stops(small, tmp_path):
    few = {**SHORT, "prompts_per_iteration": 4, "n_samples": 2, "scorer": "mine:same"}
    ended = run(small, tmp_path, iterations=7, **few)
    assert_error(ended, "iteration 5: no pair in 4 prompts", "5 iteration")
    assert column(tmp_path, "iterations/skipped") == [1, 2, 3, 4] and not (tmp_path / "model").exists()


def test_an_oracle_that_only_ties_is_one_line_and_another_one_can_continue_with_the_pool(small, tmp_path):
    ended = run(small, tmp_path, scorer="mine:same", iterations=1, **ONE_STEP)
    assert_error(ended, f"iteration 1: no pair in {PROMPTS} prompts", "all have one score")
    rows = of_iteration(tmp_path, "pool")
    assert len(rows) == PROMPTS * K and {r["score"] for r in rows} == {1.0}
    assert not (tmp_path / "pairs.jsonl").exists() and not (tmp_path / "versions" / "1").exists()
    succeeds(run(small, tmp_path, "--resume", iterations=1, **ONE_STEP))
    kept = [r["response"] for r in of_iteration(tmp_path, "pool", 1)]
    assert kept == [r["response"] for r in rows] and (tmp_path / "model").exists()


def test_no_finished_best_response_is_reported_in_one_line(small, tmp_path):
    ended = run(small, tmp_path, max_new_tokens=1, iterations=1, **ONE_STEP)
    assert_error(ended, "iteration 1: no pair", "did not end within --max-new-tokens")
    assert len(of_iteration(tmp_path, "pool")) == PROMPTS * K and not (tmp_path / "pairs.jsonl").exists()


OWN = {"offline_data": "mine.jsonl", "iterations": 0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"temperatures": (1.0, math.inf)}, ["--temperatures"]),
        ({"temperatures": (0.7, 0)}, ["--temperatures", "above 0"]),
        ({"temperatures": ()}, ["--temperatures", "one or more"]),
        ({"label_smoothing": -0.1}, ["--label-smoothing -0.1"]),
        ({"label_smoothing": 0.5}, ["--label-smoothing 0.5", "below 0.5"]),
        ({"n_samples": 1}, ["--n-samples 1", "2 or more"]),
        ({"top_p": 0.0}, ["--top-p 0.0"]),
        ({"top_p": 1.5}, ["--top-p 1.5"]),
        ({"max_length": 32}, ["--max-length 32", "more than --max-new-tokens"]),
        ({"iterations": -1, "offline_data": "tiny"}, ["--iterations -1"]),
        ({"n_samples": 3, "enhancer": "previous"}, ["--n-samples 3", "4 or more"]),
        ({"beta": 0.0}, ["--beta 0.0", "more than 0"]),
        ({"length_penalty": -1.0}, ["--length-penalty -1.0"]),
        ({"offline_pairs": 0}, ["--offline-pairs 0"]),
        ({**OWN, "max_length": 32}, ["--max-length 32"]),
        ({**OWN, "eval_prompts": 0, "max_length": 32}, None),  # nothing is sampled
    ],
    ids=named,
)
def test_arguments_out_of_range_are_named_before_anything_is_loaded(options, words):
    if words is None:
        return dpo.check(dpo.Args(**options))
    with pytest.raises(InputError) as error:
        dpo.check(dpo.Args(**options))
    assert all(word in str(error.value) for word in words)


def test_a_model_that_cannot_share_prompts_gets_separate_rows(small, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "shares_prompts", lambda model, max_length: False)
    in_process(small, tmp_path / "run", iterations=1, **SHORT)
    assert len(read_jsonl(tmp_path / "run/pool.jsonl")) == PROMPTS * K
    assert json.loads((tmp_path / "run/args.json").read_text())["args"]["share_prompt"] is False


# -- arguments and recipes ---------------------------------------------------------------
def test_every_argument_is_used_outside_its_check():
    source = inspect.getsource(dpo).replace(inspect.getsource(dpo.check), "")
    source = source.replace(inspect.getsource(dpo.Args), "")
    paths = [path for path in Path("common").glob("**/*.py") if "programs" not in path.parts]
    source += "".join(path.read_text() for path in paths)
    read = {*re.findall(r"\bargs(?:\.|, \")(\w+)", source)}
    assert {field.name for field in dataclasses.fields(dpo.Args)} - read == set()


def test_recipes_have_the_papers_numbers():
    assert list(dpo.RECIPES) == "tiny base large rlhf_workflow zephyr rlhf_workflow_offline dpo summarize".split()
    assert dpo.RECIPES["tiny"][1] == dpo.Args() == parse(dpo.RECIPES, [])
    args = parse(dpo.RECIPES, [])
    assert (args.model, args.scorer, args.dataset) == ("runs/sft", "runs/reward", "tiny")
    assert (args.reference, args.start_from, args.iterations) == ("sft", "last", 3)
    args = parse(dpo.RECIPES, ["rlhf_workflow"])
    assert (args.beta, args.lr, args.batch_size, args.epochs) == (0.1, 5e-7, 128, 2.0)
    assert (args.warmup_ratio, args.n_samples, args.iterations) == (0.03, 8, 3)
    assert (args.prompts_per_iteration, args.temperatures) == (20_000, (1.0, 0.7))
    assert (args.max_new_tokens, args.top_p, args.start_from) == (2048, 1.0, "last")
    assert (args.label_smoothing, args.offline_data, args.reference) == (0.0, None, "sft")
    args = parse(dpo.RECIPES, ["zephyr"])
    assert (args.beta, args.lr, args.batch_size, args.epochs) == (0.01, 5e-7, 128, 1.0)
    assert (args.warmup_ratio, args.iterations, args.label_smoothing) == (0.1, 0, 0.0)
    assert args.offline_data == "HuggingFaceH4/ultrafeedback_binarized[train_prefs]"
    offline, paper = (parse(dpo.RECIPES, [name]) for name in ("rlhf_workflow_offline", "dpo"))
    assert (offline.beta, offline.lr, offline.batch_size, offline.epochs) == (0.1, 5e-7, 128, 1.0)
    assert (paper.beta, paper.lr, paper.batch_size, paper.iterations) == (0.1, 1e-6, 64, 0)
    assert paper.warmup_ratio == pytest.approx(150 / (160_800 / 64), abs=0.001)
    summaries = parse(dpo.RECIPES, ["summarize"])
    assert (summaries.beta, summaries.lr, summaries.batch_size, summaries.iterations) == (0.5, 1e-6, 64, 0)
    assert summaries.warmup_ratio == pytest.approx(150 / (92_858 / 64), abs=0.001)
    assert summaries.offline_data == "trl-lib/tldr-preference"
    args = parse(dpo.RECIPES, ["rlhf_workflow", "--length-penalty", "0.001", "--temperatures", "0.5"])
    assert (args.length_penalty, args.temperatures, args.beta) == (0.001, (0.5,), 0.1)
