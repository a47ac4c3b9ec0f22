"""Draw the plots of a run. A plot is a function of the run's folder that returns the drawing, or None if
there is nothing to draw."""

import itertools
import math
from pathlib import Path
from statistics import fmean

import torch

from common.batches import split
from common.data import files
from common.scoring import measures

STYLE = {
    "axes.grid": True, "axes.axisbelow": True, "grid.alpha": 0.3, "text.parse_math": False,
    "lines.markersize": 3, "legend.fontsize": 8,
}  # fmt: skip


def figure(panels=1, size=(4.8, 3.2)):
    """Make a drawing with `panels` axes side by side, each of `size` inches: (drawing, axes)."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    drawing = Figure(figsize=(size[0] * panels, size[1]), dpi=90, layout="constrained")
    return drawing, drawing.subplots(1, panels, squeeze=False)[0]


def save(drawing, path):
    """Save a drawing with its legends below the axes, so that they cover no curve; its height grows to
    make room for them."""
    labels = [axis.get_legend_handles_labels()[1] for axis in drawing.axes]
    for axis in [axis for axis, texts in zip(drawing.axes, labels) if texts]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=5)  # below the x axis's label
    drawing.set_figheight(drawing.get_figheight() + 0.18 * max(map(len, labels)))
    drawing.savefig(path)
    return drawing


def draw(picture):
    """Call picture(), and print any error instead of raising it: a plot must not end a run whose results are
    already there."""
    try:
        picture()
    except Exception as error:
        print(f"a plot could not be drawn: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


# -- plots of training -----------------------------------------------------------------------------
def curves(folder, panels: dict[str, list[str]], name: str = "metrics.png", x: str = "step"):
    """Draw `folder`/`name` from metrics.jsonl, with one panel per {title: [metric keys]}. Rows are connected
    in the order in which they were logged. x: step, iteration or another metric."""
    rows = [row for row in files.read_jsonl(Path(folder) / "metrics.jsonl") if x in row]
    if not rows:
        return None
    drawing, axes = figure(len(panels), (4.2, 2.8))
    for axis, (title, keys) in zip(axes, panels.items()):
        for key in keys:
            drawn = [row for row in rows if key in row]
            if drawn:
                style = "o-" if len(drawn) < 10 else "-"
                axis.plot([row[x] for row in drawn], [row[key] for row in drawn], style, label=key)
        axis.set(title=title, xlabel=x)
    return save(drawing, Path(folder) / name)


def frontier(folder):
    """Draw `folder`/frontier.png: score and true reward against the KL. If the first rises while the second
    falls, the scorer is over-optimised."""
    panels = {"reward against the KL": ["eval/score", "gold/score"]}
    return curves(folder, panels, name="frontier.png", x="eval/kl")


def best_of_n(folder):
    """Draw `folder`/best_of_n.png from curves.jsonl: the first and the last version that the last scorer
    scored. Left: largest and median score among N samples at the chosen temperature (Llama 2,
    arXiv:2307.09288, figure 7). Right: largest score at each temperature (figure 8)."""
    curves = files.read_jsonl(Path(folder) / "curves.jsonl")
    curves = [curve for curve in curves if curve["scorer"] == curves[-1]["scorer"]]
    if not curves:
        return None
    drawing, (left, right) = figure(2)
    ends = (curves[0]["policy"], curves[-1]["policy"])
    for curve in [curve for curve in curves if curve["policy"] in ends]:
        n = range(1, len(curve["max"]) + 1)
        label = f"{curve['policy']}, T = {curve['temperature']:g}"
        marker = "o" if len(n) < 10 else ""
        dash = "-" if curve["policy"] == ends[0] else "--"
        [line] = right.plot(n, curve["max"], marker + dash, label=label)
        if curve["chosen"]:
            color = line.get_color()
            left.plot(n, curve["max"], f"{marker}-", color=color, label=f"{label}: largest")
            left.plot(n, curve["median"], f"{marker}:", color=color, label=f"{label}: median")
    left.set(title="largest and median of N", xlabel="N, samples of a prompt", ylabel="score")
    right.set(title="largest of N by temperature", xlabel="N, samples of a prompt", ylabel="score")
    return save(drawing, Path(folder) / "best_of_n.png")


# -- plots of scorers ------------------------------------------------------------------------------
def scorer(folder):
    """Draw metrics.png and scores.png of a reward or advantage model."""
    loss, accuracy = ["loss/reward", "loss/advantage", "eval/nll"], ["train/accuracy", "eval/accuracy"]
    curves(folder, {"loss": loss, "accuracy": accuracy, "norm": ["optim/grad_norm"]})
    scores(folder, {str(folder): files.read_jsonl(Path(folder) / "samples.jsonl")})


def scores(folder, scorers: dict[str, list[dict]]):
    """Draw `folder`/scores.png: accuracy against score difference; per scorer, a panel with the scores of
    better and worse responses; and scores by category (arXiv:2309.10202, figures 2 to 4).

    scorers: {name: rows, as for measures.pair_metrics}. A scorer without labelled pairs is left out."""
    scorers = {name[-40:]: rows for name, rows in scorers.items() if measures.pairs_of(rows)}
    if not scorers:
        return None
    # A scorer that compares gives no score to a single response
    with_scores = {name: rows for name, rows in scorers.items() if "differences" not in rows[0]}
    categories = sorted({str(row["category"]) for rows in with_scores.values() for row in rows})
    by_category = len(categories) > 1
    n_panels = 1 + len(with_scores) + by_category
    drawing, (left, *axes) = figure(n_panels, (4.4, max(3.2, 0.2 * len(categories))))
    for label, rows in scorers.items():
        pairs = [(abs(d), (d > 0) + (d == 0) / 2) for d, *_ in measures.pairs_of(rows)]
        pairs.sort(key=lambda pair: pair[0])  # not by correctness where differences are equal
        mean_difference = lambda tenth: fmean(d for d, _ in tenth)
        accuracy = lambda tenth: fmean(right for _, right in tenth)
        tenths = split(pairs, math.ceil(len(pairs) / 10))
        left.plot(list(map(mean_difference, tenths)), list(map(accuracy, tenths)), "o-", label=label)
    line = torch.linspace(0, max(0.1, left.dataLim.x1), 50)
    left.plot(line, line.sigmoid(), "k--", linewidth=1, label="calibrated: 1 / (1 + exp(-difference))")
    left.set(title="accuracy", xlabel="score difference, tenths of pairs", ylabel="share ranked as labelled")
    for axis, (name, rows) in zip(axes, with_scores.items()):
        better_and_worse(axis, name, rows)
    if by_category:
        scores_by_category(axes[-1], with_scores, categories)
    return save(drawing, Path(folder) / "scores.png")


def better_and_worse(axis, name, rows):
    """Draw histograms, with the same bins, of a scorer's scores of the better and the worse responses."""
    pairs = measures.pairs_of(rows)
    scores = {"better": [a["score"] for _, _, a, _ in pairs], "worse": [b["score"] for _, _, _, b in pairs]}
    low = min(map(min, scores.values()))
    high = max(map(max, scores.values()))
    room = 1e-6 * max(1, abs(low), abs(high))  # if all scores are equal, 40 bins still need some width
    for side, values in scores.items():
        options = {"bins": 40, "range": (low - room, high + room), "alpha": 0.5, "density": True}
        axis.hist(values, **options, label=f"{side} responses, {name}")
    axis.set(title="scores", xlabel="score", ylabel="density")


