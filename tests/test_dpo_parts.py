"""The functions of dpo_iterative.py, by hand or against plain transformers. test_dpo_iterative.py tests whole
runs."""

import gc
import math
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, TOKENIZER, A, B, C, comparisons_of, prompt, row

import dpo_iterative as dpo
from common import dist, losses, responses
from common.batches import Comparison, Row
from common.errors import NotFinite
from common.data import comparisons, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import version_evaluation
from common.run import pool, versions

END, LOG2 = TOKENIZER.eos_token_id, math.log(2)

# Whatever the script's defaults become, these tests know theirs
DEFAULTS = dict(
    model="tiny", reference="sft", max_new_tokens=8, max_length=64, max_grad_norm=0.0, seed=0, n_samples=8,
    temperatures=(1.0, 0.7), beta=0.1, length_penalty=0.0, label_smoothing=0.0, micro_batch_size=32,
    share_prompt=True,
)  # fmt: skip


def make_args(**options):
    return dpo.Args(**{**DEFAULTS, **options})


# -- samplers ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "n, temperatures, enhancer, counts",
    [
        (8, (1.0, 0.7), None, [4, 4]),
        (7, (1.0, 0.7), None, [4, 3]),
        (8, (1.0, 0.7, 0.3), None, [3, 3, 2]),
        (3, (0.5,), None, [3]),
        (8, (1.0, 0.7), "explorer", [2, 2, 2, 2]),
        (6, (1.0, 0.7), "explorer", [2, 1, 2, 1]),
        (5, (1.0, 0.7), "explorer", [2, 1, 1, 1]),
    ],
)
def test_responses_are_divided_equally_among_models_and_temperatures(n, temperatures, enhancer, counts):
    args = make_args(n_samples=n, temperatures=temperatures, enhancer=enhancer)
    names = ["newest"] + ["explorer"] * (enhancer is not None)
    ways = [(name, temperature) for name in names for temperature in temperatures]
    want = [(*way, k) for way, k in zip(ways, counts, strict=True)]
    assert dpo.samplers(SimpleNamespace(path=lambda version: "newest"), 3, args) == want


@pytest.mark.parametrize("iteration, newest, previous", [(1, 0, 0), (2, 1, 0), (3, 2, 1)])
def test_enhancer_previous_is_the_version_before_the_newest(iteration, newest, previous):
    args = make_args(n_samples=2, temperatures=(1.0,), enhancer="previous")
    versions = SimpleNamespace(path=lambda version: f"versions/{version}")
    ways = [(f"versions/{newest}", 1.0, 1), (f"versions/{previous}", 1.0, 1)]
    assert dpo.samplers(versions, iteration, args) == ways


# -- best_against_worst ------------------------------------------------------------------
def best_against_worst(rows, prompts, iteration, args):
    """dpo_iterative.best_against_worst for rows of a pool."""
    return dpo.new_pairs_of(SimpleNamespace(rows=rows), prompts, iteration, args)


LONG, LONGEST = "ant bear cat dog", "fox goat hen owl ant"  # 16 and 20 characters
LENGTHS = [row(A, "ant", 1.0), row(A, LONG, 1.3), row(A, "eel", 0.2), row(A, LONGEST, 0.3)]
FEW_ROWS = row(A, "goat toad um", 1.0)  # 3 tokens in 12 characters, against 4 in 11; no end token counts
PENALTY = {"length_penalty": 0.1}
OTHER_ITERATION = [row(A, "owl", 9.0, 2), row(A, "pig", -9.0, 2), row(B, "pig", 3.0, 2)]


def cut(text, score):
    return row(A, text, score, finished=False)


