"""advantage_model.py in one process: what a run leaves behind, eq. 6 and 8 of the paper, the expected reward,
ratios to other policies, resuming, and bad input."""

import math
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, flags
from scorers import (
    CPU,
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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import advantage_model
from common import data, metrics, models, tiny
from common.batches import Comparison, Row
from common.errors import InputError
from common.metrics import read_jsonl
from common.run import parse

ROWS, RANKINGS = tiny.rows("preferences", "train"), tiny.rows("rankings", "train")[:5]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return make_small(tmp_path_factory.mktemp("small"))


def run(*args, **options):
    return run_script("advantage_model", *args, **options)


def without(row, *names):
    return {key: value for key, value in row.items() if key not in names}


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """A run from the tiny model."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    command = flags(**small.options, policy="tiny", output_dir=folder)
    ended = succeeds(processes.script("advantage_model", *command))
    return SimpleNamespace(folder=folder, command=command, ended=ended)


# -- what a run leaves behind ------------------------------------------------------------
def test_a_run_leaves_the_whole_run_directory(undisturbed):
    args, command = (
        parse(advantage_model.RECIPES, ["tiny", *undisturbed.command]),
        ["advantage_model.py", "tiny", *undisturbed.command],
    )
    steps, ends = {"loss/advantage"}, {"eval/pairs/copy", "eval/accuracy/copy"}
    assert_whole_run(undisturbed.folder, command, args, "advantage_model", steps, ends)
    before, after = (rows_of(undisturbed.folder, "eval/nll")[i] for i in (0, -1))
    assert {"baseline/length_accuracy", "baseline/sft_logprob_accuracy"} <= set(before)
    assert {"eval/bayes_accuracy", "gold/correlation", "eval/category_spread"} <= set(after)
    assert {"length/correlation", "length/prompts", "expected/bias", "expected/rmse"} <= set(after)
    assert ("gold/expected_correlation" in after) == data.is_tiny(args.dataset)
    assert not rows_of(undisturbed.folder, "loss/expected_reward") and "ratio/clipped" not in before
    assert f"wrote {undisturbed.folder}/model" in undisturbed.ended.out


def test_the_figures_are_those_of_the_samples(undisturbed):
    assert_figures_are_those_of_the_samples(undisturbed.folder)


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


def test_the_saved_model_is_a_regression_with_two_labels(undisturbed):
    config = read_json(undisturbed.folder / "model" / "config.json")
    model = AutoModelForSequenceClassification.from_pretrained(undisturbed.folder / "model")
    assert config["architectures"] == ["LlamaForSequenceClassification"] == [type(model).__name__]
    assert config["problem_type"] == "regression" and model.config.num_labels == 2
    assert config["id2label"] == {"0": "reward", "1": "expected_reward"}
    assert config["advantage_model"] == {"n_policies": 1, "n_others": 0, "bound": 2.5}
    assert config["read_at"] == "end_token"
    assert model.score.weight.shape == (2, 128) and "lm_head.weight" not in weights(undisturbed.folder)


def test_every_parameter_changes_and_both_rows_of_the_head(undisturbed):
    start, saved = models.load_scorer("tiny", TOKENIZER, 2).state_dict(), weights(undisturbed.folder)
    assert set(start) == set(saved) and not [name for name in start if torch.equal(start[name], saved[name])]
    assert all((start["score.weight"] != saved["score.weight"]).any(1))


def test_the_defaults_are_the_runs_of_the_scripts_before(small, tmp_path):
    """runs/sft is the policy, and runs/reward is drawn beside it, if it is there."""
    args = advantage_model.Args()
    policy = models.sft_model(args.model, args.policy)
    assert (policy, args.compare_with) == ("runs/sft", "runs/reward")
    sft = write_rows(tmp_path / "sft.jsonl", tiny.rows("sft", "train")[:40])
    some = {"max_length": 64, "batch_size": 8, "micro_batch_size": 8, "max_steps": 1, "sample_prompts": 0}
    succeeds(processes.sft(*flags(dataset=sft, **some), cwd=tmp_path))
    few = {**without(small.options, "model"), "max_steps": 1, "length_prompts": 0}
    for script in ("reward", "advantage_model"):
        succeeds(processes.script(script, *flags(**few), cwd=tmp_path))
        assert read_json(tmp_path / "runs" / script / "summary.json")["steps"] == 1


# -- the loss of one optimiser step ------------------------------------------------------
def scorer():
    model = models.load_scorer("tiny", TOKENIZER, 2)
    model.compute_dtype, model.is_consolidated = torch.float32, False
    return model


def one_step(some, optimizer=None, model=None, **options):
    """(loss, squared error of e, accuracy, gradient norm, gradients) of advantage_model.update from the tiny
    model."""
    model = model or scorer()
    args = advantage_model.Args(**{"max_grad_norm": 0.0, "micro_batch_size": 4, **options})
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    results = advantage_model.update(model, optimizer, some, TOKENIZER.pad_token_id, args, CPU)
    return *results, {name: p.grad for name, p in model.named_parameters()}


def ready(some, k=0, n_samples=0, seed=0):
    """Comparisons with ratios below 1 and samples, both made up."""
    generator, out = torch.Generator().manual_seed(seed), []
    for i, c in enumerate(some):
        of_labelled = torch.rand(len(c.response_ids), k, generator=generator)
        samples = tuple(some[(i + j + 1) % len(some)].response_ids[0] for j in range(n_samples))
        out.append(c._replace(ratios=torch.cat([of_labelled, torch.ones(n_samples, k)]), samples=samples))
    return out


def reference(some, k=0, n=None, bound=2.5, regress=False):
    """The same by rows of their own: eq. 8 and eq. 6, mean over comparisons, of a ranking mean over pairs."""
    model, parts, errors, right = scorer(), [], [], []
    n = k + 1 if n is None else n
    for c in some:
        e = model(input_ids=c.prompt_ids.long()[None]).logits[0, 1]
        r = [model(input_ids=ids(c, i)).logits[0, 0] for i in range(len(c.texts))]
        a = [x - (n - k) / n * e - sum(rho * x for rho in c.ratios[i].tolist()) / n for i, x in enumerate(r)]
        pairs = [(i, j) for i in range(len(r)) for j in range(len(r)) if c.ranks[i] < c.ranks[j]]
        terms = [
            -F.logsigmoid(a[i] - a[j]) - F.logsigmoid(bound - a[i]) - F.logsigmoid(bound + a[j])
            for i, j in pairs
        ]
        right += [float(a[i] > a[j]) for i, j in pairs]
        parts.append(sum(terms) / len(terms))
        if regress:
            rows = [torch.cat([c.prompt_ids, y]).long()[None] for y in c.samples]
            with torch.no_grad():
                mean = sum(model(input_ids=x).logits[0, 0] for x in rows) / len(rows)
            errors.append((e - mean) ** 2)
    loss = sum(parts) / len(parts)
    error = sum(errors) / len(errors) if regress else torch.zeros(())
    (loss + error).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    return loss.item(), error.item(), sum(right) / len(right), norm, grads


def assert_same_step(a, b, tolerance=1e-4):
    assert a[:4] == pytest.approx(b[:4], abs=tolerance, rel=tolerance)
    for name in b[4]:
        torch.testing.assert_close(a[4][name], b[4][name], atol=tolerance, rtol=10 * tolerance)


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
    some = ready(comparisons_of(tmp_path, rows), k, n_samples)
    options = {"n_others": k, "n_policies": n, "bound": bound, "expected_reward_samples": n_samples}
    assert_same_step(one_step(some, **options), reference(some, k, n, bound, n_samples > 0))


def test_a_soft_label_counts_as_its_likelier_side(tmp_path):
    swapped = {**ROWS[0], "chosen": ROWS[0]["rejected"], "rejected": ROWS[0]["chosen"], "preference": 0.3}
    one, other = (ready(comparisons_of(tmp_path, [row])) for row in (ROWS[0], swapped))
    assert one_step(one)[0] == pytest.approx(one_step(other)[0], abs=1e-5)


def test_ties_alone_are_a_loss_of_nothing(tmp_path):
    tied = ready(comparisons_of(tmp_path, [{**row, "preference": 0.5} for row in ROWS[:3]]))
    assert one_step(tied)[:4] == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["pairs", "all at once"])
@pytest.mark.parametrize(
    "options", [{"micro_batch_size": 1}, {"micro_batch_size": 64}, {"share_prompt": False}]
)
def test_micro_batches_and_shared_prompts_change_neither_loss_nor_gradient(tmp_path, name, options):
    rows, k, n, bound, n_samples = VARIANTS[name]
    some = ready(comparisons_of(tmp_path, rows), k, n_samples)
    same = {"n_others": k, "n_policies": n, "bound": bound, "expected_reward_samples": n_samples}
    assert_same_step(one_step(some, **same, **options), one_step(some, **same))


def train(some, steps=40, **options):
    model = scorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    options |= {"max_grad_norm": 1.0, "micro_batch_size": 16, "model": model, "optimizer": optimizer}
    return [one_step(some, **options)[:3] for _ in range(steps)]


def test_training_on_a_small_set_lowers_its_loss(tmp_path):
    losses = train(ready(comparisons_of(tmp_path, ROWS[:16])))
    best = -F.logsigmoid(torch.tensor(2 * 1.35)) - 2 * F.logsigmoid(torch.tensor(2.5 - 1.35))
    assert losses[-1][0] < 0.75 * losses[0][0] and losses[-1][2] > 0.8  # accuracy
    assert losses[-1][0] > best - 0.1  # eq. 6 has a floor


def test_the_regression_brings_e_to_the_mean_reward_of_the_samples(tmp_path):
    some = ready(comparisons_of(tmp_path, ROWS[:16]), n_samples=3)
    with_samples = train(some, expected_reward_samples=3)
    assert with_samples[-1][1] < 0.5 * with_samples[0][1] and with_samples[-1][0] < with_samples[0][0]
    assert all(error == 0 for _, error, _ in train(ready(some), steps=2))


# -- ratios to other policies ------------------------------------------------------------
def plain_logprob(model, c, k):
    x, start = ids(c, k), len(c.prompt_ids)
    nll = F.cross_entropy(model(input_ids=x).logits[0, :-1], x[0, 1:], reduction="none")
    return -nll[start - 1 :].sum().item()


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two causal LMs as folders."""
    folders = [tmp_path_factory.mktemp("policies") / name for name in ("first", "second")]
    for seed, folder in enumerate(folders, 1):
        for part in (tiny.model(seed), TOKENIZER):
            part.save_pretrained(folder)
    return folders


def spy_ratios(small, folder, monkeypatch, **options):
    """Run the script in this process; the ratios its comparisons have at the first step, and metrics."""
    seen, plain = [], advantage_model.update

    def update(model, optimizer, some, *more):
        seen.extend(some)
        return plain(model, optimizer, some, *more)

    monkeypatch.setattr(advantage_model, "update", update)
    for name in ("plot_scores", "plot_metrics"):
        monkeypatch.setattr(metrics, name, lambda *_: None)
    quick = {"max_steps": 1, "length_prompts": 0, "save_every": 0, "output_dir": str(folder)}
    advantage_model.main(advantage_model.Args(**{**small.options, "policy": "tiny", **quick, **options}))
    monkeypatch.setattr(advantage_model, "update", plain)
    return seen


@pytest.mark.parametrize("k, n", [(1, None), (2, 4)])
def test_ratios_come_from_the_columns_and_are_clipped(small, tmp_path, monkeypatch, k, n):
    # near what an untrained model says, so that some are clipped and some are not
    rows = [dict(row) for row in ROWS[:24]]
    for i, row in enumerate(rows):
        for side in ("chosen", "rejected"):
            near = -math.log(len(TOKENIZER)) * (len(row[side].split()) + 1)
            row[f"{side}_behavior_logprobs"] = [near + (i % 5 - 2), near - (i % 3 - 1)]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    options = {"n_others": k, "n_policies": n, "ratio_clip": 0.8, "dataset": path, "save_dtype": "bfloat16"}
    seen, model, clipped = spy_ratios(small, tmp_path / "run", monkeypatch, **options), tiny.model(), []
    assert len(seen) == 8
    for c in seen:
        for i, side in enumerate(("chosen", "rejected")):
            ours, theirs = plain_logprob(model, c, i), c.row.data[f"{side}_behavior_logprobs"][:k]
            want = [math.exp(ours - x) for x in theirs]
            assert c.ratios[i].tolist() == pytest.approx([min(x, 0.8) for x in want], rel=1e-3)
            clipped += [x > 0.8 for x in want]
    assert 0 < sum(clipped) < len(clipped)
    assert 0 < column(tmp_path / "run", "ratio/clipped")[0] < 1
    assert_scores_are_plain_advantages(tmp_path / "run", 1 - k / (n or k + 1))
    saved = read_json(tmp_path / "run" / "model" / "config.json")["advantage_model"]
    assert (saved["n_policies"], saved["n_others"]) == (n or k + 1, k)


def test_ratios_come_from_behavior_policies_and_policy(small, policies, tmp_path, monkeypatch):
    names = tuple(map(str, policies))
    options = {
        "n_others": 2,
        "n_policies": 9,
        "ratio_clip": 4.0,
        "behavior_policies": names,
        "policy": "tiny",
    }
    seen = spy_ratios(small, tmp_path / "run", monkeypatch, **options)
    ours, theirs = tiny.model(), [AutoModelForCausalLM.from_pretrained(folder) for folder in policies]
    assert len(seen) == 8
    for c in seen[:3]:
        for i in (0, 1):
            want = [math.exp(plain_logprob(ours, c, i) - plain_logprob(x, c, i)) for x in theirs]
            assert c.ratios[i].tolist() == pytest.approx([min(x, 4.0) for x in want], rel=1e-3)


def test_rankings_have_their_ratios_in_the_order_of_the_responses(small, tmp_path, monkeypatch):
    path = str(write_rows(tmp_path / "rankings.jsonl", RANKINGS))
    options = {"dataset": path, "n_others": 1, "n_policies": 10**9, "ratio_clip": 10**8, "batch_size": 3}
    seen, model = spy_ratios(small, tmp_path / "run", monkeypatch, **options), tiny.model()
    assert len(seen) == 3
    for c in seen:
        by_text = {r["text"]: r["behavior_logprobs"][0] for r in c.row.data["responses"]}
        for i, text in enumerate(c.texts):
            want = math.exp(plain_logprob(model, c, i) - by_text[text])
            assert c.ratios[i].item() == pytest.approx(min(want, 10**8), rel=1e-3)


def test_behavior_policies_are_a_list_on_the_command_line(small, policies, tmp_path):
    more = ["--behavior-policies", *policies, "--n-others", 2]
    succeeds(run(small, tmp_path, *more, max_steps=1, length_prompts=0))
    assert read_json(tmp_path / "args.json")["args"]["behavior_policies"] == list(map(str, policies))
    assert read_json(tmp_path / "model" / "config.json")["advantage_model"]["n_policies"] == 3


def test_other_columns_of_the_same_responses_give_other_ratios(small, tmp_path, monkeypatch):
    found, path = [], tmp_path / "rows.jsonl"
    for shift in (0.0, 1.0):
        rows = [dict(row) for row in ROWS[:8]]
        for row in rows:
            row |= {f"{side}_behavior_logprobs": [-10.0 + shift] for side in ("chosen", "rejected")}
        write_rows(path, rows)
        options = {
            "n_others": 1,
            "n_policies": 10**9,
            "ratio_clip": 10**8,
            "dataset": str(path),
            "overwrite": True,
        }
        found.append(spy_ratios(small, tmp_path / "run", monkeypatch, **options))
    for a, b in zip(*found):
        assert (a.ratios / b.ratios).tolist() == [[pytest.approx(math.e)]] * 2


def test_a_policy_and_a_behavior_policy_of_the_same_name_give_other_ratios(
    small, policies, tmp_path, monkeypatch
):
    found, name = [], str(policies[0])
    for more in ({"policy": name}, {"behavior_policies": (name,)}):
        options = {"n_others": 1, "n_policies": 10**9, "ratio_clip": 10**8, "overwrite": True, **more}
        found.append(spy_ratios(small, tmp_path / "run", monkeypatch, **options))
    assert not all(torch.equal(a.ratios, b.ratios) for a, b in zip(*found))


# -- variants as commands ----------------------------------------------------------------
def test_without_shared_prompts_a_run_has_the_same_losses(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, share_prompt=False, micro_batch_size=3, max_steps=4, eval_every=0))
    for key, n in (("loss/advantage", 2), ("eval/nll", 1)):
        want = column(undisturbed.folder, key)[:n]
        assert column(tmp_path, key)[:n] == pytest.approx(want, abs=1e-4)


