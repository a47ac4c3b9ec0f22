"""ppo.py in one process: its parts, one optimiser step, the files of a run, resuming, and bad input."""

import functools
import math
import re
import statistics
from types import SimpleNamespace

import processes
import pytest
import torch
import torch.nn.functional as F
from processes import ROOT, flags
from helpers import (
    CPU, PLACE, TOKENIZER, as_killed, assert_error, assert_files, assert_same_run, column, docs_functions,
    prompt, question, read_json, rows_of, same_weights, succeeds, weights, without, write_rows,
)  # fmt: skip
from helpers import run as run_script
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ppo
from common import dist, models, responses
from common.batches import Batch, Row, collate, make_blocks, my_micro_batches, n_tokens, response_mask
from common.errors import InputError, NotFinite, NothingToLearn
from common.data import auxiliary, progress, prompt_sets, tiny
from common.data.files import read_jsonl
from common.loading import pretrained
from common.scoring import evaluation, functions, scorers
from common.scoring.safety import Gated
from common.run import checkpoints
from common.run.cli import parse

GOLD = "common.data.tiny:gold_scorer"
PAD, END = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id


def make_args(**options):
    return ppo.Args(**{"model": "tiny", "scorer": GOLD, "max_new_tokens": 8, "max_length": 64, **options})


def response(text, finished=True):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [END] * finished
    return responses.Response(ids, text, finished)


REST = prompt("rest bear cat ant")
PAIRS = [  # prompts and responses of different lengths; the third one was cut. Two answer one prompt
    (prompt("copy ant bear cat"), response("ant bear cat")),
    (prompt("first dog eel fox ant bear"), response("dog")),
    (REST, response("cat cat cat cat ant bear", finished=False)),
    (REST, response("dog dog")),
    (prompt("copy eel fox ant"), response("eel fox ant ant ant")),
]
DOCUMENTS = responses.documents(PAIRS)
LENGTHS = [4, 2, 6, 3, 6]  # tokens of the responses, end tokens included


def policy():
    return dist.shard(pretrained.load_policy("tiny", TOKENIZER), CPU)


def scorer(n_outputs=1):
    return dist.shard(pretrained.load_scorer("tiny", TOKENIZER, n_outputs, seed=3), CPU)


def of_function(function):
    return scorers.Scorer("a function", "1", functions.Term(function))


# -- normalise ---------------------------------------------------------------------------
# Two rollouts. 1, 3: count 2, mean 2, squares 2. Then 5, 7, 6: of all five the mean is 22 / 5 = 4.4 and the
# squares are 3.4^2 + 1.4^2 + 0.6^2 + 2.6^2 + 1.6^2 = 23.2, the population variance 4.64
FIRST, SECOND = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0, 6.0])


@pytest.mark.parametrize(
    "kind, first, second",
    [
        ("none", [1.0, 3.0], [5.0, 7.0, 6.0]),
        ("mean", [-1.0, 1.0], [0.6, 2.6, 1.6]),
        ("mean_std", [-1.0, 1.0], [x / math.sqrt(4.64) for x in (0.6, 2.6, 1.6)]),
        ("whiten", [-1.0, 1.0], [x / math.sqrt(2 / 3) for x in (-1.0, 1.0, 0.0)]),  # of one rollout alone
    ],
)
def test_scores_are_normalised_by_all_scores_so_far_including_this_rollout(kind, first, second):
    running = [0, 0.0, 0.0]
    assert ppo.normalise(FIRST, running, kind).tolist() == pytest.approx(first)
    assert running == pytest.approx([2, 2.0, 2.0])
    assert ppo.normalise(SECOND, running, kind).tolist() == pytest.approx(second)
    assert running == pytest.approx([5, 4.4, 23.2])  # once for each rollout, whatever the kind


def test_equal_scores_stay_finite_and_a_large_offset_keeps_the_deviation_exact():
    for kind in ("none", "mean", "mean_std", "whiten"):
        rewards = ppo.normalise(torch.full((3,), 2.0), [0, 0.0, 0.0], kind).tolist()
        assert rewards == [0.0 if kind != "none" else 2.0] * 3
    running = [0, 0.0, 0.0]
    for scores in (FIRST, SECOND):
        rewards = ppo.normalise(scores.double() + 1e7, running, "mean_std")
    assert rewards.tolist() == pytest.approx([x / math.sqrt(4.64) for x in (0.6, 2.6, 1.6)], abs=1e-5)


# -- from rows to batches and back -------------------------------------------------------
def rows_of_tokens(rows):
    """Lists of numbers, one for each token of a response -> (B, R)."""
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row) for row in rows], True)


def rollout_of(pairs=PAIRS, **fields):
    documents = responses.documents(pairs)
    finished = torch.tensor([response.finished for _, response in pairs])
    return ppo.Rollout(pairs, documents, response_mask(documents), finished, **fields)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_micro_batches_hold_every_row_once_with_its_token_values(size, packing):
    longest = max(len(document.ids) for document in DOCUMENTS)
    args, indices = make_args(packing=packing, max_length=2 * longest), [4, 0, 2, 3]
    batches = list(my_micro_batches(ppo.blocks_of(DOCUMENTS, indices, args), policy(), size))
    assert sorted(d.number for batch in batches for d in batch.documents) == sorted(indices)
    rows = 2 if packing else 4  # of --max-length tokens, each with two documents
    assert [len(batch.input_ids) for batch in batches] == [min(size, rows - i) for i in range(0, rows, size)]
    of_tokens = rows_of_tokens([response.ids for _, response in PAIRS])
    for batch in batches:  # end tokens are actions; what is known stands where they do, and is 0 elsewhere
        got = rollout_of().in_batch(of_tokens, batch)
        assert got.tolist() == (batch.input_ids[:, 1:] * batch.action_mask).tolist()
        assert batch.action_mask.sum() == sum(LENGTHS[d.number] for d in batch.documents)
    nothing = collate([], PAD)
    assert rollout_of().in_batch(of_tokens, nothing).tolist() == [[0]]


@pytest.mark.parametrize("what", ["log probabilities", "values"])
def test_per_token_values_are_in_row_order_and_independent_of_micro_batches(what):
    model, mask = policy() if what == "log probabilities" else scorer(), response_mask(DOCUMENTS)
    forward = functools.partial(models.logprobs, entropy=True, temperature=0.7)
    if what == "values":
        forward = models.state_values

    def of(plan, size, **options):
        args = make_args(**options)
        plan = [ppo.blocks_of(DOCUMENTS, rows, args) for rows in plan]
        return models.per_token(forward, model, plan=plan, micro_batch_size=size)

    want = of([range(5)], 5)
    assert all(rows.shape == mask.shape and not rows[~mask].any() for rows in want)
    plans = ([range(5)], 1), ([[4, 1], [0, 3, 2]], 2), ([[3], [2], [1], [4, 0]], 64)
    unpacked = of([range(5)], 5, packing=False)
    for got in (unpacked, of([range(5)], 5, max_length=24), *(of(*plan) for plan in plans)):
        for rows, others in zip(want, got, strict=True):
            torch.testing.assert_close(rows, others, atol=2e-6, rtol=2e-6)
    with torch.no_grad():  # of each row alone, by plain transformers
        for i, document in enumerate(DOCUMENTS):
            ids, first = document.ids.long(), len(PAIRS[i][0].ids)
            mine = [rows[i][mask[i]] for rows in want]
            if what == "values":  # read at the token before the action
                hidden = model.base_model(input_ids=ids[None]).last_hidden_state[0]
                plain = [model.score(hidden)[first - 1 : -1, 0]]
            else:
                p = (model(input_ids=ids[None]).logits[0, first - 1 : -1] / 0.7).softmax(-1)
                plain = [p.gather(1, ids[first:, None])[:, 0].log(), -(p * p.log()).sum(-1)]
            for a, b in zip(mine, plain, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("what", ["log probabilities", "values"])
def test_responses_to_one_prompt_share_it_and_have_the_numbers_of_rows_of_their_own(what):
    """A row has 8 tokens of the prompt once, then 6 and 3 of two responses; each damage to it changes numbers."""
    model, forward = policy(), models.logprobs
    if what == "values":
        model, forward = scorer(), models.state_values

    def of(**options):
        plan = [ppo.blocks_of(DOCUMENTS, range(5), make_args(**options))]
        return models.per_token(forward, model, plan, micro_batch_size=2)[0]

    [block] = ppo.blocks_of(DOCUMENTS, [2, 3], make_args())
    batch = collate([block], PAD)
    n = len(REST.ids)
    assert batch.input_ids[0].tolist() == REST.ids + PAIRS[2][1].ids + PAIRS[3][1].ids
    assert batch.position_ids[0].tolist() == [*range(n + 6), *range(n, n + 3)]
    assert batch.sources[1].tolist() == [*range(n - 1, n + 5), n - 1, n + 6, n + 7]
    assert [document.shared for document in block] == [0, n]
    want = of(share_prompt=False)
    torch.testing.assert_close(of(), want, atol=2e-6, rtol=2e-6)
    second = lambda batch: forward(model, batch)[tuple(batch.token_indices)][6:]  # of its three tokens
    torch.testing.assert_close(second(batch), want[3, :3], atol=2e-6, rtol=2e-6)
    in_order = torch.arange(n + 9)[None]
    for damage in ({"attention_mask": None}, {"sources": batch.token_indices}, {"position_ids": in_order}):
        assert (second(batch._replace(**damage)) - want[3, :3]).abs().max() > 1e-3


def test_a_row_is_no_longer_than_max_length_where_responses_share_a_prompt():
    n, rows = len(REST.ids), [2, 3, 2, 3]
    pairs = [(REST, PAIRS[i][1]) for i in rows]
    documents = responses.documents(pairs)
    for length, trees in ((n + 18, [4]), (n + 15, [3, 1]), (n + 9, [2, 2]), (n + 8, [1, 1, 1, 1])):
        blocks = make_blocks(documents, length, share_prompt=True)
        assert sorted(len(block) for block in blocks) == sorted(trees)
        assert sorted(document.number for block in blocks for document in block) == [0, 1, 2, 3]
        assert all(n_tokens(block) <= length for block in blocks)
    blocks = make_blocks(documents, 512, multiple=2, share_prompt=True)  # one tree would leave a rank without a row
    assert [[document.shared for document in block] for block in blocks] == [[0, 0], [0, 0]]
    other = responses.documents([(REST, PAIRS[2][1]), (REST._replace(ids=REST.ids[1:]), PAIRS[3][1])])  # equal messages
    assert all(not document.shared for block in make_blocks(other, 64, share_prompt=True) for document in block)
    same = [document._replace(number=0) for document in documents]  # rows of other losses have no number
    assert all(not document.shared for block in make_blocks(same, 64, share_prompt=True) for document in block)


def test_values_are_read_at_the_state_before_each_action_and_are_0_elsewhere():
    """A model whose value is the token's own id: V at index t is that of token t, not of the action t + 1."""
    own_id = lambda ids, where, positions, mask: ids[where[0], where[1]][:, None].float()
    model = SimpleNamespace(head_outputs=own_id)
    ids = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0]])
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    batch = lambda mask: Batch(ids, None, mask, mask.nonzero().T, mask.nonzero().T, [])
    values = lambda mask: models.state_values(model, batch(mask)).tolist()
    assert values(mask) == [[0, 12, 13, 14], [21, 22, 0, 0]] and values(mask & False) == [[0] * 4] * 2


