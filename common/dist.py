"""Run on one process or many: set-up and shutdown, FSDP2, `consolidated` weights, the optimiser step.

With one process there is no process group and no sharding. Under torchrun with several, FSDP2 shards each
decoder layer and the rest of the model. A script reads the same either way.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import sys
import zlib
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as td
import transformers

from .errors import NotFinite

TIMEOUT = timedelta(minutes=30)  # a rank that waits longer for the others fails instead of hanging
PATIENCE = timedelta(hours=24)  # longest wait in `barrier`, for downloads and tokenising data sets
compute_dtype = None  # value of --compute-dtype, used in forward and backward; None: see compute_dtype_of
attention = "default"  # value of --attention, transformers' name of an implementation
here = torch.device("cpu")  # this rank's device, set by `setup`
patient = None  # all ranks, for waits as long as PATIENCE
shard_size = None  # value of --shard-size, the ranks that shard a model together; None: all
ranks_per_copy = 1  # ranks that share one copy of a model inside `consolidated` (tensor parallelism)
split_layers = None  # tensor_parallel.split if ranks_per_copy > 1


# -- processes -------------------------------------------------------------------------------------
def setup() -> torch.device:
    """Join torchrun's process group, if there is one, and return this rank's device.

    For the whole process it also makes transformers silent but for errors, and on a CPU malloc keep freed
    memory (_keep_freed_memory)."""
    global here, patient
    transformers.utils.logging.disable_progress_bar()  # for reading and writing weights
    transformers.utils.logging.set_verbosity_error()  # it would warn that a scorer's head is new
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = torch.accelerator.current_accelerator(check_available=True)  # None: no accelerator
    if device and device.type == "mps" and several:
        device = None
        if is_main():
            print("Apple's MPS serves one process: those of torchrun use the CPU")
    if device:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
        torch.backends.cuda.enable_cudnn_sdp(False)  # slow for shapes it has not seen, and decoding has many
    else:
        _keep_freed_memory()
    if several and not td.is_initialized():
        options = {"timeout": TIMEOUT, "device_id": device}
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # On one node a restart reuses the store, in which gloo would find addresses of dead processes
            store, options["rank"], options["world_size"] = next(td.rendezvous("env://", timeout=TIMEOUT))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            options["store"] = td.PrefixStore(f"attempt_{attempt}", store)
        # gloo in addition to nccl: checkpoints and Python objects are exchanged on the CPU
        backend = device and f"cpu:gloo,{device.type}:{td.get_default_backend_for_device(device)}"
        td.init_process_group(backend or "gloo", **options)
        patient = td.new_group(backend="gloo", timeout=PATIENCE)
    here = device or torch.device("cpu")
    return here


def _keep_freed_memory():
    """Make glibc keep freed memory for the next tensors.

    By default a freed block of more than 32 MB returns to the system, which then hands it out again page by
    page, zeroed. On a CPU that took a fifth of PPO's time with a vocabulary of 49k. Keeping it raised the
    peak of memory by up to 40 %."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: do not map large blocks separately
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never shrink the heap


def shutdown(code: int = 0):
    """End the program. Call this last, when all files are closed.

    A program that used FSDP2 on gloo can abort in Python's teardown although its work is done (3 of 10 runs
    did), so a distributed program exits without teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not td.is_initialized():
        sys.exit(code)
    if code == 0:
        td.barrier()  # no rank leaves while another needs it; after an error no rank may wait
    os._exit(code)


def rank() -> int:
    """Return this process's rank, 0 without torchrun."""
    return td.get_rank() if td.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks."""
    return td.get_world_size() if td.is_initialized() else 1


def is_main() -> bool:
    """Return whether this is rank 0, which prints and writes files."""
    return rank() == 0


def barrier():
    """Wait for all ranks, for longer than a collective is allowed to.

    Only rank 0 downloads, reads and writes models, and machines tokenise at different speeds. If a rank ends
    meanwhile, the others raise an error at once."""
    if td.is_initialized():
        td.barrier(group=patient)


def gather(values: list) -> list:
    """Join the lists of all ranks, rank 0's first, and return the result on every rank."""
    if not td.is_initialized():
        return values
    lists = [None] * world_size()
    td.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def my_batches(items, size: int, n_tokens=None):
    """Yield this rank's share of `items` in lists of at most `size`.

    Every rank gets the same number of lists, since a forward is a collective; the last ones may be empty.
    n_tokens: function giving an item's length; items of similar length then share a list."""
    items = sorted(items, key=lambda item: -n_tokens(item)) if n_tokens else list(items)
    my_items = items[rank() :: world_size()]
    for start in range(0, math.ceil(len(items) / world_size()), size):
        yield my_items[start : start + size]


