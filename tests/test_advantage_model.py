"""advantage_model.py in one process: the files of a run, eq. 6 and 8 of the paper, the expected reward,
ratios to other policies, samples of the policy, resuming, and bad input."""

import functools
import math
import re
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import flags
from helpers import (
    CPU, TOKENIZER, Gradients, Plain, assert_epochs, assert_error,
    assert_same_result, assert_same_step, assert_whole_run, column, comparisons_of, ids, make_small,
    named, norm_of, read_json, rows_of, sequence_logprob, steps_of, succeeds, weights, without, write_rows,
)  # fmt: skip
from helpers import run as run_script
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import advantage_model
from common import responses
from common.batches import Comparison, Row
from common.errors import InputError
from common.data import tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import reward_evaluation
from common.run.cli import parse

ROWS, RANKINGS = tiny.rows("preferences", "train"), tiny.rows("rankings", "train")[:5]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_small(tmp_path_factory.mktemp("small"))


def run(*args, **options):
    return run_script("advantage_model", *args, **options)


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """A finished run from the tiny model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    command = flags(**small.options, policy="tiny", output_dir=folder)
    ended = succeeds(processes.script("advantage_model", *command))
    return SimpleNamespace(folder=folder, command=command, ended=ended)


# -- what a run leaves behind ------------------------------------------------------------
def test_a_run_leaves_the_whole_run_directory(undisturbed):
    args = parse(advantage_model.RECIPES, ["tiny", *undisturbed.command])
    command = ["advantage_model.py", "tiny", *undisturbed.command]
    steps, ends = {"loss/advantage"}, {"eval/pairs/copy", "eval/accuracy/copy"}
    assert_whole_run(undisturbed.folder, command, args, "advantage_model", steps, ends)
    after = rows_of(undisturbed.folder, "eval/nll")[-1]
    assert {"baseline/length_accuracy", "baseline/sft_logprob_accuracy"} <= set(after)
    assert {"eval/bayes_accuracy", "gold/correlation", "eval/accuracy_low"} <= set(after)
    assert {"length/correlation", "length/prompts", "expected/bias", "expected/rmse"} <= set(after)
    assert "gold/expected_correlation" not in after  # rows of a file have no known true reward
    assert "ratio/clipped" not in after and not rows_of(undisturbed.folder, "loss/expected_reward")
    assert f"wrote {undisturbed.folder}/model" in undisturbed.ended.out
    (n_steps,) = re.findall(r"plan: (\d+) optimiser steps", undisturbed.ended.out)
    assert int(n_steps) == read_jsonl(undisturbed.folder / "metrics.jsonl")[-1]["step"]


def assert_scores_are_plain_advantages(folder, share):
    """share (1 - K/N) times r, read at the response's end, minus e, read at the prompt's end."""
    plain = Plain(folder / "model")
    with torch.no_grad():
        for sample in read_jsonl(folder / "samples.jsonl")[:10]:
            e = plain.outputs(sample["prompt"])[1].item()
            for response in sample["responses"]:
                outputs = plain.outputs(sample["prompt"], response["text"])
                assert outputs.shape == (2,)
                assert share * (outputs[0].item() - e) == pytest.approx(response["score"], abs=1e-4)


def test_plain_transformers_gives_the_scores_of_the_samples(undisturbed):
    assert_scores_are_plain_advantages(undisturbed.folder, 1.0)


def test_the_saved_model_is_a_regression_with_two_labels_all_of_whose_weights_moved(undisturbed):
    config = read_json(undisturbed.folder / "model" / "config.json")
    model = AutoModelForSequenceClassification.from_pretrained(undisturbed.folder / "model")
    assert config["architectures"] == ["LlamaForSequenceClassification"] == [type(model).__name__]
    assert config["problem_type"] == "regression" and model.config.num_labels == 2
    assert config["id2label"] == {"0": "reward", "1": "expected_reward"}
    assert config["advantage_model"] == {"n_policies": 1, "n_others": 0, "bound": 2.5}
    assert config["read_at"] == "end_token" and model.score.weight.shape == (2, 128)
    start, saved = pretrained.load_scorer("tiny", TOKENIZER, 2).state_dict(), weights(undisturbed.folder)
    assert set(start) == set(saved) and not [name for name in start if torch.equal(start[name], saved[name])]
    assert all((start["score.weight"] != saved["score.weight"]).any(1))


# -- the loss of one optimiser step ------------------------------------------------------
def one_step(batch, **options):
    """((loss, squared error of e, accuracy, gradient norm), gradients) of advantage_model.update from the tiny
    model."""
    model = pretrained.load_scorer("tiny", TOKENIZER, 2)
    args = advantage_model.Args(**{"max_grad_norm": 0.0, "micro_batch_size": 4, **options})
    optimizer = Gradients(model)
    return advantage_model.update(model, optimizer, batch, args), optimizer.gradients


def ready(loaded, k=0, n_samples=0, seed=0):
    """Comparisons with ratios below 1 and samples, made up."""
    generator, batch = torch.Generator().manual_seed(seed), []
    for i, c in enumerate(loaded):
        of_labelled = torch.rand(len(c.response_ids), k, generator=generator)
        samples = tuple(loaded[(i + j + 1) % len(loaded)].response_ids[0] for j in range(n_samples))
        batch.append(c._replace(ratios=torch.cat([of_labelled, torch.ones(n_samples, k)]), samples=samples))
    return batch


def reference(batch, k=0, n=None, bound=2.5, regress=False):
    """The same computed on separate rows: eq. 8 and 6, averaged over comparisons, and over the pairs of a ranking."""
    model, losses, errors, right = pretrained.load_scorer("tiny", TOKENIZER, 2), [], [], []
    n = k + 1 if n is None else n
    for c in batch:
        e = model(input_ids=c.prompt_ids.long()[None]).logits[0, 1]
        r = [model(input_ids=ids(c, i)).logits[0, 0] for i in range(len(c.texts))]
        a = [x - (n - k) / n * e - sum(rho * x for rho in c.ratios[i].tolist()) / n for i, x in enumerate(r)]
        pairs = [(i, j) for i in range(len(r)) for j in range(len(r)) if c.ranks[i] < c.ranks[j]]
        bounds = [F.logsigmoid(bound - a[i]) + F.logsigmoid(bound + a[j]) for i, j in pairs]
        terms = [-F.logsigmoid(a[i] - a[j]) - both for (i, j), both in zip(pairs, bounds)]
        right += [float(a[i] > a[j]) for i, j in pairs]
        losses.append(sum(terms) / len(terms))
        if regress:
            rows = [torch.cat([c.prompt_ids, y]).long()[None] for y in c.samples]
            with torch.no_grad():
                mean = sum(model(input_ids=x).logits[0, 0] for x in rows) / len(rows)
            errors.append((e - mean) ** 2)
    loss = sum(losses) / len(losses)
    error = sum(errors) / len(errors) if regress else torch.zeros(())
    (loss + error).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return (loss.item(), error.item(), sum(right) / len(right), norm_of(gradients)), gradients


VARIANTS = {  # rows, K, N, bound, samples for e
    "pairs": (ROWS[:9], 0, None, 2.5, 0),
    "another bound": (ROWS[:9], 0, None, 0.5, 0),
    "K = 1": (ROWS[:9], 1, None, 2.5, 0),
    "K = 2 of 5": (ROWS[:9], 2, 5, 2.5, 0),
    "rankings": (RANKINGS, 0, None, 2.5, 0),
    "rankings and pairs, K = 1": ([*ROWS[:4], *RANKINGS[:3]], 1, 3, 2.5, 0),
    "expected reward": (ROWS[:9], 0, None, 2.5, 3),
    "all at once": ([*ROWS[:4], *RANKINGS[:3]], 2, 4, 2.0, 2),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_the_paper_on_rows_of_their_own(tmp_path, name):
    rows, k, n, bound, n_samples = VARIANTS[name]
    batch = ready(comparisons_of(tmp_path, rows), k, n_samples)
    options = {"n_others": k, "n_policies": n, "bound": bound}
    got = one_step(batch, **options)
    assert_same_step(got, reference(batch, k, n, bound, n_samples > 0))
    for other in ({"micro_batch_size": 1}, {"micro_batch_size": 64}, {"share_prompt": False}):
        if name in ("pairs", "all at once"):
            assert_same_step(one_step(batch, **options, **other), got)


def test_a_soft_label_counts_as_its_more_likely_side_and_a_tie_has_no_loss(tmp_path):
    swapped = {**ROWS[0], "chosen": ROWS[0]["rejected"], "rejected": ROWS[0]["chosen"], "preference": 0.3}
    one, other = (one_step(ready(comparisons_of(tmp_path, [row])))[0] for row in (ROWS[0], swapped))
    assert one[0] == pytest.approx(other[0], abs=1e-5)
    tied = ready(comparisons_of(tmp_path, [{**row, "preference": 0.5} for row in ROWS[:3]]))
    assert one_step(tied)[0] == (0.0, 0.0, 0.5, 0.0)


def train(batch, steps=40):
    model = pretrained.load_scorer("tiny", TOKENIZER, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    args = advantage_model.Args(micro_batch_size=16)
    return [advantage_model.update(model, optimizer, batch, args) for _ in range(steps)]


def test_training_on_a_small_set_lowers_its_loss(tmp_path):
    steps = train(ready(comparisons_of(tmp_path, ROWS[:16])))
    best = -F.logsigmoid(torch.tensor(2 * 1.35)) - 2 * F.logsigmoid(torch.tensor(2.5 - 1.35))
    assert steps[-1][0] < 0.75 * steps[0][0] and steps[-1][2] > 0.8  # accuracy
    assert steps[-1][0] > best - 0.1  # eq. 6 has a floor
    assert all(error == 0 for _, error, *_ in steps)


def test_the_regression_brings_e_to_the_mean_reward_of_the_samples(tmp_path):
    steps = train(ready(comparisons_of(tmp_path, ROWS[:16]), n_samples=3))
    assert steps[-1][1] < 0.5 * steps[0][1] and steps[-1][0] < steps[0][0]


# -- ratios to other policies ------------------------------------------------------------
def ratios_of(loaded, policy="tiny", **options):
    """(ratios of each comparison, share that is clipped)"""
    args = advantage_model.Args(policy=policy, **options)
    batch, figures = reward_evaluation.with_policy_answers(loaded, policy, TOKENIZER, args, CPU)
    return [c.ratios for c in batch], figures["ratio/clipped"]


@pytest.mark.parametrize("k, n", [(1, None), (2, 4)])
def test_ratios_come_from_the_columns_and_are_clipped(small, tmp_path, k, n):
    # near what an untrained model says, so that some are clipped and some are not
    rows = [dict(row) for row in ROWS[:24]]
    for i, row in enumerate(rows):
        for side in ("chosen", "rejected"):
            near = -math.log(len(TOKENIZER)) * (len(row[side].split()) + 1)
            row[f"{side}_behavior_logprobs"] = [near + (i % 5 - 2), near - (i % 3 - 1)]
    loaded = comparisons_of(tmp_path, rows)
    options = {"n_others": k, "n_policies": n, "ratio_clip": 0.8}
    ratios, share = ratios_of(loaded, **options)
    model, clipped = tiny.model(), []
    for c, of_responses in zip(loaded, ratios):
        for i, side in enumerate(("chosen", "rejected")):
            logprob, others = sequence_logprob(model, c, i), c.row.data[f"{side}_behavior_logprobs"][:k]
            want = [math.exp(logprob - x) for x in others]
            assert of_responses[i].tolist() == pytest.approx([min(x, 0.8) for x in want], rel=1e-3)
            clipped += [x > 0.8 for x in want]
    assert 0 < sum(clipped) < len(clipped) and share == pytest.approx(sum(clipped) / len(clipped))
    options = {**options, "dataset": tmp_path / "rows.jsonl", "save_dtype": "bfloat16", "max_steps": 1}
    succeeds(run(small, tmp_path / "run", **options, length_prompts=0))
    assert column(tmp_path / "run", "ratio/clipped") == [pytest.approx(share)]
    assert_scores_are_plain_advantages(tmp_path / "run", 1 - k / (n or k + 1))
    saved = read_json(tmp_path / "run" / "model" / "config.json")["advantage_model"]
    assert (saved["n_policies"], saved["n_others"]) == (n or k + 1, k)


def test_ratios_come_from_behavior_policies_and_policy(small, tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for seed, folder in enumerate(folders, 1):
        for part in (tiny.model(seed), TOKENIZER):
            part.save_pretrained(folder)
    policy, *others = tiny.model(), *map(AutoModelForCausalLM.from_pretrained, folders)
    loaded = comparisons_of(tmp_path, ROWS[:3])
    ratios, _ = ratios_of(loaded, n_others=2, ratio_clip=4.0, behavior_policies=tuple(map(str, folders)))
    for c, of_responses in zip(loaded, ratios):
        for i in (0, 1):
            logprobs = [sequence_logprob(model, c, i) for model in (policy, *others)]
            want = [min(math.exp(logprobs[0] - x), 4.0) for x in logprobs[1:]]
            assert of_responses[i].tolist() == pytest.approx(want, rel=1e-3)
    more = ["--behavior-policies", *folders, "--n-others", 2]
    succeeds(run(small, tmp_path / "run", *more, max_steps=1, length_prompts=0))
    assert read_json(tmp_path / "run" / "args.json")["args"]["behavior_policies"] == list(map(str, folders))


def test_rankings_have_their_ratios_in_the_order_of_the_responses(tmp_path):
    loaded, model = comparisons_of(tmp_path, RANKINGS), tiny.model()
    for c, of_responses in zip(loaded, ratios_of(loaded, n_others=1, ratio_clip=10**8)[0]):
        by_text = {r["text"]: r["behavior_logprobs"][0] for r in c.row.data["responses"]}
        for i, text in enumerate(c.texts):
            want = math.exp(sequence_logprob(model, c, i) - by_text[text])
            assert of_responses[i].item() == pytest.approx(min(want, 10**8), rel=1e-3)


def test_of_more_columns_than_k_the_first_ones_count(tmp_path):
    """The tiny world's rows have two log probabilities."""
    loaded = comparisons_of(tmp_path, ROWS[:3])
    columns = reward_evaluation.behavior_columns(loaded, advantage_model.Args(n_others=1))
    want = [[ROWS[i][f"{side}_behavior_logprobs"][:1] for side in ("chosen", "rejected")] for i in range(3)]
    assert [x.tolist() for x in columns] == [[[pytest.approx(v)] for (v,) in of_row] for of_row in want]
    with pytest.raises(InputError, match="3 numbers"):
        reward_evaluation.behavior_columns(loaded, advantage_model.Args(n_others=3))


