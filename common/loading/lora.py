"""LoRA (arXiv:2106.09685): two thin matrices learn in place of each nn.Linear's weights, which stay.

    y = W x + (alpha / r) B A x            A: (r, in), drawn at random; B: (out, r), 0 at first

Gradients and AdamW's moments are those of A and B alone. model/ holds W + (alpha / r) B A, as any other.
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

ALPHA = 32  # over r, and a rate of ten times that of all weights: Thinking Machines, "LoRA Without Regret"
LR_FACTOR = 10


class LoraLinear(nn.Linear):
    is_off = False  # then the layer computes W x alone

    def forward(self, x):
        if self.is_off:
            return super().forward(x)
        change = linear(linear(x, self.lora_a), self.lora_b)
        return super().forward(x) + change * (ALPHA / len(self.lora_a))


def attach(model, rank: int, seed: int):
    """The model, its own weights frozen, with an adapter of this rank in every nn.Linear of its decoder
    layers; what share of the weights that is, and what has none, is printed. What it computes is the same
    until B learns. seed: of A."""
    model.requires_grad_(False)
    layers = dist.decoder_layers(model)
    adapted = [m for layer in layers for m in layer.modules() if type(m) is nn.Linear]
    if not adapted:
        raise InputError(f"--lora-rank: {model.config.model_type} has no linear layers to adapt")
    if dist.is_main():
        sizes = collections.Counter()
        with_one = {id(layer.weight) for layer in adapted}
        for name, p in model.named_parameters():
            sizes["" if id(p) in with_one else re.sub(r".*\.\d+\.", "", name)] += p.numel()
        shares = {name: f"{n / sizes.total():.0%}" for name, n in sizes.most_common()}
        unadapted = ", ".join(f"{name} {share}" for name, share in shares.items() if name and share != "0%")
        print(f"adapters for {shares['']} of the weights; the others do not learn: {unadapted}")
    generator = torch.Generator().manual_seed(seed)
    for layer in adapted:
        layer.__class__ = LoraLinear
        layer.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        bound = 1 / math.sqrt(layer.in_features)
        if not layer.weight.is_meta:  # ranks other than 0 get theirs from it
            nn.init.uniform_(layer.lora_a, -bound, bound, generator)
    model.lr_factor = LR_FACTOR
    model.merge_adapters = merge_adapters
    return model


@contextlib.contextmanager
def adapters_off(model):
    """Inside, the model computes with the weights that it came with."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    try:
        for layer in adapted:
            layer.is_off = True
        yield
    finally:
        for layer in adapted:
            layer.is_off = False


class FrozenBase:
    """The model that a policy with adapters began as, without a second copy of its weights: the policy with
    its adapters off. It is valid until merge_adapters changes the policy's weights."""

    def __init__(self, policy):
        self.policy = policy
        self.token_logprobs = adapters_off(policy)(policy.token_logprobs)

    def __getattr__(self, name):
        return getattr(self.policy, name)


def merge_adapters(weights: dict):
    """Add each adapter to its W, in place, and set its B to 0: the model computes what it did. weights: a
    state dict, of shards too; every rank must call it."""
    for name in [name for name in weights if name.endswith(".lora_a")]:
        layer = name.removesuffix("lora_a")
        a = weights[name]
        b = weights[f"{layer}lora_b"]
        weights[f"{layer}weight"].add_(b @ a, alpha=ALPHA / len(a))
        b.zero_()
