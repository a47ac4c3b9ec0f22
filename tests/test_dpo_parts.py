"""dpo_iterative.py: its parts, each by hand or against plain transformers. Whole runs are in
test_dpo_iterative.py."""

import gc
import json
import math
import weakref

import pytest
import torch
from scorers import CPU, TOKENIZER, A, B, C, comparisons_of, prompt, row

import dpo_iterative as dpo
from common import comparisons, dist, losses, models, pool, tiny
from common.batches import Comparison, Row
from common.errors import InputError
from common.metrics import read_jsonl

END, PAD = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id
LOG2 = math.log(2)


# Whatever the script's defaults become, these tests know theirs
DEFAULTS = {"model": "tiny", "reference": "sft", "max_new_tokens": 8, "max_length": 64, "max_grad_norm": 0.0}
DEFAULTS |= {"temperatures": (1.0, 0.7), "n_samples": 8, "beta": 0.1, "length_penalty": 0.0, "seed": 0}
DEFAULTS |= {"label_smoothing": 0.0, "tie_margin": 0.1, "micro_batch_size": 32, "share_prompt": True}


def make_args(**options):
    return dpo.Args(**{**DEFAULTS, **options})


# -- parts: who answers a prompt ---------------------------------------------------------
@pytest.mark.parametrize(
    "n, temperatures, counts",
    [
        (8, (1.0, 0.7), [4, 4]),
        (7, (1.0, 0.7), [4, 3]),
        (8, (1.0, 0.7, 0.3), [3, 3, 2]),
        (3, (0.5,), [3]),
        (2, (1.0, 0.7, 0.3), [1, 1]),  # nobody is asked for no response
    ],
)
def test_responses_are_divided_equally_among_temperatures(n, temperatures, counts):
    args = make_args(n_samples=n, temperatures=temperatures)
    assert dpo.parts("newest", 2, args) == [("newest", t, k) for t, k in zip(temperatures, counts)]


@pytest.mark.parametrize("n, counts", [(8, [2, 2, 2, 2]), (6, [2, 1, 2, 1]), (4, [1, 1, 1, 1])])
def test_an_enhancer_gives_half_of_the_responses_at_the_same_temperatures(n, counts):
    args = make_args(n_samples=n, enhancer="explorer")
    ways = [("newest", 1.0), ("newest", 0.7), ("explorer", 1.0), ("explorer", 0.7)]
    assert dpo.parts("newest", 1, args) == [(*way, k) for way, k in zip(ways, counts)]


@pytest.mark.parametrize(
    "version, previous", [(0, "tiny"), (1, "tiny"), (2, "out/versions/1"), (3, "out/versions/2")]
)
def test_the_enhancer_previous_is_the_version_before_the_newest_one(version, previous):
    args = make_args(n_samples=2, temperatures=(1.0,), enhancer="previous", output_dir="out")
    latest = f"out/versions/{version}" if version else "tiny"
    assert dpo.parts(latest, version, args) == [(latest, 1.0, 1), (previous, 1.0, 1)]


# -- best_against_worst ------------------------------------------------------------------
def paired(responses, prompts=(A, B), iteration=1, **options):
    """([(prompt, better, worse)], what was dropped)."""
    pairs, dropped = dpo.best_against_worst(responses, prompts, iteration, make_args(**options))
    return [(pair.prompt[0]["content"], *pair.texts) for pair in pairs], dropped


NOTHING = {"same": 0, "tied": 0, "unfinished": 0}


def test_the_best_response_of_each_prompt_is_preferred_to_its_worst():
    rows = [
        row(A, "ant", 1.0),
        row(B, "bear", -3.0),
        row(A, "cat", 2.0),
        row(B, "eel", -2.0),
        row(A, "dog", 0),
    ]
    assert paired(rows) == ([("copy ant", "cat", "dog"), ("first bear cat", "eel", "bear")], NOTHING)
    assert paired(rows, prompts=(B, A))[0][0][0] == "first bear cat"  # in the order of the prompts


def test_a_pair_holds_the_ids_as_they_were_sampled_and_the_scores():
    category = prompt("rest dog eel")._replace(row=Row("prompts:3", {"category": 7}))
    better = {**row(category, "ant cat", 1.5), "response_ids": [50, 51, END]}  # not the text's own encoding
    worse = row(category, "dog", -0.5, finished=False)
    (pair,), _ = dpo.best_against_worst([worse, better], [category], 1, make_args())
    assert pair.prompt == category.turns and pair.prompt_ids.tolist() == category.ids
    assert pair.response_ids[0].tolist() == [50, 51, END]
    assert pair.response_ids[1].tolist() == TOKENIZER("dog")["input_ids"]  # cut: without an end token
    assert {ids.dtype for ids in (pair.prompt_ids, *pair.response_ids)} == {torch.int32}
    assert (pair.texts, pair.grades, pair.ranks.tolist()) == (["ant cat", "dog"], [1.5, -0.5], [0, 1])
    assert (pair.source, pair.category, pair.row.where) == ("iteration 1", "7", "prompts:3")
    assert pair.preference is None and pair.ref_logprobs is None and pair.key == category.key


