"""Accuracy of a reward model by the number of training pairs and of parameters, on the tiny world (the notes'
figure 6: +1.1 points a doubling of the data, +1.8 a doubling of the parameters, of T5 models on summaries).

    python tests/benchmarks/scaling.py                            72 runs of reward.py, about an hour on one core
    python tests/benchmarks/scaling.py --report-only              the table and the picture of the runs that are there

Six numbers of pairs, four widths, three seeds; a seed draws the pairs, the initial weights and their order. Every
run takes at most 400 optimiser steps and at most 20 passes over its pairs, and is evaluated six times on the same
2,000 held-out pairs. Its accuracy is that of the evaluation with the lowest held-out loss after the first step, so
that runs with few pairs are not judged where they overfit. (This flatters every run a little, by the same rule.)

A slope is that of a least-squares line of accuracy against log2 of the number of pairs, or of parameters, over all
settings of the other one; its interval is Student's over the seeds' slopes. With --publish the claims of these slopes
go to docs/results/claims.md."""

import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import experiments
import peers
import tyro
import verdicts

import reward
from common.data import files, tiny
from common.run import plots

PAIRS = (200, 400, 800, 1600, 3200, 6400)
WIDTHS = (16, 32, 64, 128)  # of the hidden states: three layers, the tiny model's proportions


@dataclass
class Args:
    folder: str = "runs/scaling"
    """directory of the runs and of results.jsonl; runs that are there are not made again"""
    report_only: bool = False
    """print the table and draw the picture of the runs that are there"""
    publish: bool = False
    """write docs/results/tables/scaling.jsonl and its row of docs/results/claims.md"""


def run(n, width, seed, folder) -> dict:
    """Train a reward model and return its accuracy at the evaluation of least held-out loss, after the first."""
    path, n_parameters = peers.tiny_llama(width, seed, folder)
    data = f"{folder}/pairs_{n}_{seed}.jsonl"
    files.write_jsonl(data, tiny.rows("preferences", "train", seed)[:n])
    steps = min(400, 20 * n // 32)
    held_out = f"{folder}/held_out.jsonl"
    files.write_jsonl(held_out, tiny.rows("preferences", "test")[:2000])
    out = f"{folder}/{n}_{width}_{seed}"
    reward.main(
        reward.Args(
            model=path, dataset=data, eval_dataset=held_out, max_steps=steps, eval_every=max(1, steps // 6),
            length_prompts=0, save_every=0, seed=seed, output_dir=out, overwrite=True,
        )
    )  # fmt: skip
    rows = [row for row in files.read_jsonl(f"{out}/metrics.jsonl") if "eval/nll" in row and row["step"]]
    best = min(rows, key=lambda row: row["eval/nll"])
    kept = {key: best[key] for key in ("step", "eval/accuracy", "eval/nll")}
    kept["bayes"] = files.read_json(f"{out}/summary.json")["after"]["eval/bayes_accuracy"]
    return {"pairs": n, "width": width, "parameters": n_parameters, "seed": seed, **kept}


def slope(rows, column) -> float:
    """Points of accuracy a doubling of the column: least squares with a level for each value of the other column."""
    other = "parameters" if column == "pairs" else "pairs"
    top = bottom = 0.0
    for value in {row[other] for row in rows}:
        points = [(math.log2(row[column]), 100 * row["eval/accuracy"]) for row in rows if row[other] == value]
        mean_x = statistics.fmean(x for x, _ in points)
        mean_y = statistics.fmean(y for _, y in points)
        top += sum((x - mean_x) * (y - mean_y) for x, y in points)
        bottom += sum((x - mean_x) ** 2 for x, _ in points)
    return top / bottom


def slopes(rows) -> dict[str, verdicts.Difference]:
    """The slope of each column over the seeds."""
    seeds = sorted({row["seed"] for row in rows})
    of_seed = lambda seed, column: slope([row for row in rows if row["seed"] == seed], column)
    columns = ("pairs", "parameters")
    return {column: verdicts.of_seeds([of_seed(seed, column) for seed in seeds]) for column in columns}


def report(rows, folder) -> dict[str, verdicts.Difference]:
    """Print the table and the slopes, draw the picture, and return the slopes."""
    found = slopes(rows)
    widths = sorted({(row["width"], row["parameters"]) for row in rows})
    print("pairs".ljust(8), *(f"{n:>9,} par." for _, n in widths))
    for n in PAIRS:
        cells = []
        for width, _ in widths:
            values = [100 * row["eval/accuracy"] for row in rows if (row["pairs"], row["width"]) == (n, width)]
            cells.append(f"{statistics.fmean(values):14.1f}" if values else f"{'-':>14}")
        print(f"{n:<8}", *cells)
    for column, x in found.items():
        each = ", ".join(f"{of_seed:.2f}" for of_seed in x.by_seed)
        print(f"a doubling of the {column}: {x.mean:+.2f} points [{x.low:.2f}, {x.high:.2f}] ({each})")
    drawing, [axis] = plots.figure(1, (5.8, 3.8))
    ends = []
    for width, n in widths:
        y = []
        for pairs in PAIRS:
            chosen = [row["eval/accuracy"] for row in rows if (row["pairs"], row["width"]) == (pairs, width)]
            y.append(100 * statistics.fmean(chosen) if chosen else math.nan)
        [line] = axis.plot(PAIRS, y, "o-", markersize=4)
        ends.append((y[-1], f"{n:,} parameters", line.get_color()))
    lowest = -math.inf
    for y, name, color in sorted(ends):  # names of lines that end close together stand above each other
        lowest = max(y, lowest + 1.1)
        axis.text(PAIRS[-1] * 1.12, lowest, name, color=color, va="center")
    most = 100 * rows[0]["bayes"]  # the held-out pairs are the same in all runs
    axis.axhline(most, color="k", linestyle="--", linewidth=1)
    axis.text(PAIRS[0], most - 0.3, "accuracy of the true reward: labels are noisy", va="top")
    axis.set_xscale("log", base=2)
    axis.set_xticks(PAIRS, [f"{n:,}" for n in PAIRS])
    axis.set_xlim(PAIRS[0] * 0.8, PAIRS[-1] * 5)
    title = "held-out accuracy grows with the pairs, and little beyond 40,000 parameters"
    axis.set(xlabel="training pairs", ylabel="accuracy, %")
    axis.set_title(title, fontsize=9)
    plots.save(drawing, Path(folder) / "scaling.png")
    return found


def main(args: Args):
    path = Path(args.folder) / "results.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = files.read_jsonl(path)
    done = {(row["pairs"], row["width"], row["seed"]) for row in rows}
    settings = [(n, width, seed) for seed in range(3) for width in WIDTHS for n in PAIRS]
    for setting in settings:
        if not args.report_only and setting not in done:
            rows.append(run(*setting, args.folder))
            files.append_jsonl(path, rows[-1:])
            print(rows[-1], file=sys.stderr, flush=True)
    found = report(rows, args.folder).values()
    if args.publish:
        claims = experiments.ELSEWHERE["scaling"]
        lines = [experiments.line_of(claim, x, len(x.by_seed)) for claim, x in zip(claims, found, strict=True)]
        experiments.publish_claims("scaling", lines)


if __name__ == "__main__":
    main(tyro.cli(Args))
