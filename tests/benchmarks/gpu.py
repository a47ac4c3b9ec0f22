"""What GPUs make of this: whether the six scripts run there, and how near the sampler comes to the memory's
bandwidth and training to the matrix units' rate, for Llama shapes of random weights.

    python tests/benchmarks/gpu.py --only torchrun sharded      the check to run first
    python tests/benchmarks/gpu.py                              CUDA GPUs of 80 GB
    python tests/benchmarks/gpu.py --only sharded               a minute or two on a CPU

    torchrun  a few steps of every script on the tiny world, under torchrun on two GPUs, or on one, which has a process
              group and shards its models here alone: nccl and FSDP2 are tried (without a GPU: gloo on the CPU, two
              ranks). Exit code 1 unless all of them end with 0
    sharded   sampler and training on as many ranks, with models that FSDP2 shards: figures of rank 0, each rank having
              rows and blocks of its own
    scripts   what torchrun does, without it
    sampler   rows of --prompt-tokens draw --new-tokens each, --slots at once, in bf16. Its bound: a step reads every
              weight but the embedding once, and the keys and values of every row; bound = rows / (bytes / bandwidth).
              "no graphs": the rate without CUDA graphs; "the same": whether responses are then equal bit for bit.
              Last column: how many shapes the attention has where rows end at random (a kernel may plan each anew)
    training  forward and backward of sft.py's loss on blocks of --block tokens with gradient checkpointing, bf16
              compute on fp32 weights, no optimiser step; 6 * (parameters less the embedding) * tokens operations, the
              checkpointing's second forward not counted, over the measured rate of a bf16 matrix product
    attention the same step with rows that hold DOCUMENTS each, and the same sampling, with each kernel of SDPA, and
              with --attentions by name where they are installed; `-` where a kernel takes no such mask or shape
"""

import contextlib
import gc
import math
import os
import runpy
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import dataclass, replace

import peers
import torch
import torch.distributed as td
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

import common.sampler
from common import dist, losses, models
from common.sampler import sample
from common.data import progress

ENV = peers.environment("")
SHAPES = {  # hidden, layers, heads, key-value heads, feed-forward, vocabulary
    "tiny": (64, 2, 4, 2, 128, 512),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
DOCUMENTS = 8  # of a packed row
COMMANDS = (  # few steps of each script, on the tiny world
    "sft --max-steps 200",
    "reward --max-steps 100",
    "advantage_model --max-steps 100",
    "rejection_sampling --iterations 1",
    "ppo --iterations 4",
    "dpo_iterative --iterations 1",
    "common.programs.evaluate --eval-prompts 100",
)


@dataclass
class Args:
    shapes: tuple[str, ...] = ("1b", "8b") if torch.cuda.is_available() else ("tiny",)
    """Of SHAPES; by default tiny where there is no GPU."""
    only: tuple[str, ...] = ("torchrun", "sharded", "scripts", "sampler", "training", "attention")
    """Parts to run."""
    attentions: tuple[str, ...] = ("varlen", "flash_attention_2", "flex_attention")
    """Names beside sdpa, as of --attention."""
    slots: int = 64
    """Rows that decode together."""
    prompt_tokens: int = 128
    """Of each row."""
    new_tokens: int = 128
    """Of each row."""
    block: int = 2048
    """Tokens of a block."""
    blocks: int = 4
    """Blocks of a forward and backward."""
    repeats: int = 3
    """Measured after one to warm up; the fastest counts."""


def timed(run, device, repeats):
    """The least seconds of `repeats` runs after a first one."""
    best = float("inf")
    for repeat in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start) if repeat else best
    return best


def machine(device, repeats) -> tuple[float, float]:
    """(bytes a second that a copy reads and writes, operations a second of a bf16 matrix product)."""
    n, side = (2**30, 8192) if device.type == "cuda" else (2**26, 512)
    source, target = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    bandwidth = 2 * n / timed(lambda: target.copy_(source), device, repeats)
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return bandwidth, 2 * side**3 / timed(lambda: a @ b, device, repeats)


def llama(shape, device, dtype):
    hidden, layers, heads, kv_heads, wide, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def attention_shapes(run) -> tuple:
    """Return run()'s result, the number of shapes of queries and keys in its calls of SDPA, and that of the calls."""
    functional = torch.nn.functional
    plain, shapes = functional.scaled_dot_product_attention, []

    def counted(query, key, *args, **options):
        shapes.append((query.shape, key.shape))
        return plain(query, key, *args, **options)

    functional.scaled_dot_product_attention = counted
    try:
        result = run()
    finally:
        functional.scaled_dot_product_attention = plain
    return result, len(set(shapes)), len(shapes)


