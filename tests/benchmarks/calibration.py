"""reward.py against advantage_model.py on the tiny world, where the labels' probabilities are known: accuracy
against Bayes accuracy, calibration, spread over categories, and the error of e(x).

    python sft.py
    python tests/benchmarks/calibration.py --seeds 3 --plot docs/results/calibration.png

Regimes: (a) the recipe tiny, all pairs in two epochs; (b) the first 500 pairs, the same number of steps. Arms: the reward
model, the advantage model with bounds 2.5 and 5, and with --expected-reward-samples 4. The plot shows the mean
prediction for pairs of each true probability next to the exact optimum of eq. 6. About 40 seconds per arm, seed
and regime on two cores."""

import argparse
import importlib
import json
import math
import statistics
import tempfile

import peers  # noqa: F401, it lets common be found

from common.data import files, tiny
from common.scoring import measures

ARMS = {  # name -> (script, arguments)
    "reward": ("reward", {}),
    "advantage, m = 2.5": ("advantage_model", {}),
    "advantage, m = 5": ("advantage_model", {"bound": 5.0}),
    "advantage, m = 2.5, e regressed": ("advantage_model", {"expected_reward_samples": 4}),
}
FIGURES = ("eval/accuracy", "eval/bayes_accuracy", "eval/nll", "eval/brier", "eval/ece", "eval/ece_low")
FIGURES += ("eval/ece_high", "eval/ece_floor", "category spread", "gold/correlation", "expected/bias")
FIGURES += ("expected/rmse", "gold/expected_correlation")


def optimum(p, bound):
    """sigmoid(a_c - a_r) at the minimum of eq. 6 when one side is better with probability p. By symmetry
    a_c = -a_r = d / 2; the derivative in d rises, so bisect it."""

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    def slope(d):
        toward = -sigmoid(-d) + sigmoid(d / 2 - bound)
        return p * toward + (1 - p) * (sigmoid(d) - sigmoid(-d / 2 - bound))

    low, high = -50.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return sigmoid(low)


def category_spread(rows):
    """Deviation of the categories' mean scores, divided by that of all scores; 0 if the means are equal."""
    of_category = {row["category"]: [] for row in rows}
    for row in rows:
        of_category[row["category"]] += [response["score"] for response in row["responses"]]
    means = map(statistics.fmean, of_category.values())
    return statistics.pstdev(means) / statistics.pstdev(sum(of_category.values(), []))


def run(args, arm, regime, seed, folder):
    """The final metrics of one run, and (utility difference, score difference) of its held-out pairs."""
    script, options = ARMS[arm]
    module = importlib.import_module(script)
    out = tempfile.mkdtemp(dir=folder)
    start = {"sft_model" if script == "reward" else "policy": args.sft_model, "output_dir": out}
    options = {**start, "seed": seed, "eval_every": 0, "save_every": 0, **options}
    options["length_prompts"] = 0 if script == "reward" else 200
    if regime == "b":
        options |= {"dataset": f"{folder}/few.jsonl", "eval_dataset": "tiny", "epochs": args.epochs}
    module.main(module.Args(**options))
    after, rows = (
        files.read_json(f"{out}/summary.json")["after"],
        files.read_jsonl(f"{out}/samples.jsonl"),
    )
    after["category spread"], pairs = category_spread(rows), measures.pairs_of(rows)
    return after, [(a["utility"] - b["utility"], difference) for difference, _, a, b in pairs]


def curve(pairs):
    """(mean true probability, mean predicted probability) of tenths of the pairs, better side by utility."""
    sides = [(abs(u), d if u > 0 else -d) for u, d in pairs if u]  # of u = 0 neither side is the better one
    points = [(1 / (1 + math.exp(-u)), 1 / (1 + math.exp(-d))) for u, d in sides]
    points.sort(key=lambda point: round(point[0], 9))  # pairs of one probability stay in their order
    size = math.ceil(len(points) / 10)
    tenths = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(statistics.fmean(point[k] for point in tenth) for k in (0, 1)) for tenth in tenths]


def plot(path, curves):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4), squeeze=False)
    titles = {"a": "12,000 pairs, 2 epochs", "b": "500 pairs, many epochs"}
    for axis, (regime, arms) in zip(axes[0], curves.items()):
        p = [0.5 + i / 200 for i in range(100)]
        axis.plot(p, p, "k-", linewidth=1, label="calibrated")
        for bound, style in ((2.5, "--"), (5.0, ":")):
            optima = [optimum(x, bound) for x in p]
            axis.plot(p, optima, f"k{style}", linewidth=1, label=f"optimum of eq. 6, m = {bound}")
        for arm, pairs in arms.items():
            axis.plot(*zip(*curve(pairs)), "o-", markersize=3, label=arm)
        axis.set(title=titles[regime], xlabel="true probability", ylabel="mean sigmoid(difference)")
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sft-model", default="runs/sft")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=47, help="of regime b: as many steps as regime a")
    parser.add_argument("--regimes", nargs="+", default=["a", "b"])
    parser.add_argument("--plot", help="write the calibration curves of all seeds to this file")
    parser.add_argument("--results", help="append every run's figures to this .jsonl file")
    args = parser.parse_args()
    folder = tempfile.mkdtemp()
    files.write_jsonl(f"{folder}/few.jsonl", tiny.rows("preferences", "train")[:500])
    curves = {regime: {} for regime in args.regimes}
    for regime in args.regimes:
        for arm in ARMS:
            found = []
            for seed in range(args.seeds):
                after, pairs = run(args, arm, regime, seed, folder)
                found.append(after)
                curves[regime].setdefault(arm, []).extend(pairs)
                if args.results:
                    with open(args.results, "a") as file:
                        file.write(json.dumps({"arm": arm, "regime": regime, "seed": seed, **after}) + "\n")
            print(f"\nregime {regime}, {arm}, {len(found)} seeds", flush=True)
            for key in FIGURES:
                values = [after[key] for after in found if key in after]
                if values:
                    each = ", ".join(f"{value:.4f}" for value in values)
                    print(f"  {key:22} {statistics.fmean(values):8.4f}   ({each})", flush=True)
    if args.plot:
        plot(args.plot, curves)


if __name__ == "__main__":
    main()