LONG, LONGEST = "ant bear cat dog", "fox goat hen owl ant"  # 16 and 20 characters


@pytest.mark.parametrize(
    "coefficient, better, worse",
    [
        (0.0, LONG, "eel"),  # 1.3 and 0.2
        (0.05, "ant", LONGEST),  # 1 - 0.15 against 1.3 - 0.8; 0.3 - 1 against 0.2 - 0.15
        (0.03, "ant", LONGEST),  # 0.91 against 0.82; -0.3 against 0.11
        (0.01, LONG, LONGEST),  # 1.14 against 0.97; 0.1 against 0.17
        (0.005, LONG, "eel"),  # 1.22 against 0.985; 0.2 against 0.185
    ],
)
def test_the_length_penalty_counts_for_the_best_and_for_the_worst(coefficient, better, worse):
    rows = [row(A, "ant", 1.0), row(A, LONG, 1.3), row(A, "eel", 0.2), row(A, LONGEST, 0.3)]
    assert paired(rows, length_penalty=coefficient) == ([("copy ant", better, worse)], NOTHING)


def test_the_length_is_that_of_the_text_in_characters_and_not_in_tokens():
    """4 tokens in 11 characters and 3 tokens in 12; the end token counts in neither."""
    few, many = row(A, "goat toad um", 1.0), row(A, "ant eel cat", 1.0)
    assert len(few["response_ids"]) == len(many["response_ids"])
    rows = [{**few, "response_ids": few["response_ids"][:2] + [END]}, many]
    assert paired(rows, length_penalty=0.1)[0] == [("copy ant", "ant eel cat", "goat toad um")]


def test_the_scores_of_a_pair_are_those_it_was_chosen_by_less_the_penalty():
    rows = [row(A, "ant", 1.0), row(A, LONG, 1.3)]
    (pair,), _ = dpo.best_against_worst(rows, [A], 1, make_args(length_penalty=0.05))
    penalised = [1.0 - 0.05 * 3, 1.3 - 0.05 * len(LONG)]
    assert pair.texts == ["ant", LONG] and pair.grades == pytest.approx(penalised, abs=1e-12)


def test_prompts_without_two_different_responses_are_counted_and_give_no_pair():
    rows = [
        row(A, "ant", 1.0),
        row(A, " ant\n", 2.0),
        row(B, "bear", 1.0),
        row(C, "eel", 1),
        row(C, "dog", 0),
    ]
    pairs, dropped = paired(rows, prompts=(A, B, C))
    assert pairs == [("rest dog eel", "eel", "dog")] and dropped == {**NOTHING, "same": 2}


def test_prompts_whose_different_responses_have_one_score_are_counted_as_tied():
    pairs, dropped = paired([row(A, "ant", 1.0), row(A, "cat", 1.0), row(A, "dog", 1.0)])
    assert pairs == [] and dropped == {**NOTHING, "tied": 1}


def test_different_responses_with_one_score_give_no_pair():
    pairs, dropped = paired([row(A, "ant", 1.0), row(A, "cat", 1.0)])
    assert pairs == [] and sum(dropped.values()) == 1


@pytest.mark.parametrize("best", [row(A, "ant", 2.0, finished=False), row(A, "", 2.0), row(A, " ", 2.0)])
def test_a_best_response_that_did_not_end_or_is_empty_drops_the_prompt(best):
    pairs, dropped = paired([row(A, "cat", 1.0), best, row(A, "dog", 0.0)])
    assert pairs == [] and dropped == {**NOTHING, "unfinished": 1}


@pytest.mark.parametrize("worst", [row(A, "dog", -1.0, finished=False), row(A, "", -1.0)])
def test_a_worst_response_may_be_cut_or_empty(worst):
    pairs, dropped = paired([row(A, "cat", 1.0), worst, row(A, "ant", 0.0, finished=False)])
    assert pairs == [("copy ant", "cat", worst["response"])] and dropped == NOTHING


def test_rows_of_other_iterations_and_of_other_prompts_are_ignored():
    rows = [row(A, "ant", 9.0), row(A, "bear", -9.0), row(C, "owl", 5.0, 2), row(C, "pig", 4.0, 2)]
    rows += [row(A, "cat", 1.0, 2), row(A, "dog", 0.0, 2)]
    assert paired(rows, iteration=2) == ([("copy ant", "cat", "dog")], NOTHING)  # B has no row at all
    assert paired(rows, iteration=1) == ([("copy ant", "ant", "bear")], NOTHING)
    assert paired(rows, iteration=3) == ([], NOTHING)


# -- two_of, pair_key --------------------------------------------------------------------
def ranking(*scores):
    responses = [{"text": text, "score": score} for text, score in zip(tiny.ANIMALS, scores)]
    return {"prompt": "copy ant", "responses": responses}