def test_expected_reward_samples_change_e_and_log_its_loss(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, expected_reward_samples=2, length_prompts=6, max_new_tokens=40))
    errors = column(tmp_path, "loss/expected_reward")
    assert len(errors) == 10 and all(x > 0 and math.isfinite(x) for x in errors)
    prompt = [{"role": "user", "content": "copy ant bear cat"}]
    with torch.no_grad():
        e = [Plain(folder / "model").outputs(prompt)[1].item() for folder in (tmp_path, undisturbed.folder)]
    assert abs(e[0] - e[1]) > 1e-3
    assert_scores_are_plain_advantages(tmp_path, 1.0)
    assert rows_of(tmp_path, "expected/bias")[-1]["expected/rmse"] >= 0


@pytest.mark.parametrize(
    "e, wanted", [((2.0, 1.0, -0.3), 1.0), ((-2.0, -1.0, 0.3), -1.0), ((0.0, 1.0, 0.0), 0.0751)]
)
def test_e_is_correlated_with_the_policys_mean_true_reward_on_the_tiny_world(e, wanted, monkeypatch):
    """Of `copy ant bear` the gold rewards are 2 and 2, 1 and 1, and 0 and -0.6: their means are 2, 1, -0.3."""
    answers = (("ant bear", "ant bear"), ("ant", "bear"), ("", "cat dog"))
    samples = [
        Comparison(
            [{"role": "user", "content": "copy ant bear"}], [""], torch.zeros(1), [], torch.zeros(0), "x",
            Row("rows:0", {}), samples=tuple(torch.tensor(TOKENIZER(x)["input_ids"] or [TOKENIZER.eos_token_id]) for x in some),
        )
        for some in answers
    ]  # fmt: skip
    outputs = [([0.1, 0.2], torch.tensor(x)) for x in e]
    monkeypatch.setattr(advantage_model, "outputs_of", lambda *rest: outputs)
    found, _ = advantage_model.policy_figures(
        None, samples, TOKENIZER, advantage_model.Args(), torch.device("cpu")
    )
    assert found["gold/expected_correlation"] == pytest.approx(wanted, abs=1e-3)
    other = advantage_model.Args(dataset="rows.jsonl")  # no true reward is known
    assert (
        "gold/expected_correlation"
        not in advantage_model.policy_figures(None, samples, TOKENIZER, other, None)[0]
    )


