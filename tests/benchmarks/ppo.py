"""ppo.py against the last PPOTrainer of TRL (1.9.2, trl.experimental.ppo): episodes per second, and peak memory
of the process.

    pip install trl==1.9.2          in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/ppo.py --dataset hh.jsonl.gz --trl-python trl/bin/python

Both: 8 episodes a rollout, minibatches of 2, 4 passes, prompts of at most 128 tokens, at most 64 new ones; four
Llamas of random weights in fp32 (hidden 256, 6 layers, the vocabulary of --tokenizer), whose responses end with
a chance of about 1/64 a token. They take turns, ratios are taken turn by turn, the first 2 rollouts of each do
not count."""

import argparse
import json
import os
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
sys.path.insert(0, ROOT)
import peers  # noqa: E402

SKIP, EPISODES = 2, 8


def trl(args):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    clock = peers.clock()
    tokenizer = AutoTokenizer.from_pretrained(f"{args.models}/policy", padding_side="left")
    with open(args.dataset) as file:
        rows = [json.loads(line)["prompt"] for line in file]
    turns = [[{"role": "user", "content": text}] for text in rows]
    texts = [tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in turns]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    config = PPOConfig(
        # With gradient_accumulation_steps accelerate would leave out optimiser steps
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=EPISODES, num_mini_batches=EPISODES // 2,
        num_ppo_epochs=4, total_episodes=EPISODES * args.rollouts,
        response_length=64, temperature=1.0, stop_token="eos", local_rollout_forward_batch_size=EPISODES,
        learning_rate=1e-6,
        num_sample_generations=0, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f"{args.models}/policy", dtype=torch.float32) for _ in range(2)
    )
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(f"{args.models}/reward", dtype=torch.float32)
        for _ in range(2)
    )
    PPOTrainer(
        args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
        value_model=value, train_dataset=Dataset.from_dict({"input_ids": ids}), callbacks=[clock],
    ).train()  # fmt: skip
    return EPISODES * (len(clock.times) - SKIP) / (clock.times[-1] - clock.times[SKIP - 1])


def ours(args):
    import ppo

    folder = tempfile.mkdtemp()
    ppo.main(
        ppo.Args(
            model=f"{args.models}/policy", scorer=f"{args.models}/reward", dataset=args.dataset,
            eval_dataset=args.dataset.replace("prompts", "one"), output_dir=folder, iterations=args.rollouts,
            prompts_per_iteration=EPISODES, n_samples=1, minibatch_size=2, micro_batch_size=2, epochs=4,
            max_new_tokens=64, max_length=192, lr=1e-6, value_lr=1e-6, value_warmup_steps=0, eval_every=0,
            eval_prompts=0, save_every=0, slots=EPISODES, score_batch_size=EPISODES,
        )
    )  # fmt: skip
    with open(f"{folder}/metrics.jsonl") as file:
        times = [row["time_s"] for row in map(json.loads, file) if "loss/policy" in row]
    return EPISODES * (len(times) - SKIP) / (times[-1] - times[SKIP - 1])


def make_prompts(source, folder, tokenizer, n):
    """The first n single-turn prompts of at most 128 tokens in prompts.jsonl, one more in one.jsonl."""
    from common import generate, loading

    words = loading.load_tokenizer(tokenizer, quiet=True)
    prompts = [p for p in generate.load_prompts(source, "train", words, 128) if len(p.turns) == 1]
    for name, some in (("prompts", prompts[:n]), ("one", prompts[-1:])):
        with open(f"{folder}/{name}.jsonl", "w") as file:
            file.writelines(json.dumps({"prompt": p.turns[0]["content"]}) + "\n" for p in some)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", required=True, help="prompts, as ppo.py takes them")
    parser.add_argument("--rollouts", type=int, default=7)
    peers.add_arguments(parser)
    args = parser.parse_args()
    if args.only:
        return peers.report({"trl": trl, "ours": ours}[args.only](args))
    args.models = tempfile.mkdtemp()
    peers.make_models(args.tokenizer, args.models)
    make_prompts(args.dataset, args.models, args.tokenizer, EPISODES * args.rollouts)
    args.dataset = f"{args.models}/prompts.jsonl"
    peers.take_turns(__file__, ["trl", "ours"], {"ours": "trl"}, ("models", "dataset", "rollouts"), args)


if __name__ == "__main__":
    main()
