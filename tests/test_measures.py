"""common/scoring/measures.py, the metrics of samples and scorers: by hand on a few items, by simulation on
many."""

import itertools
import json
import math
import random
import statistics

import numpy
import pytest
import torch

from common.batches import Comparison, Row, labelled_pairs
from common.data import files
from common.scoring import measures
from common.run import logs

LOG3 = math.log(3)  # sigmoid 3/4
NEW = itertools.count()


def row(*scores, ranks=None, source="s", category="c", prompt=None, **columns):
    """A row with these scores, best first, and its own prompt; columns: one value per response."""
    prompt = [{"role": "user", "content": str(next(NEW))}] if prompt is None else prompt
    ranks = range(len(scores)) if ranks is None else ranks
    responses = [{"text": "t", "tokens": 1, "rank": r, "score": s} for s, r in zip(scores, ranks)]
    for name, values in columns.items():
        for response, value in zip(responses, values):
            response[name] = value
    return {"prompt": prompt, "source": source, "category": category, "responses": responses}


def pair(difference, **more):
    return row(difference, 0.0, **more)


def test_samples_from_before_training_are_not_printed_as_results(capsys):
    sample = {"prompt": [{"role": "user", "content": "copy ant"}]}
    whens = [{**sample, "when": when, "response": when} for when in ("before", "before", "after", "after")]
    logs.print_results({}, {}, (), whens)
    assert capsys.readouterr().out.splitlines() == ["  'copy ant' -> 'after'"] * 2


@pytest.mark.parametrize(
    "key, change, before, after, words",
    [
        ("eval/nll", "eval/nll_change", [3.0, 3.2] * 10, [9.0, 9.4] * 10, "3.1 -> 9.2;"),
        ("pairs/loss", "pairs/loss_change", [0.7] * 10, [0.8] * 10, "0.7 -> 0.8;"),
        ("eval/score", "sft/score_gain", [1.0] * 10, [0.5, 0.75] * 5, "1 -> 0.625;"),
        ("eval/score", "eval/score_over_first", [1.0] * 10, [0.0] * 10, "1 -> 0;"),
        # 8 right of 40, and 7: seven that were right are wrong now, six that were wrong are right
        ("eval/score", "sft/score_gain", [1.0] * 8 + [0.0] * 32, [1.0] + [0.0] * 7 + [1.0] * 6 + [0.0] * 26, ""),
        ("eval/nll", "eval/nll_change", [1.0] * 20, [0.9, 1.2] * 10, ""),
        ("eval/nll", "eval/nll_change", [3.0] * 10, [2.0] * 10, ""),
        ("eval/nll", "eval/nll_change", [3.0] * 9, [9.0] * 9, ""),  # so few are no evidence
    ],
)
def test_a_worse_held_out_metric_is_reported_if_its_paired_interval_excludes_0(
    key, change, before, after, words, capsys
):
    mean = statistics.fmean
    figures = {key: mean(after), **measures.change(change, before, after)}
    logs.print_results({key: mean(before)}, figures, (), [])
    logs.print_results({}, figures, (), [])  # nothing before: nothing to compare with
    out = capsys.readouterr().out
    assert out.count("\n") == bool(words)
    assert not words or f"held-out {key} became worse: {words}" in out


# -- pairs ---------------------------------------------------------------------------------------
def test_pairs_are_better_minus_worse_without_ties_and_in_any_order():
    rows = [row(1.0, 5.0, 2.0, ranks=[1, 0, 1]), pair(-0.5)]
    pairs = measures.pairs_of(rows)
    assert [(d, n) for d, n, _, _ in pairs] == [(4.0, 0), (3.0, 0), (-0.5, 1)]
    assert all(better["rank"] < worse["rank"] for _, _, better, worse in pairs)


def test_a_model_that_sees_two_responses_gives_differences_in_the_order_of_the_pairs():
    seen = row(0.0, 0.0, 0.0)
    seen["differences"] = [7.0, -1.0, 2.0]
    assert [d for d, *_ in measures.pairs_of([seen])] == [7.0, -1.0, 2.0]
    assert measures.pair_metrics([seen], n_bootstrap=5)["accuracy"] == pytest.approx(2 / 3)


