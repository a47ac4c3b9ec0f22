"""Measure --compute-dtype bfloat16 on a CPU: CPU seconds of a training step and of sampling, and the losses.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.compute_dtype MODEL DATASET

5 steps of sft.py on 4 blocks of 256 tokens; 8 responses of 32 tokens to each of 4 prompts."""

import sys
import time

import torch
import sft
from common import dist
from common.sampler import sample
from common.data import demonstrations, splits
from common.loading import pretrained

args = sft.Args(model=sys.argv[1], dataset=sys.argv[2], max_length=256, lr=2e-5)
words = pretrained.load_tokenizer(args.model, quiet=True)
blocks = sft.make_blocks(
    splits.hold_out(demonstrations.load_sft(args.dataset, words, args.max_length))[0], args.max_length
)
for dtype in (torch.float32, torch.bfloat16):
    model = dist.shard(pretrained.load_policy(args.model, words), torch.device("cpu"), dtype)
    optimizer, losses, times = dist.adamw(model, args.lr, args), [], [time.process_time()]
    for step in range(5):
        losses.append(sft.update(model, optimizer, blocks[4 * step : 4 * step + 4], args)[0])
        times.append(time.process_time())
    with dist.consolidated(model):
        prompts = [block[0].ids[:40].tolist() for block in blocks[:4]]
        sample(model, prompts, n=8, max_new_tokens=32, stop_ids=None, pad_id=0, seed=0)
    step, sampled = (times[-1] - times[1]) / 4, time.process_time() - times[-1]
    print(f"{dtype}: {step:.2f} s a step, {sampled:.2f} s to sample, losses {losses}")
