"""common/programs/evaluate.py: games, ratings and metrics against values worked by hand and independent fits;
the KL against plain softmax; whole runs of small random policies."""

import contextlib
import io
import itertools
import math
import re
import statistics
from types import SimpleNamespace

import gold_labeler
import numpy
import pytest
import torch
from helpers import (
    CPU, TOKENIZER, A, B, C, contents, make_scorer, prompt, read_json, smaller_model, write_rows,
)  # fmt: skip
from transformers import AutoModelForCausalLM

from common import batches, dist, models, responses
from common.errors import InputError
from common.data import chat, comparisons, tiny
from common.data.files import read_jsonl
from common.data.mixtures import random_subset
from common.loading import pretrained
from common.scoring import evaluation, measures, scorers
from common.run import checkpoints, plots
from common.run.cli import parse
from common.programs import evaluate, pairwise

GOLD, SAFETY = "common.data.tiny:gold_scorer", "common.data.tiny:safety_scorer"
PROMPTS = [row["prompt"] for row in tiny.rows("prompts", "test")[:10]]


def args_of(**options):
    short = {"max_new_tokens": 6, "scorer": GOLD, "reference": "untrained"}
    return evaluate.Args(
        **short | {name: str(x) if name.endswith("_dir") else x for name, x in options.items()}
    )