def test_of_a_ranking_the_best_and_the_worst_become_a_pair(tmp_path):
    (c,) = comparisons_of(tmp_path, [ranking(1, 4, -2, 3)])
    assert len(c.texts) == 4
    pair = dpo.two_of(c)
    assert (pair.texts, pair.grades, pair.ranks.tolist()) == (["bear", "cat"], [4, -2], [0, 1])
    wanted = [TOKENIZER(text)["input_ids"] + [END] for text in pair.texts]
    assert [ids.tolist() for ids in pair.response_ids] == wanted
    assert torch.equal(pair.prompt_ids, c.prompt_ids) and (pair.prompt, pair.row) == (c.prompt, c.row)
    assert pair.n_tokens == len(c.prompt_ids) + 4


def test_of_ties_in_a_ranking_one_stands_for_all(tmp_path):
    (c,) = comparisons_of(tmp_path, [ranking(3, 1, 3, 1)])
    pair = dpo.two_of(c)
    assert pair.grades == [3, 1] and pair.texts[0] in ("ant", "cat") and pair.texts[1] in ("bear", "dog")


def test_a_pair_stays_as_it_is_with_its_soft_label(tmp_path):
    rows = [{"prompt": f"copy {word}", "chosen": "ant", "rejected": "cat"} for word in ("owl", "pig", "dog")]
    rows[1]["preference"], rows[2]["preference"] = 0.2, 0.5
    given = comparisons_of(tmp_path, [*rows, ranking(1, 2)])
    assert len(given) == 4 and all(dpo.two_of(c) is c for c in given)


def pair_of(prompt_ids, chosen, rejected, preference=None, reference=None, **about):
    ids = [torch.tensor(x, dtype=torch.int32) for x in (prompt_ids, chosen, rejected)]
    about = {"source": "s", "row": Row("f:1", {}), "preference": preference, **about}
    reference = None if reference is None else torch.tensor(reference)
    turns, ranks = [{"role": "user", "content": "copy ant"}], torch.tensor([0, 1])
    texts = [TOKENIZER.decode(x, skip_special_tokens=True) for x in (chosen, rejected)]
    return Comparison(turns, texts, ids[0], ids[1:], ranks, ref_logprobs=reference, **about)


def test_a_pairs_key_changes_with_every_token_and_with_nothing_else():
    pair = pair_of([1, 2], [3, 4], [5, 6])
    others = [([1, 7], [3, 4], [5, 6]), ([1, 2], [3, 7], [5, 6]), ([1, 2], [3, 4], [5, 7])]
    others += [([1, 2], [5, 6], [3, 4])]  # the sides exchanged
    others += [([1], [2, 3, 4], [5, 6]), ([1, 2], [3], [4, 5, 6]), ([1, 2, 3], [4], [5, 6])]  # other borders
    others += [([12], [3, 4], [5, 6]), ([1, 2], [34], [5, 6])]  # the same digits
    keys = {dpo.pair_key(pair), *(dpo.pair_key(pair_of(*ids)) for ids in others)}
    assert len(keys) == 1 + len(others)
    same = pair_of([1, 2], [3, 4], [5, 6], 0.5, [-1.0, -2.0], source="other", row=Row("g:2", {"a": 1}))
    assert dpo.pair_key(same) == dpo.pair_key(pair)
    assert json.loads(json.dumps({dpo.pair_key(pair): 1})) == {dpo.pair_key(pair): 1}


# -- pairs_loss --------------------------------------------------------------------------
def test_the_loss_of_pairs_by_hand():
    """beta = 1/2; h is 1/2 ((-3 + 4) - (-5 + 3)) = 3/2 and 1/2 ((-2 + 1) - (-6 + 6)) = -1/2, the latter with
    P(chosen is better) = 1/4; label smoothing 0.1 makes 0.9 and 0.3 of 1 and 1/4."""
    pairs = [pair_of([1], [2], [3], None, [-4.0, -3.0]), pair_of([1], [4], [5], 0.25, [-1.0, -6.0])]
    logprobs = torch.tensor([-3.0, -5.0, -2.0, -6.0], requires_grad=True)
    args = make_args(beta=0.5, label_smoothing=0.1)
    loss, parts = dpo.pairs_loss(logprobs, pairs, 5, args)
    right, wrong = (lambda h: math.log(1 + math.exp(-h))), (lambda h: math.log(1 + math.exp(h)))
    total = 0.9 * right(1.5) + 0.1 * wrong(1.5) + 0.3 * right(-0.5) + 0.7 * wrong(-0.5)
    assert loss.item() == pytest.approx(total / 5) and parts["loss_sum"].item() == pytest.approx(total)
    assert parts["n_correct"] == 2  # the second pair's label says that the rejected one is better
    assert parts["chosen_reward_sum"].item() == pytest.approx(0.5 - 0.5)
    assert parts["rejected_reward_sum"].item() == pytest.approx(-1.0 + 0.0)
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
    loss, parts = dpo.pairs_loss(logprobs, [], 4, make_args(label_smoothing=0.1))
    loss.backward()
    assert loss == 0 and {float(x) for x in parts.values()} == {0.0} and logprobs.grad.shape == (0,)


