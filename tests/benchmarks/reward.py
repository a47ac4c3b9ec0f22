"""reward.py against TRL's RewardTrainer on the same pairs, and rankings of six against their pairs one by one:
pairs per second, and peak memory of the process.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/reward.py --dataset hh.jsonl.gz --rankings rankings.jsonl.gz --trl-python trl/bin/python

All train a Llama of random weights (hidden 256, 6 layers, the vocabulary of --tokenizer) with a scalar head in
fp32 on rows of at most 512 tokens, 8 pairs a step, or, of rankings, 2 a step (30 pairs) against 30 pairs a step.
They take turns, ratios are taken turn by turn, and the first 2 steps of each do not count."""

import argparse
import json
import os
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, ROOT)
import peers  # noqa: E402

SKIP = 2


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    from common import comparisons

    clock = peers.clock()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy")
    rows = [
        {"chosen": [*c.prompt, peers.message(c.texts[0])], "rejected": [*c.prompt, peers.message(c.texts[1])]}
        for c in comparisons.load(args.dataset, "train", tokenizer, 512)
    ]
    config = RewardConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(
        f"{args.models}/policy", num_labels=1, dtype="float32"
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    RewardTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), callbacks=[clock], args=config
    ).train()  # fmt: skip
    return 8 * (len(clock.times) - SKIP) / (clock.times[-1] - clock.times[SKIP - 1])


def ours(args, dataset, batch_size, pairs):
    import reward

    folder = tempfile.mkdtemp()
    reward.main(
        reward.Args(
            model=f"{args.models}/policy", dataset=dataset, output_dir=folder, max_steps=args.steps, batch_size=batch_size,
            micro_batch_size=8, max_length=512, lr=1e-4, eval_every=0, save_every=0, length_prompts=0,
            eval_dataset=f"{args.rankings}/pair.jsonl", epochs=1,
        )
    )  # fmt: skip
    with open(f"{folder}/metrics.jsonl") as file:
        rows = [row for row in map(json.loads, file) if "perf/comparisons_per_s" in row]
    return (
        pairs
        * sum(row["data/comparisons"] for row in rows[SKIP:])
        / (rows[-1]["time_s"] - rows[SKIP - 1]["time_s"])
    )


def make_pairs(source, folder, tokenizer, n):
    """The first n pairs that fit: what both see once, each in an order of its own. And one pair to hold out."""
    from transformers import AutoTokenizer

    from common import comparisons

    words = AutoTokenizer.from_pretrained(tokenizer)
    rows = [c.row.data for c in comparisons.load(source, "train", words, 512)]
    for name, some in (("hh", rows[:n]), ("pair", rows[-1:])):
        with open(f"{folder}/{name}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in some)


def make_rankings(source, folder):
    """Rankings of six responses, all of different score, and the same as rows of one pair each."""
    from common import data

    with open(f"{folder}/six.jsonl", "w") as six, open(f"{folder}/pairs.jsonl", "w") as pairs:
        for row in data.load_rows(source, "rankings"):
            responses = list(
                {r["score"]: r for r in row.data["responses"] if len(r["text"]) < 1200}.values()
            )[:6]
            if len(responses) < 6 or len(row.data["instruction"]) > 600:
                continue
            six.write(json.dumps({"prompt": row.data["instruction"], "responses": responses}) + "\n")
            for i, a in enumerate(responses):
                for b in responses[i + 1 :]:
                    better, worse = (a, b) if a["score"] > b["score"] else (b, a)
                    pair = {"chosen": better["text"], "rejected": worse["text"]}
                    pairs.write(json.dumps({"prompt": row.data["instruction"], **pair}) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="pairs, as reward.py takes them")
    parser.add_argument("--rankings", required=True, help="rankings of six responses or more")
    parser.add_argument("--steps", type=int, default=14)
    peers.add_arguments(parser)
    args = parser.parse_args()
    runs = {
        "trl": lambda: trl(args),
        "ours": lambda: ours(args, args.dataset, 8, 1),
        "pairs": lambda: ours(args, f"{args.rankings}/pairs.jsonl", 30, 1),
        "six": lambda: ours(args, f"{args.rankings}/six.jsonl", 2, 15),
    }
    if args.only:
        return peers.report(runs[args.only]())
    args.models = tempfile.mkdtemp()
    peers.make_models(args.tokenizer, args.models)
    make_rankings(args.rankings, args.models)
    make_pairs(args.dataset, args.models, args.tokenizer, 8 * args.steps)
    args.dataset, args.rankings = f"{args.models}/hh.jsonl", args.models
    flags = ("models", "dataset", "rankings", "steps")
    peers.take_turns(__file__, list(runs), {"ours": "trl", "six": "pairs"}, flags, args)


if __name__ == "__main__":
    main()
