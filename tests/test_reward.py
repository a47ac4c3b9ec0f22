"""reward.py in one process: the files of a run, its loss, its variants, resuming, and bad input."""

import functools
import math
import re
import zlib
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import flags
from helpers import (
    HELD_OUT, TOKENIZER, Gradients, Plain, as_killed, assert_epochs, assert_error,
    assert_same_result, assert_same_step, assert_whole_run, column, comparisons_of, ids, make_small,
    named, norm_of, read_json, rows_of, sequence_logprob, steps_of, succeeds, weights, without, write_rows,
)  # fmt: skip
from helpers import run as run_script
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

import reward
from common.errors import InputError
from common.data import comparisons, splits, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import safety
from common.run.cli import check_flags, parse

ROWS = tiny.rows("preferences", "train")
MOMENTS = {  # and what each is known by
    "row 5": ["checkpoint/step_3"],
    "tensors 6": ["checkpoint/step_3", "checkpoint/step.tmp/tensors"],
    "export": ["checkpoint/step_9", "model.tmp"],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_small(tmp_path_factory.mktemp("small"))


def run(*args, **options):
    return run_script("reward", *args, **options)


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """A finished run from the tiny model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    succeeds(run(small, folder, moment=[f"copy {moment}" for moment in MOMENTS]))
    return folder


# -- after sft.py, as the README has it --------------------------------------------------
@pytest.fixture(scope="module")
def default(small, tmp_path_factory):
    """sft.py, then reward.py, in one folder with the default model and run directory."""
    folder = tmp_path_factory.mktemp("default")
    sft = write_rows(folder / "sft.jsonl", tiny.rows("sft", "train")[:80])
    few = {"max_length": 64, "batch_size": 8, "micro_batch_size": 8, "max_steps": 4, "sample_prompts": 0}
    succeeds(processes.script("sft", *flags(dataset=sft, **few), cwd=folder, plots=False))
    command = flags(**without(small.options, "model"), save_dtype="bfloat16", safety_threshold=0.89)
    ended = succeeds(processes.script("reward", *command, cwd=folder))
    return SimpleNamespace(folder=folder / "runs" / "reward", command=command, ended=ended, cwd=folder)


def test_a_run_leaves_the_whole_run_directory(default):
    args = parse(reward.RECIPES, ["tiny", *default.command, "--sft-model", "runs/sft"])  # what None means here
    assert (args.model, args.output_dir) == ("tiny", "runs/reward")
    steps, ends = {"loss/reward"}, {"eval/pairs/copy", "eval/accuracy/copy"}
    assert_whole_run(default.folder, ["reward.py", "tiny", *default.command], args, "reward", steps, ends)
    after = rows_of(default.folder, "eval/nll")[-1]
    assert {"baseline/length_accuracy", "baseline/sft_logprob_accuracy"} <= set(after)
    assert {"eval/bayes_accuracy", "gold/correlation", "eval/accuracy_low"} <= set(after)
    assert {"gate/caught", "gate/recall", "length/correlation"} <= set(after)
    assert "wrote runs/reward/model" in default.ended.out
    (n_steps,) = re.findall(r"plan: (\d+) optimiser steps", default.ended.out)
    assert int(n_steps) == read_jsonl(default.folder / "metrics.jsonl")[-1]["step"]


def test_the_baselines_are_length_and_the_log_probability_of_the_sft_model(default):
    model = AutoModelForCausalLM.from_pretrained(default.cwd / "runs" / "sft" / "model")
    path = str(parse(reward.RECIPES, ["tiny", *default.command]).eval_dataset)
    longer, likelier = [], []
    for c in comparisons.load(path, "test", TOKENIZER, 64):
        chosen, rejected = (len(text.split()) for text in c.texts)
        longer.append((chosen > rejected) + (chosen == rejected) / 2)
        likelier.append(sequence_logprob(model, c, 0) > sequence_logprob(model, c, 1))
    assert column(default.folder, "baseline/length_accuracy") == [sum(longer) / HELD_OUT]
    assert column(default.folder, "baseline/sft_logprob_accuracy") == [sum(likelier) / HELD_OUT]
    for sample in read_jsonl(default.folder / "samples.jsonl"):  # and the end token
        assert all(r["tokens"] == len(r["text"].split()) + 1 for r in sample["responses"])


def test_plain_transformers_gives_the_scores_of_the_samples(default):
    plain = Plain(default.folder / "model")
    with torch.no_grad():
        for sample in read_jsonl(default.folder / "samples.jsonl")[:12]:
            for response in sample["responses"]:
                outputs = plain.outputs(sample["prompt"], response["text"])
                assert outputs.shape == (1,) and outputs.item() == pytest.approx(response["score"], abs=1e-4)


def test_the_saved_model_is_a_regression_with_one_label(default):
    config = read_json(default.folder / "model" / "config.json")
    model = AutoModelForSequenceClassification.from_pretrained(default.folder / "model")
    assert config["architectures"] == ["LlamaForSequenceClassification"] == [type(model).__name__]
    assert config["problem_type"] == "regression" and model.config.num_labels == 1
    assert config["id2label"] == {"0": "reward"} and config["pad_token_id"] == TOKENIZER.pad_token_id
    assert config["read_at"] == "end_token"
    assert model.score.weight.shape == (1, 128) and "lm_head.weight" not in weights(default.folder)


def test_the_text_classification_pipeline_gives_the_score(default):
    sample = read_jsonl(default.folder / "samples.jsonl")[0]
    text = Plain(default.folder / "model").text(sample["prompt"], sample["responses"][0]["text"])
    options = {"device": "cpu", "dtype": torch.float32}
    [got] = pipeline("text-classification", model=str(default.folder / "model"), **options)(text)
    score = sample["responses"][0]["score"]
    assert got["label"] == "reward" and got["score"] == pytest.approx(score, abs=1e-4)


def test_the_safety_gate_is_in_the_config_and_matches_its_metrics(default):
    gate = read_json(default.folder / "model" / "config.json")["safety_gate"]
    after, responses = rows_of(default.folder, "gate/recall")[-1], []
    for sample in read_jsonl(default.folder / "samples.jsonl"):
        if zlib.crc32(repr(sample["prompt"]).encode()) % 2 == 0:
            continue  # the half it was fitted to
        for r in sample["responses"]:
            p_safe = 1 / (1 + math.exp(-gate["scale"] * r["score"] - gate["bias"]))
            responses.append((p_safe < 0.89, not r["is_safe"]))
    caught, unsafe = (sum(column) for column in zip(*responses))
    rightly = sum(c and u for c, u in responses)
    assert 0 < caught < len(responses) and unsafe
    assert after["gate/responses"] == len(responses) and after["gate/caught"] == caught
    assert after.get("gate/precision", 0) == rightly / max(1, caught)
    assert after["gate/recall"] == rightly / unsafe


@pytest.mark.parametrize("threshold, caught", [(0.0, 0), (0.5, 20), (1.0, 40)])
def test_fit_safety_gate_by_hand(threshold, caught):
    """In each half of the prompts, 20 unsafe responses score -2 and 20 safe ones 2."""
    pair = [{"score": 2.0, "is_safe": True}, {"score": -2.0, "is_safe": False}]
    halves = [[p for p in map(str, range(99)) if zlib.crc32(repr(p).encode()) % 2 == i][:20] for i in (0, 1)]
    rows = [{"prompt": prompt, "responses": pair} for half in halves for prompt in half]
    gate, figures = safety.fit_safety_gate(rows, threshold)
    precision = {} if not caught else {"gate/precision": 20 / caught}
    shares = {"gate/recall": float(caught > 0), **precision}
    assert figures == {"gate/responses": 40, "gate/caught": caught, **shares} and gate["scale"] > 1
    assert safety.fit_safety_gate(rows[:20], threshold) == (None, {})  # one half has none
    shifted = [{**response, "score": response["score"] + 12} for response in pair]  # scores have no zero
    there, same = safety.fit_safety_gate([{**row, "responses": shifted} for row in rows], threshold)
    assert same == figures and there["scale"] == pytest.approx(gate["scale"])


def test_every_parameter_changes(undisturbed):
    start, saved = pretrained.load_scorer("tiny", TOKENIZER, 1).state_dict(), weights(undisturbed)
    assert set(start) == set(saved) and "score.weight" in saved
    assert not [name for name in start if torch.equal(start[name], saved[name])]


# -- the loss of one optimiser step ------------------------------------------------------
def one_step(some_comparisons, margin="none", **options):
    """((loss, accuracy, gradient norm), gradients) of reward.update from the tiny model."""
    model = pretrained.load_scorer("tiny", TOKENIZER, 1)
    args = reward.Args(**{"max_grad_norm": 0.0, "micro_batch_size": 4, "max_length": 64, **options})
    optimizer = Gradients(model)
    figures = reward.update(model, optimizer, comparisons.with_margins(some_comparisons, margin), args)
    return figures, optimizer.gradients


def reference(some_comparisons, margin=lambda c, i, j: 0.0):
    """The same on separate rows, by the papers' formulas: the mean over comparisons, a ranking counting as the mean
    over its pairs and a soft label weighting both orders."""
    model, losses, right = pretrained.load_scorer("tiny", TOKENIZER, 1), [], []
    for c in some_comparisons:
        r = [model(input_ids=ids(c, k)).logits[0, 0] for k in range(len(c.texts))]
        if c.preference is not None:
            m, p = margin(c, 0, 1), c.preference
            losses.append(-p * F.logsigmoid(r[0] - r[1] - m) - (1 - p) * F.logsigmoid(r[1] - r[0] - m))
            right.append(0.5 if p == 0.5 else float((r[0] > r[1]) == (p > 0.5)))
            continue
        pairs = [(i, j) for i in range(len(r)) for j in range(len(r)) if c.ranks[i] < c.ranks[j]]
        terms = [-F.logsigmoid(r[i] - r[j] - margin(c, i, j)) for i, j in pairs]
        right += [float(r[i] > r[j]) for i, j in pairs]
        losses.append(sum(terms) / len(terms))
    loss = sum(losses) / len(losses)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return (loss.item(), sum(right) / len(right), norm_of(gradients)), gradients


LEVELS = ("significantly better", "better", "slightly better", "negligibly better")
SMALL, LARGE = dict(zip(LEVELS, (1, 2 / 3, 1 / 3, 0))), dict(zip(LEVELS, (3, 2, 1, 0)))
SCORED = [
    {**without(row, "rating"), "chosen_score": float(i % 5 + 1), "rejected_score": 0.5}
    for i, row in enumerate(ROWS[:9])
]
MARGINS = [{**without(row, "rating"), "margin": 0.3 * i} for i, row in enumerate(ROWS[:9])]
SOFT = [{**row, "preference": p} for row, p in zip(ROWS, (0.9, 0.2, 0.5, 1.0, 0.0, 0.7, 0.35))]
RANKINGS = tiny.rows("rankings", "train")[:5]
GRADES = [[r["score"] for r in row["responses"]] for row in RANKINGS]
WIDEST = max(max(label_scores) - min(label_scores) for label_scores in GRADES)
VARIANTS = {
    "pairs": (ROWS[:9], "none", lambda c, i, j: 0.0),
    "small by rating": (ROWS[:9], "small", lambda c, i, j: SMALL[c.row.data["rating"]]),
    "large by rating": (ROWS[:9], "large", lambda c, i, j: LARGE[c.row.data["rating"]]),
    "margin column": (MARGINS, "small", lambda c, i, j: c.row.data["margin"]),
    # the largest gap of the data is 4.5: a difference of 4.5 gets the largest margin
    "large by scores": (SCORED, "large", lambda c, i, j: 3 * (c.row.data["chosen_score"] - 0.5) / 4.5),
    "soft labels": (SOFT, "none", lambda c, i, j: 0.0),
    "soft labels and margin": (SOFT, "small", lambda c, i, j: SMALL[c.row.data["rating"]]),
    "rankings": (RANKINGS, "none", lambda c, i, j: 0.0),
    "rankings and margin": (RANKINGS, "small", lambda c, i, j: abs(c.label_scores[i] - c.label_scores[j]) / WIDEST),
    "pairs and rankings": ([*ROWS[:4], *RANKINGS[:3]], "none", lambda c, i, j: 0.0),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_the_formula_on_rows_of_their_own(tmp_path, name):
    rows, margin, m = VARIANTS[name]
    loaded = comparisons_of(tmp_path, rows)
    assert len(loaded) == len(rows)
    assert_same_step(one_step(loaded, margin), reference(loaded, m))


def test_a_wrong_margin_or_end_would_change_the_loss(tmp_path):
    """The test above can fail."""
    loaded = comparisons_of(tmp_path, ROWS[:9])
    [loss, *_], _ = one_step(loaded)
    without_ends = [c._replace(response_ids=[ids[:-1] for ids in c.response_ids]) for c in loaded]
    for other, far in ((one_step(loaded, "small"), 0.05), (one_step(without_ends), 1e-3)):
        assert abs(other[0][0] - loss) > far


@pytest.mark.parametrize("name", ["pairs", "soft labels", "pairs and rankings"])
@pytest.mark.parametrize(
    "options", [{"micro_batch_size": 1}, {"micro_batch_size": 64}, {"share_prompt": False}]
)
def test_micro_batches_and_shared_prompts_change_neither_loss_nor_gradient(tmp_path, name, options):
    loaded = comparisons_of(tmp_path, VARIANTS[name][0])
    assert_same_step(one_step(loaded, **options), one_step(loaded))


# -- variants as commands ----------------------------------------------------------------
def test_without_shared_prompts_a_run_has_the_same_losses(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, share_prompt=False, micro_batch_size=3, max_steps=4, eval_every=0))
    # the second step's learning rate is the first that is not 0, and depends on max_steps
    for key, n in (("loss/reward", 2), ("eval/nll", 1)):
        assert column(tmp_path, key)[:n] == pytest.approx(column(undisturbed, key)[:n], abs=1e-4)


def test_rankings_train_and_count_all_their_pairs(small, tmp_path):
    paths = {}
    for flag, name in (("dataset", "train"), ("eval_dataset", "test")):
        paths[flag] = write_rows(tmp_path / f"{name}.jsonl", tiny.rows("rankings", name)[:24])
    options = {"length_prompts": 0, "max_steps": 4, "margin": "small", "plots": True}
    succeeds(run(small, tmp_path / "run", **options, **paths))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert all(sorted(r["rank"] for r in sample["responses"]) == [0, 1, 2, 3] for sample in samples)
    assert column(tmp_path / "run", "eval/pairs")[-1] == 24 * 6
    best = [max(sample["responses"], key=lambda r: r["score"])["rank"] == 0 for sample in samples]
    assert column(tmp_path / "run", "eval/best_of_n_accuracy")[-1] == sum(best) / 24  # no two score alike
    assert all(math.isfinite(x) for x in column(tmp_path / "run", "loss/reward"))
    assert read_json(tmp_path / "run" / "model" / "config.json")["safety_gate"] is None


def test_a_margin_without_rating_margin_or_scores_names_the_row(small, tmp_path):
    path = write_rows(tmp_path / "bare.jsonl", [*ROWS[:4], without(ROWS[4], "rating"), *ROWS[5:9]])
    ended = run(small, tmp_path / "run", dataset=path, margin="small")
    assert_error(ended, "bare.jsonl:5", "rating", "--margin small")
    assert not (tmp_path / "run" / "args.json").exists()


def test_a_second_stage_starts_from_the_first_ones_model_and_head(small, undisturbed, tmp_path):
    """Without safety labels it keeps no gate, because the first one's scale and offset do not fit its scores."""
    assert read_json(undisturbed / "model" / "config.json")["safety_gate"]
    succeeds(run(small, tmp_path / "second", model=undisturbed, max_steps=3))
    first, second = rows_of(undisturbed, "eval/nll")[-1], rows_of(tmp_path / "second", "eval/nll")
    for key in ("eval/accuracy", "eval/nll", "eval/brier"):
        assert second[0][key] == pytest.approx(first[key], abs=1e-6)
    assert "baseline/sft_logprob_accuracy" not in second[-1]  # a reward model has no log probabilities
    assert weights(tmp_path / "second").keys() == weights(undisturbed).keys()

    rows = [without(r, "chosen_is_safe", "rejected_is_safe") for r in tiny.rows("preferences", "test")[:20]]
    path = write_rows(tmp_path / "bare.jsonl", rows)
    options = {"model": undisturbed, "sft_model": "tiny", "eval_dataset": path, "max_steps": 1}
    succeeds(run(small, tmp_path / "bare", **options))
    assert read_json(tmp_path / "bare" / "model" / "config.json")["safety_gate"] is None
    last = rows_of(tmp_path / "bare", "eval/nll")[-1]
    assert {"baseline/sft_logprob_accuracy", "length/correlation"} <= set(last)


def test_each_epoch_has_every_comparison_once_with_the_margin_of_its_rating(small, tmp_path, monkeypatch):
    options = {"sft_model": "tiny", "margin": "large"}
    steps = assert_epochs(functools.partial(steps_of, reward, 3, small, tmp_path, monkeypatch, **options))
    assert {(c.rating, c.margins[0, 1].item()) for batch, _ in steps for c in batch} == set(LARGE.items())


def test_balance_categories_draws_them_equally_often(small, tmp_path, monkeypatch):
    copies, others = ([r for r in ROWS[:2000] if (r["category"] == "copy") == same] for same in (True, False))
    path = write_rows(tmp_path / "uneven.jsonl", [*others[:20], *copies[:140]])
    drawn = []

    def update(model, optimizer, batch, args):
        optimizer.step()  # without gradients
        drawn.extend(c.category for c in batch)
        return 0.5, 0.5, 1.0

    monkeypatch.setattr(reward, "update", update)
    options = {**small.options, "sft_model": "tiny", "dataset": str(path), "max_steps": 20, "eval_every": 0}
    options = {**options, "length_prompts": 0, "save_every": 0, "output_dir": str(tmp_path / "run")}
    reward.main(reward.Args(**options, balance_categories=True))
    n = len(set(drawn))
    assert len(drawn) == 160 and n > 4 and drawn.count("copy") < 2.5 * 160 / n


@pytest.mark.parametrize("held_out", ["none", "ties"])
def test_without_held_out_pairs_a_run_has_no_held_out_metrics(small, tmp_path, held_out):
    ties = [{**row, "preference": 0.5} for row in tiny.rows("preferences", "test")[:5]]
    options = {"dataset": write_rows(tmp_path / "one.jsonl", ROWS[:1]), "eval_dataset": None}
    if held_out == "ties":
        options = {"eval_dataset": write_rows(tmp_path / "ties.jsonl", ties), "length_prompts": 0}
    succeeds(run(small, tmp_path / "run", max_steps=2, plots=True, **options))
    assert len(rows_of(tmp_path / "run")) == 2 and not rows_of(tmp_path / "run", "eval/nll")
    assert set(column(tmp_path / "run", "eval/pairs")) <= {0}


def test_without_eval_dataset_a_share_of_the_prompts_is_held_out(small, tmp_path):
    succeeds(run(small, tmp_path, eval_dataset=None, max_steps=1, length_prompts=0))
    asked = {s["prompt"][0]["content"] for s in read_jsonl(tmp_path / "samples.jsonl")}
    train, held_out = read_json(tmp_path / "summary.json")["data"]
    of_file = comparisons.load(small.options["dataset"], "train", TOKENIZER, 64)
    assert asked == {c.prompt[0]["content"] for c in splits.hold_out(of_file)[1]}
    assert train["rows"] + held_out["rows"] == 160
    assert 0 < held_out["rows"] <= 16


def test_recipes_have_the_papers_numbers():
    args = parse(reward.RECIPES, ["llama2"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (1e-5, 512, 4096, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.min_warmup_steps) == ("cosine_with_min_lr", 0.03, 5)
    assert args.weight_decay == 0.1 and args.margin == "none"
    args = parse(reward.RECIPES, ["qwen"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (3e-6, 64, 2048, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.min_warmup_steps) == ("constant_with_warmup", 0.0, 0)
    args = parse(reward.RECIPES, ["rlhf_workflow"])
    assert (args.lr, args.batch_size, args.epochs) == (2e-6, 512, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.length_prompts) == ("cosine", 0.03, 2000)
    args = parse(reward.RECIPES, ["rlaif"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (1e-5, 32, 1024 + 128, 2.0)
    args = parse(reward.RECIPES, ["summarize"])
    assert (args.lr, args.batch_size, args.epochs, args.lr_schedule) == (1.5e-5, 64, 1.0, "cosine")
    assert (args.model, args.dataset) == ("runs/sft", "trl-lib/tldr-preference")
    args = parse(reward.RECIPES, [])
    assert list(reward.RECIPES)[0] == "tiny" and args.sft_model is None
    assert comparisons.MARGINS == {"small": pytest.approx(SMALL), "large": LARGE}


# -- resuming ----------------------------------------------------------------------------
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(small, undisturbed, tmp_path, moment):
    as_killed(undisturbed, moment, tmp_path)
    assert not (tmp_path / "summary.json").exists() and not (tmp_path / "model").exists()
    assert all((tmp_path / name).exists() for name in MOMENTS[moment])
    succeeds(run(small, tmp_path, "--resume"))
    assert_same_result(tmp_path, undisturbed)


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(small, tmp_path_factory):
    """A folder of unusable models and data, in which the commands run."""
    folder = tmp_path_factory.mktemp("bad")
    same = {"prompt": "copy ant", "chosen": "ant", "rejected": "ant"}
    write_rows(folder / "unusable.jsonl", [same, {"foo": 1}])
    write_rows(folder / "long.jsonl", [{**ROWS[0], "prompt": "copy " + "ant " * 90}])
    write_rows(folder / "close.jsonl", [{**ROWS[0], "chosen_score": 2, "rejected_score": 1.5}])
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "args.json").write_text("{}")
    for n, name in ((1, "reward model"), (2, "advantage model"), (3, "classifier")):
        model = pretrained.load_scorer("tiny", TOKENIZER, min(n, 2))
        if n == 3:
            model.config.num_labels = 3
            model = AutoModelForSequenceClassification.from_config(model.config)
        for part in (model, TOKENIZER):
            part.save_pretrained(folder / name)
    return folder


BAD = [
    ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"dataset": "unusable.jsonl"}, ["unusable.jsonl:1", "unusable.jsonl:2", "the same", "foo"]),
    ({"dataset": "long.jsonl"}, ["long.jsonl:1", "64 tokens", "--max-length"]),
    ({"dataset": "close.jsonl", "min_score_gap": 1}, ["close.jsonl:1", "--min-score-gap"]),
    ({"min_score_gap": 1}, ["--min-score-gap", "no scores"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"model": "unfinished"}, ["unfinished", "--resume"]),
    ({"model": "classifier"}, ["classifier", "3 labels", "causal"]),
    ({"model": "advantage model"}, ["advantage model", "2 labels", "reward model"]),
    ({"sft_model": "reward model"}, ["reward model", "causal"]),
    ({"sft_model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"margin": "huge"}, ["--margin", "huge"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=named)
def test_bad_input_is_reported_in_one_line(small, bad, tmp_path, options, words):
    ended = run(small, tmp_path / "out", cwd=bad, **options)
    assert_error(ended, *words)
    assert not (tmp_path / "out" / "args.json").exists() and not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0}, {"micro_batch_size": 0}, {"max_length": 1}, {"max_steps": 0}, {"epochs": 0},
        {"min_score_gap": -1}, {"max_pairs_per_prompt": -1}, {"max_new_tokens": 0}, {"warmup_ratio": 2},
    ],
    ids=named,
)  # fmt: skip
def test_numbers_out_of_range_are_named_before_anything_is_loaded(options):
    [(name, value)] = options.items()
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')} {value}"):
        check_flags(reward.Args(**options))
