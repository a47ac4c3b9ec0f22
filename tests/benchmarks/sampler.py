"""common/sampler.py against transformers' generate in batches of 64 and its continuous batching with room for 64
rows, on the same work in one run.

    python tests/benchmarks/sampler.py

32 prompts of 20 to 60 tokens, n = 8, at most 64 new tokens, every 20th id a stop id: lengths are geometric with
mean near 20. All sample from the same random-weight Llama (hidden 512, 8 layers, vocabulary 8,192)."""

import argparse
import statistics
import time

import peers
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from common.sampler import sample


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = peers.llama(512, 8, 8, 8192, 512, pad_token_id=0, bos_token_id=1, eos_token_id=20)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).eval().to(device)
    lengths = torch.randint(20, 61, (args.prompts,)).tolist()
    prompts = [torch.randint(1, 8192, (length,)).tolist() for length in lengths]
    stop_ids = list(range(20, 8192, 20))

    drawing = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    drawing |= {"max_new_tokens": args.max_new_tokens, "eos_token_id": stop_ids}

    def ours(seed):
        options = {"max_new_tokens": args.max_new_tokens, "stop_ids": stop_ids, "pad_id": 0}
        out = sample(model, prompts, n=args.n, seed=seed, **options)
        return int(out.sample_mask.sum())

    def generate(seed):
        torch.manual_seed(seed)
        rows, tokens = [prompt for prompt in prompts for _ in range(args.n)], 0
        for start in range(0, len(rows), 64):
            batch = rows[start : start + 64]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in batch], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch], device=device)
            out = model.generate(input_ids=ids, attention_mask=mask, **drawing)[:, width:]
            ended = torch.isin(out, torch.tensor(stop_ids, device=device)).int()
            tokens += int((ended.cumsum(1) - ended == 0).sum())  # up to and with the first stop id
        return tokens

    # Pages of 256 tokens hold a row each; without num_blocks it takes all memory there is
    paging = ContinuousBatchingConfig(num_blocks=72, max_batch_tokens=1024, use_cuda_graph=False)

    def continuous(seed):
        torch.manual_seed(seed)
        rows = [prompt for prompt in prompts for _ in range(args.n)]
        how = {"generation_config": GenerationConfig(**drawing), "continuous_batching_config": paging}
        out = model.generate_batch(inputs=rows, warmup=False, **how)
        assert len(out) == len(rows)
        return sum(len(one.generated_tokens) for one in out.values())

    ways = {"sampler": ours, "generate": generate, "continuous": continuous}
    for run in ways.values():
        run(0)  # warm up
    speeds = {name: [] for name in ways}
    for repeat in range(args.repeats):
        for name, run in ways.items():
            start = time.perf_counter()
            tokens = run(repeat)
            speeds[name].append(tokens / (time.perf_counter() - start))
            print(f"{name:10} {tokens:6} tokens {speeds[name][-1]:8.0f} tokens/s", flush=True)
    for name in ("generate", "continuous"):
        ratios = sorted(a / b for a, b in zip(speeds["sampler"], speeds[name]))
        middle = statistics.median(ratios)
        print(f"sampler against {name}: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) times the speed")


if __name__ == "__main__":
    main()
