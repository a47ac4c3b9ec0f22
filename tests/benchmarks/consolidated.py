"""Decoding with sharded weights, inside `consolidated`, and with a model that was never sharded, on the same
ranks in one run.

    torchrun --nproc-per-node 2 tests/benchmarks/consolidated.py

Random-weight Llama (hidden 512, 8 layers, vocabulary 8,192), batch 8, 32 new tokens, greedy, no stop ids.
Prints tokens per second of rank 0, the ratios, and the bytes of parameters that a rank holds before, inside
and after `consolidated`."""

import statistics
import time

import peers
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from common import dist
from common.sampler import sample


def held(model):
    """Bytes of parameters in this rank's memory."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.untyped_storage().nbytes() for p in local)


def main():
    device = dist.setup()
    config = peers.llama(512, 8, 8, 8192, 256)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).to(device).eval()
    torch.manual_seed(0)
    sharded = dist.shard(LlamaForCausalLM(config), device, torch.float32)
    prompts = torch.randint(0, 8192, (8, 24), generator=torch.Generator().manual_seed(1)).tolist()

    def decode(model):
        dist.barrier()
        start = time.perf_counter()
        out = sample(model, prompts, max_new_tokens=32, stop_ids=[], pad_id=0, temperature=0)
        dist.barrier()
        return out.response_tokens.numel() / (time.perf_counter() - start), out.response_tokens

    speeds = {"sharded": [], "consolidated": [], "never sharded": []}
    answers = {}
    before = held(sharded)
    for _ in range(6):
        speed, answers["sharded"] = decode(sharded)
        speeds["sharded"].append(speed)
        with dist.consolidated(sharded):
            inside = held(sharded)
            speed, answers["consolidated"] = decode(sharded)
        speeds["consolidated"].append(speed)
        speed, answers["never sharded"] = decode(plain)
        speeds["never sharded"].append(speed)
    if dist.is_main():
        for name, values in speeds.items():
            print(f"{name:14} {statistics.median(values[1:]):8.1f} tokens/s")
        for name in ("sharded", "never sharded"):
            ratios = [a / b for a, b in zip(speeds["consolidated"][1:], speeds[name][1:])]
            span = f"(min {min(ratios):.2f}, max {max(ratios):.2f})"
            print(f"consolidated / {name}: median {statistics.median(ratios):.2f} {span}")
        same = all(torch.equal(answer, answers["sharded"]) for answer in answers.values())
        print(f"bytes of parameters held: before {before:,}, inside {inside:,}, after {held(sharded):,}; "
              f"the same tokens: {same}")  # fmt: skip
    dist.shutdown()


if __name__ == "__main__":
    main()