def test_a_second_run_begins_where_the_first_one_ended_head_included(small, undisturbed, tmp_path):
    succeeds(run(small, tmp_path, model=undisturbed.folder, max_steps=1, judge="gold_labeler:mute"))
    first, second = rows_of(undisturbed.folder, "eval/nll")[-1], rows_of(tmp_path, "eval/nll")[0]
    for key in ("eval/accuracy", "eval/nll", "eval/brier"):
        assert second[key] == pytest.approx(first[key], abs=1e-6)
    assert "baseline/sft_logprob_accuracy" not in second
    assert second["baseline/judge_accuracy"] == 0.5 and second["baseline/judge_failed"] == 1.0  # no answer


def test_rankings_train_and_count_all_their_pairs(small, tmp_path):
    for name in ("train", "test"):
        write_rows(tmp_path / f"{name}.jsonl", tiny.rows("rankings", name)[:16])
    paths = {"dataset": tmp_path / "train.jsonl", "eval_dataset": tmp_path / "test.jsonl"}
    succeeds(
        run(
            small,
            tmp_path / "run",
            **paths,
            n_others=1,
            n_policies=3,
            max_steps=2,
            length_prompts=0,
            plots=True,
        )
    )
    assert column(tmp_path / "run", "eval/pairs")[-1] == 16 * 6
    assert all(math.isfinite(x) for x in column(tmp_path / "run", "loss/advantage"))