# -- pairs of the tiny world, and their figures by plain transformers ---------------------
def encoded(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def make_pairs(n=5):
    """Of different lengths and labels; the last one's rejected response was cut."""
    made = []
    for i in range(n):
        ids = prompt(" ".join(["copy", *tiny.ANIMALS[: 1 + 2 * i]])).ids
        better, worse = (
            encoded(" ".join(tiny.ANIMALS[i : 2 * i + 1])),
            encoded(" ".join(tiny.ANIMALS[5 : 9 - i // 2])),
        )
        cut = [] if i == n - 1 else [END]
        made.append(pair_of(ids, [*better, END], worse + cut, (None, 0.8, 0.1, None, 0.5)[i % 5]))
    return made


def plain_logprobs(model, pair):
    """log pi(y | x) of both responses by log-softmax over plain forwards, gradient flows."""
    found = []
    for ids in pair.response_ids:
        whole = torch.cat([pair.prompt_ids, ids]).long()
        logprobs = model(input_ids=whole[None]).logits[0, len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(-1, ids.long()[:, None]).sum())
    return found


def with_made_up_reference(pairs):
    """References some nats away from the policy's own, so that no h is 0."""
    with torch.no_grad():
        own = [torch.stack(plain_logprobs(tiny.model(), pair)) for pair in pairs]
    shifts = torch.tensor([[4.0, -3.0], [-6.0, 2.0], [1.0, 5.0], [-2.0, -7.0], [3.0, 1.0]])
    return [p._replace(ref_logprobs=x + shifts[i % 5]) for i, (p, x) in enumerate(zip(pairs, own))]


@pytest.fixture(scope="module")
def pairs():
    return with_made_up_reference(make_pairs())


# -- with_reference ----------------------------------------------------------------------
@pytest.fixture
def loaded(monkeypatch):
    """Names of the models that are loaded from now on."""
    names, load = [], pool.load
    monkeypatch.setattr(pool, "load", lambda name, *more: names.append(name) or load(name, *more))
    return names


def save(folder, seed=0):
    args = make_args(seed=seed)
    dist.save_model(pool.load("tiny", TOKENIZER, args, CPU), TOKENIZER, folder)
    return str(folder)


def referenced(pairs, name, folder, **options):
    args = make_args(output_dir=str(folder), **options)
    found = dpo.with_reference(pairs, name, TOKENIZER, args, CPU)
    assert [dpo.pair_key(x) for x in found] == [dpo.pair_key(x) for x in pairs]
    return torch.stack([pair.ref_logprobs for pair in found])


def plain_references(pairs, seed=0):
    with torch.no_grad():
        model = tiny.model(seed)
        return torch.stack([torch.stack(plain_logprobs(model, pair)) for pair in pairs])


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 64])
def test_references_are_the_sums_of_plain_log_softmax(share_prompt, micro_batch_size, tmp_path):
    pairs, options = make_pairs(), {"share_prompt": share_prompt, "micro_batch_size": micro_batch_size}
    got = referenced(pairs, "tiny", tmp_path, **options)
    wanted = plain_references(pairs)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
    assert (got - wanted.roll(1, 0)).abs().min() > 0.1  # in another order they would differ


def test_the_same_pairs_load_no_model_again(tmp_path, loaded, capsys):
    pairs = make_pairs()
    first = referenced(pairs, "tiny", tmp_path)
    assert loaded == ["tiny"]
    again = referenced(pairs[::-1], "tiny", tmp_path)
    assert loaded == ["tiny"] and torch.equal(again, first.flip(0)) and capsys.readouterr().out == ""
    assert not list(tmp_path.glob("*.tmp"))


def test_only_pairs_that_are_not_known_are_computed_and_each_once(tmp_path, loaded, monkeypatch):
    pairs, asked, plain = make_pairs(), [], dpo.pair_logprobs
    monkeypatch.setattr(
        dpo, "pair_logprobs", lambda model, some, *more: asked.append(some) or plain(model, some, *more)
    )
    referenced(pairs[:2], "tiny", tmp_path)
    got = referenced([pairs[3], *pairs, pairs[3]], "tiny", tmp_path)
    wanted = [[dpo.pair_key(pair) for pair in some] for some in (pairs[:2], [pairs[3], pairs[2], pairs[4]])]
    assert [[dpo.pair_key(pair) for pair in some] for some in asked] == wanted
    torch.testing.assert_close(got[1:6], plain_references(pairs), rtol=0, atol=1e-4)
    assert torch.equal(got[0], got[4]) and torch.equal(got[6], got[4])


def test_a_reference_that_cannot_share_prompts_is_refused_before_anything_is_kept(tmp_path, monkeypatch):
    def refuse(model, max_length):
        raise InputError("use --no-share-prompt")

    monkeypatch.setattr(models, "check_shared_prompt", refuse)
    with pytest.raises(InputError, match="--no-share-prompt"):
        referenced(make_pairs(2), "tiny", tmp_path)
    assert not (tmp_path / "reference.json").exists()


def test_the_reference_is_gone_before_training(tmp_path, monkeypatch):
    alive, load = [], pool.load
    monkeypatch.setattr(pool, "load", lambda *args: alive.append(weakref.ref(m := load(*args))) or m)
    gc.disable()
    try:
        referenced(make_pairs(2), "tiny", tmp_path)
        assert len(alive) == 1 and alive[0]() is None
    finally:
        gc.enable()


def test_under_another_reference_all_are_computed_anew_and_this_is_said(tmp_path, loaded, capsys):
    pairs, names = make_pairs(), [save(tmp_path / str(seed), seed) for seed in (0, 1)]
    loaded.clear()
    first = referenced(pairs, names[0], tmp_path)
    other = referenced(pairs[:2], names[1], tmp_path)
    out = capsys.readouterr().out
    assert "is of another reference: its pairs are computed anew" in out and "reference.json" in out
    torch.testing.assert_close(other, plain_references(pairs[:2], seed=1), rtol=0, atol=1e-4)
    assert (other - first[:2]).abs().min() > 1e-3
    assert loaded == names
    referenced(pairs, names[1], tmp_path)  # of which three are not known yet
    assert capsys.readouterr().out == "" and loaded == [*names, names[1]]


def test_other_weights_under_the_same_name_are_another_reference(tmp_path, capsys):
    pairs = make_pairs(2)
    referenced(pairs, save(tmp_path / "model", 0), tmp_path)
    got = referenced(pairs, save(tmp_path / "model", 1), tmp_path)
    torch.testing.assert_close(got, plain_references(pairs, seed=1), rtol=0, atol=1e-4)
    assert "another reference" in capsys.readouterr().out


def test_that_the_newest_policy_is_the_reference_needs_no_saying(tmp_path, capsys):
    pairs, names = make_pairs(2), [save(tmp_path / str(seed), seed) for seed in (0, 1)]
    for seed, name in enumerate(names):
        got = referenced(pairs, name, tmp_path, reference="last")
        torch.testing.assert_close(got, plain_references(pairs, seed), rtol=0, atol=1e-4)
    assert capsys.readouterr().out == ""


def test_tiny_with_another_seed_is_another_reference(tmp_path):
    pairs = make_pairs(2)
    referenced(pairs, "tiny", tmp_path, seed=0)
    got = referenced(pairs, "tiny", tmp_path, seed=1)
    torch.testing.assert_close(got, plain_references(pairs, seed=1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-3],
        lambda whole: b"\xff\xfe",
        lambda whole: b"rubbish",
        lambda whole: b"{}",
        lambda whole: b'{"model": 3}',
        lambda whole: b"[1]",
        lambda whole: b"null",
    ],
    ids=["empty", "half", "cut", "bytes", "words", "object", "number", "list", "null"],
)
def test_a_damaged_file_of_references_is_made_again(damage, tmp_path, loaded):
    pairs, path = make_pairs(2), tmp_path / "reference.json"
    first = referenced(pairs, "tiny", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert torch.equal(referenced(pairs, "tiny", tmp_path), first) and loaded == ["tiny"] * 2
    assert path.read_bytes() == whole


# -- update ------------------------------------------------------------------------------
def updated(pairs, lr=0.0, model=None, **options):
    """(figures, gradients, weights) of one step of the tiny policy."""
    args = make_args(**options)
    model = model or pool.load("tiny", TOKENIZER, args, CPU)
    figures = dpo.update(model, torch.optim.SGD(model.parameters(), lr=lr), pairs, PAD, args, CPU)
    return figures, [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def assert_close_gradients(found, expected, tolerance=1e-5):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=tolerance * max(1.0, b.abs().max().item()))


def of_formula(pairs, beta=0.1, smoothing=0.0):
    """Figures and gradients of the whole batch, worked out pair by pair with a plain forward."""
    model, sums = (
        tiny.model(),
        dict.fromkeys(("loss", "right", "chosen", "rejected", "logp_c", "logp_r"), 0.0),
    )
    for pair in pairs:
        chosen, rejected = plain_logprobs(model, pair)
        rewards = [beta * (x - y) for x, y in zip((chosen, rejected), pair.ref_logprobs)]
        h, label = rewards[0] - rewards[1], 1.0 if pair.preference is None else pair.preference
        p = (1 - smoothing) * label + smoothing * (1 - label)
        loss = -(p * torch.log(torch.sigmoid(h)) + (1 - p) * torch.log(torch.sigmoid(-h))) / len(pairs)
        loss.backward()
        sums["loss"] += loss.item()
        sums["right"] += 0.5 if label == 0.5 else float((h > 0) == (label > 0.5))
        for key, x in zip(("chosen", "rejected", "logp_c", "logp_r"), (*rewards, chosen, rejected)):
            sums[key] += x.item()
    mean = {key: x / len(pairs) for key, x in sums.items() if key != "loss"}
    gradients = [parameter.grad for parameter in model.parameters()]
    figures = {"loss/dpo": sums["loss"], "train/accuracy": mean["right"]}
    figures |= {"reward/chosen": mean["chosen"], "reward/rejected": mean["rejected"]}
    figures |= {"logps/chosen": mean["logp_c"], "logps/rejected": mean["logp_r"]}
    figures["reward/margin"] = mean["chosen"] - mean["rejected"]
    squares = sum(g.double().square().sum().item() for g in gradients)
    return figures | {"optim/grad_norm": math.sqrt(squares)}, gradients


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 64])
def test_figures_and_gradient_of_a_step_are_those_of_the_formula(share_prompt, micro_batch_size, pairs):
    options = {"share_prompt": share_prompt, "micro_batch_size": micro_batch_size, "beta": 0.2}
    figures, gradients, _ = updated(pairs, label_smoothing=0.1, **options)
    wanted, of_all = of_formula(pairs, 0.2, 0.1)
    assert figures == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert_close_gradients(gradients, of_all)
    assert 0 < wanted["train/accuracy"] < 1 and abs(wanted["loss/dpo"] - LOG2) > 0.05
    hard, others = updated([p._replace(preference=None) for p in pairs], label_smoothing=0.1, **options)[:2]
    assert abs(hard["loss/dpo"] - figures["loss/dpo"]) > 0.05  # the soft labels count
    assert max((a - b).abs().max().item() for a, b in zip(others, gradients)) > 1e-3


