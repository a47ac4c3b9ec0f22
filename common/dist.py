"""One process or many: torchrun set-up and shutdown, FSDP2, `consolidated`, the optimiser step.

Without torchrun (or with one process) there is no process group and no sharding; with WORLD_SIZE > 1 FSDP2
shards every decoder layer and the root. A script reads the same either way.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import sys
import warnings
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
import transformers

from common.errors import NotFinite

TIMEOUT = timedelta(minutes=30)  # a rank that waits longer for the others fails instead of hanging
PATIENCE = timedelta(hours=24)  # but for a download, or a data set to be tokenised
compute_dtype = None  # of forward and backward, where --compute-dtype says one
here = torch.device("cpu")  # this rank's device, once `setup` has found it
ranks_per_copy = 1  # how many ranks hold one copy of a model together inside `consolidated`
split_layers = None  # then tensor_parallel.split, which splits the layers among them


# -- processes -------------------------------------------------------------------------------------
def setup() -> torch.device:
    """Join the process group that torchrun's environment describes, if any; returns this rank's device."""
    global here
    transformers.utils.logging.disable_progress_bar()  # of reading and writing weights
    transformers.utils.logging.set_verbosity_error()  # that a scorer's head is new is no news
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    device = torch.accelerator.current_accelerator(check_available=True)  # None: there is only the CPU
    if device and device.type == "mps" and several:
        device = None
        if is_main():
            print("Apple's MPS serves one process: those of torchrun use the CPU")
    if device:
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
        torch.accelerator.set_device_index(device.index)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan a shape: decoding has many shapes
    else:
        _keep_freed_memory()
    if several and not td.is_initialized():
        options = {"timeout": TIMEOUT, "device_id": device}
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # One node: a restart gets the store of the ranks before it, where gloo finds their dead addresses
            store, options["rank"], options["world_size"] = next(td.rendezvous("env://", timeout=TIMEOUT))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            options["store"] = td.PrefixStore(f"attempt_{attempt}", store)
        # gloo beside nccl and its like: checkpoints and objects travel on the CPU
        backend = device and f"cpu:gloo,{device.type}:{td.get_default_backend_for_device(device)}"
        td.init_process_group(backend or "gloo", **options)
    here = device or torch.device("cpu")
    return here


def print_machine():
    """Print what this program computes with, and warn of a GPU that torch cannot use."""
    if is_main():
        with_what = ", ".join(f"{name} {value}" for name, value in machine().items())
        print(f"{with_what}; torch {torch.__version__}, transformers {transformers.__version__}")
        if here.type == "cpu":
            _warn_of_unused_gpu()


def machine() -> dict:
    """What a run computes with, for its first line and args.json."""
    name = f"{here} ({torch.cuda.get_device_name(here)})" if here.type == "cuda" else str(here)
    dtype = str(compute_dtype_of(here)).removeprefix("torch.")
    return {"device": name, "compute_dtype": dtype, "world_size": world_size()}


def peak_memory(device, name: str) -> dict[str, float]:
    """{"memory/NAME_gb": the most that this rank's tensors took on an accelerator since the last call,
    "memory/reserved_gb": the most that torch has taken from it}, in units of 10^9 bytes. {} on the CPU and on
    Apple's MPS."""
    if device.type in ("cpu", "mps"):
        return {}
    peak = torch.accelerator.max_memory_allocated(device) / 1e9
    reserved = torch.accelerator.max_memory_reserved(device) / 1e9
    torch.accelerator.reset_peak_memory_stats(device)
    return {f"memory/{name}_gb": peak, "memory/reserved_gb": reserved}


def _warn_of_unused_gpu(driver=Path("/dev/nvidiactl")):
    """A line where an NVIDIA GPU is there, and not hidden on purpose, but torch cannot use it: a driver that
    is older than its CUDA, or a torch without CUDA. driver: the file that a loaded driver makes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()  # warns of a driver that is too old
    if (driver.exists() or caught) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        why = f": {str(caught[0].message).split('. ')[0]}" if caught else ""
        built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use it{why}"
        mend = "update the driver, or install a torch for it"
        print(f"warning: this machine has an NVIDIA GPU, but {built}. All runs on the CPU: {mend}")


def _keep_freed_memory():
    """Have glibc keep what is freed for the next tensor. By default a block of more than 32 MB goes back to
    the system, which hands it out again page by page, zeroed: a fifth of PPO's time on a CPU with a
    vocabulary of 49k. The price is memory: up to four tenths more at the peak was seen."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # there is no mallopt but in glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def shutdown(code: int = 0):
    """End the program; call it last, with every file closed. What used FSDP2 on gloo can abort in Python's
    teardown after all its work is done (3 of 10 runs did), so a distributed program leaves without it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not td.is_initialized():
        sys.exit(code)
    if code == 0:
        td.barrier()  # nobody leaves while another still needs it; after an error, though, nobody may wait
    os._exit(code)


def rank() -> int:
    return td.get_rank() if td.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return td.get_world_size() if td.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def barrier():
    """Wait for all ranks, for longer than a collective may last: rank 0 alone downloads and reads a model,
    and writes it, and not every machine tokenises equally fast."""
    if td.is_initialized():
        store = td.distributed_c10d._get_default_store()
        n = store.add("barrier", 1)  # ranks that came, to all barriers so far
        key = f"barrier/{(n - 1) // world_size()}"
        if n % world_size() == 0:
            store.set(key, "all are here")
        store.wait([key], PATIENCE)


def gather(values: list) -> list:
    """The lists of all ranks joined, rank 0's first, on every rank."""
    if not td.is_initialized():
        return values
    lists = [None] * world_size()
    td.all_gather_object(lists, values)
    return [value for part in lists for value in part]


