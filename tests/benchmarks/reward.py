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
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, ROOT)
SKIP = 2


def make_model(tokenizer, folder):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=256, intermediate_size=680, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=words.pad_token_id, eos_token_id=words.eos_token_id, bos_token_id=words.bos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    from common import preferences

    clock = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            clock.append(time.perf_counter())

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = [
        {"chosen": [*c.prompt, answer(c.texts[0])], "rejected": [*c.prompt, answer(c.texts[1])]}
        for c in preferences.load(args.dataset, "train", tokenizer, 512)
    ]
    config = RewardConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype="float32")
    model.config.pad_token_id = tokenizer.pad_token_id
    RewardTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_list(rows), callbacks=[Clock()], args=config
    ).train()  # fmt: skip
    return 8 * (len(clock) - SKIP) / (clock[-1] - clock[SKIP - 1])


def answer(text):
    return {"role": "assistant", "content": text}


def ours(args, dataset, batch_size, pairs):
    import reward

    folder = tempfile.mkdtemp()
    reward.main(
        reward.Args(
            model=args.model, dataset=dataset, output_dir=folder, max_steps=args.steps, batch_size=batch_size,
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

    from common import preferences

    words = AutoTokenizer.from_pretrained(tokenizer)
    rows = [c.row.data for c in preferences.load(source, "train", words, 512)]
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
    parser.add_argument("--tokenizer", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", required=True, help="pairs, as reward.py takes them")
    parser.add_argument("--rankings", required=True, help="rankings of six responses or more")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only", choices=["trl", "ours", "six", "pairs"], help="run this one here and print JSON"
    )
    parser.add_argument("--model", help="with --only: the folder of the model")
    args = parser.parse_args()
    if args.only:
        runs = {
            "trl": lambda: trl(args),
            "ours": lambda: ours(args, args.dataset, 8, 1),
            "six": lambda: ours(args, f"{args.rankings}/six.jsonl", 2, 15),
            "pairs": lambda: ours(args, f"{args.rankings}/pairs.jsonl", 30, 1),
        }
        speed = runs[args.only]()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return print(json.dumps({"pairs_per_s": speed, "peak_gb": peak}))
    args.model, folder = tempfile.mkdtemp(), tempfile.mkdtemp()
    make_model(args.tokenizer, args.model)
    make_rankings(args.rankings, folder)
    make_pairs(args.dataset, folder, args.tokenizer, 8 * args.steps)
    args.dataset = f"{folder}/hh.jsonl"
    args.rankings, figures = folder, {"trl": [], "ours": [], "pairs": [], "six": []}
    for _ in range(args.repeats):
        for name in figures:
            command = [args.trl_python if name == "trl" else sys.executable, __file__, "--only", name]
            for flag in ("model", "dataset", "rankings", "steps"):
                command += [f"--{flag}", str(getattr(args, flag))]
            out = subprocess.run(command, capture_output=True, text=True)
            if out.returncode:
                sys.exit(out.stderr[-2000:])
            figures[name].append(json.loads(out.stdout.strip().splitlines()[-1]))
            speed, peak = figures[name][-1].values()
            print(f"{name:6} {speed:8.1f} pairs/s, peak {peak:.2f} GB", flush=True)
    for name, base in (("ours", "trl"), ("six", "pairs")):
        speed, peak = (
            statistics.median(a[key] / b[key] for a, b in zip(figures[name], figures[base]))
            for key in ("pairs_per_s", "peak_gb")
        )
        print(f"{name} against {base}: {speed:.2f} times the pairs per second, {peak:.2f} of the peak memory")


if __name__ == "__main__":
    main()
