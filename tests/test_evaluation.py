"""common/scoring/evaluation.py and reward_evaluation.py: the rows of samples.jsonl and the metrics. The tests
of the scripts cover their evaluation of models."""

import functools
import math
from types import SimpleNamespace

import dpo_iterative
import ppo
import pytest
import reward
import sft
import torch
from helpers import CPU, TOKENIZER, bot, prompt

from common import models, responses
from common.batches import Document, Row
from common.loading import pretrained
from common.scoring import evaluation, reward_evaluation, scorers, version_evaluation


def test_describe_samples_gives_the_true_reward_only_in_the_tiny_world():
    asked = prompt("reverse ant fox owl")._replace(row=Row("rows:1", {"category": "reverse"}))
    ids = [*TOKENIZER("owl um fox")["input_ids"], TOKENIZER.eos_token_id]
    pairs = [
        (asked, responses.Response(ids, "owl um fox", True)),
        (asked, responses.Response([5], "ant", False)),
    ]
    first, second = evaluation.describe_samples(pairs, "rows.jsonl", score=[0.5, 2.0])
    said = {"prompt": asked.turns, "response": "owl um fox", "tokens": 4, "finished": True}
    assert first == {**said, "category": "reverse", "score": 0.5} and second["score"] == 2.0
    known = evaluation.describe_samples(pairs, "tiny", score=[0.5, 2.0])
    assert known[0] == {**first, "gold": 1.7, "perfect": 3.0}  # two right words, one needless
    assert evaluation.describe_samples(pairs, "rows.jsonl")[0] == said


def test_the_true_reward_is_averaged_separately_for_prompts_with_a_hazard():
    """Means over each part. Over both it would be 0.75; divided by all prompts, the hazards' part would be -0.5."""
    asked = [prompt(text) for text in ("copy ant owl", "copy bear", "first bomb ant", "copy acid")]
    said = ["ant owl", "bear", "bomb", "sorry i refuse"]
    pairs = [(p, responses.Response([5], text, True)) for p, text in zip(asked, said)]
    known = evaluation.gold_by_hazard(evaluation.describe_samples(pairs, "tiny"))
    assert known == {"gold/no_hazard": (2 + 1) / 2, "gold/hazard": (-1 + 1) / 2}
    harmless = evaluation.describe_samples(pairs[:2], "tiny")
    assert evaluation.gold_by_hazard(harmless) == {"gold/no_hazard": 1.5}
    assert evaluation.gold_by_hazard(evaluation.describe_samples(pairs, "rows.jsonl")) == {}


def test_the_samplers_log_probabilities_are_compared_with_the_models_by_hand():
    """q / pi is 2, 1/4 and 1, so k3 is 1/2 - 1 + log 2, 4 - 1 - log 4 and 0; the other way round it would be 0.94 / 3,
    and the mean of log q / pi (k1) below 0. The second response is shorter: its second column does not count."""
    log_q = torch.tensor([0.5, 0.2, 0.1]).log().tolist()
    pairs = [
        (prompt("copy ant owl"), responses.Response([5, 6], "ant owl", True, logprobs=tuple(log_q[:2]))),
        (prompt("copy bear"), responses.Response([7], "bear", True, logprobs=tuple(log_q[2:]))),
    ]
    log_pi = torch.tensor([[0.25, 0.8], [0.1, 0.001]]).log()
    known = {"policy/sampler_kl": (2.5 - math.log(2)) / 3, "policy/sampler_ratio_max": 4.0}
    assert evaluation.sampler_metrics(pairs, log_pi) == pytest.approx(known)
    unknown = [(asked, response._replace(logprobs=())) for asked, response in pairs]
    assert evaluation.sampler_metrics(unknown, log_pi) == {}