# -- seeds and the learning rate -------------------------------------------------------------------
def seed_of(*parts) -> int:
    """Make a seed from the run's seed, a purpose, an iteration, ...: the same on every rank."""
    return _hash(parts)


def _hash(parts: tuple) -> int:
    return zlib.crc32(json.dumps(parts).encode())


@functools.lru_cache(maxsize=4)  # each step of an epoch asks for the same order, PPO for three orders
def shuffled(n: int, *key) -> list[int]:
    """Return 0 .. n-1 in a random order that `key` determines (as in seed_of).

    The list is cached and shared by all callers: do not change it."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(_hash(key))).tolist()


def schedule(step: int, n_steps: int, args) -> float:
    """Compute the learning rate of optimiser step `step` of 1 .. n_steps, as a share of --lr in (0, 1].

    Warm-up is linear and lasts --warmup-ratio of the steps, at least --min-warmup-steps. It starts above 0,
    because a step with learning rate 0 would be wasted. Then follows --lr-schedule: a cosine or a line to 0,
    a cosine to a tenth, or a constant. args: needs warmup_ratio and lr_schedule."""
    done = step - 1
    warmup = max(math.ceil(args.warmup_ratio * n_steps), getattr(args, "min_warmup_steps", 0))
    if done < warmup:
        return step / (warmup + 1)
    cosine = (1 + math.cos(math.pi * (done - warmup) / (n_steps - warmup))) / 2
    line = (n_steps - done) / (n_steps - warmup)
    shares = {"cosine": cosine, "linear": line, "cosine_with_min_lr": 0.1 + 0.9 * cosine}
    return {**shares, "constant_with_warmup": 1.0}[args.lr_schedule]


# -- FSDP2 -----------------------------------------------------------------------------------------
def compute_dtype_of(device) -> torch.dtype:
    """Return the dtype of --compute-dtype; by default bf16 on an accelerator that supports it, else fp32."""
    if compute_dtype:
        return getattr(torch, compute_dtype)
    has_bf16 = getattr(torch.get_device_module(device), "is_bf16_supported", lambda **_: False)
    return torch.bfloat16 if has_bf16(including_emulation=False) else torch.float32


def shard(model, device, compute_dtype=None):
    """Move the model to this rank's device, and shard it if there are several ranks.

    model: has its weights on rank 0. On the other ranks it may be on any device (load_policy leaves it on
      "meta", so that only one copy is read from disk). Its `forward_methods` (models.with_methods) get FSDP's
      hooks.
    compute_dtype: dtype of forward and backward, kept as `model.compute_dtype`. None: compute_dtype_of.
      Master weights and gradient reduction are fp32."""
    model.compute_dtype = compute_dtype or compute_dtype_of(device)
    if not td.is_initialized():
        return model.to(device)
    # Imported only if used, because it takes a second and 50 MB that a single process does not need
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    barrier()  # rank 0 may still have been reading weights
    weights = model.state_dict() if is_main() else {}
    # The state dict lacks non-persistent buffers, such as rotary frequencies
    on_rank_0 = []
    if is_main():
        buffers = {name: buffer.cpu() for name, buffer in model.named_buffers()}  # gather keeps the device
        on_rank_0 = [buffers, getattr(model, "generation_config", None)]
    buffers, model.generation_config = gather(on_rank_0)
    model.to("meta").tie_weights()  # moving to or from "meta" makes new tensors, so tie again
    mesh = _mesh(device.type, world_size(), shard_size or world_size())
    policy = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(model)
    owners = Counter(weight for layer in layers for weight in layer.parameters())
    for layer in layers:
        if all(owners[weight] == 1 for weight in layer.parameters()):  # else the root's
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    if isinstance(getattr(model, "score", None), torch.nn.Linear):  # a score head stays in fp32
        fully_shard(model.score, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    # Embeddings, final norm and head: tied weights share this group
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device).tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=options)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    for method in getattr(model, "forward_methods", ()):
        register_fsdp_forward_method(model, method)
    return model


@functools.cache  # each call with several groups would create new process groups
def _mesh(device_type: str, n: int, size: int):
    """Arrange n ranks in groups of `size` consecutive ranks, for hybrid sharding.

    Each group holds a whole model, sharded, and gathers layers only within the group. Gradients are averaged
    within groups first and then between them, each rank its share (PyTorch FSDP, arXiv:2304.11277, section
    3.2.2). If size == n, the mesh has one group and one dimension."""
    if size == n:
        return td.init_device_mesh(device_type, (n,))  # torch's default device would be mps on a Mac
    return td.init_device_mesh(device_type, (n // size, size), mesh_dim_names=("replicate", "shard"))


def decoder_layers(model) -> list:
    """List a model's decoder layers: the outermost modules that transformers declares not to split."""
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    inner = {m for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if layer not in inner]