# -- samples of the policy, and e --------------------------------------------------------
LIMITS = SimpleNamespace(model="tiny", max_new_tokens=60, slots=64)


def test_policy_samples_end_in_the_templates_end_token(tmp_path, monkeypatch):
    ended = [responses.Response([20, 3], "", True), responses.Response([20, 21], "", False)]
    monkeypatch.setattr(responses, "sample_responses", lambda *_, **__: [(None, r) for r in ended])
    prompts, policy = comparisons_of(tmp_path, ROWS[:1]), pretrained.load_policy("tiny", TOKENIZER)
    [[sample]] = reward_evaluation.policy_samples(policy, prompts, TOKENIZER, 2, LIMITS, 1)
    assert sample.tolist() == [20, TOKENIZER.eos_token_id]


def test_policy_samples_gives_the_responses_that_ended(tmp_path, capsys):
    prompts, policy = comparisons_of(tmp_path, ROWS[:2]), pretrained.load_policy("tiny", TOKENIZER)
    drawn = lambda seed: reward_evaluation.policy_samples(policy, prompts, TOKENIZER, 8, LIMITS, seed)
    one, again, other = map(drawn, (1, 1, 2))
    n = sum(map(len, one))
    assert 0 < n < 16 and f"{n} of 16 samples had room, ended within --max-new-tokens" in capsys.readouterr().out
    for sample in [sample for of_prompt in one for sample in of_prompt]:
        assert sample.dtype == torch.int32 and 1 <= len(sample) <= 60
        assert sample.tolist().index(TOKENIZER.eos_token_id) == len(sample) - 1
    one, again, other = ([[x.tolist() for x in y] for y in samples] for samples in (one, again, other))
    assert one == again != other


