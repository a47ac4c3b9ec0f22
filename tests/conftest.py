"""Set up all tests: no GPU, one thread, the order of the files, and garbage collection."""

import gc
import os
import sys
from pathlib import Path

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # expected numbers are those of a CPU; tests/benchmarks/gpu.py is for GPUs
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: for matrices this small, threads only wait for each other
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def notes_are_printed_in_each_test():
    """A note is printed once in a process: another test's would be missing in this one's output."""
    if "common.data.progress" in sys.modules:
        sys.modules["common.data.progress"].note.cache_clear()


def pytest_configure(config):
    config.option.loadscopereorder = False  # of xdist: it would begin with the files of the most tests


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: -item.path.stat().st_size)  # no long file at the end, while another worker is idle
    gc.freeze()  # to collect garbage, which scripts ask for often, need not look at all that was imported
