"""Measures of samples and scorers, with intervals. docs/use/runs.md defines every key by a formula."""

import math
import statistics

import torch

from common.data import message_columns
from common.scoring import texts


def with_interval(key: str, value: float, low: float, high: float, n: int) -> dict[str, float]:
    """{key, key_low, key_high}; of fewer than 10 items, which are no evidence, {key, key_n}, their number."""
    return {key: value, f"{key}_n": n} if n < 10 else {key: value, f"{key}_low": low, f"{key}_high": high}


def interval(metrics: dict[str, float], key: str, form: str = "+.2f") -> str:
    """What with_interval gave, for people: '+0.12 [+0.05, +0.19]' or '+0.12 (n = 6)'."""
    if f"{key}_n" in metrics:
        return f"{metrics[key]:{form}} (n = {metrics[key + '_n']:.0f})"
    return f"{metrics[key]:{form}} [{metrics[key + '_low']:{form}}, {metrics[key + '_high']:{form}}]"


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n independent items."""
    middle, half = (share + 1.92 / n) / (1 + 3.84 / n), 1.96 / (1 + 3.84 / n)
    half *= math.sqrt(share * (1 - share) / n + 0.96 / n**2)
    return max(0.0, middle - half), min(1.0, middle + half)  # rounding would make them -0 and over 100 %


def resamples(n: int, n_bootstrap: int, generator):
    """Of each bootstrap sample of n items: how often each was drawn, (n,)."""
    for _ in range(n_bootstrap):
        yield torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n)


def percentiles(estimates: torch.Tensor) -> list:
    """The ends of the 95 % interval of bootstrap estimates, (n_bootstrap, ...)."""
    return estimates.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0).tolist()


# A row is a response to a prompt: {"prompt", "response", "tokens", "score", on the tiny world "gold", ...}.
JUDGES = {"score": "the scorer", "gold": "the true reward"}  # column -> who says so


def means(rows: list[dict], columns: dict[str, str]) -> dict[str, float]:
    """{key: mean of the column over the rows} of {key: column}, for the columns that the rows have."""
    columns = {key: column for key, column in columns.items() if rows and column in rows[0]}
    return {key: sum(row[column] for row in rows) / len(rows) for key, column in columns.items()}


def gains(before: list[dict], after: list[dict], columns: dict[str, str]) -> dict[str, float]:
    """As means: of two policies' responses to the same prompts the mean difference and its 95 % interval."""
    metrics = {}
    for key, column in columns.items():
        if after and column in after[0]:
            first = [row[column] for row in before]
            metrics.update(change(key, first, [row[column] for row in after]))
    return metrics


def change(key: str, before: list[float], after: list[float]) -> dict[str, float]:
    """{key: mean difference of the same items before and after} and its 95 % interval; {} where one of them
    is not finite."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    n = len(after)
    if not all(map(math.isfinite, differences)):
        return {}
    mean = statistics.fmean(differences)
    half = 1.96 * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return with_interval(key, mean, mean - half, mean + half, n)


def outcomes(scores: list[float], opponents: list[float], tie_margin: float) -> list[float]:
    """Each game: 1 a win, 1/2 a tie, 0 a defeat; a difference of the margin ties, however rounded."""
    least = tie_margin + 1e-9
    return [(1 + (a - b > least) - (a - b < -least)) / 2 for a, b in zip(scores, opponents, strict=True)]


def against(before, after, tie_margin: float | None, prefix="", pairwise=False) -> dict[str, float]:
    """Responses of two policies to the same prompts: for `score`, and for `gold` where it is known, the
    shares of prompts on which the second one wins, ties and loses (outcomes), the win rate, in which a tie
    is half a win, with Wilson's interval, the margin, and the gain.
    tie_margin None: a tenth of the first one's standard deviation, 0.1 of a pairwise oracle's scores."""
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
    """Expected largest and median score among N of the K samples of a prompt, N = 1..K, mean over prompts.

    scores: (prompts, K). Unbiased, from the order statistics of all K and not from the first N: with the i-th
      smallest of K, P(it is the largest of N) = C(i-1, N-1) / C(K, N) and P(it is the j-th smallest of N) =
      C(i-1, j-1) C(K-i, N-j) / C(K, N); the median of an even N averages j = N/2 and N/2 + 1
      (Llama 2, arXiv:2307.09288, figure 7)."""
    k = scores.shape[1]
    ranked = scores.double().sort(1).values.mean(0).tolist()  # linear in these, so the mean comes first

    def expected(j, n):  # of the j-th smallest of n
        ways = [math.comb(i, j - 1) * math.comb(k - 1 - i, n - j) for i in range(k)]
        return sum(way / math.comb(k, n) * score for way, score in zip(ways, ranked))

    sizes = range(1, k + 1)
    medians = [(expected((n + 1) // 2, n) + expected(n // 2 + 1, n)) / 2 for n in sizes]
    return [expected(n, n) for n in sizes], medians


def correlation(x, y) -> float:
    """Pearson's; NaN where one of them does not vary."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    return torch.corrcoef(torch.tensor([x, y], dtype=torch.float64))[0, 1].item()