def test_differences_are_of_the_pairs_that_the_labels_count():
    """pairs_of and preferences.labelled_pairs must walk the pairs in one order: pairwise differences depend
    on it."""

    ranks = [1, 0, 2, 1]
    mine = [(a["score"], b["score"]) for _, _, a, b in measures.pairs_of([row(0, 1, 2, 3, ranks=ranks)])]
    ids = torch.zeros(1, dtype=torch.int32)
    c = Comparison([], [""] * 4, ids, [ids] * 4, torch.tensor(ranks), "", Row("", {}))
    assert mine == labelled_pairs(c) == [(0, 2), (1, 0), (1, 2), (1, 3), (3, 2)]


@pytest.mark.parametrize(
    "differences, expected", [([1, -1, 0, 2], 0.625), ([0, 0], 0.5), ([-3], 0.0), ([0.1], 1.0)]
)
def test_accuracy_counts_ties_half(differences, expected):
    assert measures.accuracy(differences) == expected
    rows = [pair(d) for d in differences]
    assert measures.pair_metrics(rows, n_bootstrap=5)["accuracy"] == expected


def test_accuracy_of_nothing():
    assert math.isnan(measures.accuracy([]))
    assert measures.pair_metrics([row(1.0, 2.0, ranks=[0, 0])]) == {"pairs": 0}


# -- figures -------------------------------------------------------------------------------------
def test_pair_metrics_by_hand():
    """Differences log 3 four times, three of them correct, and -2 log 3 once: confidences 3/4 (bin 5 of 10 in
    [0.5, 1]) and 9/10 (bin 8). In bin 5 accuracy is 3/4: no gap. In bin 8 it is 0 against 9/10."""
    figures = measures.pair_metrics([pair(LOG3)] * 3 + [pair(-LOG3), pair(-2 * LOG3)], n_bootstrap=20)
    assert figures["pairs"] == 5 and figures["accuracy"] == pytest.approx(3 / 5)
    nll = 3 * math.log(4 / 3) + math.log(4) + math.log(10)
    assert figures["nll"] == pytest.approx(nll / 5)
    assert figures["brier"] == pytest.approx((3 * 0.25**2 + 0.75**2 + 0.9**2) / 5)
    assert figures["ece"] == pytest.approx(0.9 / 5)
    each = (3 * 0.25 + 0.75 + 0.9) / 5
    for wrong in (0.9, 0.9 / 2, 0.9 / 10, each):  # bins not weighted: sum, mean; over all bins; no bins
        assert abs(figures["ece"] - wrong) > 0.05


def test_a_scorer_that_matches_soft_labels_is_calibrated():
    """By hand for p = 0.8: NLL -0.8 log 0.8 - 0.2 log 0.2, Brier 0.8 * 0.2."""
    sides = [{"rank": 0, "score": math.log(4), "tokens": 1}, {"rank": 1, "score": 0.0, "tokens": 1}]
    rows = [{"prompt": str(i), "preference": 0.8, "responses": sides} for i in range(20)]
    figures = measures.pair_metrics(rows)
    assert (figures["ece"], figures["brier"]) == (pytest.approx(0, abs=1e-12), pytest.approx(0.16))
    assert figures["nll"] == pytest.approx(0.5004, abs=1e-4) and figures["accuracy"] == 1


def test_ties_and_certainty_fall_in_the_first_and_the_last_bin():
    """A tie is half right with confidence 1/2: no gap. 1000 is right for certain: no gap."""
    figures = measures.pair_metrics([pair(0.0), pair(1000.0)], n_bootstrap=5)
    assert figures["ece"] == pytest.approx(0, abs=1e-12)
    assert figures["nll"] == pytest.approx(math.log(2) / 2)
    assert figures["brier"] == pytest.approx(0.25 / 2)


def reference_ece(differences, n_bins=10):
    """With numpy, bin by bin."""
    d = numpy.asarray(differences)
    confidence, right = 1 / (1 + numpy.exp(-abs(d))), numpy.where(d == 0, 0.5, d > 0)
    edges, total = numpy.linspace(0.5, 1, n_bins + 1), 0.0
    for low, high in zip(edges[:-1], edges[1:]):
        inside = (confidence >= low) & ((confidence < high) | (high == 1))
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