def sampler(shape, device, bandwidth, args) -> dict:
    model = dist.shard(llama(shape, device, torch.bfloat16), device, torch.bfloat16)
    prompts = torch.randint(3, model.config.vocab_size, (args.slots, args.prompt_tokens)).tolist()
    options = {"max_new_tokens": args.new_tokens, "pad_id": 0}

    def ours():
        sample(model, prompts, stop_ids=[], slots=args.slots, seed=0, **options)

    ids = torch.tensor(prompts, device=device)
    drawing = {"do_sample": True, "top_k": 0}
    drawing |= {"max_new_tokens": args.new_tokens, "min_new_tokens": args.new_tokens}

    def generate():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **drawing)

    # Prompts of all lengths, and one token in 32 ends a response: a step's rows and columns change
    ragged = [ids[: 1 + i * len(ids) // len(prompts)] for i, ids in enumerate(prompts)] * 2
    stop_ids = range(model.config.vocab_size // 32)

    def draw_ragged():
        return sample(model, ragged, stop_ids=stop_ids, slots=args.slots, seed=0, **options)

    n = args.slots * args.new_tokens
    with dist.consolidated(model):
        after, common.sampler.GRAPH_AFTER = common.sampler.GRAPH_AFTER, math.inf
        without = n / timed(ours, device, args.repeats)
        plain, n_shapes, n_calls = attention_shapes(draw_ragged)
        common.sampler.GRAPH_AFTER = after
        same = all(map(torch.equal, plain, draw_ragged()))
        speeds = [n / timed(run, device, args.repeats) for run in (ours, generate)]
    config = model.config
    weights = 2 * (sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size)
    length = args.prompt_tokens + args.new_tokens / 2  # of a row, on the average step
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    bound = args.slots * bandwidth / (weights + args.slots * length * per_token)
    line = {"model": shape, "tokens/s": f"{speeds[0]:.0f}", "no graphs": f"{without:.0f}"}
    line |= {"the same": same, "generate": f"{speeds[1]:.0f}"}
    line["times"] = f"{speeds[0] / speeds[1]:.2f}"
    line |= {"bandwidth's bound": f"{bound:.0f}", "of the bound": f"{speeds[0] / bound:.0%}"}
    return {**line, "shapes of attention": f"{n_shapes} in {n_calls // config.num_hidden_layers} forwards"}


def training(shape, device, rate, args) -> dict:
    model = llama(shape, device, torch.float32)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.token_logprobs = types.MethodType(models.token_logprobs, model)
    model.forward_methods = ["token_logprobs"]  # where FSDP gathers the weights
    model = dist.shard(model, device, torch.bfloat16).train()
    vocabulary = model.config.vocab_size
    ids = torch.randint(3, vocabulary, (args.blocks, args.block), device=device)
    ids = ids if device.type == "cuda" else ids[:, :256]
    mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)

    def step():
        logprobs = model.token_logprobs(ids, mask)
        losses.sft_loss(logprobs, mask)[0].backward()
        model.zero_grad(set_to_none=True)

    speed = ids.numel() / timed(step, device, args.repeats)
    weights = sum(p.numel() for p in model.parameters()) - vocabulary * model.config.hidden_size
    used = 6 * weights * speed  # an embedding is looked up, not multiplied
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
    line = {"model": shape, "tokens/s": f"{speed:.0f}"}
    line |= {"operations/s": f"{used:.3g}", "matrix rate": f"{rate:.3g}"}
    return {**line, "of the rate": f"{used / rate:.0%}", "peak GB": f"{peak:.1f}"}


def attention(shape, device, _, args) -> list[dict]:
    """A line for each kernel: milliseconds of a packed step, the peak beside it, tokens a second of the sampler."""
    kinds = {f"sdpa, {name.lower()}": ("sdpa", SDPBackend.__members__[name]) for name in SDPBackend.__members__
             if name not in ("ERROR", "OVERRIDEABLE")}  # fmt: skip
    kinds |= {name: (name, None) for name in args.attentions}
    length = (args.block if device.type == "cuda" else 256) // DOCUMENTS * DOCUMENTS
    positions = torch.arange(length // DOCUMENTS, device=device).repeat(args.blocks, DOCUMENTS)
    ids = torch.randint(3, SHAPES[shape][-1], positions.shape, device=device)
    mask = positions[:, 1:] > 0
    prompts = ids[:1, : args.prompt_tokens].repeat(args.slots, 1).tolist()
    lines = []
    for kind, (name, backend) in kinds.items():
        line = {"model": shape, "attention": kind, "packed ms": "-", "peak GB": "-", "sampler tokens/s": "-"}
        model = llama(shape, device, torch.float32)
        model.token_logprobs = types.MethodType(models.token_logprobs, model)
        model.compute_dtype = torch.bfloat16

        def step():
            losses.sft_loss(model.token_logprobs(ids, mask, positions), mask)[0].backward()
            model.zero_grad(set_to_none=True)

        def draw():
            sample(model, prompts, stop_ids=[], pad_id=0, slots=args.slots, seed=0, max_new_tokens=args.new_tokens)

        try:
            model.set_attn_implementation(name)
            with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                line["packed ms"] = f"{1e3 * timed(step, device, args.repeats):.0f}"
                if device.type == "cuda":
                    line["peak GB"] = f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
                model = model.to(torch.bfloat16).eval()
                seconds = timed(draw, device, args.repeats)
                line["sampler tokens/s"] = f"{args.slots * args.new_tokens / seconds:.0f}"
        except Exception as error:  # a compiler's errors have classes of their own; the other kinds go on
            print(f"{kind}: {type(error).__name__}: {str(error)[:200].splitlines()}")
        lines.append(line)
        model = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return lines


def launcher(ranks) -> list[str]:
    """Of a module that follows. ranks: of torchrun; 0: without it."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    return [sys.executable, "-m", *(torchrun if ranks else ())]


def scripts(ranks=0) -> list[dict]:
    table = []
    with tempfile.TemporaryDirectory() as folder:
        run = {"cwd": folder, "env": ENV, "capture_output": True, "text": True}
        for command in COMMANDS:
            start = time.perf_counter()
            out = subprocess.run([*launcher(ranks), *command.split()], **run)
            line = {"command": command, "exit code": out.returncode, "seconds": time.perf_counter() - start}
            table.append({**line, "last line": (out.stdout.strip().splitlines() or [""])[-1][:80]})
            print(f"{command}: exit code {out.returncode}, {line['seconds']:.0f} s", flush=True)
            if out.returncode:
                print(f"{command}:\n{out.stderr[-4000:]}")
    return table


def rank():
    """One rank of torchrun: the module that the first argument names, or `sharded`. A rank that is alone gets a
    process group, so that its models are sharded too."""
    if os.environ["WORLD_SIZE"] == "1":
        td.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "sharded":
        measure(replace(tyro.cli(Args), only=("sampler", "training")))
        dist.shutdown()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def main(args: Args):
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    ranks = min(2, torch.cuda.device_count() or 2)
    if ranks == 1:
        print("one GPU, so one rank under torchrun: nccl wants a GPU for each")
    for part, n in (("torchrun", ranks), ("scripts", 0)):
        table = scripts(n) if part in args.only else []
        if table:
            failed = sum(line["exit code"] != 0 for line in table)
            print(f"\n{part}, {n or 1} rank(s) on {name}: {len(table) - failed} of {len(table)} commands run")
            progress.print_table(table)
            if failed:
                sys.exit(1)
    if "sharded" in args.only:
        print(f"\nsharded, {ranks} rank(s) on {name}", flush=True)
        ended = subprocess.run([*launcher(ranks), "sharded", *sys.argv[1:]], env=ENV)
        if ended.returncode:
            sys.exit(1)
    if {"sampler", "training", "attention"} & {*args.only}:
        measure(args)


def measure(args):
    """The tables of sampler, training and attention, here or on each rank of torchrun."""
    device = dist.setup()
    bandwidth, rate = machine(device, args.repeats)
    if dist.is_main():
        print(f"{device}: {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.3g} bf16 TFLOP/s")
    for part, unit in ((sampler, bandwidth), (training, rate), (attention, None)):
        table = []
        for shape in args.shapes if part.__name__ in args.only else ():
            lines = part(shape, device, unit, args)
            table += lines if isinstance(lines, list) else [lines]
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        if table and dist.is_main():
            print(f"\n{part.__name__}")
            progress.print_table(table)


if __name__ == "__main__":
    rank() if "WORLD_SIZE" in os.environ else main(tyro.cli(Args))