def test_a_step_without_sharing_prompts_has_the_same_gradient(pairs):
    shared, apart = (updated(pairs, share_prompt=x, micro_batch_size=2) for x in (True, False))
    assert shared[0] == pytest.approx(apart[0], rel=1e-4, abs=1e-5)
    assert_close_gradients(shared[1], apart[1])


@pytest.mark.parametrize("share_prompt", [True, False])
def test_the_first_loss_is_log_2_where_the_policy_is_the_reference(share_prompt, tmp_path):
    options = {"share_prompt": share_prompt, "micro_batch_size": 2}
    args = make_args(output_dir=str(tmp_path), **options)
    known = dpo.with_reference(make_pairs(), "tiny", TOKENIZER, args, CPU)
    figures, gradients, _ = updated(known, **options)
    assert figures["loss/dpo"] == pytest.approx(LOG2, abs=1e-6)
    for key in ("reward/chosen", "reward/rejected", "reward/margin"):
        assert figures[key] == pytest.approx(0, abs=1e-5)
    assert figures["optim/grad_norm"] > 0.01 and any(g.any() for g in gradients)


def test_steps_raise_the_margin_and_keep_to_the_gradients_direction(pairs):
    """Plain gradient descent with a small rate lowers the loss by rate x norm^2."""
    args = make_args()
    model, rate = pool.load("tiny", TOKENIZER, args, CPU), 1e-3
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    first, second = (dpo.update(model, optimizer, pairs[:2], PAD, args, CPU) for _ in range(2))
    fall = first["loss/dpo"] - second["loss/dpo"]
    assert fall == pytest.approx(rate * first["optim/grad_norm"] ** 2, rel=0.2)
    assert second["reward/margin"] > first["reward/margin"]