PAIRED = {  # (rows, options, pairs, what is dropped)
    "the best and the worst of each prompt": (
        [row(B, "bear", -3), row(A, "ant", 1), row(A, "cat", 2), row(B, "eel", -2), row(A, "dog", 0)],
        {},
        [("first bear cat", "eel", "bear"), ("copy ant", "cat", "dog")],  # in the order of the rows
        {},
    ),
    "without a penalty": (LENGTHS, {}, [("copy ant", LONG, "eel")], {}),
    # 1.22 against 0.985; 0.2 against 0.185
    "a small penalty": (LENGTHS, {"length_penalty": 0.005}, [("copy ant", LONG, "eel")], {}),
    # 1.14 against 0.97; 0.1 against 0.17
    "which changes the worst": (LENGTHS, {"length_penalty": 0.01}, [("copy ant", LONG, LONGEST)], {}),
    # 0.91 against 0.82; -0.3 against 0.11
    "and the best": (LENGTHS, {"length_penalty": 0.03}, [("copy ant", "ant", LONGEST)], {}),
    "characters": (
        [{**FEW_ROWS, "response_ids": FEW_ROWS["response_ids"][:2] + [END]}, row(A, "ant eel cat", 1.0)],
        PENALTY,
        [("copy ant", "ant eel cat", "goat toad um")],
        {},
    ),
    "one text": ([row(A, "ant", 1), row(A, " ant\n", 2), row(B, "bear", 1)], {}, [], {"same": 2}),
    "one score": ([row(A, "ant", 1), row(A, "cat", 1), row(A, "dog", 1)], {}, [], {"tied": 1}),
    "the best is cut": ([row(A, "cat", 1), cut("ant", 2), row(A, "dog", 0)], {}, [], {"unfinished": 1}),
    "one of the best ended": (
        [cut("ant", 1), row(A, " ", 1), row(A, "cat", 1), row(A, "eel", 1), row(A, "dog", 0)],
        {},
        [("copy ant", "cat", "dog")],
        {},
    ),
    "none of the best ended": ([cut("ant", 1), row(A, "", 1), row(A, "dog", 0)], {}, [], {"unfinished": 1}),
    "the best is empty": ([row(A, "cat", 1), row(A, " ", 2), row(A, "dog", 0)], {}, [], {"unfinished": 1}),
    "the worst is cut": ([row(A, "cat", 1), cut("dog", -1)], {}, [("copy ant", "cat", "dog")], {}),
    "the worst is empty": ([row(A, "cat", 1), row(A, "", -1)], {}, [("copy ant", "cat", "")], {}),
    "others": (
        [*OTHER_ITERATION, row(A, "cat", 1), row(A, "dog", 0), row(C, "owl", 5), row(C, "pig", 4)],
        {},
        [("copy ant", "cat", "dog")],  # C is not asked for, B has no row
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows, options, wanted, reasons", PAIRED.values(), ids=PAIRED)
def test_paired_are(rows, options, wanted, reasons):
    pairs, dropped = best_against_worst(rows, [A, B], 1, make_args(**options))
    assert [(pair.prompt[0]["content"], *pair.texts) for pair in pairs] == wanted
    assert dropped == {"same": 0, "tied": 0, "unfinished": 0, **reasons}


@pytest.mark.parametrize("scores, n, unfinished", [([1.0, 0.0], 1, 0), ([0.0, 1.0], 0, 1)])
def test_the_worst_response_may_have_a_special_token_and_the_best_may_not(scores, n, unfinished):
    said = [responses.Response([50, END], "cat", True), responses.Response([2, 51, END], "dog", True, clean=False)]
    pairs, dropped = dpo.best_against_worst([(A, response) for response in said], scores, 1, make_args())
    assert [pair.texts for pair in pairs] == [["cat", "dog"]] * n and dropped["unfinished"] == unfinished


def test_a_pair_holds_the_sampled_ids_and_the_scores_minus_the_penalty():
    tagged = prompt("rest dog eel")._replace(row=Row("prompts:3", {"category": 7}))
    better = {**row(tagged, "ant cat", 1.5), "response_ids": [50, 51, END]}  # not the text's own encoding
    worse = row(tagged, "dog", -0.5, finished=False)
    (pair,), _ = best_against_worst([worse, better], [tagged], 1, make_args(**PENALTY))
    assert pair.prompt == tagged.turns and pair.prompt_ids.tolist() == tagged.ids
    assert pair.response_ids[0].tolist() == [50, 51, END]
    assert pair.response_ids[1].tolist() == TOKENIZER("dog")["input_ids"]  # cut: without an end token
    assert {ids.dtype for ids in (pair.prompt_ids, *pair.response_ids)} == {torch.int32}
    assert (pair.texts, pair.ranks.tolist()) == (["ant cat", "dog"], [0, 1])
    assert pair.label_scores == pytest.approx([1.5 - 0.7, -0.5 - 0.3], abs=1e-12)
    assert (pair.source, pair.category, pair.row.where) == ("iteration 1", "7", "prompts:3")
    assert pair.preference is None and pair.ref_logprobs is None and pair.key == tagged.key


def test_prompts_of_ids_alone_are_told_apart_by_their_ids():
    prompts = [responses.Prompt(ids, [], Row("", {})) for ids in ([5, 6], [7])]
    said = [(prompts[i], responses.Response([50 + k, END], word, True)) for k, (i, word) in enumerate(zip(
        (0, 0, 1, 1), ("ant", "cat", "dog", "eel")))]  # fmt: skip
    pairs, _ = dpo.best_against_worst(said, [2.0, 1.0, 0.0, 3.0], 1, make_args())
    assert [(pair.prompt_ids.tolist(), *pair.texts) for pair in pairs] == [([5, 6], "ant", "cat"), ([7], "eel", "dog")]


@pytest.mark.parametrize("prompts", [[A, B], [C, B, A]])
def test_pairs_come_in_the_order_of_sampling_whatever_prompts_were_added(prompts):
    rows = [row(asked, word, score, chunk=chunk) for chunk, asked in ((1, A), (0, B)) for word, score in
            (("ant", 1.0), ("cat", 0.0))]  # fmt: skip
    rows.append(row(A, "eel", 9.0, iteration=2))
    pairs, _ = dpo.new_pairs_of(SimpleNamespace(rows=rows), prompts, 1, make_args())
    assert [(pair.key, *pair.texts) for pair in pairs] == [(B.key, "ant", "cat"), (A.key, "ant", "cat")]


# -- plan_steps --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "n, epochs, sizes", [(7, 2, [3, 3, 1] * 2), (7, 1.5, [3, 3, 1, 3]), (2, 0.1, [2]), (0, 2, [])]
)
def test_each_epoch_has_its_own_order(n, epochs, sizes):
    args = make_args(batch_size=3, epochs=epochs)
    steps = dpo.plan_steps(list(range(n)), 1, args)
    assert [len(step) for step in steps] == sizes
    if epochs == 2 and n:
        first, second = (sum(steps[i : i + 3], []) for i in (0, 3))
        assert sorted(first) == sorted(second) == list(range(n)) and first != second
        assert dpo.plan_steps(list(range(n)), 2, args) != steps


# -- best_and_worst ------------------------------------------------------------------------------
def ranking(*scores):
    responses = [{"text": text, "score": score} for text, score in zip(tiny.ANIMALS, scores)]
    return {"prompt": "copy ant", "responses": responses}


def test_the_best_and_worst_of_a_ranking_become_a_pair(tmp_path):
    (c,) = comparisons_of(tmp_path, [ranking(1, 4, -2, 3)])
    assert len(c.texts) == 4
    pair = comparisons.best_and_worst(c)
    assert (pair.texts, pair.label_scores, pair.ranks.tolist()) == (["bear", "cat"], [4, -2], [0, 1])
    wanted = [TOKENIZER(text)["input_ids"] + [END] for text in pair.texts]
    assert [ids.tolist() for ids in pair.response_ids] == wanted
    assert torch.equal(pair.prompt_ids, c.prompt_ids) and (pair.prompt, pair.row) == (c.prompt, c.row)
    (c,) = comparisons_of(tmp_path, [ranking(3, 1, 3, 1)])  # of ties one stands for all
    pair = comparisons.best_and_worst(c)
    assert pair.label_scores == [3, 1] and pair.texts[0] in ("ant", "cat") and pair.texts[1] in ("bear", "dog")


def test_a_pair_is_unchanged_and_keeps_its_soft_label(tmp_path):
    rows = [{"prompt": f"copy {word}", "chosen": "ant", "rejected": "cat"} for word in ("owl", "pig", "dog")]
    rows[1]["preference"], rows[2]["preference"] = 0.2, 0.5
    pairs = comparisons_of(tmp_path, [*rows, ranking(1, 2)])
    assert len(pairs) == 4 and all(comparisons.best_and_worst(c) is c for c in pairs)


def pair_of(
    prompt_ids, chosen, rejected, preference=None, reference=None, source="s", data_row=Row("f:1", {})
):
    ids = [torch.tensor(x, dtype=torch.int32) for x in (prompt_ids, chosen, rejected)]
    return Comparison(
        prompt=[{"role": "user", "content": "copy ant"}],
        texts=[TOKENIZER.decode(x, skip_special_tokens=True) for x in (chosen, rejected)], prompt_ids=ids[0],
        response_ids=ids[1:], ranks=torch.tensor([0, 1]), source=source, row=data_row, preference=preference,
        ref_logprobs=None if reference is None else torch.tensor(reference),
    )  # fmt: skip


# -- pair_logprobs -----------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 8])
def test_a_pair_that_is_listed_twice_gets_its_value_twice(size):
    model, args = tiny_policy(), make_args(micro_batch_size=size)
    a, b = pair_of([1, 5], [6], [7, 8]), pair_of([1, 9, 9], [10, 11, 12], [13])
    once = dpo.pair_logprobs(model, [a, b], args)
    twice = dpo.pair_logprobs(model, [a, b, a, a], args)
    torch.testing.assert_close(torch.stack(twice), torch.stack([once[i] for i in (0, 1, 0, 0)]))


def test_a_ranking_among_pairs_is_refused():
    pair = pair_of([1, 5], [6], [7, 8])
    ranking_of_4 = pair._replace(response_ids=pair.response_ids * 2, ranks=torch.arange(4))
    with pytest.raises(ValueError, match="zip"):
        dpo.pair_logprobs(tiny_policy(), [ranking_of_4, pair], make_args())


# -- pairs_loss --------------------------------------------------------------------------
def test_the_loss_of_pairs_by_hand():
    """beta = 1/2; h is 1/2 ((-3 + 4) - (-5 + 3)) = 3/2 and 1/2 ((-2 + 1) - (-6 + 6)) = -1/2, the latter with
    P(chosen is better) = 1/4; label smoothing 0.1 makes 0.9 and 0.3 of 1 and 1/4."""
    pairs = [pair_of([1], [2], [3], None, [-4.0, -3.0]), pair_of([1], [4], [5], 0.25, [-1.0, -6.0])]
    logprobs = torch.tensor([-3.0, -5.0, -2.0, -6.0], requires_grad=True)
    loss, sums = dpo.pairs_loss(logprobs, pairs, 5, make_args(beta=0.5, label_smoothing=0.1))
    right, wrong = (lambda h: math.log(1 + math.exp(-h))), (lambda h: math.log(1 + math.exp(h)))
    total = 0.9 * right(1.5) + 0.1 * wrong(1.5) + 0.3 * right(-0.5) + 0.7 * wrong(-0.5)
    assert loss.item() == pytest.approx(total / 5) and sums["loss_sum"].item() == pytest.approx(total)
    assert sums["n_correct"] == 2  # the second pair's label says that the rejected one is better
    assert sums["chosen_reward_sum"].item() == pytest.approx(0.5 - 0.5)
    assert sums["rejected_reward_sum"].item() == pytest.approx(-1.0 + 0.0)
    columns = (torch.tensor(x) for x in ([-3.0, -2], [-5.0, -6], [-4.0, -1], [-3.0, -6]))
    same, _ = losses.dpo_loss(*columns, 0.5, 0.1, torch.tensor([1.0, 0.25]), 5)
    assert loss.item() == pytest.approx(same.item())
    loss.backward()
    s = [1 / (1 + math.exp(-h)) for h in (1.5, -0.5)]
    gradient = [0.5 * (s[0] - 0.9) / 5, 0.5 * (s[1] - 0.3) / 5]
    wanted = torch.tensor([gradient[0], -gradient[0], gradient[1], -gradient[1]])
    torch.testing.assert_close(logprobs.grad, wanted)


def test_the_loss_of_no_pair_is_0_and_still_has_a_gradient():
    logprobs = torch.zeros(0, requires_grad=True)
    loss, sums = dpo.pairs_loss(logprobs, [], 4, make_args(label_smoothing=0.1))
    loss.backward()
    assert loss == 0 and {float(x) for x in sums.values()} == {0.0} and logprobs.grad.shape == (0,)


# -- pairs of the tiny world, and their figures by plain transformers ---------------------
def make_pairs(n=5):
    """Pairs with different lengths and labels; the last one's rejected response was cut."""
    pairs = []
    for i in range(n):
        ids = prompt(" ".join(["copy", *tiny.ANIMALS[: 1 + 2 * i]])).ids
        texts = (" ".join(tiny.ANIMALS[i : 2 * i + 1]), " ".join(tiny.ANIMALS[5 : 9 - i // 2]))
        better, worse = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts)
        end = [] if i == n - 1 else [END]
        pairs.append(pair_of(ids, [*better, END], worse + end, (None, 0.8, 0.1, None, 0.5)[i % 5]))
    return pairs


def plain_logprobs(model, pair):
    """log pi(y | x) of both responses by log-softmax over plain forwards, gradient flows."""
    sums = []
    for ids in pair.response_ids:
        whole = torch.cat([pair.prompt_ids, ids]).long()
        logprobs = model(input_ids=whole[None]).logits[0, len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
        sums.append(logprobs.gather(-1, ids.long()[:, None]).sum())
    return torch.stack(sums)


def plain_references(pairs, seed=0):
    with torch.no_grad():
        model = tiny.model(seed)
        return torch.stack([plain_logprobs(model, pair) for pair in pairs])


@pytest.fixture(scope="module")
def pairs():
    """Pairs whose reference is some nats away from the policy's log probabilities, so that no h is 0."""
    shifts = torch.tensor([[4.0, -3.0], [-6.0, 2.0], [1.0, 5.0], [-2.0, -7.0], [3.0, 1.0]])
    made = make_pairs()
    return [pair._replace(ref_logprobs=x) for pair, x in zip(made, plain_references(made) + shifts)]


# -- with_reference ----------------------------------------------------------------------
def tiny_policy(seed=0):
    return dist.shard(pretrained.load_policy("tiny", TOKENIZER, seed=seed), CPU)


def ids_of(pair):
    return [pair.prompt_ids, *pair.response_ids]


def referenced(pairs, seed=0, **options):
    """The pairs' log probabilities under the tiny model of this seed, (pairs, 2)."""
    run = SimpleNamespace(args=make_args(seed=seed, **options), device=CPU, folder=Path())
    asked = versions.Versions(run, TOKENIZER, "tiny").ask("tiny", dpo.pair_logprobs, pairs, run.args)
    found = dpo.with_reference(pairs, asked)
    assert [pair._replace(ref_logprobs=None) for pair in found] == pairs
    return torch.stack([torch.zeros(2), *(pair.ref_logprobs for pair in found)])[1:]


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 64])
def test_references_are_the_sums_of_plain_log_softmax(share_prompt, micro_batch_size):
    pairs, options = make_pairs(), {"share_prompt": share_prompt, "micro_batch_size": micro_batch_size}
    found = referenced(pairs, **options)
    torch.testing.assert_close(found, plain_references(pairs), rtol=0, atol=1e-4)
    assert (found - found.roll(1, 0)).abs().min() > 0.1  # in another order they would differ
    torch.testing.assert_close(referenced(pairs, 1), plain_references(pairs, 1), rtol=0, atol=1e-4)


def test_the_reference_is_freed_before_training(monkeypatch):
    alive, load = [], pretrained.load_policy

    def noted(*args, **options):
        model = load(*args, **options)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(pretrained, "load_policy", noted)
    gc.disable()
    try:
        referenced(make_pairs(2))
        assert len(alive) == 1 and alive[0]() is None
        assert referenced([]).numel() == 0 and len(alive) == 1
    finally:
        gc.enable()


# -- update ------------------------------------------------------------------------------
class Noting(torch.optim.SGD):
    def step(self):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]
        super().step()


def updated(pairs, lr=0.0, model=None, **options):
    """(metrics, gradients, weights) of one step of the tiny policy."""
    model = model or tiny_policy()
    optimizer = Noting(model.parameters(), lr=lr)
    figures = dpo.update(model, optimizer, pairs, make_args(**options))
    return figures, optimizer.gradients, [p.detach() for p in model.parameters()]


def assert_close_gradients(gradients, expected, tolerance=1e-5):
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=tolerance * max(1.0, b.abs().max().item()))


