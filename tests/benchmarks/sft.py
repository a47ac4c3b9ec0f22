"""sft.py against TRL's SFTTrainer on the same rows: tokens of text per second, and peak memory of the process.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/sft.py --dataset rows.jsonl.gz --trl-python trl/bin/python

Both train a Llama of random weights (hidden 256, 6 layers, the vocabulary of --tokenizer) in fp32 with batch
8 on rows of at most 512 tokens: TRL not packed, 8 rows a step; sft.py packed, 8 blocks of 512 a step, and not
packed, 8 rows a step. Padding does not count as text. The three take turns, ratios are taken turn by turn,
and the first 2 steps of each do not count."""

import argparse
import json
import os
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, ROOT)
import peers  # noqa: E402

SKIP = 2


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from common import data

    clock = []

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "num_tokens" in (logs or {}):
                clock.append((time.perf_counter(), logs["num_tokens"]))

    dialogues = [data.sft_messages(row.data)[0] for row in data.load_rows(args.dataset, "sft")]
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        packing=False, learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(f"{args.models}/policy"),
        train_dataset=Dataset.from_list([{"prompt": d[:-1], "completion": d[-1:]} for d in dialogues]),
        callbacks=[Clock()],
        args=config,
    ).train()
    (t0, n0), (t1, n1) = clock[SKIP - 1], clock[-1]
    return (n1 - n0) / (t1 - t0)


def ours(args, packing):
    import sft

    folder = tempfile.mkdtemp()
    sft.main(
        sft.Args(
            model=f"{args.models}/policy", dataset=args.dataset, output_dir=folder, max_steps=args.steps, batch_size=8,
            micro_batch_size=8, max_length=512, lr=1e-4, packing=packing, eval_every=0, save_every=0,
            sample_prompts=0,
        )
    )  # fmt: skip
    with open(f"{folder}/metrics.jsonl") as file:
        rows = [row for row in map(json.loads, file) if "perf/tokens_per_s" in row][SKIP:]
    seconds = sum(row["data/tokens"] / row["perf/tokens_per_s"] for row in rows)
    return sum(row["data/tokens"] for row in rows) / seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="what sft.py takes")
    parser.add_argument("--steps", type=int, default=12)
    peers.add_arguments(parser)
    args = parser.parse_args()
    runs = {
        "trl": lambda: trl(args),
        "packed": lambda: ours(args, packing=True),
        "rows": lambda: ours(args, packing=False),
    }
    if args.only:
        return peers.report(runs[args.only]())
    args.models = tempfile.mkdtemp()
    peers.make_models(args.tokenizer, args.models)
    against = {"packed": "trl", "rows": "trl"}
    peers.take_turns(__file__, list(runs), against, ("models", "dataset", "steps"), args)


if __name__ == "__main__":
    main()