def test_expected_reward_samples_change_e_and_log_its_loss(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, expected_reward_samples=2, length_prompts=6, max_new_tokens=40))
    errors = column(tmp_path, "loss/expected_reward")
    assert len(errors) == 10 and all(x > 0 and math.isfinite(x) for x in errors)
    prompt = [{"role": "user", "content": "copy ant bear cat"}]
    with torch.no_grad():
        e = [Plain(folder / "model").outputs(prompt)[1].item() for folder in (tmp_path, undisturbed.folder)]
    assert abs(e[0] - e[1]) > 1e-3
    assert_scores_are_plain_advantages(tmp_path, 1.0)


@pytest.mark.parametrize(
    "e, wanted", [((2.0, 1.0, -0.3), 1.0), ((-2.0, -1.0, 0.3), -1.0), ((0.0, 1.0, 0.0), 0.0751)]
)
def test_expected_reward_metrics_by_hand(e, wanted, monkeypatch):
    """The gold rewards of three prompts' answers are 2 and 2, 1 and 1, 0 and -0.6: means 2, 1, -0.3. The
    means of r are -0.2, -0.1 and 0.03, in the opposite order, so e correlates with them as with the gold rewards but
    for the sign; r has a variance of 0.005 on each prompt, its mean 0.0025."""
    answers = (("ant bear", "ant bear"), ("ant", "bear"), ("", "cat dog"))
    turns, row = [{"role": "user", "content": "copy ant bear"}], Row("rows:0", {})
    sampled = []
    for texts in answers:
        samples = [torch.tensor(TOKENIZER(text)["input_ids"] or [TOKENIZER.eos_token_id]) for text in texts]
        prompt = Comparison(turns, [""], torch.zeros(1), [], torch.zeros(0), "x", row)
        sampled.append(prompt._replace(samples=tuple(samples)))
    means = (-0.2, -0.1, 0.03)
    outputs = [(torch.tensor([m - 0.05, m + 0.05]), torch.tensor(x)) for m, x in zip(means, e)]
    monkeypatch.setattr(reward_evaluation, "baselines_and_samples", lambda *_: ({}, sampled))
    monkeypatch.setattr(reward_evaluation, "of_each_comparison", lambda *_: outputs)
    rest = (SimpleNamespace(device=CPU), "policy", sampled, TOKENIZER)
    figures = reward_evaluation.expected_reward_metrics(*rest, advantage_model.Args())
    assert figures["gold/expected_correlation"] == pytest.approx(wanted, abs=1e-3)
    assert figures["expected/correlation"] == pytest.approx(-wanted, abs=1e-3)
    errors, deviation = [x - m for m, x in zip(means, e)], math.sqrt(0.005)
    rmse = math.sqrt(sum(x**2 for x in errors) / 3 - 0.0025)
    assert figures["expected/bias"] == pytest.approx(sum(errors) / 3 / deviation, rel=1e-4)
    assert figures["expected/rmse"] == pytest.approx(rmse / deviation, rel=1e-4)
    other = advantage_model.Args(dataset="rows.jsonl")  # no true reward is known
    assert "gold/expected_correlation" not in reward_evaluation.expected_reward_metrics(*rest, other)