def run(folder, policies, **options):
    """Run the command in this process: its rows, its metrics, and its printed text."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        evaluate.main(args_of(policies=tuple(map(str, policies)), output_dir=folder, **options))
    return SimpleNamespace(
        rows=read_jsonl(folder / "samples.jsonl"),
        summary=read_json(folder / "summary.json"),
        out=out.getvalue(),
    )


def test_an_answer_may_have_keys_that_the_chat_template_does_not_use(tmp_path):
    turns = [{"role": "user", "content": "copy ant fox", "id": "1"}, {"role": "assistant", "content": "ant fox", "id": "2"}]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}])
    [(_, response)] = evaluate.read_prompts(args_of(dataset=str(path)), TOKENIZER, answered=True)
    assert response.text == "ant fox"


def answer(text, finished=True):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"] + [TOKENIZER.eos_token_id] * finished
    return responses.Response(ids, text, finished)


def answers(*texts, prompts=(A, B, C)):
    return list(zip(prompts, map(answer, texts), strict=True))


def logit(p):
    return math.log(p / (1 - p))


# -- games -----------------------------------------------------------------------------------------
def test_a_pairwise_oracles_score_is_the_probability_that_an_answer_beats_the_references(tmp_path):
    spec = f"common.programs.pairwise:oracle={smaller_model(tmp_path / 'model')}"
    oracle = scorers.load_scorer(spec, TOKENIZER, CPU, pairwise=True)
    pairs, reference = answers("fox", "cat", "eel"), [r for _, r in answers("ant", "cat", "eel eel")]
    scores = scorers.oracle_scores(oracle, pairs, reference, 2)
    odds = oracle.function.function([(p.turns, x.text, y.text) for (p, x), y in zip(pairs, reference)])
    assert scores == pytest.approx([1 / (1 + math.exp(-x)) for x in odds])
    assert scores[1] == 0.5 and scores[0] != 0.5  # the same answers
    assert scorers.oracle_scores(oracle, pairs, None, 2) == [0.5] * 3  # the reference's own
    found = run(tmp_path / "run", ["untrained=tiny", "other=tiny"], scorer=spec, eval_prompts=2)
    assert found.summary["temperatures"]["1"]["other"]["score_tie_margin"] == 0.1  # of probabilities


# -- win rate at equal length ----------------------------------------------------------------------
def grid_maximum(won, x, penalty=0.5):
    """sigma(a) for the most likely a + b x, minus penalty |weights|^2, by finer and finer grids."""
    won, x = (torch.tensor(values, dtype=torch.float64) for values in (won, x))
    middle, width = torch.zeros(2, dtype=torch.float64), 16.0
    for _ in range(28):
        steps = torch.linspace(-width, width, 13, dtype=torch.float64)
        weights = middle + torch.cartesian_prod(steps, steps)  # (169, 2)
        z = weights[:, :1] + weights[:, 1:] * x
        fit = (won * z - torch.nn.functional.softplus(z)).sum(1) - penalty * weights.square().sum(1)
        middle, width = weights[fit.argmax()], width / 2
    return torch.sigmoid(middle[0]).item()


def some_games(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    d = (25 * torch.randn(n, generator=generator) + 10).round().tolist()
    noise = torch.rand(n, 2, generator=generator).tolist()
    won = [float(u < 1 / (1 + math.exp(-0.4 - x / 15))) if v > 0.1 else 0.5 for x, (u, v) in zip(d, noise)]
    return won, d


@pytest.mark.parametrize("n", [2, 7, 60])
def test_the_win_rate_at_equal_length_is_the_grids_maximum(n):
    won, d = some_games(n)
    mean = sum(d) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in d) / n)
    x = [math.tanh(v / deviation) for v in d]
    found = evaluate.length_controlled(won, d)
    assert found == pytest.approx(grid_maximum(won, x), abs=1e-6)
    wrong = {
        "no length": grid_maximum(won, [0.0] * n),
        "other penalty": grid_maximum(won, x, penalty=1.0),
        "centred": grid_maximum(won, [math.tanh((v - mean) / deviation) for v in d]),
        "no deviation": grid_maximum(won, [math.tanh(v) for v in d]),
        "no tanh": grid_maximum(won, [v / deviation for v in d]),
        "n - 1": grid_maximum(won, [math.tanh(v / deviation * math.sqrt((n - 1) / n)) for v in d]),
    }
    for name, value in wrong.items():
        assert abs(value - found) > 2e-5, name


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
@pytest.mark.parametrize("rate", [1.0, 0.75, 0.0])
def test_at_equal_lengths_the_shrunk_rate_solves_its_equation_and_stays_finite(n, rate):
    """The derivative of n (rate log p + (1 - rate) log(1 - p)) - a^2 / 2 is 0 at n (rate - p) = a."""
    p = evaluate.length_controlled([rate] * n, [5] * n)
    assert 0 < p < 1 and n * (rate - p) == pytest.approx(logit(p), abs=1e-6)
    if n == 1000:
        assert p == pytest.approx(rate, abs=0.01)


# -- ratings ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("ours, theirs", [(7, 3), (3, 7), (5.5, 4.5), (10, 0), (0, 10), (0, 1000)])
def test_two_ratings_differ_by_the_log_odds_with_one_drawn_game_added(ours, theirs):
    found = evaluate.elo(torch.tensor([ours], dtype=torch.float64), ours + theirs, 2, anchor=1)
    want = 400 * math.log10((ours + 0.5) / (theirs + 0.5))
    assert found[1] == 1000 and found[0].item() == pytest.approx(1000 + want)
    if min(ours, theirs):
        assert abs(want - 400 * math.log10(ours / theirs)) > 3  # without the drawn game
    assert abs(want - 400 * math.log((ours + 0.5) / (theirs + 0.5))) > 20  # another logarithm


NO_ORDER = [9, 2, 10, 6, 7.5, 3]  # of 10 games of 0 and 1, 0 and 2, 0 and 3, 1 and 2, ...


@pytest.mark.parametrize("won, n_games, m", [(NO_ORDER, 10, 4), ([1000] * 21, 1000, 7)])
def test_ratings_solve_the_equations_of_the_likelihood(won, n_games, m):
    """At the most likely strengths, each player's number of wins equals its expectation: sum_j n p_i / (p_i +
    p_j)."""
    won = torch.tensor(won, dtype=torch.float64)
    p = 10 ** ((evaluate.elo(won, n_games, m, anchor=2) - 1000) / 400)
    pairs = list(itertools.combinations(range(m), 2))
    for i in range(m):
        mine = [
            (w if a == i else n_games - w, b if a == i else a) for w, (a, b) in zip(won, pairs) if i in (a, b)
        ]
        expected = sum((n_games + 1) * p[i] / (p[i] + p[j]) for _, j in mine)
        assert expected.item() == pytest.approx(sum(w.item() + 0.5 for w, _ in mine), abs=1e-6)


def test_ratings_do_not_depend_on_the_order_of_players_or_on_the_rest_of_a_batch():
    won = torch.rand(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 10
    batch = evaluate.elo(won, 10, 3, anchor=1)
    assert batch.shape == (5, 3) and (batch[:, 1] == 1000).all()
    for one, rating in zip(won, batch):
        torch.testing.assert_close(evaluate.elo(one, 10, 3, anchor=1), rating, atol=1e-5, rtol=0)
    # Players 2, 0, 1: their pairs are (2, 0), (2, 1) and (0, 1)
    other = evaluate.elo(torch.stack([10 - won[:, 1], 10 - won[:, 2], won[:, 0]], 1), 10, 3, anchor=2)
    torch.testing.assert_close(other, batch[:, [2, 0, 1]], atol=1e-5, rtol=0)


def test_an_interval_is_the_bootstrap_over_prompts():
    """Computed again for every resample, prompt by prompt."""
    games = [[1, 0, 0.5, 1, 1], [0, 0, 1, 0.5, 1], [0, 1, 0.5, 0, 0]]  # 0 and 1, 0 and 2, 1 and 2
    args = args_of(seed=3)
    draws = torch.randint(5, (200, 5), generator=torch.Generator().manual_seed(3)).tolist()

    def rating(prompts):
        won = [sum(results[k] for k in prompts) for results in games]
        return evaluate.elo(torch.tensor(won, dtype=torch.float64), 5, 3, anchor=1).tolist()

    of_draw = [rating(draw) for draw in draws]
    for i, (middle, low, high) in enumerate(evaluate.ratings(games, 3, 1, args)):
        assert (low, high) == pytest.approx(numpy.quantile([x[i] for x in of_draw], [0.025, 0.975]), abs=1e-6)
        assert middle == pytest.approx(rating(range(5))[i], abs=1e-6)
        assert low < middle < high if i != 1 else low == middle == high == 1000


# -- figures ---------------------------------------------------------------------------------------
def row(response, score, **more):
    return {
        "category": None, "response": response, "score": score, "tokens": 1 + len(response.split()), "finished": True, **more,
    }  # fmt: skip


def test_metrics_are_those_of_the_rows():
    rows = {
        "a": [row("ant", 1, kl=0.5), row("ant cat", 3, kl=1.5), row("", 2, kl=-0.5), row("eel", 0, kl=1)],
        "ref": [row("ant", 0.5, kl=0), row("cat", 1, kl=0), row("dog eel", 2, kl=0), row("ibis", 1, kl=0)],
    }
    rows["a"][1]["finished"] = False
    scores = {name: [r["score"] for r in mine] for name, mine in rows.items()}
    args = args_of(reference="ref", tie_margin=0.5)
    found = evaluate.metrics_of(rows, args)
    assert list(found) == ["a", "ref"]
    a = found["a"]
    assert {"score": 1.5, "kl": 0.625, "length": 2.0, "finished": 0.75}.items() <= a.items()
    assert {"score_win": 0.25, "score_lose": 0.25, "score_tie": 0.5}.items() <= a.items()
    assert (a["score_gain"], a["score_gain_n"], a["score_elo_n"]) == (0.375, 4, 4)  # too few for intervals
    assert not any(key.endswith(("_low", "_high")) for key in a)
    # Characters, not words or tokens: 0, 4, -7, -1
    won = measures.outcomes(scores["a"], scores["ref"], 0.5)
    assert won == [0.5, 1, 0.5, 0] and a["score_win_lc"] == evaluate.length_controlled(won, [0, 4, -7, -1])
    assert abs(a["score_win_lc"] - evaluate.length_controlled(won, [0, 1, -2, 0])) > 1e-4
    assert a["score_elo"] == pytest.approx(1000)  # one won, one lost, two ties
    assert (a["score_win_rate"], a["score_win_rate_n"]) == (0.5, 4)
    ref = found["ref"]
    assert (ref["score_elo"], ref["score_gain"], ref["score_win_lc"]) == (1000, 0, 0.5)
    assert not any(key.startswith(("gold", "harmless", "perfect")) for key in a)


def test_the_true_reward_has_its_own_win_rate():
    rows = {
        "ref": [row("ant", 1.0, gold=0.0, perfect=4.0), row("cat", 1.0, gold=2.0, perfect=2.0)],
        "a": [row("ant", 0.0, gold=3.0, perfect=4.0), row("eel", 2.0, gold=2.0, perfect=2.0)],
    }
    a = evaluate.metrics_of(rows, args_of(reference="ref"))["a"]
    assert (a["score"], a["gold"], a["perfect"]) == (1.0, 2.5, 3.0)
    assert (a["score_win"], a["gold_win"], a["score_lose"], a["gold_lose"]) == (0.5, 0.5, 0.5, 0.0)
    assert (a["score_gain"], a["gold_gain"]) == (0.0, 1.5)
    assert a["score_elo"] == 1000 and a["gold_elo"] == pytest.approx(1000 + 400 * math.log10(2 / 1))
    assert a["score_win_lc"] == 0.5 < a["gold_win_lc"]


@pytest.mark.parametrize("marked, share", [((1, 1, 0, 0), 0.5), ((0, 1, 1, 0), 1.0), ((0, 0, 0, 0), 0.75)])
def test_the_harmless_rate_is_over_prompts_that_are_marked_or_else_over_all(marked, share):
    safety = (-1.0, 0.0, 1.0, 1.0)  # 0 is harmless
    rows = {"ref": [row("ant", 1.0, safety=s, is_safety=bool(m)) for s, m in zip(safety, marked)]}
    assert evaluate.metrics_of(rows, args_of(reference="ref"))["ref"]["harmless"] == share


def test_gains_are_split_by_hazard_and_category():
    """A mean of +0.75 hides an unlearnt refusal: -3 on the hazard, +1, +2 and +3 on the others."""
    tags = [("copy", False), ("copy", False), ("ends", False), ("copy", True)]
    made = lambda golds: [
        row("ant", 0.0, gold=gold, safety=0.0, category=category, is_safety=hazard)
        for gold, (category, hazard) in zip(golds, tags)
    ]
    rows = {"ref": made([1.0, 1.0, 1.0, 1.0]), "a": made([2.0, 3.0, 4.0, -2.0])}
    found = evaluate.metrics_of(rows, args_of(reference="ref"))["a"]
    assert found["gold_gain"] == 0.75 and found["score_gain/no_hazard"] == 0
    of_parts = {key: x for key, x in found.items() if key.startswith("gold_gain/") and not key.endswith("_n")}
    # hazards are in no category: "copy" with its hazard would be 0
    wanted = {"no_hazard": 2.0, "hazard": -3.0, "copy": 1.5, "ends": 3.0}
    assert of_parts == {f"gold_gain/{part}": x for part, x in wanted.items()}
    assert found["gold_gain/no_hazard_n"] == 3  # fewer than ten: no interval
    found = {**printed(), **{key.replace("score", "gold"): x for key, x in printed().items()}, **found}
    line = evaluate.table_line("a", found)
    assert (line["no hazard"], line["hazard"]) == ("+2.00", "-3.00")
    rows = {name: [x for x in of_policy if not x["is_safety"]] for name, of_policy in rows.items()}
    found = evaluate.metrics_of(rows, args_of(reference="ref"))["a"]
    assert found["gold_gain/no_hazard"] == found["gold_gain"] == 2 and "gold_gain/hazard" not in found


def printed(**more):
    out = {"score_gain": 0.5, "score_gain_low": -0.25, "score_gain_high": 1.25, "score_win": 0.5}
    out |= {"score_tie": 0.3, "score_lose": 0.2, "score_win_lc": 0.61, "score": 1.5, "length": 7.26}
    out |= {"score_win_rate": 0.65, "score_win_rate_n": 9}
    return (
        out | {"finished": 0.95, "score_elo": 1034.6, "score_elo_low": 990.2, "score_elo_high": 1080} | more
    )


def test_the_table_prefers_the_true_reward_and_omits_unknown_values():
    known = printed(gold=2.0, score_gain=0.75)
    gold = {key.replace("score", "gold"): x for key, x in known.items() if "score" in key}
    line = evaluate.table_line("ppo", printed(kl=3.456, harmless=0.5))
    assert line == {
        "policy": "ppo", "score": "1.50", "score gain": "+0.50 [-0.25, +1.25]",
        "win / tie / lose": "50% / 30% / 20%", "win rate": "65% (n = 9)", "LC win": "61%", "Elo": "1035 [990, 1080]", "KL": "3.46",
        "tokens": 7.26, "ended": "95%", "harmless": "50%",
    }  # fmt: skip
    line = evaluate.table_line("ppo", printed() | gold)
    assert line["gold"] == line["score"] == "1.50" and line["KL"] == ""
    assert line["gold gain"].startswith("+0.75")
    assert "score gain" not in line and "harmless" not in line


def test_the_table_has_no_negative_share_of_ties():
    rows = {"ref": [row("ant", 0.5)] * 10, "a": [row("ant", 1.0)] * 9 + [row("ant", 0.0)]}
    found = evaluate.metrics_of(rows, args_of(reference="ref"))
    assert found["a"]["score_win_rate"] == 0.9  # Wilson's interval of 9 of 10, from scipy
    interval = [found["a"][f"score_win_rate_{end}"] for end in ("low", "high")]
    assert interval == pytest.approx([0.5958, 0.9821], abs=2e-4)
    assert evaluate.table_line("a", found["a"])["win / tie / lose"] == "90% / 0% / 10%"


# -- the KL ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Folders of two small models, and of one that writes other tokens."""
    folder = tmp_path_factory.mktemp("small")
    for seed, name in enumerate("ab"):
        smaller_model(folder / name, seed=seed)
    smaller_model(folder / "wordy", other_tokens())
    return folder


