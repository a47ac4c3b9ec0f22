"""dpo_iterative.py against TRL 1.16's DPOTrainer (pairs per second) and its experimental OnlineDPOTrainer
(responses per second), and the peak memory of the processes.

    pip install trl==1.16.0 accelerate         in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/trl_dpo.py --dataset hh.jsonl.gz --trl-python trl/bin/python

Offline: one epoch over pairs of at most 512 tokens per side, 8 per step, with a separate reference model. Our time
includes the reference's log probabilities of all pairs, computed before the first step; `unshared` is ours with
one row per response. Online: each step has 16 prompts of at most 128 tokens and 2 responses of at most 64 tokens to
each; ours has one iteration per step, with sampling, scoring, reference and export. All are Llamas with random
weights in fp32 (hidden 256, 6 layers, the vocabulary of --tokenizer), whose responses end at each token with a
probability of about 1/64. They take turns, ratios are per turn, and the first 2 steps of each do not count."""

import functools
import json
import tempfile
import time

import peers


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
        learning_rate=1e-5, beta=0.1, **peers.STEPS,
    )  # fmt: skip
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype=torch.float32) for _ in range(2)
    )
    clock = peers.clock()
    DPOTrainer(
        model=policy, ref_model=reference, args=config, processing_class=tokenizer, callbacks=[clock],
        train_dataset=Dataset.from_list(rows),
    ).train()  # fmt: skip
    return peers.per_second(8, clock.times)


def offline(args, share_prompt=True):
    """Pairs per second of the counted steps, each with its share of the reference's time."""
    import dpo_iterative
    from common.run import versions

    folder, seconds = tempfile.mkdtemp(), []
    ask = versions.Versions.ask

    def timed(versions, name, forward, pairs, args):
        start = time.perf_counter()
        values = ask(versions, name, forward, pairs, args)
        seconds.append((time.perf_counter() - start) / max(1, len(pairs)))
        return values

    versions.Versions.ask = timed
    dpo_iterative.main(
        dpo_iterative.Args(
            model=f"{args.models}/policy", offline_data=f"{args.models}/pairs.jsonl", iterations=0, epochs=1,
            dataset=f"{args.models}/prompts.jsonl", output_dir=folder, batch_size=8, micro_batch_size=8,
            max_length=512, max_new_tokens=64, lr=1e-5, beta=0.1, eval_prompts=0, save_every=0,
            share_prompt=share_prompt,
        )
    )  # fmt: skip
    rows = peers.rows_of(folder, "loss/dpo")
    n = sum(row["data/pairs"] for row in rows[peers.SKIP :])
    # the last call is of the training pairs; the ones before of held-out pairs
    return n / (rows[-1]["time_s"] - rows[peers.SKIP - 1]["time_s"] + n * seconds[-1])


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
        max_length=192, max_new_tokens=64, temperature=1.0, learning_rate=1e-5, beta=0.1, **peers.STEPS,
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
    return peers.per_second(32, clock.times)


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
    return peers.per_second(32, [row["time_s"] for row in peers.rows_of(folder, "loss/dpo")])


def prepare(args):
    """pairs.jsonl, the first rows that fit, as messages; the prompts."""
    from common.data import comparisons, files
    from common.loading import pretrained

    words = pretrained.load_tokenizer(args.tokenizer, quiet=True)
    sides = lambda c: {side: [peers.message(text)] for side, text in zip(("chosen", "rejected"), c.texts)}
    loaded = comparisons.load(args.dataset, "train", words, 512)[: 8 * args.steps + 1]
    files.write_jsonl(f"{args.models}/pairs.jsonl", [{"prompt": c.prompt, **sides(c)} for c in loaded])
    peers.make_prompts(args.dataset, args.models, args.tokenizer, 16 * args.online_steps + 1)


if __name__ == "__main__":
    flags = {"dataset": "pairs, as reward.py takes them, prompts with them", "steps": 14, "online-steps": 7}
    runs = {"trl_offline": trl_offline, "offline": offline}
    runs |= {"unshared": functools.partial(offline, share_prompt=False)}
    runs |= {"trl_online": trl_online, "online": online}
    against = {"offline": "trl_offline", "unshared": "trl_offline", "online": "trl_online"}
    peers.compare(__file__, __doc__, flags, runs, against, prepare)
