"""One copy of a model on n ranks together, for generation: tensor parallelism (Megatron-LM, Shoeybi et al.,
2019, arXiv:1909.08053, section 3).

    f(x A) B = sum over ranks i of f(x A_i) B_i

A makes queries, keys and values, or the MLP's gate and up: a rank has the columns of its heads, or of its
share of the hidden units. B is what follows, o_proj or down_proj, of which it has the same rows. f, attention
or the activation, stays within a head or a unit: ranks meet twice a layer, to add up what B gives. Embedding,
norms and unembedding are whole on every rank (3 % of 70B), so logits need not be put together.

Llama 2 generated so, from weights consolidated to each node (arXiv:2307.09288, section 3.2.3).
"""

import contextlib
import functools

import torch.distributed as td

from common import dist
from common.errors import InputError

FAMILIES = ("llama", "qwen2", "qwen3")  # whose decoder layers have these linear layers:
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")


def check(config, n: int):
    """InputError unless n ranks can have a copy of a model with this (text) config together."""
    if n == 1:
        return
    flag = f"--generate-tensor-parallel {n}"
    kind = config.model_type
    if kind not in FAMILIES:
        raise InputError(f"{flag}: {kind} cannot be divided, only {', '.join(FAMILIES)} can")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % n:
            raise InputError(f"{flag}: wanted a divisor of {kind}'s {name}, {getattr(config, name)}")


@functools.cache
def group_of(n: int):
    """The group of n consecutive ranks that this one is in. Every rank must call it."""
    return td.new_subgroups(n, timeout=dist.TIMEOUT)[0]


@contextlib.contextmanager
def split(model, layers, n: int):
    """Inside, groups of n ranks have these decoder layers of a model together, and a forward of the same rows
    on all ranks of a group gives what the whole model gives. Layers are gathered from FSDP's shards one at a
    time, so no rank ever has all. `model.agree_on` makes what ranks drew that of the group's first rank: on a
    GPU they may round, and so draw, differently."""
    check(model.config.get_text_config(), n)
    group = group_of(n)
    shards = []
    hooks = []
    model.agree_on = functools.partial(td.broadcast, group=group, group_src=0)

    def add_up(module, inputs, output):
        td.all_reduce(output, group=group)

    try:
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
    """A copy of this rank's part of a parameter, path: in its decoder layer, self_attn.q_proj.weight for one.
    Linear layers store (out, in), LoRA's two matrices (r, in) and (out, r)."""
    layer, name = path.split(".")[-2:]
    if layer in COLUMN_PARALLEL and name != "lora_a":
        return whole.chunk(group.size(), 0)[group.rank()].clone()
    if layer in ROW_PARALLEL and name in ("weight", "lora_a"):
        return whole.chunk(group.size(), 1)[group.rank()].clone()
    return whole / group.size() if name == "bias" else whole.clone()  # o_proj's bias is added n times