# -- variants as commands ----------------------------------------------------------------
def test_without_shared_prompts_a_run_has_the_same_losses(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, share_prompt=False, micro_batch_size=3, max_steps=4, eval_every=0))
    for key, n in (("loss/advantage", 2), ("eval/nll", 1)):
        want = column(undisturbed.folder, key)[:n]
        assert column(tmp_path, key)[:n] == pytest.approx(want, abs=1e-4)


def test_each_epoch_has_every_comparison_once_at_the_schedules_rates(small, tmp_path, monkeypatch):
    assert_epochs(functools.partial(steps_of, advantage_model, 4, small, tmp_path, monkeypatch, policy="tiny"))


def test_a_second_run_starts_from_the_first_ones_model_and_head(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, model=undisturbed.folder, max_steps=1))
    first, second = rows_of(undisturbed.folder, "eval/nll")[-1], rows_of(tmp_path, "eval/nll")[0]
    for key in ("eval/accuracy", "eval/nll", "eval/brier"):
        assert second[key] == pytest.approx(first[key], abs=1e-6)
    assert not column(tmp_path, "baseline/sft_logprob_accuracy")


def test_rankings_train_and_count_all_their_pairs(small, tmp_path):
    paths = {}
    for flag, name in (("dataset", "train"), ("eval_dataset", "test")):
        paths[flag] = write_rows(tmp_path / f"{name}.jsonl", tiny.rows("rankings", name)[:16])
    options = {"n_others": 1, "n_policies": 3, "max_steps": 2, "length_prompts": 0, "plots": True}
    succeeds(run(small, tmp_path / "run", **paths, **options))
    assert column(tmp_path / "run", "eval/pairs")[-1] == 16 * 6
    assert all(math.isfinite(x) for x in column(tmp_path / "run", "loss/advantage"))


