"""Measure decoding with sharded weights, inside `consolidated`, with a copy shared by two ranks, and with a model
that was never sharded, on the same ranks in one run.

    torchrun --nproc-per-node 2 tests/benchmarks/consolidated.py

Random-weight Llama (hidden 512, 8 layers, vocabulary 8,192), batch 8 on every rank, 32 new tokens, greedy, no
stop ids. Prints tokens per second of rank 0, the ratios, and the bytes of parameters that a rank holds."""

import contextlib
import statistics
import time

import peers
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from common import dist
from common.sampler import sample
from common.loading import tensor_parallel

WAYS = {"sharded": 0, "consolidated": 1, "two ranks a copy": 2, "never sharded": 0}  # dist.ranks_per_copy


def held(model):
    """Bytes of parameters in this rank's memory."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.untyped_storage().nbytes() for p in local)


def main():
    device, dist.split_layers = dist.setup(), tensor_parallel.split
    config = peers.llama(512, 8, 8, 8192, 256)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).to(device).eval()
    torch.manual_seed(0)
    sharded = dist.shard(LlamaForCausalLM(config), device, torch.float32)
    prompts = torch.randint(0, 8192, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()
    speeds, answers, sizes = {way: [] for way in WAYS}, {}, {}
    for _ in range(6):
        for way, dist.ranks_per_copy in WAYS.items():
            model = plain if way == "never sharded" else sharded
            with dist.consolidated(model) if dist.ranks_per_copy else contextlib.nullcontext():
                sizes[way] = held(model)
                dist.barrier()
                start = time.perf_counter()
                out = sample(model, prompts, max_new_tokens=32, stop_ids=[], pad_id=0, temperature=0)
                dist.barrier()
                speeds[way].append(out.response_tokens.numel() / (time.perf_counter() - start))
                answers[way] = out.response_tokens
    if dist.is_main():
        for way, values in speeds.items():
            ratios = [a / b for a, b in zip(values[1:], speeds["consolidated"][1:])]
            span = f"{statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})"
            same = torch.equal(answers[way], answers["sharded"])
            print(f"{way:16} {statistics.median(values[1:]):8.1f} tokens/s, {span} of consolidated; "
                  f"{sizes[way]:,} bytes of parameters; the same tokens: {same}")  # fmt: skip
    dist.shutdown()


if __name__ == "__main__":
    main()
