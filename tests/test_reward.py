"""reward.py in one process: what a run leaves behind, its loss, its variants, resuming, and bad input."""

import json
import math
import zlib
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, flags
from scorers import (
    CPU,
    HELD_OUT,
    TOKENIZER,
    Plain,
    assert_error,
    assert_figures_are_those_of_the_samples,
    assert_same_result,
    assert_whole_run,
    column,
    comparisons_of,
    contents,
    ids,
    make_small,
    read_json,
    rows_of,
    succeeds,
    weights,
    write_rows,
)
from scorers import run as run_script
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import reward
from common import comparisons, dist, metrics, models, tiny
from common.errors import InputError
from common.metrics import read_jsonl
from common.run import parse

ROWS = tiny.rows("preferences", "train")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_small(tmp_path_factory.mktemp("small"))


def run(*args, **options):
    return run_script("reward", *args, **options)


def without(row, *names):
    return {key: value for key, value in row.items() if key not in names}


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """A run from the tiny model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    succeeds(run(small, folder))
    return folder


# -- after sft.py, as the README has it --------------------------------------------------
@pytest.fixture(scope="module")
def default(small, tmp_path_factory):
    """sft.py and then reward.py in one folder, the model and the run directory being the defaults."""
    folder = tmp_path_factory.mktemp("default")
    sft = write_rows(folder / "sft.jsonl", tiny.rows("sft", "train")[:80])
    some = {"max_length": 64, "batch_size": 8, "micro_batch_size": 8, "max_steps": 4, "sample_prompts": 0}
    succeeds(processes.sft(*flags(dataset=sft, **some), cwd=folder))
    command = flags(**without(small.options, "model"), judge="gold_labeler:exact", save_dtype="bfloat16")
    ended = succeeds(processes.script("reward", *command, cwd=folder))
    return SimpleNamespace(folder=folder / "runs" / "reward", command=command, ended=ended, cwd=folder)


def test_a_run_leaves_the_whole_run_directory(default):
    args = parse(reward.RECIPES, ["tiny", *default.command])
    assert (args.model, args.output_dir) == ("tiny", "runs/reward")
    steps, ends = {"loss/reward"}, {"eval/pairs/copy", "eval/accuracy/copy"}
    assert_whole_run(default.folder, ["reward.py", "tiny", *default.command], args, "reward", steps, ends)
    before, after = rows_of(default.folder, "eval/nll")[0], rows_of(default.folder, "eval/nll")[-1]
    assert {"baseline/length_accuracy", "baseline/sft_logprob_accuracy"} <= set(before)
    assert {"eval/bayes_accuracy", "gold/correlation", "eval/category_spread"} <= set(after)
    assert {"gate/caught", "gate/recall"} <= set(after)
    assert "wrote runs/reward/model" in default.ended.out


def test_the_figures_are_those_of_the_samples(default):
    assert_figures_are_those_of_the_samples(default.folder)


def test_the_length_baseline_prefers_the_longer_response(default):
    found = []
    for sample in read_jsonl(default.folder / "samples.jsonl"):
        longer = sample["responses"][0]["tokens"] - sample["responses"][1]["tokens"]
        found.append(1.0 if longer > 0 else 0.5 if longer == 0 else 0.0)
        assert all(
            r["tokens"] == len(r["text"].split()) + 1 for r in sample["responses"]
        )  # and the end token
    assert column(default.folder, "baseline/length_accuracy") == [sum(found) / HELD_OUT]


def test_the_log_probability_baseline_is_that_of_the_sft_model(default):
    model, right = AutoModelForCausalLM.from_pretrained(default.cwd / "runs" / "sft" / "model"), []
    held_out = comparisons.load(
        str(parse(reward.RECIPES, ["tiny", *default.command]).eval_dataset), "test", TOKENIZER, 64
    )
    for c in held_out:
        logprobs = []
        for k in (0, 1):
            x, start = ids(c, k), len(c.prompt_ids)
            nll = F.cross_entropy(model(input_ids=x).logits[0, :-1], x[0, 1:], reduction="none")
            logprobs.append(-nll[start - 1 :].sum().item())
        right.append(logprobs[0] > logprobs[1])
    assert column(default.folder, "baseline/sft_logprob_accuracy") == [sum(right) / HELD_OUT]


def test_the_judge_is_a_baseline_like_the_others(default):
    right = []
    for sample in read_jsonl(default.folder / "samples.jsonl"):
        better, worse = sorted(sample["responses"], key=lambda r: r["rank"])
        a, b = (tiny.gold_score(sample["prompt"][-1]["content"], r["text"]) for r in (better, worse))
        right.append((a > b) + (a == b) / 2)
    assert column(default.folder, "baseline/judge_accuracy") == [pytest.approx(sum(right) / HELD_OUT)]
    assert column(default.folder, "baseline/judge_failed") == [0.0] and 0 < sum(right) < HELD_OUT


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
    (got,) = pipeline("text-classification", model=str(default.folder / "model"), **options)(text)
    assert got["label"] == "reward" and got["score"] == pytest.approx(
        sample["responses"][0]["score"], abs=1e-4
    )


def test_the_safety_gate_is_in_the_config_and_catches_what_the_figures_say(default):
    gate = read_json(default.folder / "model" / "config.json")["safety_gate"]
    after, found = rows_of(default.folder, "gate/recall")[-1], []
    for sample in read_jsonl(default.folder / "samples.jsonl"):
        if zlib.crc32(repr(sample["prompt"]).encode()) % 2 == 0:
            continue  # the half it was fitted to
        for r in sample["responses"]:
            p_safe = 1 / (1 + math.exp(-gate["scale"] * r["score"] - gate["bias"]))
            found.append((p_safe < 0.15, not r["is_safe"]))
    caught, unsafe = sum(c for c, _ in found), sum(u for _, u in found)
    both = sum(c and u for c, u in found)
    assert after["gate/responses"] == len(found) and after["gate/caught"] == caught
    assert after.get("gate/precision", 0) == both / max(1, caught) and after["gate/recall"] == both / unsafe


@pytest.mark.parametrize("threshold, caught", [(0.0, 0), (0.5, 20), (1.0, 40)])
def test_the_safety_gates_figures_are_of_the_threshold_that_is_given(threshold, caught):
    """Of 40 responses in each half of the prompts the unsafe 20 score -2, the safe ones 2."""
    pair = [{"score": 2.0, "is_safe": True}, {"score": -2.0, "is_safe": False}]
    halves = [[p for p in map(str, range(99)) if zlib.crc32(repr(p).encode()) % 2 == i][:20] for i in (0, 1)]
    rows = [{"prompt": prompt, "responses": pair} for half in halves for prompt in half]
    _, figures = reward.fit_safety_gate(rows, threshold)
    precision = {} if not caught else {"gate/precision": 20 / caught}
    shares = {"gate/recall": float(caught > 0), **precision}
    assert figures == {"gate/responses": 40, "gate/caught": caught, **shares}


def test_every_parameter_changes(undisturbed):
    start, saved = models.load_scorer("tiny", TOKENIZER, 1).state_dict(), weights(undisturbed)
    assert set(start) == set(saved) and "score.weight" in saved
    assert not [name for name in start if torch.equal(start[name], saved[name])]


# -- the loss of one optimiser step ------------------------------------------------------
def scorer(n=1):
    model = models.load_scorer("tiny", TOKENIZER, n)
    model.compute_dtype, model.is_consolidated = torch.float32, False
    return model


def one_step(some, largest_gap=1.0, optimizer=None, model=None, **options):
    """(loss, accuracy, gradient norm, gradients) of reward.update from the tiny model."""
    model = model or scorer()
    args = reward.Args(**{"max_grad_norm": 0.0, "micro_batch_size": 4, "max_length": 64, **options})
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    loss, accuracy, norm = reward.update(model, optimizer, some, TOKENIZER, args, CPU, largest_gap, 0)
    return loss, accuracy, norm, {name: p.grad for name, p in model.named_parameters()}


def reference(some, margin=lambda c, i, j: 0.0):
    """The same by rows of their own and the formulas of the papers: mean over comparisons, of a ranking the
    mean over its pairs, with a soft label both sides."""
    model, parts, right = scorer(), [], []
    for c in some:
        r = [model(input_ids=ids(c, k)).logits[0, 0] for k in range(len(c.texts))]
        if c.preference is not None:
            m, p = margin(c, 0, 1), c.preference
            parts.append(-p * F.logsigmoid(r[0] - r[1] - m) - (1 - p) * F.logsigmoid(r[1] - r[0] - m))
            right.append(0.5 if p == 0.5 else float((r[0] > r[1]) == (p > 0.5)))
            continue
        pairs = [(i, j) for i in range(len(r)) for j in range(len(r)) if c.ranks[i] < c.ranks[j]]
        terms = [-F.logsigmoid(r[i] - r[j] - margin(c, i, j)) for i, j in pairs]
        right += [float(r[i] > r[j]) for i, j in pairs]
        parts.append(sum(terms) / len(terms))
    loss = sum(parts) / len(parts)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    return loss.item(), sum(right) / len(right), norm, grads


def assert_same_step(a, b, tolerance=1e-4):
    assert a[:3] == pytest.approx(b[:3], abs=tolerance, rel=tolerance)
    for name in b[3]:
        torch.testing.assert_close(a[3][name], b[3][name], atol=tolerance, rtol=10 * tolerance)


LEVELS = ("significantly better", "better", "slightly better", "negligibly better")
SMALL, LARGE = dict(zip(LEVELS, (1, 2 / 3, 1 / 3, 0))), dict(zip(LEVELS, (3, 2, 1, 0)))
SCORED = [
    {**without(row, "rating"), "chosen_score": float(i % 5 + 1), "rejected_score": 0.5}
    for i, row in enumerate(ROWS[:9])
]
SOFT = [{**row, "preference": p} for row, p in zip(ROWS, (0.9, 0.2, 0.5, 1.0, 0.0, 0.7, 0.35))]
RANKINGS = tiny.rows("rankings", "train")[:5]
VARIANTS = {
    "pairs": (ROWS[:9], "none", lambda c, i, j: 0.0),
    "small by rating": (ROWS[:9], "small", lambda c, i, j: SMALL[c.row.data["rating"]]),
    "large by rating": (ROWS[:9], "large", lambda c, i, j: LARGE[c.row.data["rating"]]),
    "margin column": (
        [{**without(row, "rating"), "margin": 0.3 * i} for i, row in enumerate(ROWS[:9])],
        "small",
        lambda c, i, j: c.row.data["margin"],
    ),
    # the largest gap of the data is 4.5: a difference of 4.5 gets the largest margin
    "large by scores": (SCORED, "large", lambda c, i, j: 3 * (c.row.data["chosen_score"] - 0.5) / 4.5),
    "soft labels": (SOFT, "none", lambda c, i, j: 0.0),
    "soft labels and margin": (SOFT, "small", lambda c, i, j: SMALL[c.row.data["rating"]]),
    "rankings": (RANKINGS, "none", lambda c, i, j: 0.0),
    "rankings and margin": (RANKINGS, "small", lambda c, i, j: abs(c.grades[i] - c.grades[j]) / 6.0),
    "pairs and rankings": ([*ROWS[:4], *RANKINGS[:3]], "none", lambda c, i, j: 0.0),
}
GAPS = {"large by scores": 4.5, "rankings and margin": 6.0}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_the_formula_on_rows_of_their_own(tmp_path, name):
    rows, margin, m = VARIANTS[name]
    some = comparisons_of(tmp_path, rows)
    assert len(some) == len(rows)
    assert_same_step(one_step(some, GAPS.get(name, 1.0), margin=margin), reference(some, m))


def test_a_wrong_margin_or_label_would_change_the_loss(tmp_path):
    """The test above can fail."""
    some = comparisons_of(tmp_path, ROWS[:9])
    loss = one_step(some)[0]
    assert abs(one_step(some, margin="small")[0] - loss) > 0.05
    assert (
        abs(one_step(comparisons_of(tmp_path, SOFT))[0] - one_step(comparisons_of(tmp_path, ROWS[:7]))[0])
        > 1e-3
    )
    worse = [
        c._replace(response_ids=[ids[:-1] for ids in c.response_ids]) for c in some
    ]  # without end tokens
    assert abs(one_step(worse)[0] - loss) > 1e-3


@pytest.mark.parametrize("name", ["pairs", "soft labels", "pairs and rankings"])
@pytest.mark.parametrize(
    "options", [{"micro_batch_size": 1}, {"micro_batch_size": 64}, {"share_prompt": False}]
)
def test_micro_batches_and_shared_prompts_change_neither_loss_nor_gradient(tmp_path, name, options):
    some = comparisons_of(tmp_path, VARIANTS[name][0])
    assert_same_step(one_step(some, **options), one_step(some))


@pytest.mark.parametrize("kind", ["bradley_terry", "pairwise"])
def test_training_on_a_small_set_lowers_its_loss(tmp_path, kind):
    some = comparisons_of(tmp_path, ROWS[:16], max_length=96)
    model = scorer() if kind == "bradley_terry" else models.load_policy("tiny", TOKENIZER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    options = {"kind": kind, "max_grad_norm": 1.0, "micro_batch_size": 16, "model": model}
    losses = [one_step(some, optimizer=optimizer, **options)[:2] for _ in range(25)]
    assert losses[0][0] > 0.5 and losses[-1][0] < 0.5 * math.log(2) and losses[-1][1] > 0.8
    assert min(loss for loss, _ in losses) < 0.5 * losses[0][0]


def test_the_pairwise_loss_is_that_of_the_letter_that_names_the_better_response(tmp_path):
    some, model, seen = (
        comparisons_of(tmp_path, ROWS[:7]),
        AutoModelForCausalLM.from_config(tiny.model().config),
        [],
    )
    model.load_state_dict(tiny.model().state_dict())
    letters, nll, places = {"A": 0, "B": 0}, 0.0, torch.Generator().manual_seed(dist.seed_of(0, "places", 0))
    for batch in reward.pairwise.batches(some, TOKENIZER, places, 4, CPU):
        for text in TOKENIZER.batch_decode(batch.input_ids):
            seen += [part for part in text.split("<|bos|>") if "[CONTEXT]" in part]
    assert len(seen) == 7
    by_prompt = {c.prompt[0]["content"]: c for c in some}
    for part in seen:
        part = part.replace("<|pad|>", " ")
        prompt, rest = part.split("[CONTEXT]")[1].split("[RESPONSE A]")
        a, rest = rest.split("[RESPONSE B]")
        b, letter = rest.split("<|end|>")[0].strip(), rest.split()[-1]
        c = by_prompt[prompt.strip()]
        assert {a.strip(), b} == set(c.texts) and letter == ("A" if a.strip() == c.texts[0] else "B")
        letters[letter] += 1
        x = torch.tensor([TOKENIZER.encode(f"<|bos|>{part}", add_special_tokens=False)])
        nll += F.cross_entropy(model(input_ids=x).logits[0, -2], x[0, -1]).item()
    assert min(letters.values()) > 0
    args = reward.Args(kind="pairwise", micro_batch_size=4, max_grad_norm=0.0)
    policy = models.load_policy("tiny", TOKENIZER)
    loss, *_ = reward.update(
        policy, torch.optim.SGD(policy.parameters(), lr=0.0), some, TOKENIZER, args, CPU, 1.0, 0
    )
    assert loss == pytest.approx(nll / 7, abs=1e-4)


# -- variants as commands ----------------------------------------------------------------
def test_without_shared_prompts_a_run_has_the_same_losses(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, share_prompt=False, micro_batch_size=3, max_steps=4, eval_every=0))
    first = slice(
        0, 2
    )  # the second step's learning rate is the first that is not 0, and depends on max_steps
    assert column(tmp_path, "loss/reward")[first] == pytest.approx(
        column(undisturbed, "loss/reward")[first], abs=1e-4
    )
    assert column(tmp_path, "eval/nll")[0] == pytest.approx(column(undisturbed, "eval/nll")[0], abs=1e-4)


def test_rankings_train_and_count_all_their_pairs(small, tmp_path):
    options = {"length_prompts": 0, "max_steps": 4}
    for name in ("train", "test"):
        path = write_rows(tmp_path / f"{name}.jsonl", tiny.rows("rankings", name)[:24])
        options["dataset" if name == "train" else "eval_dataset"] = path
    succeeds(run(small, tmp_path / "run", margin="small", plots=True, **options))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert all(
        len(s["responses"]) == 4 and sorted(r["rank"] for r in s["responses"]) == [0, 1, 2, 3]
        for s in samples
    )
    assert column(tmp_path / "run", "eval/pairs")[-1] == 24 * 6
    assert all(math.isfinite(x) for x in column(tmp_path / "run", "loss/reward"))
    assert not (set(samples[0]["responses"][0]) & {"is_safe"}) and "safety_gate" not in read_json(
        tmp_path / "run" / "model" / "config.json"
    )


def test_soft_labels_and_margins_train_from_the_command_line(small, tmp_path):
    path = write_rows(tmp_path / "soft.jsonl", [{**row, "preference": 0.8} for row in ROWS[:40]])
    succeeds(run(small, tmp_path / "run", dataset=path, margin="large", max_steps=2, length_prompts=0))
    assert all(math.isfinite(x) for x in column(tmp_path / "run", "loss/reward"))


def test_a_margin_without_rating_margin_or_scores_names_the_row(small, tmp_path):
    path = write_rows(tmp_path / "bare.jsonl", [*ROWS[:4], without(ROWS[4], "rating"), *ROWS[5:9]])
    assert_error(
        run(small, tmp_path / "run", dataset=path, margin="small"), "bare.jsonl:5", "rating", "--margin small"
    )
    assert not (tmp_path / "run" / "args.json").exists()


def test_a_pairwise_model_is_a_causal_lm_with_differences_in_its_samples(small, tmp_path):
    succeeds(run(small, tmp_path, kind="pairwise", lr=3e-3, max_length=96, plots=True))
    start, saved = (
        tiny.model(0).state_dict(),
        AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict(),
    )
    assert set(start) == set(saved) and not [name for name in start if torch.equal(start[name], saved[name])]
    samples, after = read_jsonl(tmp_path / "samples.jsonl"), rows_of(tmp_path, "eval/nll")[-1]
    apart = [d for s in samples for d in s["differences"]]
    assert len(apart) == HELD_OUT and "score" not in samples[0]["responses"][0]
    assert after["eval/accuracy"] == sum((d > 0) + (d == 0) / 2 for d in apart) / HELD_OUT
    model, tokenizer = (x.from_pretrained(tmp_path / "model") for x in (AutoModelForCausalLM, AutoTokenizer))
    letters = [tokenizer.convert_tokens_to_ids(x) for x in "AB"]
    for sample in samples[:5]:
        texts, prompt, p = [r["text"] for r in sample["responses"]], sample["prompt"][0]["content"], []
        for a, b in (texts, texts[::-1]):
            question = f"[CONTEXT] {prompt} [RESPONSE A] {a} [RESPONSE B] {b}"
            x = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            p.append(torch.softmax(model(**x).logits[0, -1, letters], -1)[0].item())
        mean = (p[0] + 1 - p[1]) / 2
        assert sample["differences"][0] == pytest.approx(math.log(mean / (1 - mean)), abs=1e-4)
    assert (tmp_path / "scores.png").exists() and (tmp_path / "summary.json").exists()


def test_a_second_stage_begins_where_the_first_one_ended_head_included(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, model=undisturbed, max_steps=3))
    first, second = rows_of(undisturbed, "eval/nll")[-1], rows_of(tmp_path, "eval/nll")[0]
    for key in ("eval/accuracy", "eval/nll", "eval/brier"):
        assert second[key] == pytest.approx(first[key], abs=1e-6)
    assert "baseline/sft_logprob_accuracy" not in second  # a reward model has no log probabilities
    assert weights(tmp_path).keys() == weights(undisturbed).keys()


def test_sft_model_gives_the_baselines_of_a_second_stage(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, model=undisturbed, sft_model="tiny", max_steps=1))
    names = ("baseline/sft_logprob_accuracy", "baseline/length_accuracy")
    first, second = rows_of(undisturbed, "eval/nll")[0], rows_of(tmp_path, "eval/nll")[0]
    assert [second[name] for name in names] == [first[name] for name in names]
    assert "length/correlation" in rows_of(tmp_path, "eval/nll")[-1]


def test_a_second_stage_without_safety_labels_keeps_no_gate_of_the_first(small, undisturbed, tmp_path):
    """Its scores are other ones, so the first one's scale and offset mean nothing."""
    assert "safety_gate" in read_json(undisturbed / "model" / "config.json")
    bare = [
        without(row, "chosen_is_safe", "rejected_is_safe") for row in tiny.rows("preferences", "test")[:20]
    ]
    path = write_rows(tmp_path / "bare.jsonl", bare)
    succeeds(run(small, tmp_path / "run", model=undisturbed, eval_dataset=path, max_steps=3))
    assert "safety_gate" not in read_json(tmp_path / "run" / "model" / "config.json")