# -- estimate_advantages -----------------------------------------------------------------
# Two responses, of three tokens with the end token and of two that were cut. With beta = 0.5, log ratios to
# the reference of 0.2, -0.4, 0.6 and 1, 1 and scores of 10 and -1 the rewards are -0.1, 0.2, -0.3 + 10 and
# -0.5, -0.5 - 1, and what is still to come 9.8, 9.9, 9.7 and -2, -1.5
TWO = [
    (PAIRS[0][0], responses.Response([5, 6, END], "", True)),
    (PAIRS[1][0], responses.Response([5, 6], "", False)),
]
OLD = rows_of_tokens([[-1.0, -2.0, -3.0], [-1.0, -1.0]])
REF = rows_of_tokens([[-1.2, -1.6, -3.6], [-2.0, -2.0]])
TO_COME = [[9.8, 9.9, 9.7], [-2.0, -1.5]]


def estimate(values=([0.0] * 3, [0.0] * 2), **options):
    """(advantages, returns, the mean KL of a response)."""
    options = {"kl_coef": 0.5, "gamma": 1.0, "lam": 1.0, "whiten_advantages": False, **options}
    rollout = rollout_of(TWO, response_rewards=torch.tensor([10.0, -1.0]), old_logprobs=OLD, ref_logprobs=REF)
    rollout.sample_logprobs = options.pop("sample_logprobs", None)
    rollout.old_values = rows_of_tokens(values)
    kl = ppo.estimate_advantages(rollout, make_args(**options))
    assert not rollout.advantages[1, 2] and not rollout.returns[1, 2]  # behind the shorter response
    lists = lambda rows: [row[mask].tolist() for row, mask in zip(rows, rollout.mask)]
    return lists(rollout.advantages), lists(rollout.returns), kl


def test_advantages_are_weighted_by_pi_old_over_the_samplers_probability_up_to_the_cap():
    """log pi_old - log q is log 0.5, 0, log 4 and 0, 0: weights 0.5, 1, 2 (capped at 2) and 1, 1. Returns keep theirs."""
    drawn = OLD - rows_of_tokens([[math.log(0.5), 0.0, math.log(4)], [0.0, 0.0]])
    options = {"sample_logprobs": drawn, "importance_cap": 2.0}
    advantages, returns, _ = estimate(**options)
    assert near(advantages, [[9.8 / 2, 9.9, 9.7 * 2], TO_COME[1]]) and near(returns, TO_COME)
    for off in (0.0, None):
        assert near(estimate(**{**options, "importance_cap": off})[0], TO_COME)
    flat = sum(TO_COME, [])  # whitened by their own mean and deviation, whatever the weights
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    whitened = [[(x - mean) / deviation for x in row] for row in TO_COME]
    whitened[0] = [w * x for w, x in zip((0.5, 1, 2), whitened[0])]
    assert near(estimate(**options, whiten_advantages=True)[0], whitened)


def near(got, want):
    return all(a == pytest.approx(b, abs=1e-5) for a, b in zip(got, want, strict=True))


def test_the_score_is_added_at_the_last_token_and_the_kl_subtracted_at_every_token():
    advantages, returns, kl = estimate()
    assert near(advantages, TO_COME) and near(returns, TO_COME)
    assert kl == pytest.approx((0.2 - 0.4 + 0.6 + 1 + 1) / 2)
    no_sum = estimate(lam=0.0)[0]  # with values of 0 the rewards themselves
    assert near(no_sum, [[-0.1, 0.2, 9.7], [-0.5, -1.5]])  # clamped at 0 it would be 0 in place of 0.2
    # d^2 / 2, and exp(-d) - 1 + d, of the log ratios d
    for kind, x in (
        ("k2", [0.02, 0.08, 0.18, 0.5, 0.5]),
        ("k3", [0.01873, 0.09182, 0.14881, 0.36788, 0.36788]),
    ):
        rewards, _, kl = estimate(lam=0.0, kl_estimator=kind)
        assert near(rewards, [[-x[0] / 2, -x[1] / 2, 10 - x[2] / 2], [-x[3] / 2, -1 - x[4] / 2]])
        assert kl == pytest.approx(sum(x) / 2, abs=1e-4)


def test_returns_are_unwhitened_advantages_plus_values():
    """Rewards to come less values of 1, 2, 3 and 4, 5."""
    plain = [[8.8, 7.9, 6.7], [-6.0, -6.5]]
    values = ([1.0, 2.0, 3.0], [4.0, 5.0])
    advantages, returns, _ = estimate(values)
    assert near(advantages, plain) and near(returns, TO_COME)
    flat = [x for row in plain for x in row]
    mean = sum(flat) / 5
    deviation = math.sqrt(sum((x - mean) ** 2 for x in flat) / 5)  # over the tokens of all rows
    advantages, returns, _ = estimate(values, whiten_advantages=True)
    assert near(advantages, [[(x - mean) / deviation for x in row] for row in plain])
    assert near(returns, TO_COME)


def test_gamma_and_lambda_are_those_of_the_arguments():
    """gamma = 0.5: 9.7; 0.2 + 4.85; -0.1 + 2.525. lambda = 0.5: the same with values of 0."""
    want = [[2.425, 5.05, 9.7], [-1.25, -1.5]]
    assert near(estimate(gamma=0.5)[0], want) and near(estimate(lam=0.5)[0], want)
    # With values: deltas of -0.1, -0.3, 6.7 and -2, -6.5, each plus 0.125 times the next advantage
    both = estimate(([1.0, 2.0, 3.0], [4.0, 5.0]), gamma=0.5, lam=0.25)[0]
    assert near(both, [[-0.0328125, 0.5375, 6.7], [-2.8125, -6.5]])


