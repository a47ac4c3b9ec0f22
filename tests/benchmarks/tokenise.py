"""Measure the way from a file to token ids: processor time of the slowest rank, remaining memory, rows per second.

    torchrun --nproc-per-node 2 tests/benchmarks/tokenise.py DIR hh_rlhf.jsonl.gz 20000 pairs

The file's pairs of dialogues are copied, each with a number before its text, up to the given count; then
they are read as `sft` or as `pairs`, with the tokenizer of DIR."""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import dist
from common.data import comparisons, demonstrations, mixtures
from common.loading import pretrained

model, dataset, n, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
dist.setup()
tokenizer, rows = pretrained.load_tokenizer(model, quiet=True), mixtures.load_rows(dataset, "preferences")
pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    for i in range(n):
        sides = rows[i % len(rows)].data.items()
        print(json.dumps({name: text.replace(": ", f": {i} ", 1) for name, text in sides}), file=file)
    file.flush()
    load = comparisons.load if kind == "pairs" else demonstrations.load_sft
    before, start, cpu = pages(), time.time(), time.process_time()
    made = load(file.name, split="train", tokenizer=tokenizer, max_length=1024)
    spent = time.process_time() - cpu, time.time() - start
cpu, seconds = (max(dist.gather([x])) for x in spent)
memory = (pages() - before) * resource.getpagesize() / n / 1000
if dist.is_main():
    figures = f"{cpu / n * 1000:.2f} ms of a processor, {memory:.1f} kB a row, {n / seconds:.0f} rows/s"
    print(f"{kind}, {dist.world_size()} ranks, {len(made)} of {n} rows: {figures}")
dist.shutdown()
