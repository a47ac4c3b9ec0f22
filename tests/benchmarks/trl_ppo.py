"""ppo.py against the last PPOTrainer of TRL (1.9.2, trl.experimental.ppo): episodes per second, and peak memory
of the process.

    pip install trl==1.9.2          in an environment of its own, whose interpreter is --trl-python
    python tests/benchmarks/trl_ppo.py --dataset hh.jsonl.gz --trl-python trl/bin/python

Both: 8 episodes per rollout, minibatches of 2, 4 passes, prompts of at most 128 tokens, at most 64 new ones; four
Llamas with random weights in fp32 (hidden 256, 6 layers, the vocabulary of --tokenizer), whose responses end at
each token with a probability of about 1/64. They take turns, ratios are per turn, and the first 2 rollouts of each
do not count."""

import json
import tempfile

import peers

EPISODES = 8


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
        learning_rate=1e-6, num_sample_generations=0, **peers.TRAINER,
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
    return peers.per_second(EPISODES, clock.times)


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
    return peers.per_second(EPISODES, [row["time_s"] for row in peers.rows_of(folder, "loss/policy")])


def prepare(args):
    peers.make_prompts(args.dataset, args.models, args.tokenizer, EPISODES * args.rollouts)
    args.dataset = f"{args.models}/prompts.jsonl"


if __name__ == "__main__":
    flags = {"dataset": "prompts, as ppo.py takes them", "rollouts": 7}
    peers.compare(__file__, __doc__, flags, {"trl": trl, "ours": ours}, {"ours": "trl"}, prepare)
