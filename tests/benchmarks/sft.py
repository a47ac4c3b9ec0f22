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
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(args.model),
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
            model=args.model, dataset=args.dataset, output_dir=folder, max_steps=args.steps, batch_size=8,
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
    parser.add_argument("--tokenizer", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", required=True, help="what sft.py takes")
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["trl", "packed", "rows"], help="run this one here and print JSON")
    parser.add_argument("--model", help="with --only: the folder of the model")
    args = parser.parse_args()
    if args.only:
        speed = trl(args) if args.only == "trl" else ours(args, packing=args.only == "packed")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        return print(json.dumps({"tokens_per_s": speed, "peak_gb": peak}))
    args.model = tempfile.mkdtemp()
    make_model(args.tokenizer, args.model)
    figures = {"trl": [], "packed": [], "rows": []}
    for _ in range(args.repeats):
        for name in figures:
            command = [args.trl_python if name == "trl" else sys.executable, __file__, "--only", name]
            for flag in ("model", "dataset", "steps"):
                command += [f"--{flag}", str(getattr(args, flag))]
            out = subprocess.run(command, capture_output=True, text=True)
            if out.returncode:
                sys.exit(out.stderr[-2000:])
            figures[name].append(json.loads(out.stdout.strip().splitlines()[-1]))
            speed, peak = figures[name][-1].values()
            print(f"{name:7} {speed:8.0f} tokens/s, peak {peak:.2f} GB", flush=True)
    for name in ("packed", "rows"):
        speed, peak = (
            statistics.median(a[key] / b[key] for a, b in zip(figures[name], figures["trl"]))
            for key in ("tokens_per_s", "peak_gb")
        )
        print(
            f"sft.py {name} / TRL: {speed:.2f} times the tokens per second, {peak:.2f} times the peak memory"
        )


if __name__ == "__main__":
    main()