def my_batches(items, size: int, n_tokens=None):
    """This rank's share of `items` in lists of at most `size`; n_tokens: an item's length, for like lengths
    to share a list. Every rank gets as many lists, empty ones at last, for a forward is a collective."""
    items = sorted(items, key=lambda item: -n_tokens(item)) if n_tokens else list(items)
    my_items = items[rank() :: world_size()]
    for start in range(0, math.ceil(len(items) / world_size()), size):
        yield my_items[start : start + size]


# -- seeds and the learning rate -------------------------------------------------------------------
def seed_of(*parts) -> int:
    """A seed made of these parts, the same on every rank: the run's seed, a purpose, an iteration, ..."""
    return _hash(parts)


def _hash(parts: tuple) -> int:
    return zlib.crc32(json.dumps(parts).encode())


@functools.lru_cache(maxsize=4)  # each step of an epoch asks for the same order; PPO for three
def shuffled(n: int, *key) -> list[int]:
    """0 .. n-1 in a random order; key: what seed_of takes. The same list for all callers: only read it."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(_hash(key))).tolist()


def schedule(step: int, n_steps: int, args) -> float:
    """The learning rate of optimiser step `step` of 1 .. n_steps, as a share of --lr, in (0, 1].

    args: --warmup-ratio of the steps, or --min-warmup-steps if more, rise in a line from above 0, for a step
      with 0 is wasted; then --lr-schedule: a cosine or a line to 0, a cosine to a tenth, or constant."""
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
    """What --compute-dtype says; without it bf16 where an accelerator has it, else fp32."""
    if compute_dtype:
        return getattr(torch, compute_dtype)
    has_bf16 = getattr(torch.get_device_module(device), "is_bf16_supported", lambda **_: False)
    return torch.bfloat16 if has_bf16(including_emulation=False) else torch.float32


def shard(model, device, compute_dtype=None):
    """The model on this rank's device, sharded when there are several ranks.

    model: real weights on rank 0, any device elsewhere (load_policy leaves the other ranks on "meta",
      so that one copy is read). Its `forward_methods` (see pretrained.py) run FSDP's hooks too.
    compute_dtype: of forward and backward, kept as `model.compute_dtype`; None: compute_dtype_of. Master
      weights and reductions are fp32."""
    model.compute_dtype = compute_dtype or compute_dtype_of(device)
    if not td.is_initialized():
        return model.to(device)
    # Imported where it is used, here and below: what one process does not need takes a second and 50 MB
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    barrier()  # rank 0 had the weights to read
    weights = model.state_dict() if is_main() else {}
    # The state dict lacks buffers that can be computed, rotary frequencies for one
    on_rank_0 = []
    if is_main():
        buffers = {name: buffer.cpu() for name, buffer in model.named_buffers()}  # gather keeps their device
        on_rank_0 = [buffers, getattr(model, "generation_config", None)]
    buffers, model.generation_config = gather(on_rank_0)
    model.to("meta").tie_weights()  # what moves to or from "meta" is new, so no longer shared
    mesh = td.init_device_mesh(device.type, (world_size(),))  # the default's device is mps on a Mac
    policy = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(model)
    owners = Counter(weight for layer in layers for weight in layer.parameters())
    for layer in layers:
        if all(owners[weight] == 1 for weight in layer.parameters()):  # else the root's
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    if isinstance(getattr(model, "score", None), torch.nn.Linear):  # a scalar head stays in fp32
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


def decoder_layers(model) -> list:
    """The modules that transformers does not split, in their order; of nested ones the outermost."""
    layers = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or [])]
    inner = {m for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if layer not in inner]


def is_sharded(model) -> bool:
    return type(model).__name__.startswith("FSDP")  # fully_shard makes it a class of its own


@contextlib.contextmanager
def consolidated(model):
    """Gather every weight once, for generation; free the copy afterwards (llama2_rlhf: with FSDP each
    decoding step gathers all weights again, about 20 times slower; consolidating once per rollout mends it).

    Inside, a forward of `model` communicates nothing, so ranks may decode different numbers of steps, and
    computes no gradient. Needs memory for one copy of the weights in compute_dtype per rank; where
    `ranks_per_copy` ranks share one (tensor_parallel.py), these run the same rows together. On one process
    weights are only cast, if compute_dtype is not theirs."""
    if getattr(model, "is_consolidated", False):  # by the caller, for several calls
        yield model
        return
    training = model.training
    sharded = [m for m in model.modules() if is_sharded(m)]
    masters = {} if sharded else {p: p.data for p in model.parameters()}
    hooks = [(m._forward_pre_hooks, m._forward_hooks) for m in sharded]
    layers = [m for m in sharded if m is not model] if ranks_per_copy > 1 else []  # that ranks share
    model.eval()
    try:
        with torch.no_grad():
            for m in sharded:  # the hooks would free a layer again, and cost more time than a small layer
                if m not in layers:
                    m.unshard()
                m._forward_pre_hooks, m._forward_hooks = {}, {}
            for p in masters:  # where the dtype is the same already, to() gives the same tensor
                p.data = p.data.to(getattr(model, "compute_dtype", p.dtype))
            model.is_consolidated = True
            with split_layers(model, layers, ranks_per_copy) if layers else contextlib.nullcontext():
                yield model
    finally:
        model.is_consolidated = False
        model.train(training)
        for p, data in masters.items():
            p.data = data
        for m, (before, after) in zip(sharded, hooks):
            m._forward_pre_hooks, m._forward_hooks = before, after
            m.reshard()
        if sharded and model.device.type != "cpu":
            torch.get_device_module(model.device).empty_cache()


# -- an optimiser step -----------------------------------------------------------------------------
def adamw(model, lr, args):
    """AdamW on what of the model learns. Where the papers name the betas, they are 0.9 and 0.95."""
    learning = [p for p in model.parameters() if p.requires_grad]
    eps = getattr(args, "adam_eps", 1e-8)
    factor = getattr(model, "lr_factor", 1)  # adapters have one, see lora.py
    groups = [{"params": learning, "lr_factor": factor}]
    return torch.optim.AdamW(groups, lr * factor, (0.9, 0.95), eps, args.weight_decay, fused=True)


def set_lr(optimizer, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    return lr


def backward(loss):
    """Add the gradient of `loss`, a scalar: what a micro-batch of this rank adds to the step's loss. FSDP
    takes the mean of the ranks' gradients, not their sum: so each is multiplied by the number of ranks."""
    (loss * world_size()).backward()