def is_sharded(model) -> bool:
    """Return whether FSDP has sharded this module."""
    return type(model).__name__.startswith("FSDP")  # fully_shard makes it a class of its own


@contextlib.contextmanager
def consolidated(model):
    """Gather all weights once for generation, and free the copy afterwards.

    Without this, FSDP gathers all weights at every decoding step. Llama 2 (arXiv:2307.09288, section 3.2.3)
    found that about 20 times slower, and consolidates once per rollout.

    Inside the context gradients are off. Unless ranks share a copy, a forward communicates nothing, so ranks
    may decode different numbers of steps. Each rank needs memory for one copy of the weights in
    compute_dtype. If `ranks_per_copy` ranks share a copy (tensor_parallel.py), they run the same rows
    together. On one process the weights are only cast to compute_dtype."""
    if getattr(model, "is_consolidated", False):  # the caller did it already, for several calls
        yield model
        return
    modes = [(m, m.training) for m in model.modules()]
    sharded = [m for m in model.modules() if is_sharded(m)]
    masters = {} if sharded else {p: p.data for p in model.parameters()}
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in sharded]
    layers = [m for m in sharded if m is not model] if ranks_per_copy > 1 else []  # layers split among ranks
    model.eval()
    try:
        with torch.no_grad():
            for m in sharded:  # without hooks, which would free each layer again and cost time
                if m not in layers:
                    m.unshard()
                m._forward_pre_hooks, m._forward_hooks = {}, {}
            for p in masters:  # if the dtype is equal already, to() returns the same tensor
                p.data = p.data.to(getattr(model, "compute_dtype", p.dtype))
            model.is_consolidated = True
            with split_layers(model, layers, ranks_per_copy) if layers else contextlib.nullcontext():
                yield model
    finally:
        model.is_consolidated = False
        for m, training in modes:
            m.training = training
        for p, data in masters.items():
            p.data = data
        for m, (before, after) in zip(sharded, hooks):
            m._forward_pre_hooks, m._forward_hooks = before, after
            m.reshard()
        if sharded and model.device.type != "cpu":
            torch.get_device_module(model.device).empty_cache()


# -- an optimiser step -----------------------------------------------------------------------------
def adamw(model, lr, args):
    """Make AdamW for the trainable weights, which are dithered first if the model computes in bfloat16.

    Betas are 0.9 and 0.95, as in the papers that name them. lr: its learning rate until set_lr changes it.
    args: needs weight_decay. If it has no adam_eps or seed (of the offsets), they are 1e-8 and 0."""
    if getattr(model, "compute_dtype", None) == torch.bfloat16:
        dither(model, getattr(args, "seed", 0))
    eps = getattr(args, "adam_eps", 1e-8)
    factor = getattr(model, "lr_factor", 1)  # LoRA adapters have one (lora.py)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad], "lr_factor": factor}]
    return torch.optim.AdamW(groups, lr * factor, (0.9, 0.95), eps, args.weight_decay, fused=True)