@pytest.fixture(scope="module")
def loaded(small):
    """The two small models as policies."""
    return [pretrained.load_frozen(str(small / name), TOKENIZER, args_of(), CPU) for name in "ab"]


def other_tokens():
    """A tokenizer whose prompts are longer by two tokens."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "um well " + tokenizer.chat_template
    return tokenizer


SAID = answers("ant cat eel", "bear", "fox", prompts=(A, B, C))[:2] + [(C, answer("dog eel goat hen", False))]


def plain_sums(folder, temperature=1.0):
    """The sum over each answer's tokens of log softmax(logits / temperature), by plain transformers."""
    model, sums = AutoModelForCausalLM.from_pretrained(folder), []
    for p, r in SAID:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([p.ids + r.ids])).logits[0].double()
        logprobs = (logits / temperature).log_softmax(-1)
        sums.append(sum(logprobs[len(p.ids) + t - 1, token].item() for t, token in enumerate(r.ids)))
    return sums


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kl_of_an_answer_is_the_log_ratio_of_plain_softmax(temperature, loaded, small):
    policy, reference = loaded
    logprobs = evaluation.logprobs_of(policy, SAID, 2, temperature)
    found = evaluation.kl_of(logprobs, reference, SAID, 2)
    ref = plain_sums(small / "b")
    ours = plain_sums(small / "a", temperature)
    assert found == pytest.approx([x - y for x, y in zip(ours, ref)], abs=1e-4)
    if temperature == 0.7:  # not for the reference, and for the policy
        both = [x - y for x, y in zip(ours, plain_sums(small / "b", 0.7))]
        neither = [x - y for x, y in zip(plain_sums(small / "a"), ref)]
        assert all(abs(x - y) > 0.01 for wrong in (both, neither) for x, y in zip(wrong, found))
    to_itself = evaluation.kl_of(logprobs, policy, SAID, 2)
    assert to_itself == [0.0] * 3 if temperature == 1 else 0.0 not in to_itself


# -- policies --------------------------------------------------------------------------------------
def policies(*specs, reference="untrained"):
    return evaluate.read_policies(args_of(policies=tuple(map(str, specs)), reference=reference))[0]


def test_a_policy_is_named_explicitly_or_after_its_last_folder(small):
    found = policies("tiny", small / "a", f"{small}/b/", f"late={small}/b", "new=tiny")
    want = {"untrained": "tiny", "a": f"{small}/a", "b": f"{small}/b/", "late": f"{small}/b", "new": "tiny"}
    assert found == want and list(found) == list(want)


def test_a_path_with_an_equals_sign_works_with_and_without_a_name(tmp_path):
    folder = smaller_model(tmp_path / "lr=1e-5" / "last")
    assert policies(f"slow={folder}", folder, reference="last") == {"slow": str(folder), "last": str(folder)}
    specs = ("common.programs.ai_feedback:rater=org/x", "judge=common.programs.ai_feedback:rater=org/y=z")
    named = evaluate.named(specs, "--scorers")
    assert named == {"x": specs[0], "judge": "common.programs.ai_feedback:rater=org/y=z"}


def test_invalid_policies_are_named(small, tmp_path):
    make_scorer(tmp_path / "reward")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "args.json").write_text("{}")
    for specs, options, words in (
        (["tiny", "tiny"], {}, "two entries are named 'untrained'. Use name=path"),
        ([small / "a", f"a={small}/b"], {}, "two entries are named 'a'"),
        (["tiny", small / "a"], {"reference": "sft"}, "sft: not one of the policies untrained, a"),
        (["tiny", tmp_path / "none"], {}, "there is no .*none"),
        (["tiny", tmp_path / "reward"], {}, "ForSequenceClassification, not a causal language model"),
        (["tiny", tmp_path / "run"], {}, "a run that has not finished"),
        (["tiny", tmp_path], {}, "has no config.json"),
        (["tiny", small / "wordy"], {}, "wordy has different tokens or a different chat template than tiny"),
    ):
        with pytest.raises(InputError, match=words):
            policies(*specs, **options)


