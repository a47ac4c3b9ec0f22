"""Share one copy of a model between n ranks for generation: tensor parallelism.

Source: Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053, section 3).

    f(x A) B = sum over ranks i of f(x A_i) B_i

A gives queries, keys and values, or the gate and up projections of the MLP. A rank has the columns of A for
its attention heads, or for its share of the hidden units. B is the layer that follows, o_proj or down_proj; a
rank has the same rows of it. f, attention or the activation, stays within a head or a unit. So ranks
communicate twice per layer, to add up the outputs of B. Embedding, norms and unembedding are whole on every
rank (3 % of a 70B model), so logits need not be put together.

Llama 2 was sampled in this way, from weights consolidated on each node (arXiv:2307.09288, section 3.2.3).
"""

import contextlib
import functools

import torch.distributed as td

from common import dist
from common.errors import InputError

FAMILIES = ("llama", "qwen2", "qwen3")  # their decoder layers have these linear layers:
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


def check(config, n: int):
    """Raise InputError unless n ranks can share a copy of a model with this (text) config."""
    if n == 1:
        return
    flag = f"--generate-tensor-parallel {n}"
    kind = config.model_type
    if kind not in FAMILIES:
        raise InputError(f"{flag}: a model of type {kind} cannot be split, only {', '.join(FAMILIES)} can")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % n:
            raise InputError(f"{flag}: not a divisor of {kind}'s {name}, {getattr(config, name)}")


@functools.cache
def group_of(n: int):
    """Return the group of n consecutive ranks that this rank is in. Every rank must call it."""
    return td.new_subgroups(n, timeout=dist.TIMEOUT)[0]


@contextlib.contextmanager
def split(model, layers, n: int):
    """Share these decoder layers of a model between groups of n ranks, inside the context.

    A forward of the same rows on all ranks of a group gives the result of the whole model. Layers are
    gathered from FSDP's shards one at a time, so no rank ever has all of them. `model.agree_on` replaces
    the tokens and log probabilities that a rank drew by those of its group's first rank: on a GPU ranks
    may round differently, and so draw different tokens."""
    check(model.config.get_text_config(), n)
    group = group_of(n)
    shards = []
    hooks = []
    model.agree_on = functools.partial(td.broadcast, group=group, group_src=0)

    def add_up(module, inputs, output):
        td.all_reduce(output, group=group)

    try:
        # One layer at a time: the full weights of one layer are the most that a rank holds beyond its parts
        for layer in layers:
            layer.unshard()
            my_parts = {path: part(path, whole, group) for path, whole in layer.named_parameters()}
            layer.reshard()
            for path in my_parts:
                owner, _, name = path.rpartition(".")
                module = layer.get_submodule(owner)
                shards.append((module, name, module._parameters[name]))
                module._parameters[name] = my_parts[path]
                if owner.endswith(ROW_PARALLEL) and name == "weight":
                    hooks.append(module.register_forward_hook(add_up))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, shard in shards:
            module._parameters[name] = shard
        del model.agree_on


def part(path: str, whole, group):
    """Return a copy of this rank's part of a parameter.

    path: the parameter's name in its decoder layer, such as self_attn.q_proj.weight.
    whole: the parameter. Linear layers store (out, in), LoRA's two matrices (r, in) and (out, r)."""
    layer, name = path.split(".")[-2:]
    if layer in COLUMN_PARALLEL and name != "lora_a":
        return whole.chunk(group.size(), 0)[group.rank()].clone()
    if layer in ROW_PARALLEL and name in ("weight", "lora_a"):
        return whole.chunk(group.size(), 1)[group.rank()].clone()
    return whole / group.size() if name == "bias" else whole.clone()  # the sum has o_proj's bias n times
