"""Compute a rank's peak memory of tensors, next to the arithmetic of docs/use/gpus.md, without a GPU or weights: the
scripts' update functions and the sampler run on tensors without content, with --ranks simulated ranks.

    python tests/benchmarks/memory.py --ranks 8 64 512
    python tests/benchmarks/memory.py --model llama3-70b --ranks 8 64 512 --share 8
    python tests/benchmarks/memory.py --model llama2-7b --ranks 1 2 --tokens 2048 --lora-rank 16

A micro-batch is a row of --tokens, with checkpointing, after another one that left its gradients. In PPO four
models are there, also while --slots rows of LENGTH tokens are sampled inside `consolidated`, where --share ranks
hold one copy together (--generate-tensor-parallel). With --lora-rank PPO has three models, and prompts and a
decoding step are also shown beside the policy alone, as SFT and DPO sample; --wide: its frozen weights in float32."""

import copy
import itertools
import weakref
from unittest import mock

import peers  # noqa: F401, which makes the scripts known
import torch
import torch.testing._internal.distributed.fake_pg  # noqa: F401, which makes "fake" known
import tyro
from torch import distributed as td
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint import state_dict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

import dpo_iterative
import ppo
import sft
from common import batches, dist, models, sampler
from common.data import progress, tiny
from common.loading import pretrained, tensor_parallel
from common.run import checkpoints

LENGTH = 2048
NAMES = """num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads
vocab_size"""
SHAPES = {
    "llama3-1b": (16, 2048, 8192, 32, 8, 128256),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama2-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama3-70b": (80, 8192, 28672, 64, 8, 128256),
}


class Storages(TorchDispatchMode):
    """The most bytes at once of the storages that a subclass hands to `count`, each until it is freed."""

    def __init__(self):
        super().__init__()
        self.sizes, self.live, self.peak = {}, 0, 0

    def count(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
        self.live += storage.size() - self.sizes.get(key, 0)
        self.sizes[key] = storage.size()
        self.peak = max(self.peak, self.live)

    def forget(self, key):
        self.live -= self.sizes.pop(key)


class Pretend(Storages):
    """Models compute with fake tensors, whose storage is counted; ids, masks and lengths are real."""

    def __init__(self):
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, aten = kwargs or {}, torch.ops.aten
        if (
            func is torch.ops.prim.device.default or torch._guards.active_fake_mode()
        ):  # DTensor asks for shapes
            return func(*args, **kwargs)
        if td.tensor.DTensor in types:
            return NotImplemented  # it comes again with the part of this rank
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fakes = any(isinstance(x, FakeTensor) for x in tensors)
        if func is aten._local_scalar_dense.default and fakes:
            return 1.0 if args[0].dtype.is_floating_point else False
        if func is aten.index.Tensor and fakes:  # masks become places, of which the number is known
            masks = [x is not None and x.dtype == torch.bool for x in args[1]]
            places = [x.nonzero().unbind(1) if mask else [x] for x, mask in zip(args[1], masks)]
            args = args[0], [*itertools.chain(*places)]
        begins = all(x.device.type == "meta" for x in tensors)  # a tensor made of nothing
        device = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
        if torch.device(device).type == "meta" or not (fakes or begins):
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.ndim == 4 and out.shape[-1] >= out.shape[-2] > LENGTH:
                self.count(out.untyped_storage())  # masks: real, but as large as (tokens, tokens)
            return out
        with self.fake:
            out = func(*args, **kwargs)
        if begins and isinstance(out, torch.Tensor) and not out.dtype.is_floating_point:
            return func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, FakeTensor):
                self.count(x.untyped_storage())
        return out

    def peak_of(self, run, *inputs):
        self.peak = self.live
        return run(*inputs), self.peak