def of_formula(pairs, beta, smoothing):
    """Metrics and gradients of the whole batch, computed pair by pair with a plain forward."""
    model, n, columns = tiny.model(), len(pairs), []
    for pair in pairs:
        logprobs = plain_logprobs(model, pair)
        rewards = beta * (logprobs - pair.ref_logprobs)
        h, label = rewards[0] - rewards[1], 1.0 if pair.preference is None else pair.preference
        p = (1 - smoothing) * label + smoothing * (1 - label)
        loss = -(p * torch.log(torch.sigmoid(h)) + (1 - p) * torch.log(torch.sigmoid(-h)))
        (loss / n).backward()
        correct = 0.5 if label == 0.5 else float((h > 0) == (label > 0.5))
        columns.append([loss.item(), correct, *rewards.tolist(), h.item(), *logprobs.tolist()])
    gradients = [parameter.grad for parameter in model.parameters()]
    names = "loss/dpo train/accuracy reward/chosen reward/rejected reward/margin logps/chosen logps/rejected"
    figures = {name: sum(column) / n for name, column in zip(names.split(), zip(*columns))}
    figures["optim/grad_norm"] = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    return {**figures, "data/pairs": n}, gradients


@pytest.mark.parametrize("share_prompt, micro_batch_size", [(True, 1), (True, 2), (True, 64), (False, 2)])
def test_metrics_and_gradient_of_a_step_are_those_of_the_formula(share_prompt, micro_batch_size, pairs):
    options = {"share_prompt": share_prompt, "micro_batch_size": micro_batch_size, "beta": 0.2}
    figures, gradients, _ = updated(pairs, label_smoothing=0.1, **options)
    wanted, of_all = of_formula(pairs, 0.2, 0.1)
    assert figures == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert_close_gradients(gradients, of_all)
    assert 0 < wanted["train/accuracy"] < 1 and abs(wanted["loss/dpo"] - LOG2) > 0.05
    hard = [pair._replace(preference=None) for pair in pairs]
    assert abs(updated(hard, label_smoothing=0.1, **options)[0]["loss/dpo"] - figures["loss/dpo"]) > 0.05


