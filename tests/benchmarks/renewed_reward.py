"""For docs/results/renewed_reward.sh: labels by the annotators of the tiny world, and the table of its runs.

python tests/benchmarks/renewed_reward.py label POLICY PAIRS SEED FILE
python tests/benchmarks/renewed_reward.py table FOLDER SEEDS"""

import math
import random
import statistics
import sys

import peers  # noqa: F401, it lets common be found

from common.responses import sample_pairs
from common.data import files, progress, tiny
from common.data.prompt_sets import load_prompts
from common.loading import pretrained
from common.scoring import measures

OVER = "once_3/first_3 renewed_3/first_3 renewed_3/once_3 first_3/first_1 once_3/once_1 renewed_3/renewed_1"
utility = lambda prompt, text: tiny.gold_reward(prompt, text) + 0.1 * len(text.split())  # an annotator's


def label(policy, n_pairs, seed, file):
    """Make this number of pairs of different responses of a policy to training prompts, at most two per prompt."""
    rng, tokenizer, rows = random.Random(f"{seed}/{file}"), pretrained.load_tokenizer(policy), []
    prompts = load_prompts("tiny", "train", tokenizer, max_tokens=96)
    prompts, model = rng.sample(prompts, int(n_pairs)), pretrained.load_policy(policy, tokenizer).eval()
    pairs = sample_pairs(model, tokenizer, prompts, n=4, seed=int(seed), max_new_tokens=32, slots=256)
    for (prompt, a), (_, b) in zip(pairs[::2], pairs[1::2]):
        if len({a.text, b.text, ""}) == 3 and len(rows) < int(n_pairs):
            odds = utility(prompt.question, a.text) - utility(prompt.question, b.text)
            better, worse = (a, b) if rng.random() < 1 / (1 + math.exp(-odds)) else (b, a)
            rows.append({"prompt": prompt.question, "chosen": better.text, "rejected": worse.text})
    files.write_jsonl(file, rows)


def agrees(run):
    """Count the pairs of a round, chosen by the reward model, that the annotators' utility orders the same way."""
    rows = [(row["prompt"][-1]["content"], row) for row in files.read_jsonl(f"{run}/pairs.jsonl")]
    return measures.accuracy([utility(x, row["chosen"]) - utility(x, row["rejected"]) for x, row in rows])


def table(folder, seeds):
    """True reward over SFT, and over other runs, on the same prompts: by seed, of all, of those of no hazard."""
    rows, lines, seeds = {}, [], range(int(seeds))
    for seed in seeds:
        for row in files.read_jsonl(f"{folder}/{seed}/evaluate/samples.jsonl"):
            for group in (f"seed {seed}", "all", "no hazard")[: 2 if row["is_safety"] else 3]:
                rows.setdefault((group, row["policy"]), []).append(row)
    over_sft = [f"{name}/sft" for group, name in rows if group == "all" and name != "sft"]
    for after, before in [pair.split("/") for pair in over_sft + OVER.split()]:
        line = {"run": after, "KL": f"{statistics.fmean(row['kl'] for row in rows['all', after]):.2f}"}
        line["agrees"] = " ".join(f"{agrees(f'{folder}/{seed}/{after}'):.0%}" for seed in seeds)
        for group in sorted(group for group, name in rows if name == "sft"):
            gain = measures.gains(rows[group, before], rows[group, after], {"gain": "gold"})
            line[group] = measures.interval(gain, "gain")
        lines.append({**line, "over": before})
    progress.print_table(lines)


if __name__ == "__main__":
    {"label": label, "table": table}[sys.argv[1]](*sys.argv[2:])
