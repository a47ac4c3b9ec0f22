"""What docs/renewed_reward.sh needs beside the scripts: labels for a policy's responses, by the annotators of the
tiny world (common/tiny.py), and the table of all its runs.

    python tests/benchmarks/renewed_reward.py label POLICY PAIRS SEED FILE
    python tests/benchmarks/renewed_reward.py table FOLDER SEEDS
"""

import math
import random
import sys
from pathlib import Path

import peers  # noqa: F401, it lets common be found

from common import batches, generate, loading, metrics, tiny

ARMS, ROUNDS = ("first", "once", "renewed"), (1, 2, 3)


def utility(prompt, text):
    return tiny.gold_reward(prompt, text) + 0.1 * len(text.split())


def label(policy, n_pairs, seed, file):
    """So many pairs of different responses of a policy to training prompts, at most two of a prompt."""
    tokenizer, rng = loading.load_tokenizer(policy), random.Random(f"{seed}/{file}")
    prompts = generate.load_prompts("tiny", "train", tokenizer, max_tokens=96)
    chosen, rows = rng.sample(prompts, int(n_pairs)), []
    model = loading.load_policy(policy, tokenizer).eval()
    pairs = generate.sample_pairs(model, tokenizer, chosen, n=4, seed=int(seed), max_new_tokens=32, slots=256)
    for (prompt, one), (_, other) in zip(pairs[::2], pairs[1::2]):
        a, b = one.text, other.text
        if len({a, b, ""}) == 3 and len(rows) < int(n_pairs):
            odds = utility(prompt.question, a) - utility(prompt.question, b)
            better, worse = (a, b) if rng.random() < 1 / (1 + math.exp(-odds)) else (b, a)
            rows.append({"prompt": prompt.question, "chosen": better, "rejected": worse})
    assert len(rows) == int(n_pairs), f"only {len(rows)} pairs differ"
    metrics.write_jsonl(file, rows)


def scorer_figures(run):
    """Of a round's pool: correlation of score and true reward within a prompt, and its choice's true gain."""
    of_prompts, correlations, gaps = {}, [], []
    for row in metrics.read_jsonl(Path(run, "pool.jsonl")):
        gold = tiny.gold_score(row["prompt"][-1]["content"], row["response"])
        of_prompts.setdefault(batches.turns_key(row["prompt"]), []).append((row["score"], gold))
    for scored in of_prompts.values():
        correlations.append(metrics.correlation(*zip(*scored)))
        gaps.append(max(scored)[1] - min(scored)[1])
    correlations = [x for x in correlations if not math.isnan(x)]
    return sum(correlations) / len(correlations), sum(gaps) / len(gaps)


if __name__ == "__main__":
    {"label": label, "table": None}[sys.argv[1]](*sys.argv[2:])