def scores_by_category(axis, scorers, categories):
    """Draw mean and standard deviation of each category's scores (arXiv:2309.10202, figures 1a and 4)."""
    for i, (label, rows) in enumerate(scorers.items()):
        rows_of = lambda name: [row for row in rows if str(row["category"]) == name]
        scores = enumerate(measures.score_metrics(rows_of(name)) for name in categories)
        scores = {place + 0.2 * i: x for place, x in scores if x}
        means = [x["mean"] for x in scores.values()]
        deviations = [x["deviation"] for x in scores.values()]
        if scores:
            axis.errorbar(means, list(scores), xerr=deviations, fmt="o", capsize=2, label=label)
    axis.set_yticks(range(len(categories)), [name[:24] for name in categories], fontsize=8)
    axis.invert_yaxis()  # first category at the top
    axis.set(title="scores by category", xlabel="mean and standard deviation")


# -- plots that compare policies -------------------------------------------------------------------
def compared(folder, results, without=()):
    """Draw `folder`/frontier.png: rewards against the KL of the policies whose KL is known, at the
    temperature at which most are known. Policies named dpo/0.1 and dpo/0.3 are points of one curve, dpo.
    Returns None for fewer than two policies.

    results: {temperature: {policy: metrics of programs/evaluate.py}}. without: policies to leave out."""
    is_drawn = lambda name, r: "kl" in r and name not in without  # noqa: E731
    drawn = []
    for of_t in results.values():
        drawn.append({name: r for name, r in of_t.items() if is_drawn(name, r)})
    policies = max(drawn, key=len)  # the first temperature, if several have the same number
    if len(policies) < 2:
        return None
    kinds = [kind for kind in measures.JUDGES if all(kind in r for r in policies.values())]
    drawing, axes = figure(len(kinds))
    for kind, axis in zip(kinds, axes):
        curves = {}
        labels = []
        for name, r in policies.items():
            curves.setdefault(name.partition("/")[0], []).append((r["kl"], r[kind], name))
        for points in map(sorted, curves.values()):
            [line] = axis.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", markersize=6)
            for x, y, name in points[:-1]:
                labels.append((x, y, name.partition("/")[2], line.get_color()))
            labels.append((*points[-1], line.get_color()))  # the last point has the curve's name
        axis.set(title=f"{measures.JUDGES[kind]} against the KL", xlabel="KL (nats)", ymargin=0.15)
        axis.set_xscale("symlog", linthresh=1, subs=(1, 2, 5))  # linear up to 1; default labels would be TeX
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        label_points(axis, labels)
    return save(drawing, folder / "frontier.png")


def label_points(axis, labels: list[tuple]):
    """Write each (x, y, text, color) next to its point: at the first of several nearby places where the text
    covers no point and no other text, or at the last one."""
    from matplotlib.transforms import Bbox

    axis.figure.draw_without_rendering()  # computes the layout, and with it the points' pixels
    places = axis.transData.transform([label[:2] for label in labels])
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in places]
    for x, y, text, color in labels:
        note = axis.annotate(text, (x, y), (0, 0), textcoords="offset points", color=color, va="center")
        for up, right in itertools.product((0, 9, -9, 18, -18, 27, -27), (7, -7)):
            note.set(position=(right, up), ha="left" if right > 0 else "right")
            box = note.get_window_extent()
            inside = axis.bbox.x0 < box.x0 and box.x1 < axis.bbox.x1
            if inside and not any(map(box.overlaps, taken)):
                break
        taken.append(box)
