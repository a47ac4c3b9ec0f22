"""Metrics of samples and of scorers, with their intervals. docs/use/runs.md defines every key."""

import math
import statistics

import torch


def with_interval(key: str, value: float, low: float, high: float, n: int) -> dict[str, float]:
    """Return a metric with its interval: {key, key_low, key_high}. With fewer than 10 items, too few for an
    interval, return {key, key_n}, where key_n is their number."""
    return {key: value, f"{key}_n": n} if n < 10 else {key: value, f"{key}_low": low, f"{key}_high": high}


def interval(metrics: dict[str, float], key: str, form: str = "+.2f") -> str:
    """Format a metric of with_interval for printing: '+0.12 [+0.05, +0.19]' or '+0.12 (n = 6)'."""
    if f"{key}_n" in metrics:
        return f"{metrics[key]:{form}} (n = {metrics[key + '_n']:.0f})"
    return f"{metrics[key]:{form}} [{metrics[key + '_low']:{form}}, {metrics[key + '_high']:{form}}]"


def wilson(share: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share of n independent items."""
    middle, half = (share + 1.92 / n) / (1 + 3.84 / n), 1.96 / (1 + 3.84 / n)
    half *= math.sqrt(share * (1 - share) / n + 0.96 / n**2)
    return max(0.0, middle - half), min(1.0, middle + half)  # rounding errors could give -0 or over 100 %


def resamples(n: int, n_bootstrap: int, generator):
    """Yield n_bootstrap bootstrap samples of n items, each as the number of times an item was drawn, (n,)."""
    for _ in range(n_bootstrap):
        yield torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n)


def percentiles(estimates: torch.Tensor) -> list:
    """Return the two ends of the 95 % interval of bootstrap estimates, (n_bootstrap, ...)."""
    return estimates.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0).tolist()


# A row is a response to a prompt: {"prompt", "response", "tokens", "score", in the tiny world "gold", ...}.
JUDGES = {"score": "the scorer", "gold": "the true reward"}  # column -> the judge whose score it holds


def means(rows: list[dict], columns: dict[str, str]) -> dict[str, float]:
    """Compute the mean of each of `columns`, {key: column}, that the rows have: {key: mean}."""
    columns = {key: column for key, column in columns.items() if rows and column in rows[0]}
    return {key: sum(row[column] for row in rows) / len(rows) for key, column in columns.items()}


def gains(before: list[dict], after: list[dict], columns: dict[str, str]) -> dict[str, float]:
    """Compute, like `means`, the mean paired difference of each column with its 95 % interval. before, after:
    responses of two policies to the same prompts."""
    metrics = {}
    for key, column in columns.items():
        if after and column in after[0]:
            metrics.update(change(key, [row[column] for row in before], [row[column] for row in after]))
    return metrics


def change(key: str, before: list[float], after: list[float]) -> dict[str, float]:
    """Compute the mean difference, after - before, of the same items, with its 95 % interval. Returns {} if a
    difference is not finite."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n = len(after)
    if not all(map(math.isfinite, differences)):
        return {}
    mean = statistics.fmean(differences)
    half = 1.96 * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return with_interval(key, mean, mean - half, mean + half, n)


def outcomes(scores: list[float], opponents: list[float], tie_margin: float) -> list[float]:
    """Decide each game: 1 for a win, 1/2 for a tie, 0 for a loss. A difference of exactly the margin is a
    tie."""
    least = tie_margin + 1e-9  # a difference that is rounded up must not become a win
    return [(1 + (a - b > least) - (a - b < -least)) / 2 for a, b in zip(scores, opponents, strict=True)]


def against(before, after, tie_margin: float | None, prefix="", pairwise=False) -> dict[str, float]:
    """Compare the responses of two policies to the same prompts, by `score` and, if it is known, by `gold`.

    Returns, for the second policy, the shares of prompts on which it wins, ties and loses (outcomes), the win
    rate, in which a tie is half a win, with Wilson's interval, the tie margin, and the gain.
    tie_margin: default 0.1 standard deviations of the first policy's scores; for a pairwise oracle 0.1."""
    metrics = {}
    for column in [column for column in JUDGES if column in after[0]]:
        key = f"{prefix}{column}"
        first = [row[column] for row in before]
        second = [row[column] for row in after]
        unit = 1.0 if pairwise and column == "score" else statistics.pstdev(first)
        margin = 0.1 * unit if tie_margin is None else tie_margin
        metrics[f"{key}_tie_margin"] = margin
        won = outcomes(second, first, margin)
        for name, result in (("win", 1), ("lose", 0), ("tie", 0.5)):
            metrics[f"{key}_{name}"] = won.count(result) / len(won)
        rate = sum(won) / len(won)
        metrics.update(with_interval(f"{key}_win_rate", rate, *wilson(rate, len(won)), len(won)))
        metrics.update(gains(before, after, {f"{key}_gain": column}))
    return metrics


def best_of_n(scores: torch.Tensor) -> tuple[list[float], list[float]]:
    """Compute the expected largest and median score among N of a prompt's K samples, for N = 1..K, mean over
    prompts (the curves of Llama 2, arXiv:2307.09288, figure 7). Returns two lists of K numbers.

    scores: (prompts, K). The estimates are unbiased and use all K samples, not only the first N. For the i-th
      smallest of K, P(it is the largest of N) = C(i-1, N-1) / C(K, N) and P(it is the j-th smallest of N) =
      C(i-1, j-1) C(K-i, N-j) / C(K, N). The median of an even N is the mean of j = N/2 and N/2 + 1."""
    k = scores.shape[1]
    ranked = scores.double().sort(1).values.mean(0).tolist()  # estimates are linear: average prompts first

    def expected(j, n):  # expected value of the j-th smallest of n
        ways = [math.comb(i, j - 1) * math.comb(k - 1 - i, n - j) for i in range(k)]
        return sum(way / math.comb(k, n) * score for way, score in zip(ways, ranked))

    sizes = range(1, k + 1)
    medians = [(expected((n + 1) // 2, n) + expected(n // 2 + 1, n)) / 2 for n in sizes]
    return [expected(n, n) for n in sizes], medians


def correlation(x, y) -> float:
    """Compute Pearson's correlation; NaN if x or y is constant."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()


# A row is {"prompt", "source", "category", "responses": [{"text", "tokens", "rank", "score"}, ...]}. For a
# scorer that compares two responses it has "differences", one for each pair, instead of scores.
def pairs_of(rows) -> list[tuple]:
    """Return (score of better - score of worse, row number, better, worse response) of each labelled pair."""
    pairs = []
    for number, row in enumerate(rows):
        responses = row["responses"]
        sides = [(a, b) for a in responses for b in responses if a["rank"] + 1 <= b["rank"]]
        differences = row.get("differences") or [a["score"] - b["score"] for a, b in sides]
        pairs += [(d, number, a, b) for d, (a, b) in zip(differences, sides)]
    return pairs


def label_of(row) -> float:
    """Return the probability of the more probable side of a row's pairs: 1 without a soft label."""
    p = row.get("preference", 1.0)
    return max(p, 1 - p)


def pairs_by(key, rows) -> list[tuple]:
    """Return pairs_of the rows with the value of `key` as each response's score."""
    scored = lambda row: {"responses": [{**r, "score": r[key]} for r in row["responses"]]}
    return pairs_of(map(scored, rows))


def parts_of(rows) -> dict[tuple[str, str], list[dict]]:
    """Split rows by data set and by category: {("data set" or "category", name): rows}. A kind with only one
    name is left out."""
    rows_of_part = {}
    for kind, column in (("data set", "source"), ("category", "category")):
        by_name = {}
        for row in rows:
            by_name.setdefault(str(row[column]), []).append(row)
        for name in sorted(by_name) if len(by_name) > 1 else ():
            rows_of_part[kind, name] = by_name[name]
    return rows_of_part


def score_metrics(rows) -> dict[str, float]:
    """Compute mean and standard deviation of the responses' scores; {} for a scorer that compares."""
    scores = [r["score"] for row in rows for r in row["responses"] if "score" in r]
    return {"mean": statistics.fmean(scores), "deviation": statistics.pstdev(scores)} if scores else {}


def accuracy(differences) -> float:
    """Compute the share of differences above 0, where a tie counts 1/2; NaN without differences."""
    right = [float(d > 0) + float(d == 0) / 2 for d in differences]
    return sum(right) / len(right) if right else math.nan


SUBSETS = ("Factuality", "Precise IF", "Math", "Safety", "Focus", "Ties")  # of RewardBench 2


def reward_bench_2(rows) -> dict[str, float]:
    """Compute RewardBench 2's scores (arXiv:2506.01937): {subset: best_of_n_accuracy, or ties_score for Ties}
    and, if all six subsets have one, their mean, "score". Only this benchmark has Ties; {} without them."""
    of_subset = lambda name: [row for row in rows if row["category"] == name]
    if not of_subset("Ties"):
        return {}
    best_of_n = lambda name: best_of_n_accuracy(of_subset(name)).get("best_of_n_accuracy", math.nan)
    scores = {name: best_of_n(name) for name in SUBSETS[:-1]} | {"Ties": ties_score(of_subset("Ties"))}
    scores = {name: x for name, x in scores.items() if not math.isnan(x)}
    return {**scores, "score": statistics.fmean(scores.values())} if len(scores) == len(SUBSETS) else scores


def ties_score(rows) -> float:
    """Score RewardBench 2's questions with several correct answers (id "tied:N") together with their variants
    that have one (id "ref:N"). Returns NaN for rows with other ids, and for a scorer that compares.

        0.3 P(gap of tied > 0) + 0.3 P(gap of ref > 0) + 0.2 P(gap of tied > spread)
        + 0.2 P(g > spread) + 0.01 mean tanh(g / spread - 1), 0 where that is 0 / 0

    gap: the lowest score of a correct answer minus the highest of an incorrect one. g: the smaller of the two
    gaps of N. spread: the highest score of a correct answer minus the lowest. The weights and the last term
    are those of the authors' code (allenai/reward-bench)."""
    gaps = {"tied": {}, "ref": {}}
    spreads = {}
    for row in rows:
        kind, _, number = row.get("id", "").partition(":")
        if kind not in gaps or "score" not in row["responses"][0]:
            return math.nan
        correct = [r["score"] for r in row["responses"] if r["rank"] < 1]
        incorrect = [r["score"] for r in row["responses"] if r["rank"] >= 1]
        gaps[kind][number] = min(correct) - max(incorrect)
        spreads[kind, number] = max(correct) - min(correct)
    paired = [n for n in gaps["tied"] if n in gaps["ref"]]
    if not paired:
        return math.nan
    columns = [(gaps["tied"][n], gaps["ref"][n], spreads["tied", n]) for n in paired]
    tied, ref, spread = torch.tensor(columns, dtype=torch.float64).T
    g = tied.minimum(ref)
    margin = (g / spread - 1).tanh().nan_to_num(0).mean()
    right = lambda kind: statistics.fmean(gap > 0 for gap in gaps[kind].values())
    ahead = (tied > spread).double().mean() + (g > spread).double().mean()
    return 0.3 * right("tied") + 0.3 * right("ref") + (0.2 * ahead + 0.01 * margin).item()


def best_of_n_accuracy(rows) -> dict[str, float]:
    """Compute how often the response with the best score is also labelled best, over rows with more than two
    responses, with Wilson's interval; {} if there are no such rows.

    If several responses share the best score, a row counts the share of them that is labelled best
    (RewardBench 2, arXiv:2506.01937). With a scorer that compares, a response's score is its log odds in the
    labelled pair that goes worst for it."""
    shares = []
    for row in [row for row in rows if len(row["responses"]) > 2]:
        responses = row["responses"]
        worst = dict.fromkeys(map(id, responses), math.inf)
        for d, _, a, b in pairs_of([row]):
            worst[id(a)] = min(worst[id(a)], d)
            worst[id(b)] = min(worst[id(b)], -d)
        scores = [r.get("score", worst[id(r)]) for r in responses]
        least = min(r["rank"] for r in responses)
        best = [r["rank"] < least + 1 for r, score in zip(responses, scores) if score == max(scores)]
        shares.append(sum(best) / len(best))
    n = len(shares)
    share = sum(shares) / max(1, n)
    return with_interval("best_of_n_accuracy", share, *wilson(share, n), n) if n else {}


def pair_metrics(rows, n_bootstrap=1000, n_bins=10) -> dict[str, float]:
    """Measure how well score differences predict labels.

    accuracy; nll and brier of sigmoid(difference); ece, the expected calibration error; and, for rows with
    more than two responses, best_of_n_accuracy. ece_floor is the mean ECE of a perfectly calibrated model
    with the same confidences, which is due to the finite sample only.

    The pairs of one prompt are correlated. The accuracy's interval is therefore Wilson's for an effective
    number of independent pairs, estimated from the variation between prompts, and the ECE's is a bootstrap
    over prompts."""
    pairs = pairs_of(rows)
    if not pairs:
        return {"pairs": 0}
    difference = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64)
    if difference.isnan().any():
        return {"pairs": len(pairs), "nll": math.nan}
    prompts = [repr(rows[number]["prompt"]) for _, number, _, _ in pairs]
    number_of = {}
    prompt = torch.tensor([number_of.setdefault(prompt, len(number_of)) for prompt in prompts])
    label = torch.tensor([label_of(rows[number]) for _, number, _, _ in pairs], dtype=torch.float64)
    correct = (difference.sign() + 1) / 2
    n = len(pairs)
    probability, confidence = difference.sigmoid(), difference.abs().sigmoid()
    bins = ((confidence - 0.5) * 2 * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.zeros(len(number_of), n_bins).double()  # sum of correct - confidence per prompt and bin
    as_labelled = label * correct + (1 - label) * (1 - correct)
    gaps.index_put_((prompt, bins), as_labelled - confidence, accumulate=True)
    sizes = torch.bincount(prompt)
    generator = torch.Generator().manual_seed(0)
    resampled = []
    floor = []
    for times in resamples(len(number_of), n_bootstrap, generator):
        resampled.append((times.double() @ gaps).abs().sum() / (times @ sizes))
    low, high = percentiles(torch.stack(resampled))
    for _ in range(200):
        drawn = (torch.rand(n, generator=generator, dtype=torch.float64) < confidence).double()
        gap = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, bins, drawn - confidence)
        floor.append(gap.abs().sum() / n)
    right = correct.mean().item()
    # Effective number of pairs: from all_alike, if the pairs of a prompt always agree, to n, if independent
    all_alike = n**2 / (sizes**2).sum().item()
    spread = (torch.bincount(prompt, correct) - right * sizes).square().sum().item()  # between prompts
    n_independent = max(all_alike, min(n, n**2 * right * (1 - right) / (spread + 1e-9)))
    metrics = {
        "pairs": n,
        **with_interval("accuracy", right, *wilson(right, n_independent), round(all_alike)),
        "nll": torch.nn.functional.binary_cross_entropy_with_logits(difference, label),
        "brier": (label * (1 - probability) ** 2 + (1 - label) * probability**2).mean(),
        **with_interval("ece", gaps.sum(0).abs().sum() / n, low, high, len(number_of)),
        "ece_floor": torch.stack(floor).mean(),
        **best_of_n_accuracy(rows),
    }
    return {key: float(value) for key, value in metrics.items()}


def known_metrics(rows) -> dict[str, float]:
    """Compute the accuracy of length as the score, which a reward model must beat, and two metrics that are
    known only in the tiny world.

    baseline/length_accuracy: the score is the number of tokens.
    eval/bayes_accuracy: an annotator without noise on the same pairs (tiny world).
    gold/correlation: correlation of the scores with the true reward over all responses (tiny world)."""
    responses = [r for row in rows for r in row["responses"]]
    accuracy_of = lambda key: accuracy([d for d, *_ in pairs_by(key, rows)])
    metrics = {"baseline/length_accuracy": accuracy_of("tokens")}
    if all("utility" in r for r in responses):
        metrics["eval/bayes_accuracy"] = accuracy_of("utility")
    if all("gold" in r and "score" in r for r in responses):
        gold = [r["gold"] for r in responses]
        metrics["gold/correlation"] = correlation([r["score"] for r in responses], gold)
    return metrics
