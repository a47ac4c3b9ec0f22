"""dpo_iterative.py against TRL 1.16's DPOTrainer (pairs per second) and its experimental OnlineDPOTrainer
(responses per second), and the peak memory of the processes.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/dpo.py --dataset hh.jsonl.gz --trl-python trl/bin/python

Offline: one epoch over pairs of at most 512 tokens a side, 8 a step, the reference a model of its own. Our time
has the reference's log probabilities of all pairs in it, computed before the first step; `unshared` is ours with
a row for each response. Online: 16 prompts of at most 128 tokens, 2 responses of at most 64 tokens each, a step;
ours has an iteration for each step, with its sampling, scoring, reference and export. All are Llamas of random
weights in fp32 (hidden 256, 6 layers, the vocabulary of --tokenizer), whose responses end with a chance of about
1/64 a token. They take turns, ratios are taken turn by turn, the first 2 steps of each do not count."""

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


def trl_offline(args):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy")
    with open(f"{args.models}/pairs.jsonl") as file:
        rows = [json.loads(line) for line in file]
    config = DPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=8, max_length=512,
        learning_rate=1e-5, beta=0.1, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype=torch.float32) for _ in range(2)
    )
    clock = peers.clock()
    DPOTrainer(
        model=policy, ref_model=reference, args=config, processing_class=tokenizer, callbacks=[clock],
        train_dataset=Dataset.from_list(rows),
    ).train()  # fmt: skip
    return 8 * (len(clock.times) - SKIP) / (clock.times[-1] - clock.times[SKIP - 1])


def offline(args, share_prompt=True):
    """Pairs per second of the counted steps, each with its share of the reference's time."""
    import dpo_iterative

    folder, seconds = tempfile.mkdtemp(), []
    add = dpo_iterative.References.attach

    def timed(self, pairs, name):
        start = time.perf_counter()
        pairs = add(self, pairs, name)
        seconds.append((time.perf_counter() - start) / len(pairs))
        return pairs

    dpo_iterative.References.attach = timed
    dpo_iterative.main(
        dpo_iterative.Args(
            model=f"{args.models}/policy", offline_data=f"{args.models}/pairs.jsonl", iterations=0, epochs=1,
            dataset=f"{args.models}/prompts.jsonl", output_dir=folder, batch_size=8, micro_batch_size=8,
            max_length=512, max_new_tokens=64, lr=1e-5, beta=0.1, eval_prompts=0, save_every=0,
            share_prompt=share_prompt,
        )
    )  # fmt: skip
    with open(f"{folder}/metrics.jsonl") as file:
        rows = [row for row in map(json.loads, file) if "loss/dpo" in row]
    n = sum(row["data/pairs"] for row in rows[SKIP:])
    # the last call is of the training pairs; the ones before of held-out pairs
    return n / (rows[-1]["time_s"] - rows[SKIP - 1]["time_s"] + n * seconds[-1])


def trl_online(args):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy", padding_side="left")
    with open(f"{args.models}/prompts.jsonl") as file:
        rows = [{"prompt": [{"role": "user", "content": json.loads(line)["prompt"]}]} for line in file]
    config = OnlineDPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.online_steps, per_device_train_batch_size=16,
        max_length=192, max_new_tokens=64, temperature=1.0, learning_rate=1e-5, beta=0.1, logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        disable_tqdm=True, seed=0,
    )  # fmt: skip
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype=torch.float32) for _ in range(2)
    )
    reward = AutoModelForSequenceClassification.from_pretrained(f"{args.models}/reward", dtype=torch.float32)
    clock = peers.clock()
    OnlineDPOTrainer(
        model=policy, ref_model=reference, reward_funcs=reward, args=config, processing_class=tokenizer,
        reward_processing_classes=tokenizer, train_dataset=Dataset.from_list(rows), callbacks=[clock],
    ).train()  # fmt: skip
    return 32 * (len(clock.times) - SKIP) / (clock.times[-1] - clock.times[SKIP - 1])


def online(args):
    import dpo_iterative

    folder = tempfile.mkdtemp()
    dpo_iterative.main(
        dpo_iterative.Args(
            model=f"{args.models}/policy", scorer=f"{args.models}/reward", output_dir=folder,
            dataset=f"{args.models}/prompts.jsonl", eval_dataset=f"{args.models}/one.jsonl",
            iterations=args.online_steps, prompts_per_iteration=16, n_samples=2, temperatures=(1.0,),
            max_new_tokens=64, max_length=192, batch_size=16, micro_batch_size=16, epochs=1, lr=1e-5, beta=0.1,
            eval_prompts=0, save_every=0, slots=32, score_batch_size=32,
        )
    )  # fmt: skip
    with open(f"{folder}/metrics.jsonl") as file:
        times = [row["time_s"] for row in map(json.loads, file) if "loss/dpo" in row]
    return 32 * (len(times) - SKIP) / (times[-1] - times[SKIP - 1])


def make_data(source, folder, tokenizer, n_pairs, n_prompts):
    """pairs.jsonl, the first n_pairs rows that fit, as messages; prompts.jsonl and one more in one.jsonl."""
    from common import comparisons, generate, loading

    words = loading.load_tokenizer(tokenizer, quiet=True)
    with open(f"{folder}/pairs.jsonl", "w") as file:
        for c in comparisons.load(source, "train", words, 512)[:n_pairs]:
            sides = {name: [peers.message(text)] for name, text in zip(("chosen", "rejected"), c.texts)}
            file.write(json.dumps({"prompt": c.prompt, **sides}) + "\n")
    prompts = [p for p in generate.load_prompts(source, "train", words, 128) if len(p.turns) == 1]
    for name, some in (("prompts", prompts[:n_prompts]), ("one", prompts[-1:])):
        with open(f"{folder}/{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"prompt": p.turns[0]["content"]}) + "\n" for p in some)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="pairs, as reward.py takes them, prompts with them")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--online-steps", type=int, default=7)
    peers.add_arguments(parser)
    args = parser.parse_args()
    runs = {
        "trl_offline": lambda: trl_offline(args),
        "offline": lambda: offline(args),
        "unshared": lambda: offline(args, share_prompt=False),
        "trl_online": lambda: trl_online(args),
        "online": lambda: online(args),
    }
    if args.only:
        return peers.report(runs[args.only]())
    args.models = tempfile.mkdtemp()
    peers.make_models(args.tokenizer, args.models)
    make_data(args.dataset, args.models, args.tokenizer, 8 * args.steps + 1, 16 * args.online_steps + 1)
    flags = ("models", "dataset", "steps", "online_steps")
    against = {"offline": "trl_offline", "unshared": "trl_offline", "online": "trl_online"}
    peers.take_turns(__file__, list(runs), against, flags, args)


if __name__ == "__main__":
    main()