def test_the_first_loss_is_log_2_if_the_policy_is_the_reference():
    logprobs = referenced(make_pairs())
    pairs = [pair._replace(ref_logprobs=x) for pair, x in zip(make_pairs(), logprobs)]
    figures, gradients, _ = updated(pairs, micro_batch_size=2)
    assert figures["loss/dpo"] == pytest.approx(LOG2, abs=1e-6)
    rewards = [figures[f"reward/{name}"] for name in ("chosen", "rejected", "margin")]
    assert rewards == pytest.approx([0, 0, 0], abs=1e-5)
    assert figures["optim/grad_norm"] > 0.01 and any(g.any() for g in gradients)
    same = dpo.pair_metrics(tiny_policy(), pairs, make_args())
    assert same.pop("losses") == pytest.approx([LOG2] * len(pairs), abs=1e-5)
    assert same == pytest.approx({"pairs/loss": LOG2, "pairs/accuracy": 0.5, "pairs/margin": 0.0}, abs=1e-5)


def test_gradients_are_clipped_and_the_norm_before_clipping_is_returned(pairs):
    start, free = tiny.model().parameters(), updated(pairs)[0]
    figures, _, weights = updated(pairs, lr=1.0, max_grad_norm=0.01)
    moved = math.sqrt(sum((a - b).double().square().sum().item() for a, b in zip(weights, start)))
    assert figures["optim/grad_norm"] == pytest.approx(free["optim/grad_norm"], rel=1e-5)
    assert free["optim/grad_norm"] > 0.02 and moved == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite_changes_no_weight(max_grad_norm, pairs):
    broken = [*pairs[:2], pairs[2]._replace(ref_logprobs=torch.tensor([math.inf, -1.0]))]
    model = tiny_policy()
    with pytest.raises(NotFinite):
        updated(broken, 0.1, model, max_grad_norm=max_grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny.model().parameters()))
    figures = updated(pairs, 0.1, model, max_grad_norm=max_grad_norm)[0]  # and the next step is a step
    assert math.isfinite(figures["loss/dpo"]) and math.isfinite(figures["optim/grad_norm"])
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), tiny.model().parameters()))


