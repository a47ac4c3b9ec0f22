"""sft.py against TRL's SFTTrainer on the same rows: tokens of text per second, and peak memory of the process.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/trl_sft.py --dataset rows.jsonl.gz --trl-python trl/bin/python

Both train a Llama of random weights (hidden 256, 6 layers, the vocabulary of --tokenizer) in fp32 with batch
8 on rows of at most 512 tokens: TRL without packing, 8 rows per step; sft.py packed, 8 blocks of 512 per step, and
not packed, 8 rows per step. Padding does not count as text. The three take turns, ratios are per turn, and the
first 2 steps of each do not count."""

import functools
import tempfile
import time

import peers


def trl(args):
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from common.data import message_columns, mixtures

    clock = []

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "num_tokens" in (logs or {}):
                clock.append((time.perf_counter(), logs["num_tokens"]))

    dialogues = [message_columns.sft_messages(row.data)[0] for row in mixtures.load_rows(args.dataset, "sft")]
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        packing=False, learning_rate=1e-4, **peers.STEPS,
    )  # fmt: skip
    SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype="float32"),
        processing_class=AutoTokenizer.from_pretrained(f"{args.models}/policy"),
        train_dataset=Dataset.from_list([{"prompt": d[:-1], "completion": d[-1:]} for d in dialogues]),
        callbacks=[Clock()],
        args=config,
    ).train()
    (t0, n0), (t1, n1) = clock[peers.SKIP - 1], clock[-1]
    return (n1 - n0) / (t1 - t0)


def ours(args, packing=True):
    import sft

    folder = tempfile.mkdtemp()
    sft.main(
        sft.Args(
            model=f"{args.models}/policy", dataset=args.dataset, output_dir=folder, max_steps=args.steps, batch_size=8,
            micro_batch_size=8, max_length=512, lr=1e-4, packing=packing, eval_every=0, save_every=0,
            sample_prompts=0,
        )
    )  # fmt: skip
    rows = peers.rows_of(folder, "perf/tokens_per_s")[peers.SKIP :]
    seconds = sum(row["data/tokens"] / row["perf/tokens_per_s"] for row in rows)
    return sum(row["data/tokens"] for row in rows) / seconds


if __name__ == "__main__":
    flags = {"dataset": "what sft.py takes", "steps": 12}
    runs = {"trl": trl, "packed": ours, "rows": functools.partial(ours, packing=False)}
    peers.compare(__file__, __doc__, flags, runs, {"packed": "trl", "rows": "trl"})
