"""reward.py against TRL's RewardTrainer on the same pairs, and rankings of six against their pairs one by one:
pairs per second, and peak memory of the process.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/trl_reward.py --dataset hh.jsonl.gz --rankings rankings.jsonl.gz --trl-python trl/bin/python

All train a Llama of random weights (hidden 256, 6 layers, the vocabulary of --tokenizer) with a scalar head in
fp32 on rows of at most 512 tokens, with 8 pairs per step; for rankings, 2 per step (30 pairs) against 30 pairs.
They take turns, ratios are per turn, and the first 2 steps of each do not count."""

import itertools
import tempfile

import peers


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    from common.data import comparisons

    clock = peers.clock()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy")
    rows = [
        {"chosen": [*c.prompt, peers.message(c.texts[0])], "rejected": [*c.prompt, peers.message(c.texts[1])]}
        for c in comparisons.load(args.dataset, "train", tokenizer, 512)
    ]
    config = RewardConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        learning_rate=1e-4, **peers.STEPS,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(
        f"{args.models}/policy", num_labels=1, dtype="float32"
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    RewardTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), callbacks=[clock], args=config
    ).train()  # fmt: skip
    return peers.per_second(8, clock.times)


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
    rows, skip = peers.rows_of(folder, "perf/comparisons_per_s"), peers.SKIP
    n = pairs * sum(row["data/comparisons"] for row in rows[skip:])
    return n / (rows[-1]["time_s"] - rows[skip - 1]["time_s"])


def prepare(args):
    """The first pairs that fit: what both see once, each in an order of its own. And one pair to hold out;
    rankings of six responses, all of different score, and the same as rows of one pair each."""
    from common.data import comparisons, files, mixtures
    from common.loading import pretrained

    words = pretrained.load_tokenizer(args.tokenizer, quiet=True)
    loaded = [c.row.data for c in comparisons.load(args.dataset, "train", words, 512)]
    rows = {"hh": loaded[: 8 * args.steps], "pair": loaded[-1:], "six": [], "pairs": []}
    for row in mixtures.load_rows(args.rankings, "rankings"):
        prompt, short = row.data["instruction"], [r for r in row.data["responses"] if len(r["text"]) < 1200]
        responses = list({r["score"]: r for r in short}.values())[:6]
        if len(responses) < 6 or len(prompt) > 600:
            continue
        rows["six"].append({"prompt": prompt, "responses": responses})
        for a, b in itertools.combinations(responses, 2):
            better, worse = (a, b) if a["score"] > b["score"] else (b, a)
            rows["pairs"].append({"prompt": prompt, "chosen": better["text"], "rejected": worse["text"]})
    for name in rows:
        files.write_jsonl(f"{args.models}/{name}.jsonl", rows[name])
    args.dataset, args.rankings = f"{args.models}/hh.jsonl", args.models


if __name__ == "__main__":
    flags = {"dataset": "pairs, as reward.py takes them", "rankings": "of six responses or more", "steps": 14}
    runs = {
        "trl": trl,
        "ours": lambda args: ours(args, args.dataset, 8, 1),
        "pairs": lambda args: ours(args, f"{args.rankings}/pairs.jsonl", 30, 1),
        "six": lambda args: ours(args, f"{args.rankings}/six.jsonl", 2, 15),
    }
    peers.compare(__file__, __doc__, flags, runs, {"ours": "trl", "six": "pairs"}, prepare)