def test_gradients_are_scaled_down_to_the_largest_norm_and_the_norm_before_is_told(pairs):
    start, free = tiny.model().parameters(), updated(pairs)[0]
    figures, _, weights = updated(pairs, lr=1.0, max_grad_norm=0.01)
    moved = math.sqrt(sum((a - b).double().square().sum().item() for a, b in zip(weights, start)))
    assert figures["optim/grad_norm"] == pytest.approx(free["optim/grad_norm"], rel=1e-5)
    assert free["optim/grad_norm"] > 0.02 and moved == pytest.approx(0.01, rel=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_loss_that_is_not_finite_changes_no_weight(value, max_grad_norm, pairs):
    broken = [*pairs[:2], pairs[2]._replace(ref_logprobs=torch.tensor([value, -1.0]))]
    args = make_args(max_grad_norm=max_grad_norm)
    model = pool.load("tiny", TOKENIZER, args, CPU)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    figures = dpo.update(model, optimizer, broken, PAD, args, CPU)
    assert not math.isfinite(figures["loss/dpo"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before)) and not optimizer.state
    figures = dpo.update(model, optimizer, pairs, PAD, args, CPU)  # and the next step is a step
    assert math.isfinite(figures["loss/dpo"]) and math.isfinite(figures["optim/grad_norm"])
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before))


def test_a_gradient_that_is_not_finite_changes_no_weight(pairs, monkeypatch):
    plain = dist.clip_grad_norm
    monkeypatch.setattr(dist, "clip_grad_norm", lambda *given: plain(*given) * math.inf)
    figures, _, weights = updated(pairs, lr=0.1)
    assert math.isfinite(figures["loss/dpo"]) and figures["optim/grad_norm"] == math.inf
    assert all(torch.equal(a, b) for a, b in zip(weights, tiny.model().parameters()))


