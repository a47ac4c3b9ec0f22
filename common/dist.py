"""One process or many: torchrun set-up and shutdown, FSDP2, `consolidated`, gradient clipping, checkpoints.

The environment decides. Without torchrun (or with one process) there is no process group and no sharding;
with WORLD_SIZE > 1 every decoder layer and the root are sharded by FSDP2 with fp32 master weights and, on
GPU, bf16 compute. The functions below are written so that a script reads the same either way.
"""

import contextlib
import copy
import ctypes
import functools
import io
import itertools
import json
import math
import os
import random
import shutil
import sys
import warnings
import zlib
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
import transformers
from torch import nn

from common.errors import InputError, NotFinite

LAYOUT = 1  # of checkpoints; raise it when those before cannot be gone on with
TIMEOUT = timedelta(minutes=30)  # a rank that waits longer for the others fails instead of hanging
PATIENCE = timedelta(hours=24)  # but for a download, or a data set to be tokenised


# -- processes -------------------------------------------------------------------------------------
def setup() -> torch.device:
    """Join the process group that torchrun's environment describes, if there is one, and return this rank's
    device."""
    transformers.utils.logging.disable_progress_bar()  # of reading and writing weights
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not td.is_initialized():
        options = {"timeout": TIMEOUT, "device_id": device if cuda else None}
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # One node: a restart gets the store of the ranks before it, where gloo finds their dead addresses
            store, options["rank"], options["world_size"] = next(td.rendezvous("env://", timeout=TIMEOUT))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            options["store"] = td.PrefixStore(f"attempt_{attempt}", store)
        # gloo beside nccl: checkpoints and objects travel on the CPU
        td.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **options)
    return device


def _keep_freed_memory():
    """Have glibc keep what is freed for the next tensor. By default a block of more than 32 MB goes back to
    the system, which hands it out again page by page, zeroed: a fifth of PPO's time on a CPU with a
    vocabulary of 49k. The price is memory: up to four tenths more at the peak was seen."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # there is no mallopt but in glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX: no block has a mapping of its own
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap does not shrink


def shutdown(code: int = 0):
    """End the program. Call it last, with every file closed.

    A program that used FSDP2 on gloo can abort in the interpreter's teardown after all its work is done (seen
    in 3 of 10 runs that called destroy_process_group), so a distributed program flushes its output and leaves
    without that teardown."""
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
    if td.is_initialized():
        td.barrier()


_patient_barriers = itertools.count()  # numbers of those to come, the same on every rank


def patient_barrier():
    """A barrier after work that may keep the ranks apart for longer than a collective may last: rank 0 alone
    downloads and reads a model, and not every machine tokenises equally fast."""
    if td.is_initialized():
        store, key = td.distributed_c10d._get_default_store(), f"patient_barrier/{next(_patient_barriers)}"
        if store.add(f"{key}/ranks", 1) == world_size():
            store.set(key, "all are here")
        store.wait([key], PATIENCE)


def all_sum(*values) -> list[float]:
    """Each value summed over all ranks, in fp64. Numerators and denominators go through here, never per-rank
    means."""
    total = torch.tensor([float(v) for v in values], dtype=torch.float64)
    if td.is_initialized():
        td.all_reduce(total)
    return total.tolist()


def sum_of_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' tensors, on the CPU, on every rank."""
    if td.is_initialized():
        td.all_reduce(tensor)
    return tensor


def gather(values: list) -> list:
    """The lists of all ranks joined, rank 0's first, on every rank."""
    if not td.is_initialized():
        return values
    parts = [None] * world_size()
    td.all_gather_object(parts, values)
    return [value for part in parts for value in part]


def my_batches(items, size: int, n_tokens=None):
    """This rank's share of `items` in lists of at most `size`; n_tokens: an item's length, for like lengths
    to share a list. Every rank gets the same number of lists, for a forward is a collective; a rank that runs
    out of items gets empty ones."""
    items = sorted(items, key=lambda item: -n_tokens(item)) if n_tokens else list(items)
    mine = items[rank() :: world_size()]
    for start in range(0, math.ceil(len(items) / world_size()), size):
        yield mine[start : start + size]


# -- seeds and the learning rate -------------------------------------------------------------------
def seed_of(*parts) -> int:
    """A seed made of these parts, the same on every rank: the run's seed, a purpose, an epoch or iteration,
    ..."""
    return zlib.crc32(json.dumps(parts).encode())