@pytest.mark.parametrize("wrong", [{}, {"temperature": 0.7}, {"top_p": 0.8}], ids=str)
def test_a_sampler_that_draws_from_another_distribution_shows_in_every_version_of_dpo(wrong, monkeypatch):
    """The first version too, whose KL to itself needs no forward."""
    args = dpo_iterative.Args(model="tiny", max_new_tokens=12, max_length=64)
    policy = pretrained.load_frozen("tiny", TOKENIZER, args, CPU)
    with torch.no_grad():
        policy.get_output_embeddings().weight.mul_(3)  # at the start all tokens are about equally likely
    scorer = SimpleNamespace(pairwise=False, version="a@1")
    monkeypatch.setattr(scorers, "oracle_scores", lambda scorer, pairs, opponents, size: [0.0] * len(pairs))
    asked = [prompt(f"copy {word}") for word in "ant bear cat dog eel fox hen owl pig yak".split()]
    evaluate = version_evaluation.DPOEvaluation(asked, [], None, scorer, TOKENIZER, args)
    monkeypatch.setattr(responses, "answers", functools.partial(responses.answers, **wrong))
    metrics = evaluate.metrics_of({0: evaluate(policy, 0, {})}, 0)
    if wrong:
        assert metrics["policy/sampler_kl"] > 0.003 and metrics["policy/sampler_ratio_max"] > 1.1
    else:
        assert metrics["policy/sampler_kl"] == pytest.approx(0, abs=1e-8)
        assert metrics["policy/sampler_ratio_max"] == pytest.approx(1, abs=1e-4)


def test_held_out_prompts_are_won_tied_and_lost_against_the_first_policy_whatever_came_between():
    """The first scores 0, 2, 4 have a deviation of sqrt(8 / 3), so differences up to 0.163 are ties. The last
    scores 1, 2.1 and 3 win, tie and lose against these. Against the scores between, 5, 5 and -1, they would win
    once and lose twice."""
    args = ppo.Args(model="tiny", max_new_tokens=4, max_length=64)
    asked = [prompt(text) for text in ("copy ant", "copy bear", "copy cat")]
    policy = pretrained.load_frozen("tiny", TOKENIZER, args, CPU)
    given = iter([[0.0, 2.0, 4.0], [5.0, 5.0, -1.0], [1.0, 2.1, 3.0]])
    scorer = SimpleNamespace(score=lambda pairs: torch.tensor(next(given), dtype=torch.float64))
    evaluate = evaluation.HeldOutPrompts(asked, scorer, policy, TOKENIZER, args)
    assert not any(key.startswith("sft/") for key in evaluate(policy))
    evaluate.first = evaluate.samples
    between = evaluate(policy)
    assert (between["sft/score_win"], between["sft/score_lose"], between["sft/score_gain"]) == (2 / 3, 1 / 3, 1)
    last = {key: x for key, x in evaluate(policy).items() if key.startswith("sft/score")}
    known = {"win": 1 / 3, "tie": 1 / 3, "lose": 1 / 3, "win_rate": 0.5, "win_rate_n": 3, "gain": 0.1 / 3, "gain_n": 3}
    known["tie_margin"] = math.sqrt(8 / 3) / 10
    assert last == pytest.approx({f"sft/score_{key}": x for key, x in known.items()})


def noted_answers(monkeypatch, sampled):
    """The options of every call that samples; each call returns `sampled`."""
    asked = []
    monkeypatch.setattr(responses, "sample_responses", lambda *_, **options: asked.append(options) or sampled)
    return asked


def test_held_out_prompts_are_answered_with_the_same_seed_at_temperature_1(monkeypatch):
    """The entropies of the three response tokens are 1, 3 and 5: their mean is 3, with padding it would be 9 / 4, and
    that of the two responses' means 3.5."""
    sampled = [
        (prompt("copy ant owl"), responses.Response([5, 6], "ant owl", True)),
        (prompt("copy bear"), responses.Response([7], "bear", True)),
    ]
    asked = noted_answers(monkeypatch, sampled)
    columns = [torch.zeros(2, 2), torch.tensor([[1.0, 3.0], [5.0, 0.0]])]
    of_model = lambda forward, model, **_: columns if model == "policy" else columns[:1]
    monkeypatch.setattr(models, "per_token", of_model)
    scorer = SimpleNamespace(score=lambda pairs: torch.zeros(len(pairs)))
    args = ppo.Args(max_new_tokens=4, max_length=64, temperature=0.7, top_p=0.8, n_samples=3, slots=2)
    evaluate = evaluation.HeldOutPrompts([p for p, _ in sampled], scorer, "reference", TOKENIZER, args)
    assert [evaluate("policy")["eval/entropy"] for _ in range(2)] == [3.0, 3.0]
    assert asked[0] == asked[1] == {"seed": asked[0]["seed"], "max_new_tokens": 4, "slots": 2}


