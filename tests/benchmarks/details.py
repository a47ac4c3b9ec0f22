"""Add lines and a picture to the page of a group of experiments.py, with a function named like the group. Each
function gets the group's Results, gain(arm, only) -> verdicts.Difference of the true reward over the first policy
on a part of the prompts (experiments.PROMPTS), and the folder of the group's runs."""

from statistics import fmean

import peers  # noqa: F401 (it puts the project into sys.path)

from common.data import files, tiny
from common.run import plots
from common.scoring import measures

REFUSAL = " ".join(tiny.REFUSAL)


def question(row) -> str:
    return row["prompt"][-1]["content"] if isinstance(row["prompt"], list) else row["prompt"]


def worth_of_a_word(rows) -> float:
    """What a longer response's word is worth to a score, in units of the true reward: the slope of the score over
    length among pairs with the same difference of true reward, divided by its slope over that difference. 0 for a
    score that follows the truth, however noisy or curved; 0.1 for the annotators. rows: of samples.jsonl of scorers."""
    same_gap = {}
    for score, _, a, b in measures.pairs_of(rows):
        gap, longer = round(a["gold"] - b["gold"], 3), a["tokens"] - b["tokens"]
        if gap:
            same_gap.setdefault(abs(gap), []).append((longer, score) if gap > 0 else (-longer, -score))
    xy = xx = 0.0
    for pairs in same_gap.values():
        lengths, scores = map(fmean, zip(*pairs))
        xy += sum((x - lengths) * (y - scores) for x, y in pairs)
        xx += sum((x - lengths) ** 2 for x, _ in pairs)
    of_word = xy / xx
    of_gap = sum(gap * (y - of_word * x) for gap, pairs in same_gap.items() for x, y in pairs)
    return of_word * sum(gap**2 * len(pairs) for gap, pairs in same_gap.items()) / of_gap


def forgetting(results, gain, folder) -> list[str]:
    """Count the refusals among rehearsed rows; draw each arm's gain on its own commands and its loss on others."""
    sets = {"the best of all commands": "best", "any of all commands": "any", "the best of the two commands": "two"}
    of_seeds = lambda name: [files.read_jsonl(folder / str(s) / f"{name}.jsonl") for s in range(results.seeds)]
    rows = {title: sum(of_seeds(name), []) for title, name in sets.items()} | {"SFT's own data": tiny.rows("sft", "train")}
    lines = ["| rehearsed | rows | prompts with a hazard | refused, of these | perfect answers |", "|---|---|---|---|---|"]
    for title, of_set in rows.items():
        answers = [(question(row), row["completion"]) for row in of_set]
        hazards = [text == REFUSAL for prompt, text in answers if tiny.is_safety(prompt)]
        perfect = fmean(tiny.gold_score(*answer) >= tiny.perfect_score(answer[0]) for answer in answers)
        n = len(of_set) // (1 if title == "SFT's own data" else results.seeds)
        share = len(hazards) / len(answers)
        lines.append(f"| {title} | {n:,} | {share:.0%} | {fmean(hazards):.0%} | {perfect:.0%} |")
    drawing, axes = plots.figure(2, (6.2, 5.2))
    names = [arm.removeprefix("rehearsed: ") for arm in results.arms]
    practised = [gain(arm, "first and ends") for arm in results.arms]
    for axis, part, title in zip(axes, ("the six others", "hazard"), ("the six others", "prompts with a hazard")):
        points(axis, names, practised, [gain(arm, part) for arm in results.arms])
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set(title=f"true reward over SFT: {title}", xlabel="the two commands that PPO trains on", ylabel=title)
    plots.save(drawing, folder / "forgetting.png")
    return lines


def points(axis, names, xs, ys):
    """Draw a point for each name at two Differences, with their intervals and the name next to it."""
    labels = []
    for number, (name, x, y) in enumerate(zip(names, xs, ys)):
        bars = {"xerr": [[x.mean - x.low], [x.high - x.mean]], "yerr": [[y.mean - y.low], [y.high - y.mean]]}
        style = {"fmt": "o", "color": f"C{number % 10}", "markersize": 5, "ecolor": "lightgray", "elinewidth": 0.8}
        axis.errorbar(x.mean, y.mean, **bars, **style)
        labels.append((x.mean, y.mean, name.replace("`", ""), style["color"]))
    axis.margins(x=0.35, y=0.1)
    plots.label_points(axis, labels)
    for text in axis.texts:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0})


