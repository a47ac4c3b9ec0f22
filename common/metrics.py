"""Files of rows, what is printed, plots, and measures. Every key is defined by a formula in docs/runs.md."""

import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from common import dist


class Metrics:
    """Appends one JSON object a logged step to `folder`/metrics.jsonl, on rank 0; the other ranks' calls do
    nothing.

    keep_rows: when a run resumes, how many rows were there at its checkpoint (`n_rows` then). Later ones,
      written between the checkpoint and the crash, are cut, since they will be written again; the clock goes
      on from the last one kept."""

    def __init__(self, folder, keep_rows: int | None = None):
        self.path, self.n_rows, before = Path(folder) / "metrics.jsonl", keep_rows or 0, 0.0
        if keep_rows is not None and dist.is_main():
            kept = read_jsonl(self.path)[:keep_rows]
            write_jsonl(self.path, kept)
            before = kept[-1]["time_s"] if kept else 0.0
        self.start = time.time() - before

    def log(self, step: int, iteration: int, **values):
        self.n_rows += 1
        if dist.is_main():
            seconds = round(time.time() - self.start, 3)
            row = {"step": step, "iteration": iteration, "time_s": seconds, **values}
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")


def read_jsonl(path) -> list[dict]:
    """The rows of a .jsonl file that were written whole: a last line that a crash cut short is left out. No
    file: no rows."""
    rows = []
    for line in Path(path).read_text("utf-8", "replace").split("\n") if Path(path).exists() else []:
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def write_jsonl(path, rows: list[dict]):
    """Write rows to `path`, whole or not at all."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    os.replace(temporary, path)


def append_jsonl(path, rows: list[dict]):
    """Append rows to `path`, on the disk when this returns."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())


def read_json(path):
    """The content of a .json file; {} if there is none, or none that can be read."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}


def write_json(path, value):
    """Write `value` to `path` so that it is there whole or not at all."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


# -- what is printed -------------------------------------------------------------------------------
def progress(total: int, start: int, name: str, rows=None, lines: int = 20):
    """On rank 0 a tqdm bar over `total` steps or `rows`, which it then iterates over; elsewhere a silent one.
    Where stderr is no terminal, plain lines in its place: about `lines` of them, and one at least a minute.
    lines=0: what is done within a minute leaves no trace. Show at most three figures with `set_postfix`."""
    if dist.is_main() and not sys.stderr.isatty():
        return Lines(total, start, name, rows, lines)
    unit, silent = "step" if lines else "row", not dist.is_main()
    options = {"unit": unit, "leave": lines > 0, "disable": silent, "dynamic_ncols": True}
    return tqdm(rows, total=total, initial=start, desc=name, **options)