def measure(tokens, slots, lora, pretend):
    """{what: bytes at the peak of this rank}; the parameters of policy and value model. lora: its rank."""
    n, half, found = dist.world_size(), torch.arange(tokens // 2), {}
    documents = [batches.Document(half.int() % 300, half >= tokens // 8, [], None, i) for i in range(2 * n)]

    def load(kind, *head):
        model = dist.shard(kind("", tiny.tokenizer(), *head), torch.device("cpu"), torch.bfloat16)
        return model, dist.adamw(model, 1e-6, sft.Args())

    def step(what, script, models_, optimizers, *given):
        checkpoints._tensors({model: pair for model, *pair in zip("pv", models_, optimizers)})  # which makes moments
        for parameter in (p for model in models_ for p in model.parameters() if p.requires_grad):
            parameter.grad = torch.zeros_like(parameter)
        learners = [*models_, *optimizers]
        if script is ppo:
            learners = [ppo.Agent(*models_, None, None, *optimizers)]
        args = script.Args(micro_batch_size=1, max_length=tokens)
        _, found[what] = pretend.peak_of(script.update, *learners, *given, args)

    def next_logits(model, new, *more):
        logits, peak = pretend.peak_of(plain, model, new, *more)
        what = ("prefill" if new.shape[1] > 1 else "decoding") + beside
        found[what] = max(found.get(what, 0), peak)
        return logits

    def sampled():
        with mock.patch.object(sampler, "_next_logits", next_logits), dist.consolidated(policy):
            prompts = [[5] * (LENGTH - 2)] * slots
            sampler.sample(policy, prompts, max_new_tokens=2, stop_ids=[], pad_id=0, slots=slots)

    policy, optimizer = load(pretrained.load_policy, True, 0, lora)
    plain, policy.ragged_cache_works = sampler._next_logits, True  # there are no numbers to compare
    step("SFT", sft, [policy], [optimizer], batches.split(documents, 2))
    prompt, *responses = torch.arange(tokens).int().split([tokens // 4, tokens * 3 // 8, tokens * 3 // 8])
    pair = batches.Comparison([], ["", ""], prompt, responses, torch.tensor([0, 1]), "", None)
    step("DPO", dpo_iterative, [policy], [optimizer], [pair._replace(ref_logprobs=torch.zeros(2))] * n)
    if lora:
        beside = ", SFT"
        sampled()
    beside = ""
    value, of_value = load(pretrained.load_scorer, 1, True)
    _others = [load(pretrained.load_scorer, 1, True)]  # the reward model, and but for adapters a reference
    _others += [] if lora else [load(pretrained.load_policy, True)]
    mask = batches.response_mask(documents)
    figures = {name: torch.zeros(mask.shape) for name in "old_logprobs old_values advantages returns".split()}
    rollout = ppo.Rollout([], documents, mask, mask[:, 0], **figures)
    step("PPO", ppo, [policy, value], [optimizer, of_value], rollout, range(2 * n), {}, True)

    sampled()
    return found, *(sum(p.numel() for p in model.parameters()) for model in (policy, value))


def arithmetic(shape, tokens, slots, ranks, n, n_value):
    """docs/use/gpus.md's, of the same."""
    layers, hidden, wide, heads, key_value_heads, vocabulary = shape
    ends = 2 * vocabulary * hidden  # parameters of embedding and unembedding
    between, inside = 2 * layers * hidden * tokens, (28 * hidden + 12 * wide) * tokens  # activations
    logits = 3.5 * 4 * models.LOGITS_IN_MEMORY  # of a chunk: in bf16, in fp32, their softmax and gradient
    mask = 2 * tokens**2  # of documents that share a row, or responses a prompt: one in bf16 for all layers
    in_layer = 3 * ends + 8 * (n - ends) / layers + between + inside
    working = max(in_layer, 3 * ends + logits + between, 6 * ends)
    cached = 4 * layers * key_value_heads * hidden // heads / dist.ranks_per_copy  # bytes of a token
    copy_ = 2 * (ends + (n - ends) / dist.ranks_per_copy)
    sampling = 16 * (n + n_value) / ranks + copy_ + cached * slots * LENGTH
    return {
        "SFT": 16 * n / ranks + working + mask,
        "DPO": 16 * n / ranks + working + mask,
        "PPO": 20 * (n + n_value) / ranks + working,
        "prefill": sampling + cached * sampler.PREFILL_TOKENS,
        "decoding": sampling,
    }


def main(
    model: str = "llama3-8b", ranks: tuple[int, ...] = (8,), tokens: int = 4096, share: int = 1, slots: int = 16,
    lora_rank: int = 0, wide: bool = False,
):  # fmt: skip
    shape, table, resize = SHAPES[model], [], torch.UntypedStorage.resize_
    dist.dither = lambda *_: None  # it would draw a number for each weight
    config = LlamaConfig(**dict(zip(NAMES.split(), shape)))

    def read(auto_class, name, config, seed):
        with torch.device("meta"):
            empty = auto_class.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        if not td.is_initialized():  # one process moves its weights, of which there are none
            empty.to = lambda device: type(empty).to_empty(empty, device=device)
        return empty

    # No files, no weights, no other ranks; chunks of logits as on a GPU
    pretrained._read_config, pretrained._read = lambda name: copy.deepcopy(config), read
    pretrained.check_forward = pretrained._check_rows = state_dict.set_model_state_dict = lambda *_, **__: None
    dist.barrier, dist.gather = lambda: None, lambda values: values
    models.LOGITS_IN_MEMORY, models.CHUNKS_KEPT = 8 * models.LOGITS_IN_MEMORY, 1
    dist.ranks_per_copy, dist.split_layers = share, tensor_parallel.split
    dist.compute_dtype = None if wide else "bfloat16"  # of frozen weights; shard is handed its own
    torch.equal = lambda *_: True  # there are no numbers to round
    for n in ranks:
        tensor_parallel.group_of.cache_clear()
        if n > 1:
            td.init_process_group("fake", rank=0, world_size=n, store=td.HashStore())
        with Pretend() as pretend:
            torch.UntypedStorage.resize_ = lambda *args: pretend.count(resize(*args) or args[0])
            found, *sizes = measure(tokens, slots, lora_rank, pretend)
        if n > 1:
            td.destroy_process_group()
        expected = {} if lora_rank or n == 1 else arithmetic(shape, tokens, slots, n, *sizes)
        for what in found:
            row = {"model": model, "ranks": n, "what": what, "GB": found[what] / 1e9}
            if expected:
                row |= {"arithmetic": expected[what] / 1e9, "differs by": f"{expected[what] / found[what] - 1:+.0%}"}
            table.append(row)
    progress.print_table(table)


if __name__ == "__main__":
    tyro.cli(main)
