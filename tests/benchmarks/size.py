"""Cost against size: tokens per second and peak memory of a training step (sft.py's loss, packed) for 1, 2 and 4
times the length and the batch, and of the sampler for 1, 2 and 4 times the samples. Every point is a separate
process, because the peak is the process's.

    python tests/benchmarks/size.py
"""

import json
import resource
import sys
import time
from dataclasses import dataclass

import peers
import torch
import tyro
from transformers import LlamaForCausalLM

from common import losses, models
from common.sampler import sample


@dataclass
class Args:
    length: int = 256
    """Tokens of a block."""
    batch: int = 4
    """Blocks of a step."""
    samples: int = 8
    """Responses to each of 16 prompts."""
    seconds: float = 8.0
    """Approximate seconds of measuring per point."""
    point: str | None = None
    """Run only training or sampling, in this process, and print JSON."""


def measure(args):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model, tokens, start = LlamaForCausalLM(peers.llama(256, 6, 4, 8192, 4096, **special)), 0, None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    while start is None or time.perf_counter() - start < args.seconds:
        if args.point == "training":
            ids = torch.randint(3, 8192, (args.batch, args.length))
            mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)
            losses.sft_loss(models.token_logprobs(model, ids, mask), mask)[0].backward()
            model.zero_grad(set_to_none=True)
            now = ids.numel()
        else:
            prompts = torch.randint(3, 8192, (16, 48)).tolist()
            stop = list(range(20, 8192, 40))
            options = {"max_new_tokens": 64, "stop_ids": stop, "pad_id": 0, "slots": 512}
            out = sample(model, prompts, n=args.samples, **options)
            now = int(out.sample_mask.sum())
        if start is None:  # the first one warms up
            start = time.perf_counter()
        else:
            tokens += now
    speed = tokens / (time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"speed": speed, "memory": peak - before}))


def main(args: Args):
    if args.point:
        return measure(args)
    for point, name in (("training", "length"), ("training", "batch"), ("sampling", "samples")):
        first = None
        for times in (1, 2, 4):
            sizes = {key: getattr(args, key) for key in ("length", "batch", "samples", "seconds")}
            sizes[name] *= times
            flags = ["--point", point, *(f"--{key}={value}" for key, value in sizes.items())]
            measured = peers.last_line([sys.executable, __file__, *flags])
            first = first or measured
            line = {"what": point, name: times * getattr(args, name), "tokens/s": f"{measured['speed']:.0f}"}
            line["of the first"] = f"{measured['speed'] / first['speed']:.2f}"
            line["memory over the weights, GB"] = f"{measured['memory']:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args))