class Lines:
    """A tqdm bar for log files."""

    def __init__(self, total, start, name, rows, lines):
        self.total, self.n, self.name, self.rows, self.figures = total, start, name, rows, {}
        self.every = max(1, math.ceil(total / lines)) if lines else math.inf
        self.begun = self.last = time.time()

    def update(self, n=1):
        before, self.n, now = self.n, self.n + n, time.time()
        full = self.every < math.inf and (self.n // self.every > before // self.every or self.n == self.total)
        if full or now - self.last >= 60:
            self.last = now
            figures = "".join(f", {key} {value}" for key, value in self.figures.items())
            seconds = f"{now - self.begun:.0f} s"
            print(
                f"{self.name}: {self.n:,} of {self.total:,} ({seconds}){figures}", file=sys.stderr, flush=True
            )

    def set_postfix(self, figures=(), refresh=True, **more):
        self.figures = {**dict(figures), **more}

    def __iter__(self):
        for row in self.rows:
            yield row
            self.update()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        pass


def print_results(before: dict, after: dict, shown, samples: list[dict]):
    """Three samples, and the figures `shown` before -> after: what a person wants to read, the rest is in the
    run's summary.json."""
    for sample in [sample for sample in samples if "response" in sample][-3:]:
        gold = f"  gold {sample['gold']:.1f} of {sample['perfect']:.1f}" if "gold" in sample else ""
        print(f"  {sample['prompt'][-1]['content'][:60]!r} -> {sample['response'][:80]!r}{gold}")
    for key in [key for key in shown if key in after]:
        first = f"{before[key]:.4g} -> " if key in before else ""
        print(f"{key}: {first}{after[key]:.4g}")


def say_if_worse(before: dict, after: dict):
    """One line for each held-out figure that ended worse than it began."""
    for key, better in (("eval/nll", -1), ("pairs/loss", -1), ("eval/score", 1)):
        if key in before and key in after and better * (after[key] - before[key]) < 0:
            change = f"{before[key]:.8g} -> {after[key]:.8g}"
            print(f"held-out {key} ended worse than it began: {change}; try a lower --lr or fewer steps")


def print_table(rows: list[dict]):
    """Rows of the same keys as a table, on rank 0."""
    if not rows or not dist.is_main():
        return
    cells = [[f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    cells = [list(rows[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


LABELS = {  # what pictures call the keys of metrics.jsonl
    "loss/nll": "training loss (nats)",
    "loss/reward": "training loss (nats)",
    "loss/advantage": "training loss (nats)",
    "loss/dpo": "training loss (nats)",
    "loss/value": "value loss (half the squared error)",
    "eval/nll": "held-out loss (nats)",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm before clipping",
    "train/accuracy": "training pairs (share ranked as labelled)",
    "eval/accuracy": "held-out pairs (share ranked as labelled)",
    "pairs/accuracy": "held-out pairs (share ranked as labelled)",
    "reward/score": "score of rollouts",
    "reward/gold": "true reward of rollouts",
    "eval/score": "score of held-out responses",
    "gold/score": "true reward of held-out responses",
    "reward/chosen": "chosen (beta times nats)",
    "reward/rejected": "rejected (beta times nats)",
    "kl/per_response": "KL of rollouts (nats)",
    "eval/kl": "KL of held-out responses (nats)",
    "policy/entropy": "entropy (nats per token)",
    "value/explained_variance": "explained variance (share)",
    "pool/score": "mean score of samples",
    "pool/best": "best score of a prompt's samples",
    "pool/worst": "worst score of a prompt's samples",
    "sweep/max": "expected best score of a prompt's samples",
    "sample/length": "held-out responses (tokens)",
    "pairs/chosen_length": "chosen (tokens)",
    "pairs/rejected_length": "rejected (tokens)",
}


def figure(panels=1, size=(4.8, 3.2)):
    """A figure of `panels` axes side by side, each of `size` inches, and these axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # a category may hold a $
    drawing = Figure(figsize=(size[0] * panels, size[1]), dpi=90, layout="constrained")
    return drawing, drawing.subplots(1, panels, squeeze=False)[0]


def save(drawing, path):
    """Write a figure; below each of its axes stands a legend, where it covers no curve, and the figure grows
    by it."""
    most = 0
    for axis in drawing.axes:
        n = len(axis.get_legend_handles_labels()[1])
        columns = 2 if n > 4 else 1
        if n:  # 5: the room that ticks and their label take, in font sizes
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "borderaxespad": 5}
            axis.legend(fontsize=8, ncols=columns, **place)
        most = max(most, math.ceil(n / columns))
    drawing.set_figheight(drawing.get_figheight() + 0.18 * most)
    drawing.savefig(path)
    return drawing


def whole_ticks(axis):
    """Ticks of steps, tokens and samples: whole numbers only."""
    axis.xaxis.get_major_locator().set_params(integer=True)


def category_ticks(axis, names):
    """Categories from top to bottom, where long names have room."""
    axis.set_yticks(range(len(names)), [name[:24] for name in names], fontsize=8)
    axis.invert_yaxis()


def plot_metrics(folder, panels: dict[str, list[str]], name: str = "metrics.png", x: str = "step"):
    """Draw `folder`/`name` from metrics.jsonl: one panel for each {title: [metric keys]}, against `x`, the
    step or the iteration."""
    rows = read_jsonl(Path(folder) / "metrics.jsonl")
    drawing, axes = figure(len(panels), (4.2, 2.8))
    for axis, (title, keys) in zip(axes, panels.items()):
        for key in keys:
            points = [(row[x], row[key]) for row in rows if key in row]
            marker = "o" if len(points) < 10 else None
            if points:
                axis.plot(*zip(*points), marker=marker, markersize=3, label=LABELS.get(key, key))
        axis.set(title=title, xlabel=x)
        whole_ticks(axis)
        axis.grid(alpha=0.3)
    return save(drawing, Path(folder) / name)


def plot_frontier(folder, x: str, ys: dict[str, str], name: str = "frontier.png"):
    """Draw `folder`/name from metrics.jsonl: the metrics `ys` {label: key} against the metric `x`, in the
    order in which they were logged: a scorer and the true reward against the KL show over-optimisation."""
    rows = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if x in row]
    if not rows:
        return None
    drawing, (axis,) = figure()
    for label, key in ys.items():
        points = [(row[x], row[key]) for row in rows if key in row]
        if points:
            axis.plot(*zip(*points), "o-", markersize=3, label=label)
    axis.set(xlabel=LABELS.get(x, x), ylabel="mean over held-out prompts", title="reward against the KL")
    axis.grid(alpha=0.3)
    return save(drawing, Path(folder) / name)


def plot_lengths(folder, policies: dict[str, list[dict]] | None = None):
    """Draw `folder`/length.png: the score against the tokens of every held-out response of some policies
    {name: rows with `tokens` and `score`}; None: of the first and the last version in samples.jsonl."""
    if policies is None:
        versions = samples_by(folder, "version")
        ends = dict.fromkeys([*list(versions)[:1], *list(versions)[-1:]])
        policies = {f"version {version}": versions[version] for version in ends}
    if not policies:
        return None
    drawing, (axis,) = figure()
    for shift, (name, rows) in enumerate(policies.items()):
        x, y = ([row[key] for row in rows] for key in ("tokens", "score"))
        beside = [tokens + 0.25 * shift for tokens in x]  # else a policy hides the one before
        axis.scatter(beside, y, s=6, alpha=0.4, label=f"{name}: correlation {correlation(x, y):.2f}")
    axis.set(xlabel="tokens", ylabel="score", title="held-out responses")
    whole_ticks(axis)
    axis.grid(alpha=0.3)
    return save(drawing, Path(folder) / "length.png")


def samples_by(folder, column: str) -> dict[str, list[dict]]:
    """The rows of `folder`/samples.jsonl, by what a column says."""
    groups = {}
    for row in read_jsonl(Path(folder) / "samples.jsonl"):
        groups.setdefault(row.get(column), []).append(row)
    return groups


def plot_categories(folder, policies: dict[str, list[dict]] | None = None):
    """Draw `folder`/categories.png: the mean true reward (where it is known, else the score) of the held-out
    responses of some policies, by default those before and after training, by category. Rows without
    categories: nothing is drawn."""
    policies = samples_by(folder, "when") if policies is None else policies
    first = next(iter(policies.values()), [])
    key = "gold" if first and "gold" in first[0] else "score"
    names = sorted({row["category"] for row in first} - {None})
    if len(names) < 2:
        return None
    drawing, (axis,) = figure(size=(4.8, 1 + 0.3 * len(names)))
    width = 0.8 / len(policies)
    for number, (policy, rows) in enumerate(policies.items()):
        mine = [[row[key] for row in rows if row["category"] == name] for name in names]
        y = [i + (number - (len(policies) - 1) / 2) * width for i in range(len(names))]
        axis.barh(y, [statistics.fmean(values) for values in mine], width, label=policy)
    category_ticks(axis, names)
    axis.axvline(0, color="black", linewidth=1)
    title = "true reward" if key == "gold" else "score"
    axis.set(title=f"{title} by category", xlabel="mean of held-out responses")
    return save(drawing, Path(folder) / "categories.png")


# -- measures of samples ---------------------------------------------------------------------------
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


def best_of_n_kl(n: int) -> float:
    """Upper bound (nats) of KL(best of n samples || the policy): log n - (n - 1) / n."""
    return math.log(n) - (n - 1) / n


def paired(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """Mean difference after - before on the same prompts, and its 95 % interval (normal; of one prompt,
    infinite)."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean, n = statistics.fmean(differences), len(differences)
    half = 1.96 * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.inf
    return mean, mean - half, mean + half


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n independent items."""
    middle, half = (share + 1.92 / n) / (1 + 3.84 / n), 1.96 / (1 + 3.84 / n)
    half *= math.sqrt(share * (1 - share) / n + 0.96 / n**2)
    return middle - half, middle + half


FEW = 10


def with_interval(key: str, value: float, low: float, high: float, n: int) -> dict[str, float]:
    """{key, key_low, key_high}. An interval from fewer than 10 items is no evidence: their number stands in
    its place, {key, key_n}."""
    return {key: value, f"{key}_n": n} if n < FEW else {key: value, f"{key}_low": low, f"{key}_high": high}


def interval(figures: dict[str, float], key: str, form: str = "+.2f") -> str:
    """What with_interval gave, for people: '+0.12 [+0.05, +0.19]' or '+0.12 (n = 6)'."""
    if f"{key}_n" in figures:
        return f"{figures[key]:{form}} (n = {figures[key + '_n']})"
    return f"{figures[key]:{form}} [{figures[key + '_low']:{form}}, {figures[key + '_high']:{form}}]"


def paired_figures(key: str, before: list[dict], after: list[dict], column: str) -> dict[str, float]:
    """`paired` of a column of two policies' rows on the same prompts, with_interval."""
    values = ([row[column] for row in rows] for rows in (before, after))
    return with_interval(key, *paired(*values), len(after))


def gains(before: list[dict], after: list[dict]) -> dict[str, float]:
    """The paired differences of `score`, and of `gold` where it is known, of two policies' responses to the
    same prompts: eval/score_gain and gold/score_gain, with_interval."""
    figures = paired_figures("eval/score_gain", before, after, "score") if after else {}
    if after and "gold" in after[0]:
        figures.update(paired_figures("gold/score_gain", before, after, "gold"))
    return figures


def means(rows: list[dict], columns: dict[str, str]) -> dict[str, float]:
    """{key: mean of the column over the rows} of {key: column}, for the columns that the rows have."""
    known = {key: column for key, column in columns.items() if rows and column in rows[0]}
    return {key: sum(row[column] for row in rows) / len(rows) for key, column in known.items()}


def game(difference: float, tie_margin: float) -> int:
    """1: won, 0: a tie, -1: lost. A difference of the margin itself ties, whatever its rounding."""
    return (difference > tie_margin + 1e-9) - (difference < -tie_margin - 1e-9)


def margin_of_ties(tie_margin: float | None, reference: list[float]) -> float:
    """--tie-margin; where it is None, a tenth of the standard deviation of the reference's scores, whose unit
    nobody knows."""
    return 0.1 * statistics.pstdev(reference) if tie_margin is None else tie_margin


def against(before: list[dict], after: list[dict], tie_margin: float | None, prefix="") -> dict[str, float]:
    """Responses of two policies to the same prompts: for `score`, and for `gold` where it is known, the
    shares of prompts on which the second one wins, ties (scores that differ by no more than tie_margin) and
    loses, the margin, and the paired difference (gain) with its 95 % interval."""
    out = {}
    for column in ("score", "gold") if "gold" in after[0] else ("score",):
        key = f"{prefix}{column}"
        margin = out[f"{key}_tie_margin"] = margin_of_ties(tie_margin, [row[column] for row in before])
        games = [game(b[column] - a[column], margin) for a, b in zip(before, after, strict=True)]
        for name, result in (("win", 1), ("lose", -1), ("tie", 0)):
            out[f"{key}_{name}"] = games.count(result) / len(games)
        out |= paired_figures(f"{key}_gain", before, after, column)
    return out


def regressions(before: list[dict], after: list[dict]) -> list[dict]:
    """A table of categories, all of them first: paired difference of `score` (and of `gold`, where it is
    known) of two policies' responses to the same prompts, with its 95 % interval and whether this excludes 0
    (by chance one category in twenty does); of fewer than 10 prompts, with their number alone."""
    table = []
    for name in [None, *sorted({row["category"] for row in after} - {None})] if after else []:
        inside = [i for i, row in enumerate(after) if name in (None, row["category"])]
        line = {"category": name or "all", "prompts": len(inside)}
        for column in ("score", "gold") if "gold" in after[0] else ("score",):
            figures = paired_figures(column, [before[i] for i in inside], [after[i] for i in inside], column)
            line[column] = interval(figures, column)
            worse, better = figures.get(f"{column}_high", 0) < 0, figures.get(f"{column}_low", 0) > 0
            line[f"{column} is"] = "worse" if worse else "better" if better else ""
        table.append(line)
    return table


def plot_best_of_n(folder, curves: list[dict] | None = None):
    """`folder`/best_of_n.png: left, the largest and the median score among N samples at each policy's own
    temperature (Llama 2, figure 7); right, the largest one for every temperature (figure 8).

    curves: {"policy", "temperature", "chosen": bool, "max": [...], "median": [...]}, N = 1, 2, ...; None:
    those
      of the first and the last policy in `folder`/curves.jsonl, if one scorer scored both."""
    if curves is None:
        rows = read_jsonl(Path(folder) / "curves.jsonl")
        ends = [row["policy"] for row in rows[:1] + rows[-1:]]
        curves = [row for row in rows if row["policy"] in ends and row["scorer"] == rows[-1]["scorer"]]
    if not curves:
        return None
    drawing, axes = figure(2, (4.8, 3.2))
    names = list(dict.fromkeys(curve["policy"] for curve in curves))
    for curve in curves:
        n, color = range(1, len(curve["max"]) + 1), f"C{names.index(curve['policy'])}"
        label = f"{curve['policy']}, T = {curve['temperature']:g}"
        if curve["chosen"]:
            axes[0].plot(n, curve["max"], color=color, label=f"{label}: largest")
            axes[0].plot(n, curve["median"], color=color, linestyle="--", label=f"{label}: median")
        rank = sorted(c["temperature"] for c in curves if c["policy"] == curve["policy"])
        style = ("-", "--", ":", "-.")[rank.index(curve["temperature"]) % 4]
        axes[1].plot(n, curve["max"], color=color, linestyle=style, label=label)
    for axis, title in zip(axes, ("largest and median score of N samples", "largest score by temperature T")):
        axis.set(title=title, xlabel="N, samples of a prompt", ylabel="score")
        whole_ticks(axis)
        axis.grid(alpha=0.3)
    return save(drawing, Path(folder) / "best_of_n.png")


# -- measures of a scorer on labelled pairs --------------------------------------------------------
# A row is {"prompt", "source", "category", "responses": [{"text", "tokens", "rank", "score"}, ...]}, and for
# a model that sees two responses at once "differences", one for each pair, in place of the scores.
def pairs_of(rows) -> list[tuple]:
    """(score difference better - worse, row number, better response, worse response) of every labelled
    pair."""
    pairs = []
    for number, row in enumerate(rows):
        responses = row["responses"]
        mine = [(a, b) for a in responses for b in responses if a["rank"] < b["rank"]]
        differences = row.get("differences")
        if differences is None:
            differences = [a["score"] - b["score"] for a, b in mine]
        pairs += [(d, number, a, b) for d, (a, b) in zip(differences, mine)]
    return pairs


def pair_figures(rows, n_bootstrap=1000, n_bins=10) -> dict[str, float]:
    """How well score differences predict labels: eval/accuracy (ties count 1/2; also for each data set and
    category), eval/nll and eval/brier of sigmoid(difference), and the expected calibration error eval/ece
    with a 95 % interval and its floor.

    ECE: confidence sigmoid(|difference|) in n_bins equal bins of [0.5, 1]; the mean of |accuracy -
      confidence| over bins, weighted by count. The interval is a bootstrap over rows, for a row's pairs hang
      together. The floor is the mean ECE of a perfectly calibrated model with these confidences and this
      number of pairs: what sampling alone gives."""
    pairs = pairs_of(rows)
    if not pairs:
        return {"eval/pairs": 0}
    difference = torch.tensor([pair[0] for pair in pairs], dtype=torch.float64)
    if difference.isnan().any():
        return {"eval/pairs": len(pairs), "eval/nll": math.nan}
    row = torch.tensor([pair[1] for pair in pairs])
    correct, n = (difference.sign() + 1) / 2, len(pairs)
    probability, confidence = difference.sigmoid(), difference.abs().sigmoid()
    bins = ((confidence - 0.5) * 2 * n_bins).long().clamp(max=n_bins - 1)

    def ece(gap):  # gap: (..., n_bins), each bin's sum of correct - confidence
        return gap.abs().sum(-1)

    gaps = torch.zeros(len(rows), n_bins, dtype=torch.float64)
    gaps.index_put_((row, bins), correct - confidence, accumulate=True)
    sizes = torch.bincount(row, minlength=len(rows))
    generator = torch.Generator().manual_seed(0)
    resampled = []
    for _ in range(n_bootstrap):
        draw = torch.randint(len(rows), (len(rows),), generator=generator)
        times = torch.bincount(draw, minlength=len(rows))  # how often each row was drawn
        resampled.append(ece(times.double() @ gaps) / (times @ sizes).clamp(min=1))
    resampled = torch.stack(resampled)
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    floor = []
    for _ in range(200):
        label = (torch.rand(n, generator=generator, dtype=torch.float64) < confidence).double()
        gap = torch.zeros(n_bins, dtype=torch.float64).index_add_(0, bins, label - confidence)
        floor.append(ece(gap) / n)
    figures = {
        "eval/pairs": n,
        "eval/accuracy": correct.mean(),
        "eval/nll": -torch.nn.functional.logsigmoid(difference).mean(),
        "eval/brier": ((1 - probability) ** 2).mean(),
        **with_interval("eval/ece", ece(gaps.sum(0)) / n, low, high, len(rows)),
        "eval/ece_floor": torch.stack(floor).mean(),
    }
    for kind in ("source", "category"):
        names = sorted({str(r[kind]) for r in rows})
        place = {name: i for i, name in enumerate(names)}
        of_pair = torch.tensor([place[str(r[kind])] for r in rows])[row]
        counts = torch.bincount(of_pair, minlength=len(names))
        shares = torch.bincount(of_pair, correct, minlength=len(names)) / counts
        for name, share, count in zip(names, shares, counts) if len(names) > 1 else ():
            figures |= {f"eval/accuracy/{name}": share, f"eval/pairs/{name}": count}
    return {key: float(value) for key, value in figures.items()}


def accuracy(differences) -> float:
    """Share of differences above 0, ties counting 1/2; NaN of none."""
    right = [float(d > 0) + float(d == 0) / 2 for d in differences]
    return sum(right) / len(right) if right else math.nan


def known_figures(rows) -> dict[str, float]:
    """What only the tiny world knows: eval/bayes_accuracy, of a labeler without noise on the same pairs, and
    gold/correlation, of the scores with the true reward over all responses."""
    responses = [r for row in rows for r in row["responses"]]
    figures = {}
    if all("utility" in r for r in responses):
        differences = [a["utility"] - b["utility"] for _, _, a, b in pairs_of(rows)]
        figures["eval/bayes_accuracy"] = accuracy(differences)
    if all("gold" in r and "score" in r for r in responses):
        scores, gold = ([r[key] for r in responses] for key in ("score", "gold"))
        figures["gold/correlation"] = correlation(scores, gold)
    return figures


def correlation(x, y) -> float:
    """Pearson's; NaN where one of them does not vary."""
    if len(set(x)) < 2 or len(set(y)) < 2:
        return math.nan
    x, y = (torch.tensor(values, dtype=torch.float64) for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    return (x @ y / (x.norm() * y.norm())).item()


def length_correlations(rows) -> list[float]:
    """Of each prompt with three responses or more: the correlation of tokens and score over its responses, if
    both vary."""
    found = []
    for row in rows:
        tokens, scores = ([r[key] for r in row["responses"]] for key in ("tokens", "score"))
        found += [correlation(tokens, scores)] if len(tokens) > 2 else []
    return [value for value in found if not math.isnan(value)]


def length_figures(correlations) -> dict[str, float]:
    """length/correlation and length/prompts of length_correlations; of none, nothing."""
    n = len(correlations)
    return {"length/correlation": sum(correlations) / n, "length/prompts": n} if n else {}


def category_scores(rows) -> dict[str, tuple[float, float]]:
    """category -> (mean, standard deviation) of the scores of all its responses."""
    scores = {}
    for row in rows:
        scores.setdefault(str(row["category"]), []).extend(r["score"] for r in row["responses"])
    return {name: (statistics.fmean(x), statistics.pstdev(x)) for name, x in sorted(scores.items())}


def category_spread(rows) -> float:
    """Standard deviation of the categories' mean scores over that of all scores: 0 when all categories score
    alike. NaN for fewer than two categories, or a scorer that gives all the same."""
    means = [mean for mean, _ in category_scores(rows).values()]
    scores = [r["score"] for row in rows for r in row["responses"]]
    overall = statistics.pstdev(scores) if len(means) > 1 else 0.0
    return statistics.pstdev(means) / overall if overall > 0 else math.nan


def plot_scores(folder, runs=None, length=()):
    """`folder`/scores.png: accuracy against score difference, scores of better and worse responses (of the
    first run), mean and standard deviation of scores by category, and length correlations.

    runs: {name: rows}, the first being this run's; one without labelled pairs is left out."""
    runs = runs or {str(folder): read_jsonl(Path(folder) / "samples.jsonl")}
    runs = {name: rows for name, rows in runs.items() if pairs_of(rows)}
    if not runs:
        return None
    name, rows = next(iter(runs.items()))
    scored = {key: value for key, value in runs.items() if "differences" not in value[0]}
    means = {key: category_scores(value) for key, value in scored.items()}
    names = sorted(set().union(*means.values())) if name in scored else []
    panels = 1 + (name in scored) + (len(names) > 1) + bool(length)
    drawing, axes = figure(panels, (4.4, 3.2))
    axes = iter(axes)
    axis, widest = next(axes), 0.1
    for key, value in runs.items():
        pairs = sorted((abs(d), (d > 0) + (d == 0) / 2) for d, *_ in pairs_of(value))
        size = max(1, math.ceil(len(pairs) / 10))
        tenths = [pairs[i : i + size] for i in range(0, len(pairs), size)]
        x, y = ([statistics.fmean(pair[i] for pair in tenth) for tenth in tenths] for i in (0, 1))
        axis.plot(x, y, "o-", markersize=3, label=key[-40:])
        widest = max([widest, *x])
    line = torch.linspace(0, widest, 50)
    axis.plot(line, line.sigmoid(), "k--", linewidth=1, label="calibrated: 1 / (1 + exp(-difference))")
    axis.set(xlabel="score difference, tenths of the pairs", ylabel="share ranked as labelled")
    axis.set_title("accuracy")
    axis.grid(alpha=0.3)
    if name in scored:
        axis, pairs = next(axes), pairs_of(rows)
        for side, label in ((2, "better"), (3, "worse")):
            values = [pair[side]["score"] for pair in pairs]
            axis.hist(values, bins=40, alpha=0.5, density=True, label=f"{label} responses, {name[-40:]}")
        axis.set(title="scores", xlabel="score", ylabel="density")
    if len(names) > 1:
        axis = next(axes)
        for shift, (key, mine) in enumerate(means.items()):
            y = [names.index(name) + 0.2 * shift for name in mine]
            mean, deviation = zip(*mine.values())
            axis.errorbar(mean, y, xerr=deviation, fmt="o", markersize=4, capsize=3, label=key[-40:])
        category_ticks(axis, names)
        axis.set(title="scores by category", xlabel="mean and standard deviation of scores")
    if length:
        axis = next(axes)
        axis.hist(length, bins=20, range=(-1, 1))
        axis.set_xticks([-1, -0.5, 0, 0.5, 1])
        title = f"length and score of samples, {len(length)} prompts"
        axis.set(title=title, xlabel="correlation of tokens and score", ylabel="prompts")
    return save(drawing, Path(folder) / "scores.png")


def plot_scorer(folder, loss: str, length=()):
    """The plots of a reward, advantage or preference model. loss: the key of its training loss."""
    plot_scores(folder, length=length)
    accuracy = ["train/accuracy", "eval/accuracy"]
    plot_metrics(folder, {"loss": [loss, "eval/nll"], "accuracy": accuracy, "norm": ["optim/grad_norm"]})
