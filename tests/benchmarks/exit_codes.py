"""Count how many of N torchrun programs that use FSDP2 on gloo end with exit code 0. (Without dist.shutdown
some abort in the interpreter's teardown, after all their work is done.)

    python tests/benchmarks/exit_codes.py [N]              50 by default; "N of N ended with exit code 0"
"""

import collections
import os
import subprocess
import sys
import tempfile

import peers  # noqa: F401, it lets common be found


def program(folder):
    """Train, sample, write a checkpoint and a model, on 2 ranks."""
    import torch

    import sft
    from common import dist
    from common.data import demonstrations, tiny
    from common.loading import pretrained
    from common.run import checkpoints
    from common.batches import Row, make_blocks
    from common.sampler import sample

    device, tokenizer, args = dist.setup(), tiny.tokenizer(), sft.Args(micro_batch_size=2)
    model = dist.shard(pretrained.load_policy("tiny", tokenizer), device)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = [Row("tiny", row) for row in tiny.rows("sft", "train")[:40]]
    blocks = make_blocks(demonstrations.sft_documents(rows, tokenizer, 64, "tiny"), 64)
    sft.update(model, optimizer, blocks, args)
    with dist.consolidated(model):
        sample(model, [[1, 2]], max_new_tokens=4, stop_ids=[], pad_id=0)
    checkpoints.save_checkpoint(f"{folder}/checkpoint", 1, {"policy": (model, optimizer)}, {})
    checkpoints.save_model(model, tokenizer, f"{folder}/model")
    dist.shutdown()


def main(n):
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, *launcher.split(), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    codes = collections.Counter()
    for i in range(n):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*command, folder], env=environment, capture_output=True, text=True)
        codes[done.returncode] += 1
        if done.returncode:
            print(f"run {i + 1} ended with exit code {done.returncode}: {done.stderr[-1000:]}", flush=True)
    print(f"{codes[0]} of {n} ended with exit code 0")
    sys.exit(codes[0] != n)


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        program(sys.argv[1])
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