# -- write_pairs -------------------------------------------------------------------------
def test_pairs_that_were_written_are_read_again(tmp_path):
    """Including one whose chosen response has the lower score, and one whose rejected response was cut."""
    tagged = prompt("rest dog eel")._replace(row=Row("prompts:3", {"category": "rest"}))
    rows = [row(A, "ant", 2.0), row(A, LONG, 2.3), row(tagged, "eel", 1.0)]
    rows.append(row(tagged, "dog eel", 0.0, finished=False))
    made, _ = best_against_worst(rows, [A, tagged], 1, make_args(length_penalty=0.05))
    talk = [*A.turns, {"role": "assistant", "content": "ant"}, {"role": "user", "content": "again"}]
    soft = {"prompt": talk, "chosen": "ant", "rejected": "owl", "preference": 0.25}
    made += comparisons_of(tmp_path, [soft])
    pool.write_pairs(tmp_path, made, 1)
    read = comparisons.load(str(tmp_path / "pairs.jsonl"), "train", TOKENIZER, 64)
    for name in ("prompt", "texts", "label_scores", "category", "preference"):
        assert [getattr(pair, name) for pair in read] == [getattr(pair, name) for pair in made]
    assert all(map(torch.equal, ids_of(read[0]), ids_of(made[0]))) and len(read) == 3
    written = read_jsonl(tmp_path / "pairs.jsonl")
    assert [(r["iteration"], r["source"]) for r in written] == [(1, "iteration 1")] * 2 + [(1, "rows.jsonl")]