def test_two_ranks_sum_to_the_figures_and_gradient_of_one(pairs, monkeypatch):
    """One after the other; FSDP would average their gradients. One has 3 pairs, the other 2 and, with one
    pair a forward, an empty batch."""
    wanted, of_all = of_formula(pairs)
    sent, models, forwards = [], [pool.load("tiny", TOKENIZER, make_args(), CPU) for _ in range(2)], [0, 0]
    monkeypatch.setattr(dist, "world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_sum", lambda *values: sent.append(values) or list(values))
    gradients = []
    for rank, model in enumerate(models):
        monkeypatch.setattr(dist, "rank", lambda rank=rank: rank)
        model.model.register_forward_pre_hook(
            lambda *_, rank=rank: forwards.__setitem__(rank, forwards[rank] + 1)
        )
        gradients.append(updated(pairs, model=model, micro_batch_size=1)[1])
    assert forwards == [3, 3]
    names = "loss/dpo train/accuracy reward/chosen reward/rejected logps/chosen logps/rejected".split()
    totals = [sum(float(x) for x in both) / len(pairs) for both in zip(*sent)]
    assert totals == pytest.approx([wanted[name] for name in names], rel=1e-4, abs=1e-5)
    assert_close_gradients([(a + b) / 2 for a, b in zip(*gradients)], of_all)


# -- write_pairs -------------------------------------------------------------------------
def test_pairs_that_were_written_are_read_again(tmp_path):
    args = make_args(output_dir=str(tmp_path))
    tagged = prompt("rest dog eel")._replace(row=Row("prompts:3", {"category": "rest"}))
    rows = [row(A, "ant", 2.0), row(A, "cat", 0.5), row(tagged, "eel", 1.0), row(tagged, "dog eel", 0.0)]
    made, _ = dpo.best_against_worst(rows, [A, tagged], 1, args)
    talk = [*A.turns, {"role": "assistant", "content": "ant"}, {"role": "user", "content": "again"}]
    soft = {"prompt": talk, "chosen": "ant", "rejected": "owl", "preference": 0.25}
    given = [*made, *comparisons_of(tmp_path, [soft])]
    dpo.write_pairs(given, 1, args)
    read = comparisons.load(str(tmp_path / "pairs.jsonl"), "train", TOKENIZER, args.max_length)
    assert len(read) == len(given) == 3
    for got, want in zip(read, given):
        assert (got.prompt, got.texts, got.grades, got.category) == (
            want.prompt,
            want.texts,
            want.grades,
            want.category,
        )
        assert got.preference == want.preference and dpo.pair_key(got) == dpo.pair_key(want)
    assert [pair.grades for pair in read] == [[2.0, 0.5], [1.0, 0.0], None]
    written = read_jsonl(tmp_path / "pairs.jsonl")
    assert [(r["iteration"], r["source"]) for r in written] == [(1, "iteration 1")] * 2 + [(1, "rows.jsonl")]


def test_pairs_of_iterations_before_stay_and_others_are_replaced(tmp_path):
    args = make_args(output_dir=str(tmp_path))

    def write(iteration, *words):
        rows = [row(A, word, k, iteration) for k, word in enumerate(words)]
        made, _ = dpo.best_against_worst(rows, [A], iteration, args)
        dpo.write_pairs(made, iteration, args)
        return [(r["iteration"], r["chosen"], r["rejected"]) for r in read_jsonl(tmp_path / "pairs.jsonl")]

    first, second = (1, "cat", "ant"), (2, "eel", "dog")
    assert write(1, "ant", "cat") == [first]
    assert write(2, "dog", "eel") == [first, second]
    assert write(2, "dog", "eel") == [first, second]  # done again after a crash
    assert write(2, "owl", "pig") == [first, (2, "pig", "owl")]
    assert write(1, "ant", "cat") == [first]


@pytest.mark.parametrize(
    "rows, options",
    [
        ([row(A, "ant", 1.0), row(A, LONG, 1.3)], {"length_penalty": 0.05}),
        ([row(A, "ant", 1.0), row(A, "cat", 0.0, finished=False)], {}),
    ],
    ids=["chosen for its length", "rejected one cut"],
)
def test_whatever_is_trained_on_can_be_read_again(rows, options, tmp_path):
    args = make_args(output_dir=str(tmp_path), **options)
    usual = [row(B, "bear", 1.0), row(B, "cat", 0.0)]
    made, _ = dpo.best_against_worst([*rows, *usual], [A, B], 1, args)
    assert len(made) == 2
    dpo.write_pairs(made, 1, args)
    assert len(comparisons.load(str(tmp_path / "pairs.jsonl"), "train", TOKENIZER, args.max_length)) == 2


# -- figures -----------------------------------------------------------------------------
def sample(score, gold=None, tokens=4, finished=True, kl=0.0):
    known = {} if gold is None else {"gold": gold, "perfect": 2.0}
    return {"score": score, **known, "tokens": tokens, "finished": finished, "kl": kl, "category": None}


STUDIES = {
    0: {
        "scorer": "a@1",
        "pairs": {"pairs/loss": 0.7},
        "samples": [sample(x, 1.0) for x in (0.0, 1.0, 2.0, 3.0)],
    },
    1: {
        "pairs": {"pairs/loss": 0.5, "pairs/accuracy": 0.75},
        "scorer": "a@1",
        "samples": [
            sample(1.0, 2.0, 3, kl=1.0),  # wins by 1
            sample(1.05, 1.0, 5, kl=2.0),  # ties
            sample(2.0, 1.0, 6, False, kl=3.0),  # ties
            sample(2.5, 0.0, 10, kl=6.0),  # loses by 0.5
        ],
    },
    2: {"scorer": "a@1", "pairs": {}, "samples": [sample(2.0, 2.0) for _ in range(4)]},
}


