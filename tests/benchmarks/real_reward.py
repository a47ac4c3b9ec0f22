"""Print the gains of the methods of docs/results/real_reward.sh and some of their answers, and draw their rollouts;
with its PAIRS and DTYPE also the gains by reward models, and by dtype.

python tests/benchmarks/real_reward.py FOLDER SEEDS"""

import math
import re
import statistics
import sys
from pathlib import Path

import torch
import verdicts
from experiments import markdown, publish
from real_task import right

from common.data import files
from common.run import plots
from common.scoring import measures

METHODS = {"ppo": "PPO", "grpo": "GRPO", "rejection_sampling": "rejection sampling", "dpo": "iterative DPO"}


def differences(before: list[dict], after: list[dict]) -> list[float]:
    """after - before of `right`, row by row. The rows are answers to the same prompts, in the same order."""
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    return [b["right"] - a["right"] for a, b in zip(before, after)]


def spread(gains: list[list[float]]) -> tuple[float, int]:
    """The standard deviation of a gain over seeds, pooled over methods, and its degrees of freedom. gains: for each
    method, those of its seeds."""
    several = [of_seeds for of_seeds in gains if len(of_seeds) > 1]
    freedom = sum(len(of_seeds) - 1 for of_seeds in several)
    squares = sum((len(of_seeds) - 1) * statistics.variance(of_seeds) for of_seeds in several)
    return math.sqrt(squares / freedom) if freedom else 0.0, freedom


def gain(before: list[list[dict]], after: list[list[dict]], deviation=0.0, freedom=0) -> tuple[float, float]:
    """The mean difference, after - before, and half of its 95 % interval: the wider one of two, which take the
    prompts (all answers to one are a cluster) or the seeds as drawn at random. before, after: for each seed the
    rows of its answers; the others: as returned by spread, if several seeds were measured."""
    of_prompt = {}
    for rows_before, rows_after in zip(before, after, strict=True):
        for row, difference in zip(rows_before, differences(rows_before, rows_after)):
            of_prompt.setdefault(str(row["prompt"]), []).append(difference)
    n = sum(map(len, before))
    mean = sum(map(sum, of_prompt.values())) / n
    squares = sum(sum(x - mean for x in cluster) ** 2 for cluster in of_prompt.values())
    half = 1.96 * math.sqrt(squares * len(of_prompt) / (len(of_prompt) - 1)) / n
    if freedom:
        half = max(half, verdicts.quantile(freedom) * deviation / math.sqrt(len(before)))
    return mean, half


def read(folders, name="answers") -> dict[str, dict[Path, list[dict]]]:
    """{policy: {folder of a seed that has it: the rows of its answers, with whether they are right}}, of the evaluation
    with this name."""
    answers = {}
    for folder in folders:
        for row in right(folder / name / "samples.jsonl", folder / "test.jsonl"):
            answers.setdefault(row["policy"], {}).setdefault(folder, []).append(row)
    return answers


def minutes(folders) -> dict[str, float]:
    """{step: its CPU minutes, mean over the seeds}, from times.txt."""
    seconds = {}
    for line in (folders[0].parent / "times.txt").read_text().splitlines():
        seed, step, of_cpu = re.match(r"seed (\d+), ([\w.]+): \d+ s, (\d+) s of CPU", line).groups()
        if seed in [folder.name for folder in folders]:
            seconds.setdefault(step, []).append(int(of_cpu))
    return {step: statistics.fmean(values) / 60 for step, values in seconds.items()}