def test_pairs_of_earlier_iterations_stay_and_others_are_replaced(tmp_path):
    def write(iteration, *words):
        rows = [row(A, word, k, iteration) for k, word in enumerate(words)]
        made, _ = best_against_worst(rows, [A], iteration, make_args())
        pool.write_pairs(tmp_path, made, iteration)
        return [(r["iteration"], r["chosen"], r["rejected"]) for r in read_jsonl(tmp_path / "pairs.jsonl")]

    first, second = (1, "cat", "ant"), (2, "eel", "dog")
    assert write(1, "ant", "cat") == [first]
    assert write(2, "dog", "eel") == [first, second]
    assert write(2, "dog", "eel") == [first, second]  # done again after a crash
    assert write(2, "owl", "pig") == [first, (2, "pig", "owl")]
    assert write(1, "ant", "cat") == [first]


# -- version_evaluation.DPOEvaluation, pairing_metrics -------------------------------------------------
def sample(score, gold, tokens=4, finished=True, kl=0.0):
    columns = {"score": score, "gold": gold, "perfect": 2.0, "tokens": tokens, "finished": finished, "kl": kl}
    return {**columns, "category": None}


FIRST = [sample(x, 1.0) for x in (0.0, 1.0, 2.0, 3.0)]  # whose standard deviation is 1.118
SECOND = [
    sample(1.0, 2.0, 3, kl=1.0),  # wins by 1
    sample(1.05, 1.0, 5, kl=2.0),  # ties
    sample(2.0, 1.0, 6, False, kl=3.0),  # ties
    sample(2.5, 0.0, 10, kl=6.0),  # loses by 0.5
]
STUDIES = {
    0: {"scorer": "a@1", "pairs": {"pairs/loss": 0.7}, "samples": FIRST},
    1: {"scorer": "a@1", "pairs": {"pairs/loss": 0.5, "pairs/accuracy": 0.75}, "samples": SECOND},
    2: {"scorer": "a@1", "pairs": {}, "samples": [sample(2.0, 2.0) for _ in range(4)]},
}


