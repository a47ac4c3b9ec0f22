"""Rows a second from a file to token ids, and the memory that they take.

    python tests/benchmarks/tokenise.py --model DIR --dataset hh_rlhf.jsonl.gz
    torchrun --nproc-per-node 2 tests/benchmarks/tokenise.py --model DIR --dataset hh_rlhf.jsonl.gz --pairs

The file's pairs of dialogues are copied, each with a number before its text, until there are --rows. Reads
them as demonstrations, or as --pairs. Processor time is that of the slowest rank, its waiting for others
left out; memory is rank 0's, after the load less before it."""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from common import comparisons, data, dist, loading

parser = argparse.ArgumentParser()
parser.add_argument("--model"), parser.add_argument("--dataset")
parser.add_argument("--rows", type=int, default=20_000)
parser.add_argument("--pairs", action="store_true")
args = parser.parse_args()
dist.setup()
tokenizer, rows = loading.load_tokenizer(args.model, quiet=True), data.load_rows(args.dataset, "preferences")
with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    for i in range(args.rows):
        row = {name: text.replace(": ", f": {i} ", 1) for name, text in rows[i % len(rows)].data.items()}
        file.write(json.dumps(row) + "\n")
    file.flush()
    dist.barrier()
    before, start, cpu = (
        int(Path("/proc/self/statm").read_text().split()[1]),
        time.time(),
        time.process_time(),
    )
    made = (comparisons.load if args.pairs else data.load_sft)(
        file.name, split="train", tokenizer=tokenizer, max_length=1024
    )
    seconds, cpu = (max(dist.gather([x])) for x in (time.time() - start, time.process_time() - cpu))
    pages = int(Path("/proc/self/statm").read_text().split()[1]) - before
if dist.is_main():
    ms, kb = (f"{x / args.rows * 1000:.2f}" for x in (cpu, pages * resource.getpagesize() / 1e6))
    print(f"{dist.world_size()} ranks, {len(made)} of {args.rows} rows: {ms} ms of a processor, {kb} kB a row, "
          f"{args.rows / seconds:.0f} rows/s")  # fmt: skip
dist.shutdown()