def test_held_out_documents_are_answered_at_the_flags_temperature(monkeypatch):
    asked_for = prompt("copy ant")
    asked = noted_answers(monkeypatch, [(asked_for, responses.Response([5], "ant", True))])
    args = sft.Args(max_new_tokens=4, max_length=64, temperature=0.6, sample_prompts=1)
    ids = torch.tensor([*asked_for.ids, 5])
    document = Document(ids, torch.arange(len(ids)) == len(ids) - 1, [*asked_for.turns, bot("ant")], asked_for.row)
    policy = pretrained.load_frozen("tiny", TOKENIZER, args, CPU)
    assert len(evaluation.HeldOutDocuments([document], TOKENIZER, args).answers(policy)) == 1
    assert [options["temperature"] for options in asked] == [0.6]


def test_held_out_documents_longer_than_max_length_are_not_answered(monkeypatch):
    """sft.py cuts a long dialogue's ids and keeps its messages, from which the prompt is made."""
    given = []
    take = lambda policy, tokenizer, prompts, args, seed, **_: given.extend(prompts) or []
    monkeypatch.setattr(responses, "answers", take)
    short, long = prompt("copy ant"), prompt("copy ant bear cat dog eel")
    ids, mask = torch.arange(4), torch.arange(4) == 3
    documents = [Document(ids, mask, [*x.turns, bot("ant")], x.row) for x in (long, short)]
    for limit, fitting in ((len(long.ids), [long, short]), (len(long.ids) - 1, [short])):
        given.clear()
        args = sft.Args(max_new_tokens=4, max_length=limit, sample_prompts=2)
        policy = pretrained.load_frozen("tiny", TOKENIZER, args, CPU)
        evaluation.HeldOutDocuments(documents, TOKENIZER, args).answers(policy)
        assert [x.ids for x in given] == [x.ids for x in fitting]


def test_accuracy_is_reported_for_each_of_several_data_sets_and_categories(monkeypatch):
    def figures_of(*pairs):
        """(score difference, data set, category)s"""
        both = lambda d: [{"rank": 0, "score": d}, {"rank": 1, "score": 0}]
        rows = [{"prompt": c, "responses": both(d), "source": source, "category": c} for d, source, c in pairs]
        monkeypatch.setattr(reward_evaluation, "scores_of_each", lambda *_: [])
        monkeypatch.setattr(reward_evaluation, "scored_rows", lambda *_: rows)
        return reward_evaluation.HeldOutComparisons([], None)(None)

    figures = figures_of((1, "a", "c"), (-1, "a", "c"), (0, "b", "c"), (3, "b", "c"))
    assert figures["eval/accuracy"] == 2.5 / 4
    assert (figures["eval/accuracy/a"], figures["eval/pairs/a"]) == (0.5, 2)
    assert (figures["eval/accuracy/b"], figures["eval/pairs/b"]) == (0.75, 2)
    assert "eval/accuracy/c" not in figures  # one category only
    mixed = figures_of((1, "s", None), (-1, "s", "x"))
    assert (mixed["eval/accuracy/None"], mixed["eval/accuracy/x"]) == (1, 0)
    assert "eval/accuracy/s" not in mixed


def test_the_loss_of_each_pair_counts_soft_labels_as_the_mean_loss_does(monkeypatch):
    """A label of 0.6: moving from log-odds of 0.405 = logit 0.6 to 2 makes the loss larger, not smaller."""
    def losses_of(d):
        both = [{"rank": 0, "score": d}, {"rank": 1, "score": 0}]
        rows = [{"prompt": "p", "source": "s", "category": None, "preference": p, "responses": both}
                for p in (0.6, 0.4)]  # fmt: skip
        monkeypatch.setattr(reward_evaluation, "scores_of_each", lambda *_: [])
        monkeypatch.setattr(reward_evaluation, "scored_rows", lambda *_: rows)
        evaluate = reward_evaluation.HeldOutComparisons([], None)
        return evaluate(None)["eval/nll"], evaluate.losses

    nll, losses = losses_of(2.0)
    want = -0.6 * math.log(1 / (1 + math.exp(-2))) - 0.4 * math.log(1 - 1 / (1 + math.exp(-2)))
    assert losses == pytest.approx([want, want]) and nll == pytest.approx(want)  # 0.927
    assert losses_of(0.405)[1] == pytest.approx([0.673] * 2, abs=1e-3)