def figures(evaluations, version, pairwise=False):
    scorer = SimpleNamespace(pairwise=pairwise)
    return version_evaluation.DPOEvaluation([], [], None, scorer, TOKENIZER, make_args()).metrics_of(evaluations, version)


def test_metrics_of_the_first_version_are_means_without_a_comparison():
    wanted = {"pairs/loss": 0.7, "eval/score": 1.5, "gold/score": 1.0, "gold/perfect": 2.0, "eval/kl": 0.0}
    assert figures(STUDIES, 0) == {**wanted, "sample/length": 4.0, "sample/finished": 1.0}


def test_metrics_of_a_version_are_means_and_its_win_rate_over_the_first():
    wanted = {
        "pairs/loss": 0.5, "pairs/accuracy": 0.75, "eval/score": 6.55 / 4, "gold/score": 1.0,
        "gold/perfect": 2.0, "eval/kl": 3.0, "sample/length": 6.0, "sample/finished": 0.75,
        "sft/score_win": 0.25, "sft/score_lose": 0.25, "sft/score_tie": 0.5, "sft/score_gain": 0.55 / 4,
        "sft/gold_win": 0.25, "sft/gold_lose": 0.25, "sft/gold_tie": 0.5, "sft/gold_gain": 0.0,
        "sft/score_tie_margin": 0.1, "sft/gold_tie_margin": 0.0,
        "sft/score_gain_n": 4, "sft/gold_gain_n": 4,  # too few for an interval
        "sft/score_win_rate": 0.5, "sft/gold_win_rate": 0.5, "sft/score_win_rate_n": 4, "sft/gold_win_rate_n": 4,
    }  # fmt: skip
    assert figures(STUDIES, 1, pairwise=True) == pytest.approx(wanted)
    assert figures(STUDIES, 1)["sft/score_tie_margin"] == pytest.approx(0.1118, abs=1e-4)