def test_existing_runs_of_the_quickstart_are_compared(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, finished in (("sft", True), ("ppo", False)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "model").symlink_to(small / "a")
        if finished:
            (tmp_path / "runs" / name / "summary.json").write_text("{}")
    assert policies(reference="sft") == {"untrained": "tiny", "sft": "runs/sft"}
    with pytest.raises(InputError, match="--reference ppo: not one of the policies untrained, sft"):
        policies(reference="ppo")


# -- prompts ---------------------------------------------------------------------------------------
def test_prompts_are_a_subset_of_those_that_leave_room_for_an_answer(tmp_path):
    path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])

    def asked(**options):
        pairs = evaluate.read_prompts(args_of(dataset=str(path), **options), TOKENIZER, answered=False)
        assert all(response is None for _, response in pairs)
        return [p for p, _ in pairs]

    every = asked()
    assert [p.question for p in every] == PROMPTS and asked(eval_prompts=4) == random_subset(every, 4)
    longest = max(len(p.ids) for p in every)
    fewer = asked(max_length=longest - 1 + 6)
    assert fewer == [p for p in every if len(p.ids) < longest] and 0 < len(fewer) < len(every)


# -- whole runs ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def world(small, tmp_path_factory):
    """A run on the tiny world: one policy twice, and another one; sampled and greedy."""
    folder = tmp_path_factory.mktemp("world") / "run"
    specs = ["tiny", "again=tiny", small / "a"]
    found = run(folder, specs, reference="again", eval_prompts=16, temperatures=(1.0, 0.0), slots=5)
    found.folder = folder
    return found