def test_figures_of_the_first_version_are_means_without_a_comparison():
    figures = dpo.figures(STUDIES, 0, make_args())
    wanted = {"pairs/loss": 0.7, "eval/score": 1.5, "gold/score": 1.0, "gold/perfect": 2.0, "eval/kl": 0.0}
    assert figures == wanted | {"sample/length": 4.0, "sample/finished": 1.0}


def test_figures_of_a_version_are_means_and_what_it_wins_against_the_first_one():
    figures = dpo.figures(STUDIES, 1, make_args(tie_margin=0.1))
    wanted = {"pairs/loss": 0.5, "pairs/accuracy": 0.75, "eval/score": 6.55 / 4, "gold/score": 1.0}
    wanted |= {"gold/perfect": 2.0, "eval/kl": 3.0, "sample/length": 6.0, "sample/finished": 0.75}
    wanted |= {
        "sft/score_win": 0.25,
        "sft/score_lose": 0.25,
        "sft/score_tie": 0.5,
        "sft/score_gain": 0.55 / 4,
    }
    wanted |= {"sft/gold_win": 0.25, "sft/gold_lose": 0.25, "sft/gold_tie": 0.5, "sft/gold_gain": 0.0}
    wanted |= {f"sft/{name}_tie_margin": 0.1 for name in ("score", "gold")}
    wanted |= {f"sft/{name}_gain_n": 4 for name in ("score", "gold")}  # too few for an interval
    assert figures == pytest.approx(wanted)
    assert dpo.figures(STUDIES, 1, make_args(tie_margin=0.01))["sft/score_tie"] == 0.25


def test_figures_from_the_second_version_on_tell_the_gain_over_the_one_before_too():
    figures = dpo.figures(STUDIES, 2, make_args())
    assert figures["eval/score_over_before"] == pytest.approx(2.0 - 6.55 / 4)
    assert figures["gold/score_over_before"] == pytest.approx(1.0)
    assert figures["sft/score_gain"] == pytest.approx(0.5) and figures["sft/gold_gain"] == pytest.approx(1.0)
    assert "eval/score_over_before" not in dpo.figures(STUDIES, 1, make_args())


def test_figures_compare_no_scores_of_different_oracles():
    """A run that is gone on with under another --scorer."""
    studies = {**STUDIES, 0: {**STUDIES[0], "scorer": "b@1"}}
    keys = set(dpo.figures(studies, 2, make_args()))
    assert "eval/score_over_before" in keys and not any(key.startswith("sft/") for key in keys)
    keys = set(dpo.figures({**STUDIES, 1: {**STUDIES[1], "scorer": "b@1"}}, 2, make_args()))
    assert "sft/score_gain" in keys and "eval/score_over_before" not in keys


def test_figures_without_samples_are_those_of_the_held_out_pairs_alone():
    studies = {v: {"scorer": None, "pairs": {"pairs/loss": 0.5}, "samples": []} for v in range(3)}
    assert [dpo.figures(studies, v, make_args()) for v in range(3)] == [{"pairs/loss": 0.5}] * 3


def test_figures_without_a_true_reward_have_none():
    studies = {v: {"scorer": "a@1", "pairs": {}, "samples": [sample(v), sample(v + 1)]} for v in range(3)}
    figures = dpo.figures(studies, 2, make_args())
    assert not any("gold" in key for key in figures) and figures["eval/score_over_before"] == 1


def test_figures_of_the_pool_by_hand():
    """A: 2, 1, 0; B: -1, -3. Of iteration 2 alone; a pair's lengths are in tokens, its end token included."""
    rows = [row(A, "ant cat", 2.0, 2), row(A, "cat", 1.0, 2), row(A, "dog eel owl", 0.0, 2, finished=False)]
    rows += [row(B, "bear", -1.0, 2), row(B, "", -3.0, 2), row(A, "fox", 100.0, 1), row(C, "pig", -100.0, 3)]
    args = make_args()
    made, dropped = dpo.best_against_worst(rows, [A, B], 2, args)
    got = dpo.pool_figures(rows, made, {**dropped, "same": 4}, 2)
    wanted = {"pool/responses": 5, "pool/score": -0.2, "pool/best": 0.5, "pool/worst": -1.5}
    wanted |= {"pool/finished": 0.8, "pool/length": (3 + 2 + 3 + 2 + 1) / 5}
    wanted |= {"pool/characters": (7 + 3 + 11 + 4 + 0) / 5}
    wanted |= {"pairs/kept": 2, "pairs/same": 4, "pairs/tied": 0, "pairs/unfinished": 0}
    wanted |= {"pairs/chosen_score": 0.5, "pairs/rejected_score": -1.5}
    wanted |= {"pairs/chosen_length": 2.5, "pairs/rejected_length": 2.0}
    assert got == pytest.approx(wanted)