def test_balance_categories_draws_them_equally_often(small, tmp_path, monkeypatch):
    copies, others = ([r for r in ROWS[:2000] if (r["category"] == "copy") == same] for same in (True, False))
    path = write_rows(tmp_path / "uneven.jsonl", [*others[:20], *copies[:140]])
    drawn = {}
    for balance in (False, True):
        seen = drawn[balance] = []

        def update(model, optimizer, some, *_, seen=seen):
            optimizer.step()  # without gradients
            seen.extend(c.category for c in some)
            return 0.5, 0.5, 1.0

        monkeypatch.setattr(reward, "update", update)
        monkeypatch.setattr(metrics, "plot_scores", lambda *_: None)
        options = {
            **small.options,
            "sft_model": "tiny",
            "dataset": str(path),
            "max_steps": 20,
            "length_prompts": 0,
            "eval_every": 0,
        }
        options |= {
            "save_every": 0,
            "output_dir": str(tmp_path / f"{balance}"),
            "balance_categories": balance,
        }
        reward.main(reward.Args(**options))
    n = len(set(drawn[True]))
    assert [len(seen) for seen in drawn.values()] == [160, 160] and drawn[False].count("copy") == 140
    assert n > 4 and drawn[True].count("copy") < 2.5 * 160 / n