def gains(folders) -> list[str]:
    """Make the table: correct answers to held-out prompts before and after each method, in the seeds that have it,
    and what the other methods gain over PPO."""
    answers = read(folders)
    of_cpu = minutes(folders)
    tasks = [*dict.fromkeys(row["category"] for row in answers["sft"][folders[0]])]
    over_sft, over_ppo = over(answers, "sft"), over(answers, "ppo")
    lines = []
    for policy, by_seed in answers.items():
        rows = sum(by_seed.values(), [])
        right_ones, gained = over_sft.get(policy, (f"{share(rows)} %", ""))
        more = over_ppo[policy][1] if policy in over_ppo else ""
        each = ", ".join(share(by_seed[folder]) if folder in by_seed else "-" for folder in folders)
        finished = statistics.fmean(row["finished"] for row in rows)
        cells = [right_ones, gained, more, each, *task_cells(rows, tasks), f"{finished:.0%}", f"{of_cpu[policy]:.0f}"]
        lines.append([METHODS.get(policy, "SFT"), *cells])
    right_ones, gained, *others = titles_of(folders, tasks)
    return markdown(["", right_ones, gained, "over PPO", *others, "ended", "CPU minutes"], lines)


def over(answers, base) -> dict[str, list[str]]:
    """{other policy: gain_cells over the policy base, in the seeds that have both}; SFT is only compared as a base."""
    before, arms = answers.get(base, {}), {}
    for policy, by_seed in answers.items():
        seeds = [seed for seed in by_seed if seed in before]
        if policy not in (base, "sft") and seeds:
            arms[policy] = [before[seed] for seed in seeds], [by_seed[seed] for seed in seeds]
    if base == "sft":
        deviation, freedom = pooled([*arms.values()])
    else:
        trained = [answers.get(policy, {}) for policy in (base, *arms)]
        common = [seed for seed in before if all(seed in by_seed for by_seed in trained)]
        deviation, freedom = between([[by_seed[seed] for seed in common] for by_seed in trained])
    return {policy: gain_cells(*arm, deviation, freedom) for policy, arm in arms.items()}


def share(rows) -> str:
    return f"{100 * statistics.fmean(row['right'] for row in rows):.0f}"


def pooled(arms) -> tuple[float, int]:
    """spread of the arms' gains by seed. arms: for each the rows of its seeds' answers before and after."""
    return spread([[statistics.fmean(differences(*of_seed)) for of_seed in zip(*arm)] for arm in arms])


def between(arms) -> tuple[float, int]:
    """The standard deviation over seeds of the difference of two arms, from what an arm's seeds have of their own
    (verdicts.seed_variances), and its degrees of freedom. arms: for each the rows of its seeds, the same ones. (Were
    `pooled` given arms over one of them, the luck of that one would count as if it were of several.)"""
    if min(len(arms), len(arms[0])) < 2:
        return 0.0, 0
    shares = [[[statistics.fmean(row["right"] for row in rows)] for rows in of_arm] for of_arm in arms]
    means = torch.tensor(shares, dtype=torch.float64)
    _, of_arm = verdicts.seed_variances(means, torch.zeros_like(means[0]))
    return math.sqrt(2 * of_arm), (len(arms) - 1) * (len(arms[0]) - 1)


def gain_cells(before, after, deviation, freedom) -> list[str]:
    """Right before and after, and the gain with its interval."""
    middle, half = gain(before, after, deviation, freedom)
    right_ones = f"{share(sum(before, []))} -> {share(sum(after, []))} %"
    return [right_ones, f"{middle:+.2f} [{middle - half:+.2f}, {middle + half:+.2f}]"]


def task_cells(rows, tasks) -> list[str]:
    """Right by task, and the KL."""
    by_task = [f"{share([row for row in rows if row['category'] == task])} %" for task in tasks]
    return [*by_task, f"{statistics.fmean(row['kl'] for row in rows):.1f}"]


def compared(arms) -> list[list[str]]:
    """Cells of each arm, which has all seeds. arms: as pooled takes them."""
    deviation = pooled(arms)
    return [cells_of(*arm, *deviation) for arm in arms]


def cells_of(before, after, deviation, freedom) -> list[str]:
    rows = sum(after, [])
    gained = gain_cells(before, after, deviation, freedom)
    return [*gained, ", ".join(map(share, after)), *task_cells(rows, tasks_of(rows))]