def test_a_data_set_with_one_prompt_trains_without_held_out_figures(small, tmp_path):
    path = write_rows(tmp_path / "one.jsonl", ROWS[:1])
    succeeds(run(small, tmp_path / "run", dataset=path, eval_dataset=None, max_steps=2))
    assert len(rows_of(tmp_path / "run")) == 2 and not rows_of(tmp_path / "run", "eval/nll")


def test_recipes_have_the_papers_numbers():
    args = parse(advantage_model.RECIPES, ["advantage_model"])
    assert (args.lr, args.batch_size, args.bound, args.epochs) == (5e-6, 180, 2.5, 1.0)
    assert (args.lr_schedule, args.warmup_ratio, args.dataset) == (
        "cosine_with_min_lr",
        0.1,
        "Anthropic/hh-rlhf",
    )
    assert list(advantage_model.RECIPES)[0] == "tiny" and advantage_model.RECIPES["tiny"][1].dataset == "tiny"
    assert parse(advantage_model.RECIPES, []).bound == 2.5


# -- resuming ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "moment, left",
    [
        ("row 2", ["metrics.jsonl", "cache.json"]),
        ("pointer 6", ["checkpoint/step_3", "checkpoint/step_6", "checkpoint/latest.tmp"]),
        ("summary", ["checkpoint/step_9", "model"]),
    ],
)
def test_a_run_killed_at_any_moment_resumes_to_the_same_bits(small, undisturbed, tmp_path, moment, left):
    assert run(small, tmp_path, moment=moment).code == -9 and not (tmp_path / "summary.json").exists()
    assert all((tmp_path / name).exists() for name in left)
    succeeds(run(small, tmp_path, "--resume"))
    assert_same_result(tmp_path, undisturbed.folder)