@torch.no_grad()
def dither(model, seed=0):
    """Move trained fp32 weights off bfloat16's grid at random, so that updates smaller than its spacing act.

    Most models are stored in bfloat16, and forwards in bfloat16 round the fp32 weights that AdamW changes. As
    long as a weight's updates add up to less than half of the spacing, 2^-9 to 2^-8 of the weight, it rounds
    to what it was: a short run at a low rate would learn little (docs/results/gpu.md). So weights on the grid
    get offsets, uniform within half of the spacing. They still round to what they were, so outputs do not
    change. But an update of a tenth of the spacing now takes a tenth of the weights to the next number, so
    that on average over many weights the forward changes by what was learnt.

    On one process only weights of linear layers and convolutions get offsets, which autocast rounds, without
    those tied to embeddings, which it does not; under FSDP all weights but a score head's. Weights of float16
    files, which lie on eighths of the spacing, mostly get none. Where a weight has an offset, it does not
    depend on the number of ranks."""
    sharded = is_sharded(model)
    layers = (torch.nn.Linear, torch.nn.Conv1d, transformers.pytorch_utils.Conv1D)
    autocast = {id(x) for m in model.modules() if isinstance(m, layers) for x in (m.weight, m.bias)}
    autocast -= {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    for name, p in model.named_parameters():
        is_rounded = (sharded or id(p) in autocast) and not name.startswith("score.")
        if is_rounded and p.requires_grad and p.dtype == torch.float32:
            # As integers, neighbouring fp32 numbers differ by 1 and neighbouring bf16 numbers by 2^16
            generator = torch.Generator(p.device).manual_seed(seed_of(seed, "dither", name))
            options = {"generator": generator, "dtype": torch.int32, "device": p.device}
            offset = torch.randint(1 - 2**15, 2**15, p.shape, **options)
            if sharded:  # keep this rank's part of the offsets
                from torch.distributed.tensor import distribute_tensor

                offset = distribute_tensor(offset, p.device_mesh, p.placements, src_data_rank=None).to_local()
                p = p.to_local()
            bits = p.data.view(torch.int32)
            bits += offset * ((bits % 2**16 == 0) & (p != 0))


def set_lr(optimizer, lr: float) -> float:
    """Set the learning rate of each group to lr times its lr_factor; return lr."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    return lr


def backward(loss):
    """Add the gradient of a micro-batch's loss, a scalar that is its share of the step's loss.

    FSDP averages gradients over ranks, but the losses of all ranks should add up, so the loss is multiplied
    by the number of ranks."""
    (loss * world_size()).backward()


class Sums:
    """Sum metrics of losses, scalars by name, over the micro-batches of a step and then over ranks.

    A mean is then one division by the step's count. For names that end in _max the maximum is kept."""

    def __init__(self):
        self.values = {}

    def add(self, metrics: dict, prefix: str = ""):
        """Add the metrics of one micro-batch, without waiting for the device."""
        for name, value in metrics.items():
            self.values.setdefault(prefix + name, []).append(torch.as_tensor(value, device=here).detach())

    def over_ranks(self) -> dict[str, float]:
        """Return {name: total}, the same on every rank. Every rank must call it, even without micro-batch."""
        combine = lambda name, values: max(values) if name.endswith("_max") else sum(values)
        each = [x.reshape(1).float() for values in self.values.values() for x in values]
        read = iter(torch.cat(each).tolist() if each else ())  # one read, so Python waits once
        totals = {}
        for name, values in self.values.items():
            totals[name] = combine(name, [next(read) for _ in values])
        ranks = gather([totals])
        names = {name: None for of_rank in ranks for name in of_rank}  # keeps their order
        of_ranks = lambda name: [totals[name] for totals in ranks if name in totals]
        return {name: combine(name, of_ranks(name)) for name in names}


def optimizer_step(models: list, optimizers: list, loss: float, max_norm: float) -> list[float]:
    """Clip each model's gradients to norm max_norm (0: do not clip), take a step, and clear the gradients.

    loss: of the whole step, over all ranks.
    Returns each model's gradient norm before clipping, over all weights and ranks. If a norm or the loss is
    not finite, no model changes and NotFinite is raised, on every rank."""
    norms = []
    for model in models:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        norms.append(norm.full_tensor() if is_sharded(model) else norm)
    norms = torch.stack(norms).tolist()
    finite = all(map(math.isfinite, [loss, *norms]))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not finite:
        shown = f"loss {loss:g}, gradient norm " + ", ".join(f"{norm:g}" for norm in norms)
        raise NotFinite(f"{shown}: the step was not taken; lower --lr or look at the data")
    return norms