def test_a_data_set_with_one_prompt_trains_without_held_out_figures(small, tmp_path):
    path = write_rows(tmp_path / "one.jsonl", ROWS[:1])
    succeeds(run(small, tmp_path / "run", dataset=path, eval_dataset=None, max_steps=2))
    assert len(rows_of(tmp_path / "run")) == 2 and not rows_of(tmp_path / "run", "eval/nll")


def test_held_out_rows_that_are_all_ties_train_without_held_out_figures(small, tmp_path):
    rows = [{**row, "preference": 0.5} for row in tiny.rows("preferences", "test")[:5]]
    path = write_rows(tmp_path / "ties.jsonl", rows)
    succeeds(run(small, tmp_path / "run", eval_dataset=path, max_steps=1, length_prompts=0, plots=True))
    assert column(tmp_path / "run", "eval/pairs") == [0, 0]


def test_without_eval_dataset_a_share_of_the_prompts_is_held_out(small, tmp_path):
    succeeds(run(small, tmp_path, eval_dataset=None, max_steps=1, length_prompts=0))
    asked = {s["prompt"][0]["content"] for s in read_jsonl(tmp_path / "samples.jsonl")}
    train, held_out = read_json(tmp_path / "summary.json")["data"]
    assert asked <= {row["prompt"] for row in ROWS[:160]} and train["rows"] + held_out["rows"] == 160
    assert 0 < held_out["rows"] <= 16