def calibrated(n, seed, spread=1.0):
    """Differences better - worse of n pairs whose labels follow sigmoid(difference), differences normal."""
    rng = random.Random(seed)
    differences = []
    for _ in range(n):
        d = rng.gauss(0, spread)
        differences.append(d if rng.random() < 1 / (1 + math.exp(-d)) else -d)
    return differences


@pytest.mark.parametrize("n_bins", [10, 7])
def test_ece_equals_a_bin_by_bin_reference(n_bins):
    differences = [2 * d for d in calibrated(500, 1)]
    figures = measures.pair_metrics([pair(d) for d in differences], n_bootstrap=5, n_bins=n_bins)
    assert figures["ece"] == pytest.approx(reference_ece(differences, n_bins), abs=1e-12)
    assert figures["ece"] > 0.05


@pytest.mark.parametrize("n, floor, slack", [(300, 0.06, 0.004), (500, 0.046, 0.003), (4000, 0.0165, 0.001)])
def test_the_floor_is_the_ece_from_sampling_only(n, floor, slack):
    """Of a perfectly calibrated model: about 0.046 at n = 500, elsewhere by 1 / sqrt(n): 0.059 at 300, 0.0163
    at 4,000."""
    differences = calibrated(n, 0)
    figures = measures.pair_metrics([pair(d) for d in differences], n_bootstrap=5)
    assert figures["ece_floor"] == pytest.approx(floor, abs=slack)
    # independently: the same confidences, labels drawn anew
    rng, found = random.Random(1), []
    for _ in range(30):
        drawn = [abs(d) if rng.random() < 1 / (1 + math.exp(-abs(d))) else -abs(d) for d in differences]
        found.append(reference_ece(drawn))
    error = statistics.stdev(found) * math.sqrt(1 / 30 + 1 / 200)
    assert abs(figures["ece_floor"] - statistics.mean(found)) < 4 * error


def test_the_floor_does_not_depend_on_the_labels():
    right, wrong = ([pair(s * abs(d)) for d in calibrated(300, 0)] for s in (1, -1))
    floors = [measures.pair_metrics(rows, n_bootstrap=5)["ece_floor"] for rows in (right, wrong)]
    assert floors[0] == floors[1]


def test_interval_holds_the_estimate_and_shrinks_with_the_number_of_pairs():
    widths = []
    for n in (200, 3200):
        rows = [pair(3 * d) for d in calibrated(n, 2)]  # overconfident, far above the floor
        f = measures.pair_metrics(rows, n_bootstrap=200)
        assert f["ece_low"] < f["ece"] < f["ece_high"]
        assert f["ece_low"] > 1.2 * f["ece_floor"]
        widths.append(f["ece_high"] - f["ece_low"])
    assert 2.5 < widths[0] / widths[1] < 6  # about the root of 16
    assert measures.pair_metrics(rows, n_bootstrap=200) == f  # a function of the rows alone


def test_interval_is_a_bootstrap_over_rows():
    """The pairs of a row are correlated: 100 rankings of 4 whose 6 pairs all agree have the interval of 100 rows,
    wider than that of 600 pairs by about the root of 6."""
    rng = random.Random(3)
    signs = [1 if rng.random() < 0.7 else -1 for _ in range(100)]
    scores = [[s * 1e-3 * (3 - i) for i in range(4)] for s in signs]
    rankings = [row(*x) for x in scores]
    pairs = [pair(d) for ranking in rankings for d, *_ in measures.pairs_of([ranking])]
    a, b = (measures.pair_metrics(rows, n_bootstrap=300) for rows in (rankings, pairs))
    assert a["pairs"] == b["pairs"] == 600 and a["ece"] == pytest.approx(b["ece"])
    ratio = (a["ece_high"] - a["ece_low"]) / (b["ece_high"] - b["ece_low"])
    assert 1.8 < ratio < 3.1  # sqrt(6) = 2.45
    # one bin, 70 % right against 50 %: the binomial's interval is +- 1.96 sqrt(0.7 * 0.3 / 100)
    p = sum(s > 0 for s in signs) / 100
    width = 2 * 1.96 * math.sqrt(p * (1 - p) / 100)
    assert a["ece_high"] - a["ece_low"] == pytest.approx(width, rel=0.2)