class Sums:
    """The metrics that losses return, scalars by name, summed over the micro-batches of a step and then over
    ranks: a mean is one division by the step's count. Of a name that ends in _max the largest is kept."""

    def __init__(self):
        self.values = {}

    def add(self, metrics: dict, prefix: str = ""):
        for name, value in metrics.items():
            self.values.setdefault(prefix + name, []).append(torch.as_tensor(value).detach())

    def over_ranks(self) -> dict[str, float]:
        """{name: total}, the same on every rank. Every rank must call it, also one without a share."""
        combine = lambda name, values: max(values) if name.endswith("_max") else sum(values)
        each = [x.reshape(1) for values in self.values.values() for x in values]
        read = iter(torch.cat(each).tolist() if each else ())  # read once: the device is waited for
        totals = {}
        for name, values in self.values.items():
            totals[name] = combine(name, [next(read) for _ in values])
        ranks = gather([totals])
        names = {name: None for of_rank in ranks for name in of_rank}  # in their order
        of_ranks = lambda name: [totals[name] for totals in ranks if name in totals]
        return {name: combine(name, of_ranks(name)) for name in names}


def optimizer_step(models: list, optimizers: list, loss: float, max_norm: float) -> list[float]:
    """Clip each model's gradients to a norm of at most max_norm (0: leave them), step, and forget them.

    loss: of the step, over all ranks. Returns each model's gradient norm, over all weights and ranks, before
      clipping. Where one of them or the loss is not finite, no model moves: NotFinite, on every rank."""
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
        shown = ", ".join(f"{norm:g}" for norm in norms)
        mend = "lower --lr or look at the data"
        raise NotFinite(f"loss {loss:g}, gradient norm {shown}: the step was not taken; {mend}")
    return norms