@functools.lru_cache(maxsize=1)  # each step of an epoch asks for the same order
def shuffled(n: int, *key) -> list[int]:
    """0 .. n-1 in a random order, the same on every rank; read it, for the next caller gets the same list.
    key: what seed_of takes."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_of(*key))).tolist()


def schedule(step: int, n_steps: int, args) -> float:
    """The learning rate of optimiser step `step` of 1 .. n_steps, as a share of --lr, in (0, 1].

    args: --warmup-ratio of the steps, or --min-warmup-steps if that is more, rise in a line that begins
      above 0, for a step with 0 is a step wasted; then --lr-schedule: a cosine or a line to 0, a cosine to a
      tenth, or constant."""
    done = step - 1
    warmup = max(math.ceil(args.warmup_ratio * n_steps), getattr(args, "min_warmup_steps", 0))
    if done < warmup:
        return step / (warmup + 1)
    cosine = (1 + math.cos(math.pi * (done - warmup) / (n_steps - warmup))) / 2
    line = (n_steps - done) / (n_steps - warmup)
    shares = {"cosine": cosine, "linear": line, "cosine_with_min_lr": 0.1 + 0.9 * cosine}
    return {**shares, "constant_with_warmup": 1.0}[args.lr_schedule]


# -- FSDP2 -----------------------------------------------------------------------------------------
def shard(model, device, compute_dtype=None):
    """The model on this rank's device, sharded when there are several ranks.

    model: real weights on rank 0, any device elsewhere (loading.load_policy leaves the other ranks on "meta",
      so that one copy is read).
    compute_dtype: what forward and backward compute in; None: bf16 on GPU, fp32 on CPU. Master weights and
      reductions are fp32. The model's `forward_methods` (see loading.py) run FSDP's hooks too. Sets
      `model.compute_dtype`."""
    compute_dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    if not td.is_initialized():
        model.to(device)
    else:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        patient_barrier()  # rank 0 had the weights to read
        weights = model.state_dict() if is_main() else {}
        # The state dict lacks buffers that can be computed, rotary frequencies for one
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        model.to("meta")
        _tie(model)
        mesh = td.init_device_mesh(device.type, (world_size(),))  # the default's device is mps on a Mac
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        for module in list(model.modules()):
            if type(module).__name__ in (model._no_split_modules or []):  # the decoder layers
                fully_shard(module, mesh=mesh, mp_policy=policy)
        if isinstance(getattr(model, "score", None), nn.Linear):  # a scalar head stays in fp32
            fully_shard(model.score, mesh=mesh, mp_policy=MixedPrecisionPolicy())
        # Embeddings, final norm and head: tied weights share this group
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model.to_empty(device=device)
        _tie(model)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, weights, options=options)
        for name, buffer in model.named_buffers():
            if is_main():
                buffer.copy_(buffers[name])
            td.broadcast(buffer, 0)
        for method in getattr(model, "forward_methods", ()):
            register_fsdp_forward_method(model, method)
            _free_without_gradient(model, method)
    model.compute_dtype = compute_dtype
    model.is_consolidated = False
    return model


def is_sharded(model) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def _free_without_gradient(model, method):
    """FSDP keeps the root's weights after a forward for the backward to come. Without gradient there is none:
    free them, or the model goes on holding them and `parameters()` gives gathered tensors, which an optimiser
    must not be built on."""
    run = getattr(model, method)

    @functools.wraps(run)
    def wrapped(*args, **kwargs):
        result = run(*args, **kwargs)
        if not torch.is_grad_enabled() and not model.is_consolidated:
            model.reshard()
        return result

    setattr(model, method, wrapped)


def _tie(model):
    """Moving a module to or from the meta device makes new parameters and so unties shared ones: tie input
    and output embeddings again."""
    if getattr(model.config, "tie_word_embeddings", False) and model.get_output_embeddings() is not None:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


@contextlib.contextmanager
def at_hand(device, offload, *models):
    """Inside, `models` (None is left out) are on `device`; with `offload` they are in the CPU's memory
    outside. Every rank must call it; around a whole step, for moving costs as much as reading the weights."""
    for model in filter(None, models) if offload else ():
        model.to(device)
    try:
        yield
    finally:
        put_away(offload, *models)


def put_away(offload, *models):
    """With `offload`, models (None is left out) go to the CPU's memory."""
    for model in filter(None, models) if offload else ():
        model.to("cpu")


@contextlib.contextmanager
def consolidated(model):
    """Gather every weight once, for generation; free the copy afterwards (llama2_rlhf: with FSDP each
    decoding step gathers all weights again, about 20 times slower; consolidating once per rollout mends it).

    Inside, a forward of `model` communicates nothing, so ranks may decode different numbers of steps, and
    computes no gradient. Needs memory for one copy of the weights in compute_dtype per rank. On one process
    weights are only cast, if compute_dtype is not theirs."""
    if getattr(model, "is_consolidated", False):  # by the caller, for several calls
        yield model
        return
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _full_weights(model):
            yield model
    finally:
        model.train(training)


