"""For group renewed_reward of experiments.py: labels by the annotators of the tiny world.

python tests/benchmarks/renewed_reward.py --policy runs/sft --pairs 6000 --output labels.jsonl --seed 0"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import peers  # noqa: F401, it lets common be found
import tyro

from common.responses import sample_responses
from common.data import files, tiny
from common.data.prompt_sets import load_prompts
from common.loading import pretrained
from common.scoring import measures


def utility(prompt, text) -> float:
    """An annotator's: helpfulness, and 0.1 for each word."""
    return tiny.gold_reward(prompt, text) + 0.1 * len(text.split())


@dataclass
class Args:
    policy: str
    """Its responses are labelled."""
    output: Path
    """File of the pairs."""
    pairs: int = 2000
    """Number of pairs of different responses to training prompts, at most two per prompt."""
    seed: int = 0


def main(args: Args):
    """Label pairs by Bradley-Terry on the annotators' utility."""
    rng = random.Random(f"{args.seed}/{args.output.name}")
    tokenizer, rows = pretrained.load_tokenizer(args.policy), []
    prompts = load_prompts("tiny", "train", tokenizer, max_tokens=96)
    prompts, model = rng.sample(prompts, args.pairs), pretrained.load_policy(args.policy, tokenizer).eval()
    sampled = sample_responses(model, tokenizer, prompts, n=4, seed=args.seed, max_new_tokens=32, slots=256)
    for (prompt, a), (_, b) in zip(sampled[::2], sampled[1::2]):
        if len({a.text, b.text, ""}) == 3 and len(rows) < args.pairs:
            odds = utility(prompt.question, a.text) - utility(prompt.question, b.text)
            better, worse = (a, b) if rng.random() < 1 / (1 + math.exp(-odds)) else (b, a)
            rows.append({"prompt": prompt.question, "chosen": better.text, "rejected": worse.text})
    files.write_jsonl(args.output, rows)


def right_on_its_own(run) -> float:
    """Return the share of a run's pairs, chosen by its scorer, that the annotators' utility orders the same way."""
    rows = [(row["prompt"][-1]["content"], row) for row in files.read_jsonl(f"{run}/pairs.jsonl")]
    return measures.accuracy([utility(x, row["chosen"]) - utility(x, row["rejected"]) for x, row in rows])


def late_answers(file):
    """Write pairs that all reward models can be compared on: of the answers of the second and the third policy, of
    both arms with labels of their own, the one with the larger utility is chosen. Equal utilities are left out."""
    by_policy, rows = {}, []
    for row in files.read_jsonl(file.parent / "evaluate" / "samples.jsonl"):
        by_policy.setdefault(row["policy"], []).append(row)
    for arm in ("trained_once", "renewed"):
        for pair in zip(by_policy[f"{arm}_round_2"], by_policy[f"{arm}_round_3"], strict=True):
            prompt = pair[0]["prompt"][-1]["content"]
            (low, worse), (high, better) = sorted((utility(prompt, row["response"]), row["response"]) for row in pair)
            if worse and better and low < high:
                rows.append({"prompt": prompt, "chosen": better, "rejected": worse})
    files.write_jsonl(file, rows)


def right_on_late(run) -> float:
    """Return the share of the late answers' pairs that the scorer of an arm's last round puts in order."""
    rows = files.read_jsonl(run.parent / "ranked" / "samples.jsonl")
    of_arm = [row for row in rows if row["scorer"] == run.name.partition("_")[0]]
    return measures.accuracy([difference for difference, *_ in measures.pairs_of(of_arm)])


if __name__ == "__main__":
    main(tyro.cli(Args))