def ladder(results, gain, folder) -> list[str]:
    """Count pairs and judgements, and the pairs whose chosen response is truly the better one, by iteration;
    draw these shares and what the policies gain."""
    lines = ["| | pairs | judgements a pair | truly better, by iteration (no hazard) |", "|---|---|---|---|"]
    shares = {}
    for arm in results.arms:
        pairs, scored = [], 0
        for seed in range(results.seeds):
            out = results.folders[arm, seed]
            out = out.with_name(out.name.partition("_part_")[0])  # learned in parts: the run with all of its pairs
            pairs += files.read_jsonl(out / "pairs.jsonl")
            scored += len(files.read_jsonl(out / "pool.jsonl"))
        by_iteration = {}
        for pair in pairs:
            if not tiny.is_safety(question(pair)):
                chosen, rejected = (tiny.gold_score(question(pair), pair[x]) for x in ("chosen", "rejected"))
                right = (chosen > rejected) + (chosen == rejected) / 2
                by_iteration.setdefault(pair["iteration"], []).append(right)
        shares[arm] = [fmean(by_iteration[i]) for i in sorted(by_iteration)]
        each = scored / len(pairs) if scored else 2  # given pairs
        lines.append(f"| {arm} | {len(pairs) / results.seeds:,.0f} | {each:.1f} | {', '.join(f'{x:.0%}' for x in shares[arm])} |")
    drawing, (left, right) = plots.figure(2, (6.2, 4.6))
    wrong = [arm for arm in results.arms if len(shares[arm]) > 1 and min(shares[arm]) < 1]
    for arm in wrong:
        left.plot(range(1, len(shares[arm]) + 1), [100 * x for x in shares[arm]], "o-", label=arm)
    left.set(title="pairs in the right order by the truth, no hazard", xlabel="iteration", ylabel="%", xticks=(1, 2, 3))
    labels = []
    for arm in results.arms:
        x = gain(arm, "no hazard")
        kl = results.values(arm, "kl").mean().item()
        color = f"C{wrong.index(arm)}" if arm in wrong else "black"
        bars = [[x.mean - x.low], [x.high - x.mean]]
        right.errorbar(kl, x.mean, yerr=bars, fmt="o", color=color, markersize=5, elinewidth=0.8, ecolor="lightgray")
        short = arm.replace("offline, SFT's responses", "offline own").replace("SFT's responses", "own")
        short = short.replace("offline, given pairs, annotators", "given pairs")
        labels.append((kl, x.mean, short.replace("annotators, in three parts", "in parts"), color))
    right.set(title="true reward over SFT, no hazard", xlabel="KL to SFT (nats)", xscale="log", xlim=(0.05, 50))
    right.xaxis.set_major_formatter("{x:g}")
    plots.label_points(right, labels)
    plots.save(drawing, folder / "ladder.png")
    return lines


def temperature(results, gain, folder) -> list[str]:
    """List the temperatures that the sweep chose before each iteration."""
    lines = ["| | seed | temperature chosen before each iteration |", "|---|---|---|"]
    for arm, seed in results.folders:
        chosen = ", ".join(f"{x:g}" for x in temperatures_of(results.folders[arm, seed]))
        lines.append(f"| {arm} | {seed} | {chosen} |")
    return lines


def rise_of_temperature(folder) -> float:
    """From the first iteration to the last."""
    chosen = temperatures_of(folder)
    return chosen[-1] - chosen[0]


def temperatures_of(folder) -> list[float]:
    """List the temperatures that the sweep of rejection_sampling.py chose, one for each iteration."""
    versions = files.read_json(folder / "summary.json")["versions"].values()
    return [row["sweep/temperature"] for row in versions if "sweep/temperature" in row]