@contextlib.contextmanager
def _full_weights(model):
    from torch.distributed.fsdp import FSDPModule

    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules:
        masters = {p: p.data for p in model.parameters()}
        for p in masters:  # where the dtype is the same already, to() gives the same tensor
            p.data = p.data.to(getattr(model, "compute_dtype", p.dtype))
        try:
            yield
        finally:
            for p, data in masters.items():
                p.data = data
        return
    # A tiny forward lets FSDP find its root and order; unshard before it fails. All ranks are here together,
    # so it may communicate.
    device = next(model.parameters()).device
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    for module in modules:
        module.unshard()
    hooks = [(m, m._forward_pre_hooks, m._forward_hooks) for m in modules]
    model.is_consolidated = True
    for m in modules:  # they would free a layer after its forward, and cost more time than a small layer
        m._forward_pre_hooks, m._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        model.is_consolidated = False
        for m, pre, post in hooks:
            m._forward_pre_hooks, m._forward_hooks = pre, post
        for module in modules:
            module.reshard()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# -- an optimiser step -----------------------------------------------------------------------------
def adamw(model, lr, args):
    """AdamW on what of the model learns. Where the papers name the betas, they are 0.9 and 0.95."""
    learning = [p for p in model.parameters() if p.requires_grad]
    eps = getattr(args, "adam_eps", 1e-8)
    return torch.optim.AdamW(learning, lr, (0.9, 0.95), eps, args.weight_decay, fused=True)