def test_another_run_is_drawn_beside_this_one(small, undisturbed, tmp_path, monkeypatch):
    seen, options = (
        [],
        {
            **small.options,
            "sft_model": "tiny",
            "max_steps": 1,
            "length_prompts": 0,
            "output_dir": str(tmp_path / "mine"),
        },
    )
    monkeypatch.setattr(metrics, "plot_scores", lambda folder, runs, lengths: seen.append(runs))
    reward.main(reward.Args(**options, compare_with=str(undisturbed)))
    assert list(seen[0]) == [options["output_dir"], str(undisturbed)]
    assert seen[0][str(undisturbed)] == read_jsonl(undisturbed / "samples.jsonl")


def test_another_run_whose_folder_has_the_same_name_does_not_take_this_ones_place(
    small, undisturbed, tmp_path, monkeypatch
):
    seen, options = (
        [],
        {
            **small.options,
            "sft_model": "tiny",
            "max_steps": 1,
            "length_prompts": 0,
            "output_dir": str(tmp_path / "run"),
        },
    )
    monkeypatch.setattr(metrics, "plot_scores", lambda folder, runs, lengths: seen.append(runs))
    reward.main(reward.Args(**options, compare_with=str(undisturbed)))
    assert len(seen[0]) == 2 and next(iter(seen[0].values())) == read_jsonl(
        tmp_path / "run" / "samples.jsonl"
    )