def tasks_of(rows) -> list[str]:
    return sorted({row["category"] for row in rows})


def titles_of(folders, tasks) -> list[str]:
    """Titles of the cells that `compared` makes."""
    seeds = ", ".join(folder.name for folder in folders)
    return ["right", "gain", f"right, seeds {seeds}, %", *tasks, "KL"]


def learned(folders) -> list[str]:
    """Make the table of PPO with reward models of few and many labelled pairs, and with the check itself: how well
    each tells a right from a wrong held-out answer, and what is gained in truth and in the model's own score."""
    counts = sorted(int(folder.name[7:]) for folder in folders[0].glob("reward_*"))
    answers = read(folders)
    arms = [([*answers["sft"].values()], [*answers["ppo"].values()])]
    firsts = [["the check", "", "", "", ""]]
    for n in counts:
        before, after = ([*by_seed.values()] for by_seed in read(folders, f"answers_{n}").values())
        arms.append((before, after))
        ranked = {}
        for folder in folders:
            for row in files.read_jsonl(folder / f"reward_{n}" / "samples.jsonl"):
                for part in ("all", row["category"]):
                    ranked.setdefault(part, []).append(row)
        accuracies = [f"{measures.pair_metrics(ranked[part])['accuracy']:.0%}" for part in sorted(ranked)]
        firsts.append([f"a reward model of {n:,} pairs", *accuracies, proxy(before, after)])
    tasks = tasks_of(sum(arms[0][0], []))
    lines = [[*first, *cells] for first, cells in zip(firsts, compared(arms))]
    titles = ["reward", "accuracy", *(f"of {task}" for task in tasks), "own gain"]
    return markdown([*titles, *titles_of(folders, tasks)], lines)


def proxy(before, after) -> str:
    """The gain in the scorer's score, in standard deviations of its scores of the answers before; mean over seeds."""
    gains = []
    for old, new in zip(before, after):
        scores, later = ([row["score"] for row in rows] for rows in (old, new))
        gains.append((statistics.fmean(later) - statistics.fmean(scores)) / statistics.stdev(scores))
    return f"{statistics.fmean(gains):+.1f}"


def sampler_cells(folders, name) -> list[str]:
    """How far the sampler's probabilities are from the trainer's in the rollouts of a run: k3 and the largest ratio."""
    rows = [row for folder in folders for row in files.read_jsonl(folder / name / "metrics.jsonl")]
    rows = [row for row in rows if "policy/sampler_kl" in row]
    kl = statistics.fmean(row["policy/sampler_kl"] for row in rows)
    return [f"{kl:.1e}", f"{max(row['policy/sampler_ratio_max'] for row in rows):.2f}"]


def ratios(folders) -> list[str]:
    """Make the table of the sampler's probabilities against the trainer's in SFT's first rollouts."""
    arms = [(dtype, p) for dtype in ("float32", "bfloat16") for p in ("1.0", "0.9")]
    lines = [[dtype, p, *sampler_cells(folders, f"ratios_{dtype}_{p}")] for dtype, p in arms]
    return markdown(["", "`--top-p`", "k3 per token", "largest ratio"], lines)


def dtypes(folders) -> list[str]:
    """Make the table of PPO in bfloat16, with and without the weights that correct for the sampler. All answers are
    sampled in bfloat16."""
    before, in_float32, capped, plain = ([*of.values()] for of in read(folders, "answers_bfloat16").values())
    arms = [(before, in_float32), (before, capped), (before, plain)]
    firsts = [
        ["float32", *sampler_cells(folders, "ppo")],
        ["bfloat16, `--importance-cap 2`", *sampler_cells(folders, "ppo_bfloat16")],
        ["bfloat16, `--importance-cap 0`", *sampler_cells(folders, "ppo_bfloat16_uncorrected")],
        ["the cap, over none", "", ""],
    ]
    cells = [*compared(arms), cells_of(plain, capped, *between([in_float32, capped, plain]))]
    lines = [[*first, *of_arm] for first, of_arm in zip(firsts, cells, strict=True)]
    titles = titles_of(folders, tasks_of(sum(before, [])))
    return markdown(["PPO in", "k3 per token", "largest ratio", *titles], lines)