# -- prompts, text -----------------------------------------------------------------------
@pytest.mark.parametrize("count, n", [(10, 3), (10, 4), (7, 7), (7, 6), (5, 1), (64, 48), (3, 9)])
def test_prompts_repeat_only_after_all_were_used_and_never_within_an_iteration(count, n):
    prompts = list(range(count))
    iterations = [prompt_sets.fresh_prompts(prompts, n, i, 0) for i in range(1, 31)]
    assert all(len(set(some)) == len(some) == min(n, count) for some in iterations)
    order = [x for some in iterations for x in some]
    passes = [order[i : i + count] for i in range(0, len(order) - count + 1, count)]
    assert passes and all(sorted(some) == prompts for some in passes)
    assert count < 10 or len({tuple(some) for some in passes}) == len(passes)  # each in an order of its own
    assert iterations[4] == prompt_sets.fresh_prompts(prompts, n, 5, 0)
    assert count < 10 or iterations[:3] != [prompt_sets.fresh_prompts(prompts, n, i, 1) for i in range(1, 4)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_a_stream_repeats_a_document_only_after_all_others(size):
    documents, steps = list("abcde"), 10
    found = [x for step in range(steps) for x in auxiliary.stream(documents, size, step, 0, "ptx")]
    assert len(found) == size * steps
    passes = [found[i : i + 5] for i in range(0, len(found) - 4, 5)]
    assert all(sorted(some) == documents for some in passes)
    assert found == [x for step in range(steps) for x in auxiliary.stream(documents, size, step, 0, "ptx")]
    # a step's place does not depend on how the steps before it were asked for
    assert found == auxiliary.stream(documents, size * steps, 0, 0, "ptx")
    if size > 2:
        assert len(set(map(tuple, passes))) > 1 and found != auxiliary.stream(documents, size * steps, 0, 1, "ptx")


def texts_of(folder, *rows, **options):
    path = str(write_rows(folder / "text.jsonl", rows))
    return auxiliary.text_documents(make_args(ptx_dataset=path, **options), TOKENIZER)


def test_every_token_of_a_text_but_the_first_is_learnt_and_so_is_its_end(tmp_path):
    (document,) = texts_of(tmp_path, {"text": "the ant saw a bear ."})
    ids = TOKENIZER("the ant saw a bear .")["input_ids"] + [END]
    assert document.ids.tolist() == ids and len(ids) == 7
    batch = collate([[document]], PAD)
    assert batch.input_ids[0, 1:][batch.action_mask[0]].tolist() == ids[1:]


def test_rows_without_text_are_dropped_and_named(tmp_path, capsys):
    rows = [{"text": "the ant"}, {"text": " "}, {"text": None}, {"other": 1}, {"text": "a bear"}, {"text": 3}]
    assert [d.row.where for d in texts_of(tmp_path, *rows)] == ["text.jsonl:1", "text.jsonl:5"]
    assert "text.jsonl:2" in capsys.readouterr().out
    with pytest.raises(InputError, match="no usable row among its 2: no text in the column text .text.jsonl:1"):
        texts_of(tmp_path, *rows[1:3])


def test_a_long_text_is_cut_and_no_end_is_learnt_there(tmp_path):
    (document,) = texts_of(tmp_path, {"text": "ant bear " * 50}, max_length=16, max_new_tokens=4)
    assert document.ids.tolist() == TOKENIZER("ant bear " * 50)["input_ids"][:16]
    assert END not in document.ids.tolist()


# -- scores ------------------------------------------------------------------------------
def gated(scorer, safety=None, **options):
    """A function of pairs that gives their scores and the share that the safety scorer decided."""

    def score(pairs):
        both = Gated(scorer, safety, make_args(**options))
        return both.score(pairs), both.metrics["reward/gated"]

    return score


def test_the_safety_score_counts_for_tagged_prompts_and_unsafe_responses(capsys):
    """Safety scores 1, -1.74, -1.73, -5, 2: sigmoid(-1.74) < 0.15 < sigmoid(-1.73); the first is tagged."""
    pairs = [(p._replace(row=Row("x:1", {"is_safety": i == 0})), r) for i, (p, r) in enumerate(PAIRS)]
    logits = {r.text: x for (_, r), x in zip(pairs, [1.0, -1.74, -1.73, -5.0, 2.0])}
    helpful = of_function(lambda prompts, responses, rows: [10.0] * len(prompts))
    safety = of_function(lambda prompts, responses, rows: [logits[text] for text in responses])
    scores, share = gated(helpful, safety)(pairs)
    assert scores.tolist() == pytest.approx([1.0, -1.74, 10.0, -5.0, 10.0]) and share == pytest.approx(3 / 5)
    progress.note.cache_clear()
    assert "teaches nothing" not in capsys.readouterr().out
    assert gated(helpful)(pairs)[1] == 0
    assert "all 5 responses have the score 10: it teaches nothing" in capsys.readouterr().out
    scores, share = gated(helpful, safety, safety_threshold=0.0)(pairs)
    assert scores.tolist() == [1.0, 10, 10, 10, 10] and share == pytest.approx(1 / 5)  # the tagged one alone


def test_a_reward_models_safety_gate_turns_its_score_into_the_logit():
    plain = scorers.Scorer("safety", "1", None, scorer(), TOKENIZER)
    raw = torch.tensor(scorers.score(plain, PAIRS, 8))
    helpful = of_function(lambda prompts, responses, rows: [99.0] * len(prompts))
    for safety, logits in ((plain, raw), (plain._replace(gate=(2.0, -0.5)), 2 * raw - 0.5)):
        scores, _ = gated(helpful, safety, safety_threshold=1.0)(PAIRS)
        torch.testing.assert_close(scores, logits)


# -- the value model ---------------------------------------------------------------------
def value_model(loaded, prompts=(), **options):
    args = make_args(**options)
    return scorers.load_value_model(Gated(loaded, None, args), policy(), TOKENIZER, prompts, args, CPU)


def of_models(folder, n_outputs, n_policies=1, n_others=0):
    """A scorer on disk as load_scorer reads it."""
    model = scorer(n_outputs)
    if n_outputs == 2:
        model.config.advantage_model = {"n_policies": n_policies, "n_others": n_others}
    checkpoints.save_model(model, TOKENIZER, folder)
    return model, scorers.load_scorer(str(folder), TOKENIZER, CPU)


def test_the_value_model_starts_as_the_reward_model_with_its_head(tmp_path):
    model, loaded = of_models(tmp_path / "reward", 1)
    value = value_model(loaded, scorer=str(tmp_path / "reward"), reward_norm="none")
    a, b = model.state_dict(), value.state_dict()
    assert b.pop("score.bias") == 0
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    assert value is not loaded.model and all(p.requires_grad for p in value.parameters())
    assert not any(p.requires_grad for p in loaded.model.parameters())


@pytest.mark.parametrize("norm", ["mean_std", "whiten", "mean"])
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_the_value_model_starts_in_the_units_of_the_normalised_rewards(tmp_path, monkeypatch, norm, n_outputs):
    """V is the reward model, shifted and scaled so that the scores of the policy's responses have mean 0 and deviation
    1 (`mean`: only shifted): its offset and unit do not count. Of an advantage model r's differences are compared."""
    monkeypatch.setattr(responses, "sample_responses", lambda *_, **__: PAIRS)
    n, k = 3, 2
    model, loaded = of_models(tmp_path / "scorer", n_outputs, n, k)
    prompts = [p for p, _ in PAIRS]
    value = value_model(loaded, prompts, scorer=str(tmp_path / "scorer"), score_batch_size=2, reward_norm=norm)
    scores = torch.tensor(scorers.score(loaded, PAIRS, 2))
    rewards, values = [], []
    with torch.no_grad():
        for p, r in PAIRS:
            ids = torch.tensor([p.ids + r.ids])
            end = torch.tensor([[0], [ids.shape[1] - 1]])
            rewards.append(model(input_ids=ids).logits[0, 0])
            values.append(value.head_outputs(ids, end)[0, 0])
    rewards, values = torch.stack(rewards), torch.stack(values)
    scale = 1.0 if n_outputs == 1 else 1 - k / n
    unit = 1.0 if norm == "mean" else scores.std(correction=0)
    torch.testing.assert_close(values - values.mean(), scale * (rewards - rewards.mean()) / unit, atol=1e-4, rtol=1e-4)
    if n_outputs == 1:
        torch.testing.assert_close(values, (rewards - scores.mean()) / unit, atol=1e-4, rtol=1e-4)


def test_the_value_models_units_come_from_64_responses_in_few_slots_and_from_the_checkpoint_of_a_resumed_run(
    tmp_path, monkeypatch
):
    """Without --slots their number is chosen later, when all models are loaded. Of equal scores there is no unit."""
    model, loaded = of_models(tmp_path / "reward", 1)
    asked, sampled = [], [PAIRS[0]] * 64
    monkeypatch.setattr(responses, "sample_responses", lambda *_, **options: asked.append(options) or sampled)
    given = {"scorer": str(tmp_path / "reward"), "temperature": 0.7, "top_p": 0.8}
    for n, slots in ((1, None), (3, 4)):
        value = value_model(loaded, [p for p, _ in PAIRS[:n]], slots=slots, **given)
        assert torch.equal(value.score.weight, model.score.weight)
        mean = scorers.score(loaded, PAIRS[:1], 8)[0]
        assert value.score.bias.item() == pytest.approx(-mean, abs=1e-5)
    got = [(x["n"], x["slots"], x["temperature"], x["top_p"]) for x in asked]
    assert got == [(64, 16, 0.7, 0.8), (22, 4, 0.7, 0.8)]
    args = make_args(**given)
    scorers.load_value_model(Gated(loaded, None, args), None, TOKENIZER, [], args, CPU, resumed=True)
    assert len(asked) == 2


@pytest.mark.parametrize("n, k, scale", [(1, 0, 1), (3, 2, 1 / 3)])
def test_a_value_model_from_an_advantage_model_starts_at_r_minus_the_mean_expectation(tmp_path, n, k, scale):
    """As the score does, it counts 1 - K / N of it."""
    model, loaded = of_models(tmp_path / "advantage", 2, n, k)
    prompts = [p for p, _ in PAIRS]
    value = value_model(loaded, prompts, scorer=str(tmp_path / "advantage"), score_batch_size=2, reward_norm="none")
    outputs = lambda ids: model(input_ids=torch.tensor([ids])).logits[0].tolist()  # at the last token
    with torch.no_grad():
        mean = sum(outputs(p.ids)[1] for p in prompts) / len(prompts)
        assert value.config.num_labels == 1 and abs(mean) > 0.01
        for p, r in PAIRS:
            ids = torch.tensor([p.ids + r.ids])
            v = value.head_outputs(ids, torch.tensor([[0], [ids.shape[1] - 1]])).item()
            assert v == pytest.approx(scale * (outputs(p.ids + r.ids)[0] - mean), abs=1e-4)


@pytest.mark.parametrize("foreign", [False, True])
def test_for_a_function_or_other_tokens_the_value_starts_at_0_on_the_policys_body(foreign):
    other = scorers.Scorer("foreign", "1", None, scorer(), TOKENIZER, same_tokens=False)
    value = value_model(other if foreign else of_function(len))
    body = tiny.model(0).model.state_dict()
    assert all(torch.equal(x, body[name]) for name, x in value.base_model.state_dict().items())
    values = models.state_values(value, collate([[d] for d in DOCUMENTS], PAD))
    assert not values.any() and values.requires_grad


# -- one optimiser step ------------------------------------------------------------------
def known(temperature=1.0):
    """A rollout: the policy's own log probabilities, so that the ratio is 1, and random numbers."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda: rows_of_tokens([torch.randn(n, generator=generator) for n in LENGTHS])
    rollout = rollout_of(old_values=draw(), advantages=draw(), returns=draw())
    options = {"plan": [ppo.blocks_of(DOCUMENTS, range(5), make_args())], "micro_batch_size": 2}
    [rollout.old_logprobs] = models.per_token(
        functools.partial(models.logprobs, temperature=temperature), policy(), **options
    )
    return rollout


class SGD(torch.optim.SGD):
    """An optimiser that keeps the gradients for inspection."""

    def zero_grad(self, set_to_none=True):
        pass


def one_step(extra=None, policy_learns=True, rollout=None, lr=0.0, **options):
    """(result of ppo.update, policy, value)."""
    learners = policy(), scorer()
    optimizers = [SGD(model.parameters(), lr=lr) for model in learners]
    args = make_args(**{"micro_batch_size": 2, "max_grad_norm": 0.0, **options})
    rows, rollout = list(range(5)), rollout or known()
    agent = ppo.Agent(*learners, None, TOKENIZER, *optimizers)
    result = ppo.update(agent, rollout, rows, extra or {}, policy_learns, args)
    return result, *learners


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_close_gradients(got, want, tolerance=1e-5):
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=tolerance, rtol=1e-3)


def global_norm(model):
    return math.sqrt(sum(g.square().sum().item() for g in gradients(model).values()))


def test_a_step_is_the_papers_losses_on_rows_of_their_own():
    """At ratio 1 the policy's gradient is that of -(1/n) sum A log pi, the value's of the clipped errors."""
    rollout, plain, value = known(), policy(), scorer()
    result, ours, our_value = one_step(rollout=rollout)
    policy_loss = value_loss = 0.0
    for i, document in enumerate(DOCUMENTS):
        ids, first, kept = document.ids.long(), len(PAIRS[i][0].ids), rollout.mask[i]
        logits = plain(input_ids=ids[None]).logits[0, first - 1 : -1]
        nll = F.cross_entropy(logits, ids[first:], reduction="none")
        policy_loss = policy_loss + (rollout.advantages[i][kept] * nll).sum() / 21
        hidden = value.base_model(input_ids=ids[None]).last_hidden_state[0, first - 1 : -1]
        v, old, returns = value.score(hidden)[:, 0], rollout.old_values[i][kept], rollout.returns[i][kept]
        near_old = torch.maximum(torch.minimum(v, old + 0.15), old - 0.15)
        value_loss = value_loss + torch.maximum((v - returns) ** 2, (near_old - returns) ** 2).sum() / 42
    (policy_loss + value_loss).backward()
    assert_close_gradients(gradients(ours), gradients(plain))
    assert_close_gradients(gradients(our_value), gradients(value))
    assert result["policy/grad_norm"] == pytest.approx(global_norm(plain), rel=1e-4)
    assert result["value/grad_norm"] == pytest.approx(global_norm(value), rel=1e-4) and result["n"] == 21
    assert result["value/loss_sum"] == pytest.approx(21 * value_loss.item(), rel=1e-4)
    assert result["policy/loss_sum"] == pytest.approx(-rollout.advantages.sum().item(), abs=1e-4)
    ratio = result["policy/ratio_sum"], result["policy/approx_kl_sum"]
    assert ratio == pytest.approx((21, 0), abs=1e-4)


@pytest.mark.parametrize(
    "size, packing, share_prompt, rehearsal_norm",
    [
        (1, True, True, "sum"), (3, True, True, "mean"), (64, True, True, "mean"),
        (64, True, False, "mean"), (64, False, True, "sum"),
    ],
)  # fmt: skip
def test_micro_batches_change_neither_gradients_nor_figures(size, packing, share_prompt, rehearsal_norm):
    options = {"extra": {"rehearsal": DOCUMENTS[1:4], "ptx": DOCUMENTS[:2]}, "rehearsal_norm": rehearsal_norm}
    a, *ours = one_step(micro_batch_size=size, packing=packing, share_prompt=share_prompt, **options)
    b, *others = one_step(**options)
    assert a == pytest.approx(b, rel=1e-4, abs=1e-4)
    for x, y in zip(ours, others):
        assert_close_gradients(gradients(x), gradients(y))


def assert_stands_still(model, first):
    before = first.state_dict()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["advantages", "returns"])
def test_neither_model_changes_if_a_loss_is_not_finite(name, monkeypatch):
    rollout, kept = known(), []
    getattr(rollout, name)[4] *= math.nan
    step = dist.optimizer_step
    noted = lambda models, *rest: step(kept.extend(models) or models, *rest)
    monkeypatch.setattr(dist, "optimizer_step", noted)
    with pytest.raises(NotFinite, match="loss nan"):
        one_step(rollout=rollout, lr=0.1)
    for model, first in zip(kept, (policy(), scorer()), strict=True):
        assert_stands_still(model, first)


@pytest.mark.parametrize("extra", [{}, {"rehearsal": DOCUMENTS[1:4], "ptx": DOCUMENTS[:2]}])
@pytest.mark.parametrize("policy_learns", [True, False])
def test_a_refused_step_names_the_loss(extra, policy_learns, monkeypatch):
    options = {"extra": extra, "policy_learns": policy_learns, "ptx_coef": 0.5, "rehearsal_coef": 0.25}
    sums, *_ = one_step(**options)
    loss = (sums["value/loss_sum"] + sums.get("policy/loss_sum", 0)) / 21
    loss += 0.5 * sums.get("ptx/loss", 0) + 0.25 * sums.get("rehearsal/loss", 0)
    infinite = lambda *_: torch.tensor(math.inf)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", infinite)
    with pytest.raises(NotFinite, match=re.escape(f"loss {loss:.4g}"[:-1])):
        one_step(**options)


def test_each_models_gradient_is_clipped_separately():
    result, ours, value = one_step(max_grad_norm=0.01)
    for model, norm in ((ours, result["policy/grad_norm"]), (value, result["value/grad_norm"])):
        assert norm > 0.02 and global_norm(model) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_ratio_is_1_only_at_the_temperature_of_the_old_probabilities(temperature):
    rollout = known(temperature)
    result = one_step(rollout=rollout, temperature=temperature)[0]
    assert result["policy/ratio_max"] == 1.0 and result["policy/approx_kl_sum"] == 0
    assert one_step(rollout=rollout, temperature=1.5 - temperature)[0]["policy/ratio_max"] > 1.05


def nll_of(model, documents, per_row):
    """sum over rows of per_row(negative log likelihoods of its learnt tokens), by plain transformers."""
    total = 0.0
    for document in documents:
        ids = document.ids.long()
        nll = F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], ids[1:], reduction="none")
        total = total + per_row(nll[document.response_mask[1:].bool()])
    return total


# kind, options, the papers' formula for three documents with LENGTHS[:3] = 4 + 2 + 6 tokens
EXTRA = {
    "ptx": ("ptx", {"ptx_coef": 0.3}, 0.3, lambda nll: nll.sum() / 12),
    "rehearsal": ("rehearsal", {"rehearsal_coef": 0.2}, 0.2, lambda nll: nll.sum() / 3),
    "mean": ("rehearsal", {"rehearsal_coef": 0.2, "rehearsal_norm": "mean"}, 0.2, lambda nll: nll.mean() / 3),
}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", EXTRA)
def test_the_other_losses_add_their_gradient_with_their_weight_at_temperature_1(name, temperature):
    kind, coefficients, weight, per_row = EXTRA[name]
    options = {**coefficients, "micro_batch_size": 1, "packing": False}  # three micro-batches
    options["temperature"] = temperature
    plain = policy()
    loss = nll_of(plain, DOCUMENTS[:3], per_row)
    (weight * loss).backward()
    alone = gradients(one_step(**options)[1])
    result, ours, _ = one_step({kind: DOCUMENTS[:3]}, **options)
    added = {key: g - alone[key] for key, g in gradients(ours).items()}
    assert_close_gradients(added, gradients(plain))
    assert result[f"{kind}/loss"] == pytest.approx(loss.item(), rel=1e-4)  # before its weight
    assert result[f"{kind}/n_tokens"] == 12
    assert max(g.abs().max() for g in added.values()) > 1e-3


# -- one iteration -----------------------------------------------------------------------
def test_metrics_of_an_iteration_by_hand():
    """A rollout of 2 and 1 tokens. q / pi is 2, 1/4 and 1, so k3 is 1/2 - 1 + log 2, 4 - 1 - log 4 and 0; the other
    way round it would be 0.94 / 3. All errors of the values are 1. Two steps had 2 and 4 tokens."""
    pairs = [
        (PAIRS[0][0], responses.Response([5, END], "", True)),
        (PAIRS[1][0], responses.Response([5], "", False)),
    ]
    rollout = rollout_of(
        pairs, scores=torch.tensor([1.0, 5.0]), response_rewards=torch.tensor([0.0, 0.5]),
        sample_logprobs=rows_of_tokens([[math.log(0.5), math.log(0.2)], [-1.0]]),
        old_logprobs=rows_of_tokens([[math.log(0.25), math.log(0.8)], [-1.0]]),
        entropies=rows_of_tokens([[1.0, 3.0], [5.0]]),
        returns=rows_of_tokens([[1.0, 2.0], [3.0]]), old_values=rows_of_tokens([[0.0, 1.0], [2.0]]),
    )  # fmt: skip
    columns = {  # of each step, and the metric
        "n": (2, 4), "value/loss_sum": (6.0, 3.0), "value/n_clipped": (2, 1), "value/grad_norm": (2.0, 6.0),
        "policy/loss_sum": (-1.0, -2.0), "policy/ratio_sum": (2.6, 4.0), "policy/ratio_max": (2.0, 1.5),
        "policy/n_clipped": (1, 2), "policy/approx_kl_sum": (0.5, 0.1), "policy/grad_norm": (1.0, 3.0),
        "ptx/loss": (1.0, 3.0), "ptx/n_tokens": (12, 18), "rehearsal/loss": (2.0, 4.0), "rehearsal/n_tokens": (7, 7),
    }  # fmt: skip
    steps = [dict(zip(columns, values)) for values in zip(*columns.values())]
    want = {
        "reward/score": 3.0, "reward/deviation": 2.0, "reward/normalised": 0.25, "rollout/finished": 0.5,
        "rollout/length": 1.5, "loss/value": 1.5, "value/clipped": 0.5, "value/explained_variance": 1.0,
        "optim/value_grad_norm": 4.0, "policy/entropy": 3.0, "policy/sampler_kl": (2.5 - math.log(2)) / 3,
        "policy/sampler_ratio_max": 4.0,
    }  # fmt: skip
    of_the_value = [{key: x for key, x in step.items() if key.startswith(("value", "n"))} for step in steps]
    assert ppo.metrics_of(rollout, of_the_value) == pytest.approx(want)  # during its warm-up
    want |= {
        "loss/policy": -0.5, "policy/ratio_mean": 1.1, "policy/ratio_max": 2.0, "policy/clipped": 0.5,
        "policy/approx_kl": 0.1, "policy/first_ratio_max": 2.0, "policy/first_approx_kl": 0.25,
        "optim/policy_grad_norm": 2.0, "loss/ptx": 2.0, "ptx/tokens_ratio": 5.0, "loss/rehearsal": 3.0,
    }  # fmt: skip
    assert ppo.metrics_of(rollout, steps) == pytest.approx(want)


def test_minibatches_divide_a_rollout_anew_in_every_epoch_iteration_and_run():
    passes = []
    for iteration, seed in ((1, 0), (2, 0), (1, 1)):
        epochs = ppo.minibatches_of(64, iteration, make_args(epochs=2, minibatch_size=16, seed=seed))
        assert [[len(minibatch) for minibatch in epoch] for epoch in epochs] == [[16] * 4] * 2
        passes += [sum(epoch, []) for epoch in epochs]
    assert all(sorted(order) == list(range(64)) for order in passes)
    assert len(set(map(tuple, passes))) == 6


def test_a_rollout_has_its_own_seed_and_the_flags_temperature_and_top_p(monkeypatch):
    asked = []

    def noted(policy, tokenizer, prompts, *, seed, **options):
        asked.append((seed, options))
        raise NothingToLearn

    monkeypatch.setattr(responses, "sample_responses", noted)
    agent = ppo.Agent(*[None] * 6)
    for iteration, seed in ((1, 0), (2, 0), (1, 1), (1, 0)):
        args = make_args(seed=seed, temperature=0.7, top_p=0.8, n_samples=3)
        with pytest.raises(NothingToLearn):
            ppo.run_iteration(agent, [REST], None, ppo.fresh_state(), iteration, args)
    seeds = [seed for seed, _ in asked]
    assert len(set(seeds)) == 3 and seeds[0] == seeds[3]
    for _, options in asked:
        assert (options["temperature"], options["top_p"], options["n"]) == (0.7, 0.8, 3)


def test_the_references_log_probabilities_have_the_rollouts_temperature():
    """The reference is the policy, so that the KL is 0. k2 cannot cancel."""
    args = make_args(temperature=0.7, missing_eos_penalty=0.0, minibatch_size=2, kl_estimator="k2")
    learners = policy(), scorer()
    agent = ppo.Agent(*learners, policy(), TOKENIZER, *(SGD(model.parameters(), lr=0.0) for model in learners))
    score = lambda sampled: torch.arange(len(sampled)).float()
    _, row = ppo.run_iteration(agent, [REST], score, ppo.fresh_state(), 1, args)
    assert row["kl/per_response"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("scores", [torch.tensor([1.0, math.nan]), torch.ones(1), torch.ones(2, 1)])
def test_scores_that_are_not_one_finite_number_per_response_leave_no_trace(scores):
    learners = policy(), scorer()
    agent = ppo.Agent(*learners, policy(), TOKENIZER, *(SGD(model.parameters(), lr=0.1) for model in learners))
    state = ppo.fresh_state()
    args = make_args(missing_eos_penalty=0.0, minibatch_size=2, n_samples=2)
    with pytest.raises(ValueError, match="expected 2 finite scores"):
        ppo.run_iteration(agent, [REST], lambda sampled: scores, state, 1, args)
    assert state == ppo.fresh_state()


@pytest.mark.parametrize("numbers", [(0, 0), (0, 2), (1, 2)])
def test_per_token_needs_documents_that_are_numbered(numbers):
    documents = [document._replace(number=number) for document, number in zip(DOCUMENTS, numbers)]
    with pytest.raises(ValueError, match="numbers 0, 1"):
        models.per_token(models.logprobs, policy(), [[documents]], 2)


# -- runs --------------------------------------------------------------------------------
JUDGES = """
import itertools

def constant(prompts, responses, rows):
    return [0.0] * len(prompts)

def not_a_number(prompts, responses, rows):
    return [float("nan") if "ant" in text.split() else 1.0 for text in responses]

asked = itertools.chain([0.0, 1.0], itertools.repeat(0.5))  # the second of the 6 held-out prompts' scores is best

def fading(prompts, responses, rows):
    return [next(asked)] * 6 if len(prompts) == 6 else [len(text) / 10 for text in responses]

rising = itertools.chain([0.0, 1.0, 0.5, 2.0], itertools.repeat(0.9))

def best_in_the_third(prompts, responses, rows):
    return [next(rising)] * 6 if len(prompts) == 6 else [len(text) / 10 for text in responses]

def safe(prompts, responses, rows):
    return [-3.0 if len(text.split()) % 2 else 3.0 for text in responses]
"""
ITERATIONS, STEPS = 5, [4, 8, 12, 16, 20]  # of 16 responses, in minibatches of 8, twice


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A folder with an SFT model, a reward model, prompts and text, and flags for a run of a second."""
    folder = tmp_path_factory.mktemp("ppo")
    rows = {"sft": tiny.rows("sft", "train")[:2000], "sft_eval": tiny.rows("sft", "test")[:20]}
    rows |= {"prompts": tiny.rows("prompts", "train")[:40], "asked": tiny.rows("prompts", "test")[:6]}
    rows |= {"rehearsal": tiny.rows("sft", "train")[:8], "text": tiny.rows("text", "train")[:240]}
    files = {name: str(write_rows(folder / f"{name}.jsonl", some)) for name, some in rows.items()}
    (folder / "ppo_judges.py").write_text(JUDGES)
    options = {"dataset": files["sft"], "eval_dataset": files["sft_eval"], "max_steps": 60, "lr": 5e-3}
    options |= {"max_length": 64, "sample_prompts": 0, "eval_every": 0, "save_every": 0}
    options |= {"micro_batch_size": 16, "output_dir": folder / "sft"}
    succeeds(processes.script("sft", *flags(**options), cwd=folder, plots=False))
    checkpoints.save_model(scorer(), TOKENIZER, folder / "reward")
    options = {"model": folder / "sft", "scorer": folder / "reward", "dataset": files["prompts"]}
    options |= {"eval_dataset": files["asked"], "prompts_per_iteration": 8, "n_samples": 2, "epochs": 2}
    options |= {"minibatch_size": 8, "micro_batch_size": 5, "max_new_tokens": 10, "max_length": 64}
    options |= {"slots": 64}
    options |= {"iterations": ITERATIONS, "value_warmup_steps": 3, "save_every": 2, "eval_every": 2}
    options = {key: str(value) if key in ("model", "scorer") else value for key, value in options.items()}
    return SimpleNamespace(folder=folder, files=files, options=options)


def options_of(small, folder, **options):
    given = {**small.options, "output_dir": str(folder), **options}
    return {key: value for key, value in given.items() if value is not None}


run = functools.partial(run_script, "ppo")


def metrics_rows(folder, key="kl/per_response"):
    return rows_of(folder, key)


def test_a_rollout_of_one_response_logs_no_nan(small, tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "PLOTS", [])
    options = {"prompts_per_iteration": 1, "n_samples": 1, "minibatch_size": 1, "epochs": 1, "iterations": 2}
    options |= {"value_warmup_steps": 0, "missing_eos_penalty": 0.0, "max_new_tokens": 1, "eval_every": 0}
    ppo.main(ppo.Args(**options_of(small, tmp_path, **options)))
    lines = [*(tmp_path / "metrics.jsonl").read_text().splitlines(), (tmp_path / "summary.json").read_text()]
    assert not [line for line in lines if "NaN" in line or "Infinity" in line]
    for row in metrics_rows(tmp_path):
        assert row["reward/deviation"] == 0 and "value/explained_variance" not in row


class Stopped(Exception):
    """Ends a run in this process."""


@pytest.mark.parametrize("dtype, cap", [("float32", 0.0), ("bfloat16", 2.0)])
def test_each_model_has_its_learning_rate_and_importance_weights_are_the_default_in_bfloat16(
    small, tmp_path, monkeypatch, dtype, cap
):
    made = []

    def noted(model, lr, args):
        made.append((hasattr(model, "score"), lr, args.importance_cap))
        if len(made) == 2:
            raise Stopped
        return None

    monkeypatch.setattr(dist, "compute_dtype", dtype)
    monkeypatch.setattr(dist, "adamw", noted)
    with pytest.raises(Stopped):
        ppo.main(ppo.Args(**options_of(small, tmp_path, lr=1e-5, value_lr=2e-5)))
    assert made == [(False, 1e-5, cap), (True, 2e-5, cap)]


def test_the_weights_under_the_adapters_are_the_reference_unless_another_is_given():
    for reference, expected in ((None, True), ("a", True), ("b", False)):
        args = ppo.Args(model="a", lora_rank=4, reference=reference)
        assert ppo.is_lora_on_reference(args) is expected
        args.lora_rank = 0
        assert ppo.is_lora_on_reference(args) is False


def all_options(small):
    """The options of a run that uses every feature."""
    options = {"ptx_dataset": small.files["text"], "ptx_coef": 0.1, "ptx_batch_size": 3}
    options |= {"rehearsal_data": small.files["rehearsal"], "rehearsal_batch_size": 3}
    return options | {"save_dtype": "bfloat16"}


# When a run is killed, and its last checkpoint then
MOMENTS = {"row 12": "step_2", "tensors 4": "step_2", "pointer 4": "step_2", "older 4": "step_4"}
MOMENTS |= {"export": "step_4", "summary": "step_4"}


@pytest.fixture(scope="session")
def undisturbed(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    copies = [f"copy {moment}" for moment in MOMENTS]
    ended = succeeds(run(small, folder, moment=copies, plots=True, **all_options(small)))
    return SimpleNamespace(folder=folder, ended=ended)


FILES = "args.json checkpoint frontier.png metrics.jsonl metrics.png model samples.jsonl summary.json"
TRAINING = """loss/policy loss/value policy/ratio_mean policy/ratio_max policy/clipped policy/approx_kl policy/entropy
    policy/first_ratio_max policy/first_approx_kl policy/sampler_kl policy/sampler_ratio_max value/clipped
    value/explained_variance optim/policy_grad_norm optim/value_grad_norm loss/ptx loss/rehearsal
    ptx/tokens_ratio reward/score reward/normalised reward/deviation reward/gated
    kl/per_response rollout/finished rollout/length time/sample_s time/score_s time/estimate_s time/update_s
    perf/tokens_per_s step iteration time_s"""
OF_THE_POLICY = """loss/policy loss/ptx loss/rehearsal ptx/tokens_ratio optim/policy_grad_norm policy/first_approx_kl
    policy/first_ratio_max policy/ratio_mean policy/ratio_max policy/clipped policy/approx_kl"""
HELD_OUT = "eval/score eval/kl eval/entropy eval/ptx_nll sample/length sample/finished"


def test_a_run_leaves_the_whole_run_directory(small, undisturbed):
    folder = undisturbed.folder
    assert_files(folder, FILES)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["latest", "step_4"]
    written = read_json(folder / "args.json")
    args = parse(ppo.RECIPES, ["tiny"] + flags(**options_of(small, folder, **all_options(small))))
    assert written["args"] == {**vars(args), "importance_cap": 0.0} and written["stage"] == "ppo"
    assert "wrote " in undisturbed.ended.out and "eval/score: " in undisturbed.ended.out
    (n_steps,) = re.findall(r"plan: .*; ([\d,]+) optimiser steps", undisturbed.ended.out)
    assert int(n_steps) == read_jsonl(folder / "metrics.jsonl")[-1]["step"]


def test_metrics_have_a_row_before_training_per_iteration_and_after(undisturbed):
    rows = read_jsonl(undisturbed.folder / "metrics.jsonl")
    assert [(row["step"], row["iteration"]) for row in rows] == [
        (0, 0), *zip(STEPS, range(1, ITERATIONS + 1)), (20, ITERATIONS),
    ]  # fmt: skip
    assert all(set(row) >= set(TRAINING.split()) for row in rows[2:-1])
    assert set(TRAINING.split()) - set(rows[1]) == set(OF_THE_POLICY.split())  # none of these in warm-up
    assert [row["iteration"] for row in rows if "eval/ptx_nll" in row] == [0, 2, 4, 5]
    assert all(set(HELD_OUT.split()) <= set(row) for row in rows if "eval/score" in row)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    summary = read_json(undisturbed.folder / "summary.json")
    assert not any(key.startswith(("gold/", "reward/gold")) for row in rows for key in row)  # not of a file
    assert summary["iterations"] == ITERATIONS
    assert summary["before"] == without(rows[0], *PLACE) and summary["after"] == without(rows[-1], *PLACE)


def test_the_ratio_is_1_and_the_kl_0_before_the_first_step_of_every_iteration(undisturbed):
    assert column(undisturbed.folder, "policy/first_ratio_max") == [1.0] * (ITERATIONS - 1)
    assert column(undisturbed.folder, "policy/first_approx_kl") == [0.0] * (ITERATIONS - 1)
    assert max(column(undisturbed.folder, "policy/ratio_max")) > 1.01  # later steps have moved away


def test_sampler_and_training_forward_agree_in_float32(undisturbed):
    assert column(undisturbed.folder, "policy/sampler_kl") == pytest.approx([0.0] * ITERATIONS, abs=1e-4)
    assert column(undisturbed.folder, "policy/sampler_ratio_max") == pytest.approx([1.0] * ITERATIONS, abs=1e-3)


def test_the_reference_is_the_first_policy_and_warm_up_lasts_whole_iterations(undisturbed):
    rows = metrics_rows(undisturbed.folder)
    assert column(undisturbed.folder, "eval/kl")[0] == 0 and column(undisturbed.folder, "eval/kl")[-1] != 0
    # 3 steps of warm-up are the 4 of the first iteration; the second one's responses are the first policy's
    assert [row["kl/per_response"] == 0 for row in rows] == [True, True, False, False, False]
    assert all(row["optim/value_grad_norm"] > 0 for row in rows)
    for key in ("optim/policy_grad_norm", "loss/ptx", "loss/rehearsal"):
        assert [row.get(key, 0) > 0 for row in rows] == [False] + [True] * 4


def test_the_ratio_of_text_to_response_tokens_is_that_of_the_steps(undisturbed):
    # 4 optimiser steps an iteration, each with 3 of the texts, whose tokens but the first are learnt
    rows = metrics_rows(undisturbed.folder)[1:]
    assert len(rows) == ITERATIONS - 1
    for row in rows:
        tokens = row["ptx/tokens_ratio"] * 2 * row["rollout/length"] * 16  # 16 responses, twice
        assert 3 * 4 * 2 <= tokens <= 3 * 4 * 63 and tokens == pytest.approx(round(tokens), abs=1e-6)


def test_a_checkpoint_during_warm_up_keeps_the_policys_optimiser_without_steps(tmp_path):
    """torch's get_state_dict takes a step with an optimiser that has taken none, which would spoil Adam's bias
    correction."""
    model, saved = torch.nn.Linear(2, 1), {}
    for where in ("never saved", "saved", "loaded"):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if where == "saved":
            checkpoints.save_checkpoint(tmp_path, 1, {"policy": (model, optimizer)}, {"a": 1})
        if where == "loaded":
            assert checkpoints.load_checkpoint(tmp_path, {"policy": (model, optimizer)}) == {"a": 1}
        for scale in (1.0, 3.0):
            optimizer.zero_grad()
            (scale * model(torch.ones(1, 2)).square().sum()).backward()
            optimizer.step()
        saved[where] = model.weight.detach().clone()
    assert torch.equal(saved["saved"], saved["never saved"]) and torch.equal(saved["loaded"], saved["saved"])


def test_win_rates_over_the_first_policy_are_those_of_the_samples(undisturbed):
    rows = read_jsonl(undisturbed.folder / "samples.jsonl")
    after = read_json(undisturbed.folder / "summary.json")["after"]
    a, b = ([row for row in rows if row["when"] == when] for when in ("before", "after"))
    assert len(a) == len(b) == 6 and [r["prompt"] for r in a] == [r["prompt"] for r in b]
    assert rows == a + b
    differences = [y["score"] - x["score"] for x, y in zip(a, b)]
    assert after["sft/score_gain"] == pytest.approx(sum(differences) / 6) and after["sft/score_gain_n"] == 6
    margin = statistics.pstdev(row["score"] for row in a) / 10
    won, lost = sum(d > margin for d in differences), sum(d < -margin for d in differences)
    assert (after["sft/score_win"], after["sft/score_lose"]) == (won / 6, lost / 6)
    assert after["sft/score_win_rate"] == pytest.approx((won + (6 - won - lost) / 2) / 6)
    rows = read_jsonl(undisturbed.folder / "metrics.jsonl")
    assert [row["iteration"] for row in rows if "sft/score_win_rate" in row] == [2, 4, ITERATIONS]  # not before
    assert after["eval/score"] == pytest.approx(sum(row["score"] for row in b) / 6)
    assert after["eval/kl"] == pytest.approx(sum(row["kl"] for row in b) / 6)


def test_plain_transformers_gives_the_kl_of_the_samples(small, undisturbed):
    ours = AutoModelForCausalLM.from_pretrained(undisturbed.folder / "model", dtype=torch.float32)
    first = AutoModelForCausalLM.from_pretrained(small.folder / "sft" / "model")
    rows = [row for row in read_jsonl(undisturbed.folder / "samples.jsonl") if row["when"] == "after"]
    pairs = [(prompt(question(row)), response(row["response"], row["finished"])) for row in rows]
    shown = [(row, pair) for row, pair in zip(rows, pairs) if len(pair[1].ids) == row["tokens"]]
    assert len(shown) >= 5  # the text leaves out special tokens
    for row, pair in shown:
        [document] = responses.documents([pair])
        nll = [nll_of(model, [document], lambda x: x.sum()).item() for model in (ours, first)]
        assert row["kl"] == pytest.approx(nll[1] - nll[0], abs=1e-3)


def test_every_parameter_of_the_policy_changes(small, undisturbed):
    start, saved = weights(small.folder / "sft"), weights(undisturbed.folder)
    assert set(start) == set(saved)
    assert not [name for name in start if torch.equal(start[name].bfloat16(), saved[name])]


# -- what moves and when, seen from inside -----------------------------------------------
def copy_of(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.fixture(scope="module")
def watched(small, tmp_path_factory):
    """A run in this process, with two warm-up iterations of four, a frozen layer and few texts."""
    seen = SimpleNamespace(steps=[], references=[], held_out=[], texts=[], first=None)
    update, figures_of_held_out = ppo.update, evaluation.HeldOutPrompts.__call__

    def watched_update(agent, rollout, minibatch, extra, policy_learns, args):
        before = [copy_of(agent.policy), copy_of(agent.value)]
        seen.first = seen.first or before[0]
        seen.texts += [tuple(d.ids.tolist()) for d in extra["ptx"]]
        result = update(agent, rollout, minibatch, extra, policy_learns, args)
        changed = [
            {name for name, x in model.state_dict().items() if not torch.equal(x, old[name])}
            for model, old in zip((agent.policy, agent.value), before)
        ]
        seen.steps.append((policy_learns, *changed, agent.policy_optimizer.state_dict()["state"] != {}))
        return result

    def watched_evaluate(self, policy):
        seen.references.append(copy_of(self.reference))
        seen.held_out += [tuple(d.ids.tolist()) for block in self.blocks_of_text for d in block]
        return figures_of_held_out(self, policy)

    text = write_rows(small.folder / "few.jsonl", tiny.rows("text", "train")[:18])
    options = {"iterations": 4, "value_warmup_steps": 5, "freeze_layers": 1, "save_every": 0, "eval_every": 0}
    options |= {"ptx_dataset": str(text), "ptx_coef": 0.1, "ptx_batch_size": 2, "lr": 1e-3}
    patch = pytest.MonkeyPatch()
    patch.setattr(ppo, "update", watched_update)
    patch.setattr(evaluation.HeldOutPrompts, "__call__", watched_evaluate)
    patch.setattr(ppo, "PLOTS", [])
    folder = tmp_path_factory.mktemp("watched")
    ppo.main(ppo.Args(**options_of(small, folder, **options)))
    patch.undo()
    seen.folder = folder
    return seen


def test_only_the_value_model_learns_during_warm_up(watched):
    assert [moves for moves, *_ in watched.steps] == [False] * 8 + [True] * 8  # 5 steps are two iterations
    for moves, policy, value, stepped in watched.steps:
        assert value and bool(policy) == moves == stepped


def test_the_reference_never_changes(watched):
    first, *others = watched.references
    assert len(others) == 1
    assert all(torch.equal(x, first[name]) for model in (*others, watched.first) for name, x in model.items())


def test_texts_follow_the_streams_order_from_the_policys_first_step(watched):
    assert len(watched.texts) == 16 * 2
    assert len(set(watched.texts[:16])) == 2  # asked for again while the policy stands still
    assert len(set(watched.texts[16:])) == 16 and watched.texts[16:18] == watched.texts[:2]


def test_held_out_texts_are_never_trained_on(watched):
    assert watched.held_out and not set(watched.texts) & set(watched.held_out)


# -- learning ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def learnt(small, tmp_path_factory):
    """Ten iterations towards the true reward, on the tiny world's own prompts."""
    folder = tmp_path_factory.mktemp("learnt")
    world = "tiny:commands=copy+first"  # a part, for all of it takes longer to read than to learn
    options = {"scorer": GOLD, "dataset": world, "eval_dataset": None, "eval_prompts": 250, "iterations": 10}
    options |= {"prompts_per_iteration": 64, "minibatch_size": 32, "micro_batch_size": 32}
    options |= {"value_warmup_steps": 8}
    succeeds(run(small, folder, save_every=0, eval_every=0, **options))
    return folder


def test_the_true_reward_of_held_out_prompts_rises(learnt):
    before, after = column(learnt, "gold/score")
    assert after > before + 0.2 and column(learnt, "sft/gold_gain_low")[-1] > 0
    assert after == pytest.approx(column(learnt, "eval/score")[-1])  # the scorer is the true reward


def test_the_true_reward_of_rollouts_is_logged_in_the_tiny_world(learnt):
    rows = metrics_rows(learnt)
    assert [row["reward/gold"] for row in rows] == pytest.approx([row["reward/score"] for row in rows])
    assert sum(row["reward/gold"] for row in rows[-3:]) > sum(row["reward/gold"] for row in rows[:3])


# -- resume ------------------------------------------------------------------------------
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bits(small, undisturbed, tmp_path, moment):
    as_killed(undisturbed.folder, moment, tmp_path)
    assert (tmp_path / "checkpoint" / "latest").read_text() == MOMENTS[moment]
    succeeds(run(small, tmp_path, "--resume", **all_options(small)))
    assert_same_run(tmp_path, undisturbed.folder)


def test_resuming_with_frozen_layers_and_running_statistics_changes_nothing(small, tmp_path):
    options = {"freeze_layers": 2, "reward_norm": "mean", "value_warmup_steps": 1, "iterations": 3}
    succeeds(run(small, tmp_path / "a", moment="copy results", **options))
    as_killed(tmp_path / "a", "results", tmp_path / "b")
    succeeds(run(small, tmp_path / "b", "--resume", **options))
    assert_same_run(tmp_path / "b", tmp_path / "a")
    start = weights(small.folder / "sft")
    same = {name for name, x in weights(tmp_path / "a").items() if torch.equal(x, start[name])}
    assert same == {name for name in start if re.match(r"model.layers.[01]\.", name)}


# -- variants ----------------------------------------------------------------------------
SHORT = {"iterations": 2, "value_warmup_steps": 0, "eval_every": 0, "save_every": 0}


def test_the_ratio_is_1_at_any_temperature_with_a_nucleus_and_checkpointed_activations(small, tmp_path):
    options = {"temperature": 0.7, "top_p": 0.9, "gradient_checkpointing": True, "reward_norm": "whiten"}
    options |= {"safety_scorer": "ppo_judges:safe", "iterations": 3, "value_warmup_steps": 0}
    succeeds(run(small, tmp_path, **{**SHORT, **options}))
    assert column(tmp_path, "policy/first_ratio_max") == [1.0] * 3
    assert column(tmp_path, "policy/first_approx_kl") == [0.0] * 3
    assert read_json(tmp_path / "args.json")["args"]["importance_cap"] == 0.0  # in float32
    # the sampler draws from the nucleus alone, in which each token is more probable
    assert all(kl > 0.001 for kl in column(tmp_path, "policy/sampler_kl"))
    assert all(ratio <= 1 / 0.9 + 0.01 for ratio in column(tmp_path, "policy/sampler_ratio_max"))
    assert all(0 < share < 1 for share in column(tmp_path, "reward/gated"))
    whitened = [row["reward/normalised"] + 1 - row["rollout/finished"] for row in metrics_rows(tmp_path)]
    assert whitened == pytest.approx([0.0] * 3, abs=1e-5)  # less the penalty, which comes after


def test_a_safety_model_without_a_fitted_probability_is_used_with_a_warning(small, tmp_path, capsys):
    options = {**SHORT, "iterations": 1, "eval_prompts": 0, "safety_scorer": str(small.folder / "reward")}
    out = succeeds(run(small, tmp_path / "run", **options)).out
    assert out.count(f"{small.folder / 'reward'} has no fitted P(safe)") == 1
    model = scorer()
    model.config.safety_gate = {"scale": 2.0, "bias": -0.5}
    checkpoints.save_model(model, TOKENIZER, tmp_path / "fitted")
    specs = (str(tmp_path / "fitted"), GOLD)
    gates = [scorers.load_scorer(spec, TOKENIZER, CPU, safety=True).gate for spec in specs]
    assert gates == [(2.0, -0.5), (1.0, 0.0)] and "P(safe)" not in capsys.readouterr().out


def test_with_a_constant_reward_only_the_penalty_remains(small, tmp_path):
    """The evaluation before training is the best and two more are not better, so the first policy is exported."""
    options = {"scorer": "ppo_judges:constant", "missing_eos_penalty": 2.5, "max_new_tokens": 4}
    options |= {"iterations": 9, "eval_every": 1, "patience": 2}
    succeeds(run(small, tmp_path, **{**SHORT, **options}))
    summary, rows = read_json(tmp_path / "summary.json"), metrics_rows(tmp_path)
    assert summary["iterations"] == 2 == len(rows) and summary["exported_iteration"] == 0
    assert same_weights(tmp_path, small.folder / "sft")
    for row in rows:  # the penalty comes after normalisation
        assert 0 < row["rollout/finished"] < 1 and row["reward/score"] == 0
        assert row["reward/normalised"] == pytest.approx(-2.5 * (1 - row["rollout/finished"]))


def test_the_kl_is_to_the_given_reference(small, tmp_path):
    few = write_rows(small.folder / "five.jsonl", tiny.rows("prompts", "train")[:5])
    options = {"reference": "tiny", "iterations": 1, "max_kl": 1e4, "dataset": few}
    succeeds(run(small, tmp_path, **{**SHORT, **options}))
    assert column(tmp_path, "step") == [0, 4, 4]  # of 10 responses two minibatches, twice
    assert column(tmp_path, "eval/kl")[0] > 1 and column(tmp_path, "kl/per_response")[0] > 1
    assert column(tmp_path, "policy/first_ratio_max") == [1.0]  # the ratio is to the policy itself


def test_with_patience_the_best_held_out_version_is_exported_also_by_a_killed_run(small, tmp_path):
    """The scores of held-out prompts are 0 before, 1 after the first iteration, and lower from then on."""
    one, best, killed = tmp_path / "one", tmp_path / "best", tmp_path / "killed"
    options = {**SHORT, "scorer": "ppo_judges:fading"}
    succeeds(run(small, one, **{**options, "iterations": 1}))
    options |= {"iterations": 4, "save_every": 2, "patience": 9, "eval_every": 1}
    succeeds(run(small, best, moment="copy row 12", **options))
    as_killed(best, "row 12", killed)
    succeeds(run(small, killed, "--resume", **options))
    exported = [read_json(x / "summary.json")["exported_iteration"] for x in (one, best, killed)]
    assert exported == [1, 1, 1]
    assert same_weights(best, one) and same_weights(killed, one) and len(metrics_rows(best)) == 4
    succeeds(run(small, best, "--overwrite", **{**options, "iterations": 2, "patience": 0}))
    assert not same_weights(best, one) and not (best / "best").exists()
    # patience from iteration 2 on: nobody knows that policy's score, so the first one that has one is better
    options |= {"iterations": 3, "patience": 0}
    succeeds(run(small, tmp_path / "late", moment="copy row 12", **options))
    as_killed(tmp_path / "late", "row 12", killed)
    succeeds(run(small, killed, "--resume", **{**options, "patience": 9}))
    assert read_json(killed / "summary.json")["exported_iteration"] == 3


def test_a_best_version_from_a_lost_continuation_is_not_exported(small, tmp_path):
    """The third iteration is the best, but the run is killed before its checkpoint. In the resumed run the third
    one is worse (the judge counts from 0 again), so the first, which the checkpoint has, is the best version."""
    options = {**SHORT, "scorer": "ppo_judges:best_in_the_third", "iterations": 4, "save_every": 2}
    options |= {"patience": 9, "eval_every": 1}
    run_one, killed = tmp_path / "one", tmp_path / "killed"
    succeeds(run(small, run_one, **{**options, "iterations": 1, "patience": 0}))
    succeeds(run(small, tmp_path / "whole", moment="copy row 12", **options))
    assert read_json(tmp_path / "whole" / "summary.json")["exported_iteration"] == 3
    as_killed(tmp_path / "whole", "row 12", killed)
    assert {path.name for path in (killed / "best").glob("step_*")} == {"step_1", "step_3"}
    succeeds(run(small, killed, "--resume", **options))
    assert read_json(killed / "summary.json")["exported_iteration"] == 1
    assert same_weights(killed, run_one)


def test_rehearsal_is_logged_and_its_prompts_can_be_excluded_from_rollouts(small, tmp_path, monkeypatch):
    rows, asked = tiny.rows("sft", "train")[:13], []
    options = {"rehearsal_data": str(write_rows(tmp_path / "r.jsonl", rows[:5])), "iterations": 1}
    options |= {"ptx_dataset": small.files["text"], "ptx_coef": 0.0, "hold_out_rehearsed": True}
    options |= {"dataset": str(write_rows(tmp_path / "p.jsonl", rows))}
    monkeypatch.setattr(ppo, "PLOTS", [])
    monkeypatch.setattr(prompt_sets, "fresh_prompts", lambda some, *_: asked.extend(some) or some)
    ppo.main(ppo.Args(**options_of(small, tmp_path / "run", **{**SHORT, **options})))
    (row,) = metrics_rows(tmp_path / "run")
    assert row["loss/rehearsal"] > 0 and row.get("loss/ptx", 0) == 0
    assert {p.question for p in asked} == {row["prompt"] for row in rows[5:]}


# -- bad input ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words, options",
    [
        (["--minibatch-size 48", "128 responses", "try 32"], {"minibatch_size": 48}),  # the largest below it
        (["--minibatch-size 129", "128 responses", "try 128"], {"minibatch_size": 129}),
        (["--safety-threshold 0.3", "--safety-scorer"], {"safety_threshold": 0.3}),
        (["--minibatch-size 0"], {"minibatch_size": 0}),
        (["--temperature 0", "greedy"], {"temperature": 0.0}),
        (["--top-p 0"], {"top_p": 0.0}),
        (["--top-p 1.5"], {"top_p": 1.5}),
        (["--ptx-coef 0.1", "--ptx-dataset"], {"ptx_coef": 0.1}),
        (["--max-length 8", "--max-new-tokens"], {"max_length": 8, "max_new_tokens": 8}),
        (["--n-samples 0"], {"n_samples": 0}),
        (["--iterations 0"], {"iterations": 0}),
        (["--clip-ratio"], {"clip_ratio": -0.1}),
        (["--gamma"], {"gamma": 1.5}),
        (["--lam"], {"lam": -0.5}),
        (["--kl-coef"], {"kl_coef": -1.0}),
        (["--value-lr"], {"value_lr": -1.0}),
        (["--freeze-layers"], {"freeze_layers": -1}),
        (["--value-warmup-steps"], {"value_warmup_steps": -1}),
    ],
)
def test_arguments_outside_their_limits_are_named(words, options):
    with pytest.raises(InputError) as error:
        ppo.check(make_args(**options))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_flags_that_depend_on_the_data_are_checked_with_the_prompts_that_are_there():
    """64 prompts give 128 responses, 4 steps an iteration: the third begins after 8. 5 prompts give 2 steps."""
    args = make_args(value_warmup_steps=8, iterations=3)
    ppo.check_data([None] * 64, [], args)
    assert ppo.n_steps([None] * 64, 3, args) == 12 and ppo.n_steps([None] * 5, 3, args) == 6
    for n, steps, at_most in ((64, 9, 8), (5, 5, 4)):
        words = f"--value-warmup-steps {steps}: expected at most the {at_most} steps .*--iterations 3.*never move"
        with pytest.raises(InputError, match=words):
            ppo.check_data([None] * n, [], make_args(value_warmup_steps=steps, iterations=3))
    ppo.check_data([None] * 64, [None], make_args(patience=2, eval_every=1, eval_prompts=1))
    for held_out, options in (([], {}), ([None], {"eval_every": 0}), ([None], {"eval_prompts": 0})):
        with pytest.raises(InputError, match="--patience 2: expected 0 without --eval-every and held-out"):
            ppo.check_data([None] * 64, held_out, make_args(**{"patience": 2, "eval_every": 1, **options}))


@pytest.mark.parametrize(
    "options, words",
    [
        ({"scorer": "ppo_judges:not_a_number"}, ["ppo_judges:not_a_number", "nan", "ant"]),
        ({"ptx_dataset": "nothing.jsonl"}, ["nothing.jsonl", "no such file"]),
        ({"scorer": "nothing/of/this name"}, ["nothing/of/this name"]),
        ({"model": "reward"}, ["reward is a", "not a causal language model"]),
        ({"lora_rank": 2, "freeze_layers": 9}, ["--freeze-layers 9", "--lora-rank"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_ends_with_one_line(small, tmp_path, options, words):
    ended = run(small, tmp_path / "run", **{**SHORT, **options})
    assert_error(ended, *words)
    assert not (tmp_path / "run" / "model").exists() and not (tmp_path / "run" / "summary.json").exists()


@pytest.fixture
def cut(small, tmp_path, monkeypatch):
    """(the rollouts of which responses end, more options) -> a run in this process."""
    sample = responses.answers  # of rollouts and evaluations, not of the value model's units
    monkeypatch.setattr(ppo, "PLOTS", [])

    def go(whole, **options):
        rollouts = iter(range(1, 99))

        def sample_cut(policy, tokenizer, prompts, args, seed, n=1, **rest):
            sampled = sample(policy, tokenizer, prompts, args, seed, n=n, **rest)
            evaluates = n == 1
            ended = evaluates or next(rollouts) in whole
            return sampled if ended else [(p, r._replace(finished=False)) for p, r in sampled]

        monkeypatch.setattr(responses, "answers", sample_cut)
        ppo.main(ppo.Args(**options_of(small, tmp_path, **{**SHORT, "prompts_per_iteration": 4, **options})))

    return go


@pytest.mark.parametrize("iterations, last", [(2, 2), (9, 6)])
def test_five_rollouts_in_a_row_without_a_finished_response_stop_the_run(cut, tmp_path, iterations, last):
    words = (
        f"iteration {last}: no response ended within 10 .*--max-new-tokens.* {min(5, last)} iteration.* row"
    )
    with pytest.raises(InputError, match=words):
        cut([1] if iterations > 5 else [], iterations=iterations)
    assert not (tmp_path / "model").exists()


def test_a_rollout_without_a_finished_response_is_skipped_and_counted(cut, tmp_path):
    cut([1, 6, 8], iterations=8)
    assert [row["iteration"] for row in metrics_rows(tmp_path)] == [1, 6, 8]
    rows = metrics_rows(tmp_path, "iterations/skipped")
    skipped = [(row["iteration"], row["iterations/skipped"]) for row in rows]
    assert skipped == [(2, 1), (3, 2), (4, 3), (5, 4), (7, 1)]
    assert column(tmp_path, "step") == [0, 2, 2, 2, 2, 2, 4, 4, 6, 6]


def test_with_patience_the_last_iteration_is_evaluated_even_if_it_is_skipped(cut, tmp_path):
    """Or what the policy has learnt since the last evaluation could not be the best version."""
    cut([1], iterations=2, patience=9, eval_every=9)
    [row] = metrics_rows(tmp_path, "iterations/skipped")
    assert row["iteration"] == 2 and "eval/score" in row


def test_a_reward_that_needs_no_end_learns_from_unfinished_responses(small, cut, tmp_path):
    cut([], missing_eos_penalty=0.0)
    assert column(tmp_path, "rollout/finished") == [0.0] * 2 and not column(tmp_path, "iterations/skipped")
    for row in metrics_rows(tmp_path, "reward/normalised")[:1]:
        assert row["reward/normalised"] == pytest.approx(0, abs=1e-5)  # nothing is taken off
    start = weights(small.folder / "sft")
    assert all(not torch.equal(x, start[name]) for name, x in weights(tmp_path).items())


@pytest.fixture(scope="module")
def foreign(small):
    """A reward model with another chat template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(small.folder / "reward")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template  # two of them
    checkpoints.save_model(scorer(), tokenizer, small.folder / "foreign")
    return str(small.folder / "foreign")


def test_a_scorer_with_other_tokens_scores_the_text_and_a_line_says_so(small, foreign, tmp_path):
    ended = succeeds(run(small, tmp_path, scorer=foreign, **SHORT | {"iterations": 1}))
    assert "foreign has different tokens or a different chat template: the text is encoded again\n" in ended.out


def test_a_kl_above_the_limit_stops_the_run_and_keeps_the_checkpoint(small, tmp_path):
    options = {**SHORT, "lr": 0.005, "iterations": 3, "save_every": 1}
    words = ["iteration 2", "KL", "nats per response", "--max-kl 0.01", "--kl-coef", "checkpoint"]
    assert_error(run(small, tmp_path, max_kl=0.01, **options), *words)
    assert (tmp_path / "checkpoint" / "latest").read_text() == "step_1"
    assert not (tmp_path / "model").exists()
    succeeds(run(small, tmp_path, "--resume", max_kl=1e6, **{**options, "iterations": 2}))


def test_a_loss_that_is_not_finite_ends_the_run_before_the_step(small, tmp_path):
    words = ["step 3", "loss nan", "the step was not taken", "--lr", "checkpoint"]
    assert_error(run(small, tmp_path, moment="nan 3", **SHORT), *words)
    assert not (tmp_path / "model").exists()


# -- recipes -----------------------------------------------------------------------------
PAPERS = {
    "llama2": {"kl_coef": 0.01, "clip_ratio": 0.2, "lr": 1e-6, "adam_eps": 1e-5, "weight_decay": 0.1,
               "max_grad_norm": 1.0, "minibatch_size": 64, "reward_norm": "whiten", "safety_threshold": 0.15,
               "epochs": 1, "top_p": 1.0, "prompts_per_iteration": 512, "n_samples": 1, "iterations": 400,
               "patience": 20, "eval_every": 10},  # 20 evaluations, every 10 iterations: not before 200
    "qwen": {"kl_coef": 0.04, "lr": 1e-6, "value_lr": 5e-6, "clip_value": 0.15, "value_warmup_steps": 50,
             "n_samples": 2, "top_p": 0.9, "reward_norm": "mean"},
    "advantage_model": {"lr": 5e-7, "rehearsal_coef": 0.01, "rehearsal_norm": "sum", "iterations": 100,
                        "prompts_per_iteration": 256, "n_samples": 1, "minibatch_size": 256, "epochs": 1},
    "rlaif": {"lr": 1e-5, "kl_coef": 0.05, "temperature": 0.9, "prompts_per_iteration": 128, "n_samples": 1,
              "minibatch_size": 128, "iterations": 160_800 * 8 // 128, "max_new_tokens": 128,
              "max_length": 1024 + 128, "lam": 1.0, "whiten_advantages": False, "epochs": 1},
    "summarize": {"lr": 1.5e-5, "kl_coef": 0.05, "epochs": 4, "prompts_per_iteration": 512, "n_samples": 1,
                  "iterations": 1_000_000 // 512, "model": "runs/sft", "dataset": "trl-lib/tldr"},
}  # fmt: skip


@pytest.mark.parametrize("name", ppo.RECIPES)
def test_recipes_have_the_papers_numbers_within_their_limits(name):
    args, numbers = ppo.RECIPES[name][1], {"gamma": 1.0, "lam": 0.95, **PAPERS.get(name, {})}
    assert {key: getattr(args, key) for key in numbers} == numbers
    ppo.check(args)


# -- docs/learn/grpo.patch -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    return processes.patched("ppo", "grpo", tmp_path_factory.mktemp("grpo"))


def test_grpo_compares_the_responses_to_a_prompt_by_hand(grpo):
    """The rewards 1, 3 and 2, 2 have means of 2 and deviations of sqrt 2 and 0."""
    rollout = rollout_of(PAIRS[:4], response_rewards=torch.tensor([1.0, 3.0, 2.0, 2.0]))
    rollout.old_logprobs, rollout.ref_logprobs = rollout.mask * -1.0, rollout.mask * -1.5
    kl = grpo.estimate_advantages(rollout, grpo.Args(n_samples=2))
    advantages = torch.tensor([-(0.5**0.5), 0.5**0.5, 0.0, 0.0])[:, None] * rollout.mask
    torch.testing.assert_close(rollout.advantages, advantages, atol=1e-4, rtol=0)
    assert kl == pytest.approx(0.5 * sum(LENGTHS[:4]) / 4)


def test_grpo_runs_without_a_value_model(grpo, small, tmp_path, monkeypatch):
    options = {"iterations": 2, "eval_every": 0, "save_every": 1, "value_warmup_steps": None}
    monkeypatch.setattr(grpo, "PLOTS", [])
    grpo.main(grpo.Args(**options_of(small, tmp_path, **options)))
    rows = metrics_rows(tmp_path)
    assert [row["policy/first_ratio_max"] for row in rows] == [1.0, 1.0]
    assert rows[1]["loss/kl"] > 0 and not any(key.startswith("value/") for key in rows[0])
    assert read_json(tmp_path / "args.json")["stage"] == "grpo"


SUM = """import gsm8k
from common.data import tiny


def f(*given):
    words = [-0.5 * len(response.split()) for response in given[1]]
    true = [2 * x for x in tiny.gold_scorer(*given)]
    return {"true": true, "words": words, "correct": gsm8k.correct(*given)}
"""


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_an_answer_that_can_be_checked_is_a_reward_whose_parts_are_logged(
    name, grpo, small, tmp_path, monkeypatch
):
    monkeypatch.chdir(docs_functions(tmp_path))
    rows = [{"prompt": r["prompt"], "answer": "#### 2"} for r in tiny.rows("prompts", "train")[:8]]
    (tmp_path / "sum.py").write_text(SUM)
    options = {"scorer": "sum.py:f", "iterations": 1}
    options |= {"dataset": str(write_rows(tmp_path / "p.jsonl", rows)), "eval_prompts": 0}
    module = grpo if name == "grpo" else ppo
    monkeypatch.setattr(module, "PLOTS", [])
    options |= {"value_warmup_steps": None if name == "grpo" else 0}
    module.main(module.Args(**options_of(small, tmp_path / "run", **options)))
    [row] = metrics_rows(tmp_path / "run")
    parts = [row[f"reward/{part}"] for part in ("true", "words", "correct")]
    assert all(parts[:2]) and row["reward/score"] == pytest.approx(sum(parts), abs=1e-5)
    assert parts[2] == 0


@pytest.mark.parametrize("name, most", [("grpo", 55), ("cpl", 42), ("hir", 95)])
def test_a_patch_is_short(name, most):
    lines = (ROOT / "docs" / "learn" / f"{name}.patch").read_text().splitlines()
    assert sum(line.startswith("+") and not line.startswith("+++") for line in lines) <= most