def test_a_run_with_samples_and_ratios_that_was_killed_resumes_to_the_same_bits(small, tmp_path):
    options = {"expected_reward_samples": 1, "n_others": 1, "length_prompts": 2, "max_new_tokens": 4}
    succeeds(run(small, tmp_path / "whole", **options))
    assert run(small, tmp_path / "killed", moment="row 5", **options).code == -9
    succeeds(run(small, tmp_path / "killed", "--resume", **options))
    assert_same_result(tmp_path / "killed", tmp_path / "whole")


def test_a_nan_loss_stops_before_the_step_and_leaves_the_last_checkpoint(small, tmp_path):
    ended = run(small, tmp_path, moment="nan 5", micro_batch_size=8)
    assert_error(ended, "step 5", "nan", str(tmp_path / "checkpoint"))
    assert not (tmp_path / "model").exists() and not (tmp_path / "summary.json").exists()
    assert (tmp_path / "checkpoint" / "latest").read_text() == "step_3"
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]


def test_a_loss_that_is_not_a_number_changes_no_weight(tmp_path, monkeypatch):
    plain, model = advantage_model.losses.advantage_model_loss, scorer()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}

    def poisoned(*args, **options):
        loss, numbers = plain(*args, **options)
        return loss * float("nan"), numbers

    monkeypatch.setattr(advantage_model.losses, "advantage_model_loss", poisoned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    loss, *_ = one_step(ready(comparisons_of(tmp_path, ROWS[:4])), optimizer=optimizer, model=model)
    assert math.isnan(loss) and all(torch.equal(start[name], w) for name, w in model.state_dict().items())


# -- bad input ---------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bad(small, tmp_path_factory):
    """A folder of things that cannot be used. Commands run in it."""
    folder = tmp_path_factory.mktemp("bad")
    names = ("chosen_behavior_logprobs", "rejected_behavior_logprobs")
    write_rows(folder / "no_columns.jsonl", [*ROWS[:3], without(ROWS[3], *names)])
    write_rows(folder / "one_column.jsonl", [*ROWS[:3], without(ROWS[3], names[1])])
    write_rows(folder / "short.jsonl", [*ROWS[:3], {**ROWS[3], names[0]: [-2.0]}])
    write_rows(folder / "number.jsonl", [*ROWS[:3], {**ROWS[3], names[0]: -2.0}])
    write_rows(folder / "words.jsonl", [*ROWS[:3], {**ROWS[3], names[0]: ["low", "high"]}])
    write_rows(folder / "holes.jsonl", [*ROWS[:3], {**ROWS[3], names[0]: [None, None]}])
    write_rows(
        folder / "unusable.jsonl", [{"prompt": "copy ant", "chosen": "ant", "rejected": "ant"}, {"foo": 1}]
    )
    for n, name in ((1, "reward model"), (2, "advantage model")):
        for part in (models.load_scorer("tiny", TOKENIZER, n), TOKENIZER):
            part.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
        ({"dataset": "unusable.jsonl"}, ["unusable.jsonl:1", "unusable.jsonl:2", "the same", "foo"]),
        ({"model": "runs/sft"}, ["runs/sft", "python sft.py"]),
        ({"policy": "runs/sft", "n_others": 1}, ["runs/sft", "python sft.py"]),
        ({"model": "reward model"}, ["reward model", "1 output", "advantage model"]),
        ({"policy": "reward model"}, ["reward model", "causal"]),
        ({"behavior_policies": "reward model", "n_others": 1}, ["reward model", "causal"]),
        ({"model": "advantage model", "n_others": 1}, ["advantage model", "--policy"]),
        ({"model": "advantage model", "expected_reward_samples": 1}, ["advantage model", "--policy"]),
        ({"n_others": 1, "ratio_clip": 2}, ["--n-others 1", "--ratio-clip 2", "--n-policies 2"]),
        ({"dataset": "no_columns.jsonl", "n_others": 1}, ["no_columns.jsonl:4", "chosen_behavior_logprobs"]),
        (
            {"dataset": "one_column.jsonl", "n_others": 1},
            ["one_column.jsonl:4", "rejected_behavior_logprobs"],
        ),
        ({"dataset": "short.jsonl", "n_others": 2}, ["short.jsonl:4", "2 numbers"]),
        *(
            ({"dataset": f"{name}.jsonl", "n_others": 1}, [f"{name}.jsonl:4", "behavior_logprobs"])
            for name in ("number", "words", "holes")
        ),
        ({"max_length": 256}, ["--max-length 256", "128 positions"]),
        ({"n_othres": 1}, ["--n-othres", "did you mean --n-others"]),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_bad_input_is_one_line_that_says_what_and_where(small, bad, tmp_path, options, words):
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
        ({"batch_size": 0}, ["--batch-size 0"]),
        ({"behavior_policies": ("tiny",)}, ["--behavior-policies", "--n-others 0"]),
        ({"behavior_policies": ("tiny",), "n_others": 2}, ["--behavior-policies", "--n-others 2"]),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else "",
)
def test_numbers_that_make_no_sense_are_named_before_anything_is_loaded(options, words):
    with pytest.raises(InputError) as error:
        advantage_model.check(advantage_model.Args(**options))
    assert all(word in str(error.value) for word in words)


