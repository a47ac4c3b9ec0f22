"""sft.py against TRL's SFTTrainer on the same rows: tokens of text per second, and peak memory of the whole
process.

    pip install trl==1.16.0                        in an environment of its own (--trl-python names its
    interpreter) python tests/benchmarks/sft.py --model DIR --dataset rows.jsonl.gz --trl-python
    trl/bin/python
 Both train on rows of at most 512 tokens with batch 8 in fp32: TRL not packed (8 rows a step), sft.py packed
(8 blocks of 512 a step) and not packed (8 rows a step). Padding is not counted as text. Runs alternate,
ratios are pair by pair, the first 2 steps do not count."""

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SKIP = 2


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    clock = []

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "num_tokens" in (logs or {}):
                clock.append((time.perf_counter(), logs["num_tokens"]))

    with gzip.open(args.dataset, "rt") as file:
        rows = [json.loads(line) for line in file]
    rows = [
        {
            "prompt": [{"role": "user", "content": row["instruction"]}],
            "completion": [{"role": "assistant", "content": max(row["responses"], key=lambda r: r["score"])["text"]}],
        }
        for row in rows
    ]
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512, packing=False, learning_rate=1e-4,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"), processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(rows), callbacks=[Clock()], args=config,
    ).train()
    (t0, n0), (t1, n1) = clock[SKIP - 1], clock[-1]
    return (n1 - n0) / (t1 - t0)


def ours(args, packing):
    sys.path.insert(0, ROOT)
    import sft

    folder = tempfile.mkdtemp()
    sft.main(
        sft.Args(
            model=args.model, dataset=args.dataset, output_dir=folder, max_steps=args.steps, batch_size=8, micro_batch_size=8, max_length=512,
            lr=1e-4, packing=packing, eval_every=0, save_every=0, sample_prompts=0,
        )
    )
    rows = [json.loads(line) for line in open(f"{folder}/metrics.jsonl")]
    rows = [row for row in rows if "perf/tokens_per_s" in row][SKIP:]
    text = sum(row["data/tokens"] for row in rows)
    return text / sum(row["data/tokens"] / row["perf/tokens_per_s"] for row in rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="a folder, e.g. a random Llama of hidden 256, 6 layers, vocabulary 49,152")
    parser.add_argument("--dataset", required=True, help="a .jsonl.gz of instruction + responses [{text, score}]")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["trl", "packed", "rows"], help="run this one here and print JSON")
    args = parser.parse_args()
    if args.only:
        speed = trl(args) if args.only == "trl" else ours(args, packing=args.only == "packed")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return print(json.dumps({"tokens_per_s": speed, "peak_gb": peak}))
    figures = {"trl": [], "packed": [], "rows": []}
    for _ in range(args.repeats):
        for name in figures:
            python = args.trl_python if name == "trl" else sys.executable
            command = [python, __file__, "--only", name, "--model", args.model, "--dataset", args.dataset, "--steps", str(args.steps)]
            out = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            if out.returncode:
                sys.exit(out.stderr[-2000:])
            figures[name].append(json.loads(out.stdout.strip().splitlines()[-1]))
            print(f"{name:7} {figures[name][-1]['tokens_per_s']:8.0f} tokens/s, peak {figures[name][-1]['peak_gb']:.2f} GB", flush=True)
    for name in ("packed", "rows"):
        speed = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(figures[name], figures["trl"]))
        memory = statistics.median(a["peak_gb"] / b["peak_gb"] for a, b in zip(figures[name], figures["trl"]))
        print(f"sft.py {name} / TRL: {speed:.2f} times the tokens per second, {memory:.2f} times the peak memory")


if __name__ == "__main__":
    main()