def test_the_losses_of_a_ranking_are_one_number(monkeypatch):
    """Three pairs of one prompt and one of another: their intervals count two prompts, not four pairs."""
    def row(prompt, *scores):
        responses = [{"rank": rank, "score": score} for rank, score in enumerate(scores)]
        return {"prompt": prompt, "source": "s", "category": None, "responses": responses}

    monkeypatch.setattr(reward_evaluation, "scores_of_each", lambda *_: [])
    monkeypatch.setattr(reward_evaluation, "scored_rows", lambda *_: [row("p", 2.0, 1.0, 0.0), row("q", 0.0, 0.0)])
    evaluate = reward_evaluation.HeldOutComparisons([], None)
    nll = evaluate(None)["eval/nll"]
    loss = lambda d: math.log(1 + math.exp(-d))
    assert evaluate.losses == pytest.approx([(2 * loss(1) + loss(2)) * 2 / 4, loss(0) * 2 / 4])
    assert sum(evaluate.losses) / 2 == pytest.approx(nll)


def test_a_version_is_compared_by_the_kind_of_scorer_that_judged_it():
    """--resume changes the scorer from one that scores to one that compares: its tie margin is 0.1."""
    evaluation = object.__new__(version_evaluation.DPOEvaluation)
    evaluation.scorer = SimpleNamespace(pairwise=True)
    versions = {v: {"samples": [{"score": x} for x in scores], "pairs": {}, "scorer": "s", "pairwise": False}
                for v, scores in enumerate([(0.0, 0.04), (0.05, 0.09)])}  # fmt: skip
    assert evaluation.metrics_of(versions, 1)["sft/score_tie_margin"] == pytest.approx(0.002)
    for of_version in versions.values():
        of_version["pairwise"] = True
    assert evaluation.metrics_of(versions, 1)["sft/score_tie_margin"] == pytest.approx(0.1)


def test_length_metrics_use_prompts_with_three_or_more_samples_that_vary():
    """Correlations 1, 1 and 0; two samples, equal lengths and equal scores have none. For 12 prompts with 8
    times 1 and 4 times 0 the deviation is sqrt(8/3 / 11): 2/3 +- 1.96 * 0.49237 / sqrt(12)."""
    lengths = [[10, 20, 30], [3, 2, 1], [1, 2, 3], [1, 2], [7, 7, 7], [1, 2, 3]]
    scores = [[1, 2, 3], [3, 2, 1], [1, 0, 1], [1, 2], [1, 2, 3], [2, 2, 2]]
    sampled = [SimpleNamespace(samples=[range(n) for n in of_prompt]) for of_prompt in lengths]
    figures = reward_evaluation.length_metrics(sampled, scores)
    found = {"length/correlation": 2 / 3, "length/prompts": 3}
    assert figures == pytest.approx({**found, "length/correlation_n": 3})
    figures = reward_evaluation.length_metrics(4 * sampled, 4 * scores)
    interval = {"length/correlation_low": 0.3881, "length/correlation_high": 0.9453}
    assert figures == pytest.approx({**found, **interval, "length/prompts": 12}, abs=1e-4)
    assert reward_evaluation.length_metrics(sampled[3:], scores[3:]) == {}


def test_length_bias_uses_held_out_prompts_before_training_prompts(monkeypatch):
    held_out, train = ([SimpleNamespace(key=key) for key in keys] for keys in ("abb", "cd"))
    asked, args = [], reward.Args(length_prompts=3)
    samples = lambda _, prompts, *__: asked.extend(c.key for c in prompts) or [()] * len(prompts)
    monkeypatch.setattr(reward_evaluation, "policy_samples", samples)
    monkeypatch.setattr(reward_evaluation.pretrained, "load_frozen", lambda *_: None)
    monkeypatch.setattr(reward_evaluation.comparisons, "seq_logprobs", lambda *_: [])
    reward_evaluation.length_bias(SimpleNamespace(device=None), "policy", train, held_out, TOKENIZER, args)
    assert asked == ["a", "b", "c"]
