"""Which masks SDPA keeps for backward, and the most bytes of tensors of a step: packed rows of a Llama of 4 layers,
hidden size 256, on a CPU; with masks of True and False, as transformers makes them, and in numbers, made once.

    OMP_NUM_THREADS=1 python tests/benchmarks/masks.py --tokens 4096 8192
    OMP_NUM_THREADS=1 python tests/benchmarks/masks.py --dtype float32 bfloat16 --repeats 3      and how long it takes
"""

import sys
import time
from pathlib import Path
from unittest import mock

import torch
import tyro
from memory import Storages
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common import batches, losses, models
from common.data import progress

DOCUMENTS, LAYERS = 8, 4


class Count(Storages):
    """The most bytes of tensors at once, of those that are made while it is on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.count(x.untyped_storage())
        return out


def measure(model, batch, dtype, repeats) -> dict:
    kept, model.compute_dtype = {}, dtype

    def pack(x):
        if x.ndim == 4 and x.shape[-1] == x.shape[-2] == batch.input_ids.shape[1]:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def step():
        losses.sft_loss(models.logprobs(model, batch), batch.action_mask)[0].backward()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), Count() as count:
        step()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    model.zero_grad()
    line = {"masks kept": len(kept), "their MB": sum(kept.values()) / 1e6, "peak MB": count.peak / 1e6}
    return {**line, "CPU s": min(seconds, default="-"), "gradient": gradient}


def main(tokens: tuple[int, ...] = (1024, 2048, 4096), dtype: tuple[str, ...] = ("bfloat16",), repeats: int = 0):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **sizes, vocab_size=64, num_hidden_layers=LAYERS, max_position_embeddings=2**15, attn_implementation="sdpa"
    )
    model = models.with_methods(LlamaForCausalLM(config).train(), [models.token_logprobs])
    registered = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    table = []
    for n in tokens:
        ids = torch.randint(3, 64, (DOCUMENTS, n // DOCUMENTS))
        documents = [batches.Document(row, torch.arange(len(row)) > 0, [], None) for row in ids]
        batch = batches.collate([documents], 0)
        for name in dtype:
            of_kind = getattr(torch, name)
            with mock.patch.dict(registered, sdpa=masking_utils.sdpa_mask):
                before = measure(model, batch, of_kind, repeats)
            after = measure(model, batch, of_kind, repeats)
            apart = (before.pop("gradient") - after.pop("gradient")).abs().max().item()
            for line, kind, kept in ((before, "True and False", LAYERS), (after, "in numbers", 1)):
                by_hand = {"arithmetic MB": kept * n * n * of_kind.itemsize / 1e6}
                table.append({"T": n, "dtype": name, "mask": kind, **by_hand, **line, "gradients apart": apart})
    progress.print_table(table)


if __name__ == "__main__":
    tyro.cli(main)
