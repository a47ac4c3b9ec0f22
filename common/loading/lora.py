"""LoRA (arXiv:2106.09685): train two thin matrices for each nn.Linear, whose own weights stay frozen.

    y = W x + (alpha / r) B A x            A: (r, in), drawn at random; B: (out, r), 0 at first

Only A and B have gradients and AdamW moments. The exported model/ holds W + (alpha / r) B A, like any other.

W is kept in the compute dtype if that holds it exactly, as bfloat16 holds most models of the hub: 2 bytes a
weight. Nothing changes to the last bit, because autocast and FSDP round a float32 W to bfloat16 before every
product. A and B stay in float32, where AdamW's small steps add up, and are added to W in float32 when the
model is exported.
"""

import collections
import contextlib
import math
import re

import torch
from torch import nn
from torch.nn.functional import linear

from common import dist
from common.errors import InputError

ALPHA = 32  # with ten times the rate of full training: Thinking Machines, "LoRA Without Regret"
LR_FACTOR = 10


class LoraLinear(nn.Linear):
    """A linear layer with an adapter."""

    is_off = False  # True: the layer computes only W x

    def forward(self, x):
        """Compute W x plus the adapter's change, or only W x if the adapter is off."""
        if self.is_off:
            return super().forward(x)
        return super().forward(x) + linear(linear(x, self.lora_a), self.lora_b) * (ALPHA / len(self.lora_a))


def attach(model, rank: int, seed: int):
    """Freeze the model and give every nn.Linear of its decoder layers an adapter; return the model.

    Its outputs do not change until B learns. Prints the share of the weights that have an adapter, and names
    the others. If the compute dtype holds the frozen weights exactly, as it does for files in bfloat16, they
    are kept in it. rank: rows of A and columns of B. seed: of A's initial values. Every rank must call it.
    Raises InputError if there is no linear layer to adapt."""
    model.requires_grad_(False)
    adapted = [m for layer in dist.decoder_layers(model) for m in layer.modules() if type(m) is nn.Linear]
    if not adapted:
        raise InputError(f"--lora-rank: {model.config.model_type} has no linear layers to adapt")
    if dist.is_main():
        sizes = collections.Counter()
        with_one = {id(layer.weight) for layer in adapted}
        for name, p in model.named_parameters():
            sizes["with adapters" if id(p) in with_one else re.sub(r".*\.\d+\.", "", name)] += p.numel()
        shares = [f"{name} {n / sizes.total():.0%}" for name, n in sizes.most_common()]
        shown = ", ".join(share for share in shares if not share.endswith(" 0%"))
        print(f"weights, of which only those with adapters learn: {shown}")
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted:
        layer.__class__ = LoraLinear
        layer.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        bound = 1 / math.sqrt(layer.in_features)
        if not layer.weight.is_meta:  # the other ranks receive theirs from rank 0
            nn.init.uniform_(layer.lora_a, -bound, bound, generator)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.weight is not model.get_input_embeddings().weight:
        adapted.append(head)  # tied weights stay: autocast does not round embeddings
    dtype = dist.compute_dtype_of(dist.here)
    is_exact = dist.is_main() and all(torch.equal(x.weight.to(dtype).float(), x.weight) for x in adapted)
    dist.barrier()  # rank 0 may still have been reading weights
    if dist.gather([is_exact])[0]:
        for layer in adapted:
            layer.weight.data = layer.weight.data.to(dtype)
    elif dist.is_main():
        print(f"frozen weights stay in float32, because {dtype} would round them (docs/use/gpus.md)")
    model.lr_factor = LR_FACTOR
    return model


@contextlib.contextmanager
def adapters_off(model):
    """Compute without adapters inside this context: with the weights that the model was loaded with."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    try:
        for layer in adapted:
            layer.is_off = True
        yield
    finally:
        for layer in adapted:
            layer.is_off = False


class FrozenBase:
    """The model that a policy with adapters started from, without a second copy of its weights.

    It is the policy with its adapters off, and valid until merge_adapters changes the policy's weights."""

    def __init__(self, policy):
        self.policy = policy
        self.token_logprobs = adapters_off(policy)(policy.token_logprobs)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def merged(weights: dict, name: str):
    """Return the weight of this name plus its adapter, if it has one, in float32.

    weights: a state dict; its tensors may be shards."""
    layer = name.removesuffix("weight")
    a = weights.get(f"{layer}lora_a")
    if a is None:
        return weights[name]
    return weights[name].float().add(weights[f"{layer}lora_b"] @ a, alpha=ALPHA / len(a))


def merge_adapters(weights: dict):
    """Add each adapter to its W, in place and rounded to W's dtype, and set its B to 0.

    The model's outputs stay the same up to rounding. weights: a state dict; its tensors may be shards, and
    every rank must call this."""
    for name in [name for name in weights if name.endswith(".lora_a")]:
        layer = name.removesuffix("lora_a")
        weights[f"{layer}weight"].copy_(merged(weights, f"{layer}weight"))
        weights[f"{layer}lora_b"].zero_()