def test_metrics_from_the_second_version_on_include_the_gain_over_the_previous_one():
    found = figures(STUDIES, 2)
    assert found["eval/score_over_before"] == pytest.approx(2.0 - 6.55 / 4)
    assert found["gold/score_over_before"] == pytest.approx(1.0)
    assert found["sft/score_gain"] == pytest.approx(0.5) and found["sft/gold_gain"] == pytest.approx(1.0)
    assert "eval/score_over_before" not in figures(STUDIES, 1)


def test_metrics_never_compare_scores_of_different_oracles():
    """For a run that is resumed with another --scorer."""
    keys = set(figures({**STUDIES, 0: {**STUDIES[0], "scorer": "b@1"}}, 2))
    assert "eval/score_over_before" in keys and not any(key.startswith("sft/") for key in keys)
    keys = set(figures({**STUDIES, 1: {**STUDIES[1], "scorer": "b@1"}}, 2))
    assert "sft/score_gain" in keys and "eval/score_over_before" not in keys


def test_metrics_without_samples_are_only_those_of_the_held_out_pairs():
    evaluations = {v: {"scorer": None, "pairs": {"pairs/loss": 0.5}, "samples": []} for v in range(3)}
    assert [figures(evaluations, v) for v in range(3)] == [{"pairs/loss": 0.5}] * 3


def test_metrics_of_the_pool_by_hand():
    """A: 2, 1, 0; B: -1, -3. Only iteration 2 counts; lengths are in tokens, including the end token."""
    rows = [row(A, "ant cat", 2.0, 2), row(A, "cat", 1.0, 2), row(A, "dog eel owl", 0.0, 2, finished=False)]
    rows += [row(B, "bear", -1.0, 2), row(B, "", -3.0, 2), row(A, "fox", 100.0, 1), row(C, "pig", -100.0, 3)]
    made, dropped = best_against_worst(rows, [A, B], 2, make_args())
    wanted = {
        "pool/responses": 5, "pool/score": -0.2, "pool/best": 0.5, "pool/worst": -1.5, "pool/finished": 0.8,
        "pool/length": (3 + 2 + 3 + 2 + 1) / 5, "pool/characters": (7 + 3 + 11 + 4 + 0) / 5,
        "pairs/kept": 2, "pairs/same": 4, "pairs/tied": 0, "pairs/unfinished": 0,
        "pairs/chosen_score": 0.5, "pairs/rejected_score": -1.5,
        "pairs/chosen_length": 2.5, "pairs/rejected_length": 2.0,
    }  # fmt: skip
    assert pool.pairing_metrics(rows, made, {**dropped, "same": 4}, 2) == pytest.approx(wanted)