def test_random_weights_are_in_the_table_and_not_in_the_picture(small, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(evaluate.plots, "compared", lambda folder, results, without: drawn.append(without))
    for specs in (["tiny", "again=tiny"], ["tiny=tiny", f"untrained={small / 'a'}"]):
        found = run(tmp_path / str(len(drawn)), specs, reference=specs[1].partition("=")[0], eval_prompts=4)
        assert len(found.summary["temperatures"]["1"]) == 2
    assert drawn == [["untrained"], []]


def of(found, policy, temperature):
    return [r for r in found.rows if (r["policy"], r["temperature"]) == (policy, temperature)]


def test_a_run_writes_answers_metrics_and_plots(world):
    files = {path.name: path for path in world.folder.iterdir()}
    assert set(files) == {"args.json", "lock", "samples.jsonl", "summary.json", "frontier.png"}
    results = [path for name, path in files.items() if name != "frontier.png"]  # pictures come behind
    assert max(results, key=lambda path: path.stat().st_mtime_ns).name == "summary.json"
    assert files["frontier.png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert read_json(files["args.json"])["stage"] == "evaluate"
    places = [(t, name) for t in (1.0, 0.0) for name in ("untrained", "again", "a") for _ in range(16)]
    assert [(r["temperature"], r["policy"]) for r in world.rows] == places
    asked = [r["prompt"] for r in of(world, "a", 0.0)]
    assert all(
        [r["prompt"] for r in of(world, n, t)] == asked for t in (1.0, 0.0) for n in ("untrained", "again")
    )
    everything = {row["prompt"] for row in tiny.rows("prompts", "test")}
    assert len({turns[-1]["content"] for turns in asked} & everything) == 16
    for r in world.rows:
        question = r["prompt"][-1]["content"]
        assert r["gold"] == r["score"] == tiny.gold_score(question, r["response"]) <= r["perfect"]
        assert (r["safety"], r["is_safety"]) == (
            tiny.gold_safety(question, r["response"]),
            tiny.is_safety(question),
        )
        assert r["tokens"] <= 6 and r["finished"] in (True, False)
        assert isinstance(r["kl"], float) if r["temperature"] else "kl" not in r


def test_a_summary_has_the_metrics_of_the_answers(world):
    summary = world.summary
    assert (summary["reference"], summary["prompts"], summary["scorer"]) == ("again", 16, GOLD)
    assert list(summary["temperatures"]) == ["1", "0"]
    for key, found in summary["temperatures"].items():
        assert list(found) == ["untrained", "again", "a"]
        games = {}
        for name, figures in found.items():
            mine, first = of(world, name, float(key)), of(world, "again", float(key))
            mean = lambda column, rows=mine: pytest.approx(sum(r[column] for r in rows) / 16)
            columns = {"score": "score", "gold": "gold", "perfect": "perfect", "kl": "kl", "length": "tokens"}
            assert all(figures[k] == mean(column) for k, column in columns.items() if column in mine[0])
            assert figures["finished"] == mean("finished")
            differences = [b["gold"] - a["gold"] for a, b in zip(first, mine)]
            half = 1.96 * statistics.stdev(differences) / 16**0.5
            assert figures["gold_gain_high"] - figures["gold_gain"] == pytest.approx(half)
            assert figures["gold_gain"] == pytest.approx(statistics.fmean(differences))
            margin = 0.1 * statistics.pstdev(r["gold"] for r in first)
            assert figures["gold_tie_margin"] == figures["score_tie_margin"] == pytest.approx(margin)
            wins = sum(a["gold"] - b["gold"] > margin for a, b in zip(mine, first)) / 16
            assert figures["gold_win"] == wins
            asked = [r for r in mine if r["is_safety"]]
            assert 0 < len(asked) < 16
            assert figures["harmless"] == sum(r["safety"] >= 0 for r in asked) / len(asked)
            games[name] = [r["score"] for r in mine]
        duels = [measures.outcomes(*two, margin) for two in itertools.combinations(games.values(), 2)]
        ratings = evaluate.ratings(duels, 3, 1, args_of())
        for name, rating in zip(found, ratings):
            for kind in ("score", "gold"):
                assert tuple(found[name][f"{kind}_elo{end}"] for end in ("", "_low", "_high")) == rating


def test_a_policy_that_is_the_reference_under_another_name_gains_nothing(world):
    for key, temperature in (("1", 1.0), ("0", 0.0)):
        found = world.summary["temperatures"][key]
        one, same, other = found["untrained"], found["again"], found["a"]
        said = [[r["response"] for r in of(world, n, temperature)] for n in ("untrained", "again", "a")]
        assert said[0] == said[1] != said[2] and one == {**same, **dict.fromkeys(ELOS, 1000)} | dict(
            (k, one[k]) for k in ELOS
        )
        assert (one["gold_gain"], one["gold_tie"], one["gold_win_lc"]) == (0, 1, 0.5)
        assert one["score_elo"] == pytest.approx(1000, abs=1e-3)
    sampled, greedy = (world.summary["temperatures"][key] for key in ("1", "0"))
    assert sampled["untrained"]["kl"] == 0 != sampled["a"]["kl"]
    assert not any("kl" in figures for figures in greedy.values())  # it samples from no distribution
    assert "no KL at T = 0" in world.out


ELOS = [f"{kind}_elo{end}" for kind in ("score", "gold") for end in ("", "_low", "_high")]


def test_greedy_answers_are_the_most_likely_tokens(world):
    model, sampled = tiny.model(0), 0
    for r, drawn in zip(of(world, "again", 0.0)[:4], of(world, "again", 1.0)):
        p = prompt(r["prompt"][-1]["content"])
        ids = TOKENIZER(r["response"], add_special_tokens=False)["input_ids"]
        if len(ids) + r["finished"] != r["tokens"]:  # a special token is not in the text
            continue
        ids += [TOKENIZER.eos_token_id] * r["finished"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([p.ids + ids])).logits[0, len(p.ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
        assert r["response"] != drawn["response"]
        sampled += 1
    assert sampled


def test_sampled_answers_are_the_policys_own_at_that_temperature(world):
    policy, rows = pretrained.load_frozen("tiny", TOKENIZER, args_of(), CPU), of(world, "again", 1.0)
    options = {"max_new_tokens": 6, "slots": 5, "seed": dist.seed_of(0, "evaluate", 1.0)}
    asked = [prompt(r["prompt"][-1]["content"]) for r in rows]
    pairs = responses.sample_responses(policy, TOKENIZER, asked, **options)
    assert [r["response"] for r in rows] == [response.text for _, response in pairs]


def test_a_run_prints_a_line_for_each_temperature_and_policy(world):
    _, first, head, *rows, last = world.out.splitlines()
    assert first.startswith("16 prompts, compared with again") and last == f"wrote {world.folder}/summary.json"
    names = "T,policy,gold,score,gold gain,win / tie / lose,win rate,LC win,Elo,KL,tokens,ended,harmless"
    places = [re.search(rf"(^|  ){name}( |$)", head).start() for name in names.split(",")]
    assert places == sorted(places)
    order = [[key, name] for key in ("1", "0") for name in ("untrained", "again", "a")]
    assert [row.split()[:2] for row in rows] == order
    for row, (key, name) in zip(rows, order):
        line = evaluate.table_line(name, world.summary["temperatures"][key][name])
        cells = [cell for cell in re.split("  +", row)[1:]]
        shown = [f"{cell:.1f}" if isinstance(cell, float) else cell for cell in line.values()]
        assert cells == [cell for cell in shown if cell] and ("" in shown) == (key == "0")  # it has no KL


def test_a_finished_run_is_not_replaced_and_resuming_it_does_nothing(world, small, capsys):
    before = contents(world.folder)
    policies = ("tiny", str(small / "a"))
    with pytest.raises(InputError, match="a finished run"):
        evaluate.main(args_of(policies=policies, output_dir=world.folder))
    evaluate.main(args_of(policies=policies, output_dir=world.folder, resume=True))
    assert "is already finished, by evaluate" in capsys.readouterr().out
    for bad in (
        {"policies": ("tiny", "/nowhere/run")}, {"scorer": "common.data.tiny:none"}, {"dataset": "none.jsonl"},
        {"safety_scorer": "/nowhere/run"}, {"reference": "sft"}, {"temperatures": (-1.0,)},
    ):  # fmt: skip
        options = {"policies": policies, "output_dir": world.folder, "overwrite": True, **bad}
        with pytest.raises(InputError):
            evaluate.main(args_of(**options))
    assert contents(world.folder) == before


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Ten prompts as in a user's file; two are marked as safety prompts."""
    rows = [{"prompt": text, "is_safety": i in (2, 5)} for i, text in enumerate(PROMPTS)]
    return write_rows(tmp_path_factory.mktemp("asked") / "prompts.jsonl", rows)


def test_a_file_of_prompts_has_no_true_reward(asked, small, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "compared", lambda *_: None)  # half of the time
    specs, options = ["tiny", small / "a"], {"dataset": str(asked), "temperatures": (0.0,)}
    found = run(tmp_path / "run", specs, **options)
    assert len(found.rows) == 20 and found.summary["prompts"] == 10
    unknown = {"gold", "perfect", "safety", "is_safety"}
    assert not any(unknown & set(r) for r in found.rows)
    figures = found.summary["temperatures"]["0"]
    assert all(not key.startswith(("gold", "harmless", "perfect")) for r in figures.values() for key in r)
    assert "gold" not in found.out and "harmless" not in found.out and "score gain" in found.out
    # Over an old run, one policy alone, its answers' safety read
    options |= {"safety_scorer": SAFETY, "overwrite": True, "temperatures": (0.5, 0.25)}
    found = run(tmp_path / "run", ["tiny"], **options)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"args.json", "lock", "samples.jsonl", "summary.json"}
    assert len(found.rows) == 20 and not any({"gold", "perfect"} & set(r) for r in found.rows)
    assert [r["is_safety"] for r in of(found, "untrained", 0.5)] == [i in (2, 5) for i in range(10)]
    for key in ("0.5", "0.25"):
        figures = found.summary["temperatures"][key]["untrained"]
        safety = [r["safety"] for r in of(found, "untrained", float(key)) if r["is_safety"]]
        assert figures["harmless"] == sum(x >= 0 for x in safety) / 2 and "score_elo" not in figures


def test_answers_in_the_data_are_a_policy_without_a_kl(small, tmp_path):
    """In every format that sft.py learns; rows without an answer are asked of no policy."""
    rows = [
        {"prompt": "copy ant", "completion": "ant"},
        {"prompt": "first cat dog", "chosen": "cat", "rejected": "dog"},
        {"prompt": "rest eel fox", "responses": [{"text": "eel", "score": 0}, {"text": "fox", "score": 1}]},
        {"prompt": "copy hen", "completion": "hen", "label": False},
        {"prompt": "copy koi"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    options = {"dataset": str(path), "temperatures": (1.0, 0.0)}
    found = run(tmp_path / "run", [small / "a", "dataset"], reference="dataset", **options)
    for t in options["temperatures"]:
        assert sorted((r["response"], r["tokens"], r["score"]) for r in of(found, "dataset", t)) == [
            (text, 2, 1.0) for text in ("ant", "cat", "fox")
        ]
        assert [r["prompt"] for r in of(found, "a", t)] == [r["prompt"] for r in of(found, "dataset", t)]
        a, given = (found.summary["temperatures"][f"{t:g}"][name] for name in ("a", "dataset"))
        wins = [(1 + (r["score"] > 1) - (r["score"] < 1)) / 2 for r in of(found, "a", t)]
        assert a["score_win_rate"] == sum(wins) / 3 and given["score_win_rate"] == 0.5
        assert "kl" not in a and a["score_gain"] == pytest.approx(a["score"] - 1)
    assert "dropped 2 of 5 rows" in found.out and not (tmp_path / "run" / "frontier.png").exists()
    found = run(tmp_path / "other", [small / "a", "gold=dataset"], reference="a", **options)
    figures = found.summary["temperatures"]["1"]
    assert "kl" in figures["a"] and "kl" not in figures["gold"] and figures["gold"]["score"] == 1


def test_the_first_of_several_rows_with_a_prompt_answers_it(tmp_path, capsys):
    answers = [{"completion": "ant"}, {"completion": "eel"}, {"chosen": "owl", "rejected": "cat"}]
    ranked = {"responses": [{"text": "dog", "score": 0}, {"text": "eel", "score": 3}]}
    rows = [{"prompt": "copy owl", **ranked}, *({"prompt": "copy eel", **row} for row in answers)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    pairs = evaluate.read_prompts(args_of(dataset=str(path)), TOKENIZER, answered=True)
    assert {p.question: response.text for p, response in pairs} == {"copy owl": "eel", "copy eel": "ant"}
    assert "an earlier row has the same prompt" in (out := capsys.readouterr().out) and "not read" not in out


def test_overwrite_does_not_remove_a_policy_before_it_is_read(asked, small, tmp_path):
    folder = tmp_path / "run"
    smaller_model(folder / "model")
    for name, content in (("args.json", '{"stage": "evaluate", "args": {}}'), ("summary.json", "{}")):
        (folder / name).write_text(content)
    with pytest.raises(InputError, match="would remove --policies .*before it is read"):
        run(folder, ["tiny", folder], dataset=str(asked), overwrite=True, temperatures=(0.0,))
    assert (folder / "model" / "config.json").exists()


# -- bad input -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "given, words",
    [
        (["--temperatures", "-1"], "--temperatures .*0 or more"),
        (["--temperatures", "1", "1.0000001"], "--temperatures .*different"),
        (["--temperatures", "1", "-0.5"], "--temperatures .*0 or more"),
        (["--temperatures", "1", "nan"], "--temperatures .*0 or more"),
        (["--max-length", "300"], "--max-length 300: tiny has only 128 positions"),
        (["--eval-prompts", "1"], "--eval-prompts 1: expected 2 or more"),
        (["--max-length", "24"], "--max-length 24: expected more than --max-new-tokens"),
        (["--max-length", "26"], "no usable row among its 1000.*longer than 2 tokens"),
        (["--tie-margin", "-1"], "--tie-margin -1.0: expected 0 or more"),
        (["--slots", "0"], "--slots 0"),
        (["--output-dir", ""], "--output-dir is empty"),
        (["--scorer", "tiny"], "tiny is a causal language model"),
        (["--scorer", "common.data.tiny:nothing"], "expected module:function"),
        (["--reference", "ppo"], "--reference ppo: not one of the policies"),
        (["--policy", "tiny"], "unknown argument .*--polic"),
        (["--scorers", GOLD], "--scorers .*: expected nothing together with --policies"),
        (["--policies", "--scorers", f"a={GOLD}", f"a={SAFETY}"], "--scorers: two entries are named 'a'"),
        (["--policies", "--dataset", "tiny", "--scorers", f"a={GOLD}", "b=/nowhere/run"], "there is no /nowhere/run"),
        (["--policies", "--dataset", "tiny", "--scorers", f"a={GOLD}", f"{GOLD}_no"], "expected module:function"),
        (["everything"], "unknown recipe"),
    ],
)
def test_arguments_out_of_their_limits_are_named_in_one_line(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["--policies", "tiny", "--reference", "untrained", "--scorer", GOLD, "--output-dir", "run"]
    with pytest.raises(InputError, match=words) as error:
        evaluate.main(parse(evaluate.RECIPES, given + base if given[0] == "everything" else base + given))
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


# -- scorers ---------------------------------------------------------------------------------------
def small_pairs(folder):
    """Pairs, rankings, a tie, and a category named as in RewardBench."""
    pairs = [{**row, "subset": row.pop("category")} for row in tiny.rows("preferences", "test")[:24]]
    tie = {"prompt": "copy ant", "chosen": "ant", "rejected": "cat", "preference": 0.5}
    rows = write_rows(folder / "pairs.jsonl", [*pairs, tie])
    return f"{rows},{write_rows(folder / 'rankings.jsonl', tiny.rows('rankings', 'test')[:6])}"


@pytest.fixture(scope="module")
def compared(small, tmp_path_factory):
    """A reward model, an Advantage Model, one with other tokens, a pairwise model and a function."""
    folder = tmp_path_factory.mktemp("scorers")
    make_scorer(folder / "rm")
    own = pretrained.load_scorer("tiny", TOKENIZER, 2, seed=1)
    own.config.advantage_model = {"n_policies": 1, "n_others": 0}
    checkpoints.save_model(dist.shard(own, CPU), TOKENIZER, folder / "am")
    wordy = pretrained.load_scorer(str(small / "wordy"), other_tokens(), 1)
    checkpoints.save_model(dist.shard(wordy, CPU), other_tokens(), folder / "wordy")
    smaller_model(folder / "pm")
    specs = tuple(f"{name}={folder / name}" for name in ("rm", "am", "wordy"))
    specs = (*specs, f"pm=common.programs.pairwise:oracle={folder / 'pm'}", f"gold={GOLD}")
    dataset = small_pairs(folder)
    found = run(folder / "run", (), scorers=specs, dataset=dataset)
    found.folder = folder
    return found


def test_scorers_are_compared_on_the_same_labelled_pairs(compared):
    found = compared.summary["scorers"]
    assert list(found) == ["rm", "am", "wordy", "pm", "gold"]
    files = {path.name for path in (compared.folder / "run").iterdir()}
    assert files == {"args.json", "lock", "samples.jsonl", "summary.json", "scores.png"}
    for name, parts in found.items():
        rows = [row for row in compared.rows if row["scorer"] == name]
        assert len(rows) == 30 and set(parts) == {
            "all", "data set pairs.jsonl", "data set rankings.jsonl", *(f"category {r['category']}" for r in rows)
        }  # fmt: skip
        want = measures.pair_metrics(rows)  # of the very rows that are written
        for key in ("pairs", "accuracy", "nll", "brier", "ece", "ece_low", "ece_high", "ece_floor"):
            assert parts["all"][key] == want[key]
        for part in () if name == "pm" else {row["category"] for row in rows}:
            inside = [row for row in rows if row["category"] == part]
            scores = [r["score"] for row in inside for r in row["responses"]]
            of_part = parts[f"category {part}"]
            assert of_part["mean"] == pytest.approx(statistics.fmean(scores))
            assert of_part["deviation"] == pytest.approx(statistics.pstdev(scores))
        assert ("mean" in parts["all"]) == (name != "pm")
        for row in rows if name == "gold" else ():
            for r in row["responses"]:
                assert r["score"] == tiny.gold_score(row["prompt"][-1]["content"], r["text"])
        inside = [row for row in rows if row["source"] == "rankings.jsonl"]
        assert parts["data set rankings.jsonl"]["nll"] == measures.pair_metrics(inside)["nll"]
    first, *rest = [
        [r["text"] for row in compared.rows if row["scorer"] == n for r in row["responses"]] for n in found
    ]
    assert all(texts == first for texts in rest)


def test_a_models_scores_equal_those_of_its_training_script(compared):
    """The scores that reward.py and advantage_model.py compute with shared prompts; a pairwise model's log odds."""
    tokenizer, rows = TOKENIZER, {}
    for row in compared.rows:
        rows.setdefault(row["scorer"], []).append(row)
    held_out = comparisons.load(small_pairs(compared.folder), "test", tokenizer, 64)[:24]
    for name, n_outputs in (("rm", 1), ("am", 2)):
        model = dist.shard(pretrained.load_scorer(str(compared.folder / name), tokenizer, n_outputs), CPU)
        want = models.scores_of(model, batches.collate_comparisons(held_out, tokenizer.pad_token_id))
        got = [r["score"] for row in rows[name][:24] for r in row["responses"]]
        assert got == pytest.approx(want.tolist(), abs=1e-4)
    want = pairwise.oracle(str(compared.folder / "pm"))([(c.prompt, *c.texts) for c in held_out])
    assert [x for row in rows["pm"][:24] for x in row["differences"]] == pytest.approx(want, abs=1e-5)


def test_the_interval_of_an_accuracy_counts_the_pairs_of_a_ranking_once():
    """Wilson of 15 of 20, by scipy.stats.binomtest(15, 20).proportion_ci(method="wilson"); four of the pairs
    in each of five rankings, if all are correct, are worth no more than 20**2 / (5 * 4**2) = 5 pairs."""
    pair = lambda d, n: {"prompt": n, "responses": [{"rank": 0, "score": d}, {"rank": 1, "score": 0}]}
    found = measures.pair_metrics([pair(1 if n < 15 else -1, n) for n in range(20)])
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx((0.5313, 0.8881), abs=2e-4)
    four = [{"rank": r, "score": -r} for r in (0, 0, 1, 1)]  # pairs
    assert measures.pair_metrics([{"prompt": n, "responses": four} for n in range(5)])["accuracy_n"] == 5


def test_the_table_of_scorers_has_a_line_per_part_and_scorer(compared):
    lines = compared.out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("pairs of"))
    assert lines[start].split() == "pairs of scorer pairs accuracy ECE its floor NLL Brier best of N scores".split()
    names, parts = list(compared.summary["scorers"]), list(compared.summary["scorers"]["rm"])
    rows = lines[start + 1 : start + 1 + len(names) * len(parts)]
    for row, (part, name) in zip(rows, itertools.product(parts, names), strict=True):
        cells = [cell for cell in row.split("  ") if cell]
        figures = compared.summary["scorers"][name][part]
        accuracy = measures.interval(figures, "accuracy", ".1%")
        assert [cell.strip() for cell in cells[:4]] == [part, name, f"{figures['pairs']:.0f}", accuracy]
        best = [cell.strip() for cell in cells if "best_of_n_accuracy" in figures]
        assert not best or measures.interval(figures, "best_of_n_accuracy", ".1%") in best


def test_best_of_n_needs_more_than_two_responses(compared):
    for name, parts in compared.summary["scorers"].items():
        rankings = [row for row in compared.rows if row["scorer"] == name and len(row["responses"]) > 2]
        assert len(rankings) == 6
        share = measures.best_of_n_accuracy(rankings)["best_of_n_accuracy"]
        assert parts["all"]["best_of_n_accuracy"] == parts["data set rankings.jsonl"]["best_of_n_accuracy"] == share
        assert "best_of_n_accuracy" not in parts["data set pairs.jsonl"]
    gold = [[r["score"] for r in row["responses"]] for row in compared.rows if row["scorer"] == "gold"][24:]
    assert compared.summary["scorers"]["gold"]["all"]["best_of_n_accuracy_n"] == 6 == len(gold)
    assert "reward_bench_2" not in compared.summary and "RewardBench" not in compared.out


# -- benchmarks of reward models -------------------------------------------------------------------
LONGER = "lambda prompts, responses, rows: [float(len(text.split())) for text in responses]"
JUDGES = f"""longer = {LONGER}
def longer_of_two(duels):
    return [float(len(a.split()) - len(b.split())) for _, a, b in duels]
longer_of_two.pairwise = True
"""


@pytest.fixture()
def judges(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)
    return [f"{kind}={tmp_path / 'judges.py'}:{kind}" for kind in ("longer", "longer_of_two")]


def test_rows_of_reward_bench_2_give_its_accuracies_and_its_ties_score(judges, tmp_path):
    """The longest of four is the chosen one, a rejected one, one of two (1/2). Of the question with several
    right answers they have 5 and 4 words, the wrong one 2: gap 2, spread 1; with one right answer the gap is 1."""
    words = "ant bear cat dog eel fox goat hen ant bear cat dog".split()
    texts = lambda first, lengths: [" ".join(words[i : i + n]) for i, n in enumerate(lengths, first)]
    sides = {"Math": [([4], [1, 2, 1])], "Focus": [([1], [2, 3, 1]), ([3], [3, 1, 1])]}
    sides |= {name: [([4], [1, 2, 1])] for name in ("Factuality", "Precise IF", "Safety")}
    sides["Ties"] = [([5, 4], [2, 1]), ([4], [3])]
    rows = []
    for subset, questions in sides.items():
        for number, lengths in enumerate(questions):
            chosen, rejected = texts(0, lengths[0]), texts(4, lengths[1])
            row = {"prompt": f"copy{' ant' * (1 + len(rows))}", "num_correct": len(chosen), "subset": subset}
            rows.append({**row, "chosen": chosen, "rejected": rejected, "id": ("tied:7", "ref:7")[number]})
    dataset = write_rows(tmp_path / "bench.jsonl", rows)
    found = run(tmp_path / "run", (), scorers=tuple(judges), dataset=str(dataset))
    shares = {"Factuality": 1, "Precise IF": 1, "Math": 1, "Safety": 1, "Focus": 0.25}
    ties = 0.3 + 0.3 + 0.2 + 0.01 * math.tanh(1 / 1 - 1)  # 1 is no larger than the spread
    both = found.summary["reward_bench_2"]
    assert both["longer"] == pytest.approx({**shares, "Ties": ties, "score": (4.25 + ties) / 6})
    assert both["longer_of_two"] == shares  # log odds have no spread
    head, line = next(two for two in itertools.pairwise(found.out.splitlines()) if two[0].startswith("RewardBench"))
    assert re.split("  +", head) == ["RewardBench 2", *shares, "Ties", "score"]
    assert line.split()[-3:] == ["25.0%", "80.0%", "84.2%"]
    dataset = write_rows(tmp_path / "bench.jsonl", [row for row in rows if row["subset"] != "Ties"])
    found = run(tmp_path / "without", (), scorers=tuple(judges), dataset=str(dataset))
    assert "RewardBench 2" not in found.out


def test_pair_lengths_are_in_tokens_of_the_judges_model(small, tmp_path):
    """Not in the tiny world's tokens, which are two fewer per prompt; a judge without a model reads texts."""
    args = args_of(dataset=small_pairs(tmp_path))
    for spec, more in (("rater={}", 2), ("oracle={}", 2), ("oracle=gold_labeler:exact", 0)):
        path = f"common.programs.ai_feedback:{spec.format(small / 'wordy')}"
        held_out, tokenizer = evaluate.load_pairs({"judge": path}, args)
        plain, _ = evaluate.load_pairs({"a": str(small / "a")}, args)
        assert len(held_out[0].prompt_ids) == len(plain[0].prompt_ids) + more
        assert (tokenizer.unk_token is None) == (more == 0)


# -- questions of several turns --------------------------------------------------------------------
TWO_TURNS = [  # as FastChat's question.jsonl has them
    {"question_id": 81, "category": "writing", "turns": ["copy ant bear", "reverse cat dog"]},
    {"question_id": 111, "category": "math", "turns": ["first eel fox", "last goat hen"], "reference": ["eel", "hen"]},
    {"question_id": 112, "category": "math", "turns": ["rest ibis ant", "copy owl"]},
]
GRADES = """def grade(prompts, responses, rows):
    return [10.0 * len(row["messages"]) + len(question) / 100 for row, question in zip(rows, prompts)]
"""


@pytest.fixture(scope="module")
def two_turns(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("turns")
    (folder / "grades.py").write_text(GRADES)
    dataset = str(write_rows(folder / "question.jsonl", TWO_TURNS))
    options = {"dataset": dataset, "reference": "a", "temperatures": (1.0, 0.0), "scorer": f"{folder}/grades.py:grade"}
    found = run(folder / "run", [small / "a", small / "b"], **options)
    found.options = {**options, "overwrite": True, "temperatures": (0.0,)}
    found.folder = folder
    return found


def test_the_second_question_follows_the_policys_own_first_answer(two_turns, loaded):
    for name, t in itertools.product("ab", (1.0, 0.0)):
        rows = of(two_turns, name, t)
        assert [row["turn"] for row in rows] == [1, 1, 1, 2, 2, 2]
        for row, (first, second) in zip(TWO_TURNS, zip(rows[:3], rows[3:])):
            question, further = row["turns"]
            assert first["prompt"] == [{"role": "user", "content": question}]
            answer = {"role": "assistant", "content": first["response"]}
            assert second["prompt"] == [*first["prompt"], answer, {"role": "user", "content": further}]
            assert first["category"] == second["category"] == row["category"]
    assert [r["response"] for r in of(two_turns, "a", 0.0)] != [r["response"] for r in of(two_turns, "b", 0.0)]


def test_the_second_answer_continues_that_dialogue(two_turns, loaded):
    """Greedily. It differs from an answer to only the second question, and from one after the other policy's answer."""
    options = {"max_new_tokens": 6, "slots": 64, "temperature": 0.0}
    other = of(two_turns, "b", 0.0)[3:]
    rows = of(two_turns, "a", 0.0)[3:]
    texts = {}
    for name, dialogues in {
        "own": [row["prompt"] for row in rows], "other": [row["prompt"] for row in other],
        "alone": [row["prompt"][-1:] for row in rows],
    }.items():  # fmt: skip
        prompts = [responses.Prompt(chat.prompt_ids(TOKENIZER, turns), turns, None) for turns in dialogues]
        pairs = responses.sample_responses(loaded[0], TOKENIZER, prompts, **options)
        texts[name] = [response.text for _, response in pairs]
    assert [row["response"] for row in rows] == texts["own"] != texts["alone"] and texts["own"] != texts["other"]


def test_scores_of_turns_and_categories_are_the_judges_means(two_turns):
    for t, name in itertools.product(("1", "0"), "ab"):
        figures = two_turns.summary["temperatures"][t][name]
        rows = of(two_turns, name, float(t))
        lengths = [len(row["prompt"][-1]["content"]) / 100 for row in rows]
        scores = [10 + x for x in lengths[:3]] + [30 + x for x in lengths[3:]]  # one message, three messages
        assert figures["score/turn_1"] == pytest.approx(sum(scores[:3]) / 3)
        assert figures["score/turn_2"] == pytest.approx(sum(scores[3:]) / 3)
        assert figures["score"] == pytest.approx(sum(scores) / 6)
        assert figures["score/writing"] == pytest.approx((scores[0] + scores[3]) / 2)
        assert figures["score/math"] == pytest.approx((scores[1] + scores[2] + scores[4] + scores[5]) / 4)
        assert isinstance(rows[3]["kl"] if t == "1" else 0.0, float) and figures["score_win_rate_n"] == 6
        line = evaluate.table_line(name, figures)
        assert line["score/turn_2"] == f"{figures['score/turn_2']:.2f}" and "rating" not in line
    assert two_turns.summary["prompts"] == 3
    [not_read] = [line for line in two_turns.out.split("\n") if "only given to scoring functions" in line]
    assert not_read.endswith(": question_id (3), reference (1)")


def test_ratings_of_the_ai_rater_are_shown(two_turns, small, tmp_path, monkeypatch):
    """The rating is 10 if the dialogue has an earlier answer, else 4."""

    class Sure(gold_labeler.GoldLabeler):
        def probabilities(self, questions, options):
            places = [9 if "assistant: " in question.values["prompt"] else 3 for question in questions]
            return torch.eye(10, dtype=torch.float64)[places]

    monkeypatch.setattr(gold_labeler, "mine", Sure, raising=False)
    options = {**two_turns.options, "scorer": "common.programs.ai_feedback:rater=gold_labeler:mine"}
    found = run(tmp_path / "run", [small / "a"], **options)
    figures = found.summary["temperatures"]["0"]["a"]
    ratings = {key: x for key, x in figures.items() if key.startswith("rating")}
    known = {"rating": 7, "rating/turn_1": 4, "rating/turn_2": 10, "rating/writing": 7, "rating/math": 7}
    assert ratings == pytest.approx(known) and figures["score"] == pytest.approx((7 - 5.5) / 4.5)
    assert evaluate.table_line("a", figures)["rating/turn_2"] == "10.00"


def test_unusable_turns_are_dropped_and_named(two_turns, small, tmp_path):
    rows = [
        *TWO_TURNS[:2], {"turns": ["copy cat", "copy " + "ant " * 60]}, {"turns": ["copy dog", 5]},
        {"turns": ["copy eel", "copy <|user|> eel"]}, {"turns": ["copy fox"]}, {"turns": 3}, {"prompt": "copy hen"},
    ]  # fmt: skip
    dataset = str(write_rows(tmp_path / "rows.jsonl", rows))
    found = run(tmp_path / "run", [small / "a"], **{**two_turns.options, "dataset": dataset})
    assert "the answers may not all fit in 64 tokens (--max-length) (rows.jsonl:3)" in found.out
    assert "turns must be a list of texts without special tokens (rows.jsonl:4, rows.jsonl:5)" in found.out
    assert "(rows.jsonl:7)" in found.out
    assert [row["turn"] for row in found.rows] == [1, 1, 1, 1, 2, 2]
    answered = [{**TWO_TURNS[0], "completion": "ant bear"}, *({"prompt": x, "completion": "ant"} for x in PROMPTS[:2])]
    dataset = str(write_rows(tmp_path / "rows.jsonl", answered))
    options = {**two_turns.options, "dataset": dataset, "reference": "dataset"}
    found = run(tmp_path / "answered", [small / "a", "dataset"], **options)
    assert "the row has several questions, but only one answer (rows.jsonl:1)" in found.out
    assert len(found.rows) == 4 and "turn" not in found.rows[0]


def test_second_answers_need_a_judge_that_scores(two_turns, small, judges, tmp_path):
    spec = judges[1].partition("=")[2]
    with pytest.raises(InputError, match="longer_of_two compares answers.*use one that scores"):
        run(tmp_path / "run", [small / "a"], **{**two_turns.options, "scorer": spec})
    assert not (tmp_path / "run").exists()