def test_more_behavior_policies_or_columns_than_k_are_no_error_where_they_are_columns(tmp_path):
    """The tiny world's rows have two log probabilities; with K = 1 the first one counts."""
    some = comparisons_of(tmp_path, ROWS[:3])
    args = advantage_model.Args(n_others=1)
    found = advantage_model.behavior_columns(some, args)
    want = [[ROWS[i][f"{side}_behavior_logprobs"][:1] for side in ("chosen", "rejected")] for i in range(3)]
    assert [x.tolist() for x in found] == [[[pytest.approx(v)] for (v,) in of_row] for of_row in want]
    with pytest.raises(InputError, match="3 numbers"):
        advantage_model.behavior_columns(some, advantage_model.Args(n_others=3))


@pytest.mark.parametrize(
    "options",
    [
        {"dataset": "no_columns.jsonl", "n_others": 1},
        {"model": "reward model"},
        {"judge": "no/such/model"},
        {"judge": "gold_labeler:nobody"},
    ],
)
def test_overwrite_with_bad_input_leaves_the_old_run(small, bad, undisturbed, options):
    before = contents(undisturbed.folder)
    assert_error(run(small, undisturbed.folder, "--overwrite", cwd=bad, **options))
    assert contents(undisturbed.folder) == before
    assert_error(run(small, undisturbed.folder), "finished", "--overwrite", "--resume")


def test_bad_input_ends_a_real_python_in_the_same_way(tmp_path):
    ended = processes.python(ROOT / "advantage_model.py", cwd=tmp_path)  # the bare command, without runs/sft
    assert_error(ended, "runs/sft", "python sft.py")
    assert len(ended.err.strip().splitlines()) == 1 and not list(tmp_path.iterdir())