def rise_by_n(folder, curve) -> float:
    """How much the expected largest ("max") or median score of SFT's samples rises from one sample to eight, at the
    temperature that the sweep chose."""
    curves = files.read_jsonl(folder / "curves.jsonl")
    [chosen] = [row for row in curves if row["policy"] == curves[0]["policy"] and row["chosen"]]
    return chosen[curve][7] - chosen[curve][0]


def gained_by_both_orders(folder) -> float:
    """How much more often a labeler agrees with people when both orders are averaged. folder: of an arm that is named
    after the labeler (labels of `biased`)."""
    labels = folder.parent / f"labels_{folder.name.rpartition('_')[2]}" / "summary.json"
    summary = files.read_json(labels)
    return summary["alignment"] - summary["alignment/one_order"]


def temperatures(results, gain, folder) -> list[str]:
    """List the win rates over the data set's answers at both temperatures, the means over the seeds."""
    lines = ["| | T = 0 | T = 1 | lost |", "|---|---|---|---|"]
    for arm in results.arms:
        of_seeds = [map(fmean, games(results.folders[arm, seed])) for seed in range(results.seeds)]
        cold, warm = map(fmean, zip(*of_seeds))
        lines.append(f"| {arm} | {cold:.1%} | {warm:.1%} | {cold - warm:.1%} |")
    return lines


def renewed_reward(results, gain, folder) -> list[str]:
    """List how often each arm's last reward model is right, the means over the seeds."""
    columns = ("right on late answers", "right on the pairs of its own round")
    lines = [f"| reward model of round 3 | {' | '.join(columns)} |", "|---|---|---|"]
    for arm in (arm for arm in results.arms if arm.endswith("round 3")):
        shares = [f"{results.values(arm, column).mean():.1%}" for column in columns]
        lines.append(f"| {arm.removesuffix(', round 3')} | {' | '.join(shares)} |")
    return lines


def lost_by_temperature(folder) -> list[float]:
    """What a policy's game against the data set's answer loses from T = 0 to T = 1, for each prompt."""
    return [cold - warm for cold, warm in zip(*games(folder), strict=True)]


def games(folder) -> list[list[float]]:
    """At T = 0 and at T = 1, for each prompt, in their alphabetic order: 1 if a policy's answer is better than the data
    set's, a half if it is as good, or 0."""
    rows = sorted(files.read_jsonl(folder.parent / "temperatures" / "samples.jsonl"), key=question)
    asked = lambda policy, t: [row for row in rows if row["policy"] == policy and row["temperature"] == t]
    found = []
    for t in (0, 1):
        sides = [asked("dataset", t), asked(folder.name, t)]
        assert [*map(question, sides[0])] == [*map(question, sides[1])]
        theirs, ours = ([row["gold"] for row in of_policy] for of_policy in sides)
        margin = measures.against(*sides, None)["gold_tie_margin"]
        found.append(measures.outcomes(ours, theirs, margin))
    return found


def labels(results, gain, folder) -> list[str]:
    """How often the labels of the 12,000 pairs agree with people's (the mean over the seeds) and with the true
    helpfulness (the mean, and each seed's), in percent."""
    people = [{**row, "preference": 1.0, "human": 1.0} for row in tiny.rows("preferences", "train")]
    of = lambda name: [files.read_jsonl(folder / f"{s}/labels_{name}/rows.jsonl") for s in range(results.seeds)]
    labelled = {"people": [people], "smaller": of("smaller"), "same size": of("same_size"), "larger": of("larger")}
    gold = lambda row, side: tiny.gold_reward(question(row), row[side])
    lines = ["| who labels | agrees with people | with the truth | by seed |", "|---|---|---|---|"]
    for name, of_seeds in labelled.items():
        human, true = [], []
        for rows in of_seeds:
            truths = [(row["preference"] - 0.5, gold(row, "chosen") - gold(row, "rejected")) for row in rows]
            human.append(measures.accuracy([(row["preference"] - 0.5) * (row["human"] - 0.5) for row in rows]))
            true.append(measures.accuracy([p * x for p, x in truths if x]))
        each = ", ".join(f"{100 * x:.1f}" for x in true) if len(true) > 1 else "the same pairs"
        lines.append(f"| {name} | {fmean(human):.1%} | {fmean(true):.1%} | {each} |")
    return lines
