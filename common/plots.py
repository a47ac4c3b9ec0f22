"""Pictures of a run: functions of its folder, which they read and draw in. They return the figure, or None
where there is nothing to draw."""

import itertools
import math
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev

import torch

from common import metrics
from common.metrics import JUDGES, read_jsonl

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
STYLE = {
    "text.parse_math": False,  # a category may hold a $
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "lines.markersize": 3,
    "errorbar.capsize": 3,
    "legend.fontsize": 8,
}


def figure(panels=1, size=(4.8, 3.2)):
    """A figure of `panels` axes side by side, each of `size` inches, and these axes."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
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
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5, ncols=columns)
        most = max(most, math.ceil(n / columns))
    drawing.set_figheight(drawing.get_figheight() + 0.18 * most)
    drawing.savefig(path)
    return drawing


def whole_ticks(axis):
    """Ticks of steps, tokens and samples: whole numbers only."""
    axis.xaxis.get_major_locator().set_params(integer=True)


# -- of training -----------------------------------------------------------------------------------
def curves(folder, panels: dict[str, list[str]], name: str = "metrics.png", x: str = "step"):
    """`folder`/`name` from metrics.jsonl: one panel for each {title: [metric keys]}, against `x` (step,
    iteration or another metric) in the order in which they were logged."""
    rows = [row for row in read_jsonl(Path(folder) / "metrics.jsonl") if x in row]
    if not rows:
        return None
    drawing, axes = figure(len(panels), (4.2, 2.8))
    for axis, (title, keys) in zip(axes, panels.items()):
        for key in keys:
            points = [(row[x], row[key]) for row in rows if key in row]
            if points:
                axis.plot(*zip(*points), "o-" if len(points) < 10 else "-", label=LABELS.get(key, key))
        axis.set(title=title, xlabel=LABELS.get(x, x))
        if isinstance(rows[0][x], int):
            whole_ticks(axis)
    return save(drawing, Path(folder) / name)


def frontier(folder):
    """`folder`/frontier.png: a scorer and the true reward against the KL, which show over-optimisation."""
    panels = {"reward against the KL": ["eval/score", "gold/score"]}
    return curves(folder, panels, name="frontier.png", x="eval/kl")


# -- of responses ----------------------------------------------------------------------------------
def samples_by(folder, column: str) -> dict[str, list[dict]]:
    """The rows of `folder`/samples.jsonl, by what a column says."""
    groups = {}
    for row in read_jsonl(Path(folder) / "samples.jsonl"):
        groups.setdefault(row.get(column), []).append(row)
    return groups


def lengths(folder):
    """`folder`/length.png: the score against the tokens of every held-out response of the first and the last
    version in samples.jsonl."""
    versions = samples_by(folder, "version")
    if not versions:
        return None
    drawing, (axis,) = figure()
    for shift, version in enumerate(sorted({min(versions), max(versions)})):
        x, y = ([row[key] for row in versions[version]] for key in ("tokens", "score"))
        beside = [tokens + 0.25 * shift for tokens in x]  # else a version hides the one before
        label = f"version {version}: correlation {metrics.correlation(x, y):.2f}"
        axis.scatter(beside, y, s=6, alpha=0.4, label=label)
    axis.set(xlabel="tokens", ylabel="score", title="held-out responses")
    whole_ticks(axis)
    return save(drawing, Path(folder) / "length.png")


def categories(folder):
    """`folder`/categories.png: the true rewards (where they are known, else the scores) of held-out responses
    before and after training, by category, if there are several."""
    scores = {}
    for when, rows in samples_by(folder, "when").items():
        kind = "gold" if "gold" in rows[0] else "score"
        scores[when] = [(row["category"], row[kind]) for row in rows]
    names = {category for of_policy in scores.values() for category, _ in of_policy}
    if len(names) < 2:
        return None
    drawing, (axis,) = figure(size=(4.8, 1 + 0.3 * len(names)))
    by_category(scores, JUDGES[kind], axis)
    return save(drawing, Path(folder) / "categories.png")


def by_category(scores: dict[str, list[tuple]], title, axis):
    """Means and standard deviations. scores: name -> (category, score) of each response."""
    grouped = {name: metrics.by_category(of_name) for name, of_name in scores.items()}
    names = sorted(set().union(*grouped.values()))
    for shift, (name, of_category) in enumerate(grouped.items()):
        y = [names.index(category) + 0.2 * shift for category in of_category]
        mean, deviation = (list(map(measure, of_category.values())) for measure in (fmean, pstdev))
        axis.errorbar(mean, y, xerr=deviation, fmt="o", label=name)
    axis.set_yticks(range(len(names)), [name[:24] for name in names], fontsize=8)
    axis.invert_yaxis()  # from top to bottom
    axis.set(title=f"{title} by category", xlabel="mean and standard deviation")


def best_of_n(folder):
    """`folder`/best_of_n.png of the first and the last policy in curves.jsonl, if one scorer scored both: the
    largest and the median score among N samples at each policy's own temperature (Llama 2, figure 7), and the
    largest one for every temperature (figure 8)."""
    rows = read_jsonl(Path(folder) / "curves.jsonl")
    ends = list(dict.fromkeys(row["policy"] for row in rows[:1] + rows[-1:]))
    drawn = [row for row in rows if row["policy"] in ends and row["scorer"] == rows[-1]["scorer"]]
    if not drawn:
        return None
    drawing, (left, right) = figure(2)
    temperatures = sorted({curve["temperature"] for curve in drawn})
    for curve in drawn:
        n, color = range(1, len(curve["max"]) + 1), f"C{ends.index(curve['policy'])}"
        label = f"{curve['policy']}, T = {curve['temperature']:g}"
        if curve["chosen"]:
            left.plot(n, curve["max"], color=color, label=f"{label}: largest")
            left.plot(n, curve["median"], "--", color=color, label=f"{label}: median")
        style = ("-", "--", ":", "-.")[temperatures.index(curve["temperature"]) % 4]
        right.plot(n, curve["max"], style, color=color, label=label)
    left.set(title="largest and median score of N samples", xlabel="N, samples of a prompt", ylabel="score")
    right.set(title="largest score by temperature T", xlabel="N, samples of a prompt", ylabel="score")
    whole_ticks(left)
    whole_ticks(right)
    return save(drawing, Path(folder) / "best_of_n.png")


# -- of scorers ------------------------------------------------------------------------------------
def scorer(folder, loss: str):
    """The pictures of a reward, advantage or preference model. loss: the key of its training loss."""
    accuracy = ["train/accuracy", "eval/accuracy"]
    curves(folder, {"loss": [loss, "eval/nll"], "accuracy": accuracy, "norm": ["optim/grad_norm"]})
    scores(folder, {str(folder): read_jsonl(Path(folder) / "samples.jsonl")})


def scores(folder, scorers: dict[str, list[dict]]):
    """`folder`/scores.png: accuracy against score difference, scores of better and worse responses (of the
    first scorer) and scores by category. scorers: {name: rows of metrics.pair_figures}; one without labelled
    pairs is left out."""
    scorers = {name[-40:]: rows for name, rows in scorers.items() if metrics.pairs_of(rows)}
    if not scorers:
        return None
    name, first = next(iter(scorers.items()))
    panels = [partial(accuracy_by_difference, scorers)]
    if "differences" not in first[0]:
        panels.append(partial(better_and_worse, name, first))
        scored = {n: metrics.scores_of(rows) for n, rows in scorers.items() if "differences" not in rows[0]}
        if len(set(dict(scored[name]))) > 1:
            panels.append(partial(by_category, scored, "scores"))
    drawing, axes = figure(len(panels), (4.4, 3.2))
    for draw, axis in zip(panels, axes):
        draw(axis)
    return save(drawing, Path(folder) / "scores.png")


def accuracy_by_difference(scorers, axis):
    widest = 0.1
    for name, rows in scorers.items():
        pairs = sorted((abs(d), (d > 0) + (d == 0) / 2) for d, *_ in metrics.pairs_of(rows))
        size = math.ceil(len(pairs) / 10)
        tenths = [zip(*pairs[i : i + size]) for i in range(0, len(pairs), size)]
        points = [[fmean(values) for values in tenth] for tenth in tenths]
        axis.plot(*zip(*points), "o-", label=name)
        widest = max(widest, points[-1][0])
    line = torch.linspace(0, widest, 50)
    axis.plot(line, line.sigmoid(), "k--", linewidth=1, label="calibrated: 1 / (1 + exp(-difference))")
    axis.set(title="accuracy", xlabel="score difference, tenths of pairs", ylabel="share ranked as labelled")


def better_and_worse(name, rows, axis):
    pairs = metrics.pairs_of(rows)
    for side, label in ((2, "better"), (3, "worse")):
        values = [pair[side]["score"] for pair in pairs]
        axis.hist(values, bins=40, alpha=0.5, density=True, label=f"{label} responses, {name}")
    axis.set(title="scores", xlabel="score", ylabel="density")


# -- of policies that are compared -----------------------------------------------------------------
def compared(folder, results):
    """`folder`/elo.png: ratings at the first temperature. frontier.png: rewards against the KL.

    results: temperature -> policy -> figures of common/evaluate.py. Returns both; of one policy None."""
    temperature, first = next(iter(results.items()))
    kinds = [kind for kind in JUDGES if all(f"{kind}_elo" in r for r in first.values())]
    if not kinds:
        return None
    elos, axes = figure(len(kinds), (4.8, 1 + 0.35 * len(first)))
    for axis, kind in zip(axes, kinds):
        elo = {end: [r.get(f"{kind}_elo{end}") for r in first.values()] for end in ("", "_low", "_high")}
        axis.barh(list(first), [x - 1000 for x in elo[""]], left=1000)
        axis.set(title=f"by {JUDGES[kind]}, temperature {temperature}", xlabel="Elo")
        if None not in elo["_low"]:  # enough prompts for an interval
            axis.hlines(list(first), elo["_low"], elo["_high"], color="black")
            axis.set_xlabel("Elo and its 95 % interval")
        axis.axvline(1000, color="black", linewidth=1)
        axis.invert_yaxis()
    frontiers, axes = figure(len(kinds))
    far = any(r.get("kl", 0) > 10 for of_policy in results.values() for r in of_policy.values())
    for axis, kind in zip(axes, kinds):
        for (temperature, of_policy), marker in zip(results.items(), itertools.cycle("os^vD")):
            for i, (name, r) in enumerate(of_policy.items()):
                label = name if len(results) == 1 else f"{name}, T = {temperature}"
                if "kl" in r:
                    axis.plot(r["kl"], r[kind], marker, color=f"C{i}", markersize=6, label=label)
        axis.set(title=f"{JUDGES[kind]} against the KL", xlabel="KL to the reference (nats)")
        axis.set_ylabel("mean over held-out prompts")
        if far:
            axis.set_xscale("symlog", linthresh=1, subs=(1, 2, 5))  # its own labels are TeX
            axis.xaxis.set_major_formatter("{x:g}")
    save(elos, folder / "elo.png")
    save(frontiers, folder / "frontier.png")
    return elos, frontiers
