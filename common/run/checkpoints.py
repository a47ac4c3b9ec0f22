"""Save and load checkpoints, which can be resumed on any number of ranks, and export a trained model."""

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
from common.loading import lora

LAYOUT = 2  # version of the format; increase it if older checkpoints can no longer be resumed


def save_checkpoint(root, step: int, modules: dict, state: dict, keep: int | None = None):
    """Save a checkpoint as `root`/step_N, point `root`/latest at it, and remove all others except that of the
    step `keep`. A crash leaves either the old checkpoint or the new one, never a partial one.

    modules: {name: (model, its AdamW)}. state: counters and positions that resuming needs, as JSON. There is
      no random state to save, because every generator is made from a seed where it is used.
    Raises OSError if it cannot be written, for example because the disk is full."""
    import torch.distributed.checkpoint as dcp

    root = Path(root)
    final, temporary = root / f"step_{step}", root / "step.tmp"  # over what a crash left behind
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that there is only one process
            dcp.save(_tensors(modules), checkpoint_id=str(temporary / "tensors"), no_dist=world_size() == 1)
    except dcp.CheckpointException as error:  # a failed write on some rank, or a bug
        causes = _causes(error)
        if not any(isinstance(cause, OSError) or "inline_container" in str(cause) for cause in causes):
            raise
        reason = str(causes[0]).split("\n")[0][:120]
        raise OSError(f"{temporary} cannot be written ({reason}). Make room, then use --resume.") from error
    if is_main():
        files.replace(temporary / "state.json", json.dumps({**state, "layout": LAYOUT}))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        files.flush(root)
        files.replace(root / "latest", final.name)
        for old in root.glob("step_*"):  # only after the new checkpoint is on disk
            if old.name not in (final.name, f"step_{keep}"):
                shutil.rmtree(old, ignore_errors=True)
    barrier()


def load_checkpoint(root, modules: dict, step: int | None = None) -> dict:
    """Load the latest checkpoint, or that of `step`, into `modules`, and return the `state` of the latest.
    Learning rate, weight decay and the other settings of the optimisers are not loaded.

    Raises InputError if the checkpoint is damaged or does not fit the models."""
    import torch.distributed.checkpoint as dcp

    folder, state = _latest(root)
    folder = folder if step is None else Path(root) / f"step_{step}"
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(_tensors(modules), checkpoint_id=str(folder / "tensors"), no_dist=world_size() == 1)
    except dcp.CheckpointException as error:
        reason = str(_causes(error)[0]).split("\n")[0][:160]
        raise InputError(f"{folder} is damaged, or of another --model ({reason}). Try --overwrite.") from None
    return state


def _causes(error) -> list:
    """List what failed on the ranks, in a CheckpointException.

    It wraps everything: what says nothing of the files, such as Ctrl-C or too little memory, is raised."""
    causes = [cause for cause, *_ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt | MemoryError | torch.OutOfMemoryError | PermissionError):
            raise cause
    return causes


def checkpoint_state(root) -> dict:
    """Return the `state` of the latest checkpoint, on every rank; {} if there is no checkpoint.

    Raises InputError if `latest` names no checkpoint, or one in another format."""
    return _latest(root)[1]


def _latest(root) -> tuple[Path | None, dict]:
    """Return (folder, state) of the latest checkpoint, or (None, {}) without one. Rank 0 reads for all."""
    folder = None
    state = {}
    latest = Path(root) / "latest"
    if is_main() and latest.exists():
        name = latest.read_text("utf-8", "replace").strip()
        folder = latest.parent / name
        if not re.fullmatch(r"step_\d+", name) or not (folder / "state.json").is_file():
            there = ", ".join(sorted(path.name for path in latest.parent.glob("step_*"))) or "none"
            why = f"names {name[:40]!r}, which is not a checkpoint. Checkpoints: {there}"
            raise InputError(f"{latest} {why}. Write one of them into it, or start again with --overwrite.")
        state = files.read_json(folder / "state.json")
        if state.pop("layout", None) != LAYOUT:
            why = "is from another version of these scripts. Use that version, or --overwrite."
            raise InputError(f"{folder}/state.json {why}")
    return gather([(folder, state)])[0]


def _tensors(modules):
    """Return {name: weights and AdamW's moments, by parameter name}. They are the tensors themselves, not
    copies, so that loading fills them. An optimiser without a step so far gets its initial moments."""
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
    """Build the model without storage, each weight in the dtype that it has when transformers loads the model
    in `dtype`. Integers stay integers, and weights that a family keeps in fp32 (routers, recurrences) stay in
    fp32."""
    with torch.device("meta"):
        empty = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    kept = {*empty._keep_in_fp32_modules_strict} if dtype != torch.float32 else set()
    kept.update(empty._keep_in_fp32_modules if dtype == torch.float16 else ())
    for name, weight in empty.state_dict(keep_vars=True).items():
        if any(re.search(glob.replace("*", ".*"), name) for glob in kept):
            weight.data = weight.data.float()
    return empty


def save_model(model, tokenizer, path, dtype: torch.dtype = torch.float32):
    """Export a model and its tokenizer to `path` with save_pretrained. The folder is written under another
    name and then renamed, so that it is never partial. LoRA adapters are merged in float32 in the files; the
    model itself does not change.

    Raises OSError if it cannot be written, for example because the disk is full."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if is_main():
        temporary = Path(f"{path}.tmp")
        path = Path(path)
        shutil.rmtree(temporary, ignore_errors=True)
        empty = skeleton(model, dtype)  # saving from this needs no second copy of the weights, and no shards
        empty.generation_config = getattr(model, "generation_config", None)
        tied = empty.all_tied_weights_keys  # equal to other weights, so they are not saved
        kinds = {name: x.dtype for name, x in empty.state_dict().items() if name not in tied}
        for name, kind in kinds.items():  # one at a time, since two copies may not fit into memory
            weights[name] = lora.merged(weights, name).to(kind)
        try:
            empty.save_pretrained(temporary, state_dict={name: weights[name] for name in kinds})
            tokenizer.save_pretrained(temporary)
        except Exception as error:  # safetensors and tokenizers have no OSError for a full disk
            shutil.rmtree(temporary, ignore_errors=True)  # the next checkpoint may need its room
            if "os error" not in str(error):
                raise
            raise OSError(f"{temporary} cannot be written ({error}). Make room, then use --resume.") from None
        for file in temporary.rglob("*"):
            if file.suffix == ".safetensors":  # it is written for its owner only
                file.chmod((temporary / "config.json").stat().st_mode)
            files.flush(file)
        files.flush(temporary)
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        files.flush(path.parent)
    barrier()  # writing a large model can take longer than the timeout of a collective