def test_the_interval_of_an_accuracy_has_the_spread_of_samples_of_prompts():
    """100 rankings of 4 with 60 % of their pairs as labelled: in half of the rankings the 6 pairs all agree, in the
    others they are drawn independently. The interval is as wide as the spread of 300 samples' accuracies, not as
    that of 100 pairs or of 600."""
    rng = random.Random(4)

    def sample():
        rows = []
        for number in range(100):
            signs = [1 if rng.random() < 0.6 else -1 for _ in range(6)]
            signs = signs[:1] * 6 if number % 2 else signs
            rows.append({**row(0.0, 0.0, 0.0, 0.0), "differences": signs})
        return rows

    found = [measures.pair_metrics(sample(), n_bootstrap=2) for _ in range(300)]
    spread = 2 * 1.96 * statistics.stdev(figures["accuracy"] for figures in found)
    width = statistics.fmean(figures["accuracy_high"] - figures["accuracy_low"] for figures in found)
    assert width == pytest.approx(spread, rel=0.15)
    for wrong in (100, 600):
        low, high = measures.wilson(0.6, wrong)
        assert not 0.8 < (high - low) / spread < 1.25


@pytest.mark.parametrize("n", [1, 3, 10, 22.5, 1000])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_interval_of_a_share_of_0_or_1_prints_no_minus(share, n):
    figures = {"x": share, **dict(zip(("x_low", "x_high"), measures.wilson(share, n)))}
    assert 0 <= figures["x_low"] < figures["x_high"] <= 1
    assert "-" not in measures.interval(figures, "x", ".0%")


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_nan_and_infinity_are_written_to_no_json_file(tmp_path):
    figures = {"a": math.nan, "b": math.inf, "c": numpy.float64("-inf"), "d": 1.5, "é NaN": "Infinity"}
    logs.Metrics(tmp_path).log(3, 1, **figures)
    row = strict((tmp_path / "metrics.jsonl").read_text())
    assert set(row) == {"step", "iteration", "time_s", "d", "é NaN"}
    figures["e"] = [math.nan, 2.0]
    kept = {"a": None, "b": None, "c": None, "d": 1.5, "é NaN": "Infinity", "e": [None, 2.0]}
    files.write_json(tmp_path / "a.json", {"versions": {"1": figures}, "rows": [figures]})
    assert strict((tmp_path / "a.json").read_text()) == {"versions": {"1": kept}, "rows": [kept]}
    files.write_jsonl(tmp_path / "a.jsonl", [figures])
    files.append_jsonl(tmp_path / "a.jsonl", [figures])
    assert [strict(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [kept, kept]



def test_pairs_of_one_prompt_in_separate_rows_are_still_one_cluster():
    rng, rankings, pairs = random.Random(5), [], []
    for _ in range(40):
        sign = 1 if rng.random() < 0.7 else -1
        ranking = row(*(sign * (3 - i) for i in range(4)))
        rankings.append(ranking)
        pairs += [pair(d, prompt=ranking["prompt"]) for d, *_ in measures.pairs_of([ranking])]
    of_rankings = measures.pair_metrics(rankings)
    of_pairs = {key: x for key, x in of_rankings.items() if not key.startswith("best_of_n")}
    assert of_pairs == pytest.approx(measures.pair_metrics(pairs)) and of_pairs != of_rankings
    alone = measures.pair_metrics([{**one, "prompt": number} for number, one in enumerate(pairs)])
    width = lambda figures, key: figures[f"{key}_high"] - figures[f"{key}_low"]  # noqa: E731
    for key in ("accuracy", "ece"):
        assert width(alone, key) < 0.6 * width(measures.pair_metrics(pairs), key)


# -- what the tiny world knows -------------------------------------------------------------------
# -- benchmarks of reward models -----------------------------------------------------------
BEST_OF_FOUR = [  # one chosen of four -> what it counts: alone at the top, beaten, one of two there, one of four
    ((3, 1, 2, 0), 1), ((1, 3, 0, 0), 0), ((2, 0, 2, 1), 1 / 2), ((0, 0, 0, 0), 1 / 4),
]  # fmt: skip


def ties_row(name, correct, incorrect):
    scored = [(0, x) for x in correct] + [(1, x) for x in incorrect]
    return {"id": name, "responses": [{"rank": rank, "score": score} for rank, score in scored]}


@pytest.mark.parametrize(
    "rows, score",
    [
        # gaps 3 and 2, spread 1: all is right, and the smaller gap is twice the spread
        ([("tied:1", [4, 5], [1, 0]), ("ref:1", [3], [1, 0])], 0.3 + 0.3 + 0.2 + 0.2 + 0.01 * math.tanh(1)),
        # gaps 3 and 0.5: a reference's gap that is less than the spread costs the harder margin alone
        ([("tied:1", [4, 5], [1]), ("ref:1", [1.5], [1])], 0.3 + 0.3 + 0.2 + 0.01 * math.tanh(-0.5)),
        # gap 0 is not right; of two references, one that belongs to no question counts as right or wrong
        ([("tied:1", [4, 5], [4]), ("ref:1", [3], [1]), ("ref:2", [0], [1])], 0.3 / 2 + 0.01 * math.tanh(-1)),
        # no spread: infinitely far apart, on the right side or the wrong one, or 0 of 0
        ([("tied:1", [4, 4], [1]), ("ref:1", [3], [1])], 1 + 0.01),
        ([("tied:1", [4, 4], [1]), ("ref:1", [0], [1])], 0.3 + 0.2 - 0.01),
        ([("tied:1", [4, 4], [4]), ("ref:1", [3], [1])], 0.3),
        # two questions: means over both
        ([("tied:1", [4, 5], [1]), ("ref:1", [3], [1]), ("tied:2", [1, 3], [2]), ("ref:2", [2], [1])],
         0.3 / 2 + 0.3 + 0.2 / 2 + 0.2 / 2 + 0.01 * (math.tanh(1) + math.tanh(-1.5)) / 2),
    ],
)  # fmt: skip
def test_reward_bench_2s_rule_for_ties_by_hand(rows, score):
    assert measures.ties_score([ties_row(*row) for row in rows]) == pytest.approx(score)


def test_the_ties_score_needs_reward_bench_2_rows_and_a_scorer_of_single_responses():
    tied, ref = ties_row("tied:1", [4, 5], [1]), ties_row("ref:1", [3], [1])
    compares = {**tied, "responses": [{"rank": 0}, {"rank": 1}], "differences": [1.0]}
    nameless = {"responses": tied["responses"]}
    for rows in ([tied], [tied, ties_row("ref:2", [3], [1])], [{**tied, "id": "12"}, ref], [nameless], [compares, ref]):
        assert math.isnan(measures.ties_score(rows))


@pytest.mark.parametrize("compares", [False, True])
def test_best_of_n_counts_rows_whose_best_score_is_correct_and_shares_of_ties(compares):
    """1.75 of four prompts; pairs do not count. With ties as half a win it would be 2, as wins 3."""
    rows = [row(*scores, ranks=[0, 1, 1, 1]) for scores, _ in BEST_OF_FOUR]
    if compares:
        for one in rows:
            one["differences"] = [d for d, *_ in measures.pairs_of([one])]
            for response in one["responses"]:
                del response["score"]
    shares = [measures.best_of_n_accuracy([one])["best_of_n_accuracy"] for one in rows]
    assert shares == [share for _, share in BEST_OF_FOUR]
    metrics = measures.pair_metrics([*rows, *([] if compares else [pair(-1.0), pair(-1.0)])])
    assert (metrics["best_of_n_accuracy"], metrics["best_of_n_accuracy_n"]) == (7 / 16, 4)
    assert "best_of_n_accuracy" not in measures.pair_metrics([pair(1.0), pair(2.0)])


@pytest.mark.parametrize(
    "scores, ranks, share",
    [
        ((1, 3, 2), [0, 0, 1], 1),  # of two chosen ones the second is best
        ((2, 1, 2), [0, 0, 1], 1 / 2),
        ((1, 2, 3), [0, 1, 2], 0),
        ((1, 3, 2), [0.0, 0.5, 1.2], 1),  # with --min-score-gap the second is not worse than the first
        ((1, 2, 3), [0.0, 0.5, 1.2], 0),
    ],
)
def test_a_response_is_chosen_if_no_other_is_labelled_better(scores, ranks, share):
    assert measures.best_of_n_accuracy([row(*scores, ranks=ranks)])["best_of_n_accuracy"] == share


def test_with_circular_preferences_the_best_response_is_the_one_whose_worst_pair_is_best():
    """a over b by 1, b over c by 2, c over a by 3: the worst pairs are -3, -1 and -2, so b is best."""
    circle = row(0, 0, 0)
    circle["differences"] = [1.0, -3.0, 2.0]  # of a and b, a and c, b and c
    for response in circle["responses"]:
        del response["score"]
    assert measures.best_of_n_accuracy([circle])["best_of_n_accuracy"] == 0
    circle["responses"][1]["rank"], circle["responses"][0]["rank"] = 0, 1  # b, a, c
    circle["differences"] = [-3.0, -1.0, 2.0]  # of a and c, b and a, b and c
    assert measures.best_of_n_accuracy([circle])["best_of_n_accuracy"] == 1


def test_known_metrics_by_hand():
    """Utilities agree with the labels of 2 of 3 pairs and tie in one: 2.5 / 3. The third response
    is the longest: lengths tie in one pair and are wrong in two."""
    more = {"gold": [1.0, 0.0, 0.5], "utility": [2.0, 1.0, 1.0], "tokens": [2, 2, 3]}
    figures = measures.known_metrics([row(3.0, 1.0, 2.0, **more)])
    assert figures["baseline/length_accuracy"] == pytest.approx(0.5 / 3)
    assert figures["eval/bayes_accuracy"] == pytest.approx(2.5 / 3)
    assert figures["gold/correlation"] == pytest.approx(1.0)
    baselines = {"baseline/length_accuracy": 0.5}
    assert measures.known_metrics([row(1.0, 2.0)]) == baselines
    unscored = row(0, 0, gold=[1.0, 0.0], utility=[0.0, 1.0])
    for response in unscored["responses"]:
        del response["score"]
    unscored["differences"] = [1.0]
    assert measures.known_metrics([unscored]) == {**baselines, "eval/bayes_accuracy": 0.0}


def test_correlation_equals_numpy_and_is_nan_of_a_constant():
    rng = random.Random(0)
    x = [rng.gauss(0, 1) for _ in range(50)]
    y = [0.5 * a + rng.gauss(0, 1) for a in x]
    assert measures.correlation(x, y) == pytest.approx(numpy.corrcoef(x, y)[0, 1])
    assert measures.correlation([1, 2, 4], [-2, -4, -8]) == pytest.approx(-1)
    assert measures.correlation([1, 2, 3], [1, 0, 1]) == pytest.approx(0)
    for constant, n in ((2.0, 2), (0.1, 3), (0.7, 7)):  # the mean of the last two rounds
        assert math.isnan(measures.correlation([constant] * n, [i * i for i in range(n)]))


# -- measures of samples -------------------------------------------------------------------------
def brute_force(scores):
    """The mean over prompts and all subsets of size N of the largest and of the median."""
    found = [], []
    for n in range(1, len(scores[0]) + 1):
        for values, measure in zip(found, (max, statistics.median)):
            of_each = [statistics.fmean(map(measure, itertools.combinations(row, n))) for row in scores]
            values.append(statistics.fmean(of_each))
    return found


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_best_of_n_is_the_mean_over_all_subsets_also_with_ties(k):
    rng = random.Random(k)
    for values in ([-1.5, 0.0, 2.0], [rng.gauss(0, 1) for _ in range(50)]):  # three values only: many ties
        scores = [[rng.choice(values) for _ in range(k)] for _ in range(4)]
        for got, want in zip(measures.best_of_n(torch.tensor(scores)), brute_force(scores), strict=True):
            assert got == pytest.approx(want, abs=1e-6)


def gain(before, after):
    rows = ([{"score": x} for x in scores] * 3 for scores in (before, after))
    figures = measures.gains(*rows, {"gain": "score"})
    return figures["gain"], figures["gain_low"], figures["gain_high"]


def test_gains_by_hand():
    """Differences 1, 0, 2, 3, thrice: mean 3/2, variance 15 / 11, so 1.96 sqrt(15 / 11 / 12) to each side."""
    before, after = [1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 5.0, 7.0]
    mean, low, high = gain(before, after)
    assert (mean, low, high) == pytest.approx((1.5, 0.8393, 2.1607), abs=1e-4)
    assert gain(after, before) == pytest.approx((-mean, -high, -low))
    assert gain([1.0, 5.0, 3.0, 2.0], [2.0, 6.0, 4.0, 3.0]) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError):
        measures.gains([{"score": 1.0}], [{"score": 1.0}] * 2, {"gain": "score"})


# -- two policies' responses ---------------------------------------------------------------
def test_a_game_is_won_beyond_the_margin_and_tied_at_it():
    ours, theirs = [1.0, 0.75, 0.5, 0.25, 0.0], [0.5] * 5  # floats hold these exactly
    assert measures.outcomes(ours, theirs, 0.25) == [1, 0.5, 0.5, 0.5, 0]
    assert measures.outcomes(ours, theirs, 0.2) == measures.outcomes(ours, theirs, 0.0) == [1, 1, 0.5, 0, 0]
    assert measures.outcomes(theirs, ours, 0.2) == [0, 0, 0.5, 1, 1]
    assert measures.outcomes(ours, theirs, 0.5) == [0.5] * 5
    assert measures.outcomes([1.1, 1.0], [1.0, 1.1], 0.1) == [0.5, 0.5]  # 1.1 - 1.0 is more than 0.1 in floats
    with pytest.raises(ValueError):
        measures.outcomes(ours, theirs[1:], 0.0)


def test_win_tie_and_lose_by_hand():
    """Differences 1, 0.1, -0.1, -0.2 and 0, twice: one beats a margin of 0.15, one falls below it. The mean
    is 0.16, the sample variance 2 (0.84^2 + 0.06^2 + 0.26^2 + 0.36^2 + 0.16^2) / 9 = 1.864 / 9. The win rate
    is 0.2 + 0.6 / 2; Wilson's interval of 5 of 10, from scipy."""
    scores = [(0.0, 1.0), (1.0, 1.1), (2.0, 1.9), (0.5, 0.3), (-1.0, -1.0)] * 2
    before, after = [[{"score": pair[i]} for pair in scores] for i in (0, 1)]
    got, half = measures.against(before, after, 0.15, "x/"), 1.96 * math.sqrt(1.864 / 90)
    shares = {"x/score_win": 0.2, "x/score_lose": 0.2, "x/score_tie": 0.6}
    ends = {"x/score_gain_low": 0.16 - half, "x/score_gain_high": 0.16 + half}
    ends |= {"x/score_win_rate": 0.5, "x/score_win_rate_low": 0.2366, "x/score_win_rate_high": 0.7634}
    known = {**shares, **ends, "x/score_gain": 0.16, "x/score_tie_margin": 0.15}
    assert got == pytest.approx(known, abs=2e-4)
    # Nine prompts are too few for an interval
    few = measures.against(before[:9], after[:9], 0.15)
    assert few["score_gain_n"] == 9 and not {"score_gain_low", "score_gain_high"} & set(few)
    assert measures.interval(few, "score_gain") == "+0.18 (n = 9)"
    got = measures.against([{"score": 0.0, "gold": 2.0}], [{"score": 0.25, "gold": 1.0}], 0.25)
    assert (got["score_tie"], got["gold_lose"], got["gold_gain"]) == (1, 1, -1)  # at the margin it is a tie
    assert (got["score_win_rate"], got["gold_win_rate"], got["score_win_rate_n"]) == (0.5, 0, 1)


@pytest.mark.parametrize("unit", [1.0, 1e-3])
def test_the_tie_margin_is_in_units_of_the_references_deviation(unit):
    """0.1 of a deviation of 1: 0.11 wins, 0.09 ties. If all scores are equal, the margin is 0."""
    scores = [(0.0, 0.11), (1.0, 1.09), (2.0, 2.11), (0.5, 0.59), (-1.0, -0.89)]
    before = [{"score": unit * x, "gold": 3.0} for x, _ in scores]
    after = [{"score": unit * x, "gold": 3.001} for _, x in scores]
    got = measures.against(before, after, None)
    assert (got["score_win"], got["score_tie"], got["gold_win"]) == (0.6, 0.4, 1)
    assert (got["score_tie_margin"], got["gold_tie_margin"]) == (pytest.approx(0.1 * unit), 0)