def test_recipes_have_the_papers_numbers():
    args = parse(advantage_model.RECIPES, ["advantage_model"])
    assert (args.lr, args.batch_size, args.bound, args.epochs) == (5e-6, 180, 2.5, 1.0)
    assert (args.lr_schedule, args.warmup_ratio) == ("cosine_with_min_lr", 0.1)
    assert args.dataset == "Anthropic/hh-rlhf" and list(advantage_model.RECIPES)[0] == "tiny"
    args = parse(advantage_model.RECIPES, [])
    assert args.bound == 2.5 and args.policy is None


# -- resuming ----------------------------------------------------------------------------
def test_a_killed_run_with_samples_and_ratios_resumes_to_the_same_bits(small, tmp_path):
    options = {"expected_reward_samples": 1, "n_others": 1, "length_prompts": 2, "max_new_tokens": 4}
    succeeds(run(small, tmp_path / "whole", **options))
    assert run(small, tmp_path / "killed", moment="row 5", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of unusable models and data, in which the commands run."""
    folder = tmp_path_factory.mktemp("bad")
    names = ("chosen_behavior_logprobs", "rejected_behavior_logprobs")
    fourth = {
        "no_columns": without(ROWS[3], *names),
        "one_column": without(ROWS[3], names[1]),
        "short": {**ROWS[3], names[0]: [-2.0]},
        "number": {**ROWS[3], names[0]: -2.0},
        "words": {**ROWS[3], names[0]: ["low", "high"]},
        "holes": {**ROWS[3], names[0]: [None, None]},
    }
    for name, row in fourth.items():
        write_rows(folder / f"{name}.jsonl", [*ROWS[:3], row])
    for n, name in ((1, "reward model"), (2, "advantage model")):
        for part in (pretrained.load_scorer("tiny", TOKENIZER, n), TOKENIZER):
            part.save_pretrained(folder / name)
    return folder


BAD = [
    ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
    ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
    ({"policy": "runs/sft", "n_others": 1}, ["runs/sft", "python sft.py"]),
    ({"model": "reward model"}, ["reward model", "1 output", "advantage model"]),
    ({"policy": "reward model"}, ["reward model", "causal"]),
    ({"behavior_policies": "reward model", "n_others": 1}, ["reward model", "causal"]),
    ({"model": "advantage model", "n_others": 1}, ["advantage model", "--policy"]),
    ({"model": "advantage model", "expected_reward_samples": 1}, ["advantage model", "--policy"]),
    ({"n_others": 1, "ratio_clip": 2}, ["--n-others 1", "--ratio-clip 2", "--n-policies 2"]),
    ({"dataset": "no_columns.jsonl", "n_others": 1}, ["no_columns.jsonl:4", "chosen_behavior_logprobs"]),
    ({"dataset": "one_column.jsonl", "n_others": 1}, ["one_column.jsonl:4", "rejected_behavior_logprobs"]),
    ({"dataset": "short.jsonl", "n_others": 2}, ["short.jsonl:4", "2 numbers"]),
    ({"dataset": "number.jsonl", "n_others": 1}, ["number.jsonl:4", "behavior_logprobs"]),
    ({"dataset": "words.jsonl", "n_others": 1}, ["words.jsonl:4", "behavior_logprobs"]),
    ({"dataset": "holes.jsonl", "n_others": 1}, ["holes.jsonl:4", "behavior_logprobs"]),
    ({"max_length": 256}, ["--max-length 256", "128 positions"]),
    ({"other": 1}, ["--other", "did you mean --n-others"]),
]


@pytest.mark.parametrize("options, words", BAD, ids=named)
def test_bad_input_is_reported_in_one_line(small, bad, tmp_path, options, words):
    ended = run(small, tmp_path / "out", cwd=bad, **options)
    assert_error(ended, *words)
    assert not (tmp_path / "out" / "args.json").exists() and not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"bound": 0}, ["--bound 0"]),
        ({"n_others": -1}, ["--n-others -1"]),
        ({"n_others": 1, "n_policies": 1}, ["--n-policies 1", "--n-others"]),
        ({"n_others": 2, "n_policies": 1}, ["--n-policies 1", "--n-others"]),
        ({"n_others": 2, "n_policies": 4, "ratio_clip": 2}, ["--ratio-clip 2", "--n-policies 4"]),
        ({"ratio_clip": 0}, ["--ratio-clip 0"]),
        ({"expected_reward_samples": -1}, ["--expected-reward-samples -1"]),
        ({"behavior_policies": ("tiny",)}, ["--behavior-policies", "--n-others 0"]),
        ({"behavior_policies": ("tiny",), "n_others": 2}, ["--behavior-policies", "--n-others 2"]),
    ],
    ids=named,
)
def test_numbers_out_of_range_are_named_before_anything_is_loaded(options, words):
    with pytest.raises(InputError) as error:
        advantage_model.check(advantage_model.Args(**options))
    assert all(word in str(error.value) for word in words)
