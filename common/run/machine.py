"""Describe a run's machine: device, dtype, number of ranks, peaks of memory, a GPU that torch cannot use."""

import os
import warnings
from pathlib import Path

import torch
import transformers

from common import dist


def show():
    """Print device, dtype, ranks and versions, and warn of a GPU that torch cannot use."""
    if dist.is_main():
        with_what = ", ".join(f"{name} {value}" for name, value in describe().items())
        print(f"{with_what}; torch {torch.__version__}, transformers {transformers.__version__}")
        if dist.here.type == "cpu":
            _warn_of_unused_gpu()


def describe() -> dict:
    """Return device, dtype, attention and number of ranks, for a run's first line and args.json."""
    device = dist.here
    dtype = str(dist.compute_dtype_of(device)).removeprefix("torch.")
    name = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    ranks = dist.world_size()
    return {"device": name, "compute_dtype": dtype, "attention": dist.attention, "world_size": ranks}


def peak_memory(device, name: str) -> dict[str, float]:
    """Return this rank's peak memory on an accelerator in GB (10^9 bytes); {} on the CPU and on Apple's MPS.

    "memory/NAME_gb": peak of its tensors since the last call. "memory/reserved_gb": peak that torch
    reserved."""
    if device.type in ("cpu", "mps"):
        return {}
    peak = torch.accelerator.max_memory_allocated(device) / 1e9
    reserved = torch.accelerator.max_memory_reserved(device) / 1e9
    torch.accelerator.reset_peak_memory_stats(device)
    return {f"memory/{name}_gb": peak, "memory/reserved_gb": reserved}


def _warn_of_unused_gpu(driver=Path("/dev/nvidiactl")):
    """Print a warning if there is an NVIDIA GPU, not hidden on purpose, that torch cannot use.

    The driver may be too old for torch's CUDA, or torch may be built without CUDA.
    driver: a file that exists if the driver is loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()  # warns if the driver is too old
    if (driver.exists() or caught) and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        why = f": {str(caught[0].message).split('. ')[0]}" if caught else ""
        built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use it{why}"
        mend = "update the driver, or install a torch for it"
        print(f"warning: this machine has an NVIDIA GPU, but {built}. All runs on the CPU: {mend}")
