"""Checkpoints, which any number of ranks can resume from, and the export of a trained model."""

import copy
import json
import re
import shutil
import warnings
from pathlib import Path

import torch

from common.dist import barrier, gather, is_main, world_size
from common.errors import InputError
from common.data import files

LAYOUT = 2  # version of a checkpoint's contents; raise it when older ones cannot be resumed


def save_checkpoint(root, step: int, modules: dict, state: dict, keep: int | None = None):
    """Write `root`/step_N whole or not at all, point `root`/latest at it, drop others, but that of the step
    `keep`. Any ranks load it.

    modules: {name: (model, its AdamW)}. state: what else resuming needs, as JSON (counters, positions).
      Random numbers have no state to keep: a generator is made from a seed where it is used."""
    import torch.distributed.checkpoint as dcp

    root = Path(root)
    final, temporary = root / f"step_{step}", root / f"step_{step}.tmp"
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that a single process is a single process
            dcp.save(_tensors(modules), checkpoint_id=str(temporary / "tensors"), no_dist=world_size() == 1)
    except dcp.CheckpointException as error:  # a write that failed on some rank, or a bug
        causes = [cause for cause, *_ in error.failures.values()]
        if not any(isinstance(cause, OSError) or "inline_container" in str(cause) for cause in causes):
            raise
        reason = str(causes[0]).split("\n")[0][:120]
        raise OSError(f"{temporary} cannot be written ({reason}): make room, then --resume") from error
    if is_main():
        files.replace(temporary / "state.json", json.dumps({**state, "layout": LAYOUT}))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        files.sync_folder(root)
        files.replace(root / "latest", final.name)
        for old in root.glob("step_*"):  # only now, when the new one is on the disk
            if old.name not in (final.name, f"step_{keep}"):
                shutil.rmtree(old, ignore_errors=True)
    barrier()


def load_checkpoint(root, modules: dict, step: int | None = None) -> dict:
    """Fill `modules` from the checkpoint that `root`/latest names, or that of `step`, and return the `state`
    of the latest. Learning rate, weight decay and their like stay as the optimisers have them now."""
    import torch.distributed.checkpoint as dcp

    folder, state = _latest(root)
    folder = folder if step is None else Path(root) / f"step_{step}"
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(_tensors(modules), checkpoint_id=str(folder / "tensors"), no_dist=world_size() == 1)
    except dcp.CheckpointException as error:
        reason = str(next(iter(error.failures.values()))[0]).split("\n")[0][:160]
        raise InputError(f"{folder} is broken, or of another --model ({reason}): try --overwrite") from None
    return state


def checkpoint_state(root) -> dict:
    """The `state` of the checkpoint that `root`/latest names, {} if there is none; the same on every rank."""
    return _latest(root)[1]


def _latest(root) -> tuple[Path | None, dict]:
    """(folder, state) of the last checkpoint, (None, {}) if there is none: as rank 0 sees it."""
    folder = None
    state = {}
    latest = Path(root) / "latest"
    if is_main() and latest.exists():
        name = latest.read_text("utf-8", "replace").strip()
        folder = latest.parent / name
        if not re.fullmatch(r"step_\d+", name) or not (folder / "state.json").is_file():
            there = ", ".join(sorted(path.name for path in latest.parent.glob("step_*"))) or "none"
            why = f"names {name[:40]!r}, which is no checkpoint. There are: {there}"
            raise InputError(f"{latest} {why}. Write one of them into it, or begin anew with --overwrite.")
        state = files.read_json(folder / "state.json")
        if state.pop("layout", None) != LAYOUT:
            why = "is of another version of these scripts: use that, or --overwrite"
            raise InputError(f"{folder}/state.json {why}")
    return gather([(folder, state)])[0]


def _tensors(modules):
    """{name: weights and AdamW's moments} by parameter names: the very tensors, which a load fills. An
    optimiser that took no step yet gets the moments that it would begin with."""
    tensors = {}
    for name, (model, optimizer) in modules.items():
        learning = {key: p for key, p in model.named_parameters() if p.requires_grad}
        for p in learning.values():
            if p not in optimizer.state:
                zeros = {moment: torch.zeros_like(p) for moment in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        moments = {key: optimizer.state[p] for key, p in learning.items()}
        tensors[name] = {"model": model.state_dict(), "optimizer": moments}
    return tensors


def skeleton(model, dtype):
    """The model without content, each weight in the dtype that transformers reads it in where it loads the
    model in `dtype`: integers stay integers, and what a family keeps in fp32 (routers, recurrences) does."""
    with torch.device("meta"):
        empty = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    kept = {*empty._keep_in_fp32_modules_strict} if dtype != torch.float32 else set()
    kept.update(empty._keep_in_fp32_modules if dtype == torch.float16 else ())
    for name, weight in empty.state_dict(keep_vars=True).items():
        if any(re.search(glob.replace("*", ".*"), name) for glob in kept):
            weight.data = weight.data.float()
    return empty


def save_model(model, tokenizer, path, dtype: torch.dtype = torch.float32):
    """Export with save_pretrained to `path`, whole or not at all: written beside it, then renamed."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if hasattr(model, "merge_adapters"):  # see lora.py
        model.merge_adapters(model.state_dict())
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if is_main():
        temporary = Path(f"{path}.tmp")
        path = Path(path)
        shutil.rmtree(temporary, ignore_errors=True)
        empty = skeleton(model, dtype)  # to save from: no second copy of the weights, and not sharded
        empty.generation_config = getattr(model, "generation_config", None)
        tied = empty.all_tied_weights_keys  # by now copies of others, that need no place in the file
        kinds = {name: x.dtype for name, x in empty.state_dict().items() if name not in tied}
        weights = {name: weights[name].to(kind) for name, kind in kinds.items()}  # without lora.py's
        empty.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
    barrier()  # a large model takes rank 0 longer to write than a collective may last