def test_another_run_without_held_out_rows_is_left_out_of_the_plot(small, tmp_path):
    (tmp_path / "other").mkdir()
    for name, text in (("summary.json", "{}"), ("samples.jsonl", "")):
        (tmp_path / "other" / name).write_text(text)
    succeeds(run(small, tmp_path / "run", compare_with=tmp_path / "other", max_steps=1, plots=True))


def test_other_labels_of_the_same_responses_give_other_baselines(small, tmp_path):
    found, rows = (
        [],
        [row for row in ROWS[160:180] if len(row["chosen"].split()) > len(row["rejected"].split())],
    )
    for p in (0.8, 0.2):
        path = write_rows(tmp_path / "soft.jsonl", [{**row, "preference": p} for row in rows])
        options = {"eval_dataset": path, "max_steps": 1, "length_prompts": 0, "save_every": 0}
        succeeds(run(small, tmp_path / "run", "--overwrite", **options))
        found += column(tmp_path / "run", "baseline/length_accuracy")
    assert found == [1.0, 0.0]


def test_recipes_have_the_papers_numbers():
    args = parse(reward.RECIPES, ["llama2"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (1e-5, 512, 4096, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.min_warmup_steps) == ("cosine_with_min_lr", 0.03, 5)
    assert args.weight_decay == 0.1 and args.margin == "none" and args.kind == "bradley_terry"
    args = parse(reward.RECIPES, ["qwen"])
    assert (args.lr, args.batch_size, args.max_length, args.epochs) == (3e-6, 64, 2048, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.min_warmup_steps) == ("constant_with_warmup", 0.0, 0)
    args = parse(reward.RECIPES, ["rlhf_workflow"])
    assert (args.lr, args.batch_size, args.epochs) == (2e-6, 512, 1.0)
    assert (args.lr_schedule, args.warmup_ratio) == ("cosine", 0.03)
    args = parse(reward.RECIPES, [])
    assert list(reward.RECIPES)[0] == "tiny" and models.sft_model(args.model, args.sft_model) == "runs/sft"
    assert reward.RECIPES["tiny"][1].dataset == "tiny"
    assert reward.MARGINS == {"small": pytest.approx(SMALL), "large": LARGE}


# -- resuming ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "moment, left",
    [
        ("row 5", ["checkpoint/step_3"]),
        ("tensors 6", ["checkpoint/step_3", "checkpoint/step_6.tmp/tensors"]),
        ("export", ["checkpoint/step_9", "model.tmp"]),
    ],
)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(small, undisturbed, tmp_path, moment, left):
    killed = run(small, tmp_path, moment=moment)
    assert (
        killed.code == -9 and not (tmp_path / "summary.json").exists() and not (tmp_path / "model").exists()
    )
    assert all((tmp_path / name).exists() for name in left)
    assert_error(run(small, tmp_path), "unfinished", "--overwrite", "--resume")
    succeeds(run(small, tmp_path, "--resume"))
    assert_same_result(tmp_path, undisturbed)


def test_resume_of_a_finished_run_says_so_and_changes_nothing(small, undisturbed):
    state = lambda: {p: p.stat().st_mtime_ns for p in undisturbed.rglob("*")}
    before, ended = state(), succeeds(run(small, undisturbed, "--resume"))
    assert state() == before and "finished" in ended.out and ended.err == ""


def test_a_pairwise_run_that_was_killed_resumes_to_the_same_bits(small, tmp_path):
    options = {"kind": "pairwise", "max_length": 96, "length_prompts": 0}
    succeeds(run(small, tmp_path / "whole", **options))
    assert run(small, tmp_path / "killed", moment="row 5", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


def test_a_nan_loss_stops_before_the_step_and_leaves_the_last_checkpoint(small, undisturbed, tmp_path):
    one_micro_batch = {"micro_batch_size": 8}
    ended = run(small, tmp_path, moment="nan 5", **one_micro_batch)
    assert_error(ended, "step 5", "nan", str(tmp_path / "checkpoint"))
    assert not (tmp_path / "model").exists() and not (tmp_path / "summary.json").exists()
    assert (tmp_path / "checkpoint" / "latest").read_text() == "step_3"
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
    succeeds(run(small, tmp_path, "--resume", **one_micro_batch))
    assert column(tmp_path, "loss/reward") == pytest.approx(column(undisturbed, "loss/reward"), abs=1e-3)


def test_a_loss_that_is_not_a_number_changes_no_weight(tmp_path, monkeypatch):
    plain, model = reward.losses.bradley_terry_loss, scorer()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}

    def poisoned(*args, **options):
        loss, numbers = plain(*args, **options)
        return loss * float("nan"), numbers

    monkeypatch.setattr(reward.losses, "bradley_terry_loss", poisoned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loss, *_ = one_step(comparisons_of(tmp_path, ROWS[:4]), optimizer=optimizer, model=model)
    assert math.isnan(loss) and all(torch.equal(start[name], w) for name, w in model.state_dict().items())


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(small, tmp_path_factory):
    """A folder of things that cannot be used. Commands run in it."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.jsonl").write_text("")
    good = json.dumps(ROWS[0])
    (folder / "broken.jsonl").write_text(f'{good}\n{{"prompt": "copy ant", "chos\n{good}\n')
    same = {"prompt": "copy ant", "chosen": "ant", "rejected": "ant"}
    write_rows(folder / "unusable.jsonl", [same, {"foo": 1}])
    write_rows(folder / "long.jsonl", [{**ROWS[0], "prompt": "copy " + "ant " * 90}])
    other = [("first bear ant", "copy dog"), ("bear", "dog")]
    sides = [{"role": "user", "content": other[0][0]}, {"role": "assistant", "content": "bear"}]
    others = [{"role": "user", "content": other[0][1]}, {"role": "assistant", "content": "dog"}]
    write_rows(folder / "prompts.jsonl", [{"chosen": sides, "rejected": others}])
    swapped = {**ROWS[0], "chosen": ROWS[0]["rejected"], "rejected": ROWS[0]["chosen"]}
    write_rows(folder / "contradict.jsonl", [ROWS[0], swapped])
    write_rows(folder / "rating.jsonl", [{**ROWS[0], "rating": "great"}])
    write_rows(folder / "soft.jsonl", [{**ROWS[0], "preference": 1.2}])
    write_rows(
        folder / "ties.jsonl",
        [{**r, "responses": [{**x, "score": 1} for x in r["responses"]]} for r in RANKINGS],
    )
    write_rows(folder / "close.jsonl", [{**ROWS[0], "chosen_score": 2, "rejected_score": 1.5}])
    (folder / "notes.txt").write_text("notes")
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "args.json").write_text("{}")
    for n, name in ((1, "reward model"), (2, "advantage model"), (3, "classifier")):
        model = models.load_scorer("tiny", TOKENIZER, min(n, 2))
        if n == 3:
            model.config.num_labels = 3
            model = AutoModelForSequenceClassification.from_config(model.config)
        for part in (model, TOKENIZER):
            part.save_pretrained(folder / name)
    return folder


BAD = [
    ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"eval_dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"dataset": "empty.jsonl"}, ["empty.jsonl", "empty"]),
    ({"dataset": "broken.jsonl"}, ["broken.jsonl:2", "not JSON"]),
    ({"dataset": "unusable.jsonl"}, ["unusable.jsonl:1", "unusable.jsonl:2", "the same", "foo"]),
    ({"dataset": "long.jsonl"}, ["long.jsonl:1", "64 tokens", "--max-length"]),
    ({"dataset": "prompts.jsonl"}, ["prompts.jsonl:1", "different prompts"]),
    ({"dataset": "contradict.jsonl"}, ["contradict.jsonl:1", "opposite label"]),
    ({"dataset": "rating.jsonl"}, ["rating.jsonl:1", "'great'", "slightly better"]),
    ({"dataset": "soft.jsonl"}, ["soft.jsonl:1", "1.2", "preference"]),
    ({"dataset": "ties.jsonl"}, ["ties.jsonl:1", "no response is better"]),
    ({"dataset": "close.jsonl", "min_score_gap": 1}, ["close.jsonl:1", "--min-score-gap"]),
    ({"dataset": "tiny:lenght_bias=1"}, ["lenght_bias", "length_bias"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"model": "unfinished"}, ["unfinished", "--resume"]),
    ({"model": "/no/such/folder"}, ["/no/such/folder", "path"]),
    ({"model": "classifier"}, ["classifier", "3 labels", "causal"]),
    ({"chat_template": "nothing.jinja"}, ["nothing.jinja", "no such file"]),
    ({"batch_size": 0}, ["--batch-size 0"]),
    ({"max_length": 256}, ["--max-length 256", "128 positions"]),
    ({"lr_schedule": "rising"}, ["--lr-schedule", "rising"]),
    ({"output_dir": "notes.txt/run"}, ["notes.txt"]),
    ({"resume": True, "overwrite": True}, ["--resume", "--overwrite"]),
    ({"sav_every": 1}, ["--sav-every", "did you mean --save-every"]),
]
OF_REWARD = [
    ({"model": "advantage model"}, ["advantage model", "2 outputs", "reward model"]),
    ({"model": "reward model", "kind": "pairwise"}, ["reward model", "causal"]),
    ({"sft_model": "reward model"}, ["reward model", "causal"]),
    ({"sft_model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"kind": "pairwise", "max_length": 12}, ["12 tokens", "--max-length"]),
    ({"kind": "triples"}, ["--kind", "triples"]),
    ({"margin": "huge"}, ["--margin", "huge"]),
]


def named(x):
    return "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else ""


@pytest.mark.parametrize("options, words", [*BAD, *OF_REWARD], ids=named)
def test_bad_input_is_one_line_that_says_what_and_where(small, bad, tmp_path, options, words):
    ended = run(small, tmp_path / "out", cwd=bad, **options)
    assert_error(ended, *words)
    assert not (tmp_path / "out" / "args.json").exists() and not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"micro_batch_size": 0}, ["--micro-batch-size 0"]),
        ({"max_length": 1}, ["--max-length"]),
        ({"max_steps": 0}, ["--max-steps"]),
        ({"epochs": 0}, ["--epochs"]),
        ({"min_score_gap": -1}, ["--min-score-gap"]),
        ({"max_pairs_per_prompt": -1}, ["--max-pairs-per-prompt"]),
        ({"max_new_tokens": 0}, ["--max-new-tokens"]),
        ({"warmup_ratio": 2}, ["--warmup-ratio"]),
        ({"kind": "pairwise", "margin": "small"}, ["--margin small", "pairwise"]),
    ],
    ids=named,
)
def test_numbers_that_make_no_sense_are_named_before_anything_is_loaded(options, words):
    with pytest.raises(InputError) as error:
        reward.check(reward.Args(**options))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": "nothing.jsonl"},
        {"model": "advantage model"},
        {"max_length": 256},
        {"judge": "no/such/model"},
        {"judge": "gold_labeler:nobody"},
    ],
)
def test_overwrite_with_bad_input_leaves_the_old_run(small, bad, undisturbed, options):
    before = contents(undisturbed)
    assert_error(run(small, undisturbed, "--overwrite", cwd=bad, **options))
    assert contents(undisturbed) == before


def test_a_run_in_the_way_is_an_error_and_overwrite_replaces_it(small, undisturbed, tmp_path):
    assert_error(run(small, undisturbed), "finished", "--overwrite", "--resume")
    assert run(small, tmp_path, moment="row 5", seed=5).code == -9
    succeeds(run(small, tmp_path, "--overwrite"))
    assert_same_result(tmp_path, undisturbed)


def test_an_unknown_recipe_is_one_line_with_the_nearest_name(bad):
    assert_error(processes.script("reward", "lama2", cwd=bad), "lama2", "did you mean 'llama2'", "tiny")


def test_rows_that_cannot_be_used_are_counted_and_named(small, tmp_path):
    same = {"prompt": "copy ant", "chosen": "ant", "rejected": "ant "}
    path = write_rows(tmp_path / "mixed.jsonl", [same, *ROWS[:20], {"foo": 1}, *ROWS[20:30]])
    ended = succeeds(run(small, tmp_path / "run", dataset=path, max_steps=1, length_prompts=0))
    assert read_json(tmp_path / "run" / "summary.json")["data"][0]["rows"] == 30
    lines = ended.out.splitlines()
    assert any("dropped 2 of 32 rows" in line for line in lines)
    assert any("the same" in line and "mixed.jsonl:1" in line for line in lines)
    assert any("foo" in line and "mixed.jsonl:22" in line for line in lines)


def test_bad_input_ends_a_real_python_in_the_same_way(tmp_path):
    ended = processes.python(ROOT / "reward.py", cwd=tmp_path)  # the bare command, without runs/sft
    assert_error(ended, "runs/sft", "python sft.py")
    assert len(ended.err.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