def set_lr(optimizer, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def backward(loss):
    """Add the gradient of `loss`, a scalar: what a micro-batch of this rank adds to the step's loss. All
    ranks' shares add up to it, but FSDP takes the mean of the ranks' gradients: so each share is multiplied
    by the number of ranks."""
    (loss * world_size()).backward()


class Sums:
    """The metrics that losses return, scalars by name, summed over the micro-batches of a step and then over
    ranks: a mean is one division by the step's count, never a mean of means. Of a name that ends in _max the
    largest value is kept instead."""

    def __init__(self, *names):
        """names: those that a rank without a share does not come by."""
        self.values = {name: [] for name in names}

    def add(self, metrics: dict, prefix: str = ""):
        for name, value in metrics.items():
            self.values.setdefault(prefix + name, []).append(torch.as_tensor(value).detach())

    def over_ranks(self) -> dict[str, float]:
        """{name: total} in fp64, the same on every rank. Every rank must call it, with the same names in the
        same order."""
        values = {name: [float(x) for x in micro_batches] for name, micro_batches in self.values.items()}
        names = [name for name in values if not name.endswith("_max")]
        totals = dict(zip(names, all_sum(*(sum(values[name]) for name in names))))
        for name in values:
            if name.endswith("_max"):
                totals[name] = max(gather(values[name]))
        return totals


def optimizer_step(models: list, optimizers: list, loss: float, max_norm: float) -> list[float]:
    """Clip each model's gradients to a norm of at most max_norm (0: leave them), step, and forget them.

    loss: of the step, over all ranks. Returns each model's gradient norm, over all weights and ranks, before
      clipping. Where one of them or the loss is not finite, no model moves: NotFinite, on every rank."""
    norms = [clip_grad_norm(model, max_norm) for model in models]
    finite = all(map(math.isfinite, [loss, *norms]))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not finite:
        shown = ", ".join(f"{norm:g}" for norm in norms)
        raise NotFinite(
            f"loss {loss:g}, gradient norm {shown}: the step was not taken; lower --lr or look at the data"
        )
    return norms


def clip_grad_norm(model, max_norm: float) -> float:
    """Scale the gradients to a global norm of at most max_norm (0: leave them) and return the norm before
    that, over all ranks."""
    norm = torch.nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if 0 < max_norm < norm.item():
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.item()


# -- checkpoints -----------------------------------------------------------------------------------
def save_checkpoint(root, step: int, modules: dict, state: dict):
    """Write `root`/step_N whole or not at all, point `root`/latest at it, then drop older ones.

    modules: {name: (model, optimizer or None)}. state: what else resuming needs, as JSON (counters,
      positions). Random number generators of every rank are added. Loads on any number of ranks
      (the generators on the same number only)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    root = Path(root)
    final, temporary = root / f"step_{step}", root / f"step_{step}.tmp"
    if is_main():
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    barrier()
    # Of an optimiser that has taken no step torch makes a first one to have a state to save: forget it again
    fresh = [name for name, (_, optimizer) in modules.items() if optimizer and not optimizer.state]
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that a single process is a single process
            dcp.save(_tensors(modules), checkpoint_id=str(temporary / "tensors"), no_dist=world_size() == 1)
    except CheckpointException as error:  # torch's word for a write that failed on some rank, or for a bug
        causes = [cause for cause, *_ in error.failures.values()]
        if not any(isinstance(cause, OSError) or "inline_container" in str(cause) for cause in causes):
            raise
        said = str(causes[0]).split("\n")[0][:120]
        raise OSError(f"{temporary} cannot be written ({said}): make room, then --resume") from error
    buffer = io.BytesIO()  # where Python writes and not torch, a full disk is an OSError
    torch.save(_generators(), buffer)
    (temporary / f"generators_{rank()}_of_{world_size()}.pt").write_bytes(buffer.getvalue())
    for name in fresh:
        modules[name][1].state.clear()
    if is_main():
        (temporary / "state.json").write_text(
            json.dumps({**state, "fresh_optimizers": fresh, "layout": LAYOUT})
        )
    barrier()  # every rank has written its part
    if is_main():
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        pointer = root / "latest.tmp"
        pointer.write_text(final.name)
        os.replace(pointer, root / "latest")
        for old in root.glob("step_*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    barrier()


def load_checkpoint(root, modules: dict) -> dict:
    """Restore `modules` and the random number generators from the checkpoint that `root`/latest names, and
    return its `state`. Learning rate, weight decay and their like stay as the optimisers have them now."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    (folder, state), tensors = _read_state(Path(root)), _tensors(modules)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(tensors, checkpoint_id=str(folder / "tensors"), no_dist=world_size() == 1)
    for name, (model, optimizer) in modules.items():
        groups = optimizer.param_groups if optimizer else []
        now = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        states = {"model_state_dict": tensors[name]["model"], "optim_state_dict": tensors[name]["optimizer"]}
        set_state_dict(model, optimizer or [], **states)
        for group, settings in zip(optimizer.param_groups if optimizer else [], now):
            group.update(settings)
    generators = folder / f"generators_{rank()}_of_{world_size()}.pt"
    if generators.exists():
        _set_generators(torch.load(generators, weights_only=False))
    elif is_main():
        print(f"{folder} is from another number of ranks: random numbers start afresh, all else is the same")
    for name in state.pop("fresh_optimizers"):
        modules[name][1].state.clear()
    return state


def checkpoint_state(root) -> dict:
    """The `state` of the checkpoint that `root`/latest names, nothing else of it loaded; {} if there is none.
    The same on every rank, which all must call it."""
    state, root = {}, Path(root)
    if is_main() and (root / "latest").exists():
        state = _read_state(root)[1]
        state.pop("fresh_optimizers")  # load_checkpoint's
    return gather([state])[0]


def _read_state(root):
    """(folder, state) of the checkpoint that `root`/latest names."""
    folder = root / (root / "latest").read_text().strip()
    state = json.loads((folder / "state.json").read_text())
    if state.pop("layout", None) != LAYOUT:
        raise InputError(
            f"{folder} is of another version of these scripts: go on with that one, or --overwrite"
        )
    return folder, state


def _tensors(modules):
    """{name: {"model": ..., "optimizer": ...}}, state dicts by parameter names, so that any number of ranks
    fits."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = {name: get_state_dict(model, optimizer or []) for name, (model, optimizer) in modules.items()}
    return {name: {"model": model, "optimizer": optimizer} for name, (model, optimizer) in states.items()}


def _generators():
    import numpy

    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None}


def _set_generators(states):
    import numpy

    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@torch.no_grad()
def round_weights(model, dtype: torch.dtype):
    """Round the weights in place to what `save_model` writes in this dtype: what is evaluated after this is
    what is exported."""
    for weight in model.state_dict().values():
        weight.copy_(weight.to(dtype))


def save_model(model, tokenizer, path, dtype: torch.dtype = torch.float32):
    """Export with save_pretrained to `path`, whole or not at all (written beside it, then renamed). Every
    rank must call it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if is_main():
        path, temporary = Path(path), Path(f"{path}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        with torch.device("meta"):
            skeleton = _plain_class(model)(config)  # to save from: no FSDP, and no second copy of the weights
        skeleton.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
        skeleton.to(dtype)
        tied = skeleton.all_tied_weights_keys  # by now copies of others, that need no place in the file
        weights = {name: weight.to(dtype) for name, weight in weights.items() if name not in tied}
        skeleton.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    patient_barrier()  # a large model takes rank 0 longer to write than a collective may last


def _plain_class(model) -> type[nn.Module]:
    """The transformers class of a model, also after fully_shard, which gives it a subclass named FSDP..."""
    return type(model).__mro__[2] if type(model).__name__.startswith("FSDP") else type(model)