# A row is {"prompt", "source", "category", "responses": [{"text", "tokens", "rank", "score"}, ...]}, and for
# a model that sees two responses at once "differences", one for each pair, in place of the scores.
def pairs_of(rows) -> list[tuple]:
    """(score difference better - worse, row number, better, worse response) of every labelled pair."""
    pairs = []
    for number, row in enumerate(rows):
        responses = row["responses"]
        sides = [(a, b) for a in responses for b in responses if a["rank"] + 1 <= b["rank"]]
        differences = row.get("differences") or [a["score"] - b["score"] for a, b in sides]
        pairs += [(d, number, a, b) for d, (a, b) in zip(differences, sides)]
    return pairs


def pairs_by(score, rows) -> list[tuple]:
    """pairs_of the rows, with score(row, response), computed once for each response, instead of theirs."""
    scored = lambda row: {"responses": [{**r, "score": score(row, r)} for r in row["responses"]]}
    return pairs_of(map(scored, rows))


def parts_of(rows) -> dict[tuple[str, str], list[dict]]:
    """{("data set" or "category", name): its rows}, where there are several of the kind."""
    rows_of_part = {}
    for kind, column in (("data set", "source"), ("category", "category")):
        by_name = {}
        for row in rows:
            by_name.setdefault(str(row[column]), []).append(row)
        for name in sorted(by_name) if len(by_name) > 1 else ():
            rows_of_part[kind, name] = by_name[name]
    return rows_of_part


def score_metrics(rows) -> dict[str, float]:
    """Mean and standard deviation of the responses' scores; nothing of a scorer that compares."""
    scores = [r["score"] for row in rows for r in row["responses"] if "score" in r]
    return {"mean": statistics.fmean(scores), "deviation": statistics.pstdev(scores)} if scores else {}


def accuracy(differences) -> float:
    """Share of differences above 0, ties counting 1/2; NaN of none."""
    right = [float(d > 0) + float(d == 0) / 2 for d in differences]
    return sum(right) / len(right) if right else math.nan


SECTIONS = {  # of RewardBench (arXiv:2403.13787): subsets, in groups that count alike
    "Chat": ["alpacaeval-easy alpacaeval-length alpacaeval-hard mt-bench-easy mt-bench-med"],
    "Chat Hard": ["mt-bench-hard llmbar-natural llmbar-adver-neighbor llmbar-adver-GPTInst "
                  "llmbar-adver-GPTOut llmbar-adver-manual"],
    "Safety": ["refusals-dangerous refusals-offensive "
               "xstest-should-refuse xstest-should-respond donotanswer"],
    "Reasoning": ["math-prm", "hep-cpp hep-go hep-java hep-js hep-python hep-rust"],
}  # fmt: skip