def samples(folders) -> list[str]:
    """The first six held-out prompts of the last seed, with each policy's answer; correct ones are bold."""
    answers = {policy: by_seed[folders[-1]][:6] for policy, by_seed in read(folders[-1:]).items()}
    lines = []
    for same in zip(*answers.values()):
        texts = [" ".join(row["response"].split()).replace("|", "\\|") for row in same]
        cells = [f"**{text}**" if row["right"] else text for row, text in zip(same, texts)]
        lines.append([same[0]["prompt"][-1]["content"], *cells])
    return markdown(["prompt", *(METHODS.get(policy, "SFT") for policy in answers)], lines)


def rollouts(run) -> tuple[int, list[float]]:
    """Return the responses per rollout of a run, and the share of correct ones in each rollout."""
    args = files.read_json(run / "args.json")["args"]
    shares = []
    for row in files.read_jsonl(run / "metrics.jsonl"):
        shares += [row[key] for key in ("reward/score", "pool/score") if key in row]
    return args["prompts_per_iteration"] * args["n_samples"], shares


def draw(folders, path):
    """Draw the share of correct answers in each rollout by the number of responses sampled before it, and at the end
    that on held-out prompts. Thin lines: single seeds."""
    drawing, [axis] = plots.figure(1, (6.4, 3.8))
    ends = []
    for number, (method, by_seed) in enumerate(list(read(folders).items())[1:]):
        curves = []
        for folder, rows in by_seed.items():
            n, shares = rollouts(folder / method)
            shares.append(statistics.fmean(row["right"] for row in rows))
            curves.append([100 * share for share in shares])
            x = [n * i for i in range(len(shares))]
            axis.plot(x, curves[-1], color=f"C{number}", linewidth=0.6, alpha=0.5)
        mean = [statistics.fmean(values) for values in zip(*curves)]
        axis.plot(x, mean, color=f"C{number}", linewidth=2)
        axis.plot(x[-1], mean[-1], "o", color=f"C{number}", markersize=6)
        ends.append((x[-1], mean[-1], METHODS[method], f"C{number}"))
    lowest = -math.inf
    for x_end, y, title, color in sorted(ends, key=lambda end: end[1]):  # names do not cover each other
        lowest = max(y, lowest + 5)
        axis.text(x_end + 25, lowest, title, color=color, va="center")
    axis.set_xlim(0, 1.3 * max(end[0] for end in ends))
    axis.set(xlabel="responses sampled so far", ylabel="right answers, %", ylim=(0, 100))
    axis.set_title("right answers of each rollout; the point: of held-out prompts", fontsize=9)
    plots.save(drawing, path)


TABLES = {  # what makes them, and the last file of each seed that it reads
    gains: "answers/samples.jsonl",
    samples: "answers/samples.jsonl",
    learned: "labels_test.jsonl",
    ratios: "ratios_bfloat16_0.9/summary.json",
    dtypes: "answers_bfloat16/samples.jsonl",
}


def main(folder, seeds):
    folders = [Path(folder, seed) for seed in seeds.split()]
    name = "_".join(("real_reward", *Path(folder).name.split("+"), *seeds.split()))
    for make, needed in TABLES.items():
        if not all((folder / needed).exists() for folder in folders):
            continue
        suffix = "" if make is gains else f"_{make.__name__}"
        lines = make(folders)
        print("\n".join([*lines, ""]))
        publish(name + suffix, lines)
    draw(folders, Path(folder, "rewards.png"))


if __name__ == "__main__":
    main(*sys.argv[1:])