def reward_bench(rows) -> dict[str, float]:
    """Score RewardBench's rows: {section: accuracy over its pairs, of Reasoning the mean of that of math and
    that of code} of each section all of whose subsets are there, and of all four their mean, "score"."""
    subsets = {row["category"] for row in rows}
    scores = {}
    for section, groups in SECTIONS.items():
        if not subsets.issuperset(" ".join(groups).split()):
            continue
        shares = []
        for names in map(str.split, groups):
            pairs = pairs_of([row for row in rows if row["category"] in names])
            shares.append(accuracy([d for d, *_ in pairs]))
        scores[section] = statistics.fmean(shares)
    return {**scores, "score": statistics.fmean(scores.values())} if len(scores) == len(SECTIONS) else scores


def best_of_n_accuracy(rows) -> dict[str, float]:
    """Share of the rows with more than two responses whose best-scored response is one that none is labelled
    better than, with Wilson's interval; nothing where there are no such rows. Of several best-scored ones the
    share counts that is (RewardBench 2, arXiv:2506.01937). A scorer that compares gives a response the score
    of the labelled pair that goes worst for it."""
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
    """How well score differences predict labels: accuracy, nll and brier of sigmoid(difference), and ece, the
    expected calibration error. A prompt's pairs hang together: the accuracy's interval is that of so many
    independent pairs as vary as much over prompts, the ECE's a bootstrap over prompts. The floor is the mean
    ECE of a perfectly calibrated model with these confidences: what sampling alone gives. Of rows with more
    than two responses best_of_n_accuracy, too."""
    pairs = pairs_of(rows)
    if not pairs:
        return {"pairs": 0}
    difference = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64)
    if difference.isnan().any():
        return {"pairs": len(pairs), "nll": math.nan}
    prompts = [repr(rows[number]["prompt"]) for _, number, _, _ in pairs]
    number_of = {}
    prompt = torch.tensor([number_of.setdefault(prompt, len(number_of)) for prompt in prompts])
    soft = [rows[number].get("preference", 1.0) for _, number, _, _ in pairs]
    label = torch.tensor([max(p, 1 - p) for p in soft], dtype=torch.float64)  # P(the better one is better)
    correct = (difference.sign() + 1) / 2
    n = len(pairs)
    probability, confidence = difference.sigmoid(), difference.abs().sigmoid()
    bins = ((confidence - 0.5) * 2 * n_bins).long().clamp(max=n_bins - 1)
    gaps = torch.zeros(len(number_of), n_bins).double()  # of each prompt and bin: of correct - confidence
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
    all_alike = n**2 / (sizes**2).sum().item()  # a prompt's pairs as one
    spread = (torch.bincount(prompt, correct) - right * sizes).square().sum().item()  # from prompt to prompt
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
    """Accuracies of simple scores, which a model must beat: baseline/length_accuracy, of length;
    baseline/copying_accuracy, of texts.copied; of rows with a `reference` baseline/rouge_l_accuracy, of
    texts.rouge_l, without the pairs of which one response has the reference's very words: its ROUGE-L is 1,
    whatever it says. Of what only the tiny world knows eval/bayes_accuracy, of a labeler without noise on the
    same pairs, and gold/correlation, of the scores with the true reward over all responses."""
    responses = [r for row in rows for r in row["responses"]]
    copied = lambda row, r: texts.copied(r["text"], message_columns.transcript(row["prompt"]))
    rouge_l = lambda row, r: texts.rouge_l(r["text"], row["reference"])
    accuracy_of = lambda score: accuracy([d for d, *_ in pairs_by(score, rows)])
    metrics = {"baseline/length_accuracy": accuracy_of(lambda row, r: r["tokens"])}
    metrics["baseline/copying_accuracy"] = accuracy_of(copied)
    referenced = pairs_by(rouge_l, [row for row in rows if row.get("reference")])
    if differences := [d for d, _, a, b in referenced if max(a["score"], b["score"]) < 1]:
        metrics["baseline/rouge_l_accuracy"] = accuracy(differences)
    if all("utility" in r for r in responses):
        metrics["eval/bayes_accuracy"] = accuracy_of(lambda row, r: r["utility"])
    if all("gold" in r and "score" in r for r in responses):
        gold = [r["gold"] for r in responses]
        metrics["gold/correlation"] = correlation([r["score"] for r in responses], gold)
    return metrics
